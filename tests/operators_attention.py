"""Rows of attention and of its parts: see operators.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from nntile_py import tasks as ops
from nntile_py.tasks import Op, Tensor
from nntile_py.tasks.attention_dropout import ScoresDropout, steps_of
from nntile_py.tasks.attention_operands import Operands
from nntile_py.tasks.mask import Mask
from nntile_py.testing import Case, Maker, Values, ids, of, offsets, padding

_HEADS = "batch heads seq head_dim"
_SCORES = "batch heads seq key"


def rotary(axes: str, inverse: bool = False) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        case.sizes["head_dim"] += case.sizes["head_dim"] % 2
        case.sizes["rotary"] = case.sizes["head_dim"]
        table = case.x("seq rotary", angles, case.sum_dtype)
        return case.add(ops.Rotary(case.x(axes), table, case.y(axes), inverse))

    return row


def angles(rng: np.random.Generator, shape: tuple[int, ...], values: Values) -> Any:
    return ops.rotary_table(shape[1], shape[0], 10000.0)


def softmax(mask: Mask) -> Callable[[Case], Op]:
    return lambda case: case.add(ops.Softmax(case.x(_SCORES, band=mask.band), case.y(_SCORES, band=mask.band), mask))


def softmax_of_data(axes: str, *, segments: bool = False, **band: Any) -> Any:
    """A softmax masked by padding or by segments."""

    def row(case: Case) -> Op:
        data = case.x("sequences", offsets(case.sizes["seq"]), "int64") if segments else None
        keys = None if segments else case.x("batch key", padding, "int16" if band.get("causal") else "int64")
        mask = Mask(padding=keys, segments=data, **band)
        return case.add(ops.Softmax(case.x(axes, band=mask.band), case.y(axes, band=mask.band), mask))

    return row


def softmax_grad(mask: Mask) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        scores = case.x(_SCORES, band=mask.band)
        p = case.x(_SCORES, of(ops.Softmax(scores, scores, mask), 0), band=mask.band)
        dp = case.x(_SCORES, band=mask.band)
        return case.add(ops.SoftmaxGrad(p, dp, case.y(_SCORES, band=mask.band)))

    return row


PACKED = ["qkv batch heads seq head_dim"]
SEPARATE = [_HEADS] * 3
BY_SEQ = ["batch seq heads head_dim"] * 3


def operands(tensors: list[Tensor]) -> Operands:
    q, k, v = tensors if len(tensors) == 3 else ((tensors[0], part) for part in range(3))
    return Operands(q, k, v)


def attention(qkv: list[str], backend: str, causal: bool) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        out, lse = case.y(qkv[0].replace("qkv", "")), case.y("batch heads seq")
        inputs = operands([case.x(axes) for axes in qkv])
        return case.add(ops.Attention(inputs, out, lse, mask=Mask(causal), backend=backend))

    return row


def attention_grad(qkv: list[str], backend: str, causal: bool, do: str = _HEADS) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        inputs, out = operands([case.x(axes) for axes in qkv]), qkv[0].replace("qkv", "")
        free = ops.Attention(inputs, case.temp(out), case.temp("batch heads seq"), mask=Mask(causal), backend=backend)
        o, lse = case.x(out, of(free, 0)), case.x("batch heads seq", of(free, 1), case.sum_dtype)
        forward = ops.Attention(inputs, o, lse, mask=Mask(causal), backend=backend)
        return case.add(ops.AttentionGrad(forward, case.x(do), [case.y(axes) for axes in qkv]))

    return row


def dropped(qkv: list[str], *, gradient: bool, masks: bool = False) -> Callable[[Case], Op]:
    """Attention, or its gradient, with dropout of the probabilities, in one task; masks: causal, with padding."""

    def row(case: Case) -> Op:
        case.slots["dropout_seed"], case.options["seed"], case.whole = 7.0, 7, {"seq"}
        mask = Mask(masks, padding=case.x("batch seq", padding, "int64") if masks else None)
        drop = ScoresDropout(0.3, 2, steps_of(_SCORES.split(), case.sizes))
        inputs, axes = operands([case.x(of) for of in qkv]), qkv[0].replace("qkv", "")
        options = {"mask": mask, "backend": "segments", "dropout": drop}
        if not gradient:
            return case.add(ops.Attention(inputs, case.y(axes), case.y("batch heads seq"), **options))
        free = ops.Attention(inputs, case.temp(axes), case.temp("batch heads seq"), **options)
        seeded = [lambda *given, k=k: free.reference(*(given[2][t] for t in free.inputs), seed=7)[k] for k in (0, 1)]
        o, lse = case.x(axes, seeded[0]), case.x("batch heads seq", seeded[1], case.sum_dtype)
        forward = ops.Attention(inputs, o, lse, **options)
        return case.add(ops.AttentionGrad(forward, case.x(_HEADS), [case.y(of) for of in qkv]))

    return row


def relative(products: str = "queries keys", axes: str = _SCORES, gradient: bool = False, rows: int = 5) -> Any:
    """Scores with the products named by `products`, or their gradient; the index has at most `rows` rows."""

    def row(case: Case) -> Op:
        case.sizes |= {"distance": case.sizes["seq"] + case.sizes["key"] - 1, "relative": rows}
        index, scores = case.x("distance", rising_rows(rows), "int64"), case.x(axes)
        named = {"queries": axes.replace("key", "relative"), "keys": axes.replace("seq ", "") + " relative"}
        made = [case.x(named[one]) if one in products else None for one in named]
        out = Tensor("y", scores.axes, scores.shape, scores.dtype, storage=scores)
        forward = ops.RelativeScores(scores, index, *made, out)
        if not gradient:
            return case.add(forward)
        return case.add(ops.RelativeScoresGrad(forward, scores, [case.like(t) for t in made if t]))

    return row


def with_distances(
    products: str = "queries keys", axes: str = _HEADS, *, mask: str = "", drop: float = 0.0, gradient: bool = False,
    order: str = "", rows: int = 5,
) -> Callable[[Case], Op]:  # fmt: skip
    """Attention with relative positions, or its gradient. products: which products there are. order: their axes."""

    def row(case: Case) -> Op:
        case.whole |= {"seq"}
        case.sizes |= {"distance": 2 * case.sizes["seq"] - 1, "relative": rows}
        case.sizes |= {} if "batch" in axes else {"batch": 1}
        names = " ".join([order or axes.replace(" head_dim", ""), "relative"])
        qkv = operands([case.x(axes) for _ in range(3)])
        index = case.x("distance", rows_of_distances(rows), "int64")
        made = [case.x(names) if one in products else None for one in ("queries", "keys")]
        data = {
            "padding": case.x("batch seq", two_keys, "int64") if mask == "padding" else None,
            "segments": case.x("sequences", long_and_short(case.sizes["seq"]), "int64") if mask == "segments" else None,
        }
        options: dict[str, Any] = {"mask": Mask(**data), "scale": 0.7}
        if drop:
            case.slots["dropout_seed"], case.options["seed"] = 7.0, 7
            numbers = case.x("batch seq", ids(100), "int64") if mask == "segments" else None
            options["dropout"] = ScoresDropout(drop, 2, steps_of(_SCORES.split(), case.sizes), numbers)
        terms, rest = ops.DistanceTerms(index, *made), "batch heads seq"
        if not gradient:
            return case.add(ops.RelativeAttention(qkv, terms, case.y(axes), case.y(rest, case.sum_dtype), **options))
        free = ops.RelativeAttention(qkv, terms, case.temp(axes), case.temp(rest), **options)
        seed = {"seed": 7} if drop else {}

        def found(number: int) -> Maker:
            return lambda rng, shape, values: np.ascontiguousarray(
                free.reference(*(values[t] for t in free.inputs), **seed)[number]
            )

        o, lse = found(0), found(1)
        forward = ops.RelativeAttention(qkv, terms, case.x(axes, o), case.x(rest, lse, case.sum_dtype), **options)
        outs = [case.like(t) for t in (*qkv.tensors, *terms.products)]
        return case.add(ops.RelativeAttentionGrad(forward, case.x(_HEADS if "batch" in axes else axes), outs))

    return row


# If a query has one key, or all its keys have one row of distances, the exact gradient of its scores is zero and only
# rounding is left. So the following functions give each query two keys, and neighbouring distances different rows.


def long_and_short(positions: int) -> Maker:
    """Offsets of three sequences: of two or more positions, of none, of one. A position may be left at the end."""
    end = max(positions - 2, 2)
    return lambda rng, shape, values: np.array([0, end, end, min(end + 1, positions)])


def two_keys(rng: np.random.Generator, shape: tuple[int, ...], values: Values) -> Any:
    """Padding of all keys but the first two."""
    return np.where(np.arange(shape[1]) < 2, 1, rng.random(shape) < 0.6)


def rows_of_distances(rows: int) -> Maker:
    """Rows of distances, without gaps: each next distance has the same or the next row. Distance 0 has a middle row."""

    def make(rng: np.random.Generator, shape: tuple[int, ...], values: Values) -> Any:
        rises, middle = rng.random(shape) < 0.6, shape[0] // 2
        rises[middle : middle + 2] = True
        steps = np.cumsum(rises)
        return np.clip(steps - steps[middle] + rows // 2, 0, rows - 1)

    return make


def rising_rows(rows: int) -> Maker:
    """Rows that never fall, the first and the last of several distances."""
    return lambda rng, shape, values: np.sort(np.clip(rng.integers(-1, rows + 1, shape), 0, rows - 1))


def repeat(gradient: bool) -> Callable[[Case], Op]:
    """Two key heads, cut where the heads are cut. test_attention.py has tiles of heads that do not fit key heads."""

    def row(case: Case) -> Op:
        case.whole, case.sizes["kv_heads"], case.sizes["heads"] = {"heads"}, 2, 6
        many, few = "batch heads seq head_dim", "batch kv_heads seq head_dim"
        if gradient:
            return case.add(ops.AttentionRepeatGrad(case.x(many), case.y(few)))
        return case.add(ops.AttentionRepeat(case.x(few), case.y(many)))

    return row


ROWS: dict[str, Callable[[Case], Any]] = {
    "Rotary": rotary("batch seq heads head_dim"),
    "Rotary inverse": rotary("batch seq heads head_dim", inverse=True),
    "Rotary of heads": rotary(_HEADS),
    "Rotary columns first": rotary("heads head_dim batch seq"),
    "Rotary of positions last": rotary("head_dim seq", inverse=True),
    "Softmax": softmax(Mask()),
    "Softmax causal": softmax(Mask(causal=True)),
    "Softmax window": softmax(Mask(window=3)),
    "Softmax two-sided window": softmax(Mask(window=2, two_sided=True)),
    "Softmax padding two-sided window": softmax_of_data("batch seq key", window=2, two_sided=True),
    "Softmax segments two-sided window": softmax_of_data(_SCORES, segments=True, window=2, two_sided=True),
    "Softmax padding": softmax_of_data(_SCORES),
    "Softmax padding causal": softmax_of_data("heads batch seq key", causal=True),
    "Softmax padding window": softmax_of_data("batch seq key", window=3),
    "Softmax segments": softmax_of_data("heads seq key", segments=True),
    "Softmax segments window": softmax_of_data(_SCORES, segments=True, window=2),
    "SoftmaxGrad": softmax_grad(Mask()),
    "SoftmaxGrad causal": softmax_grad(Mask(causal=True)),
    "SoftmaxGrad window": softmax_grad(Mask(window=3)),
    "RelativeScores": relative(),
    "RelativeScores of queries": relative("queries", "heads batch seq key"),
    "RelativeScores of keys": relative("keys", "seq key"),
    "RelativeScores of many rows": relative(rows=40),
    "RelativeScoresGrad": relative(gradient=True),
    "RelativeScoresGrad of queries": relative("queries", "seq key", gradient=True),
    "RelativeScoresGrad of keys": relative("keys", "heads batch seq key", gradient=True),
    "RelativeScoresGrad of many rows": relative(rows=40, gradient=True),
    "SoftmaxGrad two-sided window": softmax_grad(Mask(window=2, two_sided=True)),
    "AttentionRepeat": repeat(gradient=False),
    "AttentionRepeatGrad": repeat(gradient=True),
}
_by_seq, _one = "batch seq heads head_dim", "heads seq head_dim"
for _gradient in (False, True):
    _name = f"RelativeAttention{'Grad' * _gradient}"
    _with = partial(with_distances, gradient=_gradient)
    ROWS[_name] = _with()
    ROWS[f"{_name} of queries"] = _with("queries", _by_seq, mask="padding", rows=40)
    ROWS[f"{_name} of keys"] = _with("keys", _by_seq, order="heads batch seq")
    ROWS[f"{_name} segments"] = _with(axes="seq heads head_dim", mask="segments", rows=40)
    ROWS[f"{_name} segments dropout"] = _with(axes=_one, mask="segments", drop=0.3, rows=9)
    ROWS[f"{_name} padding dropout"] = _with(mask="padding", drop=0.3, rows=3)
    _name = f"Attention{'Grad' * _gradient} dropout"
    ROWS[_name] = dropped(PACKED, gradient=_gradient)
    ROWS[f"{_name} padding causal"] = dropped(BY_SEQ, gradient=_gradient, masks=True)
for _form, _causal in itertools.product(("vendor", "merge", "flash"), (False, True)):
    for _layout, _qkv in (("packed", PACKED), ("separate", SEPARATE)):
        _name = f"{_form} {_layout}{' causal' if _causal else ''}"
        ROWS[f"Attention {_name}"] = attention(_qkv, _form, _causal)
        ROWS[f"AttentionGrad {_name}"] = attention_grad(_qkv, _form, _causal)
for _form in ("vendor", "merge", "flash"):
    ROWS[f"Attention {_form} by seq"] = attention(BY_SEQ, _form, True)
    ROWS[f"AttentionGrad {_form} by seq"] = attention_grad(BY_SEQ, _form, True, BY_SEQ[0])
ROWS["Attention packed in the middle"] = attention(["batch seq qkv heads head_dim"], "merge", True)
ROWS["AttentionGrad packed in the middle"] = attention_grad(["batch seq qkv heads head_dim"], "merge", True)
