"""Calls without a rule: one ATen task each. Axes along which entries do not depend on each other may be cut."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Node

from nntile_py.capture.aten_task import AtenCall
from nntile_py.capture.axis_groups import Dim
from nntile_py.capture.builder import GraphBuilder
from nntile_py.capture.export import CONSTANT, TASKS, args_of, check_draws, name_of, shape_of
from nntile_py.capture.rules import AxisFinder, Value, argument, each, rule

# Operators whose entries affect each other only along the dimensions that one argument gives: {operator: (position,
# name) of this argument}.
ALONG = {
    "cat": (1, "dim"), "concat": (1, "dim"), "softmax": (1, "dim"), "_softmax": (1, "dim"), "log_softmax": (1, "dim"),
    "slice": (1, "dim"), "select": (1, "dim"), "narrow": (1, "dim"), "split": (2, "dim"), "chunk": (2, "dim"),
    "split_with_sizes": (2, "dim"), "cumsum": (1, "dim"), "flip": (1, "dims"), "roll": (2, "dims"),
    "amax": (1, "dim"), "amin": (1, "dim"), "var": (1, "dim"), "std": (1, "dim"), "unbind": (1, "dim"),
    "glu": (1, "dim"), "cumprod": (1, "dim"), "logsumexp": (1, "dim"), "repeat_interleave": (2, "dim"),
}  # fmt: skip
# Operators whose entries do not affect each other along the first dimensions: {operator: number of these dimensions}.
FIRST = {
    "conv1d": 1, "conv2d": 1, "conv3d": 1, "convolution": 1, "conv_transpose2d": 1, "conv_transpose1d": 1,
    "group_norm": 1, "instance_norm": 1, "pixel_shuffle": 1, "pixel_unshuffle": 1, "im2col": 1, "unfold": 1,
    "max_pool2d": 2, "max_pool1d": 2, "avg_pool2d": 2, "avg_pool1d": 2, "adaptive_avg_pool2d": 2,
    "adaptive_avg_pool1d": 2, "adaptive_max_pool2d": 2, "upsample_bilinear2d": 2, "upsample_nearest2d": 2,
    "upsample_bicubic2d": 2, "scaled_dot_product_attention": 2,
}  # fmt: skip


CONVOLUTIONS = {"conv1d": 1, "conv2d": 2, "conv3d": 3}  # {name: number of spatial dimensions}


def _convolution_grad(node: Node) -> Callable[..., Any] | None:
    """Return the gradient of a convolution, which needs no second forward pass; None if its padding is a text."""
    count = CONVOLUTIONS[name_of(node)]

    if isinstance(argument(node, 4, "padding", 0), str):
        return None
    options = enumerate((("stride", 1), ("padding", 0), ("dilation", 1)), 3)
    stride, padding, dilation = (each(argument(node, k, *option), count) for k, option in options)
    groups = int(argument(node, 6, "groups", 1))

    def backward(inputs: list[torch.Tensor], grads: list[torch.Tensor], wanted: tuple[int, ...]) -> Any:
        x, weight, *bias = inputs
        dy, mask = grads[0].to(x.dtype), [k in wanted for k in range(3)]
        found = torch.ops.aten.convolution_backward(
            dy, x, weight.to(x.dtype), [len(bias[0])] if bias else None, stride, padding, dilation, False, [0] * count,
            groups, mask,
        )  # fmt: skip
        return [found[k] for k in wanted]

    return backward


def _alone(node: Node) -> Iterator[tuple[Node, int, int]]:
    """Yield (operand, its dimension, the result's dimension) of dimensions along which entries do not interact."""
    name, shape = name_of(node), shape_of(args_of(node)[0]) if isinstance(args_of(node)[0], Node) else ()
    operands = [one for one in node.all_input_nodes if isinstance(one.meta.get("val"), torch.Tensor)]
    if name in ALONG:
        count = len(shape or shape_of(operands[0]))
        at = argument(node, *ALONG[name], default=0)
        over = {int(k) % count for k in (at if isinstance(at, list | tuple) else [at])} if at != [] else {*range(count)}
        drops = name in ("select", "unbind") or (
            name in ("amax", "amin", "var", "std", "logsumexp") and not _keeps(node)
        )
        for operand in operands:
            for k in range(count):
                if k not in over:
                    yield operand, k, k - sum(one < k for one in over) * drops
    elif name == "scaled_dot_product_attention":
        for k in range(len(shape_of(node)) - 2):
            if all(shape_of(operand)[k] == shape_of(node)[k] for operand in operands[:3]):
                yield from ((operand, k, k) for operand in operands[:3])
    elif name == "rotate":
        yield from ((operands[0], k, k) for k in range(len(shape) - 2))
    elif name == "layer_norm" or (name == "rms_norm" and isinstance(args_of(node)[1], list)):
        yield from ((operands[0], k, k) for k in range(len(shape) - len(args_of(node)[1])))
    elif name in ("pad", "constant_pad_nd"):
        padded = len(args_of(node)[1]) // 2
        yield from ((operands[0], k, k) for k in range(len(shape) - padded))
    else:
        yield from ((operands[0], k, k) for k in range(FIRST.get(name, 0)))


def _keeps(node: Node) -> bool:
    place = 3 if name_of(node) in ("var", "std") else 2
    return bool(argument(node, place, "keepdim", False))


class AtenFallback:
    """Runs a call as one ATen task on whole tensors, or on tiles along axes whose entries do not interact."""

    def dims(self, find: AxisFinder, node: Node) -> Any:
        value = node.meta["val"]
        several = isinstance(value, tuple | list)
        shapes = [tuple(map(int, one.shape)) for one in (value if several else [value])]
        results = [find.fresh(shape) for shape in shapes]
        filled: set[int] = set()
        for operand, at, place in _alone(node):
            dim = find.of(operand)[at]
            if place in filled:
                find.same(node, operand, at, results[0][place])
            elif dim:
                filled.add(place)
                for dims in results:
                    dims[place] = dim
        return results if several else results[0]

    def build(self, made: GraphBuilder, node: Node) -> Any:
        check_draws(node)
        if _complex(node):
            return None  # complex results are not stored: the tasks that read them run this call, see _deferred
        region = [*_deferred(made, node), node]
        read = dict.fromkeys(one for call in region for one in call.all_input_nodes if one not in region)
        operands = [one for one in read if not _embedded(made, one)]
        alone = self._alone_axes(made, node) if len(region) == 1 else []
        values = [made.whole(made.spread(made.read(node, one)), alone) for one in operands]
        dims = made.dims(node)
        several = bool(dims) and isinstance(dims[0], list)
        kinds = [one.dtype for one in (node.meta["val"] if several else [node.meta["val"]])]
        results = [
            made.empty(node, one, made.not_cut(one, alone), kind)
            for one, kind in zip(dims if several else [dims], kinds, strict=True)
        ]
        label, function = _function(made, node, operands)
        layouts = [_layout(value) for value in (*values, *results)]
        backward = _convolution_grad(node) if name_of(node) in CONVOLUTIONS and len(operands) > 1 else None
        tensors = [v.tensor for v in values], [v.tensor for v in results]
        call = AtenCall(label, function, *tensors, layouts, alone, backward, _products(node))
        made.g.add(call)
        for value, one in zip(results, node.meta["val"] if several else [node.meta["val"]], strict=True):
            value.tensor.requires_grad &= one.dtype.is_floating_point
        made.fallbacks.append(call)
        parts = [made.cut_again(value, one) for value, one in zip(results, dims if several else [dims], strict=True)]
        return parts if several else parts[0]

    def _alone_axes(self, made: GraphBuilder, node: Node) -> list[str]:
        axes: dict[str, None] = {}
        for operand, at, _ in _alone(node):
            axes |= dict.fromkeys(made.read(node, operand).dims[at])
        dims = made.dims(node)
        first = dims[0] if dims and isinstance(dims[0], list) else dims
        return [axis for axis in axes if any(axis in dim for dim in first)]


def _layout(value: Value) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(value.tensor.axes.index(axis) for axis in dim) for dim in value.dims)


