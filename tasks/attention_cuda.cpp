// Attention on CUDA: by fused kernels of cuDNN and ATen where they support the case, else by ATen's operations on
// tiles.
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>

#include "attention_cuda.h"
#include "attention_cudnn.h"
#include "runtime.h"

namespace nntile {
namespace {

constexpr int64_t kLseRows = 32;  // the memory-efficient kernel pads the rows of log-sum-exp to a multiple of kLseRows

bool low(const at::Tensor& x) { return at::isReducedFloatingType(x.scalar_type()); }

// Scores and statistics are fp32 for bf16 and fp16 operands.
at::Tensor in_fp32(const at::Tensor& x) { return low(x) ? x.to(at::kFloat) : x; }

// Returns whether the GPU supports the flash attention of ATen and cuDNN. ATen's memory-efficient kernel supports fp16
// on older GPUs too.
bool runs_flash(const at::Tensor& x) {
  int major = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, x.get_device()));
  return major >= 8;
}

// A kernel. `vendor` chooses the same kernel for the forward and the backward pass. flash, window: ATen's flash
// attention without and with a window. segments: a kernel of attention_packed_cuda.cpp. efficient: ATen's
// memory-efficient kernel. none: ATen's operations on tiles. For cudnn and efficient, all masks but the causal mask are
// a bias of the scores.
enum class Vendor { cudnn, flash, segments, window, efficient, none };

Vendor vendor(const Triple& x, const PairMask& mask, packed::Way way) {
  const auto width = x.q.size(3);
  const bool halves = low(x.q) && width % 8 == 0 && width <= 256, flash = halves && runs_flash(x.q);
  if (flash && mask.segments.defined()) return Vendor::segments;
  if (way != packed::Way::fastest)
    throw TaskError(std::string("model.attention: ") + (way == packed::Way::cudnn ? "cudnn" : "varlen") +
                    " takes bf16 or fp16, and a head_dim that is a multiple of 8 up to 256, on GPUs of compute"
                    " capability 8.0 or higher; got " + c10::toString(x.q.scalar_type()) + ", head_dim " +
                    std::to_string(width) + "; allowed: vendor or segments");
  if (flash && mask.window && !mask.padding.defined()) return Vendor::window;
  if (flash && width <= 128 && x.q.size(2) % 64 == 0 && x.k.size(2) % 64 == 0) return Vendor::cudnn;
  if (flash && mask.simple()) return Vendor::flash;
  if (halves || (x.q.scalar_type() == at::kFloat && width % 4 == 0)) return Vendor::efficient;
  return Vendor::none;
}

// Returns whether cuDNN is tried before ATen's flash attention, for sequences of any length. cuDNN's causal mask aligns
// the first query with the first key, so a causal mask needs as many queries as keys.
bool cudnn_takes(const Triple& x, bool causal) {
  return x.q.size(3) <= 128 && (!causal || x.q.size(2) == x.k.size(2));
}

// Returns a view of x [b, h, s, d] as rows of 16-byte words, one row per position; undefined if x's layout does not
// allow such a view.
at::Tensor words(const at::Tensor& x) {
  const auto y = x.permute({0, 2, 1, 3});  // batch, seq, heads, head_dim
  const auto row = y.size(2) * y.size(3), pitch = y.stride(1), each = 16 / static_cast<int64_t>(y.element_size());
  const bool rows = y.stride(3) == 1 && y.stride(2) == y.size(3) && y.stride(0) == y.size(1) * pitch;
  if (!rows || row % each || pitch % each || reinterpret_cast<uintptr_t>(y.data_ptr()) % 16) return {};
  return at::for_blob(y.data_ptr(), {y.size(0) * y.size(1), row / each})
      .strides({pitch / each, 1})
      .options(y.options().dtype(at::kComplexDouble))
      .target_device(y.device())
      .make_tensor();
}

}  // namespace

void copy_rows(const at::Tensor& dst, const at::Tensor& src) {
  const auto to = words(dst), from = words(src);
  if (to.defined() && from.defined() && dst.scalar_type() == src.scalar_type()) to.copy_(from);
  else dst.copy_(src);
}

