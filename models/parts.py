"""Layers that several models' texts share."""

from __future__ import annotations

from collections.abc import Mapping

from nntile_py.graph.declared import ONES, ZEROS, Init, Part
from nntile_py.graph.graph import Graph
from nntile_py.tasks.contract import linear
from nntile_py.tasks.layer_norm import layer_norm
from nntile_py.tasks.op import Tensor

Sizes = Mapping[str, int]


def dense(
    g: Graph,
    x: Tensor,
    name: str,
    inner: Sizes,
    out: Sizes,
    init: Init,
    *,
    bias: bool = True,
    transposed: bool = False,
    part: tuple[str, int, int] | None = None,
) -> Tensor:
    """x W + b, as torch.nn.Linear: sums over the axes `inner` of x, makes the axes `out` after batch and seq.

    The weight is NAME.weight [out, inner], with `transposed` [inner, out] (GPT-2's Conv1D); the bias NAME.bias [out].
    part (weight's name, number, of): W and b are one of `of` equal parts along out's first axis of another weight.
    """
    axes = {**inner, **out} if transposed else {**out, **inner}
    along = next(iter(out))
    source = {kind: Part(f"{part[0]}.{kind}", *part[1:], along) if part else None for kind in ("weight", "bias")}
    weight = g.param(f"{name}.weight", axes, init, source["weight"])
    b = g.param(f"{name}.bias", out, ZEROS, source["bias"]) if bias else None
    return linear(g, x, weight, [axis for axis in x.axes if axis not in inner] + list(out), b)


def norm(g: Graph, x: Tensor, name: str, eps: float) -> Tensor:
    """LayerNorm over embed with the weights NAME.weight and NAME.bias."""
    embed = {"embed": x.size("embed")}
    return layer_norm(g, x, g.param(f"{name}.weight", embed, ONES), g.param(f"{name}.bias", embed, ZEROS), eps)
