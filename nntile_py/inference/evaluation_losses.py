"""Losses of predictions, computed with numpy in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nntile_py.data.collators import Array


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
