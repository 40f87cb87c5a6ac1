"""Products in 8 bits (precision: fp8): quantisation, the pass over the graph, training in fp32 tiles on CPU workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import nntile_py as nt
from nntile_py.graph.graph import Graph
from nntile_py.graph.passes.fp8 import FP8, quantize_products
from nntile_py.graph.step import StepSpec
from nntile_py.models import GPT2, GPT2Config, Llama, LlamaConfig
from nntile_py.tasks import Contract, Quantize
from nntile_py.tasks.band import Band
from nntile_py.tasks.contract import contract
from nntile_py.tasks.quantize import quantized
from nntile_py.testing import Case, check
from nntile_py.tiles import Tiling
from nntile_py.tiles.dtypes import DTYPES, host_dtype, is_scaled
from nntile_py.tiles.task import Tile

SIZES = {"layers": 2, "embed": 128, "heads": 4, "vocab": 512}
GPT = GPT2Config(positions=64, **SIZES)
MODELS: dict[str, Any] = {
    "gpt2": lambda: GPT2(GPT, seed=0),
    "llama": lambda: Llama(LlamaConfig(kv_heads=2, ffn=192, **SIZES), seed=0),
}
RAGGED = {"batch": 3, "seq": 40, "embed": 72, "ffn": 150}


def test_dtypes_of_returned_arrays() -> None:
    """Arrays of fp16 are float32 too, as docstrings of Encoder and BoundModel say."""
    assert {host_dtype(dtype) for dtype in ("fp16", "bf16", "e4m3", "e5m2", "fp32")} == {"float32"}
    assert all(host_dtype(dtype) == DTYPES[dtype].numpy for dtype in ("fp64", "bool", "int16", "int32", "int64"))


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1.0, 447.0, 1e20])
def test_quantized_is_the_conversion_of_torch(dtype: str, magnitude: float) -> None:
    x = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32) * np.float32(magnitude)
    x[0, :3] = 0, -0.0, x.max() * 2**-20
    values = quantized(x, dtype)
    largest = DTYPES[dtype].largest
    scale = next(s for k in range(-140, 140) if np.abs(x).max() <= largest * (s := 2.0**k))
    expected = torch.tensor(np.float64(x) / scale).float().to(getattr(torch, DTYPES[dtype].torch)).double() * scale
    np.testing.assert_array_equal(values, expected.numpy())
    assert largest * scale / 4 < np.abs(values).max() <= largest * scale


def test_the_values_of_a_tile_with_a_value_that_is_not_finite_are_nan() -> None:
    for value in np.inf, -np.inf, np.nan:
        assert np.isnan(quantized(np.array([1.0, value, 2.0]), "e4m3")).all()
    assert (quantized(np.zeros(4), "e5m2") == 0).all()


def test_rows_have_scales_of_their_own() -> None:
    x = np.random.default_rng(0).standard_normal((3, 4, 8)) * 2.0 ** np.arange(0, 36, 3).reshape(3, 4, 1)
    rows = quantized(x, "e4m3", 2)
    for index in np.ndindex(3, 4):
        np.testing.assert_array_equal(rows[index], quantized(x[index], "e4m3"))
    x[1, 2, 3] = np.inf
    assert np.isnan(quantized(x, "e4m3", 2)).all(axis=2).sum() == 1


def test_a_tile_has_room_for_its_scales() -> None:
    assert Tile("x", (0,), (3, 5), "e4m3", scales=3).bytes == 16 + 16
    assert Tile("x", (0,), (5, 8), "e4m3", scales=5).bytes == 48 + 32
    assert Tile("x", (0,), (3, 5), "e4m3").bytes == 16 + 16
    assert Tile("x", (0,), (4, 8), "e5m2").bytes == 32 + 16
    assert Tile("x", (0,), (4, 8), "bf16").bytes == 64


@pytest.mark.parametrize("policy", ["chain", "tree"])
@pytest.mark.parametrize("tiles", [{}, {"embed": 8, "ffn": 10}, {"batch": 3, "embed": 10, "ffn": 17}])
@pytest.mark.parametrize("by_row", [False, True])
def test_a_product_reads_quantised_operands(tiles: dict[str, int], policy: str, by_row: bool) -> None:
    def row(case: Case) -> Any:
        x, w = case.x("batch seq embed"), case.x("embed ffn")
        (x8,) = case.add(Quantize(x, [_temp(case, "batch seq embed", 2 * by_row)], [2])).outputs
        (w8,) = case.add(Quantize(w, [_temp(case, "ffn embed", 1 * by_row)], [1])).outputs
        case.add(Contract(x8, w8, case.y("batch seq ffn"), bias=case.x("ffn")))

    # The reference has one scale for the whole tensor or row: values near the least one of e4m3 may differ.
    with nt.Runtime(cpus=2):
        check(row, tiles, policy, "fp32", tolerance=2e-4)


def _temp(case: Case, axes: str, scaled: int) -> Any:
    names = axes.split()
    return case.graph.temp("eight bits", names, [case.sizes[a] for a in names], "e4m3", scaled=scaled)


# -- the pass


def quantised_products(spec: StepSpec) -> dict[str, list[Contract]]:
    """Return {operator's name: its products in 8 bits}, in the order of the graph."""
    found: dict[str, list[Contract]] = {}
    for op in spec.graphs.graph.ops:
        if isinstance(op, Contract) and is_scaled(op.a.dtype):
            assert is_scaled(op.b.dtype)
            found.setdefault(op.name, []).append(op)
    return found


def test_the_products_of_layers_are_in_8_bits() -> None:
    spec = StepSpec(MODELS["gpt2"](), 4, 64, precision="fp8")
    products = quantised_products(spec)
    names = ("attn.q", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert [*products] == [f"h{layer}.{name}.Contract" for layer in (0, 1) for name in names]
    assert all([op.phase for op in ops] == ["forward", "backward", "backward"] for ops in products.values())
    for op in (op for ops in products.values() for op in ops):  # the summed axes come last
        assert all(x.axes[-len(op.k) :] == tuple(op.k) for x in (op.a, op.b)), op.inputs
    # Each activation, gradient and weight is quantised once: 3 tensors for each product, of which QKV's input has one.
    made = [op for op in spec.graphs.graph.ops if isinstance(op, Quantize)]
    assert len(made) == 3 * len(products) and len({op.inputs[0] for op in made}) == len(made)
    assert all(len(op.outputs) == 2 for op in made)


def test_gradients_may_have_a_wider_range() -> None:
    spec = StepSpec(MODELS["llama"](), 4, 64, precision="fp8", fp8=FP8(gradients="e5m2"))
    for ops in quantised_products(spec).values():
        for op in ops:
            expected = {"e4m3"} if op.phase == "forward" else {"e4m3", "e5m2"}
            assert {op.a.dtype, op.b.dtype} == expected


def test_rows_of_products_may_have_scales() -> None:
    spec = StepSpec(MODELS["gpt2"](), 4, 64, Tiling({"batch": 2}), precision="fp8", fp8=FP8(scales="row"))
    for op in (op for ops in quantised_products(spec).values() for op in ops):
        assert (op.a.scaled, op.b.scaled) == (len(op.m), len(op.n))
    tiles = {a.tile for task in spec.step().first.tasks.tasks for a in task.accesses if is_scaled(a.tile.dtype)}
    assert {tile.scales for tile in tiles} == {2 * 64, 128, 3 * 128, 512}
    other = StepSpec(MODELS["gpt2"](), 4, 64, Tiling({"batch": 2}), precision="fp8").step()
    assert other.first.tasks.digest() != spec.step().first.tasks.digest()


def test_excluded_products_stay_in_bf16() -> None:
    spec = StepSpec(MODELS["gpt2"](), 4, 64, precision="fp8", fp8=FP8(exclude=["h0.*", "*.c_fc.*"]))
    assert [*quantised_products(spec)] == [f"h1.{name}.Contract" for name in ("attn.q", "attn.c_proj", "mlp.c_proj")]


def test_an_evaluation_has_no_operands_of_gradients() -> None:
    evaluation = StepSpec(MODELS["gpt2"](), 4, 64, precision="fp8").evaluation()
    made = [op for op in evaluation.graph.ops if isinstance(op, Quantize)]
    assert len(made) == 16 and all(len(op.outputs) == 1 for op in made)


def test_any_number_of_tokens_is_allowed() -> None:
    evaluation = StepSpec(MODELS["gpt2"](), 1, 3, precision="fp8").evaluation()
    assert sum(isinstance(op, Contract) and is_scaled(op.a.dtype) for op in evaluation.graph.ops) == 8


def test_a_forward_pass_may_lack_excluded_products() -> None:
    spec = StepSpec(MODELS["gpt2"](), 4, 64, precision="fp8", fp8=FP8(exclude=["no.such.*"]))
    outputs = spec.outputs("logits")
    assert outputs.graph.class_axes == {"vocab"}
    products = [op for op in outputs.graph.ops if isinstance(op, Contract)]
    assert sum(is_scaled(op.a.dtype) for op in products) == len(products) - 1 == 8  # all but the logits


def test_a_model_with_a_band_keeps_its_products() -> None:
    graph = Graph("bf16")
    weight = graph.named("weight", ["seq", "key"], [64, 64], "param")
    weight.band = Band(causal=True)
    x = graph.named("x", ["key", "embed"], [64, 64], "input")
    contract(graph, weight, x, ["seq", "embed"])
    quantize_products(graph, FP8())
    assert [type(op) for op in graph.ops] == [Contract]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fp8": FP8(exclude=["h7.*"])}, "fp8.exclude: 'h7.*' matches no product; allowed: patterns of h0.attn.q"),
        ({"fp8": 1}, "fp8: got 1; allowed: "),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(nt.ConfigError, match="^" + message.replace("*", r"\*")):
        _ = StepSpec(MODELS["gpt2"](), 4, 64, precision="fp8", **options).graphs


def test_a_model_whose_products_are_too_small_is_refused() -> None:
    small = GPT2(GPT2Config(layers=1, embed=24, heads=2, vocab=64, positions=16))
    with pytest.raises(nt.ConfigError, match="precision: got fp8, and no product of the model fits; allowed: a model"):
        _ = StepSpec(small, 2, 16, precision="fp8").graphs


def test_options_are_checked() -> None:
    with pytest.raises(nt.ConfigError, match=r"^fp8\.gradients: got 'bf16'; allowed: e4m3 or e5m2$"):
        FP8(gradients="bf16")
    with pytest.raises(nt.ConfigError, match=r"^fp8\.scales: got 'column'; allowed: tile or row$"):
        FP8(scales="column")
    with pytest.raises(nt.ConfigError, match="fp8: got 3; allowed: a mapping of gradients, scales, exclude"):
        FP8.of(3)  # type: ignore[arg-type]


def test_cpu_workers_refuse_it() -> None:
    with nt.Runtime(cpus=1), pytest.raises(nt.ConfigError, match="precision: fp8 needs GPUs"):
        nt.Trainer(MODELS["gpt2"](), 4, 64, precision="fp8")


# -- training on CPU workers, with fp32 in the place of bf16


def _trained(model: str, workers: int = 2, **options: Any) -> tuple[list[float], list[np.ndarray[Any, Any]]]:
    """Return the losses of some steps, and of an evaluation, and the weights."""
    rng = np.random.default_rng(0)
    with nt.Runtime(cpus=workers):
        trainer = nt.Trainer(MODELS[model](), 4, 64, seed=1, **options)
        losses = []
        for _ in range(6):
            ids = rng.integers(0, 8, (4, 65)).cumsum(1) % 512
            losses.append(trainer.step(ids[:, :64], ids[:, 1:], lr=1e-3))
        losses.append(trainer.evaluate(ids[:, :64], ids[:, 1:]))
        return losses, [np.asarray(weight) for weight in trainer.state_dict().values()]


@pytest.mark.usefixtures("fp8_in_fp32")
@pytest.mark.parametrize("scales", ["tile", "row"])
@pytest.mark.parametrize("tiles", [{}, RAGGED], ids=["uncut", "ragged"])
@pytest.mark.parametrize("model", [*MODELS])
def test_losses_are_near_those_of_fp32(model: str, tiles: dict[str, int], scales: str) -> None:
    exact, _ = _trained(model, precision="fp32")
    losses, _ = _trained(model, precision="fp8", tiles=tiles, fp8={"scales": scales})
    assert losses != exact
    np.testing.assert_allclose(losses, exact, rtol=5e-4)


@pytest.mark.usefixtures("fp8_in_fp32")
@pytest.mark.parametrize("scales", ["tile", "row"])
def test_the_bits_depend_neither_on_workers_nor_on_recompute(scales: str) -> None:
    options: dict[str, Any] = {"precision": "fp8", "tiles": RAGGED, "fp8": {"scales": scales}}
    losses, weights = _trained("gpt2", **options)
    for other in ({"workers": 1}, {"recompute": "layer"}):
        again, same = _trained("gpt2", **options, **other)
        assert again == losses
        for one, two in zip(weights, same, strict=True):
            np.testing.assert_array_equal(one, two)


@pytest.mark.usefixtures("fp8_in_fp32")
def test_a_checkpoint_keeps_the_options(tmp_path: Any) -> None:
    with nt.Runtime(cpus=1):
        trainer = nt.Trainer(MODELS["gpt2"](), 4, 64, precision="fp8", fp8={"gradients": "e5m2", "exclude": ["h0.*"]})
        trainer.save(tmp_path / "saved")
        trainer.close()
        loaded = nt.Trainer.load(tmp_path / "saved")
        assert loaded.spec.fp8 == FP8(gradients="e5m2", exclude=["h0.*"]) and loaded.precision == "fp8"


def test_the_tiling_of_the_test_is_ragged() -> None:
    tiling = Tiling(RAGGED)
    assert [part.size for part in tiling.parts("seq", 64)] == [40, 24]
    assert [part.size for part in tiling.parts("embed", 128)] == [72, 56]
