"""Pair: an operator with the same values in numpy and in PyTorch."""

from typing import Any

import numpy as np
import torch

from nntile_py.graph.graph import Graph
from nntile_py.tasks import Op, Tensor
from nntile_py.tasks.band import ALL, Band
from nntile_py.tasks.cross_entropy import IGNORED
from nntile_py.testing import error

AXES: dict[str, int] = {
    "batch": 2, "seq": 5, "key": 5, "embed": 7, "heads": 3, "head_dim": 4, "ffn": 6, "vocab": 11, "qkv": 3, "one": 1,
    "stat": 2, "classes": 2, "rotary": 4,
}  # fmt: skip


class Pair:
    """One forward operator on tensors that require gradients, with values in numpy and PyTorch."""

    def __init__(self) -> None:
        self.g = Graph("fp64")
        self.rng = np.random.default_rng(3)
        self.values: dict[Tensor, Any] = {}
        self.torch: dict[Tensor, torch.Tensor] = {}

    def param(self, axes: str, *, band: Band = ALL) -> Tensor:
        t = self.temp(axes, band=band)
        t.requires_grad = True
        self.values[t] = self.rng.standard_normal(t.shape)
        self.torch[t] = torch.tensor(self.values[t], requires_grad=True)
        return t

    def temp(self, axes: str, **options: Any) -> Tensor:
        names = axes.split()
        return Tensor(f"t{id(names)}", names, [AXES[a] for a in names], "fp64", **options)

    def ints(self, axes: str, below: int, ignored: bool = False) -> Tensor:
        t = self.temp(axes)
        value = self.rng.integers(0, below, t.shape)
        if ignored:
            value.flat[:2] = IGNORED
        self.values[t], self.torch[t] = value, torch.tensor(value)
        return t

    def compare(self, op: Op, *expected: torch.Tensor, **options: Any) -> None:
        """The operator's outputs and gradients by the references with PyTorch's; dy is random."""
        self.g.add(op)
        made = len(self.g.ops)
        results = op.reference(*(self.values[t] for t in op.inputs), **options)
        self.values.update(zip(op.outputs, results, strict=True))
        dys: list[Tensor | None] = []
        for out, want in zip(op.outputs, expected, strict=False):
            assert error(self.values[out], want.detach()) < 1e-12, out
            dy = self.temp(" ".join(out.axes))
            dy.band = out.band
            self.values[dy] = np.ones(1) if out.shape == (1,) else self.rng.standard_normal(out.shape)
            want.backward(torch.tensor(self.values[dy]).reshape(want.shape), retain_graph=True)
            dys.append(dy)
        grads = op.gradient(self.g, *dys, *[None] * (len(op.outputs) - len(dys)))
        for other in self.g.ops[made:]:
            results = other.reference(*(self.values[t] for t in other.inputs), **options)
            self.values.update(zip(other.outputs, results, strict=True))
        compared = 0
        for t, grad in zip(op.inputs, grads, strict=True):
            want = self.torch[t].grad
            if want is not None:
                assert grad is not None and grad.axes == t.axes
                assert error(self.values[grad], want) < 1e-11, t
                compared += 1
        assert compared == sum(t.requires_grad for t in op.inputs)
