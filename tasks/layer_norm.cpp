// LayerNorm on tiles [rows, embed]. Rows of statistics are (mean, 1/sqrt(var + eps)).
#include <optional>
#include <vector>

#include "common.h"
#include "dropout.h"
#include "layer_norm_args.h"

namespace nntile {
namespace {

template <class T>
T sum_of(const T* x, int64_t n) {
  return sum_vectors<T>(n, [&](int64_t k, int64_t count) { return keep(load(x + k, count), count); });
}

// Returns the sum of (x - mean)^2.
template <class T>
T squares_of(const T* x, T mean, int64_t n) {
  return sum_vectors<T>(n, [&](int64_t k, int64_t count) {
    const auto d = load(x + k, count) - Vec<T>(mean);
    return keep(d * d, count);
  });
}

template <class T>
void normalise(T* y, const T* x, const T* statistics, const T* gamma, const T* beta, int64_t n) {
  const Vec<T> mean(statistics[0]), rstd(statistics[1]);
  for_vectors<T>(n, [&](int64_t k, int64_t count) {
    const auto xhat = (load(x + k, count) - mean) * rstd;
    at::vec::fmadd(xhat, load(gamma + k, count), load(beta + k, count)).store(y + k, static_cast<int>(count));
  });
}

std::optional<Mask> mask_of(const std::optional<DropoutArgs>& dropout, const Args& t) {
  return dropout ? std::make_optional<Mask>(*dropout, t) : std::nullopt;
}

// tiles: y, statistics, x, gamma, beta (, residual, total)
void layer_norm(Args& t) {
  const LayerNormArgs args(t);
  const auto y = t[0], statistics = t[1], x = t[2], gamma = t[3], beta = t[4];
  const bool has_residual = t.tiles() > 5;
  const auto residual = has_residual ? t[5] : at::Tensor(), total = has_residual ? t[6] : at::Tensor();
  const auto mask = mask_of(args.dropout, t);
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = x.size(-1), rows = x.numel() / n;
    const T eps = static_cast<T>(args.eps);
    for (int64_t row = 0; row < rows; ++row) {
      const T* in = x.data_ptr<T>() + row * n;
      if (has_residual) {
        auto* s = total.data_ptr<T>() + row * n;
        const auto* r = residual.data_ptr<T>() + row * n;
        if (mask) {
          mask->apply(s, in, x, row);
          in = s;
        }
        for_vectors<T>(n, [&](int64_t k, int64_t count) {
          (load(in + k, count) + load(r + k, count)).store(s + k, static_cast<int>(count));
        });
        in = s;
      }
      auto* st = statistics.data_ptr<T>() + row * 2;
      st[0] = sum_of(in, n) / static_cast<T>(n);
      st[1] = T(1) / std::sqrt(squares_of(in, st[0], n) / static_cast<T>(n) + eps);
      normalise(y.data_ptr<T>() + row * n, in, st, gamma.data_ptr<T>(), beta.data_ptr<T>(), n);
    }
  });
}

// tiles: state (count, mean, M2), x
void layer_norm_moments(Args& t) {
  const auto state = t[0], x = t[1];
  const bool accumulates = t.accumulates(0);
  const auto part = accumulates ? at::Tensor(state.clone()) : state;
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = x.size(-1), rows = x.numel() / n;
    auto* s = part.data_ptr<T>();
    const auto* in = x.data_ptr<T>();
    for (int64_t row = 0; row < rows; ++row, s += 3, in += n) {
      s[0] = static_cast<T>(n);
      s[1] = sum_of(in, n) / s[0];
      s[2] = squares_of(in, s[1], n);
    }
  });
  if (accumulates) combine(Monoid::moments, state, part);
}

// tiles: statistics, state
void layer_norm_stat(Args& t) {
  const LayerNormStatisticsArgs args(t);
  const auto statistics = t[0], state = t[1];
  dispatch(statistics, [&](auto zero) {
    using T = decltype(zero);
    auto* out = statistics.data_ptr<T>();
    const auto* s = state.data_ptr<T>();
    for (int64_t row = 0; row < statistics.numel() / 2; ++row) {
      out[row * 2] = s[row * 3 + 1];
      out[row * 2 + 1] = T(1) / std::sqrt(s[row * 3 + 2] / s[row * 3] + static_cast<T>(args.eps));
    }
  });
}

// tiles: y, statistics, x, gamma, beta
void layer_norm_apply(Args& t) {
  const auto y = t[0], statistics = t[1], x = t[2], gamma = t[3], beta = t[4];
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = x.size(-1);
    for (int64_t row = 0; row < x.numel() / n; ++row)
      normalise(y.data_ptr<T>() + row * n, x.data_ptr<T>() + row * n, statistics.data_ptr<T>() + row * 2,
                gamma.data_ptr<T>(), beta.data_ptr<T>(), n);
  });
}

