"""Gradient norm, clipping and the optimizers AdamW and SGD, tile by tile, in place."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from numbers import Real
from typing import ClassVar

import numpy as np

from nntile_py.tiles import RW, R, Slot, TaskArgs, Tile, W

from .op import NORMALIZATION, Array, Lowering, Op, Tensor

FAN_IN = 8  # partial sums added by one task
LARGEST = float(np.finfo(np.float32).max)
INVERSE_SCALE = "inverse_loss_scale"
Ends = Mapping[Hashable, int]
Node = Tile | Sequence["Node"]  # of a tree of sums: what is squared, or sums


class ClipArgs(TaskArgs):
    max_norm: float  # 0: none
    skip_above: float  # 0: none


class ScaledClipArgs(TaskArgs):
    clip: ClipArgs
    inverse: Slot  # 1 / what the loss is scaled by


class AdamWArgs(TaskArgs):
    lr: Slot
    beta1_correction: Slot  # 1 - beta1^t
    beta2_correction: Slot  # 1 - beta2^t
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class SGDArgs(TaskArgs):
    lr: Slot
    momentum: float
    weight_decay: float


class GradNorm(Op):
    """norm = sqrt(sum of squares of all gradients), fp64 [1]; clip = min(1, max_norm / (norm + 1e-6)), fp64 [1].

    As torch.nn.utils.clip_grad_norm_; without max_norm clip is 1. Where norm is above `skip_above`, or no number, clip
    is -1: the optimizers then leave everything as it is. Sums go up a tree of fixed shape: the result does
    not depend on the order in which tasks run. What `ends` names alike, by the key of a gradient's tile, is
    added first: tiles that lie on the same device. With `scaled` the gradients are those of a loss that was multiplied
    by 1 / `inverse_loss_scale`, a slot: norm is that of the loss's own, clip is multiplied by the slot, and a norm that
    is no finite number makes clip -1 (Micikevicius et al. 2018, 3.2).
    """

    category = NORMALIZATION
    independent = True

    def __init__(
        self, grads: Sequence[Tensor], norm: Tensor, clip: Tensor, max_norm: float | None, ends: Ends | None = None,
        *, skip_above: float | None = None, scaled: bool = False,
    ) -> None:  # fmt: skip
        for key, value in (("clip_grad_norm", max_norm), ("skip_above_norm", skip_above)):
            if value is not None and (not isinstance(value, Real) or not 0 < float(value) < math.inf):
                raise ValueError(f"{key}: {value} is not allowed; use a positive number, or none")
        super().__init__(grads, [norm, clip])
        self.max_norm, self.scaled = max_norm, scaled
        self.skip_above = (skip_above or LARGEST) if scaled else skip_above
        self.ends = ends or {}

    def flop(self) -> float:
        return 2.0 * sum(t.numel for t in self.inputs)

    def lower(self, low: Lowering) -> None:
        near: dict[int, list[Tile]] = {}
        for grad in self.inputs:
            for tile in (low.tile(grad, index) for index in low.indices(grad)):
                near.setdefault(self.ends.get(tile.key, 0), []).append(tile)
        tops = [_nested(tiles, 1)[0] for _, tiles in sorted(near.items())]
        numbers = itertools.count()
        sums = [self._sum(low, node, numbers) for node in _nested(tops, FAN_IN)]
        norm, clip = (low.tile(t, {"one": 0}) for t in self.outputs)
        accesses, args = [W(norm), W(clip), *map(R, sums)], ClipArgs(self.max_norm or 0.0, self.skip_above or 0.0)
        if self.scaled:
            low.emit("clip_scaled", accesses, ScaledClipArgs(args, Slot(INVERSE_SCALE)))
        else:
            low.emit("clip", accesses, args)

    def _sum(self, low: Lowering, node: Node, numbers: Iterator[int]) -> Tile:
        """What all squares below a node add up to; first of the gradients that a backward pass makes first."""
        below = [] if isinstance(node, Tile) else [self._sum(low, one, numbers) for one in reversed(node)]
        total = Tile(f"{self.name}.sum", (next(numbers),), (1,), "fp64")
        if isinstance(node, Tile):
            low.emit("sum_squares", [W(total), R(node)])
        else:
            low.emit("add_scalars", [W(total), *map(R, reversed(below))])
        return total

    def reference(self, *inputs: Array, inverse: float = 1.0) -> tuple[Array, ...]:
        norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in inputs)) * inverse
        clip = inverse * (1.0 if self.max_norm is None else min(1.0, self.max_norm / (norm + 1e-6)))
        if self.skip_above is not None and not norm <= self.skip_above:
            clip = -1.0
        return np.array([norm]), np.array([clip])


def _nested(nodes: Sequence[Node], most: int) -> Sequence[Node]:
    """At most so many nodes, each of FAN_IN at most."""
    while len(nodes) > most:
        nodes = [nodes[first : first + FAN_IN] for first in range(0, len(nodes), FAN_IN)]
    return nodes


def split(value: Array, dtype: str = "bf16") -> tuple[Array, Array]:
    """fp32 values as a parameter of this dtype and its `master`. Of bf16: rounded, halves away from zero, and what that
    left, int16, the lower half of their bits. Of fp16, whose bits are no part of fp32's: rounded, and the values."""
    if dtype == "fp16":
        value = value.astype(np.float32)
        with np.errstate(over="ignore"):  # as on a GPU
            return value.astype(np.float16), value
    value = np.where(np.isnan(value), np.nan, value)  # some NaN would be rounded to a number
    bits = value.astype(np.float32).view(np.int32)
    low_bits = bits.astype(np.int16)
    return (bits - low_bits).view(np.float32), low_bits


