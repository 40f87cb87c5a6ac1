"""Rows of element-wise operators, norms, and operators that move or select data: see operators.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from nntile_py import tasks as ops
from nntile_py.tasks import Op
from nntile_py.tasks.activation import ACTIVATIONS
from nntile_py.tasks.band import Band
from nntile_py.tasks.scalar import expression as ex
from nntile_py.testing import Case, Maker, ids, large, normal, of

_HEADS = "batch heads seq head_dim"
_SCORES = "batch heads seq key"
_POSITIONS = [("seq", 0.0), ("seq", 0.6), ("batch", 1.0), ("embed", 0.5)]


def binary(op: type[Op], a: str, b: str) -> Callable[[Case], Op]:
    return lambda case: case.add(op(case.x(a), case.x(b), case.y(a)))  # type: ignore[call-arg]


def transposed(axes: str, out: str) -> Callable[[Case], Op]:
    return lambda case: case.add(ops.Transpose(case.x(axes), case.y(out)))


def summed(axes: str, out: str) -> Callable[[Case], Op]:
    return lambda case: case.add(ops.Sum(case.x(axes), case.y(out, case.sum_dtype)))


def renamed(case: Case) -> None:
    x = case.add(ops.Rename(case.x(_HEADS), {"seq": "key"})).output
    case.add(ops.Transpose(x, case.y("head_dim key batch heads")))


def unpacked(axes: str) -> Callable[[Case], Op]:
    outs = axes.replace("qkv", "")
    return lambda case: case.add(ops.Unpack(case.x(axes), [case.y(outs) for _ in range(3)], "qkv"))


def packed(axes: str) -> Callable[[Case], Op]:
    ins = axes.replace("qkv", "")
    return lambda case: case.add(ops.Pack([case.x(ins) for _ in range(3)], case.y(axes), "qkv"))


def dropout(p: float, seed: int, causal: bool = False) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        axes = _SCORES if causal else "batch seq embed"
        case.slots["dropout_seed"], case.options["seed"] = float(seed), seed
        return case.add(ops.Dropout(case.x(axes, band=Band(causal)), case.y(axes, band=Band(causal)), p, key=7))

    return row


def dropout_by_numbers(p: float) -> Callable[[Case], Op]:
    """Rows that have numbers of their own."""

    def row(case: Case) -> Op:
        case.slots["dropout_seed"], case.options["seed"] = 5.0, 5
        numbers = case.x("batch seq", ids(1000), "int64")
        return case.add(ops.Dropout(case.x("batch seq embed"), case.y("batch seq embed"), p, 7, numbers))

    return row


def embedding(ids_axes: str, rows: str) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        numbers = case.x(ids_axes, ids(case.sizes[rows]), "int64")
        return case.add(ops.Embedding(numbers, case.x(f"{rows} embed"), case.y(f"{ids_axes} embed")))

    return row


def embedding_grad(ids_axes: str, rows: str, padding: int | None = None) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        numbers, dy = case.x(ids_axes, ids(case.sizes[rows]), "int64"), case.x(f"{ids_axes} embed")
        return case.add(ops.EmbeddingGrad(numbers, dy, case.y(f"{rows} embed", case.sum_dtype), padding))

    return row


def activation(kind: str, make: Maker = normal) -> Callable[[Case], Op]:
    return lambda case: case.add(ops.Activation(case.x("batch seq ffn", make), case.y("batch seq ffn"), kind))


def activation_grad(kind: str, make: Maker = normal) -> Callable[[Case], Op]:
    axes = "batch seq ffn"
    return lambda case: case.add(ops.ActivationGrad(case.x(axes), case.x(axes, make), case.y(axes), kind))


def gated(kind: str) -> Callable[[Case], Op]:
    axes = "batch seq ffn"
    return lambda case: case.add(ops.Gated(case.x(axes), case.x(axes), case.y(axes), kind))


def gated_grad(kind: str) -> Callable[[Case], Op]:
    axes = "batch seq ffn"
    return lambda case: case.add(
        ops.GatedGrad(case.x(axes), case.x(axes), case.x(axes), case.y(axes), case.y(axes), kind)
    )


def layer_norm(residual: bool, p: float = 0.0) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        axes, x = "batch seq embed", case.x("batch seq embed")
        if p:
            case.slots["dropout_seed"], case.options["seed"], case.whole = 6.0, 6, {"embed"}
        return case.add(
            ops.LayerNorm(
                x, case.x("embed"), case.x("embed"), case.y(axes), case.y("batch seq stat", case.sum_dtype), 1e-5,
                residual=case.x(axes) if residual else None, total=case.y(axes) if residual else None,
                dropout=ops.Dropout(x, case.temp(axes), p, key=7) if p else None,
            )
        )  # fmt: skip

    return row


def layer_norm_grad(add: bool, bias: bool = False, p: float = 0.0) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        axes = "batch seq embed"
        x, gamma, beta = case.x(axes), case.x("embed"), case.x("embed")
        forward = ops.LayerNorm(x, gamma, beta, case.temp(axes), case.temp("batch seq stat"), 1e-5)
        dx = case.y(axes)
        if p:
            case.slots["dropout_seed"], case.options["seed"] = 6.0, 6
        return case.add(
            ops.LayerNormGrad(
                case.x(axes), x, case.x("batch seq stat", of(forward, 1), case.sum_dtype), gamma,
                dx, case.y("embed", case.sum_dtype), case.y("embed", case.sum_dtype), add=case.x(axes) if add else None,
                dbias=case.y("embed", case.sum_dtype) if bias else None,
                dropout=ops.Dropout(dx, case.y(axes), p, key=7) if p else None,
            )
        )  # fmt: skip

    return row


def rms_norm(residual: bool, rows: str = "batch seq", axis: str = "embed") -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        axes, case.sizes["stat"] = f"{rows} {axis}", 1
        x, gamma, y, statistics = case.x(axes), case.x(axis), case.y(axes), case.y(f"{rows} stat", case.sum_dtype)
        more = {"residual": case.x(axes), "total": case.y(axes)} if residual else {}
        return case.add(ops.RMSNorm(x, gamma, y, statistics, 1e-5, **more))

    return row


def rms_norm_grad(add: bool, rows: str = "batch seq", axis: str = "embed") -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        axes, case.sizes["stat"] = f"{rows} {axis}", 1
        x, gamma = case.x(axes), case.x(axis)
        forward = ops.RMSNorm(x, gamma, case.temp(axes), case.temp(f"{rows} stat"), 1e-5)
        statistics = case.x(f"{rows} stat", of(forward, 1), case.sum_dtype)
        outs = case.y(axes), case.y(axis, case.sum_dtype)
        return case.add(ops.RMSNormGrad(case.x(axes), x, statistics, gamma, *outs, add=case.x(axes) if add else None))

    return row


def quantize(
    axes: str, *outs: tuple[str, str, int], make: Maker = normal, by_row: bool = False
) -> Callable[[Case], Op]:
    """outs: axes, dtype and number of rows' axes of each output. by_row: each row has a scale, not each tile."""

    def row(case: Case) -> Op:
        x = case.x(axes, make)
        made = [case.y(out, dtype) for out, dtype, _ in outs]
        for out, (*_, rows) in zip(made, outs, strict=True):
            out.scaled = rows if by_row else 0
        return case.add(ops.Quantize(x, made, [rows for *_, rows in outs]))

    return row


