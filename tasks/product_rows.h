// Product of a few rows and a column-major matrix, as in passes that generate tokens.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "rows.h"

// Keeps the compiler from loading a vector again for each use: the loads would take longer than the products.
#ifdef __AVX2__
#define IN_REGISTER(vector) asm("" : "+v"(reinterpret_cast<Lanes<T>&>(vector)))
#else
#define IN_REGISTER(vector)
#endif

namespace nntile {

constexpr int64_t kFewRows = 16;
constexpr int64_t kLong = 256;  // elements of a long column
constexpr int64_t kBytesAhead = 16384;  // distance from the elements of b that are read to those that are prefetched

// Returns whether a has at most kFewRows rows and b is column-major. The transpose of b, [n, k], is then read once, row
// by row.
inline bool is_few_rows(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
  return out.dim() == 2 && a.size(0) <= kFewRows && out.stride(1) == 1 && a.stride(1) == 1 && b.stride(0) == 1 &&
         a.size(1) > 1;
}

// A vector register. Unlike Vec, its lanes can be shuffled.
template <class T>
using Lanes [[gnu::vector_size(Vec<T>::size() * sizeof(T))]] = T;

// Returns lanes From of x and y together.
template <class T, size_t... From>
inline Lanes<T> lanes_of(Lanes<T> x, Lanes<T> y) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(x, y, From...);
#else  // GCC 11
  using Index [[gnu::vector_size(sizeof(x))]] = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  return __builtin_shuffle(x, y, Index{From...});
#endif
}

// Returns in lane i the sum of lanes i and i ^ Step of a vector: of x if bit Step of i is 0, else of y.
template <class T, size_t Step, size_t... I>
inline Lanes<T> paired_sums(Lanes<T> x, Lanes<T> y, std::index_sequence<I...>) {
  constexpr size_t n = sizeof...(I);
  return lanes_of<T, (I & Step ? n + I : I)...>(x, y) + lanes_of<T, (I & Step ? n + (I ^ Step) : I ^ Step)...>(x, y);
}

// Returns a vector whose lanes 0 to Count - 1 are the sums of the lanes of Count vectors, a power of two. A sum has the
// same bits for each Count. The sums of several vectors together take fewer instructions than one after the other.
template <class T, int Count, int Step = 1>
[[gnu::always_inline]] inline Lanes<T> sums_of_lanes(const Lanes<T> (&x)[Count]) {
  constexpr auto lanes = std::make_index_sequence<Vec<T>::size()>();
  if constexpr (Step == Vec<T>::size()) {
    return x[0];
  } else {
    constexpr int left = std::max(Count / 2, 1);
    Lanes<T> sums[left];
#pragma GCC unroll 16
    for (int k = 0; k < left; ++k) sums[k] = paired_sums<T, Step>(x[2 * k], x[std::min(2 * k + 1, Count - 1)], lanes);
    return sums_of_lanes<T, left, 2 * Step>(sums);
  }
}

