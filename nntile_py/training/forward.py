"""Forward passes to be timed: of sequences of any lengths, padded or packed, with no more than they need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nntile_py.execution.cuda_graph import Served
from nntile_py.execution.program import Store
from nntile_py.execution.runtime import Runtime
from nntile_py.graph.bin_packing import StepInputs, bins_of
from nntile_py.graph.step import Evaluation, StepSpec
from nntile_py.training.inputs import counted, means

Array = np.ndarray[Any, Any]


def forward_passes(
    spec: StepSpec, inputs: Mapping[str, Array], captured: bool | None = None
) -> tuple[Evaluation, Callable[[int], list[float]]]:
    """The pass, and what runs it n times; needs a running Runtime. Of a model without a loss the losses are 0.

    inputs: padded, as `spec.random_inputs` gives them. captured: see Served."""
    filled = StepInputs(inputs, [{}])
    if spec.pack:
        filled = bins_of(spec, training=False).fill(inputs, 1, spec.batch, shift=True)
    made = spec.with_inputs(filled.arrays).evaluation()
    low, declared, store, arrays = made.forward, made.graph.inputs, Store(), dict[str, Array]()
    program = Served(low.tasks, store, tf32=spec.dtype == "tf32", captured=captured)
    for param in made.params:
        store.write(low, param.tensor, param.weight(spec.model.weights))
    for name, one in declared.items():  # written once: PyTorch's too lie where they are needed
        if name in filled.arrays:
            value = one.checked(filled.arrays[name], spec.rows)
            arrays[name] = one.shift(value) if one.shifted and not spec.pack else value
        else:
            default = one.filled(spec.rows, arrays)
            assert default is not None, name  # random inputs leave out what has one
            arrays[name] = default
        store.write(low, one.tensor, arrays[name])
    slots = means(counted(declared, arrays, filled.arrays)) | dict(filled.live[0])

    def run(count: int) -> list[float]:
        for _ in range(count):
            program.run(slots)
        Runtime.wait()
        has_loss = ("scalar", "loss", (0,)) in store.handles
        return count * (store.fetch("loss").wait() if has_loss else [0.0])

    return made, run
