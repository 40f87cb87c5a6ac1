// Operands with their layouts, but without at::Tensor: constructing or permuting a tensor takes half a microsecond.
#pragma once
#include <ATen/DimVector.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <optional>
#include <utility>

namespace nntile {

struct View {
  void* data;
  at::ScalarType dtype;
  c10::Device device;
  at::DimVector sizes, strides;
  at::Tensor owner;  // owner of the memory, if not a tile
  const void* scale = nullptr;  // factor of the elements, in device memory; null: 1
  bool by_row = false;          // `scale` has one factor for each row; false: one factor for all elements

  View(void* data_, at::ScalarType dtype_, c10::Device device_, at::DimVector sizes_, at::DimVector strides_,
       at::Tensor owner_ = {})
      : data(data_), dtype(dtype_), device(device_), sizes(std::move(sizes_)), strides(std::move(strides_)),
        owner(std::move(owner_)) {}
  View(const at::Tensor& x)
      : View(x.data_ptr(), x.scalar_type(), x.device(), at::DimVector(x.sizes()), at::DimVector(x.strides()), x) {}

  View permuted(at::IntArrayRef order) const {
    View made(data, dtype, device, at::DimVector(order.size()), at::DimVector(order.size()), owner);
    made.scale = scale, made.by_row = by_row;
    for (size_t axis = 0; axis < order.size(); ++axis) {
      made.sizes[axis] = sizes[static_cast<size_t>(order[axis])];
      made.strides[axis] = strides[static_cast<size_t>(order[axis])];
    }
    return made;
  }

  // Returns the same elements with another shape, if strides allow it.
  std::optional<View> reshaped(const at::DimVector& shape) const {
    auto found = at::detail::computeStride(sizes, strides, shape);
    if (!found) return {};
    View made(data, dtype, device, shape, std::move(*found), owner);
    made.scale = scale, made.by_row = by_row;
    return made;
  }

  int64_t numel() const { return c10::multiply_integers(sizes); }

  at::Tensor tensor() const {
    auto maker = at::for_blob(data, sizes);
    maker.strides(at::IntArrayRef(strides)).options(at::TensorOptions(dtype).device(device)).target_device(device);
    if (owner.defined()) maker.deleter([kept = owner](void*) {});
    return maker.make_tensor();
  }
};

}  // namespace nntile
