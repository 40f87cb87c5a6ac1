"""Measures the rates of CPU cores: flop/s of a matrix product and bytes/s of a copy."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from nntile_py.system.interrupts import ends_at_once
from nntile_py.system.load import cores


@dataclass(frozen=True)
class WorkerRates:
    """Measured rates of one CPU worker while all workers compute.

    Attributes:
        flop_s: flop/s of a matrix product.
        bytes_s: bytes/s of a copy.
        cpu_share: share of the time in which the threads of the measurement had a core.
    """

    flop_s: float
    bytes_s: float
    cpu_share: float


def best_of(work: Callable[[], object], seconds: float = 0.2) -> tuple[float, float, float]:
    """Call `work` repeatedly for a number of seconds, at least once.

    Returns:
        1. Seconds of the best call: the shortest wall time, or the mean processor time of a call if this is shorter.
           Processor time excludes other processes.
        2. Wall time of all calls.
        3. Processor time of this thread for all calls.
    """
    times: list[float] = []
    start, own = time.perf_counter(), time.thread_time()
    now = start
    while not times or now < start + seconds:  # on a busy machine the first call may take longer
        work()
        times.append(time.perf_counter() - now)
        now = time.perf_counter()
    own = time.thread_time() - own
    return min(*times, own / len(times) or math.inf), now - start, own


def measured_rates(workers: int, fp64: bool, size: int = 768, seconds: float = 0.2) -> WorkerRates:
    """Measure the rates of one CPU worker, by a matrix product and a copy of 16 MiB on all workers at once.

    Args:
        workers: number of CPU workers; more workers than cores are measured as one worker on each core.
        fp64: True: the product is in fp64 instead of fp32.
        size: rows and columns of the product's matrices.
        seconds: time of the product, and of the copy.
    """
    with ends_at_once():  # an interrupted import of torch ends the process with a trace of C++
        import torch

    dtype = torch.float64 if fp64 else torch.float32
    workers = min(workers, cores())  # a plan may be for a larger machine; each thread takes 40 MB
    barrier = threading.Barrier(workers)
    measured: list[tuple[float, float, float]] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            measure()
        except BaseException as error:
            failed.append(error)
            barrier.abort()

    def measure() -> None:
        torch.set_num_threads(1)  # threads that torch uses for calls from this thread
        a, b = torch.rand(size, size, dtype=dtype), torch.rand(size, size, dtype=dtype)
        source, target = torch.rand(1 << 22), torch.empty(1 << 22)
        product, best, wall, own = torch.empty_like(a), [], 0.0, 0.0
        works: list[tuple[Callable[[], object], int]] = [
            (lambda: torch.mm(a, b, out=product), 2 * size**3),
            (lambda: target.copy_(source), 2 * source.nbytes),
        ]
        for work, amount in works:
            work()
            barrier.wait()
            each, wall_seconds, own_seconds = best_of(work, seconds)
            best.append(amount / each)
            wall, own = wall + wall_seconds, own + own_seconds
        measured.append((best[0], best[1], own / wall))

    threads = [threading.Thread(target=run) for _ in range(workers)]
    started: list[threading.Thread] = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
    except BaseException:  # the system has no further thread, or Ctrl-C
        barrier.abort()
        raise
    finally:
        for thread in started:
            thread.join()
    for error in failed:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return WorkerRates(*(sum(values) / len(measured) for values in zip(*measured, strict=True)))
