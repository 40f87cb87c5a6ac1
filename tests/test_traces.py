"""What a trace may declare and return: names, outputs and weights that do not get in each other's way."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import nntile_py as nt
from nntile_py.tasks import (
    activation,
    add,
    attention,
    cross_entropy,
    embedding,
    linear,
    select,
    squared_error,
    transpose,
)
from nntile_py.testing import error

EDGE = {"batch": 2, "seq": 6, "vocab": 20, "embed": 8, "ffn": 12}
Text = Callable[[nt.Graph, nt.Batch, dict[str, Any]], Any]


class Made(nt.Model):
    """ids -> x -> relu(x w + b) d + x -> logits; `text` declares more, and says what the trace ends in."""

    Config = nt.ModelConfig
    text: Text

    def trace(self, g: nt.Graph, batch: nt.Batch) -> nt.Traced:
        def param(name: str, *axes: str) -> nt.tasks.Tensor:
            return g.param(name, {axis: EDGE[axis] for axis in axes}, nt.Normal(0.5))

        tokens = {"batch": batch.size, "seq": batch.seq}
        ids = g.input("input_ids", tokens, below=20)
        labels = g.input("labels", tokens, below=20, ignored=-100, scale="loss_scale")
        table = param("table", "vocab", "embed")
        w, b, d = param("w", "ffn", "embed"), param("b", "ffn"), param("d", "embed", "ffn")
        x = embedding(g, ids, table)
        pre = linear(g, x, w, ["batch", "seq", "ffn"], b)
        act = activation(g, pre, "relu")
        y = linear(g, act, d, ["batch", "seq", "embed"])
        r = add(g, y, x)
        logits = linear(g, r, table, ["batch", "seq", "vocab"])
        known = {name: one for name, one in locals().items() if isinstance(one, nt.tasks.Tensor)}
        made = self.text(g, batch, known)
        return made if isinstance(made, nt.Traced) else nt.Traced(cross_entropy(g, known["logits"], labels), made)


def made_of(text: Text) -> Made:
    model = Made(nt.ModelConfig(), seed=1)
    model.text = text  # type: ignore[method-assign]
    return model


EDGE_TILES = {"batch": 1, "seq": 4, "embed": 3, "ffn": 5, "vocab": 7}
EDGE_IDS = np.arange(12).reshape(2, 6)
EDGE_INPUTS = {"input_ids": EDGE_IDS, "labels": EDGE_IDS}


@pytest.mark.parametrize("tiles", [{}, EDGE_TILES])
@pytest.mark.parametrize("fusion", [True, {"found": False}, False], ids=str)
def test_any_tensor_may_be_an_output(runtime: nt.Runtime, tiles: dict[str, int], fusion: Any) -> None:
    """One at a time, under names of weights, gradients and scalars: what it is in NumPy, and the weights untouched."""
    names = {
        "x": "table.grad", "pre": "b.m", "act": "loss", "y": "x", "r": "grad_norm", "logits": "labels",
        "table": "d", "ids": "w", "labels": "z",
    }  # fmt: skip
    for name, called in names.items():
        model = made_of(lambda g, batch, t, name=name, called=called: {called: t[name], f"{called} too": t[name]})
        trainer = nt.Trainer(model, 2, 6, tiles, fusion=fusion)
        p = {key: np.asarray(value, np.float64) for key, value in model.weights.items()}
        x = p["table"][EDGE_IDS]
        pre = x @ p["w"].T + p["b"]
        y = np.maximum(pre, 0) @ p["d"].T
        want = {"x": x, "pre": pre, "act": np.maximum(pre, 0), "y": y, "r": x + y, "logits": (x + y) @ p["table"].T}
        want |= {"table": p["table"], "ids": EDGE_IDS, "labels": EDGE_IDS}
        loss, outputs = trainer.evaluate(EDGE_INPUTS, return_outputs=True)
        assert outputs.keys() == {called, f"{called} too"}
        assert all(got.shape == want[name].shape and error(got, want[name]) < 1e-6 for got in outputs.values())
        assert abs(loss / trainer.evaluate(EDGE_INPUTS) - 1) < 1e-6
        assert all(np.array_equal(value, p[key]) for key, value in trainer.state_dict().items())
        trainer.close()


def test_an_output_of_a_weights_shape_under_its_name(runtime: nt.Runtime) -> None:
    """It trains as under another name."""
    ids = np.arange(12 * 6).reshape(12, 6) % 20
    states = []
    for name in ("other", "w", "w.grad", "w.m"):
        trainer = nt.Trainer(made_of(lambda g, batch, t, name=name: {name: select(g, t["x"], "seq", 0)}), 12, 6)
        for _ in range(2):
            trainer.step({"input_ids": ids, "labels": ids})
            trainer.evaluate({"input_ids": ids, "labels": ids}, return_outputs=True)
        states.append(trainer.state_dict())
        trainer.close()
    assert all(np.array_equal(states[0][key], other[key]) for other in states for key in states[0])


@pytest.mark.parametrize("name", ["d.m", "d.v", "d.grad", "loss", "grad_norm", "clip", "d.low_bits", "lr"])
def test_parameters_named_as_what_the_optimizer_keeps(runtime: nt.Runtime, name: str) -> None:
    states = []
    for called in ("other", name):
        def text(g: nt.Graph, batch: nt.Batch, t: dict[str, Any], called: str = called) -> Any:
            more = g.param(called, {"embed": 8, "ffn": 12}, nt.Normal(0.5))
            y = linear(g, t["act"], more, ["batch", "seq", "embed"])
            t["logits"] = linear(g, add(g, t["r"], y), t["table"], ["batch", "seq", "vocab"])
            return {}

        model = made_of(text)
        trainer = nt.Trainer(model, 2, 6, EDGE_TILES, optimizer=nt.AdamW(lr=0.01), clip_grad_norm=1.0)
        losses = [trainer.step(EDGE_INPUTS) for _ in range(3)]
        states.append((losses, list(trainer.state_dict().values()), list(trainer.gradients().values())))
        trainer.close()
    (losses, weights, grads), other = states
    assert losses == other[0] and len(weights) == len(other[1]) == 5
    assert all(np.array_equal(a, b) for a, b in zip(weights + grads, other[1] + other[2], strict=True))


def test_queries_as_outputs(runtime: nt.Runtime) -> None:
    """Products that would be packed are not where one is asked for."""
    def text(g: nt.Graph, batch: nt.Batch, t: dict[str, Any]) -> Any:
        axes, heads, parts = ["batch", "heads", "seq", "head_dim"], {"heads": 2, "head_dim": 4}, []
        for name in "qkv":
            one = linear(g, t["x"], g.param(name, heads | {"embed": 8}, nt.Normal(0.5)), ["batch", "seq", *heads])
            parts.append(transpose(g, one, axes))
        a = transpose(g, attention(g, *parts, nt.Mask(causal=True)), ["batch", "seq", *heads])
        o = g.param("o", {"embed": 8} | heads, nt.Normal(0.5))
        t["logits"] = linear(g, add(g, t["r"], linear(g, a, o, ["batch", "seq", "embed"])), t["table"],
                             ["batch", "seq", "vocab"])  # fmt: skip
        return {"queries": parts[0], "attended": a}

    model = made_of(text)
    for tiles in ({}, EDGE_TILES):
        trainer = nt.Trainer(model, 2, 6, tiles)
        got = trainer.evaluate(EDGE_INPUTS, return_outputs=True)[1]
        p = model.weights
        q, k, v = ((p["table"][EDGE_IDS] @ p[name].T).reshape(2, 6, 2, 4).transpose(0, 2, 1, 3) for name in "qkv")
        assert error(got["queries"], q) < 1e-6
        want = F.scaled_dot_product_attention(*map(torch.tensor, (q, k, v)), is_causal=True).numpy()
        assert error(got["attended"], want.transpose(0, 2, 1, 3)) < 1e-6
        trainer.close()


EMBED = {"embed": 8}


def declared(g: nt.Graph, *params: tuple[dict[str, int], Any]) -> dict[str, Any]:
    """Parameters p0, p1, ... of these axes and sources; no output."""
    for number, (axes, sources) in enumerate(params):
        g.param(f"p{number}", axes, nt.ZEROS, sources)
    return {}


# What a trace does besides, or ends in, and what the one message must say.
WRONG_TRACES: dict[str, tuple[Text, str]] = {
    "half a weight": (lambda g, b, t: declared(g, (EMBED, nt.Part("u", 0, 2, "embed"))),
                      "weight u: a part of it belongs to no parameter or to two; .* Those declared: p0$"),
    "a whole and a part": (lambda g, b, t: declared(g, ({"e": 4}, nt.Part("u", 0, 2, "e")), ({"e": 8}, "u")),
                           "weight u: .*declared: p0, p1$"),
    "unlike parts": (
        lambda g, b, t: declared(g, ({"e": 3}, nt.Part("u", 0, 2, "e")), ({"e": 2}, nt.Part("u", 1, 3, "e"))),
        "weight u: .*declared: p0, p1$"),
    "parts across": (
        lambda g, b, t: declared(
            g, ({"e": 1, "f": 2}, nt.Part("u", 0, 2, "e")), ({"e": 2, "f": 1}, nt.Part("u", 1, 2, "f"))),
        "weight u: .*declared: p0, p1$"),
    "a part of a float": (lambda g, b, t: g.param("p", EMBED, nt.ZEROS, nt.Part("u", 0, 1.5, "embed")), "is no part"),
    "sources": (lambda g, b, t: g.param("p", EMBED, nt.ZEROS, 3), "parameter p: got sources 3; allowed: a text"),
    "logits as loss": (lambda g, b, t: nt.Traced(t["logits"], {}), "the loss is .*vocab 20.*; allowed: what a loss"),
    "a parameter as loss": (lambda g, b, t: nt.Traced(t["table"], {}), r"the loss is table\[.*; allowed: what a loss"),
    "a loss of another graph": (
        lambda g, b, t: nt.Traced(nt.Graph().named("loss", ["one"], [1], "scalar", "fp64"), {}), "the loss is loss"),
    "a number as output": (lambda g, b, t: {"a": 3}, "output 'a': got 3; allowed: {name: tensor}"),
    "a number as name": (lambda g, b, t: {3: t["x"]}, "output 3: got .*; allowed: {name: tensor}"),
    "another graph's output": (lambda g, b, t: {"a": nt.Graph().temp("z", ["embed"], [8], "fp32")},
                               r"output a: got z\[embed 8\]; allowed: a tensor that this trace has made"),
    "an output never written": (lambda g, b, t: {"a": g.temp("z", ["embed"], [8], "fp32")}, "output a: got z"),
    "exit": (lambda g, b, t: sys.exit(0), r"line \d+: SystemExit: 0"),
    "a name": (lambda g, b, t: g.param(3, EMBED, nt.ZEROS), "parameter: got the name 3; allowed: a text"),
    "axes": (lambda g, b, t: g.param("p", ["embed"], nt.ZEROS), "parameter p: got axes .*; allowed: {axis: size}"),
    "a dtype": (lambda g, b, t: g.input("i", EMBED, "bool"),
                "input i: got dtype 'bool'; allowed: None or int64, fp32, fp64, bf16, fp16"),
    "a dtype of numpy": (lambda g, b, t: g.input("i", EMBED, np.float32), "input i: got dtype <class 'numpy.float32'>"),
    "shifted": (lambda g, b, t: g.input("i", {"batch": 2}, shifted=True, ignored=-1), "input i: shifted needs .*seq"),
} | {
    f"size {size}": (lambda g, b, t, size=size: g.param("p", {"embed": size}, nt.ZEROS),
                     f"parameter p: got axis 'embed' of size {size}; allowed: a text and a positive integer")
    for size in (0, -1, True, 8.0)
} | {
    f"start {init!r}": (lambda g, b, t, init=init: g.param("p", EMBED, init),
                        f"parameter p: got start values {init!r}; allowed: nt.Normal, nt.Constant")
    for init in (0.02, None, "zeros")
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_TRACES)
def test_wrong_traces(name: str) -> None:
    text, message = WRONG_TRACES[name]
    with pytest.raises(nt.ConfigError, match=message) as told:
        made_of(text).params()
    assert str(told.value).startswith("model Made (") and str(told.value).count("model Made") == 1


def test_an_earlier_loss_is_no_output() -> None:
    """The later one is added in its place."""
    def text(g: nt.Graph, batch: nt.Batch, t: dict[str, Any]) -> Any:
        first = cross_entropy(g, t["logits"], t["labels"])
        again = linear(g, t["x"], t["table"], ["batch", "seq", "vocab"])
        return nt.Traced(cross_entropy(g, again, t["labels"], loss=first), {"first": first})

    with pytest.raises(nt.ConfigError, match=r"output first: a later tensor overwrites loss\[one 1\]"):
        made_of(text).params()


@pytest.mark.parametrize(
    ("start", "value"),
    [(nt.Normal, math.nan), (nt.Normal, -1.0), (nt.Normal, "a"), (nt.Constant, None), (nt.Constant, math.inf)],
)
def test_start_values(start: Any, value: Any) -> None:
    with pytest.raises(nt.ConfigError, match=re.escape(f"{start.__name__}: got {value!r}; allowed: a number")):
        start(value)


def test_parts_of_unlike_sizes() -> None:
    """A half and two quarters are the whole."""
    def text(g: nt.Graph, batch: nt.Batch, t: dict[str, Any]) -> Any:
        half, quarters = ({"e": 4}, nt.Part("u", 0, 2, "e")), [({"e": 2}, nt.Part("u", k, 4, "e")) for k in (2, 3)]
        return declared(g, half, *quarters)

    assert made_of(text).weight_shapes()["u"] == (8,)


def test_a_scale_of_an_input_left_out(runtime: nt.Runtime) -> None:
    """The default's values count."""
    def text(g: nt.Graph, batch: nt.Batch, t: dict[str, Any]) -> Any:
        axes = {"batch": batch.size, "seq": batch.seq} | EMBED
        target = g.input("target", axes, None, default=0.5, scale="mse_scale")
        return nt.Traced(squared_error(g, t["y"], target), {"y": t["y"]})

    trainer = nt.Trainer(made_of(text), 2, 6, EDGE_TILES, optimizer=nt.SGD(lr=0.0))
    loss, outputs = trainer.evaluate(EDGE_INPUTS, return_outputs=True)
    want = ((outputs["y"] - 0.5) ** 2).mean()
    given = EDGE_INPUTS | {"target": np.full((2, 6, 8), 0.5, np.float32)}
    assert all(abs(one / want - 1) < 1e-6 for one in (loss, trainer.step(EDGE_INPUTS), trainer.step(given)))
    trainer.close()


def test_an_input_asked_for_and_not_declared(runtime: nt.Runtime) -> None:
    trainer = nt.Trainer(made_of(lambda g, batch, t: {"x": t["x"]} if batch.has("foo", neutral=1) else {}), 2, 6)
    for name in ("foo", "bar"):
        for value in (0, 1):
            with pytest.raises(ValueError, match=f"^{name}: unknown input; allowed: input_ids, labels$"):
                trainer.step(EDGE_INPUTS | {name: np.full((2, 6), value)})
    trainer.close()
