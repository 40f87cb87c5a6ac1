"""A forward pass that runs on StarPU: it takes checked inputs and slots, and returns outputs by name."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any

import numpy as np

from nntile_py import _core
from nntile_py.execution.cuda_graph import Served
from nntile_py.execution.host_copy import HostCopy, assembled
from nntile_py.execution.program import Store
from nntile_py.graph.built_step import Evaluation
from nntile_py.graph.params import Array, Input

LOSS = ("scalar", "loss", (0,))  # key of the loss's tile


class MissingInput(ValueError):
    """An input has neither a value nor a default."""

    def __init__(self, name: str, needed: Iterable[str]) -> None:
        self.needed = list(needed)
        super().__init__(f"{name}: missing; the model needs {', '.join(self.needed)}")


def check_inputs(
    declared: Mapping[str, Input], given: Mapping[str, Any], rows: int, *, shift: bool = False,
    unlabelled: bool = False, own: Collection[str] = (),
) -> dict[str, Array]:  # fmt: skip
    """Check the arrays of a program's inputs. Return {input: array} for all inputs, with defaults filled in.

    Args:
        declared: The program's inputs.
        given: Arrays by name.
        rows: Number of rows of the batch.
        shift: True: labels of a causal model are not shifted yet, and are shifted here.
        unlabelled: True: labels may be missing. Missing labels count in no mean.
        own: Inputs that the engine provides, which error messages leave out.

    Raises:
        MissingInput: An input has neither a value nor a default.
        ValueError: An array has the wrong shape, dtype or values.
    """
    arrays = dict(given)  # a default may derive from an array that is not an input itself
    for name, declaration in declared.items():
        if name in given:
            value = declaration.checked(given[name], rows)
            arrays[name] = declaration.shift(value) if declaration.shifted and shift else value
        elif unlabelled and declaration.default is None and is_label(declaration):
            arrays[name] = np.full(declaration.shape(rows), declaration.ignored or 0)
        elif (default := declaration.filled(rows, arrays)) is not None:
            arrays[name] = default
        else:
            raise MissingInput(name, (n for n, i in declared.items() if i.default is None and n not in own))
    return {name: arrays[name] for name in declared}


def is_label(declaration: Input) -> bool:
    """Return True if an input affects only the loss."""
    return bool(declaration.scale) or declaration.ignored is not None


def label_counts(declared: Mapping[str, Input], arrays: Mapping[str, Array], given: Collection[str]) -> dict[str, int]:
    """Return, for each slot that scales a loss, the number of labels over which the loss is averaged.

    The number is 0 for labels that are not in `given` and have no default.
    """
    scaled = {name: one for name, one in declared.items() if one.scale}
    present = {name for name, one in scaled.items() if name in given or one.default is not None}
    return {str(one.scale): one.counted(arrays[name]) if name in present else 0 for name, one in scaled.items()}


def mean_slots(declared: Mapping[str, Input], counts: Mapping[str, int], scale: float = 1.0) -> dict[str, float]:
    """Return {slot: weight * scale / number of labels}: factors that turn sums of losses into means times `scale`."""
    weights = {one.scale: one.weight for one in declared.values()}
    return {slot: weights[slot] * scale / max(count, 1) for slot, count in counts.items()}


class ForwardProgram:
    """A forward pass that runs on StarPU. It needs a running Runtime.

    Inputs, weights and outputs are persistent tiles: an input keeps its value until `write` replaces the value, and a
    tensor that the program updates keeps its value between runs. Slots are numbers that `run` takes at each submission.

        arrays = program.check(given)          # validate, fill in defaults
        program.write(arrays)                  # asynchronous
        program.run(program.slots(arrays, given) | {"length": 17.0})
        logits = program.read("logits")        # waits

    Args:
        evaluation: The pass, as StepSpec.evaluation or StepSpec.outputs returns it.
        store: Holds the persistent tiles. Programs that share weights share a store, or its handles.
        tf32: CUDA may round fp32 products to tf32.
        captured: Whether to run the pass as a CUDA graph; see Served.
        checked: Check that the values that tasks write are finite.
    """

    def __init__(
        self, evaluation: Evaluation, store: Store, *, tf32: bool = False, captured: bool | None = False,
        checked: bool = False,
    ) -> None:  # fmt: skip
        self.evaluation, self.store = evaluation, store
        self.inputs, self.outputs = evaluation.graph.inputs, evaluation.outputs
        self._lowering = evaluation.forward
        self._has_loss = any(a.tile.key == LOSS for task in self._lowering.tasks.tasks for a in task.accesses)
        self.served = Served(evaluation.forward.tasks, store, tf32=tf32, captured=captured, checked=checked)

    @property
    def slot_names(self) -> list[str]:
        """Names of the slots whose values `run` takes."""
        return self.served.slots

    def write_weights(self, weights: Any) -> None:
        """Write the weights of a model, {name: array}, into their tiles."""
        for param in self.evaluation.params:
            self.store.write(self._lowering, param.tensor, param.weight(weights))

    def input_tiles(self) -> dict[Hashable, _core.Tile]:
        """Return {key: handle} of the tiles of the program's inputs, for a program that shares them."""
        grids = (self._lowering.grid(one.tensor) for one in self.inputs.values())
        return {tile.key: self.store.handle(tile) for grid in grids for _, tile in grid}

    def check(
        self, given: Mapping[str, Any], rows: int | None = None, *, shift: bool = False, unlabelled: bool = False
    ) -> dict[str, Array]:
        """Check input arrays and fill in defaults, see check_inputs. rows: None: the program's number of rows."""
        if rows is None:
            rows = next((one.tensor.shape[0] for one in self.inputs.values() if one.batched), 1)
        return check_inputs(self.inputs, given, rows, shift=shift, unlabelled=unlabelled)

    def write(self, arrays: Mapping[str, Array]) -> None:
        """Write inputs into their tiles, after the tasks submitted so far, without waiting.

        Arrays that are no inputs of this program are skipped.
        """
        for name, value in arrays.items():
            if name in self.inputs:
                self.store.write_input(self._lowering, self.inputs[name].tensor, value)

    def slots(self, arrays: Mapping[str, Array], given: Collection[str]) -> dict[str, float]:
        """Return the values of the slots that turn the sums in the loss into means over the labels in `given`."""
        return mean_slots(self.inputs, label_counts(self.inputs, arrays, given))

    def run(self, slots: Mapping[str, float]) -> None:
        """Submit the tasks of the pass with these values of the slots, and return at once."""
        self.served.run(slots)

    def loss(self) -> float:
        """Wait for the loss and return it; 0 for a model without a loss."""
        return float(self.store.fetch("loss").wait()[0]) if self._has_loss else 0.0

    def read(self, name: str) -> Array:
        """Wait for an output and return it. All ranks call it and get the same array."""
        return self.store.read(self._lowering, self.outputs[name])

    def start_copy(self, name: str) -> HostCopy:
        """Start to copy an output of the last submitted pass. Later passes may run meanwhile."""
        return self.store.copy(tile for _, tile in self._lowering.grid(self.outputs[name]))

    def finish_copy(self, name: str, copied: HostCopy) -> Array:
        """Wait for a copy that `start_copy` began, and return the output. Raises TaskError if a task failed."""
        copied.wait()
        tensor = self.outputs[name]
        grid = self._lowering.grid(tensor)
        return assembled(tensor, [(where, copied.array(number)) for number, (where, _) in enumerate(grid)])
