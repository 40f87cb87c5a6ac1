"""Operators against their references: in any tiling, under each accumulation policy, with their gradients.

`check_operator` is for a user's own operator; the project's are checked by `check`, row by row of a table.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from nntile_py import _core
from nntile_py.execution.program import Store, programs
from nntile_py.execution.runtime import Runtime
from nntile_py.graph.graph import Graph
from nntile_py.graph.lowering import lower
from nntile_py.system.load import cores
from nntile_py.tasks import Op, Tensor
from nntile_py.tasks.band import ALL, Band
from nntile_py.tasks.cross_entropy import IGNORED
from nntile_py.tasks.op import accumulation_dtype
from nntile_py.tasks.optimizer import joined
from nntile_py.tiles import AXES, Tiling, cut_as
from nntile_py.tiles.dtypes import DTYPES, host_dtype
from nntile_py.tiles.tasklist import POLICIES

Array = np.ndarray[Any, Any]
Values = dict[Tensor, Array]
Maker = Callable[[np.random.Generator, tuple[int, ...], Values], Array]
Row = Callable[["Case"], Any]

SIZES = {"batch": 4, "seq": 6, "embed": 24, "heads": 4, "head_dim": 4, "ffn": 20, "vocab": 36}
FIXED = {"qkv": 3, "stat": 2, "one": 1, "classes": 2, "sequences": 4}


# -- values of inputs


def rounded(value: Array, dtype: str) -> Array:
    """What a tensor of the dtype holds of the values; in float64 if they are no integers."""
    if dtype in ("int16", "int64"):
        return np.asarray(value, DTYPES[dtype].numpy)
    return np.asarray(torch.tensor(value, dtype=torch.float64).to(getattr(torch, DTYPES[dtype].torch)).double().numpy())


def normal(rng: np.random.Generator, shape: tuple[int, ...], values: Values) -> Array:
    return rng.standard_normal(shape)


def large(rng: np.random.Generator, shape: tuple[int, ...], values: Values) -> Array:
    """Among which exponentials overflow."""
    return 300 * rng.standard_normal(shape)


def positive(rng: np.random.Generator, shape: tuple[int, ...], values: Values) -> Array:
    return rng.uniform(0.1, 1.0, shape)


def triangle(rng: np.random.Generator, shape: tuple[int, ...], values: Values) -> Array:
    """Zero above the diagonal, as the probabilities of causal attention."""
    return np.tril(rng.standard_normal(shape))


def ids(below: int, ignored: float = 0.0) -> Maker:
    """Numbers of rows of a table or of words; some of them, not all, IGNORED."""

    def make(rng: np.random.Generator, shape: tuple[int, ...], values: Values) -> Array:
        result = np.where(rng.random(shape) < ignored, IGNORED, rng.integers(0, below, shape))
        result.flat[0] = rng.integers(0, below)
        return result

    return make


def padding(rng: np.random.Generator, shape: tuple[int, ...], values: Values) -> Array:
    """1 for keys that may be attended to, in any pattern; none of the last sequence."""
    result = (rng.random(shape) < 0.6).astype(int)
    result[-1] = 0
    return result


def offsets(positions: int) -> Maker:
    """Of sequences one behind the other, the last ones of no length; some positions at the end may be of none."""

    def make(rng: np.random.Generator, shape: tuple[int, ...], values: Values) -> Array:
        (count,) = shape
        live = int(rng.integers(2, count + 1))
        inner = np.sort(rng.integers(0, positions + 1, live - 1))
        return np.array([0, *inner, *[inner[-1]] * (count - live)])

    return make


def low_bits(rng: np.random.Generator, shape: tuple[int, ...], values: Values) -> Array:
    """What rounding to bf16 may leave."""
    return rng.integers(-(2**15), 2**15, shape)


def of(op: Op, output: int) -> Maker:
    """What an operator outside of the case would have made."""
    return lambda rng, shape, values: op.reference(*(values[t] for t in op.inputs))[output]


def error(got: Any, want: Any) -> float:
    """|got - want| / |want|, norm-wise; infinite where something is not finite or the shapes differ."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape or not np.isfinite(got).all():
        return float("inf")
    return float(np.linalg.norm(got - want) / (np.linalg.norm(want) or 1.0))


