"""Traces made up for tests: tasks that follow one another on workers, with dates; the rules of a file with a trace."""

import json
from bisect import bisect_right
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nntile_py.profiling.trace import Bus, TaskInfo, Trace, Worker
from nntile_py.tiles.dependencies import TileUse, dependencies

US = 1_000


def info(name: str, uses: list[TileUse], flop: float = 1e3, size: int = 10) -> TaskInfo:
    layer, _, operator = name.rpartition(".")
    tiles = ", ".join(str(use.tile) for use in uses)
    return TaskInfo(layer, operator, "forward", operator.lower(), tiles, flop, size, tuple(uses))


def scheduled(
    infos: list[TaskInfo], lengths: list[float], workers: int = 2, overhead: float = 1.0, fetch: float = 0.0,
    kind: str = "CPU", submit: float = 0.01,
) -> Trace:  # fmt: skip
    """Each task, in order, on the worker that is free first. Lengths, overhead and fetch in us."""
    before = dependencies(i.uses for i in infos)
    free, end = [0.0] * workers, [0.0] * len(infos)
    rows = []
    for task, length in enumerate(lengths):
        worker = min(range(workers), key=free.__getitem__)
        submitted = task * submit
        pop = max([submitted, free[worker], *(end[b] for b in before[task])])
        start = pop + overhead / 2 + fetch
        end[task] = start + length
        free[worker] = end[task] + overhead / 2
        rows.append((worker, submitted, pop, pop + overhead / 2, start, start, end[task], free[worker]))
    names = ("worker", "submit", "pop", "fetch", "fetched", "start", "end", "released")
    columns = dict(zip(names, (np.array(rows).T * [[1 / US]] + [[0]]) * US, strict=True))
    table = {k: (v * (1 if k == "worker" else US)).round().astype(np.int64) for k, v in columns.items()}
    count, node = len(infos), int(kind == "CUDA")
    ones = np.ones(count, np.int64)
    return Trace(
        infos=infos, workers=[Worker(f"{kind} {k}", kind, node) for k in range(workers)], nodes=["RAM", "CUDA 0"],
        buses=[Bus(0, 1, 10**6, 7)] if node else [], info=np.arange(count), step=ones, replay=ones,
        memory=ones * 100, main_memory=ones * 200, **table,
    )  # fmt: skip


def independent(count: int, **options: Any) -> list[TaskInfo]:
    return [info(f"h0.{options.get('name', 'Contract')}", [TileUse(k, "W")]) for k in range(count)]


def chain(count: int, adds: bool) -> list[TaskInfo]:
    return [info("h0.Contract", [TileUse("sum", "RW", adds)]) for _ in range(count)]


def check_format(path: Path) -> list[dict[str, Any]]:
    """Reads a trace-event file and holds it to the format's rules."""
    tree = json.loads(path.read_text())
    assert isinstance(tree["traceEvents"], list)
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    flows: dict[int, dict[str, dict[str, Any]]] = {}
    named, inner = set(), []
    for event in tree["traceEvents"]:
        assert event["ph"] in "XMCsf", event
        assert isinstance(event["name"], str) and event["name"]
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            named.add((event["pid"], event["tid"]))
            continue
        assert event["ts"] >= 0 and np.isfinite(event["ts"])
        if event["ph"] == "X":
            assert event["dur"] >= 0 and isinstance(event["cat"], str)
            if event["cat"] == "part":
                inner.append(event)
                continue
            rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
        else:
            assert event["ph"] == "s" or event["bp"] == "e"
            assert event["ph"] not in flows.setdefault(event["id"], {})
            flows[event["id"]][event["ph"]] = event
    assert set(rows) <= named
    for pid_tid, spans in rows.items():  # slices of a row do not overlap
        spans.sort()
        assert all(a[1] <= b[0] + 1e-3 for a, b in pairwise(spans)), pid_tid
    parts: dict[int, list[dict[str, Any]]] = {}
    groups = {e["args"]["task"]: e for e in tree["traceEvents"] if e["ph"] == "X" and "parts" in e["args"]}
    for event in inner:
        parts.setdefault(event["args"]["group"], []).append(event)
    assert parts.keys() == groups.keys()
    for task, found in parts.items():  # the parts fill their group, one after the other
        group = groups[task]
        assert [p["name"].removesuffix(" (estimated)") for p in found] == [p["name"] for p in group["args"]["parts"]]
        edges = [group["ts"], *(p["ts"] + p["dur"] for p in found)]
        assert edges[:-1] == pytest.approx([p["ts"] for p in found], abs=1e-6)
        assert edges[-1] == pytest.approx(group["ts"] + group["dur"], abs=1e-6)
    for flow in flows.values():
        assert flow.keys() == {"s", "f"}
        assert flow["s"]["ts"] <= flow["f"]["ts"] + 1e-3
        for event in flow.values():  # both ends lie on a slice
            spans = rows[event["pid"], event["tid"]]
            at = bisect_right(spans, (event["ts"] + 1e-3, np.inf)) - 1
            assert at >= 0 and event["ts"] <= spans[at][1] + 1e-3
    return list(tree["traceEvents"])
