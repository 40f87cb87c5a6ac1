"""Every operator in every tiling, policy and dtype against its float64 reference."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operators import ROWS, TILINGS
from operators_contract import linear

import nntile_py as nt
from nntile_py import tasks as ops
from nntile_py.graph.lowering import lower
from nntile_py.tasks import Op, Tensor
from nntile_py.testing import SIZES, Case, check
from nntile_py.tiles import Tiling

POLICIES = ("chain", "commute", "redux", "tree")
every_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


def test_every_operator_has_a_row() -> None:
    built = set()
    for row in ROWS.values():
        case = Case(SIZES, "fp64")
        row(case)
        for op in case.graph.ops:
            assert op.flop() >= 0 and op.elements() >= 0
        built |= {type(op) for op in case.graph.ops}
    known = {x for x in vars(ops).values() if isinstance(x, type) and issubclass(x, Op)}
    assert {x for x in known if not x.__subclasses__()} <= built <= known


def check_programs(row: Any, dtype: str, *combinations: tuple[str, str]) -> None:
    """Check the row for each (tiling, policy); two policies often give the same program, which runs once."""
    checked = set()
    for tiling, policy in combinations:
        case, tiles = Case(SIZES, dtype), TILINGS[tiling]
        row(case)
        if (digest := lower(case.graph, case.tiling(tiles), policy).tasks.digest()) not in checked:
            checked.add(digest)
            check(row, tiles, policy, dtype)


@pytest.mark.long
@every_row
def test_in_fp64(runtime: nt.Runtime, row: Any) -> None:
    ragged = (("ragged", policy) for policy in POLICIES)
    check_programs(row, "fp64", ("uncut", "chain"), ("even", "chain"), ("even", "tree"), *ragged)


@every_row
def test_in_fp32(runtime: nt.Runtime, row: Any) -> None:
    check_programs(row, "fp32", ("uncut", "chain"), ("ragged", "redux"))


def test_policies_give_other_programs_only_where_partial_sums_meet() -> None:
    """check_programs skips equal programs: policies matter only for operators with sums."""
    programs = {}
    for name in ("Sum", "Add"):
        case = Case(SIZES, "fp64")
        ROWS[name](case)
        programs[name] = {lower(case.graph, Tiling(TILINGS["ragged"]), policy).tasks.digest() for policy in POLICIES}
    assert [len(programs[name]) for name in ("Sum", "Add")] == [len(POLICIES), 1]


LARGE = {"batch": 5, "seq": 47, "embed": 530, "ffn": 75, "heads": 2, "head_dim": 19, "key": 33}


@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
@pytest.mark.parametrize(
    "row",
    [
        linear(bias="ffn", scale=0.3), linear(bias="ffn", residual=True),
        linear(bias="ffn", activation="gelu", pre=True),
        linear("batch seq ffn", "embed ffn", "batch seq embed", bias="embed"),
        linear("batch seq embed", "batch seq ffn", "embed ffn"),
        linear("embed ffn", "batch seq embed", "ffn batch seq"),
        linear("batch heads seq head_dim", "batch heads key head_dim", "batch heads seq key", scale=0.3),
        linear("batch heads seq key", "batch heads key head_dim", "batch heads seq head_dim"),
    ],
)  # fmt: skip
def test_products_of_many_rows_and_columns(runtime: nt.Runtime, row: Any, dtype: str) -> None:
    """Tiles of whole blocks and of parts of blocks along all axes, where one row of tiles is added to another."""
    check(row, {"embed": 400, "ffn": 60, "batch": 3}, "chain", dtype, SIZES | LARGE)


# From four elements up a LayerNorm's gradient, from two on a softmax's are not all cancellation.
LIMITS = {
    "batch": (1, 4), "seq": (2, 9), "embed": (4, 40), "heads": (1, 4), "head_dim": (1, 20), "ffn": (1, 40),
    "vocab": (2, 40),
}  # fmt: skip


@st.composite
def tilings(draw: st.DrawFn) -> tuple[dict[str, int], dict[str, int]]:
    """Draw sizes of axes, and tile sizes of some axes: at most five tiles per axis, the last tile of any size."""
    sizes = {axis: draw(st.integers(*limits), label=axis) for axis, limits in LIMITS.items()}
    cut = draw(st.sets(st.sampled_from(sorted(set(sizes) - {"head_dim"})), min_size=1), label="cut")
    return sizes, {axis: draw(st.integers(-(-sizes[axis] // 5), sizes[axis])) for axis in sorted(cut)}


@pytest.mark.few(128)
@every_row
@settings(max_examples=4, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(drawn=tilings(), policy=st.sampled_from(POLICIES), seed=st.integers(0, 2**32))
def test_any_shape(runtime: nt.Runtime, row: Any, drawn: Any, policy: str, seed: int) -> None:
    sizes, tiles = drawn
    check(row, tiles, policy, "fp64", sizes, seed, tolerance=1e-11)


@pytest.mark.parametrize("name", ["Contract bias gelu", "LayerNormGrad", "Attention merge packed causal", "Embedding"])
def test_a_wrong_result_is_seen(runtime: nt.Runtime, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kind = getattr(ops, name.split()[0])
    right = kind.reference

    def wrong(self: Op, *inputs: Any) -> Any:
        first, *rest = right(self, *inputs)
        first.flat[-1] += 1e-6
        return first, *rest

    monkeypatch.setattr(kind, "reference", wrong)
    with pytest.raises(AssertionError, match="off by"):
        check(ROWS[name], TILINGS["ragged"], "chain", "fp64")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_tile_that_nobody_writes_is_seen(runtime: nt.Runtime, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    everywhere = ops.Lowering.indices
    monkeypatch.setattr(ops.Lowering, "indices", lambda *args: list(everywhere(*args))[:-1])
    grid = {"grid": ops.Lowering.grid}

    def whole(low: ops.Lowering, tensor: Tensor) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops.Lowering, "indices", everywhere)
            return grid["grid"](low, tensor)

    monkeypatch.setattr(ops.Lowering, "grid", whole)
    with pytest.raises(AssertionError, match="off by inf"):
        check(ROWS["Add"], TILINGS["ragged"], policy, "fp64")
