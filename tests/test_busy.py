"""A machine on which others compute: that it is seen, and what a profile says then."""

import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from traces import independent, info, scheduled

from nntile_py.profiling import analysis, rules
from nntile_py.system import load
from nntile_py.system.load import Load, cores
from nntile_py.tiles.order import Use

PEAKS = {"CPU": analysis.Peak(1e9, 1e9, "test"), "CUDA": analysis.Peak(1e9, 1e9, "test")}
TILES = {"batch": {"size": 8, "tile": 4, "tiles": 2}, "embed": {"size": 96, "tile": 96, "tiles": 1}}


def test_a_peak_is_at_least_what_a_task_reached() -> None:
    """A machine that was busy while the peak was measured: a product above the roofline would be none."""
    work = [info("Contract", [Use(k, "W")], flop=1e6, size=400) for k in range(4)]
    trace = scheduled(work, [1_000, 250, 2_000, 500])  # the best: 1e6 flop in 250 us
    low = analysis.Peak(1e9, 1e9, "measured", 0.4)
    raised = analysis.at_least_seen(low, trace, "CPU")
    assert raised.flop == pytest.approx(4e9, rel=1e-3) and raised.bytes == 1e9 and raised.cpu_share == 0.4
    assert "gave 1.0 Gflop/s, Contract reached 4.0 Gflop/s" in raised.source
    (row,) = analysis.summarise(trace, {"CPU": raised})["operators"]
    assert row["roofline"] < 1
    high = analysis.Peak(5e9, 1e9, "measured")
    assert analysis.at_least_seen(high, trace, "CPU") is high and analysis.at_least_seen(low, trace, "CUDA") is low
    given = analysis.at_least_seen(analysis.Peak(1e9, 1e9, "config"), trace, "CPU")
    assert given.flop == 1e9 and "too low" in given.source  # what the user gave stays


def test_a_busy_machine_is_named() -> None:
    trace = scheduled(independent(40), [1_000] * 40)
    summary = analysis.summarise(trace, PEAKS, TILES)
    quiet = [found["rule"] for found in rules.report(summary | {"load": {"cores": 2, "others": 0.05}})]
    assert "busy-machine" not in quiet
    first = rules.report(summary | {"load": {"cores": cores(), "others": float(cores())}})[0]
    assert first["rule"] == "busy-machine" and "while the steps ran" in first["cause"]
    # Short tasks may then be the fault of others, unless the plan finds the tiles too small as well.
    for good, told in ((48, True), (8, False)):
        tiles = {"embed": {"size": 96, "tile": 8, "tiles": 12, "good": good}}
        short = analysis.summarise(scheduled(independent(400), [5] * 400, overhead=2), PEAKS, tiles)
        found = rules.report(short | {"load": {"cores": cores(), "others": float(cores())}})
        assert ("short-tasks" in [one["rule"] for one in found]) == told
    shared = analysis.summarise(trace, {"CPU": replace(PEAKS["CPU"], cpu_share=0.35)}, TILES)
    assert "had a core for 35% of the time" in rules.report(shared)[0]["cause"]


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


def test_a_peak_on_a_machine_that_keeps_a_thread_waiting() -> None:
    """One call is timed, however late."""
    calls: list[int] = []
    best, all_of_them, own = analysis.best_of(lambda: calls.append(1), seconds=0.0)
    assert calls == [1] and 0 < best <= all_of_them and own >= 0
