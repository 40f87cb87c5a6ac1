// Attention on pairs of tiles (queries, keys and values). Places of the operands: see Operands in attention.py.
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include "attention.h"
#include "rows.h"

namespace nntile {
namespace {

constexpr int64_t kRows = 128;  // query rows at a time: their scores stay in the cache

// f(batch, head)
template <class F>
void for_heads(const at::Tensor& q, F f) {
  for (int64_t b = 0; b < q.size(0); ++b)
    for (int64_t h = 0; h < q.size(1); ++h) f(b, h);
}

at::Tensor head(const at::Tensor& x, int64_t b, int64_t h) { return x.select(0, b).select(0, h); }

// Keys that row `row` of the tile attends to.
int64_t kept_keys(bool diagonal, int64_t row, int64_t keys) { return diagonal ? std::min(row + 1, keys) : keys; }

// Scaled scores of query rows [first, first + rows) into the buffer; keys beyond `keys` are masked for all of them.
at::Tensor scores_of(at::Tensor& buffer, const at::Tensor& q, const at::Tensor& k, int64_t first, int64_t rows,
                     int64_t keys, double scale) {
  auto s = buffer.narrow(0, 0, rows * keys).view({rows, keys});
  at::addmm_out(s, s, q.narrow(0, first, rows), k.narrow(0, 0, keys).t(), 0, scale);
  return s;
}

// body(scores of a block of rows, first row, rows, keys) for one head
template <class F>
void for_blocks(bool diagonal, const at::Tensor& q, const at::Tensor& k, double scale, at::Tensor& buffer, F body) {
  for (int64_t first = 0; first < q.size(0); first += kRows) {
    const int64_t rows = std::min(kRows, q.size(0) - first);
    const int64_t keys = kept_keys(diagonal, first + rows - 1, k.size(0));
    body(scores_of(buffer, q, k, first, rows, keys, scale), first, rows, keys);
  }
}

at::Tensor buffer_for(const at::Tensor& q, const at::Tensor& k) {
  return at::empty({std::min(kRows, q.size(2)) * k.size(2)}, q.options());
}

// tiles: out, lse, q/k/v
void attention(Args& t) {
  Reader ints{t};
  const auto out = t[0].permute(ints.four());
  const bool causal = ints.one();
  const Triple x(ints, 2);
  const auto [o, lse] = at::_scaled_dot_product_flash_attention_for_cpu(x.q, x.k, x.v, 0.0, causal, {}, t.f(0));
  out.copy_(o);
  t[1].copy_(lse);
}

// tiles: do, out, lse, q/k/v, dq/dk/dv
void attention_grad(Args& t) {
  Reader ints{t};
  const auto d_out = t[0].permute(ints.four()), out = t[1].permute(ints.four());
  const bool causal = ints.one();
  const Triple x(ints, 3), grads(ints, 3 + x.count);
  const auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      d_out, x.q, x.k, x.v, out, t[2], 0.0, causal, {}, t.f(0));
  grads.q.copy_(dq);
  grads.k.copy_(dk);
  grads.v.copy_(dv);
}

// tiles: state (max, sumexp, values), q/k/v
void attention_partial(Args& t) {
  Reader ints{t};
  const bool diagonal = ints.one();
  const Triple x(ints, 1);
  const auto state = t[0];
  const bool accumulates = t.accumulates(0);
  const auto part = accumulates ? at::empty(state.sizes(), state.options()) : state;
  auto buffer = buffer_for(x.q, x.k);
  dispatch(state, [&](auto zero) {
    using T = decltype(zero);
    for_heads(x.q, [&](int64_t b, int64_t h) {
      const auto s_head = head(part, b, h);
      const auto v = head(x.v, b, h);
      for_blocks(diagonal, head(x.q, b, h), head(x.k, b, h), t.f(0), buffer,
                 [&](const at::Tensor& s, int64_t first, int64_t rows, int64_t keys) {
                   for (int64_t row = 0; row < rows; ++row) {
                     auto* p = s.data_ptr<T>() + row * keys;
                     auto* st = s_head.data_ptr<T>() + (first + row) * s_head.size(1);
                     const int64_t kept = kept_keys(diagonal, first + row, keys);
                     st[0] = max_of(p, kept);
                     exp_row(p, p, st[0], T(1), kept);
                     std::fill(p + kept, p + keys, T(0));
                     st[1] = sum_vectors<T>(kept, [&](int64_t k, int64_t n) { return keep(load(p + k, n), n); });
                   }
                   auto values = s_head.narrow(0, first, rows).narrow(1, 2, v.size(1));
                   values.copy_(s.mm(v.narrow(0, 0, keys)));
                 });
    });
  });
  if (accumulates) combine(Monoid::softmax, state, part);
}

// tiles: out, lse, state
void attention_normalise(Args& t) {
  Reader ints{t};
  const auto out = t[0].permute(ints.four()), lse = t[1], state = t[2];
  const auto sum = state.select(-1, 1);
  out.copy_(state.narrow(-1, 2, state.size(-1) - 2).div(sum.unsqueeze(-1)));
  lse.copy_(sum.log().add_(state.select(-1, 0)));
}

// tiles: state (max, sumexp), q/k/v
void flash_maxsumexp(Args& t) {
  Reader ints{t};
  const bool diagonal = ints.one();
  const Triple x(ints, 1);
  const auto state = t[0];
  const bool accumulates = t.accumulates(0);
  const auto part = accumulates ? at::empty(state.sizes(), state.options()) : state;
  auto buffer = buffer_for(x.q, x.k);
  dispatch(state, [&](auto zero) {
    using T = decltype(zero);
    for_heads(x.q, [&](int64_t b, int64_t h) {
      auto* st = head(part, b, h).template data_ptr<T>();
      for_blocks(diagonal, head(x.q, b, h), head(x.k, b, h), t.f(0), buffer,
                 [&](const at::Tensor& s, int64_t first, int64_t rows, int64_t keys) {
                   for (int64_t row = 0; row < rows; ++row) {
                     const auto* p = s.data_ptr<T>() + row * keys;
                     const int64_t kept = kept_keys(diagonal, first + row, keys);
                     st[(first + row) * 2] = max_of(p, kept);
                     st[(first + row) * 2 + 1] = sumexp_of(p, st[(first + row) * 2], kept);
                   }
                 });
    });
  });
  if (accumulates) combine(Monoid::softmax, state, part);
}

// tiles: lse, state
void attention_lse(Args& t) { t[0].copy_(t[1].select(-1, 1).log().add_(t[1].select(-1, 0))); }

// The rows' probabilities in place of their scores.
template <class T>
void probabilities(const at::Tensor& s, const at::Tensor& lse, bool diagonal, int64_t first, int64_t rows,
                   int64_t keys) {
  for (int64_t row = 0; row < rows; ++row) {
    auto* p = s.data_ptr<T>() + row * keys;
    const int64_t kept = kept_keys(diagonal, first + row, keys);
    exp_row(p, p, lse.data_ptr<T>()[first + row], T(1), kept);
    std::fill(p + kept, p + keys, T(0));
  }
}

// tiles: out (ACC), lse, q/k/v
void flash_softmax_gemm(Args& t) {
  Reader ints{t};
  const auto out = t[0].permute(ints.four());
  const bool diagonal = ints.one();
  const Triple x(ints, 2);
  const auto lse = t[1];
  auto buffer = buffer_for(x.q, x.k);
  dispatch(lse, [&](auto zero) {
    using T = decltype(zero);
    for_heads(x.q, [&](int64_t b, int64_t h) {
      for_blocks(diagonal, head(x.q, b, h), head(x.k, b, h), t.f(0), buffer,
                 [&](const at::Tensor& s, int64_t first, int64_t rows, int64_t keys) {
                   probabilities<T>(s, head(lse, b, h), diagonal, first, rows, keys);
                   auto target = head(out, b, h).narrow(0, first, rows);
                   at::addmm_out(target, target, s, head(x.v, b, h).narrow(0, 0, keys), t.accumulates(0) ? 1 : 0, 1);
                 });
    });
  });
}

// tiles: delta, do, out
void attention_delta(Args& t) {
  Reader ints{t};
  const auto d_out = t[1].permute(ints.four()), out = t[2].permute(ints.four());
  t[0].copy_(d_out.mul(out).sum(-1));
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
  const Triple grads(ints, first_grad);
  auto scores = buffer_for(x.q, x.k), products = buffer_for(x.q, x.k);
  const double scale = t.f(0);
  dispatch(lse, [&](auto zero) {
    using T = decltype(zero);
    for_heads(x.q, [&](int64_t b, int64_t h) {
      const auto q = head(x.q, b, h), k = head(x.k, b, h), v = head(x.v, b, h), g = head(d_out, b, h);
      const auto row_delta = head(delta, b, h);
      for_blocks(diagonal, q, k, scale, scores,
                 [&](const at::Tensor& p, int64_t first, int64_t rows, int64_t keys) {
                   probabilities<T>(p, head(lse, b, h), diagonal, first, rows, keys);
                   auto ds = scores_of(products, g, v, first, rows, keys, 1.0);
                   auto dv = head(grads.v, b, h).narrow(0, 0, keys), dk = head(grads.k, b, h).narrow(0, 0, keys);
                   auto dq = head(grads.q, b, h).narrow(0, first, rows);
                   at::addmm_out(dv, dv, p.t(), g.narrow(0, first, rows));
                   for (int64_t row = 0; row < rows; ++row) {
                     auto* out = ds.template data_ptr<T>() + row * keys;
                     const auto* in = p.data_ptr<T>() + row * keys;
                     const Vec<T> d(row_delta.data_ptr<T>()[first + row]), s(static_cast<T>(scale));
                     for_vectors<T>(keys, [&](int64_t c, int64_t n) {
                       (load(in + c, n) * (load(out + c, n) - d) * s).store(out + c, static_cast<int>(n));
                     });
                   }
                   at::addmm_out(dq, dq, ds, k.narrow(0, 0, keys));
                   at::addmm_out(dk, dk, ds.t(), q.narrow(0, first, rows));
                 });
    });
  });
}

NNTILE_KERNEL(attention, attention);
NNTILE_KERNEL(attention_grad, attention_grad);
NNTILE_KERNEL(attention_partial, attention_partial);
NNTILE_KERNEL(attention_normalise, attention_normalise);
NNTILE_KERNEL(flash_maxsumexp, flash_maxsumexp);
NNTILE_KERNEL(attention_lse, attention_lse);
NNTILE_KERNEL(flash_softmax_gemm, flash_softmax_gemm);
NNTILE_KERNEL(attention_delta, attention_delta);
NNTILE_KERNEL(attention_grad_pair, attention_grad_pair);
NNTILE_CUDA_KERNEL(attention_normalise, attention_normalise);
NNTILE_CUDA_KERNEL(attention_lse, attention_lse);

}  // namespace
}  // namespace nntile
