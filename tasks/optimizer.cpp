#include <cmath>

#include "common.h"
#include "optimizer_args.h"

namespace nntile {
namespace {

// tiles: sum (fp64), grad
void sum_squares(Args& t) {
  const auto grad = t[1];
  double total = 0;
  dispatch(grad, [&](auto zero) {
    using T = decltype(zero);
    const auto* g = grad.data_ptr<T>();
    // Sums a short run in the tile's dtype, and adds the sums of the runs in double.
    constexpr int64_t run = 1024;
    for (int64_t first = 0; first < grad.numel(); first += run)
      total += static_cast<double>(sum_vectors<T>(std::min(run, grad.numel() - first), [&](int64_t k, int64_t count) {
        const auto v = load(g + first + k, count);
        return keep(v * v, count);
      }));
  });
  *t[0].data_ptr<double>() = total;
}

// tiles: sum, terms...
void add_scalars(Args& t) {
  double total = 0;
  for (size_t k = 1; k < t.tiles(); ++k) total += *t[k].data_ptr<double>();
  *t[0].data_ptr<double>() = total;
}

// tiles: norm, clip, sums of squares...
void clip(Args& t, const ClipArgs& a, double inverse) {
  double total = 0;
  for (size_t k = 2; k < t.tiles(); ++k) total += *t[k].data_ptr<double>();
  const double norm = std::sqrt(total) * inverse;
  *t[0].data_ptr<double>() = norm;
  *t[1].data_ptr<double>() = (a.max_norm > 0 ? std::min(1.0, a.max_norm / (norm + 1e-6)) : 1.0) * inverse;
  if (a.skip_above > 0 && !(norm <= a.skip_above)) *t[1].data_ptr<double>() = -1;
}

void clip_alone(Args& t) { clip(t, ClipArgs(t), 1); }

void clip_scaled(Args& t) {
  const ScaledClipArgs a(t);
  clip(t, a.clip, a.inverse);
}

NNTILE_KERNEL(sum_squares, sum_squares);
NNTILE_KERNEL(add_scalars, add_scalars);
NNTILE_KERNEL(clip, clip_alone);
NNTILE_KERNEL(clip_scaled, clip_scaled);

}  // namespace
}  // namespace nntile
