"""Lists split over ranks, simulated without MPI: the results of the whole list, no deadlock, no tile sent twice."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter, deque
from collections.abc import Hashable
from typing import Any

import pytest

import nntile_py as nt
from nntile_py.errors import ConfigError
from nntile_py.graph.built_step import Step
from nntile_py.graph.step import StepSpec
from nntile_py.tiles import R, TaskList, Tile, Tiling, W
from nntile_py.tiles.allreduce import RankSums
from nntile_py.tiles.placement import Residency, Speed, place
from nntile_py.tiles.rank_tasks import RECEIVE, SEND, MessageTask, RankLists, Replicas, described, messages
from nntile_py.tiles.task import ACC, Task
from nntile_py.tiles.task_groups import grouped
from nntile_py.tiles.tasklist import POLICIES

CORES = Speed(flop_s=2e11, bytes_s=5e9, link_s=1e10)
TILINGS = [{}, {"batch": 2}, {"batch": 3, "embed": 20, "heads": 1, "ffn": 48, "vocab": 31, "seq": 5}]
Values = dict[Hashable, Any]


def step(tiles: dict[str, int], policy: str, ranks: int = 1) -> Step:
    config = nt.models.GPT2Config(layers=2, embed=32, heads=4, vocab=67, positions=16)
    spec = StepSpec(
        nt.models.GPT2(config, {}),
        8,
        12,
        Tiling(tiles),
        accumulate=policy,
        clip_grad_norm=1.0,
        grad_accumulation=2,
        ranks=ranks,
    )
    return spec.step()


def placed(made: Step, ranks: int) -> list[TaskList]:
    residency: Residency = {}
    return [place(low.tasks, ranks, CORES, residency) for low in made.lists]


def of_one_gpu(tasks: TaskList) -> TaskList:
    for task in tasks.tasks:
        task.worker = -1
    return grouped(tasks, 1e13, 1e12, 1e-3, one_worker=True)


def run(task: Task, values: Values) -> None:
    """What a task writes stands for all that it was made from. Raises KeyError where that is not there."""
    read = [values[a.tile.key] for a in task.accesses if a.mode in ("R", "RW", "COMMUTE")]
    read += [values.get(a.tile.key) for a in task.accesses if a.mode == "REDUX"]
    result = hash((task.kernel, task.ints, *read))
    for number, access in enumerate(task.accesses):
        if access.mode != "R":
            values[access.tile.key] = hash((result, number))


def play(lists: list[TaskList], values: list[Values], sent: Counter[Any], draw: random.Random) -> None:
    """Every rank runs its list in order and waits for what it receives; whose turn it is, is drawn."""
    under_way: dict[tuple[int, int, int], deque[Any]] = {}
    at = [0] * len(lists)
    while left := [rank for rank, one in enumerate(lists) if at[rank] < len(one.tasks)]:
        draw.shuffle(left)
        for rank in left:
            task, mine = lists[rank].tasks[at[rank]], values[rank]
            if task.kernel == RECEIVE:
                assert isinstance(task, MessageTask)
                if not under_way.get((task.peer, rank, task.tag)):
                    continue
            for tile in task.clears:
                mine.pop(tile.key, None)
            if isinstance(task, MessageTask):
                key = task.accesses[0].tile.key
                if task.kernel == SEND:
                    under_way.setdefault((rank, task.peer, task.tag), deque()).append(mine[key])
                    sent[key, mine[key], task.peer] += 1
                else:
                    mine[key] = under_way[task.peer, rank, task.tag].popleft()
            else:
                for part in task.parts or [task]:
                    run(part, mine)
            for tile in (*task.frees, *task.scratch):
                del mine[tile.key]
            at[rank] += 1
            break
        else:
            raise AssertionError(f"all ranks wait, at entries {at}")
    assert not any(under_way.values()), "a message was sent that nobody receives"


def before(shared: RankLists, replicas: Replicas) -> list[TaskList]:
    """The messages that a list needs first, as lists."""
    lists = [TaskList() for _ in shared.lists]
    for rank, message in replicas.brought(shared.needs.items()):
        lists[rank].tasks.append(message)
    return lists


RANKS = (1, 2, 3, 4)
WAYS = [*itertools.product([False, True], repeat=2)]  # shard, groups
# Each way meets each tiling with each policy, and with each number of ranks.
MET = [
    (*WAYS[(t + p + r) % len(WAYS)], TILINGS[t], POLICIES[p], RANKS[r])
    for t, p, r in itertools.product(*map(range, map(len, (TILINGS, POLICIES, RANKS))))
]
if os.environ.get("NNTILE_TORTURE"):
    MET = [(*way, *others) for way, *others in itertools.product(WAYS, TILINGS, POLICIES, RANKS)]


@pytest.mark.few(10)
@pytest.mark.parametrize(("shard", "groups", "tiles", "policy", "ranks"), MET)
def test_ranks_compute_what_the_whole_list_does(
    shard: bool, groups: bool, tiles: dict[str, int], policy: str, ranks: int
) -> None:
    made = step(tiles, policy, ranks)
    whole = placed(made, ranks)
    names = {tile.key for low in made.lists for tile in low.tasks.initialised if tile.kind != "grad"}
    alone: Values = {key: hash(key) for key in names}
    for _ in range(2):
        for tasks in whole:
            for task in tasks.tasks:
                for tile in task.clears:
                    alone.pop(tile.key, None)
                run(task, alone)
                for tile in task.frees:
                    del alone[tile.key]
    replicas, draw = Replicas(ranks, shard=shard), random.Random(0)
    shares = replicas.share(whole)
    if groups:  # as where each rank has a GPU
        for shared in shares:
            shared.lists = [of_one_gpu(one) for one in shared.lists]
            assert any(task.parts for one in shared.lists for task in one.tasks)
    values: list[Values] = [{} for _ in range(ranks)]
    known = {tile.key: tile for low in made.lists for tile in low.tasks.initialised}
    for key in names:
        for rank in replicas.written(known[key]):
            values[rank][key] = hash(key)
    sent: Counter[Any] = Counter()
    for _ in range(2):
        for shared in shares:
            play(before(shared, replicas), values, sent, draw)
            play(shared.lists, values, sent, draw)
            replicas.ran(shared)
    borrowed = {key for key, tile in replicas.tiles.items() if shard and tile.kind == "param"}
    assert {count for (key, *_), count in sent.items() if key not in borrowed} <= {1}
    # A weight is let go and sent again, forward and backward, in each micro-batch.
    again = max((count for (key, *_), count in sent.items() if key in borrowed), default=0)
    assert 2 <= again <= 4 if shard and ranks > 1 else again == 0
    assert bool(sent) == (ranks > 1)
    kept = {key for key in replicas.tiles if key in alone}
    copies = 2 if policy == "chain" else 3  # where it is made, in the norm, in the update
    for key in kept:
        assert {values[rank][key] for rank in replicas._held[key]} == {alone[key]}, key
    for key, tile in replicas.tiles.items():
        there = sum(key in mine for mine in values)
        most = 1 if shard and tile.kind == "param" else copies if tile.kind == "grad" else ranks
        assert there <= most and (most > 1 or there == 1), tile
    assert all(isinstance(key, tuple) for mine in values for key in mine)  # what does not outlive a list has gone


def test_tags_are_the_same_on_all_ranks_and_no_two_tiles_share_one() -> None:
    tags: list[dict[str, int]] = []
    for _ in range(2):
        found: dict[str, int] = {}
        for shared in Replicas(2).share(placed(step(TILINGS[1], "chain"), 2)):
            for task in (task for one in shared.lists for task in one.tasks if isinstance(task, MessageTask)):
                tile = task.accesses[0].tile
                found[f"{tile} {id(tile)}" if not tile.persistent else str(tile.key)] = task.tag
        assert len(set(found.values())) == len(found)
        tags.append(found)
    assert sorted(tags[0].values()) == sorted(tags[1].values())


def test_a_sum_meets_before_it_is_read() -> None:
    """Even one that goes on in later lists; what is added after that goes on."""
    total = Tile("w.grad", (0,), (4,), "fp32", persistent=True, kind="grad")
    parts = [Tile("x", (k,), (4,), "fp32", persistent=True, axes=("batch",), kind="input") for k in range(3)]
    made, meeting = TaskList("tree", parts), RankSums(3, {("grad", "w.grad")})
    for last in (False, True):
        for part in parts:
            made.emit("add", [ACC(total), R(part)])
        if not last:
            made.emit("look", [W(Tile("y", (0,), (4,), "fp32", persistent=True)), R(total)])
    meeting.divide(made)
    tasks = made.resolve().tasks
    assert [task.kernel for task in tasks] == ["add"] * 3 + ["combine"] * 2 + ["look"] + ["add"] * 3
    assert [task.worker for task in tasks] == [0, 1, 2, 2, 2, -1, 0, 1, 2]
    assert {tile.tensor for tile in meeting.apart()} == {"w.grad.of_rank_0", "w.grad.of_rank_1"}
    assert not meeting.joined([total], "") and len(meeting.ended().joined([total], "")) == 2


def test_the_first_task_that_differs_is_found() -> None:
    one, same, other = (placed(step(tiles, "chain"), 2) for tiles in (TILINGS[1], TILINGS[1], TILINGS[2]))
    assert described(one) == described(same)
    assert described(one) != described(other)
    same[0].tasks[5].worker ^= 1
    here, there = described(one), described(same)
    (name,) = (name for name in here if here[name] != there[name])
    assert name == f"task 5 of list 0 ({one[0].tasks[5].op})"


def test_a_tile_that_no_message_holds_is_refused() -> None:
    tile = Tile("embed.weight", (0, 0), (50257, 25600), "fp32", axes=("vocab", "embed"))
    with pytest.raises(ConfigError, match=r"embed.weight\[0, 0\] has 5146316800 bytes.*vocab, embed"):
        messages(tile, 0, 1, 0)
