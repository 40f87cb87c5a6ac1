// Sampling of tokens from logits (sample.py), on CPU workers.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "common.h"
#include "page_table.h"
#include "sample.h"
#include "sample_args.h"

namespace nntile {
namespace {

constexpr size_t kSortedFirst = 256;  // number of logits that are sorted first; more are sorted if the draw needs them

// Settings of a row, in the order of SETTINGS.
struct SampleSettings {
  double temperature, top_k, top_p, min_p, penalty;
};

// Sorts indices by descending logits; equal logits keep their order.
struct Falling {
  const std::vector<double>& z;
  bool operator()(int64_t a, int64_t b) const {
    const auto i = static_cast<size_t>(a), j = static_cast<size_t>(b);
    return z[i] > z[j] || (z[i] == z[j] && a < b);
  }
};

// Returns the index of the largest logit, and of several equal logits the first index. Returns kNoToken if a logit is
// nan, or if the largest logit is infinite.
template <class T>
int64_t largest(const T* x, int64_t n) {
  bool has_nan = false;
  for (int64_t k = 0; k < n; ++k) has_nan |= x[k] != x[k];  // without `break`, so that the loop is vectorised
  if (has_nan) return kNoToken;
  const int64_t at = std::max_element(x, x + n) - x;
  return std::isfinite(x[at]) ? at : kNoToken;
}

// Returns the token for the draw u; see `drawn` in sample.py. top: the largest logit, which is finite.
int64_t drawn(const std::vector<double>& z, const SampleSettings& s, double u, double top) {
  const size_t all = z.size(), most = s.top_k > 0 ? std::min(all, static_cast<size_t>(s.top_k)) : all;
  const auto weight = [&](double x) { return std::exp((x - top) / s.temperature); };
  std::vector<int64_t> order(all);
  std::iota(order.begin(), order.end(), 0);
  std::vector<double> sums;  // cumulative weights in the order of descending logits
  // Without top_k, the sum of all weights is known before the logits are sorted.
  double total = most == all ? std::accumulate(z.begin(), z.end(), 0.0, [&](double a, double x) { return a + weight(x); }) : 0;
  for (size_t n = most < all ? most : std::min(all, kSortedFirst);; n = std::min(n * 8, most)) {
    std::nth_element(order.begin(), order.begin() + static_cast<int64_t>(n) - 1, order.end(), Falling{z});
    std::sort(order.begin(), order.begin() + static_cast<int64_t>(n), Falling{z});
    sums.clear();
    double sum = 0;
    for (size_t k = 0; k < n; ++k) sums.push_back(sum += weight(z[static_cast<size_t>(order[k])]));
    if (n == most && most < all) total = sum;
    size_t kept = 0;  // tokens that top_p and min_p keep; if all n are kept, later tokens may be kept too
    while (kept < n && (kept == 0 || (sums[kept - 1] < s.top_p * total && sums[kept] - sums[kept - 1] >= s.min_p))) ++kept;
    const double end = kept < n || n == most ? sums[kept - 1] : s.top_p >= 1 && s.min_p <= 0 ? total : -1;
    const double wanted = u * end;
    if (end < 0 || (n < most && kept == n && sums.back() <= wanted)) continue;
    const auto at = std::upper_bound(sums.begin(), sums.begin() + static_cast<int64_t>(kept), wanted) - sums.begin();
    return order[std::min(static_cast<size_t>(at), kept - 1)];
  }
}

// tiles: drawn [batch, ring], logits, table, [settings, draws], [history], [ids]
void sample(Args& t) {
  const SampleArgs args(t);
  const auto out = t[0], logits = t[1], table = t[2];
  size_t next = 3;
  const auto optional = [&](bool exists) { return exists ? t[next++] : at::Tensor(); };
  const auto settings = optional(!args.greedy), draws = optional(!args.greedy);
  const auto history = optional(args.penalised), ids = optional(args.advances);
  const int64_t batch = table.size(0), vocab = logits.numel() / batch;
  dispatch(logits, [&](auto zero) {
    using T = decltype(zero);
    std::vector<double> z(static_cast<size_t>(args.tokens));
    for (int64_t b = 0; b < batch; ++b) {
      auto* row = table.data_ptr<int64_t>() + b * table.size(1);
      const int64_t at = row[kPast] + row[kCount];
      const T* x = logits.data_ptr<T>() + b * vocab;
      int64_t token = 0;
      if (row[kCount] > 0 && args.greedy) {
        token = largest(x, args.tokens);
      } else if (row[kCount] > 0) {
        std::copy_n(x, args.tokens, z.begin());
        const auto* set = settings.data_ptr<float>() + b * settings.size(1);
        const SampleSettings s{set[0], set[1], set[2], set[3], set[4]};
        if (args.penalised) {
          const auto* known = history.data_ptr<int64_t>() + b * history.size(1);
          std::vector<int64_t> seen(known, known + std::min(at, history.size(1)));
          std::sort(seen.begin(), seen.end());
          seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
          for (const auto k : seen)
            if (k < args.tokens) { auto& v = z[static_cast<size_t>(k)]; v = v > 0 ? v / s.penalty : v * s.penalty; }
        }
        token = largest(z.data(), args.tokens);
        if (s.temperature != 0 && token != kNoToken) {
          const double u = draws.data_ptr<float>()[b * draws.size(1) + std::min(at, draws.size(1) - 1)];
          token = drawn(z, s, u, z[static_cast<size_t>(token)]);
        }
      }
      out.data_ptr<int64_t>()[b * out.size(1) + at % out.size(1)] = token;
      if (!args.advances) continue;
      token = std::max(token, int64_t{0});  // the next pass needs a token that the model has
      ids.data_ptr<int64_t>()[b] = token;
      if (args.penalised && row[kCount] > 0 && at < history.size(1)) history.data_ptr<int64_t>()[b * history.size(1) + at] = token;
      row[kPast] += row[kCount];
    }
  });
}

NNTILE_KERNEL(sample, sample);
NNTILE_KERNEL(unite, unite);

}  // namespace
}  // namespace nntile
