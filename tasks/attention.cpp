// Attention on pairs of tiles (queries, keys and values). A query without attended keys gets zeros, and lse 0.
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sum.h>

#include "attention_cpu.h"
#include "attention_head.h"
#include "attention_repeat_args.h"

namespace nntile {
namespace {

constexpr int64_t kRows = 128;  // rows of queries in a block; the block's scores fit into the cache

at::Tensor head(const at::Tensor& x, int64_t b, int64_t h) { return x.select(0, b).select(0, h); }

// Returns a row of a tensor [batch, heads, seq], such as the log-sum-exp.
template <class T>
T* row_of(const at::Tensor& x, int64_t b, int64_t h) {
  return x.data_ptr<T>() + b * x.stride(0) + h * x.stride(1);
}

at::Tensor buffer_for(const at::Tensor& q, const at::Tensor& k) {
  return at::empty({std::min(kRows, q.size(2)) * k.size(2)}, q.options());
}

// Returns the scores scale q k^T of the query rows [first, first + rows) and an interval of the keys: a view
// of the buffer.
at::Tensor scores_of(const at::Tensor& buffer, const at::Tensor& q, const at::Tensor& k, int64_t first, int64_t rows,
                     Interval keys, double scale) {
  auto s = buffer.narrow(0, 0, rows * keys.size()).view({rows, keys.size()});
  at::addmm_out(s, s, q.narrow(0, first, rows), k.narrow(0, keys.from, keys.size()).t(), 0, scale);
  return s;
}

// Calls body(b, head of q, head of k, scores, first row, number of rows, keys) for each block of query rows. No row of
// the block attends to keys outside the interval `keys`. The scores include the bias of the padding.
template <class T, class Body>
void for_blocks(const Triple& x, const PairMask& mask, double scale, Body body) {
  const auto buffer = buffer_for(x.q, x.k);
  std::vector<T> bias(mask.padding.defined() ? x.k.size(2) : 0);
  for (int64_t b = 0; b < x.q.size(0); ++b) {
    if (mask.padding.defined()) padding_bias(mask.padding, b, bias);
    for (int64_t h = 0; h < x.q.size(1); ++h) {
      const int64_t h_k = h / x.group();
      const auto q = head(x.q, b, h), k = head(x.k, b, h_k);
      for (int64_t first = 0; first < q.size(0); first += kRows) {
        const int64_t rows = std::min(kRows, q.size(0) - first);
        const auto keys = kept_by_rows(mask, first, rows, k.size(0));
        const auto s = scores_of(buffer, q, k, first, rows, keys, scale);
        for (int64_t row = 0; row < rows && !bias.empty(); ++row)
          {
            auto* x = s.data_ptr<T>() + row * keys.size();
            add_rows(x, x, bias.data() + keys.from, keys.size());
          }
        body(b, h, h_k, s, first, rows, keys);
      }
    }
  }
}

// Calls f(pointer to scores, number of keys, row) for the attended keys of each row. The scores of all other keys
// become zero.
template <class T, class F>
void for_rows(const at::Tensor& s, const PairMask& mask, int64_t first, Interval keys, int64_t all_keys, F f) {
  for (int64_t row = 0; row < s.size(0); ++row) {
    auto* p = s.data_ptr<T>() + row * keys.size();
    auto kept = kept_keys(mask, first + row, all_keys);
    if (kept.size()) kept = {kept.from - keys.from, kept.to - keys.from};
    f(p + kept.from, kept.size(), first + row);
    std::fill(p, p + kept.from, T(0));
    std::fill(p + kept.to, p + keys.size(), T(0));
  }
}

// Replaces scores by exp(score - maximum of the row), and calls f(row, maximum, sum of the row). Maximum and sum are 0
// for a row without attended keys.
template <class T, class F>
void exponentials(const at::Tensor& s, const PairMask& mask, int64_t first, Interval keys, int64_t all_keys, F f) {
  for_rows<T>(s, mask, first, keys, all_keys, [&](T* p, int64_t n, int64_t row) {
    const T top = n ? max_of(p, n) : -std::numeric_limits<T>::infinity();
    if (top == -std::numeric_limits<T>::infinity()) {
      std::fill(p, p + n, T(0));
      f(row, T(0), T(0));
      return;
    }
    exp_row(p, p, top, T(1), n);
    f(row, top, sum_vectors<T>(n, [&](int64_t k, int64_t count) { return keep(load(p + k, count), count); }));
  });
}

// Replaces scores by probabilities: exp(score - lse of the row), or 0 for masked keys.
template <class T>
void probabilities(const at::Tensor& s, const at::Tensor& lse, const PairMask& mask, int64_t first, Interval keys,
                   int64_t all_keys) {
  for_rows<T>(s, mask, first, keys, all_keys,
              [&](T* p, int64_t n, int64_t row) { exp_row(p, p, lse.data_ptr<T>()[row], T(1), n); });
}

// Calls f(pointer to the scores of the attended keys, row, first attended key, number of attended keys) for each row of
// a block.
template <class T, class F>
void for_kept(const at::Tensor& s, const PairMask& mask, int64_t first, Interval keys, int64_t all_keys, F f) {
  for (int64_t row = 0; row < s.size(0); ++row) {
    const auto kept = kept_keys(mask, first + row, all_keys);
    f(s.data_ptr<T>() + row * keys.size() + kept.from - keys.from, first + row, kept.from, kept.size());
  }
}

at::Tensor rows_of(const at::Tensor& x, Interval keys) { return x.narrow(0, keys.from, keys.size()); }

// Calls f(head, batch, head of k) with the keys and values of each head, see HeadAttention::begin.
template <class T, class F>
void for_heads(const Triple& x, bool diagonal, bool gradients, F f) {
  auto& head = buffers_of_head<T>();
  for (int64_t b = 0; b < x.k.size(0); ++b)
    for (int64_t h = 0; h < x.k.size(1); ++h) {
      const HeadSizes sizes{x.q.size(2), x.k.size(2), x.q.size(3), diagonal};
      head.begin(sizes, rows_of_head<const T>(x.k, b, h), rows_of_head<const T>(x.v, b, h), gradients);
      f(head, b, h);
    }
}

// Computes attention without a mask, or with the causal mask.
void heads(const AttentionArgs& args, const Triple& x, const at::Tensor& out, const at::Tensor& lse) {
  dispatch(lse, [&](auto zero) {
    using T = decltype(zero);
    for_heads<T>(x, args.diagonal, false, [&](auto& head, int64_t b, int64_t h_k) {
      for (int64_t h = h_k * x.group(); h < (h_k + 1) * x.group(); ++h)
        head.forward(rows_of_head<const T>(x.q, b, h), rows_of_head<T>(out, b, h), row_of<T>(lse, b, h),
                     static_cast<T>(args.scale));
    });
  });
}

// The gradients of `heads`. adds: adds to the gradients of k and v.
void heads_grad(const AttentionGradArgs& args, const Triple& x, const Triple& grads, const at::Tensor& d_out,
                const at::Tensor& out, const at::Tensor& lse, bool adds) {
  dispatch(lse, [&](auto zero) {
    using T = decltype(zero);
    for_heads<T>(x, args.diagonal, true, [&](auto& head, int64_t b, int64_t h_k) {
      for (int64_t h = h_k * x.group(); h < (h_k + 1) * x.group(); ++h)
        head.backward(rows_of_head<const T>(x.q, b, h), rows_of_head<const T>(d_out, b, h),
                      rows_of_head<const T>(out, b, h), row_of<T>(lse, b, h), rows_of_head<T>(grads.q, b, h),
                      static_cast<T>(args.scale));
      head.end(rows_of_head<T>(grads.k, b, h_k), rows_of_head<T>(grads.v, b, h_k), adds);
    });
  });
}

// Returns whether each segment is attention without other masks: the tile has all positions, and the mask has no
// dropout, no window and no padding.
bool whole_segments(const PairMask& mask, const Triple& x) {
  return mask.segments.defined() && !mask.dropout && !mask.window && !mask.padding.defined() && !mask.seq && !mask.key &&
         x.q.size(2) == x.k.size(2);
}

// Calls f(first position, number of positions) for each segment, then outside(first position, number of positions) for
// the positions outside all segments.
template <class Segment, class Outside>
void for_segments(const at::Tensor& segments, int64_t positions, Segment f, Outside outside) {
  const auto* offsets = segments.data_ptr<int64_t>();
  const auto last = segments.numel() - 1;
  for (int64_t k = 0; k < last; ++k) {
    const auto from = std::min(offsets[k], positions), to = std::min(offsets[k + 1], positions);
    if (from < to) f(from, to - from);
  }
  const auto from = std::min(offsets[0], positions), to = std::min(offsets[last], positions);
  if (from) outside(int64_t{0}, from);
  if (to < positions) outside(to, positions - to);
}

Triple part_of(const Triple& x, int64_t from, int64_t count) {
  return {x.q.narrow(2, from, count), x.k.narrow(2, from, count), x.v.narrow(2, from, count)};
}

// tiles: out, lse, q/k/v, padding, segments
void attention(Args& t) {
  const AttentionArgs args(t);
  const auto out = as_bhsd(t[0], args.out), lse = t[1];
  const Triple x(t, args.qkv, 2);
  const PairMask mask(t, args.diagonal, args.limits, 2 + x.count);
  if (mask.simple()) return heads(args, x, out, lse);
  if (whole_segments(mask, x)) {
    const auto one = [&](int64_t from, int64_t count) {
      heads(args, part_of(x, from, count), out.narrow(2, from, count), lse.narrow(2, from, count));
    };
    const auto none = [&](int64_t from, int64_t count) {
      out.narrow(2, from, count).zero_();
      lse.narrow(2, from, count).zero_();
    };
    return for_segments(mask.segments, x.q.size(2), one, none);
  }
  dispatch(lse, [&](auto zero) {
    using T = decltype(zero);
    for_blocks<T>(x, mask, args.scale, [&](int64_t b, int64_t h, int64_t h_k, const at::Tensor& s, int64_t first,
                                           int64_t rows, Interval keys) {
      auto sums = at::empty({rows, 1}, lse.options());
      auto* to = head(lse, b, h).data_ptr<T>();
      exponentials<T>(s, mask, first, keys, x.k.size(2), [&](int64_t row, T top, T sum) {
        sums.data_ptr<T>()[row - first] = sum ? sum : T(1);
        to[row] = sum ? top + std::log(sum) : T(0);
      });
      if (mask.dropout)
        for_kept<T>(s, mask, first, keys, x.k.size(2), [&, drop = ScoresDropout(mask, t)](
                        T* p, int64_t row, int64_t key, int64_t n) { drop.apply(p, b, h, row, key, n); });
      head(out, b, h).narrow(0, first, rows).copy_(s.mm(rows_of(head(x.v, b, h_k), keys)).div_(sums));
    });
  });
}

// Adds the gradients of a pair of tiles to `grads`. delta: as in attention_delta.
template <class T>
void add_grads(const Triple& x, const Triple& grads, const PairMask& mask, const at::Tensor& d_out,
               const at::Tensor& lse, const at::Tensor& delta, double scale, const Args& t) {
  const auto products = buffer_for(x.q, x.k);
  for_blocks<T>(x, mask, scale, [&](int64_t b, int64_t h, int64_t h_k, const at::Tensor& p, int64_t first,
                                    int64_t rows, Interval keys) {
    probabilities<T>(p, head(lse, b, h), mask, first, keys, x.k.size(2));
    const auto g = head(d_out, b, h), v = head(x.v, b, h_k);
    const auto ds = scores_of(products, g, v, first, rows, keys, 1.0);
    auto dv = rows_of(head(grads.v, b, h_k), keys), dk = rows_of(head(grads.k, b, h_k), keys);
    auto dq = head(grads.q, b, h).narrow(0, first, rows);
    auto weights = p;
    if (mask.dropout) {
      const auto factors = at::ones_like(p);
      for_kept<T>(factors, mask, first, keys, x.k.size(2), [&, drop = ScoresDropout(mask, t)](
                      T* f, int64_t row, int64_t key, int64_t n) { drop.apply(f, b, h, row, key, n); });
      weights = p.mul(factors);
      ds.mul_(factors);
    }
    at::addmm_out(dv, dv, weights.t(), g.narrow(0, first, rows));
    const auto row_delta = head(delta, b, h);
    for (int64_t row = 0; row < rows; ++row) {
      auto* out = ds.data_ptr<T>() + row * keys.size();
      const auto* in = p.data_ptr<T>() + row * keys.size();
      const Vec<T> d(row_delta.data_ptr<T>()[first + row]), s(static_cast<T>(scale));
      for_vectors<T>(keys.size(), [&](int64_t c, int64_t n) {
        (load(in + c, n) * (load(out + c, n) - d) * s).store(out + c, static_cast<int>(n));
      });
    }
    at::addmm_out(dq, dq, ds, rows_of(head(x.k, b, h_k), keys));
    at::addmm_out(dk, dk, ds.t(), head(x.q, b, h).narrow(0, first, rows));
  });
}

// tiles: do, out, lse, q/k/v, dq/dk/dv, padding, segments
void attention_grad(Args& t) {
  const AttentionGradArgs args(t);
  const auto d_out = as_bhsd(t[0], args.d_out), out = as_bhsd(t[1], args.out), lse = t[2];
  const Triple x(t, args.qkv, 3), grads(t, args.grads, 3 + x.count);
  const PairMask mask(t, args.diagonal, args.limits, 3 + x.count + grads.count);
  const bool adds = t.accumulates(3 + x.count + args.grads.k[0]);  // tasks of other heads add to dk and dv too
  if (mask.simple()) return heads_grad(args, x, grads, d_out, out, lse, adds);
  if (whole_segments(mask, x)) {
    const auto one = [&](int64_t from, int64_t count) {
      const auto part = [&](const at::Tensor& y) { return y.narrow(2, from, count); };
      heads_grad(args, part_of(x, from, count), part_of(grads, from, count), part(d_out), part(out), part(lse), adds);
    };
    const auto none = [&](int64_t from, int64_t count) {
      const auto part = part_of(grads, from, count);
      part.q.zero_();
      for (const auto& y : {part.k, part.v})
        if (!adds) y.zero_();
    };
    return for_segments(mask.segments, x.q.size(2), one, none);
  }
  clear(t, 3 + x.count, grads.count);
  const auto delta = d_out.mul(out).sum(-1).contiguous();
  dispatch(lse, [&](auto zero) { add_grads<decltype(zero)>(x, grads, mask, d_out, lse, delta, args.scale, t); });
}

// tiles: state [.., (max, sumexp, values)] (without values for flash_maxsumexp), q/k/v, padding, segments
void add_state(Args& t, bool values) {
  const PairArgs args(t);
  const Triple x(t, args.qkv, 1);
  const PairMask mask(t, args.diagonal, args.limits, 1 + x.count);
  const auto state = t[0];
  const auto part = t.accumulates(0) ? at::empty(state.sizes(), state.options()) : state;
  dispatch(state, [&](auto zero) {
    using T = decltype(zero);
    for_blocks<T>(x, mask, args.scale, [&](int64_t b, int64_t h, int64_t h_k, const at::Tensor& s, int64_t first,
                                           int64_t rows, Interval keys) {
      const auto to = head(part, b, h);
      exponentials<T>(s, mask, first, keys, x.k.size(2), [&](int64_t row, T top, T sum) {
        to.data_ptr<T>()[row * to.size(1)] = top;
        to.data_ptr<T>()[row * to.size(1) + 1] = sum;
      });
      if (values) to.narrow(0, first, rows).narrow(1, 2, x.v.size(3)).copy_(s.mm(rows_of(head(x.v, b, h_k), keys)));
    });
  });
  if (t.accumulates(0)) combine(Monoid::softmax, state, part);
}

void attention_partial(Args& t) { add_state(t, true); }

void flash_maxsumexp(Args& t) { add_state(t, false); }

// Returns the values sumexp of a state, with 1 in the place of 0, because rows without attended keys are divided by
// them too.
at::Tensor sums_of(const at::Tensor& state) {
  const auto sum = state.select(-1, 1);
  return sum.masked_fill(sum.eq(0), 1.0);
}

// tiles: out, lse, state
void attention_normalise(Args& t) {
  const OutArgs args(t);
  const auto out = as_bhsd(t[0], args.out), lse = t[1], state = t[2], sum = sums_of(state);
  out.copy_(state.narrow(-1, 2, state.size(-1) - 2).div(sum.unsqueeze(-1)));
  lse.copy_(sum.log().add_(state.select(-1, 0)));
}

// tiles: lse, state
void attention_lse(Args& t) { t[0].copy_(sums_of(t[1]).log_().add_(t[1].select(-1, 0))); }

// tiles: out (ACC), lse, q/k/v, padding, segments
void flash_softmax_gemm(Args& t) {
  const AttentionArgs args(t);
  const auto out = as_bhsd(t[0], args.out), lse = t[1];
  const Triple x(t, args.qkv, 2);
  const PairMask mask(t, args.diagonal, args.limits, 2 + x.count);
  dispatch(lse, [&](auto zero) {
    using T = decltype(zero);
    for_blocks<T>(x, mask, args.scale, [&](int64_t b, int64_t h, int64_t h_k, const at::Tensor& s, int64_t first,
                                           int64_t rows, Interval keys) {
      probabilities<T>(s, head(lse, b, h), mask, first, keys, x.k.size(2));
      auto target = head(out, b, h).narrow(0, first, rows);
      at::addmm_out(target, target, s, rows_of(head(x.v, b, h_k), keys), t.accumulates(0) ? 1 : 0, 1);
    });
  });
}

// tiles: delta, do, out
void attention_delta(Args& t) {
  const DeltaArgs args(t);
  t[0].copy_(as_bhsd(t[1], args.d_out).mul(as_bhsd(t[2], args.out)).sum(-1));
}

// tiles: do, lse, delta, q/k/v, dq/dk/dv (ACC), padding, segments
void attention_grad_pair(Args& t) {
  const PairGradArgs args(t);
  const auto d_out = as_bhsd(t[0], args.d_out), lse = t[1], delta = t[2];
  const Triple x(t, args.qkv, 3), grads(t, args.grads, 3 + x.count);
  const PairMask mask(t, args.diagonal, args.limits, 3 + x.count + grads.count);
  clear(t, 3 + x.count, grads.count);
  dispatch(lse, [&](auto zero) { add_grads<decltype(zero)>(x, grads, mask, d_out, lse, delta, args.scale, t); });
}

// tiles: y [.., heads, ..], x [.., kv_heads, ..]
void attention_repeat(Args& t) {
  const RepeatArgs args(t);
  const auto y = t[0], x = t[1];
  y.unflatten(args.axis, {x.size(args.axis), -1}).copy_(x.unsqueeze(args.axis + 1));
}

// tiles: dx (ACC), dy
void attention_repeat_grad(Args& t) {
  const RepeatArgs args(t);
  const auto dx = t[0], sum = t[1].unflatten(args.axis, {dx.size(args.axis), -1}).sum(args.axis + 1, false, std::nullopt);
  if (t.accumulates(0)) dx.add_(sum);
  else dx.copy_(sum);
}

NNTILE_KERNEL(attention, attention);
NNTILE_KERNEL(attention_grad, attention_grad);
NNTILE_KERNEL(attention_segments, attention);
NNTILE_KERNEL(attention_segments_grad, attention_grad);
NNTILE_KERNEL(attention_varlen, attention);
NNTILE_KERNEL(attention_varlen_grad, attention_grad);
NNTILE_KERNEL(attention_cudnn, attention);
NNTILE_KERNEL(attention_cudnn_grad, attention_grad);
NNTILE_KERNEL(attention_partial, attention_partial);
NNTILE_KERNEL(attention_normalise, attention_normalise);
NNTILE_KERNEL(flash_maxsumexp, flash_maxsumexp);
NNTILE_KERNEL(attention_lse, attention_lse);
NNTILE_KERNEL(flash_softmax_gemm, flash_softmax_gemm);
NNTILE_KERNEL(attention_delta, attention_delta);
NNTILE_KERNEL(attention_grad_pair, attention_grad_pair);
NNTILE_KERNEL(attention_repeat, attention_repeat);
NNTILE_KERNEL(attention_repeat_grad, attention_repeat_grad);
NNTILE_CUDA_KERNEL(attention_normalise, attention_normalise);
NNTILE_CUDA_KERNEL(attention_lse, attention_lse);
NNTILE_CUDA_KERNEL(attention_repeat, attention_repeat);
NNTILE_CUDA_KERNEL(attention_repeat_grad, attention_repeat_grad);

}  // namespace
}  // namespace nntile
