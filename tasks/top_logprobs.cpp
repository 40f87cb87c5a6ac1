// Log-probabilities of chosen and of most probable tokens (top_logprobs.py), on CPU workers.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "common.h"
#include "page_table.h"
#include "top_logprobs_args.h"

namespace nntile {
namespace {

// Returns log(sum(exp(x))) of n logits.
template <class T>
double log_sum_exp(const T* x, int64_t n) {
  const double top = *std::max_element(x, x + n);
  return top + std::log(std::accumulate(x, x + n, 0.0, [&](double sum, T value) { return sum + std::exp(value - top); }));
}

// Sets order[0 .. count - 1] to the indices of the largest of n logits, in descending order; nan counts as -inf.
template <class T>
void largest(const T* x, int64_t n, int64_t count, std::vector<int64_t>& order) {
  const auto value = [&](int64_t k) { return x[k] != x[k] ? -std::numeric_limits<T>::infinity() : x[k]; };
  order.resize(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](int64_t a, int64_t b) {
    return value(a) > value(b) || (value(a) == value(b) && a < b);
  });
}

// tiles: values [batch, ring, rank], ids, logits, chosen, [table]; without a table, the axis ring is seq
void top_logprobs(Args& t) {
  const TopLogProbsArgs args(t);
  const auto values = t[0], ids = t[1], logits = t[2], chosen = t[3];
  const auto table = args.paged ? t[4] : at::Tensor();
  const int64_t vocab = logits.size(-1), rows = logits.numel() / vocab, ring = chosen.numel() / rows, ranks = ids.size(-1);
  std::vector<int64_t> order;
  dispatch(logits, [&](auto zero) {
    using T = decltype(zero);
    for (int64_t b = 0; b < rows; ++b) {
      int64_t column = 0;
      if (args.paged) {
        const auto* row = table.data_ptr<int64_t>() + b * table.size(1);
        if (row[kCount] == 0) continue;
        column = (row[kPast] + (args.advanced ? 0 : row[kCount])) % ring;
      }
      const int64_t place = b * ring + column, token = chosen.data_ptr<int64_t>()[place];
      if (token < 0) continue;
      const T* x = logits.data_ptr<T>() + b * vocab;
      const double sum = log_sum_exp(x, vocab);
      largest(x, args.tokens, ranks - 1, order);
      for (int64_t r = 0; r < ranks; ++r) {
        const int64_t id = r == 0 ? token : order[static_cast<size_t>(r) - 1];
        ids.data_ptr<int64_t>()[place * ranks + r] = id;
        values.data_ptr<T>()[place * ranks + r] = static_cast<T>(x[id] - sum);
      }
    }
  });
}

NNTILE_KERNEL(top_logprobs, top_logprobs);

}  // namespace
}  // namespace nntile