namespace {

// Returns [b or 1, 1, seq, key]: true where a pair is masked; undefined if no pair is masked.
at::Tensor hidden(const Triple& x, const PairMask& mask) {
  if (mask.simple() && !mask.diagonal) return {};
  at::Tensor result;
  const auto hide = [&](const at::Tensor& more) { result = result.defined() ? result.logical_or(more) : more; };
  const auto integers = x.q.options().dtype(at::kLong);
  const auto key = at::arange(mask.key, mask.key + x.k.size(2), integers);
  const auto seq = at::arange(mask.seq, mask.seq + x.q.size(2), integers).unsqueeze(1);
  if (mask.diagonal) hide(key.gt(seq));
  if (mask.window) hide(key.le(seq.sub(mask.window)));
  if (mask.two_sided) hide(key.ge(seq.add(mask.window)));
  if (mask.segments.defined()) {
    const auto of_seq = at::searchsorted(mask.segments, seq, false, true);
    hide(of_seq.ne(at::searchsorted(mask.segments, key, false, true)));
    hide(of_seq.eq(0).logical_or(of_seq.eq(mask.segments.numel())));
  }
  if (result.defined()) result = result.unsqueeze(0).unsqueeze(0);
  if (mask.padding.defined()) hide(mask.padding.eq(0).unsqueeze(1).unsqueeze(1));
  return result.expand({-1, -1, x.q.size(2), -1});
}

// The bias that the kernels cudnn and efficient add to the scores. `dead` marks the queries without attended keys. The
// bias is finite, because infinities would give NaN. So a kernel returns the mean of all values for a dead
// query; `clear_dead` then sets the results of dead queries to 0.
struct Bias {
  at::Tensor bias, dead;  // [b, 1, seq, key], [b, 1, seq]; undefined with only a causal mask

