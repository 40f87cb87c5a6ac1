"""Every mask with every attention backend, forward and gradient, against references; references against PyTorch."""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import nntile_py as nt
from nntile_py.errors import ConfigError
from nntile_py.graph.graph import Graph
from nntile_py.graph.lowering import lower
from nntile_py.tasks.attention import BACKENDS, attention
from nntile_py.tasks.band import Band
from nntile_py.tasks.elementwise import add
from nntile_py.tasks.mask import Mask
from nntile_py.tasks.op import Tensor
from nntile_py.testing import Case, check, error, ids, offsets, padding
from nntile_py.tiles import TileRange, Tiling

MASKS = [
    "none", "causal", "window", "padding", "padding causal", "padding window", "segments", "segments causal",
    "segments window", "around", "padding around", "segments around",
]  # fmt: skip
BSHD = "batch seq heads head_dim"
LAYOUTS: dict[str, list[str]] = {
    "by seq": [BSHD] * 3,
    "packed": ["qkv batch heads seq head_dim"],
    "packed by seq": ["batch seq qkv heads head_dim"],  # as fusion.qkv makes them
    "packed k and v": ["batch heads seq head_dim", "batch heads qkv seq head_dim"],
    "one sequence": ["heads seq head_dim"] * 3,
    "groups": [BSHD, "batch seq kv_heads head_dim", "batch seq kv_heads head_dim"],
    "other order": ["batch heads seq head_dim", BSHD, "seq heads batch head_dim"],
    "cross": [BSHD, "batch key heads head_dim", "batch key heads head_dim"],
    "cross groups": ["batch heads seq head_dim", *["batch kv_heads key head_dim"] * 2],
    "cross packed": ["batch heads seq head_dim", "batch qkv heads key head_dim"],
}
SIZES = {"batch": 3, "seq": 11, "key": 11, "heads": 6, "kv_heads": 3, "head_dim": 5}
CROSS = {"batch": 3, "seq": 11, "key": 7, "heads": 6, "kv_heads": 3, "head_dim": 5}
DTYPES = ("fp64", "fp32")
TILINGS: dict[str, dict[str, int]] = {
    "uncut": {},
    "even": {"batch": 1, "heads": 2},
    "seq": {"seq": 4, "heads": 6},
    "ragged": {"batch": 2, "seq": 3, "heads": 4},
    "parts of groups": {"batch": 2, "seq": 5, "heads": 1},
}


@dataclass(frozen=True)
class Row:
    """Attention with its gradient; the output and the gradients of q, k and v are compared."""

    mask: str
    backend: str
    layout: str = "by seq"
    dropout: float = 0.0
    added: bool = False  # gradients are compared with what they are of added: they may be nothing but rounding
    ends: tuple[int, ...] = ()  # of the segments; else random ones
    start: int = 0  # of the first of these

    @property
    def fits(self) -> bool:
        if self.layout == "one sequence" and "padding" in self.mask:
            return False
        return "cross" not in self.layout or self.mask in ("none", "padding")

    @property
    def sizes(self) -> dict[str, int]:
        return {**(CROSS if "cross" in self.layout else SIZES), **({"batch": 1} if "segments" in self.mask else {})}

    def build(self, case: Case) -> tuple[list[Tensor], Tensor, Tensor, Mask]:
        """Return q, k and v, or packed tensors with them; the output; its gradient; the mask."""
        case.sizes["qkv"] = 3 if len(LAYOUTS[self.layout]) == 1 else 2
        inputs = [case.x(axes) for axes in LAYOUTS[self.layout]]
        for tensor in inputs:
            tensor.requires_grad = True
        parts = [(t, i) for t in inputs for i in range(case.sizes["qkv"])] if len(inputs) == 1 else list(inputs)
        if len(inputs) == 2:
            parts = [inputs[0], (inputs[1], 0), (inputs[1], 1)]
        key = "key" if "cross" in self.layout else "seq"
        words = self.mask.split()
        of_segments = offsets(case.sizes["seq"])
        if self.ends:
            case.sizes["sequences"] = len(self.ends) + 1
            of_segments = lambda *_: np.array([self.start, *self.ends])  # noqa: E731
        if self.dropout and self.backend == "segments" and "segments" in words:
            case.graph.row_numbers["seq"] = case.x("batch seq", ids(1000), "int64")
        data = {
            "padding": case.x(f"batch {key}", padding, "int64") if "padding" in words else None,
            "segments": case.x("sequences", of_segments, "int64") if "segments" in words else None,
        }
        window = 4 if {"window", "around"} & {*words} else None
        mask = Mask("causal" in words, window, **data, two_sided="around" in words)
        q, k, v = parts
        out = attention(case.graph, q, k, v, mask, self.backend, self.dropout)
        return inputs, out, case.x(" ".join(out.axes)), mask

    def __call__(self, case: Case) -> tuple[list[Tensor], Tensor, Tensor, Mask]:
        made = inputs, out, dy, _ = self.build(case)
        g, grads = case.graph, {out: dy}
        g._phase = "backward"
        for op in reversed(g.ops[:]):
            for t, grad in zip(op.inputs, op.gradient(g, *(grads.get(x) for x in op.outputs)), strict=True):
                if grad is not None and t.requires_grad:
                    grads[t] = add(g, grads[t], grad) if t in grads else grad
        compared = [add(g, t, grads[t]) if self.added else grads[t] for t in inputs]
        for number, tensor in enumerate((out, *compared)):
            tensor.storage.kind, tensor.storage.name = "scalar", f"result{number}"
        return made


