"""Muon: updates of matrices by orthogonalised momentum; AdamW updates the other parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import model_validator

from nntile_py.errors import ConfigError
from nntile_py.schema import BelowOne, Betas, Count, Names, NonNegative, Positive, Switch
from nntile_py.tiles import RW, R, Slot, TaskArgs, W

from .adamw import AdamW
from .contract import Contract
from .matrix_axes import MatrixAxes
from .op import NORMALIZATION, Array, GraphLike, Lowering, Op, Tensor
from .optimizer import Optimizer, UpdateOp, in_place, joined, split
from .param_group import matches

NS = 3.4445, -4.7750, 2.0315  # coefficients a, b, c of the iteration (Jordan et al. 2024)


class MuonMomentumArgs(TaskArgs):
    momentum: float
    nesterov: bool


class MuonMomentum(Op):
    """m = b m + (1 - b) g; u = b m + (1 - b) g with nesterov, else m. g is the gradient times clip.

    If clip is below 0 (see GradNorm), m does not change and u is 0.
    """

    def __init__(self, grad: Tensor, m: Tensor, clip: Tensor, out: Tensor, momentum: float, nesterov: bool) -> None:
        super().__init__([grad, m, clip], [*in_place([m]), out])
        self.momentum, self.nesterov = momentum, nesterov

    def flop(self) -> float:
        return 7.0 * self.output.numel

    def lower(self, lowering: Lowering) -> None:
        (grad, m, clip), out = self.inputs, self.outputs[1]
        for index in lowering.indices(m):
            tiles = [RW(lowering.tile(m, index)), W(lowering.tile(out, index)), R(lowering.tile(grad, index))]
            args = MuonMomentumArgs(self.momentum, self.nesterov)
            lowering.emit("muon_momentum", [*tiles, R(lowering.tile(clip, {"one": 0}))], args)

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        grad, m, clip = inputs
        if clip[0] < 0:
            return m, np.zeros_like(m)
        b, g = self.momentum, grad * clip[0]
        m = b * m + (1 - b) * g
        return m, b * m + (1 - b) * g if self.nesterov else m


class MuonGatherArgs(TaskArgs):
    matrices: int  # number of matrices in the stack
    eps: float
    places: tuple[int, ...]  # stride of each axis in the stack of matrices, then each tile's position in the stack


class MuonGather(Op):
    """x: all matrices of u in one tile, each divided by its Frobenius norm, or by eps if the norm is smaller."""

    category = NORMALIZATION

    def __init__(self, u: Tensor, out: Tensor, axes: MatrixAxes, eps: float) -> None:
        super().__init__([u], [out])
        self.axes, self.eps = axes, eps

    def flop(self) -> float:
        return 3.0 * self.output.numel

    def lower(self, lowering: Lowering) -> None:
        u = self.inputs[0]
        indices = [*lowering.indices(u)]
        places = *self.axes.strides(u), *(self.axes.place(lowering, u, index) for index in indices)
        args = MuonGatherArgs(self.axes.shape(u)[0], self.eps, places)
        whole = lowering.tile(self.output, dict.fromkeys(self.output.axes, 0))
        lowering.emit("muon_gather", [W(whole), *(R(lowering.tile(u, index)) for index in indices)], args)

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        stack = self.axes.stacked(inputs[0], self.inputs[0]).astype(np.float64)
        norms = np.sqrt((stack**2).sum((1, 2), keepdims=True))
        return ((stack / np.maximum(norms, self.eps)).reshape(self.output.shape),)


class MuonUpdateArgs(TaskArgs):
    lr: Slot
    weight_decay: float
    factor: float
    places: tuple[int, ...]  # stride of each axis in the stack of matrices, then the tile's position in it


class MuonUpdate(UpdateOp):
    """p = p (1 - lr weight_decay) - lr factor x, for a stack of whole matrices x. Clip and master: see Update."""

    def __init__(
        self, param: Tensor, x: Tensor, clip: Tensor, axes: MatrixAxes, factor: float,
        *, weight_decay: float = 0.0, lr_scale: float = 1.0, master: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.axes, self.factor, self.lr_scale, self.weight_decay = axes, factor, lr_scale, weight_decay
        self.master = [master] if master else []
        super().__init__([param, x, clip, *self.master], in_place([param, *self.master]))

    def flop(self) -> float:
        return 4.0 * self.output.numel

    def lower(self, lowering: Lowering) -> None:
        param, x, clip = self.inputs[:3]
        read = [R(lowering.tile(x, dict.fromkeys(x.axes, 0))), R(lowering.tile(clip, {"one": 0}))]
        for index in lowering.indices(param):
            places = *self.axes.strides(param), self.axes.place(lowering, param, index)
            args = MuonUpdateArgs(self.lr_slot, self.weight_decay, self.factor, places)
            master = [RW(lowering.tile(t, index)) for t in self.master]
            lowering.emit("muon_update", [RW(lowering.tile(param, index)), *read, *master], args)

    def reference(self, *inputs: Array, lr: float = 1e-3) -> tuple[Array, ...]:
        param, x, clip, *master = inputs
        if clip[0] < 0:
            return param, *master
        lr *= self.lr_scale
        whole = joined(param, master[0]).astype(np.float64) if master else param
        step = self.axes.unstacked(x.reshape(self.axes.shape(self.output)), self.output)
        whole = whole * (1 - lr * self.weight_decay) - lr * self.factor * step
        return split(whole, self.output.dtype) if master else (whole,)


class Muon(Optimizer):
    """Muon as torch.optim.Muon (Jordan et al. 2024) for hidden matrices, and AdamW for all other weights.

    In each step: m = b m + (1 - b) g; u = b m + (1 - b) g, or m without `nesterov`; p -= lr weight_decay p;
    p -= lr factor NS(u). NS approximates the nearest matrix with orthonormal rows or columns: it divides u by its
    Frobenius norm, then repeats x = a x + (b x x^T + c (x x^T)^2) x `ns_steps` times.

    Hidden matrices are the weights with two axes in the checkpoint, except parameters with one of the axes TABLES:
    tables of embeddings, and output layers. If one weight of the checkpoint holds queries, keys and values, it counts
    as three matrices.

    NS needs whole matrices. The tiles of u are gathered into one tile for each parameter, and the products of NS are
    tasks on this tile. So the result does not depend on the tiling, and different parameters run in parallel. x has the
    parameter's dtype if the parameter is fp32 or fp64, else bf16.
    """

    weight_decay: NonNegative = 0.1
    """Weight decay, decoupled from the gradient, of all weights."""
    momentum: BelowOne = 0.95
    """Decay rate of the average of the gradient of a matrix."""
    nesterov: Switch = True
    """Nesterov momentum."""
    ns_steps: Count = 5
    """Steps of the Newton-Schulz iteration that makes the momentum orthogonal."""
    eps: Positive = 1e-7
    """Smallest norm by which the momentum is divided."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"
    """Factor of the learning rate of a matrix: `original` is sqrt(max(1, rows / columns)); `match_rms_adamw` is
    0.2 sqrt(max(rows, columns)), so that the learning rates of AdamW fit."""
    adamw_lr: NonNegative | None = None
    """Learning rate of AdamW for the other weights; null: `lr`."""
    adamw_match: Names = ()
    """Patterns of names of matrices that AdamW updates too, as in `groups`."""
    betas: Betas = (0.9, 0.999)
    """Decay rates of AdamW for the other weights."""

    TABLES: ClassVar = frozenset({"vocab", "position", "kind", "bucket", "classes"})
    colour: ClassVar = "#c79a00"

    @model_validator(mode="after")
    def _rate_of_adamw(self) -> Self:
        if self.adamw_lr and not self.lr:
            raise ConfigError(f"optimizer.adamw_lr: got {self.adamw_lr}; allowed with optimizer.lr = 0: 0 or null")
        return self

    @property
    def states(self) -> tuple[str, ...]:
        return ("m",)

    def slots(self, step: int) -> dict[str, float]:
        return self._adamw.slots(step)

    @property
    def patterns(self) -> dict[str, Sequence[str]]:
        return {"adamw_match": self.adamw_match}

    def of_param(self, weights: Sequence[str], param: Tensor, axes: MatrixAxes | None) -> tuple[Optimizer, float]:
        hidden = axes and self.TABLES.isdisjoint(param.axes)
        if hidden and not any(matches(weight, self.adamw_match) for weight in weights):
            return self, 1.0
        scale = self.adamw_lr / self.lr if self.adamw_lr is not None and self.lr else 1.0
        return self._adamw, scale

    @property
    def _adamw(self) -> AdamW:
        return AdamW(lr=self.lr, betas=self.betas, weight_decay=self.weight_decay)

    def adjustment(self, rows: int, columns: int) -> float:
        """Return the factor of the learning rate of a matrix."""
        if self.adjust_lr_fn == "original":
            return math.sqrt(max(1, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))

    def add_update(
        self, g: GraphLike, param: Tensor, grad: Tensor, states: Sequence[Tensor], clip: Tensor,
        axes: MatrixAxes | None, **how: Any,
    ) -> None:  # fmt: skip
        assert axes
        (m,), shape = states, axes.shape(param)
        u = g.temp("u", param.axes, param.shape, m.dtype)
        g.add(MuonMomentum(grad, m, clip, u, self.momentum, self.nesterov))
        names = ("muon_matrices", "muon_rows", "muon_columns")[shape[0] == 1 :]
        dtype = param.dtype if param.dtype in ("fp32", "fp64") else "bf16"
        x = g.temp("x", names, shape[3 - len(names) :], dtype)
        g.add(MuonGather(u, x, axes, self.eps))
        x, factor = newton_schulz(g, x, self.ns_steps)
        g.add(MuonUpdate(param, x, clip, axes, factor * self.adjustment(*shape[1:]), **how))

    def reference(
        self, p: Array, grad: Array, states: Sequence[Array], weight_decay: float, lr: float, step: int
    ) -> tuple[Array, ...]:
        b, (m,), (rows, columns) = self.momentum, states, p.shape
        m = b * m + (1 - b) * grad
        x = b * m + (1 - b) * grad if self.nesterov else m
        x = x / max(float(np.linalg.norm(x)), self.eps)
        for _ in range(self.ns_steps):
            gram = x @ x.T
            x = NS[0] * x + (NS[1] * gram + NS[2] * gram @ gram) @ x
        return p * (1 - lr * weight_decay) - lr * self.adjustment(rows, columns) * x, m


