// Combines partial results, for the accumulation policies redux and tree, and for kernels that add to a tile.
#include <ATen/ops/maximum.h>

#include "common.h"
#include "task_args.h"

namespace nntile {
namespace {

// Merges state b of a row into state a. A state is (max, sumexp, values...); it is empty if sumexp is 0.
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

// Merges state b (count, mean, M2) of a row into state a. Source: Chan, Golub and LeVeque (1979), update of sums of
// squares.
template <class T>
void combine_moments(T* a, const T* b) {
  if (b[0] == T(0)) return;
  const T count = a[0] + b[0], delta = b[1] - a[1];
  a[1] += delta * b[0] / count;
  a[2] += b[2] + delta * delta * a[0] * b[0] / count;
  a[0] = count;
}

// The next two functions merge the states of all rows of a tile by operations of ATen, for CUDA workers.
void combine_softmax(const at::Tensor& a, const at::Tensor& b) {
  const auto top_a = a.select(-1, 0).masked_fill(a.select(-1, 1).eq(0), -INFINITY);
  const auto top_b = b.select(-1, 0).masked_fill(b.select(-1, 1).eq(0), -INFINITY);
  const auto both = at::maximum(top_a, top_b);
  const auto top = both.masked_fill(both.eq(-INFINITY), 0.0);
  const auto rest = a.narrow(-1, 1, a.size(-1) - 1);
  rest.mul_(top_a.sub(top).exp_().unsqueeze(-1));
  rest.add_(b.narrow(-1, 1, b.size(-1) - 1).mul(top_b.sub(top).exp_().unsqueeze(-1)));
  a.select(-1, 0).copy_(top);
}

void combine_moments(const at::Tensor& a, const at::Tensor& b) {
  const auto na = a.select(-1, 0), nb = b.select(-1, 0), n = na.add(nb);
  const auto part = nb.div(n.masked_fill(n.eq(0), 1.0));
  const auto delta = b.select(-1, 1).sub(a.select(-1, 1));
  a.select(-1, 2).add_(b.select(-1, 2)).add_(delta.mul(delta).mul_(na).mul_(part));
  a.select(-1, 1).add_(delta.mul(part));
  na.copy_(n);
}

}  // namespace

void combine(Monoid monoid, const at::Tensor& dst, const at::Tensor& src) {
  if (monoid == Monoid::sum) {
    dst.add_(src);
    return;
  }
  if (!dst.is_cpu()) return monoid == Monoid::softmax ? combine_softmax(dst, src) : combine_moments(dst, src);
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

void combine_kernel(Args& t) { combine(static_cast<Monoid>(CombineArgs(t).monoid), t[0], t[1]); }

void empty(Args&) {}

// A task of known duration: multiply-adds of which each needs the result of the previous one.
void busy(Args& t) {
  const int64_t count = BusyArgs(t).count;
  auto* at = t[0].data_ptr<float>();
  float x = *at;
  for (int64_t k = 0; k < count; ++k) x = x * 0.5f + 0.5f;
  *at = x;
}

NNTILE_KERNEL(combine, combine_kernel);
NNTILE_KERNEL(empty, empty);
NNTILE_KERNEL(busy, busy);
NNTILE_CUDA_KERNEL(combine, combine_kernel);
NNTILE_CUDA_KERNEL(empty, empty);

}  // namespace
}  // namespace nntile
