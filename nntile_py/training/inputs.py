"""Convert the inputs that a user passes to a step into StepInputs, and compute the seed of the step's dropout."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nntile_py.graph.step_inputs import StepInputs

IntArray = np.ndarray[Any, Any]
Inputs = Mapping[str, Any] | IntArray | StepInputs


def as_step_inputs(
    inputs: Inputs, labels: IntArray | None, passes: int, pack: Callable[[Mapping[str, Any]], StepInputs] | None
) -> StepInputs:
    """Convert the inputs that a user passes to a step into StepInputs.

    Args:
        inputs: A dict of arrays, the array `input_ids`, or StepInputs, which are returned unchanged.
        labels: The array `labels`; only if `inputs` is the array `input_ids`.
        passes: Number of forward and backward passes that the inputs are for.
        pack: Packs the sequences of a dict into bins. None: no packing.

    Raises:
        ValueError: `labels` is given with a dict or with StepInputs, or StepInputs are for another number of passes.
    """
    if isinstance(inputs, StepInputs):
        if labels is not None:
            raise ValueError("labels: given beside inputs that are filled; fill them with these")
        if len(inputs.live) != passes:
            raise ValueError(f"inputs: filled for {len(inputs.live)} passes; allowed here: {passes}")
        return inputs
    if not isinstance(inputs, Mapping):
        inputs = {"input_ids": inputs} if labels is None else {"input_ids": inputs, "labels": labels}
    elif labels is not None:
        raise ValueError("labels: given beside a dict of inputs; put them into it")
    return pack(inputs) if pack else StepInputs(inputs, [{}] * passes)


def dropout_seed(seed: int, step: int, micro: int) -> float:
    """Return the dropout seed of a micro-batch: a hash of `seed`, `step` and `micro`, the micro-batch's number.

    The hash has 48 bits, which a float holds exactly."""
    key = f"{seed} {step} {micro}".encode()
    return float(int.from_bytes(hashlib.blake2b(key, digest_size=6).digest(), "big"))
