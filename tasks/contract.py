"""Contraction of two tensors over shared axes: every matrix product, with or without fused operations (FusedLinear)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from nntile_py.tiles import ACC, RW, Access, R, TaskArgs, Tile, W
from nntile_py.tiles.dtypes import is_scaled

from .activation import ACTIVATIONS, activate, activate_flop, derivative, derivative_flop
from .band import ALL
from .elementwise import bias_add
from .op import CONTRACTION, Array, GraphLike, Index, Lowering, Op, Tensor, accumulation_dtype, permutation


class EpilogueArgs(TaskArgs):
    """The operations fused into a product. They decide which tiles a task has besides a, b and the output."""

    bias_axes: int  # bit mask of the bias' axes among the output's axes; -1: no bias
    residual: bool
    activation: int  # position in ACTIVATIONS; -1: none
    keep_pre: bool  # also store the value before the activation
    aux: bool  # multiply by the activation's derivative at aux
    colsum: int  # number of the input, 0 or 1, whose sum over K is stored too; -1: none

    @property
    def title(self) -> str:
        """The fused operations of a task, such as ` + bias + gelu`."""
        name = ACTIVATIONS[self.activation] if self.activation >= 0 else ""
        parts = {"bias": self.bias_axes >= 0, "residual": self.residual, f"{name}'": self.aux}
        parts |= {name: self.activation >= 0 and not self.aux, "bias gradient": self.colsum >= 0}
        return "".join(f" + {part}" for part, there in parts.items() if there)


class PlanArgs(TaskArgs):
    """How the tensors are seen as matrices: batch axes, row axes (m), column axes (n), summed axes (k)."""

    swap: bool  # exchange a and b, as the output has the columns before the rows
    batch: int  # number of batch axes; m, n, k: numbers of the other axes
    m: int
    n: int
    k: int
    # Permutations of axes: of a to (batch, m, k), of b to (batch, k, n), of the result to (batch, m, n). The result is
    # the output tile, or a partial-sum tile if axes are reordered. If the task copies the partial-sum tile to the
    # output tile, also the permutation for this copy.
    orders: tuple[int, ...]


class ContractArgs(TaskArgs):
    fast: bool  # for 8-bit operands: partial sums may have fewer bits than fp32
    epilogue: EpilogueArgs
    plan: PlanArgs
    scale: float

    @property
    def title(self) -> str:
        """The fused operations of a task; `reshape`: the output's axes are not in the order batch, m, n."""
        plan = self.plan
        out = plan.orders[2 * (plan.batch + plan.k) + plan.m + plan.n :]
        return (" + reshape" if out != tuple(range(plan.batch + plan.m + plan.n)) else "") + self.epilogue.title