class Case:
    """A graph under construction, the makers of its inputs' values, the slots of its program."""

    def __init__(self, sizes: Mapping[str, int], dtype: str) -> None:
        self.sizes = {**FIXED, "key": sizes["seq"], "position": sizes["seq"] + 3, **sizes}
        self.graph = Graph(dtype)
        self.makers: dict[Tensor, Maker] = {}
        self.options: dict[str, Any] = {}  # of the reference
        self.slots: dict[str, float] = {}
        self.whole: set[str] = set()  # axes that must not be cut
        self.labels: dict[str, Tensor] = {}  # by the slot that scales their loss
        self.grads: dict[Tensor, Tensor | None] = {}  # of the operator's inputs
        self.dys: dict[Tensor, Tensor] = {}  # what comes in as gradients of its outputs
        self.masters: dict[Tensor, Tensor] = {}  # of parameters that are fp32 ones in the optimizer; see split
        self.sum_dtype = accumulation_dtype(dtype)

    def x(self, axes: str, make: Maker = normal, dtype: str | None = None, **options: Any) -> Tensor:
        tensor = self._tensor(axes, "input", dtype, **options)
        self.makers[tensor] = make
        return tensor

    def y(self, axes: str, dtype: str | None = None, **options: Any) -> Tensor:
        """An output: `scalar` is the kind of tensor that is not written before the program and outlives it."""
        return self._tensor(axes, "scalar", dtype, **options)

    def like(self, tensor: Tensor) -> Tensor:
        return self.y(" ".join(tensor.axes), tensor.dtype, band=tensor.band)

    def temp(self, axes: str, **options: Any) -> Tensor:
        names = axes.split()
        return self.graph.temp("temp", names, [self.sizes[a] for a in names], self.graph.dtype, **options)

    def _tensor(self, axes: str, kind: str, dtype: str | None, band: Band = ALL) -> Tensor:
        names = axes.split()
        name = f"t{len(self.graph.tensors) + len(self.graph.kept)}"
        if unknown := [axis for axis in names if axis not in self.sizes]:
            raise ValueError(f"axes {axes!r}: {', '.join(unknown)} has no size here; known are {', '.join(self.sizes)}")
        tensor = self.graph.named(name, names, [self.sizes[a] for a in names], kind, dtype)
        tensor.band = band
        return tensor

    def label(self, logits: Tensor, ignored: float = 0.0, scale: str = "loss_scale") -> Tensor:
        """Labels of the logits' classes; the slot becomes what goes with them."""
        self.labels[scale] = self.x(" ".join(logits.axes[:-1]), ids(logits.shape[-1], ignored), "int64")
        return self.labels[scale]

    def add(self, op: Op) -> Op:
        return self.graph.add(op)

    # -- values

    def draw(self, rng: np.random.Generator) -> Values:
        values: Values = {}
        for tensor, make in self.makers.items():
            values[tensor] = rounded(make(rng, tensor.shape, values), tensor.dtype)
        for scale, labels in self.labels.items():
            self.slots[scale] = 1 / max(int((values[labels] != IGNORED).sum()), 1)
        return values

    def computed(self, inputs: Values) -> Values:
        """The inputs, and what the references make of them, one operator after the other."""
        values = dict(inputs)
        for op in self.graph.ops:
            known = inspect.signature(op.reference).parameters
            options = {name: value for name, value in self.options.items() if name in known}
            results = op.reference(*(values[t] for t in op.inputs), **options)
            told = f"{op.kind}.reference: has to return a tuple of {len(op.outputs)} arrays, of the outputs' shapes"
            assert isinstance(results, tuple) and len(results) == len(op.outputs), told
            for tensor, result in zip(op.outputs, results, strict=True):
                assert np.shape(result) == tensor.shape, f"{told}; {tensor} is {np.shape(result)}"
            values.update(zip(op.outputs, results, strict=True))
        return values

    def expected(self, inputs: Values) -> Values:
        """What is in tiles that outlive the program."""
        values = self.computed(inputs)
        last = {t.storage: t for t in values if t.persistent}  # of those in the same tiles
        return {t: values[t] for t in last.values() if t not in inputs}

    def whole_values(self, values: Values) -> Values:
        """With parameters and their masters joined: the parts of bf16 alone jump where that does."""
        parts = {low: param for param, low in self.masters.items()}
        by_storage = {t.storage: value for t, value in values.items()}
        joint = {p: joined(by_storage[p], by_storage[r]) for p, r in self.masters.items()}
        return {t: joint.get(t.storage, value) for t, value in values.items() if t.storage not in parts}


