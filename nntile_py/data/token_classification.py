"""Training data of a classifier of tokens: the first token of each word has the word's label."""

from __future__ import annotations

from typing import Any

import numpy as np

from nntile_py.data.classification import ClassificationDataset
from nntile_py.data.collators import TokenLabelCollator
from nntile_py.data.dataset import Evaluator
from nntile_py.data.entities import EntityScores
from nntile_py.tasks.cross_entropy import IGNORED


class TokenClassificationDataset(ClassificationDataset):
    """The Dataset of a classifier of tokens. For the arguments see ClassificationDataset.

    In `corpus`, a text's classes are the classes of its tokens, see `labelled_words.classes_of_tokens`.
    """

    def __init__(self, *args: Any, seq: int, pad: int = 0, **options: Any) -> None:
        super().__init__(*args, seq=seq, pad=pad, **options)
        self._collator = TokenLabelCollator(seq, pad)

    def measure(self, model: Evaluator, whole: bool = False) -> dict[str, Any]:
        """Evaluate the model on held-out texts. Returns mean loss, accuracy of words, and scores of entities."""
        losses, counts, scores = list[float](), list[int](), EntityScores(self.corpus.names)
        for inputs in self.held_out(whole):
            loss, logits = model.evaluate(inputs, return_logits=True)
            labels = inputs["labels"]
            real, predicted = labels != IGNORED, logits.argmax(-1)
            if real.any():
                losses.append(loss)
                counts.append(int(real.sum()))
            for row in np.flatnonzero(real.any(1)):
                scores.add(labels[row, real[row]], predicted[row, real[row]])
        return {"held_out_loss": float(np.average(losses, weights=counts))} | scores.metrics()
