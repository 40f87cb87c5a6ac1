// Attention of one head on one core. Scores of some queries stay in the cache, as in FlashAttention (Dao et al. 2022).
// Products use register_tile.h, as BLAS is slow at these sizes.
#pragma once
#include <array>
#include <cmath>
#include <limits>

#include "exponential.h"
#include "register_tile.h"
#include "rows.h"

namespace nntile {

// Rows [position, head_dim] of one head: element (i, d) is data[i * row + d * column].
template <class T>
struct HeadRows {
  T* data;
  int64_t row, column;

  T& at(int64_t i, int64_t d) const { return data[i * row + d * column]; }
};

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// The right operand of a product, in one of two forms. `rows`: row-major, with rows of at least `width` elements, a
// multiple of kTileColumns<T>; copied only if needed. `transposed`: a copy of the transpose, in panels of
// kTileColumns<T> columns.
template <class T>
class RightOperand {
 public:
  const T* data = nullptr;
  int64_t step = 0;

  void rows(const HeadRows<const T>& x, int64_t count, int64_t dim, int64_t width) {
    if (x.column == 1 && dim == width) {
      data = x.data;
      step = x.row;
      return;
    }
    copy_.assign(std::max(copy_.size(), static_cast<size_t>(count * width)), T(0));
    for (int64_t i = 0; i < count; ++i)
      for (int64_t d = 0; d < dim; ++d) copy_[i * width + d] = x.at(i, d);
    data = copy_.data();
    step = width;
  }

  // Panel p has elements [dim, kTileColumns<T>] of rows [p * kTileColumns<T>, (p + 1) * kTileColumns<T>) of x.
  [[gnu::flatten]] void transposed(const HeadRows<const T>& x, int64_t count, int64_t dim) {
    constexpr int64_t vector = Vec<T>::size();
    step = kTileColumns<T>;
    copy_.resize(std::max(copy_.size(), static_cast<size_t>(round_up(count, step) * dim)));
    for (int64_t i = 0; i < round_up(count, step); i += vector) {
      T* out = copy_.data() + i / step * step * dim + i % step;
      for (int64_t d = 0; d < dim; d += vector) {
        if (i + vector <= count && d + vector <= dim && x.column == 1) {
          at::vec::transpose_mxn(x.data + i * x.row + d, x.row, out + d * step, step, static_cast<int>(vector),
                                 static_cast<int>(vector));
          continue;
        }
        for (int64_t r = 0; r < vector; ++r)
          for (int64_t c = d; c < std::min(d + vector, dim); ++c)
            out[c * step + r] = i + r < count ? x.at(i + r, c) : T(0);
      }
    }
    data = copy_.data();
  }

 private:
  Lines<T> copy_;
};

// Sizes of a head. diagonal: query i attends to keys 0 to i, else to all keys.
struct HeadSizes {
  int64_t queries, keys, dim;
  bool diagonal;

  int64_t kept(int64_t query) const { return diagonal ? std::min(query + 1, keys) : keys; }
};

inline constexpr int64_t kHeadKeys = 512;  // keys of a block; terms must not mask all keys of a block

// Scores without further terms; see `Terms` in attention_relative.cpp.
struct NoTerms {
  template <class T>
  void add(T*, int64_t, int64_t, int64_t, int64_t, int64_t) const {}
  template <class T>
  void collect(const T*, int64_t, int64_t, int64_t, int64_t, int64_t) const {}
  template <class T>
  void drop(T*, int64_t, int64_t, int64_t) const {}
};

// Terms: a class whose `add` adds terms to a block of unscaled scores, and whose `collect` gets the block's gradients.
// Its `drop` multiplies a query's numbers, one for each of some keys, by the factors of dropout.
template <class T, class Terms = NoTerms>
class HeadAttention {
  static constexpr int64_t kColumns = kTileColumns<T>, kRows = kTileRows;
  // A block of scores fits into the L2 cache. A panel of keys stays in the L1 cache for all queries of a block.
  static constexpr int64_t kQueries = 8 * kRows, kStep = kHeadKeys + kColumns;

