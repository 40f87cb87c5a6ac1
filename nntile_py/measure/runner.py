"""`nntile sweep`: measure a config at many points, in worker processes.

Each finished or failed point is a line of rows.jsonl, synced to disk before the next point starts, so that a killed
sweep can continue. worker.py measures a point.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from nntile_py.errors import ConfigError, NNTileError
from nntile_py.measure.contest import point_with_peers
from nntile_py.measure.process import STOP_LIMIT, NoAnswer, WorkerProcess, answers
from nntile_py.measure.results import pooled, write_results
from nntile_py.measure.sweep_points import Point, points
from nntile_py.measure.sweep_report import sets_text
from nntile_py.measure.sweep_spec import Sweep
from nntile_py.system.folders import read

_TEXTS = ("id", "status", "error", "limit")


class Rows:
    """The file rows.jsonl of a folder, with a line for each finished point. Only one sweep may have it open."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "rows.jsonl"
        self.all: dict[str, dict[str, Any]] = {}

    @contextmanager
    def open(self) -> Iterator[Rows]:
        with ExitStack() as opened:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
                opened.callback(os.close, self._file)
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                whole = read(self.path)
            except BlockingIOError:
                raise ConfigError(f"--out: another sweep is writing into {self.path.parent}") from None
            except OSError as error:
                raise ConfigError(f"--out: {self.path}: {error.strerror}; allowed: a folder to write to") from None
            kept = whole[: whole.rfind(b"\n") + 1]  # an interrupted write has no end of line
            self.all = dict(self._read(number, line) for number, line in enumerate(kept.splitlines(), 1))
            if kept != whole:
                os.ftruncate(self._file, len(kept))
            yield self

    def _read(self, number: int, line: bytes) -> tuple[str, dict[str, Any]]:
        try:
            row = json.loads(line)
            if not _whole(row):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ConfigError(
                f"{self.path}, line {number}: allowed: a point's row, as a sweep writes it; "
                "remove the line, or take another --out"
            ) from None
        return row["id"], row

    def append(self, row: dict[str, Any]) -> None:
        self.all[row["id"]] = row
        line = (json.dumps(row) + "\n").encode()
        while line:
            line = line[os.write(self._file, line) :]
        os.fsync(self._file)


def _whole(row: dict[str, Any]) -> bool:
    """Return whether a row of the file has everything that results need, with finite numbers."""
    others = (*_TEXTS, "sets", "measure", "times")
    numbers = [value for key, value in row.items() if key not in others and not key.endswith(" error")]
    good = row["status"] != "ok" or "seconds" in row
    texts = good and all(isinstance(row.get(key, ""), str) for key in _TEXTS) and isinstance(row["sets"], dict)
    numbers = [value for value in (*numbers, *row.get("times", [])) if value is not None]
    return texts and bool(row["id"]) and all(type(n) in (int, float) and math.isfinite(n) for n in numbers)


def run(sweep: Sweep, folder: Path, console: Console, *, retry: bool = False) -> list[dict[str, Any]]:
    """Measure every point that has no row in rows.jsonl yet; return a row for each point, in the points' order.

    rows.jsonl has a row for each point and round; the result joins the rounds of a point.

    Args:
        retry: measure failed points again.
    """
    every = points(sweep)
    names = {p.id: [p.id if k == 0 else f"{p.id}.{k + 1}" for k in range(sweep.rounds)] for p in every}
    alike = [p.process for p in every]
    ordered = sorted(every, key=lambda p: alike.index(p.process)) if sweep.together else every
    todo = [(p, names[p.id][k]) for k in range(sweep.rounds) for p in ordered]
    with Rows(folder).open() as rows:
        if rows.all and not any(name in rows.all for own in names.values() for name in own):
            raise ConfigError(f"--out: the rows in {folder} are of another sweep; allowed: another folder")
        done = {i for i, row in rows.all.items() if not retry or row["status"] == "ok"}
        left = [(p, name) for p, name in todo if name not in done]
        try:
            with _progress(console) as progress, closing(Processes(sweep.together)) as processes:
                before = len(todo) - len(left)
                bar = progress.add_task("", total=len(todo), completed=before)
                for number, (point, name) in enumerate(left, 1):
                    progress.update(bar, description=sets_text(point.sets))
                    row = measure_point(point, sweep.time_limit, processes, [p for p, _ in left[number:]])
                    rows.append(row | {"id": name})
                    progress.advance(bar)
                    if not console.is_terminal:  # without a progress bar
                        ended = f"{row['seconds']:.4g} s" if row["status"] == "ok" else row["status"]
                        _say(console, f"{before + number} of {len(todo)}: {sets_text(point.sets)}: {ended}")
        finally:  # however the sweep ends, its rows can be read
            there = [(p, [rows.all[name] for name in names[p.id] if name in rows.all]) for p in every]
            result = [pooled(own) | {"id": p.id, "sets": p.sets} for p, own in there if own]
            for line in write_results(sweep, result, folder):
                _say(console, line)
    return result


