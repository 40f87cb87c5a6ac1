"""Tilings, task lists and steps as plain data: nothing here starts StarPU."""

import itertools
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nntile_py as nt
from nntile_py import tasks as ops
from nntile_py.errors import ConfigError
from nntile_py.graph.built_step import Step
from nntile_py.graph.fusion import Fusion
from nntile_py.graph.graph import Graph
from nntile_py.graph.lowering import lower
from nntile_py.graph.step import StepSpec
from nntile_py.models import GPT2, GPT2Config
from nntile_py.tasks.mask import Mask
from nntile_py.tiles import ACC, AXES, RW, R, Slot, TaskArgs, TaskList, Tile, TileRange, Tiling, W

POLICIES = ("chain", "commute", "redux", "tree")
every_policy = pytest.mark.parametrize("policy", POLICIES)

# -- tilings


@given(axis=st.sampled_from([*AXES, "key", "head_dim"]), size=st.integers(1, 200), tile=st.integers(1, 300))
def test_parts_cover_the_axis(axis: str, size: int, tile: int) -> None:
    cut = {"key": "seq", "head_dim": "embed"}.get(axis, axis)
    parts = Tiling({cut: tile}).parts(axis, size)
    assert [x for p in parts for x in range(p.offset, p.end)] == list(range(size))
    width = size if axis == "head_dim" else min(tile, size)
    assert len(parts) == math.ceil(size / width)
    assert {p.size for p in parts[:-1]} <= {width} and 1 <= parts[-1].size <= width
    assert Tiling({cut: tile}).cut(axis, size) == (len(parts) > 1)


def test_an_axis_left_out_is_not_cut() -> None:
    assert Tiling({"seq": 3}).parts("batch", 7) == [TileRange(0, 7)] == Tiling().parts("vocab", 7)


@pytest.mark.parametrize(
    ("tiles", "text"),
    [({"embd": 2}, "tiles.embd: unknown axis"), ({"seq": 0}, "tiles.seq: got 0;"),
     ({"seq": 2.0}, "tiles.seq: got 2.0;"), ({"seq": True}, "tiles.seq: got True;"),
     ({"key": 2}, "tiles.key: unknown axis")],
)  # fmt: skip
def test_a_wrong_tiling(tiles: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Tiling(tiles)


# -- task lists: a machine that runs them on bags of contributions

Bag = Counter[str]
# (kernel, position): accesses of GPT-2's kernels that change a tile without adding to it
IN_PLACE = {("contract_epilogue", 0), ("cross_entropy", 0), ("cross_entropy_grad", 0)}
IN_PLACE |= {("adamw", position) for position in range(3)}


@dataclass
class Machine:
    """Runs tasks on tiles that hold bags of contributions; StarPU's rules for each access mode, checked."""

    tiles: dict[Tile, Bag] = field(default_factory=dict)
    pending: dict[Tile, Bag] = field(default_factory=dict)  # of reductions under way
    in_place: set[int] = field(default_factory=set)  # ids of accesses RW, besides those of the kernels IN_PLACE
    reads: list[tuple[str, Bag]] = field(default_factory=list)

    def settle(self, tile: Tile) -> None:
        if tile in self.pending:
            self.tiles[tile] = self.tiles.get(tile, Counter()) + self.pending.pop(tile)

    def run(self, tasks: TaskList) -> None:
        for task in tasks.tasks:
            for tile in task.clears:
                assert tile not in self.pending
                self.tiles.pop(tile, None)
            for access in task.accesses:
                if access.mode != "REDUX":
                    self.settle(access.tile)
                if access.mode in ("R", "RW", "COMMUTE"):
                    assert access.tile in self.tiles, f"{task.op}: {access.tile} is read before it is written"
            bags = [Counter(self.tiles.get(a.tile, Counter())) for a in task.accesses]
            for position, access in enumerate(task.accesses):
                mine = Counter([f"{task.op}/{position}"])
                if task.kernel == "combine":
                    mine = bags[1]
                if access.mode == "R" and task.kernel != "combine":
                    self.reads.append((f"{task.op}/{position}", bags[position]))
                elif access.mode == "R":
                    continue
                elif access.mode == "REDUX":
                    assert access.accumulate and access.tile.redux
                    self.pending[access.tile] = self.pending.get(access.tile, Counter()) + mine
                else:
                    changes = id(access) in self.in_place or (task.kernel, position) in IN_PLACE
                    assert changes or access.accumulate == (access.mode != "W"), (task.kernel, position, access)
                    self.tiles[access.tile] = (bags[position] + mine) if access.accumulate or changes else mine
            for tile in task.frees:
                assert not tile.persistent
                self.settle(tile)
                del self.tiles[tile]
        for tile in list(self.pending):
            self.settle(tile)

    def kept(self) -> dict[Tile, Bag]:
        assert all(tile.persistent for tile in self.tiles), "a temporary tile is left over"
        return self.tiles


Recipe = list[tuple[str, list[tuple[str, int]]]]  # kernel, [(mode, number of the tile)]


def expected(recipe: Recipe, tiles: Sequence[Tile], held: dict[Tile, Bag]) -> Machine:
    """Simulate the accesses: ACC adds to the contents of the tile, from the list or from before it."""
    machine = Machine({t: Counter(bag) for t, bag in held.items()})
    for number, (_, accesses) in enumerate(recipe):
        before = {t: Counter(bag) for t, bag in machine.tiles.items()}
        for position, (mode, tile) in enumerate(accesses):
            name = f"{number}/{position}"
            if mode == "R":
                machine.reads.append((name, before[tiles[tile]]))
            else:
                base = Counter() if mode == "W" else before.get(tiles[tile], Counter())
                machine.tiles[tiles[tile]] = base + Counter([name])
    return machine


@st.composite
def recipes(draw: st.DrawFn) -> tuple[Recipe, list[bool], list[bool]]:
    """Draw tasks on up to five tiles, some persistent, some of these with data; no tile is read before a write."""
    count = draw(st.integers(1, 5))
    persistent = [draw(st.booleans()) for _ in range(count)]
    holds = [p and draw(st.booleans()) for p in persistent]
    written = list(holds)
    recipe: Recipe = []
    for _ in range(draw(st.integers(1, 30))):
        accesses = []
        for tile in draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3, unique=True)):
            modes = ["ACC", "ACC", "ACC", "W", *(["R", "RW"] if written[tile] else [])]
            accesses.append((draw(st.sampled_from(modes)), tile))
        for mode, tile in accesses:
            written[tile] |= mode != "R"
        recipe.append(("kernel", accesses))
    return recipe, persistent, holds


