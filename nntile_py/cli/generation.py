"""The command `nntile generate`."""

from pathlib import Path
from typing import Annotated

import typer

from nntile_py.cli.options import Cpus, Cuda, ModelType, Precision, app, ends_at_ctrl_c, fields_of
from nntile_py.errors import as_options


@app.command(epilog="Example: nntile generate runs/my_run --prompt Some --max-tokens 20")
def generate(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="Folder of a run, of a checkpoint, or of transformers' save_pretrained."),
    ],
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            help="Text to continue; may be given several times. [default: standard input, which is one prompt]"
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--input",
            help="File of prompts: .jsonl, .csv with a header, or .txt, where each line, also an empty line, is a"
            " prompt.",
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="With --input: key or column of the prompts. [default: text]"),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Answer each line, and keep the conversation; Ctrl-C ends an answer, Ctrl-D the chat."
        ),
    ] = False,
    system: Annotated[str, typer.Option(help="With --chat: the message that begins the conversation.")] = "",
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Largest number of new tokens of a text. [default: 128, or as many as fit]"),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Logits are divided by it; 0: always the most probable token.")
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(help="Draw among the k most probable tokens; 0: all. [default: all]")
    ] = None,
    top_p: Annotated[
        float, typer.Option(help="Draw among the most probable tokens that together have this probability.")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Draw among tokens with at least this share of the largest probability.")
    ] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens that came before are less likely.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop text: a text ends before it; may be given several times.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Prompts that are continued at once.", min=1)] = 8,
    cache: Annotated[
        str | None, typer.Option(help="Memory for keys and values, such as 2GiB. [default: as the prompts need]")
    ] = None,
    tiles: Annotated[
        list[str] | None, typer.Option("--tiles", metavar="AXIS=SIZE", help="Tile size of an axis, such as ffn=1024.")
    ] = None,
    cpus: Cpus = None,
    cuda: Cuda = 0,
    precision: Precision = "fp32",
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="With --json: the log-probability of each new token, and the N most probable tokens, 0 to 20.",
            metavar="N",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each text.")] = False,
    sets: ModelType = None,
) -> None:
    """Continue prompts with a trained causal model: GPT-2, Llama, or a model of your own."""
    from nntile_py.inference.generate_command import Command, run

    options = {
        "max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "seed": seed, "stop": stop or [],
        "logprobs": logprobs,
    }  # fmt: skip
    how = {"batch": batch, "cache": cache, "precision": precision}
    workers, cuts = (cpus, cuda), tiles or []
    more = (options, how, cuts, workers, as_json, fields_of(sets))
    command = Command(folder, prompt or [], source, text, chat, system, *more)
    ending = "the chat ends" if chat else "the text ends here"
    with ends_at_ctrl_c(lambda: ending), as_options(*options, *how, "tiles", "cpus", "cuda"):
        run(command)
