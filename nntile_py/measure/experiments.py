"""The figures and tables of papers that `nntile experiment` knows, as the YAMLs of experiments/ describe them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PrivateAttr

from nntile_py.analysis.workloads import Work
from nntile_py.errors import ConfigError
from nntile_py.measure.layout_experiment import LaidOut
from nntile_py.measure.operator_experiment import Counted, Printed
from nntile_py.measure.sweep_spec import check_sweep
from nntile_py.schema import Count, Section, assignment, read_yaml, validated
from nntile_py.system.console_tables import plain_table
from nntile_py.system.folders import installed

if TYPE_CHECKING:
    from rich.console import RenderableType

EXPERIMENTS = installed("experiments")
ROUNDS = 3  # times that a sweep measures all its points, in turns, unless it says otherwise
Mode = Literal["training", "inference"]


class Drawing(Section):
    """What `nntile graph` is to draw."""

    config: str
    set_: dict[str, Any] = Field(default_factory=dict, alias="set")
    work: Work = "train"
    level: Literal["logical", "tiles"] = "logical"
    layer: int | None = None
    phase: Literal["forward", "backward", "update", "all"] = "all"
    fusion: Literal["before", "after", "both"] = "both"


class Profile(Section):
    """What `nntile profile` is to trace."""

    config: str
    set_: dict[str, Any] = Field(default_factory=dict, alias="set")
    work: Literal["train", "inference"] = "train"
    steps: Count = 3


class Experiment(Section):
    """A YAML of experiments/: `cpu` and `gpu` say the same at two sizes; `kind` says what they are."""

    title: str
    shows: str
    paper: str  # what the paper found
    kind: Literal["sweep", "graph", "profile", "analysis", "layouts"]
    rows: list[Printed] = Field(default_factory=list)  # of the paper's table, beside which an analysis stands
    columns: list[str] = Field(default=["seconds", "seconds_min", "tasks"])  # metrics that the report tells
    ratio: str | None = None  # a key: the report tells how many times the first value's time the others take
    cpu: dict[str, Any]
    gpu: dict[str, Any]

    _name: str = PrivateAttr("")

    @property
    def name(self) -> str:
        return self._name

    @property
    def goes_on(self) -> bool:
        """Whether it takes what an interrupted or earlier run has left in its folder."""
        return self.kind in ("sweep", "layouts")

    def part(self, scale: str, mode: Mode | None = None, sets: Sequence[str] = ()) -> Any:
        """The Sweep, Drawing, Profile, Counted or LaidOut of a scale, in a mode other than its own if one is named.

        sets: KEY=VALUE, over the keys that all of it has."""
        path, tree = EXPERIMENTS / f"{self.name}.yaml", getattr(self, scale)
        if mode:
            tree = self._in_mode(tree, mode)
        if self.kind == "sweep":
            return check_sweep({"rounds": ROUNDS} | tree, path, sets)
        cls: Any = {"graph": Drawing, "profile": Profile, "analysis": Counted, "layouts": LaidOut}[self.kind]
        try:
            made = validated(cls, tree, f"{scale}.")
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        made = made.model_copy(update={"set_": made.set_ | dict(map(assignment, sets))})
        if isinstance(made, Counted | LaidOut):
            return made
        return made.model_copy(update={"config": str(path.parent / made.config)})

    def _in_mode(self, tree: dict[str, Any], mode: Mode) -> dict[str, Any]:
        """A whole model's work changes; of a small graph, inference is the forward pass and training all of it."""
        inner = tree.get("measure", {}) if self.kind == "sweep" else tree
        if self.kind in ("analysis", "layouts") or {"measure.work", "measure.phase"} & tree.get("grid", {}).keys():
            raise ConfigError(f"--mode: not allowed with {self.name}, which measures forward and backward by itself")
        if inner.get("work") == "attention":
            raise ConfigError(f"--mode: not allowed with {self.name}, which is a forward pass in any case")
        if inner.get("work", "train") in ("train", "inference"):
            inner = inner | {"work": "train" if mode == "training" else mode}
        else:
            inner = inner | {"phase": "all" if mode == "training" else "forward"}
        if self.kind != "sweep":
            return inner
        if mode == "training" and tree.get("set", {}).get("model.head") == "none":  # there is no loss in it
            tree = tree | {"set": {key: of for key, of in tree["set"].items() if key != "model.head"}}
        plots = [plot | {"title": plot.get("title", "").replace("inference", mode)} for plot in tree.get("plots", [])]
        return tree | {"measure": inner, "plots": plots}


def names() -> list[str]:
    """Of all experiments: the YAMLs that say what they show."""
    return sorted(p.stem for p in EXPERIMENTS.glob("*.yaml") if p.stem.startswith(("bt-", "fig", "table")))


def load_experiment(name: str) -> Experiment:
    if name not in names():
        raise ConfigError(f"NAME: no experiment {name!r}; allowed: {', '.join(names())}")
    path = EXPERIMENTS / f"{name}.yaml"
    try:
        made: Experiment = validated(Experiment, read_yaml(path, "NAME", Experiment))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    made._name = name
    return made


def listing() -> RenderableType:
    shown = plain_table(heads := ("name", "what", "shows"), text=heads)
    for name in names():
        made = load_experiment(name)
        shown.add_row(name, made.title, made.shows)
    return shown
