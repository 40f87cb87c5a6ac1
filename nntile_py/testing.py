"""Compares operators with their references in numpy, under several tilings and accumulation policies.

`check_operator` checks a user's operator. The project's tests use `check`: a test case is a function that adds an
operator to a `Case`, and the lists of test cases are in tests/operators_*.py.
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
from nntile_py.tiles.dtypes import DTYPES, host_dtype, is_scaled
from nntile_py.tiles.tasklist import POLICIES

Array = np.ndarray[Any, Any]
Values = dict[Tensor, Array]
Maker = Callable[[np.random.Generator, tuple[int, ...], Values], Array]  # draws an input: its shape, earlier inputs
Row = Callable[["Case"], Any]  # adds the operator under test to a Case

# Largest relative error by dtype. Values of 8 bits are compared with references that are rounded alike.
TOLERANCES = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 1.5e-2, "fp16": 2e-3, "e4m3": 1e-3, "e5m2": 1e-3}
# SIZES: default sizes of axes. FIXED: sizes of axes that no test changes.
SIZES = {"batch": 4, "seq": 6, "embed": 24, "heads": 4, "head_dim": 4, "ffn": 20, "vocab": 36}
FIXED = {"qkv": 3, "stat": 2, "one": 1, "classes": 2, "sequences": 4}


# -- values of inputs


def rounded(value: Array, dtype: str) -> Array:
    """Round values to the dtype of a tensor; the result is float64 unless the dtype is an integer."""
    if dtype in ("int16", "int64"):
        return np.asarray(value, DTYPES[dtype].numpy)
    return np.asarray(torch.tensor(value, dtype=torch.float64).to(getattr(torch, DTYPES[dtype].torch)).double().numpy())


def normal(rng: np.random.Generator, shape: tuple[int, ...], values: Values) -> Array:
    return rng.standard_normal(shape)


def large(rng: np.random.Generator, shape: tuple[int, ...], values: Values) -> Array:
    """Return random values so large that their exponentials overflow."""
    return 300 * rng.standard_normal(shape)


def positive(rng: np.random.Generator, shape: tuple[int, ...], values: Values) -> Array:
    return rng.uniform(0.1, 1.0, shape)


def triangle(rng: np.random.Generator, shape: tuple[int, ...], values: Values) -> Array:
    """Return random values with zeros above the diagonal, like the probabilities of causal attention."""
    return np.tril(rng.standard_normal(shape))


def ids(below: int, ignored: float = 0.0) -> Maker:
    """Return a function that draws integers from 0 to below - 1. A share `ignored` of them, never all, is IGNORED."""

    def make(rng: np.random.Generator, shape: tuple[int, ...], values: Values) -> Array:
        result = np.where(rng.random(shape) < ignored, IGNORED, rng.integers(0, below, shape))
        result.flat[0] = rng.integers(0, below)
        return result

    return make


def padding(rng: np.random.Generator, shape: tuple[int, ...], values: Values) -> Array:
    """Return a random attention mask: 1 for keys that count, 0 for padding. The last sequence is all padding."""
    result = (rng.random(shape) < 0.6).astype(int)
    result[-1] = 0
    return result


def offsets(positions: int) -> Maker:
    """Return a function that draws offsets of packed sequences in a bin with `positions` positions.

    Sequence k begins at offset k. The last sequences may be empty, and the last positions unused.
    """

    def make(rng: np.random.Generator, shape: tuple[int, ...], values: Values) -> Array:
        (count,) = shape
        live = int(rng.integers(2, count + 1))
        inner = np.sort(rng.integers(0, positions + 1, live - 1))
        return np.array([0, *inner, *[inner[-1]] * (count - live)])

    return make


def low_bits(rng: np.random.Generator, shape: tuple[int, ...], values: Values) -> Array:
    """Return random low bits: the 16 bits of fp32 master weights that their bf16 copies lack."""
    return rng.integers(-(2**15), 2**15, shape)


def of(op: Op, output: int) -> Maker:
    """Return a function that computes output number `output` of the operator `op` with op's reference."""
    return lambda rng, shape, values: op.reference(*(values[t] for t in op.inputs))[output]