def select(axis: str, at: float) -> Callable[[Case], Op]:
    """at: where on the axis, 0 for its first position, 1 for the last."""

    def row(case: Case) -> Op:
        x = case.x("batch seq embed")
        out = case.y(" ".join(a for a in x.axes if a != axis))
        return case.add(ops.Select(x, out, axis, round(at * (x.size(axis) - 1))))

    return row


def select_grad(axis: str, at: float) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        out = case.y("batch seq embed")
        dy = case.x(" ".join(a for a in out.axes if a != axis))
        return case.add(ops.SelectGrad(dy, out, axis, round(at * (out.size(axis) - 1))))

    return row


def places(positions: int) -> Maker:
    """Positions, some of them twice, and -1 for none."""
    return lambda rng, shape, values: rng.integers(-1, positions, shape)


def gather(x: str, new: str, *, gradient: bool, axes: int = 1, lead: int | None = None) -> Callable[[Case], Op]:
    """Gather at places [..., new] of x after its first `lead` axes; default: all axes but the last two."""

    def row(case: Case) -> Op:
        names = x.split()
        at = len(names) - 2 if lead is None else lead
        counted, width = names[at : at + axes], names[at + axes :]
        case.whole |= {*counted} if axes > 1 else set()
        positions = math.prod(case.sizes[axis] for axis in counted)
        where = case.x(" ".join([*names[:at], new]), places(positions), "int64")
        y = " ".join([*names[:at], new, *width])
        if gradient:
            return case.add(ops.GatherGrad(case.x(y), where, case.y(x)))
        return case.add(ops.Gather(case.x(x), where, case.y(y)))

    return row


