"""The sections of a sweep's YAML."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from nntile_py.analysis.workloads import FORWARD, Phase, Work
from nntile_py.errors import ConfigError
from nntile_py.measure.contestants import BERT_PEERS, LAYER_WORKS, OURS, PEERS, Peer
from nntile_py.schema import (
    Count,
    Natural,
    Part,
    Positive,
    Section,
    Size,
    Switch,
    allowed,
)
from nntile_py.tasks.op import CATEGORIES

Values = dict[str, list[Any]]
VARIANT = "variant"  # key of a point that names one of `variants`
_ALWAYS = ["seconds", "tasks", "flop", "bytes_moved", "peak_bytes", "parallelism", "planned_task_us", "took", "load"]
_UNITS = ("seconds", "flop", "% seconds", "% flop")
PEER_METRICS = ("seconds", "ms", "tokens_per_s", "peak_mib", "ratio", "ratio_min", "ratio_max")  # after a peer's name
_TIMED = ["tokens", "host_mib", "seconds_min", "seconds_max", "ms", "us", "best ms", "best us", "us_per_task", "others"]
METRICS = {  # names of the metrics that worker.py returns, by measure.how
    "plan": _ALWAYS,
    "run": [*_ALWAYS, *_TIMED, "tokens_per_s", "gflop_per_s", "peak_mib"],
    "operators": [*_ALWAYS, *(f"{of.name} {unit}" for of in CATEGORIES for unit in _UNITS)],
    "nodes": [  # how: plan with measure.nodes
        "seconds", "tasks", "peak_bytes", "took", "load", "tokens_per_s", "efficiency", "worker_efficiency", "gpus",
        "own_seconds", "computed_seconds", "exposed_seconds", "update_seconds", "busy", "adding", "card", "thread",
        "inside_bytes", "between_bytes", "messages",
    ],
}  # fmt: skip


def _full(values: Values | None) -> Values | None:
    if values is not None and not (values and all(values.values())):
        raise ValueError("keys of a config, each with a list of at least one value")
    return values


class Measure(Section):
    """What a point measures. It measures `repeats` times; each time covers `steps` steps, which are submitted
    together."""

    work: Work = "train"
    """A training step, a forward pass, or a part of a model, as `nntile graph --work` names them."""
    phase: Phase = "all"
    """The phase of a part of a model: forward, backward or both."""
    how: Literal["run", "plan", "operators"] = "run"
    """`run`: measure. `plan`: plan without a run. `operators`: time each operator by itself; sum the times by class."""
    contestant: Literal["nntile", "torch_eager", "torch_compile", "torch_graphs", "torch_packed", "torch_padded"] = (
        "nntile"
    )
    """The program that runs a training step or a forward pass, in processes of its own: nntile_py, or PyTorch (eager or
    torch.compile) with transformers' model on padded sequences with a mask. For `encoder` and `mha` PyTorch runs layers
    of torch.nn. `torch_graphs`, `torch_packed` and `torch_padded`: see `nntile bench step --peer`."""
    peers: list[Peer] = Field(default_factory=list)
    """Programs that are timed in turns with nntile_py's training step or forward pass, as in `nntile bench step`, with
    `repeats` turns. Metrics of a peer begin with its name: `torch_compile ratio` is the time of nntile_py divided by
    the time of torch_compile."""
    gpu_memory: Size | None = None
    """Bytes of each GPU that a contestant may use; nntile_py reserves 1 GiB of them for kernels' workspaces. Null: no
    bound; tiles of nntile_py take runtime.cuda_memory."""
    alpha: Part = 1.0
    """Mean length of the sequences divided by train.seq, for training steps and forward passes."""
    captured: Switch | None = None
    """Run forward passes and small graphs, such as `encoder`, on one GPU as a CUDA graph. Null: if that is faster. For
    `encoder` and `mha` of torch_compile: true runs each phase as one CUDA graph, null runs single kernels."""
    autotune: Switch = False
    """Use torch.compile's mode max-autotune, for `encoder` and `mha` by torch_compile; CUDA graphs need `captured`."""
    stacked: Switch = False
    """For PyTorch's `encoder` and `mha`: compute Q, K and V as one product and call scaled_dot_product_attention,
    instead of layers of torch.nn."""
    warmup: Natural = 1
    """Steps before the first measured time."""
    steps: Count = 1
    """Steps that are submitted together and measured as one time."""
    repeats: Count = 3
    """Number of measured times."""
    nodes: Count | None = None
    """Simulate a training step on this many machines, as `nntile plan --nodes` does; needs `how: plan`."""
    gpus_per_node: Count | None = None
    """With `nodes`: GPUs of each machine; null: runtime.cuda."""
    network: str | None = None
    """With `nodes`: rate of a network card in each direction, such as 400Gb/s. Null: 400Gb/s, for CPU nodes 40Gb/s."""
    gpus_per_nic: Count | None = None
    """With `nodes`: GPUs that share a network card; null: 1."""
    strong: Switch = False
    """With `nodes`: the efficiency compares with one node, and one GPU, that computes the whole batch instead of its
    part."""

    @model_validator(mode="after")
    def _what_pytorch_runs(self) -> Measure:
        """Check keys that do not go together."""
        ours, run, train = self.contestant == OURS, self.how == "run", self.work == "train"
        works = ("train", *FORWARD, *LAYER_WORKS)
        layer = self.work in LAYER_WORKS and not ours
        compiled = layer and self.contestant == "torch_compile"
        no_layer = "false where {} runs no encoder or mha"
        # A key, whether its value is refused, and what is allowed.
        for key, refused, need in (
            ("peers", self.peers and not (ours and run),
             "none where measure.how is not run or measure.contestant not nntile"),
            ("work", (self.peers or self.contestant in BERT_PEERS) and self.work not in ("train", "inference"),
             "train or inference with these contestants"),
            ("contestant", not ours and not (run and self.work in works),
             f"nntile, where measure.how is not run or measure.work is none of {', '.join(works)}"),
            ("captured", self.captured is not None and not (ours and run and not train) and not compiled,
             "null where measure.work is train, measure.how not run, or measure.contestant not nntile"),
            ("autotune", self.autotune and not compiled, no_layer.format("torch_compile")),
            ("stacked", self.stacked and not layer, no_layer.format("PyTorch")),
            ("nodes", self.nodes is not None and (self.how != "plan" or not train),
             "null where measure.how is not plan or measure.work not train"),
            ("phase", self.phase == "backward" and self.work in FORWARD,
             f"all or forward, as {self.work} has no other"),
        ):  # fmt: skip
            if refused:
                value = getattr(self, key)
                value = ", ".join(value) if isinstance(value, list) else value
                value = str(value).lower() if isinstance(value, bool) else value
                raise ConfigError(f"measure.{key}: got {value}; allowed: {need}")
        return self


