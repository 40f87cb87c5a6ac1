// RMSNorm on tiles [rows, embed]. rstd has 1/sqrt(mean of squares + eps) of each row.
#include <vector>

#include "common.h"
#include "rms_norm_args.h"
#include "rows.h"

namespace nntile {
namespace {

// y = x rstd gamma; y may be x.
template <class T>
void scale_row(T* y, const T* x, T rstd, const T* gamma, int64_t n) {
  for_vectors<T>(n, [&](int64_t k, int64_t count) {
    (load(x + k, count) * Vec<T>(rstd) * load(gamma + k, count)).store(y + k, static_cast<int>(count));
  });
}

// Returns the sum of dy gamma x.
template <class T>
T weighted_dot(const T* dy, const T* x, const T* gamma, int64_t n) {
  return sum_vectors<T>(n, [&](int64_t k, int64_t count) {
    return keep(load(dy + k, count) * load(gamma + k, count) * load(x + k, count), count);
  });
}

// tiles: y, rstd, x, gamma (, residual, total)
void rms_norm(Args& t) {
  const RMSNormArgs args(t);
  const auto y = t[0], rstd = t[1], x = t[2], gamma = t[3];
  const bool has_residual = t.tiles() > 4;
  const auto residual = has_residual ? t[4] : at::Tensor(), total = has_residual ? t[5] : at::Tensor();
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = x.size(-1), rows = x.numel() / n;
    const T eps = static_cast<T>(args.eps);
    for (int64_t row = 0; row < rows; ++row) {
      const T* in = x.data_ptr<T>() + row * n;
      if (has_residual) {
        auto* s = total.data_ptr<T>() + row * n;
        const auto* r = residual.data_ptr<T>() + row * n;
        for_vectors<T>(n, [&](int64_t k, int64_t count) {
          (load(in + k, count) + load(r + k, count)).store(s + k, static_cast<int>(count));
        });
        in = s;
      }
      auto& st = rstd.data_ptr<T>()[row];
      st = T(1) / std::sqrt(dot_of(in, in, n) / static_cast<T>(n) + eps);
      scale_row(y.data_ptr<T>() + row * n, in, st, gamma.data_ptr<T>(), n);
    }
  });
}

// tiles: squares (ACC), x
void rms_norm_squares(Args& t) {
  const auto squares = t[0], x = t[1];
  const bool accumulates = t.accumulates(0);
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = x.size(-1);
    auto* out = squares.data_ptr<T>();
    for (int64_t row = 0; row < x.numel() / n; ++row) {
      const T* in = x.data_ptr<T>() + row * n;
      out[row] = (accumulates ? out[row] : T(0)) + dot_of(in, in, n);
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

// tiles: y, rstd, x, gamma
void rms_norm_apply(Args& t) {
  const auto y = t[0], rstd = t[1], x = t[2], gamma = t[3];
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = x.size(-1);
    for (int64_t row = 0; row < x.numel() / n; ++row)
      scale_row(y.data_ptr<T>() + row * n, x.data_ptr<T>() + row * n, rstd.data_ptr<T>()[row], gamma.data_ptr<T>(), n);
  });
}

// tiles: sums (ACC) of dy gamma xhat, rstd, dy, x, gamma
void rms_norm_grad_sums(Args& t) {
  const auto sums = t[0], rstd = t[1], dy = t[2], x = t[3], gamma = t[4];
  const bool accumulates = t.accumulates(0);
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = x.size(-1);
    auto* out = sums.data_ptr<T>();
    for (int64_t row = 0; row < x.numel() / n; ++row) {
      const T dot = weighted_dot(dy.data_ptr<T>() + row * n, x.data_ptr<T>() + row * n, gamma.data_ptr<T>(), n);
      out[row] = (accumulates ? out[row] : T(0)) + dot * rstd.data_ptr<T>()[row];
    }
  });
}

// tiles: dx, dgamma (ACC), dy, x, rstd, gamma (, sums) (, add)
void rms_norm_grad(Args& t) {
  const RMSNormGradArgs args(t);
  const auto dx = t[0], dgamma = t[1], dy = t[2], x = t[3], rstd = t[4], gamma = t[5];
  const size_t add_at = args.has_sums ? 7 : 6;
  const bool has_add = t.tiles() > add_at;
  const auto sums = args.has_sums ? t[6] : at::Tensor(), add = has_add ? t[add_at] : at::Tensor();
  if (!t.accumulates(1)) dgamma.zero_();
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = x.size(-1), rows = x.numel() / n;
    const T whole = static_cast<T>(args.embed);
    const auto* w = gamma.data_ptr<T>();
    std::vector<T> gamma_sum(static_cast<size_t>(n));
    for (int64_t row = 0; row < rows; ++row) {
      const auto *g = dy.data_ptr<T>() + row * n, *in = x.data_ptr<T>() + row * n;
      const T st = rstd.data_ptr<T>()[row];
      const T sum = args.has_sums ? sums.data_ptr<T>()[row] : weighted_dot(g, in, w, n) * st;
      const Vec<T> scale(st), mean(sum / whole);
      const T* extra = has_add ? add.data_ptr<T>() + row * n : nullptr;
      auto* out = dx.data_ptr<T>() + row * n;
      for_vectors<T>(n, [&](int64_t k, int64_t count) {
        const int c = static_cast<int>(count);
        const auto grad = load(g + k, count), xhat = load(in + k, count) * scale;
        auto d = scale * (grad * load(w + k, count) - xhat * mean);
        if (extra) d = d + load(extra + k, count);
        d.store(out + k, c);
        auto* gs = gamma_sum.data() + k;
        at::vec::fmadd(grad, xhat, load(gs, count)).store(gs, c);
      });
    }
    for (size_t k = 0; k < gamma_sum.size(); ++k) dgamma.data_ptr<T>()[k] += gamma_sum[k];
  });
}

NNTILE_KERNEL(rms_norm, rms_norm);
NNTILE_KERNEL(rms_norm_squares, rms_norm_squares);
NNTILE_KERNEL(rms_norm_stat, rms_norm_stat);
NNTILE_KERNEL(rms_norm_apply, rms_norm_apply);
NNTILE_KERNEL(rms_norm_grad_sums, rms_norm_grad_sums);
NNTILE_KERNEL(rms_norm_grad, rms_norm_grad);

}  // namespace
}  // namespace nntile
