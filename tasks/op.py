"""Base class of operators: tensors with named axes, a gradient, a cost, a lowering to tile tasks, a reference.

Axis names: batch, seq (positions of queries), key (positions of keys), embed, heads, kv_heads, head_dim, qkv (3), ffn,
vocab, position (rows of the position table). A model may add other names; those axes are never cut.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from nntile_py.tiles import Access, TaskArgs, TaskList, Tile, TileRange, Tiling
from nntile_py.tiles.arguments import NO_ARGS
from nntile_py.tiles.dtypes import accumulation_dtype as accumulation_dtype
from nntile_py.tiles.tasklist import PythonKernel

from .band import ALL, Band, share_in_tiles
from .scalar.expression import Definition

Index = dict[str, int]
Array = np.ndarray[Any, Any]


class Tensor:
    """A logical tensor: named axes with sizes, a dtype, a kind.

    Args:
        kind: `input`, `param`, `grad` (of a parameter), `state` (of the optimizer), `scalar` (kept for the host),
            `output` (of an evaluation, kept for the host), `temp` (freed after its last reader).
        monoid: how contributions to a tile are combined: `sum`, `softmax` or `moments`.
        storage: the tensor that owns the tiles; an in-place operator gives its output the storage of its input.
        band: a tensor with the axes seq and key has only the tiles within this band of an attention mask.
    """

    def __init__(
        self,
        name: str,
        axes: Sequence[str],
        shape: Sequence[int],
        dtype: str,
        kind: str = "temp",
        *,
        monoid: str = "sum",
        storage: Tensor | None = None,
        band: Band = ALL,
    ) -> None:
        if len(set(axes)) != len(axes):
            raise ValueError(f"{name}: an axis is named twice in {', '.join(axes)}")
        if len(axes) != len(shape):
            raise ValueError(f"{name}: {len(axes)} axes ({', '.join(axes)}) for {len(shape)} sizes {list(shape)}")
        self.name, self.axes, self.shape = name, tuple(axes), tuple(map(int, shape))
        self.sizes = dict(zip(self.axes, self.shape, strict=True))
        self.dtype, self.kind, self.monoid, self.band = dtype, kind, monoid, band
        self.storage: Tensor = storage.storage if storage else self
        self.requires_grad = kind == "param"

    def size(self, axis: str) -> int:
        return self.sizes[axis]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def elements(self) -> int:
        """Number of elements within the band; without a band, of all elements."""
        if not self.banded:
            return self.numel
        seq, key = self.size("seq"), self.size("key")
        return self.numel // (seq * key) * self.band.pairs(TileRange(0, seq), TileRange(0, key))

    @property
    def banded(self) -> bool:
        return self.band != ALL and {"seq", "key"} <= {*self.axes}

    def filled(self, cuts: Tiling) -> float:
        """Return the fraction of the elements that lie in existing tiles."""
        if not self.banded:
            return 1.0
        seq, key = self.size("seq"), self.size("key")
        return share_in_tiles(self.band, seq, key, (cuts.tile("seq", seq), cuts.tile("key", key)))

    @property
    def persistent(self) -> bool:
        return self.storage.kind != "temp"

    def __repr__(self) -> str:
        return f"{self.name}[{', '.join(f'{a} {s}' for a, s in self.sizes.items())}]"


def require(fits: bool, rule: str, *tensors: Tensor | None) -> None:
    """Raise ValueError with an operator's rule and the tensors that break the rule, unless `fits`."""
    if not fits:
        raise ValueError(f"{rule}; got {', '.join(str(t) for t in tensors if t)}")


class GraphLike(Protocol):
    """The part of a graph's interface that operators use."""

    dtype: str
    training: bool  # False: an evaluation, without dropout
    cuts: Tiling  # of the later lowering, where known
    row_numbers: dict[str, Tensor]  # for packed sequences, by axis: see Dropout
    projections: list[list[Tensor]]  # for each attention: queries, keys, values

    @property
    def loss(self) -> Tensor | None: ...

    def temp(self, name: str, axes: Sequence[str], shape: Sequence[int], dtype: str, **options: Any) -> Tensor: ...
    def named(
        self, name: str, axes: Sequence[str], shape: Sequence[int], kind: str, dtype: str | None = None
    ) -> Tensor: ...
    def scope(self, name: str) -> AbstractContextManager[None]: ...
    def dropout_key(self) -> int: ...
    def add(self, op: Op) -> Op: ...