  Bias(const Triple& x, const PairMask& mask) {
    if (mask.simple()) return;
    const auto masked = hidden(x, mask);
    const auto keys = x.k.size(2), pitch = (keys + 15) / 16 * 16;  // row alignment for the vector loads of efficient
    bias = at::zeros({x.q.size(0), 1, x.q.size(2), pitch}, x.q.options()).narrow(3, 0, keys);
    // Far below any score, but representable: fp16 ends at 65504.
    bias.masked_fill_(masked, x.q.scalar_type() == at::kHalf ? -65504. : -1e30);
    dead = masked.all(-1);
  }
  at::Tensor of_heads(const at::Tensor& q) const {
    return bias.defined() ? bias.expand({-1, q.size(1), -1, -1}) : bias;
  }
};

// Returns nullopt for an undefined bias, because ATen's forward functions mistake an undefined tensor for a bias in
// main memory.
std::optional<at::Tensor> given(const at::Tensor& x) { return x.defined() ? std::make_optional(x) : std::nullopt; }

void clear_dead(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& dead) {
  if (!dead.defined()) return;
  out.masked_fill_(dead.unsqueeze(-1), 0);
  lse.masked_fill_(dead, 0);
}

at::Tensor scores(const Triple& x, const PairMask& mask, double scale) {
  auto s = at::matmul(in_fp32(x.q), in_fp32(repeated(x.k, x.group())).transpose(-1, -2)).mul_(scale);
  const auto masked = hidden(x, mask);
  return masked.defined() ? s.masked_fill_(masked, -INFINITY) : s;
}

// tiles: out, lse, q/k/v, padding, segments
template <packed::Way way>
void attention(Args& t) {
  const AttentionArgs args(t);
  const auto out = as_bhsd(t[0], args.out), lse = t[1];
  const Triple x(t, args.qkv, 2);
  const PairMask mask(t, args.diagonal, args.limits, 2 + x.count);
  const bool causal = mask.diagonal;
  const auto repeat = [&](const at::Tensor& y) { return repeated(y, x.group()); };
  switch (vendor(x, mask, way)) {
    case Vendor::cudnn: {
      const Bias more(x, mask);
      if (!cudnn::attention(x, out, lse, more.bias, causal, args.scale)) {
        const auto r = at::_scaled_dot_product_cudnn_attention(
            x.q, repeat(x.k), repeat(x.v), given(more.of_heads(x.q)), true, 0.0, causal, false, args.scale);
        copy_rows(out, std::get<0>(r));
        lse.copy_(std::get<1>(r).view(lse.sizes()));
      }
      clear_dead(out, lse, more.dead);
      return;
    }
    case Vendor::flash: {
      if (cudnn_takes(x, causal) && cudnn::attention(x, out, lse, {}, causal, args.scale)) return;
      const auto r = at::_scaled_dot_product_flash_attention(x.q, x.k, x.v, 0.0, causal, false, args.scale);
      copy_rows(out, std::get<0>(r));
      lse.copy_(std::get<1>(r));
      return;
    }
    case Vendor::segments: return packed::attention(way, x, mask, out, lse, t.most(1)[2], args.scale);
    case Vendor::window: {
      const auto r = at::_flash_attention_forward(
          x.q.transpose(1, 2), x.k.transpose(1, 2), x.v.transpose(1, 2), {}, {}, x.q.size(2), x.k.size(2), 0.0, false,
          false, args.scale, mask.left(), mask.right());
      copy_rows(out, std::get<0>(r).transpose(1, 2));
      lse.copy_(std::get<1>(r));
      return;
    }
    case Vendor::efficient: {
      const Bias more(x, mask);
      const auto r = at::_scaled_dot_product_efficient_attention(
          x.q, repeat(x.k), repeat(x.v), given(more.of_heads(x.q)), true, 0.0, causal, args.scale);
      copy_rows(out, std::get<0>(r));
      lse.copy_(std::get<1>(r).narrow(-1, 0, x.q.size(2)));
      clear_dead(out, lse, more.dead);
      return;
    }
    case Vendor::none: {
      const auto s = scores(x, mask, args.scale), l = at::logsumexp(s, {-1});
      l.masked_fill_(l.eq(-INFINITY), 0);
      out.copy_(at::matmul(s.sub(l.unsqueeze(-1)).exp_(), in_fp32(repeat(x.v))));
      lse.copy_(l);
    }
  }
}

// Adds the gradients of one pair of tiles, whose probabilities are exp(scale q k^T - lse).
void add_pair(const Triple& x, const PairMask& mask, const Triple& grads, const at::Tensor& d_out,
              const at::Tensor& lse, const at::Tensor& delta, double scale) {
  const auto p = scores(x, mask, scale).sub_(lse.unsqueeze(-1)).exp_();
  const auto g = in_fp32(d_out);
  const auto v = in_fp32(repeated(x.v, x.group())), k = in_fp32(repeated(x.k, x.group()));
  const auto ds = at::matmul(g, v.transpose(-1, -2)).sub_(delta.unsqueeze(-1)).mul_(p).mul_(scale);
  grads.v.add_(of_groups(at::matmul(p.transpose(-1, -2), g), x.group()));
  grads.q.add_(at::matmul(ds, k));
  grads.k.add_(of_groups(at::matmul(ds.transpose(-1, -2), in_fp32(x.q)), x.group()));
}

// tiles: do, out, lse, q/k/v, dq/dk/dv, padding, segments
template <packed::Way way>
void attention_grad(Args& t) {
  const AttentionGradArgs args(t);
  const auto d_out = as_bhsd(t[0], args.d_out), out = as_bhsd(t[1], args.out), lse = t[2].contiguous();
  const Triple x(t, args.qkv, 3), grads(t, args.grads, 3 + x.count);
  const PairMask mask(t, args.diagonal, args.limits, 3 + x.count + grads.count);
  const bool causal = mask.diagonal;
  const bool adds = t.accumulates(3 + x.count + args.grads.k[0]);  // tasks of other heads add to dk and dv too
  const auto own = [&] {  // gradients for kernels that overwrite their outputs instead of adding
    return adds ? Triple(grads.q, at::empty_like(grads.k), at::empty_like(grads.v)) : grads;
  };
  const auto add = [&](const Triple& made) {
    if (adds) grads.k.add_(made.k), grads.v.add_(made.v);
  };
  const auto seed = at::empty({}, lse.options().dtype(at::kLong));  // unused, as there is no dropout
  const auto rows = x.q.size(2), keys = x.k.size(2);
  const auto repeat = [&](const at::Tensor& y) { return repeated(y, x.group()); };
  at::Tensor dq, dk, dv;
  switch (vendor(x, mask, way)) {
    case Vendor::cudnn: {
      const Bias more(x, mask);
      const auto made = own();
      if (cudnn::attention_grad(x, out, lse, d_out, made, more.bias, causal, args.scale)) return add(made);
      std::tie(dq, dk, dv) = at::_scaled_dot_product_cudnn_attention_backward(
          d_out, x.q, repeat(x.k), repeat(x.v), out, lse.unsqueeze(-1), seed, seed, more.of_heads(x.q), {}, {}, rows,
          keys, 0.0, causal, args.scale);
      break;
    }
    case Vendor::flash: {
      const auto made = own();
      if (cudnn_takes(x, causal) && cudnn::attention_grad(x, out, lse, d_out, made, {}, causal, args.scale))
        return add(made);
      std::tie(dq, dk, dv) = at::_scaled_dot_product_flash_attention_backward(
          d_out, x.q, x.k, x.v, out, lse, {}, {}, rows, keys, 0.0, causal, seed, seed, args.scale);
      break;
    }
    case Vendor::segments: {
      const auto made = own();
      packed::attention_grad(way, x, mask, out, lse, d_out, made, t.most(2)[2], args.scale);
      return add(made);
    }
    case Vendor::window: {
      const auto seq_first = [](const at::Tensor& y) { return y.transpose(1, 2); };
      std::tie(dq, dk, dv) = at::_flash_attention_backward(
          seq_first(d_out), seq_first(x.q), seq_first(x.k), seq_first(x.v), seq_first(out), lse, {}, {}, rows, keys, 0.0,
          false, seed, seed, args.scale, mask.left(), mask.right());
      dq = seq_first(dq);
      dk = seq_first(dk);
      dv = seq_first(dv);
      break;
    }
    case Vendor::efficient: {
      const Bias more(x, mask);
      const auto missing = (kLseRows - rows % kLseRows) % kLseRows;
      const auto padded = missing ? at::constant_pad_nd(lse, {0, missing}, INFINITY) : lse;
      at::Tensor db;
      std::tie(dq, dk, dv, db) = at::_scaled_dot_product_efficient_attention_backward(
          d_out, x.q, repeat(x.k), repeat(x.v), more.of_heads(x.q), out, padded, seed, seed, 0.0,
          {true, true, true, false}, causal, args.scale);
      break;
    }
    case Vendor::none:
      clear(t, 3 + x.count, grads.count);
      add_pair(x, mask, grads, d_out, lse, in_fp32(d_out).mul(in_fp32(out)).sum(-1), args.scale);
      return;
  }
  const auto put = [&](const at::Tensor& to, const at::Tensor& from) {
    const auto sum = from.size(1) == to.size(1) ? from : of_groups(from, x.group());
    if (adds) to.add_(sum);
    else copy_rows(to, sum);
  };
  copy_rows(grads.q, dq);
  put(grads.k, dk);
  put(grads.v, dv);
}

// tiles: state [.., (max, sumexp, values)] (without values for flash_maxsumexp), q/k/v, padding, segments
void add_state(Args& t, bool values) {
  const PairArgs args(t);
  const Triple x(t, args.qkv, 1);
  const PairMask mask(t, args.diagonal, args.limits, 1 + x.count);
  const auto state = t[0];
  const auto part = t.accumulates(0) ? at::empty(state.sizes(), state.options()) : state;
  const auto s = scores(x, mask, args.scale);
  const auto top = at::amax(s, {-1}, true);
  if (!mask.simple()) top.masked_fill_(top.eq(-INFINITY), 0);
  const auto p = s.sub(top).exp_();
  part.select(-1, 0).copy_(top.squeeze(-1));
  part.select(-1, 1).copy_(p.sum(-1));
  if (values) part.narrow(-1, 2, part.size(-1) - 2).copy_(at::matmul(p, in_fp32(repeated(x.v, x.group()))));
  if (t.accumulates(0)) combine(Monoid::softmax, state, part);
}

void attention_partial(Args& t) { add_state(t, true); }

void flash_maxsumexp(Args& t) { add_state(t, false); }

// tiles: out (ACC), lse, q/k/v, padding, segments
void flash_softmax_gemm(Args& t) {
  const AttentionArgs args(t);
  const auto out = as_bhsd(t[0], args.out);
  const Triple x(t, args.qkv, 2);
  const PairMask mask(t, args.diagonal, args.limits, 2 + x.count);
  const auto p = scores(x, mask, args.scale).sub_(t[1].unsqueeze(-1)).exp_();
  const auto product = at::matmul(p, in_fp32(repeated(x.v, x.group())));
  if (t.accumulates(0)) out.add_(product);
  else out.copy_(product);
}

// tiles: delta, do, out
void attention_delta(Args& t) {
  const DeltaArgs args(t);
  t[0].copy_(in_fp32(as_bhsd(t[1], args.d_out)).mul(in_fp32(as_bhsd(t[2], args.out))).sum(-1));
}

// tiles: do, lse, delta, q/k/v, dq/dk/dv (ACC), padding, segments
void attention_grad_pair(Args& t) {
  const PairGradArgs args(t);
  const auto d_out = as_bhsd(t[0], args.d_out), lse = t[1], delta = t[2];
  const Triple x(t, args.qkv, 3), grads(t, args.grads, 3 + x.count);
  const PairMask mask(t, args.diagonal, args.limits, 3 + x.count + grads.count);
  clear(t, 3 + x.count, grads.count);
  add_pair(x, mask, grads, d_out, lse, delta, args.scale);
}

NNTILE_CUDA_KERNEL(attention, attention<packed::Way::fastest>);
NNTILE_CUDA_KERNEL(attention_grad, attention_grad<packed::Way::fastest>);
NNTILE_CUDA_KERNEL(attention_varlen, attention<packed::Way::varlen>);
NNTILE_CUDA_KERNEL(attention_varlen_grad, attention_grad<packed::Way::varlen>);
NNTILE_CUDA_KERNEL(attention_cudnn, attention<packed::Way::cudnn>);
NNTILE_CUDA_KERNEL(attention_cudnn_grad, attention_grad<packed::Way::cudnn>);
NNTILE_CUDA_KERNEL(attention_partial, attention_partial);
NNTILE_CUDA_KERNEL(flash_maxsumexp, flash_maxsumexp);
NNTILE_CUDA_KERNEL(flash_softmax_gemm, flash_softmax_gemm);
NNTILE_CUDA_KERNEL(attention_delta, attention_delta);
NNTILE_CUDA_KERNEL(attention_grad_pair, attention_grad_pair);

}  // namespace
}  // namespace nntile
