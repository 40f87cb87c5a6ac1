// Runs a kernel that was generated and compiled at run time; see scalar/cpp.py.
#include <vector>

#include "kernel.h"

namespace nntile {
namespace {

using Made = void (*)(void* const*, const int64_t* const*, const int64_t*, const double*, uint64_t);

// The task's ints: address of the function, number of floats, then the ints for the function. The function gets all
// tiles and floats of the task.
void generated(Args& t) {
  const auto made = reinterpret_cast<Made>(t.i(0));
  std::vector<at::Tensor> tensors;
  std::vector<void*> tiles;
  std::vector<const int64_t*> shapes;
  std::vector<double> floats;
  uint64_t accumulates = 0;
  for (size_t k = 0; k < t.tiles(); ++k) tensors.push_back(t[k]);
  for (size_t k = 0; k < t.tiles(); ++k) {
    tiles.push_back(tensors[k].data_ptr());
    shapes.push_back(tensors[k].sizes().data());
    accumulates |= uint64_t{t.accumulates(k)} << k;
  }
  for (int64_t k = 0; k < t.i(1); ++k) floats.push_back(t.f(static_cast<size_t>(k)));
  made(tiles.data(), shapes.data(), t.ints().data() + 2, floats.data(), accumulates);
}

NNTILE_KERNEL(generated, generated);

}  // namespace
}  // namespace nntile