class Random(Section):
    """Random points of the grid that `over` defines, each at most once."""

    count: Count
    """Number of points."""
    seed: Natural = 0
    """Seed of the random choice."""
    over: Values
    """Keys of the config, each with the list of its values."""

    _values = field_validator("over")(_full)


class Plot(Section):
    """y over x: a line or bars for each value of `series`, a panel for each of `panel`; `heat`: y as colour."""

    kind: Literal["line", "bar", "heat"] = "line"
    """Kind of plot."""
    x: str
    """A key that points set, or a column of results.csv."""
    y: str | list[str] = "seconds"
    """A column of results.csv, or a list of columns with a line or bar for each."""
    series: str | None = None
    """A key: each of its values gets a line or a bar."""
    panel: str | None = None
    """A key: each of its values gets a panel."""
    title: str = ""
    """Title above the plot."""
    xlabel: str | None = None
    """Label of the x axis; null: derived from `x`."""
    ylabel: str | None = None
    """Label of the y axis; null: derived from `y`."""
    log: Switch = False
    """The x axis is logarithmic, to base 2."""
    ylog: Switch = False
    """The y axis is logarithmic, to base 10, and does not start at 0."""
    same: Switch = True
    """All panels have the same y axis."""

    @property
    def metrics(self) -> list[str]:
        return [self.y] if isinstance(self.y, str) else self.y

    @model_validator(mode="after")
    def _second_axis(self) -> Plot:
        if self.kind == "heat" and self.series is None:
            raise ConfigError("plots: a heat map needs `series`, the key of its vertical axis")
        return self


class Best(Section):
    """The point that is reported as the best."""

    metric: str = "seconds"
    """A column of results.csv."""
    of: Literal["least", "greatest"] = "least"
    """Whether the smallest or the largest value is the best."""


