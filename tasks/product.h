// Products of tensors on one core with a fused epilogue, for processors with AVX-512 that are not Intel's. There, MKL,
// the BLAS of ATen, is slow, because it uses only AVX2. On processors that have only AVX2, MKL is faster than this
// code. On an AMD EPYC of family 25, steps of gpt2_tiny, bert_tiny and llama_tiny with MKL take 0.64 to 0.76 of the
// time.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string_view>
#include <vector>

#include "activation.h"
#include "contract.h"
#include "product_rows.h"
#include "register_tile.h"

namespace nntile {

// A matrix with arbitrary offsets: element (i, j) is data[rows.at[i] + columns.at[j]].
struct Offsets {
  std::vector<int64_t> at;
  int64_t run = 1;  // length of the runs of contiguous elements; a run begins at each multiple of this length

  // Sets the offsets of the elements along axes [from, from + count) of x. The last of these axes varies fastest.
  void set(const at::Tensor& x, size_t from, size_t count) {
    at.assign(1, 0);
    run = 1;
    bool side_by_side = true;
    for (size_t axis = from + count; axis-- > from;) {
      const auto size = x.sizes()[axis], step = x.strides()[axis];
      const size_t inner = at.size();
      at.resize(inner * static_cast<size_t>(size));
      for (size_t k = inner; k < at.size(); ++k) at[k] = at[k - inner] + step;
      side_by_side = side_by_side && (size == 1 || step == run);
      if (side_by_side) run *= size;
    }
  }

  int64_t size() const { return static_cast<int64_t>(at.size()); }
  int64_t operator[](int64_t k) const { return at[static_cast<size_t>(k)]; }
  int64_t to_end_of_run(int64_t k) const { return run - k % run; }

  // Returns the distance from each of `count` offsets to the next, from `first` on; nullopt if the distances differ.
  std::optional<int64_t> step(int64_t first, int64_t count) const {
    for (int64_t k = first + 2; k < first + count; ++k)
      if ((*this)[k] - (*this)[k - 1] != (*this)[first + 1] - (*this)[first]) return {};
    return count > 1 ? (*this)[first + 1] - (*this)[first] : 0;
  }
};

template <class T>
struct Matrix {
  T* data;
  const Offsets &rows, &columns;
};

// y = act(alpha a b + beta y + bias + residual), or with `aux` act'(aux) (alpha a b + ...). A null pointer: y has no
// such term.
template <class T>
struct Epilogue {
  T alpha, beta;
  const T* bias;  // one number per column; other pointers have the layout of the result
  const T *residual, *aux;
  T* activated;  // output of the activation; the result then keeps the value before the activation
  int activation;  // -1: no activation
};

// Goto and van de Geijn 2008: panels of both operands are copied such that a tile of the result, in registers, reads
// them in order. A panel of the right operand and a block of the left operand fit into the L2 cache. Matthews 2018:
// copies of panels and writes of the result use an offset per row and column, so no permuted tensor is needed.
template <class T>
class Product {
  static constexpr int64_t kRows = kTileRows, kVector = Vec<T>::size(), kColumns = kTileColumns<T>;
  static constexpr int64_t kLeftStep = (kRows + kVector - 1) / kVector * kVector;  // `transpose` writes whole squares
  // Depth of a panel. With half the depth, the panel of the right operand would fit into the L1 cache. But each result
  // would be read and written more often, which took longer on an EPYC of family 25.
  static constexpr int64_t kDepth = 2048 / sizeof(T);
  // If the elements of several panels at one depth are contiguous, up to kPanels panels are copied together, because
  // the elements at the next depth may be on another page of memory. kAhead: depths between a prefetch and its copy.
  static constexpr int64_t kPanels = 4, kAhead = 6;
  static constexpr int64_t kBlockRows = 20 * kRows, kBlockColumns = 48 * kColumns;