# -- the references against PyTorch


def attended(row: Row, sizes: Mapping[str, int], data: list[Any]) -> torch.Tensor:
    """Return [batch, 1, seq, key], computed for each pair of positions."""
    batch, seq, key = sizes["batch"], sizes["seq"], sizes["key"]
    words, result = row.mask.split(), torch.zeros(batch, 1, seq, key, dtype=torch.bool)
    for b, s, k in itertools.product(range(batch), range(seq), range(key)):
        good = True
        if "causal" in words or "window" in words:
            good = k <= s
        if "window" in words:
            good = good and s - k < 4
        if "around" in words:
            good = abs(s - k) < 4
        if "padding" in words:
            good = good and bool(data[0][b, k])
        if "segments" in words:
            starts = data[0].tolist()
            good = good and any(a <= s < z and a <= k < z for a, z in itertools.pairwise(starts))
        result[b, 0, s, k] = good
    return result


def of_torch(row: Row, case: Case, made: Any, values: Any) -> list[Any]:
    """The output and the gradients of the inputs."""
    inputs, out, dy, mask = made
    given = [torch.tensor(values[t], requires_grad=True) for t in inputs]
    parts = []
    for t, value in zip(inputs, given, strict=True):
        axes = [a for a in t.axes if a != "qkv"]
        slices = value.unbind(t.axes.index("qkv")) if "qkv" in t.axes else [value]
        roles = [{"kv_heads": "heads", "key": "seq"}.get(a, a) for a in axes]
        order = [roles.index(a) for a in ("batch", "heads", "seq", "head_dim") if a in roles]
        parts += [x.permute(order) if len(order) == 4 else x.permute(order)[None] for x in slices]
    q, k, v = parts
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    allowed = attended(row, {**case.sizes, "batch": q.shape[0]}, [values[t] for t in mask.inputs])
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~allowed, -1e9)
    o = (torch.softmax(scores, -1) * allowed) @ v
    axes = list(out.axes)
    o = (o if "batch" in axes else o[0]).permute(
        [[a for a in ("batch", "heads", "seq", "head_dim") if a in axes].index(a) for a in axes]
    )
    o.backward(torch.tensor(values[dy]))
    return [o.detach(), *(t.grad for t in given)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", ["vendor", "naive"])
def test_references(layout: str, backend: str) -> None:
    for mask in MASKS:
        row = Row(mask, backend, layout)
        if not row.fits:
            continue
        case = Case(row.sizes, "fp64")
        made = row(case)
        values = case.draw(np.random.default_rng(1))
        expected = case.expected(values)
        found = {t.storage.name: value for t, value in expected.items()}
        for number, want in enumerate(of_torch(row, case, made, values)):
            assert error(found[f"result{number}"], want) < 1e-12, (mask, number)


# -- lowered


def tiles_for(row: Row, tiling: str) -> dict[str, int]:
    return {axis: size for axis, size in TILINGS[tiling].items() if axis != "batch" or row.layout != "one sequence"}


def combinations() -> list[tuple[Row, str, str]]:
    """Return each mask with each backend, in a tiling that cuts sequences and in another one.

    Layouts, tilings and data types are chosen so that each two values of different parameters occur if they fit.
    """
    cuts = [[name for name, tiles in TILINGS.items() if ("seq" in tiles) == cut] for cut in (False, True)]
    chosen, seen = [], set[Any]()

    def add(*values: Sequence[str]) -> None:
        new = {one: {*itertools.combinations(enumerate(one), 2)} - seen for one in itertools.product(*values)}
        best = max(new, key=lambda one: len(new[one]))
        seen.update(new[best])
        chosen.append((Row(*best[:3]), *best[3:]))

    for tilings, mask, backend in itertools.product(cuts, MASKS, BACKENDS):
        add([mask], [backend], [layout for layout in LAYOUTS if Row(mask, backend, layout).fits], tilings, DTYPES)
    for layout, backend in itertools.product(LAYOUTS, BACKENDS):
        if ((1, backend), (2, layout)) not in seen:
            add(["none"], [backend], [layout], ["ragged"], ["fp64"])
    return chosen


def test_combinations() -> None:
    """A layout occurs with each backend, tiling and fitting mask."""
    chosen = [(row.layout, row.backend, row.mask, tiling) for row, tiling, _ in combinations()]
    fitting = {(layout, mask) for layout in LAYOUTS for mask in MASKS if Row(mask, "naive", layout).fits}
    assert {(layout, mask) for layout, _, mask, _ in chosen} == fitting
    assert {(layout, backend) for layout, backend, *_ in chosen} == {*itertools.product(LAYOUTS, BACKENDS)}
    assert {(layout, tiling) for layout, *_, tiling in chosen} == {*itertools.product(LAYOUTS, TILINGS)}


@pytest.mark.few(40)
@pytest.mark.parametrize(
    ("row", "tiling", "dtype"),
    combinations(),
    ids=lambda of: f"{of.backend} {of.mask} {of.layout}" if isinstance(of, Row) else of,
)
def test_masks(runtime: nt.Runtime, row: Row, tiling: str, dtype: str) -> None:
    check(row, tiles_for(row, tiling), "chain", dtype, row.sizes)


@pytest.mark.parametrize("policy", ["commute", "redux", "tree"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_policies(runtime: nt.Runtime, backend: str, policy: str) -> None:
    for row in (Row("padding window", backend, "groups"), Row("segments causal", backend, "packed")):
        check(row, tiles_for(row, "parts of groups"), policy, "fp64", row.sizes)


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_many_positions(runtime: nt.Runtime, backend: str) -> None:
    """Kernels take the queries in blocks; windows and sequences leave out keys before and after."""
    for mask, tiles in itertools.product(MASKS[1:], ({}, {"seq": 170})):
        row = Row(mask, backend)
        check(row, tiles, "chain", "fp64", {**row.sizes, "batch": 1, "seq": 300, "key": 300, "heads": 1, "head_dim": 8})


@pytest.mark.parametrize(("layout", "head_dim"), [("groups", 20), ("other order", 64), ("packed by seq", 32)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_queries_and_keys(runtime: nt.Runtime, layout: str, head_dim: int, dtype: str) -> None:
    """More queries and keys than a block of attention_head.h has; head_dim with and without a rest."""
    for mask in ("none", "causal", "segments causal"):
        row = Row(mask, "vendor", layout)
        sizes = {**row.sizes, "batch": 1, "seq": 650, "key": 650, "heads": 2, "kv_heads": 1, "head_dim": head_dim}
        check(row, {}, "chain", dtype, sizes)


@pytest.mark.parametrize("scale", [-0.7, 30.0])
def test_scales(runtime: nt.Runtime, scale: float) -> None:
    """Of a negative scale, the largest score is the least product; of a large scale, most exponentials vanish."""

    def row(case: Case) -> None:
        q, k, v = inputs = [case.x(BSHD) for _ in range(3)]
        for tensor in inputs:
            tensor.requires_grad = True
        out = attention(case.graph, q, k, v, Mask(True), "vendor", scale=scale)
        op, dy = case.graph.ops[-1], case.x(BSHD)
        grads = [t for t in op.gradient(case.graph, dy, None) if t is not None]
        for number, tensor in enumerate((out, *grads)):
            tensor.storage.kind, tensor.storage.name = "scalar", f"result{number}"

    check(row, {}, "chain", "fp64", {**SIZES, "seq": 70, "head_dim": 16})


@pytest.mark.parametrize("tiling", TILINGS)
def test_dropout(runtime: nt.Runtime, tiling: str) -> None:
    def row(case: Case) -> None:
        case.slots["dropout_seed"] = case.options["seed"] = 3
        Row("padding causal", "naive", "groups", dropout=0.4)(case)
        assert sum(op.kind == "Dropout" for op in case.graph.ops) == 2

    check(row, TILINGS[tiling], "chain", "fp64", SIZES)


@pytest.mark.parametrize("mask", ["segments", "segments causal", "segments around"])
@pytest.mark.parametrize("tiling", ["uncut", "even"])
def test_dropout_of_segments(runtime: nt.Runtime, mask: str, tiling: str) -> None:
    def row(case: Case) -> None:
        case.slots["dropout_seed"] = case.options["seed"] = 3
        Row(mask, "segments", "groups", dropout=0.4, ends=(4, 5, 5, 9))(case)

    check(row, TILINGS[tiling], "chain", "fp64", {**SIZES, "batch": 1})


DROPPED = [("none", "cross groups"), ("none", "one sequence"), ("none", "other order"), ("padding", "cross packed")]
DROPPED += [(mask, "groups") for mask in ("none", "causal", "window", "padding", "padding causal", "padding around")]
HEADS_BATCH = "heads batch seq head_dim"


def dropped(mask: str, backend: str, layout: str) -> Callable[[Case], None]:
    def row(case: Case) -> None:
        case.slots["dropout_seed"] = case.options["seed"] = 3
        Row(mask, backend, layout, dropout=0.4)(case)

    return row


@pytest.mark.parametrize("tiles", [{}, {"batch": 1, "heads": 2}, {"batch": 2, "heads": 4}, {"batch": 2, "heads": 1}])
@pytest.mark.parametrize(("mask", "layout"), DROPPED)
def test_dropout_in_one_task(runtime: nt.Runtime, mask: str, layout: str, tiles: dict[str, int]) -> None:
    own = {axis: tile for axis, tile in tiles.items() if axis != "batch" or layout != "one sequence"}
    check(dropped(mask, "segments", layout), own, "chain", "fp64", Row(mask, "segments", layout).sizes)


@pytest.mark.parametrize(("mask", "layout"), [*DROPPED, ("causal", "heads first")])
def test_dropout_draws_as_with_scores_in_memory(monkeypatch: pytest.MonkeyPatch, mask: str, layout: str) -> None:
    monkeypatch.setitem(LAYOUTS, "heads first", [HEADS_BATCH] * 3)
    found = []
    for backend in ("naive", "segments"):
        case = Case(Row(mask, backend, layout).sizes, "fp64")
        dropped(mask, backend, layout)(case)
        assert any(op.kind == "Attention" for op in case.graph.ops) == (backend == "segments")
        expected = case.expected(case.draw(np.random.default_rng(1)))
        of_names = {tensor.storage.name: value for tensor, value in expected.items()}
        found.append([of_names[f"result{number}"] for number in range(1 + len(LAYOUTS[layout]))])
    assert all(error(fused, naive) < 1e-12 for naive, *fused in zip(*found, strict=True) for fused in fused)


def test_dropout_of_cut_sequences() -> None:
    """If the graph knows that sequences are cut, scores are in memory; a graph for whole sequences raises an error."""
    for cuts, kinds in (({"heads": 2}, {"Attention"}), ({"seq": 4}, {"Contract", "Softmax", "Dropout", "Rename"})):
        case = Case(SIZES, "fp64")
        g = case.graph = Graph("fp64", cuts=Tiling(cuts))
        attention(g, *[case.x("batch heads seq head_dim") for _ in range(3)], Mask(), "segments", 0.1)
        assert {op.kind for op in g.ops} - {"Transpose"} == kinds
        lower(g, Tiling(cuts))
        if "heads" in cuts:
            with pytest.raises(ConfigError, match=r"tiles\.seq: got 4; allowed with attention_dropout: none"):
                lower(g, Tiling({"seq": 4}))


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Row, dict[str, int], dict[str, int]]:
    """Any mask, backend and layout, any sizes, and tiles that fit the groups of heads."""
    names = [draw(st.sampled_from(of)) for of in (MASKS, BACKENDS, list(LAYOUTS))]
    row = Row(*names, added=True)
    assume(row.fits)
    sizes = {axis: draw(st.integers(1, most)) for axis, most in (("batch", 3), ("seq", 9), ("head_dim", 6))}
    sizes["key"] = draw(st.integers(1, 9)) if "cross" in row.layout else sizes["seq"]
    group, sizes["kv_heads"] = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sizes["heads"] = group * sizes["kv_heads"]
    if "segments" in row.mask:
        sizes["batch"] = 1
    tiles = {axis: draw(st.integers(-(-sizes[axis] // 4), sizes[axis])) for axis in ("batch", "seq")}
    tiles["heads"] = draw(st.sampled_from([t for t in range(1, sizes["heads"] + 1) if not (t % group and group % t)]))
    return row, sizes, {axis: tiles[axis] for axis in draw(st.sets(st.sampled_from(sorted(tiles))))}


@settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(drawn=shapes(), seed=st.integers(0, 2**32))
def test_any_shape(runtime: nt.Runtime, drawn: Any, seed: int) -> None:
    row, sizes, tiles = drawn
    check(row, tiles, "chain", "fp64", sizes, seed, tolerance=1e-11)


# -- which pairs of tiles there are


@pytest.mark.parametrize("backend", BACKENDS)
def test_pairs_outside_of_the_window_are_absent(backend: str) -> None:
    """Five tiles of 3 positions, the last of 2: each attends to itself and to the tiles within the window."""
    for window, reach in ((1, 0), (2, 1), (4, 1), (5, 2), (8, 3), (100, 4)):
        case = Case({**SIZES, "batch": 1, "seq": 14, "heads": 1}, "fp64")
        g, t = case.graph, [case.x(BSHD) for _ in range(3)]
        for tensor in t:
            tensor.requires_grad = True
        out = attention(g, *t, Mask(window=window), backend)
        if backend == "naive":
            grads: dict[Tensor, Tensor] = {out: case.x(BSHD)}
            for op in reversed(g.ops[:]):
                grads.update(zip(op.inputs, op.gradient(g, grads[op.output]), strict=True))  # type: ignore[arg-type]
        else:
            g.ops[-1].gradient(g, case.x(BSHD), None)
        tasks = lower(g, Tiling({"seq": 3})).tasks.tasks
        counts = Counter(task.kernel for task in tasks)
        pairs = sum(min(i, reach) + 1 for i in range(5))
        if backend == "naive":
            assert counts["maxsumexp"] == counts["softmax"] == counts["softmax_grad"] == pairs
            assert counts["contract"] == 6 * pairs
        else:
            kernels = ["flash_maxsumexp", "flash_softmax_gemm"] if backend == "flash" else ["attention_partial"]
            assert all(counts[kernel] == pairs for kernel in [*kernels, "attention_grad_pair"])
            readers = {task.kernel for task in tasks for access in task.accesses if access.tile.tensor == t[2].name}
            assert readers == {kernels[-1], "attention_grad_pair"}, "flash_maxsumexp reads no values"


@settings(deadline=None)
@given(
    band=st.builds(Band, st.just(True), st.none() | st.integers(1, 30))
    | st.builds(Band, st.just(False), st.integers(1, 30), st.just(True)),
    tile=st.integers(1, 9), size=st.integers(1, 30),
)  # fmt: skip
def test_bands(band: Band, tile: int, size: int) -> None:
    """Properties of tiles agree with their elements; areas add up; elements are the attended pairs."""
    parts, allowed = Tiling({"seq": tile}).parts("seq", size), band.allowed(size, size)
    total, there = 0.0, 0
    for seq, key in itertools.product(parts, parts):
        inside = allowed[seq.offset : seq.end, key.offset : key.end]
        assert band.empty(seq, key) == (not inside.any())
        before = Band(band.causal).allowed(size, size)[seq.offset : seq.end, key.offset : key.end]
        assert band.cuts_window(seq, key) >= bool((before & ~inside).any())
        assert band.cuts_causal(seq, key) >= (not before.all())
        assert (band.area(seq, key) > 0) == bool(inside.any())
        assert band.pairs(seq, key) == inside.sum()
        total += band.area(seq, key)
        there += inside.size * bool(inside.any())
    assert total == band.area(TileRange(0, size), TileRange(0, size))
    assert abs(total - allowed.sum()) <= size
    scores = Tensor("scores", ["heads", "seq", "key"], [3, size, size], "fp32", band=band)
    assert scores.elements == 3 * allowed.sum()
    assert scores.filled(Tiling({"seq": tile})) == pytest.approx(there / size**2)


# -- rejected arguments


def test_refused() -> None:
    g = Graph("fp32")

    def tensor(axes: str, dtype: str = "fp32", **sizes: int) -> Tensor:
        known = {**SIZES, "qkv": 3, "sequences": 4, **sizes}
        return g.named(f"t{len(g.tensors)}", axes.split(), [known[a] for a in axes.split()], "input", dtype)

    q, cross = tensor(BSHD), tensor("batch key heads head_dim", key=7)
    offsets_of = tensor("sequences", "int64")
    few, uneven = tensor("batch seq kv_heads head_dim"), tensor("batch seq kv_heads head_dim", kv_heads=4)
    for match, ask in {
        "a causal mask for 11 queries and 7 keys": lambda: attention(g, q, cross, cross, Mask(causal=True)),
        "a window for 11 queries and 7 keys": lambda: attention(g, q, cross, cross, Mask(window=3)),
        "segments for 11 queries": lambda: attention(g, q, cross, cross, Mask(segments=offsets_of)),
        "got segments .* for a batch of 3; allowed: int64": lambda: attention(g, q, q, q, Mask(segments=offsets_of)),
        "mask: got a window of 0; allowed: a number of positions from 1 up": lambda: Mask(window=0),
        "mask: got two_sided; allowed: two_sided with a window and without causal": lambda: Mask(two_sided=True),
        "got two_sided; allowed: two_sided with a window and without causal": lambda: Mask(True, 3, two_sided=True),
        "a window for 11 queries and 7 keys;": lambda: attention(g, q, cross, cross, Mask(window=3, two_sided=True)),
        "got padding and segments; allowed": lambda: Mask(padding=tensor("batch seq", "int64"), segments=offsets_of),
        "got padding of fp32; allowed: integers": lambda: Mask(padding=tensor("batch seq")),
        "does not fit 3 sequences of 11": lambda: attention(
            g, q, q, q, Mask(padding=tensor("batch seq", "int64", seq=7))
        ),
        "allowed: the axes batch, then": lambda: attention(g, q, q, q, Mask(padding=tensor("seq batch", "int64"))),
        "attention backends naive or segments": lambda: attention(g, q, q, q, Mask(), "merge", 0.1),
        "attention: got 'fused'; allowed: ": lambda: attention(g, q, q, q, Mask(), "fused"),
        "6 heads cannot share 4": lambda: attention(g, q, uneven, uneven, Mask()),
        "must have the same axes": lambda: attention(g, q, few, q, Mask()),
        "name its axis key": lambda: attention(g, q, *[tensor(BSHD, seq=7)] * 2, Mask()),
        "do not fit the queries": lambda: attention(g, q, *[tensor(BSHD, head_dim=7)] * 2, Mask()),
        "must have the axes": lambda: attention(g, *[tensor("batch seq embed", embed=8)] * 3, Mask()),
    }.items():
        with pytest.raises(ValueError, match=match):
            ask()
    attention(g, q, few, few, Mask())
    need = "allowed: a multiple or a divisor of 2"
    with pytest.raises(ConfigError, match=rf"tiles\.heads: got 3, and 2 heads share one of kv_heads; {need}"):
        lower(g, Tiling({"heads": 3}))
