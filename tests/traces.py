"""Traces made up for tests: tasks that follow one another on workers, with dates."""

from typing import Any

import numpy as np

from nntile_py.profiling.trace import Bus, Info, Trace, Worker
from nntile_py.tiles.order import Use, dependencies

US = 1_000


def info(name: str, uses: list[Use], flop: float = 1e3, size: int = 10) -> Info:
    layer, _, operator = name.rpartition(".")
    tiles = ", ".join(str(use.tile) for use in uses)
    return Info(layer, operator, "forward", operator.lower(), tiles, flop, size, tuple(uses))


def scheduled(
    infos: list[Info], lengths: list[float], workers: int = 2, overhead: float = 1.0, fetch: float = 0.0,
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


def independent(count: int, **options: Any) -> list[Info]:
    return [info(f"h0.{options.get('name', 'Contract')}", [Use(k, "W")]) for k in range(count)]


def chain(count: int, adds: bool) -> list[Info]:
    return [info("h0.Contract", [Use("sum", "RW", adds)]) for _ in range(count)]
