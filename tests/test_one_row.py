"""Passes that generate one token of one text: products of a row, with their norms and gates."""

from collections import Counter
from typing import Any

import pytest

import nntile_py as nt
from nntile_py.graph.fusion import Fusion
from nntile_py.graph.graph import Graph
from nntile_py.graph.key_value_cache import CacheShape, Sampling
from nntile_py.graph.step import StepSpec
from nntile_py.tasks.gemv import Gemv
from nntile_py.tiles import Tiling

LLAMA = nt.models.LlamaConfig(layers=2, embed=32, heads=4, kv_heads=2, ffn=48, vocab=50, positions=64)
GPT2 = nt.models.GPT2Config(layers=2, embed=32, heads=4, vocab=50, positions=64)


def decoding(model: Any, rows: int = 1, tiles: Any = None, **changes: Any) -> Graph:
    spec = StepSpec(model, rows, 1, Tiling(tiles or {}), "fp32", **changes)
    return spec.generation(CacheShape(32, 9), Sampling(True), advances=True).graph


def titles(graph: Graph) -> Counter[str]:
    return Counter(op.title for op in graph.ops if isinstance(op, Gemv))


def kinds(graph: Graph) -> set[str]:
    return {op.kind for op in graph.ops}


def test_products_of_llama_normalise_and_gate() -> None:
    graph = decoding(nt.models.Llama(LLAMA, seed=0))
    assert titles(graph) == {
        "Gemv + rms_norm": 2 + 2 + 1,  # q, k and v; up; head
        "Gemv + residual": 2 + 2,
        "Gemv + rms_norm + silu + factor": 2,
    }
    assert kinds(graph).isdisjoint({"Contract", "RMSNorm", "Gated", "Add"})


def test_products_of_gpt2_normalise() -> None:
    graph = decoding(nt.models.GPT2(GPT2, seed=0))
    assert titles(graph) == {
        "Gemv + bias": 1,  # the first norm also adds the embeddings: a generated kernel
        "Gemv + layer_norm + bias": 1,
        "Gemv + bias + residual": 2 + 2,
        "Gemv + layer_norm + bias + gelu_new": 2,
        "Gemv + layer_norm": 1,
    }


@pytest.mark.parametrize(
    ("axis", "tile", "product"),
    [("ffn", 20, "h0.mlp.down_proj"), ("heads", 2, "h0.attn.o_proj"), ("embed", 16, "h0.mlp.up_proj")],
)
def test_products_whose_sums_are_cut_stay_contractions(axis: str, tile: int, product: str) -> None:
    graph = decoding(nt.models.Llama(LLAMA, seed=0), tiles={axis: tile})
    (op,) = (op for op in graph.ops if op.name == f"{product}.Contract")
    assert op.kind == "Contract" and titles(graph)


def test_other_passes_have_no_such_products() -> None:
    model = nt.models.Llama(LLAMA, seed=0)
    assert not titles(decoding(model, rows=2)) and not titles(decoding(model, fusion=Fusion.of(False)))
    assert not titles(StepSpec(model, 1, 1).graphs.graph)
