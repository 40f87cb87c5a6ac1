"""A case: an operator or a few on tensors with random values; how it is run and compared with the reference."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from conftest import error

from nntile_py.execution.program import Store, programs
from nntile_py.graph.graph import Graph
from nntile_py.graph.lowering import lower
from nntile_py.tasks import Op, Tensor
from nntile_py.tasks.band import ALL, Band
from nntile_py.tasks.cross_entropy import IGNORED
from nntile_py.tasks.op import wide
from nntile_py.tasks.optimizer import joined
from nntile_py.tiles import Tiling

Array = np.ndarray[Any, Any]
Values = dict[Tensor, Array]
Maker = Callable[[np.random.Generator, tuple[int, ...], Values], Array]

SIZES = {"batch": 4, "seq": 6, "embed": 24, "heads": 4, "head_dim": 4, "ffn": 20, "vocab": 36}
FIXED = {"qkv": 3, "stat": 2, "one": 1, "sequences": 4}
NUMPY = {"bf16": np.float32, "fp32": np.float32, "fp64": np.float64, "int16": np.int16, "int64": np.int64}


# -- values of inputs


def rounded(value: Array, dtype: str) -> Array:
    """What a tensor of the dtype holds of the values; in float64 if they are no integers."""
    if dtype in ("int16", "int64"):
        return np.asarray(value, NUMPY[dtype])
    kinds = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
    return np.asarray(torch.tensor(value, dtype=torch.float64).to(kinds[dtype]).double().numpy())


def normal(rng: np.random.Generator, shape: tuple[int, ...], values: Values) -> Array:
    return rng.standard_normal(shape)


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


def rest(rng: np.random.Generator, shape: tuple[int, ...], values: Values) -> Array:
    """What rounding to bf16 may leave."""
    return rng.integers(-(2**15), 2**15, shape)


def of(op: Op, output: int) -> Maker:
    """What an operator outside of the case would have made."""
    return lambda rng, shape, values: op.reference(*(values[t] for t in op.inputs))[output]


class Case:
    """A graph under construction, the makers of its inputs' values, the slots of its program."""

    def __init__(self, sizes: Mapping[str, int], dtype: str) -> None:
        self.sizes = {**FIXED, "key": sizes["seq"], "position": sizes["seq"] + 3, **sizes}
        self.graph = Graph(dtype)
        self.makers: dict[Tensor, Maker] = {}
        self.options: dict[str, Any] = {}  # of the reference
        self.slots: dict[str, float] = {}
        self.whole: set[str] = set()  # axes that must not be cut
        self.labels: Tensor | None = None
        self.rests: dict[Tensor, Tensor] = {}  # of parameters in two parts, what rounding to bf16 left
        self.wide = wide(dtype)

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
        name = f"t{len(self.graph.tensors)}"
        tensor = self.graph.named(name, names, [self.sizes[a] for a in names], kind, dtype)
        tensor.band = band
        return tensor

    def label(self, ignored: float = 0.0) -> Tensor:
        """Labels [batch, seq]; the slot loss_scale becomes what goes with them."""
        self.labels = self.x("batch seq", ids(self.sizes["vocab"], ignored), "int64")
        return self.labels

    def add(self, op: Op) -> Op:
        return self.graph.add(op)

    # -- values

    def draw(self, rng: np.random.Generator) -> Values:
        values: Values = {}
        for tensor, make in self.makers.items():
            values[tensor] = rounded(make(rng, tensor.shape, values), tensor.dtype)
        if self.labels:
            self.slots["loss_scale"] = 1 / max(int((values[self.labels] != IGNORED).sum()), 1)
        return values

    def expected(self, inputs: Values) -> Values:
        """What the references make of the inputs, one operator after the other."""
        values = dict(inputs)
        for op in self.graph.ops:
            known = inspect.signature(op.reference).parameters
            options = {name: value for name, value in self.options.items() if name in known}
            results = op.reference(*(values[t] for t in op.inputs), **options)
            assert len(results) == len(op.outputs), op.kind
            values.update(zip(op.outputs, results, strict=True))
        last = {t.storage: t for t in values if t.persistent}  # of those in the same tiles
        return {t: values[t] for t in last.values() if t not in inputs}

    def whole_values(self, values: Values) -> Values:
        """With parameters in two parts joined: the parts alone jump where bf16 does."""
        parts = {rest: param for param, rest in self.rests.items()}
        by_storage = {t.storage: value for t, value in values.items()}
        joint = {p: joined(by_storage[p], by_storage[r]) for p, r in self.rests.items()}
        return {t: joint.get(t.storage, value) for t, value in values.items() if t.storage not in parts}


def check(
    row: Callable[[Case], Any],
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
        program = program or programs([low.tasks], store)[0]
        program.run(case.slots)
        got = {tensor: store.read(low, tensor) for tensor in expected}
        assert all(value.dtype == NUMPY[tensor.dtype] for tensor, value in got.items())
        got = case.whole_values(got)
        for tensor, want in case.whole_values(expected).items():
            there = np.zeros(tensor.shape, bool)
            for where, _ in low.grid(tensor):
                there[where] = True
            wrong = error(got[tensor], want * there)
            exact = tensor.storage in case.rests
            limit = 1e-6 if exact else tolerance or {"fp64": 1e-12, "fp32": 1e-5, "bf16": 1.5e-2}[dtype]
            assert wrong < limit, f"{tensor}: off by {wrong:.1e}, replay {replay}, {policy}, {dict(tiles)}, {sizes}"
