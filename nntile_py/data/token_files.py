"""Files of tokens: a folder that `nntile data prepare` writes, files of nanoGPT, llm.c, Megatron."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nntile_py.data.collators import Array
from nntile_py.errors import ConfigError
from nntile_py.system.folders import errors_name, replace_file

META, TOKENIZER = "tokens.json", "tokenizer.json"  # META is written last: a folder without it is not complete
PROGRESS = "progress.json"  # of a folder that is not complete
FORMAT = 1
CHECKED = 2**28  # bytes; larger files are opened without a check of their checksum, which would read them whole
TRAIN, HELD_OUT = "train", "held_out"
_MEGATRON = b"MMIDIDX\x00\x00"
_MEGATRON_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_CHUNK = 2**24  # tokens that are checked at a time; bytes that are read at a time for a checksum
_LLM_C = 20240520  # first number of a file of llm.c, whose header has 256 numbers


class Tokens(NamedTuple):
    """Tokenized sequences, one after the other.

    Attributes:
        ids: Token numbers of all sequences, an integer array [tokens]; it may be a memory-mapped file (np.memmap).
        lengths: Number of tokens of each sequence, int64 [sequences].
        learned: For each token, 1 if the model learns to predict it, else 0; uint8 [tokens]. None: all are learned.
    """

    ids: Array
    lengths: Array
    learned: Array | None = None


@dataclass
class TokenFolder:
    """The tokens of a text, split into a training part and a held-out part, and the text's tokenizer.

    Attributes:
        train: The training part.
        held_out: The held-out part.
        tokenizer: Content of tokenizer.json.
        facts: Entries of META, such as `end`, `unit`, `val_fraction`, `digest`, `left_out`."""

    train: Tokens
    held_out: Tokens
    tokenizer: str
    facts: Mapping[str, Any]


class TokenWriter:
    """Appends sequences to the files of one part of a folder, and continues after an interruption.

    Args:
        folder: The folder.
        part: TRAIN or HELD_OUT.
        dtype: Type of the token numbers.
        sizes: Sizes of the files, as `flush` has returned them, to continue from. None: begin with empty files.
    """

    def __init__(self, folder: Path, part: str, dtype: Any, sizes: list[int] | None = None) -> None:
        self._dtypes = [np.dtype(dtype), np.dtype(np.int64), np.dtype(np.uint8)]
        (folder / f"{part}.lengths").unlink(missing_ok=True)
        paths = written_files(folder, part)
        self._segments = paths[1]
        self._files = [path.open("r+b" if sizes else "wb") for path in paths]
        for file, size in zip(self._files, sizes or [0] * 3, strict=True):
            file.truncate(size)
            file.seek(size)

    def append(self, ids: Array, segments: Array, learned: Array | None = None) -> None:
        """Append sequences.

        Args:
            ids: Token numbers.
            segments: Number of tokens of each sequence; negative if the sequence continues in the next segment.
            learned: See Tokens.
        """
        for file, dtype, array in zip(self._files, self._dtypes, (ids, segments, learned), strict=True):
            if array is not None:
                with errors_name(Path(file.name)):
                    file.write(np.ascontiguousarray(array, dtype).tobytes())

    def flush(self) -> list[int]:
        """Wait until all sequences are on the disk. Returns the sizes of the files."""
        for file in self._files:
            with errors_name(Path(file.name)):
                file.flush()
                os.fsync(file.fileno())
        return [file.tell() for file in self._files]

    def finish(self) -> None:
        """Write the lengths of the sequences. The file of segments stays: an interrupted call needs it to continue."""
        self.flush()
        segments = np.fromfile(self._segments, np.int64)
        replace_file(self._segments.with_suffix(".lengths"), joined_lengths(segments).tobytes())

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            with errors_name(Path(file.name)):
                file.close()


def joined_lengths(segments: Array) -> Array:
    """Return the number of tokens of each sequence, int64, from segments, see TokenWriter.append.

    Sequences without tokens are left out. A segment of 0 tokens ends its sequence."""
    if not len(segments):
        return segments.astype(np.int64)
    ends = segments >= 0
    first = np.flatnonzero(np.concatenate([[True], ends[:-1]]))
    lengths = np.add.reduceat(np.abs(segments), first)
    return lengths[lengths > 0]


def _names(part: str) -> list[str]:
    return [f"{part}.{name}" for name in ("tokens", "lengths", "learned")]


def written_files(folder: Path, part: str) -> list[Path]:
    """Return the files that a TokenWriter appends to: tokens, segments, and which tokens are learned."""
    return [folder / name.replace(".lengths", ".segments") for name in _names(part)]


def _checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def is_token_folder(path: Path) -> bool:
    """Return True if the folder was written by `nntile data prepare`."""
    return (path / META).is_file()


def is_unfinished(folder: Path) -> bool:
    """Return True if `nntile data prepare` has begun a folder and not completed it."""
    return (folder / PROGRESS).is_file() and not is_token_folder(folder)


def write_meta(folder: Path, tokenizer: str, dtype: Any, facts: Mapping[str, Any]) -> None:
    """Write the files that complete a folder of tokens."""
    replace_file(folder / TOKENIZER, tokenizer)
    names = [TOKENIZER, *_names(TRAIN), *_names(HELD_OUT)]
    files = {name: _checksum(folder / name) for name in names}
    tree = {"format": FORMAT, "dtype": np.dtype(dtype).name, "crc32": files, **facts}
    replace_file(folder / META, json.dumps(tree, indent=1))


def read_token_folder(folder: Path, key: str = "data.source") -> TokenFolder:
    """Open a folder of tokens. The tokens stay on the disk until they are used.

    Raises:
        ConfigError: The folder is damaged or of another version. The message names `key`.
    """
    need = "allowed: a folder that `nntile data prepare` has completed"
    try:
        facts = json.loads((folder / META).read_text())
        if facts["format"] != FORMAT:
            raise ConfigError(f"{key}: {folder} has format {facts['format']!r}; allowed: {FORMAT} (prepare it again)")
        for name, checksum in facts["crc32"].items():
            if (folder / name).stat().st_size <= CHECKED and _checksum(folder / name) != checksum:
                raise ValueError(f"{name} is damaged")
        if np.dtype(facts["dtype"]).kind not in "iu":
            raise ValueError(f"dtype: {facts['dtype']!r}")
        train, held_out = (_part(folder, part, facts["dtype"]) for part in (TRAIN, HELD_OUT))
        return TokenFolder(train, held_out, (folder / TOKENIZER).read_text(encoding="utf-8"), facts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{key}: cannot read the tokens in {folder} ({error}); {need}") from None


def _part(folder: Path, part: str, dtype: str) -> Tokens:
    ids = _mapped(folder / f"{part}.tokens", dtype)
    lengths = np.fromfile(folder / f"{part}.lengths", np.int64)
    learned = _mapped(folder / f"{part}.learned", np.uint8)
    if lengths.sum() != len(ids) or len(learned) not in (0, len(ids)):
        raise ValueError(f"{part}.tokens has {len(ids):,} tokens, {part}.lengths counts {lengths.sum():,}")
    return Tokens(ids, lengths, learned if len(learned) else None)


def _mapped(path: Path, dtype: Any, offset: int = 0) -> Array:
    """Return a file as an array that stays on the disk."""
    if path.stat().st_size <= offset:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, np.dtype(dtype), "r", offset)


# -- files of other programs


def is_token_file(path: Path) -> bool:
    """Return True if a file has the suffix .bin or .idx, as files of tokens of nanoGPT, llm.c and Megatron have."""
    return path.suffix.lower() in (".bin", ".idx") and path.is_file()


def read_token_file(path: Path, end: int | None, vocab: int, key: str = "data.source") -> Tokens:
    """Open a file of tokens: of Megatron if there is an .idx beside the .bin, else of llm.c or nanoGPT (uint16).

    Args:
        path: The file .bin, or Megatron's .idx.
        end: Token that ends a document in files without an index. None: the file is one document.
        vocab: Size of the vocabulary: token numbers must be smaller.
        key: Key of the config that names the file, for messages.

    Raises:
        ConfigError: The file is damaged, or has a number that is no token of the vocabulary.
    """
    try:
        index = path.with_suffix(".idx")
        tokens = _megatron(index) if index.is_file() else _flat(path, end)
        ends = [int(end) for part in _chunks(tokens.ids) for end in (part.min(), part.max())]
        if ends and (wrong := min(ends) if min(ends) < 0 else max(ends)) not in range(vocab):
            raise ValueError(f"token number {wrong}, and the tokenizer has {vocab:,} tokens")
    except (OSError, ValueError) as error:
        need = "uint16 token numbers (nanoGPT), llm.c's .bin, or Megatron's .bin with .idx"
        raise ConfigError(f"{key}: cannot read {path} ({error}); allowed: {need}") from None
    return tokens


def _chunks(ids: Array) -> list[Array]:
    return [ids[first : first + _CHUNK] for first in range(0, len(ids), _CHUNK)]


def _flat(path: Path, end: int | None) -> Tokens:
    """Read a file of nanoGPT (only uint16 numbers), or of llm.c (a header of 1024 bytes before these numbers)."""
    size = path.stat().st_size
    header = np.fromfile(path, np.int32, 256)
    offset = 1024 if len(header) == 256 and header[0] == _LLM_C else 0
    if (size - offset) % 2 or size == offset:
        raise ValueError(f"{size:,} bytes are no uint16 numbers")
    if offset and header[2] != (size - offset) // 2:
        raise ValueError(f"{(size - offset) // 2:,} tokens; its header says {header[2]:,}")
    ids = _mapped(path, np.uint16, offset)
    found = [] if end is None else [np.flatnonzero(part == end) + k * _CHUNK + 1 for k, part in enumerate(_chunks(ids))]
    bounds = np.unique(np.concatenate([[0], *found, [len(ids)]]).astype(np.int64))
    return Tokens(ids, np.diff(bounds))


def _megatron(index: Path) -> Tokens:
    """Read Megatron's file: the index has the length and the place of each sequence."""
    content = index.read_bytes()
    if not content.startswith(_MEGATRON):
        raise ValueError(f"{index.name} does not begin with {_MEGATRON[:7].decode()}")
    if len(content) < 34:
        raise ValueError(f"{index.name} is cut short: {len(content):,} bytes; its header has 34")
    code, count = content[17], int.from_bytes(content[18:26], "little")
    if code not in _MEGATRON_DTYPES:
        raise ValueError(f"{index.name} has the number type {code}; allowed: {', '.join(map(str, _MEGATRON_DTYPES))}")
    dtype, first = np.dtype(_MEGATRON_DTYPES[code]), 34
    if len(content) < first + 12 * count:
        raise ValueError(f"{index.name} is cut short: {len(content):,} bytes for {count:,} sequences")
    lengths = np.frombuffer(content, np.int32, count, first).astype(np.int64)
    starts = np.frombuffer(content, np.int64, count, first + 4 * count)
    if (lengths < 0).any():
        raise ValueError(f"{index.name} has a sequence of {lengths.min():,} tokens")
    if (starts != (np.cumsum(lengths) - lengths) * dtype.itemsize).any():
        raise ValueError(f"the sequences of {index.name} are not one after the other")
    ids = _mapped(index.with_suffix(".bin"), dtype)
    if len(ids) != lengths.sum():
        raise ValueError(f"{len(ids):,} tokens; {index.name} counts {lengths.sum():,}")
    return Tokens(ids, lengths)
