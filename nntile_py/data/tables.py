"""Read texts with labels: from a table, or from Python's standard library."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from nntile_py.data.files import text_lines
from nntile_py.data.rows import place, read_rows, table_names
from nntile_py.errors import ConfigError
from nntile_py.schema import short
from nntile_py.system.folders import STDLIB, read, stdlib, stdlib_files

MAX_LABELS = 256  # a column with more labels is not a column of classes
MIN_FUNCTIONS = 200  # packages of the standard library with fewer functions are left out
# A function with its nested functions: the lines below `def` that are empty, indented further, or close its arguments.
_FUNCTION = re.compile(r"^( *)(?:async )?def .*\n(?:(?:\1[ \t].*)?\n|\1\).*\n)*", re.MULTILINE)


class LabelledText(NamedTuple):
    """A text, its label, and the number of its line in the file, from 1 on.

    `several`: None, or the labels of a text that may have any number of labels; `label` joins them to one text.
    `words`: None, or the words of a text whose words have labels; `several` has the words' labels, `label` is empty.
    """

    text: str
    label: str
    line: int
    several: tuple[str, ...] | None = None
    words: tuple[str, ...] | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """All labels of the text."""
        return (self.label,) if self.several is None else self.several


def read_labelled_texts(
    key: str, source: str, text: str, label: str, *, several: bool = False
) -> list[LabelledText]:
    """Return the texts and labels of all rows of a table.

    Args:
        key: Key of the config that names the table, for messages.
        source: A file with a suffix of FORMATS, or `python-stdlib`: functions of Python's standard library, labelled
            with their package.
        text: Column of the texts.
        label: Column of the labels.
        several: A text may have any number of labels: a list in JSON, else names separated by commas.

    Raises:
        ConfigError: The file is not a table, or a row lacks its text or label. The message names file and line.
    """
    if source == STDLIB:
        return _functions()
    try:
        stat = os.stat(source)
        return _read(key, source, text, label, several, (stat.st_mtime_ns, stat.st_size))
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {source}: {error.strerror}; allowed: {_allowed(text, label)}") from None


def labels_of(source: str, samples: list[LabelledText]) -> list[str]:
    """Return the distinct labels of `samples`, sorted: by value if all labels are integers, else as text.

    Raises ConfigError if there is only one label, or more than MAX_LABELS."""
    labels = {label for sample in samples for label in sample.labels}
    if not labels:
        raise ConfigError(f"data.source: {source}: no row has a label; allowed: at least two labels")
    if len(labels) == 1:
        label, need = labels.pop(), "at least two labels"
        rows = f"all {len(samples):,} rows have" if len(samples) > 1 else "the only row has"
        raise ConfigError(f"data.source: {source}: {rows} the label {label!r}; allowed: {need}")
    if len(labels) > MAX_LABELS:
        need = f"at most {MAX_LABELS} (is data.label the right column?)"
        raise ConfigError(f"data.source: {source} has {len(labels):,} labels in {len(samples):,} rows; allowed: {need}")
    return sorted(labels, key=int) if all(re.fullmatch(r"-?\d{1,18}", label) for label in labels) else sorted(labels)


def class_numbers(names: list[str] | None, classes: int, samples: list[LabelledText]) -> dict[str, int]:
    """Return {label: number of its class}.

    A label is the name of a class. If no class has a number as its name, and some labels of `samples` are not names,
    labels may also be numbers of classes."""
    by_name = {name: number for number, name in enumerate(names or ())}
    if no_numbers(names) and not all(label in by_name for sample in samples for label in sample.labels):
        return {str(number): number for number in range(classes)} | by_name
    return by_name


def unknown_label(samples: list[LabelledText], numbers: Mapping[str, int]) -> tuple[int, str] | None:
    """Return line and name of the first label that is not in `numbers`, or None."""
    return next(((sample.line, label) for sample in samples for label in sample.labels if label not in numbers), None)


def no_numbers(names: list[str] | None) -> bool:
    """Return True if no class has a number as its name, so that a number as a label is unambiguous."""
    return not any(name.removeprefix("-").isdecimal() for name in names or ())


@lru_cache(maxsize=2)
def _read(
    key: str, source: str, text: str, label: str, several: bool, changed: tuple[int, int]
) -> list[LabelledText]:
    """Read a table. The result is cached. changed: time and size of the file, so that a changed file is read again."""
    where, need = f"{key}: {source}", _allowed(text, label)
    check = _checked_several if several else _checked
    samples = [
        check(f"{where}, {place(Path(source), line)}", row, text, label, line)
        for line, row in read_rows(where, Path(source), (text, label), need)
    ]
    if not samples:
        raise ConfigError(f"{where}: no rows; allowed: {need}")
    return samples


def _allowed(text: str, label: str) -> str:
    return f"a table with the columns {text!r} and {label!r} (data.text and data.label name others): {table_names()}"


def _checked(here: str, row: dict[str, Any], text: str, label: str, line: int) -> LabelledText:
    return LabelledText(text_of(here, text, row[text]), name_of(here, label, row[label]), line)


def _checked_several(here: str, row: dict[str, Any], text: str, label: str, line: int) -> LabelledText:
    value = row[label]
    if isinstance(value, str):
        value = [name for name in value.split(",") if name.strip()]
    if not isinstance(value, list):
        need = "a list of names or integers, or names separated by commas"
        raise ConfigError(f"{here}: {label!r} is {short(value)}; allowed: {need}")
    labels = tuple(sorted({name_of(here, label, name) for name in value}))
    return LabelledText(text_of(here, text, row[text]), ", ".join(labels), line, labels)


def name_of(here: str, label: str, name: Any) -> str:
    """Return a label as text. If `name` is no label, raise ConfigError, whose message begins with `here`."""
    if isinstance(name, bool):
        name = str(name).lower()
    if not isinstance(name, str | int) or not str(name).strip():
        several = ", or a list with head: multi_label_classification" * isinstance(name, list)
        raise ConfigError(f"{here}: {label!r} is {short(name)}; allowed: a name or an integer{several}")
    return text_of(here, label, str(name)).strip()


# -- text


def read_text(where: str, path: Path) -> str:
    """Return the text of a file in UTF-8.

    Raises:
        ConfigError: The file has another encoding. The message begins with `where`.
        OSError: The file cannot be read.
    """
    return "".join(line for _, line in text_lines(where, path))


def lines_of(text: str) -> list[str]:
    """Return the lines of a text. A line ends at \\n or \\r\\n, not at a form feed or U+2028 as in str.splitlines."""
    lines = text.split("\n")
    return [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]


def text_of(here: str, key: str, value: Any, *, empty: bool = False) -> str:
    """Return `value` if it is text; blank text is allowed only if `empty`.

    Otherwise raise ConfigError, whose message begins with `here` and names `key`."""
    if not isinstance(value, str) or not (empty or value.strip()):
        need = "a text" if empty else "a text that is not empty"
        raise ConfigError(f"{here}: {key!r} is {short(value)}; allowed: {need}")
    check_whole(here, value, ConfigError)
    return value


def check_whole(here: str, text: str, error: type[Exception]) -> None:
    """Raise `error`, whose message begins with `here`, if UTF-8 cannot encode the text."""
    try:
        text.encode()
    except UnicodeEncodeError:  # such as \ud800 in JSON
        raise error(f"{here}: half of a character (a lone surrogate); allowed: whole characters") from None


@lru_cache(maxsize=1)
def _functions() -> list[LabelledText]:
    """Return the functions and methods of the standard library, each labelled with its package.

    Packages with fewer than MIN_FUNCTIONS functions are left out."""
    root, functions = stdlib(), []
    for path in stdlib_files():
        package, *inside = path.relative_to(root).parts
        if inside and (root / package / "__init__.py").is_file():
            content = read(path).decode("utf-8-sig", errors="replace")
            functions += [LabelledText(match[0].rstrip(), package, content.count("\n", 0, match.start()) + 1)
                      for match in _FUNCTION.finditer(content)]  # fmt: skip
    counts = Counter(sample.label for sample in functions)
    return [sample for sample in functions if counts[sample.label] >= MIN_FUNCTIONS]
