"""`nntile bench capacity`: the largest GPT that nntile_py and PyTorch's FSDP2 train within a limit of GPU memory."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from nntile_py.config.run_config import RunConfig, load
from nntile_py.errors import ConfigError
from nntile_py.measure.contest import measure_in_turns
from nntile_py.measure.contestants import BERT_PEERS, OURS, PEERS, check_gpus, check_peer
from nntile_py.measure.sweep_spec import Measure
from nntile_py.system.folders import installed, replace_file
from nntile_py.system.machine import machine

SHAPE = ("layers", "embed", "heads")
MODELS = {  # sizes in the order of SHAPE: two for CPUs, GPT-2's, then GPT-3's (Brown et al. 2020)
    "tiny": (2, 32, 2), "45M": (6, 512, 8),
    "124M": (12, 768, 12), "355M": (24, 1024, 16), "774M": (36, 1280, 20), "XL": (48, 1600, 25),
    "2.7B": (32, 2560, 32), "6.7B": (32, 4096, 32), "13B": (40, 5120, 40),
}  # fmt: skip
HOST_BYTES = {"nntile": 22, "fsdp2_offload": 18}  # largest bytes of main memory for each parameter; others: not checked
PROCESSES = 2  # number of processes of ddp, fsdp2 and fsdp2_offload on the CPU
STATE_BYTES = 16  # of each bf16 parameter: value, low bits of the master weight, gradient, two moments
NO_ANSWER = "no answer within"  # in the message of NoAnswer
COLUMNS = ("model", "contestant", "trains", "tokens/s", "s a step")


def heads(cuda: int) -> list[str]:
    """Return the heads of the table's columns.

    cuda: number of GPUs; 0: the CPU, where processes take main memory only."""
    peak = "GiB allocated on the fullest GPU" if cuda else "GiB of the largest process"
    return [*COLUMNS, peak, "GiB of main memory, all processes"]


def capacity(
    models: Annotated[str, typer.Option(help=f"Separated by commas: {', '.join(MODELS)}.")] = "355M,774M,XL,2.7B,6.7B",
    contestants: Annotated[str, typer.Option(help="nntile, or a --peer of bench step.")] = "nntile,fsdp2,fsdp2_offload",
    cuda: Annotated[int, typer.Option(help="GPUs; 0: the CPU, for tests.", min=0)] = 1,
    cuda_memory: Annotated[float, typer.Option(help="GiB of each GPU that a program may take.")] = 20.0,
    host_memory: Annotated[float, typer.Option(help="GiB of main memory; larger models are left out. 0: any.")] = 0.0,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a key of experiments/gpt2_124m.yaml, except the model's sizes. [default: train.seq=1024, "
            "4 sequences a GPU in one tile, tokenizer.vocab_size=50304]",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Turns, of one step each.", min=1)] = 3,
    time_limit: Annotated[float, typer.Option(help="Largest number of seconds of a start, and of a turn.")] = 120.0,
    search: Annotated[
        bool, typer.Option("--search", help="Start with the model that fills the GPUs, then try others.")
    ] = False,
    budget: Annotated[float, typer.Option(help="Seconds after which no other model starts. 0: no bound.")] = 0.0,
    out: Annotated[Path | None, typer.Option(help="Write OUT.json and OUT.md after each row.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find the largest GPT that trains within a limit of GPU memory, and measure its speed."""
    names = _allowed("--contestants", contestants, [OURS, *(peer for peer in PEERS if peer not in BERT_PEERS)])
    order = sorted(_allowed("--models", models, MODELS), key=list(MODELS).index)
    check_gpus(cuda, "--cuda")
    own = settings(cuda)
    configs = {model: config_of(model, [*own, *(sets or [])]) for model in order}
    for name in (name for name in names if name != OURS):
        check_peer(configs[order[0]], name)
    how = Measure(gpu_memory=int(cuda_memory * 2**30) or None)
    rows: list[dict[str, Any]] = []
    result = {"sets": [*own, *(sets or [])], "measure": how.model_dump(), "rows": rows, **machine()}
    table = [f"| {' | '.join(heads(cuda))} |", "|---" * len(heads(cuda)) + "|"]
    if not as_json:
        print(*table, sep="\n", flush=True)
    room = (cuda or PROCESSES) * cuda_memory * 2**30
    filling = [parameters(configs[model]) * STATE_BYTES <= room for model in order]
    first = max(sum(filling) - 1, 0) if search else 0
    for row in tried(names, configs, first, how, rounds, time_limit, host_memory, budget):
        rows.append(row)
        if not as_json:
            print(_line(row), flush=True)
        if out:
            replace_file(out.with_suffix(".json"), json.dumps(result, indent=2) + "\n")
            replace_file(out.with_suffix(".md"), "\n".join([*table, *map(_line, rows), ""]))
    if as_json:
        print(json.dumps(result, indent=2))