def check(
    row: Row,
    tiles: Mapping[str, int],
    policy: str,
    dtype: str,
    sizes: Mapping[str, int] = SIZES,
    seed: int = 0,
    tolerance: float | None = None,
) -> None:
    """Run a row through StarPU twice, with other values each time, and compare every output with the reference.

    Outputs hold NaN before, and the second run finds the tiles as the first has left them: what is not written, or
    is added to without having been cleared, is seen.
    """
    case = Case(sizes, dtype)
    row(case)
    low = lower(case.graph, Tiling({a: t for a, t in tiles.items() if a not in case.whole}), policy)
    rng, store, program = np.random.default_rng(seed), Store(), None
    for replay in range(2):
        values = case.draw(rng)
        expected = case.expected(values)
        owners = {t.storage for t in values}
        for tensor in expected:
            if tensor.storage not in owners:
                store.write(low, tensor, np.full(tensor.shape, np.nan))
        for tensor, value in values.items():
            store.write(low, tensor, value)
        program = program or programs([low.tasks], store, checked=True)[0]
        program.run(case.slots)
        got = {tensor: store.read(low, tensor) for tensor in expected}
        assert all(value.dtype == host_dtype(tensor.dtype) for tensor, value in got.items())
        got = case.whole_values(got)
        for tensor, want in case.whole_values(expected).items():
            there = np.zeros(tensor.shape, bool)
            for where, _ in low.grid(tensor):
                there[where] = True
            wrong = error(got[tensor], want * there)
            exact = tensor.storage in case.masters
            limit = 1e-6 if exact else tolerance or {"fp64": 1e-12, "fp32": 1e-5, "bf16": 1.5e-2, "fp16": 2e-3}[dtype]
            kind = next((op.kind for op in case.graph.ops if tensor in op.outputs), "")
            assert wrong < limit, (
                f"{kind}: {tensor} is off by {wrong:.1e}{'' if np.isfinite(wrong) else ': not all of it is written'}"
                f" (run {replay + 1} of the program, {policy}, tiles {dict(tiles) or 'uncut'}, sizes {dict(sizes)})"
            )
    assert _core.take_not_finite() is None, "a task wrote a value that is not finite"


# -- a user's operator

DIRECTIONS, STEP = 4, 1e-5  # of finite differences


