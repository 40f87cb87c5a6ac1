"""Eviction: the tile with the furthest next use leaves first, after its last use, and no more tiles than necessary."""

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from conftest import CPUS
from hypothesis import given, settings
from hypothesis import strategies as st

import nntile_py as nt
from nntile_py.execution import program
from nntile_py.graph.fusion import Fusion
from nntile_py.graph.step import StepSpec
from nntile_py.tiles import RW, R, TaskList, Tile, Tiling, W
from nntile_py.tiles.eviction import FULL, mark_evictions, outside_peak, room_in_turn
from nntile_py.tiles.task import Task


def tile(name: str, kib: int = 1, persistent: bool = True) -> Tile:
    return Tile(name, (0,), (kib * 256,), "fp32", persistent=persistent)


def a_list(*tasks: Task) -> TaskList:
    made = TaskList()
    made.tasks = list(tasks)
    return made


def names(tasks: TaskList) -> list[str]:
    return ["".join(sorted(tile.tensor for tile in task.evicts)) for task in tasks.tasks]


def fetched(tasks: list[Task], room: int, marks: bool) -> int:
    """Return the bytes that arrive in a late round; the least recently used tile leaves, with `marks` a marked one."""
    held: OrderedDict[Tile, bool] = OrderedDict()
    total = 0
    for turn in range(6):
        for task in tasks:
            for access in task.accesses:
                total += access.tile.bytes if turn == 5 and access.tile not in held else 0
                held[access.tile] = marks and access.tile in task.evicts
                held.move_to_end(access.tile)
            mine = {access.tile for access in task.accesses}
            for gone in sorted(held, key=lambda tile: not held[tile]):  # stable
                if sum(tile.bytes for tile in held) <= room:
                    break
                if gone not in mine:
                    del held[gone]
    return total


def test_nothing_leaves_where_all_fits() -> None:
    a, b = tile("a"), tile("b")
    tasks = a_list(Task("k", [R(a), RW(b)]), Task("k", [RW(a)]))
    assert not mark_evictions([tasks], 2048) and names(tasks) == ["", ""] and room_in_turn([tasks], 2049 / FULL) == 0
    assert mark_evictions([tasks], 1024) and 800 < room_in_turn([tasks], 1024) < 1024
    assert mark_evictions([tasks], 2048) is False and names(tasks) == ["", ""]  # old marks are gone


def test_a_scan_keeps_what_fits() -> None:
    """The worst case of least recently used: ten tiles in turn, repeatedly, with room for six."""
    tasks = a_list(*(Task("k", [RW(tile(str(k)))]) for k in range(10)))
    assert mark_evictions([tasks], 6 << 10)
    assert sum(map(bool, names(tasks))) == 5  # four have no room, and what is used needs some
    assert fetched(tasks.tasks, 6 << 10, marks=False) == 10 << 10
    assert fetched(tasks.tasks, 6 << 10, marks=True) <= 5 << 10


def test_tiles_of_several_lists_are_the_same_by_name() -> None:
    first = a_list(*(Task("k", [RW(tile(name))]) for name in "ab"), Task("k", [RW(tile("x", 4))]))
    then = a_list(Task("k", [RW(tile("a"))]), Task("k", [RW(tile("x", 4))]))
    assert mark_evictions([first, then], 5 << 10)
    # x takes 4 of 5 KiB, so one more tile fits: a and b are never in memory together.
    assert names(first) == ["a", "b", ""] and names(then) == ["", ""]


def test_what_is_freed_does_not_leave() -> None:
    big, weight = tile("big", 4, persistent=False), tile("w")
    gradient = tile("g", 2)
    tasks = a_list(
        Task("k", [W(gradient), R(weight)], clears=[gradient]), Task("k", [W(big)]), Task("k", [R(big)], frees=[big]),
    )  # fmt: skip
    assert mark_evictions([tasks], 6 << 10)
    assert names(tasks) == ["g", "", ""]
    assert not mark_evictions([a_list(*tasks.tasks[1:])], 4 << 10)


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True), min_size=2, max_size=12),
    st.integers(3, 9),
)
@settings(max_examples=200, deadline=None)
def test_little_more_travels_than_by_use(uses: list[list[int]], room: int) -> None:
    """Marked tiles are the task's own; for equal sizes they spare transfers, or cost a tile where the rounds differ."""
    tiles = [tile(str(k)) for k in range(10)]
    tasks = a_list(*(Task("k", [RW(tiles[k]) for k in used]) for used in uses))
    leave = mark_evictions([tasks], room << 10)
    assert leave == (len({k for used in uses for k in used}) > room)
    assert leave == (room_in_turn([tasks], ((room << 10) + 1) / FULL) > 0)
    for task in tasks.tasks:
        assert {t.tensor for t in task.evicts} <= {a.tile.tensor for a in task.accesses}
    assert fetched(tasks.tasks, room << 10, True) <= fetched(tasks.tasks, room << 10, False) + (1 << 10)


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True), min_size=2, max_size=12),
    st.sets(st.tuples(st.integers(0, 11), st.integers(0, 9))), st.integers(3, 9),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_tiles_outside_at_once(uses: list[list[int]], cleared: set[tuple[int, int]], room: int) -> None:
    """The peak is that of a simulation with a set of tiles in memory, a set of tiles outside, and three rounds."""
    tiles = [tile(str(k), 1 + k % 3) for k in range(10)]
    tasks = [
        Task("k", [RW(tiles[k]) for k in used], clears=[tiles[k] for at, k in sorted(cleared) if at == number])
        for number, used in enumerate(uses)
    ]
    mark_evictions([a_list(*tasks[:1]), a_list(*tasks[1:])], 3 * room << 10)
    inside, outside = set[Tile](), {tiles[k] for used in uses for k in used}
    for _ in range(3):
        peak = most = 0
        for task in tasks:
            used = {access.tile for access in task.accesses}
            inside, outside = (inside - {*task.clears}) | used, outside - {*task.clears} - used
            peak, most = max(peak, sum(t.bytes for t in outside)), max(most, sum(t.bytes for t in inside))
            inside, outside = inside - {*task.evicts}, outside | {*task.evicts}
    assert outside_peak([a_list(*tasks)]) == peak and most <= 3 * room << 10


