"""The figures and tables of papers that `nntile experiment` reproduces: YAMLs of experiments/, typed and checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PrivateAttr

from nntile_py.errors import ConfigError
from nntile_py.measure.capacity_experiment import CapacityExperiment
from nntile_py.measure.experiment_parts import ConfigPart, GraphExperiment, ProfileExperiment
from nntile_py.measure.layout_experiment import LayoutExperiment
from nntile_py.measure.operator_experiment import OperatorExperiment, PaperRow
from nntile_py.measure.part_experiments import BreakdownExperiment, FlopExperiment
from nntile_py.measure.selection_experiment import SelectionExperiment, WidthExperiment
from nntile_py.measure.sweep_points import check_sweep
from nntile_py.schema import Section, assignment, read_yaml, validated
from nntile_py.system.console_tables import plain_table
from nntile_py.system.folders import installed

if TYPE_CHECKING:
    from rich.console import RenderableType

EXPERIMENTS = installed("experiments")
ROUNDS = 3  # rounds of a sweep that does not set `rounds`
Mode = Literal["training", "inference"]


KINDS = {
    "graph": GraphExperiment, "profile": ProfileExperiment, "analysis": OperatorExperiment, "layouts": LayoutExperiment,
    "flop": FlopExperiment, "breakdown": BreakdownExperiment, "selection": SelectionExperiment,
    "widths": WidthExperiment, "capacity": CapacityExperiment,
}  # fmt: skip


class Experiment(Section):
    """A YAML of experiments/: `cpu` and `gpu` are sections of one kind at two sizes."""

    title: str
    shows: str
    paper: str  # result in the paper
    kind: Literal[
        "sweep", "graph", "profile", "analysis", "layouts", "flop", "breakdown", "selection", "widths", "capacity"
    ]
    rows: list[PaperRow] = Field(default_factory=list)  # the paper's table, for the kind `analysis`
    columns: list[str] = Field(default=["seconds", "seconds_min", "tasks"])  # metrics in the report
    ratio: str | None = None  # a key: the report divides the times of its other values by the first value's time
    cpu: dict[str, Any]
    gpu: dict[str, Any]

    _name: str = PrivateAttr("")

    @property
    def name(self) -> str:
        return self._name

    @property
    def goes_on(self) -> bool:
        """Whether an interrupted run continues from the files in its folder."""
        return self.kind in ("sweep", "layouts", "selection")

    def part(self, scale: str, mode: Mode | None = None, sets: Sequence[str] = ()) -> Any:
        """Return the section of a scale, cpu or gpu, checked: a Sweep or an ExperimentPart.

        Args:
            mode: replaces the experiment's own mode.
            sets: KEY=VALUE; they override the section's `set`.
        """
        path, tree = EXPERIMENTS / f"{self.name}.yaml", getattr(self, scale)
        if mode:
            tree = self._in_mode(tree, mode)
        if self.kind == "sweep":
            return check_sweep({"rounds": ROUNDS} | tree, path, sets)
        cls: Any = KINDS[self.kind]
        try:
            part = validated(cls, tree, f"{scale}.")
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        changed = {"set_": part.set_ | dict(map(assignment, sets))}
        changed |= {"config": str(path.parent / part.config)} if isinstance(part, ConfigPart) else {}
        return part.model_copy(update=changed)

    def _in_mode(self, tree: dict[str, Any], mode: Mode) -> dict[str, Any]:
        """Return the section in another mode: with another `work` for a model, another `phase` for a small graph."""
        inner = tree.get("measure", {}) if self.kind == "sweep" else tree
        both = {"measure.work", "measure.phase"} & tree.get("grid", {}).keys()
        reasons = {
            "trains": self.kind == "capacity",
            "is about forward passes only": self.kind in ("flop", "breakdown", "selection"),
            "measures forward and backward separately": self.kind in ("analysis", "layouts", "widths") or both,
            "measures forward passes only": inner.get("work") == "attention",
        }
        for reason in (reason for reason, holds in reasons.items() if holds):
            raise ConfigError(f"--mode: got {mode} with {self.name}, which {reason}; allowed: no --mode")
        if inner.get("work", "train") in ("train", "inference"):
            inner = inner | {"work": "train" if mode == "training" else mode}
        else:
            inner = inner | {"phase": "all" if mode == "training" else "forward"}
        if self.kind != "sweep":
            return inner
        if mode == "training" and tree.get("set", {}).get("model.head") == "none":  # a model without a loss
            tree = tree | {"set": {key: of for key, of in tree["set"].items() if key != "model.head"}}
        plots = [plot | {"title": plot.get("title", "").replace("inference", mode)} for plot in tree.get("plots", [])]
        return tree | {"measure": inner, "plots": plots}


def names() -> list[str]:
    """Return the names of all experiments, sorted."""
    return sorted(p.stem for p in EXPERIMENTS.glob("*.yaml") if p.stem.startswith(("bt-", "fig", "table")))


def load_experiment(name: str) -> Experiment:
    if name not in names():
        raise ConfigError(f"NAME: no experiment {name!r}; allowed: {', '.join(names())}")
    path = EXPERIMENTS / f"{name}.yaml"
    try:
        experiment: Experiment = validated(Experiment, read_yaml(path, "NAME", Experiment))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    experiment._name = name
    return experiment


def listing() -> RenderableType:
    table = plain_table(heads := ("name", "what", "shows"), text=heads)
    for name in names():
        experiment = load_experiment(name)
        table.add_row(name, experiment.title, experiment.shows)
    return table