// Computes Rows x Columns results. Each result is the product of a row of a and a column of b. a, b, out: pointers to
// the first elements. Ahead: prefetch later columns of b into the L2 cache. A prefetch beyond the end of b has no effect.
// A result has the same bits for all numbers of rows and columns.
template <int Rows, int Columns, class T, bool Ahead>
inline void rows_by_columns(T* out, int64_t out_step, const T* a, int64_t a_step, const T* b, int64_t b_step, int64_t k,
                            T beta, T alpha) {
  constexpr int64_t width = Vec<T>::size();
  constexpr int count = Rows * Columns, at_once = std::min<int>(count, width);
  Vec<T> sums[count];  // all loops over them are unrolled, so that they stay in registers
#pragma GCC unroll 16
  for (auto& sum : sums) sum = Vec<T>(T(0));
  const auto add = [&](int64_t at, auto elements) __attribute__((always_inline)) {
    Vec<T> columns[Columns];
#pragma GCC unroll 4
    for (int c = 0; c < Columns; ++c) {
      if constexpr (Ahead) __builtin_prefetch(b + c * b_step + at + kBytesAhead / sizeof(T), 0, 2);
      columns[c] = keep(load(b + c * b_step + at, elements), elements);
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      auto row = keep(load(a + r * a_step + at, elements), elements);
      IN_REGISTER(row);
#pragma GCC unroll 4
      for (int c = 0; c < Columns; ++c)
        sums[r * Columns + c] = at::vec::fmadd(row, columns[c], sums[r * Columns + c]);
    }
  };
  int64_t at = 0;
  for (; at + width <= k; at += width) add(at, std::integral_constant<int64_t, width>());
  if (at < k) add(at, k - at);
  T totals[count];
#pragma GCC unroll 4
  for (int first = 0; first < count; first += at_once) {
    Lanes<T> some[at_once];
#pragma GCC unroll 16
    for (int number = 0; number < at_once; ++number)
      std::memcpy(&some[number], &sums[first + number], sizeof(Lanes<T>));
    const auto added = sums_of_lanes<T>(some);
    std::memcpy(totals + first, &added, sizeof(T) * at_once);
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < Columns; ++c) {
      const T sum = alpha * totals[r * Columns + c];
      T& to = out[r * out_step + c];
      to = beta == T(0) ? sum : std::fma(beta, to, sum);  // else the compiler chooses which product it rounds
    }
}

// out = beta * out + alpha * a b for m rows of a and n columns of b. out_step, a_step: between rows; b_step: between
// columns.
template <class T>
void few_rows(T* out, int64_t out_step, const T* a, int64_t a_step, const T* b, int64_t b_step, int64_t m, int64_t n,
              int64_t k, T beta, T alpha) {
  constexpr bool large = Vec<T>::size() * sizeof(T) == 64;  // AVX-512 has 32 registers, for twice as many sums
  constexpr int kRows = large ? 8 : 4;
  const auto columns_of = [&](auto columns, int64_t column) {
    constexpr int C = decltype(columns)::value;
    const auto rows_of = [&](auto rows, int64_t row) {
      const auto run = [&](auto ahead) {
        rows_by_columns<decltype(rows)::value, C, T, decltype(ahead)::value>(
            out + row * out_step + column, out_step, a + row * a_step, a_step, b + column * b_step, b_step, k, beta,
            alpha);
      };
      if (row == 0) run(std::true_type());
      else run(std::false_type());
    };
    int64_t row = 0;
    if constexpr (C < 4)  // kRows rows of 4 columns would have more sums than registers
      for (; row + kRows <= m; row += kRows) rows_of(std::integral_constant<int, kRows>(), row);
    for (; row + 4 <= m; row += 4) rows_of(std::integral_constant<int, 4>(), row);
    for (; row + 2 <= m; row += 2) rows_of(std::integral_constant<int, 2>(), row);
    if (row < m) rows_of(std::integral_constant<int, 1>(), row);
  };
  const auto all_columns = [&](auto columns) {
    int64_t column = 0;
    for (; column + columns <= n; column += columns) columns_of(columns, column);
    for (; column < n; ++column) columns_of(std::integral_constant<int, 1>(), column);
  };
  // Long columns are read the fastest one by one. The sums of short columns are more work than their products, and take
  // less time for several columns together.
  if (m <= 2 && large && k >= kLong) all_columns(std::integral_constant<int, 1>());
  else if (m <= 2) all_columns(std::integral_constant<int, 4>());
  else if (m < 8) all_columns(std::integral_constant<int, large ? 4 : 2>());
  else all_columns(std::integral_constant<int, 2>());
}

// The same for tensors; see is_few_rows.
template <class T>
void few_rows(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, double beta, double alpha) {
  few_rows(out.data_ptr<T>(), out.stride(0), a.data_ptr<T>(), a.stride(0), b.data_ptr<T>(), b.stride(1), a.size(0),
           b.size(1), a.size(1), static_cast<T>(beta), static_cast<T>(alpha));
}

}  // namespace nntile
