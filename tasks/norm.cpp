// LayerNorm and RMSNorm on tiles [rows, embed]. Statistics of a row: mean (LayerNorm only), then the reciprocal of the
// standard deviation or of the root mean square.
#include <optional>
#include <vector>

#include "dropout.h"
#include "layer_norm_args.h"
#include "rms_norm_args.h"
#include "rows.h"

namespace nntile {
namespace {

// Number of statistics of a row. kMean: true for LayerNorm, which subtracts the mean and adds beta; false for RMSNorm.
template <bool kMean>
constexpr int64_t kStatistics = kMean ? 2 : 1;

// Computes the normalised values of a row.
template <bool kMean, class T>
struct Row {
  Vec<T> mean, rstd;

  explicit Row(const T* statistics) : mean(kMean ? statistics[0] : T(0)), rstd(statistics[kStatistics<kMean> - 1]) {}
  Vec<T> operator()(const Vec<T>& x) const { return kMean ? (x - mean) * rstd : x * rstd; }
};

// Weights of a norm. beta is null for RMSNorm.
template <bool kMean, class T>
struct Weights {
  const T *gamma, *beta;

  Weights(const Args& t, size_t first)
      : gamma(t[first].data_ptr<T>()), beta(kMean ? t[first + 1].data_ptr<T>() : nullptr) {}

  // y = xhat gamma (+ beta); y may be x.
  void apply(T* y, const T* x, const T* statistics, int64_t n) const {
    const Row<kMean, T> xhat(statistics);
    for_vectors<T>(n, [&](int64_t k, int64_t count) {
      const auto v = xhat(load(x + k, count)), g = load(gamma + k, count);
      (kMean ? at::vec::fmadd(v, g, load(beta + k, count)) : v * g).store(y + k, static_cast<int>(count));
    });
  }
};

std::optional<Mask> mask_of(const std::optional<DropoutArgs>& dropout, const Args& t) {
  return dropout ? std::make_optional<Mask>(*dropout, t) : std::nullopt;
}

// tiles: y, statistics, x, weights (, residual, total)
template <bool kMean>
void norm(Args& t, double eps, const std::optional<Mask>& mask) {
  const auto y = t[0], statistics = t[1], x = t[2];
  constexpr size_t kResidual = 3 + kStatistics<kMean>;
  const bool has_residual = t.tiles() > kResidual;
  const auto residual = has_residual ? t[kResidual] : at::Tensor(), total = has_residual ? t[kResidual + 1] : at::Tensor();
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = x.size(-1), rows = x.numel() / n;
    const Weights<kMean, T> weights(t, 3);
    for (int64_t row = 0; row < rows; ++row) {
      const T* in = x.data_ptr<T>() + row * n;
      if (has_residual) {
        auto* s = total.data_ptr<T>() + row * n;
        const auto* r = residual.data_ptr<T>() + row * n;
        if (mask) {
          mask->apply(s, in, x, row);
          in = s;
        }
        add_rows(s, in, r, n);
        in = s;
      }
      auto* st = statistics.data_ptr<T>() + row * kStatistics<kMean>;
      if (kMean) st[0] = sum_of(in, n) / static_cast<T>(n);
      const T squares = kMean ? squares_of(in, st[0], n) : dot_of(in, in, n);
      st[kStatistics<kMean> - 1] = T(1) / std::sqrt(squares / static_cast<T>(n) + static_cast<T>(eps));
      weights.apply(y.data_ptr<T>() + row * n, in, st, n);
    }
  });
}

void layer_norm(Args& t) {
  const LayerNormArgs args(t);
  norm<true>(t, args.eps, mask_of(args.dropout, t));
}

void rms_norm(Args& t) { norm<false>(t, RMSNormArgs(t).eps, std::nullopt); }

// tiles: state (count, mean, M2) (ACC), x
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

