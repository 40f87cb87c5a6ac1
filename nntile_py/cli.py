"""The command `nntile`. Heavy imports happen inside the commands, so that --help and a wrong config answer at once."""

import atexit
import errno
import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from nntile_py.errors import ConfigError, NNTileError, shown
from nntile_py.runs import newest_run, run_folder, run_of, taken
from nntile_py.system import ranks

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    epilog="Example: nntile init my.yaml && nntile train my.yaml",
)  # fmt: skip

LARGE_TRACE = 20  # MB: viewers become slow
Config = Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, such as `nntile init` writes.")]


def _complete_key(incomplete: str) -> list[str]:
    """For a shell that completes --set: the keys of all models."""
    from nntile_py.config.run import all_keys
    from nntile_py.models.base import known

    found = (f"{key}=" for cls in known().values() for key in all_keys(cls.Config))
    return [key for key in dict.fromkeys(found) if key.startswith(incomplete)]


Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a key, such as tiles.embed=96.", autocompletion=_complete_key
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main(run: Callable[[], Any] = app) -> None:
    """Entry point: errors of nntile_py become one message and an exit status (NNTILE_DEBUG=1 shows the traceback)."""
    atexit.register(gc.freeze)  # no search for cycles among all that was imported as the process ends: 0.4 s
    try:
        run()
    except (NNTileError, OSError, MemoryError) as error:
        if os.environ.get("NNTILE_DEBUG") == "1":
            raise
        text = f"out of memory ({error})" if isinstance(error, MemoryError) else str(error)
        wrong = isinstance(error, ConfigError)
        if isinstance(error, OSError) and error.filename:
            text = f"{error.filename}: {error.strerror}"
            wrong = error.errno in (errno.ENAMETOOLONG, errno.ELOOP)  # what no file can be called
        ranks.failing(status := 2 if wrong else 1)
        print(shown(f"{ranks.who()}error: {text}"), file=sys.stderr)
        sys.exit(status)


