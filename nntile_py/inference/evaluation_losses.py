"""Losses of predictions: computed by the model itself, or with numpy in float64."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from nntile_py.data.collators import Array
from nntile_py.errors import ConfigError
from nntile_py.execution.forward_program import MissingInput, label_counts
from nntile_py.execution.runtime import Runtime
from nntile_py.inference.bound_model import BoundModel
from nntile_py.inference.encoder import IN_FLIGHT
from nntile_py.tasks.cross_entropy import IGNORED

Advance = Callable[[str, int, int], None]  # shows progress: name of the units, units done now, units in all


@dataclass
class Sums:
    """Sums over the predicted tokens or texts of an evaluation."""

    loss: float = 0.0
    count: int = 0
    correct: int = 0

    def add_logits(self, logits: Array, labels: Array) -> None:
        """Add predictions. logits: [predictions, classes]. labels: [predictions]."""
        log_probabilities = log_softmax(logits)
        self.loss -= float(np.take_along_axis(log_probabilities, labels[:, None], 1).sum())
        self.count += len(labels)
        self.correct += int((logits.argmax(1) == labels).sum())


def log_softmax(logits: Array) -> Array:
    """Return the logarithm of the softmax over the last axis, in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def binary_loss(logits: Array, wanted: Array) -> Array:
    """Return the binary cross-entropy of each logit, without overflow: max(x, 0) - x y + log(1 + exp(-|x|))."""
    loss: Array = np.maximum(logits, 0) - logits * wanted + np.log1p(np.exp(-np.abs(logits)))
    return loss


def causal_sums(
    bound: BoundModel, samples: Iterable[tuple[Array, Array]], number: int, sizes: tuple[int, int], advance: Advance
) -> Sums:
    """Return the losses of a causal model on (input_ids, labels).

    Args:
        bound: The model.
        samples: The arrays, each at most seq long.
        number: Number of samples.
        sizes: Samples of a forward pass, and seq.
        advance: Shows progress.
    """
    (batch, seq), sums, waiting = sizes, Sums(), deque[tuple[Any, int]]()
    rows = min(batch, number)
    if bound.spec(rows, seq).trace(training=False)[1].loss is None:
        raise ConfigError(f"RUN: {type(bound.model).__name__} has no loss; allowed: a model whose trace returns one")

    def take() -> None:
        fetched, count = waiting.popleft()
        sums.loss += float(fetched.wait()[0]) * count
        sums.count += count

    for part in _grouped(samples, rows):
        batch_inputs = {"input_ids": np.zeros((rows, seq), np.int64), "labels": np.full((rows, seq), IGNORED)}
        for row, (inputs, labels) in enumerate(part):
            batch_inputs["input_ids"][row, : len(inputs)] = inputs
            batch_inputs["labels"][row, : len(labels)] = labels
        with Runtime.turn:
            program = bound.program((rows, seq), lambda: bound.spec(rows, seq).evaluation())
            try:
                arrays = program.check(batch_inputs, shift=True)
            except MissingInput as error:
                needed = ", ".join(error.needed)
                raise ConfigError(f"RUN: the model needs {needed}; allowed: input_ids, labels") from None
            if count := sum(label_counts(program.inputs, arrays, batch_inputs).values()):
                program.write(arrays)
                program.run(program.slots(arrays, batch_inputs))
                waiting.append((program.store.fetch("loss"), count))
        while len(waiting) > IN_FLIGHT:
            take()
        advance("windows", len(part), number)
    while waiting:
        take()
    return sums


def _grouped(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield lists of `size` items; the last list may be shorter."""
    rest = iter(items)
    while part := list(islice(rest, size)):
        yield part
