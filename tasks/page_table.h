// Entries of a page table's row; see cached_attention.py.
#pragma once
#include <cstdint>

namespace nntile {

inline constexpr int64_t kPast = 0, kCount = 1, kPages = 2;  // cached positions, new tokens, then numbers of pages

}  // namespace nntile
