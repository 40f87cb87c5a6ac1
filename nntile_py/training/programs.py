"""What a trainer runs: programs of a step and of an evaluation, for each set of inputs that they are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nntile_py import _core
from nntile_py.errors import ConfigError
from nntile_py.execution import memory
from nntile_py.execution.program import Program, Store, programs
from nntile_py.execution.runtime import Runtime
from nntile_py.graph import packed_inputs
from nntile_py.graph.fusion import lacking
from nntile_py.graph.graph import Graph
from nntile_py.graph.params import Input
from nntile_py.graph.step import Evaluation, Step, StepSpec
from nntile_py.tasks.op import Lowering
from nntile_py.tasks.optimizer import INVERSE_SCALE
from nntile_py.tiles import TaskList
from nntile_py.training.inputs import IntArray


@dataclass
class StepPrograms:
    """What runs a step whose arrays are those that were given."""

    built: Step
    first: Program
    more: Program | None
    update: Program


class Programs:
    """Of a spec, on a runtime; each is made when it is first needed. All tiles that last are in `store`."""

    def __init__(self, spec: StepSpec, runtime: Runtime, checked: bool) -> None:
        path, digest = (spec.timings.path, spec.timings.digest()) if spec.timings else ("", "none")
        compiler = "none" if spec.fusion.found and lacking(spec.dtype) else "one"
        needed = "the C++ compiler (with fusion.found: false none is needed)"
        causes = {f"the database of layouts {path}": digest, needed: compiler}
        self.spec, self.store = spec, Store(causes)
        self.steps: dict[frozenset[str], StepPrograms] = {}
        self._runtime, self._checked = runtime, checked
        self._evaluations: dict[tuple[frozenset[str], bool], tuple[Evaluation, Program]] = {}
        self._changed: set[str] = set()  # inputs with a default that a step has given
        self._optional: dict[str, float] = {}  # inputs that a step may have, and what is as good as none
        self._optional_inputs: dict[str, Input | None] = {}
        built = self.of(spec.given).built  # as are those with other inputs, for all that lasts
        searched = spec.timings if not built.refused else None
        self.spec = replace(spec, timings=searched, kept=built.kept if searched else None)

    def of(self, given: frozenset[str]) -> StepPrograms:
        """The programs of steps that have these optional inputs."""
        if given not in self.steps:
            built = self.spec.with_inputs(given).step()
            self._optional |= built.optional
            memory.check_step(built, self._runtime)
            _core.advise(f"the largest tensors are {built.largest()}")
            first, *more, update = self._bound([low.tasks for low in built.lists])
            given_slots = {one.scale for one in built.graph.inputs.values()}
            known = {*given_slots, *self.spec.live_slots(), "lr", "dropout_seed", *self.spec.optimizer.slots(1)}
            known.add(INVERSE_SCALE)
            for name in {*first.slots, *update.slots} - known:
                need = f"declare the input whose values count with scale={name!r}"
                raise ConfigError(f"model: its loss is divided by {name}, which no input gives; {need}")
            self.steps[given] = StepPrograms(built, first, more[0] if more else None, update)
            self._write_defaults(built.graph, built.first)
        return self.steps[given]

    def evaluation(self, made: StepPrograms, keep: bool) -> tuple[Evaluation, Program]:
        """Of what these steps are given. keep: the outputs, too."""
        given = next(names for names, one in self.steps.items() if one is made)
        if (given, keep) not in self._evaluations:
            evaluation = self.spec.with_inputs(given).evaluation(keep)
            (program,) = self._bound([evaluation.forward.tasks])
            self._evaluations[given, keep] = (evaluation, program)
        return self._evaluations[given, keep]

    def check(
        self, given: Mapping[str, Any], rows: int, shift: bool, unlabelled: bool = False
    ) -> tuple[dict[str, IntArray], StepPrograms]:
        """Arrays of the right shapes and ranges, and the programs that take them. shift: labels are to be shifted."""
        optional = {name: one for name in self._optional if name in given and (one := self._optional_input(name))}
        values = {name: one.checked(given[name], rows) for name, one in optional.items()}
        absent = {name for name, value in values.items() if (value == self._optional[name]).all()}
        made = self.of(frozenset(optional) - absent)
        declared, arrays = made.built.graph.inputs, {}
        for name in given:
            if name not in declared and name not in absent:
                known = [*declared, *(n for n in self._optional if n not in declared and self._optional_input(n))]
                raise ValueError(f"{name}: unknown input; allowed are {', '.join(known)}")
        for name, one in declared.items():
            if name in given:
                value = values[name] if name in values else one.checked(given[name], rows)
                arrays[name] = one.shift(value) if one.shifted and shift else value
            elif unlabelled and one.default is None and (one.scale or one.ignored is not None):
                arrays[name] = np.full(one.shape(rows), one.ignored or 0)
            elif (default := one.filled(rows, arrays)) is None:
                mine = {*self._optional, *packed_inputs.OWN}
                needed = [n for n, i in declared.items() if i.default is None and n not in mine]
                raise ValueError(f"{name}: missing; the model needs {', '.join(needed)}")
            elif name in self._changed or one.scale or callable(one.default):
                arrays[name] = default
        self._changed |= {name for name in arrays if declared[name].default is not None}
        return arrays, made

    def _bound(self, lists: Sequence[TaskList]) -> list[Program]:
        return programs(lists, self.store, tf32=self.spec.dtype == "tf32", checked=self._checked)

    def _write_defaults(self, graph: Graph, low: Lowering) -> None:
        """Inputs that are the same at every step unless a step gives them."""
        for one in graph.inputs.values():
            if (value := one.filled(self.spec.rows)) is not None:
                self.store.write(low, one.tensor, value)

    def _optional_input(self, name: str) -> Input | None:
        """An optional input as it is declared, in no program as long as it says nothing; None: it is not declared."""
        if name not in self._optional_inputs:
            self._optional_inputs[name] = self.spec.with_inputs(frozenset({name})).trace()[0].inputs.get(name)
        return self._optional_inputs[name]
