"""Parameters that several operators use: gradients against float64 PyTorch, also summed over micro-batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pairwise import pairwise
from torch.nn import functional as F

import nntile_py as nt
from nntile_py.graph.passes.qkv_fusion import merge_projections
from nntile_py.graph.step import StepSpec
from nntile_py.models.parts import dense_weights, norm_weights
from nntile_py.tasks import activation, add, attention, cross_entropy, embedding, linear, select, transpose
from nntile_py.testing import error

VOCAB, EMBED, FFN, ROWS, SEQ, EPS = 13, 10, 9, 4, 6, 1e-5
CUT = {"batch": 2, "seq": 4, "embed": 4, "ffn": 5, "vocab": 6}

RULES = {"found": False}
FUSIONS: list[Any] = [True, RULES, False, {"residual_norm": False}, {"bias": False}]
FUSIONS += [{**RULES, "residual_norm": False}, {**RULES, "bias": False}]


class LoopConfig(nt.ModelConfig):
    pre_norm: bool


class Loop(nt.Model):
    """One layer (two products, two biases, a norm) four times; the table three times, as ids, others and classes.

    The first product's bias is in turns a parameter, and what is made of a row of another one."""

    Config = LoopConfig

    def trace(self, g: nt.Graph, batch: nt.Batch) -> nt.Traced:
        tokens, embed, ffn = {"batch": batch.size, "seq": batch.seq}, {"embed": EMBED}, {"ffn": FFN}
        ids, others = (g.input(name, tokens, below=VOCAB) for name in ("ids", "others"))
        labels = g.input("labels", tokens, below=VOCAB, ignored=-100, scale="loss_scale")
        table = g.param("table", {"vocab": VOCAB} | embed, nt.Normal(1.0))
        up = dense_weights(g, "up", embed, ffn, nt.Normal(0.4))
        down = dense_weights(g, "down", ffn, embed, nt.Normal(0.4))
        normed = norm_weights(g, "norm", EMBED)
        rows = g.param("rows", {"two": 2} | ffn, nt.Normal(1.0))
        made = [activation(g, select(g, rows, "two", k), "gelu") for k in range(2)]
        x = add(g, embedding(g, ids, table), embedding(g, others, table))
        for bias in (up.bias, made[0], made[1], made[0], up.bias):
            y = normed(g, x, EPS) if self.config.pre_norm else x
            y = linear(g, y, up.weight, ["batch", "seq", "ffn"], bias)
            x = add(g, x, down(g, activation(g, y, "gelu")))
            x = x if self.config.pre_norm else normed(g, x, EPS)
        logits = linear(g, x, table, ["batch", "seq", "vocab"])
        return nt.Traced(cross_entropy(g, logits, labels), {"logits": logits})


def of_torch(pre_norm: bool, weights: Any, inputs: Any) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of Loop."""
    p = {name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in weights.items()}

    def normed(x: Any) -> Any:
        return F.layer_norm(x, (EMBED,), p["norm.weight"], p["norm.bias"], EPS)

    x, made = p["table"][inputs["ids"]] + p["table"][inputs["others"]], F.gelu(p["rows"])
    for bias in (p["up.bias"], made[0], made[1], made[0], p["up.bias"]):
        y = F.gelu(F.linear(normed(x) if pre_norm else x, p["up.weight"], bias))
        x = x + F.linear(y, p["down.weight"], p["down.bias"])
        x = x if pre_norm else normed(x)
    loss = F.cross_entropy((x @ p["table"].T).reshape(-1, VOCAB), torch.tensor(inputs["labels"]).reshape(-1))
    loss.backward()
    return loss.item(), {name: value.grad.numpy() for name, value in p.items() if value.grad is not None}


@pytest.mark.few(8)
@pairwise(
    how=[
        (True, {}, "chain"),
        (True, CUT, "tree"),
        (False, {}, "redux"),
        (False, CUT, "chain"),
        (False, CUT, "commute"),
    ],
    fusion=FUSIONS,
    micro=[1, 2],
)
def test_gradients(runtime: nt.Runtime, how: tuple[bool, dict[str, int], str], fusion: Any, micro: int) -> None:
    pre_norm, tiles, policy = how
    rng = np.random.default_rng(0)
    inputs = {name: rng.integers(0, VOCAB, (ROWS, SEQ)) for name in ("ids", "others", "labels")}
    model = Loop(LoopConfig(pre_norm=pre_norm), seed=1)
    for value in model.weights.values():
        value += 0.1 * rng.standard_normal(value.shape, np.float32)
    loss, grads = of_torch(pre_norm, model.weights, inputs)
    trainer = nt.Trainer(
        model, ROWS // micro, SEQ, tiles, optimizer=nt.SGD(lr=0.0), accumulate=policy, fusion=fusion,
        grad_accumulation=micro,
    )  # fmt: skip
    for _ in range(2):  # nothing is left of the step before
        assert abs(trainer.step(inputs) / loss - 1) < 1e-6
        got = trainer.gradients()
        assert got.keys() == grads.keys()
        assert {name: e for name in grads if (e := error(got[name], grads[name])) > 1e-5} == {}
    trainer.close()


def test_shared_gradients_are_summed_in_place() -> None:
    """Each layer's task adds to the same tiles: no more tensors, and no tasks that add them."""
    spec = StepSpec(Loop(LoopConfig(pre_norm=False)), ROWS, SEQ)
    made = spec.graphs
    kinds = [one.kind for op in made.graph.ops for one in getattr(op, "members", [op])]
    weights = {param.name: grad for param, grad in made.grads.items()}
    parts = [t.storage for op in made.graph.ops for t in op.outputs]
    assert {name: parts.count(grad) for name, grad in weights.items()} == {
        "table": 3, "up.weight": 5, "up.bias": 2, "down.weight": 5, "down.bias": 5, "norm.weight": 5, "norm.bias": 5,
        "rows": 1,
    }  # fmt: skip
    assert kinds.count("Add") == 1 + 1 + 1  # of the embeddings; rows; made[0]


@pytest.mark.parametrize(("shared", "products"), [("qkv", 2), ("", 2), ("k", 6), ("qk", 6)])
def test_projections_that_layers_share(shared: str, products: int) -> None:
    """Two attentions have one product each if they share all projections or none."""
    g, embed, heads = nt.Graph(), {"embed": 8}, {"heads": 2, "head_dim": 4}
    x = g.input("x", {"batch": 2, "seq": 4} | embed, None)
    known: dict[str, Any] = {}
    for layer in range(2):
        names = {one: one if one in shared else f"{one}{layer}" for one in "qkv"}
        made = {}
        for one, name in names.items():
            if name not in known:
                known[name] = dense_weights(g, name, embed, heads, nt.Normal(0.1))
            made[one] = transpose(g, known[name](g, x), ["batch", "heads", "seq", "head_dim"])
        attention(g, made["q"], made["k"], made["v"], nt.Mask())
    merge_projections(g)
    assert sum(op.kind == "Contract" for op in g.ops) == products
    weights = [name for name in g.tensors if name.endswith("weight")]
    assert len(weights) == (len(known) if products == 6 else len(known) // 3)
    assert {source.weight for param in g.params.values() for source in param.sources} == {
        f"{name}.{part}" for name in known for part in ("weight", "bias")
    }
