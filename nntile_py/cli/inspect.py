"""The commands that inspect a training step: `nntile plan`, `profile`, `graph`, `analyze` and `layouts`."""

import sys
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from nntile_py.cli.options import (
    Config,
    Json,
    OptionalConfig,
    Overwrite,
    Sets,
    app,
    choose_tiles,
    load_config,
    note_tiles,
    one_of,
    show,
)  # fmt: skip
from nntile_py.errors import ConfigError, NNTileError
from nntile_py.runs import check_writable, run_folder
from nntile_py.system import launcher

LARGE_TRACE = 20  # megabytes; viewers are slow with larger traces
MEASURED, TUNED = 7, 5  # default of --repeats, in runs of each operator: for `analyze --measure` and `layouts tune`


@app.command(epilog="Example: nntile plan my.yaml --set tiles.embed=64")
def plan(
    config: Config,
    sets: Sets = None,
    nodes: Annotated[
        int | None, typer.Option(help="Simulate a step on this many machines, which need not exist.")
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(help="With --nodes: GPUs of each machine. [default: runtime.cuda]")
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="With --nodes: rate of a network card in each direction. [default: 400Gb/s; CPUs 40Gb/s]",
        ),
    ] = None,
    gpus_per_nic: Annotated[
        int | None, typer.Option(help="With --nodes: GPUs that share a network card. [default: 1]")
    ] = None,
    strong: Annotated[
        bool, typer.Option("--strong", help="With --nodes: compare with one machine (or GPU) that has the whole batch.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print parameters, tasks, flop and bytes without a run, or the simulated time of a step on other machines.

    The exit status is 1 if a run would not fit into memory."""
    from nntile_py.config.builders import step_spec, with_micro_batches
    from nntile_py.config.run_config import load

    raw = load(config, sets or [])
    loaded = with_micro_batches(raw)
    spec = step_spec(loaded) if nodes is None else None
    if spec:
        note_tiles(loaded, spec)
    from nntile_py.analysis.cluster_plan import plan_cluster, requested_cluster
    from nntile_py.analysis.plan import plan as plan_run

    cluster = requested_cluster(loaded, nodes, gpus_per_node, network, gpus_per_nic)
    if strong and not cluster:
        raise ConfigError("--strong: allowed: only with --nodes")
    if cluster:
        simulated = plan_cluster(loaded, cluster, strong=strong)
        show(simulated.to_dict() if as_json else simulated.render())
        return
    result = plan_run(raw, spec)
    show(result.to_dict() if as_json else result.render())
    if result.refused:
        sys.stdout.flush()
        raise NNTileError(result.refused)


@app.command(epilog="Example: nntile profile my.yaml --steps 2 --out runs/look")
def profile(
    config: Config,
    steps: Annotated[int | None, typer.Option(help="Steps to profile. [default: profile.steps]", min=1)] = None,
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. [default: runs/NAME-profile]")] = None,
    overwrite: Overwrite = False,
    work: Annotated[str, typer.Option(help="train, or inference: only forward passes.")] = "train",
    fxt: Annotated[bool, typer.Option("--fxt", help="Also write StarPU's trace, for ViTE and StarVZ.")] = False,
) -> None:
    """Run a few steps of CONFIG; write trace, Gantt chart and report, and print the bottlenecks."""
    from nntile_py.config.builders import step_spec
    from nntile_py.config.scheduler_file import check_machine

    one_of("--work", work, ("train", "inference"))
    loaded = load_config(config, sets)
    name = Path(config).stem
    folder = run_folder(f"{name}-profile", None, out or (Path(loaded.out) if loaded.out else None), overwrite)
    check_machine(loaded.runtime)
    if work == "train":
        loaded = choose_tiles(loaded)
        note_tiles(loaded, step_spec(loaded))
    from nntile_py.profiling import profile as run

    summary = run(loaded, folder, name, steps or loaded.profile.steps, fxt, work == "inference")
    if not launcher.leads():
        return
    from rich.text import Text

    for finding in summary["findings"]:
        show(Text(f"{finding['rule']}: {finding['cause']}\n  {finding['advice']}"))  # rich wraps Text between words
    print(f"{summary['seconds_per_step'] * 1e3:.1f} ms a step; open {folder / 'report.html'}")
    print(_trace_message(folder / "trace.json", summary))


@app.command(epilog="Example: nntile graph my.yaml --layer 0 --fusion both --out layer.dot")
def graph(
    config: Config,
    out: Annotated[Path, typer.Option(help="The picture: .svg, .png or .pdf (needs graphviz), or .dot.")],
    sets: Sets = None,
    level: Annotated[str, typer.Option(help="logical (operators) or tiles (tasks).")] = "logical",
    layer: Annotated[int | None, typer.Option(help="Draw only this layer, 0 or more. [default: all]", min=0)] = None,
    phase: Annotated[str, typer.Option(help="forward, backward, update or all.")] = "all",
    fusion: Annotated[str, typer.Option(help="before, after or both, side by side.")] = "after",
    work: Annotated[str, typer.Option(help="train, inference, encoder, decoder, mha, linear_..., qkv_...")] = "train",
    every: Annotated[
        bool, typer.Option("--every-layer", help="Draw every layer. Otherwise equal layers are drawn once.")
    ] = False,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="Also draw the tensors of a whole model, or the tasks of all layers.")
    ] = False,
) -> None:
    """Draw operators or tile tasks with flop and bytes, before and after fusion."""
    loaded = load_config(config, sets)
    from nntile_py.analysis import draw
    from nntile_py.analysis.workloads import Work

    one_of("--level", level, ("logical", "tiles"))
    one_of("--phase", phase, draw.PHASES)
    one_of("--fusion", fusion, ("before", "after", "both"))
    check_writable("--out", out, out.parent)
    one_of("--work", work, get_args(Work))
    what = draw.draw(
        loaded, level=level, work=cast(Work, work), layer=layer, phase=phase, fusion=fusion, folded=not every,
        tensors=tensors,
    )  # fmt: skip
    draw.write(what, out)
    print(out)
    if note := draw.note(what, not tensors and draw.is_overview(level, work, layer, phase)):
        print(f"note: {note}", file=sys.stderr)


@app.command(epilog="Example: nntile analyze --work encoder --out runs/encoder")
def analyze(
    config: OptionalConfig = None,
    work: Annotated[
        str | None, typer.Option(help="encoder, decoder or mha; with CONFIG also train or inference. [default: train]")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Run and time each operator by itself.")] = False,
    repeats: Annotated[
        int | None,
        typer.Option(help=f"With --measure: runs of each operator; the median counts. [default: {MEASURED}]", min=1),
    ] = None,
    sets: Sets = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for report.html, CSV files and pictures of the graph. [default: none]")
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Count flop and moved elements of each operator, before and after fusion, and print what bounds the step."""
    if repeats and not measure:
        raise ConfigError("--repeats: allowed: only with --measure")
    if overwrite and not out:
        raise ConfigError("--overwrite: allowed: only with --out")
    loaded, of_work = _work(config, work, sets)
    out = out and run_folder("", None, out, overwrite)
    from rich.console import Console

    from nntile_py.analysis import analysis_report
    from nntile_py.analysis.operators import analyse

    result = analyse(loaded, of_work)
    if measure:
        from nntile_py.profiling.operator_timer import measure as run

        result = run(result, loaded, repeats or MEASURED)
    if out:
        paths = analysis_report.write(result, out)
        print(*paths, sep="\n", file=sys.stderr)
        if not any(path.suffix == ".svg" for path in paths):  # no graphviz, or the graph is too large to read
            print(f"no pictures of the graph: {out / 'report.html'} says why", file=sys.stderr)
    if as_json:
        show(result.to_dict())
    else:
        analysis_report.render(result, Console())


@app.command(epilog="Example: nntile layouts tune --work encoder --set model.embed=128 --set train.seq=64")
def layouts(
    action: Annotated[str, typer.Argument(help="tune: time operators in every layout. show: print the results.")],
    config: OptionalConfig = None,
    work: Annotated[
        str | None, typer.Option(help="encoder, decoder or mha; with CONFIG also train or inference. [default: train]")
    ] = None,
    sets: Sets = None,
    repeats: Annotated[
        int | None,
        typer.Option(help=f"With tune: runs of each operator; the minimum counts. [default: {TUNED}]", min=1),
    ] = None,
    database: Annotated[
        Path | None, typer.Option(help="File of times. [default: in the cache folder, by device and precision]")
    ] = None,
    own: Annotated[
        bool, typer.Option("--own", help="With tune: of the ways to fuse Q, K, V measure only `fusion.qkv`.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="With show: a picture of the times: .svg, .png or .pdf.")] = None,
    as_json: Json = False,
) -> None:
    """Time operators in all layouts (orders of axes in memory); show the layouts that `layout: searched` chooses."""
    from rich.console import Console

    from nntile_py.analysis import layout_analysis as parts
    from nntile_py.config.builders import timings as opened
    from nntile_py.system.folders import replace_file
    from nntile_py.system.pictures import FORMS, files_of

    one_of("ACTION", action, ("tune", "show"))
    form = out.suffix.lstrip(".") if out else "svg"
    one_of("--out", form, FORMS)
    of_tune = (("--own", own, "tune"), ("--repeats", repeats, "tune"))
    for option, value, needed in (*of_tune, ("--out", out, "show"), ("--json", as_json, "show")):
        if value and action != needed:
            raise ConfigError(f"{option}: allowed: only with {needed}")
    if out:
        check_writable("--out", out, out.parent)
    loaded, of_work = _work(config, work, sets)
    if action == "tune":
        _tune(loaded, of_work, opened(loaded, database, new=True), repeats or TUNED, own)
        return
    known = opened(loaded, database)
    results = parts.layout_results(loaded, of_work, known)
    if out:
        best = min(results, key=lambda result: result.seconds)
        replace_file(out, files_of(parts.violins(best, known), [form])[form])
    if as_json:
        show([result.to_dict() for result in results])
    else:
        parts.render(results, known, Console())


def _tune(config: Any, work: Any, known: Any, repeats: int, own: bool) -> None:
    """Time operators in all layouts, add the times to the database `known`, and print the decision."""
    from rich.console import Console

    from nntile_py.analysis import layout_analysis as parts
    from nntile_py.analysis.workloads import FORWARD
    from nntile_py.profiling.layout_timer import tune
    from nntile_py.system.progress import telling

    with telling(Console(stderr=True)) as tell:
        tuned = tune(config, work, known, repeats, tell, own_alone=own)
    print(f"{tuned.measured} measured; {known.path}")
    if tuned.comparison or work not in FORWARD:
        print(parts.decision(tuned.comparison.program if tuned.comparison else None, tuned.comparison))
    if tuned.others:
        print(
            f"other processes kept {tuned.others:.1f} cores busy during the measurement: times are too long",
            file=sys.stderr,
        )


def _work(config: str | None, work: str | None, sets: list[str] | None) -> tuple[Any, Any]:
    """Return the config and the work (such as train or encoder) of `analyze` or `layouts`.

    Without CONFIG, the config is the preset of the work, with BERT-large's sizes.
    """
    from nntile_py.analysis.workloads import PRESETS, Work, preset

    one_of("--work", work or "train", get_args(Work))
    if config is None and work not in PRESETS:
        got = f"--work {work}" if work else "neither CONFIG nor --work is given"
        raise ConfigError(f"{got}; allowed without CONFIG: --work {', '.join(PRESETS)}")
    return load_config(config, sets) if config else preset(str(work), sets or []), work or "train"


def _trace_message(path: Path, summary: dict[str, Any]) -> str:
    """Return a message with the trace file's path and size; for a large file also how to get a smaller one."""
    size = path.stat().st_size / 1e6
    message = f"{path}, for ui.perfetto.dev: {size:,.1f} MB"
    if size <= LARGE_TRACE:
        return message
    fewer = "--steps 1, or " if summary["steps"] > 1 else ""
    return f"{message}; smaller with {fewer}fewer tasks a step (larger tiles); report.html does not need it"
