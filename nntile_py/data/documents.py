"""Documents: the texts of a file or a folder, read one after the other, and their split into two parts."""

from __future__ import annotations

import codecs
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nntile_py.data.collators import Array
from nntile_py.data.files import COMPRESSED, WIDE, binary_format, format_suffix, opened, text_in_utf8
from nntile_py.data.instructions import Instructions
from nntile_py.data.rows import MissingColumn, is_dataset, is_table, place, read_rows, table_names
from nntile_py.data.tables import text_of
from nntile_py.data.token_files import is_unfinished
from nntile_py.errors import ConfigError
from nntile_py.system.folders import STDLIB, files_in, stdlib, stdlib_files

OPTION = "SOURCE"  # key of the source in messages of `nntile data prepare`
PART = 4 * 2**20  # bytes or characters; a longer document has several parts, which are tokenized one after the other
# Where a part may end, best place first. The tokenizers of GPT-2, Llama 3 and others split text at a line end between
# two characters that are not blank. They give the same tokens for the parts as for the whole document.
_PARAGRAPH, _SINGLE, _LINE = (re.compile(rule) for rule in (r"\n\s*\n(?=\S)", r"(?<=\S)\n(?=\S)", r"\n(?=\S)"))


class TextPart(NamedTuple):
    """A part of a document.

    Attributes:
        text: The text.
        last: This is the document's last part.
        learned: Which parts of the text a model learns: (begin, end) in characters. None: all of it."""

    text: str
    last: bool = True
    learned: tuple[tuple[int, int], ...] | None = None


