// Squared error, a loss, and its gradient.
#include "common.h"
#include "squared_error_args.h"

namespace nntile {
namespace {

// tiles: loss (ACC), x, target
void squared_error(Args& t) {
  const auto loss = t[0], x = t[1], target = t[2];
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = x.size(-1);
    const double scale = SquaredErrorArgs(t).scale;
    double total = 0;  // scaled row by row: see cross_entropy.cpp
    for (int64_t row = 0; row < x.numel() / n; ++row) {
      const auto *a = x.data_ptr<T>() + row * n, *b = target.data_ptr<T>() + row * n;
      total += scale * static_cast<double>(sum_vectors<T>(n, [&](int64_t k, int64_t count) {
        const auto d = load(a + k, count) - load(b + k, count);
        return keep(d * d, count);
      }));
    }
    auto* out = loss.data_ptr<double>();
    *out = (t.accumulates(0) ? *out : 0.0) + total;
  });
}

// tiles: dx, x, target
void squared_error_grad(Args& t) {
  const auto dx = t[0], x = t[1], target = t[2];
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    const Vec<T> scale(static_cast<T>(2 * SquaredErrorArgs(t).scale));
    auto* out = dx.data_ptr<T>();
    const auto *a = x.data_ptr<T>(), *b = target.data_ptr<T>();
    for_vectors<T>(x.numel(), [&](int64_t k, int64_t count) {
      (scale * (load(a + k, count) - load(b + k, count))).store(out + k, static_cast<int>(count));
    });
  });
}

NNTILE_KERNEL(squared_error, squared_error);
NNTILE_KERNEL(squared_error_grad, squared_error_grad);

}  // namespace
}  // namespace nntile
