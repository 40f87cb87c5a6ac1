"""Activations on CUDA. A kernel's constant KIND is the activation's position in activation.ACTIVATIONS."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import triton
import triton.language as tl

from nntile_py.tiles.task import Task

from .activation import ActivationArgs
from .launch import Launches, elementwise, launches


@triton.jit
def _gelu_new_gate(x):
    """Return (1 + tanh(u)) / 2 with u = sqrt(2/pi) (x + 0.044715 x^3), as a logistic function of 2u."""
    return tl.sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x * x))


@triton.jit
def tanh(x):
    """Return tanh(x) from an exponential; near zero, where 1 - e loses digits, from a series exact to fp32 rounding."""
    e, x2 = tl.exp(-2 * tl.abs(x)), x * x
    far = tl.where(x < 0, -1.0, 1.0) * (1 - e) / (1 + e)
    return tl.where(x2 < 0.04, x * (1 + x2 * (-1 / 3 + x2 * (2 / 15 - x2 * (17 / 315)))), far)


@triton.jit
def _mish_gate(x):
    """Return tanh(log(1 + e^x)), from a = e^-|x|, which never overflows."""
    a = tl.exp(-tl.abs(x))
    top = tl.where(x > 0, 1 + 2 * a, a * a + 2 * a)
    return top / (top + 2 * tl.where(x > 0, a * a, 1.0))


@triton.jit
def activate(x, KIND: tl.constexpr):
    if KIND == 0:
        y = tl.maximum(x, 0.0)
    elif KIND == 1:
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif KIND == 2:
        y = x * _gelu_new_gate(x)
    elif KIND == 3:
        y = tanh(x)
    elif KIND == 4:
        y = x * tl.sigmoid(x)
    elif KIND == 5:
        y = x * tl.sigmoid(1.702 * x)
    elif KIND == 6:
        y = x * tl.maximum(x, 0.0)
    elif KIND == 7:
        y = tl.minimum(tl.maximum(x, 0.0), 6.0)
    elif KIND == 8:
        y = tl.maximum(x, 0.01 * x)
    elif KIND == 9:
        y = x * tl.minimum(tl.maximum(x + 3, 0.0), 6.0) / 6
    elif KIND == 10:
        y = x * _mish_gate(x)
    else:
        y = tl.sigmoid(x)
    return y


@triton.jit
def derivative(x, KIND: tl.constexpr):
    if KIND == 0:
        y = tl.where(x > 0, 1.0, 0.0)
    elif KIND == 1:
        y = 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif KIND == 2:
        gate = _gelu_new_gate(x)
        y = gate + x * 1.5957691216057308 * (1 + 3 * 0.044715 * x * x) * gate * (1 - gate)
    elif KIND == 3:
        t = tanh(x)
        y = 1 - t * t
    elif KIND == 4 or KIND == 5:
        slope = 1.0 if KIND == 4 else 1.702
        gate = tl.sigmoid(slope * x)
        y = gate + slope * x * gate * (1 - gate)
    elif KIND == 6:
        y = 2 * tl.maximum(x, 0.0)
    elif KIND == 7:
        y = tl.where((x > 0) & (x < 6), 1.0, 0.0)
    elif KIND == 8:
        y = tl.where(x > 0, 1.0, 0.01)
    elif KIND == 9:
        y = tl.where(x > -3, tl.where(x < 3, x / 3 + 0.5, 1.0), 0.0)
    elif KIND == 10:
        gate = _mish_gate(x)
        y = gate + x * (1 - gate * gate) * tl.sigmoid(x)
    else:
        a = tl.exp(-tl.abs(x))
        y = a / ((1 + a) * (1 + a))
    return y


@triton.jit
def _activation(Y, X, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + at, activate(tl.load(X + at, at < n).to(tl.float32), KIND), at < n)


@triton.jit
def _activation_grad(DX, DY, X, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dy, x = tl.load(DY + at, at < n).to(tl.float32), tl.load(X + at, at < n).to(tl.float32)
    tl.store(DX + at, dy * derivative(x, KIND), at < n)


@launches("activation")
def _describe(task: Task) -> Launches:
    return elementwise(_activation, task, KIND=ActivationArgs.of(task).kind)


@launches("activation_grad")
def _describe_grad(task: Task) -> Launches:
    return elementwise(_activation_grad, task, KIND=ActivationArgs.of(task).kind)
