"""Attention with relative positions on CPUs, against float64 and against stored scores; refused combinations."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from relative_rows import BSHD, CASES, RelativeRow, fitted

import nntile_py as nt
from nntile_py.errors import ConfigError
from nntile_py.graph.graph import Graph
from nntile_py.graph.layouts import on, same_orders_of
from nntile_py.graph.lowering import lower
from nntile_py.tasks import contract, relative_scores, rename, softmax
from nntile_py.tasks.attention_relative import relative_attention
from nntile_py.tasks.mask import Mask
from nntile_py.tasks.op import Tensor
from nntile_py.testing import Case, check, check_gradient, error, with_gradient
from nntile_py.tiles import Tiling


@pytest.mark.few(16)
@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
@pytest.mark.parametrize("name", CASES)
def test_against_the_reference(runtime: nt.Runtime, name: str, dtype: str) -> None:
    """Several blocks of queries; tiles of heads and of rows of the batch."""
    row, sizes, tiles = fitted(name, 150)
    if name == "an empty bin":
        sizes["seq"] = sizes["key"] = 9
    check(row, tiles, "chain", dtype, sizes)


@pytest.mark.parametrize("masked", [0, 5, 600])
@pytest.mark.parametrize("scale", [0.3, -0.3])
def test_padding_in_front(runtime: nt.Runtime, masked: int, scale: float) -> None:
    """Of 620 keys in blocks of 512, the first `masked` are padding; blocks may be padding alone."""
    row = RelativeRow("padding", "log", scale=scale)

    def filled(case: Case) -> None:
        row(case)
        mask = next(t for t in case.makers if t.axes == ("batch", "seq"))
        case.makers[mask] = lambda rng, shape, values: np.broadcast_to(np.arange(shape[1]) >= masked, shape).astype(int)

    check(filled, {}, "chain", "fp64", {"batch": 1, "seq": 620, "key": 620, "heads": 1, "head_dim": 8})


def forward(row: RelativeRow) -> Callable[[Case], Any]:
    """Return a row with the operator alone, without its gradient."""

    def of_case(case: Case) -> None:
        row(case)
        case.graph.ops = case.graph.ops[:1]
        for tensor in case.graph.ops[0].outputs:
            tensor.storage.kind = "scalar"

    return of_case


@pytest.mark.parametrize("name", ["log of few", "clipped", "queries", "keys", "padding", "rows"])
def test_gradient_against_finite_differences(name: str) -> None:
    row, sizes, _ = fitted(name, 20)
    case = Case({**sizes, "head_dim": 3}, "fp64")
    with_gradient(forward(row), (0,), case)
    check_gradient(case, np.random.default_rng(0))


@pytest.mark.parametrize("name", ["log", "clipped", "queries", "keys", "padding"])
def test_reference_equals_stored_scores(name: str) -> None:
    """The reference equals that of separate operators: scores, their terms of distances, softmax, weighted sum."""
    row, sizes, _ = fitted(name, 20)
    case = Case(sizes, "fp64")
    forward(replace(row, scale=1.0))(case)
    op, g = case.graph.ops[0], case.graph
    q, k, v, index, *products = op.inputs[:6] if row.products == "queries keys" else op.inputs[:5]
    keys, values = rename(g, k, seq="key"), rename(g, v, seq="key")
    of = {one: transposed(g, t, one) for one, t in zip(row.products.split(), products, strict=True)}
    scores = contract(g, q, keys, ["batch", "heads", "seq", "key"])
    scores = relative_scores(g, scores, index, of.get("queries"), of.get("keys"))
    mask = Mask(**{"segments" if row.mask == "segments" else "padding": op.inputs[-1]})
    stored = contract(g, softmax(g, scores, mask), values, BSHD.split())
    found = case.computed(case.draw(np.random.default_rng(1)))
    assert error(found[op.output], found[stored]) < 1e-12


def transposed(g: Graph, product: Tensor, one: str) -> Tensor:
    """Return the product with the axes that RelativeScores expects."""
    heads_first = nt.tasks.transpose(g, product, ["batch", "heads", "seq", "relative"])
    return heads_first if one == "queries" else rename(g, heads_first, seq="key")


def built(**changes: Any) -> Tensor:
    """Add attention with relative positions of two heads and five positions to a graph."""
    g = Graph("fp32")
    sizes = {"batch": 1, "seq": 5, "heads": 2, "head_dim": 4, "relative": 3, "distance": 9, "key": 5, "kv_heads": 1}

    def tensor(axes: str, dtype: str = "fp32") -> Tensor:
        return g.named(f"t{len(g.tensors)}", axes.split(), [sizes[a] for a in axes.split()], "input", dtype)

    axes = {"q": BSHD, "k": BSHD, "v": BSHD, "queries": BSHD.replace("head_dim", "relative"), "keys": None}
    axes |= {key: value for key, value in changes.items() if key in axes}
    sizes |= changes.get("sizes", {})
    q, k, v, queries, keys = (tensor(of) if of else None for of in axes.values())
    index = tensor("distance", changes.get("index", "int64"))
    assert q and k and v
    return relative_attention(g, q, k, v, changes.get("mask", Mask()), index, queries, keys)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"index": "fp32"}, "need an int64 index of 2 seq - 1 distances"),
        ({"sizes": {"distance": 10}}, "need an int64 index of 2 seq - 1 distances"),
        ({"queries": None}, "needs one product with embeddings of distances"),
        ({"queries": "batch heads seq relative", "keys": "batch seq heads relative"}, "the axes of the other product"),
        ({"queries": "seq heads relative"}, "a product has the sizes of the queries"),
        ({"queries": "batch seq relative heads"}, "`relative` must be the last axis"),
        ({"mask": Mask(causal=True)}, "got a causal mask or a window; allowed: all keys, padding or segments"),
        ({"mask": Mask(window=2, two_sided=True)}, "got a causal mask or a window"),
        ({"k": "batch seq kv_heads head_dim", "v": "batch seq kv_heads head_dim"}, "the heads of the queries"),
        ({"k": "batch key heads head_dim", "v": "batch key heads head_dim"}, "must have the positions"),
    ],
)
def test_refused(changes: dict[str, Any], told: str) -> None:
    built()
    with pytest.raises(ValueError, match=told):
        built(**changes)


def test_cut_sequences(runtime: nt.Runtime) -> None:
    """The operator refuses tiles of seq; a DeBERTa whose graph knows of them stores its scores."""
    case = Case(fitted("rows", 20)[1], "fp64")
    CASES["rows"][0](case)
    with pytest.raises(ConfigError, match=r"tiles\.seq: got 4; allowed with relative positions: none"):
        lower(case.graph, Tiling({"seq": 4}))
    config = nt.models.DeBERTaConfig(layers=1, embed=8, heads=2, vocab=9, positions=8, attention="segments")
    for tiles, fused in (({"batch": 1}, True), ({"seq": 4}, False)):
        trainer = nt.Trainer(nt.models.DeBERTa(config), 2, 8, tiles)
        kinds = {op.kind for op in trainer.built.graph.ops}
        trainer.close()
        assert ("RelativeAttention" in kinds) == fused == ("RelativeScores" not in kinds)


@pytest.mark.parametrize(
    ("changes", "packed", "fused"),
    [({}, True, True), ({}, False, False), ({"heads": 1}, True, False),
     ({"heads": 1, "attention_dropout": 0.1}, True, True), ({"attention": "naive"}, True, False),
     ({"attention": "segments"}, False, True)],
)  # fmt: skip
def test_default_backend(runtime: nt.Runtime, changes: dict[str, Any], packed: bool, fused: bool) -> None:
    """Attention over packed sequences is fused, except with wide heads; with dropout there is only the fused form."""
    sizes = {"layers": 1, "embed": 128, "heads": 2, "vocab": 9, "positions": 8}
    config = nt.models.DeBERTaV2Config(**{**sizes, **changes})
    trainer = nt.Trainer(nt.models.DeBERTaV2(config), 2, 8, {"batch": 1}, pack=packed)
    kinds = {op.kind for op in trainer.built.graph.ops}
    trainer.close()
    assert ("RelativeAttention" in kinds) == fused == ("RelativeScores" not in kinds)


def test_layout_search(runtime: nt.Runtime) -> None:
    """The search may move axes of queries, keys and values, and of their gradients; products keep their order."""
    row, sizes, tiles = fitted("log", 40)

    def copied(case: Case) -> None:
        row(case)
        for number, op in enumerate(case.graph.ops):
            movable = {t for tie in same_orders_of(op) for t in tie.names}
            assert len(movable) == 4 + 4 * number and not any(t.axes[-1] == "relative" for t in movable)
            case.graph.ops[number] = on(op, {})
            assert type(case.graph.ops[number]) is type(op)

    check(copied, tiles, "chain", "fp64", sizes)


@pytest.mark.parametrize("attention", ["naive", "segments"])
def test_padding_in_some_steps_without_relative_terms(runtime: nt.Runtime, attention: str) -> None:
    """Steps with and without padding have the same parameters."""
    config = nt.models.DeBERTaV2Config(
        layers=1, embed=8, heads=2, vocab=9, positions=8, c2p=False, p2c=False, attention=attention
    )
    trainer = nt.Trainer(nt.models.DeBERTaV2(config), 2, 6, shift_labels=False)
    ids, mask = np.arange(12).reshape(2, 6) % 9, np.ones((2, 6), int)
    full = trainer.evaluate(ids, ids)
    assert trainer.evaluate({"input_ids": ids, "attention_mask": mask, "labels": ids}) == full
    mask[1, 3:] = 0
    padded = {"input_ids": ids, "attention_mask": mask, "labels": np.where(mask, ids, -100)}
    losses = [trainer.step(padded), trainer.step(ids, ids), trainer.evaluate(padded), trainer.evaluate(ids, ids)]
    assert losses[2] < losses[0] and losses[3] < full
