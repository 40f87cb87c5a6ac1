// Shared by the CPU and CUDA contractions: roles of the axes, operands as matrices.
#pragma once
#include <ATen/TensorUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <optional>

#include "contract_args.h"

namespace nntile {

inline at::Tensor broadcastable(const at::Tensor& bias, int64_t mask, const at::Tensor& out) {
  std::vector<int64_t> shape(out.sizes().begin(), out.sizes().end());
  for (size_t axis = 0; axis < shape.size(); ++axis)
    if (!((mask >> axis) & 1)) shape[axis] = 1;
  return bias.view(shape);
}

// Returns whether the axes of the bias (bits of `mask`) are the last axes of the output.
inline bool trailing(int64_t mask, int64_t axes) {
  int64_t last = 0;
  while (last < axes && !((mask >> last) & 1)) ++last;
  for (int64_t axis = last; axis < axes; ++axis)
    if (!((mask >> axis) & 1)) return false;
  return true;
}

struct Plan {
  bool swap, permuted_out;
  at::IntArrayRef a, b, out;
  at::IntArrayRef reshape;  // order of the sum's axes in the output; empty: the sum is the output
  size_t batch, m, n, k;

  explicit Plan(const PlanArgs& args) : swap(args.swap) {
    batch = static_cast<size_t>(args.batch);
    m = static_cast<size_t>(args.m);
    n = static_cast<size_t>(args.n);
    k = static_cast<size_t>(args.k);
    a = args.orders.slice(0, batch + m + k);
    b = args.orders.slice(a.size(), batch + k + n);
    out = args.orders.slice(a.size() + b.size(), batch + m + n);
    reshape = args.orders.slice(a.size() + b.size() + out.size());
    permuted_out = false;
    for (size_t axis = 0; axis < out.size(); ++axis) permuted_out |= out[axis] != static_cast<int64_t>(axis);
  }
};

// Returns the arguments without the epilogue, which is computed later in another tile than the product.
inline EpilogueArgs without_epilogue(EpilogueArgs args) {
  args.bias_axes = args.activation = args.colsum = -1;
  args.residual = args.keep_pre = args.aux = false;
  return args;
}

inline int64_t extent(at::IntArrayRef sizes, size_t from, size_t count) {
  int64_t product = 1;
  for (size_t axis = from; axis < from + count; ++axis) product *= sizes[axis];
  return product;
}

// Copies 16 bytes (8 bf16) at a time if the last axis is contiguous in both tensors. ATen would copy one element per
// thread.
inline void copy(at::Tensor to, const at::Tensor& from) {
  const auto several = static_cast<int64_t>(16 / from.element_size());
  const auto vectors = [&](const at::Tensor& x) {
    bool fits = x.dim() > 0 && x.size(-1) % several == 0 && x.stride(-1) == 1 &&
                reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0;
    for (int64_t axis = 0; axis + 1 < x.dim(); ++axis) fits = fits && x.stride(axis) % several == 0;
    return fits;
  };
  if (to.dtype() == from.dtype() && vectors(to) && vectors(from))
    to.view(at::kComplexDouble).copy_(from.view(at::kComplexDouble));
  else to.copy_(from);
}

// Returns a view as a batch of matrices, which BLAS can use without a copy. nullopt if neither rows nor columns are
// contiguous, or if there are no batch axes.
inline std::optional<at::Tensor> in_place(const at::Tensor& tensor, size_t batch, size_t rows, size_t columns) {
  const auto sizes = tensor.sizes();
  const std::vector<int64_t> shape{extent(sizes, 0, batch), extent(sizes, batch, rows),
                                   extent(sizes, batch + rows, columns)};
  if (!batch || !at::detail::computeStride(sizes, tensor.strides(), shape)) return {};
  const auto view = tensor.view(shape);
  const bool by_row = view.stride(2) == 1 && view.stride(1) >= view.size(2);
  const bool by_column = view.stride(1) == 1 && view.stride(2) >= view.size(1);
  return by_row || by_column ? std::optional(view) : std::nullopt;
}

inline at::Tensor matrix(const at::Tensor& tensor, size_t batch, size_t rows, size_t columns) {
  const auto sizes = tensor.sizes();
  std::vector<int64_t> shape{extent(sizes, batch, rows), extent(sizes, batch + rows, columns)};
  if (batch) shape.insert(shape.begin(), extent(sizes, 0, batch));
  if (at::detail::computeStride(sizes, tensor.strides(), shape)) return tensor.view(shape);
  const auto copied = at::empty(sizes, tensor.options());
  copy(copied, tensor);
  return copied.view(shape);
}

}  // namespace nntile