MODES = {"R": R, "W": W, "RW": RW, "ACC": ACC}


def listed(
    recipe: Recipe, tiles: Sequence[Tile], holds: Sequence[bool], policy: str, in_place: set[int] | None = None
) -> TaskList:
    """Return a resolved list. in_place: gets the ids of the accesses RW."""
    tasks = TaskList(policy, [t for t, h in zip(tiles, holds, strict=True) if h])
    for number, (kernel, accesses) in enumerate(recipe):
        made = [MODES[mode](tiles[tile]) for mode, tile in accesses]
        tasks.emit(kernel, made, op=str(number))
        if in_place is not None:
            in_place |= {id(access) for access, (mode, _) in zip(made, accesses, strict=True) if mode == "RW"}
    return tasks.resolve()


def edges(tasks: TaskList) -> list[tuple[Any, Any]]:
    """Return the pairs (earlier, later) of tasks that StarPU orders, since one of them writes a tile of the other."""
    result = []
    for first, second in itertools.combinations(tasks.tasks, 2):
        for a, b in itertools.product(first.accesses, second.accesses):
            free = a.mode == b.mode and a.mode in ("R", "COMMUTE", "REDUX")
            if a.tile is b.tile and not free:
                result.append((first, second))
    return result


@every_policy
@settings(deadline=None, max_examples=100)
@given(drawn=recipes())
def test_each_contribution_lands_once(policy: str, drawn: tuple[Recipe, list[bool], list[bool]]) -> None:
    recipe, persistent, holds = drawn
    tiles = [Tile(f"t{k}", (), (2,), "fp32", persistent=p) for k, p in enumerate(persistent)]
    in_place = set[int]()
    tasks = listed(recipe, tiles, holds, policy, in_place)
    initial = {t: Counter([f"initial {t.tensor}"]) for t, h in zip(tiles, holds, strict=True) if h}
    want = expected(recipe, tiles, initial)
    for stale in (False, True):  # a second replay finds what the first has left in tiles that are to be written anew
        machine = Machine({t: Counter(bag) for t, bag in initial.items()}, in_place=in_place)
        if stale:
            machine.tiles |= {
                t: Counter(["stale"]) for t in tiles if t.persistent and t not in initial and t in want.tiles
            }
        machine.run(tasks)
        assert machine.reads == want.reads
        assert machine.kept() == {t: bag for t, bag in want.tiles.items() if t.persistent}
    for first, second in edges(tasks):
        assert first.priority > second.priority


