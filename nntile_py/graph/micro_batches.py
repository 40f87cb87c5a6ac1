"""Estimates of a step with different numbers of micro-batches, for `train.grad_accumulation: auto` and for plans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from nntile_py.graph.recompute_choice import StepEstimate
from nntile_py.graph.step import StepSpec


def in_parts(spec: StepSpec, parts: Iterable[int]) -> Iterator[tuple[int, list[StepEstimate]]]:
    """Yield (number of micro-batches, estimates) with each micro-batch divided into equal parts.

    Args:
        parts: Numbers of parts. Numbers that do not divide the batch are left out.
    """
    for part in parts:
        if spec.batch % part == 0:
            count = spec.grad_accumulation * part
            one = spec if part == 1 else replace(spec, batch=spec.batch // part, grad_accumulation=count)
            yield count, one.recompute_estimates


def in_micro_batches(spec: StepSpec) -> Iterator[tuple[int, list[StepEstimate]]]:
    """Yield (number of micro-batches, estimates), from the smallest number on.

    Stop at the first number with a step that fits without evictions and repeats as little as `recompute` allows. More
    micro-batches would only have more tasks.
    """
    for count, found in in_parts(spec, range(1, spec.batch + 1)):
        yield count, found
        if found[0].fits and not found[0].evicted_bytes:
            return
