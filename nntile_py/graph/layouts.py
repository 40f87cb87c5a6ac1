"""Layouts: the order of the axes of an operator's tensors in memory, and the orders that its kernels accept.

Ivanov et al. 2021 ("Data movement is all you need", section V): a contraction accepts all orders that map to one
(batched) matrix product. Other operators work on rows: the axis along a row comes last, and the other axes may have any
order.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from nntile_py.tasks.activation import Activation, ActivationGrad
from nntile_py.tasks.attention import Attention, AttentionGrad
from nntile_py.tasks.attention_operands import ROLES
from nntile_py.tasks.band import ALL
from nntile_py.tasks.contract import Contract
from nntile_py.tasks.elementwise import Add, BiasAdd, Dropout, Multiply, Pack, Rename, Sum, Transpose, Unpack
from nntile_py.tasks.gated import Gated, GatedGrad
from nntile_py.tasks.generated import Generated
from nntile_py.tasks.norm import Norm, NormGrad
from nntile_py.tasks.op import Op, Tensor
from nntile_py.tasks.scalar.expression import Definition, Element, Keep, Reduce, nodes_of
from nntile_py.tasks.softmax import Softmax, SoftmaxGrad
from nntile_py.tiles import Tiling

Order = tuple[str, ...]
Layout = tuple[Order, ...]  # the order of each tensor of an operator, as tensors_of lists them
BY_ROWS = (Add, Multiply, BiasAdd, Sum, Dropout, Activation, ActivationGrad, Gated, GatedGrad, Norm, NormGrad, Softmax,
           SoftmaxGrad)  # fmt: skip


@dataclass(frozen=True)
class SameOrder:
    """Tensors of an operator that must all have the same order of axes.

    Attributes:
        names: for each tensor, a name for each axis. Axes of the same name correspond. "" marks an axis that stays
            behind all named axes.
        last: names of axes that stay last.
        kept: in each tuple, names whose relative order is fixed, such as the axes of a bias.
    """

    names: Mapping[Tensor, Order]
    last: Order = ()
    kept: tuple[Order, ...] = ()


def tensors_of(op: Op) -> list[Tensor]:
    """Return all tensors of an operator once: inputs, then outputs."""
    return list(dict.fromkeys([*op.inputs, *op.outputs]))


def layout_of(op: Op) -> Layout:
    """Return the present layout of an operator: the order of axes of each tensor."""
    return tuple(t.axes for t in tensors_of(op))


def same_orders_of(op: Op) -> list[SameOrder]:
    """Return the tensors of an operator whose axes may be reordered, in sets of tensors that need the same order.

    All other tensors of the operator keep their order.
    """
    if isinstance(op, Contract):
        with_out = [t for t in (op.output, op.residual, op.pre, op.aux) if t]
        kept = [t.axes for t in (op.bias, op.bias_grad[1] if op.bias_grad else None) if t]
        one = SameOrder({t: t.axes for t in with_out}, kept=tuple(kept))
        return [*(SameOrder({t: t.axes}) for t in (op.a, op.b) if t not in with_out), one]
    if isinstance(op, Transpose):
        return [SameOrder({t: t.axes}) for t in tensors_of(op)]
    if isinstance(op, Rename):
        return [SameOrder({op.inputs[0]: op.inputs[0].axes, op.output: op.inputs[0].axes})]
    if isinstance(op, Unpack | Pack):
        return [SameOrder({t: t.axes for t in tensors_of(op)})]
    if isinstance(op, Attention | AttentionGrad):
        return _attention_orders(op)
    if isinstance(op, (Generated, *BY_ROWS)):
        form = op.scalar()
        masked = isinstance(op, Softmax) and op.mask.inputs  # the mask's kernel expects the batch axis in its place
        return [] if form is None or masked else _row_orders(op, form)
    return []


def _attention_orders(op: Attention | AttentionGrad) -> list[SameOrder]:
    """Return the sets of attention's tensors that need the same order.

    The sets are: the operands; the gradients of the operands; the output; the gradient of the output.
    """

    def roles(tensors: Iterable[Tensor]) -> SameOrder:
        return SameOrder({t: tuple(ROLES.get(a, a) for a in t.axes) for t in tensors}, last=("head_dim",))

    forward = op.forward if isinstance(op, AttentionGrad) else op
    single = [forward.output, *([op.do] if isinstance(op, AttentionGrad) else [])]
    many = [forward.operands.tensors, *([op.grads.tensors] if isinstance(op, AttentionGrad) else [])]
    return [*map(roles, many), *(roles([t]) for t in single)]


def _row_orders(op: Op, form: Definition) -> list[SameOrder]:
    """Return the sets of tensors that need the same order in an operator on rows.

    The loads and stores of the operator's scalar form determine the sets.
    """
    if any(node.row_numbers for node in nodes_of(form, Keep)):
        return []  # random numbers of dropout depend on the order of the rows
    at = {op.inputs[node.number]: node.at for node in nodes_of(form, Element)}
    at |= {op.outputs[out.number]: out.at for out in form.outputs if not out.total}
    rows = {t: tuple(a if isinstance(a, str) else "" for a in of) for t, of in at.items()}
    free = {t: of for t, of in rows.items() if len(of) > 1 and t.kind == "temp"}
    if isinstance(op, Generated):  # a generated kernel takes any order of each tensor
        return [SameOrder(free)]
    # The axes of a tensor with a fixed order have this order in the other tensors too.
    kept = [t.axes for t in (*(t for t in rows if t not in free), *op.sums)]
    reduces = any(True for kind in (Reduce, Keep) for _ in nodes_of(form, kind))
    last = ("seq", "key") if isinstance(op, Softmax | SoftmaxGrad) else form.axes[-1:] if reduces else ()
    return [SameOrder(free, last, tuple(kept))]


# -- an operator in another layout


def on(op: Op, other: Mapping[Tensor, Tensor]) -> Op:
    """Return a copy of an operator on other tensors. other: {tensor: new tensor, maybe in another order}."""

    def of(tensor: Tensor) -> Tensor:
        return other.get(tensor, tensor)

    changed = copy.copy(op)
    if isinstance(op, Contract):
        names = ("bias", "residual", "pre", "aux")
        given = {name: of(t) if (t := getattr(op, name)) else None for name in names}
        sums = (op.bias_grad[0], of(op.bias_grad[1])) if op.bias_grad else None
        changed = Contract(of(op.a), of(op.b), of(op.output), scale=op.scale, activation=op.activation, bias_grad=sums,
                        reshape=op.reshape, **given)  # fmt: skip
    elif isinstance(op, AttentionGrad):
        changed = type(op)(_attention_on(op.forward, of), of(op.do), [of(t) for t in op.outputs])
    elif isinstance(op, Attention):
        changed = _attention_on(op, of)
    elif isinstance(op, Generated):
        changed = op.on([of(t) for t in op.inputs], [of(t) for t in op.outputs])
    else:
        changed.inputs, changed.outputs = [of(t) for t in op.inputs], [of(t) for t in op.outputs]
        for name, value in vars(op).items():
            if isinstance(value, Tensor):
                setattr(changed, name, of(value))
            elif isinstance(value, Dropout):
                setattr(changed, name, on(value, other))
    changed.name, changed.phase = op.name, op.phase
    return changed


def _attention_on(op: Attention, of: Any) -> Attention:
    """Return a copy of an attention operator with each tensor replaced by `of(tensor)`."""
    changed = copy.copy(op)
    changed.lse, changed.outputs = of(op.lse), [of(t) for t in op.outputs]
    changed.read([of(t) for t in op.operands.tensors])
    return changed


def laid(op: Op, layout: Layout) -> Op:
    """Return a copy of the operator whose tensors have the orders of a layout."""
    other, movable = {}, {t for tie in same_orders_of(op) for t in tie.names}
    for tensor, order in zip(tensors_of(op), layout, strict=True):
        if tensor not in movable:
            continue
        shape = [tensor.size(axis) for axis in order]
        other[tensor] = Tensor(tensor.name, order, shape, tensor.dtype, tensor.kind, monoid=tensor.monoid,
                               band=tensor.band, scaled=tensor.scaled)  # fmt: skip
    return on(op, other)


# -- the layouts of a contraction


def products(op: Contract) -> Iterator[Layout]:
    """Yield all layouts in which a contraction is one matrix product or one batch of matrix products.

    The axes of the batch, the rows, the columns and the sum are each contiguous, in the same order in each tensor, and
    the batch is not last: a BLAS library takes strides between matrices, and contiguous rows or columns within a
    matrix.
    """
    one = same_orders_of(op)[-1]
    if op.a is op.b or {op.a, op.b} & {*one.names}:
        return  # one tensor has two roles
    free = [list(itertools.permutations(part)) for part in (op.batch, op.m, op.n, op.k)]
    for batch, m, n, k in itertools.product(*free):
        for a, b, out in itertools.product(_forms(batch, m, k), _forms(batch, k, n), _forms(batch, m, n)):
            if not all(_subsequence(axes, out) for axes in one.kept):
                continue
            orders = {op.a: a, op.b: b} | dict.fromkeys(one.names, out)
            yield tuple(orders.get(t, t.axes) for t in tensors_of(op))


def _forms(batch: Order, rows: Order, columns: Order) -> list[Order]:
    """Return the orders of axes of a batch of matrices or transposed matrices.

    The batch axes come first, or between rows and columns.
    """
    orders = [(*batch, *rows, *columns), (*batch, *columns, *rows)]
    orders += [(*rows, *batch, *columns), (*columns, *batch, *rows)] if batch else []
    return list(dict.fromkeys(orders))


def _subsequence(axes: Sequence[str], order: Sequence[str]) -> bool:
    """Return whether the axes that occur in both sequences have the same relative order."""
    return [a for a in order if a in axes] == [a for a in axes if a in order]


def fits(tie: SameOrder, order: Order) -> bool:
    """Return whether the SameOrder `tie` allows its tensors this order of axes, given by the names in `tie`."""
    return all(_subsequence(axes, order) for axes in tie.kept) and order[len(order) - len(tie.last) :] == tie.last


# -- texts that identify a measurement


def described(op: Op, tiling: Tiling, policy: str = "chain") -> tuple[str, str]:
    """Return a text of the operator and a text of its layout, which identify a measured time.

    Two operators have equal texts if they run the same kernels on the same memory layout. Axes that are contiguous in
    all tensors count as one axis. The axes of a contraction are called B (batch), M, N and K.
    """
    tensors = tensors_of(op)
    attention = op.forward if isinstance(op, AttentionGrad) else op if isinstance(op, Attention) else None
    solid = {axis for tie in same_orders_of(op) for axis in tie.last}
    solid |= {op.definition.axes[-1]} if isinstance(op, Generated) else set()
    solid |= {axis for t in tensors for axis in t.axes} if attention else set()
    solid |= set() if isinstance(op, Contract) else {"qkv", "stat"}
    parts = _together(tensors, solid)
    role = partial(_role, op, solid)
    extents = {axis: size for t in tensors for axis, size in t.sizes.items()}
    cuts = {a: f"{n}/{tile}" if (tile := tiling.tile(a, n)) < n else str(n) for a, n in extents.items()}
    roles: dict[str, list[str]] = {}
    for axis in sorted(cuts):
        roles.setdefault(role(axis), []).append(cuts[axis])
    sizes = ", ".join(f"{name} {'x'.join(sorted(of))}" for name, of in sorted(roles.items()))
    bands = {str(t.band) for t in tensors if t.band != ALL}
    more = [*sorted(bands), *([attention.backend, str(attention.mask.band)] if attention else [])]
    more += [policy] * (policy != "chain")
    dtypes = " ".join(dict.fromkeys(t.dtype for t in tensors))
    names: dict[Order, str] = {}
    for tensor in tensors:
        for part in _split(tensor.axes, parts):
            if part not in names:
                mine = role(part[0])
                again = sum(of.rstrip("0123456789") == mine for of in names.values())
                names[part] = mine if len(roles[mine]) == len(part) else f"{mine}{again}"
    orders = [" ".join(_named(part, names, cuts, roles, role) for part in _split(t.axes, parts)) for t in tensors]
    layout = ", ".join(orders[: len(set(op.inputs))]) + " -> " + ", ".join(orders[len(set(op.inputs)) :])
    return f"{op.title}: {sizes}; {' '.join([dtypes, *more])}", layout


def _role(op: Op, solid: set[str], axis: str) -> str:
    """Return the name of an axis in the texts of `described`.

    In a contraction the name is B, M, N or K. In other operators, axes in `solid` keep their names; others are R.
    """
    if isinstance(op, Contract):
        parts = {"B": op.batch, "M": op.m, "N": op.n, "K": op.k}
        return next((name for name, axes in parts.items() if axis in axes), axis)
    return axis if axis in solid else "R"


def _named(part: Order, names: dict[Order, str], cuts: dict[str, str], roles: dict[str, list[str]], role: Any) -> str:
    """Return the text of a part (see `_together`): its name, with its sizes if other parts have the same role."""
    whole = len(roles[role(part[0])]) == len(part)
    return names[part] if whole else f"{names[part]}({'x'.join(sorted(cuts[a] for a in part))})"


def _together(tensors: Sequence[Tensor], solid: set[str]) -> list[Order]:
    """Return the tensors' axes in parts. A part is a tuple of axes that are contiguous wherever one of them occurs."""
    follows: dict[str, str] = {}
    axes = list(dict.fromkeys(a for t in tensors for a in t.axes))
    for a, b in itertools.permutations(axes, 2):
        if solid.isdisjoint((a, b)) and all(_beside(t.axes, a, b) for t in tensors if {a, b} & set(t.axes)):
            follows[a] = b
    parts = []
    for axis in axes:
        if axis not in follows.values():
            part = [axis]
            while part[-1] in follows:
                part.append(follows[part[-1]])
            parts.append(tuple(part))
    return parts


def _beside(axes: Order, a: str, b: str) -> bool:
    """Return whether axis b directly follows axis a."""
    return a in axes and b in axes and axes.index(b) == axes.index(a) + 1


def _split(axes: Order, parts: Sequence[Order]) -> list[Order]:
    """Return the parts (see `_together`) that make up a tensor's axes, in the tensor's order."""
    return sorted((p for p in parts if p[0] in axes), key=lambda p: axes.index(p[0]))
