"""What a trainer holds after a step: read from its tiles, or copied while the next steps run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from nntile_py.execution.program import Store, whole
from nntile_py.graph.params import Param
from nntile_py.graph.step import Step
from nntile_py.tasks.op import Tensor
from nntile_py.tasks.optimizer import MASTERS, joined
from nntile_py.training.checkpoint import State, Stored

Array = np.ndarray[Any, Any]


def states_of(built: Step) -> dict[str, dict[Tensor, Tensor]]:
    """The optimizer's tensors: by their name (m, v, a master), then by the parameter that they belong to."""
    result: dict[str, dict[Tensor, Tensor]] = {}
    owners = {param.tensor.name: param.tensor for param in built.params}
    for tensor in built.update_graph.kept.values():
        owner, _, name = tensor.name.rpartition(".")
        if tensor.kind == "state" and owner in owners:
            result.setdefault(name, {})[owners[owner]] = tensor
    return result


def masters_of(built: Step) -> dict[Tensor, Tensor]:
    """What makes each bf16 or fp16 parameter the fp32 one; empty for other dtypes."""
    name, _ = MASTERS.get(built.graph.dtype, ("", ""))
    return states_of(built).get(name, {})


def averages_of(built: Step) -> dict[str, dict[Tensor, Tensor]]:
    """The optimizer's tensors but masters, which are a part of the weights."""
    masters = masters_of(built)
    return {name: of for name, of in states_of(built).items() if of != masters}


class Live:
    """Weights and averages in a trainer's tiles; `state` reads each when it is asked for, and waits for the tasks.

    Every one of several ranks makes it. The first reads `state`, for which the others `give` the tiles that it has not,
    until it says `end`: it holds no more than its own tiles and one tensor."""

    def __init__(self, step: int, built: Step, store: Store, loss_scale: Mapping[str, Any] | None) -> None:
        self.step, self._built, self._store, self._states = step, built, store, states_of(built)
        self._loss_scale = loss_scale
        weights = {param.tensor: built.first for param in built.params}
        averages = {tensor: built.update for of in self._states.values() for tensor in of.values()}
        self.pieces = store.pieces(weights | averages)
        self._numbers: dict[Tensor, list[int]] = {}
        for number, piece in enumerate(self.pieces):
            self._numbers.setdefault(piece.tensor, []).append(number)
        self._ranks = store.ranks
        self._own = self._ranks.rank if self._ranks else 0

    @property
    def mine(self) -> list[int]:
        """The numbers of the pieces that this rank gives."""
        return [number for number, piece in enumerate(self.pieces) if piece.rank == self._own]

    def piece(self, number: int) -> Array:
        """One that this rank has."""
        found: Array = self._store.handle(self.pieces[number].tile).read()
        return found

    def give(self) -> bool:
        """On ranks that are not the first: give it what it asks for, until it says `end`; whether that was the last."""
        assert self._ranks
        return self._ranks.give(self.piece)

    def end(self, last: bool = False) -> None:
        """On the first rank: no more is asked of the others. last: there will be no other checkpoint."""
        if self._ranks:
            self._ranks.end_giving(last)

    def read(self, tensor: Tensor) -> Array:
        numbers = self._numbers[tensor]
        return whole(tensor, [(self.pieces[number].where, self._part(number)) for number in numbers])

    def _part(self, number: int) -> Array:
        rank = self.pieces[number].rank
        if rank == self._own or not self._ranks:
            return self.piece(number)
        given: Array = self._ranks.ask(rank, number)
        return given

    def state(self) -> State:
        """Raises TaskError where a task had failed."""
        masters = masters_of(self._built)

        def weight(param: Param) -> Array:
            value = self.read(param.tensor)
            return joined(value, self.read(masters[param.tensor])) if param.tensor in masters else value

        def average(of: Mapping[Tensor, Tensor], param: Param) -> Array:
            return self.read(of[param.tensor])

        dtype = "float64" if self._built.graph.dtype == "fp64" else "float32"
        stored = partial(_stored, self._built.params, dtype)
        averages = {name: stored(partial(average, of)) for name, of in averages_of(self._built).items()}
        return State(self.step, stored(weight), averages, self._loss_scale)


class Snapshot(Live):
    """The same, copied while the next steps run; `state` is for any thread, when `done` says so."""

    def __init__(self, step: int, built: Step, store: Store, loss_scale: Mapping[str, Any] | None) -> None:
        super().__init__(step, built, store, loss_scale)
        self._copied = store.copy(self.pieces[number].tile for number in self.mine)
        self._place = {number: place for place, number in enumerate(self.mine)}

    def done(self) -> bool:
        return self._copied.done()

    def wait(self) -> None:
        """Raises TaskError if a task failed."""
        self._copied.wait()

    def piece(self, number: int) -> Array:
        while not self.done():  # another rank's may be, and its thread asks
            time.sleep(0.001)
        return self._copied.array(self._place[number])


def _stored(params: Sequence[Param], dtype: str, value: Callable[[Param], Array]) -> dict[str, Stored]:
    """By the checkpoint's names. `value` is asked for one parameter at a time, of which several weights may be made."""
    sources = [(param, source) for param in params for source in param.sources]
    last: dict[int, Array] = {}

    def read(name: str) -> Array:
        out: dict[str, Array] = {}
        for param, source in sources:
            if source.weight == name:
                if id(param) not in last:
                    last.clear()
                    last[id(param)] = param.declared(value(param))
                source.put(out, last[id(param)])
        return out[name]

    return {source.weight: Stored(dtype, source.shape, partial(read, source.weight)) for _, source in sources}
