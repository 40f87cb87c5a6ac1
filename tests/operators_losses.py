"""Rows of losses and of weight updates: see operators.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from nntile_py import tasks as ops
from nntile_py.tasks import Op, Tensor
from nntile_py.tasks.cross_entropy import IGNORED
from nntile_py.tasks.optimizer import MASTERS
from nntile_py.testing import Array, Case, Maker, Values, large, low_bits, normal, of, positive


def cross_entropy(axes: str) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        logits = case.x(axes)
        lse = case.y(" ".join(logits.axes[:-1]), case.sum_dtype)
        return case.add(ops.CrossEntropy(logits, case.label(logits, ignored=0.3), case.y("one", "fp64"), lse))

    return row


def token_scores(axes: str) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        logits = case.x(axes)
        rows = " ".join(logits.axes[:-1])
        state, picked = case.y(f"{rows} stat", case.sum_dtype), case.y(rows, case.sum_dtype)
        state.monoid = "softmax"
        return case.add(ops.TokenScores(logits, case.label(logits, ignored=0.3), state, picked))

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
        return case.add(ops.CrossEntropyGrad(logits, labels, case.x(rows, of(free, 1), case.sum_dtype), out))

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
    """target: dtype of the target, which on GPUs may be wider than the dtype of x."""

    def row(case: Case) -> Op:
        x, wanted = case.x("batch seq embed"), case.x("batch seq embed", dtype=case.sum_dtype if target else None)
        case.slots["mse_scale"] = 1 / x.numel
        return case.add(ops.SquaredError(x, wanted, case.y("one", "fp64")))

    return row


def squared_error_grad(case: Case) -> Op:
    x, target = case.x("batch seq embed"), case.x("batch seq embed")
    case.slots["mse_scale"] = 1 / x.numel
    return case.add(ops.SquaredErrorGrad(x, target, case.y("batch seq embed")))


def shares(rng: np.random.Generator, shape: tuple[int, ...], values: Values) -> Array:
    """Return targets of a binary cross-entropy: 0, 1, numbers between them, and -100, but not as the first."""
    result = np.where(rng.random(shape) < 0.5, rng.random(shape), rng.integers(0, 2, shape))
    result[rng.random(shape) < 0.2] = IGNORED
    result.flat[0] = 1.0
    return result


def binary_cross_entropy(make: Maker = normal) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        x, target = case.x("batch seq embed", make), case.x("batch seq embed", shares, case.sum_dtype)
        case.labels["loss_scale"] = target
        return case.add(ops.BinaryCrossEntropy(x, target, case.y("one", "fp64")))

    return row


def binary_cross_entropy_grad(make: Maker = normal) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        x, target = case.x("batch seq embed", make), case.x("batch seq embed", shares)
        case.labels["loss_scale"] = target
        return case.add(ops.BinaryCrossEntropyGrad(x, target, case.y("batch seq embed")))

    return row


def grad_norm(
    max_norm: float | None, places: int = 0, skip_above: float | None = None, scale: float | None = None
) -> Callable[[Case], Op]:
    """places: where tiles lie, in turn; the last tensor's are not known. scale: of the loss."""

    def row(case: Case) -> Op:
        grads = [case.x(axes, dtype=case.sum_dtype) for axes in ("vocab embed", "embed ffn", "ffn")]
        indices = [(grad.storage.name, index) for grad in grads[:2] for index in itertools.product(range(20), repeat=2)]
        ends = {where: sum(where[1]) % places for where in indices if places}
        outputs = case.y("one", "fp64"), case.y("one", "fp64")
        if scale:
            case.slots["inverse_loss_scale"] = case.options["inverse"] = 1 / scale
        return case.add(ops.GradNorm(grads, *outputs, max_norm, ends, skip_above=skip_above, scaled=bool(scale)))

    return row


def with_master(case: Case, param: Tensor) -> dict[str, Tensor]:
    """Return the state that completes a bf16 or fp16 parameter to its fp32 master weight."""
    if param.dtype not in MASTERS:
        return {}
    case.masters[param] = case.x(
        " ".join(param.axes), low_bits if param.dtype == "bf16" else normal, MASTERS[param.dtype][1]
    )
    return {"master": case.masters[param]}


def negative(rng: np.random.Generator, shape: tuple[int, ...], values: Values) -> Array:
    return -positive(rng, shape, values)


