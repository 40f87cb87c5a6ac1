#include "quantize.h"

namespace nntile {

NNTILE_CUDA_KERNEL(quantize, quantize_by_aten);

}  // namespace nntile
