"""One row per group of operators that run as one generated kernel: see operators.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nntile_py import tasks as ops
from nntile_py.tasks import Op
from nntile_py.tasks.activation import ACTIVATIONS
from nntile_py.tasks.band import Band
from nntile_py.tasks.mask import Mask
from nntile_py.testing import (
    Case,
    ids,
    of,
    padding,
    triangle,
)

_ROWS = "batch seq embed"
_SCORES = "batch heads seq key"


def generated(make: Callable[[Case], list[Op]], *whole: str, seed: int | None = 6) -> Callable[[Case], Op]:
    """Several operators as one, with all persistent outputs. seed: seed of the dropout among them."""

    def row(case: Case) -> Op:
        case.whole = {*whole}
        if seed is not None:
            case.slots["dropout_seed"], case.options["seed"] = float(seed), seed
        members = make(case)
        return case.add(ops.Generated(members, [t for op in members for t in op.outputs if t.persistent]))

    return row


def dropped_into_norm(case: Case) -> list[Op]:
    """DRLN of the data-movement paper, without the bias."""
    x, dropped, total = case.x(_ROWS), case.temp(_ROWS), case.y(_ROWS)
    statistics = case.y("batch seq stat", case.sum_dtype)
    norm = ops.LayerNorm(total, case.x("embed"), case.x("embed"), case.y(_ROWS), statistics, 1e-5)
    return [ops.Dropout(x, dropped, 0.3, key=7), ops.Add(case.x(_ROWS), dropped, total), norm]


def norm_grad_into_dropout(case: Case) -> list[Op]:
    """BLNRD and the bias' gradient."""
    x, gamma = case.x(_ROWS), case.x("embed")
    forward = ops.LayerNorm(x, gamma, case.x("embed"), case.temp(_ROWS), case.temp("batch seq stat"), 1e-5)
    statistics, dx = case.x("batch seq stat", of(forward, 1), case.sum_dtype), case.temp(_ROWS)
    sums = [case.y("embed", case.sum_dtype) for _ in range(3)]
    total, dropped = case.y(_ROWS), case.y(_ROWS)
    return [
        ops.LayerNormGrad(case.x(_ROWS), x, statistics, gamma, dx, *sums[:2]),
        ops.Add(case.x(_ROWS), dx, total),
        ops.Dropout(total, dropped, 0.3, key=1 << 40),
        ops.Sum(dropped, sums[2]),
    ]


def activation_grads(kind: str) -> Callable[[Case], list[Op]]:
    """BDRB."""

    def make(case: Case) -> list[Op]:
        axes = "batch seq ffn"
        dropped, dx = case.temp(axes), case.y(axes)
        return [
            ops.Dropout(case.x(axes), dropped, 0.2, key=3),
            ops.ActivationGrad(dropped, case.x(axes), dx, kind),
            ops.Sum(dx, case.y("ffn", case.sum_dtype)),
        ]

    return make


def bias_and_activation(kind: str) -> Callable[[Case], list[Op]]:
    """Bias, activation and dropout, with two dropouts, one with row numbers."""

    def make(case: Case) -> list[Op]:
        axes = "batch seq ffn"
        y, act, dropped = case.temp(axes), case.y(axes), case.temp(axes)
        row_numbers = case.x("batch seq", ids(1000), "int64")
        return [
            ops.BiasAdd(case.x(axes), case.x("ffn"), y),
            ops.Activation(y, act, kind),
            ops.Dropout(act, dropped, 0.4, key=5, row_numbers=row_numbers),
            ops.Dropout(dropped, case.y(axes), 0.1, key=2),
        ]

    return make


def masked_softmax(**mask: Any) -> Callable[[Case], list[Op]]:
    """SM."""

    def make(case: Case) -> list[Op]:
        data = case.x("batch key", padding, "int64") if mask.get("padding") else None
        what = Mask(**(mask | {"padding": data}))
        scores, dropped = case.x(_SCORES, band=what.band), case.y(_SCORES, band=what.band)
        p = case.y(_SCORES, band=what.band)
        return [ops.Softmax(scores, p, what), ops.Dropout(p, dropped, 0.3, key=9)]

    return make