def _products(node: Node) -> float:
    """Return the floating point operations of a call's convolutions and products, as torch counts them."""

    from torch.utils.flop_counter import FlopCounterMode  # imports triton: not before TRITON_INTERPRET is set

    def described(one: Node) -> Any:
        value = one.meta.get("val")
        return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value

    args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), described)
    try:
        with FlopCounterMode(display=False) as counter:
            assert callable(node.target)
            node.target(*args, **kwargs)
    except Exception:  # a call whose result depends on values; such calls have no products
        return 0.0
    return float(counter.get_total_flops())


def _embedded(made: GraphBuilder, node: Node) -> bool:
    """Return whether an operand is a constant: it is no operand of the task, but part of the task's function."""
    return made.captured.where.get(node) == CONSTANT


def _function(made: GraphBuilder, node: Node, operands: list[Node]) -> tuple[str, Callable[..., Any]]:
    """Return a text that identifies a call and its constants, and the call as a function of its operands."""
    region = [*_deferred(made, node), node]
    read = dict.fromkeys(one for call in region for one in call.all_input_nodes)
    constants = {
        one: _plain(node, made.captured.constants[one]) for one in read if one not in operands and one not in region
    }
    digest = hashlib.sha256()
    for value in constants.values():
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype}{[*value.shape]}".encode())
            digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    names = {one: f"x{k}" for k, one in enumerate(operands)} | {one: f"c{k}" for k, one in enumerate(constants)}
    names |= {one: f"y{k}" for k, one in enumerate(region)}
    texts = [
        name_of(call) + str(torch.fx.node.map_arg((call.args, dict(call.kwargs)), names.__getitem__)) for call in region
    ]
    label = " ".join(texts) + (f" {digest.hexdigest()[:16]}" if constants else "")
    dtypes = [one.meta["val"].dtype for one in operands]
    label += "".join(f" x{k}:{kind}" for k, kind in enumerate(dtypes) if not kind.is_floating_point)
    calls: list[tuple[Node, Any, Any]] = [(call, call.target, _without_statistics(call)) for call in region]

    moved: dict[Any, dict[Node, Any]] = {}  # the constants on each device: copied once, not in each task

    def function(*tensors: torch.Tensor) -> Any:
        kind = next((x.dtype for x in tensors if x.dtype.is_floating_point), None)
        place = tensors[0].device if tensors else None
        if (place, kind) not in moved:
            moved[place, kind] = {one: _on(value, place, kind) for one, value in constants.items()}
        known = dict(moved[place, kind])
        for one, x, dtype in zip(operands, tensors, dtypes, strict=True):
            known[one] = x if x.dtype.is_floating_point and dtype.is_floating_point else x.to(dtype)
        if len({_kind(value) for value in known.values()} - {None}) > 1:  # different precisions: compute in fp32
            known = {one: value.float() if _kind(value) else value for one, value in known.items()}
        for call, target, template in calls:
            args, kwargs = torch.fx.node.map_arg(template, known.__getitem__)
            known[call] = target(*args, **kwargs)
        return known[node]

    return label, function


