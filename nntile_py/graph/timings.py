"""The database of layouts: measured times of operators in each layout.

There is one file for each combination of device, version, dtype and method.
"""

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

KEYS = ("device", "version", "dtype", "method")  # header of a file: the conditions of its times
# Operators are timed with tiles that are in memory but not in a cache, see profiling/layout_timer.py. Files of other
# methods are not read.
METHOD = "out of cache"


@dataclass(frozen=True)
class Timing:
    """The measured time of an operator in a layout.

    Attributes:
        operator: text that identifies the operator, see layouts.described.
        layout: text that identifies the layout, see layouts.described.
        seconds: the shortest of the repeated `times`.
        width: width of a generated kernel, see Generated.on; None: the kernel's default width.
        turns: True: the layout was measured a second time, alternating with the default layout.
    """

    operator: str
    layout: str
    seconds: float
    times: tuple[float, ...] = ()
    width: int | None = None
    turns: bool = False


@dataclass(frozen=True)
class LayoutComparison:
    """Measured seconds of whole steps of a program, alternating between the default and the searched layouts.

    Attributes:
        program: the digest SearchedLayouts.program.
    """

    program: str
    default: tuple[float, ...]
    searched: tuple[float, ...]

    @property
    def slower(self) -> bool:
        """True if the searched layouts are slower, and the difference exceeds the noise.

        The median difference must be above half the width of its notch: 1.57 interquartile ranges divided by the square
        root of the number of differences (McGill, Tukey and Larsen 1978), which is about 95 % confidence.
        """
        gaps = [searched - default for default, searched in zip(self.default, self.searched, strict=True)]
        first, middle, third = statistics.quantiles(gaps, n=4, method="inclusive")
        return middle > 1.57 * (third - first) / math.sqrt(len(gaps))

    def __str__(self) -> str:
        parts = []
        for name, seconds in (("default", self.default), ("searched", self.searched)):
            ms = sorted(1e3 * t for t in seconds)
            parts.append(f"{name} {statistics.median(ms):.3f} ms ({ms[0]:.3f} to {ms[-1]:.3f})")
        ruling = "searched is slower" if self.slower else "searched is not slower beyond noise"
        return f"{', '.join(parts)}, medians of {len(self.default)} steps in turns: {ruling}"


