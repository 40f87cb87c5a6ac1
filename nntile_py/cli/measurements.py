"""The commands that measure: `nntile sweep`, `nntile experiment` and `nntile bench`."""

from pathlib import Path
from typing import Annotated, cast

import typer

from nntile_py.cli.options import Json, Overwrite, Sets, alone, app, ends_at_ctrl_c, one_of, show
from nntile_py.errors import ConfigError
from nntile_py.runs import check_writable, run_folder, taken


@app.command(epilog="Example: nntile sweep --auto my.yaml --budget 4")
def sweep(
    config: Annotated[str, typer.Argument(metavar="SWEEP", help="YAML of a sweep; with --auto: of a run.")],
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the results. [default: runs/sweep-NAME]")] = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="Search tile sizes: plan many tilings, measure the best.")
    ] = False,
    budget: Annotated[
        int, typer.Option(help="With --auto: number of tilings to measure, with the config's own.", min=1)
    ] = 12,
    retry: Annotated[bool, typer.Option("--retry", help="Measure failed points again.")] = False,
    as_json: Json = False,
) -> None:
    """Measure a config with many values of its keys. The same command continues an interrupted sweep."""
    from rich.console import Console

    alone("sweep")
    from nntile_py.measure.autotune import keep_winner, search, write_search
    from nntile_py.measure.results import best_text, summary
    from nntile_py.measure.runner import run
    from nntile_py.measure.sweep_points import load_sweep

    console = Console(stderr=True)
    path, folder = Path(config), out or Path("runs") / f"sweep-{Path(config).stem}"
    kept = ""
    check_writable("--out", folder)

    def after() -> str:
        started = (folder / "rows.jsonl").exists()
        return f"the same command continues from {folder}" if started else "nothing is written"

    with ends_at_ctrl_c(after):
        tilings = search(path, sets or [], budget, console) if auto else None
        chosen = tilings.sweep if tilings else load_sweep(path, sets or [])
        rows = run(chosen, folder, console, retry=retry)
        if tilings:
            write_search(tilings, rows, folder)
            kept = keep_winner(tilings, rows)
    show({"rows": rows} if as_json else summary(chosen, rows))
    if not as_json:
        baseline = tilings.baseline(rows) if tilings else None
        lines = [best_text(rows, chosen.best, baseline), *([kept] if kept else []), f"results in {folder}"]
        print("\n".join(lines))
    raise typer.Exit(0 if any(row["status"] == "ok" for row in rows) else 1)


@app.command(epilog="Example: nntile experiment fig18 --plan")
def experiment(
    name: Annotated[str | None, typer.Argument(help="An experiment such as fig18. [default: list all]")] = None,
    scale: Annotated[str, typer.Option(help="cpu: small sizes, minutes on two cores. gpu: the papers' sizes.")] = "cpu",
    mode: Annotated[str | None, typer.Option(help="training or inference. [default: the experiment's mode]")] = None,
    sets: Sets = None,
    only_plan: Annotated[bool, typer.Option("--plan", help="Check and plan each point without running it.")] = False,
    results: Annotated[Path | None, typer.Option(help="Also write DATE-NAME.png, .csv, .md to this folder.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the runs. [default: runs/NAME-SCALE[-MODE]]")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Reproduce a figure or a table of a paper; without NAME, list all experiments."""
    from rich.console import Console

    alone("experiment")
    from nntile_py.measure import experiment as parts
    from nntile_py.measure import experiments

    one_of("--scale", scale, ("cpu", "gpu"))
    one_of("--mode", mode or "training", ("training", "inference"))
    if name is None:
        show(experiments.listing())
        return
    chosen, how = experiments.load_experiment(name), cast(experiments.Mode | None, mode)
    if only_plan:
        show(parts.plan(chosen, scale, how, sets or []))
        return
    if results:
        check_writable("--results", results)
    own = "-".join(filter(None, (name, scale, mode)))
    if not chosen.goes_on:
        folder = run_folder(own, None, out, overwrite)
    elif overwrite:
        raise ConfigError(f"--overwrite: got {name}, which continues earlier results; allowed: no --overwrite")
    else:
        folder = out or Path("runs") / own
        check_writable("--out", folder)

    def after() -> str:
        if chosen.goes_on:
            return f"the same command continues from {folder}"
        return "the same command begins anew" + f" with --overwrite, as {folder} is not empty" * taken(folder)

    with ends_at_ctrl_c(after):
        for path in parts.run(chosen, scale, folder, results, Console(stderr=True), how, sets or []):
            print(path)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False,
    epilog="Example: nntile bench tasks",
)  # fmt: skip
def bench(context: typer.Context) -> None:
    """Measure steps beside PyTorch, task overhead, messages and memory limits (nntile bench --help)."""
    from nntile_py.measure.commands import bench_app  # this typer app parses the remaining arguments

    raise typer.Exit(bench_app(context.args, prog_name="nntile bench", standalone_mode=False) or 0)
