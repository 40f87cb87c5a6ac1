"""Fusion of operators with equal iteration spaces into one operator with a kernel generated from scalar forms."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar

import numpy as np

from nntile_py.tiles import ACC, Access, R, Slot, TaskArgs, W

from .band import Band
from .op import NORMALIZATION, Array, Category, Index, Lowering, Op, Tensor, accumulation_dtype, permutation
from .scalar import cpp
from .scalar import expression as ex


class GeneratedArgs(TaskArgs):
    """Arguments of a kernel that uses indices in the whole tensor."""

    numbers: tuple[int, ...]  # first index of the tile along each axis, then sizes of the whole axes


class GeneratedDropoutArgs(TaskArgs):
    """Arguments of a kernel with dropout."""

    seed: Slot
    numbers: tuple[int, ...]  # as in GeneratedArgs, then the key of each dropout


@dataclass(frozen=True)
class GeneratedKernel:
    """A generated kernel: its computation, and the types of its tiles (outputs, then inputs)."""

    name: str
    definition: ex.Definition
    tiles: tuple[ex.TileType, ...]
    outputs: int
    source: str  # C++ text
    width: int | None = None  # elements of a row per vector (CPU) or per thread (GPU); None: the default

    def emitted(self, accesses: Sequence[Access], args: TaskArgs) -> str:
        """Register the kernel for a task list and return its name."""
        KERNELS[self.name] = self
        return self.name


GENERATED = "generated"  # name of the C++ kernel that calls generated kernels
KERNELS: dict[str, GeneratedKernel] = {}  # kernels in task lists, by name


class NotFusible(ValueError):
    """Operators cannot be fused; the message is the reason."""


class Generated(Op):
    """Operators with equal iteration spaces as one operator: one task for each tile of the iteration space.

    At most one member may reduce within rows, that is over the last axis; the last axis must then not be cut. Every
    member may sum over rows, but no member may read such a sum. Raises NotFusible otherwise.

    Args:
        members: the operators in order of execution.
        kept: outputs of members to store, since other operators read them; the other values are never stored.
        forms: a cache of the operators' scalar forms.
    """

    colours: ClassVar = {"forward": "#8da0cb", "backward": "#7c4dff"}

    def __init__(self, members: Sequence[Op], kept: Collection[Tensor], forms: Forms | None = None) -> None:
        self.members: list[Op] = []
        self.width: int | None = None
        for op in members:
            self.members += op.members if isinstance(op, Generated) else [op]
        own = [(forms or _form)(op) for op in self.members]
        if any(list(form.sizes.items()) != list(own[0].sizes.items()) for form in own):
            raise NotFusible("their spaces differ")
        if sum(form.reduces for form in own) > 1:
            raise NotFusible("only one may reduce within rows")
        inputs, outputs, self.definition = _joined(self.members, own, kept)
        super().__init__(inputs, outputs)
        self._member_tensors = inputs, outputs  # tensors that the members use; `on` replaces only the operator's
        self._whole = next((t for t in self._tensors if set(self.definition.axes) <= set(t.axes)), None)
        self._check()

    def on(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], width: int | None = None) -> Generated:
        """Return a copy of this operator on other tensors, whose axes may have other orders. Dropout masks stay equal.

        Args:
            width: elements of a row per vector, or per thread on GPUs; None: unchanged.
        """
        other = copy.copy(self)
        for name in ("_at", "kernel"):
            vars(other).pop(name, None)
        other.inputs, other.outputs, other.width = list(inputs), list(outputs), width or self.width
        pairs = zip(self._tensors, other._tensors, strict=True)
        permutations = {old: permutation(old.axes, new.axes) for old, new in pairs}
        done: dict[ex.Expression, ex.Expression] = {}

        def at(tensor: Tensor, access: ex.Access) -> ex.Access:
            return tuple(access[k] for k in permutations[tensor])

        def change(load: ex.Element) -> ex.Expression:
            return ex.Element(load.number, at(self.inputs[load.number], load.at))

        other.definition = ex.Definition(
            self.definition.sizes,
            tuple(
                replace(out, at=at(self.outputs[out.number], out.at), value=ex.replaced(out.value, done, change))
                for out in self.definition.outputs
            ),
        )
        other._whole = next((t for t in other._tensors if set(other.definition.axes) <= set(t.axes)), None)
        return other

    @property
    def category(self) -> Category:  # type: ignore[override]
        return NORMALIZATION if any(op.category is NORMALIZATION for op in self.members) else self.members[0].category

    @property
    def kind(self) -> str:
        """Name of the fusion group, such as dropout_add_layer_norm, in plans, profiles and `fusion.exclude`."""
        starts = r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"  # where a word starts, such as RMS, Norm or Grad
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
        """Whether a member reduces within rows: over the last axis."""
        return self.definition.reduces

    def flop(self) -> float:
        return sum(op.flop() for op in self.members)

    def _check(self) -> None:
        if any(node.axis != self.definition.axes[-1] for node in ex.nodes_of(self.definition, ex.Reduce)):
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
            raise NotFusible("two outputs are added to the same tensor, such as a bias of several layers")
        if any(t.dtype != accumulation_dtype(t.dtype) for t in self.sums):
            raise NotFusible("a sum is not of the dtype of accumulation")

    # -- lowering

    @cached_property
    def _at(self) -> dict[Tensor, tuple[str | int, ...]]:
        """{tensor: for each of its axes, the axis of the iteration space that indexes it}.

        0 stands for an uncut axis that is accessed at fixed indices.
        """
        axes: dict[Tensor, tuple[str | int, ...]] = {}
        loads = [(self.inputs[load.number], load.at) for load in ex.nodes_of(self.definition, ex.Element)]
        for tensor, at in [*loads, *((self.outputs[out.number], out.at) for out in self.definition.outputs)]:
            plain = tuple(a if isinstance(a, str) else 0 for a in at)
            if axes.setdefault(tensor, plain) != plain:
                raise NotFusible(f"{tensor} is read with two orders of axes")
        return axes

    @cached_property
    def kernel(self) -> GeneratedKernel:
        """The generated kernel; operators that differ only in names, sizes and dropout keys share one kernel."""
        sums = set(self.sums)
        tiles = tuple(ex.TileType(t.dtype, self._at[t], t in sums) for t in self._tensors)
        source = cpp.source(self.definition, tiles, len(self.outputs), self.width)
        name = f"{self.kind[:60]}_{hashlib.sha256(source.encode()).hexdigest()[:8]}"
        return GeneratedKernel(name, self.definition, tiles, len(self.outputs), source, self.width)

    def lower(self, lowering: Lowering) -> None:
        assert self._whole, self
        axes = self.definition.axes
        assert not (self.reduces and lowering.cut(self._whole, axes[-1])), "not joined where the rows are cut"
        sums = set(self.sums)
        for index in lowering.by_batch(lowering.indices(self._whole), self.sums):
            accesses = []
            for tensor in self._tensors:
                at = zip(tensor.axes, self._at[tensor], strict=True)
                tile = lowering.tile(tensor, {axis: index[a] if isinstance(a, str) else 0 for axis, a in at})
                written = ACC(tile) if tensor in sums else W(tile)
                accesses.append(written if tensor in self.outputs else R(tile))
            lowering.emit(self.kernel, accesses, self._args(lowering, index))

    def _args(self, lowering: Lowering, index: Index) -> TaskArgs:
        assert self._whole, self
        keys = tuple(dict.fromkeys(node.key for node in ex.nodes_of(self.definition, ex.Keep)))
        if not keys and not ex.has(self.definition, ex.AxisIndex):
            return TaskArgs()
        offsets = tuple(lowering.part(self._whole, axis, index).offset for axis in self.definition.axes)
        numbers = (*offsets, *self.definition.sizes.values())
        return GeneratedDropoutArgs(Slot("dropout_seed"), (*numbers, *keys)) if keys else GeneratedArgs(numbers)

    def scalar(self) -> ex.Definition:
        return self.definition

    def reference(self, *inputs: Array, seed: int = 0) -> tuple[Array, ...]:
        def transposed(x: Array, old: Tensor, new: Tensor) -> Array:
            return x.transpose(permutation(old.axes, new.axes))

        (read, written), own = self._member_tensors, zip(self.inputs, inputs, strict=True)
        values = {first: transposed(x, t, first) for first, (t, x) in zip(read, own, strict=True)}
        for op in self.members:
            options = {"seed": seed} if ex.has(_form(op), ex.Keep) else {}
            # The result does not depend on an input of a member that is no input of the group.
            operands = (values[t] if t in values else np.zeros(t.shape) for t in op.inputs)
            values.update(zip(op.outputs, op.reference(*operands, **options), strict=True))
        return tuple(transposed(values[first], first, t) for first, t in zip(written, self.outputs, strict=True))


class Forms:
    """A cache of operators' scalar forms. The operators must not change while the cache is used."""

    def __init__(self) -> None:
        self._forms: dict[Op, ex.Definition | None] = {}

    def find(self, op: Op) -> ex.Definition | None:
        """Return an operator's scalar form, or None if it has none."""
        if op not in self._forms:
            self._forms[op] = op.scalar()
        return self._forms[op]

    def __call__(self, op: Op) -> ex.Definition:
        return _checked(op, self.find(op))


