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
#include "relative_pairs.h"

namespace nntile::relative {
namespace {

constexpr int64_t kRows = 64;  // queries of a block; the block's scores fit into the cache

// One head of the positions [first, first + count) of a row of the batch.
struct Part {
  int64_t batch, head, first, count;

  at::Tensor of(const at::Tensor& x) const {  // x: [batch, heads, positions, ..]
    return x.select(0, batch).select(0, head).narrow(0, first, count);
  }
  template <class T>
  T* begin(const at::Tensor& x) const {
    return x.data_ptr<T>() + batch * x.stride(0) + head * x.stride(1) + first * x.stride(2);
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

  // Combines a block of scores of the part with its products, first with those of queries.
  template <class Score, class Terms>
  void combine(const Part& part, const Block& block, const BlockScores<Score>& scores, const Terms& terms) const {
    const auto head = [&](const at::Tensor& x) {
      return HeadProducts<typename Terms::Value>{part.begin<std::remove_const_t<Score>>(x), x.stride(2)};
    };
    if (queries.defined()) block.of_queries(head(queries), scores, terms);
    if (keys.defined()) block.of_keys(head(keys), scores, terms);
  }
};

// The terms of one part's scores for HeadAttention.
template <class T>
struct Terms {
  const Products* products = nullptr;
  const Products* sums = nullptr;  // gradients of the products
  const int32_t* origin = nullptr;
  Part part{};
  const std::vector<T>* bias = nullptr;  // of the padding, or empty
  const ScoresDropout* dropout = nullptr;

  void add(T* s, int64_t step, int64_t first, int64_t rows, int64_t from, int64_t end) const {
    products->combine(part, Block{origin, first, rows, from, end}, BlockScores<T>{s, step}, AddTerms<T>{T(1)});
    for (int64_t row = 0; row < rows && !bias->empty(); ++row)
      add_rows(s + row * step, s + row * step, bias->data() + from, end - from);
  }

  void collect(const T* ds, int64_t step, int64_t first, int64_t rows, int64_t from, int64_t end) const {
    sums->combine(part, Block{origin, first, rows, from, end}, BlockScores<const T>{ds, step}, SumTerms<T>());
  }

  void drop(T* p, int64_t query, int64_t from, int64_t keys) const {
    if (dropout) dropout->apply(p, part.batch, part.head, part.first + query, part.first + from, keys);
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
  // t: the task's tiles
  Scores(const Args& t, const Triple& x, const Products& products, const at::Tensor& index, const PairMask& mask,
         double scale)
      : x_(x), products_(products), index_(index), mask_(mask), scale_(scale),
        buffer_(at::empty({2, kRows * x.q.size(2)}, x.q.options())),
        bias_(mask.padding.defined() ? static_cast<size_t>(x.q.size(2)) : 0) {
    if (mask.dropout) dropout_.emplace(mask, t);
  }

  // Returns the terms for HeadAttention. sums: gradients of the products, if they are computed.
  Terms<T> terms(const Part& part, const Products* sums = nullptr) const {
    return {&products_, sums, index_.origin(), part, &bias_, dropout_ ? &*dropout_ : nullptr};
  }

  // Returns whether HeadAttention can compute the part: without a block of keys that are all padding. Reads the padding
  // of the part's row of the batch.
  bool plain(const Part& part) {
    if (bias_.empty()) return true;
    padding_bias(mask_.padding, part.batch, bias_);
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
      products_.combine(part, Block{index_.origin(), first, rows, 0, part.count}, BlockScores<T>{data, part.count},
                        AddTerms<T>{static_cast<T>(scale_)});
      for (int64_t row = 0; row < rows && !bias_.empty(); ++row)
        add_rows(data + row * part.count, data + row * part.count, bias_.data(), part.count);
      f(s, first, rows);
    }
  }

  // Multiplies the rows of probabilities p of the part's queries from `first` on by the factors of dropout.
  void drop(const at::Tensor& p, const Part& part, int64_t first) const {
    for (int64_t row = 0; row < p.size(0); ++row)
      terms(part).drop(p.data_ptr<T>() + row * p.size(1), first + row, 0, p.size(1));
  }

  at::Tensor block(int64_t number, int64_t rows, int64_t keys) const {
    return buffer_.select(0, number).narrow(0, 0, rows * keys).view({rows, keys});
  }

 private:
  const Triple& x_;
  const Products& products_;
  Index index_;
  const PairMask& mask_;
  double scale_;
  at::Tensor buffer_;
  std::vector<T> bias_;
  std::optional<ScoresDropout> dropout_;
};

template <class T>
HeadRows<T> rows_of(const at::Tensor& x, const Part& part) {
  return {part.begin<std::remove_const_t<T>>(x), x.stride(2), x.stride(3)};
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
    Scores<T> scores(t, x, products, t[2 + x.count], mask, args.attention.scale);
    const auto fused = [&](const Part& part) {
      auto& head = begin_head<T>(x, part, false);
      head.forward(rows_of<const T>(x.q, part), rows_of<T>(out, part), part.begin<T>(lse),
                   static_cast<T>(args.attention.scale), scores.terms(part));
    };
    const auto one = [&](const Part& part) {
      if (scores.plain(part)) return fused(part);
      const auto v = part.of(x.v), to = part.of(out);
      T* of_rows = part.begin<T>(lse);
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
        scores.drop(s, part, first);
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
  dispatch(lse, [&](auto zero) {
    using T = decltype(zero);
    Scores<T> scores(t, x, products, t[index], mask, a.scale);
    const auto fused = [&](const Part& part) {
      auto& head = begin_head<T>(x, part, true);
      head.backward(rows_of<const T>(x.q, part), rows_of<const T>(d_out, part), rows_of<const T>(out, part),
                    part.begin<T>(lse), rows_of<T>(grads.q, part), static_cast<T>(a.scale),
                    scores.terms(part, &sums));
      head.end(rows_of<T>(grads.k, part), rows_of<T>(grads.v, part), false);
    };
    const auto one = [&](const Part& part) {
      if (scores.plain(part)) return fused(part);
      const auto q = part.of(x.q), k = part.of(x.k), v = part.of(x.v), g = part.of(d_out);
      auto dq = part.of(grads.q), dk = part.of(grads.k), dv = part.of(grads.v);
      const auto deltas = g.mul(part.of(out)).sum(-1);
      const T *lses = part.begin<T>(lse), *of_rows = deltas.template data_ptr<T>();
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
          scores.drop(factors, part, first);
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
