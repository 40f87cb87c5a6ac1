"""The arguments of a step in their different forms, and the seed of its dropout."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nntile_py.graph.bin_packing import StepInputs

IntArray = np.ndarray[Any, Any]
Inputs = Mapping[str, Any] | IntArray | StepInputs


def as_step_inputs(
    inputs: Inputs, labels: IntArray | None, passes: int, pack: Callable[[Mapping[str, Any]], StepInputs] | None
) -> StepInputs:
    """Return the inputs of `passes` passes; an array is `input_ids`. pack: packs sequences into bins."""
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
    """Return a seed for each seed, step and micro-batch; 48 bits, which a float holds exactly."""
    key = f"{seed} {step} {micro}".encode()
    return float(int.from_bytes(hashlib.blake2b(key, digest_size=6).digest(), "big"))