class Sweep(Section):
    """A sweep's YAML: the base config, keys that `set` changes, and the points."""

    config: str
    """YAML of a run: the settings of all points. The path is relative to this file."""
    set_: dict[str, Any] = Field(default_factory=dict, alias="set")
    """Keys of the run with values for all points, such as `runtime.cpus: 2`."""
    grid: Values | None = None
    """Keys, each with a list of values. Every combination of values is a point."""
    list_: list[dict[str, Any]] | None = Field(None, alias="list")
    """Points, each a mapping of keys to values. With `grid` too: each point of the list with each point of the grid."""
    random_: Random | None = Field(None, alias="random")
    """Random points of a grid, instead of a grid or a list."""
    variants: dict[str, dict[str, Any]] | None = None
    """Named settings: keys of the config, or of `measure` as measure.KEY. Every point is measured with each variant. In
    plots and tables the key `variant` has the name."""
    measure: Measure = Measure()
    rounds: Count = 1
    """Rounds, each of which measures all points in turns, so that load of the machine affects all points alike."""
    time_limit: Positive = 600.0
    """Largest number of seconds of a point in a round; with peers: of a contestant's start, and of each turn."""
    together: Switch = False
    """Points with the same `runtime` share a process, since starting a GPU takes longer than a measurement."""
    best: Best = Best()
    plots: list[Plot] = Field(default_factory=list)
    """Pictures, a list of sections with these keys."""

    _values = field_validator("grid")(_full)

    @model_validator(mode="after")
    def _some(self) -> Sweep:
        if not (self.grid or self.list_ or self.random_) or (self.random_ and (self.grid or self.list_)):
            raise ConfigError("grid, list, random: allowed: a grid, a list, both (their product), or random")
        own = {key for keys in (self.variants or {}).values() for key in keys}
        if twice := own & {key for keys in (self.grid, *(self.list_ or [])) for key in keys or ()}:
            raise ConfigError(f"variants: {min(twice)} is set by the grid or list, too; allowed: in one of them")
        parts = {"set_", "grid", "list_", "random_", "variants"}
        for name, values in self.model_dump(by_alias=True, include=parts).items():
            try:
                json.dumps(values, sort_keys=True)
            except (TypeError, ValueError) as error:  # YAML has dates, too
                raise ConfigError(f"{name}: {error}; allowed: numbers, texts, lists, mappings") from None
        return self

    def varied(self) -> dict[str, str]:
        """Return the keys that points set, with the section that sets each key."""
        over = [(key, "random") for key in self.random_.over] if self.random_ else []
        over += [(key, "variants") for keys in (self.variants or {}).values() for key in keys]
        over += [(VARIANT, "variants")] if self.variants else []
        return dict(
            [*over, *((k, "list") for e in self.list_ or [] for k in e), *((k, "grid") for k in self.grid or {})]
        )

    def metrics(self) -> list[str]:
        """Return the metrics that rows can have."""
        tables = [self.grid or {}, self.random_.over if self.random_ else {}]
        hows = [self.measure.how, *(how for values in tables for how in values.get("measure.how", []))]
        hows += [entry["measure.how"] for entry in self.list_ or [] if "measure.how" in entry]
        hows += ["nodes"] if self.measure.nodes or "measure.nodes" in self.varied() else []
        peers = [f"{peer} {metric}" for peer in PEERS for metric in PEER_METRICS] if self.has_peers else []
        return list(dict.fromkeys([*(metric for how in hows for metric in METRICS.get(how, [])), *peers]))

    @property
    def has_peers(self) -> bool:
        """Whether some points are timed in turns with peers."""
        return bool(self.measure.peers) or "measure.peers" in self.varied()

    def check_names(self) -> None:
        """Raise ConfigError for metrics and keys that no row will have, before any measurement."""
        metrics = self.metrics()
        keys = [*self.varied(), *self.set_, *metrics]
        wanted = [("best.metric", self.best.metric, metrics)]
        for number, plot in enumerate(self.plots):
            axes = {name: getattr(plot, name) for name in ("x", "series", "panel")}
            wanted += [(f"plots.{number}.{name}", of, keys) for name, of in axes.items() if of is not None]
            wanted += [(f"plots.{number}.y", y, metrics) for y in plot.metrics]
        for name, of, known in wanted:
            if of not in known:
                what = "a metric of this measure" if known is metrics else "a key that the sweep sets"
                raise ConfigError(f"{name}: {of!r} is not {what}; {allowed(of, known)}")

    def settings(self) -> Iterator[dict[str, Any]]:
        """Yield the keys and values of each point, in order."""
        over = self.random_.over if self.random_ else self.grid or {}
        numbers: Sequence[int] = range(math.prod(map(len, over.values())))
        if self.random_:
            numbers = random.Random(self.random_.seed).sample(numbers, min(self.random_.count, len(numbers)))
        variants = [{VARIANT: name} for name in self.variants or {}] or [{}]
        for entry, number, variant in itertools.product(self.list_ or [{}], numbers, variants):
            point = {}
            for key, values in reversed(over.items()):
                number, index = divmod(number, len(values))
                point[key] = values[index]
            yield entry | {key: point[key] for key in over} | variant
