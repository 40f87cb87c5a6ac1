// Gathers from x [rows, positions, width] the positions `places` [rows, count]; the place -1 gives zeros. The gradient
// adds to these positions. Each of these axes may be several axes of the tiles.
#include "common.h"
#include "gather_args.h"

namespace nntile {
namespace {

struct Sizes {
  int64_t width, count, positions;

  // y has the axes of places, then width. x has rows, positions, width. The last `axes` axes of places form
  // the count.
  Sizes(const at::Tensor& y, const at::Tensor& x, const at::Tensor& places, int64_t axes)
      : width(y.numel() / places.numel()), count(1) {
    for (int64_t axis = places.dim() - axes; axis < places.dim(); ++axis) count *= places.size(axis);
    positions = x.numel() / width / (places.numel() / count);
  }
};

// tiles: y, x, places
void gather(Args& t) {
  const GatherArgs args(t);
  const auto y = t[0], x = t[1], places = t[2];
  const auto [width, count, positions] = Sizes(y, x, places, args.added);
  dispatch(y, [&](auto zero) {
    using T = decltype(zero);
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
  const auto [width, count, positions] = Sizes(dy, dx, places, args.added);
  dispatch(dx, [&](auto zero) {
    using T = decltype(zero);
    auto* out = dx.data_ptr<T>();
    const auto* place = places.data_ptr<int64_t>();
    const auto* from = dy.data_ptr<T>();
    for (int64_t k = 0; k < places.numel(); ++k, from += width) {
      const int64_t at = place[k] - args.first;
      if (place[k] < 0 || at < 0 || at >= positions) continue;
      auto* row = out + (k / count * positions + at) * width;
      add_rows(row, row, from, width);
    }
  });
}

NNTILE_KERNEL(gather, gather);
NNTILE_KERNEL(gather_grad, gather_grad);

}  // namespace
}  // namespace nntile
