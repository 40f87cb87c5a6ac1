"""What a step is given, as transformers names it, and the means that its values count towards."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from nntile_py.graph.bin_packing import StepInputs
from nntile_py.graph.params import Input

IntArray = np.ndarray[Any, Any]
Inputs = Mapping[str, Any] | IntArray | StepInputs


def as_dict(inputs: Mapping[str, Any] | IntArray, labels: IntArray | None) -> Mapping[str, Any]:
    """input_ids alone, with labels beside it, as the dict of both."""
    if isinstance(inputs, Mapping):
        if labels is not None:
            raise ValueError("labels: given beside a dict of inputs; put them into it")
        return inputs
    return {"input_ids": inputs} if labels is None else {"input_ids": inputs, "labels": labels}


def as_filled(inputs: StepInputs, labels: IntArray | None, passes: int) -> StepInputs:
    """Inputs that are filled, where they are for so many passes; labels are among them."""
    if labels is not None:
        raise ValueError("labels: given beside inputs that are filled; fill them with these")
    if len(inputs.live) != passes:
        raise ValueError(f"inputs: filled for {len(inputs.live)} passes; allowed here: {passes}")
    return inputs


def counted(declared: Mapping[str, Input], arrays: Mapping[str, IntArray], given: Mapping[str, Any]) -> dict[str, int]:
    """How many values count towards each mean, by its slot; none of labels that were left out."""
    scaled = {name: one for name, one in declared.items() if one.scale}
    there = {name for name, one in scaled.items() if name in given or one.default is not None}
    return {str(one.scale): one.counted(arrays[name]) if name in there else 0 for name, one in scaled.items()}


def means(numbers: Mapping[str, int], scale: float = 1.0) -> dict[str, float]:
    """The slots that make means of sums; scale: of these."""
    return {slot: scale / max(count, 1) for slot, count in numbers.items()}


def dropout_seed(seed: int, step: int, micro: int) -> float:
    """Another one for each seed, step and micro-batch; 48 bits, which a float argument holds exactly."""
    key = f"{seed} {step} {micro}".encode()
    return float(int.from_bytes(hashlib.blake2b(key, digest_size=6).digest(), "big"))
