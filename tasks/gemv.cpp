// Product of a matrix and one row, with a norm before the product and an epilogue after it: see Gemv in gemv.py.
#include <vector>

#include "activation.h"
#include "gemv_args.h"
#include "product_rows.h"
#include "rows.h"

namespace nntile {
namespace {

constexpr int64_t kLayerNorm = 1;  // position in NORMS of gemv.py

template <class T>
using Tiles = std::vector<const T*>;

// x += tile, for each tile from number `first` on.
template <class T>
void add_tiles(T* x, const Tiles<T>& tiles, size_t first, int64_t n) {
  for (size_t number = first; number < tiles.size(); ++number) add_rows(x, x, tiles[number], n);
}

// Normalises a row in place; beta is null for an RMSNorm. The operations are those of norm.cpp.
template <class T>
void normalise(T* x, const T* gamma, const T* beta, int64_t n, T eps) {
  const T mean = beta ? sum_of(x, n) / static_cast<T>(n) : T(0);
  const T squares = beta ? squares_of(x, mean, n) : dot_of(x, x, n);
  const Vec<T> rstd(T(1) / std::sqrt(squares / static_cast<T>(n) + eps));
  for_vectors<T>(n, [&](int64_t k, int64_t count) {
    const auto v = load(x + k, count), g = load(gamma + k, count);
    const auto out = beta ? at::vec::fmadd((v - Vec<T>(mean)) * rstd, g, load(beta + k, count)) : v * rstd * g;
    out.store(x + k, static_cast<int>(count));
  });
}

// tiles: y, addends of x, weight (, gamma, beta) (, bias) (, addends of the residual) (, factor)
void gemv(Args& t) {
  const GemvArgs args(t);
  const auto kind = static_cast<int>(args.activation);
  const auto out = t[0];
  const int64_t n = out.numel(), k = t.view(1).numel();
  dispatch(out, [&](auto zero) {
    using T = decltype(zero);
    size_t next = 1;
    const auto tiles = [&](int64_t count) {
      Tiles<T> found;
      for (int64_t number = 0; number < count; ++number) found.push_back(static_cast<const T*>(t.view(next++).data));
      return found;
    };
    const auto tile = [&](bool there) { return there ? tiles(1)[0] : nullptr; };
    const auto inputs = tiles(args.inputs);
    const T *weight = tile(true), *gamma = tile(args.norm >= 0), *beta = tile(args.norm == kLayerNorm);
    const T* bias = tile(args.bias);
    const auto residuals = tiles(args.residuals);
    const T *factor = tile(args.factor), *x = inputs[0];
    thread_local std::vector<T> row;
    if (gamma || inputs.size() > 1) {
      row.assign(x, x + k);
      add_tiles(row.data(), inputs, 1, k);
      if (gamma) normalise(row.data(), gamma, beta, k, static_cast<T>(args.eps));
      x = row.data();
    }
    auto* y = out.template data_ptr<T>();
    few_rows<T>(y, n, x, k, weight, k, 1, n, k, T(0), static_cast<T>(args.scale));
    if (bias) add_rows(y, y, bias, n);
    add_tiles(y, residuals, 0, n);
    if (kind < 0 && !factor) return;
    for_vectors<T>(n, [&](int64_t from, int64_t count) {
      auto v = load(y + from, count);
      if (kind >= 0) v = activate(kind, v);
      if (factor) v = v * load(factor + from, count);
      v.store(y + from, static_cast<int>(count));
    });
  });
}

NNTILE_KERNEL(gemv, gemv);

}  // namespace
}  // namespace nntile
