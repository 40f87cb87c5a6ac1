"""Shared parts of product kernels: order of blocks, activations of sums in fp32 and their derivatives."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import triton
import triton.language as tl

from .activation_triton import activate, derivative
from .interpreted_triton import INTERPRETED


@triton.jit
def _reciprocal(x):
    if INTERPRETED:
        y = 1 / x
    else:  # one instruction, with an error of 1e-7
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return y


@triton.jit
def _power_of_two(x):
    if INTERPRETED:
        y = tl.exp2(x)
    else:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return y


@triton.jit
def normal_tail(x):
    """Return |x|, the standard normal distribution function at -|x|, and exp(-x^2 / 2).

    The distribution function divided by the exponential is a polynomial in 1 / (1 + 0.36 |x|), fitted with a relative
    error of 2e-5; bf16 rounds by up to 4e-3. This needs half of erf's instructions, and the derivative of x Phi(x)
    needs the exponential too.
    """
    far = tl.abs(x)
    e, t = _power_of_two(x * x * -0.7213475204444817), _reciprocal(1 + 0.36 * far)
    tail = t * (0.14209608 + t * (0.1609567 + t * (0.04957307 + t * (0.24151073 - t * 0.09412782)))) * e
    return far, tail, e


@triton.jit
def activated(x, KIND: tl.constexpr):
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
    if KIND == 1:
        far, tail, e = normal_tail(x)
        below = tail - far * e * 0.3989422804014327  # the derivative at -|x|
        y *= tl.where(x < 0, below, 1 - below)
    else:
        y *= derivative(x, KIND)
    return y


@triton.jit
def block_of(number, m, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Return first row and column of a block; GROUP blocks of rows are consecutive in time, to share operands."""
    down, across = tl.cdiv(m, ROWS), tl.cdiv(n, COLUMNS)
    first = number // (GROUP * across) * GROUP
    size = tl.minimum(down - first, GROUP)
    within = number % (GROUP * across)
    return (first + within % size) * ROWS, within // size * COLUMNS
