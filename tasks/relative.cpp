// Products with embeddings of relative positions, added to tiles of attention scores [.., seq, key], and the gradient.
//
// The row along `relative` depends on key - seq alone: the index's part that a tile needs is a list of seq + key - 1
// rows, along which a query's keys are neighbours.
#include <vector>

#include "common.h"
#include "relative_args.h"

namespace nntile {
namespace {

// Sizes of a tile of scores, and the rows of its pairs.
struct Pairs {
  Pairs(const at::Tensor& scores, const at::Tensor& index, int64_t first, int64_t relative)
      : seq(scores.size(-2)), key(scores.size(-1)), relative(relative), matrices(scores.numel() / (seq * key)),
        rows(seq + key - 1), ends(key) {
    const auto* from = index.data_ptr<int64_t>() + first - (seq - 1);
    for (size_t t = 0; t < rows.size(); ++t) rows[t] = static_cast<int32_t>(from[t]);
    for (int64_t k = 0; k < key; ++k) ends[k] = static_cast<int32_t>(k * relative);
  }

  // Of a query: the rows of its keys.
  const int32_t* of(int64_t query) const { return rows.data() + seq - 1 - query; }

  int64_t seq, key, relative, matrices;
  std::vector<int32_t> rows;
  std::vector<int32_t> ends;  // of each key: where its rows begin
};

// tiles: scores (RW), index, products of queries [.., seq, relative], products of keys [.., key, relative]
void relative_scores(Args& t) {
  const RelativeArgs args(t);
  const auto scores = t[0];
  const Pairs pairs(scores, t[1], args.first, t[2].size(-1));
  const auto queries = args.queries ? t[2] : at::Tensor(), keys = args.keys ? t[2 + args.queries] : at::Tensor();
  dispatch(scores, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = pairs.key;
    for (int64_t row = 0; row < pairs.matrices * pairs.seq; ++row) {
      const int32_t *at = pairs.of(row % pairs.seq), *ends = pairs.ends.data();
      T* __restrict y = scores.data_ptr<T>() + row * n;
      if (args.queries) {
        const T* q = queries.data_ptr<T>() + row * pairs.relative;
        for (int64_t k = 0; k < n; ++k) y[k] += q[at[k]];
      }
      if (args.keys) {
        const T* p = keys.data_ptr<T>() + row / pairs.seq * n * pairs.relative;
        for (int64_t k = 0; k < n; ++k) y[k] += p[ends[k] + at[k]];
      }
    }
  });
}

// tiles: gradient of the queries' products (ACC), of the keys' (ACC), dy, index
void relative_scores_grad(Args& t) {
  const RelativeArgs args(t);
  const size_t sums = args.queries + args.keys;
  const auto dy = t[sums];
  const Pairs pairs(dy, t[sums + 1], args.first, t[0].size(-1));
  for (size_t number = 0; number < sums; ++number)
    if (!t.accumulates(number)) t[number].zero_();
  dispatch(dy, [&](auto zero) {
    using T = decltype(zero);
    T* dq = args.queries ? t[0].data_ptr<T>() : nullptr;
    T* dp = args.keys ? t[args.queries].data_ptr<T>() : nullptr;
    const int64_t n = pairs.key;
    for (int64_t row = 0; row < pairs.matrices * pairs.seq; ++row) {
      const int32_t *at = pairs.of(row % pairs.seq), *ends = pairs.ends.data();
      const T* grad = dy.data_ptr<T>() + row * n;
      if (dq) {
        T* to = dq + row * pairs.relative;
        for (int64_t k = 0; k < n; ++k) to[at[k]] += grad[k];
      }
      if (dp) {
        T* to = dp + row / pairs.seq * n * pairs.relative;
        for (int64_t k = 0; k < n; ++k) to[ends[k] + at[k]] += grad[k];
      }
    }
  });
}

NNTILE_KERNEL(relative_scores, relative_scores);
NNTILE_KERNEL(relative_scores_grad, relative_scores_grad);

}  // namespace
}  // namespace nntile
