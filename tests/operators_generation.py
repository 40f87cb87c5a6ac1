"""Rows of operators with which texts are generated: see operators.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nntile_py import tasks as ops
from nntile_py.tasks import Op
from nntile_py.tasks.attention_operands import Operands
from nntile_py.testing import Case, Maker, Values
from nntile_py.tiles import Tiling

_HEADS = "batch heads seq head_dim"
SLOTS, ENTRIES = 16, 3  # positions of a page; pages of a sequence


def angles_of_rows(rng: np.random.Generator, shape: tuple[int, ...], values: Values) -> Any:
    """Cosines and sines of positions that each row of the batch has of its own."""
    return ops.rotary_table(shape[-1], 50, 10000.0)[rng.integers(0, 50, shape[:-1])]


def page_table(new: int, rows: int | None = None) -> Maker:
    """Return a function that draws a page table: sequences of different lengths, one of them without new tokens.

    rows: rows that share a part of the pages; None: there is one part.
    """

    def make(rng: np.random.Generator, shape: tuple[int, ...], values: Values) -> Any:
        table = np.zeros(shape, np.int64)
        every = rng.permutation(np.arange(1, 1 + (rows or shape[0]) * ENTRIES))
        for row in range(shape[0]):
            count = 0 if row == 1 and shape[0] > 1 else int(rng.integers(1, new + 1))
            past = int(rng.integers(0, SLOTS * ENTRIES - count + 1))
            used = -(-(past + count) // SLOTS)
            table[row, :2] = past, count
            first = row % (rows or shape[0]) * ENTRIES
            table[row, 2 : 2 + used] = every[first : first + used]
        return table

    return make


def cached_attention(
    axes: str = _HEADS, group: int = 1, window: int | None = None, *, rotary: bool = False, merged: bool = False,
    rows: int | None = None,
) -> Callable[[Case], Op]:  # fmt: skip
    """merged: q, k and v are parts of one tensor. rows: see page_table."""

    def row(case: Case) -> Op:
        case.whole |= {"seq"}
        pages = 1 + (rows or case.sizes["batch"]) * ENTRIES
        parts = ops.PageParts(pages, rows, first=1) if rows else None
        if rows:
            case.cut |= {"batch": min(rows, 3)}
        count = 1 + -(-case.sizes["batch"] // rows) if rows else 1
        case.sizes |= {"page": pages * count + (rows is not None), "slot": SLOTS, "entry": 2 + ENTRIES}
        keys = "kv_heads" if group > 1 else "heads"
        if group > 1 or merged:
            case.whole |= {"heads"}
        if group > 1:
            case.sizes["kv_heads"] = max(case.sizes["heads"] // group, 1)
            case.sizes["heads"] = group * case.sizes["kv_heads"]
        case.sizes["head_dim"] += rotary * case.sizes["head_dim"] % 2
        case.sizes |= {"all_heads": case.sizes["heads"] + 2 * case.sizes[keys], "rotary": case.sizes["head_dim"]}
        if merged:
            q = k = v = case.x(axes.replace("heads", "all_heads"))
        else:
            q, k, v = case.x(axes), *(case.x(axes.replace("heads", keys)) for _ in range(2))
        table = case.x("batch entry", page_table(case.sizes["seq"], rows), "int64")
        pools = [case.x(f"page {keys} slot head_dim") for _ in range(2)]
        after = [case.graph.temp("after", p.axes, p.shape, p.dtype, storage=p) for p in pools]
        turned = case.x("batch seq rotary", angles_of_rows, case.sum_dtype) if rotary else None
        heads = (case.sizes["heads"], case.sizes[keys]) if merged else None
        options: dict[str, Any] = {"window": window, "rotary": turned, "heads": heads, "parts": parts}
        return case.add(ops.CachedAttention(Operands(q, k, v), table, pools, case.y(axes), after, **options))

    return row


def token_places(case: Case) -> Op:
    case.sizes |= {"entry": 2 + ENTRIES, "last": 1}
    case.whole |= {"seq"}
    table = case.x("batch entry", page_table(case.sizes["seq"]), "int64")
    return case.add(ops.TokenPlaces(table, case.y("batch seq", "int64"), case.y("batch last", "int64"), 20))


def _settings(rng: np.random.Generator, shape: tuple[int, ...], values: Values) -> Any:
    """Settings of each sort, one row after the other: greedy, no filter, then each filter."""
    rows = [(0, 0, 1, 0, 1.3), (1, 0, 1, 0, 1), (0.7, 3, 1, 0, 1), (1.5, 0, 0.6, 0, 1.2), (1, 0, 1, 0.3, 0.8)]
    rows += [(2, 4, 0.7, 0.1, 2)]
    first = int(rng.integers(len(rows)))
    return np.array([rows[(first + k) % len(rows)] for k in range(shape[0])], np.float32)


def sample(
    *, greedy: bool = False, penalised: bool = False, advances: bool = False, broken: bool = False
) -> Callable[[Case], Op]:
    """broken: each second row has a logit that is nan or infinite."""

    def row(case: Case) -> Op:
        case.sizes |= {"entry": 2 + ENTRIES, "setting": 5, "draw": 1 + SLOTS * ENTRIES, "one": 1}
        case.whole |= {"vocab"}
        # Logits that are far apart, so that fp32, bf16 and fp64 draw the same tokens.
        logits = case.x("batch one vocab", lambda rng, shape, _: _distinct(rng, shape, broken))
        table = case.x("batch entry", page_table(1), "int64")
        settings = draws = history = ids = None
        if not greedy:
            settings = case.x("batch setting", _settings, "fp32")
            draws = case.x("batch draw", lambda rng, shape, _: rng.random(shape), "fp32")
        tokens = max(case.sizes["vocab"] - 2, 1)
        if penalised:
            history = case.x("batch draw", lambda rng, shape, _: rng.integers(0, tokens, shape), "int64")
        if advances:
            ids = case.x("batch one", lambda rng, shape, _: np.zeros(shape, int), "int64")
        case.sizes["ring"] = 3
        ring = case.x("batch ring", lambda rng, shape, _: rng.integers(0, 9, shape), "int64")
        changed = [ring, *(t for t in (table, history, ids) if t and ids)]
        after = [case.graph.temp("after", t.axes, t.shape, t.dtype, storage=t) for t in changed]
        return case.add(ops.Sample(logits, table, ring, settings, draws, history, ids, tokens, after))

    return row


def _distinct(rng: np.random.Generator, shape: tuple[int, ...], broken: bool = False) -> Any:
    values = np.arange(shape[-1]) / 4.0 - shape[-1] / 8.0
    rows = np.stack([rng.permutation(values) for _ in range(shape[0])])[:, None]
    for row in range(0, shape[0] if broken else 0, 2):
        rows[row, 0, rng.integers(shape[-1])] = rng.choice([np.nan, np.inf, -np.inf])
    return rows


def unite(case: Case) -> Op:
    case.sizes |= {"token": case.sizes["vocab"], "one": 1}
    return case.add(ops.Unite(case.x("batch one vocab"), case.y("batch token")))


def unite_of_positions(case: Case) -> Op:
    case.sizes |= {"token": case.sizes["vocab"]}
    return case.add(ops.Unite(case.x("batch seq vocab"), case.y("batch seq token")))


def top_logprobs(*, paged: bool = True, advanced: bool = False, most: int = 5) -> Callable[[Case], Op]:
    """most: number of most probable tokens."""

    def row(case: Case) -> Op:
        tokens = max(case.sizes["vocab"] - 2, 1)
        case.sizes |= {"entry": 2 + ENTRIES, "one": 1, "ring": 3, "rank": 1 + min(most, tokens)}
        case.whole |= {"vocab"}
        ring = "ring" if paged else "seq"

        def logits_of(rng: np.random.Generator, shape: tuple[int, ...], _: Values) -> Any:
            return _distinct(rng, (shape[0] * shape[1], shape[2])).reshape(shape)

        logits = case.x(f"batch {'one' if paged else 'seq'} vocab", logits_of)
        chosen = case.x(f"batch {ring}", lambda rng, shape, _: rng.integers(-1, tokens, shape), "int64")
        values = case.x(f"batch {ring} rank", dtype=case.sum_dtype)
        ids = case.x(f"batch {ring} rank", lambda rng, shape, _: rng.integers(0, 9, shape), "int64")
        table = case.x("batch entry", page_table(1), "int64") if paged else None
        after = [case.graph.temp("after", t.axes, t.shape, t.dtype, storage=t) for t in (values, ids)]
        return case.add(ops.TopLogProbs(logits, chosen, values, ids, table, tokens, after, advanced=advanced))

    return row


def rotary_of_rows(axes: str) -> Callable[[Case], Op]:
    """Rotary positions of which each row of the batch has its own."""

    def row(case: Case) -> Op:
        case.sizes["head_dim"] += case.sizes["head_dim"] % 2
        case.sizes["rotary"] = case.sizes["head_dim"]
        table = case.x("batch seq rotary", angles_of_rows, case.sum_dtype)
        return case.add(ops.Rotary(case.x(axes), table, case.y(axes)))

    return row


def gemv(
    x: str = "embed", y: str = "ffn", *, norm: str = "", bias: bool = False, residual: int = 0, addends: int = 1,
    activation: str | None = None, factor: bool = False, scale: float = 1.0, cut: dict[str, int] | None = None,
) -> Callable[[Case], Op]:  # fmt: skip
    """A Gemv of a row with the axes `x` and a result with the axes `y`, besides batch and seq.

    residual, addends: number of tensors whose sum is the residual, or the row. cut: tile size of a summed axis.
    """

    def row(case: Case) -> Op:
        case.sizes |= {"batch": 1, "seq": 1}
        case.whole |= {*x.split()} - {*(cut or {})}
        parts = [part for axis in cut or {} for part in Tiling(cut).parts(axis, case.sizes[axis])]
        rows = [case.x(f"batch seq {x}") for _ in range(addends)]
        weights = [case.x(x) for _ in range({"": 0, "rms_norm": 1, "layer_norm": 2}[norm])]
        kind: Any = {"rms_norm": ops.RMSNorm, "layer_norm": ops.LayerNorm}.get(norm)
        of_row = kind and kind(rows[0], *weights, case.temp(f"batch seq {x}"), case.temp("batch seq stat"), 1e-3)
        return case.add(
            ops.Gemv(
                rows, case.x(f"{y} {x}"),
                [case.y(f"batch seq {y}") for _ in parts or [None]], parts=parts, scale=scale,
                norm=of_row, activation=activation,
                bias=case.x(y) if bias else None, residual=[case.x(f"batch seq {y}") for _ in range(residual)],
                factor=case.x(f"batch seq {y}") if factor else None,
            )
        )  # fmt: skip

    return row


ROWS: dict[str, Callable[[Case], Any]] = {
    "Gemv": gemv(scale=-0.37),
    "Gemv heads": gemv("heads head_dim", "embed", residual=1, bias=True),
    "Gemv rms_norm": gemv(norm="rms_norm", y="qkv heads head_dim"),
    "Gemv rms_norm gated": gemv(norm="rms_norm", activation="silu", factor=True, scale=0.7),
    "Gemv layer_norm": gemv(norm="layer_norm", scale=-0.37),
    "Gemv layer_norm bias gelu_new": gemv(norm="layer_norm", bias=True, activation="gelu_new"),
    "Gemv all": gemv(norm="layer_norm", bias=True, residual=1, activation="gelu", factor=True),
    "CachedAttention": cached_attention(),
    "CachedAttention groups": cached_attention("batch seq heads head_dim", group=2),
    "CachedAttention window": cached_attention(window=3),
    "CachedAttention parts": cached_attention(group=2, rows=2),
    "CachedAttention merged parts": cached_attention("batch seq heads head_dim", rotary=True, merged=True, rows=3),
    "CachedAttention groups window": cached_attention(group=3, window=5),
    "CachedAttention rotary": cached_attention(rotary=True),
    "CachedAttention merged": cached_attention("batch seq heads head_dim", group=2, rotary=True, merged=True),
    "TokenPlaces": token_places,
    "Sample": sample(),
    "Sample greedy": sample(greedy=True, advances=True),
    "Sample penalised": sample(penalised=True, advances=True),
    "Sample broken": sample(penalised=True, advances=True, broken=True),
    "Sample broken greedy": sample(greedy=True, advances=True, broken=True),
    "Unite": unite,
    "Unite positions": unite_of_positions,
    "TopLogProbs": top_logprobs(),
    "TopLogProbs advanced": top_logprobs(advanced=True, most=20),
    "TopLogProbs positions": top_logprobs(paged=False),
    "Rotary of rows": rotary_of_rows(_HEADS),
    "Rotary of rows seq first": rotary_of_rows("seq batch heads head_dim"),
}
