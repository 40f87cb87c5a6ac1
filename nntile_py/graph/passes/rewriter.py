"""The Rewriter: a graph with the writer and the readers of each tensor, and a worklist that applies a rule."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterator
from typing import TypeVar

from nntile_py.graph.graph import Graph
from nntile_py.tasks.op import Op, Tensor

Kind = TypeVar("Kind", bound=Op)


class Rewriter:
    """The operators of a graph with the writer and the readers of each tensor, kept up to date by every change.

    An operator keeps its position for its whole life. A removed operator leaves a gap, so no other position changes.

    Attributes:
        ops: the operators by position.
        order: the position of each operator.
        maker: the operator that writes each tensor.
        readers: the operators that read each tensor, by position.
    """

    def __init__(self, graph: Graph) -> None:
        self.ops = dict(enumerate(graph.ops))
        self.order: dict[Op, int] = {}
        self.maker: dict[Tensor, Op] = {}
        self.readers: dict[Tensor, list[Op]] = {}
        self._known: dict[Op, list[list[Tensor]]] = {}  # inputs and outputs of each operator, as recorded above
        self._touched: set[Tensor] = set()  # tensors of the operators that the current rule changed
        for place, op in self.ops.items():
            self._enter(op, place)

    def _enter(self, op: Op, place: int) -> None:
        self.ops[place], self.order[op] = op, place
        self._known[op] = [op.inputs[:], op.outputs[:]]
        for t in op.outputs:
            self.maker[t] = op
        for t in op.inputs:
            bisect.insort(self.readers.setdefault(t, []), op, key=self.order.__getitem__)
        self._touched.update(*self._known[op])

    def _leave(self, op: Op) -> int:
        inputs, outputs = self._known.pop(op)
        for t in inputs:
            self.readers[t].remove(op)
        for t in outputs:
            if self.maker[t] is op:
                del self.maker[t]
        self._touched.update(inputs, outputs)
        return self.order.pop(op)

    def maker_only_for(self, tensor: Tensor, reader: Op, kind: type[Kind]) -> Kind | None:
        """Return the operator that writes a temporary tensor for `reader` only, if the operator is of this kind."""
        op = self.maker.get(tensor)
        only_reader = self.readers.get(tensor) == [reader] and tensor.kind == "temp"
        return op if only_reader and isinstance(op, kind) else None

    def summands(self, op: Op, kind: type[Kind]) -> Iterator[tuple[Kind, Tensor, Tensor]]:
        """Yield (maker, this input, other input) for each input that an operator of this kind makes only for `op`.

        op: an addition of two tensors.
        """
        for mine, other in (op.inputs, op.inputs[::-1]):
            if maker := self.maker_only_for(mine, op, kind):
                yield maker, mine, other

    def remove(self, op: Op) -> None:
        """Remove an operator."""
        del self.ops[self._leave(op)]

    def changed(self, op: Op) -> None:
        """Update the Rewriter's records after the inputs or outputs of an operator were changed."""
        self._enter(op, self._leave(op))

    def replace(self, old: list[Op], new: Op) -> bool:
        """Replace the operators `old` by the operator `new`, at the position of the last of them. Return True.

        If an operator before that position reads a result of `old`, change nothing and return False.
        """
        *others, last = sorted(old, key=self.order.__getitem__)
        readers = [reader for op in others for t in op.outputs for reader in self.readers.get(t, [])]
        if any(reader not in old and self.order[reader] < self.order[last] for reader in readers):
            return False
        new.name, new.phase = old[0].name, old[0].phase
        for op in others:
            self.remove(op)
        self._enter(new, self._leave(last))
        return True

    def place(self, old: list[Op], new: Op) -> int | None:
        """Return the first position of an operator in `old` where `new` can replace all operators of `old`.

        The position is after the makers of the inputs of `new` and before the readers of the outputs of `old`. None:
        there is no such position.
        """
        makers = [self.order[self.maker[t]] for t in new.inputs if t in self.maker and self.maker[t] not in old]
        readers = [self.order[r] for op in old for t in op.outputs for r in self.readers.get(t, []) if r not in old]
        places = sorted(self.order[op] for op in old)
        return next((k for k in places if max(makers, default=-1) < k < min(readers, default=k + 1)), None)

    def put(self, old: list[Op], new: Op, place: int) -> None:
        """Replace the operators `old` by `new`, which already has a name. place: the position of one of `old`."""
        new.phase = old[0].phase
        for at in [self._leave(op) for op in old]:
            if at != place:
                del self.ops[at]
        self._enter(new, place)

    def apply(self, rule: Rule) -> None:
        """Apply a rule to the first operator that it matches, again and again until it matches no operator.

        A rule may look at its operator's neighbours (operators that share a tensor with it) and at their neighbours.
        After a change, the rule is tried again only on operators within this distance.
        """
        waiting = list(self.ops)  # sorted, so it is a heap
        while waiting:
            op = self.ops.get(heapq.heappop(waiting))
            self._touched = set()
            if op and rule(self, op):
                near = self._around(self._touched)
                near |= self._around({t for op in near for t in (*op.inputs, *op.outputs)})
                for op in near:
                    heapq.heappush(waiting, self.order[op])

    def _around(self, tensors: set[Tensor]) -> set[Op]:
        """Return the makers and readers of tensors. Tensors without a maker, such as a mask, are skipped.

        All layers may read a tensor without a maker, so its readers do not count as neighbours.
        """
        return {op for t in tensors if t in self.maker for op in (self.maker[t], *self.readers.get(t, []))}


Rule = Callable[[Rewriter, Op], bool]  # changes the graph around an operator; returns whether it changed anything
