// The inner loop of products on one core: a tile of the result is summed in registers.
#pragma once
#include <new>
#include <utility>
#include <vector>

#include "common.h"

namespace nntile {

#ifdef CPU_CAPABILITY_AVX512
constexpr int64_t kTileRows = 12;  // with two vectors of columns: 24 of 32 registers are sums
#else
constexpr int64_t kTileRows = 6;  // 12 of 16 registers
#endif
constexpr int64_t kTileVectors = 2;
template <class T>
constexpr int64_t kTileColumns = kTileVectors * Vec<T>::size();

// Memory that begins at a cache line: a vector load across two lines takes twice as long.
template <class T>
struct LineAllocator {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};

  LineAllocator() = default;
  template <class U>
  LineAllocator(const LineAllocator<U>&) {}
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), kLine)); }
  void deallocate(T* p, size_t) { ::operator delete(p, kLine); }
  bool operator==(const LineAllocator&) const { return true; }
};
template <class T>
using Lines = std::vector<T, LineAllocator<T>>;

// A left operand: element (i, k) is data[i * row + k * depth].
template <class T>
struct TileRows {
  const T* data;
  int64_t row, depth;
};

// c = a b, or c += a b with `adds`, for kHeight rows and kTileColumns<T> columns. Written such that the compiler keeps
// all sums in registers. c_step, b_step: distance from a row of c or b to the next. each(k) is called at each depth.
template <int64_t kHeight, class T, class Each>
[[gnu::always_inline]] inline void multiply_tile(T* c, int64_t c_step, const TileRows<T>& a, const T* b,
                                                 int64_t b_step, int64_t depth, bool adds, Each each) {
  constexpr int64_t kVector = Vec<T>::size();
  Vec<T> sums[kHeight][kTileVectors];
#pragma GCC unroll 16
  for (int64_t r = 0; r < kHeight; ++r)
#pragma GCC unroll 2
    for (int64_t v = 0; v < kTileVectors; ++v)
      sums[r][v] = adds ? Vec<T>::loadu(c + r * c_step + v * kVector) : Vec<T>(T(0));
  const T* left = a.data;
  for (int64_t k = 0; k < depth; ++k, left += a.depth, b += b_step) {
    each(k);
    Vec<T> columns[kTileVectors];
#pragma GCC unroll 2
    for (int64_t v = 0; v < kTileVectors; ++v) columns[v] = Vec<T>::loadu(b + v * kVector);
#pragma GCC unroll 16
    for (int64_t r = 0; r < kHeight; ++r) {
      const Vec<T> one(left[r * a.row]);
#pragma GCC unroll 2
      for (int64_t v = 0; v < kTileVectors; ++v) sums[r][v] = at::vec::fmadd(one, columns[v], sums[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int64_t r = 0; r < kHeight; ++r)
#pragma GCC unroll 2
    for (int64_t v = 0; v < kTileVectors; ++v) sums[r][v].store(c + r * c_step + v * kVector);
}

template <class T, class Each, int64_t... kLess>
[[gnu::always_inline]] inline void multiply_tile(std::integer_sequence<int64_t, kLess...>, int64_t height, T* c,
                                                 int64_t c_step, const TileRows<T>& a, const T* b, int64_t b_step,
                                                 int64_t depth, bool adds, Each each) {
  static_cast<void>(((height == kLess + 1 &&
                      (multiply_tile<kLess + 1>(c, c_step, a, b, b_step, depth, adds, each), true)) || ...));
}

// As above, for `height` rows, 1 to kTileRows.
template <class T, class Each>
[[gnu::always_inline]] inline void multiply_tile(int64_t height, T* c, int64_t c_step, const TileRows<T>& a,
                                                 const T* b, int64_t b_step, int64_t depth, bool adds, Each each) {
  multiply_tile(std::make_integer_sequence<int64_t, kTileRows>(), height, c, c_step, a, b, b_step, depth, adds, each);
}

}  // namespace nntile