def formula(first: str, second: str, out: str, value: Callable[[Any, Any], Any]) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        inputs = [case.x(first), case.x(second)]
        elements = [ops.element(number, x) for number, x in enumerate(inputs)]
        return case.add(ops.Formula(inputs, case.y(out), value(*elements), "own"))

    return row


def total(axes: str, out: str) -> Callable[[Case], Op]:
    return lambda case: case.add(ops.Total(case.x(axes), case.y(out, case.sum_dtype)))


_BOUNDED = [kind for kind in ACTIVATIONS if kind != "relu2"]  # relu2 of large values overflows fp16
ROWS: dict[str, Callable[[Case], Any]] = {
    "Add": binary(ops.Add, "batch seq embed", "batch seq embed"),
    "Multiply": binary(ops.Multiply, "batch seq embed", "batch seq embed"),
    "BiasAdd": binary(ops.BiasAdd, "batch seq embed", "embed"),
    "BiasAdd of leading axes": binary(ops.BiasAdd, "seq batch embed", "seq"),
    "BiasAdd of positions": binary(ops.BiasAdd, "batch seq embed", "seq embed"),
    "Sum": summed("batch seq embed", "embed"),
    "Sum over the last axis": summed("batch seq embed", "batch seq"),
    "Sum over outer axes": summed("qkv batch heads seq head_dim", "qkv heads head_dim"),
    "Transpose": transposed("batch seq heads head_dim", _HEADS),
    "Transpose all": transposed("batch seq qkv heads head_dim", "head_dim qkv seq heads batch"),
    "Rename": renamed,
    "Unpack": unpacked("qkv batch heads seq head_dim"),
    "Unpack a middle axis": unpacked("batch seq qkv heads head_dim"),
    "Pack": packed("qkv batch heads seq head_dim"),
    "Pack a middle axis": packed("batch seq qkv heads head_dim"),
    "Dropout": dropout(0.3, seed=5),
    "Dropout of a large seed": dropout(0.9, seed=(12345 << 32) + 99),
    "Dropout by numbers": dropout_by_numbers(0.3),
    "Dropout of nothing": dropout(0.0, seed=1),
    "Dropout causal": dropout(0.4, seed=3, causal=True),
    "Embedding": embedding("batch seq", "vocab"),
    "Embedding of positions": embedding("seq", "position"),
    "EmbeddingGrad": embedding_grad("batch seq", "vocab"),
    "EmbeddingGrad of positions": embedding_grad("seq", "position"),
    "EmbeddingGrad of padding": embedding_grad("batch seq", "vocab", padding=1),
    **{f"Activation {kind}": activation(kind) for kind in ACTIVATIONS},
    **{f"ActivationGrad {kind}": activation_grad(kind) for kind in ACTIVATIONS},
    **{f"Gated {kind}": gated(kind) for kind in ("silu", "gelu_new")},
    **{f"GatedGrad {kind}": gated_grad(kind) for kind in ("silu", "gelu_new")},
    "Quantize twice": quantize("batch seq embed", ("batch seq embed", "e4m3", 2), ("embed batch seq", "e4m3", 1)),
    "Quantize permuted": quantize(
        "heads seq batch head_dim", ("batch seq heads head_dim", "e4m3", 2), ("heads head_dim batch seq", "e4m3", 2)
    ),
    "Quantize rows twice": quantize(
        "batch seq embed", ("batch seq embed", "e4m3", 2), ("embed batch seq", "e4m3", 1), by_row=True
    ),
    "Quantize rows permuted": quantize(
        "heads seq batch head_dim",
        ("batch seq heads head_dim", "e4m3", 2),
        ("heads head_dim batch seq", "e5m2", 2),
        by_row=True,
    ),
    "Quantize rows of zeros": quantize(
        "embed ffn", ("ffn embed", "e4m3", 1), make=lambda rng, shape, values: np.zeros(shape), by_row=True
    ),
    "Quantize wide": quantize("embed ffn", ("ffn embed", "e5m2", 1)),
    "Quantize zeros": quantize("embed ffn", ("ffn embed", "e4m3", 1), make=lambda rng, shape, values: np.zeros(shape)),
    **{f"Select {axis} {at}": select(axis, at) for axis, at in _POSITIONS},
    **{f"SelectGrad {axis} {at}": select_grad(axis, at) for axis, at in _POSITIONS},
    **{f"Activation {kind} of large values": activation(kind, large) for kind in _BOUNDED},
    **{f"ActivationGrad {kind} of large values": activation_grad(kind, large) for kind in ACTIVATIONS},
    "LayerNorm": layer_norm(residual=False),
    "LayerNorm residual": layer_norm(residual=True),
    "LayerNorm residual dropout": layer_norm(residual=True, p=0.3),
    "LayerNormGrad": layer_norm_grad(add=False),
    "LayerNormGrad add": layer_norm_grad(add=True),
    "LayerNormGrad bias": layer_norm_grad(add=False, bias=True),
    "LayerNormGrad add bias": layer_norm_grad(add=True, bias=True),
    "LayerNormGrad dropout": layer_norm_grad(add=False, p=0.3),
    "LayerNormGrad add bias dropout": layer_norm_grad(add=True, bias=True, p=0.3),
    "RMSNorm": rms_norm(residual=False),
    "RMSNorm residual": rms_norm(residual=True),
    "RMSNormGrad": rms_norm_grad(add=False),
    "RMSNormGrad add": rms_norm_grad(add=True),
    "RMSNorm of heads": rms_norm(False, "batch seq heads", "head_dim"),
    "RMSNormGrad of heads": rms_norm_grad(False, "batch seq heads", "head_dim"),
    "Formula": formula("batch seq embed", "batch seq embed", "batch seq embed", lambda a, b: ex.sin(a) * ex.cos(b)),
    "Formula of some axes": formula("embed", "seq batch", "batch seq embed", lambda a, b: ex.select(a > b, a * b, b)),
    "Formula of one number": formula("batch seq embed", "one", "batch seq embed", lambda a, b: a / (2 + b * b)),
    "Formula of a new axis": formula("seq embed", "embed", "batch seq embed", lambda a, b: ex.maximum(a, b)),
    "Total": total("batch seq embed", "seq"),
    "Total of the last axis": total("batch seq embed", "batch seq"),
    "Gather": gather("batch seq embed", "heads", gradient=False),
    "GatherGrad": gather("batch seq embed", "heads", gradient=True),
    "Gather of one sequence": gather("seq embed", "vocab", gradient=False),
    "GatherGrad of one sequence": gather("seq embed", "vocab", gradient=True),
    "Gather several axes": gather("batch seq heads head_dim", "ffn one", gradient=False, lead=1),
    "GatherGrad several axes": gather("batch seq heads head_dim", "ffn one", gradient=True, lead=1),
    "Gather of several axes": gather("batch ffn heads embed", "seq", gradient=False, axes=2, lead=1),
    "GatherGrad of several axes": gather("batch ffn heads embed", "seq", gradient=True, axes=2, lead=1),
}
