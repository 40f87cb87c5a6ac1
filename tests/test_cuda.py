"""On a CUDA device: every operator against its float64 reference, GPT-2, memory limits, Python tasks."""

import importlib
import itertools
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from operators import ROWS, TILINGS
from operators_contract import linear
from operators_losses import adamw, lion, muon_update, sgd
from relative_rows import CASES as RELATIVE
from relative_rows import fitted
from test_attention import SIZES as ATTENTION_SIZES
from test_attention import Row as AttentionRow
from test_packed import LENGTH, LENGTHS, inputs, made

import nntile_py as nt
from nntile_py import _core
from nntile_py.graph.fusion import Fusion
from nntile_py.tasks import launch
from nntile_py.testing import check, error, with_gradient

if not (torch.cuda.is_available() and _core.has_cuda):
    pytest.skip("needs a CUDA device and an extension built for it", allow_module_level=True)

SPLIT = {
    "AdamW split": adamw(split=True), "SGD split": sgd(0.0, split=True), "SGD momentum split": sgd(0.8, split=True),
    "Lion split": lion(split=True), "MuonUpdate split": muon_update("heads head_dim embed", split=True),
}  # fmt: skip
LARGE = {"batch": 2, "seq": 192, "embed": 136, "heads": 4, "head_dim": 64, "ffn": 320, "vocab": 1000}
FOLDER = __file__.rpartition("/")[0]
CONFIG = nt.models.GPT2Config(layers=3, embed=128, heads=4, vocab=512, positions=64)


@pytest.fixture(scope="module")
def cuda() -> Iterator[nt.Runtime]:
    with nt.Runtime(cpus=0, cuda=1) as running:
        yield running


