"""What a task list leaves in which order, found the plain way."""

from collections.abc import Mapping, Sequence

from nntile_py.tiles import Tile
from nntile_py.tiles.task import Task


def waits(tasks: Sequence[Task], group: Mapping[int, int] | None = None) -> list[set[int]]:
    """The groups that each task has to wait for, directly or through others; without `group` each task is one."""
    group = {k: k for k in range(len(tasks))} if group is None else group
    writer: dict[Tile, int] = {}
    readers: dict[Tile, list[int]] = {}
    result: list[set[int]] = []
    of_group: dict[int, set[int]] = {}
    for number, task in enumerate(tasks):
        direct = set()
        for access in task.accesses:
            if access.tile in writer:
                direct.add(writer[access.tile])
            if access.mode != "R":
                direct.update(readers.get(access.tile, []))
        before = {group[k] for k in direct}.union(*(of_group[group[k]] for k in direct))
        result.append(before)
        of_group.setdefault(group[number], set()).update(before - {group[number]})
        for access in task.accesses:
            if access.mode == "R":
                readers.setdefault(access.tile, []).append(number)
            else:
                writer[access.tile], readers[access.tile] = number, []
    return result
