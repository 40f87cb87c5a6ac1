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

SAME = ("to", "alias", "contiguous", "clone", "_to_copy", "type_as", "float")  # operators that only copy or convert


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
    """Return gelu in its approximation by tanh."""
    return torch.nn.functional.gelu(x, approximate="tanh")


def gated(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    """Return act(gate) * up; kind is one of GATES."""
    return GATES[kind](gate) * up


GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "relu": torch.nn.functional.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_new": gelu_tanh,
}


def activation_kind(node: Node) -> str:
    """Return the name by which the graph's operators know a call's activation."""
    name = name_of(node)
    by_tanh = name == "gelu_tanh" or (name == "gelu" and node.kwargs.get("approximate") == "tanh")
    return "gelu_new" if by_tanh else name


# -- matching: each function returns None if a node does not match


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
                squared = (_is(square, "square") or (_is(square, "pow") and args_of(square)[1] == 2)) and (
                    bare(args_of(square)[0]) is x
                )
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


def _gated_by(node: Node) -> tuple[Node, Node, str] | None:
    """Return (gate, up, kind) of act(gate) * up, of equal shapes, whose last call is `node`."""
    for gate, up in _pairs(node, "mul"):
        if not isinstance(gate, Node) or not isinstance(up, Node) or activation_kind(gate) not in GATES:
            continue
        if len(gate.users) == 1 and shape_of(gate) == shape_of(up) and gate is not up:
            return args_of(gate)[0], up, activation_kind(gate)
    return None


PATTERNS: tuple[tuple[Callable[[Node], tuple[Any, ...] | None], Callable[..., Any]], ...] = (
    (_norm_of, rms_norm),
    (_rotated_by, rotate),
    (_gelu_of, gelu_tanh),
    (_gated_by, gated),
)


# -- rewriting


def rewrite(captured: CapturedModule) -> None:
    """Apply all rewrites to a captured module's graph."""
    for node in list(captured.graph.nodes):
        if node.op == "call_function":
            _drop_empty(node)
            _share_keys(node)
            for match, function in PATTERNS:
                if (found := match(node)) is not None:
                    _replace(node, function, found)
                    break
    captured.graph.eliminate_dead_code()
    for node in list(captured.graph.nodes):
        if name_of(node) in ("split", "chunk", "split_with_sizes"):
            _split_product(captured, node)
        elif name_of(node) in ("view", "reshape", "permute", "transpose"):
            _unbind_product(captured, node)
    captured.graph.eliminate_dead_code()


def _unrepeated(node: Any) -> Any:
    """Return keys or values before their heads were repeated for the queries that share them, if they were."""
    node = bare(node)
    if name_of(node) == "repeat_interleave" and len(node.args) > 2 and args_of(node)[2] in (1, -3):
        return args_of(node)[0]
    inner = node
    while name_of(inner) in ("reshape", "view", "_unsafe_view", "expand", *SAME):
        inner = args_of(inner)[0]
    if name_of(inner) != "unsqueeze" or args_of(inner)[1] not in (2, -3):
        return node
    source = bare(args_of(inner)[0])
    few, full = shape_of(source), shape_of(node)
    fits = len(few) == len(full) == 4 and few[0] == full[0] and few[2:] == full[2:] and full[1] % few[1] == 0
    return source if fits else node


def _share_keys(node: Node) -> None:
    """Let attention read keys and values before their heads were repeated."""
    if name_of(node) == "scaled_dot_product_attention":
        q, k, v, *others = node.args
        sources = _unrepeated(k), _unrepeated(v)
        if sources != (k, v) and shape_of(sources[0])[:3] == shape_of(sources[1])[:3]:
            node.args, node.kwargs = (q, *sources, *others), node.kwargs | {"enable_gqa": True}


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


class _Product(NamedTuple):
    """A product with a weight, and perhaps a bias, that nothing else reads."""

    node: Node
    weight: Node
    columns: int  # dimension of the weight along which the results lie
    bias: Node | None


def _product_of(captured: CapturedModule, node: Any) -> _Product | None:
    place = {"linear": (1, 0, 2, 0), "addmm": (2, 1, 0, 0), "mm": (1, 1, 9, 0)}.get(name_of(node))
    if place is None or len(node.users) != 1:
        return None
    weight, bias = args_of(node)[place[0]], argument(node, place[2], "bias")
    if weight not in captured.weights or (bias is not None and bias not in captured.weights) or bias is weight:
        return None
    if len(weight.users) != 1 or (bias is not None and len(bias.users) != 1):
        return None
    return _Product(node, weight, place[1], bias)