@dataclass
class Documents:
    """The documents of a source. Iteration yields their parts, in an order that depends only on file names.

    A table has a document in each row, any other file is one document. A folder's files that are no text, or are
    tables without the column, are left out and counted. Blank documents are skipped.

    Args:
        source: `python-stdlib`, a text file, a table, a folder of such files, or a folder of Hugging Face datasets.
        extensions: File name endings to read in a folder; .gz and .zst may follow them.
        column: Column of a table with the text.
        max_bytes: Upper bound on the bytes of text to read. A character that the bound cuts becomes U+FFFD.
        unit: What a sequence is. With `paragraphs`, parts of a document end between two paragraphs if possible.
        key: Key of the config, or option, that names the source, for messages.
        instructions: Turns the rows of a table into texts. None: a row's text is in `column`.

    Attributes:
        left_out: {kind of file: number of files of this kind that were left out of a folder}.

    Raises:
        ConfigError: The file is no text, or a row of a table is damaged. The message names file and line. In Python's
            standard library, which no user can correct, bytes that are not UTF-8 become U+FFFD.
    """

    source: str
    extensions: Sequence[str] = ()
    column: str = "text"
    max_bytes: int | None = None
    unit: str = "window"
    key: str = "data.source"
    instructions: Instructions | None = None
    left_out: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._files: list[Path] | None = None
        self._total = 0

    @property
    def files(self) -> list[Path]:
        """The files to read. In a folder, files with other extensions are counted as left out."""
        if self._files is None:
            root = Path(self.source)
            if self.source == STDLIB:
                self._files = stdlib_files()
            elif root.is_dir() and not is_dataset(root):
                self._files = self._of_folder(root)
            else:
                self._files = [root]
            self._total = len(self._files) + self.left_out.total()
        return self._files

    def _of_folder(self, root: Path) -> list[Path]:
        extensions, files = tuple(self.extensions), []
        for path in files_in(root, [""]):
            if path.name.startswith("."):
                continue
            bare = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
            if bare.name.lower().endswith(extensions) or path.name.lower().endswith(extensions):
                files.append(path)
            else:
                self.left_out[path.suffix.lower() or "without an extension"] += 1
        return files

    def paths(self) -> list[Path]:
        """Return all files that determine the documents."""
        root = Path(self.source)
        return sorted(root.iterdir()) if is_dataset(root) else self.files

    def describe(self) -> str:
        """Return one line on the files that were left out of a folder; "" if none was."""
        if not self.left_out:
            return ""
        names = ", ".join(f"{count:,} {name}" for name, count in self.left_out.most_common(5))
        more = f" and {len(self.left_out) - 5} other kinds" if len(self.left_out) > 5 else ""
        read = self._total - self.left_out.total()
        return f"read {read:,} of {self._total:,} files in {self.source}; left out: {names}{more}"

    def __iter__(self) -> Iterator[TextPart]:
        left, found = self.max_bytes, False
        try:
            for path in list(self.files):
                if left == 0:
                    break
                for part in self._parts(path, left):
                    found = True
                    if left is None:
                        yield part
                        continue
                    content = part.text.encode()
                    cut = content[:left].decode(errors="replace")
                    yield part if len(content) <= left else part._replace(text=cut, last=True)
                    if (left := max(0, left - len(content))) == 0:
                        break
        except OSError as error:
            need = "text files"
            raise ConfigError(f"{self.key}: cannot read {error.filename}: {error.strerror}; allowed: {need}") from None
        if not found:
            raise ConfigError(self._nothing())

    def _nothing(self) -> str:
        root = stdlib() if self.source == STDLIB else Path(self.source)
        what = f"no text in {root}"
        if root.is_dir() and not self.files:
            what = f"no file with one of the extensions {', '.join(self.extensions)} in {root}"
        if is_unfinished(root):
            need = "the same `nntile data prepare` again, which continues, then the folder"
            return f"{self.key}: `nntile data prepare` has not completed {root}; allowed: {need}"
        left = f" ({self.describe()})" if self.left_out else ""
        return f"{self.key}: {what}{left}; allowed: a text file, a table, or a folder of such files (data.extensions)"

    def _parts(self, path: Path, most: int | None) -> Iterator[TextPart]:
        """Yield the parts of a file's documents without blank documents.

        In a folder, a file that is not UTF-8 text, or a table without the required column, is skipped.
        """
        tolerant = Path(self.source).is_dir() and self.source != STDLIB and not is_dataset(Path(self.source))
        if self.instructions and not is_table(path):
            need = f"instructions: {table_names()}{self._or_texts}"
            raise ConfigError(f"{self.key}: {path} is no table; allowed for {need}")
        parts = self._rows(path) if is_table(path) else self._cut(self._decoded(path, most))
        if not tolerant:
            yield from parts
            return
        begun = False
        try:
            if not is_table(path):
                self._check(path)  # before any part is yielded, so that a file is used whole or not at all
            for part in parts:
                begun = True
                yield part
        except MissingColumn:
            if begun:
                raise
            columns = self.instructions.columns if self.instructions else [self.column]
            self._leave_out(path, f"{format_suffix(path)} without the column {' or '.join(map(repr, columns))}")
        except _NoText as error:
            self._leave_out(path, f"{format_suffix(path)} that is {error.kind}")

    @property
    def _or_texts(self) -> str:
        """End of messages of `nntile eval`, whose --data may also be texts; "" for other commands."""
        return "; for texts: --set data.messages=null" if self.key == "--data" else ""

    def _leave_out(self, path: Path, why: str) -> None:
        self.left_out[why] += 1
        self.files.remove(path)

    def _rows(self, path: Path) -> Iterator[TextPart]:
        where, of = f"{self.key}: {path}", self.instructions
        if of:
            names = " and ".join(map(repr, of.columns))
            keys = "data.messages, or data.prompt and data.response"
            need = f"a table with {names} ({keys}): {table_names()}{self._or_texts}"
            for number, row in read_rows(where, path, of.columns, need):
                if spans := of.render(f"{where}, {place(path, number)}", row):
                    yield TextPart(spans.text, learned=spans.learned)
            return
        others = "data.text names another, data.messages conversations"
        if self.key == OPTION:
            others = "--text names another, --messages conversations"
        need = f"a table with the column {self.column!r} ({others}): {table_names()}"
        for number, row in read_rows(where, path, [self.column], need):
            text = row[self.column]
            if text is not None and text_of(f"{where}, {place(path, number)}", self.column, text, empty=True).strip():
                yield from self._cut(text[first : first + PART] for first in range(0, len(text), PART))

    def _check(self, path: Path) -> None:
        """Read a file of more than one chunk, or a compressed file, once. Raises _NoText if the file is no text."""
        if path.stat().st_size > PART or path.suffix.lower() in COMPRESSED:
            for _ in self._decoded(path, None):
                pass

    def _cut(self, chunks: Iterable[str]) -> Iterator[TextPart]:
        """Yield the parts of a document, whose text comes in chunks of at most PART."""
        begun, text = False, ""
        for chunk in chunks:
            text += chunk
            while len(text) >= PART and (cut := _last_cut(text, self.unit)):
                if begun or text[:cut].strip():
                    yield TextPart(text[:cut], last=False)
                    begun = True
                text = text[cut:]
        if text.strip() or begun:
            yield TextPart(text)

    def _decoded(self, path: Path, most: int | None) -> Iterator[str]:
        """Yield the text of a file in UTF-8 in chunks, without byte order mark. Raises _NoText if the file is no text.

        most: Upper bound on the bytes to read."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace" if self.source == STDLIB else "strict")
        read = 0
        with opened(path) as file:
            while chunk := file.read(PART if most is None else min(PART, most - read)):
                if not read:
                    chunk = chunk.removeprefix(codecs.BOM_UTF8)
                if self.source != STDLIB and (0 in chunk or (not read and chunk.startswith(WIDE))):
                    raise self._no_text(path)
                pending = len(decoder.getstate()[0])
                try:
                    yield decoder.decode(chunk)
                except UnicodeDecodeError as error:
                    at, value = read - pending + error.start, error.object[error.start]
                    raise self._not_utf8(path, at, value, error.reason) from None
                read += len(chunk)
            if rest := decoder.getstate()[0]:  # the last character is incomplete
                if most is None and self.source != STDLIB:
                    raise self._not_utf8(path, read - len(rest), rest[0], "unexpected end of data")
                yield "\ufffd"

    def _no_text(self, path: Path) -> _NoText:
        kind = binary_format(path) or "binary"
        wrong = f"in {kind}" if kind.startswith("UTF-") else f"no text: {_article(kind)} file"
        need = f"{text_in_utf8(kind)}, or a table: {table_names()}"
        return _NoText(f"{self.key}: {path} is {wrong}; allowed: {need}", kind)

    def _not_utf8(self, path: Path, at: int, value: int, reason: str) -> _NoText:
        wrong = f"{path}: byte {at} (0x{value:02x}) is not UTF-8 ({reason})"
        need = "text in UTF-8 (`iconv -f LATIN1 -t UTF-8` converts Latin-1); for a folder also other data.extensions"
        return _NoText(f"{self.key}: {wrong}; allowed: {need}", "not UTF-8")


class _NoText(ConfigError):
    """A file is no text in UTF-8. `kind`: what the file is."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


