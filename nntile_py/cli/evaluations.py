"""The commands `nntile eval` and `nntile lm-eval`."""

import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from nntile_py.cli.options import Json, Sets, alone, app, ends_at_ctrl_c, show
from nntile_py.errors import ConfigError


@app.command("eval", epilog="Example: nntile eval runs/my_run --data my.txt --stride 64")
def evaluate(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Folder of a run, a checkpoint, or of save_pretrained.")
    ],
    data: Annotated[
        Path,
        typer.Option(
            help="Text file, folder of text files, or table (.csv, .tsv or .jsonl). For language models, each row of a"
            " table is a document."
        ),
    ],
    stride: Annotated[
        int | None,
        typer.Option(
            help="Tokens from the beginning of a window to the beginning of the next window; the rest of a window"
            " is only context. [default: half of --seq; for a masked model, windows do not overlap]"
        ),
    ] = None,
    seq: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a window. [default: train.seq of the run; else the positions, at most 1024]", min=1
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Windows in a forward pass. [default: train.batch of the run; else 8]", min=1)
    ] = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Measure trained models on a whole file or folder: loss, perplexity, bits per byte, accuracy, F1."""
    from rich.console import Console

    alone("eval")
    from nntile_py.inference import eval_command as command

    rows: list[dict[str, Any]] = []
    with ends_at_ctrl_c(lambda: f"{len(rows)} of {len(runs)} models are measured"):
        try:
            command.evaluate_runs(runs, data, (seq, stride, batch), sets or [], Console(stderr=True), rows.append)
        finally:
            if as_json and rows:
                show(command.as_json(rows))
            elif rows:
                screen = Console()
                print(command.table(rows, screen.width if screen.is_terminal else math.inf))


@app.command(
    "lm-eval", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="Example: nntile lm-eval run --model nntile --model_args path=runs/my_run --tasks my_task --include_path .",
)  # fmt: skip
def lm_eval(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="ARGUMENTS...", help="Arguments of lm_eval, such as `run --help` or `ls tasks`."),
    ],
) -> None:
    """Run lm_eval, EleutherAI's evaluation harness, with the additional model `nntile`."""
    alone("lm-eval")
    try:
        from nntile_py.inference import lm_harness
    except ModuleNotFoundError as error:
        need = "to install it: pip install lm_eval"
        raise ConfigError(f"nntile lm-eval: the package {error.name} is missing; allowed: {need}") from None
    sys.argv = ["nntile lm-eval", *arguments]
    lm_harness.run()
