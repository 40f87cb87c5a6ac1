"""Who makes and who reads each tensor of a graph, while operators are put together; the worklist of rules."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable
from typing import TypeVar

from nntile_py.graph.graph import Graph
from nntile_py.tasks.op import Op, Tensor

Kind = TypeVar("Kind", bound=Op)


class Uses:
    """Who makes and who reads each tensor of a graph, kept up to date while operators change, and the worklist."""

    def __init__(self, graph: Graph) -> None:
        self.ops = dict(enumerate(graph.ops))  # by place; who goes leaves a gap, so that no other place changes
        self.order: dict[Op, int] = {}
        self.maker: dict[Tensor, Op] = {}
        self.readers: dict[Tensor, list[Op]] = {}  # in their order
        self._known: dict[Op, list[list[Tensor]]] = {}  # inputs and outputs, as they are entered here
        self._touched: set[Tensor] = set()  # by the rule that is being applied
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

    def made_for(self, tensor: Tensor, reader: Op, kind: type[Kind]) -> Kind | None:
        """The operator of this kind that makes the tensor for this reader alone."""
        op = self.maker.get(tensor)
        alone = self.readers.get(tensor) == [reader] and tensor.kind == "temp"
        return op if alone and isinstance(op, kind) else None

    def remove(self, op: Op) -> None:
        del self.ops[self._leave(op)]

    def changed(self, op: Op) -> None:
        """To be called by whoever gives an operator other inputs or outputs."""
        self._enter(op, self._leave(op))

    def replace(self, old: list[Op], new: Op) -> bool:
        """Put `new` where the last of `old` stands. False, and nothing changes: what they make is read before that."""
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
        """The first place of one of `old` that is after all makers of what `new` reads, and before all its readers.

        None: there is none."""
        makers = [self.order[self.maker[t]] for t in new.inputs if t in self.maker and self.maker[t] not in old]
        readers = [self.order[r] for op in old for t in op.outputs for r in self.readers.get(t, []) if r not in old]
        places = sorted(self.order[op] for op in old)
        return next((k for k in places if max(makers, default=-1) < k < min(readers, default=k + 1)), None)

    def put(self, old: list[Op], new: Op, place: int) -> None:
        """Put `new`, which has a name, in the place of all of these, where one of them stands."""
        new.phase = old[0].phase
        for at in [self._leave(op) for op in old]:
            if at != place:
                del self.ops[at]
        self._enter(new, place)

    def apply(self, rule: Rule) -> None:
        """Apply a rule until it fits nowhere, always to the first operator that it fits.

        A rule may look as far as its operator's neighbours (who shares a tensor with it) and theirs: only so near to
        what has changed is it tried again.
        """
        waiting = list(self.ops)  # in order, so a heap
        while waiting:
            op = self.ops.get(heapq.heappop(waiting))
            self._touched = set()
            if op and rule(self, op):
                near = self._around(self._touched)
                near |= self._around({t for op in near for t in (*op.inputs, *op.outputs)})
                for op in near:
                    heapq.heappush(waiting, self.order[op])

    def _around(self, tensors: set[Tensor]) -> set[Op]:
        """Makers and readers; but what no operator makes, such as a mask that all layers read, joins none of them."""
        return {op for t in tensors if t in self.maker for op in (self.maker[t], *self.readers.get(t, []))}


Rule = Callable[[Uses, Op], bool]
