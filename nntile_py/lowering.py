"""From a graph and a tiling to a resolved task list."""

from __future__ import annotations

from collections.abc import Iterable

from nntile_py.graph import Graph
from nntile_py.tasks import Lowering, Tensor
from nntile_py.tiles import TaskList, Tiling

WRITTEN_BEFORE = ("input", "param", "state")


def lower(graph: Graph, tiling: Tiling, policy: str = "chain", *, holds: Iterable[Tensor] = ()) -> Lowering:
    """Lower every operator and resolve the list. `holds`: further tensors that hold data before the program runs."""
    low = Lowering(tiling, TaskList(policy))
    before = [t for t in graph.tensors.values() if t.kind in WRITTEN_BEFORE] + list(holds)
    for tensor in before:
        low.tasks.initialised.update(low.tile(tensor, index) for index in low.indices(tensor))
    for op in graph.ops:
        low.op = op.name if op.phase == "forward" else f"{op.name}.{op.phase}"
        op.lower(low)
    low.tasks.resolve()
    return low
