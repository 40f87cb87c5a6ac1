"""Rows of contractions: see operators.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from nntile_py import tasks as ops
from nntile_py.tasks import Op
from nntile_py.tasks.activation import ACTIVATIONS
from nntile_py.tasks.band import Band
from nntile_py.testing import Case, normal, triangle


def linear(
    a: str = "batch seq embed",
    b: str = "embed ffn",
    out: str = "batch seq ffn",
    *,
    bias: str | None = None,
    residual: bool = False,
    activation: str | None = None,
    pre: bool = False,
    aux: bool = False,
    bias_grad: tuple[int, str] | None = None,
    scale: float = 1.0,
    reshape: bool = False,
    causal: str = "",
) -> Callable[[Case], Op]:
    """A Contract; `causal` names which of a, b and y are causal."""

    def row(case: Case) -> Op:
        return case.add(
            ops.Contract(
                case.x(a, triangle if "a" in causal else normal, band=Band("a" in causal)),
                case.x(b, triangle if "b" in causal else normal, band=Band("b" in causal)),
                case.y(out, band=Band("y" in causal)),
                scale=scale,
                bias=case.x(bias) if bias else None,
                residual=case.x(out) if residual else None,
                activation=activation,
                pre=case.y(out) if pre else None,
                aux=case.x(out) if aux else None,
                bias_grad=(bias_grad[0], case.y(bias_grad[1])) if bias_grad else None,
                reshape=reshape,
            )
        )

    return row


ROWS: dict[str, Callable[[Case], Any]] = {}
_VALUES = (None, "ffn"), (False, True), (None, *ACTIVATIONS), (False, True)  # bias, residual, activation, pre
for _bias, _residual, _act, _pre in itertools.product(*_VALUES):
    _kept = _bias is None if _residual else bool(_bias)  # half of the rows: each activation with each other value
    if _pre <= bool(_act) and (_act in (None, "gelu", "gelu_new") or _pre == _kept):
        _parts = [("bias", _bias), ("residual", _residual), (_act, _act), ("pre", _pre)]
        ROWS[" ".join(["Contract", *(str(name) for name, on in _parts if on)])] = linear(
            bias=_bias, residual=_residual, activation=_act, pre=_pre
        )
for _act in ACTIVATIONS:
    ROWS[f"Contract aux {_act}"] = linear(activation=_act, aux=True)

_HEADS = "batch heads seq head_dim"
_KEYS = "batch heads key head_dim"
_SCORES = "batch heads seq key"
_PERMUTED = {"a": "embed seq batch", "b": "ffn embed", "out": "ffn seq batch"}
ROWS |= {
    "Contract scale": linear(scale=-0.37),
    "Contract scale bias": linear(scale=-0.37, bias="ffn"),
    "Contract bias of a middle axis": linear(bias="seq"),
    "Contract bias of two axes": linear(bias="seq ffn", activation="gelu"),
    "Contract permuted inputs": linear("embed seq batch", "ffn embed"),
    "Contract permuted output": linear(out="seq ffn batch"),
    "Contract permuted output, bias of rows": linear(out="seq ffn batch", bias="seq"),
    "Contract permuted output, bias of columns": linear(out="seq ffn batch", bias="ffn"),
    "Contract permuted output, residual": linear(out="seq ffn batch", bias="ffn", residual=True),
    "Contract columns first": linear(out="ffn batch seq", bias="ffn", activation="gelu_new", pre=True),
    "Contract all permuted": linear(**_PERMUTED, bias="ffn", residual=True, activation="gelu", pre=True),
    "Contract all permuted, aux": linear(**_PERMUTED, activation="gelu_new", aux=True),
    "Contract reshape": linear(out="ffn batch seq", reshape=True, scale=-0.37),
    "Contract reshape, bias": linear(out="seq ffn batch", reshape=True, bias="ffn"),
    "Contract reshape, bias of rows and columns": linear(out="seq ffn batch", reshape=True, bias="seq ffn"),
    "Contract reshape, activation": linear(out="seq ffn batch", reshape=True, bias="ffn", activation="gelu"),
    "Contract reshape, everything": linear(
        **_PERMUTED, reshape=True, bias="ffn", residual=True, activation="gelu_new", pre=True
    ),
    "Contract reshape, aux": linear(out="seq ffn batch", reshape=True, activation="gelu_new", aux=True),
    "Contract reshape, packed qkv": linear(
        "batch seq embed", "embed qkv heads head_dim", "qkv batch heads seq head_dim", bias="qkv heads head_dim",
        reshape=True,
    ),
    "Contract reshape, bias gradient": linear(
        "batch seq embed", "qkv batch heads seq head_dim", "heads embed qkv head_dim",
        bias_grad=(1, "heads qkv head_dim"), reshape=True,
    ),
    "Contract reshape, batch axes": linear(_SCORES, _KEYS, "seq batch heads head_dim", reshape=True),
    "Contract reshape, causal": linear(_SCORES, _KEYS, "seq batch heads head_dim", causal="a", reshape=True),
    "Contract packed qkv, permuted output": linear(
        "batch seq embed", "embed qkv heads head_dim", "qkv batch heads seq head_dim", bias="qkv heads head_dim"
    ),
    "Contract permuted output, bias in another order": linear(
        "batch seq embed", "embed qkv heads head_dim", "heads batch qkv seq head_dim", bias="heads qkv head_dim"
    ),
    "Contract two summed axes": linear("batch seq heads head_dim", "heads head_dim embed", "batch seq embed"),
    "Contract weight gradient": linear("batch seq embed", "batch seq ffn", "embed ffn"),
    "Contract bias_grad of b": linear("batch seq embed", "batch seq ffn", "embed ffn", bias_grad=(1, "ffn")),
    "Contract bias_grad of a": linear("batch seq embed", "batch seq ffn", "embed ffn", bias_grad=(0, "embed")),
    "Contract bias_grad of b, columns first": linear(
        "batch seq embed", "batch seq ffn", "ffn embed", bias_grad=(1, "ffn")
    ),
    "Contract bias_grad of a, columns first": linear(
        "batch seq embed", "batch seq ffn", "ffn embed", bias_grad=(0, "embed"), scale=0.5
    ),
    "Contract bias_grad of a permuted": linear(
        "batch seq embed", "qkv batch heads seq head_dim", "embed qkv heads head_dim",
        bias_grad=(1, "qkv heads head_dim"),
    ),
    "Contract batch axes": linear(_HEADS, _KEYS, _SCORES, scale=0.5),
    "Contract batch axes permuted": linear("batch seq heads head_dim", "key batch head_dim heads", _SCORES),
    "Contract causal output": linear(_HEADS, _KEYS, _SCORES, scale=0.5, causal="y"),
    "Contract causal a": linear(_SCORES, _KEYS, _HEADS, causal="a"),
    "Contract causal a, permuted output": linear(_SCORES, _KEYS, "batch seq heads head_dim", causal="a"),
    "Contract causal a, over queries": linear(_SCORES, _HEADS, _KEYS, causal="a"),
    "Contract causal b": linear(_KEYS, _SCORES, _HEADS, causal="b"),
}  # fmt: skip
