"""`nntile bench capacity`: which GPT sizes train within so much memory of each GPU, ours and PyTorch's FSDP2."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from nntile_py.errors import ConfigError
from nntile_py.measure.common import parse_tiles
from nntile_py.measure.peer_process import NO_ANSWER, OF_GPT2, check_gpus, measure_step, processes
from nntile_py.system.load import cores
from nntile_py.system.machine import machine

SHAPE = ("layers", "embed", "heads")
MODELS = {  # their SHAPE: GPT-2's, then GPT-3's (Brown et al. 2020)
    "tiny": (2, 32, 2), "124M": (12, 768, 12), "355M": (24, 1024, 16), "774M": (36, 1280, 20), "XL": (48, 1600, 25),
    "2.7B": (32, 2560, 32), "6.7B": (32, 4096, 32), "13B": (40, 5120, 40),
}  # fmt: skip
HOST_BYTES = {"nntile": 22, "fsdp2_offload": 18}  # of main memory for each parameter, where all of the state goes there
STATE_BYTES = 16  # of a parameter in bf16: itself, what rounding left, its gradient and two moments
HEAD = "| model | contestant | trains | tokens/s | s a step | GiB of the fullest GPU | GiB of main memory |"


def capacity(
    models: Annotated[str, typer.Option(help=f"With commas between: {', '.join(MODELS)}.")] = "355M,774M,XL,2.7B,6.7B",
    contestants: Annotated[str, typer.Option(help="nntile and peers of bench step.")] = "nntile,fsdp2,fsdp2_offload",
    cuda: Annotated[int, typer.Option(help="CUDA devices. 0: on the CPU, for tests", min=0)] = 1,
    cuda_memory: Annotated[float, typer.Option(help="GiB of each GPU that a contestant may take.")] = 20.0,
    host_memory: Annotated[float, typer.Option(help="GiB of main memory; who needs more is left out. 0: any")] = 0.0,
    seq: int = 1024,
    batch: Annotated[int, typer.Option(help="Sequences of all GPUs together. [default: 4 a GPU]")] = 0,
    vocab: int = 50304,
    tiles: Annotated[str, typer.Option(help="Ours, as axis=size,... [default: a tile of the batch a GPU]")] = "",
    accumulate: str = "chain",
    window: Annotated[int, typer.Option(help="Ours: most tasks in flight. 0: no bound")] = 0,
    rounds: Annotated[int, typer.Option(help="Turns of one step.", min=1)] = 3,
    time_limit: Annotated[float, typer.Option(help="Seconds of a start, and of a turn.")] = 120.0,
    search: Annotated[
        bool, typer.Option("--search", help="Start where weights and states fill the GPUs, then up or down.")
    ] = False,
    budget: Annotated[float, typer.Option(help="Seconds after which none is begun. 0: no bound")] = 0.0,
    out: Annotated[Path | None, typer.Option(help="Write FILE.json and FILE.md, after each row.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The largest GPT that trains within a limit of GPU memory, and how fast."""
    names = _allowed("--contestants", contestants, ["nntile", *OF_GPT2])
    order = sorted(_allowed("--models", models, MODELS), key=list(MODELS).index)
    check_gpus(cuda)
    gpus = processes({"cuda": cuda})
    batch = batch or 4 * gpus
    base: dict[str, Any] = {
        "seq": seq, "batch": batch, "vocab": vocab, "cpus": cores(), "scheduler": "lws",
        "attention": "vendor", "tiles": parse_tiles(tiles or f"batch={max(1, batch // gpus)}"), "fusion": True,
        "accumulate": accumulate, "cuda": cuda, "dtype": "bf16", "window": window or None, "losses": 0,
        "time_limit": time_limit, "placement": None, "cuda_memory": cuda_memory,
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    result = {"options": base, "rows": rows, **machine()}
    if not as_json:
        print(f"{HEAD}\n{'|---' * 7}|", flush=True)
    filling = [_parameters(model, vocab) * STATE_BYTES <= gpus * cuda_memory * 2**30 for model in order]
    first = max(sum(filling) - 1, 0) if search else 0
    for row in _tried(names, order, first, base, rounds, host_memory, budget):
        rows.append(row)
        if not as_json:
            print(_line(row), flush=True)
        if out:
            out.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
            out.with_suffix(".md").write_text("\n".join([HEAD, "|---" * 7 + "|", *map(_line, rows), ""]))
    if as_json:
        print(json.dumps(result, indent=2))


def _allowed(option: str, told: str, names: Collection[str]) -> list[str]:
    """Of an option with commas between."""
    for name in told.split(","):
        if name not in names:
            raise ConfigError(f"{option}: {name!r} is not allowed; use {', '.join(names)}")
    return told.split(",")


def _tried(
    names: Sequence[str], models: Sequence[str], first: int, base: dict[str, Any], rounds: int,
    host_memory: float, budget: float,
) -> Iterator[dict[str, Any]]:
    """A row for each contestant and model, the contestants by turns, so that `budget` cuts off all alike."""
    trains: dict[str, dict[str, bool]] = {name: {} for name in names}
    unknown: set[str] = set()  # contestants of which one was too slow to tell
    end = time.monotonic() + (budget or math.inf)
    while turns := [
        (name, of) for name in names if name not in unknown and (of := next_model(models, first, trains[name]))
    ]:
        for name, model in turns:
            row: dict[str, Any] = {"model": model, "contestant": name, "parameters": _parameters(model, base["vocab"])}
            host = HOST_BYTES.get(name, 0) * row["parameters"] / 2**30
            if time.monotonic() > end:
                row["error"] = f"not tried: {budget:g} s were over"
            elif 0 < host_memory < host:
                row["error"] = f"not tried: may need {host:.0f} GiB of main memory"
            else:
                row |= measure_step(base | dict(zip(SHAPE, MODELS[model], strict=True)), [name], rounds, 1)[name]
            error = row.get("error", "")
            trains[name][model] = not error
            if NO_ANSWER in error:
                unknown.add(name)
            yield row
        if time.monotonic() > end:
            break


def next_model(models: Sequence[str], first: int, trains: dict[str, bool]) -> str | None:
    """The next of these, which grow, to try: `first`, then towards the largest that trains; None once that is known."""
    good, bad = ([k for k, model in enumerate(models) if trains.get(model) is found] for found in (True, False))
    if good and bad:
        at = (max(good) + min(bad)) // 2 if min(bad) - max(good) > 1 else -1
    else:
        at = max(good) + 1 if good else min(bad) - 1 if bad else first
    return models[at] if 0 <= at < len(models) else None


def _parameters(model: str, vocab: int) -> int:
    layers, embed, _ = MODELS[model]
    return 12 * layers * embed**2 + vocab * embed


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"| {row['model']} | {row['contestant']} | no: {row['error'].replace('|', '/')[:120]} | | | | |"
    gib = f"{row['peak_mib'] / 1024:.1f} | {row['host_mib'] / 1024:.1f}"
    return (
        f"| {row['model']} | {row['contestant']} | yes | {row['tokens_per_s']:,.0f} | "
        f"{row['seconds']['median']:.3f} | {gib} |"
    )
