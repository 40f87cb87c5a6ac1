"""Operators that are put together because their iteration spaces allow it: no list of which ones.

As in Ivanov et al. 2021 ("Data movement is all you need", section IV): two operators that share a tensor become one
where one loop over the space does both (their axes are equal, in order and size, whatever either reduces), while fewer
words are moved; until nothing can be merged any more. The patterns are those of that paper's figure 3: a producer and
its consumer, or two readers of one tensor, each with equal spaces or with one that reduces. A contraction takes its
epilogue before, by the rules of fusion.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from nntile_py.graph.graph import Graph
from nntile_py.graph.rewriter import Uses
from nntile_py.tasks.elementwise import Rename
from nntile_py.tasks.generated import Generated, NotFusible
from nntile_py.tasks.op import Op, Tensor
from nntile_py.tiles import Tiling


def find(uses: Uses, tiling: Tiling, exclude: Collection[str] = ()) -> set[str]:
    """Merge operators of the graph until none can be. Returns the names of all groups that were looked at.

    exclude: names of groups (`Generated.group`) that are not made."""
    finder = _Finder(uses, tiling, exclude)
    uses.apply(finder.merge)
    return finder.met


class _Finder:
    def __init__(self, uses: Uses, tiling: Tiling, exclude: Collection[str]) -> None:
        self.tiling, self.exclude, self.met = tiling, exclude, set[str]()
        self._known: dict[Op, bool] = {}
        writers = Counter(t.storage for op in uses.ops.values() if not isinstance(op, Rename) for t in op.outputs)
        # Tiles that several operators write, or that one changes in place: what is read there depends on the order.
        self.shared = {t for t, count in writers.items() if count > 1 or t.kind in ("input", "param", "state")}

    def merge(self, uses: Uses, op: Op) -> bool:
        """Merge an operator with the first of its neighbours that it can be merged with."""
        return self._may(op) and any(self._merged(uses, op, other) for other in self._neighbours(uses, op))

    def _may(self, op: Op) -> bool:
        """Whether it can be moved and computed point by point."""
        if op not in self._known:
            plain = {*op.inputs, *op.outputs} - {*op.sums}
            self._known[op] = op.scalar() is not None and self.shared.isdisjoint(t.storage for t in plain)
        return self._known[op]

    def _neighbours(self, uses: Uses, op: Op) -> Iterator[Op]:
        """Who makes what it reads, who reads what it makes, who reads what it reads; of the same phase."""
        form = op.scalar()
        assert form
        whole = [t for t in op.inputs if set(form.axes) <= set(t.axes)]  # not weights, which all layers may share
        makers = (uses.maker[t] for t in op.inputs if t in uses.maker)
        readers = (reader for t in (*op.outputs, *whole) for reader in uses.readers.get(t, []))
        for other in dict.fromkeys((*makers, *readers)):
            if other is not op and other.phase == op.phase and self._may(other):
                yield other

    def _merged(self, uses: Uses, a: Op, b: Op) -> bool:
        members = sorted((a, b), key=uses.order.__getitem__)
        try:
            group = Generated(members, self._kept(uses, members))
        except NotFusible:
            return False
        axis = group.definition.axes[-1]
        if group.reduces and self.tiling.cut(axis, group.definition.sizes[axis]):
            return False
        if group.elements() >= a.elements() + b.elements():
            return False
        place = uses.place(members, group)
        if place is None:
            return False
        self.met.add(group.group)
        if group.group in self.exclude:
            return False
        group.name = f"{a.name.rpartition('.')[0] or 'model'}.{group.group}"
        uses.put(members, group, place)
        return True

    @staticmethod
    def _kept(uses: Uses, members: list[Op]) -> set[Tensor]:
        """What others read, or who asked for it."""
        made = [t for op in members for t in op.outputs]
        return {t for t in made if t.persistent or any(reader not in members for reader in uses.readers.get(t, []))}


def groups(graph: Graph) -> list[Generated]:
    """The groups of a graph that was fused."""
    return [op for op in graph.ops if isinstance(op, Generated)]