def newton_schulz(g: GraphLike, x: Tensor, steps: int) -> tuple[Tensor, float]:
    """Add the iteration x = a x + (b x x^T + c (x x^T)^2) x (Jordan et al. 2024) to a graph.

    Contract cannot multiply its residual by a. So each step is divided by a: z is the result without the factors a of
    all steps, and `factor` is their product. The Gram matrix is computed with the factor b.

    Returns:
        (z, factor). The result of the iteration is factor z.
    """
    a, b, c = NS
    rows, columns = x.axes[-2:]
    side = rows if x.size(rows) <= x.size(columns) else columns  # axis of the smaller Gram matrix
    size, other, third = x.size(side), f"{side}_other", f"{side}_third"
    batch, sizes = x.axes[:-2], x.shape[:-2]

    def view(tensor: Tensor, *axes: str) -> Tensor:
        return Tensor(tensor.name, [*batch, *axes], tensor.shape, tensor.dtype, storage=tensor)

    factor = 1.0
    for step in range(steps):
        with g.scope(f"step{step}"):
            turned = view(x, *(other if axis == side else axis for axis in (rows, columns)))
            square = [*batch, side, other], [*sizes, size, size], x.dtype
            gram, sums = (g.temp(name, *square) for name in ("gram", "sum"))
            g.add(Contract(x, turned, gram, scale=b * factor**2))
            g.add(Contract(view(gram, side, third), view(gram, third, other), sums, scale=c / b**2, residual=gram))
            new = g.temp("x", x.axes, x.shape, x.dtype)
            g.add(Contract(sums, turned, new, scale=1 / a, residual=x))
        x, factor = new, factor * a
    return x, factor
