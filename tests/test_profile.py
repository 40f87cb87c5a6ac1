"""`nntile profile`: dates against dependencies, the files it leaves, what its rules find."""

import json
import re
import sys
import time
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
import yaml
from traces import US, chain, check_format, independent, info, scheduled

import nntile_py as nt
from nntile_py import profiling as profile
from nntile_py.analysis import roofline
from nntile_py.cli import inspect
from nntile_py.config.run_config import RunConfig, load
from nntile_py.profiling import diagnosis, peak_rates, perfetto, recorder, trace_analysis
from nntile_py.profiling.trace import Trace, accumulating, stream_starts
from nntile_py.system.worker_rates import best_of
from nntile_py.tiles.dependencies import TileUse, critical_path, dependencies

PEAKS = {"CPU": roofline.Peak(1e9, 1e9, "test"), "CUDA": roofline.Peak(1e9, 1e9, "test")}
TILES = {"batch": {"size": 8, "tile": 4, "tiles": 2}, "embed": {"size": 96, "tile": 96, "tiles": 1}}


# -- dependencies, on lists written by hand


@pytest.mark.parametrize(
    ("modes", "before"),
    [
        ("W R R RW R", [[], [0], [0], [1, 2], [3]]),
        ("W RW RW R", [[], [0], [1], [2]]),
        ("W COMMUTE COMMUTE COMMUTE R", [[], [0], [0], [0], [1, 2, 3]]),
        ("W REDUX REDUX R W", [[], [0], [0], [1, 2], [3]]),
        ("R R W COMMUTE RW", [[], [], [0, 1], [2], [3]]),
    ],
)
def test_dependencies_on_one_tile(modes: str, before: list[list[int]]) -> None:
    assert dependencies([[TileUse("a", mode)] for mode in modes.split()]) == before


def test_dependencies_on_many_tiles_and_the_longest_chain() -> None:
    tasks = [
        [TileUse("a", "W")],
        [TileUse("b", "W")],
        [TileUse("a", "R"), TileUse("c", "W")],
        [TileUse("b", "R"), TileUse("c", "RW", True)],
        [TileUse("a", "W"), TileUse("b", "R")],
    ]
    before = dependencies(tasks)
    assert before == [[], [], [0], [1, 2], [1, 2]]
    assert critical_path(before, [1, 5, 1, 1, 1]) == [1, 3]
    assert critical_path(before, [3, 3.5, 1, 1, 1]) == [0, 2, 3]
    assert critical_path([], []) == []


# -- traces made up, scheduled as a list scheduler would


def names(trace: Trace) -> list[str]:
    return [found["rule"] for found in diagnosis.report(trace_analysis.summarise(trace, PEAKS, TILES))]


def test_rules_find_what_was_put_there() -> None:
    fine = 1e3 * 1e-9 * 1e6  # us that 1e3 flop take at the peak of the test
    assert names(scheduled(independent(40), [fine] * 40, overhead=0.01)) == ["none"]
    assert names(scheduled(independent(400), [5] * 400, overhead=2))[0] == "short-tasks"
    assert names(scheduled(chain(40, True), [fine * 100] * 40))[0] == "serial-chain"
    assert names(scheduled(chain(40, False), [fine * 100] * 40))[0] == "few-tiles"
    assert names(scheduled(independent(2), [fine * 100] * 2, workers=4))[0] == "few-tiles"
    # Tasks that are short too, but what the workers wait for is each other.
    assert names(scheduled(chain(40, False), [15] * 40, overhead=2))[0] == "few-tiles"
    assert names(scheduled(independent(40), [fine * 100] * 40, fetch=50, kind="CUDA"))[0] == "transfers"
    assert names(scheduled(independent(40), [fine * 100] * 40, fetch=50))[0] == "allocation"
    assert names(scheduled(independent(40), [fine * 10] * 40, overhead=0.1)) == ["low-roofline"]
    lopsided = scheduled(independent(40), [fine * 100] * 40)
    lopsided.worker[:] = np.arange(40) >= 30  # all but a few on one worker, one after the other
    span = (lopsided.end - lopsided.start).max() + 2 * US
    for rows in (np.flatnonzero(lopsided.worker == w) for w in (0, 1)):
        shift = np.arange(len(rows)) * span - lopsided.pop[rows]
        for column in ("pop", "fetch", "fetched", "start", "end", "released"):
            getattr(lopsided, column)[rows] += shift
    assert names(lopsided)[0] == "imbalance"
    for trace in (scheduled(chain(40, True), [5] * 40, overhead=4), scheduled(independent(3), [900] * 3)):
        idle = {"short-tasks", "serial-chain", "few-tiles", "imbalance"} & set(names(trace))
        assert len(idle) == 1  # one explanation of the idle time, no advice against another


