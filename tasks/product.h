// Products of matrices on one core by vectors of the machine, where the BLAS that ATen brings is slow: MKL, made for
// Intel's processors, computes with half the width of other ones' vectors.
#pragma once
#include <algorithm>
#include <vector>

#include "common.h"

namespace nntile {

template <class T>
struct Matrix {
  T* data;
  int64_t rows, columns, row_step, column_step;
};

// Goto and van de Geijn 2008: panels of both operands are copied so that a tile of the result, kept in registers, reads
// them in order; those of the right one fit into the first cache, those of the left one into the second.
template <class T>
class Product {
#ifdef CPU_CAPABILITY_AVX512
  static constexpr int64_t kRows = 12;  // with two vectors of columns 24 of 32 registers hold sums
#else
  static constexpr int64_t kRows = 6;  // 12 of 16
#endif
  static constexpr int64_t kVectors = 2, kColumns = kVectors * Vec<T>::size();
  static constexpr int64_t kDepth = 1024 / sizeof(T);  // summed at a time
  static constexpr int64_t kBlockRows = 10 * kRows, kBlockColumns = 48 * kColumns;

 public:
  // c = alpha a b + beta c + bias, which has a number for each column, or is none. c's columns lie side by side.
  void operator()(const Matrix<T>& c, const Matrix<const T>& a, const Matrix<const T>& b, T alpha, T beta,
                  const T* bias = nullptr) {
    for (int64_t column = 0; column < c.columns; column += kBlockColumns)
      for (int64_t depth = 0; depth < a.columns; depth += kDepth) {
        const auto n = std::min(kBlockColumns, c.columns - column), k = std::min(kDepth, a.columns - depth);
        const T* right = b.data + depth * b.row_step + column * b.column_step;
        pack<kColumns>(right_, right, n, k, b.column_step, b.row_step);
        const T* more = bias && !depth ? bias + column : nullptr;
        for (int64_t row = 0; row < c.rows; row += kBlockRows) {
          const auto m = std::min(kBlockRows, c.rows - row);
          const T* left = a.data + row * a.row_step + depth * a.column_step;
          pack<kRows>(left_, left, m, k, a.row_step, a.column_step);
          block(c.data + row * c.row_step + column, c.row_step, m, n, k, alpha, depth ? T(1) : beta, more);
        }
      }
  }

 private:
  std::vector<T> left_, right_;

  // x, whose `count` rows are `step` apart, as panels [depth][kWidth] of kWidth rows each, zeros behind the last.
  template <int64_t kWidth>
  static void pack(std::vector<T>& to, const T* x, int64_t count, int64_t depth, int64_t step, int64_t step_k) {
    constexpr int64_t kSquare = Vec<T>::size();
    const auto panels = (count + kWidth - 1) / kWidth;
    to.resize(std::max(to.size(), static_cast<size_t>(panels * kWidth * depth)));
    T* out = to.data();
    for (int64_t first = 0; first < count; first += kWidth, out += kWidth * depth) {
      const auto width = std::min(kWidth, count - first);
      const T* from = x + first * step;
      if (width < kWidth) std::fill_n(out, kWidth * depth, T(0));
      if (step_k != 1) {
        for (int64_t k = 0; k < depth; ++k)
          for (int64_t i = 0; i < width; ++i) out[k * kWidth + i] = from[i * step + k * step_k];
        continue;
      }
      for (int64_t k = 0; k < depth; k += kSquare)
        for (int64_t i = 0; i < width; i += kSquare)
          at::vec::transpose_mxn(from + i * step + k, step, out + k * kWidth + i, kWidth,
                                 static_cast<int>(std::min(kSquare, width - i)),
                                 static_cast<int>(std::min(kSquare, depth - k)));
    }
  }

