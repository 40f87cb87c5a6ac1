"""Base class of operators, and the lowering of operators to tasks on tiles.

Axis names: batch, seq (positions of queries), key (positions of keys), embed, heads, kv_heads, head_dim, qkv (of size
3: queries, keys, values), ffn, vocab, position (rows of the table of position embeddings). A model may add other names.
Axes that can be cut into tiles: the keys of the config section `tiles`, and key, kv_heads and hidden, which are cut
like seq, heads and embed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from nntile_py.tiles import Access, TaskArgs, TaskList, Tile, TileRange, Tiling
from nntile_py.tiles.arguments import NO_ARGS
from nntile_py.tiles.dtypes import accumulation_dtype as accumulation_dtype
from nntile_py.tiles.tasklist import PythonKernel

from .scalar.expression import Definition
from .tensor import Tensor as Tensor
from .tensor import require as require

Index = dict[str, int]
Part = TypeVar("Part")
# StarPU's time for the tiles of a weight's update, as the number of elements that an update changes in this time.
SUM_ELEMENTS = 750_000
Array = np.ndarray[Any, Any]


class AttentionCache(Protocol):
    """The part of a KeyValueCache's interface that attention and models use."""

    def attend(self, operands: Any, mask: Any, scale: float | None) -> Tensor: ...
    def positions(self, below: int) -> Tensor: ...


class GraphLike(Protocol):
    """The part of a graph's interface that operators use."""

    dtype: str
    training: bool  # False: an evaluation, without dropout
    cuts: Tiling  # tile sizes of the later lowering, where known
    row_numbers: dict[str, Tensor]  # for packed sequences: {position axis or input: row numbers for Dropout}
    projections: list[list[Tensor]]  # for each attention: its queries, keys and values

    @property
    def loss(self) -> Tensor | None: ...
    @property
    def cache(self) -> AttentionCache | None: ...  # of a generation: has the keys and values of earlier tokens

    def temp(self, name: str, axes: Sequence[str], shape: Sequence[int], dtype: str, **options: Any) -> Tensor: ...
    def named(
        self, name: str, axes: Sequence[str], shape: Sequence[int], kind: str, dtype: str | None = None
    ) -> Tensor: ...
    def scope(self, name: str) -> AbstractContextManager[None]: ...
    def dropout_key(self) -> int: ...
    def add(self, op: Op) -> Op: ...


