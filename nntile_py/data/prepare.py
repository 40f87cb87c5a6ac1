"""Tokenize documents into memory, or into a folder of token files; the cache of such folders."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from nntile_py.data.documents import PART, Documents, Split
from nntile_py.data.token_files import (
    HELD_OUT,
    META,
    PROGRESS,
    TOKENIZER,
    TRAIN,
    TokenFolder,
    Tokens,
    TokenWriter,
    is_token_folder,
    joined_lengths,
    read_token_folder,
    write_meta,
    written_files,
)
from nntile_py.data.tokenization import Report, silent, token_dtype, tokenize
from nntile_py.errors import ConfigError
from nntile_py.system.folders import cache_folder, remove_leftovers, replace_file

CACHED_BYTES = 64 * 2**30  # limit for all cached folders; the folders used least recently are removed first
SAVE_EVERY = 20  # seconds between two records of the progress
_LOCK = "lock"
# Files that a folder may have while its tokens are not complete.
OWN = (TOKENIZER, PROGRESS, _LOCK, META, *(f"{part}.{name}" for part in (TRAIN, HELD_OUT)
       for name in ("tokens", "segments", "lengths", "learned")))  # fmt: skip


def tokenize_into_memory(
    documents: Documents, split: Split, tokenizer: Tokenizer, unit: str, end: int | None
) -> dict[str, Tokens]:
    """Return the tokens of documents: {TRAIN: ..., HELD_OUT: ...}. For the arguments see `tokenize_into_folder`."""
    ids: dict[str, list[Any]] = {name: [np.zeros(0, token_dtype(tokenizer))] for name in (TRAIN, HELD_OUT)}
    segments: dict[str, list[Any]] = {name: [np.zeros(0, np.int64)] for name in ids}
    learned: dict[str, list[Any]] = {name: [] for name in ids}
    for _, blocks in tokenize(split.parts(documents), tokenizer, unit, end):
        for block in blocks:
            ids[block.name].append(block.ids)
            segments[block.name].append(block.segments)
            learned[block.name] += [] if block.learned is None else [block.learned]
    return {
        name: Tokens(
            np.concatenate(ids[name]), joined_lengths(np.concatenate(segments[name])),
            np.concatenate(learned[name]) if learned[name] else None,
        )
        for name in ids
    }  # fmt: skip


def tokenize_into_folder(
    folder: Path, documents: Documents, split: Split, tokenizer: Tokenizer, unit: str, end: int | None,
    facts: Mapping[str, Any], key: str, report: Report = silent,
) -> None:  # fmt: skip
    """Write the tokens of documents into a folder, see token_files. Continues a call that was interrupted.

    Args:
        folder: The folder, which exists.
        documents: The documents.
        split: Which documents are held out.
        tokenizer: The tokenizer.
        unit: What a sequence is.
        end: Token that closes each sequence.
        facts: Further entries of META.
        key: Hash of all that determines the tokens (corpus.tokens_key). A call with another key is not continued.
        report: Shows progress.

    Raises:
        OSError: The disk is full. Calling again continues.
    """
    begun = {"key": key, "digest": split.digest, "tokenizer": tokenizer.to_str()}
    for name in OWN:
        remove_leftovers(folder / name)
    done, sizes = _begin(folder, begun)
    if done:
        report(f"going on after {done:,} parts of documents that are tokenized already")
    dtype, clock, start = token_dtype(tokenizer), time.monotonic(), time.monotonic()
    writers = {name: TokenWriter(folder, name, dtype, sizes.get(name)) for name in (TRAIN, HELD_OUT)}
    try:
        parts = split.parts(documents)
        characters = sum(len(next(parts)[0].text) for _ in range(done))
        read = 0

        def counted() -> Iterator[Any]:
            nonlocal read
            for part in parts:
                read += (size := len(part[0].text))
                if size >= 2 * PART:
                    report(f"tokenizing {size:,} characters without a space as one piece, which can take minutes")
                yield part

        for count, blocks in tokenize(counted(), tokenizer, unit, end):
            for block in blocks:
                writers[block.name].append(block.ids, block.segments, block.learned)
            if time.monotonic() - clock >= SAVE_EVERY:
                clock = time.monotonic()
                _save_progress(folder, begun, done + count, writers)
                share, rate = (characters + read) / max(split.characters, 1), read / (clock - start) / 1e6
                report(f"tokenized {share:.0%} of {split.characters:,} characters, {rate:.1f} million a second")
        for writer in writers.values():
            writer.finish()
    finally:
        for writer in writers.values():
            writer.close()
    write_meta(folder, tokenizer.to_str(), dtype, facts)
    (folder / PROGRESS).unlink(missing_ok=True)
    for name in writers:
        (folder / f"{name}.segments").unlink()


def interrupted_tokenizer(folder: Path, key: str) -> Tokenizer | None:
    """Return the tokenizer of an interrupted call with this key; None if there was none."""
    saved = _progress(folder)
    return Tokenizer.from_str(saved["begun"]["tokenizer"]) if saved and saved["begun"]["key"] == key else None


def _begin(folder: Path, begun: Mapping[str, Any]) -> tuple[int, dict[str, list[int]]]:
    """Return the number of tokenized parts and the sizes of files, from an interrupted call with the same `begun`.

    If there was no such call, delete the folder's record of progress, and return zero and no sizes."""
    saved = _progress(folder)
    if saved and saved["begun"] == begun and _has(folder, saved["sizes"]):
        return saved["parts"], saved["sizes"]
    (folder / PROGRESS).unlink(missing_ok=True)  # first: the files whose sizes it records are overwritten next
    return 0, {}


