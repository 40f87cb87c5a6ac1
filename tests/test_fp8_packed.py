"""Products in 8 bits of packed sequences: only the filled part of a tile counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_fp8 import SIZES, quantised_products

import nntile_py as nt
from nntile_py.execution.cuda_graph import refusal
from nntile_py.execution.program import Store, programs
from nntile_py.execution.task_payload import lives_on_cuda
from nntile_py.graph.lowering import lower
from nntile_py.graph.passes.fp8 import FP8
from nntile_py.graph.step import StepSpec
from nntile_py.tasks import Contract, Lowering, Quantize, Tensor
from nntile_py.tasks.quantize import quantized
from nntile_py.testing import Array, Case, error, rounded
from nntile_py.tiles import Tiling
from nntile_py.tiles.task import live_slot


def filled_products(
    dtype: str, sizes: dict[str, int], fills: Sequence[int], tiles: dict[str, int], *, by_row: bool = False
) -> list[tuple[list[Array], list[Array]]]:
    """Compute x w, and x' dy as a sum over tokens, for several numbers of filled rows, as of packed sequences.

    The runs share their tiles, so 8-bit tiles hold values of earlier runs behind the filled part. The values of x and
    dy behind the filled part are NaN.

    Args:
        dtype: dtype of x, w, dy and x w.
        sizes: sizes of seq, embed and ffn.
        fills: the number of filled rows of each run.
        tiles: tile sizes of embed and ffn.
        by_row: each row of a tile has a scale, not each tile.

    Returns:
        For each run: (results, expected results).
    """
    case = Case({"batch": 1, **sizes}, dtype)
    case.graph.live = frozenset({"seq"})
    x, dy, w = case.x("batch seq embed"), case.x("batch seq ffn"), case.x("embed ffn")
    x8, x8_last, dy8_last, w8 = (
        case.y(axes, "e4m3") for axes in ("batch seq embed", "embed batch seq", "ffn batch seq", "ffn embed")
    )
    for out, rows in (x8, 2), (x8_last, 1), (dy8_last, 1), (w8, 1):
        out.scaled = rows if by_row else 0
    case.add(Quantize(x, [x8, x8_last], [2, 1]))
    case.add(Quantize(dy, [dy8_last], [1]))
    case.add(Quantize(w, [w8], [1]))
    y, dw = case.y("batch seq ffn"), case.y("embed ffn", case.sum_dtype)
    case.add(Contract(x8, w8, y))
    case.add(Contract(x8_last, dy8_last, dw)).phase = "backward"
    low = lower(case.graph, Tiling(tiles), "chain")
    assert lives_on_cuda(low.tasks)
    store, found = Store(), []
    for filled in fills:
        rng = np.random.default_rng(filled)
        values = {t: rounded(_of_many_sizes(rng, t.shape), dtype) for t in (x, dy, w)}
        behind = np.arange(x.size("seq"))[None, :, None] >= filled
        for tensor, value in values.items():
            store.write(low, tensor, value if tensor is w else np.where(behind, np.nan, value))
        if not found:
            (program,) = programs([low.tasks], store)
        program.run({live_slot("seq", 0): float(filled)})
        rows_x, rows_dy = (values[tensor][0, :filled] for tensor in (x, dy))
        (by_token,), of_w = _of_tiles(low, x8, rows_x[None]), _of_tiles(low, w8, values[w].T)
        of_x, of_dy = (_of_tiles(low, t, v.T[:, None])[:, 0] for t, v in ((x8_last, rows_x), (dy8_last, rows_dy)))
        found.append(([store.read(low, y)[0, :filled], store.read(low, dw)], [by_token @ of_w.T, of_x @ of_dy.T]))
    return found


def _of_many_sizes(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Return random values whose size differs from row to row and from column to column."""
    sizes = rng.integers(-4, 5, (shape[-2], 1)), rng.integers(-4, 5, shape[-1])
    return np.asarray(rng.standard_normal(shape) * 2.0 ** sizes[0] * 2.0 ** sizes[1])


def _of_tiles(low: Lowering, tensor: Tensor, value: Array) -> Array:
    """Return the values that the tiles of an 8-bit tensor stand for; value: the filled part of the tensor."""
    values = np.zeros(value.shape)
    for where, _ in low.grid(tensor):
        values[where] = quantized(value[where], tensor.dtype, tensor.scaled)
    return values


FILLS = [48, 23, 1, 32, 23, 47]  # of 48 rows


