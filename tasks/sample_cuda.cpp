// Sampling of tokens from logits on CUDA, see sample.py. sample_triton.py has greedy sampling.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/where.h>

#include "kernel.h"
#include "page_table.h"
#include "sample.h"
#include "sample_args.h"

namespace nntile {
namespace {

// Applies the repetition penalty to x [batch, tokens]. history: [batch, draw]; the first `at` [batch, 1] entries of
// each row are the tokens of the sequence.
at::Tensor penalised(const at::Tensor& x, const at::Tensor& history, const at::Tensor& at, const at::Tensor& penalty) {
  const auto place = at::arange(history.size(1), history.options()).unsqueeze(0);
  // The entries after these tokens are replaced by the first token, so that no other logit changes.
  const auto seen = at::where(place < at, history, history.narrow(1, 0, 1)).clamp(0, x.size(1) - 1);
  const auto old = x.gather(1, seen);
  return x.scatter(1, seen, at::where(old > 0, old / penalty, old * penalty));
}

// tiles: drawn [batch, ring], logits, table, settings, draws, [history], [ids]
void sample(Args& t) {
  const SampleArgs args(t);
  auto out = t[0], table = t[2];
  const auto logits = t[1], settings = t[3], draws = t[4];
  size_t next = 5;
  const auto history = args.penalised ? t[next++] : at::Tensor();
  const int64_t batch = table.size(0);
  const auto count = table.narrow(1, kCount, 1), at = table.narrow(1, kPast, 1) + count;
  const auto setting = [&](int64_t column) { return settings.narrow(1, column, 1); };
  auto x = logits.reshape({batch, -1}).narrow(1, 0, args.tokens).to(at::kFloat);
  if (args.penalised) x = penalised(x, history, at, setting(4));
  const auto [values, order] = at::sort(x, /*stable=*/true, 1, /*descending=*/true);
  const auto temperature = setting(0), top_k = setting(1);
  const auto rank = at::arange(args.tokens, x.options()).unsqueeze(0);
  auto p = ((values - values.narrow(1, 0, 1)) / temperature.clamp_min(1e-20)).exp();
  p = p * ((top_k <= 0) | (rank < top_k));
  const auto before = p.cumsum(1) - p;
  p = p * ((rank < 1) | ((before < setting(2) * p.sum(1, true)) & (p >= setting(3) * p.narrow(1, 0, 1))));
  const auto u = draws.gather(1, at.clamp_max(draws.size(1) - 1));
  const auto sums = p.cumsum(1);
  // The index of the drawn token: the number of kept tokens whose cumulative weight is at most u times the sum. It
  // never exceeds the index of the last kept token.
  auto place = ((sums <= u * sums.narrow(1, args.tokens - 1, 1)) & (p > 0)).sum(1, true);
  place = at::where(temperature > 0, place.minimum((p > 0).sum(1, true) - 1), 0);
  // The sort puts nan first. A row with nan keeps no token, so its place may be -1.
  const auto usable = at::isfinite(values.narrow(1, 0, 1));
  const auto drawn = at::where(usable, order.gather(1, place.clamp_min(0)), kNoToken) * (count > 0);
  out.scatter_(1, at.remainder(out.size(1)), drawn);
  if (!args.advances) return;
  const auto token = drawn.clamp_min(0);  // the next pass needs a token that the model has
  t[next].copy_(token);
  if (args.penalised) {
    auto known = history;
    const auto here = at.clamp_max(known.size(1) - 1);
    known.scatter_(1, here, at::where((count > 0) & (at < known.size(1)), token, known.gather(1, here)));
  }
  table.narrow(1, kPast, 1).add_(count);
}

NNTILE_CUDA_KERNEL(sample, sample);
NNTILE_CUDA_KERNEL(unite, unite);

}  // namespace
}  // namespace nntile
