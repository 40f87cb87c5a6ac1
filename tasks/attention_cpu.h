// Masks on the CPU. All masks but padding and dropout leave a query an interval of the tile's keys. Padding is a bias,
// added to the scores.
#pragma once
#include <vector>

#include "attention.h"
#include "dropout.h"
#include "rows.h"

namespace nntile {

struct Interval {
  int64_t from = 0, to = 0;  // keys, numbered in the tile
  int64_t size() const { return to - from; }
};

// Returns the keys of the tile to which the query in row `row` attends. keys: number of keys in the tile.
inline Interval kept_keys(const PairMask& mask, int64_t row, int64_t keys) {
  const int64_t position = mask.seq + row;
  int64_t from = mask.key, to = mask.key + keys;
  if (mask.diagonal) to = std::min(to, position + 1);
  if (mask.window) from = std::max(from, position - mask.window + 1);
  if (mask.two_sided) to = std::min(to, position + mask.window);
  if (mask.segments.defined()) {
    const auto* first = mask.segments.data_ptr<int64_t>();
    const auto* last = first + mask.segments.numel();
    const auto* next = std::upper_bound(first, last, position);
    if (next == first || next == last) return {};
    from = std::max(from, next[-1]);
    to = std::min(to, next[0]);
  }
  return from < to ? Interval{from - mask.key, to - mask.key} : Interval{};
}

// Returns the smallest interval that contains the intervals of rows [first, first + rows).
inline Interval kept_by_rows(const PairMask& mask, int64_t first, int64_t rows, int64_t keys) {
  Interval all{keys, 0};
  for (int64_t row = first; row < first + rows; ++row) {
    const auto one = kept_keys(mask, row, keys);
    if (!one.size()) continue;
    all = {std::min(all.from, one.from), std::max(all.to, one.to)};
  }
  return all.size() > 0 ? all : Interval{};
}

// Computes the padding's bias of each key of sequence b: 0, or -inf where the key is masked.
template <class T>
void padding_bias(const at::Tensor& padding, int64_t b, std::vector<T>& bias) {
  const auto fill = [&](const auto* row) {
    for (size_t k = 0; k < bias.size(); ++k) bias[k] = row[k] ? T(0) : -std::numeric_limits<T>::infinity();
  };
  bias.resize(padding.size(1));
  if (padding.scalar_type() == at::kLong) fill(padding.data_ptr<int64_t>() + b * padding.size(1));
  else if (padding.scalar_type() == at::kShort) fill(padding.data_ptr<int16_t>() + b * padding.size(1));
  else throw std::invalid_argument("the padding must be int64 or int16");
}

// Dropout of the probabilities; see attention_dropout.py.
class ScoresDropout {
 public:
  // t: the task's tiles
  ScoresDropout(const PairMask& pairs, const Args& t) : mask_(*pairs.dropout, t), offsets_(pairs.segments) {}

  // p = p * mask / (1 - rate), for n keys from `key` on, query `row`, sequence b and head h. With segments, the keys
  // belong to the query's segment.
  template <class T>
  void apply(T* p, int64_t b, int64_t h, int64_t row, int64_t key, int64_t n) const {
    if (!n) return;
    const auto& steps = mask_.args().strides;
    int64_t first = mask_.args().first + h * steps[1], start = 0;
    if (offsets_.defined()) {
      const auto* offsets = offsets_.data_ptr<int64_t>();
      start = *(std::upper_bound(offsets, offsets + offsets_.numel(), row) - 1);
      first += mask_.number(start) * (steps[0] / steps[2]);
    } else {
      first += b * steps[0];
    }
    mask_.apply(p, p, first + (row - start) * steps[2] + key - start, n);
  }

 private:
  Mask mask_;
  at::Tensor offsets_;
};

}  // namespace nntile
