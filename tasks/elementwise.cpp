#include <ATen/ops/add.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>

#include "common.h"
#include "dropout.h"

namespace nntile {
namespace {

void add(Args& t) {
  auto out = t[0];
  at::add_out(out, t[1], t[2]);
}

void multiply(Args& t) {
  auto out = t[0];
  at::mul_out(out, t[1], t[2]);
}

void bias_add(Args& t) {
  auto out = t[0];
  at::add_out(out, t[1], t[2].view(BiasAddArgs(t).shape));
}

void sum(Args& t) {
  auto out = t[0];
  const auto total = t[1].sum(SumArgs(t).axes);
  if (t.accumulates(0)) out.add_(total);
  else out.copy_(total);
}

void transpose(Args& t) { t[0].copy_(t[1].permute(TransposeArgs(t).order)); }

void unpack(Args& t) {
  const int64_t axis = PackArgs(t).axis;
  for (size_t k = 1; k < t.tiles(); ++k) t[k].copy_(t[0].select(axis, static_cast<int64_t>(k) - 1));
}

void pack(Args& t) {
  const int64_t axis = PackArgs(t).axis;
  for (size_t k = 1; k < t.tiles(); ++k) t[0].select(axis, static_cast<int64_t>(k) - 1).copy_(t[k]);
}

void dropout(Args& t) {
  const auto out = t[0], x = t[1];
  const Mask mask(DropoutArgs(t), t);
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = x.size(-1);
    for (int64_t row = 0; row < x.numel() / n; ++row)
      mask.apply(out.data_ptr<T>() + row * n, x.data_ptr<T>() + row * n, x, row);
  });
}

NNTILE_KERNEL(add, add);
NNTILE_KERNEL(multiply, multiply);
NNTILE_KERNEL(bias_add, bias_add);
NNTILE_KERNEL(sum, sum);
NNTILE_KERNEL(transpose, transpose);
NNTILE_KERNEL(unpack, unpack);
NNTILE_KERNEL(pack, pack);
NNTILE_KERNEL(dropout, dropout);

}  // namespace
}  // namespace nntile
