"""TokenScorer: log-likelihoods of tokens under a causal model. Workers compute them, so logits are never copied."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from nntile_py.errors import ConfigError
from nntile_py.execution.host_copy import HostCopy
from nntile_py.execution.runtime import Runtime
from nntile_py.graph.params import Batch, Traced, trace
from nntile_py.inference.bound_model import BoundModel
from nntile_py.inference.encoder import IN_FLIGHT
from nntile_py.tasks.cross_entropy import IGNORED
from nntile_py.tasks.token_scores import token_scores

Array = np.ndarray[Any, Any]
SMALLEST = 16  # tokens of the shortest rows; longer rows have 24, 32, 48, 64, 96, ... tokens
TARGETS = "targets"  # input: for each position, the token whose log-likelihood is wanted there


class Score(NamedTuple):
    """Sum of the log-likelihoods of a sequence's targets, and whether each target is the most likely token."""

    log_likelihood: float
    greedy: bool


class TokenScorer:
    """Returns log-likelihoods of tokens. Sequences are grouped by length, and padded at their ends.

    Args:
        model: A causal model with the output logits [batch, seq, vocab].
        batch_tokens: Largest number of tokens in one forward pass. A longer sequence has a pass of its own.
        options: Arguments of BoundModel: precision, tiles, accumulate, fusion.

    Raises:
        ConfigError: The model does not have this output.
    """

    def __init__(self, model: Any, batch_tokens: int = 4096, **options: Any) -> None:
        self._batch_tokens, self._longest = batch_tokens, getattr(getattr(model, "config", None), "positions", None)
        self.bound = BoundModel(_ScoredModel(model), **options, source=model, owner="TokenScorer")
        self.bound.spec(1, 1).trace(training=False)  # checks the model

    def __call__(
        self, sequences: Sequence[Sequence[int]], targets: Sequence[Sequence[int]],
        advance: Callable[[int], None] = lambda count: None,
    ) -> list[Score]:  # fmt: skip
        """Return the score of each sequence, in the order of the sequences.

        Args:
            sequences: Token numbers that the model reads.
            targets: For each sequence, its n targets. Target k is scored as the token after the sequence's first
                len(sequence) - n + 1 + k tokens, so the last target follows the complete sequence.
            advance: Called with the number of sequences scored since the last call.
        """
        order = sorted(range(len(sequences)), key=lambda k: -len(sequences[k]))
        scores: dict[int, Score] = {}
        waiting: deque[tuple[list[int], Any, HostCopy, HostCopy]] = deque()

        def take() -> None:
            numbers, program, *copies = waiting.popleft()
            state, picked = (
                program.finish_copy(name, copy).astype(np.float64)
                for name, copy in zip(("state", "picked"), copies, strict=True)
            )
            for row, number in enumerate(numbers):
                end = len(sequences[number])
                part = slice(end - len(targets[number]), end)
                top, total, of_target = state[row, part, 0], state[row, part, 1], picked[row, part]
                likelihood = float((of_target - top - np.log(total)).sum())
                scores[number] = Score(likelihood, bool((of_target == top).all()))
            advance(len(numbers))

        while order:
            length = _row_length(len(sequences[order[0]]), self._longest)
            rows = max(self._batch_tokens // length, 1)
            numbers, order = order[:rows], order[rows:]
            waiting.append((numbers, *self._start(numbers, _row_count(len(numbers), rows), length, sequences, targets)))
            if len(waiting) > IN_FLIGHT:
                take()
        while waiting:
            take()
        return [scores[number] for number in range(len(sequences))]

    def close(self) -> None:
        """Release programs and weights."""
        self.bound.close()

    def _start(
        self, numbers: Sequence[int], rows: int, length: int, sequences: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
    ) -> tuple[Any, HostCopy, HostCopy]:  # fmt: skip
        """Submit a pass over the sequences `numbers`, and copies of its outputs to main memory."""
        arrays = {"input_ids": np.zeros((rows, length), np.int64), TARGETS: np.full((rows, length), IGNORED)}
        for row, number in enumerate(numbers):
            end = len(sequences[number])
            arrays["input_ids"][row, :end] = sequences[number]
            arrays[TARGETS][row, end - len(targets[number]) : end] = targets[number]
        with Runtime.turn:
            program = self.bound.program(
                (rows, length), lambda: self.bound.spec(rows, length).outputs("state", "picked")
            )  # fmt: skip
            program.write(program.check(arrays))
            program.run({})
            return program, program.start_copy("state"), program.start_copy("picked")


class _ScoredModel:
    """A model whose outputs are the outputs of TokenScores for its logits."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @property
    def weights(self) -> Any:
        return self._model.weights

    def trace(self, g: Any, batch: Batch) -> Traced:
        traced = trace(self._model, g, batch)
        logits = traced.outputs.get("logits")
        if logits is None or logits.axes[:-1] != ("batch", "seq"):
            shown = ", ".join(f"{name} {[*tensor.axes]}" for name, tensor in traced.outputs.items()) or "none"
            need = "a model with the output logits [batch, seq, vocab]"
            raise ConfigError(f"model: {type(self._model).__name__} has the outputs {shown}; allowed: {need}")
        targets = g.input(
            TARGETS, {a: logits.size(a) for a in logits.axes[:-1]}, below=logits.shape[-1], ignored=IGNORED
        )
        state, picked = token_scores(g, logits, targets)
        return Traced(traced.loss, {"state": state, "picked": picked})


def _row_length(tokens: int, most: int | None) -> int:
    """Return the length of rows for a sequence: 16, 24, 32, 48, 64, 96, ... tokens, so that few programs are built.

    most: Number of positions of the model; None: no limit."""
    size = SMALLEST
    while size < tokens and size * 3 // 2 < tokens:
        size *= 2
    length = size if size >= tokens else size * 3 // 2
    return min(length, most or length)


def _row_count(count: int, most: int) -> int:
    """Return the number of rows for `count` sequences: the next power of two, at most `most`."""
    return min(1 << (count - 1).bit_length(), most)
