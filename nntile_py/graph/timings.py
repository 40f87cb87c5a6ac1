"""What operators took in each layout: measured once, kept in a file for each device, version and dtype."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nntile_py.errors import ConfigError
from nntile_py.system.folders import cache_folder, read

KEYS = ("device", "version", "dtype")  # of a file: what its times are of


@dataclass(frozen=True)
class Timing:
    """seconds: the least of the times. width: of generated kernels, see Generated.on."""

    operator: str
    layout: str
    seconds: float
    times: tuple[float, ...] = ()
    width: int | None = None


@dataclass(eq=False)
class Timings:
    """By operator, layout and width. `of`: device, version and dtype; a file is one of these and a line for each."""

    of: Mapping[str, str]
    path: Path | None = None
    known: dict[str, dict[tuple[str, int | None], Timing]] = field(default_factory=dict)

    def best(self, operator: str, layout: str) -> Timing | None:
        """With the width that is best: another than the operator's own where it gains more than noise."""
        found = [t for (where, _), t in self.known.get(operator, {}).items() if where == layout]
        best, plain = min(found, key=lambda t: t.seconds, default=None), self.plain(operator, layout)
        gains = best and plain and best.seconds * (1 + self.noise(operator)) < plain.seconds
        return best if gains else plain or best

    def plain(self, operator: str, layout: str) -> Timing | None:
        """In the operator's own width, if that was measured."""
        return self.known.get(operator, {}).get((layout, None))

    def noise(self, operator: str) -> float:
        """Of its times, as a part of them: how far the middle of repeated ones is above their least, commonly."""
        of = [statistics.median(t.times) / t.seconds - 1 for t in self.known.get(operator, {}).values() if t.times]
        return statistics.median(of) if of else 0.0

    def least(self, operator: str) -> float:
        """Seconds in the best layout, whatever lies around it."""
        return min((t.seconds for t in self.known.get(operator, {}).values()), default=math.nan)

    def _take(self, line: Any) -> None:
        """An entry of the file."""
        seconds, times, width = float(line["seconds"]), tuple(map(float, line["times"])), line.get("width")
        if not (isinstance(line["operator"], str) and isinstance(line["layout"], str) and 0 < seconds < math.inf):
            raise ValueError
        timing = Timing(line["operator"], line["layout"], seconds, times, width and int(width))
        self.known.setdefault(timing.operator, {})[timing.layout, timing.width] = timing

    def add(self, timing: Timing) -> None:
        """To the file too, at once, if there is one."""
        self.known.setdefault(timing.operator, {})[timing.layout, timing.width] = timing
        if not self.path:
            return
        line = {"operator": timing.operator, "layout": timing.layout, "seconds": timing.seconds}
        line |= {"times": list(timing.times)} | ({"width": timing.width} if timing.width else {})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        head = "" if os.fstat(file).st_size else json.dumps(dict(self.of)) + "\n"
        data = (head + json.dumps(line) + "\n").encode()
        try:
            if os.write(file, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        finally:
            os.close(file)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else measures into the file meanwhile: waits for who does, and reads what that one has added."""
        if not self.path:
            yield
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.known = opened(self.of, self.path, new=True).known
            yield


def default_path(of: Mapping[str, str]) -> Path:
    """In the cache folder, where other choices by measurement are."""
    name = "-".join(re.sub(r"[^A-Za-z0-9.]+", "_", of[key]) for key in KEYS)
    return cache_folder() / "layouts" / f"{name}.jsonl"


def opened(of: Mapping[str, str], path: Path | None = None, *, new: bool = False) -> Timings:
    """A file's timings. new: it need not be there yet. ConfigError: it is of something else, or no such file."""
    path = path or default_path(of)
    made = Timings(of, path)
    if not path.exists() or (path.is_file() and not path.stat().st_size):  # of one that was ended before its first time
        if new:
            return made
        raise ConfigError(f"{path}: no such database of layouts; allowed: one that `nntile layouts tune` has made here")
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder; allowed: a file that `nntile layouts tune` has made, or will make")
    data = read(path)
    if data[-1:] != b"\n":  # a disk was full, or the power went: what was begun last is measured again
        data = data[: data.rfind(b"\n") + 1]
        if new:
            os.truncate(path, len(data))
        if new and not data:
            return made
    text = data.decode(errors="replace").splitlines() or [""]
    head, *lines = (json.loads(line) if _is_object(line) else None for line in text)
    if not isinstance(head, dict) or any(not isinstance(head.get(key), str) for key in KEYS):
        raise ConfigError(f"{path}: no database of layouts; allowed: a file that `nntile layouts tune` has made")
    for key in KEYS:
        if head[key] != of[key]:
            raise ConfigError(f"{path}: a database of {key} {head[key]!r}; allowed here: {of[key]!r}")
    for number, line in enumerate(lines, 2):
        try:
            made._take(line)
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{path}, line {number}: no timing; allowed: lines that `nntile layouts tune` writes; "
                              "remove the line") from None  # fmt: skip
    return made


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