def adamw(split: bool, clip_of: Maker = positive) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        case.options = {"lr": 1e-2, "step": 3}
        case.slots = {"lr": 1e-2, "beta1_correction": 1 - 0.9**3, "beta2_correction": 1 - 0.95**3}
        param = case.x("embed ffn")
        state = [case.x("embed ffn", make, case.sum_dtype) for make in (normal, normal, positive)]
        clip = case.x("one", clip_of, "fp64")
        options = with_master(case, param) if split else {}
        optimizer = ops.AdamW(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        return case.add(ops.Update(optimizer, param, state[0], state[1:], clip, **options))

    return row


def sgd(momentum: float, split: bool = False, clip_of: Maker = positive) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        case.options, case.slots = {"lr": 1e-2}, {"lr": 1e-2}
        param, grad = case.x("embed ffn"), case.x("embed ffn", dtype=case.sum_dtype)
        states = [case.x("embed ffn", dtype=case.sum_dtype)] if momentum else []
        clip = case.x("one", clip_of, "fp64")
        options = with_master(case, param) if split else {}
        optimizer = ops.SGD(momentum=momentum, weight_decay=0.1)
        return case.add(ops.Update(optimizer, param, grad, states, clip, **options))

    return row


def lion(split: bool = False, clip_of: Maker = positive) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        case.options, case.slots = {"lr": 1e-2}, {"lr*0.5": 5e-3}
        param, grad, m = case.x("embed ffn"), *(case.x("embed ffn", dtype=case.sum_dtype) for _ in range(2))
        clip = case.x("one", clip_of, "fp64")
        options = with_master(case, param) if split else {}
        optimizer = ops.Lion(betas=(0.8, 0.95), weight_decay=0.1)
        return case.add(ops.Update(optimizer, param, grad, [m], clip, lr_scale=0.5, **options))

    return row


def muon_momentum(nesterov: bool, clip_of: Maker = positive) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        grad, m = case.x("embed ffn"), case.x("embed ffn", dtype=case.sum_dtype)
        clip, u = case.x("one", clip_of, "fp64"), case.y("embed ffn", case.sum_dtype)
        return case.add(ops.MuonMomentum(grad, m, clip, u, 0.9, nesterov))

    return row


# {axes of a parameter: its axes as matrices}
MATRICES = {
    "embed ffn": ops.MatrixAxes((), ("embed",), ("ffn",)),
    "heads head_dim embed": ops.MatrixAxes((), ("embed",), ("heads", "head_dim")),
    "embed qkv heads head_dim": ops.MatrixAxes(("qkv",), ("embed",), ("heads", "head_dim")),
}


def stack_of(case: Case, axes: str) -> str:
    """Return the axes of the stack of matrices, whose sizes the case then knows."""
    param = Tensor("p", axes.split(), [case.sizes[axis] for axis in axes.split()], "fp32")
    case.sizes |= dict(zip(("muon_matrices", "muon_rows", "muon_columns"), MATRICES[axes].shape(param), strict=True))
    return "muon_matrices muon_rows muon_columns"


def muon_gather(axes: str) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        stack = stack_of(case, axes)
        return case.add(ops.MuonGather(case.x(axes, dtype=case.sum_dtype), case.y(stack), MATRICES[axes], 1e-7))

    return row


def muon_update(axes: str, split: bool = False, clip_of: Maker = positive) -> Callable[[Case], Op]:
    def row(case: Case) -> Op:
        case.options, case.slots = {"lr": 1e-2}, {"lr*2": 2e-2}
        param, x, clip = case.x(axes), case.x(stack_of(case, axes)), case.x("one", clip_of, "fp64")
        options = with_master(case, param) if split else {}
        update = ops.MuonUpdate(param, x, clip, MATRICES[axes], 3.0, weight_decay=0.1, lr_scale=2, **options)
        return case.add(update)

    return row


ROWS: dict[str, Callable[[Case], Any]] = {
    "CrossEntropy": cross_entropy("batch seq vocab"),
    "CrossEntropy fused": cross_entropy_fused("batch seq vocab"),
    "CrossEntropyGrad": cross_entropy_grad("batch seq vocab"),
    "TokenScores": token_scores("batch seq vocab"),
    "TokenScores of an axis that is cut": token_scores("seq embed"),
    "CrossEntropy of sequences": cross_entropy("batch classes"),
    "CrossEntropy of sequences fused": cross_entropy_fused("batch classes"),
    "CrossEntropy of an axis that is cut": cross_entropy("seq embed"),
    "CrossEntropyGrad of an axis that is cut": cross_entropy_grad("batch embed"),
    "SquaredError": squared_error(),
    "SquaredError of a wide target": squared_error("wide"),
    "SquaredErrorGrad": squared_error_grad,
    "BinaryCrossEntropy": binary_cross_entropy(),
    "BinaryCrossEntropy of large logits": binary_cross_entropy(large),
    "BinaryCrossEntropyGrad": binary_cross_entropy_grad(),
    "BinaryCrossEntropyGrad of large logits": binary_cross_entropy_grad(large),
    "Several losses": losses,
    "GradNorm": grad_norm(None),
    "GradNorm clip": grad_norm(1.5),
    "GradNorm under the limit": grad_norm(1e6),
    "GradNorm in several places": grad_norm(1.5, places=3),
    "GradNorm skips": grad_norm(1.5, skip_above=1e-3),
    "GradNorm does not skip": grad_norm(1.5, skip_above=1e6),
    "GradNorm scaled": grad_norm(1e-2, scale=1024.0),
    "GradNorm scaled skips": grad_norm(1.5, skip_above=1e-3, scale=1024.0),
    "AdamW": adamw(split=False),
    "AdamW skipped": adamw(split=True, clip_of=negative),
    "SGD": sgd(0.0),
    "SGD momentum": sgd(0.8),
    "SGD momentum skipped": sgd(0.8, split=True, clip_of=negative),
    "Lion": lion(),
    "Lion skipped": lion(split=True, clip_of=negative),
    "MuonMomentum": muon_momentum(nesterov=False),
    "MuonMomentum Nesterov": muon_momentum(nesterov=True),
    "MuonMomentum skipped": muon_momentum(nesterov=True, clip_of=negative),
    "MuonGather": muon_gather("embed ffn"),
    "MuonGather of heads": muon_gather("heads head_dim embed"),
    "MuonGather of several matrices": muon_gather("embed qkv heads head_dim"),
    "MuonUpdate": muon_update("embed ffn"),
    "MuonUpdate of heads": muon_update("heads head_dim embed"),
    "MuonUpdate of several matrices": muon_update("embed qkv heads head_dim"),
    "MuonUpdate skipped": muon_update("embed ffn", split=True, clip_of=negative),
}
