"""One row per operator: how to build it on tensors with random values.

A row makes tensors (`case.x`: an input, `case.y`: an output) and adds one operator or a few to the case's graph.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from operators_generated import ROWS as GENERATED

from nntile_py import tasks as ops
from nntile_py.tasks import Op, Tensor
from nntile_py.tasks.activation import ACTIVATIONS
from nntile_py.tasks.attention_operands import Operands
from nntile_py.tasks.band import Band
from nntile_py.tasks.mask import Mask
from nntile_py.testing import (
    Array,
    Case,
    Maker,
    Values,
    ids,
    large,
    low_bits,
    normal,
    of,
    offsets,
    padding,
    positive,
    triangle,
)

# -- the table

ROWS: dict[str, Callable[[Case], Any]] = {}


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
            )
        )

    return row


for _bias, _residual, _act in itertools.product((None, "ffn"), (False, True), (None, *ACTIVATIONS)):
    for _pre in (False, True) if _act else (False,):
        _parts = [("bias", _bias), ("residual", _residual), (_act, _act), ("pre", _pre)]
        ROWS[" ".join(["Contract", *(str(name) for name, on in _parts if on)])] = linear(
            bias=_bias, residual=_residual, activation=_act, pre=_pre
        )
for _act in ACTIVATIONS:
    ROWS[f"Contract aux {_act}"] = linear(activation=_act, aux=True)

_HEADS = "batch heads seq head_dim"
_KEYS = "batch heads key head_dim"
_SCORES = "batch heads seq key"
_POSITIONS = [("seq", 0.0), ("seq", 0.6), ("batch", 1.0), ("embed", 0.5)]
_PERMUTED = {"a": "embed seq batch", "b": "ffn embed", "out": "ffn seq batch"}
ROWS |= {
    "Contract scale": linear(scale=-0.37),
    "Contract scale bias": linear(scale=-0.37, bias="ffn"),
    "Contract bias of a middle axis": linear(bias="seq"),
    "Contract bias of two axes": linear(bias="seq ffn", activation="gelu"),
    "Contract permuted inputs": linear("embed seq batch", "ffn embed"),
    "Contract permuted output": linear(out="seq ffn batch"),
    "Contract columns first": linear(out="ffn batch seq", bias="ffn", activation="gelu_new", pre=True),
    "Contract all permuted": linear(**_PERMUTED, bias="ffn", residual=True, activation="gelu", pre=True),
    "Contract all permuted, aux": linear(**_PERMUTED, activation="gelu_new", aux=True),
    "Contract packed qkv": linear(
        "batch seq embed", "embed qkv heads head_dim", "qkv batch heads seq head_dim", bias="qkv heads head_dim"
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


def binary(op: type[Op], a: str, b: str) -> Callable[[Case], Op]:
    return lambda case: case.add(op(case.x(a), case.x(b), case.y(a)))  # type: ignore[call-arg]


def transposed(axes: str, out: str) -> Callable[[Case], Op]:
    return lambda case: case.add(ops.Transpose(case.x(axes), case.y(out)))


def summed(axes: str, out: str) -> Callable[[Case], Op]:
    return lambda case: case.add(ops.Sum(case.x(axes), case.y(out, case.wide)))


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
        draws = case.x("batch seq", ids(1000), "int64")
        return case.add(ops.Dropout(case.x("batch seq embed"), case.y("batch seq embed"), p, key=7, draws=draws))

    return row


def embedding(ids_axes: str, rows: str) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        numbers = case.x(ids_axes, ids(case.sizes[rows]), "int64")
        return case.add(ops.Embedding(numbers, case.x(f"{rows} embed"), case.y(f"{ids_axes} embed")))

    return row


def embedding_grad(ids_axes: str, rows: str) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        numbers, dy = case.x(ids_axes, ids(case.sizes[rows]), "int64"), case.x(f"{ids_axes} embed")
        return case.add(ops.EmbeddingGrad(numbers, dy, case.y(f"{rows} embed", case.wide)))

    return row


def activation(kind: str, make: Maker = normal) -> Callable[[Case], Op]:
    return lambda case: case.add(ops.Activation(case.x("batch seq ffn", make), case.y("batch seq ffn"), kind))


def activation_grad(kind: str, make: Maker = normal) -> Callable[[Case], Op]:
    axes = "batch seq ffn"
    return lambda case: case.add(ops.ActivationGrad(case.x(axes), case.x(axes, make), case.y(axes), kind))


def layer_norm(residual: bool, p: float = 0.0) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        axes, x = "batch seq embed", case.x("batch seq embed")
        if p:
            case.slots["dropout_seed"], case.options["seed"], case.whole = 6.0, 6, {"embed"}
        return case.add(
            ops.LayerNorm(
                x, case.x("embed"), case.x("embed"), case.y(axes), case.y("batch seq stat", case.wide), 1e-5,
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
                case.x(axes), x, case.x("batch seq stat", of(forward, 1), case.wide), gamma,
                dx, case.y("embed", case.wide), case.y("embed", case.wide), add=case.x(axes) if add else None,
                dbias=case.y("embed", case.wide) if bias else None,
                dropout=ops.Dropout(dx, case.y(axes), p, key=7) if p else None,
            )
        )  # fmt: skip

    return row


def rms_norm(residual: bool) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        axes, case.sizes["stat"] = "batch seq embed", 1
        x, gamma, y, stat = case.x(axes), case.x("embed"), case.y(axes), case.y("batch seq stat", case.wide)
        more = {"residual": case.x(axes), "total": case.y(axes)} if residual else {}
        return case.add(ops.RMSNorm(x, gamma, y, stat, 1e-5, **more))

    return row


def rms_norm_grad(add: bool) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        axes, case.sizes["stat"] = "batch seq embed", 1
        x, gamma = case.x(axes), case.x("embed")
        forward = ops.RMSNorm(x, gamma, case.temp(axes), case.temp("batch seq stat"), 1e-5)
        stat = case.x("batch seq stat", of(forward, 1), case.wide)
        outs = case.y(axes), case.y("embed", case.wide)
        return case.add(ops.RMSNormGrad(case.x(axes), x, stat, gamma, *outs, add=case.x(axes) if add else None))

    return row


def rotary(axes: str, inverse: bool = False) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        case.sizes["head_dim"] += case.sizes["head_dim"] % 2
        case.sizes["rotary"] = case.sizes["head_dim"]
        table = case.x("seq rotary", angles, case.wide)
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


def attention(qkv: list[str], form: str, causal: bool) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        out, lse = case.y(qkv[0].replace("qkv", "")), case.y("batch heads seq")
        inputs = operands([case.x(axes) for axes in qkv])
        return case.add(ops.Attention(inputs, out, lse, mask=Mask(causal), backend=form))

    return row


def attention_grad(qkv: list[str], form: str, causal: bool, do: str = _HEADS) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        inputs, out = operands([case.x(axes) for axes in qkv]), qkv[0].replace("qkv", "")
        free = ops.Attention(inputs, case.temp(out), case.temp("batch heads seq"), mask=Mask(causal), backend=form)
        o, lse = case.x(out, of(free, 0)), case.x("batch heads seq", of(free, 1), case.wide)
        forward = ops.Attention(inputs, o, lse, mask=Mask(causal), backend=form)
        return case.add(ops.AttentionGrad(forward, case.x(do), [case.y(axes) for axes in qkv]))

    return row


def cross_entropy(axes: str) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        logits = case.x(axes)
        lse = case.y(" ".join(logits.axes[:-1]), case.wide)
        return case.add(ops.CrossEntropy(logits, case.label(logits, ignored=0.3), case.y("one", "fp64"), lse))

    return row


def relative(products: str = "queries keys", axes: str = _SCORES, gradient: bool = False, rows: int = 5) -> Any:
    """Scores with what `products` names, or the gradient; of index `rows` rows at most."""

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


def rising_rows(rows: int) -> Maker:
    """Rows that never fall, the first and the last of several distances."""
    return lambda rng, shape, values: np.sort(np.clip(rng.integers(-1, rows + 1, shape), 0, rows - 1))


def repeat(gradient: bool) -> Callable[[Case], Op]:
    """Two key heads, cut where the heads are; tiles of heads need not fit them: test_attention.py has those."""

    def row(case: Case) -> Op:
        case.whole, case.sizes["kv_heads"], case.sizes["heads"] = {"heads"}, 2, 6
        many, few = "batch heads seq head_dim", "batch kv_heads seq head_dim"
        if gradient:
            return case.add(ops.AttentionRepeatGrad(case.x(many), case.y(few)))
        return case.add(ops.AttentionRepeat(case.x(few), case.y(many)))

    return row


def cross_entropy_fused(axes: str) -> Callable[[Case], None]:
    def row(case: Case) -> None:
        case.whole = {"vocab"}
        forward = cross_entropy(axes)(case)
        logits, labels = forward.inputs
        out = Tensor("logits_grad", logits.axes, logits.shape, logits.dtype, storage=logits)
        grad = case.add(ops.CrossEntropyGrad(logits, labels, forward.outputs[1], out))
        assert isinstance(forward, ops.CrossEntropy) and isinstance(grad, ops.CrossEntropyGrad)
        forward.fused, grad.fused = grad, True

    return row


def cross_entropy_grad(axes: str) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        logits = case.x(axes)
        labels, rows = case.label(logits, ignored=0.3), " ".join(logits.axes[:-1])
        free = ops.CrossEntropy(logits, labels, case.temp("one"), case.temp(rows))
        out = Tensor("logits_grad", logits.axes, logits.shape, logits.dtype, storage=logits)
        return case.add(ops.CrossEntropyGrad(logits, labels, case.x(rows, of(free, 1), case.wide), out))

    return row


def losses(case: Case) -> None:
    """Three that are added: of words, of two classes, of a regression."""
    words, pairs = case.x("batch seq vocab"), case.x("batch classes")
    x, target = case.x("batch embed"), case.x("batch embed")
    case.slots["mse_scale"] = 1 / x.numel
    loss = ops.cross_entropy(case.graph, words, case.label(words, ignored=0.3))
    loss = ops.cross_entropy(case.graph, pairs, case.label(pairs, scale="pairs"), loss=loss, scale="pairs")
    ops.squared_error(case.graph, x, target, loss=loss)


def squared_error(target: str | None = None) -> Callable[[Case], Op]:
    """target: its dtype on GPUs, where it may be wider than that of what it is compared with."""

    def row(case: Case) -> Op:
        x, wanted = case.x("batch seq embed"), case.x("batch seq embed", dtype=case.wide if target else None)
        case.slots["mse_scale"] = 1 / x.numel
        return case.add(ops.SquaredError(x, wanted, case.y("one", "fp64")))

    return row


def squared_error_grad(case: Case) -> Op:
    x, target = case.x("batch seq embed"), case.x("batch seq embed")
    case.slots["mse_scale"] = 1 / x.numel
    return case.add(ops.SquaredErrorGrad(x, target, case.y("batch seq embed")))


def gated(kind: str) -> Callable[[Case], Op]:
    axes = "batch seq ffn"
    return lambda case: case.add(ops.Gated(case.x(axes), case.x(axes), case.y(axes), kind))


def gated_grad(kind: str) -> Callable[[Case], Op]:
    axes = "batch seq ffn"
    return lambda case: case.add(
        ops.GatedGrad(case.x(axes), case.x(axes), case.x(axes), case.y(axes), case.y(axes), kind)
    )


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
    """At the places [..., new] of x, behind its first `lead` axes: all but the last two, if it is not given."""

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


def grad_norm(max_norm: float | None, places: int = 0, skip_above: float | None = None) -> Callable[[Case], Op]:
    """places: where tiles lie, in turn; the last tensor's are not known."""

    def row(case: Case) -> Op:
        grads = [case.x(axes, dtype=case.wide) for axes in ("vocab embed", "embed ffn", "ffn")]
        indices = [(grad.storage.name, index) for grad in grads[:2] for index in itertools.product(range(20), repeat=2)]
        ends = {where: sum(where[1]) % places for where in indices if places}
        outputs = case.y("one", "fp64"), case.y("one", "fp64")
        return case.add(ops.GradNorm(grads, *outputs, max_norm, ends, skip_above=skip_above))

    return row


