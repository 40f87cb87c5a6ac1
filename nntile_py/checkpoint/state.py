"""Write a trainer's weights and optimizer state into tiles, read them back, or copy them while training continues."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from nntile_py.checkpoint.format import StoredArray, TrainerState
from nntile_py.errors import ConfigError
from nntile_py.execution.host_copy import assembled
from nntile_py.execution.program import Store
from nntile_py.graph.built_step import Step
from nntile_py.graph.params import Param
from nntile_py.system.cgroup import free_memory
from nntile_py.tasks.op import Tensor
from nntile_py.tasks.optimizer import MASTERS, joined, split

Array = np.ndarray[Any, Any]


# -- the optimizer's tensors


def states_of(built: Step) -> dict[str, dict[Tensor, Tensor]]:
    """Return the optimizer's tensors: {name of the state, such as m or v: {parameter: tensor with its state}}.

    Tensors that complete bf16 and fp16 parameters to fp32 master weights are included."""
    result: dict[str, dict[Tensor, Tensor]] = {}
    owners = {param.tensor.name: param.tensor for param in built.params}
    for tensor in built.update_graph.kept.values():
        owner, _, name = tensor.name.rpartition(".")
        if tensor.kind == "state" and owner in owners:
            result.setdefault(name, {})[owners[owner]] = tensor
    return result


def masters_of(built: Step) -> dict[Tensor, Tensor]:
    """Return {bf16 or fp16 parameter: tensor that completes it to its fp32 master weight}; {} for other dtypes."""
    name, _ = MASTERS.get(built.graph.dtype, ("", ""))
    return states_of(built).get(name, {})


def averages_of(built: Step) -> dict[str, dict[Tensor, Tensor]]:
    """Return the optimizer's averages: {m or v: {parameter: tensor}}. Tensors of master weights are left out."""
    masters = masters_of(built)
    return {name: tensors for name, tensors in states_of(built).items() if tensors != masters}


# -- weights between a model's arrays and tiles


def read_weights(built: Step, store: Store) -> dict[str, Array]:
    """Read the weights, or their fp32 master weights, from tiles. Returns {name in transformers: array}."""
    arrays, masters = dict[str, Array](), masters_of(built)
    for param in built.params:
        value = store.read(built.first, param.tensor)
        if master := masters.get(param.tensor):
            value = joined(value, store.read(built.update, master))
        param.put(arrays, value)
    return arrays


def read_gradients(built: Step, store: Store, scale: float) -> dict[str, Array]:
    """Read the gradients from their tiles and divide them by the loss scale. Returns {name in transformers: array}."""
    arrays: dict[str, Array] = {}
    for param in built.params:
        if param.tensor in built.grads:
            value = store.read(built.first, built.grads[param.tensor])
            param.put(arrays, value / value.dtype.type(scale))
    return arrays


def write_first_state(
    model: Any, built: Step, store: Store, check_equal: Callable[[str, Mapping[str, Any]], None]
) -> None:
    """Write a model's weights into their tiles, and zeros into the tiles of the optimizer's averages.

    check_equal: called with a text and each weight; raises ConfigError if ranks have different weights."""
    masters = masters_of(built)
    weights = model.first_weights() if hasattr(model, "first_weights") else getattr(model, "weights", None)
    if not isinstance(weights, Mapping):
        raise ConfigError(f"model: {type(model).__name__}.weights is no dict; allowed: {{name: array}}")
    for param in built.params:
        value = param.weight(weights)
        check_equal("the model's weights", {param.tensor.name: value})
        if param.tensor in masters:
            value, master = split(value, param.tensor.dtype)
            store.write(built.update, masters[param.tensor], master)
        store.write(built.first, param.tensor, value)
    for tensors in averages_of(built).values():
        for tensor in tensors.values():
            store.zero(built.update, tensor)


def write_averages(built: Step, store: Store, averages: Mapping[str, Mapping[str, Array]]) -> None:
    """Write the optimizer's averages, {m or v: {name in transformers: array}}, into tiles.

    Raises:
        ConfigError: An average is missing, has another shape, or has values that are not finite.
    """
    states = averages_of(built)
    if states.keys() != averages.keys():
        saved, needed = (", ".join(names) or "none" for names in (averages, states))
        raise ConfigError(f"optimizer: the averages that were saved are {saved}, those that it needs {needed}")
    for name, values in averages.items():
        if wrong := [weight for weight, value in values.items() if not np.isfinite(value).all()]:
            raise ConfigError(f"optimizer: {name} of {wrong[0]} has values that are no finite numbers")
    for name, tensors in states.items():
        for param in (one for one in built.params if one.tensor in tensors):
            store.write(built.update, tensors[param.tensor], param.value(averages[name]))


# -- the state of a step


