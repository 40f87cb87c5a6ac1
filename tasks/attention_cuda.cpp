// Attention on CUDA: the vendor's fused kernels where a task has whole sequences, else whole-tile operations.
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "attention.h"
#include "cudnn.h"

namespace nntile {
namespace {

constexpr int64_t kLseRows = 32;  // the memory-efficient kernel pads the log-sum-exp to a multiple of this

bool low(const at::Tensor& x) { return x.scalar_type() == at::kBFloat16; }

// Scores and statistics are fp32 for bf16 operands.
at::Tensor wide(const at::Tensor& x) { return low(x) ? x.to(at::kFloat) : x; }

// Which kernel takes operands of this dtype and these sizes, forward and backward alike.
enum class Vendor { cudnn, flash, efficient, none };

Vendor vendor(const at::Tensor& q) {
  const auto seq = q.size(2), width = q.size(3);
  if (low(q) && width % 8 == 0 && width <= 128 && seq % 64 == 0) return Vendor::cudnn;
  if (low(q) && width % 8 == 0 && width <= 256) return Vendor::flash;
  if (q.scalar_type() == at::kFloat && width % 4 == 0) return Vendor::efficient;
  return Vendor::none;
}

// The tensor [b, h, s, d] as rows of 16-byte words, one a position; undefined if its memory is not so.
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

// dst <- src. Slices of packed tensors are rows at a distance, which ATen copies element by element.
void copy_rows(const at::Tensor& dst, const at::Tensor& src) {
  const auto to = words(dst), from = words(src);
  if (to.defined() && from.defined() && dst.scalar_type() == src.scalar_type()) to.copy_(from);
  else dst.copy_(src);
}

at::Tensor scores(const at::Tensor& q, const at::Tensor& k, double scale, bool diagonal) {
  auto s = at::matmul(wide(q), wide(k).transpose(-1, -2)).mul_(scale);
  if (diagonal) s.masked_fill_(at::ones({s.size(-2), s.size(-1)}, s.options().dtype(at::kBool)).triu_(1), -INFINITY);
  return s;
}

// tiles: out, lse, q/k/v
void attention(Args& t) {
  Reader ints{t};
  const auto out = t[0].permute(ints.four());
  const bool causal = ints.one();
  const Triple x(ints, 2);
  switch (vendor(x.q)) {
    case Vendor::cudnn: {
      if (cudnn::attention(x, out, t[1], causal, t.f(0))) return;
      const auto r = at::_scaled_dot_product_cudnn_attention(x.q, x.k, x.v, {}, true, 0.0, causal, false, t.f(0));
      copy_rows(out, std::get<0>(r));
      t[1].copy_(std::get<1>(r).view(t[1].sizes()));
      return;
    }
    case Vendor::flash: {
      const auto r = at::_scaled_dot_product_flash_attention(x.q, x.k, x.v, 0.0, causal, false, t.f(0));
      copy_rows(out, std::get<0>(r));
      t[1].copy_(std::get<1>(r));
      return;
    }
    case Vendor::efficient: {
      const auto r = at::_scaled_dot_product_efficient_attention(x.q, x.k, x.v, {}, true, 0.0, causal, t.f(0));
      copy_rows(out, std::get<0>(r));
      t[1].copy_(std::get<1>(r).narrow(-1, 0, x.q.size(2)));
      return;
    }
    case Vendor::none: {
      const auto s = scores(x.q, x.k, t.f(0), causal);
      const auto lse = at::logsumexp(s, {-1});
      out.copy_(at::matmul(s.sub(lse.unsqueeze(-1)).exp_(), wide(x.v)));
      t[1].copy_(lse);
    }
  }
}

// Adds the gradients of one pair of tiles, whose probabilities are exp(scale q k^T - lse).
void add_pair(const Triple& x, const Triple& grads, const at::Tensor& d_out, const at::Tensor& lse,
              const at::Tensor& delta, double scale, bool diagonal) {
  const auto p = scores(x.q, x.k, scale, diagonal).sub_(lse.unsqueeze(-1)).exp_();
  const auto g = wide(d_out);
  const auto ds = at::matmul(g, wide(x.v).transpose(-1, -2)).sub_(delta.unsqueeze(-1)).mul_(p).mul_(scale);
  grads.v.add_(at::matmul(p.transpose(-1, -2), g));
  grads.q.add_(at::matmul(ds, wide(x.k)));
  grads.k.add_(at::matmul(ds.transpose(-1, -2), wide(x.q)));
}

// tiles: do, out, lse, q/k/v, dq/dk/dv
void attention_grad(Args& t) {
  Reader ints{t};
  const auto d_out = t[0].permute(ints.four()), out = t[1].permute(ints.four());
  const bool causal = ints.one();
  const Triple x(ints, 3), grads(ints, 3 + x.count);
  const auto lse = t[2];
  const auto seed = at::empty({}, lse.options().dtype(at::kLong));  // of a dropout that is off
  const auto rows = x.q.size(2);
  at::Tensor dq, dk, dv;
  switch (vendor(x.q)) {
    case Vendor::cudnn:
      if (cudnn::attention_grad(x, out, lse, d_out, grads, causal, t.f(0))) return;
      std::tie(dq, dk, dv) = at::_scaled_dot_product_cudnn_attention_backward(
          d_out, x.q, x.k, x.v, out, lse.unsqueeze(-1), seed, seed, {}, {}, {}, rows, rows, 0.0, causal, t.f(0));
      break;
    case Vendor::flash:
      std::tie(dq, dk, dv) = at::_scaled_dot_product_flash_attention_backward(
          d_out, x.q, x.k, x.v, out, lse, {}, {}, rows, rows, 0.0, causal, seed, seed, t.f(0));
      break;
    case Vendor::efficient: {
      const auto missing = (kLseRows - rows % kLseRows) % kLseRows;
      const auto padded = missing ? at::constant_pad_nd(lse, {0, missing}, INFINITY) : lse;
      at::Tensor db;
      std::tie(dq, dk, dv, db) = at::_scaled_dot_product_efficient_attention_backward(
          d_out, x.q, x.k, x.v, {}, out, padded, seed, seed, 0.0, {true, true, true, false}, causal, t.f(0));
      break;
    }
    case Vendor::none:
      for (size_t k = 3 + x.count; k < t.tiles(); ++k) t[k].zero_();
      add_pair(x, grads, d_out, lse, wide(d_out).mul(wide(out)).sum(-1), t.f(0), causal);
      return;
  }
  copy_rows(grads.q, dq);
  copy_rows(grads.k, dk);
  copy_rows(grads.v, dv);
}

// tiles: state (max, sumexp, values), q/k/v; flash_maxsumexp's state has no values
void add_state(Args& t, bool values) {
  Reader ints{t};
  const bool diagonal = ints.one();
  const Triple x(ints, 1);
  const auto state = t[0];
  const auto part = t.accumulates(0) ? at::empty(state.sizes(), state.options()) : state;
  const auto s = scores(x.q, x.k, t.f(0), diagonal);
  const auto top = at::amax(s, {-1}, true);
  const auto p = s.sub(top).exp_();
  part.select(-1, 0).copy_(top.squeeze(-1));
  part.select(-1, 1).copy_(p.sum(-1));
  if (values) part.narrow(-1, 2, part.size(-1) - 2).copy_(at::matmul(p, wide(x.v)));
  if (t.accumulates(0)) combine(Monoid::softmax, state, part);
}

void attention_partial(Args& t) { add_state(t, true); }

void flash_maxsumexp(Args& t) { add_state(t, false); }

// tiles: out (ACC), lse, q/k/v
void flash_softmax_gemm(Args& t) {
  Reader ints{t};
  const auto out = t[0].permute(ints.four());
  const bool diagonal = ints.one();
  const Triple x(ints, 2);
  const auto product = at::matmul(scores(x.q, x.k, t.f(0), diagonal).sub_(t[1].unsqueeze(-1)).exp_(), wide(x.v));
  if (t.accumulates(0)) out.add_(product);
  else out.copy_(product);
}

// tiles: delta, do, out
void attention_delta(Args& t) {
  Reader ints{t};
  const auto d_out = t[1].permute(ints.four()), out = t[2].permute(ints.four());
  t[0].copy_(wide(d_out).mul(wide(out)).sum(-1));
}

// tiles: do, lse, delta, q/k/v, dq/dk/dv (ACC)
void attention_grad_pair(Args& t) {
  Reader ints{t};
  const auto d_out = t[0].permute(ints.four()), lse = t[1], delta = t[2];
  const bool diagonal = ints.one();
  const Triple x(ints, 3);
  const size_t first_grad = 3 + x.count;
  for (size_t k = first_grad; k < t.tiles(); ++k)
    if (!t.accumulates(k)) t[k].zero_();
  add_pair(x, Triple(ints, first_grad), d_out, lse, delta, t.f(0), diagonal);
}

NNTILE_CUDA_KERNEL(attention, attention);
NNTILE_CUDA_KERNEL(attention_grad, attention_grad);
NNTILE_CUDA_KERNEL(attention_partial, attention_partial);
NNTILE_CUDA_KERNEL(flash_maxsumexp, flash_maxsumexp);
NNTILE_CUDA_KERNEL(flash_softmax_gemm, flash_softmax_gemm);
NNTILE_CUDA_KERNEL(attention_delta, attention_delta);
NNTILE_CUDA_KERNEL(attention_grad_pair, attention_grad_pair);

}  // namespace
}  // namespace nntile
