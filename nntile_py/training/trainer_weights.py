"""The part of a Trainer that reads and restores weights and optimizer averages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nntile_py.checkpoint.state import LiveState, Snapshot, read_gradients, read_weights, write_averages
from nntile_py.errors import ConfigError, TaskError
from nntile_py.execution.program import Store
from nntile_py.execution.runtime import Runtime, in_turns
from nntile_py.graph.built_step import Step
from nntile_py.training.loss_scale import LossScale
from nntile_py.training.programs import Programs
from nntile_py.training.step_handle import StepsInFlight


class TrainerWeights:
    """Base class of Trainer: weights, gradients and optimizer averages of a model in training."""

    model: Any
    steps: int
    precision: str
    _runtime: Runtime
    _built: Step
    _store: Store
    _in_flight: StepsInFlight
    _scaled: float | None  # factor of the gradients in their tiles; None: the tiles hold the gradients of no whole step
    _programs: Programs
    copies_at_end = True  # close() copies the weights into the model

    @property
    def loss_scale(self) -> float | None:
        """Factor by which the next step's loss is multiplied; None: the loss is not scaled. Waits for earlier steps."""
        state = self._in_flight.scale_state()
        return state["value"] if state else None

    @in_turns
    def gradients(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return {name in transformers: gradient} of the last step, before clipping.

        Raises:
            TaskError: No step has run yet in this trainer, or its last step was interrupted before the update.
        """
        if self._scaled is None:
            raise TaskError("gradients: no step has run yet in this trainer, or its last step was interrupted")
        return read_gradients(self._built, self._store, self._scaled)

    @in_turns
    def state_dict(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return {name in transformers: weight} with the current weights, and store them in `model.weights` too.

        A tied weight occurs once."""
        self.model.weights = read_weights(self._built, self._store)
        return dict(self.model.weights)

    @in_turns
    def snapshot(self) -> Snapshot:
        """Start to copy weights and optimizer averages as they are after all submitted steps. Returns at once."""
        return Snapshot(self.steps, self._built, self._store, self._in_flight.scale_state())

    @in_turns
    def live(self) -> LiveState:
        """Return a LiveState, which reads weights and optimizer averages from their tiles, one array at a time."""
        return LiveState(self.steps, self._built, self._store, self._in_flight.scale_state())

    @in_turns
    def restore(
        self, step: int, averages: Mapping[str, Mapping[str, np.ndarray[Any, Any]]],
        loss_scale: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Continue from a checkpoint: set its step, optimizer averages and loss scale.

        The weights are not changed: the trainer's model must have the checkpoint's weights already.

        Args:
            step: Number of steps trained so far.
            averages: The optimizer's averages, {m or v: {name in transformers: array}}.
            loss_scale: LossScale.state of the checkpoint; None: the initial loss scale.

        Raises:
            ConfigError: An average is missing, has another shape, or has values that are not finite.
        """
        write_averages(self._built, self._store, averages)
        for name, values in averages.items():
            self._check_equal(f"{name} of the checkpoint", values)
        if self._in_flight.scale and loss_scale:
            self._in_flight.scale = LossScale(**loss_scale)
        self.steps = step
        self._check_alone()

    def hf_config(self) -> dict[str, Any]:
        """Return the content of config.json: the model's own entries, and the dtype of the saved weights."""
        config: dict[str, Any] = self.model.hf_config()
        return config | {"dtype": "float64" if self.precision == "fp64" else "float32"}

    @in_turns
    def close(self) -> None:
        """Copy the weights into the model and release the trainer. A runtime calls this before it stops.

        With `copies_at_end = False`, the weights are not copied."""
        if self.steps and self.copies_at_end:
            self.state_dict()
        self._programs.let_go()
        self._runtime.forget(self)

    def _check_alone(self) -> None:
        """Raise ConfigError if another trainer has trained the same model: each would overwrite the other's weights."""
        if any(user is not self and user.model is self.model and user.steps for user in self._runtime.users):
            need = "another model, or this model after close() of the other Trainer"
            raise ConfigError(f"model: got a model that another Trainer trains; allowed: {need}")

    def _check_equal(self, what: str, parts: Mapping[str, Any]) -> None:
        """Raise ConfigError if ranks have different values. what: name of the values in the message."""
        if self._runtime.ranks:
            self._runtime.ranks.same(what, parts)