class Lowering:
    """The tiles of a graph's tensors, and the task list to which operators append their tasks.

    Args:
        tiling: tile sizes of all axes.
    """

    def __init__(self, tiling: Tiling, tasks: TaskList) -> None:
        self.tiling, self.tasks = tiling, tasks
        self.tiles: dict[tuple[int, tuple[int, ...]], Tile] = {}
        self._tensors: dict[int, Tensor] = {}  # keeps the tensors alive whose ids are keys of `tiles`
        self._accessed: tuple[int, frozenset[Tile]] = 0, frozenset()  # number of tasks, and the tiles that they access
        self.op = ""
        # State of `rotated`: {number of parts: for each part, the work of updating the sums in which it came last}.
        self._ends: dict[int, list[int]] = {}

    @property
    def policy(self) -> str:
        """The accumulation policy: chain, commute, redux or tree."""
        return self.tasks.policy

    def parts(self, tensor: Tensor, axis: str) -> list[TileRange]:
        """Return the ranges into which the tiling cuts an axis of the tensor."""
        return self.tiling.parts(axis, tensor.size(axis))

    def part(self, tensor: Tensor, axis: str, index: Index) -> TileRange:
        """Return the range of the tensor's axis that the tile at `index` covers."""
        return self.parts(tensor, axis)[index[axis]]

    def cut(self, tensor: Tensor, axis: str) -> bool:
        """Return True if the tensor has the axis and several tiles along it."""
        return axis in tensor.axes and len(self.parts(tensor, axis)) > 1

    def indices(self, tensor: Tensor, axes: Iterable[str] | None = None) -> Iterator[Index]:
        """Yield {axis: index of the tile} for all tiles along `axes`, the last axis fastest.

        Tiles outside the band of an attention mask are skipped. Default of `axes`: all axes of the tensor.
        """
        axes = tensor.axes if axes is None else tuple(axes)
        for index in itertools.product(*(range(len(self.parts(tensor, axis))) for axis in axes)):
            named = dict(zip(axes, index, strict=True))
            if not self.empty(tensor, named):
                yield named

    def empty(self, tensor: Tensor, index: Index) -> bool:
        """Return True if the tile does not exist, because it lies wholly outside the band of the attention mask."""
        if not tensor.banded or "seq" not in index or "key" not in index:
            return False
        return tensor.band.empty(self.part(tensor, "seq", index), self.part(tensor, "key", index))

    def shape(self, tensor: Tensor, index: Index) -> tuple[int, ...]:
        return tuple(self.part(tensor, axis, index).size for axis in tensor.axes)

    def tile(self, tensor: Tensor, index: Index) -> Tile:
        """Return the tensor's tile at `index`; the first call creates it. `index` may contain further axes."""
        owner = tensor.storage
        at = tuple(index[axis] for axis in tensor.axes)
        key = (id(owner), at)
        if key not in self.tiles:
            self._tensors[id(owner)] = owner
            shape = self.shape(tensor, index)
            scales = math.prod(shape[: owner.scaled])
            self.tiles[key] = Tile(
                owner.name, at, shape, owner.dtype, owner.monoid, tensor.persistent, tensor.axes, owner.kind, scales
            )
        return self.tiles[key]

    @staticmethod
    def scratch(name: str, rows: Index, shape: Sequence[int], dtype: str, monoid: str = "sum") -> Tile:
        """Return a new temporary tile of an operator.

        Args:
            rows: {axis: index of the tile}, for the axes of the tile.
            shape: sizes along these axes, optionally followed by the size of one more axis, `state`.
        """
        return Tile(name, tuple(rows.values()), tuple(shape), dtype, monoid, axes=(*rows, "state")[: len(shape)])

    def rotated(self, parts: Sequence[Part], numel: int, sums: int = 1) -> list[Part]:
        """Rotate the order of partial sums, so that different GPUs finish different sums.

        If each GPU computes one part of the batch, this spreads the results, and the optimizer's tasks that use the
        results, over all GPUs.

        Args:
            parts: indices of the partial sums, or of the tasks that add them.
            numel: elements of the sums to which each part adds. Each part is last for about the same work of updates.
            sums: number of these sums.
        """
        if not parts:
            return []
        ends = self._ends.setdefault(len(parts), [0] * len(parts))
        last = ends.index(min(ends))
        ends[last] += numel + sums * SUM_ELEMENTS
        return [*parts[last + 1 :], *parts[: last + 1]]

    def by_batch(self, indices: Iterable[Index], sums: Sequence[Tensor]) -> list[Index]:
        """Return indices of tasks that add to sums over the batch, with the batch's halves in the order of `rotated`.

        The parts of one GPU stay neighbours, so a small sum moves to each GPU only once. An odd number of parts keeps
        its order.

        Args:
            indices: indices of an operator's tasks, each of which adds to all sums.
            sums: the operator's sums. Without a sum over the batch, the order stays.
        """
        over_batch = [tensor for tensor in sums if "batch" not in tensor.axes]
        if not over_batch:
            return [*indices]
        parts: dict[int | None, list[Index]] = {}
        for index in indices:
            parts.setdefault(index.get("batch"), []).append(index)
        every, middle = [*parts.values()], len(parts) // 2
        if 2 * middle != len(parts):  # also a batch that is not cut
            return [index for part in every for index in part]
        numel = sum(tensor.numel for tensor in over_batch)
        halves = self.rotated([every[:middle], every[middle:]], numel, len(over_batch))
        return [index for half in halves for part in half for index in part]

    def emit(
        self,
        kernel: str | PythonKernel,
        accesses: Sequence[Access],
        args: TaskArgs = NO_ARGS,
        flop: float | None = None,
    ) -> None:
        """Append a task of the current operator to the task list. Arguments: see TaskList.emit."""
        self.tasks.emit(kernel, accesses, args, self.op, flop)

    def accesses(self, tensor: Tensor) -> bool:
        """Return True if a task of the list accesses a tile of the tensor."""
        tasks = self.tasks.tasks
        if self._accessed[0] != len(tasks):
            self._accessed = len(tasks), frozenset(one.tile for task in tasks for one in task.accesses)
        return any(tile in self._accessed[1] for _, tile in self.grid(tensor))

    def grid(self, tensor: Tensor) -> list[tuple[tuple[slice, ...], Tile]]:
        """Return pairs (slices of the whole tensor, tile at these slices) for all tiles of a tensor."""
        result = []
        for index in self.indices(tensor):
            parts = [self.part(tensor, axis, index) for axis in tensor.axes]
            result.append((tuple(slice(p.offset, p.end) for p in parts), self.tile(tensor, index)))
        return result


