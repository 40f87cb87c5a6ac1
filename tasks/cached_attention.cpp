// Attention to keys and values in the pages of a cache, and the positions of new tokens (cached_attention.py).
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>

#include <array>
#include <vector>

#include "attention.h"
#include "cached_attention_args.h"
#include "page_table.h"
#include "product_rows.h"

namespace nntile {
namespace {

constexpr int64_t kQueries = 128;  // queries in a block; the block's scores fit into the cache
constexpr int64_t kFew = 4;  // new tokens; with more, copying the keys into one matrix saves more time than it takes

// A row of the page table, checked.
struct CachedRow {
  int64_t past, count;
  const int64_t* pages;

  CachedRow(const at::Tensor& table, int64_t b, int64_t seq, const at::Tensor& pool) {
    const auto* entries = table.data_ptr<int64_t>() + b * table.size(1);
    past = entries[kPast];
    count = entries[kCount];
    pages = entries + kPages;
    const int64_t room = (table.size(1) - kPages) * pool.size(2);
    if (past < 0 || count < 0 || count > seq || past + count > room)
      throw std::out_of_range("a page table with " + std::to_string(past) + " positions and " + std::to_string(count) +
                              " new tokens, in pages for " + std::to_string(room) + " positions");
    for (int64_t page = 0; page * pool.size(2) < past + count; ++page)
      if (pages[page] < 1 || pages[page] >= pool.size(0))
        throw std::out_of_range("page " + std::to_string(pages[page]) + " of a cache of " + std::to_string(pool.size(0)));
  }
};

// A pool [page, head, slot, head_dim], contiguous.
template <class T>
struct Pool {
  T* data;
  int64_t heads, slots, width;

  explicit Pool(const at::Tensor& x) : data(x.data_ptr<T>()), heads(x.size(1)), slots(x.size(2)), width(x.size(3)) {}
  T* at(const CachedRow& row, int64_t head, int64_t position) const {
    return data + ((row.pages[position / slots] * heads + head) * slots + position % slots) * width;
  }
  // Calls f(position, count, rows) for each run of positions in [first, end) that lies in one page.
  template <class F>
  void runs(const CachedRow& row, int64_t head, int64_t first, int64_t end, F f) const {
    for (int64_t p = first; p < end;) {
      const int64_t n = std::min(end - p, slots - p % slots);
      f(p, n, at(row, head, p));
      p += n;
    }
  }
  // Copies positions [first, end) into a matrix.
  at::Tensor matrix(const CachedRow& row, int64_t head, int64_t first, int64_t end, const at::TensorOptions& options) const {
    auto out = at::empty({end - first, width}, options);
    runs(row, head, first, end, [&](int64_t p, int64_t n, const T* rows) {
      std::copy_n(rows, n * width, out.data_ptr<T>() + (p - first) * width);
    });
    return out;
  }
};

// Rows of a view [b, h, s, d]. Copies by pointer avoid tensor operations, which take half a microsecond each.
template <class T>
struct RowView {
  T* data;
  std::array<int64_t, 4> step;

