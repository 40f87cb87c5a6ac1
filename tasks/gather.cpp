// Rows of x [rows, positions, width] at places [rows, count], -1 for none, and the gradient: a sum into those rows.
#include "common.h"
#include "gather_args.h"

namespace nntile {
namespace {

// tiles: y, x, places
void gather(Args& t) {
  const GatherArgs args(t);
  const auto y = t[0], x = t[1], places = t[2];
  dispatch(y, [&](auto zero) {
    using T = decltype(zero);
    const int64_t width = x.size(-1), positions = x.size(-2), count = places.size(-1);
    auto* out = y.data_ptr<T>();
    const auto* place = places.data_ptr<int64_t>();
    const auto* from = x.data_ptr<T>();
    for (int64_t k = 0; k < places.numel(); ++k, out += width) {
      if (place[k] < -1 || place[k] >= args.positions)
        throw std::out_of_range("place " + std::to_string(place[k]) + " is none of " + std::to_string(args.positions) +
                                " positions");
      const int64_t at = place[k] - args.first;
      if (place[k] >= 0 && at >= 0 && at < positions) std::copy_n(from + (k / count * positions + at) * width, width, out);
      else if (!t.accumulates(0)) std::fill_n(out, width, T(0));
    }
  });
}

// tiles: dx, dy, places
void gather_grad(Args& t) {
  const GatherGradArgs args(t);
  const auto dx = t[0], dy = t[1], places = t[2];
  if (!t.accumulates(0)) dx.zero_();
  dispatch(dx, [&](auto zero) {
    using T = decltype(zero);
    const int64_t width = dx.size(-1), positions = dx.size(-2), count = places.size(-1);
    auto* out = dx.data_ptr<T>();
    const auto* place = places.data_ptr<int64_t>();
    const auto* from = dy.data_ptr<T>();
    for (int64_t k = 0; k < places.numel(); ++k, from += width) {
      const int64_t at = place[k] - args.first;
      if (place[k] < 0 || at < 0 || at >= positions) continue;
      auto* row = out + (k / count * positions + at) * width;
      for_vectors<T>(width, [&](int64_t c, int64_t n) {
        (load(row + c, n) + load(from + c, n)).store(row + c, static_cast<int>(n));
      });
    }
  });
}

NNTILE_KERNEL(gather, gather);
NNTILE_KERNEL(gather_grad, gather_grad);

}  // namespace
}  // namespace nntile
