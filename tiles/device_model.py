"""Assumed speeds of workers that were not measured. Plans, placement and task batching use these speeds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from nntile_py.tiles import TaskList
from nntile_py.tiles.allreduce import Network
from nntile_py.tiles.dtypes import is_low
from nntile_py.tiles.placement import Speed

# One of two CPU cores at 2.5 GHz; the cores share the memory. overhead: 16 us a task (12 to 20) in profiles of
# experiments/gpt2_tiny.yaml cut into 939, 6,342 and 86,758 tasks (`overhead_per_task_s`), with no core left for the
# thread that submits. launch: time of the shortest of these tasks, without the time for their flop and bytes. submit:
# from `nntile bench tasks`. All measured on 2026-11-22.
CPU = Speed(flop_s=50e9, bytes_s=5e9, link_s=1e15, overhead=16e-6, launch=10e-6, submit=3e-6)
# One H200, by the dtype of its tiles. tf32 uses fp32 tiles; fp16 is assumed to be as fast as bf16. fp8: the products of
# a layer of GPT-2 124M and of Qwen 2.5 1.5B are 1.76 and 1.87 times as fast (experiments/fp8_products.py, 2026-11-28).
GPU = {
    "bf16": Speed(flop_s=600e12, bytes_s=3.5e12, link_s=350e9, overhead=6e-6, launch=2e-6, host_s=50e9, fp8=1.8),
    "fp32": Speed(flop_s=40e12, bytes_s=3.5e12, link_s=350e9, overhead=6e-6, launch=2e-6, host_s=50e9),
}
MEMORY = int(0.85 * 139.8 * 2**30)  # bytes of tiles on an H200 if runtime.cuda_memory is not set


def rank(cores: int) -> Speed:
    """Return the speed of all CPU workers of a rank together.

    Source of link_s and latency: two ranks on one machine send 1 MB in 0.2 ms and 8 bytes in 20 us, measured on
    2026-11-20 with StarPU-MPI over Open MPI. A network of 40 Gb/s is as fast.
    """
    return replace(CPU, flop_s=cores * CPU.flop_s, link_s=5e9, latency=20e-6)


def rank_of_gpus(one: Speed, gpus: int) -> Speed:
    """Return the speed of all GPUs of a rank together.

    Messages pass through main memory at both ends. The link's speed and latency are assumed, not measured.
    """
    return replace(one, flop_s=gpus * one.flop_s, bytes_s=gpus * one.bytes_s, link_s=4e9, latency=60e-6)


def node(cores: int) -> Speed:
    """Return the speed of a machine's CPU workers as of a single worker.

    Flop/s and bytes/s are multiplied by the cores; overhead and launch are divided by the cores.
    """
    return replace(
        CPU, flop_s=cores * CPU.flop_s, bytes_s=cores * CPU.bytes_s, overhead=CPU.overhead / cores,
        launch=CPU.launch / cores,
    )  # fmt: skip


def network(bytes_s: float, share: int = 1) -> Network:
    """Return a network of nodes. Each adapter moves `bytes_s` bytes/s each way and serves `share` workers.

    Source of latency and message: two ranks on one machine need 20 us for 8 bytes from task to task, and 1 to 5 us
    of CPU for each message (StarPU-MPI over Open MPI, 2026-11-20).
    """
    return Network(bytes_s, latency=20e-6, message=3e-6, share=share)


def speed(lists: Iterable[TaskList], gpu: bool) -> Speed:
    """Return the speed of a worker that runs these task lists."""
    low = any(is_low(access.tile.dtype) for tasks in lists for task in tasks.tasks for access in task.accesses)
    return worker("bf16" if low else "fp32", gpu)


def worker(dtype: str, gpu: bool) -> Speed:
    """Return the speed of a worker that computes with tiles of this dtype."""
    return GPU["bf16" if is_low(dtype) else "fp32"] if gpu else CPU
