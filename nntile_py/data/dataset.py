"""Dataset: the interface of a run's training data and held-out data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from tokenizers import Tokenizer

from nntile_py.data.collators import Array
from nntile_py.graph.step_inputs import StepInputs

Inputs = dict[str, Array] | StepInputs
WASTED = 0.2  # if more than this share of the tokens is padding, a run tells how to avoid padding


def padding_note(lengths: Array, seq: int, remedy: str = "train.pack: true") -> str:
    """Return a note on how much of a batch is padding and which key avoids it; "" if the share is at most WASTED.

    lengths: tokens of each sequence. seq: tokens of a row of the batch. remedy: the key and its value."""
    share = 1 - lengths.mean() / seq
    return f"{share:.0%} of a batch is padding ({remedy} avoids it)" if share > WASTED else ""


class Evaluator(Protocol):
    """An object that evaluates batches with the current weights, such as a Trainer."""

    def evaluate(self, inputs: Mapping[str, Any], *, return_logits: bool = False) -> Any: ...


class Dataset(Protocol):
    """Interface of a run's training data and held-out data. TextDataset and ClassificationDataset implement it.

    Batches are functions of the seed and the step only, so a resumed run reads the same batches.

    Attributes:
        tokenizer: Turns text into token numbers; the run saves it beside the weights.
        class_names: Names of a classifier's classes; None for a language model.
        example: Padded held-out batch. A run of a masked model ends by printing the model's guesses for the masked
            tokens of this batch. None: the run prints no sample of text.
    """

    tokenizer: Tokenizer
    class_names: list[str] | None
    example: Mapping[str, Array] | None

    def describe(self) -> str:
        """Return one line of text with the sizes of the training part and the held-out part."""
        ...

    def describe_lengths(self) -> str:
        """Return one line of text about sequences of unequal lengths; "" if there is nothing to report."""
        ...

    def contents(self) -> dict[str, bytes]:
        """Return {name of a part of the data: the part as bytes}.

        Checkpoints keep hashes of the parts, so that a run with other data is not resumed."""
        ...

    def train(self, step: int) -> Inputs:
        """Return the inputs of training step 1, 2, ..."""
        ...

    def held_out(self, whole: bool = False) -> Iterable[Inputs]:
        """Return held-out batches, the same at each call. whole: batches of all held-out data."""
        ...

    def collate(self, samples: Any, step: int = 0) -> dict[str, Array]:
        """Turn samples into the model's dict of inputs. step: number of the training step, for random choices."""
        ...

    def measure(self, model: Evaluator, whole: bool = False) -> dict[str, Any]:
        """Evaluate the model on held-out data. Returns entries for metrics.jsonl, at least `held_out_loss`."""
        ...