// tiles: squares (ACC), x
void rms_norm_squares(Args& t) {
  const auto squares = t[0], x = t[1];
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = x.size(-1);
    auto* out = squares.data_ptr<T>();
    for (int64_t row = 0; row < x.numel() / n; ++row) {
      const T* in = x.data_ptr<T>() + row * n;
      out[row] = (t.accumulates(0) ? out[row] : T(0)) + dot_of(in, in, n);
    }
  });
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

// tiles: rstd, squares
void rms_norm_stat(Args& t) {
  const RMSNormRstdArgs args(t);
  const auto rstd = t[0], squares = t[1];
  dispatch(rstd, [&](auto zero) {
    using T = decltype(zero);
    const T whole = static_cast<T>(args.embed), eps = static_cast<T>(args.eps);
    for (int64_t row = 0; row < rstd.numel(); ++row)
      rstd.data_ptr<T>()[row] = T(1) / std::sqrt(squares.data_ptr<T>()[row] / whole + eps);
  });
}

// tiles: y, statistics, x, weights
template <bool kMean>
void apply(Args& t) {
  const auto y = t[0], statistics = t[1], x = t[2];
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = x.size(-1);
    const Weights<kMean, T> weights(t, 3);
    for (int64_t row = 0; row < x.numel() / n; ++row)
      weights.apply(y.data_ptr<T>() + row * n, x.data_ptr<T>() + row * n,
                    statistics.data_ptr<T>() + row * kStatistics<kMean>, n);
  });
}

// Writes sum w (LayerNorm only), then sum w xhat, with w = dy gamma.
template <bool kMean, class T>
void row_sums(T* sums, const T* dy, const T* x, const T* statistics, const T* gamma, int64_t n) {
  const Row<kMean, T> xhat(statistics);
  Vec<T> first(T(0)), second(T(0));
  for_vectors<T>(n, [&](int64_t k, int64_t count) {
    const auto w = keep(load(dy + k, count) * load(gamma + k, count), count);
    if (kMean) first = first + w;
    second = at::vec::fmadd(w, xhat(load(x + k, count)), second);
  });
  const auto plus = [](Vec<T>& a, Vec<T>& b) { return a + b; };
  if (kMean) sums[0] = at::vec::vec_reduce_all<T>(plus, first);
  sums[kStatistics<kMean> - 1] = at::vec::vec_reduce_all<T>(plus, second);
}

// tiles: sums (ACC), statistics, dy, x, gamma
template <bool kMean>
void grad_sums(Args& t) {
  const auto sums = t[0], statistics = t[1], dy = t[2], x = t[3], gamma = t[4];
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = x.size(-1), each = kStatistics<kMean>;
    for (int64_t row = 0; row < x.numel() / n; ++row) {
      T own[2];
      row_sums<kMean>(own, dy.data_ptr<T>() + row * n, x.data_ptr<T>() + row * n,
                      statistics.data_ptr<T>() + row * each, gamma.data_ptr<T>(), n);
      auto* out = sums.data_ptr<T>() + row * each;
      for (int64_t k = 0; k < each; ++k) out[k] = (t.accumulates(0) ? out[k] : T(0)) + own[k];
    }
  });
}

// Numbers of a gradient task's optional tiles; 0: the task has no such tile.
struct GradTiles {
  int64_t add, dbias, sums, dropped;
};

