"""`nntile sweep`: measure a config at many points, each in a process of its own, or those of one runtime in one.

A point that ended, well or badly, is one line of rows.jsonl, synced to disk before the next one starts: a sweep that
was killed goes on where it was. What a point measures is in sweep_point.py.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import math
import os
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from nntile_py.checked import Count, Natural, Positive, Section, Switch, parse, read_yaml, validated
from nntile_py.config import RunConfig, load
from nntile_py.errors import ConfigError
from nntile_py.sweep_process import Processes

Values = dict[str, list[Any]]
WORK = Literal["train", "inference", "linear_relu", "linear_reshape", "qkv_none", "qkv_qk", "qkv_all", "layer"]


class Measure(Section):
    """What a point runs, and how often: `repeats` times are taken, each of `steps` steps in flight together."""

    work: WORK = "train"
    phase: Literal["forward", "backward", "all"] = "all"  # of the works that are no whole model
    how: Literal["run", "plan", "operators"] = "run"  # plan: nothing is run; operators: each alone, by class
    warmup: Natural = 1
    steps: Count = 1
    repeats: Count = 3


class Random(Section):
    """`count` points of the grid of `over`, drawn without repetition."""

    count: Count
    seed: Natural = 0
    over: Values


class Plot(Section):
    """y over x, a line or bars for each `series`, side by side for each `panel`; `heat`: y as colour over x, series."""

    kind: Literal["line", "bar", "heat"] = "line"
    x: str
    y: str | list[str] = "seconds"  # a list: a line or bar for each
    series: str | None = None
    panel: str | None = None
    title: str = ""
    xlabel: str | None = None
    ylabel: str | None = None
    log: Switch = False  # x, to base 2
    same: Switch = True  # panels have one y axis

    @property
    def metrics(self) -> list[str]:
        return [self.y] if isinstance(self.y, str) else self.y

    @model_validator(mode="after")
    def _second_axis(self) -> Plot:
        if self.kind == "heat" and self.series is None:
            raise ConfigError("plots: a heat map needs `series`, the key of its vertical axis")
        return self


class Best(Section):
    metric: str = "seconds"
    of: Literal["least", "greatest"] = "least"


class Sweep(Section):
    """A sweep's YAML: the base config with `set` over it, and its points."""

    config: str
    set_: dict[str, Any] = Field(default_factory=dict, alias="set")
    grid: Values | None = None
    list_: list[dict[str, Any]] | None = Field(None, alias="list")
    random_: Random | None = Field(None, alias="random")
    measure: Measure = Measure()
    rounds: Count = 1  # times that all points are measured, in turns: against machines that change meanwhile
    time_limit: Positive = 600.0  # seconds of a point, each time
    together: Switch = False  # points of one `runtime` share a process: GPUs take longer to start than to measure
    best: Best = Best()
    plots: list[Plot] = Field(default_factory=list)

    @field_validator("grid")
    @classmethod
    def _full(cls, grid: Values | None) -> Values | None:
        if grid is not None and not (grid and all(grid.values())):
            raise ValueError("keys of a config, each with a list of at least one value")
        return grid

    @model_validator(mode="after")
    def _some(self) -> Sweep:
        if not (self.grid or self.list_ or self.random_) or (self.random_ and (self.grid or self.list_)):
            raise ConfigError("grid, list, random: allowed: a grid, a list, both (their product), or random")
        return self

    def settings(self) -> Iterator[dict[str, Any]]:
        """What each point sets, in order."""
        over = self.random_.over if self.random_ else self.grid or {}
        numbers: Sequence[int] = range(math.prod(map(len, over.values())))
        if self.random_:
            numbers = random.Random(self.random_.seed).sample(numbers, min(self.random_.count, len(numbers)))
        for entry, number in itertools.product(self.list_ or [{}], numbers):
            point = {}
            for key, values in reversed(over.items()):
                number, index = divmod(number, len(values))
                point[key] = values[index]
            yield entry | {key: point[key] for key in over}


@dataclass(frozen=True)
class Point:
    """One configuration to measure; `id` is of all that decides the measurement, `error` why it cannot be made."""

    id: str
    sets: dict[str, Any]
    config: RunConfig | None
    measure: Measure
    error: str | None = None


def load_sweep(path: Path, overrides: Iterable[str] = ()) -> Sweep:
    """Read and check a sweep's YAML, with `overrides` of the config's keys; `config` is relative to it."""
    return check_sweep(read_yaml(path, "SWEEP", Sweep), path, overrides)


def check_sweep(tree: Mapping[str, Any], path: Path, overrides: Iterable[str] = ()) -> Sweep:
    """A sweep from what was read from `path`."""
    try:
        sweep: Sweep = validated(Sweep, dict(tree))
        for item in overrides:
            key, _, text = item.partition("=")
            sweep.set_[key.strip()] = parse(text, f"--set {item}")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    beside = path.parent / sweep.config
    return sweep.model_copy(update={"config": str(beside if beside.is_file() else sweep.config)})