def test_advice_for_attention_whose_sequence_is_cut() -> None:
    """It is one kernel where the sequence is uncut, whatever `model.attention` says."""
    row = {"operator": "h*.attn Attention", "phase": "forward", "share": 0.5, "roofline": 0.1, "bound_by": "memory"}
    row |= {"estimated": False, "tflop_per_s": 1.0, "gb_per_s": 1.0}
    for tile, named in ((16, "`tiles.seq` uncut"), (32, "fuse it (`fusion: true`)")):
        found = diagnosis.low_roofline(
            {"operators": [row], "tiles": {"seq": {"tile": tile, "size": 32, "tiles": 32 // tile}}}
        )
        assert found and named in found[1]


def test_short_tasks_are_told_tiles_that_are_coarse_enough_at_once() -> None:
    """All axes that have to change, not the next doubling of two."""
    tiles = {"batch": {"size": 8, "tile": 1, "tiles": 8, "good": 4}}
    tiles |= {"seq": {"size": 9, "tile": 9, "tiles": 1, "good": 9}}
    tiles |= {axis: {"size": 96, "tile": 8, "tiles": 12, "good": 48} for axis in ("embed", "ffn", "vocab")}
    trace = scheduled(independent(400), [5] * 400, overhead=2)
    summary = trace_analysis.summarise(trace, PEAKS, tiles)
    advice = diagnosis.report(summary)[0]["advice"]
    assert re.findall(r"`tiles\.(\w+): (\d+)`", advice) == [
        ("batch", "4"), ("embed", "48"), ("ffn", "48"), ("vocab", "48"),
    ]  # fmt: skip
    good = {axis: a | {"good": a["tile"]} for axis, a in tiles.items()}  # as the plan sees it; the profile does not
    advice = diagnosis.report(trace_analysis.summarise(trace, PEAKS, good))[0]["advice"]
    assert "`tiles.embed: 16` (now 8)" in advice


def advice_on(rule: str, settings: dict[str, Any], trace: Trace, tiles: Any = TILES) -> str:
    summary = trace_analysis.summarise(trace, PEAKS, tiles) | {"settings": settings}
    return next(found["advice"] for found in diagnosis.report(summary) if found["rule"] == rule)


def test_advice_fits_the_config() -> None:
    """A limit that is not set cannot be raised; nothing is advised that the run already has."""
    limits = {"memory": 10, "cuda_memory": 10, "window": 10}
    waiting = scheduled(independent(40), [100] * 40, fetch=50)
    assert "runtime." not in advice_on("allocation", {}, waiting)
    assert "or more memory (`runtime.memory`)" in advice_on("allocation", {"limits": {"memory": 10}}, waiting)
    moving = scheduled(independent(40), [100] * 40, fetch=50, kind="CUDA")
    first = "Place tasks where their data is (`runtime.scheduler: dmdar`), or cut along batch, which moves activations"
    batch = {"batch": {"size": 4, "tile": 2, "tiles": 2}}
    assert advice_on("transfers", {"gpus": 1, "plannable": False}, moving, batch) == first + " least."
    told = advice_on("transfers", {"planned": True, "gpus": 2, "limits": limits}, moving, {})
    assert "Place" not in told and "give more memory" not in told.partition(",")[0]
    told = advice_on("transfers", {"planned": True, "gpus": 2, "limits": limits}, moving, batch)
    assert told.startswith("Give more memory (`runtime.memory` or `runtime.cuda_memory`), or cut")
    uncut = {"batch": {"size": 1, "tile": 1, "tiles": 1}}
    assert advice_on("transfers", {"planned": True, "gpus": 2}, moving, uncut).startswith("Compute more for each byte")
    short = scheduled(independent(400), [5] * 400, overhead=2)
    assert "`fusion: true`" in advice_on("short-tasks", {"fused": False}, short)
    assert "fusion" not in advice_on("short-tasks", {"fused": True}, short)
    added = scheduled(chain(40, True), [100] * 40)
    for accumulate, wanted in {"chain": ["tree", "redux", "commute"], "commute": ["tree", "redux"], "tree": []}.items():
        told = advice_on("serial-chain", {"accumulate": accumulate}, added)
        assert re.findall("tree|redux|commute", told) == wanted and "cut the summed axis" in told.lower()
    few = scheduled(chain(40, False), [100] * 40)
    for pack in (False, True):
        seq = {"seq": {"size": 8, "tile": 8, "tiles": 1}, "batch": {"size": 1, "tile": 1, "tiles": 1}}
        told = advice_on("few-tiles", {"pack": pack, "gpus": 2}, few, seq)
        assert ("tiles.seq" in told) != pack and ("fewer workers (`runtime.cuda`)" in told) == pack
    idle = {"idle": 0.5, "name": "CPU 0", "working": 0.5}
    summary: dict[str, Any] = {"workers": [idle] * 2, "parallelism": 9.0, "critical_path": {"share_of_run": 0.1}}
    for settings, wanted in (
        ({}, ["scheduler: cpu_dmdas"]),
        ({"gpus": 1, "limits": limits}, ["runtime.scheduler: dmdas", "runtime.window"]),
        ({"scheduler": "dmdas"}, ["runtime.scheduler: lws"]),
        ({"planned": True, "gpus": 2}, ["runtime.placement: scheduler"]),
    ):
        found = diagnosis.imbalance(summary | {"settings": settings})
        assert found and re.findall("`(.+?)`", found[1]) == wanted


@pytest.mark.parametrize("sets", [(), ("runtime.memory=1GiB", "runtime.window=500", "fusion=false", "accumulate=tree")])
def test_the_settings_of_a_config(sets: tuple[str, ...]) -> None:
    config = load("experiments/gpt2_tiny.yaml", ["scheduler=null", "runtime.cpus=2", *sets])
    settings = recorder.settings(config, inference=True)
    assert settings["limits"] == ({"memory": 2**30, "window": 500} if sets else {})
    assert (settings["fused"], settings["accumulate"]) == ((False, "tree") if sets else (True, "chain"))
    assert settings["inference"] and not (settings["gpus"] or settings["planned"] or settings["plannable"])


def test_the_size_of_the_trace_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(b" " * 2_500_000)
    assert inspect._trace_message(path, {"steps": 3}) == f"{path}, for ui.perfetto.dev: 2.5 MB"
    monkeypatch.setattr(inspect, "LARGE_TRACE", 2)
    assert "2.5 MB; smaller with --steps 1, or fewer tasks a step" in inspect._trace_message(path, {"steps": 3})
    assert "--steps" not in inspect._trace_message(path, {"steps": 1})


def test_rules_name_keys_of_the_config() -> None:
    for trace in (
        scheduled(independent(400), [5] * 400, overhead=2),
        scheduled(chain(40, True), [100] * 40),
        scheduled(chain(40, False), [100] * 40),
    ):
        for found in diagnosis.report(trace_analysis.summarise(trace, PEAKS, TILES)):
            keys = re.findall(r"`([a-z_.]+):", found["advice"])
            assert keys
            assert all(key.split(".")[0] in RunConfig.model_fields for key in keys), keys
            assert found["cause"]


def test_submission_that_does_not_keep_up_is_found() -> None:
    assert names(scheduled(independent(300), [3] * 300, overhead=0.1, submit=4))[0] == "short-tasks"


def test_a_stream_runs_one_task_after_the_other() -> None:
    start, end = np.array([0, 10, 100, 5]), np.array([50, 90, 120, 40])
    assert stream_starts(start, end).tolist() == [40, 50, 100, 5]


def test_accumulation_is_told_from_other_chains() -> None:
    for adds in (True, False):
        trace = scheduled(chain(5, adds), [10] * 5)
        path = critical_path(trace.before, trace.seconds)
        assert len(path) == 5
        assert len(accumulating(trace, path)) == (4 if adds else 0)


def test_shares_of_a_known_trace() -> None:
    trace = scheduled(independent(2), [60, 20], overhead=4, fetch=10)  # 0..78 us and 0..38 us
    first, second = trace_analysis.summarise(trace, PEAKS)["workers"]
    total = 74.0
    assert first["working"] == pytest.approx(60 / total, rel=1e-3)
    assert first["communicating"] == pytest.approx(10 / total, rel=1e-3)
    assert first["overhead"] == pytest.approx(4 / total, rel=2e-2)
    assert first["idle"] == pytest.approx(0, abs=1e-3)
    assert second["idle"] == pytest.approx((total - 34) / total, rel=1e-2)
    for worker in (first, second):
        assert sum(worker[k] for k in SHARES) == pytest.approx(1, abs=1e-9)


SHARES = ("working", "communicating", "overhead", "idle")


def test_roofline_and_rates() -> None:
    work = [info("Contract", [TileUse(k, "W")], flop=1e6, size=4_000) for k in range(4)]
    (row,) = trace_analysis.summarise(scheduled(work, [2_000] * 4), PEAKS)["operators"]
    assert row["tasks"] == 4
    assert row["roofline"] == pytest.approx(0.5, rel=1e-3)  # 1e6 flop at 1e9 flop/s are 1 ms, it took 2
    assert row["tflop_per_s"] == pytest.approx(0.0005, rel=1e-3)
    assert row["gb_per_s"] == pytest.approx(0.002, rel=1e-3)
    assert row["bound_by"] == "flop"
    unknown = {"CPU": peak_rates.device_peak("a device", "fp32")}
    (row,) = trace_analysis.summarise(scheduled(work, [2_000] * 4), unknown)["operators"]
    assert row["roofline"] is None
    assert peak_rates.device_peak("CUDA 0.0 (NVIDIA H200)", "bf16").flop == 790e12


# -- groups: several tasks that run as one


def grouped_trace() -> Trace:
    """A task, then a group of a product and of two copies: 8 us, 1 us and 1 us at the peak of the test."""
    one, two = (
        info("h0.Contract", [TileUse("a", "W")], flop=8e3),
        info("h0.Copy", [TileUse("a", "R")], flop=0, size=1_000),
    )
    inside = tuple(replace(i, uses=(), estimated=True) for i in (one, two, two))
    group = replace(info("h0.Contract + 2", [TileUse("a", "RW")], flop=8e3, size=1_010), parts=inside)
    return scheduled([one, group], [10, 20])


def test_a_groups_time_is_shared_by_floors(tmp_path: Path) -> None:
    trace = grouped_trace()
    parts = trace_analysis.parts(trace, PEAKS)
    assert (parts.seconds * 1e6).tolist() == pytest.approx([10, 16, 2, 2], abs=1e-2)
    assert parts.start[1] == trace.start[1] and parts.end[-1] == trace.end[1]
    assert parts.end[1:-1].tolist() == parts.start[2:].tolist()
    summary = trace_analysis.summarise(trace, PEAKS, TILES)
    assert summary["tasks"] == 2 and len(summary["critical_path"]["operators"]) == 2
    product, copy = summary["operators"]
    assert (product["operator"], product["tasks"], copy["tasks"]) == ("h* Contract", 2, 2)
    assert product["seconds"] == pytest.approx(26e-6, rel=1e-3) and copy["seconds"] == pytest.approx(4e-6, rel=1e-3)
    assert product["estimated"] == pytest.approx(16 / 26, rel=1e-3) and copy["estimated"] == pytest.approx(1)
    assert copy["roofline"] == pytest.approx(0.5, rel=1e-3)
    assert [row["seconds"] for row in summary["critical_path"]["operators"]] == pytest.approx([26e-6, 4e-6], rel=1e-3)
    unknown = trace_analysis.parts(trace, {"CPU": peak_rates.device_peak("a device", "fp32")})
    assert unknown.seconds.sum() == pytest.approx(trace.seconds.sum())
    profile.write(trace, PEAKS, TILES, tmp_path, "groups")
    found = [e for e in check_format(tmp_path / "trace.json") if e["ph"] == "X" and e["pid"] == perfetto.WORKERS]
    (group,) = (e for e in found if "parts" in e["args"])
    assert [p["flop"] for p in group["args"]["parts"]] == [8e3, 0, 0]
    assert group["args"]["parts"][1]["tiles"] == "a" and sum(e["cat"] == "part" for e in found) == 3
    assert "its tasks in proportion" in (tmp_path / "report.html").read_text()


def test_groups_of_a_real_program(tmp_path: Path) -> None:
    """The groups that a GPU would get, on a CPU worker."""
    from nntile_py.analysis.workloads import build
    from nntile_py.execution.program import Store, programs
    from nntile_py.profiling.operator_timer import write_random
    from nntile_py.profiling.recorder import make_trace, watched
    from nntile_py.tiles.task_groups import grouped

    config = RunConfig.model_validate(CONFIG | {"fusion": False})
    ((graph, low),) = build(config, "linear_relu").graphs
    tasks = grouped(low.tasks, 1e10, 1e10, 1e-3)
    assert any(task.parts for task in tasks.tasks)
    with nt.Runtime(cpus=1):
        store = Store()
        write_random(low, store, [t for t in graph.tensors.values() if t.kind in ("input", "param")])
        (program,) = programs([tasks], store)
        with watched() as found:
            program.run()
        trace = make_trace(found.programs, found.native, None)
    parts = trace_analysis.parts(trace, PEAKS)
    assert len(trace) == len(tasks.tasks) and len(parts) == len(low.tasks.tasks)
    flat = [part for task in tasks.tasks for part in task.parts or [task]]
    assert [parts.info_of(k).kernel for k in range(len(parts))] == [task.kernel for task in flat]
    assert (parts.end >= parts.start).all() and parts.seconds.sum() == pytest.approx(trace.seconds.sum())
    profile.write(trace, PEAKS, TILES, tmp_path, "groups")
    check_format(tmp_path / "trace.json")


# -- the format


def test_rows_for_copies(tmp_path: Path) -> None:
    trace = scheduled(independent(6), [100] * 6, fetch=30, kind="CUDA")
    perfetto.write(trace, tmp_path / "trace.json")
    found = check_format(tmp_path / "trace.json")
    rows = {e["args"]["name"] for e in found if e["ph"] == "M" and "name" in e["args"]}
    assert {"workers", "CUDA 0", "fetching input", "to CUDA 1", "RAM to CUDA 0"} <= rows
    assert sum(e["pid"] == perfetto.FETCHES and e["ph"] == "X" for e in found) == 6
    assert {e["name"] for e in found if e["ph"] == "C"} == {"memory of RAM", "memory of CUDA 0", "tasks in flight"}


@pytest.mark.long
def test_a_hundred_thousand_tasks(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    infos = [
        info(
            f"h{k % 12}.{('Contract', 'LayerNorm', 'Attention')[k % 3]}", [TileUse(k, "W"), TileUse(max(k - 7, 0), "R")]
        )
        for k in range(100_000)
    ]
    trace = scheduled(infos, rng.uniform(20, 200, len(infos)).tolist(), workers=8)
    began = time.process_time()
    profile.write(trace, PEAKS, TILES, tmp_path, "synthetic")
    assert time.process_time() - began < 20  # of the processor: other work may share the machine
    assert (tmp_path / "report.html").stat().st_size < 3e6
    assert (tmp_path / "gantt.svg").stat().st_size < 5e6
    assert (tmp_path / "report.html").read_text().count("<rect") < 12_000
    tree = json.loads((tmp_path / "trace.json").read_text())
    assert sum(e["ph"] == "X" for e in tree["traceEvents"]) == 100_000


# -- a real step


CONFIG: dict[str, Any] = {
    "model": {"layers": 2, "embed": 48, "heads": 4, "dropout": 0.1},
    "tokenizer": {"vocab_size": 500},
    "train": {"steps": 1, "batch": 4, "seq": 32, "grad_accumulation": 2},
    "tiles": {"batch": 2, "seq": 16, "embed": 24, "ffn": 100, "vocab": 300},
    "runtime": {"cpus": 2},
    "profile": {"warmup": 1, "peak_flop": 5e10, "peak_bytes": 1e10},
}


@pytest.fixture(scope="module", params=["chain", "redux", "commute"])
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A run under each policy, one of them by the command, one in full, one light: its folder."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "c.yaml").write_text(yaml.safe_dump(CONFIG | {"accumulate": request.param}))
    if request.param == "chain":
        command = [sys.executable, "-m", "nntile_py.cli", "profile", "c.yaml", "--steps", "2", "--out", "p"]
        made = forks.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
        assert made.returncode == 0, made.stderr
        assert "ms a step" in made.stdout
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recorder, "LIGHT_BELOW", 0 if request.param == "redux" else 1)
            profile.profile(load(folder / "c.yaml"), folder / "p", "c", 2)
        assert json.loads((folder / "p/summary.json").read_text())["light"] == (request.param == "commute")
    return request.param, folder / "p"


@pytest.mark.few(1)
def test_files_of_a_run(measured: tuple[str, Path]) -> None:
    policy, folder = measured
    left = {path.name for path in folder.iterdir()}
    assert left == {*profile.FILES}
    summary = json.loads((folder / "summary.json").read_text())
    found = [e for e in check_format(folder / "trace.json") if e["ph"] == "X" and e["pid"] == perfetto.WORKERS]
    assert len(found) == summary["tasks"]
    for number, worker in enumerate(summary["workers"]):
        assert sum(worker[k] for k in SHARES) == pytest.approx(1, abs=0.01)
        assert all(worker[k] >= 0 for k in SHARES)
        busy = sum(e["dur"] for e in found if e["tid"] == number) * 1e-6
        assert busy == pytest.approx(worker["busy_s"], rel=0.01)
        # StarPU's own account, which the trace does not come from. With redux it has filled tiles with zeros too, for
        # which it may have waited for a core as long as it likes.
        if not summary["light"]:
            executing = worker["starpu"]["executing_s"]
            assert busy <= 1.01 * executing and (policy == "redux" or busy >= 0.99 * executing)
    busy = sum(worker["busy_s"] for worker in summary["workers"])
    assert sum(row["seconds"] for row in summary["operators"]) == pytest.approx(busy)
    html = (folder / "report.html").read_text()
    assert not re.search(r"(?:src|href)\s*=|url\(|https?://", html)  # nothing to fetch
    assert summary["findings"][0]["cause"] in unescape(re.sub("<[^>]+>", "", html)).replace("`", "")


def test_no_task_begins_before_its_predecessors_end(measured: tuple[str, Path]) -> None:
    """Dates from the file against the dependencies of the config's program, built anew."""
    policy, folder = measured
    from nntile_py.graph.fusion import Fusion
    from nntile_py.graph.step import StepSpec
    from nntile_py.models.gpt2 import GPT2
    from nntile_py.tiles import Tiling

    config = load(folder / "config.yaml")
    step = StepSpec(
        GPT2(config.model), 4, 32, Tiling(CONFIG["tiles"]), precision="fp32",
        optimizer=config.optimizer, clip_grad_norm=config.optimizer.clip_grad_norm, accumulate=policy,
        fusion=Fusion.of(True), grad_accumulation=2,
    ).step()  # fmt: skip
    assert step.more
    expected = [t for low in (step.first, step.more, step.update) * 2 for t in low.tasks.tasks]
    keys = [
        [TileUse((a.tile.tensor, a.tile.index) if a.tile.persistent else a.tile, a.mode) for a in task.accesses]
        for task in expected
    ]
    tree = json.loads((folder / "trace.json").read_text())
    tasks = [e for e in tree["traceEvents"] if e["ph"] == "X" and e["pid"] == perfetto.WORKERS]
    tasks.sort(key=lambda e: e["args"]["task"])
    own, tasks = tasks[len(expected) :], tasks[: len(expected)]
    assert all(e["args"]["operator"] == "reduction" for e in own)
    assert bool(own) == (policy == "redux")
    assert [e["args"]["kernel"] for e in tasks] == [t.kernel for t in expected]  # every task, in its place
    assert [e["args"]["flop"] for e in tasks] == [t.flop for t in expected]
    half = len(expected) // 2
    assert [e["args"]["step"] for e in tasks] == [1] * half + [2] * half
    for task, before in enumerate(dependencies(keys)):
        for other in before:
            assert tasks[task]["ts"] >= tasks[other]["ts"] + tasks[other]["dur"] - 1e-3


def test_forward_passes_alone(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(CONFIG))
    summary = profile.profile(load(tmp_path / "c.yaml"), tmp_path / "p", "c", 3, inference=True)
    assert summary["steps"] == 3 and summary["tasks"] % 3 == 0
    assert {row["phase"] for row in summary["operators"]} == {"forward"}
    check_format(tmp_path / "p/trace.json")


@pytest.mark.parametrize("head", ["none", "pooler"])
@pytest.mark.parametrize("pack", [False, True])
def test_forward_passes_of_a_model_without_a_loss(tmp_path: Path, head: str, pack: bool) -> None:
    tree = CONFIG | {"model": {"type": "bert", "layers": 1, "embed": 16, "heads": 2, "head": head}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    config = load(tmp_path / "c.yaml", [f"train.pack={str(pack).lower()}", "tiles={batch: 2}"])
    summary = profile.profile(config, tmp_path / "p", "c", 2, inference=True)
    assert summary["steps"] == 2 and {row["phase"] for row in summary["operators"]} == {"forward"}


@pytest.mark.parametrize("fxt", [False, True])
def test_a_profile_that_fails_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fxt: bool) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(CONFIG))
    config = load(tmp_path / "c.yaml")

    def interrupted(*_: Any) -> None:
        assert (tmp_path / "p/fxt").is_dir() == fxt
        raise KeyboardInterrupt

    monkeypatch.setattr(recorder, "run_steps", interrupted)
    for name in ("STARPU_FXT_TRACE", "STARPU_FXT_PREFIX"):
        monkeypatch.setenv(name, "0")  # to be as it was after the test
    with pytest.raises(KeyboardInterrupt):
        profile.profile(config, tmp_path / "p", "c", 1, fxt=fxt)
    assert not (tmp_path / "p").exists()
    (tmp_path / "p").mkdir()  # somebody's own stays
    with pytest.raises(KeyboardInterrupt):
        profile.profile(config, tmp_path / "p", "c", 1, fxt=fxt)
    assert not any((tmp_path / "p").iterdir())


def test_fxt_that_is_not_there_is_said(tmp_path: Path) -> None:
    from nntile_py.profiling.recorder import convert_fxt

    with pytest.raises(nt.TaskError, match="without FxT"):
        convert_fxt(tmp_path)


@pytest.mark.parametrize("light", [False, True])
def test_profiling_twice_and_off_between(light: bool) -> None:
    """Nothing is noted while it is off, and a second profile holds nothing of the first."""
    from nntile_py.profiling.recorder import make_trace, watched

    config = nt.models.GPT2Config(layers=1, embed=16, heads=2, vocab=40, positions=8)
    ids = np.random.default_rng(0).integers(0, 40, (2, 8))
    with nt.Runtime(cpus=1):
        trainer = nt.Trainer(nt.models.GPT2(config), 2, 8)
        traces = []
        for steps in (1, 2):
            trainer.step(ids, ids)
            with watched(light=light) as found:
                for _ in range(steps):
                    trainer.step(ids, ids)
            traces.append(make_trace(found.programs, found.native, trainer.update_list))
    assert [len(t) for t in traces] == [trainer.tasks_per_step, 2 * trainer.tasks_per_step]
    assert all((t.end >= t.start).all() and (t.start >= t.submit).all() for t in traces)
    assert traces[0].released.max() < traces[1].submit.min()


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_the_largest_rate_is_above_that_of_products(tmp_path: Path, precision: str) -> None:
    """A bound below the rate of a product would call correct counts of flop wrong."""
    import torch

    (tmp_path / "c.yaml").write_text(
        "{model: {layers: 1, embed: 12, heads: 2}, train: {steps: 1, batch: 2, seq: 8}, runtime: {cpus: 1},"
        f" precision: {precision}, profile: {{peak_flop: 1.0, peak_bytes: 1.0}}}}"
    )
    x = torch.rand(512, 512, dtype=torch.float64 if precision == "fp64" else torch.float32)
    found = []
    for _ in range(3):  # other tests share the cores
        seconds, _, _ = best_of(lambda: torch.mm(x, x))
        flop = peak_rates.largest_flop(load(tmp_path / "c.yaml"))
        assert flop
        found.append(flop / (2 * 512**3 / seconds / torch.get_num_threads()))
        if found[-1] > 0.9:
            return
    raise AssertionError(found)