class Lowering:
    """Tiles of a graph's tensors under a tiling, and the task list to which operators append their tasks."""

    def __init__(self, tiling: Tiling, tasks: TaskList) -> None:
        self.tiling, self.tasks = tiling, tasks
        self.tiles: dict[tuple[int, tuple[int, ...]], Tile] = {}
        self._tensors: dict[int, Tensor] = {}  # keeps the keys of `tiles` alive
        self.op = ""
        self._ends: dict[int, list[int]] = {}  # elements of sums by last part, for each number of parts

    @property
    def policy(self) -> str:
        return self.tasks.policy

    def parts(self, tensor: Tensor, axis: str) -> list[TileRange]:
        return self.tiling.parts(axis, tensor.size(axis))

    def part(self, tensor: Tensor, axis: str, index: Index) -> TileRange:
        return self.parts(tensor, axis)[index[axis]]

    def cut(self, tensor: Tensor, axis: str) -> bool:
        return axis in tensor.axes and len(self.parts(tensor, axis)) > 1

    def indices(self, tensor: Tensor, axes: Iterable[str] | None = None) -> Iterator[Index]:
        """Yield indices of non-empty tiles over `axes` (default: all of the tensor), the last axis fastest."""
        axes = tensor.axes if axes is None else tuple(axes)
        for index in itertools.product(*(range(len(self.parts(tensor, axis))) for axis in axes)):
            named = dict(zip(axes, index, strict=True))
            if not self.empty(tensor, named):
                yield named

    def empty(self, tensor: Tensor, index: Index) -> bool:
        """Return whether the tile lies wholly outside the tensor's band."""
        if not tensor.banded or "seq" not in index or "key" not in index:
            return False
        return tensor.band.empty(self.part(tensor, "seq", index), self.part(tensor, "key", index))

    def shape(self, tensor: Tensor, index: Index) -> tuple[int, ...]:
        return tuple(self.part(tensor, axis, index).size for axis in tensor.axes)

    def tile(self, tensor: Tensor, index: Index) -> Tile:
        """Return the tensor's tile at `index`, which may contain other axes too."""
        owner = tensor.storage
        at = tuple(index[axis] for axis in tensor.axes)
        key = (id(owner), at)
        if key not in self.tiles:
            self._tensors[id(owner)] = owner
            shape = self.shape(tensor, index)
            self.tiles[key] = Tile(
                owner.name, at, shape, owner.dtype, owner.monoid, tensor.persistent, tensor.axes, owner.kind
            )
        return self.tiles[key]

    @staticmethod
    def scratch(name: str, rows: Index, shape: Sequence[int], dtype: str, monoid: str = "sum") -> Tile:
        """Return a temporary tile of an operator with the axes of `rows`, optionally followed by one more axis."""
        return Tile(name, tuple(rows.values()), tuple(shape), dtype, monoid, axes=(*rows, "state")[: len(shape)])

    def rotated(self, parts: Sequence[Index], numel: int) -> list[Index]:
        """Rotate the order of a sum's partial sums, so that different GPUs finish different sums.

        Where each part of the batch has its own GPU, this spreads the results, and the optimizer's tasks on them, over
        all GPUs.

        Args:
            numel: elements of the sum, which balance the rotation.
        """
        if not parts:
            return []
        ends = self._ends.setdefault(len(parts), [0] * len(parts))
        last = ends.index(min(ends))
        ends[last] += numel
        return [*parts[last + 1 :], *parts[: last + 1]]

    def emit(
        self,
        kernel: str | PythonKernel,
        accesses: Sequence[Access],
        args: TaskArgs = NO_ARGS,
        flop: float | None = None,
    ) -> None:
        """Append a task of the current operator; see TaskList.emit."""
        self.tasks.emit(kernel, accesses, args, self.op, flop)

    def grid(self, tensor: Tensor) -> list[tuple[tuple[slice, ...], Tile]]:
        """Return each tile of a tensor with its slice of the whole tensor."""
        result = []
        for index in self.indices(tensor):
            parts = [self.part(tensor, axis, index) for axis in tensor.axes]
            result.append((tuple(slice(p.offset, p.end) for p in parts), self.tile(tensor, index)))
        return result