// Returns sum w and sum w xhat, with w = dy gamma.
template <class T>
std::pair<T, T> row_sums(const T* dy, const T* x, const T* statistics, const T* gamma, int64_t n) {
  const Vec<T> mean(statistics[0]), rstd(statistics[1]);
  Vec<T> first(T(0)), second(T(0));
  for_vectors<T>(n, [&](int64_t k, int64_t count) {
    const auto w = keep(load(dy + k, count) * load(gamma + k, count), count);
    first = first + w;
    second = at::vec::fmadd(w, (load(x + k, count) - mean) * rstd, second);
  });
  const auto plus = [](Vec<T>& a, Vec<T>& b) { return a + b; };
  return {at::vec::vec_reduce_all<T>(plus, first), at::vec::vec_reduce_all<T>(plus, second)};
}

// tiles: sums (ACC), statistics, dy, x, gamma
void layer_norm_grad_sums(Args& t) {
  const auto sums = t[0], statistics = t[1], dy = t[2], x = t[3], gamma = t[4];
  const bool accumulates = t.accumulates(0);
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = x.size(-1);
    for (int64_t row = 0; row < x.numel() / n; ++row) {
      const auto [first, second] = row_sums(dy.data_ptr<T>() + row * n, x.data_ptr<T>() + row * n,
                                            statistics.data_ptr<T>() + row * 2, gamma.data_ptr<T>(), n);
      auto* out = sums.data_ptr<T>() + row * 2;
      out[0] = (accumulates ? out[0] : T(0)) + first;
      out[1] = (accumulates ? out[1] : T(0)) + second;
    }
  });
}

// tiles: dx, dgamma (ACC), dbeta (ACC), dy, x, statistics, gamma (, add) (, dbias (ACC)) (, sums) (, dropped)
void layer_norm_grad(Args& t) {
  const LayerNormGradArgs args(t);
  const auto dx = t[0], dgamma = t[1], dbeta = t[2], dy = t[3], x = t[4], statistics = t[5], gamma = t[6];
  const auto place = [](int64_t at) { return static_cast<size_t>(at); };
  const size_t add_at = place(args.add), bias_at = place(args.dbias);
  const size_t sums_at = place(args.sums), dropped_at = place(args.dropped);
  const auto add = add_at ? t[add_at] : at::Tensor(), dbias = bias_at ? t[bias_at] : at::Tensor();
  const auto sums = sums_at ? t[sums_at] : at::Tensor(), dropped = dropped_at ? t[dropped_at] : at::Tensor();
  const auto mask = mask_of(args.dropout, t);
  if (!t.accumulates(1)) dgamma.zero_();
  if (!t.accumulates(2)) dbeta.zero_();
  if (bias_at && !t.accumulates(bias_at)) dbias.zero_();
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = x.size(-1), rows = x.numel() / n;
    const T whole = static_cast<T>(args.embed);
    const auto width = static_cast<size_t>(n);
    std::vector<T> gamma_sum(width), beta_sum(width), bias_sum(bias_at ? width : 0);
    for (int64_t row = 0; row < rows; ++row) {
      const auto *g = dy.data_ptr<T>() + row * n, *in = x.data_ptr<T>() + row * n, *st = statistics.data_ptr<T>() + row * 2;
      const auto* w = gamma.data_ptr<T>();
      auto pair = sums_at ? std::pair<T, T>(sums.data_ptr<T>()[row * 2], sums.data_ptr<T>()[row * 2 + 1])
                          : row_sums(g, in, st, w, n);
      const Vec<T> mean(st[0]), rstd(st[1]), m1(pair.first / whole), m2(pair.second / whole);
      auto* out = dx.data_ptr<T>() + row * n;
      const T* extra = add_at ? add.data_ptr<T>() + row * n : nullptr;
      for_vectors<T>(n, [&](int64_t k, int64_t count) {
        const int c = static_cast<int>(count);
        const auto grad = load(g + k, count), xhat = (load(in + k, count) - mean) * rstd;
        auto d = rstd * (at::vec::fmadd(grad, load(w + k, count), m1.neg()) - xhat * m2);
        if (extra) d = d + load(extra + k, count);
        d.store(out + k, c);
        auto *gs = gamma_sum.data() + k, *bs = beta_sum.data() + k;
        at::vec::fmadd(grad, xhat, load(gs, count)).store(gs, c);
        (load(bs, count) + grad).store(bs, c);
      });
      if (mask) {
        auto* y = dropped.data_ptr<T>() + row * n;
        mask->apply(y, out, dx, row);
        out = y;
      }
      for (size_t k = 0; k < bias_sum.size(); ++k) bias_sum[k] += out[k];
    }
    const auto add_to = [](const at::Tensor& out, const std::vector<T>& sum) {
      for (size_t k = 0; k < sum.size(); ++k) out.data_ptr<T>()[k] += sum[k];
    };
    add_to(dgamma, gamma_sum);
    add_to(dbeta, beta_sum);
    if (bias_at) add_to(dbias, bias_sum);
  });
}

NNTILE_KERNEL(layer_norm, layer_norm);
NNTILE_KERNEL(layer_norm_moments, layer_norm_moments);
NNTILE_KERNEL(layer_norm_stat, layer_norm_stat);
NNTILE_KERNEL(layer_norm_apply, layer_norm_apply);
NNTILE_KERNEL(layer_norm_grad_sums, layer_norm_grad_sums);
NNTILE_KERNEL(layer_norm_grad, layer_norm_grad);

}  // namespace
}  // namespace nntile