@pytest.mark.parametrize(
    "tiles", [{}, {"embed": 16, "ffn": 8}, {"embed": 20, "ffn": 17}], ids=["uncut", "even", "ragged"]
)
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("rows", [48, 50])
def test_products_of_the_filled_part_of_tiles(tiles: dict[str, int], rows: int, by_row: bool) -> None:
    with nt.Runtime(cpus=2):
        found = filled_products("fp32", {"seq": rows, "embed": 32, "ffn": 24}, FILLS, tiles, by_row=by_row)
    for results, expected in found:
        assert all(error(got, want) < 1e-5 for got, want in zip(results, expected, strict=True))
    for one, two in zip(found[1][0], found[4][0], strict=True):
        np.testing.assert_array_equal(one, two)


# -- training on CPU workers, with fp32 in the place of bf16

BERT = nt.models.BERTConfig(positions=64, dropout=0.1, **SIZES)
LENGTHS = [64, 9, 31, 50, 17, 2, 40, 21]


def _sequences(lengths: list[int], seed: int) -> dict[str, Array]:
    """Return padded arrays of sequences that a model can learn, with labels of about half of the tokens."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 8, (len(lengths), 64)).cumsum(1) % 512
    mask = np.arange(64) < np.array(lengths)[:, None]
    labels = np.where(mask & (rng.random(ids.shape) < 0.5), ids, -100)
    return {"input_ids": ids * mask, "attention_mask": mask.astype(np.int64), "labels": labels}


def packed_losses(model: Any, batches: Sequence[dict[str, Array]], **options: Any) -> tuple[list[float], list[Array]]:
    """Return the losses of a step for each batch, and of an evaluation, and the weights."""
    trainer = nt.Trainer(model, 8, 64, **{"pack": True, "tiles": {"batch": 4}} | options)
    losses = [trainer.step(batch) for batch in batches]
    losses.append(trainer.evaluate(batches[0]))
    weights = [np.asarray(weight) for weight in trainer.state_dict().values()]
    trainer.close()
    return losses, weights


PACKED_TILES = {"uncut": {}, "even": {"batch": 4, "embed": 64}, "ragged": {"batch": 3, "embed": 72, "ffn": 150}}


@pytest.mark.usefixtures("fp8_in_fp32")
@pytest.mark.parametrize("tiling", PACKED_TILES)
@pytest.mark.parametrize("head", ["masked_lm", "classification"])
def test_packed_losses_are_near_those_of_padded_sequences(tiling: str, head: str) -> None:
    """Scales cover a bin instead of a padded batch, so losses differ a little."""
    batches = [_sequences(LENGTHS, seed) for seed in range(4)]
    for batch in batches if head == "classification" else ():
        batch["labels"] = batch["input_ids"][:, 0] % 3
    config, options = BERT.model_copy(update={"head": head, "classes": 3}), {"tiles": PACKED_TILES[tiling]}
    ways: list[dict[str, Any]] = [{"precision": "fp32"}, {"precision": "fp8"}, {"precision": "fp8", "pack": False}]
    with nt.Runtime(cpus=2):
        found = [packed_losses(nt.models.BERT(config, seed=0), batches, **options, **way)[0] for way in ways]
    exact, packed, padded = found
    assert packed != exact
    np.testing.assert_allclose(packed, exact, rtol=2e-3)
    np.testing.assert_allclose(packed, padded, rtol=1e-3)


MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt2": (nt.models.GPT2, {}),
    "llama": (nt.models.Llama, {"kv_heads": 2, "ffn": 192}),
    "modernbert": (nt.models.ModernBERT, {"local_attention": 17}),
    "deberta": (nt.models.DeBERTa, {"relative_positions": 9}),  # on GPUs complete bins are computed
    "albert": (nt.models.ALBERT, {}),
}


@pytest.mark.few(2)
@pytest.mark.usefixtures("fp8_in_fp32")
@pytest.mark.parametrize("name", MODELS)
def test_packed_models(name: str) -> None:
    cls, more = MODELS[name]
    config = cls.Config(**{"positions": 64} | SIZES | more)
    batches = [_sequences(LENGTHS, seed) for seed in range(3)]
    ways: list[dict[str, Any]] = [{"precision": "fp32"}, {"precision": "fp8"}, {"precision": "fp8", "pack": False}]
    with nt.Runtime(cpus=2):
        exact, packed, padded = (packed_losses(cls(config, seed=0), batches, **way)[0] for way in ways)
    assert packed != exact
    np.testing.assert_allclose(packed, exact, rtol=2e-3)
    np.testing.assert_allclose(packed, padded, rtol=1e-3)


@pytest.mark.few(2)
@pytest.mark.usefixtures("fp8_in_fp32")
@pytest.mark.parametrize(
    "options",
    [
        {"fp8": {"scales": "row"}},
        {"accumulate": "tree"},
        {"accumulate": "redux"},
        {"check_finite": True},
        {"fusion": False},
        {"grad_accumulation": 2},
    ],
    ids=str,
)
def test_packed_steps_with_other_options(options: dict[str, Any]) -> None:
    batches = [_sequences(LENGTHS * options.get("grad_accumulation", 1), seed) for seed in range(2)]
    found = []
    with nt.Runtime(cpus=2):
        for pack in (True, False):
            trainer = nt.Trainer(
                nt.models.BERT(BERT, seed=0), 8, 64, PACKED_TILES["ragged"], precision="fp8", pack=pack, **options
            )
            found.append([trainer.step(batch) for batch in batches])
            trainer.close()
    np.testing.assert_allclose(*found, rtol=1e-3)


@pytest.mark.usefixtures("fp8_in_fp32")
def test_packed_bits_depend_neither_on_workers_nor_on_recompute() -> None:
    batches = [_sequences(LENGTHS, 0), _sequences([5, 64], 1), _sequences(LENGTHS, 2)]
    found = []
    for workers, recompute in (2, "none"), (1, "none"), (2, "layer"):
        with nt.Runtime(cpus=workers):
            found.append(packed_losses(nt.models.BERT(BERT, seed=0), batches, precision="fp8", recompute=recompute))
    for losses, weights in found[1:]:
        assert losses == found[0][0]
        for one, two in zip(weights, found[0][1], strict=True):
            np.testing.assert_array_equal(one, two)


def check_independence_of_earlier_steps(precision: str) -> None:
    """Values that an earlier step has left behind the filled part of tiles affect no loss and no gradient."""
    full, short = _sequences([64] * 8, 0), _sequences([5, 64, 3], 1)
    found = []
    for batches in ([short], [full, short]):
        trainer = nt.Trainer(
            nt.models.BERT(BERT.model_copy(update={"dropout": 0.0}), seed=0), 8, 64, {"batch": 4}, precision=precision,
            pack=True, optimizer=nt.SGD(lr=0.0),
        )  # fmt: skip
        loss = [trainer.step(batch) for batch in batches][-1]
        found.append((loss, trainer.gradients()))
        trainer.close()
    (one, grads), (two, others) = found
    assert one == two
    for name, grad in grads.items():
        np.testing.assert_array_equal(grad, others[name])


@pytest.mark.usefixtures("fp8_in_fp32")
def test_a_packed_step_is_independent_of_earlier_steps() -> None:
    with nt.Runtime(cpus=2):
        check_independence_of_earlier_steps("fp8")


@pytest.mark.usefixtures("fp8_in_fp32")
@pytest.mark.parametrize("scales", ["tile", "row"])
def test_an_encoder(scales: str) -> None:
    """With scales of rows, the vector of a text does not depend on other texts."""
    model = nt.models.BERT(BERT.model_copy(update={"head": "none"}), seed=0)
    rng = np.random.default_rng(0)
    one, two, three = (rng.integers(0, 512, n).tolist() for n in (37, 5, 20))
    with nt.Runtime(cpus=1):
        with nt.Encoder(model, "mean") as encoder:
            exact = encoder([one, two])
        with nt.Encoder(model, "mean", precision="fp8", fp8={"scales": scales}) as encoder:
            vectors, again, others = encoder([one, two]), encoder([one, two]), encoder([one, three])
    assert 1e-4 < error(vectors, exact) < 0.02
    np.testing.assert_array_equal(vectors, again)
    if scales == "row":
        np.testing.assert_array_equal(vectors[0], others[0])


def test_packed_products_are_in_8_bits() -> None:
    """Also those on masked tokens and on sequences; on GPUs they compute the filled part."""
    spec = StepSpec(nt.models.BERT(BERT), 8, 64, Tiling({"batch": 4}), precision="fp8", pack=True)
    products = quantised_products(spec)
    assert sum(map(len, products.values())) == 3 * (2 * 4 + 1)
    assert any("masked" in op.a.axes for ops in products.values() for op in ops)
    assert lives_on_cuda(spec.step().first.tasks)
    classifier = nt.models.BERT(BERT.model_copy(update={"head": "classification"}))
    pooled = StepSpec(classifier, 8, 64, precision="fp8", pack=True)
    assert any("sequence" in op.a.axes for ops in quantised_products(pooled).values() for op in ops)
    forward = pooled.outputs("logits").forward.tasks
    assert lives_on_cuda(forward) and refusal(forward) == "tokens of packed sequences share the scale of an 8-bit tile"
    assert not refusal(replace(pooled, fp8=FP8(scales="row")).outputs("logits").forward.tasks)
    assert not refusal(pooled.padded.outputs("logits").forward.tasks)
