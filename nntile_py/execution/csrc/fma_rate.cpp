// Load for measuring the peak flop/s of a CPU core: fused multiply-adds on values that stay in registers.
#include <ATen/cpu/vec/vec.h>

#include <array>

#include "runtime.h"

namespace nntile {
namespace {

template <class T>
double run(int64_t loops) {
  using V = at::vec::Vectorized<T>;
  // Two units with a latency of four cycles need eight sums in flight; AVX2 has registers for ten, two factors included.
  std::array<V, 10> sums;
  sums.fill(V(T(0)));
  const V a(T(0.5)), b(T(1));
  for (int64_t k = 0; k < loops; ++k)
    for (auto& sum : sums) sum = at::vec::fmadd(sum, a, b);
  V total(T(0));
  for (const auto& sum : sums) total = total + sum;
  std::array<T, V::size()> values;
  total.store(values.data());
  volatile T used = values[0];  // without a use, the compiler would remove the loop
  (void)used;
  return 2.0 * static_cast<double>(loops) * static_cast<double>(sums.size()) * V::size();
}

}  // namespace

double fma_flop(int64_t loops, bool fp64) { return fp64 ? run<double>(loops) : run<float>(loops); }

}  // namespace nntile
