"""A machine on which others compute: that it is seen, and what a profile says then."""

import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from traces import independent, info, scheduled
from typer.testing import CliRunner

from nntile_py.analysis import roofline
from nntile_py.cli import app
from nntile_py.config import builders
from nntile_py.errors import ConfigError
from nntile_py.profiling import diagnosis, peak_rates, trace_analysis
from nntile_py.system import load, worker_rates
from nntile_py.system.load import Load, cores
from nntile_py.system.worker_rates import best_of
from nntile_py.tiles.dependencies import TileUse
from nntile_py.training import datasets

PEAKS = {"CPU": roofline.Peak(1e9, 1e9, "test"), "CUDA": roofline.Peak(1e9, 1e9, "test")}
TILES = {"batch": {"size": 8, "tile": 4, "tiles": 2}, "embed": {"size": 96, "tile": 96, "tiles": 1}}


def test_a_peak_is_at_least_what_a_task_reached() -> None:
    """A machine that was busy while the peak was measured: a product above the roofline would be none."""
    work = [info("Contract", [TileUse(k, "W")], flop=1e6, size=400) for k in range(4)]
    trace = scheduled(work, [1_000, 250, 2_000, 500])  # the best: 1e6 flop in 250 us
    low = roofline.Peak(1e9, 1e9, "measured", 0.4)
    raised = peak_rates.at_least_seen(low, trace, "CPU")
    assert raised.flop == pytest.approx(4e9, rel=1e-3) and raised.bytes == 1e9 and raised.cpu_share == 0.4
    assert "1.0 Gflop/s, but Contract reached 4.0 Gflop/s" in raised.source
    (row,) = trace_analysis.summarise(trace, {"CPU": raised})["operators"]
    assert row["roofline"] < 1
    high = roofline.Peak(5e9, 1e9, "measured")
    assert peak_rates.at_least_seen(high, trace, "CPU") is high
    assert peak_rates.at_least_seen(low, trace, "CUDA") is low
    given = peak_rates.at_least_seen(roofline.Peak(1e9, 1e9, "config"), trace, "CPU")
    assert given.flop == 1e9 and "too low" in given.source  # what the user gave stays


def test_a_busy_machine_is_named() -> None:
    trace = scheduled(independent(40), [1_000] * 40)
    summary = trace_analysis.summarise(trace, PEAKS, TILES)
    quiet = [found["rule"] for found in diagnosis.report(summary | {"load": {"cores": 2, "others": 0.05}})]
    assert "busy-machine" not in quiet
    first = diagnosis.report(summary | {"load": {"cores": cores(), "others": float(cores())}})[0]
    assert first["rule"] == "busy-machine" and "while the steps ran" in first["cause"]
    # Short tasks may then be the fault of others, unless the plan finds the tiles too small as well.
    for good, told in ((48, True), (8, False)):
        tiles = {"embed": {"size": 96, "tile": 8, "tiles": 12, "good": good}}
        short = trace_analysis.summarise(scheduled(independent(400), [5] * 400, overhead=2), PEAKS, tiles)
        found = diagnosis.report(short | {"load": {"cores": cores(), "others": float(cores())}})
        assert ("short-tasks" in [one["rule"] for one in found]) == told
    shared = trace_analysis.summarise(trace, {"CPU": replace(PEAKS["CPU"], cpu_share=0.35)}, TILES)
    for others in (0.0, None):  # only the peak was disturbed: the report must not say that the steps were
        peak = diagnosis.report(shared | {"load": {"cores": cores(), "others": others}})[0]["cause"]
        assert peak.startswith("The measurement of the peak was disturbed: its threads had a core for 35% of the time")
        assert "The machine was busy" not in peak and "took longer" not in peak
    both = diagnosis.report(shared | {"load": {"cores": cores(), "others": float(cores())}})[0]["cause"]
    assert "while the steps ran; the threads that measured the peak had a core for 35%" in both
    assert "took longer" in both


def of_two_workers(idle: float, **more: Any) -> dict[str, Any]:
    """The summary of a run in which two workers were idle so much, and the only operator is slow."""
    trace = scheduled(independent(40), [1_000] * 40)
    summary = trace_analysis.summarise(trace, {"CPU": replace(PEAKS["CPU"], flop=1e15)}, TILES)
    workers = [worker | {"idle": idle, "working": 1 - idle} for worker in summary["workers"]]
    return summary | {"workers": workers} | more


