// Shared by the kernels that sample tokens.
#pragma once
#include <cstdint>

#include "kernel.h"
#include "sample_args.h"

namespace nntile {

inline constexpr int64_t kNoToken = -1;  // NO_TOKEN of sample.py

// Adds x to its columns of y, which begin at args.first. tiles: y (ACC), x
inline void unite(Args& t) {
  const UniteArgs args(t);
  auto y = t[0];
  const auto x = t[1];
  if (!t.accumulates(0)) y.zero_();
  auto part = y.narrow(-1, args.first, x.size(-1));
  part.add_(x.reshape(part.sizes()));
}

}  // namespace nntile
