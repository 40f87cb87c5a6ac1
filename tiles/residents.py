"""Choice of residents: tiles that only one task of a step uses. The runtime holds them for this task between steps."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from .tasklist import TaskList

ROOM = 2  # residents cannot leave a worker's memory, so all tiles of a step must fit into a ROOM-th of this memory


def residents(lists: Sequence[TaskList], memory: float) -> frozenset[Hashable]:
    """Return the keys of optimizer states that only one task of a step uses, if the worker of this task is known.

    The task must also change another tile, such as a weight. StarPU does not see the residents, so this other tile
    keeps the task's runs in order.

    Args:
        lists: resolved task lists of a step.
        memory: bytes of a worker's memory. If it is short, there are no residents.
    """
    users: dict[Hashable, int] = {}
    kept: dict[Hashable, int] = {}
    for tasks in lists:
        for task in tasks.tasks:
            kept.update((access.tile.key, access.tile.bytes) for access in task.accesses if access.tile.persistent)
            for key in {access.tile.key for access in task.accesses if access.tile.kind == "state"}:
                users[key] = users.get(key, 0) + 1
    if sum(kept.values()) + max((one.temporary_bytes() for one in lists), default=0) > memory / ROOM:
        return frozenset()
    found: set[Hashable] = set()
    for task in (task for tasks in lists for task in tasks.tasks if task.worker >= 0):
        own = {a.tile.key for a in task.accesses if users.get(a.tile.key) == 1 and a.mode == "RW"}
        if any(a.mode == "RW" and a.tile.key not in own for a in task.accesses):
            found |= own
    return frozenset(found)