 public:
  void operator()(const Matrix<T>& c, const Matrix<const T>& a, const Matrix<const T>& b, const Epilogue<T>& epilogue) {
    const auto rows = c.rows.size(), columns = c.columns.size(), all = a.columns.size();
    // With only one block of rows, pack one panel of columns at a time: the block reads the panel from the cache.
    const auto width = rows > kBlockRows ? kBlockColumns : kColumns;
    for (int64_t depth = 0; depth < all; depth += kDepth) {
      const auto k = std::min(kDepth, all - depth);
      if (width == kColumns) find_lines(b, depth, k);
      for (int64_t column = 0; column < columns; column += width) {
        const auto n = std::min(width, columns - column);
        pack<kColumns, kColumns>(right_, b.data, b.columns, column, n, b.rows, depth, k);
        for (int64_t row = 0; row < rows; row += kBlockRows) {
          const auto m = std::min(kBlockRows, rows - row);
          if (!column || rows > kBlockRows) pack<kRows, kLeftStep>(left_, a.data, a.rows, row, m, a.columns, depth, k);
          const T* next = width == kColumns && column + width < columns ? b.data + b.columns[column + width] : nullptr;
          block(c, row, m, column, n, k, part(epilogue, depth, depth + k == all), next);
        }
      }
    }
  }

 private:
  Lines<T> left_, right_;
  std::vector<int64_t> lines_;

  // Collects the offsets of a column panel's cache lines in the order of memory.
  void find_lines(const Matrix<const T>& b, int64_t depth, int64_t count) {
    lines_.clear();
    const bool along = b.rows.run > 1;
    for (int64_t i = 0; i < (along ? std::min(kColumns, b.columns.size()) : count); ++i)
      for (int64_t j = 0; j < (along ? count : kColumns); j += kVector)
        lines_.push_back(along ? b.columns[i] - b.columns[0] + b.rows[depth + j] : b.rows[depth + i] + j);
  }

  // Returns the epilogue of one part of the sum: bias and residual belong to the first part, the activation to the
  // last.
  static Epilogue<T> part(Epilogue<T> epilogue, int64_t depth, bool last) {
    if (depth) {
      epilogue.beta = 1;
      epilogue.bias = epilogue.residual = nullptr;
    }
    if (!last) {
      epilogue.aux = nullptr;
      epilogue.activated = nullptr;
      epilogue.activation = -1;
    }
    return epilogue;
  }

  // Copies rows (or columns) [first, first + count) of x into panels. Each panel is [depth][kStep] and holds kWidth
  // rows (kStep >= kWidth). Missing rows are zeros.
  template <int64_t kWidth, int64_t kStep>
  static void pack(Lines<T>& to, const T* x, const Offsets& across, int64_t first, int64_t count,
                   const Offsets& along, int64_t start, int64_t depth) {
    const auto panels = (count + kWidth - 1) / kWidth;
    to.resize(std::max(to.size(), static_cast<size_t>(panels * kStep * depth)));
    T* out = to.data();
    for (const auto end = first + count; first < end; first += kWidth, out += kStep * depth) {
      const auto width = std::min(kStep, end - first);
      if (width < kWidth) std::fill_n(out, kStep * depth, T(0));
      if (width == kStep && across.to_end_of_run(first) >= kStep) {
        const auto run = std::min(end - first, across.to_end_of_run(first));
        const auto panels_at_once = std::min(kPanels, (run - kStep) / kWidth + 1);
        for (int64_t k = 0; k < depth; ++k) {
          const T* from = x + across[first] + along[start + k];
          const T* ahead = x + across[first] + along[start + std::min(k + kAhead, depth - 1)];
          for (int64_t at = 0; at < panels_at_once * kWidth; at += kVector) __builtin_prefetch(ahead + at);
          for (int64_t p = 0; p < panels_at_once; ++p)
            std::copy_n(from + p * kWidth, kStep, out + (p * depth + k) * kStep);
        }
        first += (panels_at_once - 1) * kWidth;
        out += (panels_at_once - 1) * kStep * depth;
        continue;
      }
      for (int64_t i = 0; i < width; i += kVector) {
        const auto some = std::min(kVector, width - i);
        const auto step = along.run > 1 ? across.step(first + i, some) : std::nullopt;
        if (step) transpose<kStep>(out + i, x + across[first + i], *step, some, along, start, depth);
        else
          for (int64_t k = 0; k < depth; ++k)
            for (int64_t j = i; j < i + some; ++j) out[k * kStep + j] = x[across[first + j] + along[start + k]];
      }
    }
  }

