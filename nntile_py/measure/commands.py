"""`nntile bench`: commands `tasks` and `step`; the other commands are in modules of their names."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Any

import typer

from nntile_py.command_line import CommandApp
from nntile_py.config.builders import with_micro_batches
from nntile_py.config.run_config import RunConfig, load
from nntile_py.config.scheduler_file import check_machine
from nntile_py.measure.capacity import capacity
from nntile_py.measure.contest import TIME_LIMIT, check_ranks, measure_in_turns, measure_ranks
from nntile_py.measure.contestants import OURS, check_gpus, check_peer, parse_peers
from nntile_py.measure.messages import messages
from nntile_py.measure.metg import metg
from nntile_py.measure.sweep_spec import Measure
from nntile_py.system import launcher
from nntile_py.system.clock import spread
from nntile_py.system.machine import machine
from nntile_py.system.units import counted

bench_app = CommandApp(
    name="nntile bench", add_completion=False, help="Benchmarks of this machine.", epilog="Example: nntile bench tasks"
)
bench_app.command(epilog="Example: nntile bench metg --us 50,500 --seconds 0.05 --repeats 2")(metg)
bench_app.command(epilog="Example: nntile bench capacity --models 355M --cuda 1")(capacity)
bench_app.command(epilog="Example: mpirun -n 2 nntile bench messages --sizes 4096 --repeats 2")(messages)
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


# -- tasks


@bench_app.command(epilog="Example: nntile bench tasks --count 10000 --cpus 1")
def tasks(
    count: Annotated[int, typer.Option(help="Tasks in the program.", min=1)] = 50_000,
    tiles: Annotated[int, typer.Option(help="Tiles that each task writes, out of 64 in rotation.", min=0, max=16)] = 0,
    cpus: Annotated[int | None, typer.Option(help="Workers. [default: all cores]")] = None,
    scheduler: Annotated[str, typer.Option(help="StarPU's scheduling policy.")] = "lws",
    repeats: Annotated[int, typer.Option(help="Number of measurements.", min=1)] = 9,
    profiled: Annotated[
        bool, typer.Option("--profiled", help="Also measure with light and full profiles, in turns.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure the microseconds to submit and to run an empty task of a program."""
    result = measure_tasks(count, tiles, cpus, scheduler, repeats, profiled)
    if as_json:
        print(json.dumps(result, indent=2))
        return
    total, submit = result["us_per_task"], result["submit_us_per_task"]
    print(f"{total['median']:.2f} us a task end to end ({total['min']:.2f} to {total['max']:.2f}), with submission in")
    sizes = f"{counted(count, 'task')}, {counted(tiles, 'tile')} each, {counted(result['workers'], 'worker')}"
    print(f"{submit['median']:.2f} us; {sizes}, {scheduler}")
    for kind, at in result["profiled"].items():
        print(f"{at['median']:.2f} us ({at['min']:.2f} to {at['max']:.2f}) with a {kind} profile")


def measure_tasks(
    count: int, tiles: int, cpus: int | None, scheduler: str, repeats: int, profiled: bool = False
) -> dict[str, Any]:
    import numpy as np

    from nntile_py import _core
    from nntile_py.execution.runtime import Runtime
    from nntile_py.execution.task_payload import body

    total, submit = list[float](), list[float]()
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

        def timed(times: list[float], submission: list[float]) -> None:
            start = time.perf_counter()
            program.run([])
            submission.append((time.perf_counter() - start) / count * 1e6)
            _core.wait_all()
            times.append((time.perf_counter() - start) / count * 1e6)

        for _ in range(repeats + 1):
            timed(total, submit)
            for kind, times in profiles.items():
                _core.profile_begin(count, kind == "light")
                timed(times, [])
                _core.profile_finish()
        workers = runtime.cpus
    return {
        "tasks": count, "tiles_per_task": tiles, "workers": workers, "scheduler": scheduler,
        "us_per_task": spread(total[1:]), "submit_us_per_task": spread(submit[1:]),
        "profiled": {kind: spread(times[1:]) for kind, times in profiles.items()}, **machine(),
    }  # fmt: skip


