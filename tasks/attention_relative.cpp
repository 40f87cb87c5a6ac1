// Attention with relative positions (attention_relative.py). Kernels compute the scores of a block of queries of one
// sequence and one head at a time, and add the products with embeddings of distances. A sequence is a segment of a bin,
// or a row of the batch.
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sum.h>

#include "attention_cpu.h"
#include "attention_head.h"
#include "attention_relative_args.h"

namespace nntile::relative {
namespace {

constexpr int64_t kRows = 64;  // queries of a block; the block's scores fit into the cache
constexpr int64_t kKeys = 16;  // consecutive queries read the same cache lines of these keys' products

// One head of the positions [first, first + count) of a row of the batch.
struct Part {
  int64_t batch, head, first, count;

  at::Tensor of(const at::Tensor& x) const {  // x: [batch, heads, positions, ..]
    return x.select(0, batch).select(0, head).narrow(0, first, count);
  }
};

// Products of queries and of keys with embeddings of distances, or the gradients of these products. Each tensor is
// [batch, heads, positions, relative], or undefined if the operator lacks the product.
struct Products {
  at::Tensor queries, keys;

  Products(const Args& t, bool of_queries, bool of_keys, const Order& order, size_t first) {
    if (of_queries) queries = as_bhsd(t[first++], order);
    if (of_keys) keys = as_bhsd(t[first], order);
  }
  size_t count() const { return static_cast<size_t>(queries.defined()) + static_cast<size_t>(keys.defined()); }
};

// A block of pairs of one part: queries [first, first + rows) and keys [from, end). origin: entry of the index for
// distance 0.
struct Block {
  const int64_t* origin;
  int64_t first, rows, from, end;

  // Calls f(row, key, product) for all pairs, first with the products of queries, then with those of keys.
  template <class T, class F>
  void for_pairs(const Products& products, const Part& part, F f) const {
    if (products.queries.defined()) {
      const auto own = part.of(products.queries);
      visit(own.data_ptr<T>() + first * own.stride(0), own.stride(0), 0, f);
    }
    if (products.keys.defined()) {
      const auto own = part.of(products.keys);
      visit(own.data_ptr<T>(), 0, own.stride(0), f);
    }
  }

 private:
  template <class T, class F>
  void visit(T* data, int64_t row_step, int64_t key_step, F f) const {
    for (int64_t begin = from; begin < end; begin += kKeys) {
      const int64_t last = std::min(begin + kKeys, end) - 1;
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t* index = origin - (first + row);
        T* x = data + row * row_step;
        if (index[last] - index[begin] == last - begin) {  // neighbouring distances have neighbouring products
          x += index[begin] - begin;
          for (int64_t key = begin; key <= last; ++key) f(row, key, x[key * (key_step + 1)]);
        } else {
          for (int64_t key = begin; key <= last; ++key) f(row, key, x[key * key_step + index[key]]);
        }
      }
    }
  }
};

// The terms of one part's scores for HeadAttention.
template <class T>
struct Terms {
  const Products* products = nullptr;
  const Products* sums = nullptr;  // gradients of the products
  const int64_t* origin = nullptr;
  Part part{};
  const std::vector<T>* bias = nullptr;  // of the padding, or empty

  void add(T* s, int64_t step, int64_t first, int64_t rows, int64_t from, int64_t end) const {
    const Block block{origin, first, rows, from, end};
    block.for_pairs<T>(
        *products, part, [&](int64_t row, int64_t key, T product) { s[row * step + key - from] += product; });
    for (int64_t row = 0; row < rows && !bias->empty(); ++row)
      add_rows(s + row * step, s + row * step, bias->data() + from, end - from);
  }

  void collect(const T* ds, int64_t step, int64_t first, int64_t rows, int64_t from, int64_t end) const {
    const Block block{origin, first, rows, from, end};
    block.for_pairs<T>(
        *sums, part, [&](int64_t row, int64_t key, T& sum) { sum += ds[row * step + key - from]; });
  }
};

// Calls f(part) for each sequence and head, and outside(part) for the positions outside all segments.
template <class F, class Outside>
void for_parts(const PairMask& mask, const at::Tensor& q, F f, Outside outside) {
  const int64_t positions = q.size(2);
  const auto for_heads = [&](int64_t batch, int64_t from, int64_t to, auto body) {
    for (int64_t head = 0; from < to && head < q.size(1); ++head) body(Part{batch, head, from, to - from});
  };
  if (!mask.segments.defined()) {
    for (int64_t batch = 0; batch < q.size(0); ++batch) for_heads(batch, 0, positions, f);
    return;
  }
  const auto* offsets = mask.segments.data_ptr<int64_t>();
  const auto last = mask.segments.numel() - 1;
  const auto at = [&](int64_t number) { return std::min(offsets[number], positions); };
  for (int64_t k = 0; k < last; ++k) for_heads(0, at(k), at(k + 1), f);
  for_heads(0, 0, at(0), outside);
  for_heads(0, at(last), positions, outside);
}

// Scores of blocks of queries of one part.
template <class T>
class Scores {
 public:
  Scores(const Triple& x, const Products& products, const at::Tensor& index, const PairMask& mask, double scale)
      : x_(x), products_(products), origin_(index.data_ptr<int64_t>() + index.numel() / 2), mask_(mask), scale_(scale),
        buffer_(at::empty({2, kRows * x.q.size(2)}, x.q.options())),
        bias_(mask.padding.defined() ? static_cast<size_t>(x.q.size(2)) : 0) {}