 public:
  // Prepares the keys and values of a head. Then call `forward` or `backward` for each head of queries that uses them.
  // gradients: prepare for `backward`.
  void begin(const HeadSizes& sizes, const HeadRows<const T>& k, const HeadRows<const T>& v, bool gradients) {
    sizes_ = sizes;
    width_ = round_up(sizes.dim, kColumns);
    p_.resize(kQueries * kStep);
    sums_.resize(static_cast<size_t>(kQueries * width_));
    k_across_.transposed(k, sizes.keys, sizes.dim);
    if (!gradients) return v_.rows(v, sizes.keys, sizes.dim, width_);
    ds_.resize(p_.size());
    v_across_.transposed(v, sizes.keys, sizes.dim);
    k_.rows(k, sizes.keys, sizes.dim, width_);
    for (auto* grad : {&dk_, &dv_}) grad->assign(static_cast<size_t>(sizes.keys * width_), T(0));
  }

  // Computes a head of the output and its log-sum-exp.
  void forward(const HeadRows<const T>& q, const HeadRows<T>& out, T* lse, T scale, const Terms& terms = {}) {
    for_queries([&](int64_t first, int64_t rows) {
      std::array<T, kQueries> tops, totals;
      tops.fill(-std::numeric_limits<T>::infinity());
      totals.fill(T(0));
      for_keys(first, rows, [&](int64_t from, int64_t end) {
        scores(p_.data(), q, k_across_, first, rows, from, end);
        terms.add(p_.data(), kStep, first, rows, from, end);
        for_strips(first, rows, from, end, [&](int64_t row, int64_t height, int64_t keys) {
          for (int64_t r = row; r < row + height; ++r) {
            softmax(r, std::min(sizes_.kept(first + r) - from, keys), keys, tops[r], totals[r], scale);
            terms.drop(p_.data() + r * kStep, first + r, from, keys);
          }
          multiply(sums_.data() + row * width_, height, {p_.data() + row * kStep, kStep, 1}, v_, from, keys);
        });
      });
      for (int64_t r = 0; r < rows; ++r) {
        lse[first + r] = tops[r] + std::log(totals[r]);
        write(out, first + r, sums_.data() + r * width_, T(1) / totals[r], false);
      }
    });
  }

  // Computes a head of dq, and adds to the gradients of k and v.
  void backward(const HeadRows<const T>& q, const HeadRows<const T>& d_out, const HeadRows<const T>& out, const T* lse,
                const HeadRows<T>& dq, T scale, const Terms& terms = {}) {
    q_.rows(q, sizes_.queries, sizes_.dim, width_);
    d_out_.rows(d_out, sizes_.queries, sizes_.dim, width_);
    for_queries([&](int64_t first, int64_t rows) {
      std::array<T, kQueries> deltas;
      for (int64_t r = 0; r < rows; ++r) deltas[r] = dot(d_out, out, first + r);
      for_keys(first, rows, [&](int64_t from, int64_t end) {
        scores(p_.data(), q, k_across_, first, rows, from, end);
        terms.add(p_.data(), kStep, first, rows, from, end);
        scores(ds_.data(), d_out, v_across_, first, rows, from, end);
        for_strips(first, rows, from, end, [&](int64_t row, int64_t height, int64_t keys) {
          const auto zeros = std::min(keys + kRows, end - from);
          for (int64_t r = row; r < row + height; ++r) {
            terms.drop(ds_.data() + r * kStep, first + r, from, keys);
            gradients_of_scores(r, std::min(sizes_.kept(first + r) - from, keys), zeros, lse[first + r], deltas[r],
                                scale);
            terms.drop(p_.data() + r * kStep, first + r, from, keys);
          }
          multiply(sums_.data() + row * width_, height, {ds_.data() + row * kStep, kStep, 1}, k_, from, keys);
        });
        terms.collect(ds_.data(), kStep, first, rows, from, end);
        for (int64_t key = from; key < std::min(end, sizes_.kept(first + rows - 1)); key += kRows) {
          const auto keys = std::min(kRows, end - key);
          // The first queries of the block do not attend to `key`.
          const auto skipped = sizes_.diagonal ? std::max(key - first, int64_t{0}) : 0;
          const auto at = skipped * kStep + key - from, query = first + skipped, count = rows - skipped;
          multiply(dv_.data() + key * width_, keys, {p_.data() + at, 1, kStep}, d_out_, query, count);
          multiply(dk_.data() + key * width_, keys, {ds_.data() + at, 1, kStep}, q_, query, count);
        }
      });
      for (int64_t r = 0; r < rows; ++r) write(dq, first + r, sums_.data() + r * width_, T(1), false);
    });
  }

