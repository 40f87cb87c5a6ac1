"""Attention and softmax: scaled_dot_product_attention, its masks, and scores that a module computes itself."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from nntile_py.capture.axis_groups import Dim
from nntile_py.capture.builder import GraphBuilder
from nntile_py.capture.export import CONSTANT, HOST, TASKS, CapturedModule, args_of, name_of, shape_of
from nntile_py.capture.rules import AxisFinder, NotSupported, Value, argument, rule
from nntile_py.tasks.attention import attention
from nntile_py.tasks.attention_repeat import repeat_heads
from nntile_py.tasks.contract import contract
from nntile_py.tasks.elementwise import dropout, transpose
from nntile_py.tasks.formula import Formula, element
from nntile_py.tasks.mask import Mask
from nntile_py.tasks.op import Tensor, accumulation_dtype
from nntile_py.tasks.rotary import rotary
from nntile_py.tasks.scalar import expression as ex
from nntile_py.tasks.scalar.expression import Element
from nntile_py.tasks.softmax import softmax
from nntile_py.tiles import Tiling

TRIES = 4  # number of random paddings for which a computed mask is evaluated to find its form
ROLES = "batch", "heads", "seq", "head_dim"


def share_heads(captured: CapturedModule, tiling: Tiling) -> None:
    """Let tiles cut key heads as query heads are cut. To be called before rules ask which axes are cut."""
    for node in captured.calls:
        if name_of(node) == "scaled_dot_product_attention" and len(shape_of(node)) == 4:
            heads, few = shape_of(node)[1], shape_of(args_of(node)[1])[1]
            if few < heads and heads % few == 0:
                tiling.share("kv_heads", "heads", heads, heads // few)


@rule("scaled_dot_product_attention")
class AttentionCall:
    def dims(self, find: AxisFinder, node: Node) -> list[Dim]:
        q = args_of(node)[0]
        k, v = args_of(node)[1:3]
        if len(shape_of(q)) != 4 or shape_of(q)[-1] != shape_of(v)[-1]:
            raise NotSupported("attention without batch and heads, or values of another width")
        find.same(node, k, -1, find.of(q)[-1])
        find.same(node, v, -1, find.of(q)[-1])
        find.same(node, v, -2, find.of(k)[-2])
        find.same(node, v, -3, find.of(k)[-3])
        if shape_of(k)[1] == shape_of(q)[1]:
            find.same(node, k, -3, find.of(q)[-3])
        for one in (k, v):
            find.same(node, one, 0, find.of(q)[0])
        for dim, role in zip(find.of(q), ROLES, strict=True):
            find.propose(dim, role)
        find.propose(find.of(k)[-2], "seq")
        if shape_of(k)[1] != shape_of(q)[1]:
            find.propose(find.of(k)[-3], "kv_heads")
        mask = argument(node, 3, "attn_mask")
        if isinstance(mask, Node) and find.captured.where[mask] == TASKS:
            self._bias_dims(find, node, mask, k)
        return find.of(q)

    def _bias_dims(self, find: AxisFinder, node: Node, mask: Node, k: Node) -> None:
        """Make the dimensions of a computed bias those of the scores."""
        q = find.of(args_of(node)[0])
        for at, dim in ((0, q[0]), (1, q[1]), (2, q[2])):
            if shape_of(mask)[at] > 1 and find.of(mask)[at]:
                find.same(node, mask, at, dim)
        keys = find.of(k)[-2]
        rows = {atom for dim in find.under(node, mask)[:-1] for atom in find.groups.leaves(dim)}
        if rows & {*keys}:  # rows of the bias have the axis of the keys: queries and keys are the same positions
            return
        find.same(node, mask, -1, keys)

    def build(self, made: GraphBuilder, node: Node) -> Value:
        q = made.read(node, args_of(node)[0])
        k, v = (made.read(node, one) for one in args_of(node)[1:3])
        p = float(argument(node, 4, "dropout_p", 0.0))
        scale = argument(node, 6, "scale") or 1 / math.sqrt(shape_of(node)[-1])
        mask, bias = self._mask(made, node)
        q, k, v = (made.single(one) for one in (q, k, v))
        names = self._names(q, k)
        own = {axis: name for axis, name in names.items() if axis in q.axes}
        q, k, v = made.renamed(q, own), made.renamed(k, names), made.renamed(v, names)
        operands = self._ordered(made, q, False), self._ordered(made, k, True), self._ordered(made, v, True)
        if bias is None:
            out = attention(made.g, *operands, mask, "segments" if p else "vendor", p, scale)
        else:
            out = self._biased(made, operands, mask, bias, p, scale)
        back = made.renamed(Value(out, q.dims), {new: old for old, new in own.items()})
        return made.as_dims(back, made.dims(node))

    def _mask(self, made: GraphBuilder, node: Node) -> tuple[Mask, Value | None]:
        mask = argument(node, 3, "attn_mask")
        if mask is None:
            return Mask(causal=bool(argument(node, 5, "is_causal", False))), None
        if made.captured.where[mask] != TASKS:
            found = known_mask(made, mask, shape_of(args_of(node)[1])[-2])
            if found is not None:
                return found, None
        return Mask(), made.read(node, mask)

    def _names(self, q: Value, k: Value) -> dict[str, str]:
        """Return {axis: its name in the operators of attention}."""
        if any(len(dim) != 1 for dim in (*q.dims, *k.dims)):
            raise NotSupported("attention over several axes")
        names = {dim[0]: role for dim, role in zip(q.dims, ROLES, strict=True)}
        if k.dims[1] != q.dims[1]:
            names[k.dims[1][0]] = "kv_heads"
        if k.dims[2] != q.dims[2]:
            names[k.dims[2][0]] = "key"
        return names

    @staticmethod
    def _ordered(made: GraphBuilder, value: Value, keys: bool) -> Tensor:
        order = list(ROLES)
        value = made.spread(value)
        alias = {"kv_heads": "heads", "key": "seq"} if keys else {}
        axes = sorted(value.tensor.axes, key=lambda axis: order.index(alias.get(axis) or axis))
        return value.tensor if tuple(axes) == value.tensor.axes else transpose(made.g, value.tensor, axes)

    def _biased(
        self, made: GraphBuilder, operands: tuple[Tensor, Tensor, Tensor], mask: Mask, bias: Value, p: float,
        scale: float,
    ) -> Tensor:  # fmt: skip
        """Return attention with a bias. Its scores are stored in memory."""
        g, (q, k, v) = made.g, operands
        g.projections.append([*operands])
        k, v = (repeat_heads(g, one, q.size("heads")) if "kv_heads" in one.axes else one for one in (k, v))
        if "seq" in k.axes:
            k, v = (made.as_keys(one) for one in (k, v))
        axes = ["batch", "heads", "seq", "key"]
        scores = contract(g, q, k, axes, scale=scale)
        for dim in bias.dims:
            if len(dim) > 1:
                raise NotSupported("a bias over several axes")
        wanted = {dim[0]: axis for dim, axis in zip(bias.dims, axes[4 - len(bias.dims) :], strict=True) if dim}
        bias = made.renamed(bias, wanted)
        out = g.temp("biased", scores.axes, scores.shape, scores.dtype)
        score, term = Element(0, scores.axes), element(1, bias.tensor)
        # A mask of booleans has integer tiles: 0 hides a key.
        value = ex.select(term > 0, score, -1e30) if bias.tensor.dtype == "int64" else score + term
        scores = g.add(Formula([scores, bias.tensor], out, value, "bias")).output
        probabilities = softmax(g, scores, mask)
        if p:
            probabilities = dropout(g, probabilities, p)
        out_axes = ["batch", "heads", "seq", "head_dim"]
        return contract(g, probabilities, v, out_axes)


def known_mask(made: GraphBuilder, node: Node, keys: int) -> Mask | None:
    """Return the Mask that is equivalent to a computed attention mask; None if no Mask is known to be.

    A mask that depends on an input is evaluated for random paddings, and compared with the padded Masks that exist.
    keys: number of keys.
    """
    captured = made.captured
    if captured.where[node] == CONSTANT:
        allowed = _allowed(captured.constants[node], keys)
        return None if allowed is None else _band_of(allowed)
    if captured.where[node] != HOST:
        return None
    compute = captured.on_host(node)
    generator = torch.Generator().manual_seed(0)
    bands: list[Mask | None] = []
    padding: str | None = None
    for name, given in captured.given.items():
        shape = shape_of(given)
        if len(shape) == 2 and shape[1] == keys and not given.meta["val"].dtype.is_floating_point and "mask" in name:
            padding = name
    if padding is None or captured.inputs_of(node) != {padding}:  # other inputs may change the mask too
        return None
    for arrays, pad in _paddings(made, padding, keys, generator):
        value = compute(arrays)
        allowed = value if value.dtype == torch.bool else value > -1e4
        full = allowed.expand(pad.shape[0], *allowed.shape[1:]).all(1) if allowed.dim() == 4 else None
        if full is None or (allowed.shape[1] > 1 and not (allowed == allowed[:, :1]).all()):
            return None
        bands.append(_band_with(full, pad))
    if any(band is None or band != bands[0] for band in bands):
        return None
    first = bands[0]
    assert first is not None
    tensor = made.value(captured.given[padding]).tensor
    names = {axis: name for axis, name in zip(tensor.axes, ("batch", "seq"), strict=True) if axis != name}
    if names:
        tensor = made.renamed(Value(tensor, [(axis,) for axis in tensor.axes]), names).tensor
    return Mask(first.causal, first.window, padding=tensor, two_sided=first.two_sided)


def _paddings(
    made: GraphBuilder, name: str, keys: int, generator: torch.Generator
) -> Iterator[tuple[dict[str, Any], Any]]:
    captured = made.captured
    rows = shape_of(captured.given[name])[0]
    for _ in range(TRIES):
        pad = torch.randint(0, 2, (rows, keys), generator=generator)
        pad[:, 0] = 1
        arrays = {
            one: torch.ones(shape_of(node), dtype=node.meta["val"].dtype).numpy()
            for one, node in captured.given.items()
        }
        yield arrays | {name: pad.numpy()}, pad


def _allowed(value: torch.Tensor, keys: int) -> torch.Tensor | None:
    """Return which keys each query sees, as booleans [queries, keys].

    Returns None if the mask does more than show or hide keys, differs between rows or heads, or has not `keys` keys."""
    if value.dtype != torch.bool and not bool(((value == 0) | (value < -1e4)).all()):
        return None
    allowed = value if value.dtype == torch.bool else value == 0
    flat = allowed.reshape(-1, *allowed.shape[-2:])
    if flat.shape[-1] != keys or not bool((flat == flat[:1]).all()):
        return None
    return flat[0]


def _band_of(allowed: torch.Tensor) -> Mask | None:
    queries, keys = allowed.shape
    if bool(allowed.all()):
        return Mask()
    if queries != keys:
        return None
    behind = torch.arange(queries)[:, None] - torch.arange(keys)[None]
    if bool((allowed == (behind >= 0)).all()):
        return Mask(causal=True)
    seen = behind[allowed]
    window = int(seen.max()) + 1
    if bool((allowed == ((behind >= 0) & (behind < window))).all()):
        return Mask(causal=True, window=window)
    if bool((allowed == (behind.abs() < window)).all()):
        return Mask(window=window, two_sided=True)
    return None


def _band_with(allowed: torch.Tensor, pad: torch.Tensor) -> Mask | None:
    """Return the Mask, full or causal, that together with the padding gives `allowed`; None if neither does.

    For the causal Mask, queries that see no key are not compared.

    Args:
        allowed: which keys each query sees, [rows, queries, keys].
        pad: 1 for tokens, 0 for padding, [rows, keys].
    """
    keys = pad.shape[1]
    wanted = pad[:, None, :].bool()
    full = allowed.expand(pad.shape[0], -1, -1)
    if full.shape[-2] == 1 or bool((full == wanted).all()):
        return Mask() if bool((full == wanted).all()) else None
    causal = torch.ones(full.shape[-2], keys).tril().bool()
    rows = (wanted & causal).any(-1)
    return Mask(causal=True) if bool((full == (wanted & causal))[rows].all()) else None


@rule("softmax", "_softmax", "log_softmax")
class SoftmaxCall:
    """Softmax over the last dimension of scores [..., queries, keys]."""

    def dims(self, find: AxisFinder, node: Node) -> list[Dim]:
        count = len(shape_of(node))
        if name_of(node) == "log_softmax" or int(args_of(node)[1]) % count != count - 1 or count < 2:
            raise NotSupported("softmax over another dimension")
        return find.of(args_of(node)[0])

    def build(self, made: GraphBuilder, node: Node) -> Value:
        x = made.ordered(made.read(node, args_of(node)[0]))
        if any(len(dim) != 1 for dim in x.dims[-2:]):
            raise NotSupported("softmax over several axes")
        names = {x.dims[-2][0]: "seq", x.dims[-1][0]: "key"}
        if {*names.values()} & ({*x.axes} - {*names}):
            raise NotSupported("softmax with other axes of these names")
        inner = made.renamed(x, names)
        y = softmax(made.g, inner.tensor, Mask())
        back = made.renamed(Value(y, inner.dims), {new: old for old, new in names.items()})
        return Value(back.tensor, made.dims(node))


@rule("rotate")
class RotaryCall:
    """Rotary embeddings with constant angles, on the last two dimensions: positions, entries of a head."""

    def dims(self, find: AxisFinder, node: Node) -> list[Dim]:
        x, cos, sin = args_of(node)
        if any(find.captured.where.get(one) != CONSTANT for one in (cos, sin)):
            raise NotSupported("angles that depend on inputs")
        self.table(find.captured.constants, cos, sin, shape=shape_of(x))
        dims = find.of(x)
        find.propose(dims[-2], "seq")
        find.propose(dims[-1], "head_dim")
        return dims

    @staticmethod
    def table(constants: Any, cos: Any, sin: Any, *, shape: tuple[int, ...]) -> Any:
        """Return for each position the cosines, then the sines, of half a head's angles: [positions, head_dim].

        Raises NotSupported if the two halves of a head, or rows or heads, have different angles."""
        halves = []
        for node in (cos, sin):
            value: torch.Tensor = constants[node]
            flat = value.reshape(-1, *value.shape[-2:])
            a, b = flat[:1].chunk(2, -1)
            if flat.shape[-2:] != shape[-2:] or not torch.equal(a, b) or not bool((flat == flat[:1]).all()):
                raise NotSupported("angles that differ between rows, heads or halves")
            halves.append(a[0])
        table = torch.cat(halves, -1)
        return (table.float() if table.dtype == torch.bfloat16 else table).numpy()

    def build(self, made: GraphBuilder, node: Node) -> Value:
        x = made.spread(made.read(node, args_of(node)[0]))
        if any(len(dim) != 1 for dim in x.dims[-2:]):
            raise NotSupported("rotary embeddings over several axes")
        names = {x.dims[-2][0]: "seq", x.dims[-1][0]: "head_dim"}
        if {*names.values()} & ({*x.axes} - {*names}) or made.g.cuts.cut("head_dim", 1):
            raise NotSupported("rotary embeddings with other axes of these names")
        inner = made.renamed(x, names)
        table = self.table(made.captured.constants, *args_of(node)[1:3], shape=shape_of(args_of(node)[0]))
        sizes = {"seq": table.shape[0], "rotary": table.shape[1]}
        key = hashlib.sha256(table.tobytes()).hexdigest()[:12]
        angles = made.shared(f"rotary.{key}", sizes, table, accumulation_dtype(made.g.dtype))
        y = rotary(made.g, inner.tensor, angles)
        back = made.renamed(Value(y, inner.dims), {new: old for old, new in names.items()})
        return Value(back.tensor, made.dims(node))
