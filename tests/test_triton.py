"""The Triton kernels: in the interpreter against the operators' float64 references, and compiled for sm_90."""

import importlib
import itertools
import math
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import operators_generation
import pytest
import torch
from conftest import Python
from operators import ROWS, TILINGS
from operators_losses import adamw, lion, muon_update, sgd
from test_attention import Row as AttentionRow

from nntile_py.graph.lowering import lower
from nntile_py.tasks import Contract, Lowering, Quantize, Tensor, launch
from nntile_py.tasks import interpret as interpreter
from nntile_py.tasks.adamw import AdamWArgs
from nntile_py.tasks.attention_dropout import ScoresDropout
from nntile_py.tasks.dynamic_size import DynamicSize
from nntile_py.tasks.embedding import EmbeddingGradArgs
from nntile_py.tasks.muon import MuonUpdateArgs
from nntile_py.tasks.op import permutation
from nntile_py.tasks.optimizer import joined, split
from nntile_py.tasks.quantize import quantized
from nntile_py.tasks.sample import Sample
from nntile_py.tasks.sgd import SGDArgs
from nntile_py.testing import SIZES, TOLERANCES, Case, Values, error
from nntile_py.tiles import RW, R, Slot, Tile, Tiling, W
from nntile_py.tiles.dtypes import DTYPES, UNIT, is_low, is_scaled, scale_offset
from nntile_py.tiles.task import BusyArgs, Task, live_slot, merge

