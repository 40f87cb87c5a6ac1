// Tiles of 8 bits with a scale: see tasks/quantize.py.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include "dtypes.h"
#include "kernel.h"

namespace nntile {

// Returns the address of tile k's scale; null if tiles of this dtype have no scale.
inline void* scale_of_tile(const Args& t, size_t k) {
  const auto x = t.view(k);
  if (!is_scaled(x.dtype)) return nullptr;
  return static_cast<char*>(x.data) + scale_offset(static_cast<size_t>(c10::multiply_integers(t.most(k))));
}

inline at::Tensor scale_tensor(void* scale, c10::Device device) {
  return at::for_blob(scale, {}).options(at::TensorOptions(at::kFloat).device(device)).target_device(device).make_tensor();
}

// Returns the values that a tile of 8 bits stands for, elements times scale, in `dtype`. Returns x if `scale` is null.
inline at::Tensor dequantized(const at::Tensor& x, void* scale, at::ScalarType dtype) {
  return scale ? x.to(at::kFloat).mul_(scale_tensor(scale, x.device())).to(dtype) : x;
}

// Quantises a tile by operations of ATen.
void quantize_by_aten(Args& t);

}  // namespace nntile
