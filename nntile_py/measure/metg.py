"""`nntile bench metg`: the minimum effective task granularity (METG), as in Task Bench (Slaughter et al. 2020).

A task is a loop of dependent multiply-adds on a CPU core or on one warp of a GPU. A long task gives the time of a
multiply-add, hence the time of each task without overhead. The efficiency is this time divided by the measured time.
The launch of a kernel counts as overhead. `in_stream` is the efficiency of the same kernels, back to back in one task.
"""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
import typer

from nntile_py.errors import ConfigError
from nntile_py.system.clock import spread
from nntile_py.system.machine import machine
from nntile_py.system.units import counted

DURATIONS = "2,5,10,20,50,100,200,500,1000,2000"
IN_STREAM = 32  # kernels in one task
GOALS = (0.5, 0.95)  # efficiencies


def metg(
    cuda: Annotated[int, typer.Option(help="GPUs; 0: measure on the CPU.", min=0)] = 0,
    cpus: Annotated[int | None, typer.Option(help="CPU workers. [default: all cores]")] = None,
    scheduler: Annotated[str, typer.Option(help="StarPU's scheduling policy.")] = "lws",
    chains: Annotated[int, typer.Option(help="Independent chains of tasks for each worker.", min=1)] = 4,
    us: Annotated[str, typer.Option(help="Lengths of a task in microseconds, separated by commas.")] = DURATIONS,
    seconds: Annotated[float, typer.Option(help="Seconds of work for each worker in a measurement.", min=0)] = 0.2,
    repeats: Annotated[int, typer.Option(help="Number of measurements.", min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find the shortest tasks that keep the workers busy: measure the efficiency for several task lengths."""
    if cuda and cpus:
        raise ConfigError("--cpus: got --cuda too; allowed: one of the two, as all workers must have the same speed")
    try:
        lengths = sorted({float(item) for item in us.split(",")})
    except ValueError:
        lengths = []
    if not lengths or lengths[0] <= 0:
        raise ConfigError(f"--us: got {us!r}; allowed: positive numbers, separated by commas")
    result = measure_metg(cuda, cpus, scheduler, chains, lengths, seconds, repeats)
    if as_json:
        print(json.dumps(result, indent=2))
        return
    print("us a task    tasks   efficiency (least to greatest)   in one task")
    for row in result["rows"]:
        e = row["efficiency"]
        print(
            f"{row['us']:9.1f} {row['tasks']:8} {e['median']:12.3f} ({e['min']:.3f} to {e['max']:.3f})"
            f" {row['in_stream']:17.3f}"
        )
    for goal, length in result["metg_us"].items():
        print(f"{goal} % busy: " + ("no such length" if length is None else f"from {length:.1f} us a task"))
    workers = counted(result["workers"], f"{result['kind']} worker")
    print(f"{workers}, {counted(chains, 'chain')} each, {scheduler}")


def measure_metg(
    cuda: int, cpus: int | None, scheduler: str, chains: int, lengths: Sequence[float], seconds: float, repeats: int
) -> dict[str, Any]:
    from nntile_py import _core
    from nntile_py.execution.runtime import Runtime

    with Runtime(cpus=0 if cuda else cpus, cuda=cuda, scheduler=scheduler) as runtime:
        workers = cuda or runtime.cpus
        tiles = [_core.Tile([1], "fp32") for _ in range(chains * workers)]
        for tile in tiles:
            tile.write(np.zeros(1, np.float32))
        step = _calibrate(tiles[0])  # seconds of a multiply-add
        measured: list[tuple[int, int, list[float], float]] = []
        for length in lengths:
            count = max(1, round(length * 1e-6 / step))
            each = math.ceil(min(max(seconds / (length * 1e-6), 50), 20_000) / chains)  # tasks of a chain
            run = _program([tile for _ in range(each) for tile in tiles], count)
            run()  # moves the tiles; dmda* policies calibrate
            times = [run() for _ in range(repeats)]
            in_stream = _program([tiles[0]], count, IN_STREAM)
            measured.append((count, each * chains, times, min(in_stream() for _ in range(10))))
    for count, tasks, times, seconds in measured:
        step = min(step, min(times) / tasks / count, seconds / IN_STREAM / count)
    rows = [
        {
            "us": count * step * 1e6, "tasks": tasks * workers, "seconds": spread(times),
            "efficiency": spread([tasks * count * step / t for t in times]),
            "in_stream": IN_STREAM * count * step / seconds,
        }
        for count, tasks, times, seconds in measured
    ]  # fmt: skip
    metg_us = {f"{goal * 100:g}": shortest(rows, goal) for goal in GOALS}
    return {
        "metg_us": metg_us, "rows": rows, "workers": workers, "kind": "CUDA" if cuda else "CPU", "scheduler": scheduler,
        "chains": chains, "us_per_multiply_add": step * 1e6, **machine(),
    }  # fmt: skip


def _program(tiles: Sequence[Any], count: int, bodies: int = 1) -> Callable[[], float]:
    """Return a function that runs a task on each tile, and returns the seconds of all tasks together.

    Args:
        count: number of multiply-adds in a loop.
        bodies: number of loops in a task.
    """
    from nntile_py import _core
    from nntile_py.execution.task_payload import body, capability_of_devices, encoded_launches
    from nntile_py.tiles import RW, Tile
    from nntile_py.tiles.task import BusyArgs, Task

    described = Task("busy", [RW(Tile("busy", (0,), (1,), "fp32"))], BusyArgs(count))
    loop = body("busy", "busy", [0], [count], launched=encoded_launches([described], capability_of_devices()))
    program = _core.Program()
    for tile in tiles:
        program.add(
            bodies=[loop] * bodies, codelet="busy", name="busy", tiles=[tile], modes=["RW"], floats=[], slots=[],
            footprint=zlib.crc32(repr((count, bodies)).encode()), priority=0, flop=0.0,
        )  # fmt: skip

    def run() -> float:
        start = time.perf_counter()
        program.run([])
        _core.wait_all()
        return time.perf_counter() - start

    return run


def _calibrate(tile: Any) -> float:
    """Return the seconds of a multiply-add in a task of 20 ms, whose overhead is negligible."""
    count, last = 1000, 0.0
    while (last := min(_program([tile], count)() for _ in range(5))) < 2e-3:
        count *= 4
    count = max(1, round(count * 20e-3 / last))
    run = _program([tile], count)
    return min(run() for _ in range(10)) / count


def shortest(rows: Sequence[dict[str, Any]], goal: float) -> float | None:
    """Return the task length (us) from which the efficiency is at least `goal`, by log-linear interpolation.

    Returns None if the longest tasks do not reach `goal`.
    """
    length, longer = None, None
    for row in reversed(rows):
        e = row["efficiency"]["median"]
        if e < goal:
            if longer is not None:
                below, above = longer
                share = (goal - e) / (above - e)
                return float(math.exp(math.log(row["us"]) + share * (math.log(below) - math.log(row["us"]))))
            return None
        length, longer = row["us"], (row["us"], e)
    return length