if platform.system() != "Linux":
    pytest.skip("triton is there on Linux only", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("the operators' tests run the compiled kernels here", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # triton looks at it when its modules are imported, gluon's at first use
importlib.import_module("triton.experimental.gluon")
launch.load()
embedding_triton = importlib.import_module("nntile_py.tasks.embedding_triton")
del os.environ["TRITON_INTERPRET"]

TORCH = {dtype.name: getattr(torch, dtype.torch) for dtype in DTYPES.values()}  # fmt: skip
SPLIT: dict[str, Callable[[Case], Any]] = {
    "AdamW split": adamw(split=True),
    "SGD split": sgd(0.0, split=True),
    "SGD momentum split": sgd(0.8, split=True),
    "Lion split": lion(split=True),
    "MuonUpdate split": muon_update("heads head_dim embed", split=True),
}


def of_triton(row: Callable[[Case], Any]) -> bool:
    """Contractions, attention, draws of tokens and their log-probabilities are C++."""
    case = Case(SIZES, "fp32")
    row(case)
    names = ("Attention", "Unite", "Sample", "TopLogProbs")
    native = [op for op in case.graph.ops if isinstance(op, Contract) or op.kind.startswith(names)]
    return not any(not (isinstance(op, Sample) and op.settings is None) for op in native)


ROUNDING = {"bf16": 5e-3, "fp16": 1e-3}
TABLE = {name: row for name, row in ROWS.items() if of_triton(row)} | SPLIT


class Interpreted:
    """Runs the tasks of a lowered graph in order, on one torch tensor per tile."""

    def __init__(self, low: Lowering, way: int = 0) -> None:
        """way: which launches, where there are several."""
        self.low, self.tiles, self.way = low, dict[Tile, torch.Tensor](), way

    def write(self, tensor: Tensor, value: Any) -> None:
        for where, tile in self.low.grid(tensor):
            self.tiles[tile] = torch.tensor(value[where]).to(TORCH[tensor.dtype])

    def read(self, tensor: Tensor) -> Any:
        out = np.zeros(tensor.shape, np.int64 if tensor.dtype.startswith("int") else np.float64)
        for where, tile in self.low.grid(tensor):
            out[where] = self.tiles[tile].double().numpy() if not is_scaled(tile.dtype) else self._scaled(tile)
        return out

    def _scaled(self, tile: Tile) -> Any:
        """Return the values for which a tile of 8 bits stands: scales follow the numbers."""
        data, count = self.tiles[tile], math.prod(tile.shape)
        scales = data.view(torch.uint8)[scale_offset(count) :][: 4 * tile.scales].clone().view(torch.float32)
        return (data[:count].double().view(tile.scales, -1) * scales[:, None]).reshape(tile.shape).numpy()

    def run(self, slots: Mapping[str, float]) -> None:
        for task in self.low.tasks.tasks:
            for access in task.accesses:
                tile = access.tile
                if tile not in self.tiles:
                    shape = (tile.bytes,) if is_scaled(tile.dtype) else tile.shape
                    self.tiles[tile] = torch.full(shape, np.nan).to(TORCH[tile.dtype])
            describe = launch.describer(task.kernel)
            assert describe, task.kernel
            way = self.way % len(describe([task]).ways)
            with np.errstate(over="ignore"):  # a GPU has no warnings either
                interpreter.interpret([task], [self.tiles[a.tile] for a in task.accesses], dict(slots), way=way)


def interpret(case: Case, tiles: Mapping[str, int], policy: str, values: Values, way: int = 0) -> Interpreted:
    low = lower(case.graph, case.tiling(tiles), policy)
    ran = Interpreted(low, way)
    outputs = {t.storage for op in case.graph.ops for t in op.outputs if t.storage.kind == "scalar"}
    for tensor in (t for t in outputs if not is_scaled(t.dtype)):
        ran.write(tensor, np.full(tensor.shape, np.nan))
    for tensor, value in values.items():
        ran.write(tensor, value)
    ran.run(case.slots)
    return ran


QUANTIZE = [name for name in TABLE if name.startswith("Quantize")]  # Triton kernels in 16 bits only
# Each row in ragged tiles and, in turns, in one of two 16-bit types: the interpreter takes a second for one of them.
RAGGED = ("fp32", "ragged", "tree")
LOW = itertools.cycle([("bf16", "even", "chain"), ("fp16", "uncut", "chain")])
SLOW = ("GatherGrad of several axes", "CachedAttention rotary", "CachedAttention merged", "EmbeddingGrad of padding")


@pytest.mark.parametrize(
    ("row", "dtype", "tiling", "policy"),
    [
        pytest.param(row, *how, marks=[pytest.mark.long] * (row in SLOW or how != RAGGED))
        for row in TABLE
        for how in (RAGGED if row not in QUANTIZE else ("bf16", *RAGGED[1:]), next(LOW))
    ],
)
def test_against_the_reference(row: str, dtype: str, tiling: str, policy: str) -> None:
    case = Case(SIZES, dtype)
    TABLE[row](case)
    values = case.draw(np.random.default_rng(0))
    expected = case.expected(values)
    ran = interpret(case, TILINGS[tiling], policy, values)
    got = case.whole_values({tensor: ran.read(tensor) for tensor in expected})
    for tensor, want in case.whole_values(expected).items():
        there = np.zeros(tensor.shape, bool)
        for where, _ in ran.low.grid(tensor):
            there[where] = True
        wrong = error(got[tensor], want * there)
        # Kernels may compute statistics and a bias' gradient from stored values, which are rounded.
        of_stored = "Norm residual" in row or (row.startswith("LayerNormGrad") and "bias" in row)
        rounded = (is_low(tensor.dtype) and tensor.storage not in case.masters) or (is_low(dtype) and of_stored)
        if is_scaled(tensor.dtype):
            limit = TOLERANCES[tensor.dtype]
        else:
            twice = 1 + ("merged" in row or "RelativeAttention" in row)  # q and k, or weights, are rounded once more
            limit = ROUNDING[dtype] * twice if rounded else 1e-5
        assert wrong < limit, f"{tensor}: off by {wrong:.1e}"


@pytest.mark.parametrize("row", ["Generated norm of a sum", "Generated bias gelu", "Generated softmax causal"])
def test_generated_draws_of_odd_rows(row: str) -> None:
    """Rows of odd length: two neighbours that share a hash may be in two rows."""
    case = Case({**SIZES, "embed": 25, "ffn": 21, "seq": 7, "key": 7}, "fp32")
    TABLE[row](case)
    values = case.draw(np.random.default_rng(0))
    ran = interpret(case, {"batch": 3, "ffn": 8}, "chain", values)
    for tensor, want in case.whole_values(case.expected(values)).items():
        assert error(ran.read(tensor), want) < 1e-5, tensor


BIN = {"batch": 1, "seq": 150, "heads": 4, "kv_heads": 2, "head_dim": 24}
ENDS = (1, 1, 40, 41, 137)  # segments of length 1 and 0, one longer than a block, 13 positions of none
SEGMENTS = {
    "packed": (AttentionRow("segments", "segments", "packed", ends=ENDS), {}),
    "causal": (AttentionRow("segments causal", "segments", "packed", ends=ENDS), {"heads": 2}),
    "around": (AttentionRow("segments around", "segments", "packed k and v", ends=ENDS), {}),
    "window": (AttentionRow("segments window", "segments", "by seq", ends=ENDS), {"heads": 3}),
    "groups": (AttentionRow("segments", "segments", "groups", ends=ENDS), {"heads": 2}),
    "parts of groups": (AttentionRow("segments causal", "segments", "groups", ends=ENDS), {"heads": 1}),
    "one that fills the bin": (AttentionRow("segments", "segments", ends=(150,)), {}),
    "an empty bin": (AttentionRow("segments", "segments", "one sequence", ends=(0, 0)), {}),
    "dropout": (AttentionRow("segments", "segments", "packed", 0.3, ends=ENDS), {"heads": 3}),
    "dropout causal": (AttentionRow("segments causal", "segments", "groups", 0.3, ends=ENDS), {}),
    "chosen": (AttentionRow("segments", "vendor", "packed", ends=ENDS), {}),
}


LONG = ("window", "one that fills the bin", "dropout causal")  # several blocks of keys: half a minute each with 4 heads
POINTS = [(name, "fp32", 40) for name in SEGMENTS] + [(name, "fp32", 100) for name in LONG]
POINTS += [(name, "bf16", 40) for name in ("packed", "groups", "dropout")] + [("dropout causal", "bf16", 100)]
POINTS += [("dropout causal", "fp16", 40)]
TORTURE = bool(os.environ.get("NNTILE_TORTURE"))  # `make torture`
if TORTURE:
    POINTS = [*itertools.product(SEGMENTS, ("fp32", "bf16", "fp16"), (40, 150))]


@pytest.mark.few(4)
@pytest.mark.parametrize(("name", "dtype", "positions"), POINTS)
def test_attention_over_segments(name: str, dtype: str, positions: int) -> None:
    row, tiles = SEGMENTS[name]
    row = replace(row, ends=tuple(end * positions // 150 for end in row.ends))
    few = {"heads": 2, "kv_heads": 1} if positions > 64 and not TORTURE else {}
    check_ways(row, {**BIN, **few, "seq": positions, "key": positions}, tiles, dtype)


ROWS_OF_BATCH = {**BIN, "batch": 2, "heads": 2, "kv_heads": 1}
DENSE = {
    "plain": (AttentionRow("none", "segments", "packed", 0.3), {"batch": 1}),
    "causal": (AttentionRow("causal", "segments", "groups", 0.3), {"heads": 1}),
    "padding": (AttentionRow("padding causal", "segments", "by seq", 0.3), {}),
    "around": (AttentionRow("padding around", "segments", "groups", 0.3), {"batch": 1}),
    "keys": (AttentionRow("padding", "segments", "cross groups", 0.3), {}),
    "one sequence": (AttentionRow("window", "segments", "one sequence", 0.3), {}),
}
DENSE_POINTS = [(name, "fp32", 40) for name in DENSE] + [("padding", "bf16", 40), ("padding", "fp32", 70)]
DENSE_POINTS += [("causal", "bf16", 40), ("keys", "fp32", 70)]
if TORTURE:
    DENSE_POINTS = [*itertools.product(DENSE, ("fp32", "bf16"), (40, 140))]


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "dtype", "positions"), DENSE_POINTS)
def test_attention_with_dropout(name: str, dtype: str, positions: int) -> None:
    row, tiles = DENSE[name]
    keys = positions - 17 if "cross" in row.layout else positions
    check_ways(row, {**ROWS_OF_BATCH, "seq": positions, "key": keys}, tiles, dtype)


# First case: a row has pairs on both sides of 2^32; second: rows of a power of two end there; third: rows begin at odd
# indices.
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("positions", "large"), [(40, 2**33 - 1606), (64, 2**33 - 64 * 101), (41, 2**33 - 1607), (40, 5 * 2**31 + 8)]
)
def test_large_indices_of_dropout(monkeypatch: pytest.MonkeyPatch, positions: int, large: int) -> None:
    """Dropout of probabilities with indices beyond 2^32 equals the reference."""
    monkeypatch.setattr(ScoresDropout, "args", lambda self, batch, head: replace(ARGS(self, batch, head), first=large))
    kept = ScoresDropout._kept
    monkeypatch.setattr(ScoresDropout, "_kept", lambda self, first, sizes, seed: kept(self, first + large, sizes, seed))
    sizes = {**ROWS_OF_BATCH, "batch": 1, "seq": positions, "key": positions}
    check_ways(DENSE["plain"][0], sizes, {}, "fp32")


ARGS = ScoresDropout.args


def check_ways(row: Callable[[Case], Any], sizes: Mapping[str, int], tiles: Mapping[str, int], dtype: str) -> None:
    """Compare each candidate, among which C++ chooses, with the reference."""
    case = Case(sizes, dtype)
    case.slots["dropout_seed"] = case.options["seed"] = 3
    row(case)
    values = case.draw(np.random.default_rng(0))
    expected = case.expected(values)
    ways = [len(launch.load()[task.kernel]([task]).ways) for task in lower(case.graph, Tiling(tiles)).tasks.tasks]
    for way in range(max(ways)):
        ran = interpret(case, tiles, "chain", values, way)
        for tensor, want in expected.items():
            got, limit = ran.read(tensor), {"fp32": 1e-5, "bf16": 1.5e-2, "fp16": 2e-3}[dtype]
            wrong = error(got, want) if want.any() else float(got.any())
            assert wrong < limit, f"{tensor}: off by {wrong:.1e} in way {way}"


@pytest.mark.parametrize("programs", [30, 264])
@pytest.mark.parametrize("name", [name for name in TABLE if name.startswith("CachedAttention")])
def test_cached_attention_of_one_query(name: str, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row has up to 320 cached keys, which one program reads in blocks, or several programs."""
    monkeypatch.setattr(operators_generation, "ENTRIES", 20)
    monkeypatch.setattr(importlib.import_module("nntile_py.tasks.cached_attention_triton"), "PROGRAMS", programs)
    for dtype in ("fp32", "bf16"):
        check_ways(TABLE[name], {**SIZES, "batch": 3, "seq": 1, "key": 1}, {"batch": 2}, dtype)


# A program multiplies up to 16 short rows, but at most 4 long ones.
@pytest.mark.parametrize(
    ("embed", "ffn", "tile"), [(40, 20, 17), (1024, 20, 17), *((k, 5, 3) for k in (3000, 10000, 16384))]
)
def test_each_block_of_a_product_of_one_row(embed: int, ffn: int, tile: int) -> None:
    """Rows of w that a program loads at once, or in parts, of which the last may be shorter."""
    for name in ("Gemv all", "Gemv rms_norm gated"):
        check_ways(ROWS[name], {**SIZES, "embed": embed, "ffn": ffn}, {"ffn": tile}, "bf16")


FILLED = {**SIZES, "batch": 1, "seq": 5, "key": 5, "position": 9}


def lowered(case: Case) -> Lowering:
    low = lower(case.graph, Tiling({}), "chain")
    low.tasks.live = frozenset({"seq"})
    return low


def fills_first_rows(row: Callable[[Case], Any]) -> bool:
    """Return whether CUDA workers compute only the filled part of a bin; see lives_on_cuda."""
    case = Case(FILLED, "fp32")
    row(case)
    # Selections and caches are refused with pack, and a Gemv has one row.
    if any(op.kind.startswith(("Select", "Cached", "Gemv")) for op in case.graph.ops):
        return False
    tiles = {access.tile for task in lowered(case).tasks.tasks for access in task.accesses}
    live = [tile for tile in tiles if {"seq", "key"} & {*tile.axes}]
    return bool(live) and all(tile.axes[:2] == ("batch", "seq") and "key" not in tile.axes for tile in live)


FIRST_ROWS = [name for name, row in TABLE.items() if fills_first_rows(row)]


@pytest.mark.few(32)
@pytest.mark.parametrize(("name", "dtype"), list(zip(FIRST_ROWS, itertools.cycle(("fp32", "bf16")))))
def test_what_a_step_fills(name: str, dtype: str) -> None:
    """A step fills 5 of 40 positions. The values behind them, NaN and the id 1, affect no result."""
    case, whole = Case(FILLED, dtype), Case({**FILLED, "seq": 40, "key": 40}, dtype)
    TABLE[name](case)
    TABLE[name](whole)
    values = case.draw(np.random.default_rng(0))
    expected = case.whole_values(case.expected(values))
    big = {t.name: t for op in whole.graph.ops for t in (*op.inputs, *op.outputs)}
    ran = Interpreted(low := lowered(whole))
    for tensor in {t.storage for op in whole.graph.ops for t in op.outputs if t.storage.kind == "scalar"}:
        ran.write(tensor, np.full(tensor.shape, np.nan))
    for tensor, value in values.items():
        if not (target := big.get(tensor.name)):  # what others are made of
            continue
        given = np.full(target.shape, 1 if target.dtype.startswith("int") else np.nan)
        given[tuple(map(slice, tensor.shape))] = value
        ran.write(target, given)
    slots = {**case.slots, live_slot("seq", 0): FILLED["seq"]}
    for task in low.tasks.tasks:
        for tile in {access.tile for access in task.accesses} - ran.tiles.keys():
            ran.tiles[tile] = torch.full(tile.shape, np.nan).to(TORCH[tile.dtype])
        lives = low.tasks.live_sizes(task)
        with np.errstate(over="ignore", invalid="ignore"):
            interpreter.interpret([task], [ran.tiles[a.tile] for a in task.accesses], slots, lives=lives)
    got = {t: ran.read(big[t.name])[tuple(map(slice, t.shape))] for t in case.expected(values)}
    for tensor, want in expected.items():
        wrong, exact = error(case.whole_values(got)[tensor], want), dtype == "fp32" and not is_low(tensor.dtype)
        assert wrong < (3e-5 if exact else 1.5e-2), f"{tensor}: off by {wrong:.1e}"


FILLED_QUANTIZE = {  # axes of x, and of each output with the number of its rows' axes
    "both orders": ("batch seq embed", ("batch seq embed", 2), ("embed batch seq", 1)),
    "last": ("batch seq embed", ("embed batch seq", 1)),
    "several axes": ("batch seq heads head_dim", ("batch seq heads head_dim", 2), ("heads head_dim batch seq", 2)),
    "rows of two axes": ("batch seq heads head_dim", ("batch seq heads head_dim", 3), ("head_dim batch seq heads", 1)),
}


@pytest.mark.parametrize(("name", "dtype"), list(zip(FILLED_QUANTIZE, itertools.cycle(("bf16", "fp16")))))
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize(("filled", "of"), [(5, 48), (33, 48), (48, 48), (150, 160), (33, 40), (5, 9)])
def test_quantisation_of_what_a_step_fills(name: str, dtype: str, filled: int, of: int, by_row: bool) -> None:
    """Values behind the filled part affect neither scales nor values. Zeros follow up to a multiple of 16."""
    case = Case({**SIZES, "batch": 1, "seq": of, "embed": 140}, dtype)
    x_axes, *layouts = FILLED_QUANTIZE[name]
    x = case.x(x_axes)
    outs = [case.y(axes, "e4m3") for axes, _ in layouts]
    for out, (_, rows) in zip(outs, layouts, strict=True):
        out.scaled = rows if by_row else 0
    case.add(Quantize(x, outs, [rows for _, rows in layouts]))
    low = lowered(case)
    (task,) = low.tasks.tasks
    rng = np.random.default_rng(0)
    sizes = (rng.integers(-4, 5, (of, *[1] * (len(x.shape) - 2))), rng.integers(-4, 5, x.shape[-1]))
    value = rng.standard_normal(x.shape) * 2.0 ** sizes[0] * 2.0 ** sizes[1]
    value[:, filled:] = np.nan
    tensors = [torch.full((access.tile.bytes,), 0xFF, dtype=torch.uint8) for access in task.accesses[:-1]]
    tensors = [*(one.view(TORCH["e4m3"]) for one in tensors), torch.tensor(value).to(TORCH[dtype])]
    slots = {live_slot("seq", 0): filled}
    interpreter.interpret([task], tensors, slots, lives=low.tasks.live_sizes(task))
    part = tensors[-1][:, :filled].double().numpy()
    for out, (axes, rows), data in zip(outs, layouts, tensors, strict=False):
        ran = Interpreted(low)
        ran.tiles = {tile: data for _, tile in low.grid(out)}
        got = ran.read(out)
        order = permutation(x.axes, out.axes)
        expected = quantized(part.transpose(order), "e4m3", out.scaled)
        np.testing.assert_array_equal(got[tuple(map(slice, expected.shape))], expected)
        numbers = data[: x.numel].double().numpy()
        matrix = numbers.reshape(math.prod(out.shape[:rows]), -1)
        matrix = matrix if "seq" in axes.split()[:rows] else matrix.T  # its rows are filled in part
        count = filled * len(matrix) // of
        if len(matrix) % UNIT == 0:
            assert (matrix[count : -(-count // UNIT) * UNIT] == 0).all()


def test_live_sizes() -> None:
    """Sizes and grids of kernels depend on the number of filled rows."""
    rows = DynamicSize(100, position=3)
    words = rows * 6
    assert (words, words // 3, words // 4) == (600, 200, 150) and not isinstance(words // 4, DynamicSize)
    blocks = launch.ceil_div(words, 16)
    assert isinstance(blocks, DynamicSize) and blocks == 38 and blocks.formula == (3, 6, 16, 1)
    for filled in (1, 7, 40, 100):
        assert words.filled(filled) == 6 * filled and (2 * blocks).filled(filled) == 2 * -(-6 * filled // 16)
        assert launch.ceil_div(blocks, 3).filled(filled) == -(-6 * filled // 48)


def test_every_kernel_has_launches() -> None:
    """Every kernel has launches, except those only in C++, such as attention without segments."""
    named = set()
    for path in (Path(launch.__file__).parent).glob("*.cpp"):
        named |= set(re.findall(r"^NNTILE_KERNEL\((\w+),", path.read_text(), re.M))
    own = {name for name in named if not name.startswith(("contract", "attention", "flash", "unite", "top_logprobs"))}
    of_segments = {f"attention{name}{grad}" for name in ("", "_segments", "_relative") for grad in ("", "_grad")}
    assert set(launch.load()) == own | of_segments | {"contract"}


def test_busy() -> None:
    x = torch.zeros(1)
    interpreter.interpret([Task("busy", [RW(Tile("x", (0,), (1,), "fp32"))], BusyArgs(3))], [x])
    assert x.item() == 0.875


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_partial_sums_keep_their_bits(dtype: str) -> None:
    """The loss is fp64 whatever the precision of the rest."""
    into, part = (torch.full((5,), value, dtype=TORCH[dtype]) for value in (1 / 3, 1 / 7))
    want = into + part
    tiles = [Tile(name, (0,), (5,), dtype) for name in ("into", "part")]
    interpreter.interpret([merge(*tiles, op="sum")], [into, part])
    assert torch.equal(into, want)


@pytest.mark.parametrize("padding", [(), (3,), (2,)])
def test_embedding_grad_of_many_runs(monkeypatch: pytest.MonkeyPatch, padding: tuple[int, ...]) -> None:
    """Ids in several runs of positions, most of them 3, some in several parts: twice the same bits."""
    monkeypatch.setattr(embedding_triton, "RUN", 64)
    monkeypatch.setattr(embedding_triton, "PART", 8)
    rng, count, rows = np.random.default_rng(0), 2 * 64 + 37, 5
    ids = torch.tensor(np.where(rng.random(count) < 0.7, 3, rng.integers(0, rows + 3, count)))
    dy = torch.tensor(rng.standard_normal((count, 8)), dtype=torch.float32).bfloat16()
    tiles = [Tile("out", (0,), (rows, 8), "fp32"), Tile("ids", (0,), (count,), "int64")]
    tiles.append(Tile("dy", (0,), (count, 8), "bf16"))
    task = Task("embedding_grad", [W(tiles[0]), R(tiles[1]), R(tiles[2])], EmbeddingGradArgs(1, padding))
    results = []
    for _ in range(2):
        out = torch.full((rows, 8), np.nan)
        interpreter.interpret([task], [out, ids, dy])
        results.append(out)
    want = np.zeros((rows, 8))
    for k, row in enumerate(ids.tolist()):
        if 1 <= row < rows + 1 and row not in padding:
            want[row - 1] += dy[k].double().numpy()
    assert error(results[0], want) < 1e-5
    assert torch.equal(results[0], results[1])


SLOTS = {"lr": 1e-3, "beta1_correction": 0.1, "beta2_correction": 0.05}


def adamw_tasks(sizes: list[int]) -> tuple[list[Task], list[torch.Tensor]]:
    """The norm's first step and AdamW's tasks of parameters of these sizes, and data for all their tiles."""
    rng, clip, tasks, data = np.random.default_rng(0), Tile("clip", (0,), (1,), "fp64"), list[Task](), {}
    for number, n in enumerate(sizes):
        kinds = {"p": "bf16", "m": "fp32", "v": "fp32", "grad": "fp32", "low_bits": "int16"}
        p, m, v, grad, low_bits = (Tile(name, (number,), (n,), dtype) for name, dtype in kinds.items())
        part = Tile("part", (number,), (1,), "fp64")
        tasks.append(Task("sum_squares", [W(part), R(grad)]))
        args = AdamWArgs(*map(Slot, SLOTS), 0.9, 0.95, 1e-8, 0.1)
        tasks.append(Task("adamw", [RW(p), RW(m), RW(v), R(grad), R(clip), RW(low_bits)], args))
        scale = {low_bits: 2**15}
        data |= {t: torch.tensor(rng.random(n) * scale.get(t, 1)).to(TORCH[t.dtype]) for t in (p, m, v, grad, low_bits)}
        data[part] = torch.full((1,), np.nan, dtype=torch.float64)
    data[clip] = torch.tensor([0.5], dtype=torch.float64)
    tasks.sort(key=lambda task: task.kernel)
    return tasks, data


def test_tasks_together() -> None:
    """One launch for several tasks gives the bits of separate launches; tasks that write one tile stay separate."""
    sizes = [48, 5000, 1, 40000]
    tasks, alone = adamw_tasks(sizes)
    _, merged = adamw_tasks(sizes)
    merged = dict(zip(alone, merged.values(), strict=True))
    runs = launch.together(tasks)
    assert [len(run) for run in runs] == [len(sizes), len(sizes)]
    for task in tasks:
        interpreter.interpret([task], [alone[a.tile] for a in task.accesses], SLOTS)
    for run in runs:
        interpreter.interpret(run, [merged[a.tile] for task in run for a in task.accesses], SLOTS)
    assert all(torch.equal(alone[t], merged[t]) for t in alone)
    for task in tasks:
        if task.kernel == "sum_squares":
            part, grad = (alone[a.tile] for a in task.accesses)
            assert part.item() == pytest.approx((grad.double() ** 2).sum().item(), rel=1e-6)
    other = replace(tasks[1], args=replace(tasks[1].args, weight_decay=0.2))
    # The second task depends on the first, no other task depends on another; the fourth overtakes the third.
    assert [len(run) for run in launch.together([tasks[0], tasks[0], other, tasks[2]])] == [1, 2, 1]


@pytest.mark.parametrize("kernel", ["adamw", "sgd", "muon_update"])
def test_every_value_of_a_split_parameter(kernel: str) -> None:
    """A step without a gradient changes no bit; NaN stays NaN in both parts; stored parts equal those of `split`."""
    special = [0x7F7FFFFF, 0x7F7F8000, 0, -(2**31), 1, 0x8000, 0xFFFF, -0x7FFF8000, 0x7FC00000, 0x7F800001, -1]
    bits = np.concatenate([np.random.default_rng(0).integers(-(2**31), 2**31, 500), special]).astype(np.int32)
    value = bits.view(np.float32)
    param, low_bits = map(torch.tensor, split(value))
    n, zeros, one = len(bits), torch.zeros(len(bits)), torch.ones(1, dtype=torch.float64)
    p, r, clip = Tile("p", (0,), (n,), "bf16"), Tile("low_bits", (0,), (n,), "int16"), Tile("clip", (0,), (1,), "fp64")
    m, v, grad = (Tile(name, (0,), (n,), "fp32") for name in ("m", "v", "grad"))
    near = param.bfloat16()
    if kernel == "adamw":
        args = AdamWArgs(*map(Slot, SLOTS), 0.9, 0.95, 1e-8, 0.0)
        task = Task(kernel, [RW(p), RW(m), RW(v), R(grad), R(clip), RW(r)], args)
        interpreter.interpret([task], [near, zeros.clone(), zeros.clone(), zeros, one, low_bits], SLOTS)
    elif kernel == "muon_update":
        args = MuonUpdateArgs(Slot("lr"), 0.0, 1.0, (1, 0))
        task = Task(kernel, [RW(p), R(grad), R(clip), RW(r)], args)
        interpreter.interpret([task], [near, zeros, one, low_bits], SLOTS)
    else:
        task = Task(kernel, [R(grad), R(clip), RW(p), RW(r)], SGDArgs(Slot("lr"), 0.0, 0.0))
        interpreter.interpret([task], [zeros, one, near, low_bits], SLOTS)
    got = joined(near.float().numpy(), low_bits.numpy())
    assert np.array_equal(got, value, equal_nan=True) and np.array_equal(
        np.isnan(near.float().numpy()), np.isnan(value)
    )
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(split(got), (near.float(), low_bits), strict=True))


COMPILE = """
import sys
sys.path.insert(0, sys.argv[1])
from nntile_py.testing import Case
from operators import ROWS
from operators_losses import adamw
from nntile_py.graph.lowering import lower
from nntile_py.tasks import launch, launch_binary
from nntile_py.tiles import Tiling

sizes = {"batch": 2, "seq": 128, "embed": 768, "heads": 12, "head_dim": 64, "ffn": 3072, "vocab": 50257}
rows = ["LayerNorm residual", "LayerNormGrad add bias", "CrossEntropy fused", "EmbeddingGrad", "Transpose all"]
rows += ["GradNorm clip", "Dropout", "LayerNorm residual dropout", "LayerNormGrad add bias dropout"]
rows += ["GatedGrad silu", "SelectGrad seq 0.6", "SquaredError", "BinaryCrossEntropyGrad"]
rows += ["CrossEntropy of sequences fused"]
rows += ["Gather", "GatherGrad", "RMSNorm residual", "RMSNormGrad add", "Rotary"]
rows += ["Gather several axes", "GatherGrad several axes", "Gather of several axes", "GatherGrad of several axes"]
rows += ["RelativeScores", "RelativeScoresGrad"]
rows += ["Generated norm of a sum", "Generated norm gradient", "Generated softmax padding", "Generated gelu gradient"]
rows += ["Generated bias tanh", "Generated sums", "Gemv all"]
rows += ["Quantize twice", "Quantize rows twice"]
for row in [*map(ROWS.get, rows), adamw(split=True)]:
    case = Case(sizes, "bf16")
    row(case)
    for task in lower(case.graph, Tiling({})).tasks.tasks:
        for one in launch.describer(task.kernel)([task]).launches:
            binary = launch_binary.compile_launch(one)
            assert binary is launch_binary.compile_launch(one)
            cubin, name, shared, warps, overlaps, grid, parameters = launch_binary.encode(one, binary)
            assert cubin[:4] == b"\\x7fELF" and name.encode() in cubin and 1 <= warps <= 16, name
            assert len(parameters) == len(one.args) + 2 and parameters[-2:] == [(3, 0), (3, 0)]
            print(name)
"""


COMPILE_SEGMENTS = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/../examples"]
every = sys.argv[2] == "True"
import grouped_attention
from test_attention import Row
from nntile_py.graph.lowering import lower
from nntile_py.tasks import launch, launch_binary
from nntile_py.tasks.dynamic_size import with_live_sizes
from nntile_py.testing import Case
from nntile_py.tiles import Tiling

dense = Row("padding", "segments", dropout=0.1)
case = Case({"batch": 2, "seq": 128, "heads": 4, "head_dim": 64}, "bf16")
dense(case)
for task in lower(case.graph, Tiling({})).tasks.tasks:
    made = launch.load()[task.kernel]([task])
    assert "rows 2 of 128 128 padding 1" in made.key and len(made.ways) > 1
    print(*(launch_binary.compile_launch(one).name for one in made.launches), "dense")
def of_bin(positions, row, dtype="bf16", head_dim=64):
    case = Case({"batch": 1, "seq": positions, "heads": 12, "kv_heads": 4, "head_dim": head_dim}, dtype)
    row(case)
    low = lower(case.graph, Tiling({}))
    low.tasks.live = frozenset({"seq"})
    for task in low.tasks.tasks:
        yield task, launch.load()[task.kernel]([with_live_sizes(task, low.tasks.live_sizes(task))])

short, long = Row("segments causal", "vendor", "groups"), Row("segments", "segments", dropout=0.1)
for positions, row in (128, short), (512, long):
    for task, made in of_bin(positions, row):
        ways = made.ways if every else {tuple(one.kernel for one in way): way for way in made.ways}.values()
        names = made.key.split(" of ")[-1].split(", ")  # of what a kept choice chooses from
        assert len(made.ways) == len(names) == len(set(names)) > 1
        assert all("x".join(str(dict(one.constexprs)[k]) for k in ("ROWS", "KEYS")) in name
                   for way, name in zip(made.ways, names) for one in way)
        for way in ways:
            for one in way:
                binary = launch_binary.compile_launch(one)
                assert binary.shared <= launch_binary.shared_memory(90), (one.constexprs, binary.shared)
                *_, grid, parameters = launch_binary.encode(one, binary)
                assert any(kind == 7 for kind, _ in parameters) and len(grid) == 3
                print(binary.name, positions)
grouped_attention.register()
for dtype, head_dim in (("bf16", 64), ("fp32", 64), ("fp16", 128), ("bf16", 256))[: None if every else 1]:
    for task, made in of_bin(512, Row("segments around", "segments", dropout=0.1), dtype, head_dim):
        for one in made.launches:
            binary = launch_binary.compile_launch(one)
            assert len(made.ways) == 1
            assert binary.shared <= launch_binary.shared_memory(90), (one.constexprs, binary.shared)
            launch_binary.encode(one, binary)
            print(binary.name, dtype)
"""


@pytest.mark.long
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["first ways", "all ways"])
def test_attention_over_segments_compiles_for_sm_90(every: bool, python: Python, tmp_path: Path) -> None:
    done = python(COMPILE_SEGMENTS, Path(__file__).parent, every, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    names = {"_forward dense", "_grad_queries _grad_keys dense"}
    names |= {"_forward 128", "_forward 512", "_grad_whole 128", "_grad_queries 128", "_grad_keys 512"}
    of_grouped = ("tiles", "scores", "values", "grad_pairs", "grad_queries", "grad_keys")
    dtypes = ("bf16", "fp16", "fp32") if every else ("bf16",)
    names |= {f"_grouped_{name} {dtype}" for name in of_grouped for dtype in dtypes}
    assert names <= set(done.stdout.splitlines())


@pytest.mark.long
def test_compiles_for_sm_90(python: Python, tmp_path: Path) -> None:
    done = python(COMPILE, Path(__file__).parent, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    names = {"_cross_entropy", "_sum_rows", "_swap", "_adamw", "_squares", "_total", "_clip"}
    names |= {"_gated_grad", "_select_grad", "_gather", "_gather_grad", "_element_loss", "_element_loss_grad"}
    names |= {"_rotary", "generated", "_sum_parts", "_largest", "_quantize"}
    names |= {"_clear", "_largest_of_rows", "_quantize_rows"}
    assert names <= set(done.stdout.split())