@pytest.mark.parametrize(
    ("tiling", "policy"), [("uncut", "chain"), ("even", "tree"), ("ragged", "chain"), ("ragged", "redux")]
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_operator(cuda: nt.Runtime, row: Any, dtype: str, tiling: str, policy: str) -> None:
    check(row, TILINGS[tiling], policy, dtype, tolerance=3e-5 if dtype == "fp32" else None)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("row", SPLIT.values(), ids=SPLIT)
def test_split_parameters(cuda: nt.Runtime, row: Any, dtype: str) -> None:
    check(row, TILINGS["ragged"], "chain", dtype)


@pytest.mark.parametrize("policy", ["chain", "redux"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_operator_on_large_tiles(cuda: nt.Runtime, row: Any, dtype: str, policy: str) -> None:
    check(row, {"batch": 1, "embed": 136}, policy, dtype, LARGE, tolerance=5e-5 if dtype == "fp32" else None)


@pytest.mark.parametrize("vocab", [50257, 30522])
@pytest.mark.parametrize("tiles", [{}, {"batch": 3}], ids=["uncut", "cut"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_rows_that_are_not_aligned(cuda: nt.Runtime, dtype: str, tiles: dict[str, int], vocab: int) -> None:
    """Logits of 50257 tokens: each row begins at another multiple of 2 bytes. Large products are computed in parts."""
    sizes = {"batch": 5, "seq": 256, "embed": 64, "vocab": vocab}
    row = partial(with_gradient, linear("batch seq embed", "vocab embed", "batch seq vocab"), (0,))
    check(row, tiles, "chain", dtype, sizes)


def losses(trainer: nt.Trainer, steps: int) -> list[float]:
    rng = np.random.default_rng(5)
    ids = rng.integers(0, CONFIG.vocab, (trainer.batch, trainer.seq))  # one batch, learnt by heart
    return [p.result().loss for p in [trainer.submit(ids, ids) for _ in range(steps)]]


def train(dtype: str, steps: int = 20, **options: Any) -> list[float]:
    model = nt.models.GPT2(CONFIG, seed=1)
    trainer = nt.Trainer(model, 8, 64, precision=dtype, optimizer=nt.AdamW(lr=1e-3), clip_grad_norm=1.0, **options)
    result = losses(trainer, steps)
    trainer.close()
    return result


@pytest.fixture(scope="module")
def expected(cpu_losses: Any) -> list[float]:
    """The losses in fp32 on the CPU."""
    return cpu_losses("test_cuda", 'train("fp32")')  # type: ignore[no-any-return]


CUTS: dict[str, dict[str, int]] = {
    "uncut": {}, "batch": {"batch": 2}, "ragged": {"batch": 3, "embed": 48, "heads": 3, "ffn": 200, "vocab": 300},
    "seq": {"seq": 24, "batch": 4},
}  # fmt: skip


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("dtype", "limit"), [("fp32", 1e-4), ("tf32", 5e-3), ("bf16", 2e-2), ("fp16", 5e-3)])
def test_training(cuda: nt.Runtime, expected: list[float], dtype: str, limit: float, cut: str) -> None:
    got = train(dtype, tiles=CUTS[cut])
    assert got[-1] < 0.8 * got[0]
    assert error(got, expected) < limit


def test_gradients_that_overflow(cuda: nt.Runtime) -> None:
    """fp16 with a too large loss scale: steps change nothing until the scale is small enough."""
    trainer = nt.Trainer(nt.models.GPT2(CONFIG, seed=1), 8, 64, precision="fp16", loss_scale=2.0**24)
    ids = np.random.default_rng(5).integers(0, CONFIG.vocab, (8, 64))
    steps, weights = [], [trainer.state_dict()]
    while len(steps) < 16 and not (steps and not steps[-1].overflow):
        steps.append(trainer.submit(ids, ids).result())
        weights.append(trainer.state_dict())
    assert len(steps) > 1 and all(step.overflow and step.skipped for step in steps[:-1])
    assert not steps[-1].skipped and [step.loss_scale for step in steps] == [2.0 ** (24 - k) for k in range(len(steps))]
    same = [all((a[name] == b[name]).all() for name in a) for a, b in itertools.pairwise(weights)]
    assert same == [step.skipped for step in steps]
    trainer.close()


def test_a_precision_is_its_trainers_own(cuda: nt.Runtime) -> None:
    """A trainer in tf32, created meanwhile, changes no bit of a trainer in fp32."""
    alone = train("fp32", steps=4)
    fp32, tf32 = (
        nt.Trainer(
            nt.models.GPT2(CONFIG, seed=1), 8, 64, precision=dtype, optimizer=nt.AdamW(lr=1e-3), clip_grad_norm=1.0
        )
        for dtype in ("fp32", "tf32")
    )
    assert losses(fp32, 4) == alone != losses(tf32, 4)
    fp32.close()
    tf32.close()


@pytest.mark.parametrize("policy", ["commute", "redux", "tree"])
def test_training_by_policy(cuda: nt.Runtime, expected: list[float], policy: str) -> None:
    assert error(train("bf16", tiles={"batch": 2, "vocab": 300}, accumulate=policy), expected) < 2e-2


def test_two_runs_are_alike(cuda: nt.Runtime) -> None:
    assert train("bf16", tiles={"batch": 2}) == train("bf16", tiles={"batch": 2})


def test_algorithms_are_kept(python: Any, cuda: nt.Runtime, tmp_path: Path) -> None:
    """What cuBLASLt's products take is measured by the first process, and by no other."""
    first = python(LIMIT, FOLDER, 4096, XDG_CACHE_HOME=str(tmp_path))
    assert first.returncode == 0, first.stderr[-2000:]
    (kept,) = (tmp_path / "nntile_py").glob("gemm-*")
    choices = kept.read_text()
    assert choices.count("\n") > 10
    again = python(LIMIT, FOLDER, 4096, XDG_CACHE_HOME=str(tmp_path))
    assert again.stdout == first.stdout and kept.read_text() == choices


BLOCKS = """
import sys; sys.path.insert(0, sys.argv[1])
import test_cuda, nntile_py as nt
rows = [row for name, row in test_cuda.ROWS.items() if name.startswith("Contract") and "permuted" in name]
with nt.Runtime(cpus=0, cuda=1):
    for row in rows:
        for dtype, tolerance in (("fp32", 5e-5), ("bf16", None), ("fp16", None)):
            test_cuda.check(row, {}, "chain", dtype, test_cuda.LARGE, tolerance=tolerance)
            test_cuda.check(row, test_cuda.TILINGS["ragged"], "chain", dtype, tolerance=tolerance)
"""


def test_each_way_to_permute(python: Any, cuda: nt.Runtime, tmp_path: Path) -> None:
    """A product is written into a target with another order of axes by a copy, by rows or by columns, all correct."""
    first = python(BLOCKS, FOLDER, XDG_CACHE_HOME=str(tmp_path))
    assert first.returncode == 0, first.stderr[-2000:]
    (kept,) = (tmp_path / "nntile_py").glob("gemm-*")
    measured = kept.read_text()
    assert measured.count("blocks") > 5
    for choice in range(3):
        kept.write_text(changed := re.sub(r"(blocks .*: )\d", rf"\g<1>{choice}", measured))
        result = python(BLOCKS, FOLDER, XDG_CACHE_HOME=str(tmp_path))
        assert result.returncode == 0, (choice, result.stderr[-2000:])
        assert kept.read_text() == changed


PRODUCTS = """
import sys; sys.path.insert(0, sys.argv[1])
import test_cuda, nntile_py as nt
from operators_contract import linear
rows = [linear(b="ffn embed", bias="ffn", activation="gelu"), linear(bias="ffn", activation="gelu", pre=True)]
rows += [linear(activation="gelu", aux=True)]
rows += [linear(activation=kind, aux=aux) for kind in ("relu", "tanh", "silu", "quick_gelu") for aux in (False, True)]
with nt.Runtime(cpus=0, cuda=1):
    for row in rows:
        for seq in (37, 500, 1500):
            for dtype in ("bf16", "fp16"):
                test_cuda.check(row, {}, "chain", dtype, {"batch": 1, "seq": seq, "embed": 136, "ffn": 328})
"""


def test_each_product_with_an_epilogue(python: Any, cuda: nt.Runtime, tmp_path: Path) -> None:
    """cuBLASLt with a separate kernel and our kernels are measured once; all are correct."""
    first = python(PRODUCTS, FOLDER, XDG_CACHE_HOME=str(tmp_path))
    assert first.returncode == 0, first.stderr[-2000:]
    (kept,) = (tmp_path / "nntile_py").glob("launches-*")
    measured = kept.read_text()
    assert measured.count("product gelu") == 3 * 3 * 2
    for choice in range(5):  # beyond the last: the first
        kept.write_text(changed := re.sub(r": \d+$", f": {choice}", measured, flags=re.M))
        result = python(PRODUCTS, FOLDER, XDG_CACHE_HOME=str(tmp_path))
        assert result.returncode == 0, (choice, result.stderr[-2000:])
        assert kept.read_text() == changed


# -- packed sequences

BIN = {**ATTENTION_SIZES, "batch": 1, "seq": 300, "key": 300, "head_dim": 64}
ENDS = (1, 1, 40, 41, 290)  # segments of length 1 and 0, 10 positions of none
BIN_MASKS = ["segments", "segments causal", "segments window", "segments around"]


@pytest.mark.parametrize("backend", ["vendor", "segments"])
@pytest.mark.parametrize("layout", ["by seq", "packed", "packed k and v", "groups", "other order"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_attention_over_segments(cuda: nt.Runtime, dtype: str, layout: str, backend: str) -> None:
    tolerance = 5e-5 if dtype == "fp32" else None
    for mask in BIN_MASKS:
        small = {**BIN, "seq": 50, "key": 50, "head_dim": 24}
        for tiles, sizes in (({}, BIN), ({"heads": 2}, BIN), ({"heads": 1}, small)):
            ends = tuple(end * sizes["seq"] // 300 for end in ENDS)
            check(AttentionRow(mask, backend, layout, ends=ends), tiles, "chain", dtype, sizes, tolerance=tolerance)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("tiles", [{}, {"heads": 2}], ids=["uncut", "heads"])
def test_dropout_of_segments(cuda: nt.Runtime, tiles: dict[str, int], dtype: str) -> None:
    def row(case: Any) -> None:
        case.slots["dropout_seed"] = case.options["seed"] = 3
        AttentionRow("segments causal", "segments", "groups", 0.3, ends=ENDS)(case)

    check(row, tiles, "chain", dtype, BIN, tolerance=5e-5 if dtype == "fp32" else None)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", RELATIVE)
def test_attention_with_relative_positions(cuda: nt.Runtime, name: str, dtype: str) -> None:
    for positions, head_dim in ((300, 64), (50, 24)):
        row, sizes, tiles = fitted(name, positions, head_dim=head_dim)
        check(row, tiles, "chain", dtype, sizes, tolerance=5e-5 if dtype == "fp32" else None)


# Tiles are of 128 positions, of 64 with large heads, of 32 with fp32; ENDS leave tokens of no segment.
GROUPED: list[tuple[str, str, int, dict[str, int], float, tuple[int, ...]]] = [
    ("segments", "by seq", 64, {}, 0.0, ENDS), ("segments causal", "packed", 64, {"heads": 2}, 0.3, ENDS),
    ("segments around", "by seq", 64, {"heads": 2}, 0.0, ENDS), ("segments window", "packed", 64, {}, 0.3, (300,)),
    ("segments window", "groups", 24, {"heads": 1}, 0.0, (7, 130, 131, 300)),
    ("segments causal", "groups", 64, {"heads": 1}, 0.3, (300,)),
    ("segments around", "packed k and v", 128, {}, 0.3, (200, 200, 299)),
    ("segments", "other order", 160, {}, 0.3, (128, 256)),
]  # fmt: skip


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of examples/grouped_attention, registered for attention over segments."""
    monkeypatch.syspath_prepend(str(Path(FOLDER).parent / "examples"))
    for name in ("attention_segments", "attention_segments_grad"):
        monkeypatch.setitem(launch.load(), name, launch.load()[name])  # to be restored
    importlib.import_module("grouped_attention").register()


@pytest.mark.usefixtures("grouped")
@pytest.mark.parametrize(("mask", "layout", "head_dim", "tiles", "drop", "ends"), GROUPED)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_grouped_products(
    cuda: nt.Runtime, dtype: str, mask: str, layout: str, head_dim: int, tiles: dict[str, int], drop: float,
    ends: tuple[int, ...],
) -> None:  # fmt: skip
    row, sizes = of_drawn(AttentionRow(mask, "segments", layout, drop, ends=ends)), {**BIN, "head_dim": head_dim}
    check(row, tiles, "chain", dtype, sizes, tolerance=5e-5 if dtype == "fp32" else None)


@pytest.mark.usefixtures("grouped")
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_grouped_products_of_many_segments(cuda: nt.Runtime, dtype: str) -> None:
    """More than a program looks at at once, and more tiles than programs."""
    ends = tuple(np.cumsum([6, 0, 9, 12, 0, 0, 7] * 30 + [300]).tolist())
    sizes = {**BIN, "seq": ends[-1] + 5, "key": ends[-1] + 5}
    row = AttentionRow("segments causal", "segments", "groups", 0.3, ends=ends)
    check(of_drawn(row), {}, "chain", dtype, sizes, tolerance=5e-5 if dtype == "fp32" else None)


@pytest.mark.usefixtures("grouped")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_grouped_products_of_rows(cuda: nt.Runtime, dtype: str) -> None:
    for mask, layout in (("padding causal", "groups"), ("padding", "cross groups"), ("padding around", "by seq")):
        sizes = {**BIN, "batch": 3, "key": 170 if "cross" in layout else 300}
        for tiles in ({}, {"batch": 2, "heads": 2}):
            check(of_drawn(AttentionRow(mask, "segments", layout, 0.3)), tiles, "chain", dtype, sizes,
                  tolerance=5e-5 if dtype == "fp32" else None)  # fmt: skip


def of_drawn(row: AttentionRow) -> Any:
    def build(case: Any) -> None:
        case.slots["dropout_seed"] = case.options["seed"] = 3
        row(case)

    return build


DENSE_MASKS = ["none", "causal", "window", "padding", "padding causal", "padding around"]


def with_dropout(mask: str, layout: str) -> Any:
    return of_drawn(AttentionRow(mask, "segments", layout, 0.3))


@pytest.mark.parametrize("layout", ["by seq", "packed", "groups", "cross groups"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_attention_with_dropout(cuda: nt.Runtime, dtype: str, layout: str) -> None:
    """Sequences of a batch, in tiles of batch and heads."""
    tolerance = 5e-5 if dtype == "fp32" else None
    for mask in DENSE_MASKS:
        if not AttentionRow(mask, "segments", layout).fits:
            continue
        small = {**BIN, "batch": 3, "seq": 50, "key": 33 if "cross" in layout else 50, "head_dim": 24}
        large = {**small, "seq": 300, "key": 170 if "cross" in layout else 300, "head_dim": 64}
        for tiles, sizes in (({}, large), ({"batch": 2, "heads": 2}, large), ({"heads": 1}, small)):
            check(with_dropout(mask, layout), tiles, "chain", dtype, sizes, tolerance=tolerance)


WAYS = """
import sys; sys.path.insert(0, sys.argv[1])
import test_cuda, nntile_py as nt
with nt.Runtime(cpus=0, cuda=1):
    for dtype, tolerance in (("fp32", 5e-5), ("bf16", None), ("fp16", None)):
        for positions in (50, 120, 300):
            row = test_cuda.AttentionRow("segments", "vendor", ends=tuple(x * positions // 300 for x in test_cuda.ENDS))
            sizes = {**test_cuda.BIN, "seq": positions, "key": positions}
            test_cuda.check(row, {}, "chain", dtype, sizes, tolerance=tolerance)
            sizes = {**sizes, "batch": 3}
            test_cuda.check(test_cuda.with_dropout("padding", "packed"), {}, "chain", dtype, sizes, tolerance=tolerance)
"""


def test_each_way_to_attend(python: Any, cuda: nt.Runtime, tmp_path: Path) -> None:
    """The fastest of our kernels, ATen's and cuDNN's is measured once; all are right."""
    first = python(WAYS, FOLDER, XDG_CACHE_HOME=str(tmp_path))
    assert first.returncode == 0, first.stderr[-2000:]
    (kept,) = (tmp_path / "nntile_py").glob("launches-*")
    measured = kept.read_text()
    counts = [measured.count(f"{way} {of}") for way in ("forward", "gradient") for of in ("bf16", "fp16")]
    assert all(3 <= count <= 2 * 3 for count in counts), measured  # a row of three lengths has one candidate at most
    for choice in range(7):  # beyond the last: the first
        kept.write_text(changed := re.sub(r": \d+$", f": {choice}", measured, flags=re.M))
        result = python(WAYS, FOLDER, XDG_CACHE_HOME=str(tmp_path))
        assert result.returncode == 0, (choice, result.stderr[-2000:])
        assert kept.read_text() == changed


RAGGED = [  # of 300 tokens: some of none before and behind, segments of none, of one, of more than a block; one of all
    (5, (5, 6, 46, 47, 47, 290, 290)), (0, (300,)),
]  # fmt: skip


@pytest.mark.parametrize("backend", ["varlen", "cudnn"])
@pytest.mark.parametrize("mask", ["segments", "segments causal"])
@pytest.mark.parametrize("layout", ["by seq", "packed by seq", "groups"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_ragged_kernels(cuda: nt.Runtime, dtype: str, layout: str, mask: str, backend: str) -> None:
    """Each backend by name, in one task and in one task per head, where gradients of shared keys are added."""
    for (start, ends), tiles in itertools.product(RAGGED, ({}, {"heads": 1})):
        check(AttentionRow(mask, backend, layout, ends=ends, start=start), tiles, "chain", dtype, BIN)


@pytest.mark.parametrize("backend", ["varlen", "cudnn"])
@pytest.mark.parametrize("model", [nt.models.BERT, nt.models.GPT2])
def test_ragged_bins(cuda: nt.Runtime, model: Any, backend: str) -> None:
    """Bins with more and fewer tokens, in one program, give the results without packing."""
    batch, other, found = inputs(LENGTHS["some"]), inputs([LENGTH] * len(LENGTHS["some"]), seed=1), []
    config = model.Config(layers=2, embed=32, heads=2, vocab=30, positions=LENGTH, attention=backend)
    for pack in (False, True):
        options: dict[str, Any] = {"pack": pack, "check_finite": True, "optimizer": nt.SGD(lr=0.1)}
        rows = len(LENGTHS["some"])
        trainer = nt.Trainer(model(config, seed=3), rows, LENGTH, {"batch": 3}, precision="bf16", **options)
        steps = [trainer.submit(one).result() for one in (other, batch, other, batch)]
        found.append([(step.loss, step.grad_norm) for step in steps])
        trainer.close()
    assert error(found[1], found[0]) < 2e-2


REFUSED = """
import sys; sys.path.insert(0, sys.argv[1])
import test_cuda, nntile_py as nt
mask, backend, layout, dtype, width = sys.argv[2:]
with nt.Runtime(cpus=0, cuda=1):
    row = test_cuda.AttentionRow(mask, backend, layout, ends=test_cuda.ENDS)
    test_cuda.check(row, {}, "chain", dtype, {**test_cuda.BIN, "head_dim": int(width)})
"""


@pytest.mark.parametrize(
    ("mask", "backend", "layout", "dtype", "width", "told"),
    [
        ("segments window", "cudnn", "by seq", "bf16", 64, "cudnn cannot compute this: a window; allowed: vendor"),
        ("segments", "cudnn", "by seq", "bf16", 24, "compute this: head_dim 24, no multiple of 16; allowed: v"),
        ("segments", "cudnn", "packed", "bf16", 64, "the heads of a token do not lie together; allowed: vendor"),
        ("segments", "cudnn", "by seq", "fp32", 64, "cudnn takes bf16 or fp16, .* got Float, head_dim 64; allowed:"),
        ("segments", "varlen", "by seq", "fp32", 64, "varlen takes bf16 or fp16, .* got Float, head_dim 64; allowed:"),
    ],
)
def test_ragged_refusals(python: Any, mask: str, backend: str, layout: str, dtype: str, width: int, told: str) -> None:
    result = python(REFUSED, FOLDER, mask, backend, layout, dtype, width)
    assert result.returncode and re.search(rf"TaskError: .*model\.attention: .*{told}", result.stderr)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    "name", ["bert", "bert rules", "deberta", "deberta fused", "deberta v3 fused", "modernbert", "gpt2"]
)
@pytest.mark.parametrize(("dtype", "limit"), [("fp32", 1e-4), ("bf16", 2e-2), ("fp16", 5e-3)])
def test_packed_as_padded(cuda: nt.Runtime, name: str, dtype: str, limit: float, lengths: str) -> None:
    """What lies behind the filled part of a tile is added to nothing, in bins that other steps fill more or less."""
    batch, other, found = inputs(LENGTHS[lengths]), inputs([LENGTH] * len(LENGTHS[lengths]), seed=1), []
    for pack in (False, True):
        trainer = nt.Trainer(
            made(name.removesuffix(" rules"), dropout=0.1), len(LENGTHS[lengths]), LENGTH, {"batch": 3}, pack=pack,
            precision=dtype, check_finite=True, optimizer=nt.SGD(lr=0.1), fusion=Fusion(found="rules" not in name),
            loss_scale=256.0 if dtype == "fp16" else None,
        )  # fmt: skip
        steps = [trainer.submit(one).result() for one in (other, batch, other, batch)]
        found.append([(step.loss, step.grad_norm) for step in steps])
        trainer.close()
    assert error(found[1], found[0]) < limit


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_weights_come_back(cuda: nt.Runtime, dtype: str) -> None:
    model = nt.models.GPT2(CONFIG, seed=2)
    before = {name: value.copy() for name, value in model.weights.items()}
    trainer = nt.Trainer(model, 2, 32, precision=dtype, optimizer=nt.AdamW(lr=1e-9))
    assert all(np.array_equal(value, before[name]) for name, value in trainer.state_dict().items())
    losses(trainer, 1)
    after = trainer.state_dict()
    assert all(error(after[name], before[name]) < 1e-5 or not before[name].any() for name in before)  # no rounding
    trainer.close()


@nt.task(x="R", y="RW")
def axpy(x: Any, y: Any, *, alpha: float) -> None:
    raise AssertionError("there is no CPU worker")


@axpy.cuda  # type: ignore[attr-defined]
def axpy_cuda(x: Any, y: Any, *, alpha: float) -> None:
    y += alpha * x


def test_task_in_python(cuda: nt.Runtime) -> None:
    pytest.importorskip("cupy")
    x, y = nt.array(np.arange(6.0).reshape(2, 3)), nt.array(np.ones((2, 3)))
    for _ in range(10):
        axpy(x, y, alpha=0.5)
    assert np.array_equal(y.numpy(), 1 + 5 * np.arange(6.0).reshape(2, 3))


LIMIT = """
import sys; sys.path.insert(0, sys.argv[1])
import test_cuda, nntile_py as nt
from nntile_py.execution import disk
folder, limit = sys.argv[1:3]
more = {"memory": int(sys.argv[3]) << 20, "disk": {"path": sys.argv[4], "size": 1 << 30}} if sys.argv[3:] else {}
if sys.argv[5:]: disk._direct = lambda folder: False
with nt.Runtime(cpus=0, cuda=1, cuda_memory=int(limit) << 20, window=200, **more):
    print(test_cuda.train("bf16", tiles={"batch": 1}))
"""


@pytest.fixture(scope="module")
def unlimited(python: Any) -> str:
    result = python(LIMIT, FOLDER, 4096)
    assert result.returncode == 0, result.stderr[-2000:]
    return str(result.stdout)


@pytest.mark.parametrize("limit", [64, 24, 8, 4])
def test_eviction(python: Any, cuda: nt.Runtime, unlimited: str, limit: int) -> None:
    """With less memory than the tiles take together, 18 MiB, the losses are the same."""
    result = python(LIMIT, FOLDER, limit)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout == unlimited


MOVED = """
import numpy as np, nntile_py as nt, sys
from nntile_py.execution import program
from nntile_py.profiling.recorder import make_trace, watched
from nntile_py.tiles import TaskList, Tile
from nntile_py.tiles.task import merge
if sys.argv[1] == "unmarked": program.mark_evictions = lambda *given: False
shape = (384, 1024)
total, *parts = tiles = [Tile("x", (k,), shape, "fp32", persistent=True) for k in range(65)]
tasks = TaskList("chain", tiles)
tasks.tasks = [merge(total, part, "add") for part in parts]
with nt.Runtime(cpus=0, cuda=1, cuda_memory=60 << 20):
    store = program.Store()
    for number, tile in enumerate(tiles): store.handle(tile).write(np.full(shape, number, np.float32))
    (adds,) = program.programs([tasks.resolve()], store)
    with watched() as found:
        for _ in range(6): adds.run()
        nt.Runtime.wait()
    assert (store.handle(total).read() == 6 * 64 * 65 / 2).all()
    print(sum(bus.bytes for bus in make_trace(found.programs, found.native, None).buses))
"""


def test_what_is_used_soon_stays(python: Any, cuda: nt.Runtime) -> None:
    """64 tiles in turn, with room for 39: the least recently used tile is always the next in use."""
    runs = [python(MOVED, how) for how in ("marked", "unmarked")]
    assert not any(run.returncode for run in runs), [run.stderr[-1000:] for run in runs]
    marked, unmarked = (int(run.stdout) / (384 * 1024 * 4) / 6 for run in runs)
    assert unmarked > 60 and 20 < marked < 45, (marked, unmarked)


FULL = """
import sys; sys.path.insert(0, sys.argv[1])
import test_cuda, nntile_py as nt
from nntile_py.execution import program
if sys.argv[2] == "unplanned": program.mark_evictions = lambda *given: False
with nt.Runtime(cpus=0, cuda=1, cuda_memory=8 << 20, memory=14 << 20, window=200):
    print(test_cuda.train("bf16", tiles={"batch": 1}))
"""


@pytest.mark.parametrize("how", ["planned", "unplanned"])
def test_old_copies_leave_full_main_memory(python: Any, cuda: nt.Runtime, unlimited: str, how: str) -> None:
    """Tiles of 18 MiB in two memories of 8 and 14 MiB: main memory has no room for a copy of each tile."""
    result = python(FULL, FOLDER, how)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout == unlimited


@pytest.mark.parametrize(("limit", "main"), [(6, 10), (6, 6), (4, 4)])
@pytest.mark.parametrize("cached", [(), ("cached",)], ids=["direct", "cached"])
def test_eviction_to_disk(
    python: Any, cuda: nt.Runtime, unlimited: str, tmp_path: Path, limit: int, main: int, cached: Sequence[str]
) -> None:
    """Tiles go from the device to main memory, from there to files, and back."""
    result = python(LIMIT, FOLDER, limit, main, tmp_path, *cached)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout == unlimited and not list(tmp_path.iterdir())


PLACED = """
import sys; sys.path.insert(0, sys.argv[1])
import test_cuda, nntile_py as nt
with nt.Runtime(cpus=0, cuda=int(sys.argv[2]), placement=sys.argv[3], cuda_memory=int(sys.argv[4]) << 20, window=200):
    print(test_cuda.train(sys.argv[5], tiles=eval(sys.argv[6])))
"""
# Some tiles have a multiple of 16 elements: kernels are compiled for this, and could round differently.
UNLIKE = "fp32", {"embed": 25}
EVEN = "bf16", {"batch": 1, "ffn": 96}
PLACEMENTS = [("planned", 4096, EVEN), ("scheduler", 4096, EVEN), ("planned", 8, EVEN), ("planned", 4096, UNLIKE)]


@pytest.mark.parametrize(("placement", "limit", "how"), PLACEMENTS)
def test_several_gpus(python: Any, placement: str, limit: int, how: tuple[str, dict[str, int]]) -> None:
    """With any assignment of tasks, and with little memory, the losses equal those of one GPU to the bit."""
    if (count := torch.cuda.device_count()) < 2:
        pytest.skip("there is one GPU")
    runs = [python(PLACED, FOLDER, *where, *how) for where in ((1, "scheduler", 4096), (count, placement, limit))]
    assert not any(run.returncode for run in runs), runs[-1].stderr[-2000:]
    assert runs[0].stdout == runs[1].stdout


def test_too_little_memory(python: Any, cuda: nt.Runtime) -> None:
    result = python(LIMIT, FOLDER, 2, timeout=60)
    assert result.returncode == 1 and "AdamW works on 1.0 MiB of tiles at once" in result.stderr, result.stderr[-2000:]
    assert "Lower tiles." in result.stderr