def settings(cuda: int) -> list[str]:
    """Return the settings of all models as KEY=VALUE: devices, tiles, and 4 sequences for each GPU or CPU process."""
    own = ["precision=fp32", "scheduler=cpu"] if not cuda else []
    batch = 4 * (cuda or PROCESSES)
    return [*own, f"runtime.cuda={cuda}", f"train.batch={batch}", "tiles={batch: 4}", "tokenizer.vocab_size=50304"]


def config_of(model: str, sets: Sequence[str]) -> RunConfig:
    """Return the config of a GPT of MODELS."""
    sizes = [f"model.{key}={size}" for key, size in zip(SHAPE, MODELS[model], strict=True)]
    return load(installed("experiments") / "gpt2_124m.yaml", [*sizes, *sets])


def _allowed(option: str, text: str, names: Collection[str]) -> list[str]:
    """Return the values in a comma-separated option. Raises ConfigError for a value that is not in `names`."""
    for name in text.split(","):
        if name not in names:
            raise ConfigError(f"{option}: got {name!r}; allowed: {', '.join(names)}")
    return text.split(",")


def tried(
    names: Sequence[str],
    configs: dict[str, RunConfig],
    first: int,
    how: Measure,
    rounds: int,
    time_limit: float,
    host_memory: float,
    budget: float,
) -> Iterator[dict[str, Any]]:
    """Try models with each contestant; yield a row of the result for each attempt.

    Contestants alternate: if `budget` ends, all contestants have had about as many attempts. first: index of the model
    that is tried first.
    """
    trains: dict[str, dict[str, bool]] = {name: {} for name in names}
    too_slow: set[str] = set()  # contestants that did not answer in time
    end = time.monotonic() + (budget or math.inf)
    while turns := [
        (name, model)
        for name in names
        if name not in too_slow and (model := next_model([*configs], first, trains[name]))
    ]:
        for name, model in turns:
            config = configs[model]
            row: dict[str, Any] = {"model": model, "contestant": name, "parameters": parameters(config)}
            host = HOST_BYTES.get(name, 0) * row["parameters"] / 2**30
            if time.monotonic() > end:
                row["error"] = f"not tried: {budget:g} s were over"
            elif 0 < host_memory < host:
                row["error"] = f"not tried: may need {host:.0f} GiB of main memory"
            else:
                row |= measure_in_turns(config, how, [name], rounds, time_limit=time_limit)[name]
            error = row.get("error", "")
            trains[name][model] = not error
            if NO_ANSWER in error:
                too_slow.add(name)
            yield row
        if time.monotonic() > end:
            break


def next_model(models: Sequence[str], first: int, trains: dict[str, bool]) -> str | None:
    """Return the model to try next: `first`, then larger models until one fails, or smaller ones until one trains.

    None: the largest model that trains is known, or no model trains.

    Args:
        models: names of models in the order of their sizes.
        first: index in `models` of the model that is tried first.
        trains: for each model that was tried, whether it trains.
    """
    good, bad = ([k for k, model in enumerate(models) if trains.get(model) is fits] for fits in (True, False))
    if good and bad:
        at = (max(good) + min(bad)) // 2 if min(bad) - max(good) > 1 else -1
    else:
        at = max(good) + 1 if good else min(bad) - 1 if bad else first
    return models[at] if 0 <= at < len(models) else None


def parameters(config: RunConfig) -> int:
    c = config.model
    return int(12 * c.layers * c.embed**2 + c.vocab * c.embed)


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"| {row['model']} | {row['contestant']} | no: {row['error'].replace('|', '/')[:120]} | | | | |"
    gib = f"{row['peak_mib'] / 1024:.1f} | {row['host_mib'] / 1024:.1f}"
    return (
        f"| {row['model']} | {row['contestant']} | yes | {row['tokens_per_s']:,.0f} | "
        f"{row['seconds']['median']:.3f} | {gib} |"
    )
