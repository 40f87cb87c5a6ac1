"""The command `nntile data`."""

from pathlib import Path
from typing import Annotated

import typer

from nntile_py.cli.options import app, ends_at_ctrl_c
from nntile_py.errors import ConfigError


@app.command(epilog="Example: nntile data prepare python-stdlib my_tokens --vocab-size 8000")
def data(
    action: Annotated[str, typer.Argument(help="prepare: tokenize texts once, and write the tokens to a folder.")],
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Text file, table, folder, or python-stdlib.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the tokens: a data.source of configs.")],
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json. [default: trained on the texts]")] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Vocabulary of a tokenizer that is trained on the texts. [default: 4096]")
    ] = None,
    text: Annotated[str, typer.Option(metavar="COLUMN", help="Column of a table with the text.")] = "text",
    messages: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column with conversations.")] = None,
    prompt: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column with prompts.")] = None,
    response: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column with their responses.")] = None,
    sequences: Annotated[str, typer.Option(help="window, lines, paragraphs or documents.")] = "window",
    masked: Annotated[bool, typer.Option("--masked", help="For masked models (bert, ...).")] = False,
    val_fraction: Annotated[float, typer.Option(help="Share of the text that is held out of training.")] = 0.05,
    max_bytes: Annotated[str | None, typer.Option(metavar="SIZE", help="Read at most this much: 10GB.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a folder of tokens.")] = False,
) -> None:
    """Tokenize texts once, for many runs. An interrupted command goes on where it was."""
    from rich.console import Console

    from nntile_py.training.prepare_command import prepare

    if action != "prepare":
        raise ConfigError(f"nntile data: got {action}; allowed: prepare")
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    settings = {"source": source, "text": text, "sequences": sequences, "val_fraction": val_fraction}
    settings |= {"messages": messages, "prompt": prompt, "response": response}
    settings |= {} if max_bytes is None else {"max_bytes": max_bytes}
    with ends_at_ctrl_c(lambda: "the same command goes on from here"):
        print(prepare(settings, out, tokenizer, vocab_size, masked, overwrite, console.print))
