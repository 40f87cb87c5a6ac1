"""INTERPRETED is true if kernels run in Triton's interpreter, which lacks bf16 (as numpy does) and GPU instructions."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