def test_a_step_of_gpt2_moves_less() -> None:
    config = nt.models.GPT2Config(layers=6, embed=256, heads=4, vocab=512, positions=128)
    built = StepSpec(
        nt.models.GPT2(config, {}), 8, 128, Tiling({"batch": 8}), precision="bf16", optimizer=nt.AdamW(),
        clip_grad_norm=1.0, accumulate="chain", fusion=Fusion(), grad_accumulation=1,
    ).step()  # fmt: skip
    lists = [low.tasks for low in built.lists]
    peak = built.peak_bytes()
    assert not mark_evictions(lists, peak * 1.05) and outside_peak(lists) == 0
    evicted = []
    for room in (0.8, 0.6, 0.4):
        assert mark_evictions(lists, peak * room)
        evicted.append(sum(tile.bytes for tasks in lists for task in tasks.tasks for tile in task.evicts))
        assert evicted[-1] >= (1 - room) * peak * 0.9
        assert (1 - room) * peak <= outside_peak(lists) <= evicted[-1]
    assert evicted == sorted(evicted) and evicted[0] < 0.5 * peak


def most_inside(lists: list[TaskList]) -> int:
    """Return the most bytes in the memory at once, if the lists run in order, again and again."""
    inside, most = dict[Any, int](), 0
    for task in [task for tasks in lists for task in tasks.tasks] * 2:
        for one in task.clears:
            inside.pop(one.key, None)
        inside |= {access.tile.key: access.tile.bytes for access in task.accesses}
        most = max(most, sum(inside.values()))
        for one in (*task.frees, *task.evicts):
            inside.pop(one.key, None)
    return most


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_each_micro_batch_stays_within_the_room(recompute: str) -> None:
    """The list of the further micro-batches runs three times in a row."""
    config = nt.models.GPT2Config(layers=4, embed=64, heads=4, vocab=128, positions=64)
    built = StepSpec(
        nt.models.GPT2(config, {}), 2, 64, Tiling({}), precision="fp32", optimizer=nt.AdamW(),
        clip_grad_norm=1.0, accumulate="chain", fusion=Fusion(), grad_accumulation=4, recompute=recompute,
    ).step()  # fmt: skip
    each = [low.tasks for low in built.lists]
    lists, room = built.in_turn(4), 0.45 * built.peak_bytes()
    assert built.order(4) == [0, 1, 1, 1, 2] and built.order(2) == [0, 1, 2]
    assert mark_evictions(lists, room) and most_inside(lists) <= room
    assert mark_evictions(each, room) and most_inside(lists) > room  # one run does not show what follows a run


class AllLeave(program.Program):
    def __init__(self, tasks: TaskList, *rest: Any) -> None:
        for task in tasks.tasks:
            task.evicts = [access.tile for access in task.accesses]
        super().__init__(tasks, *rest)


def test_results_do_not_depend_on_what_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs nothing can leave; the copies that are asked for take their place among the tasks."""
    config = nt.models.GPT2Config(layers=2, embed=32, heads=2, vocab=64, positions=16)
    ids = np.arange(64).reshape(4, 16) % 64
    losses = []
    for leaves in (False, True):
        if leaves:
            monkeypatch.setattr(program, "Program", AllLeave)
        with nt.Runtime(cpus=CPUS):
            trainer = nt.Trainer(nt.models.GPT2(config), 4, 16, {"batch": 2, "embed": 16})
            losses.append([trainer.step(ids, ids) for _ in range(3)])
    assert losses[0] == losses[1]