def softmax_grads(case: Case) -> list[Op]:
    """BS."""
    band = Band(True)
    dp, p = case.temp(_SCORES, band=band), case.x(_SCORES, triangle, band=band)
    return [
        ops.Dropout(case.x(_SCORES, band=band), dp, 0.3, key=9),
        ops.SoftmaxGrad(p, dp, case.y(_SCORES, band=band)),
    ]


def rms_norm_grads(case: Case) -> list[Op]:
    case.sizes["stat"] = 1
    x, gamma, dx = case.x(_ROWS), case.x("embed"), case.temp(_ROWS)
    forward = ops.RMSNorm(x, gamma, case.temp(_ROWS), case.temp("batch seq stat"), 1e-5)
    statistics = case.x("batch seq stat", of(forward, 1), case.sum_dtype)
    return [
        ops.RMSNormGrad(case.x(_ROWS), x, statistics, gamma, dx, case.y("embed", case.sum_dtype)),
        ops.Add(dx, case.x(_ROWS), case.y(_ROWS)),
    ]


def rms_norms(case: Case) -> list[Op]:
    case.sizes["stat"] = 1
    total = case.y(_ROWS)
    norm = ops.RMSNorm(total, case.x("embed"), case.y(_ROWS), case.y("batch seq stat", case.sum_dtype), 1e-5)
    return [ops.Add(case.x(_ROWS), case.x(_ROWS), total), norm]


def sums_of_products(*kept: str) -> Callable[[Case], list[Op]]:
    """Sums that keep these axes."""

    def make(case: Case) -> list[Op]:
        product, gates = case.temp(_ROWS), [case.temp(_ROWS), case.temp(_ROWS)]
        return [
            ops.Multiply(case.x(_ROWS), case.x(_ROWS), product),
            *(ops.Sum(product, case.y(axes, case.sum_dtype)) for axes in kept),
            ops.GatedGrad(product, case.x(_ROWS), case.x(_ROWS), *gates, "silu"),
            ops.Gated(*gates, case.y(_ROWS), "gelu"),
        ]

    return make


def sum_of_a_vector(case: Case) -> list[Op]:
    squares = case.temp("embed")
    x = case.x("embed")
    return [ops.Multiply(x, x, squares), ops.Sum(squares, case.y("", case.sum_dtype))]


ROWS: dict[str, Callable[[Case], Any]] = {
    "Generated norm of a sum": generated(dropped_into_norm, "embed"),
    "Generated norm gradient": generated(norm_grad_into_dropout, "embed"),
    **{f"Generated {kind} gradient": generated(activation_grads(kind)) for kind in ACTIVATIONS},
    **{f"Generated bias {kind}": generated(bias_and_activation(kind)) for kind in ACTIVATIONS},
    "Generated softmax": generated(masked_softmax(), "seq", "key"),
    "Generated softmax causal": generated(masked_softmax(causal=True), "seq", "key"),
    "Generated softmax window": generated(masked_softmax(window=3), "seq", "key"),
    "Generated softmax two-sided window": generated(masked_softmax(window=2, two_sided=True), "seq", "key"),
    "Generated softmax padding": generated(masked_softmax(padding=True), "seq", "key"),
    "Generated softmax gradient": generated(softmax_grads, "seq", "key"),
    "Generated RMSNorm": generated(rms_norms, "embed", seed=None),
    "Generated RMSNorm gradient": generated(rms_norm_grads, "embed", seed=None),
    "Generated sums": generated(sums_of_products("embed", "seq embed", "batch seq"), seed=None),
    "Generated sums over a middle axis": generated(sums_of_products("batch embed", "embed"), seed=None),
    "Generated elements": generated(sums_of_products(), seed=None),
    "Generated sum of a vector": generated(sum_of_a_vector, seed=None),
}
