"""Texts with labels: the rows of a CSV or of JSON lines; functions of Python's standard library by their package."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from nntile_py.errors import ConfigError
from nntile_py.schema import short
from nntile_py.system.folders import STDLIB, read, stdlib, stdlib_files

MOST_LABELS = 256  # more are no classes, but another column
LEAST_FUNCTIONS = 200  # of a package whose functions are samples
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_LINES = (".jsonl", ".ndjson")
# A function, with what is nested in it: the lines below that are empty, further in, or close its arguments.
_FUNCTION = re.compile(r"^( *)(?:async )?def .*\n(?:(?:\1[ \t].*)?\n|\1\).*\n)*", re.MULTILINE)


class Sample(NamedTuple):
    """A text and its label; line: in its file, from 1 on."""

    text: str
    label: str
    line: int


def read_samples(key: str, source: str, text: str, label: str) -> list[Sample]:
    """All samples of a table, in its order. key: of the config, for messages; text, label: names of columns.

    A row without text or label, or what is no table, is a ConfigError that names the file, the line, what is allowed.
    """
    if source == STDLIB:
        return _functions()
    try:
        stat = os.stat(source)
        return _read(key, source, text, label, (stat.st_mtime_ns, stat.st_size))
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {source}: {error.strerror}; allowed: {_allowed(text, label)}") from None


def labels_of(source: str, samples: list[Sample]) -> list[str]:
    """Their labels, sorted, integers as such. ConfigError: there is one alone, or too many."""
    found = {sample.label for sample in samples}
    if len(found) == 1:
        one, need = found.pop(), "at least two labels"
        raise ConfigError(f"data.source: {source}: all {len(samples):,} rows have the label {one!r}; allowed: {need}")
    if len(found) > MOST_LABELS:
        need = f"at most {MOST_LABELS} (is data.label the right column?)"
        raise ConfigError(f"data.source: {source} has {len(found):,} labels in {len(samples):,} rows; allowed: {need}")
    return sorted(found, key=int) if all(re.fullmatch(r"-?\d{1,18}", one) for one in found) else sorted(found)


def class_numbers(names: list[str] | None, classes: int, samples: list[Sample]) -> dict[str, int]:
    """The class that a label means: by its name, or by its number where no class has a number as its name, and the
    labels of `samples` are not all names."""
    by_name = {name: number for number, name in enumerate(names or ())}
    if no_numbers(names) and not all(sample.label in by_name for sample in samples):
        return {str(number): number for number in range(classes)} | by_name
    return by_name


def no_numbers(names: list[str] | None) -> bool:
    """Whether no class has a number as its name, so that a number can only be that of a class."""
    return not any(name.removeprefix("-").isdecimal() for name in names or ())


@lru_cache(maxsize=2)
def _read(key: str, source: str, text: str, label: str, changed: tuple[int, int]) -> list[Sample]:
    """`changed`: another file of this name is read anew."""
    where, need = f"{key}: {source}", _allowed(text, label)
    samples = [
        Sample(*_checked(f"{where}, line {line}", row, text, label), line)
        for line, row in read_rows(where, Path(source), (text, label), need)
    ]
    if not samples:
        raise ConfigError(f"{where}: no rows; allowed: {need}")
    return samples


def _allowed(text: str, label: str) -> str:
    return (
        f"a file .csv or .tsv with the columns {text!r} and {label!r}, or .jsonl with these keys (data.text and"
        " data.label name others)"
    )


def _checked(here: str, row: dict[str, Any], text: str, label: str) -> tuple[str, str]:
    name = row[label]
    if isinstance(name, bool):
        name = str(name).lower()
    if not isinstance(name, str | int) or not str(name).strip():
        raise ConfigError(f"{here}: {label!r} is {short(name)}; allowed: a name or an integer")
    return text_of(here, text, row[text]), text_of(here, label, str(name)).strip()


# -- tables


def read_rows(where: str, path: Path, columns: Sequence[str], need: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a table, each with the line at which it begins: of a .csv or .tsv whose first line names the columns,
    of .jsonl or .ndjson with an object a line. Empty lines are no rows.

    ConfigError, which begins with `where`, for what is no table or lacks one of `columns`; need: what is allowed
    there. OSError where it cannot be read."""
    kind = path.suffix.lower()
    if kind not in (*_DELIMITERS, *_LINES):
        raise ConfigError(f"{where}: not the name of a table; allowed: {need}")
    decoded = read_text(where, path)
    if kind in _DELIMITERS:
        yield from _csv_rows(where, decoded, _DELIMITERS[kind], columns, need)
        return
    for line, row in _json_rows(where, decoded):
        for key in columns:
            if key not in row:
                named = ", ".join(map(repr, row)) or "none"
                raise ConfigError(f"{where}, line {line}: no {key!r}; it has {named}; allowed: {need}")
        yield line, row


