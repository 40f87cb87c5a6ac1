"""`nntile bench`: the cost of a task, a training step beside PyTorch's, a sweep of tile sizes, and bench_*.py."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from nntile_py.errors import ConfigError, NNTileError
from nntile_py.measure.capacity import capacity
from nntile_py.measure.common import parse_tiles
from nntile_py.measure.messages import messages
from nntile_py.measure.metg import metg
from nntile_py.measure.peer_process import FOR_BERT, PEERS, TIME_LIMIT, check_gpus, measure_step
from nntile_py.system import launcher
from nntile_py.system.clock import spread
from nntile_py.system.load import cores
from nntile_py.system.machine import machine

bench_app = typer.Typer(
    name="nntile bench", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    rich_markup_mode=None, help="Measure this machine.", epilog="Example: nntile bench tasks",
)  # fmt: skip
bench_app.command(epilog="Example: nntile bench metg --us 50,500 --seconds 0.05 --repeats 2")(metg)
bench_app.command(epilog="Example: nntile bench capacity --models 355M --cuda 1")(capacity)
bench_app.command(epilog="Example: mpirun -n 2 nntile bench messages --sizes 4096 --repeats 2")(messages)
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


# -- tasks


@bench_app.command(epilog="Example: nntile bench tasks --count 10000 --cpus 1")
def tasks(
    count: Annotated[int, typer.Option(help="Tasks in the program.", min=1)] = 50_000,
    tiles: Annotated[int, typer.Option(help="Tiles of each task, written in turn.", min=0, max=16)] = 0,
    cpus: Annotated[int | None, typer.Option(help="Workers. [default: all cores]")] = None,
    scheduler: Annotated[str, typer.Option(help="StarPU's scheduling policy.")] = "lws",
    repeats: Annotated[int, typer.Option(help="Measurements.", min=1)] = 9,
    profiled: Annotated[
        bool, typer.Option("--profiled", help="Beside it, in turns: with light and full profiles.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Microseconds to submit and to run an empty task from a replayed program."""
    result = measure_tasks(count, tiles, cpus, scheduler, repeats, profiled)
    if as_json:
        print(json.dumps(result, indent=2))
        return
    total, submit = result["us_per_task"], result["submit_us_per_task"]
    print(f"{total['median']:.2f} us a task end to end ({total['min']:.2f} to {total['max']:.2f}), of which submission")
    print(f"{submit['median']:.2f} us; {count} tasks, {tiles} tiles each, {result['workers']} workers, {scheduler}")
    for kind, at in result["profiled"].items():
        print(f"{at['median']:.2f} us ({at['min']:.2f} to {at['max']:.2f}) with a {kind} profile")


def measure_tasks(
    count: int, tiles: int, cpus: int | None, scheduler: str, repeats: int, profiled: bool = False
) -> dict[str, Any]:
    import numpy as np

    from nntile_py import _core
    from nntile_py.execution.runtime import Runtime
    from nntile_py.execution.task_payload import body

    total, submit = [], []
    profiles: dict[str, list[float]] = {"light": [], "full": []} if profiled else {}
    with Runtime(cpus=cpus, scheduler=scheduler) as runtime:
        pool = [_core.Tile([1], "fp32") for _ in range(64)]
        for tile in pool:
            tile.write(np.zeros(1, np.float32))
        program = _core.Program()
        for k in range(count):
            used = [pool[(k + j) % len(pool)] for j in range(tiles)]
            empty = [body("empty", "empty", range(tiles))]
            program.add(bodies=empty, codelet="empty", name="empty", tiles=used, modes=["RW"] * tiles)
        for _ in range(repeats + 1):
            start = time.perf_counter()
            program.run([])
            submitted = time.perf_counter()
            _core.wait_all()
            end = time.perf_counter()
            total.append((end - start) / count * 1e6)
            submit.append((submitted - start) / count * 1e6)
            for kind, times in profiles.items():
                _core.profile_begin(count, kind == "light")
                start = time.perf_counter()
                program.run([])
                _core.wait_all()
                times.append((time.perf_counter() - start) / count * 1e6)
                _core.profile_finish()
        workers = runtime.cpus
    return {
        "tasks": count, "tiles_per_task": tiles, "workers": workers, "scheduler": scheduler,
        "us_per_task": spread(total[1:]), "submit_us_per_task": spread(submit[1:]),
        "profiled": {kind: spread(times[1:]) for kind, times in profiles.items()}, **machine(),
    }  # fmt: skip