def _part_of_product(captured: CapturedModule, product: _Product, start: int, size: int) -> Node:
    """Add, before the insertion point of the graph, the product with `size` columns of the weight from `start` on."""
    node, weight, columns, bias = product
    with captured.graph.inserting_before(node):
        new = {weight: _part(captured, weight, WeightPart(columns, start, size))}
        if bias is not None:
            new[bias] = _part(captured, bias, WeightPart(0, start, size))
    part = captured.graph.node_copy(node, partial(_other, new))
    part.meta = node.meta | {"val": node.meta["val"][..., start : start + size]}
    return part


def _apply(view: Node, source: Node, args: Sequence[Any]) -> Node:
    """Add a view of `source` like another view. args: the arguments after the first."""
    copy = view.graph.node_copy(view, partial(_other, {args_of(view)[0]: source}))
    copy.args = (source, *args)
    copy.meta = view.meta | {"val": view.target(source.meta["val"], *args, **view.kwargs)}  # type: ignore[operator]
    return copy


def _split_product(captured: CapturedModule, node: Node) -> None:
    """Replace a product that is split along its columns by a product for each part, with a part of the weight."""
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
    product = _product_of(captured, top)
    if product is None:
        return
    sizes = [int(one.shape[-1]) for one in node.meta["val"]]
    if sorted(args_of(user)[1] for user in node.users) != list(range(len(sizes))):
        return  # each part of the weight is one parameter: all are needed, once
    for user in list(node.users):
        number: int = args_of(user)[1]
        with captured.graph.inserting_before(user):
            part = _part_of_product(captured, product, sum(sizes[:number]), sizes[number])
            for view in reversed(views):
                resized = name_of(view) in ("view", "reshape")
                part = _apply(view, part, [[*shape_of(view)[:-1], sizes[number]]] if resized else args_of(view)[1:])
        user.replace_all_uses_with(part)


def _unbind_product(captured: CapturedModule, base: Node) -> None:
    """Replace a product by one product for each entry of the first factor of its columns, with a part of the weight.

    Modules spell queries, keys and values so: qkv(x).view(rows, seq, 3, heads, size).permute(2, 0, 3, 1, 4).unbind(0).
    """
    entries = _entries_of(base)
    if entries is None:
        return
    users, at = entries
    orders: list[list[int]] = []  # of dimensions, from the last permutation to the first
    top: Any = base
    while name_of(top) in ("permute", "transpose", *SAME) and (top is base or len(top.users) == 1):
        if name_of(top) in ("permute", "transpose"):
            orders.append(order := _order_of(top))
            at = order[at]
        top = args_of(top)[0]
    if name_of(top) not in ("view", "reshape") or (top is not base and len(top.users) != 1):
        return
    product, shape = _product_of(captured, args_of(top)[0]), shape_of(top)
    if product is None or shape[:at] != shape_of(product.node)[:-1] or sorted(users.values()) != list(range(shape[at])):
        return  # each part of the weight is one parameter: all are needed, once
    rest = shape[at + 1 :]
    for user, number in users.items():
        with captured.graph.inserting_before(user):
            part = _part_of_product(captured, product, number * math.prod(rest), math.prod(rest))
            part = _apply(top, part, [[*shape[:at], *rest]])
            dropped = at
            for order in reversed(orders):
                left = [one - (one > dropped) for one in order if one != dropped]
                dropped = order.index(dropped)
                new = captured.graph.call_function(torch.ops.aten.permute.default, (part, left))
                new.meta = base.meta | {"val": part.meta["val"].permute(left)}
                part = new
        user.replace_all_uses_with(part)


def _entries_of(base: Node) -> tuple[dict[Node, int], int] | None:
    """Return ({user: entry index}, dimension) if all users take one entry along the same dimension, else None."""
    if len(base.users) == 1 and name_of(unbind := next(iter(base.users))) == "unbind":
        if all(is_getitem(user) for user in unbind.users):
            at = argument(unbind, 1, "dim", 0) % len(shape_of(base))
            return {user: args_of(user)[1] % shape_of(base)[at] for user in unbind.users}, at
    elif base.users and all(name_of(user) == "select" for user in base.users):
        places = {args_of(user)[1] % len(shape_of(base)) for user in base.users}
        if len(places) == 1:
            at = places.pop()
            return {user: args_of(user)[2] % shape_of(base)[at] for user in base.users}, at
    return None


def _order_of(node: Node) -> list[int]:
    """Return, for each dimension of a permutation's result, the dimension of its operand."""
    count = len(shape_of(node))
    if name_of(node) == "permute":
        return [one % count for one in args_of(node)[1]]
    order, (a, b) = list(range(count)), (one % count for one in args_of(node)[1:3])
    order[a], order[b] = b, a
    return order


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
