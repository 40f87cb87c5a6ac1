"""What an operator is: tensors with named axes in and out, a gradient, a cost, a lowering to tile tasks, a reference.

Axis names: batch, seq (positions), key (positions attended to), embed, heads, kv_heads, head_dim, qkv (3), ffn, vocab,
position (rows of the position table); others may be added freely and are then never cut.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from nntile_py.tiles import Access, Part, TaskArgs, TaskList, Tile, Tiling
from nntile_py.tiles.arguments import NO_ARGS
from nntile_py.tiles.dtypes import accumulation_dtype as accumulation_dtype
from nntile_py.tiles.tasklist import PythonKernel

from .band import ALL, Band, share_in_tiles
from .scalar.expression import Definition

Index = dict[str, int]
Array = np.ndarray[Any, Any]


class Tensor:
    """A logical tensor: named axes with sizes, a dtype, and what it is for.

    kind: `input`, `param`, `grad` (of a parameter), `state` (of the optimizer), `scalar` (kept for the host),
    `output` (of an evaluation, kept for the host), `temp` (freed after its last reader). Tensors of one `storage` share
    tiles: an operator in place gives its output the storage of its input. `band`: tensors with axes seq and key have
    only those tiles that lie within it.
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
        self.sizes = dict(zip(self.axes, self.shape, strict=True))  # not to be changed
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
        """Those that hold something: all, or those within the band."""
        if not self.banded:
            return self.numel
        seq, key = self.size("seq"), self.size("key")
        return self.numel // (seq * key) * self.band.pairs(Part(0, seq), Part(0, key))

    @property
    def banded(self) -> bool:
        return self.band != ALL and {"seq", "key"} <= {*self.axes}

    def filled(self, cuts: Tiling) -> float:
        """The share of its elements that lie in tiles that there are."""
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
    """ValueError with an operator's rule and the tensors that break it."""
    if not fits:
        raise ValueError(f"{rule}; got {', '.join(str(t) for t in tensors if t)}")


class GraphLike(Protocol):
    """What operators need of the graph that they are added to."""

    dtype: str
    training: bool  # or an evaluation: without dropout
    cuts: Tiling  # that it will be lowered with, where that is known
    row_numbers: dict[str, Tensor]  # of packed sequences, by axis: the numbers by which dropout draws
    projections: list[list[Tensor]]  # of each attention: queries, keys, values
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
    """A graph's tensors cut by a tiling, and the list of tasks that grows as operators lower themselves."""

    def __init__(self, tiling: Tiling, tasks: TaskList) -> None:
        self.tiling, self.tasks = tiling, tasks
        self.tiles: dict[tuple[int, tuple[int, ...]], Tile] = {}
        self._tensors: dict[int, Tensor] = {}  # keeps the keys of `tiles` alive
        self.op = ""
        self._ends: dict[int, list[int]] = {}  # words of sums by their last part, for each number of parts

    @property
    def policy(self) -> str:
        return self.tasks.policy

    def parts(self, tensor: Tensor, axis: str) -> list[Part]:
        return self.tiling.parts(axis, tensor.size(axis))

    def part(self, tensor: Tensor, axis: str, index: Index) -> Part:
        return self.parts(tensor, axis)[index[axis]]

    def cut(self, tensor: Tensor, axis: str) -> bool:
        return axis in tensor.axes and len(self.parts(tensor, axis)) > 1

    def indices(self, tensor: Tensor, axes: Iterable[str] | None = None) -> Iterator[Index]:
        """Tile indices over `axes` (default: all of the tensor's), the last axis fastest; absent tiles are left out."""
        axes = tensor.axes if axes is None else tuple(axes)
        for index in itertools.product(*(range(len(self.parts(tensor, axis))) for axis in axes)):
            named = dict(zip(axes, index, strict=True))
            if not self.empty(tensor, named):
                yield named

    def empty(self, tensor: Tensor, index: Index) -> bool:
        """Whether the tile lies wholly outside of the tensor's band."""
        if not tensor.banded or "seq" not in index or "key" not in index:
            return False
        return tensor.band.empty(self.part(tensor, "seq", index), self.part(tensor, "key", index))

    def shape(self, tensor: Tensor, index: Index) -> tuple[int, ...]:
        return tuple(self.part(tensor, axis, index).size for axis in tensor.axes)

    def tile(self, tensor: Tensor, index: Index) -> Tile:
        """The tensor's tile at `index`, which may name other axes too. A key axis may be given the index of seq."""
        owner = tensor.storage
        at = tuple(index[axis] for axis in tensor.axes)
        key = (id(owner), at)
        if key not in self.tiles:
            self._tensors[id(owner)] = owner
            shape = self.shape(tensor, index)
            kept = tensor.persistent, tensor.axes, owner.kind
            self.tiles[key] = Tile(owner.name, at, shape, owner.dtype, owner.monoid, *kept)
        return self.tiles[key]

    @staticmethod
    def scratch(name: str, rows: Index, shape: Sequence[int], dtype: str, monoid: str = "sum") -> Tile:
        """A tile of what an operator keeps of each row of the tiles at `rows`; an axis may follow those of the rows."""
        return Tile(name, tuple(rows.values()), tuple(shape), dtype, monoid, axes=(*rows, "state")[: len(shape)])

    def rotated(self, parts: Sequence[Index], words: int) -> list[Index]:
        """The parts of a sum of `words` words, begun at another one each time.

        Where each part of the batch has its own GPU, the sums so end spread over all of them, and the optimizer's work.
        """
        if not parts:
            return []
        ends = self._ends.setdefault(len(parts), [0] * len(parts))
        last = ends.index(min(ends))
        ends[last] += words
        return [*parts[last + 1 :], *parts[: last + 1]]

    def emit(
        self,
        kernel: str | PythonKernel,
        accesses: Sequence[Access],
        args: TaskArgs = NO_ARGS,
        flop: float | None = None,
    ) -> None:
        """Append a task of the operator that is being lowered; see TaskList.emit."""
        self.tasks.emit(kernel, accesses, args, self.op, flop)

    def grid(self, tensor: Tensor) -> list[tuple[tuple[slice, ...], Tile]]:
        """Each tile of a tensor with the slice of the whole that it holds."""
        result = []
        for index in self.indices(tensor):
            parts = [self.part(tensor, axis, index) for axis in tensor.axes]
            result.append((tuple(slice(p.offset, p.end) for p in parts), self.tile(tensor, index)))
        return result