def error(got: Any, want: Any) -> float:
    """Return the relative error: the norm of got - want divided by the norm of want.

    It is infinite if `got` has another shape or values that are not finite.
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape or not np.isfinite(got).all():
        return float("inf")
    return float(np.linalg.norm(got - want) / (np.linalg.norm(want) or 1.0))


class Case:
    """A graph for one test of an operator, functions that draw its inputs' values, and slots of its program."""

    def __init__(self, sizes: Mapping[str, int], dtype: str) -> None:
        self.sizes = {**FIXED, "key": sizes["seq"], "position": sizes["seq"] + 3, **sizes}
        self.graph = Graph(dtype)
        self.makers: dict[Tensor, Maker] = {}
        self.options: dict[str, Any] = {}  # further keyword arguments of the operators' references
        self.slots: dict[str, float] = {}
        self.whole: set[str] = set()  # axes that must not be cut
        self.cut: dict[str, int] = {}  # tile sizes that the operator needs
        self.labels: dict[str, Tensor] = {}  # {slot that scales the loss: labels of the loss}
        self.grads: dict[Tensor, Tensor | None] = {}  # {input of the operator: its gradient}
        self.dys: dict[Tensor, Tensor] = {}  # {output of the operator: its gradient, an input of the graph}
        self.masters: dict[Tensor, Tensor] = {}  # {parameter with an fp32 master weight: the weight's low bits}
        self.sum_dtype = accumulation_dtype(dtype)

    def x(self, axes: str, make: Maker = normal, dtype: str | None = None, **options: Any) -> Tensor:
        """Add an input to the graph and return it.

        axes: names of the input's axes, separated by spaces. make: draws the input's values.
        """
        tensor = self._tensor(axes, "input", dtype, **options)
        self.makers[tensor] = make
        return tensor

    def y(self, axes: str, dtype: str | None = None, **options: Any) -> Tensor:
        """Add an output to the graph and return it. `axes` are the names of its axes, separated by spaces."""
        # A tensor of the kind `scalar` may be written by a program and outlives the program.
        return self._tensor(axes, "scalar", dtype, **options)

    def like(self, tensor: Tensor) -> Tensor:
        """Add an output with the axes and dtype of `tensor` to the graph and return it."""
        return self.y(" ".join(tensor.axes), tensor.dtype, band=tensor.band)

    def temp(self, axes: str, **options: Any) -> Tensor:
        """Add a temporary tensor, which one operator writes and another one reads, to the graph and return it."""
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
        """Add an input with labels for the logits and return it.

        The slot `scale` gets the value 1 / (number of labels that are not ignored).
        """
        self.labels[scale] = self.x(" ".join(logits.axes[:-1]), ids(logits.shape[-1], ignored), "int64")
        return self.labels[scale]

    def add(self, op: Op) -> Op:
        return self.graph.add(op)

    def tiling(self, tiles: Mapping[str, int]) -> Tiling:
        """Return a tiling with these tile sizes, except for axes that this case cuts itself or must not cut."""
        return Tiling({axis: size for axis, size in {**tiles, **self.cut}.items() if axis not in self.whole})

    # -- values

    def draw(self, rng: np.random.Generator) -> Values:
        """Return random values of all inputs, rounded to their dtypes; set the slots that scale losses."""
        values: Values = {}
        for tensor, make in self.makers.items():
            values[tensor] = rounded(make(rng, tensor.shape, values), tensor.dtype)
        for scale, labels in self.labels.items():
            self.slots[scale] = 1 / max(int((values[labels] != IGNORED).sum()), 1)
        return values

    def computed(self, inputs: Values) -> Values:
        """Return the values of all tensors, computed with the operators' references from the inputs' values."""
        values = dict(inputs)
        for op in self.graph.ops:
            known = inspect.signature(op.reference).parameters
            options = {name: value for name, value in self.options.items() if name in known}
            results = op.reference(*(values[t] for t in op.inputs), **options)
            need = f"{op.kind}.reference: must return a tuple of {len(op.outputs)} arrays with the outputs' shapes"
            assert isinstance(results, tuple) and len(results) == len(op.outputs), need
            for tensor, result in zip(op.outputs, results, strict=True):
                assert np.shape(result) == tensor.shape, f"{need}; {tensor} is {np.shape(result)}"
                values[tensor] = result
        return values

    def expected(self, inputs: Values) -> Values:
        """Return the expected values of the outputs that can be read after the program (persistent tensors)."""
        values = self.computed(inputs)
        last = {t.storage: t for t in values if t.persistent}  # of tensors that share tiles, the last written counts
        return {t: values[t] for t in last.values() if t not in inputs}

    def whole_values(self, values: Values) -> Values:
        """Return the values with each parameter and its low bits joined to an fp32 master weight.

        Only master weights can be compared within a tolerance. A tiny difference may change all low bits.
        """
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
    """Run an operator's program in StarPU twice, on different values, and compare every output with the reference.

    Outputs are NaN before the first run, and the second run starts with the first run's tiles. The check thus also
    fails if a task leaves a part unwritten, or adds to a tile that was not cleared.

    Args:
        row: Adds the operator to a Case.
        tiles: Tile size of each axis.
        policy: The accumulation policy.
        dtype: Data type of the tensors.
        sizes: Size of each axis.
        seed: Seed of the random values.
        tolerance: Largest relative error; by default from TOLERANCES.

    Raises:
        AssertionError: An output is wrong.
    """
    case = Case(sizes, dtype)
    row(case)
    lowering = lower(case.graph, case.tiling(tiles), policy)
    rng, store, program = np.random.default_rng(seed), Store(), None
    for replay in range(2):
        values = case.draw(rng)
        expected = case.expected(values)
        owners = {t.storage for t in values}
        for tensor in expected:
            if tensor.storage not in owners and not is_scaled(tensor.dtype):
                store.write(lowering, tensor, np.full(tensor.shape, -1 if tensor.dtype.startswith("int") else np.nan))
        for tensor, value in values.items():
            store.write(lowering, tensor, value)
        program = program or programs([lowering.tasks], store, checked=True)[0]
        program.run(case.slots)
        got = {tensor: store.read(lowering, tensor) for tensor in expected}
        assert all(value.dtype == host_dtype(tensor.dtype) for tensor, value in got.items())
        got = case.whole_values(got)
        for tensor, want in case.whole_values(expected).items():
            has_tile = np.zeros(tensor.shape, bool)
            for part, _ in lowering.grid(tensor):
                has_tile[part] = True
            wrong = error(got[tensor], want * has_tile)
            usual = TOLERANCES[tensor.dtype if is_scaled(tensor.dtype) else dtype]
            limit = 1e-6 if tensor.storage in case.masters else tolerance or usual
            kind = next((op.kind for op in case.graph.ops if tensor in op.outputs), "")
            assert wrong < limit, (
                f"{kind}: {tensor} is off by {wrong:.1e}{'' if np.isfinite(wrong) else ': not all of it is written'}"
                f" (run {replay + 1} of the program, {policy}, tiles {dict(tiles) or 'uncut'}, sizes {dict(sizes)})"
            )
    assert _core.take_not_finite() is None, "a task wrote a value that is not finite"