  // Transposes squares of elements that are contiguous along the depth. With flatten, a square stays in registers.
  template <int64_t kStep>
  [[gnu::flatten]] static void transpose(T* out, const T* x, int64_t step, int64_t count, const Offsets& along,
                                    int64_t start, int64_t depth) {
    constexpr int kSquare = static_cast<int>(kVector);
    for (int64_t k = 0, some; k < depth; k += some) {
      some = std::min({kVector, depth - k, along.to_end_of_run(start + k)});
      const T* from = x + along[start + k];
      if (count == kVector && some == kVector)
        at::vec::transpose_mxn(from, step, out + k * kStep, kStep, kSquare, kSquare);
      else
        for (int64_t j = 0; j < count; ++j)
          for (int64_t i = 0; i < some; ++i) out[(k + i) * kStep + j] = from[j * step + i];
    }
  }

  void block(const Matrix<T>& c, int64_t row, int64_t m, int64_t column, int64_t n, int64_t k,
             const Epilogue<T>& epilogue, const T* next) const {
    alignas(64) T sums[kRows * kColumns];
    const bool plain = epilogue.alpha == T(1) && epilogue.beta == T(0) && !epilogue.bias && !epilogue.residual &&
                       epilogue.activation < 0;
    for (int64_t j = 0; j < n; j += kColumns)
      for (int64_t i = 0; i < m; i += kRows) {
        const auto height = std::min(kRows, m - i);
        const auto panel = i / kRows, lines = static_cast<int64_t>(lines_.size());
        // The cache lines of the next panel of columns are prefetched into L2 while two panels are multiplied.
        const auto* ahead = lines_.data() + panel * k;
        const auto count = next ? std::min(k, lines - panel * k) : 0;
        const bool direct = plain && n - j >= kColumns && c.columns.to_end_of_run(column + j) >= kColumns;
        const auto step = direct ? c.rows.step(row + i, height) : std::nullopt;  // nullopt: `finish` writes c
        T* const to = step ? c.data + c.rows[row + i] + c.columns[column + j] : sums;
        const TileRows<T> left{left_.data() + panel * kLeftStep * k, 1, kLeftStep};
        multiply_tile(height, to, step.value_or(kColumns), left, right_.data() + j * k, kColumns, k, false,
                      [&](int64_t depth) {
                        if (depth < count) __builtin_prefetch(next + ahead[depth], 0, 2);
                      });
        if (!step) finish(c, row + i, height, column + j, std::min(kColumns, n - j), sums, epilogue);
      }
  }

  // Writes a tile of c from its sums, in contiguous pieces.
  static void finish(const Matrix<T>& c, int64_t row, int64_t height, int64_t column, int64_t width, const T* sums,
                     const Epilogue<T>& e) {
    const Vec<T> alpha(e.alpha), beta(e.beta);
    for (int64_t j = 0, count; j < width; j += count) {
      count = std::min({kVector, width - j, c.columns.to_end_of_run(column + j)});
      const auto bias = e.bias ? load(e.bias + column + j, count) : Vec<T>(T(0));
      for (int64_t i = 0; i < height; ++i) {
        const auto at = c.rows[row + i] + c.columns[column + j];
        auto x = at::vec::fmadd(alpha, load(sums + i * kColumns + j, count), bias);
        if (e.beta != T(0)) x = at::vec::fmadd(beta, load(c.data + at, count), x);
        if (e.residual) x = x + load(e.residual + at, count);
        if (e.aux) x = x * derivative(e.activation, load(e.aux + at, count));
        else if (e.activation >= 0) {
          if (e.activated) x.store(c.data + at, static_cast<int>(count));
          x = activate(e.activation, x);
        }
        x.store((e.activated ? e.activated : c.data) + at, static_cast<int>(count));
      }
    }
  }
};

// Tensors of a product, with axes [batch, rows, columns], [batch, rows, depth], [batch, depth, columns].
struct Factors {
  at::Tensor out, a, b;
  size_t batch, rows, columns, depth;  // numbers of axes

