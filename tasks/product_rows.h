// Product of a few rows and a column-major matrix, as in passes that generate tokens.
#pragma once
#include "rows.h"

namespace nntile {

constexpr int64_t kFewRows = 16;

// Returns whether a has at most kFewRows rows and b is column-major. The transpose of b, [n, k], is then read once, row
// by row.
inline bool is_few_rows(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
  return out.dim() == 2 && a.size(0) <= kFewRows && out.stride(1) == 1 && a.stride(1) == 1 && b.stride(0) == 1 &&
         a.size(1) > 1;
}

// Computes Rows x Columns results. Each result is the product of a row of a and a column of b. a, b, out: pointers to
// the first elements. Ahead: prefetch the next columns of b, because without it several columns at once are read at 0.6
// of the memory's rate. A prefetch beyond the end of b has no effect.
template <int Rows, int Columns, class T, bool Ahead>
inline void rows_by_columns(T* out, int64_t out_step, const T* a, int64_t a_step, const T* b, int64_t b_step, int64_t k,
                            T beta, T alpha) {
  Vec<T> sums[Rows][Columns];
  for (auto& row : sums)
    for (auto& sum : row) sum = Vec<T>(T(0));
  for_vectors<T>(k, [&](int64_t at, int64_t count) {
    if constexpr (Ahead)
      for (int c = 0; c < Columns; ++c) __builtin_prefetch(b + (c + Columns) * b_step + at);
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

// out = beta * out + alpha * a b; see is_few_rows.
template <class T>
void few_rows(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, double beta, double alpha) {
  constexpr int kColumns = 4;
  const int64_t m = a.size(0), k = a.size(1), n = b.size(1);
  const int64_t out_step = out.stride(0), a_step = a.stride(0), b_step = b.stride(1);
  const T scale = static_cast<T>(alpha), keeps = static_cast<T>(beta);
  // Not in the loop over columns, where the calls of data_ptr would take a tenth of the time.
  const T *const of_a = a.data_ptr<T>(), *const of_b = b.data_ptr<T>();
  T* const into = out.data_ptr<T>();
  const auto columns_of = [&](auto columns, int64_t column) {
    constexpr int C = decltype(columns)::value;
    const T* from = of_b + column * b_step;
    const auto rows_of = [&](auto rows, int64_t row) {
      const auto run = [&](auto ahead) {
        rows_by_columns<decltype(rows)::value, C, T, decltype(ahead)::value>(
            into + row * out_step + column, out_step, of_a + row * a_step, a_step, from, b_step, k, keeps, scale);
      };
      if (row == 0 && C > 1) run(std::true_type());
      else run(std::false_type());
    };
    int64_t row = 0;
    for (; row + 4 <= m; row += 4) rows_of(std::integral_constant<int, 4>(), row);
    for (; row + 2 <= m; row += 2) rows_of(std::integral_constant<int, 2>(), row);
    if (row < m) rows_of(std::integral_constant<int, 1>(), row);
  };
  if (m == 1) {  // reads b as one sequential stream; reading four columns at once reaches 0.6 of the rate
    for (int64_t column = 0; column < n; ++column) {
      const T sum = dot_of(of_a, of_b + column * b_step, k) * scale;
      T& to = into[column];
      to = keeps == T(0) ? sum : keeps * to + sum;
    }
    return;
  }
  int64_t column = 0;
  for (; column + kColumns <= n; column += kColumns) columns_of(std::integral_constant<int, kColumns>(), column);
  for (; column < n; ++column) columns_of(std::integral_constant<int, 1>(), column);
}

}  // namespace nntile
