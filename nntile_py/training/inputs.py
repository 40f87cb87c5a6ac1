"""The arguments of a step in their different forms, and the seed of its dropout."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from nntile_py.graph.bin_packing import StepInputs

IntArray = np.ndarray[Any, Any]
Inputs = Mapping[str, Any] | IntArray | StepInputs


def as_dict(inputs: Mapping[str, Any] | IntArray, labels: IntArray | None) -> Mapping[str, Any]:
    """Return the dict of inputs. An array is `input_ids`, with `labels` beside it."""
    if isinstance(inputs, Mapping):
        if labels is not None:
            raise ValueError("labels: given beside a dict of inputs; put them into it")
        return inputs
    return {"input_ids": inputs} if labels is None else {"input_ids": inputs, "labels": labels}


def as_filled(inputs: StepInputs, labels: IntArray | None, passes: int) -> StepInputs:
    """Check that filled inputs are for this many passes; they contain the labels."""
    if labels is not None:
        raise ValueError("labels: given beside inputs that are filled; fill them with these")
    if len(inputs.live) != passes:
        raise ValueError(f"inputs: filled for {len(inputs.live)} passes; allowed here: {passes}")
    return inputs


def dropout_seed(seed: int, step: int, micro: int) -> float:
    """Return a seed for each seed, step and micro-batch; 48 bits, which a float holds exactly."""
    key = f"{seed} {step} {micro}".encode()
    return float(int.from_bytes(hashlib.blake2b(key, digest_size=6).digest(), "big"))