def with_rest(case: Case, param: Tensor) -> dict[str, Tensor]:
    """The operand that makes a bf16 parameter an fp32 one."""
    case.low_bits[param] = case.x("embed ffn", low_bits, "int16")
    return {"low_bits": case.low_bits[param]}


def negative(rng: np.random.Generator, shape: tuple[int, ...], values: Values) -> Array:
    return -positive(rng, shape, values)


def adamw(split: bool, clip_of: Maker = positive) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        case.options = {"lr": 1e-2, "step": 3}
        case.slots = {"lr": 1e-2, "beta1_correction": 1 - 0.9**3, "beta2_correction": 1 - 0.95**3}
        param = case.x("embed ffn")
        state = [case.x("embed ffn", make, case.wide) for make in (normal, normal, positive)]
        clip = case.x("one", clip_of, "fp64")
        options = with_rest(case, param) if split and param.dtype == "bf16" else {}
        return case.add(ops.AdamW(param, *state, clip, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, **options))

    return row


def sgd(momentum: float, split: bool = False, clip_of: Maker = positive) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        case.options, case.slots = {"lr": 1e-2}, {"lr": 1e-2}
        param, grad = case.x("embed ffn"), case.x("embed ffn", dtype=case.wide)
        m = case.x("embed ffn", dtype=case.wide) if momentum else None
        clip = case.x("one", clip_of, "fp64")
        options = with_rest(case, param) if split and param.dtype == "bf16" else {}
        return case.add(ops.SGD(param, grad, m, clip, momentum=momentum, weight_decay=0.1, **options))

    return row


