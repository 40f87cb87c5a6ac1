"""Rewrites of a captured module before its axes are found: operators that a module spells out become one call.

A rewrite matches nodes of the graph and replaces the last one by a call of a function of this file. The function
computes the same in torch, so a call that the graph's operators do not support can still run as one ATen task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from nntile_py.capture.export import CapturedModule, args_of, is_getitem, name_of, shape_of
from nntile_py.capture.rules import argument

SAME = ("to", "alias", "contiguous", "clone", "_to_copy", "type_as", "float")  # operators that return their argument


class WeightPart(NamedTuple):
    """A part of a weight that is a parameter of its own: `size` entries of dimension `dim`, from `start` on."""

    dim: int
    start: int
    size: int


# -- the functions that rewritten graphs call


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return weight * x / sqrt(mean(x^2) + eps) over the last dimension."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x cos + [-b, a] sin, with a and b the halves of the last dimension of x."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Return gelu by tanh."""
    return torch.nn.functional.gelu(x, approximate="tanh")


# -- matching


def bare(node: Any) -> Any:
    """Return the node whose value a node has, without operators that only copy or convert."""
    while isinstance(node, Node) and name_of(node) in SAME:
        node = args_of(node)[0]
    return node


def _is(node: Any, name: str) -> bool:
    return isinstance(node, Node) and name_of(node) == name


def _pairs(node: Any, name: str) -> Iterator[tuple[Any, Any]]:
    """Yield the two operands of a commutative call, in both orders; none if the node is another call."""
    if _is(node, name) and len(node.args) >= 2 and not node.kwargs:
        a, b = (bare(one) for one in args_of(node)[:2])
        yield from ((a, b), (b, a))


def _norm_of(node: Node) -> tuple[Node, Node, float] | None:
    """Return (x, weight, eps) of an RMSNorm whose last call is `node`."""
    for weight, scaled in _pairs(node, "mul"):
        if not isinstance(weight, Node) or weight.op != "placeholder" or len(shape_of(weight)) != 1:
            continue
        for x, root in _pairs(scaled, "mul"):
            if not _is(root, "rsqrt"):
                continue
            for mean, eps in _pairs(bare(args_of(root)[0]), "add"):
                if not _is(mean, "mean") or not isinstance(eps, float) or not argument(mean, 2, "keepdim", False):
                    continue
                square = bare(args_of(mean)[0])
                last = [one % len(shape_of(x)) for one in args_of(mean)[1]] == [len(shape_of(x)) - 1]
                squared = _is(square, "pow") and args_of(square)[1] == 2 and bare(args_of(square)[0]) is x
                if last and (squared or any(a is x and b is x for a, b in _pairs(square, "mul"))):
                    return x, weight, eps
    return None


def _rotated_by(node: Node) -> tuple[Node, Node, Node] | None:
    """Return (x, cos, sin) of rotary embeddings whose last call is `node`."""
    for first, second in _pairs(node, "add"):
        for x, cos in _pairs(first, "mul"):
            for joined, sin in _pairs(second, "mul"):
                if _is(joined, "cat") and _halves_of(joined, x) and isinstance(cos, Node) and isinstance(sin, Node):
                    return x, cos, sin
    return None


