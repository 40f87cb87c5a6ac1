"""Functions that the kernels of matrix products share: order of blocks, activations and derivatives in fp32."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import triton
import triton.language as tl

from .activation_triton import activate, derivative
from .interpreted_triton import INTERPRETED


@triton.jit
def _reciprocal(x):
    """Return 1 / x."""
    if INTERPRETED:
        y = 1 / x
    else:  # one instruction, with an error of 1e-7
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return y


@triton.jit
def _power_of_two(x):
    """Return 2^x."""
    if INTERPRETED:
        y = tl.exp2(x)
    else:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return y


@triton.jit
def normal_tail(x):
    """Return |x|, Phi(-|x|) and exp(-x^2 / 2), where Phi is the standard normal distribution function.

    Phi(-|x|) / exp(-x^2 / 2) is computed as a polynomial in 1 / (1 + 0.36 |x|), fitted with a relative error of 2e-5.
    The error of rounding to bf16 is larger, up to 4e-3. The polynomial takes half as many instructions as erf. The
    exponential is returned too, because the derivative of exact GELU, x Phi(x), needs it.
    """
    far = tl.abs(x)
    e, t = _power_of_two(x * x * -0.7213475204444817), _reciprocal(1 + 0.36 * far)
    tail = t * (0.14209608 + t * (0.1609567 + t * (0.04957307 + t * (0.24151073 - t * 0.09412782)))) * e
    return far, tail, e


@triton.jit
def activated(x, KIND: tl.constexpr):
    """Return the activation number KIND of x; negative KIND: x itself. KIND 1 is exact GELU."""
    if KIND < 0:
        y = x
    elif KIND == 1:
        far, tail, _ = normal_tail(x)
        y = tl.maximum(x, 0.0) - far * tail
    else:
        y = activate(x, KIND)
    return y


@triton.jit
def times_derivative(y, x, KIND: tl.constexpr):
    """Return y times the derivative at x of the activation number KIND."""
    if KIND == 1:
        far, tail, e = normal_tail(x)
        below = tail - far * e * 0.3989422804014327  # the derivative at -|x|
        y *= tl.where(x < 0, below, 1 - below)
    else:
        y *= derivative(x, KIND)
    return y


@triton.jit
def block_of(number, m, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Return the first row and the first column of block `number` of an m x n matrix.

    GROUP vertically adjacent blocks have consecutive numbers; the blocks to their right have the next numbers. So
    blocks that run at the same time share operands in the cache.
    """
    down, across = tl.cdiv(m, ROWS), tl.cdiv(n, COLUMNS)
    first = number // (GROUP * across) * GROUP
    size = tl.minimum(down - first, GROUP)
    within = number % (GROUP * across)
    return (first + within % size) * ROWS, within // size * COLUMNS