def _form(op: Op) -> ex.Definition:
    return _checked(op, op.scalar())


def _checked(op: Op, form: ex.Definition | None) -> ex.Definition:
    if form is None:
        raise NotFusible(f"{op.kind} has no scalar form")
    return form


def _joined(
    members: Sequence[Op], forms: Sequence[ex.Definition], kept: Collection[Tensor]
) -> tuple[list[Tensor], list[Tensor], ex.Definition]:
    """Return inputs, outputs and joint scalar form of the members. Values passed between members are substituted."""
    known: dict[tuple[Tensor, tuple[str | int, ...]], ex.Expression] = {}
    written: set[Tensor] = set()
    inputs: dict[Tensor, int] = {}
    outputs: dict[Tensor, int] = {}
    results: list[ex.Output] = []

    def of(op: Op, load: ex.Element) -> ex.Expression:
        tensor = op.inputs[load.number]
        if tensor in written and (tensor, load.at) not in known:
            raise NotFusible(f"{tensor} is read with other axes than it is written")
        number = inputs.setdefault(tensor, len(inputs)) if tensor not in written else 0
        return known.setdefault((tensor, load.at), ex.Element(number, load.at))

    for op, form in zip(members, forms, strict=True):
        done: dict[ex.Expression, ex.Expression] = {}
        values = [ex.replaced(out.value, done, partial(of, op)) for out in form.outputs]
        for out, value in zip(form.outputs, values, strict=True):
            tensor = op.outputs[out.number]
            written.add(tensor)
            if not out.total:
                known[tensor, out.at] = value
            if tensor in kept:
                number = outputs.setdefault(tensor, len(outputs))
                results.append(ex.Output(number, out.at, value, out.total))
    read, definition = _needed([*inputs], ex.Definition(dict(forms[0].sizes), tuple(results)))
    return read, [*outputs], definition


def _needed(inputs: Sequence[Tensor], definition: ex.Definition) -> tuple[list[Tensor], ex.Definition]:
    """Return the inputs that the definition loads, and the definition with their numbers.

    The other inputs belong to values that no operator outside of the group reads. Such a value is the gradient of a
    frozen embedding.
    """
    numbers = sorted({load.number for load in ex.nodes_of(definition, ex.Element)})
    if len(numbers) == len(inputs):
        return [*inputs], definition
    done: dict[ex.Expression, ex.Expression] = {}

    def renumber(load: ex.Element) -> ex.Expression:
        return replace(load, number=numbers.index(load.number))

    outputs = (replace(out, value=ex.replaced(out.value, done, renumber)) for out in definition.outputs)
    return [inputs[number] for number in numbers], replace(definition, outputs=tuple(outputs))