  void block(T* c, int64_t step, int64_t m, int64_t n, int64_t k, T alpha, T beta, const T* bias) {
    alignas(64) T whole[kRows * kColumns];
    for (int64_t column = 0; column < n; column += kColumns)
      for (int64_t row = 0; row < m; row += kRows) {
        const T *left = left_.data() + row * k, *right = right_.data() + column * k;
        const auto height = std::min(kRows, m - row), width = std::min(kColumns, n - column);
        T* to = c + row * step + column;
        const T* more = bias ? bias + column : nullptr;
        if (height == kRows && width == kColumns) {
          tile(to, step, left, right, k, alpha, beta, more);
          continue;
        }
        tile(whole, kColumns, left, right, k, alpha, T(0), nullptr);
        for (int64_t i = 0; i < height; ++i)
          for (int64_t j = 0; j < width; ++j) {
            T& x = to[i * step + j];
            x = whole[i * kColumns + j] + (beta == T(0) ? T(0) : beta * x) + (more ? more[j] : T(0));
          }
      }
  }

  // A tile of c out of a panel of each operand; written so that the compiler keeps all sums in registers.
  static void tile(T* c, int64_t step, const T* left, const T* right, int64_t depth, T alpha, T beta, const T* bias) {
    Vec<T> sums[kRows][kVectors];
#pragma GCC unroll 16
    for (int64_t r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int64_t v = 0; v < kVectors; ++v) sums[r][v] = Vec<T>(T(0));
    for (int64_t k = 0; k < depth; ++k, left += kRows, right += kColumns) {
      Vec<T> columns[kVectors];
#pragma GCC unroll 2
      for (int64_t v = 0; v < kVectors; ++v) columns[v] = Vec<T>::loadu(right + v * Vec<T>::size());
#pragma GCC unroll 16
      for (int64_t r = 0; r < kRows; ++r) {
        const Vec<T> one(left[r]);
#pragma GCC unroll 2
        for (int64_t v = 0; v < kVectors; ++v) sums[r][v] = at::vec::fmadd(one, columns[v], sums[r][v]);
      }
    }
#pragma GCC unroll 16
    for (int64_t r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int64_t v = 0; v < kVectors; ++v) {
        T* to = c + r * step + v * Vec<T>::size();
        auto sum = Vec<T>(alpha) * sums[r][v];
        if (beta != T(0)) sum = at::vec::fmadd(Vec<T>(beta), Vec<T>::loadu(to), sum);
        if (bias) sum = sum + Vec<T>::loadu(bias + v * Vec<T>::size());
        sum.store(to);
      }
  }
};

// Whether Product computes out = a b; of few rows or columns copying the panels would be most of the work.
inline bool own_product(const at::Tensor& out, const at::Tensor& a) {
  constexpr int64_t kLeast = 16;
  const auto axis = out.dim() - 2;
  const bool large = std::min({out.size(axis), out.size(axis + 1), a.size(axis + 1)}) >= kLeast;
#if defined(__x86_64__) && (defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2))
  static const bool slow = !__builtin_cpu_is("intel");
#else
  static const bool slow = false;
#endif
  return slow && large && out.stride(axis + 1) == 1;
}

// out = alpha a b + beta out + bias [columns], of matrices or batches of them, where own_product says so.
inline void product(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, double beta, double alpha,
                    const at::Tensor& bias = {}) {
  dispatch(out, [&](auto zero) {
    using T = decltype(zero);
    static thread_local Product<T> made;
    const auto axis = out.dim() - 2;
    const auto matrix = [&]<class E>(E* data, const at::Tensor& x, int64_t number) {
      const auto first = data + (axis ? number * x.stride(0) : 0);
      return Matrix<E>{first, x.size(axis), x.size(axis + 1), x.stride(axis), x.stride(axis + 1)};
    };
    for (int64_t k = 0; k < (axis ? out.size(0) : 1); ++k)
      made(matrix(out.data_ptr<T>(), out, k), matrix(a.const_data_ptr<T>(), a, k), matrix(b.const_data_ptr<T>(), b, k),
           static_cast<T>(alpha), static_cast<T>(beta), bias.defined() ? bias.const_data_ptr<T>() : nullptr);
  });
}

}  // namespace nntile