@every_policy
@given(length=st.integers(1, 40), persistent=st.booleans(), holds=st.booleans())
def test_modes_of_a_run_of_contributions(policy: str, length: int, persistent: bool, holds: bool) -> None:
    tile, source = Tile("sum", (), (2,), "fp32", persistent=persistent), Tile("x", (), (2,), "fp32", persistent=True)
    held = persistent and holds
    recipe: Recipe = [*[("add", [("ACC", 0), ("R", 1)])] * length, ("use", [("R", 0)])]
    tasks = listed(recipe, [tile, source], [held, True], policy)
    modes = [t.accesses[0].mode for t in tasks.tasks if t.kernel == "add"]
    first = "RW" if held else "W"
    if length == 1:
        assert modes == [first]
    elif policy == "tree":
        assert modes == [first] + ["W"] * (length - 1)
        merges = [t for t in tasks.tasks if t.kernel == "combine"]
        assert len(merges) == length - 1
        assert depth(tasks, tile) == math.ceil(math.log2(length))
    else:
        rest = {"chain": "RW", "commute": "COMMUTE", "redux": "REDUX"}[policy]
        assert modes == [rest if policy == "redux" else "COMMUTE" if held and policy == "commute" else first] + [
            rest
        ] * (length - 1)
    assert tile.redux == (policy == "redux" and (length > 1 or persistent))


def depth(tasks: TaskList, tile: Tile) -> int:
    """The longest chain of merges that ends in the tile."""
    depths: Counter[Tile] = Counter()
    for task in tasks.tasks:
        if task.kernel == "combine":
            into, part = (a.tile for a in task.accesses)
            depths[into] = max(depths[into], depths[part]) + 1
    return depths[tile]


def test_an_unknown_policy() -> None:
    with pytest.raises(ValueError, match="accumulate: got 'rings'; allowed: chain, commute, redux, tree"):
        TaskList("rings")


def test_peak_bytes_by_hand() -> None:
    weight = Tile("w", (), (100,), "fp32", persistent=True)  # 400 bytes, always there
    x, y, z = Tile("x", (), (10,), "fp64"), Tile("y", (), (30,), "fp32"), Tile("z", (), (5,), "fp32")
    tasks = TaskList("chain", [weight])
    tasks.emit("make", [W(x), R(weight)])  # 400 + 80
    tasks.emit("widen", [W(y), R(x)])  # + 120: the peak; x goes
    tasks.emit("narrow", [W(z), R(y)])  # 400 + 120 + 20; y goes
    tasks.emit("end", [RW(weight), R(z)])
    tasks.resolve()
    assert [task.frees for task in tasks.tasks] == [[], [x], [y], [z]]
    assert tasks.peak_bytes() == 600


def test_a_forgotten_tile_takes_no_room_until_it_is_written() -> None:
    kept, x, y = (Tile(name, (), (10,), "fp64", persistent=name == "kept") for name in ("kept", "x", "y"))  # 80 bytes
    tasks = TaskList("chain")
    tasks.emit("make", [W(x)])
    tasks.emit("go on", [W(y), R(x)])  # x goes
    tasks.emit("end", [W(kept), R(y)])
    tasks.resolve()
    assert tasks.peak_bytes() == 240
    tasks.forget([kept])
    assert tasks.tasks[0].clears == [kept] and tasks.peak_bytes() == 160


@pytest.mark.parametrize("policy", ["chain", "redux", "tree"])
def test_a_step_begins_without_the_gradients_of_the_last(policy: str) -> None:
    model = GPT2(GPT2Config(layers=1, embed=8, heads=2, vocab=20, positions=4))
    step = StepSpec(
        model, 4, 4, Tiling({"batch": 2, "embed": 4}), precision="fp32", optimizer=nt.AdamW(), clip_grad_norm=1.0,
        accumulate=policy, fusion=Fusion(),
    ).step()  # fmt: skip
    tiles = [step.first.tile(grad, index) for grad in step.grads.values() for index in step.first.indices(grad)]
    grads = {(tile.tensor, tile.index) for tile in tiles}
    assert grads <= {(tile.tensor, tile.index) for tile in step.first.tasks.tasks[0].clears}
    machine = Machine({tile: Counter(["host"]) for low in step.lists for tile in low.tasks.initialised})
    machine.run(step.first.tasks)
    once = {str(tile): bag for tile, bag in machine.tiles.items() if (tile.tensor, tile.index) in grads}
    machine.run(step.first.tasks)
    assert once == {str(tile): bag for tile, bag in machine.tiles.items() if (tile.tensor, tile.index) in grads}