def _version(asked: bool) -> None:
    if asked:
        from nntile_py.system.version import VERSION

        print(VERSION)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Train transformers cut into tiles, every operator a StarPU task."""


@app.command(epilog="Example: nntile init my.yaml --set data.source=my.txt")
def init(
    file: Annotated[Path | None, typer.Argument(help="The YAML to write. [default: MODEL.yaml]")] = None,
    model: Annotated[
        str, typer.Option(metavar="TYPE", help="gpt2, bert, llama, or a class of yours: my_file.py:MyModel.")
    ] = "gpt2",
    sets: Sets = None,
) -> None:
    """Write a YAML that trains as it stands, with every key explained."""
    from nntile_py.config.describe import initial

    file = file or Path(f"{model.rpartition(':')[2].lower()}.yaml")
    text = initial(str(file), model, sets or [])
    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(text)
    except FileExistsError:
        raise ConfigError(f"FILE: {file} is there already; allowed: the name of a new file") from None
    except OSError as error:
        raise ConfigError(f"FILE: {file}: {error.strerror}; allowed: the name of a new file") from None
    print(f"wrote {file}; train it with: nntile train {file}")


@app.command(epilog="Example: nntile config my.yaml --set fusion=false")
def config(
    config: Annotated[str | None, typer.Argument(metavar="CONFIG", help="A YAML file; none with --schema.")] = None,
    sets: Sets = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print a JSON schema of the keys, for editors.")] = False,
    model: Annotated[
        str | None, typer.Option(metavar="TYPE", help="With --schema: of this type of model. [default: of all]")
    ] = None,
) -> None:
    """Print CONFIG with all defaults filled in."""
    if schema == (config is not None) or (model and not schema):
        raise ConfigError("nntile config: allowed: CONFIG, or --schema with or without --model TYPE")
    if schema:
        from nntile_py.config.describe import schema as of

        _print(of(model))
    else:
        from nntile_py.config.run import load

        print(load(str(config), sets or []).to_yaml(), end="")


@app.command(epilog="Example: nntile train my.yaml --set train.steps=100 --out runs/try")
def train(
    config: Config,
    where: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="With --resume: a run's folder, or a checkpoint. [default: --out]"),
    ] = None,
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. [default: runs/NAME of CONFIG]")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the run in a folder, once this one has a checkpoint.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest whole checkpoint of the run, in its folder.")
    ] = False,
    rescue: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to save if the run's folder has no room at the end.")
    ] = None,
) -> None:
    """Train the model that CONFIG describes."""
    from nntile_py.config.run import load

    name = Path(config).stem

    def newest(configured: str | None) -> Path:
        from nntile_py.training.checkpoint import found

        start = where or newest_run(name, configured, out)
        return next((folder for _, folder in found(start)), start)

    loaded = load(config, sets or [], newest if resume else None)
    if where and not resume:
        raise ConfigError(f"DIR: {where} is given without --resume; allowed: nntile train {config} --resume {where}")
    if resume:
        start = where or newest_run(name, loaded.out, out)
        folder = out or run_of(start)
        if overwrite:
            raise ConfigError("--overwrite: not allowed with --resume, which goes on in the run's folder")
        if os.path.realpath(folder) != os.path.realpath(run_of(start)) and taken(folder):
            raise ConfigError(f"--out: {folder} holds something else than {start}; allowed: a new or empty folder")
    else:
        start, folder = None, run_folder(name, loaded.out, out, overwrite)
    if rescue and (taken(rescue) or os.path.realpath(rescue) == os.path.realpath(folder)):
        raise ConfigError(f"--rescue: {rescue} is not an empty folder of its own; allowed: a new or empty one")
    _note(loaded)
    try:
        from rich.console import Console

        from nntile_py.training.loop import train as run

        status = run(
            loaded.model_copy(update={"out": str(folder)}), folder, Console(),
            resume=start, replaces=overwrite and not resume, rescue=rescue,
            again=f"nntile train {config}" + (f" --out {out}" if out else ""),
        )  # fmt: skip
    except KeyboardInterrupt:
        print("interrupted; nothing more is saved", file=sys.stderr)
        status = 130
    raise typer.Exit(status)


@app.command(epilog="Example: nntile plan my.yaml --set tiles.embed=64")
def plan(
    config: Config,
    sets: Sets = None,
    nodes: Annotated[
        int | None, typer.Option(help="Play a step on so many machines, that need not be there. [default: not]")
    ] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="With --nodes: of each. [default: runtime.cuda]")] = None,
    network: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="With --nodes: of a card, each way. [default: 400Gb/s; CPUs 40Gb/s]"),
    ] = None,
    gpus_per_nic: Annotated[int | None, typer.Option(help="With --nodes: that share a card. [default: 1]")] = None,
    strong: Annotated[
        bool, typer.Option("--strong", help="With --nodes: efficiency is against the whole batch on one of them.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print parameters, tasks, flop and bytes, without running; or what a step would take on other machines."""
    from nntile_py.config.run import load

    loaded = load(config, sets or [])
    if nodes is None:
        _note(loaded)
    from nntile_py.analysis.nodes import machines, plan_nodes
    from nntile_py.analysis.plan import plan as make

    on = machines(loaded, nodes, gpus_per_node, network, gpus_per_nic)
    if strong and not on:
        raise ConfigError("--strong: allowed: only with --nodes")
    made = plan_nodes(loaded, on, strong=strong) if on else make(loaded)
    _print(made.to_dict() if as_json else made.render())


@app.command(epilog="Example: nntile profile my.yaml --steps 2 --out runs/look")
def profile(
    config: Config,
    steps: Annotated[int | None, typer.Option(help="Steps to look at. [default: profile.steps]", min=1)] = None,
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. [default: runs/NAME-profile]")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write into a folder that is not empty.")] = False,
    work: Annotated[str, typer.Option(help="train, or inference: forward passes alone.")] = "train",
    fxt: Annotated[bool, typer.Option("--fxt", help="Leave StarPU's own trace too, for ViTE and StarVZ.")] = False,
) -> None:
    """Run a few steps; leave trace, Gantt, report and what holds CONFIG back."""
    from nntile_py.config.run import load

    _one_of("--work", work, ("train", "inference"))
    loaded = load(config, sets or [])
    name = Path(config).stem
    folder = run_folder(f"{name}-profile", None, out or (Path(loaded.out) if loaded.out else None), overwrite)
    if work == "train":
        _note(loaded)
    from nntile_py.profiling import profile as run

    summary = run(loaded, folder, name, steps or loaded.profile.steps, fxt, work == "inference")
    if not ranks.leads():
        return
    for finding in summary["findings"]:
        print(f"{finding['rule']}: {finding['cause']}\n  {finding['advice']}")
    print(f"{summary['seconds_per_step'] * 1e3:.1f} ms a step; open {folder / 'report.html'}")
    print(_trace_told(folder / "trace.json", summary))


