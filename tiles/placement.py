"""Which worker each task runs on, decided before the program runs, for workers that are alike (the GPUs of a node).

A scheduler that sees ready tasks one by one moves tiles to whoever is idle. Here each task, in the list's order, goes
where the least has to travel, against the work that the workers were given so far: batch tiles stay on one GPU each,
parts of a layer spread over GPUs where there is one batch tile, optimizer states stay where they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .tasklist import Task, TaskList, Tile


@dataclass(frozen=True)
class Speed:
    """Of one worker: flop/s, bytes/s of its memory; bytes/s between two workers, seconds before a transfer begins.

    overhead: seconds of the runtime for each task.
    """

    flop_s: float
    bytes_s: float
    link_s: float
    latency: float = 20e-6
    overhead: float = 0.0

    def seconds(self, task: Task) -> float:
        return max(task.flop / self.flop_s, task.bytes / self.bytes_s)


Homes = dict[tuple[str, tuple[int, ...]], set[int]]


def placed(tasks: TaskList, workers: int, speed: Speed, homes: Homes | None = None) -> TaskList:
    """A resolved list with the same tasks, each with its worker, from 0.

    homes: the workers that hold a copy of each tile that outlives the program, by tensor and index; brought up to date.
    A tile without an entry is taken to be wherever it is wanted.
    """
    homes = {} if homes is None else homes
    readers: dict[Tile, int] = {}
    for task in tasks.tasks:
        for access in task.accesses:
            readers[access.tile] = readers.get(access.tile, 0) + 1
    copies: dict[Tile, set[int]] = {tile: homes.get((tile.tensor, tile.index), set()) for tile in readers}
    load = [0.0] * workers
    result = TaskList(tasks.policy, tasks.initialised)
    for task in tasks.tasks:
        least = min(load)
        costs = [work - least for work in load]
        for access in task.accesses:
            held = copies[access.tile]
            if access.mode == "W" or not held:
                continue
            # A copy that is only read serves later readers too.
            share = readers[access.tile] if access.mode == "R" else 1
            travel = (speed.latency + access.tile.bytes / speed.link_s) / share
            for worker in range(workers):
                if worker not in held:
                    costs[worker] += travel
        chosen = min(range(workers), key=costs.__getitem__)
        load[chosen] += speed.seconds(task)
        for access in task.accesses:
            copies[access.tile] = {chosen} if access.mode != "R" else copies[access.tile] | {chosen}
        result.tasks.append(replace(task, worker=chosen))
    homes.update({(tile.tensor, tile.index): held for tile, held in copies.items() if tile.persistent})
    return result