ROWS |= {
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
    **{f"Activation {kind}": activation(kind) for kind in ACTIVATIONS},
    **{f"ActivationGrad {kind}": activation_grad(kind) for kind in ACTIVATIONS},
    **{f"Gated {kind}": gated(kind) for kind in ("silu", "gelu_new")},
    **{f"GatedGrad {kind}": gated_grad(kind) for kind in ("silu", "gelu_new")},
    **{f"Select {axis} {at}": select(axis, at) for axis, at in _POSITIONS},
    **{f"SelectGrad {axis} {at}": select_grad(axis, at) for axis, at in _POSITIONS},
    **{f"Activation {kind} of large values": activation(kind, large) for kind in ACTIVATIONS},
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
    "Rotary": rotary("batch seq heads head_dim"),
    "Rotary inverse": rotary("batch seq heads head_dim", inverse=True),
    "Rotary of heads": rotary(_HEADS),
    "Rotary columns first": rotary("heads head_dim batch seq"),
    "Rotary of positions last": rotary("head_dim seq", inverse=True),
    "CrossEntropy": cross_entropy("batch seq vocab"),
    "CrossEntropy fused": cross_entropy_fused("batch seq vocab"),
    "CrossEntropyGrad": cross_entropy_grad("batch seq vocab"),
    "CrossEntropy of sequences": cross_entropy("batch classes"),
    "CrossEntropy of sequences fused": cross_entropy_fused("batch classes"),
    "CrossEntropy of an axis that is cut": cross_entropy("seq embed"),
    "CrossEntropyGrad of an axis that is cut": cross_entropy_grad("batch embed"),
    "SquaredError": squared_error(),
    "SquaredError of a wide target": squared_error("wide"),
    "SquaredErrorGrad": squared_error_grad,
    "Several losses": losses,
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
    "Gather": gather("batch seq embed", "heads", gradient=False),
    "GatherGrad": gather("batch seq embed", "heads", gradient=True),
    "Gather of one sequence": gather("seq embed", "vocab", gradient=False),
    "GatherGrad of one sequence": gather("seq embed", "vocab", gradient=True),
    "Gather several axes": gather("batch seq heads head_dim", "ffn one", gradient=False, lead=1),
    "GatherGrad several axes": gather("batch seq heads head_dim", "ffn one", gradient=True, lead=1),
    "Gather of several axes": gather("batch ffn heads embed", "seq", gradient=False, axes=2, lead=1),
    "GatherGrad of several axes": gather("batch ffn heads embed", "seq", gradient=True, axes=2, lead=1),
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
    "GradNorm": grad_norm(None),
    "GradNorm clip": grad_norm(1.5),
    "GradNorm under the limit": grad_norm(1e6),
    "GradNorm in several places": grad_norm(1.5, places=3),
    "GradNorm skips": grad_norm(1.5, skip_above=1e-3),
    "GradNorm does not skip": grad_norm(1.5, skip_above=1e6),
    "AdamW": adamw(split=False),
    "AdamW skipped": adamw(split=True, clip_of=negative),
    "SGD": sgd(0.0),
    "SGD momentum": sgd(0.8),
    "SGD momentum skipped": sgd(0.8, split=True, clip_of=negative),
}
ROWS |= GENERATED
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
