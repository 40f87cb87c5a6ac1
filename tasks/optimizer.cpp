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
    // Short runs in the tile's own precision, added up in double.
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

// tiles: param, m, v, grad, clip
void adamw(Args& t) {
  const AdamWArgs a(t);
  const auto param = t[0], first = t[1], second = t[2], grad = t[3];
  const double factor = *t[4].data_ptr<double>();
  if (factor < 0) return;
  dispatch(param, [&](auto zero) {
    using T = decltype(zero);
    auto *p = param.data_ptr<T>(), *m = first.data_ptr<T>(), *v = second.data_ptr<T>();
    const auto* g = grad.data_ptr<T>();
    const auto constant = [](double x) { return Vec<T>(static_cast<T>(x)); };
    const auto scale = constant(factor), decay = constant(1 - a.lr * a.weight_decay);
    const auto step = constant(a.lr / a.beta1_correction);
    const auto keep1 = constant(a.beta1), new1 = constant(1 - a.beta1);
    const auto keep2 = constant(a.beta2), new2 = constant(1 - a.beta2);
    const auto root = constant(1 / std::sqrt(a.beta2_correction)), eps = constant(a.eps);
    for_vectors<T>(param.numel(), [&](int64_t k, int64_t count) {
      const int c = static_cast<int>(count);
      const auto d = load(g + k, count) * scale;
      const auto mk = at::vec::fmadd(keep1, load(m + k, count), new1 * d);
      const auto vk = at::vec::fmadd(keep2, load(v + k, count), new2 * d * d);
      mk.store(m + k, c);
      vk.store(v + k, c);
      (load(p + k, count) * decay - step * mk / at::vec::fmadd(vk.sqrt(), root, eps)).store(p + k, c);
    });
  });
}

// tiles: grad, clip, param (, m)
void sgd(Args& t) {
  const SGDArgs a(t);
  const auto grad = t[0], param = t[2];
  const bool momentum = t.tiles() > 3;
  const auto velocity = momentum ? t[3] : at::Tensor();
  const double factor = *t[1].data_ptr<double>();
  if (factor < 0) return;
  dispatch(param, [&](auto zero) {
    using T = decltype(zero);
    auto *p = param.data_ptr<T>(), *m = momentum ? velocity.data_ptr<T>() : nullptr;
    const auto* g = grad.data_ptr<T>();
    const auto scale = static_cast<T>(factor), lr = static_cast<T>(a.lr);
    const auto keep_m = static_cast<T>(a.momentum), decay = static_cast<T>(a.weight_decay);
    for (int64_t k = 0; k < param.numel(); ++k) {
      T d = g[k] * scale + decay * p[k];
      if (m) d = m[k] = keep_m * m[k] + d;
      p[k] -= lr * d;
    }
  });
}

NNTILE_KERNEL(sum_squares, sum_squares);
NNTILE_KERNEL(add_scalars, add_scalars);
NNTILE_KERNEL(clip, clip_alone);
NNTILE_KERNEL(clip_scaled, clip_scaled);
NNTILE_KERNEL(adamw, adamw);
NNTILE_KERNEL(sgd, sgd);

}  // namespace
}  // namespace nntile
