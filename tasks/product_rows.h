// Product of a few rows and a column-major matrix, as in passes that generate tokens.
#pragma once
#include "rows.h"

namespace nntile {

constexpr int64_t kFewRows = 16;
constexpr int64_t kBytesAhead = 16384;  // distance from the elements of b that are read to those that are prefetched

// Returns whether a has at most kFewRows rows and b is column-major. The transpose of b, [n, k], is then read once, row
// by row.
inline bool is_few_rows(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
  return out.dim() == 2 && a.size(0) <= kFewRows && out.stride(1) == 1 && a.stride(1) == 1 && b.stride(0) == 1 &&
         a.size(1) > 1;
}

// Computes Rows x Columns results. Each result is the product of a row of a and a column of b. a, b, out: pointers to
// the first elements. Ahead: prefetch later columns of b into the L2 cache. Prefetches into the L1 cache are slower. A
// prefetch beyond the end of b has no effect.
template <int Rows, int Columns, class T, bool Ahead>
inline void rows_by_columns(T* out, int64_t out_step, const T* a, int64_t a_step, const T* b, int64_t b_step, int64_t k,
                            T beta, T alpha) {
  Vec<T> sums[Rows][Columns];
  for (auto& row : sums)
    for (auto& sum : row) sum = Vec<T>(T(0));
  for_vectors<T>(k, [&](int64_t at, int64_t count) {
    if constexpr (Ahead)
      for (int c = 0; c < Columns; ++c) __builtin_prefetch(b + c * b_step + at + kBytesAhead / sizeof(T), 0, 2);
    Vec<T> columns[Columns];
    for (int c = 0; c < Columns; ++c) columns[c] = keep(load(b + c * b_step + at, count), count);
    for (int r = 0; r < Rows; ++r) {
      const auto row = keep(load(a + r * a_step + at, count), count);
      for (int c = 0; c < Columns; ++c) sums[r][c] = at::vec::fmadd(row, columns[c], sums[r][c]);
    }
  });
  for (int r = 0; r < Rows; ++r)
    for (int c = 0; c < Columns; ++c) {
      const T sum = at::vec::vec_reduce_all<T>([](Vec<T>& x, Vec<T>& y) { return x + y; }, sums[r][c]) * alpha;
      T& to = out[r * out_step + c];
      to = beta == T(0) ? sum : beta * to + sum;
    }
}

// out = beta * out + alpha * a b for m rows of a and n columns of b. out_step, a_step: between rows; b_step: between
// columns.
template <class T>
void few_rows(T* out, int64_t out_step, const T* a, int64_t a_step, const T* b, int64_t b_step, int64_t m, int64_t n,
              int64_t k, T beta, T alpha) {
  constexpr int kRows = Vec<T>::size() * sizeof(T) == 64 ? 8 : 4;  // AVX-512 has 32 registers, for twice as many sums
  const auto columns_of = [&](auto columns, int64_t column) {
    constexpr int C = decltype(columns)::value;
    const auto rows_of = [&](auto rows, int64_t row) {
      const auto run = [&](auto ahead) {
        rows_by_columns<decltype(rows)::value, C, T, decltype(ahead)::value>(
            out + row * out_step + column, out_step, a + row * a_step, a_step, b + column * b_step, b_step, k, beta, alpha);
      };
      if (row == 0) run(std::true_type());
      else run(std::false_type());
    };
    int64_t row = 0;
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
  if (m <= 2) all_columns(std::integral_constant<int, 4>());
  else all_columns(std::integral_constant<int, 2>());
}

// The same for tensors; see is_few_rows.
template <class T>
void few_rows(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, double beta, double alpha) {
  few_rows(out.data_ptr<T>(), out.stride(0), a.data_ptr<T>(), a.stride(0), b.data_ptr<T>(), b.stride(1), a.size(0),
           b.size(1), a.size(1), static_cast<T>(beta), static_cast<T>(alpha));
}

}  // namespace nntile