def _progress(folder: Path) -> dict[str, Any]:
    """Return how far an interrupted call has come in a folder: `begun`, `parts`, `sizes`; {} if there was none."""
    try:
        saved: dict[str, Any] = json.loads((folder / PROGRESS).read_text())
        return saved if {*saved} == {"begun", "parts", "sizes"} and "key" in saved["begun"] else {}
    except (OSError, ValueError, TypeError):
        return {}


def _has(folder: Path, sizes: Mapping[str, list[int]]) -> bool:
    """Return True if the files of tokens have at least the sizes that they had when the progress was recorded."""
    parts = (zip(written_files(folder, name), sizes[name], strict=True) for name in (TRAIN, HELD_OUT))
    return all(path.is_file() and path.stat().st_size >= size for part in parts for path, size in part)


def _save_progress(folder: Path, begun: Mapping[str, Any], parts: int, writers: Mapping[str, TokenWriter]) -> None:
    sizes = {name: writer.flush() for name, writer in writers.items()}
    replace_file(folder / PROGRESS, json.dumps({"begun": begun, "parts": parts, "sizes": sizes}))


@contextmanager
def locked(folder: Path, report: Report = silent) -> Iterator[None]:
    """Context manager: create a folder, and keep other processes from writing tokens into it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"another process writes the tokens in {folder}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# -- cache


def cached_folder(key: str) -> Path:
    """Return the path of the cached tokens with this key, see corpus.tokens_key."""
    return cache_folder() / "tokens" / key


def read_cached(key: str) -> TokenFolder | None:
    """Return cached tokens; None if there are none, or they are damaged."""
    folder = cached_folder(key)
    if not is_token_folder(folder):
        return None
    try:
        tokens = read_token_folder(folder)
        os.utime(folder / META)  # marks the folder as used now
        return tokens
    except (ConfigError, OSError):
        return None


def trim_cache() -> None:
    """Remove cached folders until at most CACHED_BYTES are left, the least recently used first.

    The folder used last always stays."""
    folders = [folder for folder in (cache_folder() / "tokens").iterdir() if (folder / META).is_file()]
    total = 0
    for folder in sorted(folders, key=lambda one: (one / META).stat().st_mtime, reverse=True):
        size = sum(path.stat().st_size for path in folder.iterdir())
        if total and total + size > CACHED_BYTES:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            total += size