  // Returns the terms for HeadAttention. sums: gradients of the products, if they are computed.
  Terms<T> terms(const Part& part, const Products* sums = nullptr) const {
    return {&products_, sums, origin_, part, &bias_};
  }

  // Returns whether HeadAttention can compute the part: without dropout, and without a block of keys that are all
  // padding. Reads the padding of the part's row of the batch.
  bool plain(const Part& part) {
    if (!bias_.empty()) padding_bias(mask_.padding, part.batch, bias_);
    if (mask_.dropout || bias_.empty()) return !mask_.dropout;
    for (int64_t from = 0; from < part.count; from += kHeadKeys) {
      const auto begin = bias_.begin() + from, end = bias_.begin() + std::min(from + kHeadKeys, part.count);
      if (std::find(begin, end, T(0)) == end) return false;
    }
    return scale_ > 0;  // a masked score stays -inf
  }

  // Calls f(scaled scores [rows, keys], first query, number of rows) for each block of queries of the part.
  template <class F>
  void for_blocks(const Part& part, F f) {
    const auto q = part.of(x_.q), k = part.of(x_.k);
    for (int64_t first = 0; first < part.count; first += kRows) {
      const int64_t rows = std::min(kRows, part.count - first);
      auto s = block(0, rows, part.count);
      at::addmm_out(s, s, q.narrow(0, first, rows), k.t(), 0, scale_);
      T* data = s.template data_ptr<T>();
      const Block pairs{origin_, first, rows, 0, part.count};
      pairs.for_pairs<T>(products_, part, [&](int64_t row, int64_t key, T product) {
        data[row * part.count + key] += static_cast<T>(scale_) * product;
      });
      for (int64_t row = 0; row < rows && !bias_.empty(); ++row)
        add_rows(data + row * part.count, data + row * part.count, bias_.data(), part.count);
      f(s, first, rows);
    }
  }

  at::Tensor block(int64_t number, int64_t rows, int64_t keys) const {
    return buffer_.select(0, number).narrow(0, 0, rows * keys).view({rows, keys});
  }

