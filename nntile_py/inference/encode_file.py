"""`nntile encode`: encode a file of texts into a file of arrays."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
from rich.console import Console

from nntile_py.checkpoint.format import TOKENIZER
from nntile_py.errors import ConfigError, MissingWeight, as_options
from nntile_py.execution.runtime import Runtime
from nntile_py.graph.step import check_precision
from nntile_py.inference.encoder import HEADS, OUTPUTS, Encoder
from nntile_py.inference.open_model import no_tokenizer
from nntile_py.inference.sentence import has_modules
from nntile_py.inference.texts import WrongText, placed_texts
from nntile_py.runs import check_writable
from nntile_py.system.folders import new_folders, remove_leftovers, replaced, reserve
from nntile_py.system.progress import progress_bar
from nntile_py.system.units import counted

Array = np.ndarray[Any, Any]
ONE_ARRAY, NAMED = ".npy", (".npz", ".safetensors")


def encode_file(
    folder: Path, source: Path, key: str, out: Path, output: str | None, how: Mapping[str, Any],
    workers: tuple[int | None, int], overwrite: bool, console: Console,
) -> str:  # fmt: skip
    """Encode the texts of the file `source` and write the results to `out`. Returns a summary for the user.

    The file `out` appears only when it is complete. Missing folders above it are created.

    A .npy file holds the array [texts, ...]. A .npz or .safetensors file holds the array under the output's name. If an
    output has a row for each token, its array is [tokens, ...] with the tokens of all texts, and a further array
    `offsets` [texts + 1] says where each text begins.

    Args:
        folder: The model's folder.
        source: File of the texts; see texts.placed_texts.
        key: Column of the texts.
        out: File to write.
        output: Output of the model; see Encoder. None: `sentence` for a folder of sentence-transformers, else `mean`.
        how: Further arguments of Encoder.from_hf.
        workers: Number of CPU workers (None: the default of Runtime) and of CUDA workers.
        overwrite: Replace an existing file.
        console: Shows progress.

    Raises:
        ConfigError: An option, the folder, or a line of the file is wrong.
    """
    _check_out(out, overwrite)
    cpus, cuda = workers
    with as_options("cpus", "cuda"):
        runtime = Runtime(cpus=cpus, cuda=cuda)
    placed = placed_texts(source, key)
    texts = [text for text, _ in placed]
    if (folder / "config.json").is_file() and not (folder / TOKENIZER).is_file():
        raise no_tokenizer(folder)
    output = output or ("sentence" if has_modules(folder) else "mean")
    try:
        with as_options("output", *how):
            encoder = Encoder.from_hf(folder, output, **how)
            check_precision("precision", encoder.precision, cuda > 0)
    except MissingWeight as error:
        if HEADS.get(output) == "none":  # every model has these outputs
            raise
        possible = ", ".join(name for name in OUTPUTS if name not in (output, "sentence") or has_modules(folder))
        raise ConfigError(f"--output: {output} is not possible: {error}; allowed: {possible}") from None
    if encoder.of_tokens and out.suffix == ONE_ARRAY:
        raise ConfigError(f"--out: {out} holds one array; allowed with --output {output}: {', '.join(NAMED)}")
    begun = time.perf_counter()
    with runtime, progress_bar(console) as progress, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the warning about cut texts; the summary has their number
        bar = progress.add_task("texts", total=len(texts))

        def outputs() -> Iterator[Array]:
            for array in encoder.each(texts):
                yield array
                progress.advance(bar)

        remove_leftovers(out)
        with _named_by(placed), new_folders(out.parent), replaced(out) as file:
            shape = _write(file, out.suffix, output, outputs(), len(texts), encoder.of_tokens)
    seconds = time.perf_counter() - begun
    cut = f", {encoder.cut:,} of them cut at {encoder.max_length} tokens" if encoder.cut else ""
    return f"{counted(len(texts), 'text')}{cut} in {seconds:.1f} s; {out}: {output} {' x '.join(map(str, shape))}"


@contextmanager
def _named_by(placed: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Raise the Encoder's errors about a text as ConfigError, with the text's file and line.

    placed: texts and their places, see placed_texts."""
    try:
        yield
    except WrongText as error:
        raise ConfigError(f"{placed[error.number][1]}: {error.reason}") from None


def _check_out(out: Path, overwrite: bool) -> None:
    if out.suffix not in (ONE_ARRAY, *NAMED):
        raise ConfigError(f"--out: got {out}; allowed: a name that ends in {', '.join((ONE_ARRAY, *NAMED))}")
    if out.is_dir() or (out.exists() and not overwrite):
        what = "is a folder" if out.is_dir() else "exists already"
        raise ConfigError(f"--out: {out} {what}; allowed: the name of a new file, or --overwrite")
    check_writable("--out", out, out.parent)


def _write(
    file: IO[bytes], suffix: str, name: str, outputs: Iterator[Array], count: int, of_tokens: bool
) -> tuple[int, ...]:
    """Write the outputs of `count` texts to a new file. Returns the shape of the array.

    name: name of the output. of_tokens: the output has a row for each token.

    Raises:
        OSError: The disk has no room for the file; for a .npy file, this is raised after the first output.
    """
    if suffix == ONE_ARRAY:
        first = next(outputs)
        shape = (count, *first.shape)
        facts = {"descr": np.lib.format.dtype_to_descr(first.dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, facts)
        reserve(file, file.tell() + count * first.nbytes)
        for array in chain([first], outputs):
            file.write(np.ascontiguousarray(array).data)
        return shape
    rows = list(outputs)
    arrays = {name: np.concatenate(rows) if of_tokens else np.stack(rows)}
    if of_tokens:
        arrays["offsets"] = np.cumsum([0, *map(len, rows)])
    reserve(file, sum(array.nbytes for array in arrays.values()))
    if suffix == ".npz":
        np.savez(file, **arrays)  # type: ignore[arg-type]
    else:
        from safetensors.numpy import save

        file.write(save(arrays))
    return arrays[name].shape
