// Log-probabilities of chosen and of most probable tokens on CUDA, see top_logprobs.py.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "kernel.h"
#include "page_table.h"
#include "top_logprobs_args.h"

namespace nntile {
namespace {

// Returns the columns of the largest values of each row of x (fp32), in descending order of the values. Equal values
// come in ascending order of their columns.
at::Tensor largest(const at::Tensor& x, int64_t count) {
  const auto bits = x.contiguous().view(at::kInt);
  // Integers in the order of the values. With the column in the lower 32 bits, all are different: the result is unique.
  const auto ordered = at::where(bits < 0, bits.bitwise_xor(0x7fffffff), bits).to(at::kLong);
  const auto column = at::arange(x.size(1), ordered.options()).unsqueeze(0);
  return std::get<1>(at::topk(ordered * (int64_t{1} << 32) - column, count, 1));
}

// tiles: values [batch, ring, rank], ids, logits, chosen, [table]; without a table, the axis ring is seq
void top_logprobs(Args& t) {
  const TopLogProbsArgs args(t);
  const auto logits = t[2];
  const int64_t vocab = logits.size(-1), rows = logits.numel() / vocab, ring = t[3].numel() / rows, ranks = t[1].size(-1);
  const auto chosen = t[3].reshape({rows, ring});
  auto column = at::zeros_like(chosen.narrow(1, 0, 1));
  at::Tensor count;
  if (args.paged) {
    const auto table = t[4];
    count = table.narrow(1, kCount, 1);
    const auto past = table.narrow(1, kPast, 1);
    column = (args.advanced ? past : past + count).remainder(ring);
  }
  const auto token = chosen.gather(1, column);
  auto written = token >= 0;
  if (args.paged) written = written & (count > 0);
  const auto x = logits.reshape({rows, vocab}).to(at::kFloat);
  const auto ranked = at::cat({token.clamp_min(0), largest(x.narrow(1, 0, args.tokens), ranks - 1)}, 1);
  const auto value = x.gather(1, ranked) - at::logsumexp(x, {1}, /*keepdim=*/true);
  const auto place = column.unsqueeze(2).expand({rows, 1, ranks});
  const auto write = [&](const at::Tensor& tile, const at::Tensor& result) {
    auto out = tile.view({rows, ring, ranks});
    out.scatter_(1, place, at::where(written.unsqueeze(2), result.unsqueeze(1), out.gather(1, place)));
  };
  write(t[0], value);
  write(t[1], ranked);
}

NNTILE_CUDA_KERNEL(top_logprobs, top_logprobs);

}  // namespace
}  // namespace nntile