// tiles: dx, dgamma (ACC) (, dbeta (ACC)), dy, x, statistics, gamma, then the optional tiles of `places`
template <bool kMean>
void grad(Args& t, const GradTiles& places, int64_t embed, const std::optional<Mask>& mask) {
  constexpr size_t kFirst = 1 + kStatistics<kMean>;
  const auto optional = [&](int64_t at) { return at ? t[static_cast<size_t>(at)] : at::Tensor(); };
  const auto dx = t[0], dgamma = t[1], dbeta = kMean ? t[2] : at::Tensor(), dy = t[kFirst], x = t[kFirst + 1];
  const auto statistics = t[kFirst + 2], gamma = t[kFirst + 3];
  const at::Tensor add = optional(places.add), dbias = optional(places.dbias);
  const at::Tensor sums = optional(places.sums), dropped = optional(places.dropped);
  for (const auto at : {size_t{1}, size_t{kStatistics<kMean>}, static_cast<size_t>(places.dbias)})
    if (at && !t.accumulates(at)) t[at].zero_();
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = x.size(-1), rows = x.numel() / n, each = kStatistics<kMean>;
    const T whole = static_cast<T>(embed);
    const auto width = static_cast<size_t>(n);
    std::vector<T> gamma_sum(width), beta_sum(kMean ? width : 0), bias_sum(dbias.defined() ? width : 0);
    for (int64_t row = 0; row < rows; ++row) {
      const auto *g = dy.data_ptr<T>() + row * n, *in = x.data_ptr<T>() + row * n;
      const auto *st = statistics.data_ptr<T>() + row * each, *w = gamma.data_ptr<T>();
      T own[2];
      const T* of_row = sums.defined() ? sums.data_ptr<T>() + row * each : own;
      if (!sums.defined()) row_sums<kMean>(own, g, in, st, w, n);
      const Row<kMean, T> normalised(st);
      const Vec<T> m1(of_row[0] / whole), m2(of_row[each - 1] / whole);
      auto* out = dx.data_ptr<T>() + row * n;
      const T* extra = add.defined() ? add.data_ptr<T>() + row * n : nullptr;
      for_vectors<T>(n, [&](int64_t k, int64_t count) {
        const int c = static_cast<int>(count);
        const auto dy_k = load(g + k, count), xhat = normalised(load(in + k, count)), weight = load(w + k, count);
        const auto centred = kMean ? at::vec::fmadd(dy_k, weight, m1.neg()) : dy_k * weight;
        auto d = normalised.rstd * (centred - xhat * m2);
        if (extra) d = d + load(extra + k, count);
        d.store(out + k, c);
        auto* gs = gamma_sum.data() + k;
        at::vec::fmadd(dy_k, xhat, load(gs, count)).store(gs, c);
        if (kMean) (load(beta_sum.data() + k, count) + dy_k).store(beta_sum.data() + k, c);
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
    if (kMean) add_to(dbeta, beta_sum);
    if (dbias.defined()) add_to(dbias, bias_sum);
  });
}

void layer_norm_grad(Args& t) {
  const LayerNormGradArgs args(t);
  grad<true>(t, {args.add, args.dbias, args.sums, args.dropped}, args.embed, mask_of(args.dropout, t));
}

// tiles: dx, dgamma (ACC), dy, x, rstd, gamma (, sums) (, add)
void rms_norm_grad(Args& t) {
  const RMSNormGradArgs args(t);
  const int64_t add = 6 + args.has_sums;
  grad<false>(t, {static_cast<int64_t>(t.tiles()) > add ? add : 0, 0, args.has_sums ? 6 : 0, 0}, args.embed, std::nullopt);
}

NNTILE_KERNEL(layer_norm, layer_norm);
NNTILE_KERNEL(layer_norm_moments, layer_norm_moments);
NNTILE_KERNEL(layer_norm_stat, layer_norm_stat);
NNTILE_KERNEL(layer_norm_apply, apply<true>);
NNTILE_KERNEL(layer_norm_grad_sums, grad_sums<true>);
NNTILE_KERNEL(layer_norm_grad, layer_norm_grad);
NNTILE_KERNEL(rms_norm, rms_norm);
NNTILE_KERNEL(rms_norm_squares, rms_norm_squares);
NNTILE_KERNEL(rms_norm_stat, rms_norm_stat);
NNTILE_KERNEL(rms_norm_apply, apply<false>);
NNTILE_KERNEL(rms_norm_grad_sums, grad_sums<false>);
NNTILE_KERNEL(rms_norm_grad, rms_norm_grad);

}  // namespace
}  // namespace nntile
