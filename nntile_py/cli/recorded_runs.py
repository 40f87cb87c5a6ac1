"""The commands `nntile compare` and `nntile report`."""

from pathlib import Path
from typing import Annotated

import typer

from nntile_py.cli.options import Json, app, show
from nntile_py.errors import ConfigError
from nntile_py.runs import check_writable


@app.command(epilog="Example: nntile compare runs/my_run runs/my_run-2")
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    out: Annotated[Path, typer.Option(help="Picture of the losses: .png, .svg or .pdf.")] = Path("compare.png"),
    as_json: Json = False,
) -> None:
    """Compare runs: their results, the keys in which they differ, and one picture of their losses."""
    import json

    from rich.console import Console
    from rich.table import Table

    from nntile_py.system.pictures import FORMS, save_figure
    from nntile_py.training.curves import draw_losses
    from nntile_py.training.run_comparison import differences, read_run
    from nntile_py.training.run_report import shown

    if (form := out.suffix[1:]) not in FORMS:
        raise ConfigError(f"--out: got {out}; allowed: a name that ends with .{', .'.join(FORMS)}")
    check_writable("--out", out, out.parent)
    recorded = [read_run(folder) for folder in runs]
    names = [run.name if [one.name for one in recorded].count(run.name) == 1 else str(run.folder) for run in recorded]
    other = differences([run.config for run in recorded])
    curves = dict(zip(names, (run.curves for run in recorded), strict=True))
    save_figure(draw_losses(curves), out.with_suffix(""), [form])
    if as_json:
        rows = [run.summary() | {"run": name} for name, run in zip(names, recorded, strict=True)]
        show({"runs": rows, "differences": other, "picture": str(out)})
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for name in names:
        table.add_column(name, overflow="fold")
    texts = [dict(shown(run.summary())) for run in recorded]
    for key in dict.fromkeys(key for text in texts for key in text if key != "run"):
        table.add_row(key, *(text.get(key, "-") for text in texts))
    for key, values in other.items():
        table.add_row(key, *(json.dumps(value) for value in values), style="dim")
    Console().print(table)
    print(f"losses drawn in {out}")


@app.command(epilog="Example: nntile report runs/my_run")
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    out: Annotated[Path | None, typer.Option(help="The page. [default: RUN/report.html]")] = None,
) -> None:
    """Write a page about a run: curves, results and config. The page needs no network."""
    from nntile_py.system.folders import replace_file
    from nntile_py.training.run_comparison import read_run
    from nntile_py.training.run_report import report_page

    path = out or run / "report.html"
    if path.suffix != ".html":
        raise ConfigError(f"--out: got {path}; allowed: a name that ends with .html")
    if out or run.is_dir():  # otherwise the error is about RUN, see read_run
        check_writable("--out", path, path.parent)
    recorded = read_run(run)
    replace_file(path, report_page(recorded))
    print(f"wrote {path}")