class Contract(Op):
    """y = act(scale * sum_K a b + bias + residual), or scale * sum_K a b * act'(aux): FusedLinear.

    Axes in a, b and out are batch axes. Axes in a and b, but not in out, are summed (K). The other axes are rows (M),
    from a, and columns (N), from b. out may have any order of axes, so that a transpose of the output or of an input
    needs no task of its own (Alg. 4 of the NNTile report).

    Args:
        bias: axes are a subset of the output's.
        residual: axes of the output.
        activation: one of ACTIVATIONS.
        pre: a second output, the value before the activation.
        aux: instead of applying the activation, multiply the output by the activation's derivative at aux.
        bias_grad: (number of an input, 0 or 1; tensor of an additional output: the sum of this input over K).
        reshape: True: if K is cut, tasks add the partial products in a tile with the order batch, M, N or batch, N, M.
            The last task writes the sum in the output's order. False: each task adds in the output's order.
    """

    category = CONTRACTION
    colours: ClassVar = {"forward": "#0072b2", "backward": "#e69f00"}

    def __init__(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        *,
        scale: float = 1.0,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        activation: str | None = None,
        pre: Tensor | None = None,
        aux: Tensor | None = None,
        bias_grad: tuple[int, Tensor] | None = None,
        reshape: bool = False,
    ) -> None:
        self.a, self.b, self.scale, self.bias, self.residual = a, b, scale, bias, residual
        self.activation, self.pre, self.aux, self.bias_grad = activation, pre, aux, bias_grad
        self.reshape = reshape
        outputs = [out, pre, bias_grad[1] if bias_grad else None]
        super().__init__([t for t in (a, b, bias, residual, aux) if t], [t for t in outputs if t])
        shared = [axis for axis in a.axes if axis in b.axes]
        self.batch = [axis for axis in shared if axis in out.axes]
        self.k = [axis for axis in shared if axis not in out.axes]
        self.m = [axis for axis in out.axes if axis in a.axes and axis not in shared]
        self.n = [axis for axis in out.axes if axis in b.axes and axis not in shared]
        assert set(out.axes) == {*self.batch, *self.m, *self.n}, (a, b, out)

    @property
    def title(self) -> str:
        parts = {"reshape": self.output if self.reshape else None, "bias": self.bias, "residual": self.residual}
        if self.activation:  # with aux the factor is the derivative
            parts[f"{self.activation}'" if self.aux else self.activation] = self.output
        parts["bias gradient"] = self.bias_grad[1] if self.bias_grad else None
        return " + ".join([self.kind, *(name for name, tensor in parts.items() if tensor)])

    @property
    def sums(self) -> Sequence[Tensor]:
        return [] if self.reshape else [self.output]

    def gradient(self, g: GraphLike, *grads: Tensor | None) -> list[Tensor | None]:
        assert len(self.inputs) == 2 and self.activation is None, "fusion comes after the gradients"
        dy = grads[0]
        assert dy is not None
        da = contract(g, dy, self.b, self.a.axes, scale=self.scale, like=self.a) if self.a.requires_grad else None
        db = contract(g, self.a, dy, self.b.axes, scale=self.scale, like=self.b) if self.b.requires_grad else None
        return [da, db]

    def _extent(self, axes: Sequence[str]) -> int:
        sizes = {**self.a.sizes, **self.b.sizes}
        return math.prod(sizes[axis] for axis in axes)

    def flop(self) -> float:
        each = float(sum(t is not None for t in (self.bias, self.residual)))
        if self.activation:
            each += (derivative_flop if self.aux else activate_flop)(self.activation)
        summed = (self.a, self.b)[self.bias_grad[0]].numel if self.bias_grad else 0
        return self.products() + each * self.output.numel + summed

    def products(self) -> float:
        return 2.0 * self._extent([*self.batch, *self.m, *self.n, *self.k])

    # -- lowering

    def lower(self, lowering: Lowering) -> None:
        ks = [
            dict(zip(self.k, index, strict=True))
            for index in itertools.product(*(range(len(lowering.parts(self.a, axis))) for axis in self.k))
        ]
        known = dict[tuple[EpilogueArgs, bool, bool], ContractArgs]()
        for index in lowering.indices(self.output):
            live = [k for k in ks if not (lowering.empty(self.a, index | k) or lowering.empty(self.b, index | k))]
            numel = math.prod(lowering.shape(self.output, index))
            live = lowering.rotated(live, numel, sums=1 + (self.bias_grad is not None))
            self._lower_tile(lowering, index, live, known)

    def _lower_tile(
        self,
        lowering: Lowering,
        index: Index,
        ks: list[Index],
        known: dict[tuple[EpilogueArgs, bool, bool], ContractArgs],
    ) -> None:
        """Emit the tasks of one tile of the output: one task for each part of K in `ks`.

        known: cache of the arguments, so that equal arguments of many tasks are one object, encoded once.
        """
        target = lowering.tile(self.pre or self.output, index)  # the value before the activation
        moves = self.reshape and len(ks) > 1 and self._sum_axes() != self.output.axes
        total = self._sum_tile(lowering, index) if moves else target
        # Only a chain has a last partial product. Other policies need a separate task for the rest of the epilogue.
        inline = lowering.policy == "chain" or len(ks) == 1

        # Backward products sum in fp32, as in Transformer Engine: weight gradients are sums over all tokens of a tile.
        fast = self.phase == "forward" and is_scaled(self.a.dtype)

        def args(start: bool, finish: bool, colsum: int = -1) -> ContractArgs:
            key = self._epilogue(start, finish, colsum, moves), moves, finish
            return known.setdefault(key, ContractArgs(fast, key[0], self._plan(moves, finish), self.scale))

        for number, k in enumerate(ks):
            at = index | k
            first, last = number == 0, number == len(ks) - 1 and inline
            a, b = lowering.tile(self.a, at), lowering.tile(self.b, at)
            beside = self._beside(lowering, index, first, last, moves)
            sums, colsum = self._bias_grad(lowering, at)
            flop = 2.0 * math.prod(
                lowering.part(t, axis, at).size
                for t, axes in ((self.a, [*self.batch, *self.m, *self.k]), (self.b, self.n))
                for axis in axes
            )
            accesses = [ACC(total), R(a), R(b), *beside, *sums]
            lowering.emit("contract", accesses, args(first, last, colsum), flop=flop)
        if not inline and (self.activation or moves):
            beside = self._beside(lowering, index, False, True, moves)
            lowering.emit("contract_epilogue", [R(total) if moves else RW(total), *beside], args(False, True))

    def _sum_axes(self) -> tuple[str, ...]:
        """Return the order of axes in which a reshaping product adds its partial products: batch, M, N or batch, N, M.

        The side with the output's last axis comes last, so that both orders are contiguous along this side.
        """
        m, n = (self.n, self.m) if self.output.axes[-1] in self.m else (self.m, self.n)
        return (*self.batch, *m, *n)

    def _sum_tile(self, lowering: Lowering, index: Index) -> Tile:
        rows = {axis: index[axis] for axis in self._sum_axes()}
        shape = [lowering.part(self.output, axis, index).size for axis in rows]
        return lowering.scratch(f"{self.output.name}.sum", rows, shape, self.output.dtype)

    def _early_bias(self, moves: bool) -> bool:
        """Return whether the first task adds the bias. With `moves`, the bias must have its axes in the sum's order."""
        return not moves or not self.bias or tuple(a for a in self._sum_axes() if a in self.bias.axes) == self.bias.axes

    def _beside(self, lowering: Lowering, index: Index, start: bool, finish: bool, moves: bool) -> list[Access]:
        """Return the accesses to the epilogue's tiles, in the order in which the kernels expect the tiles."""
        out, target = (lowering.tile(t, index) for t in (self.output, self.pre or self.output))
        accesses = [W(target)] if moves and finish else []
        if self.bias and (start if self._early_bias(moves) else finish):
            accesses.append(R(lowering.tile(self.bias, index)))
        if self.residual and (finish if moves else start):
            accesses.append(R(lowering.tile(self.residual, index)))
        if finish and self.aux:
            accesses.append(R(lowering.tile(self.aux, index)))
        elif finish and target is not out:
            accesses.append(W(out))
        return accesses

    def _bias_grad(self, lowering: Lowering, at: Index) -> tuple[list[Access], int]:
        """Return the access to the bias gradient and the number of the input that this task sums, or [] and -1.

        Several tasks read the same tile of this input. Only the task with the first tile of the other input sums it.
        """
        if not self.bias_grad:
            return [], -1
        side, grad = self.bias_grad
        if any(at[axis] for axis in (self.n if side == 0 else self.m)):
            return [], -1
        return [ACC(lowering.tile(grad, at))], side

    def _epilogue(self, start: bool, finish: bool, colsum: int, moves: bool) -> EpilogueArgs:
        """Return the epilogue of a tile's first task (start) or last task (finish).

        moves: the last task writes another order of axes than the sum's.
        """
        act = ACTIVATIONS.index(self.activation) if self.activation else -1
        bias, early = -1, self._early_bias(moves)
        if self.bias and (start if early else finish):
            axes = self._sum_axes() if moves and early else self.output.axes
            order = [axis for axis in axes if axis in self.bias.axes]
            assert order == list(self.bias.axes), (self.bias, self.output)
            bias = sum(1 << i for i, axis in enumerate(axes) if axis in self.bias.axes)
        return EpilogueArgs(
            bias_axes=bias,
            residual=(finish if moves else start) and self.residual is not None,
            activation=act if finish else -1,
            keep_pre=finish and self.pre is not None,
            aux=finish and self.aux is not None,
            colsum=colsum,
        )

    def _plan(self, moves: bool, finish: bool) -> PlanArgs:
        """Return how a task sees its tensors as matrices. Arguments: see `_epilogue`."""
        m, n, a, b = self.m, self.n, self.a, self.b
        out = self._sum_axes() if moves else self.output.axes
        rest = [axis for axis in out if axis not in self.batch]
        swap = bool(rest and rest[0] in n)
        if swap:
            m, n, a, b = n, m, b, a
        orders = (
            *permutation(a.axes, [*self.batch, *m, *self.k]),
            *permutation(b.axes, [*self.batch, *self.k, *n]),
            *permutation(out, [*self.batch, *m, *n]),
            *(permutation(out, self.output.axes) if moves and finish else ()),
        )
        return PlanArgs(swap, len(self.batch), len(m), len(n), len(self.k), orders)

    # -- reference

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        values = iter(inputs)
        a, b = next(values), next(values)
        letters = {axis: chr(97 + i) for i, axis in enumerate(dict.fromkeys([*self.a.axes, *self.b.axes]))}

        def spell(axes: Sequence[str]) -> str:
            return "".join(letters[axis] for axis in axes)

        out_axes = self.output.axes
        y = self.scale * np.einsum(f"{spell(self.a.axes)},{spell(self.b.axes)}->{spell(out_axes)}", a, b)
        if self.bias:
            bias = next(values)
            y = y + bias.reshape([s if axis in self.bias.axes else 1 for axis, s in self.output.sizes.items()])
        if self.residual:
            y = y + next(values)
        results = [y]
        if self.aux:
            assert self.activation
            results = [y * derivative(self.activation, next(values))]
        elif self.activation:
            results = [activate(self.activation, y)] + ([y] if self.pre else [])
        if self.bias_grad:
            side, grad = self.bias_grad
            source, axes = (a, self.a.axes) if side == 0 else (b, self.b.axes)
            results.append(np.einsum(f"{spell(axes)}->{spell(grad.axes)}", source))
        return tuple(results)