def points(sweep: Sweep) -> list[Point]:
    """All points, each once. A value that no point can have is a ConfigError; a point that is refused is kept."""
    found: dict[str, Point] = {}
    for sets in sweep.settings():
        config, error = None, None
        try:
            own = {key.removeprefix("measure."): v for key, v in sets.items() if key.startswith("measure.")}
            measure: Measure = validated(Measure, sweep.measure.model_dump() | own, "measure.")
            rest = sweep.set_ | {key: value for key, value in sets.items() if not key.startswith("measure.")}
            config = load(sweep.config, [f"{key}={json.dumps(value)}" for key, value in rest.items()])
        except ConfigError as refused:
            measure, error = sweep.measure, str(refused)
        what = [config.model_dump(by_alias=True) if config else sets, measure.model_dump()]
        name = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
        found.setdefault(name, Point(name, sets, config, measure, error))
    result = list(found.values())
    for point in result:
        for key, value in point.sets.items():
            alike = [p.error for p in result if key in p.sets and p.sets[key] == value]
            if all(alike):
                raise ConfigError(f"{key} = {value!r}: {alike[0]}")
    return result


class Rows:
    """The rows of a folder, rows.jsonl: one line for each point that ended. One sweep at a time."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "rows.jsonl"
        self.all: dict[str, dict[str, Any]] = {}

    @contextmanager
    def open(self) -> Iterator[Rows]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"--out: another sweep is writing into {self.path.parent}") from None
            whole = self.path.read_bytes()
            kept = whole[: whole.rfind(b"\n") + 1]  # a write that was cut short has no end of line
            if kept != whole:
                os.ftruncate(self._file, len(kept))
            for line in kept.splitlines():
                row = json.loads(line)
                self.all[row["id"]] = row
            yield self
        finally:
            os.close(self._file)

    def append(self, row: dict[str, Any]) -> None:
        self.all[row["id"]] = row
        line = (json.dumps(row) + "\n").encode()
        while line:
            line = line[os.write(self._file, line) :]
        os.fsync(self._file)


def run(sweep: Sweep, folder: Path, console: Console, *, retry: bool = False) -> list[dict[str, Any]]:
    """Measure every point that has no row yet (with `retry`: no good one); returns the rows in the points' order.

    With several rounds a point has a row of each in the file, and one of all in the results.
    """
    from nntile_py.sweep_results import pooled, write_results

    every = points(sweep)
    names = {p.id: [p.id if k == 0 else f"{p.id}.{k + 1}" for k in range(sweep.rounds)] for p in every}
    runtimes = [p.config and p.config.runtime for p in every]
    ordered = sorted(every, key=lambda p: runtimes.index(p.config and p.config.runtime)) if sweep.together else every
    todo = [(p, names[p.id][k]) for k in range(sweep.rounds) for p in ordered]
    with Rows(folder).open() as rows:
        done = {i for i, row in rows.all.items() if not retry or row["status"] == "ok"}
        left = [(p, name) for p, name in todo if name not in done]
        try:
            with _progress(console) as progress, closing(Processes(sweep.together)) as processes:
                bar = progress.add_task("", total=len(todo), completed=len(todo) - len(left))
                for number, (point, name) in enumerate(left):
                    progress.update(bar, description=_told(point.sets))
                    follows = [p for p, _ in left[number + 1 :]]
                    rows.append(measure_point(point, sweep.time_limit, processes, follows) | {"id": name})
                    progress.advance(bar)
        finally:  # whatever ends the sweep, what is there can be read
            there = [(p, [rows.all[name] for name in names[p.id] if name in rows.all]) for p in every]
            result = [pooled(own) | {"id": p.id, "sets": p.sets} for p, own in there if own]
            write_results(sweep, result, folder)
    return result


def measure_point(
    point: Point, time_limit: float, processes: Processes | None = None, follows: Sequence[Point] = ()
) -> dict[str, Any]:
    """Run a point, in a process of its own if none are given: its row. `follows`: the points after it."""
    row: dict[str, Any] = {"id": point.id, "sets": point.sets, "measure": point.measure.model_dump()}
    if point.config is None:
        return row | {"status": "refused", "error": point.error}
    start = time.time()
    row |= (processes or Processes(together=False)).measure(point, time_limit, follows)
    return row | {"started": start, "took": time.time() - start, "load": os.getloadavg()[0]}


def _told(sets: dict[str, Any]) -> str:
    return ", ".join(f"{key} {json.dumps(value)}" for key, value in sets.items())


def _progress(console: Console) -> Progress:
    columns = BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    return Progress(*columns, TextColumn("{task.description}"), console=console)