@app.command(epilog="Example: nntile graph my.yaml --layer 0 --fusion both --out layer.dot")
def graph(
    config: Config,
    out: Annotated[Path, typer.Option(help="The picture: .svg, .png or .pdf (made by graphviz), or .dot.")],
    sets: Sets = None,
    level: Annotated[str, typer.Option(help="logical (operators) or tiles (tasks).")] = "logical",
    layer: Annotated[int | None, typer.Option(help="One layer, from 0. [default: all]", min=0)] = None,
    phase: Annotated[str, typer.Option(help="forward, backward, update or all.")] = "all",
    fusion: Annotated[str, typer.Option(help="before, after or both, side by side.")] = "after",
    work: Annotated[str, typer.Option(help="train, inference, encoder, decoder, mha, linear_..., qkv_...")] = "train",
    every: Annotated[bool, typer.Option("--every-layer", help="Draw layers that are alike each, not once.")] = False,
) -> None:
    """Draw operators or tile tasks, with flop and bytes, before and after fusion."""
    from typing import get_args

    from nntile_py.config.run import load

    loaded = load(config, sets or [])
    from nntile_py.analysis import draw
    from nntile_py.analysis.workloads import Work

    _one_of("--level", level, ("logical", "tiles"))
    _one_of("--phase", phase, draw.PHASES)
    _one_of("--fusion", fusion, ("before", "after", "both"))
    _one_of("--work", work, get_args(Work))
    what = draw.draw(
        loaded, level=level, work=cast(Work, work), layer=layer, phase=phase, fusion=fusion, folded=not every
    )
    draw.write(what, out)
    print(out)