@dataclass(frozen=True, slots=True)
class Category:
    """A class of operators of the data-movement paper, with its mark and colour in drawings."""

    name: str
    mark: str
    colour: str


CONTRACTION = Category("contraction", "△", "#f2a49a")  # only these count as a model's flop
NORMALIZATION = Category("normalization", "□", "#f7c9c2")
ELEMENTWISE = Category("element-wise", "○", "#fbe6e2")
CATEGORIES = (CONTRACTION, NORMALIZATION, ELEMENTWISE)


class Op:
    """An operator of the graph.

    A subclass defines, in this order: formula, gradient, cost, lowering, scalar form, reference. It may also set its
    category and its colours in Gantt charts by phase (forward, backward).
    """

    category: ClassVar[Category] = ELEMENTWISE
    colours: ClassVar[Mapping[str, str]] = {}
    independent: ClassVar[bool] = False  # True: an axis may have different sizes in different tensors
    picks: Sequence[str] = ()  # axes of inputs that are indexed as in a table, not summed

    name: str = ""  # set by the graph: scope and operator
    phase: str = "forward"

    def __init__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self.inputs, self.outputs = list(inputs), list(outputs)

    @property
    def kind(self) -> str:
        return type(self).__name__

    @property
    def title(self) -> str:
        """The kind, with the names of fused operations."""
        return self.kind

    @property
    def output(self) -> Tensor:
        return self.outputs[0]

    @property
    def sums(self) -> Sequence[Tensor]:
        """Outputs to which tasks only add (ACC); other operators may add to the same tiles."""
        return ()

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        """Add the operators of the gradient to the graph.

        Returns:
            The gradient of each input; None for an input without gradient.
        """
        raise NotImplementedError(f"{self.kind} has no gradient")

    def flop(self) -> float:
        """Return the floating point operations on whole tensors, with fused ones; a multiply-add counts as two."""
        return float(max(t.numel for t in [*self.inputs, *self.outputs]))

    def products(self) -> float:
        """Return the part of flop() in the usual count of a model: contractions, without fused operations."""
        return self.flop() if self.category is CONTRACTION else 0.0

    def filled(self, cuts: Tiling) -> float:
        """Return the fraction of the flop that remains under a tiling without the tiles outside a mask's band."""
        return min(t.filled(cuts) for t in [*self.inputs, *self.outputs])

    def elements(self) -> int:
        """Return the least number of elements to move: inputs once, outputs once, tied outputs twice."""
        return sum(t.elements for t in {*self.inputs, *self.outputs}) + sum(t.elements for t in self.tied)

    @property
    def tied(self) -> list[Tensor]:
        """Outputs that add to another operator's result, such as the gradient of a tied weight."""
        read = {t.storage for t in self.inputs}
        return [t for t in self.outputs if t.storage is not t and t.storage not in read]

    def fit(self, tiling: Tiling) -> None:
        """Couple axes in the tiling that must be cut alike. Raises ConfigError if that is impossible."""

    def lower(self, lowering: Lowering) -> None:
        raise NotImplementedError

    def scalar(self) -> Definition | None:
        """Return the computation of each point of the iteration space; None: not expressible. Needed for fusion."""
        return None

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        """Compute the operator in numpy float64 on whole tensors."""
        raise NotImplementedError


def operators() -> dict[str, type[Op]]:
    """Return all operator classes defined so far by name, users' own included."""
    classes: dict[str, type[Op]] = {}
    todo = [Op]
    while todo:
        for op in todo.pop().__subclasses__():
            classes[op.__name__] = op
            todo.append(op)
    return classes


def permutation(source: Sequence[str], target: Iterable[str]) -> list[int]:
    """Return the positions in `source` of the axes of `target`, as `permute` takes them."""
    return [list(source).index(axis) for axis in target]
