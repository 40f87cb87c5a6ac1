// Operands of attention kernels (attention_operands.py), and masks of a pair of tiles: a tile of queries and a tile of
// keys.
#pragma once
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <limits>

#include "attention_tasks_args.h"

namespace nntile {

using Order = std::array<int64_t, 4>;

// Returns x as [b, h, s, d]; the order has -1 for the batch if x has none.
inline at::Tensor as_bhsd(const at::Tensor& x, const Order& order) {
  if (order[0] >= 0) return x.permute(order);
  return x.permute({order[1], order[2], order[3]}).unsqueeze(0);
}

// Views [b, h, s, d] of q, k, v (or their gradients) in the task's tiles from `first` on; v is undefined for a task
// that does not read v. k and v may have fewer heads: consecutive heads of q then share a head.
struct Triple {
  at::Tensor q, k, v;
  size_t count = 0;  // number of tiles

  Triple(const Args& t, const OperandsArgs& args, size_t first) {
    const auto operand = [&](const std::array<int64_t, 2>& place) {
      const auto tile = static_cast<size_t>(place[0]);
      count = std::max(count, tile + 1);
      const auto whole = t[first + tile];
      return as_bhsd(place[1] < 0 ? whole : whole.select(args.axis, place[1]), args.order);
    };
    q = operand(args.q);
    k = operand(args.k);
    if (args.v[0] >= 0) v = operand(args.v);
  }
  Triple(at::Tensor q_, at::Tensor k_, at::Tensor v_) : q(std::move(q_)), k(std::move(k_)), v(std::move(v_)) {}

  int64_t group() const { return q.size(1) / k.size(1); }
};

// Masks of a pair of tiles; the data of the masks are in the task's tiles from `first` on.
struct PairMask {
  bool diagonal;
  int64_t seq = 0, key = 0, window = 0, longest = 0;  // positions of the first query and key; see Limits in mask.py
  bool two_sided = false;
  at::Tensor padding, segments;
  std::optional<DropoutArgs> dropout;

  PairMask(const Args& t, bool diagonal_, const std::optional<Limits>& limits, size_t first) : diagonal(diagonal_) {
    if (!limits) return;
    seq = limits->seq;
    key = limits->key;
    window = limits->window;
    two_sided = limits->two_sided;
    longest = limits->longest;
    if (limits->padding) padding = t[first++];
    if (limits->segments) segments = t[first].flatten();  // the batch has one row
    dropout = limits->dropout;
  }
  bool simple() const { return !window && !padding.defined() && !segments.defined() && !dropout; }
  // The window for ATen's flash attention: keys before the query, keys after it.
  std::optional<int64_t> left() const { return window ? std::make_optional(window - 1) : std::nullopt; }
  std::optional<int64_t> right() const {
    return window ? std::make_optional(two_sided ? window - 1 : 0) : std::nullopt;
  }
};

// Repeats each head of k or v `group` times, so that each head of q has one.
inline at::Tensor repeated(const at::Tensor& x, int64_t group) {
  return group == 1 ? x : x.unsqueeze(2).expand({-1, -1, group, -1, -1}).flatten(1, 2);
}

// Sums over each group of consecutive heads: the gradient of `repeated`.
inline at::Tensor of_groups(const at::Tensor& x, int64_t group) {
  return group == 1 ? x : x.unflatten(1, {-1, group}).sum(2);
}

// Clears the tiles of [first, first + count) to which the task does not add.
inline void clear(Args& t, size_t first, size_t count) {
  for (size_t k = first; k < first + count; ++k)
    if (!t.accumulates(k)) t[k].zero_();
}

}  // namespace nntile
