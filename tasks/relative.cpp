// Products with embeddings of relative positions, added to tiles of attention scores [.., seq, key], and the gradient.
//
// The row along `relative` depends only on key - seq: a tile needs seq + key - 1 consecutive entries of the index, and
// a query's keys use neighbouring entries. If each distance has its own row, a query reads neighbouring products too.
#include <algorithm>
#include <vector>

#include "common.h"
#include "relative_args.h"

namespace nntile {
namespace {

constexpr int64_t BLOCK = 16;  // keys of a block; consecutive queries read the same cache lines of these keys' products

// Sizes of a tile of scores, and for each distance key - query the row along `relative`.
struct Pairs {
  Pairs(const at::Tensor& scores, const at::Tensor& index, int64_t first, int64_t relative)
      : seq(scores.size(-2)), key(scores.size(-1)), relative(relative), matrices(scores.numel() / (seq * key)),
        rows(seq + key - 1), steps(rows.size()) {
    const auto* from = index.data_ptr<int64_t>() + first - (seq - 1);
    for (size_t t = rows.size(); t-- > 0;) {
      rows[t] = static_cast<int32_t>(from[t]);
      steps[t] = t + 1 < rows.size() && rows[t + 1] == rows[t] + 1 ? steps[t + 1] + 1 : 0;
    }
  }

  // Calls neighbours(query, row of its first key) if consecutive keys have consecutive rows, else each(query, rows).
  template <class Neighbours, class Each>
  void for_queries(Neighbours neighbours, Each each) const {
    for (int64_t query = 0; query < matrices * seq; ++query) {
      const int64_t t = seq - 1 - query % seq;
      if (steps[t] >= key - 1) neighbours(query, rows[t]);
      else each(query, rows.data() + t);
    }
  }

  // Calls f(offset of the pair in the scores, offset of its product) for all pairs, a block of keys at a time.
  template <class F>
  void for_keys(F f) const {
    for (int64_t matrix = 0; matrix < matrices; ++matrix)
      for (int64_t from = 0; from < key; from += BLOCK)
        for (int64_t s = 0; s < seq; ++s)
          for (int64_t k = from; k < std::min(from + BLOCK, key); ++k)
            f((matrix * seq + s) * key + k, (matrix * key + k) * relative + rows[seq - 1 - s + k]);
  }

  int64_t seq, key, relative, matrices;
  std::vector<int32_t> rows;
  std::vector<int64_t> steps;  // length of the run of consecutive rows from this entry on
};

// tiles: scores (RW), index, products of queries [.., seq, relative], products of keys [.., key, relative]
void relative_scores(Args& t) {
  const RelativeArgs args(t);
  const auto scores = t[0];
  const Pairs pairs(scores, t[1], args.first, t[2].size(-1));
  const int64_t keys = pairs.key, relative = pairs.relative;
  dispatch(scores, [&](auto zero) {
    using T = decltype(zero);
    T* __restrict y = scores.data_ptr<T>();
    if (args.queries) {
      const T* q = t[2].data_ptr<T>();
      pairs.for_queries(
          [&](int64_t query, int64_t row) {
            for (int64_t k = 0; k < keys; ++k) y[query * keys + k] += q[query * relative + row + k];
          },
          [&](int64_t query, const int32_t* rows) {
            for (int64_t k = 0; k < keys; ++k) y[query * keys + k] += q[query * relative + rows[k]];
          });
    }
    if (args.keys) {
      const T* p = t[2 + args.queries].data_ptr<T>();
      pairs.for_keys([&](int64_t pair, int64_t product) { y[pair] += p[product]; });
    }
  });
}

// tiles: [gradient of the queries' products (ACC)], [gradient of the keys' products (ACC)], gradient of the scores,
// index
void relative_scores_grad(Args& t) {
  const RelativeArgs args(t);
  const size_t sums = args.queries + args.keys;
  const auto dy = t[sums];
  const Pairs pairs(dy, t[sums + 1], args.first, t[0].size(-1));
  const int64_t keys = pairs.key, relative = pairs.relative;
  for (size_t number = 0; number < sums; ++number)
    if (!t.accumulates(number)) t[number].zero_();
  dispatch(dy, [&](auto zero) {
    using T = decltype(zero);
    const T* grad = dy.data_ptr<T>();
    if (args.queries) {
      T* __restrict q = t[0].data_ptr<T>();
      pairs.for_queries(
          [&](int64_t query, int64_t row) {
            for (int64_t k = 0; k < keys; ++k) q[query * relative + row + k] += grad[query * keys + k];
          },
          [&](int64_t query, const int32_t* rows) {
            for (int64_t k = 0; k < keys; ++k) q[query * relative + rows[k]] += grad[query * keys + k];
          });
    }
    if (args.keys) {
      T* p = t[args.queries].data_ptr<T>();
      pairs.for_keys([&](int64_t pair, int64_t product) { p[product] += grad[pair]; });
    }
  });
}

NNTILE_KERNEL(relative_scores, relative_scores);
NNTILE_KERNEL(relative_scores_grad, relative_scores_grad);

}  // namespace
}  // namespace nntile