def measure_point(
    point: Point, time_limit: float, processes: Processes | None = None, follows: Sequence[Point] = ()
) -> dict[str, Any]:
    """Measure a point; return its row.

    Args:
        processes: the sweep's worker processes; None: start a new process for this point.
        follows: the points that are measured afterwards.
    """
    row: dict[str, Any] = {"id": point.id, "sets": point.sets, "measure": point.measure.model_dump()}
    if point.config is None:
        return row | {"status": "refused", "error": point.error}
    start = time.time()
    row |= (processes or Processes(together=False)).measure(point, time_limit, follows)
    return row | {"started": start, "took": time.time() - start, "load": os.getloadavg()[0]}


class Processes:
    """The worker processes of a sweep: one for each point; with `together` one for all points of equal Point.process.

    With `together` on GPUs, the next process starts while the current one measures, since imports take seconds."""

    def __init__(self, together: bool) -> None:
        self.together = together
        self._last: WorkerProcess | None = None
        self._key: Any = None  # Point.process of the points that self._last measures
        self._next = WorkerProcess() if together else None

    def measure(self, point: Point, time_limit: float, follows: Sequence[Point] = ()) -> dict[str, Any]:
        """Return the point's status with its metrics or its error."""
        config, how = point.config, point.measure
        assert config
        if how.peers:
            self.close()  # contestants have their own processes, and need the whole machine
            try:
                return {"status": "ok", **point_with_peers(config, how, time_limit)}
            except NNTileError as error:
                return _failed(error, time_limit)
        if self._last and self._key != point.process:
            self._end(STOP_LIMIT)
        if not self._last:
            self._last, self._key, self._next = self._take(point), point.process, None
        # On the CPU the imports of the next process would take cores from the measurement.
        if self.together and config.runtime.cuda and not self._next and any(p.process != self._key for p in follows):
            self._next = WorkerProcess()
        patience = 0.0
        try:
            request = {"config": config.model_dump(by_alias=True), "measure": how.model_dump()}
            self._last.send(request | {"repeats": how.repeats, "steps": how.steps})
            (answer,) = answers([self._last], time_limit)
            answer.pop("losses", None)
            patience = STOP_LIMIT
        except NNTileError as error:
            return _failed(error, time_limit)
        finally:
            if not (patience and self.together):
                self._end(patience)
        return {"status": "ok", **answer}

    def _take(self, point: Point) -> WorkerProcess:
        """Return the process started in advance if it has the ranks that the point needs, else a new process."""
        assert point.config
        ranks = point.config.runtime.nodes if point.measure.how != "plan" else None
        if self._next and self._next.ranks == ranks:
            return self._next
        if self._next:
            self._next.close()
        return WorkerProcess(ranks=ranks)

    def _end(self, patience: float) -> None:
        if self._last:
            self._last.close(patience)
        self._last = None

    def close(self) -> None:
        self._end(STOP_LIMIT)
        if self._next:
            self._next.close()
        self._next = None


def _failed(error: NNTileError, time_limit: float) -> dict[str, Any]:
    if isinstance(error, NoAnswer):
        return {"status": "timeout", "error": f"no result after {time_limit:g} s (time_limit)"}
    return {"status": "failed", "error": str(error)}


def _progress(console: Console) -> Progress:
    columns = BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    return Progress(*columns, TextColumn("{task.description}"), console=console, disable=not console.is_terminal)


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
