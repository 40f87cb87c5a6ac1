"""Gated activations on CUDA. gated.cpp lists the tiles of each task."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import triton
import triton.language as tl

from nntile_py.tiles.task import Task

from .activation_triton import activate, derivative
from .gated import GatedArgs
from .launch import Launches, elementwise, launches


@triton.jit
def _gated(Y, GATE, UP, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate, up = tl.load(GATE + at, at < n).to(tl.float32), tl.load(UP + at, at < n).to(tl.float32)
    tl.store(Y + at, activate(gate, KIND) * up, at < n)


@triton.jit
def _gated_grad(DGATE, DUP, DY, GATE, UP, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(DY + at, at < n).to(tl.float32)
    gate, up = tl.load(GATE + at, at < n).to(tl.float32), tl.load(UP + at, at < n).to(tl.float32)
    tl.store(DGATE + at, dy * up * derivative(gate, KIND), at < n)
    tl.store(DUP + at, dy * activate(gate, KIND), at < n)


@launches("gated")
def _describe(task: Task) -> Launches:
    return elementwise(_gated, task, KIND=GatedArgs.of(task).kind)


@launches("gated_grad")
def _describe_grad(task: Task) -> Launches:
    return elementwise(_gated_grad, task, KIND=GatedArgs.of(task).kind)
