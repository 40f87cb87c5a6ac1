// Partial results put together: what the accumulation policies redux and tree, and kernels that add to a tile, call.
#include "common.h"

namespace nntile {
namespace {

// State (max, sumexp, values...) per row; sumexp 0 means nothing yet.
template <class T>
void combine_softmax(T* a, const T* b, int64_t width) {
  if (b[1] == T(0)) return;
  if (a[1] == T(0)) {
    std::copy(b, b + width, a);
    return;
  }
  const T top = std::max(a[0], b[0]);
  const T keep_a = std::exp(a[0] - top), keep_b = std::exp(b[0] - top);
  a[0] = top;
  for (int64_t k = 1; k < width; ++k) a[k] = a[k] * keep_a + b[k] * keep_b;
}

// State (count, mean, M2) per row: Chan, Golub and LeVeque (1979), update of sums of squares.
template <class T>
void combine_moments(T* a, const T* b) {
  if (b[0] == T(0)) return;
  const T count = a[0] + b[0], delta = b[1] - a[1];
  a[1] += delta * b[0] / count;
  a[2] += b[2] + delta * delta * a[0] * b[0] / count;
  a[0] = count;
}

}  // namespace

void combine(Monoid monoid, const at::Tensor& dst, const at::Tensor& src) {
  if (monoid == Monoid::sum) {
    dst.add_(src);
    return;
  }
  dispatch(dst, [&](auto zero) {
    using T = decltype(zero);
    auto* a = dst.data_ptr<T>();
    const auto* b = src.data_ptr<T>();
    const int64_t width = dst.size(-1);
    for (int64_t row = 0; row < dst.numel() / width; ++row, a += width, b += width) {
      if (monoid == Monoid::softmax) combine_softmax(a, b, width);
      else combine_moments(a, b);
    }
  });
}

namespace {

void combine_kernel(Args& t) { combine(static_cast<Monoid>(t.i(0)), t[0], t[1]); }

void empty(Args&) {}

NNTILE_KERNEL(combine, combine_kernel);
NNTILE_KERNEL(empty, empty);

}  // namespace
}  // namespace nntile
