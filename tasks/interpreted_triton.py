"""Whether kernels run in Triton's interpreter, where numpy has no bf16 and GPU instructions are missing."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
