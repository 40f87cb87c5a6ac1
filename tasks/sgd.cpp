#include "common.h"
#include "sgd_args.h"

namespace nntile {
namespace {

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

NNTILE_KERNEL(sgd, sgd);

}  // namespace
}  // namespace nntile
