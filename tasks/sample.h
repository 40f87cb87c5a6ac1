// Shared by the kernels that sample tokens.
#pragma once
#include <cstdint>

namespace nntile {

inline constexpr int64_t kNoToken = -1;  // NO_TOKEN of sample.py

}  // namespace nntile
