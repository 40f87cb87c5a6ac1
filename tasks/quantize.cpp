// Quantisation of tiles to 8 bits with a scale: on CPU workers, and of fp32 tiles on CUDA workers.
#include "quantize.h"

#include <ATen/ops/abs.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "quantize_args.h"

namespace nntile {
namespace {

// The largest value of both 8-bit dtypes is 1.75 * 2^e; the two kExponent are their e. kAbove, added to the bits of an
// fp32 number, carries into the exponent if the mantissa is above 1.75.
constexpr int kAbove = 0x1FFFFF, kMantissaBits = 23, kExponentE4m3 = 8, kExponentE5m2 = 15;

// Returns for each element of `top` the smallest power of two s with top <= largest * s; 1 if top is 0, NaN if it is
// not finite. top: largest absolute values of elements that share a scale. wide: the dtype is e5m2.
at::Tensor scale_of(const at::Tensor& top, bool wide) {
  auto exponent = top.view(at::kInt).add(kAbove).__rshift__(kMantissaBits).sub_(wide ? kExponentE5m2 : kExponentE4m3);
  const auto scale = exponent.clamp_min_(1).__lshift__(kMantissaBits).view(at::kFloat);
  const auto finite = top.lt(std::numeric_limits<float>::infinity());
  return at::where(finite, at::where(top.eq(0), 1.0, scale), std::numeric_limits<float>::quiet_NaN()).to(at::kFloat);
}

// Writes zeros behind the part of tile k that a step fills, up to a multiple of kUnit; see Quantize. On CPU workers the
// filled part has no gaps, so there is nothing to write.
void pad(const Args& t, size_t k) {
  auto full = t.view(k);
  if (full.device.is_cpu()) return;
  const auto filled = full.sizes;
  full.sizes = at::DimVector(t.most(k));
  full.dtype = at::kByte;
  for (size_t axis = 0; axis < filled.size(); ++axis) {
    const auto rest = std::min(up_to_unit(filled[axis]), full.sizes[axis]) - filled[axis];
    if (rest > 0) full.tensor().narrow(static_cast<int64_t>(axis), filled[axis], rest).zero_();
  }
}

}  // namespace

void quantize_by_aten(Args& t) {
  const QuantizeArgs args(t);
  const auto outputs = t.tiles() - 1;
  const auto x = t[outputs].to(at::kFloat);
  const auto axes = static_cast<size_t>(x.dim());
  for (size_t k = 0; k < outputs; ++k) {
    pad(t, k);
    auto out = t[k];
    const auto values = x.permute(args.layouts.slice(k * (axes + 1) + 1, axes));
    std::vector<int64_t> together(axes - axes_of_scales(t, k));  // axes that share a scale
    std::iota(together.begin(), together.end(), static_cast<int64_t>(axes - together.size()));
    const auto scales = scale_of(values.abs().amax(together, true), out.scalar_type() == at::kFloat8_e5m2);
    out.copy_(values.div(scales));
    scales_of_tile(t, k).copy_(scales);
  }
}

NNTILE_KERNEL(quantize, quantize_by_aten);

}  // namespace nntile
