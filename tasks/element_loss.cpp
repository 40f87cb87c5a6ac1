// Losses that are a sum over elements, and their gradients. The class of a loss has two functions of vectors: an
// element's loss, and the derivative of this loss.
#include "common.h"
#include "element_loss_args.h"

namespace nntile {
namespace {

struct SquaredError {
  template <class V>
  static V value(const V& x, const V& target) {
    const auto d = x - target;
    return d * d;
  }
  template <class V>
  static V derivative(const V& x, const V& target) {
    return V(2) * (x - target);
  }
};

// Elements with the target -100 are ignored.
struct BinaryCrossEntropy {
  template <class V>
  static V counted(const V& result, const V& target) {
    return V::blendv(result, V(0), target == V(-100));
  }
  template <class V>
  static V value(const V& x, const V& target) {  // log(1 + exp(x)) - x target, for x of any size
    return counted(at::vec::maximum(x, V(0)) - x * target + x.abs().neg().exp().log1p(), target);
  }
  template <class V>
  static V derivative(const V& x, const V& target) {
    return counted(V(1) / (V(1) + x.neg().exp()) - target, target);
  }
};

// tiles: loss (ACC), x, target
template <class Loss>
void element_loss(Args& t) {
  const auto loss = t[0], x = t[1], target = t[2];
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = x.size(-1);
    const double scale = ElementLossArgs(t).scale;
    double total = 0;  // scaled row by row: see cross_entropy.cpp
    for (int64_t row = 0; row < x.numel() / n; ++row) {
      const auto *a = x.data_ptr<T>() + row * n, *b = target.data_ptr<T>() + row * n;
      total += scale * static_cast<double>(sum_vectors<T>(n, [&](int64_t k, int64_t count) {
        return keep(Loss::value(load(a + k, count), load(b + k, count)), count);
      }));
    }
    auto* out = loss.data_ptr<double>();
    *out = (t.accumulates(0) ? *out : 0.0) + total;
  });
}

// tiles: dx, x, target
template <class Loss>
void element_loss_grad(Args& t) {
  const auto dx = t[0], x = t[1], target = t[2];
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    const Vec<T> scale(static_cast<T>(ElementLossArgs(t).scale));
    auto* out = dx.data_ptr<T>();
    const auto *a = x.data_ptr<T>(), *b = target.data_ptr<T>();
    for_vectors<T>(x.numel(), [&](int64_t k, int64_t count) {
      (scale * Loss::derivative(load(a + k, count), load(b + k, count))).store(out + k, static_cast<int>(count));
    });
  });
}

NNTILE_KERNEL(squared_error, element_loss<SquaredError>);
NNTILE_KERNEL(squared_error_grad, element_loss_grad<SquaredError>);
NNTILE_KERNEL(binary_cross_entropy, element_loss<BinaryCrossEntropy>);
NNTILE_KERNEL(binary_cross_entropy_grad, element_loss_grad<BinaryCrossEntropy>);

}  // namespace
}  // namespace nntile
