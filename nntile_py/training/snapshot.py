"""What a trainer holds after a step, copied while the next steps run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nntile_py.execution.program import Store
from nntile_py.graph.optimizers import LOW_BITS
from nntile_py.graph.step import Step
from nntile_py.tasks.op import Tensor
from nntile_py.tasks.optimizer import joined
from nntile_py.training.checkpoint import State

Array = np.ndarray[Any, Any]


def states_of(built: Step) -> dict[str, dict[Tensor, Tensor]]:
    """The optimizer's tensors: by their name (m, v, low_bits), then by the parameter that they belong to."""
    result: dict[str, dict[Tensor, Tensor]] = {}
    owners = {param.tensor.name: param.tensor for param in built.params}
    for tensor in built.update_graph.kept.values():
        owner, _, name = tensor.name.rpartition(".")
        if tensor.kind == "state" and owner in owners:
            result.setdefault(name, {})[owners[owner]] = tensor
    return result


class Snapshot:
    """Weights and averages after `step` steps; `state` has them when `done` says so, for any thread."""

    def __init__(self, step: int, built: Step, store: Store) -> None:
        self.step, self._built, self._states = step, built, states_of(built)
        tensors = {param.tensor: built.first for param in built.params}
        self._copied = store.copy(tensors | {t: built.update for of in self._states.values() for t in of.values()})

    def done(self) -> bool:
        return self._copied.done()

    def wait(self) -> None:
        """Raises TaskError if a task failed."""
        self._copied.wait()

    def state(self) -> State:
        """Raises TaskError where a task had failed before."""
        weights: dict[str, Array] = {}
        low_bits: Mapping[Tensor, Tensor] = self._states.get(LOW_BITS, {})
        for param in self._built.params:
            value = self._copied.array(param.tensor)
            if param.tensor in low_bits:
                value = joined(value, self._copied.array(low_bits[param.tensor]))
            param.put(weights, value)
        averages: dict[str, dict[str, Array]] = {}
        for name, of in self._states.items():
            for param in self._built.params if name != LOW_BITS else ():
                param.put(averages.setdefault(name, {}), self._copied.array(of[param.tensor]))
        return State(self.step, weights, averages)