# -- one training step, beside PyTorch

Config = Annotated[
    str | None, typer.Argument(metavar="[CONFIG]", help="A YAML, of any model; its keys instead of the options' sizes.")
]
Peer = Annotated[
    str | None,
    typer.Option(
        help="Beside ours, with commas between: torch_eager, torch_compile (torch is both); ddp, fsdp2, fsdp2_offload: "
        "a process for each GPU of --cuda. Of a CONFIG with BERT: torch_packed and torch_padded, PyTorch's strongest "
        "form without padding and with it; ddp: the same on the GPUs of runtime.cuda, packed if train.pack is on."
    ),
]
Gib = Annotated[
    float, typer.Option(help="GiB of each device, of ours 1 for kernels' workspaces. [default: all; tiles 85 %]", min=0)
]
Placed = Annotated[str | None, typer.Option(help="planned or scheduler. [default: planned on several GPUs]")]
Alpha = Annotated[
    float, typer.Option(help="Of CONFIG: mean length of the sequences, as a part of train.seq.", min=0.01, max=1)
]


@bench_app.command(epilog="Example: nntile bench step --layers 1 --embed 64 --heads 4 --seq 32 --vocab 512 --rounds 2")
def step(
    config: Config = None,
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of it.")] = None,
    peer: Peer = None,
    rounds: Annotated[int, typer.Option(help="Turns of each contestant.", min=1)] = 7,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Steps in a turn, or forward passes in flight together, of which a turn takes the median of 15 times. "
            "[default: 2; 10 passes]",
            min=1,
        ),
    ] = None,
    layers: int = 6,
    embed: int = 384,
    heads: int = 6,
    seq: int = 256,
    batch: Annotated[int, typer.Option(min=1)] = 8,
    vocab: int = 50257,
    cpus: Annotated[int | None, typer.Option(help="Cores for each side. [default: all]", min=1)] = None,
    cuda: Annotated[int, typer.Option(help="CUDA devices; torch_* take one. 0: on the CPU", min=0)] = 0,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, tf32 or fp32, on CUDA devices.")] = "bf16",
    window: Annotated[int, typer.Option(help="Most tasks in flight. 0: no bound", min=0)] = 0,
    cuda_memory: Gib = 0.0,
    losses: Annotated[int, typer.Option(help="Report the losses of this many first steps.", min=0)] = 0,
    scheduler: str = "lws",
    placement: Placed = None,
    tiles: Annotated[str, typer.Option(help="Ours, as axis=size,...")] = "batch=1",
    attention: str = "vendor",
    accumulate: str = "chain",
    fusion: bool = True,
    alpha: Alpha = 1.0,
    inference: Annotated[bool, typer.Option("--inference", help="Of CONFIG: a forward pass, no step.")] = False,
    time_limit: Annotated[
        float, typer.Option(help="Seconds of a contestant's start, and of a turn.", min=0.1, max=1e6)
    ] = TIME_LIMIT,
    as_json: Json = False,
) -> None:
    """Seconds of one training step of a GPT-2, or of CONFIG's model: forward, backward, clipping, AdamW.

    Of the ranks that mpirun has started, CONFIG's together."""
    from nntile_py.graph.step import PRECISIONS
    from nntile_py.tiles.placement import PLACEMENTS

    names, steps = ["nntile", *parse_peers(peer)], steps or (10 if inference else 2)
    check_gpus(cuda)
    if placement not in (None, *PLACEMENTS):
        raise ConfigError(f"--placement: {placement!r} is not allowed; use {' or '.join(PLACEMENTS)}")
    options: dict[str, Any] = {
        "layers": layers, "embed": embed, "heads": heads, "seq": seq, "batch": batch, "vocab": vocab,
        "cpus": cpus or cores(), "scheduler": scheduler, "tiles": parse_tiles(tiles),
        "attention": attention, "accumulate": accumulate, "fusion": fusion, "cuda": cuda, "dtype": dtype,
        "window": window or None, "cuda_memory": cuda_memory, "losses": losses, "time_limit": time_limit,
        "placement": placement,
    }  # fmt: skip
    dtypes = [name for name, kinds in PRECISIONS.items() if "CUDA" in kinds]
    if dtype not in dtypes:
        raise ConfigError(f"--dtype: {dtype!r} is not allowed; use {', '.join(dtypes)}")
    if config is None and sets:
        raise ConfigError(f"--set: {sets[0]} is allowed only with CONFIG")
    if config is None and dtype == "fp16" and len(names) > 1:
        raise ConfigError("--dtype: fp16 is not allowed with --peer; use bf16, or a CONFIG with precision: fp16")
    if config is not None:
        options |= of_config(config, sets or [], names, alpha, inference=inference)
    elif alpha != 1 or inference or set(names) & set(FOR_BERT):
        raise ConfigError(f"--alpha, --inference, --peer {' and '.join(FOR_BERT)}: allowed only with CONFIG")
    if launcher.started()[1] > 1:
        from nntile_py.measure import rank_bench

        rank_bench.check(config, names[1:])
        result = rank_bench.measure_ranks(options, rounds, steps)
        if not launcher.leads():
            return
    else:
        result = measure_step(options, names, rounds, steps)
    print(json.dumps(result, indent=2) if as_json else _told(result, names))
    if all("error" in result[name] for name in names):
        raise typer.Exit(1)