def _halves_of(joined: Node, x: Any) -> bool:
    """Return whether a cat is [-b, a] with a and b the halves of the last dimension of x."""
    parts, width = [bare(one) for one in args_of(joined)[0]], shape_of(joined)[-1]
    if len(parts) != 2 or argument(joined, 1, "dim", 0) % len(shape_of(joined)) != len(shape_of(joined)) - 1:
        return False
    if not _is(parts[0], "neg"):
        return False
    spans = [_span(bare(args_of(parts[0])[0]), x), _span(parts[1], x)]
    return spans == [(width // 2, width), (0, width // 2)]


def _span(node: Any, x: Any) -> tuple[int, int] | None:
    """Return the part of the last dimension of x that a slice, or an item of chunk or split, takes."""
    if not isinstance(x, Node) or not isinstance(node, Node):
        return None
    width, last = shape_of(x)[-1], len(shape_of(x)) - 1
    if _is(node, "slice") and bare(args_of(node)[0]) is x and argument(node, 1, "dim", 0) % (last + 1) == last:
        begin, end = argument(node, 2, "start") or 0, argument(node, 3, "end")
        end = width if end is None else min(end + width if end < 0 else end, width)
        return (begin + width if begin < 0 else begin, end) if argument(node, 4, "step", 1) == 1 else None
    if is_getitem(node) and name_of(args_of(node)[0]) in ("chunk", "split"):
        whole: Node = args_of(node)[0]
        if bare(args_of(whole)[0]) is x and argument(whole, 2, "dim", 0) % (last + 1) == last:
            size = shape_of(node)[-1]
            return args_of(node)[1] * size, (args_of(node)[1] + 1) * size
    return None


_GELU = math.sqrt(2 / math.pi)


def _gelu_of(node: Node) -> tuple[Node] | None:
    """Return (x,) of 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) whose last call is `node`."""
    for half, more in _pairs(node, "mul"):
        for x, factor in _pairs(half, "mul"):
            if factor != 0.5 or not isinstance(x, Node):
                continue
            for tanh, one in _pairs(more, "add"):
                if not _is(tanh, "tanh") or one != 1.0:
                    continue
                for total, scale in _pairs(bare(args_of(tanh)[0]), "mul"):
                    if isinstance(scale, float) and abs(scale - _GELU) < 1e-6 and _cubic(total, x):
                        return (x,)
    return None


def _cubic(node: Any, x: Node) -> bool:
    """Return whether a node is x + 0.044715 x^3."""
    for same, term in _pairs(node, "add"):
        for cube, factor in _pairs(term, "mul"):
            if same is x and factor == 0.044715 and _is(cube, "pow") and bare(args_of(cube)[0]) is x:
                return bool(args_of(cube)[1] == 3)
    return False


PATTERNS: tuple[tuple[Callable[[Node], tuple[Any, ...] | None], Callable[..., Any]], ...] = (
    (_norm_of, rms_norm),
    (_rotated_by, rotate),
    (_gelu_of, gelu_tanh),
)


# -- rewriting


def rewrite(captured: CapturedModule) -> None:
    """Apply all rewrites to a captured module's graph."""
    for node in list(captured.graph.nodes):
        if node.op == "call_function":
            _drop_empty(node)
            for match, function in PATTERNS:
                if (found := match(node)) is not None:
                    _replace(node, function, found)
                    break
    for node in list(captured.graph.nodes):
        if name_of(node) in ("split", "chunk", "split_with_sizes"):
            _split_product(captured, node)
    captured.graph.eliminate_dead_code()


def _drop_empty(node: Node) -> None:
    """Leave tensors without elements out of a cat."""
    if name_of(node) == "cat":
        kept = [one for one in args_of(node)[0] if 0 not in shape_of(one)]
        if kept and len(kept) < len(args_of(node)[0]):
            node.args = (kept, *args_of(node)[1:])
            if len(kept) == 1:
                node.replace_all_uses_with(kept[0])


def _replace(node: Node, function: Callable[..., Any], args: Sequence[Any]) -> None:
    with node.graph.inserting_before(node):
        new = node.graph.call_function(function, tuple(args))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)


def _split_product(captured: CapturedModule, node: Node) -> None:
    """Turn the parts of a product, along the columns of its weight, into products with parts of the weight."""
    views: list[Node] = []
    last = len(shape_of(args_of(node)[0])) - 1
    if argument(node, 2, "dim", 0) % (last + 1) != last or not all(is_getitem(user) for user in node.users):
        return
    top: Any = args_of(node)[0]
    while isinstance(top, Node) and len(top.users) == 1 and name_of(top) in ("view", "reshape", *SAME):
        if shape_of(top)[-1] != shape_of(args_of(top)[0])[-1]:
            return
        views.append(top)
        top = args_of(top)[0]
    place = {"linear": (1, 0, 2, 0), "addmm": (2, 1, 0, 0), "mm": (1, 1, 9, 0)}.get(name_of(top))
    if place is None or len(top.users) != 1:
        return
    weight, dim, bias = args_of(top)[place[0]], place[1], argument(top, place[2], "bias")
    if weight not in captured.weights or (bias is not None and bias not in captured.weights) or bias is weight:
        return
    if len(weight.users) != 1 or (bias is not None and len(bias.users) != 1):
        return
    sizes = [int(one.shape[-1]) for one in node.meta["val"]]
    for user in list(node.users):
        number: int = args_of(user)[1]
        start, size = sum(sizes[:number]), sizes[number]
        with captured.graph.inserting_before(top):
            new = {weight: _part(captured, weight, WeightPart(dim, start, size))}
            if bias is not None:
                new[bias] = _part(captured, bias, WeightPart(0, start, size))
        with captured.graph.inserting_before(user):
            product = captured.graph.node_copy(top, partial(_other, new))
            product.meta = top.meta | {"val": top.meta["val"][..., start : start + size]}
            for view in reversed(views):
                copy = captured.graph.node_copy(view, partial(_other, {args_of(view)[0]: product}))
                copy.meta = view.meta | {"val": view.meta["val"][..., start : start + size]}
                if name_of(copy) in ("view", "reshape"):
                    copy.args = (product, list(shape_of(copy)))
                product = copy
        user.replace_all_uses_with(product)


def _other(others: Mapping[Any, Node], node: Node) -> Node:
    return others.get(node, node)


def _part(captured: CapturedModule, weight: Node, part: WeightPart) -> Node:
    """Return a node for a part of a weight."""
    new = captured.graph.create_node("placeholder", f"{weight.name}_{part.start}")
    new.meta = weight.meta | {"val": weight.meta["val"].narrow(*part)}
    captured.weights[new] = captured.weights[weight]
    captured.where[new] = captured.where[weight]
    captured.parts[new] = part
    return new
