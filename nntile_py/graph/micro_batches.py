"""The setting `train.grad_accumulation: auto`: estimates of a step with different numbers of micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nntile_py.graph.recompute_choice import StepEstimate
from nntile_py.graph.step import StepSpec


def in_micro_batches(spec: StepSpec) -> Iterator[tuple[int, list[StepEstimate]]]:
    """Yield (number of micro-batches, estimates) for the spec's batch in 1, 2, 4, ... micro-batches.

    Stop at the first number with a step that fits without evictions and repeats as little as `recompute` allows. More
    micro-batches would only have more tasks.
    """
    count = 1
    while spec.batch % count == 0:
        found = replace(spec, batch=spec.batch // count, grad_accumulation=count).recompute_estimates
        yield count, found
        if found[0].fits and not found[0].evicted_bytes:
            return
        count *= 2