@dataclass(frozen=True, slots=True)
class Category:
    """A class of operators, with its mark and colour in drawings.

    The classes are from the data-movement paper (Ivanov et al. 2021, Data Movement Is All You Need).
    """

    name: str
    mark: str
    colour: str


CONTRACTION = Category("contraction", "△", "#f2a49a")  # by convention, only contractions count as a model's flop
NORMALIZATION = Category("normalization", "□", "#f7c9c2")
ELEMENTWISE = Category("element-wise", "○", "#fbe6e2")
CATEGORIES = (CONTRACTION, NORMALIZATION, ELEMENTWISE)


class Op:
    """An operator of the graph.

    A subclass defines, in this order: formula, gradient, cost, lowering, scalar form, reference. It may also set its
    category, and its colour in Gantt charts for each phase (forward, backward).
    """

    category: ClassVar[Category] = ELEMENTWISE
    colours: ClassVar[Mapping[str, str]] = {}
    independent: ClassVar[bool] = False  # True: an axis may have different sizes in different tensors of the operator
    picks: Sequence[str] = ()  # axes along which the operator looks entries up, as in a table, instead of summing

    name: str = ""  # set by the graph: scope and name of the operator
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
    def torch_call(self) -> str:
        """The name of the PyTorch operator that the tasks call, if they have no kernel of their own; else empty."""
        return ""

    @property
    def full_name(self) -> str:
        """The operator's name, followed by the phase unless the phase is forward. Its tasks have this name."""
        return self.name if self.phase == "forward" else f"{self.name}.{self.phase}"

    @property
    def output(self) -> Tensor:
        return self.outputs[0]

    @property
    def sums(self) -> Sequence[Tensor]:
        """Outputs to whose tiles the operator's tasks only add (ACC). Other operators may add to the same tiles."""
        return ()

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        """Add the operators of the gradient to the graph.

        Returns:
            The gradient of each input; None for an input without gradient.
        """
        raise NotImplementedError(f"{self.kind} has no gradient")

    def flop(self) -> float:
        """Return the number of floating point operations, including fused operators. A multiply-add counts as two."""
        return float(max(t.numel for t in [*self.inputs, *self.outputs]))

    def products(self) -> float:
        """Return the part of flop() in the usual flop count of a model: contractions without fused operations.

        0 for operators that are not contractions.
        """
        return self.flop() if self.category is CONTRACTION else 0.0

    def filled(self, cuts: Tiling) -> float:
        """Return the fraction of flop() that tasks compute under a tiling: tiles outside a mask's band are skipped."""
        return min(t.filled(cuts) for t in [*self.inputs, *self.outputs])

    def elements(self) -> int:
        """Return the minimum number of elements to move: each input and output once, a tied output twice."""
        return sum(t.elements for t in {*self.inputs, *self.outputs}) + sum(t.elements for t in self.tied)

    @property
    def tied(self) -> list[Tensor]:
        """Outputs that the operator adds to another operator's result, such as the gradient of a tied weight."""
        read = {t.storage for t in self.inputs}
        return [t for t in self.outputs if t.storage is not t and t.storage not in read]

    def fit(self, tiling: Tiling) -> None:
        """Couple the tile sizes of axes that must be cut alike, such as heads and kv_heads, and check the tiling.

        Raises:
            ConfigError: the operator does not support the tiling.
        """

    def lower(self, lowering: Lowering) -> None:
        raise NotImplementedError

    def scalar(self) -> Definition | None:
        """Return the formula for one point of the iteration space, from which fusion generates kernels.

        None: the operator has no such formula.
        """
        return None

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        """Return the outputs, computed in numpy float64 on whole tensors. Tests compare kernels with it."""
        raise NotImplementedError


def operators() -> dict[str, type[Op]]:
    """Return {name: class} of all operator classes defined so far, including those of users."""
    classes: dict[str, type[Op]] = {}
    todo = [Op]
    while todo:
        for op in todo.pop().__subclasses__():
            classes[op.__name__] = op
            todo.append(op)
    return classes


def permutation(source: Sequence[str], target: Iterable[str]) -> list[int]:
    """Return for each axis of `target` its position in `source`: the order for numpy's transpose or torch's permute."""
    return [list(source).index(axis) for axis in target]
