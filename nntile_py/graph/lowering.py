"""Lowering: from a graph and a tiling to a resolved task list."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from nntile_py.errors import ConfigError
from nntile_py.graph.count import count_tasks, most_tasks
from nntile_py.graph.graph import Graph
from nntile_py.graph.recompute_rule import segment_of
from nntile_py.system.gc_pause import no_search_for_cycles
from nntile_py.tasks.op import Lowering, Tensor
from nntile_py.tiles import TaskList, Tiling, cut_as
from nntile_py.tiles.allreduce import RankSums
from nntile_py.tiles.recompute import recompute

WRITTEN_BEFORE = ("input", "param", "state", "cache")  # kinds of tensors that hold data before the list runs
LISTING = 1e-4  # seconds to lower one task, on a core at 2.5 GHz
MOST_TASKS = 2_000_000  # most tasks of a list: lowering so many takes minutes, and each takes a kilobyte of memory


@no_search_for_cycles()
def lower(
    graph: Graph, tiling: Tiling, policy: str = "chain", *, holds: Collection[Tensor] = (),
    rank_sums: RankSums | None = None, recomputed: str | Sequence[str] = "none",
) -> Lowering:  # fmt: skip
    """Lower every operator of a graph to tasks and resolve the task list. Return the Lowering that holds the list.

    Args:
        policy: accumulation policy.
        holds: further tensors that hold data before the list runs, such as gradients of an earlier micro-batch. The
            tasks add to these data.
        rank_sums: adds the partial sums of several ranks; None: the sums are added in a chain from rank to rank.
        recomputed: forward operators whose tasks run again in the backward pass, see recompute_rule.py.
    """
    for op in graph.ops:
        op.fit(tiling)  # the tiling learns which axes must be cut together
    check_count(graph, tiling, policy)
    lowering = Lowering(tiling, TaskList(policy, live=graph.live))
    known = [*graph.tensors.values(), *graph.kept.values()]
    lowering.tasks.sums = {lowering.tile(tensor, index) for tensor in holds for index in lowering.indices(tensor)}
    lowering.tasks.initialised |= lowering.tasks.sums
    for tensor in (t for t in known if t.kind in WRITTEN_BEFORE):
        lowering.tasks.initialised.update(lowering.tile(tensor, index) for index in lowering.indices(tensor))
    backward = None  # number of the first backward task
    for op in graph.ops:
        lowering.op = op.full_name
        if op.phase == "backward" and backward is None:
            backward = len(lowering.tasks.tasks)
        if rank_sums and op is graph.ops[0]:
            held = (lowering.tile(t, index) for t in holds for index in lowering.indices(t))
            lowering.tasks.tasks += rank_sums.joined(held, lowering.op)
        op.lower(lowering)
    if recomputed != "none" and backward is not None:
        shared, segment = not isinstance(recomputed, str), segment_of(recomputed)
        if not recompute(lowering.tasks, backward, segment, shared=shared):
            found = any(segment(task) is not None for task in lowering.tasks.tasks[:backward])
            if shared or not found:  # layers whose weights are all frozen have nothing to repeat
                some = ", ".join(dict.fromkeys(op.name for op in graph.ops[:3]))
                why = ", as the backward pass needs no large result of the operators that match" if found else ""
                need = f"none, or other patterns; operators have names such as {some}"
                given = repr([*recomputed]) if shared else recomputed
                raise ConfigError(f"recompute: {given} repeats no operator of this model{why}; allowed: {need}")
    if rank_sums:
        rank_sums.divide(lowering.tasks)
    lowering.tasks.resolve()
    for task in lowering.tasks.tasks if graph.filled < 1 else ():
        task.flop *= graph.filled
    return lowering


def check_count(graph: Graph, tiling: Tiling, policy: str) -> None:
    """Raise ConfigError if the graph would have more than MOST_TASKS tasks under a tiling."""
    if most_tasks(graph, tiling) <= MOST_TASKS:
        return
    count = count_tasks(graph, tiling, policy)
    if count > MOST_TASKS:
        cuts = ((-(-size // tiling.tile(axis, size)), axis, size) for axis, size in graph.sizes().items())
        parts, axis, size = max(cuts)
        raise ConfigError(
            f"tiles: about {count:,} tasks are too many for a list; allowed: {MOST_TASKS:,}."
            f" The {axis} of {size:,} is cut into {parts:,} tiles, more than any other axis:"
            f" raise tiles.{cut_as(axis)}, or lower the size of the axis"
        )
