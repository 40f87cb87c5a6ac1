"""On CUDA devices: 8-bit products give the same bits on any number of GPUs and ranks, and losses near those of bf16."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_runs import GPUS, TILINGS, trained
from test_fp8_packed import BERT, FILLS, check_independence_of_earlier_steps, filled_products
from test_mpi import LACKS, ended, start

import nntile_py as nt
from nntile_py import _core
from nntile_py.errors import ConfigError
from nntile_py.testing import error

if not (torch.cuda.is_available() and _core.has_cuda):
    pytest.skip("needs a CUDA device and an extension built for it", allow_module_level=True)

SETTINGS: list[dict[str, Any]] = [
    {"precision": "bf16"},
    {"precision": "fp8"},
    {"precision": "fp8", "recompute": "layer"},
    {"precision": "fp8", "fp8": {"gradients": "e5m2"}},
    {"precision": "fp8", "fp8": {"scales": "row"}},
]


def check_runs(found: Sequence[Any]) -> None:
    """Runs have the same bits on all numbers of GPUs; losses in fp8 are near those in bf16, the first setting."""
    assert all(one == found[0] for one in found)
    (exact, _), once, again, *others = found[0]
    assert once == again
    for losses, _ in (once, *others):
        np.testing.assert_allclose(losses, exact, rtol=3e-3)
        assert losses != exact


@pytest.mark.parametrize("tiles", TILINGS)
def test_bits_are_the_same(python: Any, tiles: str) -> None:
    found = [trained(python, gpus, tiles, SETTINGS, steps=5) for gpus in GPUS]
    check_runs(found)


# -- packed sequences


@pytest.mark.parametrize("tiles", [{}, {"embed": 64, "ffn": 96}, {"embed": 50, "ffn": 100}], ids=str)
@pytest.mark.parametrize("rows", [48, 50])  # 50: no room for a multiple of 16 tokens, so sums over tokens are in bf16
@pytest.mark.parametrize("by_row", [False, True])
def test_products_of_the_filled_part_of_tiles(tiles: dict[str, int], rows: int, by_row: bool) -> None:
    """Neither what an earlier run left behind the filled part nor NaN there affects a result."""
    with nt.Runtime(cpus=0, cuda=1):
        found = filled_products("bf16", {"seq": rows, "embed": 128, "ffn": 192}, FILLS, tiles, by_row=by_row)
    for (y, dw), expected in found:
        assert error(y, expected[0]) < 1e-2 and error(dw, expected[1]) < 2e-3
    for one, two in zip(found[1][0], found[4][0], strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_packed_step_is_independent_of_earlier_steps() -> None:
    with nt.Runtime(cpus=0, cuda=1):
        check_independence_of_earlier_steps("fp8")


# GPUs of each rank, file to which each rank writes, tiles, keyword arguments of each Trainer
SCRIPT = """
import hashlib, json, os, sys
import numpy as np, nntile_py as nt
gpus, out, tiles, settings = int(sys.argv[1]), sys.argv[2], *map(json.loads, sys.argv[3:])
rng = np.random.default_rng(0)
def batch():
    mask = np.arange(256) < rng.integers(20, 257, (16, 1))
    ids = rng.integers(0, 50, mask.shape).cumsum(1) % 1000
    labels = np.where(mask & (rng.random(mask.shape) < 0.2), ids, -100)
    return {"input_ids": ids * mask, "attention_mask": mask.astype(np.int64), "labels": labels}
batches, found = [batch() for _ in range(5)], []
config = nt.models.BERTConfig(layers=2, embed=256, heads=4, vocab=1000, positions=256, dropout=0.1)
with nt.Runtime(cpus=0, cuda=gpus, mpi="OMPI_COMM_WORLD_RANK" in os.environ):
    for one in settings:
        trainer = nt.Trainer(nt.models.BERT(config, seed=0), 16, 256, tiles, pack=True, **one)
        losses = [trainer.step(batch, lr=3e-4) for batch in batches]
        weights = b"".join(w.tobytes() for _, w in sorted(trainer.state_dict().items()))
        found.append([losses, hashlib.sha256(weights).hexdigest()])
        trainer.close()