  // Writes the gradients of k and v, summed over the heads of queries since `begin`. adds: add to dk and dv instead of
  // overwriting them.
  void end(const HeadRows<T>& dk, const HeadRows<T>& dv, bool adds) const {
    for (int64_t key = 0; key < sizes_.keys; ++key) {
      write(dk, key, dk_.data() + key * width_, T(1), adds);
      write(dv, key, dv_.data() + key * width_, T(1), adds);
    }
  }

 private:
  HeadSizes sizes_{};
  int64_t width_ = 0;  // head_dim, rounded up to a multiple of kColumns
  RightOperand<T> k_across_, v_across_, k_, v_, q_, d_out_;
  // Scores and their gradients, [kQueries, kStep]; a block of the output or of dq, [kQueries, width_]; dk and dv.
  Lines<T> p_, ds_, sums_, dk_, dv_;

  // Calls f(first query, number of queries) for each block of queries, with sums_ filled with zeros.
  template <class F>
  void for_queries(F f) {
    for (int64_t first = 0; first < sizes_.queries; first += kQueries) {
      std::fill(sums_.begin(), sums_.end(), T(0));
      f(first, std::min(kQueries, sizes_.queries - first));
    }
  }

  // Calls f(first key, end) for each block of keys to which a block of queries attends.
  template <class F>
  void for_keys(int64_t first, int64_t rows, F f) const {
    for (int64_t from = 0; from < sizes_.kept(first + rows - 1); from += kHeadKeys)
      f(from, std::min(from + kHeadKeys, sizes_.keys));
  }

  // Splits a block into strips of kRows queries. Calls f(first row of the strip in the block, number of its rows,
  // number of keys from `from` on to which the strip attends). Skips strips that attend to none of these keys.
  template <class F>
  void for_strips(int64_t first, int64_t rows, int64_t from, int64_t end, F f) const {
    for (int64_t row = 0; row < rows; row += kRows) {
      const auto height = std::min(kRows, rows - row);
      const auto keys = std::min(sizes_.kept(first + row + height - 1), end) - from;
      if (keys > 0) f(row, height, keys);
    }
  }

  // s = x y^T for the queries of a block and keys [from, end) to which they attend; y: in panels.
  void scores(T* s, const HeadRows<const T>& x, const RightOperand<T>& y, int64_t first, int64_t rows, int64_t from,
              int64_t end) const {
    for (int64_t key = from; key < end; key += kColumns)
      for_strips(first, rows, key, end, [&](int64_t row, int64_t height, int64_t) {
        const TileRows<T> rows_of_x{x.data + (first + row) * x.row, x.row, x.column};
        multiply_tile(height, s + row * kStep + key - from, kStep, rows_of_x, y.data + key * sizes_.dim, kColumns,
                      sizes_.dim, false, [](int64_t) {});
      });
  }

  // c += a b for width_ columns. b: the `depth` rows from row `from` on.
  void multiply(T* c, int64_t rows, const TileRows<T>& a, const RightOperand<T>& b, int64_t from, int64_t depth) const {
    for (int64_t column = 0; column < width_; column += kColumns)
      multiply_tile(rows, c + column, width_, a, b.data + from * b.step + column, b.step, depth, true, [](int64_t) {});
  }