def read_text(where: str, path: Path) -> str:
    """A file in UTF-8; ConfigError, which begins with `where`: it is in something else. OSError as of read_rows."""
    content = read(path)
    if (place := content.find(0)) >= 0:
        raise ConfigError(f"{where}, line {_line(content, place)}: has a null byte; allowed: text in UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = _line(content, error.start)
        raise ConfigError(f"{where}, line {line}: not UTF-8 ({error.reason}); allowed: text in UTF-8") from None


def text_of(here: str, key: str, value: Any, *, empty: bool = False) -> str:
    """The text in a column; ConfigError, which begins with `here`: it is none, or (unless `empty`) holds nothing."""
    if not isinstance(value, str) or not (empty or value.strip()):
        need = "a text" if empty else "a text that is not empty"
        raise ConfigError(f"{here}: {key!r} is {short(value)}; allowed: {need}")
    check_whole(here, value, ConfigError)
    return value


def check_whole(here: str, text: str, error: type[Exception]) -> None:
    """Raise `error`, which begins with `here`, for a text that no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON's \ud800
        raise error(f"{here}: half of a character (a lone surrogate); allowed: whole characters") from None


def _line(content: bytes, place: int) -> int:
    return content.count(b"\n", 0, place) + 1


def _json_rows(where: str, content: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, row in enumerate(content.split("\n"), 1):
        if not row.strip():
            continue
        need = "allowed: one JSON object a line"
        try:
            found = json.loads(row)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}, line {line}: broken JSON ({error}); {need}") from None
        if not isinstance(found, dict):
            raise ConfigError(f"{where}, line {line}: holds {short(found)}; {need}")
        yield line, found


def _csv_rows(
    where: str, content: str, delimiter: str, wanted: Sequence[str], need: str
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows below the line of the columns' names; a row may go over several lines."""
    columns: list[str] = []
    for line, row in _fields(where, content, delimiter):
        if not columns:
            columns = [name.strip() for name in row]
            _check_columns(f"{where}, line {line}", columns, wanted, need)
        elif len(row) != len(columns):
            told = f"{len(columns)}, one for each column that the first line names"
            raise ConfigError(f"{where}, line {line}: {len(row)} fields; allowed: {told}")
        else:
            yield line, dict(zip(columns, row, strict=True))


def _check_columns(here: str, columns: list[str], wanted: Sequence[str], need: str) -> None:
    for name in wanted:
        if columns.count(name) > 1:
            raise ConfigError(f"{here}: the column {name!r} is there twice; allowed: once")
        if name not in columns:
            named = ", ".join(map(repr, columns))
            raise ConfigError(f"{here}: no column {name!r}; there are {named}; allowed: {need}")


def _fields(where: str, content: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not empty, and the line at which each begins."""
    csv.field_size_limit(2**31 - 1)  # of the whole process, and never lower: others may be reading
    try:
        reader = csv.reader(io.StringIO(content, newline=""), delimiter=delimiter, strict=True)
        line = 1
        for row in reader:
            if row:
                yield line, row
            line = reader.line_num + 1
    except csv.Error as error:
        need = "fields with the delimiter, a quote or a line's end in them in quotes, quotes in them doubled"
        raise ConfigError(f"{where}, line {line}: {error}; allowed: {need}") from None


@lru_cache(maxsize=1)
def _functions() -> list[Sample]:
    """The functions and methods of packages of the standard library that have LEAST_FUNCTIONS or more."""
    root, found = stdlib(), []
    for path in stdlib_files():
        package, *inside = path.relative_to(root).parts
        if inside and (root / package / "__init__.py").is_file():
            content = read(path).decode(errors="replace")
            found += [Sample(one[0].rstrip(), package, content.count("\n", 0, one.start()) + 1)
                      for one in _FUNCTION.finditer(content)]  # fmt: skip
    many = Counter(sample.label for sample in found)
    return [sample for sample in found if many[sample.label] >= LEAST_FUNCTIONS]