  explicit RowView(const at::Tensor& x) : data(x.data_ptr<T>()) { std::copy_n(x.strides().data(), 4, step.begin()); }
  T* at(int64_t b, int64_t h, int64_t s) const { return data + b * step[0] + h * step[1] + s * step[2]; }
  void read(T* out, int64_t b, int64_t h, int64_t s, int64_t width) const {
    const T* from = at(b, h, s);
    if (step[3] == 1) std::copy_n(from, width, out);
    else for (int64_t d = 0; d < width; ++d) out[d] = from[d * step[3]];
  }
  void write(const T* x, int64_t b, int64_t h, int64_t s, int64_t width) const {
    T* to = at(b, h, s);
    if (step[3] == 1) std::copy_n(x, width, to);
    else for (int64_t d = 0; d < width; ++d) to[d * step[3]] = x[d];
  }
};

// Rotates rows [n, width] in place. table: [n, width], in each row cosines, then sines; see rotary.cpp.
template <class T>
void rotate_rows(T* x, const T* table, int64_t n, int64_t width) {
  const int64_t half = width / 2;
  for (int64_t row = 0; row < n; ++row, x += width, table += width)
    for (int64_t k = 0; k < half; ++k) {
      const T a = x[k], b = x[half + k], cos = table[k], sin = table[half + k];
      x[k] = a * cos - b * sin;
      x[half + k] = b * cos + a * sin;
    }
}

int64_t first_key(int64_t position, int64_t window) { return window ? std::max<int64_t>(0, position - window + 1) : 0; }

// Adds rows v [n, width], each times its weight, to a row.
template <class T>
void add_weighted(T* out, const T* weights, const T* v, int64_t n, int64_t width) {
  constexpr int64_t size = Vec<T>::size();
  constexpr int together = 4;  // sums that do not wait for each other
  int64_t at = 0;
  for (; at + together * size <= width; at += together * size) {
    Vec<T> sums[together];
#pragma GCC unroll 4
    for (int k = 0; k < together; ++k) sums[k] = Vec<T>::loadu(out + at + k * size);
    for (int64_t row = 0; row < n; ++row) {
      const Vec<T> weight(weights[row]);
#pragma GCC unroll 4
      for (int k = 0; k < together; ++k)
        sums[k] = at::vec::fmadd(weight, Vec<T>::loadu(v + row * width + at + k * size), sums[k]);
    }
#pragma GCC unroll 4
    for (int k = 0; k < together; ++k) sums[k].store(out + at + k * size);
  }
  for_vectors<T>(width - at, [&](int64_t k, int64_t count) {
    auto sum = load(out + at + k, count);
    for (int64_t row = 0; row < n; ++row)
      sum = at::vec::fmadd(Vec<T>(weights[row]), load(v + row * width + at + k, count), sum);
    sum.store(out + at + k, static_cast<int>(count));
  });
}

// Computes attention of few new tokens for the query heads that share head `head` of the keys. q, out: [group * count,
// width], the queries of a head one after the other. scores: scratch memory.
template <class T>
void attend_to_pages(const Pool<T>& keys, const Pool<T>& values, const CachedRow& row, int64_t head, const T* q, T* out,
                     int64_t group, double scale, int64_t window, std::vector<T>& scores) {
  const int64_t first = first_key(row.past, window), end = row.past + row.count, total = end - first;
  const int64_t width = keys.width, queries = group * row.count;
  scores.resize(static_cast<size_t>(queries * total));
  keys.runs(row, head, first, end, [&](int64_t p, int64_t n, const T* k) {
    few_rows<T>(scores.data() + p - first, total, q, width, k, width, queries, n, width, T(0), static_cast<T>(scale));
  });
  for (int64_t r = 0; r < queries; ++r) {
    const int64_t position = row.past + r % row.count, from = first_key(position, window) - first;
    T* p = scores.data() + r * total;
    const int64_t n = position + 1 - first - from;
    const T top = max_of(p + from, n);
    const T sum = sumexp_of(p + from, top, n);
    exp_row(p + from, p + from, top, T(1) / sum, n);
    std::fill(p, p + from, T(0));
    std::fill(p + from + n, p + total, T(0));
  }
  std::fill_n(out, queries * width, T(0));
  values.runs(row, head, first, end, [&](int64_t p, int64_t n, const T* v) {
    for (int64_t r = 0; r < queries; ++r) {
      add_weighted(out + r * width, scores.data() + r * total + p - first, v, n, width);
    }
  });
}

// Computes attention of many new tokens for one head. q, out: [count, width]. k, v: rows of the positions from `first`
// on.
template <class T>
void attend_in_blocks(const at::Tensor& k, const at::Tensor& v, int64_t first, const CachedRow& row, const at::Tensor& q,
                 at::Tensor out, double scale, int64_t window) {
  for (int64_t begin = 0; begin < row.count; begin += kQueries) {
    const int64_t rows = std::min(kQueries, row.count - begin);
    const int64_t from = first_key(row.past + begin, window) - first, n = row.past + begin + rows - first - from;
    auto s = at::empty({rows, n}, q.options());
    at::addmm_out(s, s, q.narrow(0, begin, rows), k.narrow(0, from, n).t(), 0, scale);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t position = row.past + begin + r, skip = first_key(position, window) - first - from;
      const int64_t kept = position + 1 - first - from - skip;
      T* p = s.data_ptr<T>() + r * n;
      const T top = max_of(p + skip, kept);
      exp_row(p + skip, p + skip, top, T(1) / sumexp_of(p + skip, top, kept), kept);
      std::fill(p, p + skip, T(0));
      std::fill(p + skip + kept, p + n, T(0));
    }
    auto block = out.narrow(0, begin, rows);
    at::mm_out(block, s, v.narrow(0, from, n));
  }
}

// tiles: out, cached keys, cached values, page table, then q, k, v (one tile if args.heads), then the angles of the
// rotation if args.rotary
void cached_attention(Args& t) {
  const CachedAttentionArgs args(t);
  Triple x(t, args.qkv, 4);
  if (const auto [of_q, of_k] = args.heads; of_q)
    x = {x.q.narrow(1, 0, of_q), x.k.narrow(1, of_q, of_k), x.v.narrow(1, of_q + of_k, of_k)};
  const auto angles = args.rotary ? t[t.tiles() - 1] : at::Tensor();
  const auto out = as_bhsd(t[0], args.out), table = t[3];
  const int64_t seq = x.q.size(2), group = x.group();
  dispatch(t[0], [&](auto zero) {
    using T = decltype(zero);
    const Pool<T> keys(t[1]), values(t[2]);
    const RowView<T> q(x.q), k(x.k), v(x.v), o(out);
    const int64_t width = keys.width;
    std::vector<T> scores, buffer(static_cast<size_t>(2 * group * std::max(kFew, seq) * width));
    T *queries = buffer.data(), *attended = queries + group * std::max(kFew, seq) * width;
    for (int64_t b = 0; b < x.q.size(0); ++b) {
      const CachedRow row(table, b, seq, t[1]);
      if (row.count < seq) out.select(0, b).narrow(1, row.count, seq - row.count).zero_();
      const auto rotate = [&](T* rows, int64_t n, int64_t s) {
        if (args.rotary) rotate_rows(rows, angles.data_ptr<T>() + (b * seq + s) * width, n, width);
      };
      for (int64_t head = 0; head < x.k.size(1) && row.count; ++head) {
        for (int64_t s = 0; s < row.count; ++s) {
          T* key = keys.at(row, head, row.past + s);
          k.read(key, b, head, s, width);
          rotate(key, 1, s);
          v.read(values.at(row, head, row.past + s), b, head, s, width);
        }
        for (int64_t member = 0; member < group; ++member) {
          T* rows = queries + member * row.count * width;
          for (int64_t s = 0; s < row.count; ++s) q.read(rows + s * width, b, head * group + member, s, width);
          rotate(rows, row.count, 0);
        }
        if (row.count <= kFew) {
          attend_to_pages(keys, values, row, head, queries, attended, group, args.scale, args.window, scores);
        } else {
          const int64_t first = first_key(row.past, args.window), end = row.past + row.count;
          const auto key = keys.matrix(row, head, first, end, out.options());
          const auto value = values.matrix(row, head, first, end, out.options());
          for (int64_t member = 0; member < group; ++member) {
            const auto rows = [&](T* from) { return at::from_blob(from + member * row.count * width, {row.count, width}, out.options()); };
            attend_in_blocks<T>(key, value, first, row, rows(queries), rows(attended), args.scale, args.window);
          }
        }
        for (int64_t member = 0; member < group; ++member)
          for (int64_t s = 0; s < row.count; ++s)
            o.write(attended + (member * row.count + s) * width, b, head * group + member, s, width);
      }
    }
  });
}

// tiles: positions [batch, seq], last [batch, 1], table
void token_places(Args& t) {
  const TokenPlacesArgs args(t);
  const auto positions = t[0], last = t[1], table = t[2];
  for (int64_t b = 0; b < table.size(0); ++b) {
    const auto* row = table.data_ptr<int64_t>() + b * table.size(1);
    auto* out = positions.data_ptr<int64_t>() + b * positions.size(1);
    const int64_t end = std::max<int64_t>(row[kCount] - 1, 0);
    for (int64_t s = 0; s < positions.size(1); ++s) out[s] = std::min(row[kPast] + std::min(s, end), args.below - 1);
    last.data_ptr<int64_t>()[b] = row[kCount] > 0 ? row[kCount] - 1 : -1;
  }
}

NNTILE_KERNEL(cached_attention, cached_attention);
NNTILE_KERNEL(token_places, token_places);

}  // namespace
}  // namespace nntile
