"""`nntile bench`: the cost of a task, a training step beside PyTorch's, a sweep of tile sizes."""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer

from nntile_py.errors import ConfigError, NNTileError

bench_app = typer.Typer(
    name="nntile bench", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    rich_markup_mode=None, help="Measure this machine.",
)  # fmt: skip
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def machine() -> dict[str, Any]:
    """Where a figure was measured: processor, cores, versions, commit, date."""
    import torch

    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        model = next((x.split(":")[1].strip() for x in info.read_text().splitlines() if "model name" in x), model)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "processor": model, "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__,
        "commit": commit.stdout.strip() or None, "date": date.today().isoformat(),
    }  # fmt: skip


def spread(times: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": statistics.median(times), "min": min(times), "max": max(times)}


# -- tasks


@bench_app.command()
def tasks(
    count: Annotated[int, typer.Option(help="Tasks in the program.", min=1)] = 50_000,
    tiles: Annotated[int, typer.Option(help="Tiles of each task, written in turn.", min=0, max=16)] = 0,
    cpus: Annotated[int | None, typer.Option(help="Workers. [default: all cores]")] = None,
    scheduler: Annotated[str, typer.Option(help="StarPU's scheduling policy.")] = "lws",
    repeats: Annotated[int, typer.Option(help="Measurements.", min=1)] = 9,
    as_json: Json = False,
) -> None:
    """Microseconds to submit and to run an empty task from a replayed program."""
    result = measure_tasks(count, tiles, cpus, scheduler, repeats)
    if as_json:
        print(json.dumps(result, indent=2))
        return
    total, submit = result["us_per_task"], result["submit_us_per_task"]
    print(f"{total['median']:.2f} us a task end to end ({total['min']:.2f} to {total['max']:.2f}), of which submission")
    print(f"{submit['median']:.2f} us; {count} tasks, {tiles} tiles each, {result['workers']} workers, {scheduler}")


def measure_tasks(count: int, tiles: int, cpus: int | None, scheduler: str, repeats: int) -> dict[str, Any]:
    import numpy as np

    import nntile_py as nt
    from nntile_py import _core

    total, submit = [], []
    with nt.Runtime(cpus=cpus, scheduler=scheduler) as runtime:
        pool = [_core.Tile([1], "fp32") for _ in range(64)]
        for tile in pool:
            tile.write(np.zeros(1, np.float32))
        program = _core.Program()
        for k in range(count):
            used = [pool[(k + j) % len(pool)] for j in range(tiles)]
            body: tuple[Any, ...] = ("empty", "empty", list(range(tiles)), [], 0, 0, [], 0)
            program.add(bodies=[body], codelet="empty", name="empty", tiles=used, modes=["RW"] * tiles)
        for _ in range(repeats + 1):
            start = time.perf_counter()
            program.run([])
            submitted = time.perf_counter()
            _core.wait_all()
            end = time.perf_counter()
            total.append((end - start) / count * 1e6)
            submit.append((submitted - start) / count * 1e6)
        workers = runtime.cpus
    return {
        "tasks": count, "tiles_per_task": tiles, "workers": workers, "scheduler": scheduler,
        "us_per_task": spread(total[1:]), "submit_us_per_task": spread(submit[1:]), **machine(),
    }  # fmt: skip


# -- one training step, beside PyTorch


class Side:
    """One contestant in a process of its own, stopped by a signal while it is not its turn."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name = name
        command = [sys.executable, "-m", "nntile_py.bench_step", name, json.dumps(options)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ready = self.read()
        self.times: list[float] = []
        self.pause()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise NNTileError(f"bench step: the process of {self.name} ended with status {self.process.wait()}")

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def run(self, steps: int) -> dict[str, Any]:
        """Time `steps` steps."""
        assert self.process.stdin
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        result = self.read()
        self.pause()
        return result

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


@bench_app.command()
def step(
    peer: Annotated[
        str | None,
        typer.Option(
            help="torch: PyTorch eager and torch.compile beside ours; torch_eager, torch_compile: one of them."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Turns of each contestant.", min=1)] = 7,
    steps: Annotated[int, typer.Option(help="Steps in a turn.", min=1)] = 2,
    layers: int = 6,
    embed: int = 384,
    heads: int = 6,
    seq: int = 256,
    batch: int = 8,
    vocab: int = 50257,
    cpus: Annotated[int | None, typer.Option(help="Cores for each side. [default: all]")] = None,
    cuda: Annotated[int, typer.Option(help="CUDA devices of ours; PyTorch takes one. 0: on the CPU")] = 0,
    dtype: Annotated[str, typer.Option(help="bf16, tf32 or fp32, on CUDA devices.")] = "bf16",
    window: Annotated[int, typer.Option(help="Most tasks in flight. 0: no bound")] = 0,
    cuda_memory: Annotated[float, typer.Option(help="GiB of each device for tiles. [default: 85 %]")] = 0.0,
    losses: Annotated[int, typer.Option(help="Report the losses of this many first steps.")] = 0,
    scheduler: str = "lws",
    tiles: Annotated[str, typer.Option(help="Ours, as axis=size,...")] = "batch=1",
    attention: str = "vendor",
    accumulate: str = "chain",
    fusion: bool = True,
    as_json: Json = False,
) -> None:
    """Seconds of one training step of a GPT-2 in fp32: forward, backward, clipping, AdamW."""
    if peer not in (None, "torch", "torch_eager", "torch_compile"):
        raise ConfigError(f"--peer: {peer!r} is not allowed; use torch (both), torch_eager or torch_compile")
    options: dict[str, Any] = {
        "layers": layers, "embed": embed, "heads": heads, "seq": seq, "batch": batch, "vocab": vocab,
        "cpus": cpus or len(os.sched_getaffinity(0)), "scheduler": scheduler, "tiles": parse_tiles(tiles),
        "attention": attention, "accumulate": accumulate, "fusion": fusion, "cuda": cuda, "dtype": dtype,
        "window": window or None, "cuda_memory": cuda_memory, "losses": losses,
    }  # fmt: skip
    names = ["nntile", *(["torch_eager", "torch_compile"] if peer == "torch" else [peer] if peer else [])]
    result = measure_step(options, names, rounds, steps)
    if as_json:
        print(json.dumps(result, indent=2))
        return
    for name in names:
        s = result[name]
        t = s["seconds"]
        print(
            f"{name:14} {t['median']:.3f} s a step ({t['min']:.3f} to {t['max']:.3f}), "
            f"{s['tokens_per_s']:,.0f} tokens/s, "
            f"{s['gflop_per_s']:.1f} Gflop/s, peak {s['peak_mib']:,.0f} MiB, first loss {s['first_loss']:.6f}"
        )
    if peer:
        r = result["ratio_to_fastest_peer"]
        print(f"ours / {result['fastest_peer']}: {r['median']:.3f} (by round {r['min']:.3f} to {r['max']:.3f})")


def parse_tiles(text: str) -> dict[str, int]:
    """`batch=2,embed=96` as a dictionary; empty: uncut."""
    from nntile_py.tiles import Tiling

    result = {}
    for item in filter(None, text.split(",")):
        axis, _, size = item.partition("=")
        if not size.isdigit():
            raise ConfigError(f"--tiles: {item!r} is not allowed; write axis=size,axis=size")
        result[axis] = int(size)
    return Tiling(result).tiles


def measure_step(options: dict[str, Any], names: Sequence[str], rounds: int, steps: int) -> dict[str, Any]:
    """Every contestant in turn, `rounds` times; medians, spread, ratios of the same round."""
    from nntile_py.models import GPT2Config

    shape = {k: options[k] for k in ("layers", "embed", "heads", "vocab")}
    GPT2Config(positions=options["seq"], attention=options["attention"], **shape)  # refused here, not in a child
    sides: list[Side] = []
    try:
        sides.extend(Side(name, options) for name in names)
        last: dict[str, Any] = {}
        for _ in range(rounds):
            for side in sides:
                last[side.name] = side.run(steps)
                side.times.append(last[side.name]["seconds"] / steps)
    finally:
        for side in sides:
            side.close()
    tokens, flop = options["batch"] * options["seq"], sides[0].ready["flop"]
    result: dict[str, Any] = {"options": options, "rounds": rounds, "steps_per_round": steps, **machine()}
    for side in sides:
        t = spread(side.times)
        result[side.name] = {
            "seconds": t, "tokens_per_s": tokens / t["median"], "gflop_per_s": flop / t["median"] / 1e9,
            "peak_mib": last[side.name]["peak_mib"], **{k: v for k, v in side.ready.items() if k != "flop"},
        }  # fmt: skip
    peers = sides[1:]
    if peers:
        best = min(peers, key=lambda side: statistics.median(side.times))
        result["fastest_peer"] = best.name
        ratios = spread([a / b for a, b in zip(sides[0].times, best.times, strict=True)])
        ratios["of_medians"] = statistics.median(sides[0].times) / statistics.median(best.times)
        result["ratio_to_fastest_peer"] = ratios
    return result


# -- tile sizes


@bench_app.command()
def sweep(
    axis: Annotated[list[str] | None, typer.Option(help="AXIS=SIZE,SIZE,...; several make a grid.")] = None,
    rounds: int = 3,
    layers: int = 6,
    embed: int = 384,
    heads: int = 6,
    seq: int = 256,
    batch: int = 8,
    vocab: int = 8192,
    out: Annotated[Path | None, typer.Option(help="Write the table to this file (.md) too.")] = None,
    as_json: Json = False,
) -> None:
    """Step time against tile size, fused and naive."""
    axes: dict[str, list[int]] = {}
    for item in axis or ["batch=1,2,4,8", "embed=96,192,384"]:
        name, _, sizes = item.partition("=")
        if not sizes or not all(s.isdigit() and int(s) for s in sizes.split(",")):
            raise ConfigError(f"--axis: {item!r} is not allowed; write AXIS=SIZE,SIZE,...")
        axes[name] = [int(s) for s in sizes.split(",")]
        parse_tiles(f"{name}=1")
    points: list[dict[str, int]] = [{}]
    for name, values in axes.items():
        points = [point | {name: value} for point in points for value in values]
    base = {
        "layers": layers, "embed": embed, "heads": heads, "seq": seq, "batch": batch, "vocab": vocab,
        "cpus": len(os.sched_getaffinity(0)), "scheduler": "lws", "accumulate": "chain", "cuda": 0,
    }  # fmt: skip
    rows = []
    for point in points:
        row: dict[str, Any] = {"tiles": point}
        for name, fused in (("fused", True), ("naive", False)):
            options = base | {"tiles": point, "fusion": fused, "attention": "vendor" if fused else "naive"}
            measured = measure_step(options, ["nntile"], rounds, 1)["nntile"]
            row[name] = measured["seconds"] | {"tasks": measured["tasks"]}
        rows.append(row)
        if not as_json:
            print(_row(row), flush=True)
    if as_json:
        print(json.dumps({"options": base, "rows": rows, **machine()}, indent=2))
    if out:
        where = machine()
        head = f"GPT-2, {base}; {where['processor']}, {where['cores']} cores, torch {where['torch']}, {where['date']}"
        title = "| tiles | fused s | tasks | naive s | tasks | naive / fused |\n|---|---|---|---|---|---|"
        out.write_text("\n".join([head, "", title, *map(_row, rows), ""]))


def _row(row: dict[str, Any]) -> str:
    tiles = ", ".join(f"{k} {v}" for k, v in row["tiles"].items()) or "uncut"
    f, n = row["fused"], row["naive"]
    return (
        f"| {tiles} | {f['median']:.3f} ({f['min']:.3f}-{f['max']:.3f}) | {f['tasks']} | "
        f"{n['median']:.3f} ({n['min']:.3f}-{n['max']:.3f}) | {n['tasks']} | {n['median'] / f['median']:.2f} |"
    )
