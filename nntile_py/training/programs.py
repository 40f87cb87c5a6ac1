"""Programs of a trainer: bound task lists of training steps and evaluations.

Each set of optional inputs that a user passes has programs of its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nntile_py import _core
from nntile_py.errors import ConfigError
from nntile_py.execution import memory_checks
from nntile_py.execution.cuda_graph import TrainingProgram, training_programs
from nntile_py.execution.forward_program import ForwardProgram, check_inputs
from nntile_py.execution.program import Store, programs
from nntile_py.execution.runtime import Runtime
from nntile_py.graph import packed_inputs
from nntile_py.graph.built_step import Step
from nntile_py.graph.fusion import lacking
from nntile_py.graph.graph import Graph
from nntile_py.graph.params import Input
from nntile_py.graph.step import TILE_DTYPE, StepSpec
from nntile_py.tasks.op import Lowering
from nntile_py.tasks.optimizer import INVERSE_SCALE
from nntile_py.tiles import TaskList
from nntile_py.tiles.worker_kinds import check_patterns
from nntile_py.training.inputs import IntArray


@dataclass
class StepPrograms:
    """Programs of a training step for one set of optional inputs.

    Attributes:
        built: Graphs and task lists of the step.
        first: Forward and backward pass of the first micro-batch.
        more: Forward and backward pass of each further micro-batch, which add to the gradients. None: one micro-batch.
        update: Update of the weights.
    """

    built: Step
    first: TrainingProgram
    more: TrainingProgram | None
    update: TrainingProgram

    def of_pass(self, micro: int) -> tuple[TrainingProgram, Lowering]:
        """Return the program and the lowering of the forward and backward pass of a micro-batch, by its number."""
        if micro and self.more and self.built.more:
            return self.more, self.built.more
        return self.first, self.built.first


class Programs:
    """Builds a trainer's programs when they are first needed.

    Args:
        spec: The training step.
        runtime: The running Runtime.
        checked: The programs check all values that tasks write for nan and infinity.

    Attributes:
        store: The persistent tiles, which all programs share.
        steps: {names of the optional inputs of a step: programs of the step}, as far as they are built.
    """

    def __init__(self, spec: StepSpec, runtime: Runtime, checked: bool) -> None:
        path, digest = (spec.timings.path, spec.timings.digest()) if spec.timings else ("", "none")
        compiler = "none" if spec.fusion.found and lacking(TILE_DTYPE[spec.precision]) else "one"
        needed = "the C++ compiler (with fusion.found: false none is needed)"
        causes = {f"the database of layouts {path}": digest, needed: compiler}
        self.spec, self.store = spec, Store(causes)
        self.steps: dict[frozenset[str], StepPrograms] = {}
        self._runtime, self._checked = runtime, checked
        self._evaluations: dict[tuple[frozenset[str], bool], ForwardProgram] = {}
        self._changed: set[str] = set()  # inputs whose tiles no longer hold the default value
        self._optional: dict[str, float] = {}  # for each optional input, the value that has no effect
        self._optional_inputs: dict[str, Input] = {}  # declarations of the optional inputs that the model uses
        built = self.of(spec.given).built  # these programs fix the layouts of the weights
        searched = spec.timings if not built.refused else None
        self.spec = replace(spec, timings=searched, kept=built.kept if searched else None)

    def of(self, given: frozenset[str]) -> StepPrograms:
        """Return the programs of a step with the optional inputs named in `given`; build them at the first call."""
        if given not in self.steps:
            built = self.spec.with_inputs(given).step()
            self._optional |= built.optional
            memory_checks.check_step(built, self._runtime)
            settings = f". Or use {', or '.join(built.memory_settings)}" if built.memory_settings else ""
            _core.advise(f"the largest tensors are {built.largest()}{settings}")
            lists = [lowering.tasks for lowering in built.lists]
            check_patterns(lists, self._runtime.on_cpu)
            first, *more, update = self._bound(lists, built.order(self.spec.grad_accumulation))
            given_slots = {one.scale for one in built.graph.inputs.values()}
            known = {*given_slots, *self.spec.live_slots(), "dropout_seed", INVERSE_SCALE}
            known |= built.learning_rates(1.0).keys() | self.spec.optimizer.slots(1).keys()
            for name in {*first.slots, *update.slots} - known:
                need = f"declare the input whose values count with scale={name!r}"
                raise ConfigError(f"model: its loss is divided by {name}, which no input gives; {need}")
            self._write_defaults(built.graph, built.first)
            self.steps[given] = StepPrograms(built, first, more[0] if more else None, update)
        return self.steps[given]

    def evaluation(self, step: StepPrograms, keep: bool) -> ForwardProgram:
        """Return the evaluation program that has the inputs of `step`; build it at the first call.

        keep: the model's outputs stay in memory, so that they can be read."""
        given = next(names for names, known in self.steps.items() if known is step)
        if (given, keep) not in self._evaluations:
            evaluation, tf32 = self.spec.with_inputs(given).evaluation(keep), self.spec.precision == "tf32"
            program = ForwardProgram(evaluation, self.store, tf32=tf32, checked=self._checked)
            self._write_defaults(evaluation.graph, evaluation.forward, step.built.graph.inputs)
            self._evaluations[given, keep] = program
        return self._evaluations[given, keep]

    def check(
        self, given: Mapping[str, Any], rows: int, shift: bool, keep: bool | None = None
    ) -> tuple[dict[str, IntArray], StepPrograms]:
        """Check a user's inputs. Returns the arrays to write into tiles, and the programs that read these tiles.

        Args:
            given: The user's arrays by name.
            rows: Rows of the batch.
            shift: Labels are at the positions of the inputs; shift them.
            keep: As of `evaluation`; labels may be missing if the outputs are kept. None: the inputs are a step's.

        Raises:
            ValueError: An input is missing, unknown, or has the wrong shape, dtype or values.
        """
        optional = {name: one for name in self._optional if name in given and (one := self._optional_input(name))}
        values = {name: one.checked(given[name], rows) for name, one in optional.items()}
        absent = {name for name, value in values.items() if (value == self._optional[name]).all()}
        step = self.of(frozenset(optional) - absent)
        declared = step.built.graph.inputs
        # A captured module may have other inputs in its evaluation mode, such as the mask of another kind of attention.
        evaluated = {} if keep is None else self.evaluation(step, keep).inputs
        derived = {name: one for name, one in evaluated.items() if name not in declared}
        for name in given:
            if name not in declared and name not in absent:
                known = [*declared, *(n for n in self._optional if n not in declared and self._optional_input(n))]
                raise ValueError(f"{name}: unknown input; allowed: {', '.join(known)}")
        own = {*self._optional, *packed_inputs.OWN}
        declared = {**declared, **derived}
        arrays = check_inputs(declared, {**given, **values}, rows, shift=shift, unlabelled=bool(keep), own=own)
        self._changed |= {name for name in arrays if name in given and declared[name].default is not None}
        unchanged = {name for name in arrays if name not in given and self._keeps_default(name, declared[name])}
        return {name: value for name, value in arrays.items() if name not in unchanged}, step

    def _keeps_default(self, name: str, one: Input) -> bool:
        """Return True if the tiles of an input still hold the default value that `of` has written."""
        return not (one.default is None or name in self._changed or one.scale or callable(one.default))

    def _bound(self, lists: Sequence[TaskList], order: Sequence[int]) -> list[TrainingProgram]:
        spec, checked = self.spec, self._checked
        how: dict[str, Any] = {"tf32": spec.precision == "tf32", "offload": spec.offload, "order": order}
        made = programs(lists, self.store, checked=checked, **how)
        return training_programs(made, self.store, captured=spec.captured, checked=checked)

    def let_go(self) -> None:
        """Wait for all tasks, then free the memory of all CUDA graphs."""
        for step in self.steps.values():
            for program in (step.first, step.more, step.update):
                if program:
                    program.let_go()

    def _write_defaults(self, graph: Graph, lowering: Lowering, written: Collection[str] = ()) -> None:
        """Write the default values of inputs into their tiles. A default stays until a step passes another value.

        written: Names of inputs whose tiles have their values already.
        """
        for name, one in graph.inputs.items():
            if name not in written and (value := one.filled(self.spec.rows)) is not None:
                self.store.write(lowering, one.tensor, value)

    def _optional_input(self, name: str) -> Input | None:
        """Return the declaration of an optional input; None if the model does not declare it."""
        if not self._optional_inputs:
            self._optional_inputs = self.spec.with_inputs(self._optional).trace()[0].inputs
        return self._optional_inputs.get(name)