@dataclass(eq=False)
class Timings:
    """The database of layouts in memory: timings by operator, layout and width, and comparisons by program.

    Its file has a first line with the header `of` (see KEYS), then one line for each timing or comparison.
    """

    of: Mapping[str, str]
    path: Path | None = None
    known: dict[str, dict[tuple[str, int | None], Timing]] = field(default_factory=dict)
    comparisons: dict[str, LayoutComparison] = field(default_factory=dict)
    texts: dict[Hashable, tuple[str, str]] = field(default_factory=dict)  # cached results of `described`

    @property
    def workers(self) -> str:
        """Text for messages: the device that was or must be measured, and the keys that select it."""
        advice = "tune without mpirun, and with runtime.cpus or runtime.cuda as one rank has them"
        how = f"a rank's: {advice}" if launcher.started()[1] > 1 else "by runtime.cpus or runtime.cuda"
        return f"for {self.of['device']} ({how})"

    def best(self, operator: str, layout: str) -> Timing | None:
        """Return the timing of an operator in a layout; None if it was not measured.

        The kernel width is the default width, unless another width is faster by more than the noise, or only another
        width was measured.
        """
        timings = [t for (where, _), t in self.known.get(operator, {}).items() if where == layout]
        best, plain = min(timings, key=lambda t: t.seconds, default=None), self.plain(operator, layout)
        gains = best and plain and best.seconds * (1 + self.noise(operator)) < plain.seconds
        return best if gains else plain or best

    def plain(self, operator: str, layout: str) -> Timing | None:
        """Return the timing of an operator in a layout and the default kernel width; None if it was not measured."""
        return self.known.get(operator, {}).get((layout, None))

    def noise(self, operator: str) -> float:
        """Return the noise of an operator's times, as a share of the time.

        In one layout, noise is the median of the repeated times divided by their minimum, minus 1. The median over the
        layouts is returned.
        """
        of = [statistics.median(t.times) / t.seconds - 1 for t in self.known.get(operator, {}).values() if t.times]
        return statistics.median(of) if of else 0.0

    def least(self, operator: str) -> float:
        """Return the seconds of an operator in its best layout, without transposes."""
        return min((t.seconds for t in self.known.get(operator, {}).values()), default=math.nan)

    def _take(self, line: Any) -> None:
        """Add the timing or comparison in a line of the file.

        Raises:
            KeyError, TypeError, ValueError: the line is wrong.
        """
        if "program" in line:
            default, searched = _seconds(line["default"]), _seconds(line["searched"])
            if not (isinstance(line["program"], str) and line["program"] and len(default) == len(searched) > 1):
                raise ValueError
            self.comparisons[line["program"]] = LayoutComparison(line["program"], default, searched)
            return
        (seconds,), times, width = _seconds([line["seconds"]]), _seconds(line["times"]), line.get("width")
        names = isinstance(line["operator"], str) and isinstance(line["layout"], str)
        if not names or not (width is None or (type(width) is int and width > 0)):
            raise ValueError
        timing = Timing(line["operator"], line["layout"], seconds, times, width, line.get("turns") is True)
        self.known.setdefault(timing.operator, {})[timing.layout, timing.width] = timing

    def add(self, timing: Timing) -> None:
        """Store a timing here and in the file. It replaces an earlier timing of the same layout and width."""
        self.known.setdefault(timing.operator, {})[timing.layout, timing.width] = timing
        line: dict[str, Any] = {"operator": timing.operator, "layout": timing.layout, "seconds": timing.seconds}
        line |= {"times": list(timing.times)} | ({"width": timing.width} if timing.width else {})
        self._append(line | ({"turns": True} if timing.turns else {}))

    def add_comparison(self, comparison: LayoutComparison) -> None:
        """Store a comparison here and in the file."""
        self.comparisons[comparison.program] = comparison
        self._append(vars(comparison))

    def digest(self) -> str:
        """Return a hash of all entries, independent of their order."""
        timings = [timing for of in self.known.values() for timing in of.values()]
        every = sorted(map(repr, [*timings, *self.comparisons.values()]))
        return hashlib.sha256("\n".join(every).encode()).hexdigest()[:16]

    def without_comparisons(self) -> Timings:
        """Return the same times without comparisons and without a file."""
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
    def exclusive(self) -> Iterator[None]:
        """Lock the file inside the block. If another process holds the lock, wait, then read its entries."""
        if not self.path:
            yield
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say_once(f"{self.path}: waiting for another process that measures into it")
                fcntl.flock(file, fcntl.LOCK_EX)
            now = opened(self.of, self.path, new=True)
            self.known, self.comparisons = now.known, now.comparisons
            yield


def default_path(of: Mapping[str, str]) -> Path:
    """Return the default path of the database for these conditions (see KEYS), in the cache folder."""
    name = "-".join(re.sub(r"[^A-Za-z0-9.]+", "_", of[key]) for key in KEYS)
    return cache_folder() / "layouts" / f"{name}.jsonl"


def opened(of: Mapping[str, str], path: Path | None = None, *, new: bool = False) -> Timings:
    """Return the database of layouts in a file.

    Args:
        of: the conditions (see KEYS) that the file must have.
        path: the file; None: `default_path(of)`.
        new: True: the file need not exist yet.

    Raises:
        ConfigError: the file does not exist, is no database of layouts, or has other conditions.
    """
    path = path or default_path(of)
    timings = Timings(of, path)
    tuned = f"`nntile layouts tune` has made here {timings.workers}"
    # A file is empty if the process ended before its first measurement.
    if not path.exists() or (path.is_file() and not path.stat().st_size):
        if new:
            return timings
        raise ConfigError(f"{path}: no such database of layouts; allowed: one that {tuned}")
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder; allowed: a file that `nntile layouts tune` has made, or will make")
    data = read(path)
    if data[-1:] != b"\n":  # the last line is incomplete (disk full, power failure): its measurement is repeated
        data = data[: data.rfind(b"\n") + 1]
        if new:
            os.truncate(path, len(data))
        if new and not data:
            return timings
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
            timings._take(line)
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ConfigError(f"{path}, line {number}: no timing; allowed: lines that `nntile layouts tune` writes; "
                              "remove the line") from None  # fmt: skip
    return timings


def _object(text: str) -> Any:
    """Return the JSON object in a line of text as a dict; None if the line holds anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _seconds(values: Any) -> tuple[float, ...]:
    """Return a list of times as a tuple; raises ValueError unless all are finite and above zero."""
    if not isinstance(values, list) or any(isinstance(value, str | bool) for value in values):
        raise ValueError
    seconds = tuple(map(float, values))
    if not all(0 < value < math.inf for value in seconds):
        raise ValueError
    return seconds
