"""Whether Triton's kernels run in its interpreter, whose numpy has no bf16 and knows no instructions of a GPU."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
