// Attention over packed sequences on CUDA: ATen's variable-length flash attention or cuDNN's ragged kernels.
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/searchsorted.h>
#include <torch/version.h>

#include <map>
#include <sstream>

#include "attention_cuda.h"
#include "autotune.h"
#include "attention_cudnn.h"
#include "runtime.h"

namespace nntile::packed {
namespace {

// Arguments of ATen's flash attention for packed sequences. offsets: int32, first token of each segment. dead [tokens]:
// true for tokens outside all segments.
struct Packed {
  at::Tensor offsets, dead;
  int64_t longest;

  Packed(const PairMask& mask, int64_t tokens) : longest(std::min(mask.longest, tokens)) {
    const auto& segments = mask.segments;
    offsets = segments.to(at::kInt);
    const auto segment = at::searchsorted(segments, at::arange(tokens, segments.options()), false, true);
    dead = segment.eq(0).logical_or(segment.eq(segments.numel()));
  }
};

at::Tensor tokens(const at::Tensor& x) { return x.select(0, 0).transpose(0, 1); }

void varlen(const Triple& x, const PairMask& mask, const at::Tensor& out, const at::Tensor& lse, double scale) {
  const Packed packed(mask, x.q.size(2));
  const auto r = at::_flash_attention_forward(
      tokens(x.q), tokens(x.k), tokens(x.v), packed.offsets, packed.offsets, packed.longest, packed.longest, 0.0,
      mask.diagonal && !mask.window, false, scale, mask.left(), mask.right());
  tokens(out).copy_(std::get<0>(r));
  lse.copy_(std::get<1>(r).view(lse.sizes()));  // [heads, tokens]
  out.masked_fill_(packed.dead.unsqueeze(-1), 0);
  lse.masked_fill_(packed.dead, 0);
}

void varlen_grad(const Triple& x, const PairMask& mask, const at::Tensor& out, const at::Tensor& lse,
                 const at::Tensor& d_out, const Triple& grads, double scale) {
  const Packed packed(mask, x.q.size(2));
  const auto seed = at::empty({}, lse.options().dtype(at::kLong));  // unused, as there is no dropout
  const auto [dq, dk, dv] = at::_flash_attention_backward(
      tokens(d_out), tokens(x.q), tokens(x.k), tokens(x.v), tokens(out), lse.select(0, 0).contiguous(), packed.offsets,
      packed.offsets, packed.longest, packed.longest, 0.0, mask.diagonal && !mask.window, seed, seed, scale,
      mask.left(), mask.right());
  const auto put = [&](const at::Tensor& to, const at::Tensor& from) {
    from.masked_fill_(packed.dead.unsqueeze(-1).unsqueeze(-1), 0);
    copy_rows(to, of_groups(from.transpose(0, 1).unsqueeze(0), from.size(1) / to.size(1)));
  };
  put(grads.q, dq);
  put(grads.k, dk);
  put(grads.v, dv);
}

// Runs `aten` (ATen's kernel) or `ragged` (cuDNN's, which returns the reason if it does not support the case). `way`
// selects the kernel; with `fastest`, a measurement, once for each kind of task, chooses the faster kernel. Neither
// kernel adds to its outputs, so both may run repeatedly.
void run(Way way, const char* direction, const Triple& x, const PairMask& mask, int64_t most,
         const std::function<void()>& aten, const std::function<std::string()>& ragged) {
  if (!x.q.size(2)) return;  // an empty bin
  if (way == Way::varlen) return aten();
  if (way == Way::cudnn) {
    if (const auto why = ragged(); !why.empty())
      throw TaskError("model.attention: cudnn cannot compute this: " + why + "; allowed: vendor, varlen or segments");
    return;
  }
  const std::vector<int64_t> sizes{static_cast<int64_t>(x.q.scalar_type()), x.q.size(1), x.k.size(1), x.q.size(3),
                                   mask.longest, mask.segments.numel(), most, mask.diagonal, mask.window,
                                   mask.two_sided};
  thread_local std::map<std::pair<std::string, std::vector<int64_t>>, bool> known;  // true: cuDNN is faster
  auto found = known.find({direction, sizes});
  if (found == known.end()) {
    std::ostringstream key(direction, std::ios::ate);
    for (const auto size : sizes) key << ' ' << size;
    const auto file = choices_file("segments", "torch-" TORCH_VERSION "-cudnn-" + std::to_string(cudnn::version()));
    const bool faster = ragged().empty() && fastest_of(file, key.str(), {aten, [&] { ragged(); }}) == 1;
    found = known.emplace(std::pair(direction, sizes), faster).first;
  }
  if (!found->second || !ragged().empty()) aten();
}

}  // namespace

void attention(Way way, const Triple& x, const PairMask& mask, const at::Tensor& out, const at::Tensor& lse,
               int64_t most, double scale) {
  run(way, "forward", x, mask, most, [&] { varlen(x, mask, out, lse, scale); },
      [&] { return cudnn::attention_of_segments(x, mask, out, lse, most, scale); });
}

void attention_grad(Way way, const Triple& x, const PairMask& mask, const at::Tensor& out, const at::Tensor& lse,
                    const at::Tensor& d_out, const Triple& grads, int64_t most, double scale) {
  run(way, "gradient", x, mask, most, [&] { varlen_grad(x, mask, out, lse, d_out, grads, scale); },
      [&] { return cudnn::attention_of_segments_grad(x, mask, out, lse, d_out, grads, most, scale); });
}

}  // namespace nntile::packed
