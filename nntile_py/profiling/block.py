"""`nt.profile()`: profile the tasks of a `with` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nntile_py import _core
from nntile_py.errors import TaskError
from nntile_py.execution.runtime import Runtime
from nntile_py.profiling import diagnosis, recorder, trace_analysis, write
from nntile_py.system.units import counted


@dataclass
class BlockProfile:
    """Profile of a `with` block; `str(profile)` is a short summary.

    Attributes:
        folder: where the files are written; None: no files.
        summary: the content of summary.json; empty until the block has ended.
    """

    folder: Path | None
    summary: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if not (s := self.summary):
            return "profile of a block that has not ended"
        shares = ((name, np.mean([w[name] for w in s["workers"]])) for name in ("working", "overhead", "idle"))
        lines = [f"{s['seconds']:.3g} s, {counted(s['tasks'], 'task')} on {counted(len(s['workers']), 'worker')}: "]
        lines[0] += ", ".join(f"{name} {share:.0%}" for name, share in shares)
        for row in s["operators"]:
            name = f"{row['operator']} {row['phase']}".strip()
            tasks = counted(row["tasks"], "task")
            lines.append(f"  {name}: {row['share']:.0%}, {tasks} of {row['mean_s'] * 1e3:.3g} ms")
        lines += [f"{finding['cause']} {finding['advice']}" for finding in s["findings"]]
        return "\n".join(lines)


@contextmanager
def profile(folder: str | Path | None = None) -> Iterator[BlockProfile]:
    """Profile all tasks of a block on the running Runtime: `with nt.profile("folder") as block: ...; print(block)`.

    The end of the block waits for its tasks. The block counts as one step. All ranks of a run must enter the block.
    Rank 0 collects the tasks of all ranks and writes the files. On other ranks the summary covers their own tasks only.

    Args:
        folder: for report.html, the Gantt chart, trace.json and summary.json, as from `nntile profile`; None: no files.

    Raises:
        TaskError: no runtime is running, another profile is running, a task of the block fails, or no task ran.
    """
    if not isinstance(folder, str | Path | None):
        raise TypeError(f"nt.profile: folder: got {folder!r}; allowed: a path")
    if Runtime.watched is not None:
        raise TaskError("nt.profile: another profile is running; allowed: one at a time")
    block = BlockProfile(Path(folder) if folder is not None else None)
    with recorder.watched() as recording:
        yield block
        _core.wait_all()
    ranks = Runtime.current.ranks if Runtime.current else None
    if not (ranks or len(recording.native["events"])):
        raise TaskError("nt.profile: no task ran in the block")
    trace = recording.trace(None)
    trace.step = np.minimum(trace.step, 1)
    if block.folder and not (ranks and ranks.rank):
        block.folder.mkdir(parents=True, exist_ok=True)
        block.summary = write(trace, {}, {}, block.folder, block.folder.name)
    else:
        block.summary = trace_analysis.summarise(trace, {})
        block.summary["findings"] = diagnosis.report(block.summary)
