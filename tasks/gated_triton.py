"""Gated activations on CUDA. Tiles as in gated.cpp."""

# Functions of Triton's language have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from nntile_py.tiles.tasklist import Task

from .activation_triton import activate, derivative
from .gated import GatedArgs
from .launch import Launches, Parameter, ceil_div, launch, launches, numel, tile


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
    n = numel(task, 0)
    args: list[Parameter] = [*(tile(task, k) for k in range(3)), n]
    return Launches((launch(_gated, ceil_div(n, 1024), *args, KIND=GatedArgs.of(task).kind, BLOCK=1024),))


@launches("gated_grad")
def _describe_grad(task: Task) -> Launches:
    n = numel(task, 0)
    args: list[Parameter] = [*(tile(task, k) for k in range(5)), n]
    return Launches((launch(_gated_grad, ceil_div(n, 1024), *args, KIND=GatedArgs.of(task).kind, BLOCK=1024),))
