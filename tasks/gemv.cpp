// Product of a matrix and one row, with a norm before the product and an epilogue after it: see Gemv in gemv.py.
#include <vector>

#include "activation.h"
#include "gemv_args.h"
#include "rows.h"

namespace nntile {
namespace {

constexpr int64_t kLayerNorm = 1;  // position in NORMS of gemv.py

// Tiles of a task. A tensor is undefined if the task has no such tile.
struct Operands {
  at::Tensor y, x, weight, gamma, beta, bias, residual, factor;

  Operands(const Args& t, const GemvArgs& args) : y(t[0]), x(t[1]), weight(t[2]) {
    size_t next = 3;
    if (args.norm >= 0) gamma = t[next++];
    if (args.norm == kLayerNorm) beta = t[next++];
    if (args.bias) bias = t[next++];
    if (args.residual) residual = t[next++];
    if (args.factor) factor = t[next++];
  }
};

// Returns the normalised row x; beta is null for an RMSNorm. The operations are those of norm.cpp.
template <class T>
std::vector<T> normalised(const T* x, const T* gamma, const T* beta, int64_t n, T eps) {
  std::vector<T> y(static_cast<size_t>(n));
  const T mean = beta ? sum_of(x, n) / static_cast<T>(n) : T(0);
  const T squares = beta ? squares_of(x, mean, n) : dot_of(x, x, n);
  const Vec<T> rstd(T(1) / std::sqrt(squares / static_cast<T>(n) + eps));
  for_vectors<T>(n, [&](int64_t k, int64_t count) {
    const auto v = load(x + k, count), g = load(gamma + k, count);
    const auto out = beta ? at::vec::fmadd((v - Vec<T>(mean)) * rstd, g, load(beta + k, count)) : v * rstd * g;
    out.store(y.data() + k, static_cast<int>(count));
  });
  return y;
}

void gemv(Args& t) {
  const GemvArgs args(t);
  const Operands o(t, args);
  const auto kind = static_cast<int>(args.activation);
  dispatch(o.y, [&](auto zero) {
    using T = decltype(zero);
    const auto at = [](const at::Tensor& x) -> const T* { return x.defined() ? x.data_ptr<T>() : nullptr; };
    const int64_t k = o.x.numel(), n = o.y.numel();
    const T *x = at(o.x), *weight = at(o.weight), *bias = at(o.bias), *residual = at(o.residual), *factor = at(o.factor);
    std::vector<T> row;
    if (o.gamma.defined()) {
      row = normalised(x, at(o.gamma), at(o.beta), k, static_cast<T>(args.eps));
      x = row.data();
    }
    auto* y = o.y.data_ptr<T>();
    for (int64_t column = 0; column < n; ++column) y[column] = dot_of(x, weight + column * k, k) * static_cast<T>(args.scale);
    for_vectors<T>(n, [&](int64_t from, int64_t count) {
      auto v = load(y + from, count);
      if (bias) v = v + load(bias + from, count);
      if (residual) v = v + load(residual + from, count);
      if (kind >= 0) v = activate(kind, v);
      if (factor) v = v * load(factor + from, count);
      v.store(y + from, static_cast<int>(count));
    });
  });
}

NNTILE_KERNEL(gemv, gemv);

}  // namespace
}  // namespace nntile
