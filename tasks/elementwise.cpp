#include <ATen/ops/add.h>
#include <ATen/ops/sum.h>

#include "common.h"

namespace nntile {
namespace {

void add(Args& t) {
  auto out = t[0];
  at::add_out(out, t[1], t[2]);
}

void bias_add(Args& t) {
  auto out = t[0];
  at::add_out(out, t[1], t[2].view(t.ints()));
}

void sum(Args& t) {
  auto out = t[0];
  const auto total = t[1].sum(at::IntArrayRef(t.ints().data(), t.ints().size()));
  if (t.accumulates(0)) out.add_(total);
  else out.copy_(total);
}

void transpose(Args& t) { t[0].copy_(t[1].permute(slice(t, 0, t.ints().size()))); }

void unpack(Args& t) {
  for (size_t k = 1; k < t.tiles(); ++k) t[k].copy_(t[0].select(t.i(0), static_cast<int64_t>(k) - 1));
}

void pack(Args& t) {
  for (size_t k = 1; k < t.tiles(); ++k) t[0].select(t.i(0), static_cast<int64_t>(k) - 1).copy_(t[k]);
}

uint64_t hash(uint64_t index, uint64_t start) {
  uint64_t z = ((index + 1) * 0x9E3779B97F4A7C15ULL) ^ start;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z >> 32;
}

// ints: key, index of the tile's first element in the whole tensor, strides of the whole tensor.
void dropout(Args& t) {
  const auto out = t[0], x = t[1];
  const auto seed = static_cast<uint64_t>(t.f(0));
  const double p = t.f(1);
  const uint64_t start = (seed * 0x9E3779B97F4A7C15ULL) ^ (static_cast<uint64_t>(t.i(0)) * 0xD1B54A32D192ED03ULL);
  const auto limit = static_cast<uint64_t>(p * 4294967296.0);
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    const T scale = static_cast<T>(1 / (1 - p));
    auto* y = out.data_ptr<T>();
    const auto* in = x.data_ptr<T>();
    const int64_t columns = x.size(-1);
    for (int64_t row = 0; row < x.numel() / columns; ++row) {
      int64_t first = t.i(1), rest = row;
      for (int64_t axis = x.dim() - 2; axis >= 0; --axis) {
        first += rest % x.size(axis) * t.i(static_cast<size_t>(axis) + 2);
        rest /= x.size(axis);
      }
      for (int64_t k = 0; k < columns; ++k, ++y, ++in)
        *y = hash(static_cast<uint64_t>(first + k), start) >= limit ? *in * scale : T(0);
    }
  });
}

NNTILE_KERNEL(add, add);
NNTILE_KERNEL(bias_add, bias_add);
NNTILE_KERNEL(sum, sum);
NNTILE_KERNEL(transpose, transpose);
NNTILE_KERNEL(unpack, unpack);
NNTILE_KERNEL(pack, pack);
NNTILE_KERNEL(dropout, dropout);

}  // namespace
}  // namespace nntile