def contract(
    g: GraphLike, a: Tensor, b: Tensor, out_axes: Sequence[str], *, scale: float = 1.0, like: Tensor | None = None
) -> Tensor:
    """Return the product of a and b, summed over the shared axes that are not in `out_axes`, with the axes `out_axes`.

    Args:
        like: the tensor whose gradient the product is, if any. It sets the dtype and the band of the product.
    """
    sizes = {**a.sizes, **b.sizes}
    for axis in a.axes:
        if axis in b.axes and a.size(axis) != b.size(axis):
            raise ValueError(f"axis {axis} has {a.size(axis)} elements in {a} and {b.size(axis)} in {b}")
    if not set(a.axes) ^ set(b.axes) <= set(out_axes) <= set(sizes):
        raise ValueError(f"a product of {a} and {b} cannot have the axes {', '.join(out_axes)}: sums need shared axes")
    # The gradient of a parameter is a sum over all tokens, so it has the accumulation dtype.
    dtype = accumulation_dtype(a.dtype) if like and like.kind == "param" else a.dtype
    out = g.temp("contract", out_axes, [sizes[x] for x in out_axes], dtype, band=like.band if like else ALL)
    return g.add(Contract(a, b, out, scale=scale)).output


def linear(g: GraphLike, x: Tensor, weight: Tensor, out_axes: Sequence[str], bias: Tensor | None = None) -> Tensor:
    """Return x times weight, summed over the axes that both share, plus the bias. The result has the axes `out_axes`.

    The operators are named after the weight: the weight mlp.c_fc.weight gives the operator c_fc.contract.
    """
    with g.scope(next((part for part in reversed(weight.name.split(".")) if part != "weight"), weight.name)):
        y = contract(g, x, weight, out_axes)
        return bias_add(g, y, bias) if bias else y
