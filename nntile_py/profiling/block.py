"""`nt.profile()`: what the tasks of a block did."""

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


@dataclass
class BlockProfile:
    """Of a block that has ended: `summary`, as in summary.json; `str(...)` says the most of it in a few lines."""

    folder: Path | None
    summary: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if not (s := self.summary):
            return "profile of a block that has not ended"
        shares = ((name, np.mean([w[name] for w in s["workers"]])) for name in ("working", "overhead", "idle"))
        lines = [f"{s['seconds']:.3g} s, {s['tasks']} tasks on {len(s['workers'])} workers: "]
        lines[0] += ", ".join(f"{name} {share:.0%}" for name, share in shares)
        for row in s["operators"]:
            name = f"{row['operator']} {row['phase']}".strip()
            lines.append(f"  {name}: {row['share']:.0%}, {row['tasks']} tasks of {row['mean_s'] * 1e3:.3g} ms")
        lines += [f"{found['cause']} {found['advice']}" for found in s["findings"]]
        return "\n".join(lines)


@contextmanager
def profile(folder: str | Path | None = None) -> Iterator[BlockProfile]:
    """Profile all tasks of a block on the running Runtime: `with nt.profile("folder") as found: ...; print(found)`.

    The block's tasks are waited for at its end. Every rank of several enters it; the first then has the tasks of all,
    and writes, another has its own. In the folder, if one is given, it leaves report.html, the Gantt,
    trace.json and summary.json, as `nntile profile` does; the block counts as one step. Raises TaskError where no
    runtime is running, where another profile is being taken, where a task of the block fails and where it has none.
    """
    if not isinstance(folder, str | Path | None):
        raise TypeError(f"nt.profile: folder: got {folder!r}; allowed: a path")
    if Runtime.watched is not None:
        raise TaskError("nt.profile: another profile is being taken; one at a time")
    block = BlockProfile(Path(folder) if folder is not None else None)
    with recorder.watched() as found:
        yield block
        _core.wait_all()
    ranks = Runtime.current.ranks if Runtime.current else None
    if not (ranks or len(found.native["events"])):
        raise TaskError("nt.profile: no task ran in the block")
    trace = found.trace(None)
    trace.step = np.minimum(trace.step, 1)
    if block.folder and not (ranks and ranks.rank):
        block.folder.mkdir(parents=True, exist_ok=True)
        block.summary = write(trace, {}, {}, block.folder, block.folder.name)
    else:
        block.summary = trace_analysis.summarise(trace, {})
        block.summary["findings"] = diagnosis.report(block.summary)
