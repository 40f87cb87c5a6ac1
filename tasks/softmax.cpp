// Softmax over the last axis of tiles [..., seq, key].
#include <ATen/ops/sum.h>

#include "attention_cpu.h"
#include "softmax_args.h"

namespace nntile {
namespace {

// Rows of a tile of scores with their attended keys.
template <class T>
struct Rows {
  Rows(const Args& t, const SoftmaxArgs& args, const at::Tensor& scores, size_t first)
      : seq(scores.size(-2)), keys(scores.size(-1)), count(scores.numel() / keys),
        mask(t, args.diagonal, args.masked ? std::make_optional(args.masked->limits) : std::nullopt, first) {
    if (!args.masked) mask.seq = args.shift;
    if (!mask.padding.defined()) return;
    rows = args.masked->rows;
    bias.resize(mask.padding.size(0));
    for (size_t b = 0; b < bias.size(); ++b) padding_bias(mask.padding, b, bias[b]);
  }

  Interval kept(int64_t row) const { return kept_keys(mask, row % seq, keys); }

  // Sets the scores of padding keys to -inf.
  void pad(T* x, int64_t row, Interval in) const {
    if (!bias.empty()) add_rows(x, x, bias[row / rows % bias.size()].data() + in.from, in.size());
  }

  int64_t seq, keys, count, rows = 1;
  PairMask mask;
  std::vector<std::vector<T>> bias;
};

// tiles: state (ACC), scores, padding, segments
void maxsumexp(Args& t) {
  const SoftmaxArgs args(t);
  const auto state = t[0], scores = t[1];
  const bool accumulates = t.accumulates(0);
  const auto part = accumulates ? at::Tensor(state.clone()) : state;
  dispatch(scores, [&](auto zero) {
    using T = decltype(zero);
    const Rows<T> rows(t, args, scores, 2);
    std::vector<T> padded(rows.bias.empty() ? 0 : rows.keys);
    for (int64_t row = 0; row < rows.count; ++row) {
      const auto kept = rows.kept(row);
      const T* x = scores.data_ptr<T>() + row * rows.keys + kept.from;
      auto* s = part.data_ptr<T>() + row * 2;
      if (!padded.empty()) {
        std::copy_n(x, kept.size(), padded.data());
        rows.pad(padded.data(), row, kept);
        x = padded.data();
      }
      const T top = kept.size() ? max_of(x, kept.size()) : -std::numeric_limits<T>::infinity();
      const bool nothing = top == -std::numeric_limits<T>::infinity();
      s[0] = nothing ? T(0) : top;
      s[1] = nothing ? T(0) : sumexp_of(x, top, kept.size());
    }
  });
  if (accumulates) combine(Monoid::softmax, state, part);
}

// tiles: p, scores, state, padding, segments
void softmax(Args& t) {
  const SoftmaxArgs args(t);
  const auto p = t[0], scores = t[1], state = t[2];
  dispatch(scores, [&](auto zero) {
    using T = decltype(zero);
    const Rows<T> rows(t, args, scores, 3);
    for (int64_t row = 0; row < rows.count; ++row) {
      const auto* s = state.data_ptr<T>() + row * 2;
      const auto kept = s[1] == T(0) ? Interval{} : rows.kept(row);
      auto* out = p.data_ptr<T>() + row * rows.keys;
      std::copy_n(scores.data_ptr<T>() + row * rows.keys + kept.from, kept.size(), out + kept.from);
      rows.pad(out + kept.from, row, kept);
      exp_row(out + kept.from, out + kept.from, s[0], T(1) / s[1], kept.size());
      std::fill(out, out + kept.from, T(0));
      std::fill(out + kept.to, out + rows.keys, T(0));
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
