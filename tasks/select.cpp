// Selects one position of an axis. The gradient is zero at all other positions.
#include "common.h"
#include "select_args.h"

namespace nntile {
namespace {

// tiles: y, x
void select(Args& t) {
  const SelectArgs args(t);
  t[0].copy_(t[1].select(args.axis, args.index));
}

// tiles: dx, and dy if dx has the position; otherwise args.index is negative
void select_grad(Args& t) {
  const SelectArgs args(t);
  t[0].zero_();
  if (args.index >= 0) t[0].select(args.axis, args.index).copy_(t[1]);
}

NNTILE_KERNEL(select, select);
NNTILE_KERNEL(select_grad, select_grad);

}  // namespace
}  // namespace nntile
