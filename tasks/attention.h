// Where the attention kernels find their operands; see Operands in attention.py.
#pragma once
#include <ATen/core/Tensor.h>

#include "kernel.h"

namespace nntile {

// Reads the integer arguments in order.
struct Reader {
  const Args& t;
  size_t next = 0;
  int64_t one() { return t.i(next++); }
  at::IntArrayRef four() {
    next += 4;
    return slice(t, next - 4, 4);
  }
};

// The tensors q, k, v (or their gradients) as [b, h, s, d] views of the task's tiles from `first` on.
struct Triple {
  at::Tensor q, k, v;

  Triple(Reader& ints, size_t first) {
    const int64_t axis = ints.one();
    const auto order = ints.four();
    for (auto* operand : {&q, &k, &v}) {
      const auto tile = static_cast<size_t>(ints.one());
      const int64_t index = ints.one();
      count = std::max(count, tile + 1);
      const auto whole = ints.t[first + tile];
      *operand = (index < 0 ? whole : whole.select(axis, index)).permute(order);
    }
  }
  size_t count = 0;  // tiles used
};

}  // namespace nntile
