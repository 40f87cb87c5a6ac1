"""Batches of the next steps, made by a thread while the current step trains."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Self, TypeVar

AHEAD = 2  # steps whose batches are made ahead
Batch = TypeVar("Batch")


class Prefetch(Generic[Batch]):
    """Makes the batches of steps in order, ahead of their use. Use as a context manager.

    Args:
        make: Makes the batch of a step. It is called in another thread.
        last: Number of the last step.

    Attributes:
        waited: Seconds that the last call of `take` waited for its batch.
    """

    def __init__(self, make: Callable[[int], Batch], last: int) -> None:
        self._make, self._last = make, last
        self._pool = ThreadPoolExecutor(1, "batches")
        self._batches: dict[int, Future[Batch]] = {}
        self.waited = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def take(self, step: int) -> Batch:
        """Return the batch of a step, and begin with the batches of the next steps. Raises what `make` raises."""
        for number in range(step, min(step + AHEAD, self._last) + 1):
            if number not in self._batches:
                self._batches[number] = self._pool.submit(self._make, number)
        begin = time.perf_counter()
        batch = self._batches.pop(step).result()
        self.waited = time.perf_counter() - begin
        return batch
