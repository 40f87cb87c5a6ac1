// Attention with relative positions (attention_relative.py): scores of some queries of one sequence and one head at a
// time, plus products with embeddings of distances. A sequence is a segment of a bin, or a row of the batch.
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sum.h>

#include "attention_cpu.h"
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

// Products of queries and of keys with embeddings of distances, or the gradients of these products: undefined, or
// [batch, heads, positions, relative].
struct Products {
  at::Tensor queries, keys;

  Products(const Args& t, bool of_queries, bool of_keys, const Order& order, size_t first) {
    if (of_queries) queries = as_bhsd(t[first++], order);
    if (of_keys) keys = as_bhsd(t[first], order);
  }
  size_t count() const { return static_cast<size_t>(queries.defined()) + static_cast<size_t>(keys.defined()); }

  // Calls f(row of a block of scores, key, product) for all pairs of the queries [first, first + rows) and all keys of
  // a part, first with the products of queries, then with those of keys. origin: entry of the index for distance 0.
  template <class T, class F>
  void for_pairs(const Part& part, const int64_t* origin, int64_t first, int64_t rows, F f) const {
    const auto visit = [&](const at::Tensor& x, bool of_keys) {
      if (!x.defined()) return;
      const auto own = part.of(x);
      T* data = own.data_ptr<T>();
      const int64_t step = own.stride(0);
      for (int64_t from = 0; from < part.count; from += kKeys)
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t* index = origin - (first + row);
          for (int64_t key = from; key < std::min(from + kKeys, part.count); ++key)
            f(row, key, data[(of_keys ? key : first + row) * step + index[key]]);
        }
    };
    visit(queries, false);
    visit(keys, true);
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

  const int64_t* origin() const { return origin_; }

  // Calls f(scaled scores [rows, keys], first query, number of rows) for each block of queries of the part.
  template <class F>
  void for_blocks(const Part& part, F f) {
    const auto q = part.of(x_.q), k = part.of(x_.k);
    if (!bias_.empty()) padding_bias(mask_.padding, part.batch, bias_);
    for (int64_t first = 0; first < part.count; first += kRows) {
      const int64_t rows = std::min(kRows, part.count - first);
      auto s = block(0, rows, part.count);
      at::addmm_out(s, s, q.narrow(0, first, rows), k.t(), 0, scale_);
      T* data = s.template data_ptr<T>();
      products_.template for_pairs<T>(part, origin_, first, rows, [&](int64_t row, int64_t key, T product) {
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
    const auto one = [&](const Part& part) {
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
    const auto one = [&](const Part& part) {
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
        sums.template for_pairs<T>(part, scores.origin(), first, rows, [&](int64_t row, int64_t key, T& sum) {
          sum += of_scores[row * part.count + key];
        });
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