# -- one training step, beside PyTorch

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file of a run.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of CONFIG.")]
PeerOption = Annotated[
    str | None,
    typer.Option(
        "--peer",
        help="PyTorch programs to compare with, separated by commas: torch_eager, torch_compile (torch: both); "
        "on one GPU torch_graphs: torch.compile's mode reduce-overhead, with CUDA graphs. For "
        "BERT also torch_packed and torch_padded: PyTorch's fastest form without and with padding. On several GPUs: "
        "ddp for BERT and GPT-2, fsdp2 and fsdp2_offload for GPT-2, with a process for each GPU of runtime.cuda; ddp "
        "packs BERT's sequences if train.pack is true.",
    ),
]
Gib = Annotated[
    float,
    typer.Option(
        "--cuda-memory", min=0,
        help="GiB of each GPU for a program; nntile_py reserves 1 GiB of them for kernels' workspaces. [default: all]",
    ),
]  # fmt: skip
Alpha = Annotated[float, typer.Option(help="Mean length of the sequences divided by train.seq.", min=0.01, max=1)]
Hold = Annotated[
    bool | None,
    typer.Option(
        "--hold/--give-back",
        help="Keep all programs in memory, or end each program after its turn and start it again for the next turn. "
        "[default: --hold; --give-back if they do not fit together]",
    ),
]


@bench_app.command(epilog="Example: nntile bench step my.yaml --peer torch_compile --rounds 2")
def step(
    config: Config,
    sets: Sets = None,
    peer: PeerOption = None,
    rounds: Annotated[int, typer.Option(help="Turns of each program.", min=1)] = 7,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Steps in a turn. With --inference: passes submitted together; a turn is the median of 15 such times. "
            "[default: 2; 10 passes]",
            min=1,
        ),
    ] = None,
    alpha: Alpha = 1.0,
    inference: Annotated[bool, typer.Option("--inference", help="Time forward passes, not training steps.")] = False,
    cuda_memory: Gib = 0.0,
    hold: Hold = None,
    losses: Annotated[int, typer.Option(help="Report the losses of the first steps, this many.", min=0)] = 0,
    time_limit: Annotated[
        float, typer.Option(help="Largest number of seconds of a program's start, and of a turn.", min=0.1, max=1e6)
    ] = TIME_LIMIT,
    as_json: Json = False,
) -> None:
    """Measure the seconds of a training step of CONFIG: forward, backward, clipping, optimizer.

    Under mpirun: a step of all ranks together."""
    names = parse_peers(peer)
    run, how = load_contest(config, sets or [], names, alpha, inference=inference, steps=steps, cuda_memory=cuda_memory)
    if launcher.started()[1] > 1:
        check_ranks(names)
        result = measure_ranks(run, how, rounds, losses)
        if not launcher.leads():
            return
    else:
        result = measure_in_turns(
            run, how, [OURS, *names], rounds, hold=hold, losses=losses, time_limit=time_limit,
            tell=lambda text: print(text, file=sys.stderr, flush=True),
        )  # fmt: skip
    names = [OURS, *names]
    print(json.dumps(result, indent=2) if as_json else result_text(result, names))
    if all("error" in result[name] for name in names):
        raise typer.Exit(1)


def load_contest(
    path: str, sets: list[str], peers: list[str], alpha: float = 1.0,
    *, inference: bool = False, steps: int | None = None, cuda_memory: float = 0.0,
) -> tuple[RunConfig, Measure]:  # fmt: skip
    """Return the config, and how to measure it. Raises ConfigError if a peer cannot run the config."""
    config = with_micro_batches(load(path, sets))
    for name in peers:
        check_peer(config, name, "inference" if inference else "train")
    check_gpus(config.workers if config.runtime.cuda else 0, "runtime.cuda")
    check_machine(config.runtime)
    how = Measure(
        work="inference" if inference else "train", alpha=alpha, steps=steps or (10 if inference else 2),
        gpu_memory=int(cuda_memory * 2**30) or None,
    )  # fmt: skip
    return config, how


def result_text(result: dict[str, Any], names: list[str]) -> str:
    lines = [row_text(name, result[name]) for name in names]
    if "fastest_peer" in result:
        r = result["ratio_to_fastest_peer"]
        rate = f"{1 / r['median']:.3f} times its tokens/s"
        ratio = f"{r['median']:.3f} (by round {r['min']:.3f} to {r['max']:.3f})"
        lines.append(f"ours / {result['fastest_peer']}: {ratio}, {rate}")
    if result.get("memory", "held") != "held":
        lines.append("Memory was given back: each contestant ended after its turn and was started again for the next.")
    return "\n".join(lines)


def row_text(name: str, row: dict[str, Any]) -> str:
    """Return a contestant's metrics as a line."""
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
