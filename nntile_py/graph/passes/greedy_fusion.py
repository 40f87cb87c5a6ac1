"""Greedy fusion: operators merge wherever their iteration spaces allow it, without a list of patterns.

Source: Ivanov et al. 2021 ("Data movement is all you need", section IV). Two operators that share a tensor merge if one
loop over the same axes, equal in order and size, computes both, and if fewer elements then move. Merging repeats until
no pair can merge. The pairs are those of the paper's figure 3: a producer and its consumer, or two readers of a tensor;
one of the two may be a reduction. Epilogues of contractions are fused before this pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from nntile_py.graph.graph import Graph
from nntile_py.graph.passes.rewriter import Rewriter
from nntile_py.tasks.elementwise import Rename
from nntile_py.tasks.generated import Forms, Generated, NotFusible
from nntile_py.tasks.op import Op, Tensor
from nntile_py.tasks.softmax import Softmax, SoftmaxGrad
from nntile_py.tiles import Tiling


def fuse_greedily(rewriter: Rewriter, tiling: Tiling, exclude: Collection[str] = ()) -> set[str]:
    """Merge operators until no pair can merge.

    Args:
        exclude: names of groups (`Generated.kind`) that must not form.

    Returns:
        The names of all groups that can form, excluded groups included.
    """
    fuser = _GreedyFuser(rewriter, tiling, exclude)
    rewriter.apply(fuser.merge)
    rewriter.apply(fuser.convert_softmax)
    return fuser.met


class _GreedyFuser:
    def __init__(self, rewriter: Rewriter, tiling: Tiling, exclude: Collection[str]) -> None:
        self.tiling, self.exclude, self.met = tiling, exclude, set[str]()
        self._movable: dict[Op, bool] = {}
        self._forms = Forms()
        writers = Counter(
            t.storage for op in rewriter.ops.values() if not isinstance(op, Rename) for t in op.outputs
        )  # fmt: skip
        # Storage that several operators write, or that is changed in place: reads and writes must keep their order.
        self._ordered = {t for t, count in writers.items() if count > 1 or t.kind in ("input", "param", "state")}

    def merge(self, rewriter: Rewriter, op: Op) -> bool:
        """Merge an operator with the first neighbour that can merge with it."""
        return self._can_move(op) and any(self._merged(rewriter, op, other) for other in self._neighbours(rewriter, op))

    def convert_softmax(self, rewriter: Rewriter, op: Op) -> bool:
        """Turn a softmax that merged with no neighbour into a group: one pass over the scores instead of two."""
        return isinstance(op, Softmax | SoftmaxGrad) and self._can_move(op) and self._merged(rewriter, op)

    def _can_move(self, op: Op) -> bool:
        """Return whether an operator may move in the graph: it has a scalar form and uses no storage of `_ordered`."""
        if op not in self._movable:
            plain = {*op.inputs, *op.outputs} - {*op.sums}
            self._movable[op] = self._forms.find(op) is not None and self._ordered.isdisjoint(t.storage for t in plain)
        return self._movable[op]

    def _neighbours(self, rewriter: Rewriter, op: Op) -> Iterator[Op]:
        """Yield the makers of an operator's inputs and the readers of its outputs and inputs, of the same phase."""
        form = self._forms(op)
        full = [t for t in op.inputs if set(form.axes) <= set(t.axes)]  # without weights, which all layers may share
        makers = (rewriter.maker[t] for t in op.inputs if t in rewriter.maker)
        readers = (reader for t in (*op.outputs, *full) for reader in rewriter.readers.get(t, []))
        for other in dict.fromkeys((*makers, *readers)):
            if other is not op and other.phase == op.phase and self._can_move(other):
                yield other

    def _merged(self, rewriter: Rewriter, *ops: Op) -> bool:
        """Replace operators by a group if they fit into one and, for several operators, fewer elements move."""
        members = sorted(ops, key=rewriter.order.__getitem__)
        try:
            group = Generated(members, self._read_elsewhere(rewriter, members), self._forms)
        except NotFusible:
            return False
        axis = group.definition.axes[-1]
        if group.reduces and self.tiling.cut(axis, group.definition.sizes[axis]):
            return False
        if len(members) > 1 and group.elements() >= sum(op.elements() for op in members):
            return False
        place = rewriter.place(members, group)
        if place is None:
            return False
        self.met.add(group.kind)
        if group.kind in self.exclude:
            return False
        group.name = f"{ops[0].name.rpartition('.')[0] or 'model'}.{group.kind}"
        rewriter.put(members, group, place)
        return True

    @staticmethod
    def _read_elsewhere(rewriter: Rewriter, members: list[Op]) -> set[Tensor]:
        """Return the results that the group must write: persistent tensors, and tensors that other operators read."""
        results = [t for op in members for t in op.outputs]
        return {t for t in results if t.persistent or any(r not in members for r in rewriter.readers.get(t, []))}


def groups(graph: Graph) -> list[Generated]:
    """Return the fusion groups of a graph: operators that run as one generated kernel."""
    return [op for op in graph.ops if isinstance(op, Generated)]