def _kind(value: Any) -> torch.dtype | None:
    """Return the dtype of a floating-point tensor; None for anything else."""
    return value.dtype if isinstance(value, torch.Tensor) and value.dtype.is_floating_point else None


def _on(value: Any, device: torch.device | None, kind: torch.dtype | None) -> Any:
    """Return a constant on the device of a task's tensors; if it is floating-point, in their dtype `kind`, if any."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device, kind if kind and value.dtype.is_floating_point else value.dtype)


def _complex(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype.is_complex


def _deferred(made: GraphBuilder, node: Node) -> list[Node]:
    """Return the calls with complex results that the call `node` needs, in order; they run in the task of `node`."""
    found: dict[Node, None] = {}
    for one in node.all_input_nodes:
        if _complex(one) and made.captured.where.get(one) == TASKS:
            found |= dict.fromkeys([*_deferred(made, one), one])
    return list(found)


def _plain(node: Node, value: Any) -> Any:
    """Return a constant as a call takes it: an attention mask has size 1 along dimensions in which it is repeated."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    if name_of(node) == "scaled_dot_product_attention":
        for at in range(value.dim() - 2):
            if bool((value == value.narrow(at, 0, 1)).all()):
                value = value.narrow(at, 0, 1)
    return value


def _without_statistics(node: Node) -> Any:
    """Return a call's arguments; batch norm in training gets no running statistics, as a task must not change them."""
    if name_of(node) == "batch_norm" and args_of(node)[5]:
        return (*args_of(node)[:3], None, None, *args_of(node)[5:]), dict(node.kwargs)
    return node.args, dict(node.kwargs)


@rule("getitem")
class Item:
    """One of the results of a call."""

    def dims(self, find: AxisFinder, node: Node) -> list[Dim]:
        return list(find.found[args_of(node)[0]][args_of(node)[1]])

    def build(self, made: GraphBuilder, node: Node) -> Value:
        results: list[Value] = made.value(args_of(node)[0])
        number: int = args_of(node)[1]
        return results[number]
