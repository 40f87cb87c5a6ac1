// Dropout of a tile's rows, shared by kernels; see Dropout in elementwise.py.
#pragma once
#include "common.h"
#include "elementwise_args.h"

namespace nntile {

class Mask {
 public:
  // t: the task's tiles
  Mask(const DropoutArgs& args, const Args& t) : args_(args) {
    if (args.row_numbers) row_numbers_ = t[t.tiles() - 1];
    const auto seed = static_cast<uint64_t>(args.seed);
    start_ = (seed * 0x9E3779B97F4A7C15ULL) ^ (static_cast<uint64_t>(args.key) * 0xD1B54A32D192ED03ULL);
    limit_ = static_cast<uint64_t>(args.p * 4294967296.0);
  }

  // out = in * mask / (1 - p), for one row of tile x. row: index of the row among all rows of the tile.
  template <class T>
  void apply(T* out, const T* in, const at::Tensor& x, int64_t row) const {
    int64_t first = args_.first, rest = row;
    if (row_numbers_.defined()) {
      first += row_numbers_.data_ptr<int64_t>()[row] * args_.strides[static_cast<size_t>(x.dim() - 2)];
      rest = 0;
    }
    for (int64_t axis = x.dim() - 2; axis >= 0; --axis) {
      first += rest % x.size(axis) * args_.strides[static_cast<size_t>(axis)];
      rest /= x.size(axis);
    }
    apply(out, in, first, x.size(-1));
  }

  // out = in * mask / (1 - p), for n elements. first: index of the first element in the whole tensor.
  template <class T>
  void apply(T* out, const T* in, int64_t first, int64_t n) const {
    const T scale = static_cast<T>(1 / (1 - args_.p));
    for (int64_t k = 0; k < n; ++k)
      out[k] = hash(static_cast<uint64_t>(first + k)) >= limit_ ? in[k] * scale : T(0);
  }

  int64_t number(int64_t row) const { return row_numbers_.flatten().data_ptr<int64_t>()[row]; }
  const DropoutArgs& args() const { return args_; }

 private:
  uint32_t hash(uint64_t index) const {
    const auto low = static_cast<uint32_t>(index >> 1), high = static_cast<uint32_t>(index >> 33);
    uint32_t h = low * 0x9E3779B1u + static_cast<uint32_t>(start_);
    h = (h ^ (h >> 16)) * 0x7FEB352Du + static_cast<uint32_t>(start_ >> 32) + high * 0x85EBCA77u;
    h = (h ^ (h >> 15)) * 0x846CA68Bu;
    return index & 1 ? h : h + (h << 16);
  }

  DropoutArgs args_;
  at::Tensor row_numbers_;
  uint64_t start_, limit_;
};

}  // namespace nntile