def test_tile_and_task_bytes() -> None:
    a, b = Tile("a", (), (3, 5), "fp32"), Tile("b", (), (4,), "int64")
    assert (a.bytes, b.bytes) == (60, 32)
    tasks = TaskList()
    tasks.emit("k", [W(a)])
    tasks.emit("k", [RW(a), W(b)])
    assert [t.bytes for t in tasks.resolve().tasks] == [60, 152]


# -- digests


class Made(TaskArgs):
    number: int


class Used(TaskArgs):
    factor: float
    rate: Slot


def recorded(change: str = "") -> TaskList:
    shape = (3, 4) if change != "shape" else (4, 3)
    a = Tile("a", (0,), shape, "fp32" if change != "dtype" else "fp64")
    b = Tile("b", (0,), (7,), "fp32", persistent=change == "persistent")
    tasks = TaskList("chain")
    tasks.emit("make", [W(a)], Made(1))
    tasks.emit("make", [W(b if change != "tile" else a)], Made(1 if change != "int" else 2))
    args = Used(0.5 if change != "float" else 0.25, Slot("lr" if change != "slot" else "rl"))
    accesses = [W(a) if change == "mode" else RW(a), R(b if change != "tile" else a)]
    tasks.emit("use" if change != "kernel" else "lose", accesses, args)
    if change == "more":
        tasks.emit("make", [W(a)])
    return tasks.resolve()


def test_equal_lists_have_equal_digests() -> None:
    assert recorded().digest() == recorded().digest()


@pytest.mark.parametrize(
    "change", ["shape", "dtype", "persistent", "tile", "int", "kernel", "mode", "float", "slot", "more"]
)
def test_other_lists_have_other_digests(change: str) -> None:
    assert recorded(change).digest() != recorded().digest()


# -- lowered operators


def causal_tiles(low: ops.Lowering) -> set[tuple[str, int, int]]:
    """(tensor, query tile, key tile) of every tile of four axes."""
    tiles = {access.tile for task in low.tasks.tasks for access in task.accesses}
    return {(tile.tensor, *tile.index[-2:]) for tile in tiles if len(tile.index) == 4}


@pytest.mark.parametrize(("size", "tile"), [(8, 2), (7, 3), (7, 4), (5, 1), (6, 6)])
@pytest.mark.parametrize("form", ["vendor", "merge", "flash", "naive"])
def test_tile_pairs_above_the_diagonal_are_absent(form: str, size: int, tile: int) -> None:
    n = math.ceil(size / tile)
    for causal in (True, False):
        pairs = n * (n + 1) // 2 if causal else n * n
        g = Graph("fp32")
        names, shape = ["batch", "heads", "seq", "head_dim"], [2, 3, size, 4]
        q, k, v = (g.named(name, names, shape, "param") for name in "qkv")
        o = ops.attention(g, q, k, v, Mask(causal), form)
        one = g.named("one", ["one"], [1], "scalar", "fp64")
        dy = g.named("dy", o.axes, o.shape, "input")
        loss = g.add(ops.GradNorm([o], one, g.named("clip", ["one"], [1], "scalar", "fp64"), None)).output
        g._phase = "backward"
        grads: dict[Any, Any] = {o: dy}
        for op in reversed(g.ops[:-1]):
            for t, grad in zip(op.inputs, op.gradient(g, *(grads.get(x) for x in op.outputs)), strict=True):
                grads[t] = grad
        low = lower(g, Tiling({"seq": tile, "batch": 1}))
        kernels = Counter(task.kernel for task in low.tasks.tasks)
        if form == "naive":
            by_op = Counter(task.kernel for task in low.tasks.tasks if task.kernel.startswith(("softmax", "maxsumexp")))
            assert by_op == {k: 2 * pairs for k in ("maxsumexp", "softmax", "softmax_grad_sums", "softmax_grad")}
            # scores, p v, and of the backward dp, dv, dq, dk: each one GEMM a pair
            assert kernels["contract"] == 6 * 2 * pairs
            scores = {(i, j) for name, i, j in causal_tiles(low) if name.endswith(("scores", "softmax"))}
            assert scores == {(i, j) for i in range(n) for j in range(n) if not causal or j <= i}
        elif form == "vendor" and n == 1:
            assert kernels["attention"] == kernels["attention_grad"] == 2
        else:
            pair_kernels = ["flash_maxsumexp", "flash_softmax_gemm"] if form == "flash" else ["attention_partial"]
            for kernel in [*pair_kernels, "attention_grad_pair"]:
                assert kernels[kernel] == 2 * pairs
        assert loss is one


# -- GPT-2

CONFIG = GPT2Config(layers=2, embed=24, heads=4, vocab=61, positions=32, dropout=0.1)
TILES = {"batch": 2, "seq": 7, "embed": 10, "heads": 3, "ffn": 50, "vocab": 25}


