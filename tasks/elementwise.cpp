#include <ATen/ops/add.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <vector>

#include "common.h"
#include "dropout.h"

namespace nntile {
namespace {

void add(Args& t) {
  auto out = t[0];
  at::add_out(out, t[1], t[2]);
}

void multiply(Args& t) {
  auto out = t[0];
  at::mul_out(out, t[1], t[2]);
}

void bias_add(Args& t) {
  auto out = t[0];
  at::add_out(out, t[1], t[2].view(BiasAddArgs(t).shape));
}

void sum(Args& t) {
  auto out = t[0];
  const auto total = t[1].sum(SumArgs(t).axes);
  if (t.accumulates(0)) out.add_(total);
  else out.copy_(total);
}

struct Axis {
  int64_t size, to, from;  // strides in the output and in the input
};

// Returns the axes of an output and its input; axes that are contiguous in both become one.
std::vector<Axis> axes_of(const at::Tensor& y, const at::Tensor& x) {
  std::vector<Axis> found;
  for (int64_t k = 0; k < y.dim(); ++k) {
    const Axis axis{y.size(k), y.stride(k), x.stride(k)};
    if (axis.size == 1) continue;
    if (!found.empty() && found.back().to == axis.to * axis.size && found.back().from == axis.from * axis.size)
      found.back() = {found.back().size * axis.size, axis.to, axis.from};
    else
      found.push_back(axis);
  }
  return found;
}

constexpr int64_t kSquare = 16;  // a cache line of fp32

// Transposes a matrix with contiguous rows in the output and contiguous columns in the input, by squares of whole cache
// lines. at::copy_ uses squares only for a single matrix; otherwise, it reads a cache line for each element.
template <class T>
void transpose_matrix(T* to, const T* from, const Axis& rows, const Axis& columns) {
  for (int64_t j = 0; j < columns.size; j += kSquare)
    for (int64_t i = 0; i < rows.size; i += kSquare)
      at::vec::transpose_mxn(from + j * columns.from + i, columns.from, to + i * rows.to + j, rows.to,
                             static_cast<int>(std::min(kSquare, columns.size - j)),
                             static_cast<int>(std::min(kSquare, rows.size - i)));
}

template <class T>
void transpose_all(T* to, const T* from, const std::vector<Axis>& outer, size_t axis, const Axis& rows,
                   const Axis& columns) {
  if (axis == outer.size()) return transpose_matrix(to, from, rows, columns);
  const auto [size, step, step_from] = outer[axis];
  for (int64_t k = 0; k < size; ++k) transpose_all(to + k * step, from + k * step_from, outer, axis + 1, rows, columns);
}

void transpose(Args& t) {
  const auto y = t[0], x = t[1].permute(TransposeArgs(t).order);
  auto axes = axes_of(y, x);
  const auto rows = std::find_if(axes.begin(), axes.end(), [](const Axis& axis) { return axis.from == 1; });
  const bool known = y.scalar_type() == at::kFloat || y.scalar_type() == at::kDouble;
  if (!known || rows == axes.end() || axes.back().to != 1 || std::min(rows->size, axes.back().size) < kSquare ||
      rows == axes.end() - 1) {
    y.copy_(x);  // copies of whole rows, or axes too narrow for squares
    return;
  }
  const auto columns = axes.back(), first = *rows;
  axes.pop_back();
  axes.erase(rows);
  dispatch(y, [&](auto zero) {
    using T = decltype(zero);
    transpose_all(y.data_ptr<T>(), x.data_ptr<T>(), axes, 0, first, columns);
  });
}

void unpack(Args& t) {
  const int64_t axis = PackArgs(t).axis;
  for (size_t k = 1; k < t.tiles(); ++k) t[k].copy_(t[0].select(axis, static_cast<int64_t>(k) - 1));
}

void pack(Args& t) {
  const int64_t axis = PackArgs(t).axis;
  for (size_t k = 1; k < t.tiles(); ++k) t[0].select(axis, static_cast<int64_t>(k) - 1).copy_(t[k]);
}

void dropout(Args& t) {
  const auto out = t[0], x = t[1];
  const Mask mask(DropoutArgs(t), t);
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = x.size(-1);
    for (int64_t row = 0; row < x.numel() / n; ++row)
      mask.apply(out.data_ptr<T>() + row * n, x.data_ptr<T>() + row * n, x, row);
  });
}

NNTILE_KERNEL(add, add);
NNTILE_KERNEL(multiply, multiply);
NNTILE_KERNEL(bias_add, bias_add);
NNTILE_KERNEL(sum, sum);
NNTILE_KERNEL(transpose, transpose);
NNTILE_KERNEL(unpack, unpack);
NNTILE_KERNEL(pack, pack);
NNTILE_KERNEL(dropout, dropout);

}  // namespace
}  // namespace nntile
