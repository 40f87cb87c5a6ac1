"""`nntile profile`: run a few steps of a config under StarPU's task profiling, and analyse them."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nntile_py.errors import ConfigError
from nntile_py.system.folders import replace_file
from nntile_py.system.units import counted

if TYPE_CHECKING:
    from nntile_py.config.run_config import RunConfig
    from nntile_py.execution.runtime import Runtime
    from nntile_py.profiling.trace import Trace


# The files that `nntile profile` writes, apart from the files of --fxt.
FILES = ("config.yaml", "trace.json", "gantt.png", "gantt.svg", "gantt.pdf", "report.html", "summary.json")


def profile(
    config: RunConfig, folder: Path, name: str, steps: int, fxt: bool = False, inference: bool = False
) -> dict[str, Any]:
    """Profile `steps` steps of the config on random tokens; write FILES into `folder`.

    All ranks of a run call the function; rank 0 writes the files.

    Args:
        name: of the profile, for the titles of chart and report.
        fxt: also write StarPU's own trace, into the folder `fxt`.
        inference: run forward passes instead of training steps.

    Returns:
        The content of summary.json; {} on ranks other than 0.
    """
    from nntile_py.config.builders import build_model, step_spec
    from nntile_py.profiling import peak_rates, recorder
    from nntile_py.system.load import Load, among
    from nntile_py.training.run_start import build_trainer

    runtime = _runtime(config, fxt)
    ranks = runtime.ranks
    raw, new_folders, ran = (folder / "fxt").resolve(), list[Path](), False
    if fxt:
        new_folders = [path for path in (raw, raw.parent) if not path.exists()]
        raw.mkdir(parents=True, exist_ok=True)
        os.environ |= {"STARPU_FXT_TRACE": "1", "STARPU_FXT_PREFIX": f"{raw}/"}  # StarPU reads them at its start
    try:
        with runtime:
            with Load() as load:
                if inference:
                    spec = replace(step_spec(config, build_model(config)), ranks=ranks.size if ranks else 1)
                    trace = recorder.run_passes(spec, steps, config.profile.warmup)
                else:
                    trainer = build_trainer(config)
                    runtime.forget(trainer)  # the weights are not needed afterwards
                    trace = recorder.run_steps(trainer, steps, config.profile.warmup)
            ran = True
        if fxt:
            recorder.convert_fxt(raw)
    except BaseException:
        with suppress(OSError):  # a folder that is not empty stays
            for path in raw.glob("prof_file_*") if new_folders and not ran else ():  # incomplete files of StarPU
                path.unlink()
            for path in new_folders:
                path.rmdir()
        raise
    if ranks:
        ranks.barrier()  # ranks of one machine measure their peaks at the same time
    peaks = peak_rates.peaks_of(trace, config)
    loads = ranks.to_first(load) if ranks else [load]
    if loads is None:
        return {}
    replace_file(folder / "config.yaml", config.to_yaml())  # creates the folder, only after a successful run
    axes, settings = recorder.axes(config, inference), recorder.settings(config, inference)
    return write(trace, peaks, axes, folder, name, among(loads), settings)


def _runtime(config: RunConfig, fxt: bool) -> Runtime:
    """Return the runtime of a profile. The runtime has not started yet.

    Raises:
        ConfigError: The ranks have different configs, or `fxt` is True and there are several ranks.
    """
    from nntile_py.checkpoint.resume import flattened
    from nntile_py.config.scheduler_file import runtime_options
    from nntile_py.execution.runtime import Runtime

    runtime = Runtime(**runtime_options(config.runtime.model_dump()), mpi=True)
    if runtime.ranks:
        if fxt:
            raise ConfigError("--fxt: got several ranks, whose messages StarPU's trace lacks; allowed: one rank")
        runtime.ranks.same("the config", flattened(config.model_dump(mode="json", by_alias=True)))
    return runtime


def write(
    trace: Trace, peaks: Any, tiles: Any, folder: Path, name: str, load: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Write all files of a profile, except config.yaml; return the content of summary.json.

    Args:
        peaks: peak rates of one worker, by kind of worker.
        tiles: for each axis its size, its tile, the number of tiles.
        load: Load.facts() of the run.
        settings: recorder.settings of the profiled config; None for a block under nt.profile.
    """
    from nntile_py.profiling import diagnosis, gantt, perfetto, profile_report, trace_analysis
    from nntile_py.system.machine import described, machine

    summary = trace_analysis.summarise(trace, peaks, tiles) | {"load": load, "settings": settings}
    summary["findings"] = diagnosis.report(summary)
    summary["machine"] = machine()
    text = json.dumps(summary, indent=1, allow_nan=False)
    replace_file(folder / "summary.json", text + "\n")
    parts = trace_analysis.parts(trace, peaks)
    perfetto.write(trace, folder / "trace.json", parts)
    facts = summary["machine"]
    hardware = f"{described(facts)}, {facts['date']}"
    if load and load["others"] is not None:
        hardware += f"; other processes kept {load['others']:.1f} of the cores busy while the steps ran"
    tiling = ", ".join(f"{axis} {a['tile']}/{a['size']}" for axis, a in summary["tiles"].items())
    count, each = summary["steps"], summary["seconds_per_step"] * 1e3
    tasks = summary["tasks"] // max(count, 1)
    title = f"{name}: {counted(count, 'step')} of {each:,.0f} ms and {counted(tasks, 'task')}"
    title += f" on {trace.ranks} ranks" if trace.ranks > 1 else ""
    gantt.save(parts, summary, folder, title, f"{hardware}\nTiles: {tiling}", trace)
    line = f"{hardware}. Tiles: {tiling}."
    profile_report.write(trace, parts, summary, folder / "report.html", f"Profile of {name}", line)
    return summary
