// Softmax over the last axis of tiles [..., seq, key]. ints: causal, seq offset - key offset of the tile.
#include <ATen/ops/sum.h>

#include "rows.h"

namespace nntile {
namespace {

// tiles: state (ACC), scores
void maxsumexp(Args& t) {
  const auto state = t[0], scores = t[1];
  const bool accumulates = t.accumulates(0);
  const auto part = accumulates ? at::Tensor(state.clone()) : state;
  dispatch(scores, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = scores.size(-1), seq = scores.size(-2);
    for (int64_t row = 0; row < scores.numel() / n; ++row) {
      const int64_t kept = t.i(0) ? std::clamp<int64_t>(row % seq + t.i(1) + 1, 0, n) : n;
      const auto* x = scores.data_ptr<T>() + row * n;
      auto* s = part.data_ptr<T>() + row * 2;
      s[0] = kept ? max_of(x, kept) : T(0);
      s[1] = kept ? sumexp_of(x, s[0], kept) : T(0);
    }
  });
  if (accumulates) combine(Monoid::softmax, state, part);
}

// tiles: p, scores, state
void softmax(Args& t) {
  const auto p = t[0], scores = t[1], state = t[2];
  dispatch(scores, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = scores.size(-1), seq = scores.size(-2);
    for (int64_t row = 0; row < scores.numel() / n; ++row) {
      const int64_t kept = t.i(0) ? std::clamp<int64_t>(row % seq + t.i(1) + 1, 0, n) : n;
      const auto* s = state.data_ptr<T>() + row * 2;
      auto* out = p.data_ptr<T>() + row * n;
      exp_row(out, scores.data_ptr<T>() + row * n, s[0], T(1) / s[1], kept);
      std::fill(out + kept, out + n, T(0));
    }
  });
}

// tiles: sums (ACC), p, dp
void softmax_grad_sums(Args& t) {
  const auto sums = t[0], p = t[1], dp = t[2];
  dispatch(p, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = p.size(-1);
    for (int64_t row = 0; row < p.numel() / n; ++row) {
      auto& sum = sums.data_ptr<T>()[row];
      sum = (t.accumulates(0) ? sum : T(0)) + dot_of(p.data_ptr<T>() + row * n, dp.data_ptr<T>() + row * n, n);
    }
  });
}

// tiles: out, p, dp, sums
void softmax_grad(Args& t) {
  auto out = t[0];
  const auto p = t[1], dp = t[2], sums = t[3];
  dispatch(p, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = p.size(-1);
    for (int64_t row = 0; row < p.numel() / n; ++row) {
      const Vec<T> sum(sums.data_ptr<T>()[row]);
      const auto *a = p.data_ptr<T>() + row * n, *b = dp.data_ptr<T>() + row * n;
      auto* y = out.data_ptr<T>() + row * n;
      for_vectors<T>(n, [&](int64_t k, int64_t count) {
        (load(a + k, count) * (load(b + k, count) - sum)).store(y + k, static_cast<int>(count));
      });
    }
  });
}

NNTILE_KERNEL(maxsumexp, maxsumexp);
NNTILE_KERNEL(softmax, softmax);
NNTILE_KERNEL(softmax_grad_sums, softmax_grad_sums);
NNTILE_KERNEL(softmax_grad, softmax_grad);

}  // namespace
}  // namespace nntile
