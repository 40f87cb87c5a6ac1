"""Several operators of one iteration space as one, whose kernels are generated from their scalar forms."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar

from nntile_py.tiles import ACC, Access, R, Slot, TaskArgs, W

from .band import Band
from .op import NORMALIZATION, Array, Category, Index, Lowering, Op, Tensor, accumulation_dtype, permutation
from .scalar import cpp
from .scalar.expression import Access as ElementAccess
from .scalar.expression import (
    AxisIndex,
    Definition,
    Element,
    Expression,
    Keep,
    Output,
    Reduce,
    TileType,
    nodes_of,
    replaced,
)


class GeneratedArgs(TaskArgs):
    """Of a kernel that asks where its tile lies in the whole tensor."""

    numbers: tuple[int, ...]  # the tile's first index along each axis, the axes' sizes


class GeneratedDropoutArgs(TaskArgs):
    """Of one with dropout."""

    seed: Slot
    numbers: tuple[int, ...]  # as above, then the key of each dropout


@dataclass(frozen=True)
class GeneratedKernel:
    """A kernel: what it computes, on which tiles (outputs, then inputs)."""

    name: str
    definition: Definition
    tiles: tuple[TileType, ...]
    outputs: int
    source: str  # in C++
    width: int | None = None  # elements of a row that go together

    def emitted(self, accesses: Sequence[Access], args: TaskArgs) -> str:
        """Its name, for a list of tasks."""
        KERNELS[self.name] = self
        return self.name


GENERATED = "generated"  # the C++ kernel that calls those
KERNELS: dict[str, GeneratedKernel] = {}  # those that are in task lists, by name


class NotFusible(ValueError):
    """Why operators cannot be one."""


class Generated(Op):
    """Operators of one iteration space, in their order, as one task for each tile of that.

    Values that only they read are never stored. `kept`: the tensors that they make and others read. At most one of
    them may have a reduction within rows (over the last axis, which is not cut then); sums over rows are allowed to all
    but are not read here. Raises NotFusible where that is not so.
    """

    colours: ClassVar = {"forward": "#8da0cb", "backward": "#e78ac3"}

    def __init__(self, members: Sequence[Op], kept: Collection[Tensor]) -> None:
        self.members: list[Op] = []
        self.width: int | None = None
        for op in members:
            self.members += op.members if isinstance(op, Generated) else [op]
        inputs, outputs, self.definition = _joined(self.members, kept)
        super().__init__(inputs, outputs)
        self._given = inputs, outputs  # those of the members
        self._whole = next((t for t in self._tensors if set(self.definition.axes) <= set(t.axes)), None)
        self._check()

    def on(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], width: int | None = None) -> Generated:
        """The same on other tensors, whose axes may have other orders; points are numbered as before, for dropout.

        width: elements of a row that go together: lanes of a vector, on GPUs of a thread; None: as it is."""
        made = copy.copy(self)
        for name in ("_at", "kernel"):
            vars(made).pop(name, None)
        made.inputs, made.outputs, made.width = list(inputs), list(outputs), width or self.width
        turned = {old: permutation(old.axes, new.axes) for old, new in zip(self._tensors, made._tensors, strict=True)}
        done: dict[Expression, Expression] = {}

        def at(tensor: Tensor, access: ElementAccess) -> ElementAccess:
            return tuple(access[k] for k in turned[tensor])

        def change(load: Element) -> Expression:
            return Element(load.number, at(self.inputs[load.number], load.at))

        made.definition = Definition(
            self.definition.sizes,
            tuple(
                replace(out, at=at(self.outputs[out.number], out.at), value=replaced(out.value, done, change))
                for out in self.definition.outputs
            ),
        )
        made._whole = next((t for t in made._tensors if set(made.definition.axes) <= set(t.axes)), None)
        return made

    @property
    def category(self) -> Category:  # type: ignore[override]
        return NORMALIZATION if any(op.category is NORMALIZATION for op in self.members) else self.members[0].category

    @property
    def kind(self) -> str:
        return " + ".join(op.kind for op in self.members)

    @property
    def group(self) -> str:
        """Its name in `fusion.exclude` and of its kernel: dropout_add_layer_norm."""
        starts = r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"  # of words: RMS|Norm|Grad
        return "_".join(re.sub(starts, "_", op.kind).lower() for op in self.members)

    @property
    def title(self) -> str:
        return " + ".join(op.title for op in self.members)

    @property
    def _tensors(self) -> list[Tensor]:
        return [*self.outputs, *self.inputs]

    @property
    def sums(self) -> Sequence[Tensor]:
        return [
            self.outputs[number] for number in dict.fromkeys(out.number for out in self.definition.outputs if out.total)
        ]

    @property
    def reduces(self) -> bool:
        """Whether something is reduced within rows: over the last axis."""
        return any(True for _ in nodes_of(self.definition, Reduce))

    def flop(self) -> float:
        return sum(op.flop() for op in self.members)

    def _check(self) -> None:
        if sum(any(True for _ in nodes_of(form, Reduce)) for form in map(_form, self.members)) > 1:
            raise NotFusible("only one may reduce within rows")
        if any(node.axis != self.definition.axes[-1] for node in nodes_of(self.definition, Reduce)):
            raise NotFusible("another axis than the last is reduced within rows")
        if self._whole is None:
            raise NotFusible("no tensor has all axes of the space")
        if len({t.band for t in self._tensors if {"seq", "key"} <= set(t.axes)} | {Band()}) > 2:
            raise NotFusible("their bands differ")
        column, sums = self.definition.axes[-1], [out for out in self.definition.outputs if out.total]
        over_rows = [out.at for out in sums if column in out.at]
        if any(at[-1] != column for at in over_rows) or len({at[:-1] for at in over_rows} - {()}) > 1:
            raise NotFusible("sums over rows keep different axes of them")
        if any(out.at != self.definition.axes[:-1] for out in sums if column not in out.at):
            raise NotFusible("a sum is neither over rows nor over the last axis alone")
        if len({t.storage for t in self.outputs}) < len(self.outputs):
            raise NotFusible("two of its results are added to the same tensor, such as a bias of several layers")
        if any(t.dtype != accumulation_dtype(t.dtype) for t in self.sums):
            raise NotFusible("a sum is not of the dtype of accumulation")

    # -- lowering

    @cached_property
    def _at(self) -> dict[Tensor, tuple[str | int, ...]]:
        """The axis of the space that each axis of a tensor is; 0: an axis that is not cut, of fixed places."""
        found: dict[Tensor, tuple[str | int, ...]] = {}
        loads = [(self.inputs[load.number], load.at) for load in nodes_of(self.definition, Element)]
        for tensor, at in [*loads, *((self.outputs[out.number], out.at) for out in self.definition.outputs)]:
            plain = tuple(a if isinstance(a, str) else 0 for a in at)
            if found.setdefault(tensor, plain) != plain:
                raise NotFusible(f"{tensor} is read in two ways")
        return found

    @cached_property
    def kernel(self) -> GeneratedKernel:
        """The kernel; operators that differ in their names, sizes and keys of dropout alone share one."""
        sums = set(self.sums)
        tiles = tuple(TileType(t.dtype, self._at[t], t in sums) for t in self._tensors)
        source = cpp.source(self.definition, tiles, len(self.outputs), self.width)
        name = f"{self.group[:60]}_{hashlib.sha256(source.encode()).hexdigest()[:8]}"
        return GeneratedKernel(name, self.definition, tiles, len(self.outputs), source, self.width)

    def lower(self, low: Lowering) -> None:
        assert self._whole, self
        axes = self.definition.axes
        assert not (self.reduces and low.cut(self._whole, axes[-1])), "not joined where the rows are cut"
        sums = set(self.sums)
        for index in low.indices(self._whole):
            accesses = []
            for tensor in self._tensors:
                at = zip(tensor.axes, self._at[tensor], strict=True)
                tile = low.tile(tensor, {axis: index[a] if isinstance(a, str) else 0 for axis, a in at})
                made = ACC(tile) if tensor in sums else W(tile)
                accesses.append(made if tensor in self.outputs else R(tile))
            low.emit(self.kernel, accesses, self._args(low, index))

    def _args(self, low: Lowering, index: Index) -> TaskArgs:
        assert self._whole, self
        keys = tuple(dict.fromkeys(node.key for node in nodes_of(self.definition, Keep)))
        if not keys and not any(True for _ in nodes_of(self.definition, AxisIndex)):
            return TaskArgs()
        offsets = tuple(low.part(self._whole, axis, index).offset for axis in self.definition.axes)
        numbers = (*offsets, *self.definition.sizes.values())
        return GeneratedDropoutArgs(Slot("dropout_seed"), (*numbers, *keys)) if keys else GeneratedArgs(numbers)

    def scalar(self) -> Definition:
        return self.definition

    def reference(self, *inputs: Array, seed: int = 0) -> tuple[Array, ...]:
        def turned(x: Array, old: Tensor, new: Tensor) -> Array:
            return x.transpose(permutation(old.axes, new.axes))

        (read, made), own = self._given, zip(self.inputs, inputs, strict=True)
        values = {first: turned(x, t, first) for first, (t, x) in zip(read, own, strict=True)}
        for op in self.members:
            options = {"seed": seed} if any(True for _ in nodes_of(_form(op), Keep)) else {}
            values.update(zip(op.outputs, op.reference(*(values[t] for t in op.inputs), **options), strict=True))
        return tuple(turned(values[first], first, t) for first, t in zip(made, self.outputs, strict=True))


def _form(op: Op) -> Definition:
    form = op.scalar()
    if form is None:
        raise NotFusible(f"{op.kind} has no scalar form")
    return form


def _joined(members: Iterable[Op], kept: Collection[Tensor]) -> tuple[list[Tensor], list[Tensor], Definition]:
    """Inputs, outputs and definition of operators in their order: what one makes and another loads is put in."""
    known: dict[tuple[Tensor, tuple[str | int, ...]], Expression] = {}
    made: set[Tensor] = set()
    inputs: dict[Tensor, int] = {}
    outputs: dict[Tensor, int] = {}
    results: list[Output] = []
    sizes: dict[str, int] | None = None

    def of(op: Op, load: Element) -> Expression:
        tensor = op.inputs[load.number]
        if tensor in made and (tensor, load.at) not in known:
            raise NotFusible(f"{tensor} is read in another way than it is made")
        number = inputs.setdefault(tensor, len(inputs)) if tensor not in made else 0
        return known.setdefault((tensor, load.at), Element(number, load.at))

    for op in members:
        form, done = _form(op), dict[Expression, Expression]()
        sizes = sizes or dict(form.sizes)
        if list(sizes.items()) != list(form.sizes.items()):
            raise NotFusible("their spaces differ")
        values = [replaced(out.value, done, partial(of, op)) for out in form.outputs]
        for out, value in zip(form.outputs, values, strict=True):
            tensor = op.outputs[out.number]
            made.add(tensor)
            if not out.total:
                known[tensor, out.at] = value
            if tensor in kept:
                number = outputs.setdefault(tensor, len(outputs))
                results.append(Output(number, out.at, value, out.total))
    return list(inputs), list(outputs), Definition(sizes or {}, tuple(results))