def parse_peers(told: str | None) -> list[str]:
    """The contestants of --peer."""
    both = {"torch": ["torch_eager", "torch_compile"]}
    names = [name for item in told.split(",") for name in both.get(item, [item])] if told else []
    for name in names:
        if name not in PEERS:
            known = f"torch ({' and '.join(both['torch'])}), {', '.join(PEERS)}"
            raise ConfigError(f"--peer: {name!r} is not allowed; use {known}")
    return list(dict.fromkeys(names))


def of_config(path: str, sets: list[str], names: list[str], alpha: float, *, inference: bool) -> dict[str, Any]:
    """What takes the place of the options. Raises ConfigError for contestants that cannot run it."""
    from nntile_py.config.run_config import load
    from nntile_py.measure.config_peer import check_peer

    config = load(path, sets)
    for name in names:
        if name != "nntile":
            check_peer(config, name, inference=inference)
    cuda = config.workers if config.runtime.cuda else 0
    check_gpus(cuda, "runtime.cuda")
    return {
        "config": str(Path(path).resolve()), "sets": sets, "cuda": cuda,
        "batch": config.train.batch * config.train.grad_accumulation, "seq": config.train.seq,
        "dtype": config.precision, "alpha": alpha, "inference": inference,
    }  # fmt: skip


def _told(result: dict[str, Any], names: list[str]) -> str:
    lines = [told(name, result[name]) for name in names]
    if "fastest_peer" in result:
        r = result["ratio_to_fastest_peer"]
        rate = f"{1 / r['median']:.3f} times its tokens/s"
        time_taken = f"{r['median']:.3f} (by round {r['min']:.3f} to {r['max']:.3f})"
        lines.append(f"ours / {result['fastest_peer']}: {time_taken}, {rate}")
    return "\n".join(lines)


def told(name: str, row: dict[str, Any]) -> str:
    """A contestant's line."""
    if "error" in row:
        return f"{name:14} failed: {row['error']}"
    t = row["seconds"]
    flop = f"{row['gflop_per_s']:.1f} Gflop/s, " if "gflop_per_s" in row else ""
    unit, each = ("s", 1) if t["median"] > 0.1 else ("ms", 1e3)
    least, middle, most = (f"{t[key] * each:.3f}" for key in ("min", "median", "max"))
    return (
        f"{name:14} {middle} {unit} a step ({least} to {most}), "
        f"{row['tokens_per_s']:,.0f} tokens/s, {flop}peak {row['peak_mib']:,.0f} MiB, "
        f"first loss {row['first_loss']:.6f}"
    )


# -- tile sizes


@bench_app.command(epilog="Example: nntile bench sweep --axis embed=48 --rounds 1 --layers 1 --embed 96 --seq 32")
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
        "cpus": cores(), "scheduler": "lws", "accumulate": "chain", "cuda": 0,
    }  # fmt: skip
    rows = []
    for point in points:
        row: dict[str, Any] = {"tiles": point}
        for name, fused in (("fused", True), ("naive", False)):
            options = base | {"tiles": point, "fusion": fused, "attention": "vendor" if fused else "naive"}
            measured = measure_step(options, ["nntile"], rounds, 1)["nntile"]
            if "error" in measured:
                raise NNTileError(f"bench sweep: {measured['error']}")
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