  // Returns the tensors of the transposed product.
  Factors transposed() const {
    const auto swapped = [&](const at::Tensor& x, size_t first, size_t second) {
      std::vector<int64_t> order(batch + first + second);
      for (size_t k = 0; k < order.size(); ++k)
        order[k] = static_cast<int64_t>(k < batch ? k : k < batch + second ? k + first : k - second);
      return x.permute(order);
    };
    return {swapped(out, rows, columns), swapped(b, depth, columns), swapped(a, rows, depth),
            batch, columns, rows, depth};
  }
};

// Returns whether to use Product instead of BLAS or, for few rows, few_rows. With few rows or columns, Product would
// mostly copy panels.
inline bool own_product(const Factors& x) {
  constexpr int64_t kLeast = 16;
#if defined(__x86_64__) && defined(CPU_CAPABILITY_AVX512)
  static const bool slow = !__builtin_cpu_is("intel");
#else
  static const bool slow = false;
#endif
  static const bool own = [] {
    const auto* set = std::getenv("NNTILE_PRODUCT");  // own or blas; checked at the start of a runtime
    const std::string_view chosen = set ? set : "";
    return chosen == "own" || (chosen != "blas" && slow);
  }();
  const auto sizes = x.out.sizes();
  const bool column_major = x.depth && x.b.stride(static_cast<int64_t>(x.batch + x.depth) - 1) == 1;
  if (column_major && extent(sizes, x.batch, x.rows) <= kFewRows) return false;
  return own && std::min({extent(sizes, x.batch, x.rows), extent(sizes, x.batch + x.rows, x.columns),
                          extent(x.a.sizes(), x.batch + x.rows, x.depth)}) >= kLeast;
}

// Terms of the epilogue. A tensor is undefined if the epilogue lacks it. All but the bias have the layout of `out`.
struct Along {
  double alpha, beta;
  at::Tensor bias, residual, aux, activated;
  int activation;
};

inline void product(const Factors& x, const Along& along) {
  dispatch(x.out, [&](auto zero) {
    using T = decltype(zero);
    static thread_local Product<T> made;
    static thread_local Offsets batches[3], rows, columns, depths[2], left, right;
    const auto first = x.batch + x.rows;
    rows.set(x.out, x.batch, x.rows);
    columns.set(x.out, first, x.columns);
    left.set(x.a, x.batch, x.rows);
    right.set(x.b, x.batch + x.depth, x.columns);
    depths[0].set(x.a, first, x.depth);
    depths[1].set(x.b, x.batch, x.depth);
    for (size_t k = 0; k < 3; ++k) batches[k].set(k == 0 ? x.out : k == 1 ? x.a : x.b, 0, x.batch);
    for (int64_t k = 0; k < batches[0].size(); ++k) {
      const auto at = batches[0][k];
      const auto read = [&](const at::Tensor& y) { return y.defined() ? y.const_data_ptr<T>() + at : nullptr; };
      made({x.out.data_ptr<T>() + at, rows, columns}, {x.a.const_data_ptr<T>() + batches[1][k], left, depths[0]},
           {x.b.const_data_ptr<T>() + batches[2][k], depths[1], right},
           {static_cast<T>(along.alpha), static_cast<T>(along.beta),
            along.bias.defined() ? along.bias.const_data_ptr<T>() : nullptr, read(along.residual), read(along.aux),
            along.activated.defined() ? along.activated.data_ptr<T>() + at : nullptr, along.activation});
    }
  });
}

}  // namespace nntile
