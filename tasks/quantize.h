// Tiles of 8 bits with scales: see tasks/quantize.py.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>

#include "dtypes.h"
#include "kernel.h"

namespace nntile {

// Returns the address of tile k's first scale; null if tiles of this dtype have no scale.
inline void* scale_of_tile(const Args& t, size_t k) {
  const auto x = t.view(k);
  if (!is_scaled(x.dtype)) return nullptr;
  return static_cast<char*>(x.data) + scale_offset(static_cast<size_t>(c10::multiply_integers(t.most(k))));
}

// Returns the number of leading axes of tile k that number its scales; 0 if the tile has one scale.
inline size_t axes_of_scales(const Args& t, size_t k) {
  size_t axes = 0;
  for (size_t rows = 1; rows < t.scales(k); ++axes) rows *= static_cast<size_t>(t.most(k)[axes]);
  return axes;
}

inline at::Tensor scale_tensor(const void* scale, at::IntArrayRef sizes, c10::Device device) {
  const auto options = at::TensorOptions(at::kFloat).device(device);
  return at::for_blob(const_cast<void*>(scale), sizes).options(options).target_device(device).make_tensor();
}

// Returns the scales of tile k in a shape that broadcasts over the tile. Undefined: tiles of this dtype have no scale.
inline at::Tensor scales_of_tile(const Args& t, size_t k) {
  const auto x = t.view(k);
  if (!is_scaled(x.dtype)) return {};
  auto sizes = x.sizes;
  std::fill(sizes.begin() + static_cast<std::ptrdiff_t>(axes_of_scales(t, k)), sizes.end(), 1);
  return scale_tensor(scale_of_tile(t, k), sizes, x.device);
}

// Returns the values that x in 8 bits stands for, in `dtype`. Returns x if `scales` is undefined.
inline at::Tensor dequantized(const at::Tensor& x, const at::Tensor& scales, at::ScalarType dtype) {
  return scales.defined() ? x.to(at::kFloat).mul_(scales).to(dtype) : x;
}

// Quantises a tile by operations of ATen.
void quantize_by_aten(Args& t);

}  // namespace nntile
