"""Groups of tasks: the same tasks in an order that keeps every dependency, and nothing serialised that was not."""

from collections.abc import Iterator

import pytest
from orders import waits

import nntile_py as nt
from nntile_py.graph.fusion import Fusion
from nntile_py.graph.step import StepSpec
from nntile_py.tiles import RW, R, TaskList, Tile, Tiling, W
from nntile_py.tiles.residents import residents
from nntile_py.tiles.task_groups import MOST_PARTS, SCRATCH_BYTES, grouped

CONFIG = nt.models.GPT2Config(layers=2, embed=32, heads=4, vocab=64, positions=16)


def lists(tiles: dict[str, int], policy: str, dtype: str = "bf16") -> Iterator[TaskList]:
    model = nt.models.GPT2(CONFIG, {})
    step = StepSpec(
        model, 4, 16, Tiling(tiles), precision=dtype, optimizer=nt.AdamW(), clip_grad_norm=1.0, accumulate=policy,
        fusion=Fusion(), grad_accumulation=2,
    ).step()  # fmt: skip
    yield from (low.tasks for low in step.lists)


@pytest.mark.few(3)
@pytest.mark.parametrize("policy", ["chain", "commute", "redux", "tree"])
@pytest.mark.parametrize(
    "tiles", [{}, {"batch": 1}, {"batch": 3, "seq": 5, "embed": 20, "heads": 3, "ffn": 50, "vocab": 30}]
)
def test_groups_keep_the_order(tiles: dict[str, int], policy: str) -> None:
    *_, update = every = [*lists(tiles, policy)]
    for tasks in every:
        groups = grouped(tasks, 600e12, 3.5e12, 1e-3)
        flat = [part for task in groups.tasks for part in task.parts or [task]]
        assert len(flat) == len(tasks.tasks) and {id(t.accesses) for t in flat} == {id(t.accesses) for t in tasks.tasks}
        place = {id(task.accesses): number for number, task in enumerate(flat)}
        for number, before in enumerate(waits(tasks.tasks)):
            here = place[id(tasks.tasks[number].accesses)]
            assert all(place[id(tasks.tasks[b].accesses)] < here for b in before)
        assert len(groups.tasks) < (0.7 if policy == "chain" else 1) * len(tasks.tasks)
        assert all(len(task.parts) <= MOST_PARTS for task in groups.tasks)
        gone: set[Tile] = set()
        for task in groups.tasks:
            assert gone.isdisjoint(a.tile for a in task.accesses)
            gone.update(task.frees)
        freed = [tile for task in groups.tasks for tile in (*task.frees, *task.scratch)]
        assert sorted(map(id, freed)) == sorted(id(tile) for task in tasks.tasks for tile in task.frees)
        for task in groups.tasks:  # no other task uses the scratch tiles
            assert {*task.scratch}.isdisjoint(a.tile for one in groups.tasks for a in one.accesses)
            assert sum(tile.bytes for tile in task.scratch) <= SCRATCH_BYTES
            assert {*task.scratch} <= {a.tile for part in task.parts for a in part.accesses}
        if policy == "chain":  # the sums of squares of most gradients
            assert tasks is not update or sum(len(task.scratch) for task in groups.tasks) > 20


def test_no_group_waits_for_more_than_its_first_task() -> None:
    for tasks in lists({"batch": 1}, "chain"):
        groups = grouped(tasks, 600e12, 3.5e12, 1e-3).tasks
        of = {id(part.accesses): number for number, task in enumerate(groups) for part in task.parts or [task]}
        alone = {id(t.accesses): before for t, before in zip(tasks.tasks, waits(tasks.tasks), strict=True)}
        all_waits = waits(groups)
        for task, before in zip(groups, all_waits, strict=True):
            head = (task.parts or [task])[0]
            own = {of[id(tasks.tasks[b].accesses)] for b in alone[id(head.accesses)]}
            assert before <= own.union(*(all_waits[o] for o in own))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_group_ends_soon_after_what_another_worker_waits_for(elsewhere: bool) -> None:
    """Ten tasks of 100 us; the result of the first is used by a worker that would have to wait for all of them."""
    tasks = TaskList()
    made = [Tile("x", (k,), (1000,), "fp32") for k in range(10)]
    for number, tile in enumerate(made):
        tasks.emit("k", [W(tile), *([R(made[number - 1])] if number else [])], flop=100e-6 * 1e12)
    tasks.emit("k", [W(Tile("y", (0,), (1000,), "fp32")), R(made[0])], flop=100e-6 * 1e12)
    for task in tasks.tasks:
        task.worker = 0
    tasks.tasks[-1].worker = int(elsewhere)
    groups = grouped(tasks.resolve(), 1e12, 1e12, 5e-3).tasks
    assert [len(group.parts) for group in groups if group.worker == 0] == ([3, 7] if elsewhere else [11])


