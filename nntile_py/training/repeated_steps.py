"""Repeat a training step or a forward pass with the same inputs, for measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nntile_py.execution.forward_program import ForwardProgram
from nntile_py.execution.program import Store
from nntile_py.execution.runtime import Runtime
from nntile_py.graph.bin_packing import bins_of
from nntile_py.graph.built_step import Evaluation
from nntile_py.graph.step import StepSpec
from nntile_py.graph.step_inputs import StepInputs
from nntile_py.training.inputs import Inputs, IntArray
from nntile_py.training.trainer import Trainer


def same_steps(trainer: Trainer, inputs: Inputs, labels: IntArray | None = None) -> Callable[[int], list[float]]:
    """Return a function `run(n)` that submits n steps, waits for them and returns their losses.

    All steps have the same inputs and labels, as of Trainer.submit. Sequences are packed once, outside the measured
    time. This is fair: a training run packs while other steps run, and the PyTorch programs in a comparison get
    offsets and masks that were computed before."""
    filled = trainer.filled(inputs, labels)

    def run(count: int) -> list[float]:
        return [pending.result().loss for pending in [trainer.submit(filled) for _ in range(count)]]

    return run


def forward_passes(
    spec: StepSpec, inputs: Mapping[str, Any] | StepInputs, captured: bool | None = None
) -> tuple[Evaluation, Callable[[int], list[float]]]:
    """Return a model's forward pass, and a function `run(n)` that runs the pass n times and returns n losses.

    All runs have the same inputs. Needs a running Runtime.

    Args:
        spec: The model and its sizes. The losses of a model without a loss are 0.
        inputs: Padded arrays, as of spec.random_inputs, or the result of `filled_pass`. They are written into tiles
            once, outside the measured time, as the compared PyTorch programs have their inputs on the device.
        captured: True: run as a CUDA graph. False: never. None: if a graph is possible and faster.
    """
    filled = inputs if isinstance(inputs, StepInputs) else filled_pass(spec, inputs)
    evaluation = spec.with_inputs(filled.arrays).evaluation()
    program = ForwardProgram(evaluation, Store(), tf32=spec.precision == "tf32", captured=captured)
    program.write_weights(spec.model.weights)
    arrays = program.check(filled.arrays, spec.rows, shift=not spec.pack)
    program.write(arrays)
    slots = program.slots(arrays, filled.arrays) | dict(filled.live[0])

    def run(count: int) -> list[float]:
        for _ in range(count):
            program.run(slots)
        Runtime.wait()
        return count * [program.loss()]

    return evaluation, run


def filled_pass(spec: StepSpec, inputs: Mapping[str, Any]) -> StepInputs:
    """Return the inputs of a forward pass as its program takes them: with `spec.pack`, packed into bins."""
    if spec.pack:
        return bins_of(spec, training=False).fill(inputs, 1, spec.batch, shift=True)
    return StepInputs(inputs, [{}])