# -- a user's operator

DIRECTIONS, STEP = 4, 1e-5  # of finite differences: number of random directions, step size


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
    """Compare an operator and its gradient with references. Starts a runtime with two CPU workers if none is running.

    The operator and the operators of its gradient are compared with their references: uncut, in even tiles, and in
    ragged tiles under each accumulation policy. The reference of the gradient is compared with finite differences.

    Args:
        row: Adds the operator to a Case: `lambda case: case.add(Swish(case.x("batch seq"), case.y("batch seq")))`.
            `case.x` is an input with random values, `case.y` an output.
        sizes: Sizes of axes; they are added to SIZES or replace its values.
        dtypes: Data types to check. bf16 and fp16 need GPUs, or kernels written with torch.
        gradient: False for an operator without a gradient.
        outputs: Indices of the outputs that have gradients.
        seed: Seed of the random values.
        tolerance: Largest relative error (norm of the error / norm of the result). Default: 1e-12 in fp64, 1e-5 in
            fp32, 1.5e-2 in bf16, 2e-3 in fp16.

    Raises:
        AssertionError: A result is wrong; the message has the tensor, the error, the tiling and the policy.
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
    """Return a tile size that cuts an axis of this size into equal tiles: at least three tiles if possible."""
    return next(tile for tile in range(max(1, size // 3), 0, -1) if size % tile == 0)


def ragged(size: int) -> int:
    """Return a tile size with which an axis of this size has a smaller last tile; at least three tiles if possible."""
    return next((tile for tile in range(-(-size // 3), 1, -1) if size % tile), size // 2 + 1)


def with_gradient(row: Row, outputs: Sequence[int], case: Case) -> None:
    """Add the operator of `row` and the operators of its gradient to the case.

    The gradients of the operator's outputs with the indices `outputs` become inputs of the case.
    """
    row(case)
    (op,) = case.graph.ops
    for tensor in op.inputs:
        tensor.requires_grad = not tensor.dtype.startswith("int")
    dys = [
        case.x(" ".join(y.axes), dtype=y.dtype, band=y.band) if k in outputs else None for k, y in enumerate(op.outputs)
    ]
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
    """Compare the gradient with central finite differences of the operator, in random directions.

    The gradient and the differences are computed with the references in numpy.
    """
    inputs, op = case.draw(rng), case.graph.ops[0]
    values = case.computed(inputs)

    def loss(x: Tensor, moved: Array) -> float:
        results = op.reference(*(moved if t is x else inputs[t] for t in op.inputs), **case.options)
        y_values = dict(zip(op.outputs, results, strict=True))
        return float(sum((values[dy] * y_values[y]).sum() for y, dy in case.dys.items()))

    for x, grad in case.grads.items():
        if not x.requires_grad:
            continue
        directions = [rng.standard_normal(x.shape) for _ in range(DIRECTIONS)]
        want = [(loss(x, inputs[x] + STEP * v) - loss(x, inputs[x] - STEP * v)) / (2 * STEP) for v in directions]
        got = [(values[grad] * v).sum() if grad else 0.0 for v in directions]
        wrong, number = error(got, want), op.inputs.index(x)
        assert wrong < 1e-6, f"{op.kind}.gradient of input {number}: off by {wrong:.1e} from finite differences"