 private:
  const Triple& x_;
  const Products& products_;
  const int64_t* origin_;
  const PairMask& mask_;
  double scale_;
  at::Tensor buffer_;
  std::vector<T> bias_;
};

// Multiplies rows of probabilities of a part by the factors of dropout.
template <class T>
void drop(const at::Tensor& p, const PairMask& mask, const Args& t, const Part& part, int64_t first) {
  const ScoresDropout dropout(mask, t);
  for (int64_t row = 0; row < p.size(0); ++row)
    dropout.apply(p.data_ptr<T>() + row * p.size(1), part.batch, part.head, part.first + first + row, part.first,
                  p.size(1));
}

template <class T>
HeadRows<T> rows_of(const at::Tensor& x, const Part& part) {
  return rows_of_head<T>(x.narrow(2, part.first, part.count), part.batch, part.head);
}

// Returns the buffers of this thread, prepared for the keys and values of a part; see HeadAttention::begin.
template <class T>
HeadAttention<T, Terms<T>>& begin_head(const Triple& x, const Part& part, bool gradients) {
  auto& head = buffers_of_head<T, Terms<T>>();
  const HeadSizes sizes{part.count, part.count, x.q.size(3), false};
  head.begin(sizes, rows_of<const T>(x.k, part), rows_of<const T>(x.v, part), gradients);
  return head;
}

// tiles: out, lse, q/k/v, index, products of queries, products of keys, padding or segments, row numbers
void attention_relative(Args& t) {
  const RelativeAttentionArgs args(t);
  const auto out = as_bhsd(t[0], args.attention.out), lse = t[1];
  const Triple x(t, args.attention.qkv, 2);
  const Products products(t, args.queries, args.keys, args.order, 3 + x.count);
  const PairMask mask(t, false, args.attention.limits, 3 + x.count + products.count());
  dispatch(lse, [&](auto zero) {
    using T = decltype(zero);
    Scores<T> scores(x, products, t[2 + x.count], mask, args.attention.scale);
    const auto fused = [&](const Part& part) {
      auto& head = begin_head<T>(x, part, false);
      head.forward(rows_of<const T>(x.q, part), rows_of<T>(out, part), part.of(lse).template data_ptr<T>(),
                   static_cast<T>(args.attention.scale), scores.terms(part));
    };
    const auto one = [&](const Part& part) {
      if (scores.plain(part)) return fused(part);
      const auto v = part.of(x.v), to = part.of(out);
      T* of_rows = part.of(lse).template data_ptr<T>();
      scores.for_blocks(part, [&](const at::Tensor& s, int64_t first, int64_t rows) {
        const auto sums = at::empty({rows, 1}, lse.options());
        for (int64_t row = 0; row < rows; ++row) {
          T* p = s.data_ptr<T>() + row * part.count;
          const T top = max_of(p, part.count), none = -std::numeric_limits<T>::infinity();
          if (top > none) exp_row(p, p, top, T(1), part.count);
          else std::fill(p, p + part.count, T(0));
          const T sum = top > none ? sum_of(p, part.count) : T(1);
          sums.data_ptr<T>()[row] = sum;
          of_rows[first + row] = top > none ? top + std::log(sum) : T(0);
        }
        if (mask.dropout) drop<T>(s, mask, t, part, first);
        to.narrow(0, first, rows).copy_(s.mm(v).div_(sums));
      });
    };
    for_parts(mask, x.q, one, [&](const Part& part) {
      part.of(out).zero_();
      part.of(lse).zero_();
    });
  });
}

// tiles: do, out, lse, q/k/v, dq/dk/dv, index, products of queries and of keys, their gradients, padding or segments,
// row numbers
void attention_relative_grad(Args& t) {
  const RelativeAttentionGradArgs args(t);
  const auto& a = args.attention;
  const auto d_out = as_bhsd(t[0], a.d_out), out = as_bhsd(t[1], a.out), lse = t[2];
  const Triple x(t, a.qkv, 3), grads(t, a.grads, 3 + x.count);
  const size_t index = 3 + x.count + grads.count;
  const Products products(t, args.queries, args.keys, args.order, index + 1);
  const Products sums(t, args.queries, args.keys, args.order, index + 1 + products.count());
  const PairMask mask(t, false, a.limits, index + 1 + 2 * products.count());
  clear(t, 3 + x.count, grads.count);
  clear(t, index + 1 + products.count(), sums.count());
  const auto deltas = d_out.mul(out).sum(-1).contiguous();
  dispatch(lse, [&](auto zero) {
    using T = decltype(zero);
    Scores<T> scores(x, products, t[index], mask, a.scale);
    const auto fused = [&](const Part& part) {
      auto& head = begin_head<T>(x, part, true);
      head.backward(rows_of<const T>(x.q, part), rows_of<const T>(d_out, part), rows_of<const T>(out, part),
                    part.of(lse).template data_ptr<T>(), rows_of<T>(grads.q, part), static_cast<T>(a.scale),
                    scores.terms(part, &sums));
      head.end(rows_of<T>(grads.k, part), rows_of<T>(grads.v, part), false);
    };
    const auto one = [&](const Part& part) {
      if (scores.plain(part)) return fused(part);
      const auto q = part.of(x.q), k = part.of(x.k), v = part.of(x.v), g = part.of(d_out);
      auto dq = part.of(grads.q), dk = part.of(grads.k), dv = part.of(grads.v);
      const T *lses = part.of(lse).template data_ptr<T>(), *of_rows = part.of(deltas).template data_ptr<T>();
      scores.for_blocks(part, [&](const at::Tensor& p, int64_t first, int64_t rows) {
        for (int64_t row = 0; row < rows; ++row) {
          T* of_row = p.data_ptr<T>() + row * part.count;
          exp_row(of_row, of_row, lses[first + row], T(1), part.count);
        }
        auto ds = scores.block(1, rows, part.count);
        const auto go = g.narrow(0, first, rows);
        at::addmm_out(ds, ds, go, v.t(), 0, 1);
        auto weights = p;
        if (mask.dropout) {
          const auto factors = at::ones_like(p);
          drop<T>(factors, mask, t, part, first);
          weights = p.mul(factors);
          ds.mul_(factors);
        }
        at::addmm_out(dv, dv, weights.t(), go);
        T* of_scores = ds.template data_ptr<T>();
        for (int64_t row = 0; row < rows; ++row) {
          const Vec<T> delta(of_rows[first + row]), scale(static_cast<T>(a.scale));
          T* to = of_scores + row * part.count;
          const T* from = p.data_ptr<T>() + row * part.count;
          for_vectors<T>(part.count, [&](int64_t k, int64_t n) {
            (load(from + k, n) * (load(to + k, n) - delta) * scale).store(to + k, static_cast<int>(n));
          });
        }
        scores.terms(part, &sums).collect(of_scores, part.count, first, rows, 0, part.count);
        auto of_queries = dq.narrow(0, first, rows);
        at::addmm_out(of_queries, of_queries, ds, k);
        at::addmm_out(dk, dk, ds.t(), q.narrow(0, first, rows));
      });
    };
    for_parts(mask, x.q, one, [](const Part&) {});
  });
}

NNTILE_KERNEL(attention_relative, attention_relative);
NNTILE_KERNEL(attention_relative_grad, attention_relative_grad);

}  // namespace
}  // namespace nntile::relative