def _article(kind: str) -> str:
    return f"a{'n' * (kind[0] in 'AEIOX')} {kind}"


def _last_cut(text: str, unit: str) -> int:
    """Return the last position in the second half of the text at which a part may end, or 0 without such a position.

    A part ends at a space only if the text has at least 2 * PART characters.
    """
    half = len(text) // 2
    patterns = (_PARAGRAPH, _LINE) if unit == "paragraphs" else (_SINGLE, _LINE)
    for pattern in patterns if text.find("\n", half) >= 0 else ():  # `find` is much faster than the patterns
        if places := [match.end() for match in pattern.finditer(text, half)]:
            return places[-1]
    return max(0, text.rfind(" ", half, -1)) if len(text) >= 2 * PART else 0


# -- split


class Split:
    """Which documents are held out of training.

    A document is held out if the hash of its text (of its first part) is below `val_fraction`. The choice depends on
    the document alone, so it stays when documents are added, and equal documents are in the same part. If the hashes
    hold out less than 0.5 or more than 1.5 times `val_fraction` of the text, as with few or long documents, the end of
    the text is held out instead.

    Args:
        documents: The documents, which are read once here.
        val_fraction: Share of the text to hold out.

    Attributes:
        characters: Length of all documents.
        digest: SHA-256 of all documents, in hexadecimal digits.
    """

    def __init__(self, documents: Documents, val_fraction: float) -> None:
        held, lengths, first = list[bool](), list[int](), True
        digest = hashlib.sha256()
        for part in documents:
            if first:
                held.append(is_held_out(part.text, val_fraction))
                lengths.append(0)
            lengths[-1] += len(part.text)
            digest.update(f"{len(part.text)} {part.last} ".encode() + part.text.encode())
            first = part.last
        self.digest, self.characters = digest.hexdigest(), sum(lengths)
        self._held: Array = np.array(held)
        self._cut: int | None = None  # position in the joined text where held-out text begins; None: by hashes
        size, target = int(np.array(lengths)[self._held].sum()), val_fraction * self.characters
        if not 0.5 * target <= size <= 1.5 * target:
            self._cut = self.characters - int(target)

    def parts(self, documents: Documents) -> Iterator[tuple[TextPart, bool]]:
        """Yield (part, held out) of the documents. The part in which the held-out text begins is cut in two."""
        number, place = 0, 0
        for part in documents:
            end = place + len(part.text)
            if self._cut is None:
                yield part, bool(self._held[number])
            elif end <= self._cut or place >= self._cut:
                yield part, place >= self._cut
            else:
                cut = self._cut - place
                cut = part.text.find("\n", cut) + 1 or cut  # at the end of a line, if one is left
                if part.text[:cut]:
                    yield TextPart(part.text[:cut]), False
                if part.text[cut:]:
                    yield TextPart(part.text[cut:], part.last), True
            place, number = end, number + part.last


def is_held_out(text: str, val_fraction: float) -> bool:
    """Return whether the hash of a document holds it out of training: true for a share `val_fraction` of all texts."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") < val_fraction * 2**64