def step(config: GPT2Config = CONFIG, policy: str = "chain", fusion: Any = True, **tiles: int) -> Step:
    return StepSpec(
        GPT2(config, {}), 3, 17, Tiling(tiles), precision="fp32", optimizer=nt.AdamW(), clip_grad_norm=1.0,
        accumulate=policy, fusion=Fusion.of(fusion), grad_accumulation=2,
    ).step()  # fmt: skip


def kernels(low: ops.Lowering, *names: str) -> float:
    return sum(task.flop for task in low.tasks.tasks if task.kernel in names)


@pytest.mark.few(5)
@pytest.mark.parametrize("tiles", [{}, *({a: t} for a, t in TILES.items()), TILES, {"batch": 1, "heads": 1}], ids=str)
@pytest.mark.parametrize("form", ["vendor", "merge"])
def test_flop_does_not_depend_on_the_tiling(tiles: dict[str, int], form: str) -> None:
    built = step(CONFIG.changed(attention=form), **tiles)
    counted = ("contract", "attention", "attention_grad", "attention_partial", "attention_grad_pair")
    assert kernels(built.first, *counted) == built.flop == step(CONFIG).flop
    rows, embed, vocab = 3 * 17, CONFIG.embed, CONFIG.vocab
    linear = 3 * 2 * rows * (CONFIG.layers * 12 * embed**2 + embed * vocab)  # forward, and twice backward
    scores = 3.5 * CONFIG.layers * 4 * rows * 17 * embed / 2
    assert built.flop == linear + scores


@every_policy
def test_both_micro_batches_land_in_the_gradients(policy: str) -> None:
    built = step(policy=policy, **TILES)
    held: dict[tuple[str, tuple[int, ...]], Bag] = {}
    for program, low in enumerate((built.first, built.more, built.update)):
        assert low
        for number, task in enumerate(low.tasks.tasks):
            task.op = f"{program} {number}"
        start = {t: held.get((t.tensor, t.index), Counter(["start"])) for t in low.tasks.initialised}
        machine = Machine(start)
        machine.run(low.tasks)
        held |= {(t.tensor, t.index): bag for t, bag in machine.kept().items()}
    grads = {key: bag for key, bag in held.items() if key[0].endswith(".grad")}
    assert {name for name, _ in grads} == {t.name for t in built.grads.values()}
    for bag in (*grads.values(), held["loss", (0,)]):
        assert set(bag.values()) == {1}
        programs = Counter(name.split()[0] for name in bag)
        assert programs["0"] == programs["1"] > 0 and len(programs) == 2
    params = {param.name for param in built.grads}
    assert all(len(bag) == 2 for (name, _), bag in held.items() if name in params)  # what it was, and one update


def test_the_step_is_the_same_in_every_build() -> None:
    assert digests(step(**TILES)) == digests(step(**TILES))
    code = f"import sys; sys.path.insert(0, {str(__file__).rpartition('/')[0]!r})\n" + (
        "from test_tiling import TILES, digests, step; print(*digests(step(**TILES)))"
    )
    variables = os.environ | {"PYTHONHASHSEED": "1"}
    other = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
    assert other.stdout.split() == digests(step(**TILES)), other.stderr


def test_other_steps_are_other_programs() -> None:
    variants = [step(**TILES), step(), step(fusion=False), step(policy="tree", **TILES), step(policy="redux", **TILES)]
    variants += [step(CONFIG.changed(attention="flash"), **TILES), step(**{**TILES, "embed": 11})]
    first = [digests(variant)[0] for variant in variants]
    assert len(set(first)) == len(first)


def digests(built: Step) -> list[str]:
    assert built.more
    return [low.tasks.digest() for low in (built.first, built.more, built.update)]


def test_no_inputs_are_drawn_for_too_many_tiles() -> None:
    """100 million sequences: refused before there is memory for them."""
    model = GPT2(GPT2Config(layers=1, embed=8, heads=1, vocab=9, positions=4))
    spec = StepSpec(model, 4, 4, Tiling({"batch": 1}))
    with pytest.raises(ConfigError, match=r"tiles\.batch: 100,000,000 tiles .*; allowed: at most 1,000,000"):
        spec.random_inputs(10**8, seed=0)


def test_a_cut_axis_is_known_without_its_tiles() -> None:
    """`nntile layouts` asks often, before the number of tiles is checked."""
    tiling = Tiling({"embed": 1})
    assert tiling.cut("embed", 10**12) and not tiling.cut("embed", 1) and not tiling.cut("ffn", 10**12)