@dataclass(frozen=True, slots=True)
class Category:
    """A class of operators as in the data-movement paper, by what bounds their speed; how it is drawn."""

    name: str
    mark: str
    colour: str


CONTRACTION = Category("contraction", "△", "#f2a49a")  # their flop are the customary count of a model's
NORMALIZATION = Category("normalization", "□", "#f7c9c2")
ELEMENTWISE = Category("element-wise", "○", "#fbe6e2")
CATEGORIES = (CONTRACTION, NORMALIZATION, ELEMENTWISE)


class Op:
    """An operator of the graph. Subclasses say, in this order: formula, gradient, cost, lowering, scalar
    form, reference.

    A subclass may say its category, and its colours in Gantt charts by phase (forward, backward, update).
    """

    category: ClassVar[Category] = ELEMENTWISE
    colours: ClassVar[Mapping[str, str]] = {}
    independent: ClassVar[bool] = False  # whether an axis may have other sizes in other ones of its tensors
    picks: Sequence[str] = ()  # axes of its inputs along which it looks up, as in a table, and sums nothing

    name: str = ""  # set by the graph: scope and operator
    phase: str = "forward"

    def __init__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self.inputs, self.outputs = list(inputs), list(outputs)

    @property
    def kind(self) -> str:
        return type(self).__name__

    @property
    def title(self) -> str:
        """The kind, and what was fused into it."""
        return self.kind

    @property
    def output(self) -> Tensor:
        return self.outputs[0]

    @property
    def sums(self) -> Sequence[Tensor]:
        """Outputs that its tasks only add to (ACC): other operators may add to the same tiles."""
        return ()

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        """Add the operators of the gradient; returns the gradient of each input, None where there is none."""
        raise NotImplementedError(f"{self.kind} has no gradient")

    def flop(self) -> float:
        """Floating point operations on whole tensors, a multiply-add counted as two; with what was fused into it."""
        return float(max(t.numel for t in [*self.inputs, *self.outputs]))

    def products(self) -> float:
        """Those of flop() that the customary count of a model has: of contractions, without what was fused in."""
        return self.flop() if self.category is CONTRACTION else 0.0

    def filled(self, cuts: Tiling) -> float:
        """The share of its flop that a tiling leaves: tiles that lie wholly outside of a mask's band are not there."""
        return min(t.filled(cuts) for t in [*self.inputs, *self.outputs])

    def elements(self) -> int:
        """The fewest words to move: each input once, each output once, read too where it is added to."""
        return sum(t.elements for t in {*self.inputs, *self.outputs}) + sum(t.elements for t in self.tied)

    @property
    def tied(self) -> list[Tensor]:
        """Outputs that are added to what another operator has made, such as the gradient of a tied weight."""
        read = {t.storage for t in self.inputs}
        return [t for t in self.outputs if t.storage is not t and t.storage not in read]

    def fit(self, tiling: Tiling) -> None:
        """Tell the tiling how axes have to be cut together; raises ConfigError if they cannot be."""

    def lower(self, low: Lowering) -> None:
        raise NotImplementedError

    def scalar(self) -> Definition | None:
        """What is computed for each point of the iteration space, if it can be told so: such operators are fused."""
        return None

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        """The operator in numpy float64 on whole tensors."""
        raise NotImplementedError


def operators() -> dict[str, type[Op]]:
    """All that were defined so far, users' own too, by name."""
    found: dict[str, type[Op]] = {}
    todo = [Op]
    while todo:
        for op in todo.pop().__subclasses__():
            found[op.__name__] = op
            todo.append(op)
    return found


def permutation(source: Sequence[str], target: Iterable[str]) -> list[int]:
    """Positions in `source` of the axes of `target`: what `permute` takes."""
    return [list(source).index(axis) for axis in target]