@app.command(epilog="Example: nntile analyze --work encoder --out runs/encoder")
def analyze(
    config: Annotated[
        str | None, typer.Argument(metavar="[CONFIG]", help="A YAML file; none: --work at BERT-large's size.")
    ] = None,
    work: Annotated[
        str | None, typer.Option(help="encoder, decoder, mha; with CONFIG also train, inference, ... [default: train]")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Run each operator alone, and time it.")] = False,
    repeats: Annotated[int, typer.Option(help="With --measure: times of each; the median is told.", min=1)] = 7,
    sets: Sets = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for report.html, CSV and pictures of the graph. [default: none]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Count each operator's flop and words, before and after fusion; what is bound by memory."""
    loaded, what = _work(config, work, sets)
    from rich.console import Console

    from nntile_py.analysis import tell
    from nntile_py.analysis.operators import analyse

    made = analyse(loaded, what)
    if measure:
        from nntile_py.profiling.alone import measure as run

        made = run(made, loaded, repeats)
    if out:
        for path in tell.write(made, out, loaded, what):
            print(path, file=sys.stderr)
    if as_json:
        _print(made.to_dict())
    else:
        tell.render(made, Console())


@app.command(epilog="Example: nntile layouts tune --work encoder --set model.embed=128 --set train.seq=64")
def layouts(
    action: Annotated[str, typer.Argument(help="tune: run operators in every layout; show: what was found.")],
    config: Annotated[
        str | None, typer.Argument(metavar="[CONFIG]", help="A YAML file; none: --work at BERT-large's size.")
    ] = None,
    work: Annotated[
        str | None, typer.Option(help="encoder, decoder, mha; with CONFIG also train, ... [default: train]")
    ] = None,
    sets: Sets = None,
    repeats: Annotated[int, typer.Option(help="Of tune: times of each; the least counts.", min=1)] = 5,
    database: Annotated[
        Path | None, typer.Option(help="The file of times. [default: in the cache folder, by device, version, dtype]")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Of show: a picture of the times: .svg, .png or .pdf.")] = None,
    as_json: Json = False,
) -> None:
    """Measure operators in all layouts, and show which ones `layout: searched` chooses."""
    from rich.console import Console

    from nntile_py.analysis import layouts as parts
    from nntile_py.config.spec import timings as opened
    from nntile_py.system.folders import replace_file
    from nntile_py.system.pictures import FORMS, files_of

    _one_of("ACTION", action, ("tune", "show"))
    form = out.suffix.lstrip(".") if out else "svg"
    _one_of("--out", form, FORMS)
    loaded, what = _work(config, work, sets)
    if action == "tune":
        from nntile_py.profiling.layouts import tune

        known, console = opened(loaded, database, new=True), Console(stderr=True)
        with console.status("") as status:
            count, others = tune(
                loaded, what, known, repeats, lambda k, n: status.update(f"{k} of {n} operators in their layouts")
            )
        print(f"{count} measured; {known.path}")
        if others:
            print(f"other processes kept {others:.1f} cores busy meanwhile: times are too long", file=sys.stderr)
        return
    known = opened(loaded, database)
    found = parts.shown(loaded, what, known)
    if out:
        best = min(found, key=lambda of: of.seconds)
        replace_file(out, files_of(parts.violins(best, known), [form])[form])
    if as_json:
        _print([of.to_dict() for of in found])
    else:
        parts.render(found, known, Console())


def _work(config: str | None, work: str | None, sets: list[str] | None) -> tuple[Any, Any]:
    """The config and the work of a command that takes --work without one, too."""
    from typing import get_args

    from nntile_py.analysis.workloads import PRESETS, Work, preset
    from nntile_py.config.run import load

    _one_of("--work", work or "train", get_args(Work))
    if config is None and work not in PRESETS:
        told = f"--work {work}" if work else "neither CONFIG nor --work is given"
        raise ConfigError(f"{told}; allowed without CONFIG: --work {', '.join(PRESETS)}")
    return load(config, sets or []) if config else preset(str(work), sets or []), work or "train"


@app.command(epilog="Example: nntile sweep --auto my.yaml --budget 4")
def sweep(
    config: Annotated[str, typer.Argument(metavar="SWEEP", help="A sweep's YAML; with --auto the config of a run.")],
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the results. [default: runs/sweep-NAME]")] = None,
    auto: Annotated[bool, typer.Option("--auto", help="Search the tile sizes: plan many, measure the best.")] = False,
    budget: Annotated[int, typer.Option(help="With --auto: how many tilings to measure.", min=1)] = 12,
    retry: Annotated[bool, typer.Option("--retry", help="Measure points that failed once more.")] = False,
    as_json: Json = False,
) -> None:
    """Measure a config at many points; goes on where it was interrupted."""
    from rich.console import Console

    _alone("sweep")
    from nntile_py.sweep.autotune import search, write_search
    from nntile_py.sweep.results import best_told, summary
    from nntile_py.sweep.run import run
    from nntile_py.sweep.spec import load_sweep

    console = Console(stderr=True)
    path, folder = Path(config), out or Path("runs") / f"sweep-{Path(config).stem}"
    try:
        found = search(path, sets or [], budget, console) if auto else None
        chosen = found.sweep if found else load_sweep(path, sets or [])
        rows = run(chosen, folder, console, retry=retry)
        if found:
            write_search(found, rows, folder)
    except KeyboardInterrupt:
        goes_on = f"; the same command goes on from {folder}" if (folder / "rows.jsonl").exists() else ""
        print(f"interrupted{goes_on}", file=sys.stderr)
        raise typer.Exit(130) from None
    _print({"rows": rows} if as_json else summary(chosen, rows))
    if not as_json:
        print(f"{best_told(rows, chosen.best)}\nresults in {folder}")
    raise typer.Exit(0 if any(row["status"] == "ok" for row in rows) else 1)


@app.command(epilog="Example: nntile experiment fig18 --plan")
def experiment(
    name: Annotated[str | None, typer.Argument(help="Such as fig18. [default: list them]")] = None,
    scale: Annotated[str, typer.Option(help="cpu: two cores, two to five minutes. gpu: the papers' sizes.")] = "cpu",
    mode: Annotated[str | None, typer.Option(help="training or inference. [default: the experiment's own]")] = None,
    sets: Sets = None,
    only_plan: Annotated[bool, typer.Option("--plan", help="Check and plan each point, run nothing.")] = False,
    results: Annotated[Path | None, typer.Option(help="Put DATE-NAME.png, .csv, .md into this folder too.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the work. [default: runs/NAME-SCALE[-MODE]]")] = None,
) -> None:
    """Reproduce a figure or table of a paper (no NAME: list them)."""
    from rich.console import Console

    _alone("experiment")
    from nntile_py.sweep import experiment as parts

    _one_of("--scale", scale, ("cpu", "gpu"))
    _one_of("--mode", mode or "training", ("training", "inference"))
    if name is None:
        _print(parts.listing())
        return
    made, how = parts.load_experiment(name), cast(parts.Mode | None, mode)
    if only_plan:
        _print(parts.plan(made, scale, how, sets or []))
        return
    folder = out or Path("runs") / "-".join(filter(None, (name, scale, mode)))
    try:
        for path in parts.run(made, scale, folder, results, Console(stderr=True), how, sets or []):
            print(path)
    except KeyboardInterrupt:
        print(f"interrupted; what is there is in {folder}, from where a sweep goes on", file=sys.stderr)
        raise typer.Exit(130) from None


@app.command(epilog="Example: nntile encode runs/my_run --input texts.jsonl --out vectors.npy")
def encode(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A run's folder, or one that transformers' save_pretrained wrote.")
    ],
    source: Annotated[
        Path, typer.Option("--input", help="The texts: .jsonl, .csv with a header, or .txt with a text a line.")
    ],
    out: Annotated[Path, typer.Option(help="What to write: .npy, .npz or .safetensors.")],
    output: Annotated[
        str,
        typer.Option(
            help="mean of the hidden states, pooled, logits, or hidden: hidden states of all tokens, one text behind"
            " the other, with the offsets of the texts."
        ),
    ] = "mean",
    text: Annotated[str, typer.Option(metavar="KEY", help="The key or column that has the texts.")] = "text",
    batch_tokens: Annotated[int, typer.Option(help="Tokens that are computed together.", min=1)] = 4096,
    max_length: Annotated[
        int | None, typer.Option(help="Cut texts at so many tokens. [default: the model's positions]", min=1)
    ] = None,
    cpus: Annotated[int | None, typer.Option(help="CPU workers. [default: all cores, none beside GPUs]")] = None,
    cuda: Annotated[int, typer.Option(help="GPUs.")] = 0,
    dtype: Annotated[str, typer.Option(help="fp32; on GPUs also tf32 or bf16, on CPUs fp64.")] = "fp32",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False,
) -> None:
    """Write what a trained model makes of texts: a vector of each, hidden states or logits."""
    from rich.console import Console

    from nntile_py.inference.encode import encode_file

    how = {"batch_tokens": batch_tokens, "max_length": max_length, "dtype": dtype}
    try:
        print(encode_file(folder, source, text, out, output, how, (cpus, cuda), overwrite, Console(stderr=True)))
    except KeyboardInterrupt:
        print("interrupted; nothing is written", file=sys.stderr)
        raise typer.Exit(130) from None


@app.command(epilog="Example: nntile doctor --json")
def doctor(as_json: Json = False) -> None:
    """Say what is there, what is missing, how to get it."""
    from nntile_py import doctor as parts

    checks = parts.report()
    _print(checks if as_json else parts.render(checks))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False,
    epilog="Example: nntile bench tasks",
)  # fmt: skip
def bench(context: typer.Context) -> None:
    """Measure: tasks, steps, tile sizes (nntile bench --help)."""
    from nntile_py.bench.app import bench_app  # its own typer app, handed all that follows

    raise typer.Exit(bench_app(context.args, prog_name="nntile bench", standalone_mode=False) or 0)


def _note(config: Any) -> None:
    """Say at once where the tiles are far too small; what else is wrong the command itself tells."""
    from contextlib import suppress

    from nntile_py.analysis.ahead import note

    with suppress(NNTileError):
        if ranks.leads() and (told := note(config)):
            print(told, file=sys.stderr, flush=True)


def _trace_told(path: Path, summary: dict[str, Any]) -> str:
    """Where the trace is, its size, and what makes a large one smaller."""
    size = path.stat().st_size / 1e6
    told = f"{path}, for ui.perfetto.dev: {size:,.1f} MB"
    if size <= LARGE_TRACE:
        return told
    fewer = "--steps 1, or " if summary["steps"] > 1 else ""
    return f"{told}; smaller with {fewer}fewer tasks a step (larger tiles); report.html does not need it"


def _alone(command: str) -> None:
    """Refuse to be started by mpirun."""
    if (size := ranks.started()[1]) > 1:
        raise ConfigError(
            f"nntile {command}: mpirun or srun has started {size} of it; allowed: one without mpirun, which itself"
            " starts mpirun for points whose runtime.nodes is a number"
        )


def _one_of(option: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{option}: {value!r} is not allowed; use {', '.join(allowed)}")


def _print(what: Any) -> None:
    if isinstance(what, (dict, list)):
        print(json.dumps(what, indent=2))
    else:
        from rich.console import Console

        Console().print(what)


if __name__ == "__main__":
    main()