with open(out + os.environ.get("OMPI_COMM_WORLD_RANK", ""), "w") as file:
    json.dump(found, file)
"""
CAPACITY = 4 * 256  # tokens of a bin with 4 sequences
PACKED_TILES = ['{"batch": 4}', '{"batch": 4, "embed": 128}', '{"batch": 4, "embed": 100}']
E4M3 = 28  # CUDA_R_8F_E4M3, see cudaDataType


def _products_in_8_bits(cache: Path, *, by_row: bool) -> list[list[int]]:
    """Return (m, n, k, distances of the rows of both operands in bytes) of the 8-bit products that a run has timed.

    by_row: whether rows have scales of their own.
    """
    (kept,) = (cache / "nntile_py").glob("gemm-*")
    texts = [text for text in kept.read_text().splitlines() if ("scales of rows" in text) == by_row]
    lines = [text.split() for text in texts if text[0].isdigit()]
    return [[*map(int, line[:5])] for line in lines if int(line[6]) == E4M3]


@pytest.mark.parametrize("tiles", PACKED_TILES)
def test_packed_steps(python: Any, tiles: str, tmp_path: Path) -> None:
    """Products run in 8 bits, also those that sum over tokens. Losses are near those of bf16."""
    found = []
    for gpus in GPUS[:2]:
        run = python(SCRIPT, gpus, tmp_path / "found", tiles, json.dumps(SETTINGS), XDG_CACHE_HOME=str(tmp_path))
        assert run.returncode == 0, run.stderr[-2000:]
        found.append(json.loads((tmp_path / "found").read_text()))
    check_runs(found)
    if torch.cuda.get_device_capability() == (9, 0):
        assert _products_in_8_bits(tmp_path, by_row=True), "no product with scales of rows"
    products = _products_in_8_bits(tmp_path, by_row=False)
    assert any(one[3:] == [CAPACITY, CAPACITY] for one in products), "no sum over tokens"
    over_features = [one for one in products if one[3:] == [one[2], one[2]] and one[2] != CAPACITY]
    assert bool(over_features) == ("100" not in tiles)  # sums over 100 features are in bf16


@pytest.mark.skipif(bool(LACKS), reason=f"no {', no '.join(LACKS)}")
def test_packed_steps_of_ranks(tmp_path: Path) -> None:
    """Two ranks, which may share a GPU, send tiles of 8 bits with their scales."""
    given = ("-c", SCRIPT, 1, tmp_path / "found", PACKED_TILES[1], json.dumps([{"precision": "fp8"}]))
    variables = {"XDG_CACHE_HOME": str(tmp_path), "NNTILE_SHARE_GPUS": "1"}
    for ranks in (1, 2):
        status, _, errors = ended(start(ranks, *given, **variables))
        assert status == 0, errors[-2000:]
    found = [json.loads((tmp_path / f"found{rank}").read_text()) for rank in ("", 0, 1)]
    assert found[1] == found[0] and found[2] == found[0]


def test_an_encoder() -> None:
    """Vectors of texts are near those of bf16, and texts of earlier passes do not affect them."""
    model = nt.models.BERT(BERT.model_copy(update={"head": "none"}), seed=0)
    rng = np.random.default_rng(0)
    short, full = ([rng.integers(0, 512, n).tolist() for n in lengths] for lengths in ([37, 5], [40, 24]))
    with nt.Runtime(cpus=0, cuda=1):
        with nt.Encoder(model, "mean", precision="bf16") as encoder:
            want = encoder(short)
        with nt.Encoder(model, "mean", precision="fp8") as encoder:
            first, _, last = encoder(short), encoder(full), encoder(short)
        np.testing.assert_array_equal(first, last)
        assert 1e-4 < error(first, want) < 0.1
        with nt.Encoder(model, "mean", precision="fp8", fp8={"scales": "row"}, captured=True) as encoder:
            first, _, last = encoder(short), encoder(full), encoder(short)
        np.testing.assert_array_equal(first, last)
        assert 1e-4 < error(first, want) < 0.1
        with pytest.raises(ConfigError, match="captured: got true, but tokens of packed sequences share"):
            nt.Encoder(model, "mean", precision="fp8", captured=True)(short)
