#include <cmath>

#include "common.h"
#include "adamw_args.h"

namespace nntile {
namespace {

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

NNTILE_KERNEL(adamw, adamw);

}  // namespace
}  // namespace nntile