def check_operator(
    row: Row,
    sizes: Mapping[str, int] | None = None,
    *,
    dtypes: Sequence[str] = ("fp64", "fp32"),
    gradient: bool = True,
    outputs: Sequence[int] = (0,),
    seed: int = 0,
    tolerance: float | None = None,
) -> None:
    """Check an operator and its gradient; raises AssertionError with what is wrong, in which tiling and policy.

    row: makes the operator on a Case, `lambda case: case.add(Swish(case.x("batch seq"), case.y("batch seq")))`: `x` is
    an input with random values, `y` an output. sizes: of axes that SIZES lacks, or others than there. Its results are
    compared with `reference` uncut, in an even tiling and in a ragged one, the latter under each accumulation policy;
    so are those of its gradient's operators, and the gradient by the references with finite differences of the
    operator's own. gradient: False for one that has none. outputs: the numbers of those whose gradients come in.
    tolerance: |error| / |result|, by default 1e-12 in fp64, 1e-5 in fp32, 1.5e-2 in bf16, 2e-3 in fp16 (which need
    GPUs, or kernels in torch). Starts a runtime with two CPU workers unless one is running.
    """
    sizes, both = {**SIZES, **(sizes or {})}, partial(with_gradient, row, outputs) if gradient else row
    case = Case(sizes, "fp64")
    both(case)
    if gradient:
        check_gradient(case, np.random.default_rng(seed))
    axes = {cut_as(a): n for op in case.graph.ops for t in op.inputs + op.outputs for a, n in t.sizes.items()}
    axes = {a: n for a, n in axes.items() if a in AXES and a not in case.whole and n > 1}
    tilings = [{}, {a: even(n) for a, n in axes.items()}, {a: ragged(n) for a, n in axes.items()}]
    runtime = nullcontext() if Runtime.current else Runtime(cpus=min(2, cores()))
    with runtime:
        for dtype in dtypes:
            for tiles, policy in [(tilings[0], "chain"), (tilings[1], "chain"), *((tilings[2], p) for p in POLICIES)]:
                check(both, tiles, policy, dtype, sizes, seed, tolerance)


def even(size: int) -> int:
    """A tile size that cuts an axis in three or more equal parts, if it has a divisor for that."""
    return next(tile for tile in range(max(1, size // 3), 0, -1) if size % tile == 0)


def ragged(size: int) -> int:
    """A tile size that leaves a smaller last one: of three or more if possible."""
    return next((tile for tile in range(-(-size // 3), 1, -1) if size % tile), size // 2 + 1)


def with_gradient(row: Row, outputs: Sequence[int], case: Case) -> None:
    """The row, then its operator's gradient; those of outputs are inputs of the case."""
    row(case)
    (op,) = case.graph.ops
    for tensor in op.inputs:
        tensor.requires_grad = not tensor.dtype.startswith("int")
    dys = [case.x(" ".join(y.axes), dtype=y.dtype) if k in outputs else None for k, y in enumerate(op.outputs)]
    for dy, y in zip(dys, op.outputs, strict=True):
        if dy:
            dy.band = y.band
    grads = op.gradient(case.graph, *dys)
    assert len(grads) == len(op.inputs), f"{op.kind}.gradient: {len(grads)} results for {len(op.inputs)} inputs"
    for grad, x in zip(grads, op.inputs, strict=True):
        if grad:
            assert grad.sizes == x.sizes, f"{op.kind}.gradient: {grad} is not of the shape of {x}"
            if not grad.persistent:
                grad.storage.kind = "scalar"
    case.grads = dict(zip(op.inputs, grads, strict=True))
    case.dys = {y: dy for y, dy in zip(op.outputs, dys, strict=True) if dy}


def check_gradient(case: Case, rng: np.random.Generator) -> None:
    """The gradient by the references against central differences of the operator's, in a few random directions."""
    inputs, op = case.draw(rng), case.graph.ops[0]
    values = case.computed(inputs)

    def loss(x: Tensor, moved: Array) -> float:
        results = op.reference(*(moved if t is x else inputs[t] for t in op.inputs), **case.options)
        made = dict(zip(op.outputs, results, strict=True))
        return float(sum((values[dy] * made[y]).sum() for y, dy in case.dys.items()))

    for x, grad in case.grads.items():
        if not x.requires_grad:
            continue
        ways = [rng.standard_normal(x.shape) for _ in range(DIRECTIONS)]
        want = [(loss(x, inputs[x] + STEP * v) - loss(x, inputs[x] - STEP * v)) / (2 * STEP) for v in ways]
        got = [(values[grad] * v).sum() if grad else 0.0 for v in ways]
        wrong = error(got, want)
        number = op.inputs.index(x)
        assert wrong < 1e-6, f"{op.kind}.gradient of input {number}: off by {wrong:.1e} from finite differences"
