"""From a graph and a tiling to a resolved task list."""

from __future__ import annotations

import math
from collections.abc import Iterable

from nntile_py.errors import ConfigError
from nntile_py.graph.graph import Graph
from nntile_py.tasks.op import Lowering, Tensor
from nntile_py.tiles import TaskList, Tiling, cut_as

WRITTEN_BEFORE = ("input", "param", "state")


MOST_TILES = 1_000_000  # of results: each is a task or more, which takes longer to make than a user waits


def lower(graph: Graph, tiling: Tiling, policy: str = "chain", *, holds: Iterable[Tensor] = ()) -> Lowering:
    """Lower every operator and resolve the list. `holds`: further tensors that hold data before the program runs."""
    for op in graph.ops:
        op.fit(tiling)
    _check_count(graph, tiling)
    low = Lowering(tiling, TaskList(policy))
    known = [*graph.tensors.values(), *graph.kept.values()]
    before = [t for t in known if t.kind in WRITTEN_BEFORE] + list(holds)
    for tensor in before:
        low.tasks.initialised.update(low.tile(tensor, index) for index in low.indices(tensor))
    for op in graph.ops:
        low.op = op.name if op.phase == "forward" else f"{op.name}.{op.phase}"
        op.lower(low)
    low.tasks.resolve()
    return low


def _check_count(graph: Graph, tiling: Tiling) -> None:
    count, most = 0, (1, "batch", 1)
    for tensor in (t for op in graph.ops for t in op.outputs):
        # Without the parts themselves, of which there may be too many.
        cuts = [(-(-size // tiling.tile(axis, size)), axis, size) for axis, size in tensor.sizes.items()]
        count += math.prod(parts for parts, *_ in cuts)
        most = max([most, *cuts])
    if count > MOST_TILES:
        parts, axis, size = most
        raise ConfigError(
            f"tiles: {count:,} tiles of results are too many for a list of tasks; allowed: {MOST_TILES:,}."
            f" The {axis} of {size:,} makes {parts:,} of them: raise tiles.{cut_as(axis)}, or lower what it cuts"
        )
