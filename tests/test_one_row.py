"""Products of a row, with their norms and gates, in passes that generate one token of one text; of a few rows."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from operators_contract import linear
from operators_generation import gemv

import nntile_py as nt
from nntile_py import tasks as ops
from nntile_py.execution.program import Store, programs
from nntile_py.graph.fusion import Fusion
from nntile_py.graph.graph import Graph
from nntile_py.graph.key_value_cache import CacheShape, Sampling
from nntile_py.graph.lowering import lower
from nntile_py.graph.passes.one_row import fuse_one_row
from nntile_py.graph.step import StepSpec
from nntile_py.tasks.gemv import Gemv
from nntile_py.testing import SIZES, Case, check, error
from nntile_py.tiles import Tiling

LLAMA = nt.models.LlamaConfig(layers=2, embed=32, heads=4, kv_heads=2, ffn=48, vocab=50, positions=64)
GPT2 = nt.models.GPT2Config(layers=2, embed=32, heads=4, vocab=50, positions=64)


def decoding(model: Any, rows: int = 1, tiles: Any = None, partial_sums: bool = False, **changes: Any) -> Graph:
    spec = StepSpec(model, rows, 1, Tiling(tiles or {}), "fp32", **changes)
    return spec.generation(CacheShape(32, 9), Sampling(True), advances=True, partial_sums=partial_sums).graph


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


TILES = {"heads": 2, "ffn": 20}


def test_readers_of_partial_sums_add_them() -> None:
    graph = decoding(nt.models.Llama(LLAMA, seed=0), tiles=TILES, partial_sums=True)
    by_name = {op.name: op for op in graph.ops if isinstance(op, Gemv)}
    o, up, down, q = (by_name[f"h{name}.Contract"]
                      for name in ("0.attn.o_proj", "0.mlp.up_proj", "0.mlp.down_proj", "1.attn.q_proj"))  # fmt: skip
    assert [part.size for part in o.parts] == [2, 2] and [part.size for part in down.parts] == [20, 20, 8]
    assert up.x == tuple(o.outputs) == down.residual and q.x == tuple(down.outputs)
    assert "Contract" not in kinds(graph)


@pytest.mark.parametrize("other", [False, True])
def test_a_sum_that_an_activation_reads_stays_whole(other: bool) -> None:
    g, sizes = Graph("fp32"), {"one": 1, "embed": 24, "ffn": 20, "vocab": 30}

    def named(name: str, axes: str, kind: str) -> Any:
        return g.named(name, axes.split(), [sizes[a] for a in axes.split()], kind)

    x, w, head = named("x", "one embed", "input"), named("w", "ffn embed", "param"), named("head", "vocab ffn", "param")
    y = g.temp("y", ["one", "ffn"], [1, 20], "fp32")
    g.add(ops.Contract(x, w, y))
    g.add(ops.Contract(y, head, named("logits", "one vocab", "output")))
    if other:
        g.add(ops.Activation(y, named("z", "one ffn", "output"), "relu"))
    fuse_one_row(g, Tiling({"embed": 10}), partial_sums=True)
    assert [op.kind for op in g.ops] == (["Contract", "Gemv", "Activation"] if other else ["Gemv", "Gemv"])
    assert [len(op.inputs) for op in g.ops[:2]] == ([2, 2] if other else [2, 4])


def test_other_passes_have_no_such_products() -> None:
    model = nt.models.Llama(LLAMA, seed=0)
    assert not titles(decoding(model, rows=2)) and not titles(decoding(model, fusion=Fusion.of(False)))
    assert not titles(StepSpec(model, 1, 1).graphs.graph)


@pytest.mark.parametrize("policy", ["chain", "redux"])
@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
def test_partial_sums(policy: str, dtype: str, runtime: nt.Runtime) -> None:
    """Of an axis cut evenly and with a rest, with the addends of a row and of a residual."""
    for cut in ({"heads": 2}, {"heads": 3}):
        row = gemv("heads head_dim", "embed", residual=2, bias=True, addends=2, scale=0.7, cut=cut)
        check(row, {**cut, "embed": 10}, policy, dtype)
    check(gemv(norm="layer_norm", residual=3, addends=3, activation="silu"), {"ffn": 17}, policy, dtype)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 13, 15])
@pytest.mark.parametrize("tiles", [{}, {"embed": 50}, {"embed": 37, "ffn": 6}])
@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
def test_products_of_few_rows(rows: int, tiles: dict[str, int], dtype: str, runtime: nt.Runtime) -> None:
    """The kernel computes blocks of rows and of columns, of which the last are smaller. It adds tiles of a cut sum."""
    sizes = {**SIZES, "batch": 1, "seq": rows, "embed": 100, "ffn": 21}
    check(linear(b="ffn embed", scale=-0.37), tiles, "chain", dtype, sizes)


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize("summed", [83, 300])
def test_a_row_has_the_same_bits_beside_others(runtime: nt.Runtime, dtype: str, summed: int) -> None:
    """Products of up to 16 rows, as of several texts that are continued together."""
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((1, 16, summed)), rng.standard_normal((21, summed))
    results = []
    for rows in range(1, 17):
        case = Case(SIZES | {"batch": 1, "seq": rows, "embed": summed, "ffn": 21}, dtype)
        linear("batch seq embed", "ffn embed", "batch seq ffn")(case)
        (op,) = case.graph.ops
        low, store = lower(case.graph, Tiling(), "chain"), Store()
        for tensor, value in zip(op.inputs, (x[:, :rows], weight), strict=True):
            store.write(low, tensor, value.astype(np.float32 if dtype == "fp32" else np.float64))
        programs([low.tasks], store)[0].run({})
        results.append(store.read(low, op.outputs[0])[0])
    for got in results:
        assert error(got, x[0, : len(got)] @ weight.T) < {"fp32": 1e-6, "fp64": 1e-14}[dtype]
        np.testing.assert_array_equal(got, results[-1][: len(got)])
