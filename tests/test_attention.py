"""Every mask in every form of attention, forward and gradient: against the float64 references, those against PyTorch."""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from cases import Case, check, offsets, padding
from conftest import error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nntile_py as nt
from nntile_py.errors import ConfigError
from nntile_py.graph import Graph
from nntile_py.lowering import lower
from nntile_py.tasks.attention import attention
from nntile_py.tasks.elementwise import add
from nntile_py.tasks.mask import Mask
from nntile_py.tasks.op import Tensor
from nntile_py.tiles import Tiling

FORMS = ("vendor", "merge", "flash", "naive")
MASKS = [
    "none", "causal", "window", "padding", "padding causal", "padding window", "segments", "segments causal",
    "segments window",
]  # fmt: skip
BSHD = "batch seq heads head_dim"
LAYOUTS: dict[str, list[str]] = {
    "by seq": [BSHD] * 3,
    "packed": ["qkv batch heads seq head_dim"],
    "packed k and v": ["batch heads seq head_dim", "batch heads qkv seq head_dim"],
    "one sequence": ["heads seq head_dim"] * 3,
    "groups": [BSHD, "batch seq kv_heads head_dim", "batch seq kv_heads head_dim"],
    "other order": ["batch heads seq head_dim", BSHD, "seq heads batch head_dim"],
    "cross": [BSHD, "batch key heads head_dim", "batch key heads head_dim"],
    "cross groups": ["batch heads seq head_dim", *["batch kv_heads key head_dim"] * 2],
    "cross packed": ["batch heads seq head_dim", "batch qkv heads key head_dim"],
}
SIZES = {"batch": 3, "seq": 11, "key": 11, "heads": 6, "kv_heads": 3, "head_dim": 5}
CROSS = {"batch": 3, "seq": 11, "key": 7, "heads": 6, "kv_heads": 3, "head_dim": 5}
TILINGS: dict[str, dict[str, int]] = {
    "uncut": {},
    "even": {"batch": 1, "heads": 2},
    "seq": {"seq": 4, "heads": 6},
    "ragged": {"batch": 2, "seq": 3, "heads": 4},
    "parts of groups": {"batch": 2, "seq": 5, "heads": 1},
}


@dataclass(frozen=True)
class Row:
    """Attention with its gradient; the output and the gradients of q, k and v are compared."""

    mask: str
    form: str
    layout: str = "by seq"
    dropout: float = 0.0

    @property
    def fits(self) -> bool:
        if self.layout == "one sequence" and "padding" in self.mask:
            return False
        return "cross" not in self.layout or self.mask in ("none", "padding")

    @property
    def sizes(self) -> dict[str, int]:
        return {**(CROSS if "cross" in self.layout else SIZES), **({"batch": 1} if "segments" in self.mask else {})}

    def build(self, case: Case) -> tuple[list[Tensor], Tensor, Tensor, Mask]:
        """q, k, v or what holds them; the output; its gradient; the mask."""
        case.sizes["qkv"] = 3 if self.layout == "packed" else 2
        inputs = [case.x(axes) for axes in LAYOUTS[self.layout]]
        for tensor in inputs:
            tensor.requires_grad = True
        parts = [(t, i) for t in inputs for i in range(case.sizes["qkv"])] if len(inputs) == 1 else list(inputs)
        if len(inputs) == 2:
            parts = [inputs[0], (inputs[1], 0), (inputs[1], 1)]
        key = "key" if "cross" in self.layout else "seq"
        words = self.mask.split()
        data = {
            "padding": case.x(f"batch {key}", padding, "int64") if "padding" in words else None,
            "segments": case.x("sequences", offsets(case.sizes["seq"]), "int64") if "segments" in words else None,
        }
        mask = Mask("causal" in words, 4 if "window" in words else None, **data)
        q, k, v = parts
        out = attention(case.graph, q, k, v, mask, self.form, self.dropout)
        return inputs, out, case.x(" ".join(out.axes)), mask

    def __call__(self, case: Case) -> tuple[list[Tensor], Tensor, Tensor, Mask]:
        made = inputs, out, dy, _ = self.build(case)
        g, grads = case.graph, {out: dy}
        g._phase = "backward"
        for op in reversed(g.ops[:]):
            for t, grad in zip(op.inputs, op.gradient(g, *(grads.get(x) for x in op.outputs)), strict=True):
                if grad is not None and t.requires_grad:
                    grads[t] = add(g, grads[t], grad) if t in grads else grad
        for number, tensor in enumerate((out, *(grads[t] for t in inputs))):
            tensor.storage.kind, tensor.storage.name = "scalar", f"result{number}"
        return made


def rows(**options: Any) -> list[Row]:
    return [row for mask, form in itertools.product(MASKS, FORMS) if (row := Row(mask, form, **options)).fits]


# -- the references against PyTorch


