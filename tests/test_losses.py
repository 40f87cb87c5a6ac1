"""Several losses in one graph, on results of small operators: values and gradients against PyTorch."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import nntile_py as nt
from nntile_py import tasks as ops
from nntile_py.execution.program import Store, programs
from nntile_py.graph.fusion import Fusion, fuse
from nntile_py.graph.graph import Graph
from nntile_py.graph.lowering import lower
from nntile_py.tasks import Tensor
from nntile_py.tasks.cross_entropy import IGNORED
from nntile_py.testing import error
from nntile_py.tiles import Tiling

SIZES = {"batch": 4, "seq": 6, "embed": 12, "ffn": 10, "vocab": 20, "classes": 3}
TILINGS: dict[str, dict[str, int]] = {
    "uncut": {},
    "even": {"batch": 2, "seq": 3, "embed": 6, "ffn": 5, "vocab": 10},
    "ragged": {"batch": 3, "seq": 4, "embed": 5, "ffn": 7, "vocab": 9},
}
INPUTS = {"x": "batch seq embed", "target": "batch embed"}
PARAMS = {
    "gate": "embed ffn", "up": "embed ffn", "words": "ffn vocab", "pool": "ffn embed", "pairs": "embed classes",
}  # fmt: skip


def model(fp: str = "fp64") -> tuple[Graph, Tensor]:
    g = Graph(fp)

    def named(name: str, axes: str, kind: str, dtype: str | None = None) -> Tensor:
        return g.named(name, axes.split(), [SIZES[a] for a in axes.split()], kind, dtype)

    x, target = (named(name, axes, "input") for name, axes in INPUTS.items())
    gate, up, words, pool, pairs = (named(name, axes, "param") for name, axes in PARAMS.items())
    rows = ["batch", "seq"]
    h = ops.gated(g, ops.contract(g, x, gate, [*rows, "ffn"]), ops.contract(g, x, up, [*rows, "ffn"]), "silu")
    logits = ops.contract(g, h, words, [*rows, "vocab"])
    loss = ops.cross_entropy(g, logits, named("labels", "batch seq", "input", "int64"))
    pooled = ops.contract(g, ops.select(g, h, "seq", 4), pool, ["batch", "embed"])
    first = ops.activation(g, pooled, "tanh")
    logits = ops.contract(g, first, pairs, ["batch", "classes"])
    loss = ops.cross_entropy(g, logits, named("order", "batch", "input", "int64"), loss=loss, scale="order")
    y = ops.multiply(g, first, ops.select(g, x, "seq", 0))
    return g, ops.squared_error(g, y, target, loss=loss)


def of_torch(values: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    v = {name: torch.tensor(value, requires_grad=name in PARAMS) for name, value in values.items()}
    h = F.silu(v["x"] @ v["gate"]) * (v["x"] @ v["up"])
    first = torch.tanh(h[:, 4] @ v["pool"])
    loss = F.cross_entropy((h @ v["words"]).flatten(0, 1), v["labels"].flatten(), ignore_index=IGNORED)
    loss = loss + F.cross_entropy(first @ v["pairs"], v["order"])
    loss = loss + F.mse_loss(first * v["x"][:, 0], v["target"])
    loss.backward()
    return loss.detach(), {name: v[name].grad for name in PARAMS}  # type: ignore[misc]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("tiling", "policy"),
    [("uncut", "chain"), ("even", "tree"), *(("ragged", p) for p in ("chain", "commute", "redux", "tree"))],
)
def test_the_sum_and_its_gradients(runtime: nt.Runtime, tiling: str, policy: str, fused: bool) -> None:
    g, loss = model()
    grads = g.backward(loss)
    fuse(g, Fusion.of(fused), Tiling(TILINGS[tiling]))
    low = lower(g, Tiling(TILINGS[tiling]), policy)
    rng, store = np.random.default_rng(0), Store()
    (program,) = programs([low.tasks], store)
    for _ in range(2):
        values: dict[str, Any] = {n: rng.standard_normal(g.tensors[n].shape) for n in (*INPUTS, *PARAMS)}
        values["labels"], values["order"] = rng.integers(0, 20, (4, 6)), rng.integers(0, 3, 4)
        values["labels"][0, :2] = IGNORED
        for name, value in values.items():
            store.write(low, g.tensors[name], value)
        program.run({"loss_scale": 1 / 22, "order": 1 / 4, "mse_scale": 1 / 48})
        want, gradients = of_torch(values)
        assert error(store.read(low, loss), want.reshape(1)) < 1e-13
        assert {param.name for param in grads} == set(PARAMS)
        for param, grad in grads.items():
            assert error(store.read(low, grad), gradients[param.name]) < 1e-12, param


def test_each_loss_is_fused_by_its_own_classes() -> None:
    def fused(tiles: dict[str, int]) -> list[bool]:
        g, loss = model()
        g.backward(loss)
        fuse(g, Fusion(), Tiling(tiles))
        return [bool(op.fused) for op in g.ops if isinstance(op, ops.CrossEntropy)]

    assert fused({}) == [True, True] == fused({"batch": 2, "embed": 5})
    assert fused({"vocab": 9}) == [False, True]


def logits_and_labels(g: Graph) -> tuple[Tensor, Tensor]:
    x, w = g.named("x", ["seq", "embed"], [5, 4], "input"), g.named("w", ["embed", "vocab"], [4, 7], "param")
    return ops.contract(g, x, w, ["seq", "vocab"]), g.named("labels", ["seq"], [5], "input", "int64")


def test_what_reads_logits_before_their_gradient_takes_their_place() -> None:
    """A loss of the same logits after the cross-entropy: right, but the two tasks of that stay apart."""
    g = Graph()
    logits, labels = logits_and_labels(g)
    loss = ops.cross_entropy(g, logits, labels)
    loss = ops.squared_error(g, logits, g.named("target", logits.axes, logits.shape, "input"), loss=loss)
    g.backward(loss)
    fuse(g, Fusion())
    assert [op.fused for op in g.ops if isinstance(op, ops.CrossEntropyGrad)] == [False]


def test_what_reads_logits_after_their_gradient_took_their_place() -> None:
    g = Graph()
    logits, labels = logits_and_labels(g)
    loss = ops.cross_entropy(g, logits, labels)
    with pytest.raises(ValueError, match="is read after another tensor overwrote it"):
        g.backward(ops.cross_entropy(g, logits, labels, loss=loss, scale="other"))


def test_what_does_not_fit() -> None:
    g = Graph()
    logits, labels = logits_and_labels(g)
    with pytest.raises(ValueError, match=r"cross_entropy: the labels w\[embed 4, vocab 7\] need the axes of x\["):
        ops.cross_entropy(g, g.tensors["x"], g.tensors["w"])
    loss = ops.cross_entropy(g, logits, labels)
    with pytest.raises(ValueError, match="loss: the graph has a loss already"):
        ops.cross_entropy(g, logits, labels)
    with pytest.raises(ValueError, match=r"squared_error: the target labels\[seq 5\] \(int64\) does not fit"):
        ops.squared_error(g, logits, labels, loss=loss)
    with pytest.raises(ValueError, match="depends on parameters"):
        ops.squared_error(g, logits, logits, loss=loss)
    with pytest.raises(ValueError, match=r"select: .* has no position 5 along seq"):
        ops.select(g, logits, "seq", 5)
    with pytest.raises(ValueError, match=r"select: .* has no position 0 along embed"):
        ops.select(g, logits, "embed", 0)
    with pytest.raises(ValueError, match=r"multiply: .* have to have the same axes and sizes"):
        ops.multiply(g, logits, g.tensors["x"])
    with pytest.raises(ValueError, match=r"gated: .* have to have the same axes and sizes"):
        ops.gated(g, logits, g.tensors["x"], "silu")
    with pytest.raises(ValueError, match=r"activation: got 'swish'; allowed: relu, .*, silu"):
        ops.gated(g, logits, logits, "swish")