@pytest.mark.parametrize(("parallelism", "rule"), [(1.0, "few-tiles"), (99.0, "imbalance")])
def test_advice_from_times_of_a_busy_machine_says_so(parallelism: float, rule: str) -> None:
    """And what a quiet one shows does not; nobody is told to make tiles smaller and larger at once."""
    path = {"share_of_run": 0.1, "accumulation_share": 0.0, "operators": [{"operator": "A", "phase": "", "seconds": 1}]}
    summary = of_two_workers(0.5, parallelism=parallelism, critical_path=path)
    quiet = {one["rule"]: one["advice"] for one in diagnosis.report(summary | {"load": {"cores": 2, "others": 0.0}})}
    assert list(quiet) == ([rule] if rule == "few-tiles" else [rule, "low-roofline"])
    assert not [rule for rule, advice in quiet.items() if diagnosis.DOUBT in advice]
    busy = {one["rule"]: one["advice"] for one in diagnosis.report(summary | {"load": {"cores": 2, "others": 99.0}})}
    assert [*busy] == ["busy-machine", *quiet] and diagnosis.DOUBT not in busy.pop("busy-machine")
    assert busy == {rule: diagnosis.DOUBT + advice for rule, advice in quiet.items()}


def test_a_disturbed_peak_makes_only_the_roofline_doubtful() -> None:
    peaks = {"CPU": {"flop_per_s": 1e15, "bytes_per_s": 1e9, "source": "", "cpu_share": 0.3}}
    found = {one["rule"]: one["advice"] for one in diagnosis.report(of_two_workers(0.5, parallelism=99.0, peaks=peaks))}
    assert [name for name, advice in found.items() if diagnosis.DOUBT in advice] == ["low-roofline"]
    assert [*found] == ["busy-machine", "imbalance", "low-roofline"]


def test_the_load_of_others() -> None:
    """A process that computes beside this one is seen."""
    command = [sys.executable, "-c", "import time\nprint(flush=True)\nwhile True: time.perf_counter()"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout
        other.stdout.readline()
        with Load() as found:
            time.sleep(1.0)
        other.kill()
    assert found.others is not None and found.others > 0.2 and found.facts()["cores"] == cores()


def test_what_a_process_computes_itself_is_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2 s in which all cores together were busy for 3 s, 2.5 s of them with this process."""
    clocks = {"perf_counter": [10.0, 12.0], "process_time": [1.0, 3.5]}
    monkeypatch.setattr(load, "time", SimpleNamespace(**{name: iter(of).__next__ for name, of in clocks.items()}))
    monkeypatch.setattr(load, "_busy_seconds", iter([100.0, 103.0]).__next__)
    with Load() as found:
        pass
    assert (found.others, found.own) == (0.25, 1.25)


@pytest.mark.parametrize(
    "command", [["train"], ["profile"], ["bench", "step"], ["sweep", "--auto"]], ids=lambda command: command[0]
)
def test_workers_that_the_machine_lacks_are_refused_before_other_work(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measurement for `tiles: auto` with so many threads could take all memory."""
    model = "model: {layers: 1, embed: 16, heads: 2}"
    (tmp_path / "tiny.yaml").write_text(f"{model}\ntrain: {{steps: 2, batch: 2, seq: 8}}\n")
    monkeypatch.chdir(tmp_path)
    for module, name in ((builders, "measured_rates"), (datasets, "build_dataset")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("work before the check"))
    more = f"runtime.cpus={cores() + 1}"
    done = CliRunner().invoke(app, [*command, "tiny.yaml", "--set", "tiles=auto", "--set", more])
    assert isinstance(done.exception, ConfigError), done.output
    assert str(done.exception).endswith(f"got {cores() + 1}; allowed: 1 to {cores()}, the number of cores")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.yaml"]


def test_rates_are_measured_on_at_most_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan may be for a machine with more cores."""
    started: list[threading.Thread] = []
    monkeypatch.setattr(worker_rates, "cores", lambda: 2)
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (started.append(thread), start(thread)))
    assert worker_rates.measured_rates(9, False, size=32, seconds=0.001).flop_s > 0 and len(started) == 2


def test_a_peak_on_a_machine_that_keeps_a_thread_waiting() -> None:
    """One call is timed, however late."""
    calls: list[int] = []
    best, all_of_them, own = best_of(lambda: calls.append(1), seconds=0.0)
    assert calls == [1] and 0 < best <= all_of_them and own >= 0