  // An online softmax (Milakov and Gimelshein 2018): replaces the first n scores of row r by exponentials and the
  // scores up to `end` by zeros, and updates the row's maximum, sum of exponentials and sum of values.
  void softmax(int64_t r, int64_t n, int64_t end, T& top, T& total, T scale) {
    T* p = p_.data() + r * kStep;
    std::fill(p + std::max(n, int64_t{0}), p + end, T(0));
    if (n <= 0) return;
    const T higher = std::max(top, largest(p, n, scale)), less = std::exp(top - higher);
    const Vec<T> by(static_cast<T>(scale * kLog2E)), shift(static_cast<T>(-higher * kLog2E));
    total = total * less + sum_vectors<T>(n, [&](int64_t k, int64_t count) {
      const auto e = keep(exp2_of(at::vec::fmadd(load(p + k, count), by, shift)), count);
      e.store(p + k, static_cast<int>(count));
      return e;
    });
    if (less != T(1) && top > -std::numeric_limits<T>::infinity()) {
      T* sums = sums_.data() + r * width_;
      for_vectors<T>(width_, [&](int64_t k, int64_t) { (Vec<T>::loadu(sums + k) * Vec<T>(less)).store(sums + k); });
    }
    top = higher;
  }

  // Returns the largest of the scaled scores.
  static T largest(const T* p, int64_t n, T scale) {
    return scale * (scale >= 0 ? max_of(p, n) : *std::min_element(p, p + n));
  }

  // Row r: p = exp(scale p - lse), ds = scale p (ds - delta) for the first n keys; zeros up to key `end`.
  void gradients_of_scores(int64_t r, int64_t n, int64_t end, T lse, T delta, T scale) {
    T *p = p_.data() + r * kStep, *ds = ds_.data() + r * kStep;
    n = std::max(n, int64_t{0});
    const Vec<T> by(static_cast<T>(scale * kLog2E)), shift(static_cast<T>(-lse * kLog2E));
    for_vectors<T>(n, [&](int64_t k, int64_t count) {
      const auto e = exp2_of(at::vec::fmadd(load(p + k, count), by, shift));
      e.store(p + k, static_cast<int>(count));
      (e * (load(ds + k, count) - Vec<T>(delta)) * Vec<T>(scale)).store(ds + k, static_cast<int>(count));
    });
    for (T* x : {p, ds}) std::fill(x + n, x + end, T(0));
  }

  T dot(const HeadRows<const T>& a, const HeadRows<const T>& b, int64_t row) const {
    if (a.column == 1 && b.column == 1) return dot_of(a.data + row * a.row, b.data + row * b.row, sizes_.dim);
    T sum = 0;
    for (int64_t d = 0; d < sizes_.dim; ++d) sum += a.at(row, d) * b.at(row, d);
    return sum;
  }

  void write(const HeadRows<T>& to, int64_t row, const T* from, T factor, bool adds) const {
    T* out = to.data + row * to.row;
    if (to.column != 1) {
      for (int64_t d = 0; d < sizes_.dim; ++d) to.at(row, d) = from[d] * factor + (adds ? to.at(row, d) : T(0));
      return;
    }
    for_vectors<T>(sizes_.dim, [&](int64_t d, int64_t count) {
      auto x = load(from + d, count) * Vec<T>(factor);
      if (adds) x = x + load(out + d, count);
      x.store(out + d, static_cast<int>(count));
    });
  }
};

template <class T>
HeadRows<T> rows_of_head(const at::Tensor& x, int64_t b, int64_t h) {
  auto* data = static_cast<std::remove_const_t<T>*>(x.data_ptr());
  return {data + b * x.stride(0) + h * x.stride(1), x.stride(2), x.stride(3)};
}

// Returns the buffers of this thread.
template <class T, class Terms = NoTerms>
HeadAttention<T, Terms>& buffers_of_head() {
  static thread_local HeadAttention<T, Terms> head;
  return head;
}

}  // namespace nntile
