#include "activation.h"
#include "activation_args.h"

namespace nntile {
namespace {

void activation(Args& t) {
  const int kind = static_cast<int>(ActivationArgs(t).kind);
  const auto y = t[0], x = t[1];
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    auto* out = y.data_ptr<T>();
    const auto* in = x.data_ptr<T>();
    for_vectors<T>(x.numel(), [&](int64_t k, int64_t count) {
      activate(kind, load(in + k, count)).store(out + k, static_cast<int>(count));
    });
  });
}

void activation_grad(Args& t) {
  const int kind = static_cast<int>(ActivationArgs(t).kind);
  const auto dx = t[0], dy = t[1], x = t[2];
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    auto* out = dx.data_ptr<T>();
    const auto *grad = dy.data_ptr<T>(), *in = x.data_ptr<T>();
    for_vectors<T>(x.numel(), [&](int64_t k, int64_t count) {
      (load(grad + k, count) * derivative(kind, load(in + k, count)))
          .store(out + k, static_cast<int>(count));
    });
  });
}

NNTILE_KERNEL(activation, activation);
NNTILE_KERNEL(activation_grad, activation_grad);

}  // namespace
}  // namespace nntile