def test_a_group_ends_with_what_is_made_at_once_and_waited_for() -> None:
    """A factor for all gradients, then the updates of one worker, for which no other worker waits."""
    tasks = TaskList()
    clip = Tile("clip", (0,), (1,), "fp64")
    tasks.emit("clip", [W(clip)])
    for number in range(4):
        tasks.emit("update", [W(Tile("w", (number,), (1000,), "fp32")), R(clip)], flop=50e-6 * 1e12)
        tasks.tasks[-1].worker = number % 2
    tasks.tasks[0].worker = 0
    groups = grouped(tasks.resolve(), 1e12, 1e12, 5e-3).tasks
    assert [(group.worker, len(group.parts)) for group in groups] == [(0, 0), (0, 2), (1, 2)]


@pytest.mark.parametrize("alone", [False, True])
def test_others_wait_for_few_tiles(alone: bool) -> None:
    """With one worker, a group may have all tasks of an optimizer."""
    tasks = TaskList()
    for number in range(100):
        tasks.emit("update", [W(Tile(name, (number,), (10,), "fp32", persistent=True)) for name in "wmv"])
        tasks.tasks[-1].worker = -1 if alone else number % 2
    groups = grouped(tasks.resolve(), 1e12, 1e12, 5e-3, one_worker=alone).tasks
    assert [len(group.accesses) for group in groups] == ([300] if alone else [96, 96, 54, 54])


def test_modes_of_a_group() -> None:
    a, b, c = (Tile(name, (0,), (4,), "fp32") for name in "abc")
    a.persistent = True
    tasks = TaskList(initialised=[a])
    tasks.emit("x", [R(a), W(b)])
    tasks.emit("y", [R(b), W(c)])
    tasks.emit("z", [R(c), W(a)])
    (group,) = grouped(tasks.resolve(), 1e12, 1e12, 1.0, scratch=False).tasks
    assert {access.tile.tensor: access.mode for access in group.accesses} == {"a": "RW", "b": "W", "c": "W"}
    assert [part.kernel for part in group.parts] == ["x", "y", "z"] and set(group.frees) == {b, c}
    (group,) = grouped(tasks.resolve(), 1e12, 1e12, 1.0).tasks
    assert {access.tile.tensor: access.mode for access in group.accesses} == {"a": "RW"}
    assert set(group.scratch) == {b, c} and not group.frees


def test_scratch_tiles_are_small() -> None:
    a, b, c = (
        Tile("a", (0,), (4,), "fp32"),
        Tile("b", (0,), (SCRATCH_BYTES // 4 + 1,), "fp32"),
        Tile("c", (0,), (4,), "fp32"),
    )
    a.persistent = True
    tasks = TaskList(initialised=[a])
    tasks.emit("x", [R(a), W(b)])
    tasks.emit("y", [R(b), W(c)])
    tasks.emit("z", [R(c), W(a)])
    (group,) = grouped(tasks.resolve(), 1e12, 1e12, 1.0).tasks
    assert group.scratch == [c] and group.frees == [b] and {access.tile for access in group.accesses} == {a, b}


def test_groups_with_new_weights_end_soon() -> None:
    """All workers wait for new weights: a group ends 20 times the length of an update after this update."""
    tasks = TaskList()
    for number, size in enumerate((10_000_000, *[1000] * 60)):
        tasks.emit("update", [RW(Tile("w", (number,), (size,), "fp32", persistent=True, kind="param"))])
        tasks.tasks[-1].worker = number % 2
    first, *_ = grouped(tasks.resolve(), 1e12, 1e12, 5e-3).tasks
    assert len(first.parts) == 21
    for task in tasks.tasks:
        task.worker = 0
    assert len(grouped(tasks.resolve(), 1e12, 1e12, 5e-3, one_worker=True).tasks) == 1


def test_residents() -> None:
    """States that one task on a known worker uses; not if memory is short, and not without another changed tile."""
    *_, update = lists({}, "chain")
    states = {a.tile.key for task in update.tasks for a in task.accesses if a.tile.kind == "state"}
    assert states and not residents([update], 1e12)  # no task has a worker
    for task in update.tasks:
        task.worker = 0
    assert residents([update], 1e12) == states and not residents([update], 1e5)
    assert not residents([update, update], 1e12)  # two tasks use each state
    for task in update.tasks:
        task.accesses = [a for a in task.accesses if a.tile.kind != "param"]
    assert not residents([update], 1e12)
    groups = grouped(update, 1e12, 1e12, 5e-3, residents=states).tasks
    known = grouped(update, 1e12, 1e12, 5e-3).tasks
    assert len(groups) < len(known) and {id(a.tile) for task in groups for a in task.accesses} >= {
        id(a.tile) for task in update.tasks for a in task.accesses if a.tile.persistent
    }


def test_long_tasks_stay_alone() -> None:
    for tasks in lists({}, "chain"):
        assert len(grouped(tasks, 1.0, 1.0, 1e-3).tasks) == len(tasks.tasks)
