#include <ATen/ops/square.h>
#include <ATen/ops/sum.h>

#include "common.h"
#include "muon_args.h"

namespace nntile {
namespace {

// tiles: m, u, grad, clip
void muon_momentum(Args& t) {
  const MuonMomentumArgs a(t);
  const auto average = t[0], update = t[1], grad = t[2];
  const double factor = *t[3].data_ptr<double>();
  dispatch(average, [&](auto zero) {
    using T = decltype(zero);
    auto *m = average.data_ptr<T>(), *u = update.data_ptr<T>();
    const auto* g = grad.data_ptr<T>();
    const auto scale = static_cast<T>(factor), old = static_cast<T>(a.momentum);
    const auto fresh = static_cast<T>(1 - a.momentum);
    for (int64_t k = 0; k < average.numel(); ++k) {
      if (factor < 0) {
        u[k] = 0;
        continue;
      }
      const T d = fresh * (g[k] * scale);
      m[k] = old * m[k] + d;
      u[k] = a.nesterov ? old * m[k] + d : m[k];
    }
  });
}

// Returns a view of a tile's elements in the stack of matrices. places: as in MuonGatherArgs; tile: number of the tile.
at::Tensor part(const at::Tensor& stack, at::IntArrayRef shape, at::IntArrayRef places, size_t tile) {
  return stack.as_strided(shape, places.slice(0, shape.size()), stack.storage_offset() + places[shape.size() + tile]);
}

// tiles: stack of matrices, tiles of u
void muon_gather(Args& t) {
  const MuonGatherArgs a(t);
  const auto stack = t[0];
  for (size_t k = 1; k < t.tiles(); ++k) part(stack, t[k].sizes(), a.places, k - 1).copy_(t[k]);
  auto matrices = stack.view({a.matrices, -1});
  matrices.div_(matrices.square().sum(1, true).sqrt_().clamp_min_(a.eps));
}

// tiles: param, stack of matrices, clip
void muon_update(Args& t) {
  const MuonUpdateArgs a(t);
  const auto param = t[0], stack = t[1];
  if (*t[2].data_ptr<double>() < 0) return;
  param.mul_(1 - a.lr * a.weight_decay).sub_(part(stack, param.sizes(), a.places, 0), a.lr * a.factor);
}

NNTILE_KERNEL(muon_momentum, muon_momentum);
NNTILE_KERNEL(muon_gather, muon_gather);
NNTILE_KERNEL(muon_update, muon_update);

}  // namespace
}  // namespace nntile
