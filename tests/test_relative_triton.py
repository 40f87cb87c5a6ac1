"""Attention with relative positions: the Triton kernels in the interpreter, against float64."""

import itertools
from pathlib import Path

import pytest
from conftest import Python
from relative_rows import CASES, fitted
from test_triton import TORTURE, check_ways  # sets triton up for its interpreter

POINTS = [(name, "fp32", 40) for name in CASES] + [("log of few", "fp32", 100), ("clipped", "fp32", 70)]
POINTS += [("log", "bf16", 40), ("dropout", "bf16", 40), ("padding dropout", "fp16", 40), ("log of few", "bf16", 100)]
if TORTURE:
    POINTS = [*itertools.product(CASES, ("fp32", "bf16", "fp16"), (40, 150))]


@pytest.mark.few(8)
@pytest.mark.parametrize(("name", "dtype", "positions"), POINTS)
def test_against_the_reference(name: str, dtype: str, positions: int) -> None:
    row, sizes, tiles = fitted(name, positions, head_dim={"bf16": 32, "fp16": 64}.get(dtype, 24))
    check_ways(row, sizes, tiles, dtype)


COMPILE = """
import sys
sys.path.insert(0, sys.argv[1])
from relative_rows import RelativeRow
from nntile_py.graph.lowering import lower
from nntile_py.tasks import launch, launch_binary
from nntile_py.tasks.dynamic_size import with_live_sizes
from nntile_py.testing import Case
from nntile_py.tiles import Tiling

rows = (RelativeRow(), "bf16"), (RelativeRow(dropout=0.1), "fp16"), (RelativeRow("padding", products="keys"), "fp32")
for row, dtype in rows:
    case = Case({"batch": 1, "seq": 512, "heads": 12, "head_dim": 64}, dtype)
    row(case)
    low = lower(case.graph, Tiling({}))
    low.tasks.live = frozenset({"seq"})
    for task in low.tasks.tasks:
        made = launch.load()[task.kernel]([with_live_sizes(task, low.tasks.live_sizes(task))])
        for one in (one for way in made.ways for one in way):
            binary = launch_binary.compile_launch(one)
            assert binary.shared <= launch_binary.shared_memory(90), (one.constexprs, binary.shared)
            launch_binary.encode(one, binary)
            print(binary.name, dtype)
"""


@pytest.mark.long
def test_compiles_for_sm_90(python: Python, tmp_path: Path) -> None:
    done = python(COMPILE, Path(__file__).parent, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    names = "_relative_forward", "_grad_relative_queries", "_grad_relative_keys"
    assert {f"{name} {dtype}" for name in names for dtype in ("bf16", "fp16", "fp32")} == {*done.stdout.splitlines()}
