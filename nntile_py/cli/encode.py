"""The commands `nntile encode` and `nntile doctor`."""

from pathlib import Path
from typing import Annotated

import typer

from nntile_py.cli.options import Cpus, Cuda, Json, ModelType, Precision, app, ends_at_ctrl_c, fields_of, show
from nntile_py.system import launcher


@app.command(epilog="Example: nntile encode my_bert --input texts.jsonl --out vectors.npy")
def encode(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of a run, or of transformers' save_pretrained.")
    ],
    source: Annotated[
        Path, typer.Option("--input", help="File of texts: .jsonl, .csv with a header, or .txt with one text a line.")
    ],
    out: Annotated[Path, typer.Option(help="Output file: .npy, .npz or .safetensors.")],
    output: Annotated[
        str | None,
        typer.Option(
            help="mean (of the hidden states), pooled, logits, sentence (the vector of sentence-transformers), or"
            " hidden: the hidden states of all tokens of all texts, with the offset of each text."
            " [default: sentence for a folder of sentence-transformers, else mean]"
        ),
    ] = None,
    text: Annotated[str, typer.Option(metavar="KEY", help="Key or column of the texts.")] = "text",
    batch_tokens: Annotated[int, typer.Option(help="Tokens in a forward pass.", min=1)] = 4096,
    max_length: Annotated[
        int | None,
        typer.Option(help="Truncate texts to this many tokens. [default: the folder's limit, or the positions]", min=1),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Text before each text. [default: --prompt-name]")] = None,
    prompt_name: Annotated[
        str | None, typer.Option(help="Prompt of the folder. [default: the folder's default prompt]")
    ] = None,
    cpus: Cpus = None,
    cuda: Cuda = 0,
    precision: Precision = "fp32",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    sets: ModelType = None,
) -> None:
    """Encode texts with a trained model: write vectors, hidden states or logits."""
    from rich.console import Console

    from nntile_py.inference.encode_file import encode_file

    how = {"batch_tokens": batch_tokens, "max_length": max_length, "precision": precision}
    how |= {"prompt": prompt, "prompt_name": prompt_name, "model_type": fields_of(sets).get("type")}
    with ends_at_ctrl_c(lambda: "nothing is written"):
        print(encode_file(folder, source, text, out, output, how, (cpus, cuda), overwrite, Console(stderr=True)))


@app.command(epilog="Example: nntile doctor --json")
def doctor(as_json: Json = False) -> None:
    """Check the installation: what is missing, and how to install it."""
    from nntile_py import doctor as parts

    checks = parts.report()  # every rank must call it: ranks exchange their results
    if launcher.leads():
        show(checks if as_json else parts.render(parts.without_gpus(checks)))
        if not as_json:
            print(parts.summary(checks))
