"""`mpirun -n 2 nntile bench messages`: the cost of sending a tile to another rank, by the tile's size.

A hop is the time from a task of one rank to the next task of the other rank, when both change one tile alternately. A
message is the time of a tile when rank 0 writes many tiles at the same time, and rank 1 reads them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from nntile_py.errors import ConfigError
from nntile_py.system import launcher as system
from nntile_py.system.clock import spread
from nntile_py.system.machine import machine
from nntile_py.tiles import RW, R, TaskList, Tile, W

SIZES = "4,4096,65536,1048576,8388608"
HOPS = 200
AT_A_TIME = 64 << 20  # bytes in flight, of at most HOPS messages
IDLE = 1.0  # seconds without messages, in which the load of MPI's idle thread is measured


def messages(
    sizes: Annotated[str, typer.Option(help="Bytes of a tile, separated by commas.")] = SIZES,
    seconds: Annotated[float, typer.Option(help="Smallest number of seconds of a measurement.", min=0)] = 0.2,
    repeats: Annotated[int, typer.Option(help="Number of measurements.", min=1)] = 5,
    cuda: Annotated[int, typer.Option(help="1: from GPU to GPU, through main memory.", min=0, max=1)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure microseconds and GB/s of messages from rank 0 to rank 1, by tile size. Needs mpirun."""
    items = [item.strip() for item in sizes.split(",")]
    if not all(item.isdigit() and int(item) >= 4 for item in items):
        raise ConfigError(f"--sizes: got {sizes!r}; allowed: numbers of bytes, at least 4, separated by commas")
    if system.started()[1] < 2:
        raise ConfigError("nntile bench messages: got one process; allowed: several, such as mpirun -n 2 nntile ...")
    result = measure_messages([int(item) // 4 * 4 for item in items], seconds, repeats, cuda)
    if not system.leads():
        return
    if as_json:
        print(json.dumps(result, indent=2))
        return
    print("     bytes   us a hop (least to greatest)   us a message    GB/s")
    for row in result["rows"]:
        hop, message = row["hop_us"], row["message_us"]["median"]
        ends = f"({hop['min']:.1f} to {hop['max']:.1f})"
        print(f"{row['bytes']:10,} {hop['median']:10.1f} {ends:>18} {message:14.2f} {row['gb_per_s']:7.2f}")
    thread = result["progress_thread"]
    print(f"MPI's thread takes {thread['idle']:.1%} of a core while idle, {thread['busy']:.1%} while tiles are sent")


def measure_messages(sizes: list[int], seconds: float, repeats: int, cuda: int = 0) -> dict[str, Any]:
    """Measure messages of these sizes (bytes); every rank must call the function. The times are those of rank 0.

    Args:
        cuda: number of GPUs of each rank; 0: a CPU worker.
    """
    from nntile_py import _core
    from nntile_py.execution.program import Store, programs
    from nntile_py.execution.runtime import Runtime

    with Runtime(cpus=0 if cuda else 1, cuda=cuda, mpi=True) as runtime:
        ranks = runtime.ranks
        assert ranks
        store, rows, busy = Store(), list[dict[str, Any]](), list[float]()

        def timed(tasks: TaskList, count: int) -> dict[str, float]:
            """Return median, minimum and maximum of a message's microseconds. `tasks` sends `count` messages."""
            (program,) = programs([tasks], store)
            times, runs = list[float](), 1
            while len(times) < repeats:
                ranks.barrier()
                used, start = _progress_seconds(), time.perf_counter()
                for _ in range(runs):
                    program.run()
                _core.wait_all()
                took = ranks.of_first(time.perf_counter() - start)
                if took < seconds:
                    runs = 2 * runs if took < seconds / 2 else runs + 1
                    continue
                times.append(took / runs / count * 1e6)
                busy.append((_progress_seconds() - used) / took)
            return spread(times)

        time.sleep(IDLE / 10)
        used = _progress_seconds()
        time.sleep(IDLE)
        idle = (_progress_seconds() - used) / IDLE
        for size in sizes:
            count = max(1, min(HOPS, AT_A_TIME // size))
            message = timed(_one_way(size, count), count)
            rows.append({
                "bytes": size, "hop_us": timed(_to_and_fro(size), HOPS), "message_us": message,
                "at_a_time": count, "gb_per_s": size / message["median"] / 1e3,
            })  # fmt: skip
        return {
            "rows": rows, "progress_thread": {"idle": idle, "busy": spread(busy)["median"]}, "ranks": ranks.size,
            **machine(),
        }  # fmt: skip


def _tasks(emit: Callable[[TaskList], None], workers: list[int]) -> TaskList:
    tasks = TaskList()
    emit(tasks)
    for task, worker in zip(tasks.tasks, workers, strict=True):
        task.worker = worker
    return tasks.resolve()


def _tile(size: int, number: int) -> Tile:
    return Tile(f"of {size} bytes", (number,), (size // 4,), "fp32", persistent=True, kind="input")


def _to_and_fro(size: int) -> TaskList:
    def emit(tasks: TaskList) -> None:
        tile = _tile(size, 0)
        for number in range(HOPS + 1):
            tasks.emit("empty", [RW(tile) if number else W(tile)], op="hop")

    return _tasks(emit, [number % 2 for number in range(HOPS + 1)])


def _one_way(size: int, count: int) -> TaskList:
    def emit(tasks: TaskList) -> None:
        for number in range(count):
            tile = _tile(size, number)
            tasks.emit("empty", [W(tile)], op="write")
            tasks.emit("empty", [R(tile)], op="read")

    return _tasks(emit, [0, 1] * count)


def _progress_seconds() -> float:
    """Return the processor time of this process's StarPU-MPI thread."""
    ticks = 0
    for thread in Path("/proc/self/task").iterdir():
        name, _, rest = (thread / "stat").read_text().rpartition(") ")
        if name.endswith("(MPI"):
            ticks += sum(map(int, rest.split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")
