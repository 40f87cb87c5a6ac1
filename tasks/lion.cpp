#include "common.h"
#include "lion_args.h"

namespace nntile {
namespace {

// tiles: param, m, grad, clip
void lion(Args& t) {
  const LionArgs a(t);
  const auto param = t[0], average = t[1], grad = t[2];
  const double factor = *t[3].data_ptr<double>();
  if (factor < 0) return;
  dispatch(param, [&](auto zero) {
    using T = decltype(zero);
    auto *p = param.data_ptr<T>(), *m = average.data_ptr<T>();
    const auto* g = grad.data_ptr<T>();
    const auto scale = static_cast<T>(factor), lr = static_cast<T>(a.lr);
    const auto decay = static_cast<T>(1 - a.lr * a.weight_decay);
    const auto keep1 = static_cast<T>(a.beta1), new1 = static_cast<T>(1 - a.beta1);
    const auto keep2 = static_cast<T>(a.beta2), new2 = static_cast<T>(1 - a.beta2);
    for (int64_t k = 0; k < param.numel(); ++k) {
      const T d = g[k] * scale, u = keep1 * m[k] + new1 * d;
      m[k] = keep2 * m[k] + new2 * d;
      p[k] = p[k] * decay - lr * (u > 0 ? T(1) : u < 0 ? T(-1) : u);  // the sign of NaN is NaN
    }
  });
}

NNTILE_KERNEL(lion, lion);

}  // namespace
}  // namespace nntile
