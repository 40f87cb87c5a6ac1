"""Random inputs of a graph, for measurements and tests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from nntile_py.graph.params import Array


def random_inputs(graph: Any, rows: int, seed: int, alpha: float = 1.0, predicted: float = 1.0) -> dict[str, Array]:
    """Return {input: array}: random values within the declared ranges, and inputs that derive from other inputs.

    Inputs with a constant default are left out.

    Args:
        rows: number of sequences.
        alpha: mean length of the sequences divided by the longest length. If below 1: lengths are uniform around the
            mean, an attention_mask is added, and labels of padding are ignored.
        predicted: share of the labels that are not ignored.
    """
    rng = np.random.default_rng(seed)
    values: dict[str, Array] = {}
    for name, one in graph.inputs.items():
        shape = one.shape(rows)
        if one.default is None:
            integers = one.tensor.dtype == "int64"
            below = one.below or 2
            values[name] = rng.integers(0, below, shape) if integers else rng.standard_normal(shape, np.float32)
    values |= _lengths(graph, values, rows, rng, alpha, predicted)
    for name, one in graph.inputs.items():
        if one.max_count is not None:
            order = np.where(values[name] == one.ignored, 1.0, rng.random(values[name].shape)).argsort(axis=1)
            values[name][order.argsort(axis=1) >= one.max_count] = one.ignored
        if callable(one.default):
            values[name] = one.default(values)
    return values


def random_lengths(rng: np.random.Generator, count: int, longest: int, alpha: float) -> Array:
    """Return `count` random lengths of sequences, uniform around a mean of alpha * longest."""
    least, most = math.ceil((2 * alpha - 1) * longest), min(longest, int(2 * alpha * longest))
    return rng.integers(max(1, least), max(1, most) + 1, count)


def _lengths(
    graph: Any, values: Mapping[str, Array], rows: int, rng: np.random.Generator, alpha: float, predicted: float
) -> dict[str, Array]:
    """Return the inputs that change if sequences have unequal lengths (alpha < 1) or some labels are ignored."""
    tokens = [one.tensor for one in graph.inputs.values() if one.tensor.axes[:2] == ("batch", "seq")]
    if not tokens or alpha == predicted == 1:
        return {}
    seq = tokens[0].size("seq")
    lengths = random_lengths(rng, rows, seq, alpha)
    while more := max(rows, round(alpha * seq * rows)) - int(lengths.sum()):  # make the mean exactly alpha
        row = rng.integers(rows)
        lengths[row] = np.clip(lengths[row] + np.clip(more, -8, 8), 1, seq)
    real = np.arange(seq) < lengths[:, None]
    counts = real & (rng.random(real.shape) < predicted)
    changed = {} if alpha == 1 else {"attention_mask": real.astype(np.int64)}
    for name, one in graph.inputs.items():
        if one.ignored is not None and name in values and values[name].shape == real.shape:
            changed[name] = np.where(counts, values[name], one.ignored)
    return changed
