// y = act(gate) * up, and its gradient.
#include "activation.h"
#include "gated_args.h"

namespace nntile {
namespace {

// tiles: y, gate, up
void gated(Args& t) {
  const auto out = t[0], gate = t[1], up = t[2];
  const auto kind = static_cast<int>(GatedArgs(t).kind);
  dispatch(out, [&](auto zero) {
    using T = decltype(zero);
    auto* y = out.data_ptr<T>();
    const auto *x = gate.data_ptr<T>(), *u = up.data_ptr<T>();
    for_vectors<T>(out.numel(), [&](int64_t k, int64_t count) {
      (activate(kind, load(x + k, count)) * load(u + k, count)).store(y + k, static_cast<int>(count));
    });
  });
}

// tiles: dgate, dup, dy, gate, up
void gated_grad(Args& t) {
  const auto dgate = t[0], dup = t[1], grad = t[2], gate = t[3], up = t[4];
  const auto kind = static_cast<int>(GatedArgs(t).kind);
  dispatch(grad, [&](auto zero) {
    using T = decltype(zero);
    auto *dx = dgate.data_ptr<T>(), *du = dup.data_ptr<T>();
    const auto *dy = grad.data_ptr<T>(), *x = gate.data_ptr<T>(), *u = up.data_ptr<T>();
    for_vectors<T>(grad.numel(), [&](int64_t k, int64_t count) {
      const auto d = load(dy + k, count), at = load(x + k, count);
      (d * activate(kind, at)).store(du + k, static_cast<int>(count));
      (d * load(u + k, count) * derivative(kind, at)).store(dx + k, static_cast<int>(count));
    });
  });
}

NNTILE_KERNEL(gated, gated);
NNTILE_KERNEL(gated_grad, gated_grad);

}  // namespace
}  // namespace nntile