class LiveState:
    """Reads a trainer's weights and optimizer averages from their tiles, one array at a time.

    Reading an array waits for the tasks that write it.

    All ranks create a LiveState. Rank 0 reads `state`; the other ranks call `serve` and send the tiles that rank 0
    lacks, until rank 0 calls `end`. Rank 0 never holds more than its own tiles and one tensor.

    Attributes:
        pieces: All tiles of weights and averages, each with the rank that reads it.
    """

    def __init__(self, step: int, built: Step, store: Store, loss_scale: Mapping[str, Any] | None) -> None:
        self.step, self._built, self._store, self._states = step, built, store, states_of(built)
        self._loss_scale = loss_scale
        weights = {param.tensor: built.first for param in built.params}
        averages = {tensor: built.update for tensors in self._states.values() for tensor in tensors.values()}
        self.pieces = store.pieces(weights | averages)
        self._numbers: dict[Tensor, list[int]] = {}
        for number, piece in enumerate(self.pieces):
            self._numbers.setdefault(piece.tensor, []).append(number)
        self.ranks = store.ranks
        self._rank = self.ranks.rank if self.ranks else 0

    @property
    def own_pieces(self) -> list[int]:
        """Positions in `pieces` of the tiles that this rank reads."""
        return [number for number, piece in enumerate(self.pieces) if piece.rank == self._rank]

    def piece(self, number: int) -> Array:
        """Return the content of the tile `pieces[number]`, which this rank holds."""
        array: Array = self._store.handle(self.pieces[number].tile).read()
        return array

    def serve(self) -> bool:
        """On ranks other than 0: send rank 0 the tiles that it requests, until rank 0 calls `end`.

        Returns True if no further checkpoint follows."""
        assert self.ranks
        return self.ranks.give(self.piece)

    def end(self, last: bool = False) -> None:
        """On rank 0: let `serve` return on the other ranks. last: no further checkpoint follows."""
        if self.ranks:
            self.ranks.end_giving(last)

    def read(self, tensor: Tensor) -> Array:
        numbers = self._numbers[tensor]
        return assembled(tensor, [(self.pieces[number].where, self._piece_of_any_rank(number)) for number in numbers])

    def _piece_of_any_rank(self, number: int) -> Array:
        rank = self.pieces[number].rank
        if rank == self._rank or not self.ranks:
            return self.piece(number)
        array: Array = self.ranks.ask(rank, number)
        return array

    def state(self) -> TrainerState:
        """Return the state for a checkpoint, whose arrays are read when they are written.

        Reading an array raises TaskError if a task has failed."""
        masters = masters_of(self._built)

        def weight(param: Param) -> Array:
            value = self.read(param.tensor)
            return joined(value, self.read(masters[param.tensor])) if param.tensor in masters else value

        def average(tensors: Mapping[Tensor, Tensor], param: Param) -> Array:
            return self.read(tensors[param.tensor])

        dtype = "float64" if self._built.graph.dtype == "fp64" else "float32"
        params, averages = self._built.params, {}
        for name, tensors in averages_of(self._built).items():
            own = [param for param in params if param.tensor in tensors]
            averages[name] = _stored(own, dtype, partial(average, tensors))
        return TrainerState(self.step, _stored(params, dtype, weight), averages, self._loss_scale)


class Snapshot(LiveState):
    """A copy of weights and optimizer averages, made while the next steps run. When `done`, any thread may read it."""

    def __init__(self, step: int, built: Step, store: Store, loss_scale: Mapping[str, Any] | None) -> None:
        super().__init__(step, built, store, loss_scale)
        self._copies = store.copy(self.pieces[number].tile for number in self.own_pieces)
        self._copy_of = {number: k for k, number in enumerate(self.own_pieces)}

    def done(self) -> bool:
        return self._copies.done()

    def wait(self) -> None:
        """Wait for the copy. Raises TaskError if a task failed."""
        self._copies.wait()

    def piece(self, number: int) -> Array:
        while not self.done():  # rank 0 may request a piece before this rank has copied it
            time.sleep(0.001)
        return self._copies.array(self._copy_of[number])


def _stored(params: Sequence[Param], dtype: str, value: Callable[[Param], Array]) -> dict[str, StoredArray]:
    """Return {name of a weight in checkpoints: StoredArray}.

    value: reads the array of one parameter, which may hold several weights of the checkpoint."""
    sources = [(param, source) for param in params for source in param.sources]
    latest: dict[int, Array] = {}  # the array of the parameter read last, by the parameter's id

    def read(name: str) -> Array:
        arrays: dict[str, Array] = {}
        for param, source in sources:
            if source.weight == name:
                if id(param) not in latest:
                    latest.clear()
                    latest[id(param)] = param.declared(value(param))
                source.put(arrays, latest[id(param)])
        return arrays[name]

    return {source.weight: StoredArray(dtype, source.shape, partial(read, source.weight)) for _, source in sources}


class Checkpointable(Protocol):
    """The part of a Trainer that checkpoints use."""

    steps: int

    def live(self) -> LiveState: ...

    def snapshot(self) -> Snapshot: ...


def memory_for_copies(trainer: Checkpointable) -> tuple[int, int]:
    """Return the bytes of a copy of weights and averages, and the bytes of memory that are free now.

    With several ranks, both numbers belong to the rank that would have the least memory left after the copy. All ranks
    must call this function."""
    live = trainer.live()
    if not live.ranks:
        return live.state().bytes, free_memory()
    need = sum(live.pieces[number].tile.bytes for number in live.own_pieces)
    of_ranks = live.ranks.gathered(np.array([need, free_memory()], np.int64))
    worst = of_ranks[(of_ranks[:, 1] - of_ranks[:, 0]).argmin()]
    return int(worst[0]), int(worst[1])
