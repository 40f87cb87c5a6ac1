"""Dataset: the protocol of a run's training data and held-out data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from tokenizers import Tokenizer

from nntile_py.data.collators import Array
from nntile_py.graph.bin_packing import StepInputs

Inputs = dict[str, Array] | StepInputs


class Evaluator(Protocol):
    """Evaluates batches with the current weights: a Trainer."""

    def evaluate(self, inputs: Mapping[str, Any], *, return_logits: bool = False) -> Any: ...


class Dataset(Protocol):
    """Training data of a run, such as TextDataset or ClassificationDataset.

    Batches are functions of the seed and the step only, so a resumed run reads the same batches.

    Attributes:
        tokenizer: Turns text into token numbers; the run saves it beside the weights.
        class_names: Names of a classifier's classes; None for a language model.
        example: Padded held-out inputs; the end of a run shows the model's guesses for their masked tokens. None: no
            example.
    """

    tokenizer: Tokenizer
    class_names: list[str] | None
    example: Mapping[str, Array] | None

    def describe(self) -> str:
        """Return one line with the sizes of the training part and the held-out part."""
        ...

    def describe_lengths(self) -> str:
        """Return one line about sequences of unequal lengths; empty if there is nothing to report."""
        ...

    def contents(self) -> dict[str, bytes]:
        """Return the data by part. Checkpoints keep hashes of it, to refuse other data when a run resumes."""
        ...

    def train(self, step: int) -> Inputs:
        """Return the inputs of training step 1, 2, ..."""
        ...

    def held_out(self, whole: bool = False) -> Iterable[Inputs]:
        """Return held-out batches, the same at each call. `whole` asks for all held-out data."""
        ...

    def collate(self, samples: Any, step: int = 0) -> dict[str, Array]:
        """Turn samples into the model's dict of inputs."""
        ...

    def measure(self, model: Evaluator, whole: bool = False) -> dict[str, Any]:
        """Evaluate held-out data; return a line's entries for metrics.jsonl, with at least `held_out_loss`."""
        ...
