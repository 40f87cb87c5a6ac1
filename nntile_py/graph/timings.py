"""What operators took in each layout: measured once, kept in a file for each device, version, dtype and method."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import re
import statistics
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nntile_py.errors import ConfigError, say_once
from nntile_py.system import launcher
from nntile_py.system.folders import cache_folder, read

KEYS = ("device", "version", "dtype", "method")  # of a file: what its times are of
METHOD = "out of cache"  # tiles come from memory, see profiling/layouts.py; what other methods measured is not read


@dataclass(frozen=True)
class Timing:
    """seconds: the least of the times. width: of generated kernels, see Generated.on. turns: it was measured once more,
    in turns with the default layout."""

    operator: str
    layout: str
    seconds: float
    times: tuple[float, ...] = ()
    width: int | None = None
    turns: bool = False


@dataclass(frozen=True)
class Verdict:
    """Seconds of whole steps of a program in the default layouts, and in those that were searched, in turns."""

    program: str
    default: tuple[float, ...]
    searched: tuple[float, ...]

    @property
    def slower(self) -> bool:
        """Whether searched is slower beyond noise: the median of the turns' differences is above zero by more than half
        the width of its notch (McGill, Tukey and Larsen 1978: 1.57 interquartile ranges over the root of their number,
        about 95 %)."""
        gaps = [searched - default for default, searched in zip(self.default, self.searched, strict=True)]
        first, middle, third = statistics.quantiles(gaps, n=4, method="inclusive")
        return middle > 1.57 * (third - first) / math.sqrt(len(gaps))

    def __str__(self) -> str:
        told = []
        for name, seconds in (("default", self.default), ("searched", self.searched)):
            ms = sorted(1e3 * t for t in seconds)
            told.append(f"{name} {statistics.median(ms):.3f} ms ({ms[0]:.3f} to {ms[-1]:.3f})")
        ruling = "searched is slower" if self.slower else "searched is not slower beyond noise"
        return f"{', '.join(told)}, medians of {len(self.default)} steps in turns: {ruling}"


@dataclass(eq=False)
class Timings:
    """By operator, layout and width; verdicts by program. `of`: see KEYS; a file is these and a line for each."""

    of: Mapping[str, str]
    path: Path | None = None
    known: dict[str, dict[tuple[str, int | None], Timing]] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    texts: dict[Hashable, tuple[str, str]] = field(default_factory=dict)  # what searches have found of `described`

    @property
    def workers(self) -> str:
        """Whose times are wanted: of several ranks, those of one."""
        alone = "tune without mpirun, and with runtime.cpus or runtime.cuda as one rank has them"
        how = f"a rank's: {alone}" if launcher.started()[1] > 1 else "by runtime.cpus or runtime.cuda"
        return f"for {self.of['device']} ({how})"

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
        if "program" in line:
            default, searched = _seconds(line["default"]), _seconds(line["searched"])
            if not (isinstance(line["program"], str) and line["program"] and len(default) == len(searched) > 1):
                raise ValueError
            self.verdicts[line["program"]] = Verdict(line["program"], default, searched)
            return
        (seconds,), times, width = _seconds([line["seconds"]]), _seconds(line["times"]), line.get("width")
        names = isinstance(line["operator"], str) and isinstance(line["layout"], str)
        if not names or not (width is None or (type(width) is int and width > 0)):
            raise ValueError
        timing = Timing(line["operator"], line["layout"], seconds, times, width, line.get("turns") is True)
        self.known.setdefault(timing.operator, {})[timing.layout, timing.width] = timing

    def add(self, timing: Timing) -> None:
        """In the place of an earlier one; to the file too, at once, if there is one."""
        self.known.setdefault(timing.operator, {})[timing.layout, timing.width] = timing
        line: dict[str, Any] = {"operator": timing.operator, "layout": timing.layout, "seconds": timing.seconds}
        line |= {"times": list(timing.times)} | ({"width": timing.width} if timing.width else {})
        self._append(line | ({"turns": True} if timing.turns else {}))

    def judge(self, verdict: Verdict) -> None:
        """Keep it, in the file too."""
        self.verdicts[verdict.program] = verdict
        self._append(vars(verdict))

    def digest(self) -> str:
        """Of all that is in it, in whichever order it was found."""
        timings = [timing for of in self.known.values() for timing in of.values()]
        every = sorted(map(repr, [*timings, *self.verdicts.values()]))
        return hashlib.sha256("\n".join(every).encode()).hexdigest()[:16]

    def unjudged(self) -> Timings:
        """The same times without verdicts, of no file."""
        return Timings(self.of, known=self.known, texts=self.texts)

    def _append(self, line: Mapping[str, Any]) -> None:
        if not self.path:
            return
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
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say_once(f"{self.path}: another process measures into it, which is waited for")
                fcntl.flock(file, fcntl.LOCK_EX)
            now = opened(self.of, self.path, new=True)
            self.known, self.verdicts = now.known, now.verdicts
            yield


def default_path(of: Mapping[str, str]) -> Path:
    """In the cache folder, where other choices by measurement are."""
    name = "-".join(re.sub(r"[^A-Za-z0-9.]+", "_", of[key]) for key in KEYS)
    return cache_folder() / "layouts" / f"{name}.jsonl"


def opened(of: Mapping[str, str], path: Path | None = None, *, new: bool = False) -> Timings:
    """A file's timings. new: it need not be there yet. ConfigError: it is of something else, or no such file."""
    path = path or default_path(of)
    made = Timings(of, path)
    tuned = f"`nntile layouts tune` has made here {made.workers}"
    if not path.exists() or (path.is_file() and not path.stat().st_size):  # of one that was ended before its first time
        if new:
            return made
        raise ConfigError(f"{path}: no such database of layouts; allowed: one that {tuned}")
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
    head, *lines = map(_object, text)
    if not isinstance(head, dict) or any(not isinstance(head.get(key), str) for key in KEYS):
        raise ConfigError(f"{path}: no database of layouts; allowed: a file that `nntile layouts tune` has made")
    for key in KEYS:
        if head[key] != of[key]:
            more = f", which {tuned}" if key == "device" else ""
            raise ConfigError(f"{path}: a database of {key} {head[key]!r}; allowed here: {of[key]!r}{more}")
    for number, line in enumerate(lines, 2):
        try:
            made._take(line)
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ConfigError(f"{path}, line {number}: no timing; allowed: lines that `nntile layouts tune` writes; "
                              "remove the line") from None  # fmt: skip
    return made


def _object(text: str) -> Any:
    """What a line says; None if that is no object."""
    try:
        made = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return made if isinstance(made, dict) else None


def _seconds(values: Any) -> tuple[float, ...]:
    """A list of times in a file; raises what is no list of finite ones above zero."""
    if not isinstance(values, list) or any(isinstance(value, str | bool) for value in values):
        raise ValueError
    made = tuple(map(float, values))
    if not all(0 < value < math.inf for value in made):
        raise ValueError
    return made
