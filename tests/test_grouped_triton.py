"""The kernels of examples/grouped_attention in Triton's interpreter."""

import importlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_triton import BIN, DENSE, ROWS_OF_BATCH, SEGMENTS, TORTURE, check_ways  # sets triton up for its interpreter

from nntile_py.errors import ConfigError
from nntile_py.graph.lowering import lower
from nntile_py.tasks import launch
from nntile_py.testing import Case
from nntile_py.tiles import Tiling

EXAMPLES = str(Path(__file__).parents[1] / "examples")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of problems; the kernels are registered for attention over segments."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # read when the kernels are imported
    with monkeypatch.context() as registered:
        for name in ("attention_segments", "attention_segments_grad"):
            registered.setitem(launch.load(), name, launch.load()[name])  # to be restored
        importlib.import_module("grouped_attention").register()
        yield importlib.import_module("grouped_attention.problems_triton")


GROUPED = [(name, "fp32", 40) for name in SEGMENTS if name != "chosen"]
GROUPED += [(name, "fp32", 110) for name in ("window", "dropout causal", "around")]  # several tiles of 32
GROUPED += [(name, "bf16", 150) for name in ("dropout", "dropout causal")] + [("groups", "fp16", 150)]  # of 128
GROUPED += [(f"rows {name}", "fp32", 40) for name in DENSE]
GROUPED += [("rows keys", "fp32", 110), ("rows padding", "bf16", 140)]
if TORTURE:
    names = [*SEGMENTS, *(f"rows {name}" for name in DENSE)]
    GROUPED = [*itertools.product(names, ("fp32", "bf16", "fp16"), (40, 150))]


PROGRAMS = [(*one, programs) for one, programs in zip(GROUPED, itertools.cycle((3, 50)))]
if TORTURE:
    PROGRAMS = [(*one, programs) for one in GROUPED for programs in (3, 50)]


SOME = ("dropout causal", "window", "groups", "rows keys", "rows padding")


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "dtype", "positions", "programs"),
    [pytest.param(*one, marks=[pytest.mark.long] * (one[0] not in SOME)) for one in PROGRAMS],
)
def test_attention_by_grouped_products(
    monkeypatch: pytest.MonkeyPatch, kernels: Any, name: str, dtype: str, positions: int, programs: int
) -> None:
    """Programs with tiles of several sequences and heads each, which look a few ahead; more programs than tiles."""
    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    monkeypatch.setattr(kernels, "AHEAD", 2 if programs == 3 else 8)
    of_rows = name.removeprefix("rows ")
    row, tiles = SEGMENTS[name] if name in SEGMENTS else DENSE[of_rows]
    row = replace(row, ends=tuple(end * positions // 150 for end in row.ends))
    few = {"heads": 2, "kv_heads": 1} if positions > 64 and not TORTURE else {}
    sizes = {**BIN, **few} if name in SEGMENTS else ROWS_OF_BATCH
    keys = positions - 17 if "cross" in row.layout else positions
    check_ways(row, {**sizes, "seq": positions, "key": keys}, tiles, dtype)


@pytest.mark.parametrize(("mask", "share"), [("segments", 1.0), ("segments causal", 0.55), ("segments window", 0.3)])
def test_tiles_of_grouped_products(kernels: Any, mask: str, share: float) -> None:
    """No more tiles of scores than the mask leaves, but for those at the ends of a window."""
    row = replace(SEGMENTS["packed"][0], mask=mask, ends=(0, 1, 33, 33, 360, 361))
    case = Case({**BIN, "seq": 364, "key": 364, "heads": 1, "kv_heads": 1}, "fp32")
    row(case)
    (task, _) = lower(case.graph, Tiling({})).tasks.tasks
    (first, *_) = launch.load()[task.kernel]([task]).launches
    offsets, before = torch.tensor([0, 0, 1, 33, 33, 360, 361]), torch.zeros(3, 7, dtype=torch.int32)
    first.kernel[first.grid](*before, offsets, 364, 364, 7, **dict(first.constexprs), num_warps=4)
    assert before[1].tolist() == before[2].tolist() == [0, 0, 1, 2, 2, 13, 14]  # of 32 positions
    assert before[0, 4] == 2 and before[0, 5] - 2 <= share * 11**2


def test_scratch_of_grouped_products(kernels: Any) -> None:
    """What would take more than the bound is refused."""
    case = Case({**BIN, "seq": 20000, "key": 20000}, "bf16")
    SEGMENTS["packed"][0](case)
    for task, count in zip(lower(case.graph, Tiling({})).tasks.tasks, (1, 2), strict=True):
        need = rf"grouped products: .* {count} x 80000 rows of 20096 bf16, take \d.* allowed: 1 GiB"
        with pytest.raises(ConfigError, match=need):
            launch.load()[task.kernel]([task])