def joined(param: Array, master: Array) -> Array:
    """The fp32 values of which `split` made these, to the bit."""
    if np.asarray(master).dtype.kind == "f":
        return np.asarray(master, np.float32)
    return (np.asarray(param, np.float32).view(np.int32) + np.asarray(master, np.int32)).view(np.float32)


class AdamW(Op):
    """One step of AdamW (Loshchilov and Hutter 2019, Alg. 2, as torch.optim.AdamW), param, m and v in place:

    g = grad clip; p -= lr weight_decay p; m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2;
    p -= lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps).
    All stay as they are where clip is below 0 (GradNorm). Slots lr, beta1_correction = 1 - b1^t and beta2_correction =
    1 - b2^t change every step. With `master`, see `split`, param is bf16 or fp16 and p the fp32 value of both.
    """

    colours: ClassVar = {"update": "#f0e442"}

    def __init__(
        self,
        param: Tensor,
        grad: Tensor,
        m: Tensor,
        v: Tensor,
        clip: Tensor,
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        master: Tensor | None = None,
    ) -> None:
        self.master = [master] if master else []
        super().__init__([param, grad, m, v, clip, *self.master], _in_place([param, m, v, *self.master]))
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay

    def flop(self) -> float:
        return 14.0 * self.output.numel

    def lower(self, low: Lowering) -> None:
        param, grad, m, v, clip = self.inputs[:5]
        slots = Slot("lr"), Slot("beta1_correction"), Slot("beta2_correction")
        args = AdamWArgs(*slots, *self.betas, self.eps, self.weight_decay)
        for index in low.indices(param):
            state = [RW(low.tile(t, index)) for t in (param, m, v)]
            master = [RW(low.tile(t, index)) for t in self.master]
            accesses = [*state, R(low.tile(grad, index)), R(low.tile(clip, {"one": 0})), *master]
            low.emit("adamw", accesses, args)

    def reference(self, *inputs: Array, lr: float = 1e-3, step: int = 1) -> tuple[Array, ...]:
        p, g, m, v, clip = inputs[:5]
        if clip[0] < 0:
            return p, m, v, *inputs[5:]
        p = joined(p, inputs[5]).astype(np.float64) if self.master else p
        b1, b2 = self.betas
        g = g * clip[0]
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        p = p * (1 - lr * self.weight_decay)
        p = p - lr / (1 - b1**step) * m / (np.sqrt(v) / np.sqrt(1 - b2**step) + self.eps)
        p, *master = split(p, self.output.dtype) if self.master else [p]
        return p, m, v, *master


class SGD(Op):
    """g = grad clip + weight_decay p; m = momentum m + g; p -= lr m, in place (torch.optim.SGD, dampening 0).

    All stay as they are where clip is below 0 (GradNorm). With `master`, see `split`, param is bf16 or fp16 and p the
    fp32 value of both.
    """

    def __init__(
        self,
        param: Tensor,
        grad: Tensor,
        m: Tensor | None,
        clip: Tensor,
        *,
        momentum: float,
        weight_decay: float,
        master: Tensor | None = None,
    ) -> None:
        self.m, self.master = [m] if m else [], [master] if master else []
        state = [*self.m, *self.master]
        super().__init__([param, grad, clip, *state], _in_place([param, *state]))
        self.momentum, self.weight_decay = momentum, weight_decay

    def flop(self) -> float:
        return 5.0 * self.output.numel

    def lower(self, low: Lowering) -> None:
        param, grad, clip = self.inputs[:3]
        args = SGDArgs(Slot("lr"), self.momentum, self.weight_decay)
        for index in low.indices(param):
            state = [RW(low.tile(t, index)) for t in (param, *self.inputs[3:])]
            accesses = [R(low.tile(grad, index)), R(low.tile(clip, {"one": 0})), *state]
            low.emit("sgd", accesses, args)

    def reference(self, *inputs: Array, lr: float = 1e-3) -> tuple[Array, ...]:
        p, g, clip = inputs[:3]
        if clip[0] < 0:
            return p, *inputs[3:]
        p = joined(p, inputs[-1]).astype(np.float64) if self.master else p
        m = g * clip[0] + self.weight_decay * p
        if self.m:
            m = self.momentum * inputs[3] + m
        p = p - lr * m
        p, *master = split(p, self.output.dtype) if self.master else [p]
        return p, *([m] if self.m else []), *master


def _in_place(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [Tensor(f"{t.name}.new", t.axes, t.shape, t.dtype, storage=t) for t in tensors]
