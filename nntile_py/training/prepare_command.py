"""The command `nntile data prepare`: tokenize texts into a folder that configs name as data.source."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nntile_py.config.data_section import DataSection
from nntile_py.config.sections import TokenizerSection
from nntile_py.data.corpus import Reading, facts_of, new_tokenizer, tokens_key
from nntile_py.data.documents import OPTION, Documents, Split
from nntile_py.data.prepare import OWN, interrupted_tokenizer, locked, tokenize_into_folder
from nntile_py.data.special_tokens import special_tokens
from nntile_py.data.token_files import META, PROGRESS, is_token_file, is_token_folder, read_token_folder
from nntile_py.data.tokenization import Report
from nntile_py.data.tokenizer import MASKED, load_tokenizer
from nntile_py.errors import ConfigError
from nntile_py.runs import check_writable
from nntile_py.schema import validated
from nntile_py.system.folders import STDLIB, temporary_names
from nntile_py.system.units import counted
from nntile_py.training.datasets import instructions_of


def prepare(
    settings: Mapping[str, Any], out: Path, tokenizer: Path | None, vocab_size: int | None, masked: bool,
    overwrite: bool, report: Report,
) -> str:  # fmt: skip
    """Tokenize texts into the folder `out`. After an interruption, the same call continues the work.

    Args:
        settings: Keys of the section `data`.
        out: The folder.
        tokenizer: A tokenizer.json. None: a tokenizer is trained on the texts.
        vocab_size: Vocabulary size of the trained tokenizer. None: 4096.
        masked: The tokens are for masked models.
        overwrite: Replace a folder of tokens.
        report: Shows progress.

    Returns:
        Text on what was written.

    Raises:
        ConfigError: The texts, the tokenizer or the folder are not allowed.
    """
    data = validated(DataSection, dict(settings), "data.")
    section = {"path": str(tokenizer)} if tokenizer else {"vocab_size": vocab_size or 4096}
    size = validated(TokenizerSection, section, "tokenizer.").vocab_size
    source = Path(data.name)
    if data.name != STDLIB and (is_token_folder(source) or is_token_file(source)):
        raise ConfigError(f"SOURCE: {source} has tokens already; allowed: texts")
    data.check_instructions(causal=not masked)
    instructions = instructions_of(data, str(tokenizer) if tokenizer else None)
    _check_out(out, overwrite)
    check_writable("OUT", out)
    special = MASKED if masked else ()
    own = load_tokenizer(tokenizer) if tokenizer else None
    end = special_tokens(own, str(tokenizer), None).end if own else None
    reading = Reading(
        data.extensions, data.max_bytes, data.val_fraction, data.sequences, own, size or 4096, special, end, report,
        instructions,
    )
    documents = Documents(data.name, data.extensions, data.text, data.max_bytes, data.sequences, OPTION, instructions)
    begin = time.monotonic()
    report(f"reading {data.name}")
    with locked(out, report):
        _check_out(out, overwrite)  # another process may have written the tokens meanwhile
        for name in (META, PROGRESS) if is_token_folder(out) else ():
            (out / name).unlink(missing_ok=True)
        key = tokens_key(documents, reading)
        split = Split(documents, data.val_fraction)
        if note := documents.describe():
            report(note)
        used = own or interrupted_tokenizer(out, key) or new_tokenizer(documents, split, reading)
        facts = facts_of(documents, split, reading, used)
        tokenize_into_folder(out, documents, split, used, reading.unit, reading.close(used), facts, key, report)
    made, seconds = read_token_folder(out), time.monotonic() - begin
    sizes = f"{counted(len(made.train.ids), 'token')} to train on in {counted(len(made.train.lengths), 'sequence')}"
    rate = f"{split.characters / seconds / 1e6:.1f} million characters a second"
    return f"{out}: {sizes}, {len(made.held_out.ids):,} held out; {rate}"


def _check_out(out: Path, overwrite: bool) -> None:
    """Raise ConfigError unless `out` is missing, empty, or was left by an interrupted call.

    overwrite: Allow a complete folder of tokens too."""
    if out.is_dir() and is_token_folder(out):
        if not overwrite:
            raise ConfigError(f"OUT: {out} has tokens already; allowed: a new folder, or --overwrite")
    elif out.exists() and not (out / PROGRESS).exists():
        own = {path for name in OWN for path in (out / name, *temporary_names(out / name))}
        if not (out.is_dir() and own.issuperset(out.iterdir())):
            raise ConfigError(f"OUT: {out} exists and has no tokens; allowed: a new folder")
