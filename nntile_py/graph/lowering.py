"""From a graph and a tiling to a resolved task list."""

from __future__ import annotations

from collections.abc import Collection

from nntile_py.errors import ConfigError
from nntile_py.graph.count import count_tasks, most_tasks
from nntile_py.graph.graph import Graph
from nntile_py.system.gc_pause import no_search_for_cycles
from nntile_py.tasks.op import Lowering, Tensor
from nntile_py.tiles import TaskList, Tiling, cut_as
from nntile_py.tiles.allreduce import Meeting

WRITTEN_BEFORE = ("input", "param", "state")


LISTING = 1e-4  # seconds to make a task of a list, on a core at 2.5 GHz
MOST_TASKS = 2_000_000  # of a list: minutes to make it, and a kilobyte each


@no_search_for_cycles()
def lower(
    graph: Graph, tiling: Tiling, policy: str = "chain", *, holds: Collection[Tensor] = (),
    meeting: Meeting | None = None,
) -> Lowering:  # fmt: skip
    """Lower every operator and resolve the list.

    holds: further tensors that hold data before, which it adds to. meeting: how sums of several ranks meet; None: as on
    one, in a chain from rank to rank.
    """
    for op in graph.ops:
        op.fit(tiling)  # it is told what has to be cut together
    check_count(graph, tiling, policy)
    low = Lowering(tiling, TaskList(policy, live=graph.live))
    known = [*graph.tensors.values(), *graph.kept.values()]
    low.tasks.sums = {low.tile(tensor, index) for tensor in holds for index in low.indices(tensor)}
    low.tasks.initialised |= low.tasks.sums
    for tensor in (t for t in known if t.kind in WRITTEN_BEFORE):
        low.tasks.initialised.update(low.tile(tensor, index) for index in low.indices(tensor))
    for op in graph.ops:
        low.op = op.name if op.phase == "forward" else f"{op.name}.{op.phase}"
        if meeting and op is graph.ops[0]:
            low.tasks.tasks += meeting.joined((low.tile(t, index) for t in holds for index in low.indices(t)), low.op)
        op.lower(low)
    if meeting:
        meeting.divide(low.tasks)
    low.tasks.resolve()
    for task in low.tasks.tasks if graph.filled < 1 else ():
        task.flop *= graph.filled
    return low


def check_count(graph: Graph, tiling: Tiling, policy: str) -> None:
    """ConfigError: the tasks are too many for a list."""
    if most_tasks(graph, tiling) <= MOST_TASKS:
        return
    count = count_tasks(graph, tiling, policy)
    if count > MOST_TASKS:
        cuts = ((-(-size // tiling.tile(axis, size)), axis, size) for axis, size in graph.sizes().items())
        parts, axis, size = max(cuts)
        raise ConfigError(
            f"tiles: about {count:,} tasks are too many for a list; allowed: {MOST_TASKS:,}."
            f" The {axis} of {size:,} is cut into {parts:,} tiles, the most of them: raise tiles.{cut_as(axis)},"
            " or lower what it cuts"
        )