def attended(row: Row, sizes: Mapping[str, int], data: list[Any]) -> torch.Tensor:
    """[batch, 1, seq, key], one pair of positions after the other."""
    batch, seq, key = sizes["batch"], sizes["seq"], sizes["key"]
    words, result = row.mask.split(), torch.zeros(batch, 1, seq, key, dtype=torch.bool)
    for b, s, k in itertools.product(range(batch), range(seq), range(key)):
        good = True
        if "causal" in words or "window" in words:
            good = k <= s
        if "window" in words:
            good = good and s - k < 4
        if "padding" in words:
            good = good and bool(data[0][b, k])
        if "segments" in words:
            starts = data[0].tolist()
            good = good and any(a <= s < z and a <= k < z for a, z in itertools.pairwise(starts))
        result[b, 0, s, k] = good
    return result


def of_torch(row: Row, case: Case, made: Any, values: Any) -> list[Any]:
    """The output and the gradients of the inputs."""
    inputs, out, dy, mask = made
    given = [torch.tensor(values[t], requires_grad=True) for t in inputs]
    parts = []
    for t, value in zip(inputs, given, strict=True):
        axes = [a for a in t.axes if a != "qkv"]
        slices = value.unbind(t.axes.index("qkv")) if "qkv" in t.axes else [value]
        roles = [{"kv_heads": "heads", "key": "seq"}.get(a, a) for a in axes]
        order = [roles.index(a) for a in ("batch", "heads", "seq", "head_dim") if a in roles]
        parts += [x.permute(order) if len(order) == 4 else x.permute(order)[None] for x in slices]
    q, k, v = parts
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    allowed = attended(row, {**case.sizes, "batch": q.shape[0]}, [values[t] for t in mask.inputs])
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~allowed, -1e9)
    o = (torch.softmax(scores, -1) * allowed) @ v
    axes = list(out.axes)
    o = (o if "batch" in axes else o[0]).permute(
        [[a for a in ("batch", "heads", "seq", "head_dim") if a in axes].index(a) for a in axes]
    )
    o.backward(torch.tensor(values[dy]))
    return [o.detach(), *(t.grad for t in given)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["vendor", "naive"])
def test_references(layout: str, form: str) -> None:
    for mask in MASKS:
        row = Row(mask, form, layout)
        if not row.fits:
            continue
        case = Case(row.sizes, "fp64")
        made = row(case)
        values = case.draw(np.random.default_rng(1))
        expected = case.expected(values)
        found = {t.storage.name: value for t, value in expected.items()}
        for number, want in enumerate(of_torch(row, case, made, values)):
            assert error(found[f"result{number}"], want) < 1e-12, (mask, number)


# -- lowered


def tiles_for(row: Row, tiling: str) -> dict[str, int]:
    return {axis: size for axis, size in TILINGS[tiling].items() if axis != "batch" or row.layout != "one sequence"}


@pytest.mark.parametrize("tiling", ["uncut", "ragged", "parts of groups"])
@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.form} {row.mask}")
def test_masks(runtime: nt.Runtime, row: Row, tiling: str) -> None:
    check(row, tiles_for(row, tiling), "chain", "fp64", row.sizes)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "by seq"])
@pytest.mark.parametrize("form", FORMS)
def test_layouts(runtime: nt.Runtime, form: str, layout: str) -> None:
    for mask, tiling in itertools.product(("padding", "segments causal", "none"), TILINGS):
        row = Row(mask, form, layout)
        if row.fits:
            check(row, tiles_for(row, tiling), "chain", "fp64", row.sizes)


@pytest.mark.parametrize("policy", ["commute", "redux", "tree"])
@pytest.mark.parametrize("form", FORMS)
def test_policies(runtime: nt.Runtime, form: str, policy: str) -> None:
    for row in (Row("padding window", form, "groups"), Row("segments causal", form, "packed")):
        check(row, tiles_for(row, "parts of groups"), policy, "fp64", row.sizes)


@pytest.mark.parametrize("row", rows(layout="groups"), ids=lambda row: f"{row.form} {row.mask}")
def test_in_fp32(runtime: nt.Runtime, row: Row) -> None:
    check(row, TILINGS["ragged"], "chain", "fp32", row.sizes)


@pytest.mark.parametrize("form", FORMS)
def test_many_positions(runtime: nt.Runtime, form: str) -> None:
    """Kernels take the queries in blocks; windows and sequences leave out keys before and after."""
    for mask, tiles in itertools.product(MASKS[1:], ({}, {"seq": 170})):
        row = Row(mask, form)
        check(row, tiles, "chain", "fp64", {**row.sizes, "batch": 1, "seq": 300, "key": 300, "heads": 1, "head_dim": 8})


def test_dropout(runtime: nt.Runtime) -> None:
    def row(case: Case) -> None:
        case.slots["dropout_seed"] = case.options["seed"] = 3
        Row("padding causal", "naive", dropout=0.4)(case)

    for tiling in ("uncut", "ragged"):
        case = Case(SIZES, "fp64")
        row(case)
        low = lower(case.graph, Tiling(TILINGS[tiling]))
        assert any(task.kernel == "dropout" for task in low.tasks.tasks)
