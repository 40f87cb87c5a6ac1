"""Read the rows of tables: CSV, JSON lines, JSON, Parquet, and folders that Hugging Face datasets saved."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import IO, Any

from nntile_py.data.files import COMPRESSED, format_suffix, opened, package, text_lines
from nntile_py.errors import ConfigError
from nntile_py.schema import short
from nntile_py.system.units import counted

Row = tuple[int, dict[str, Any]]  # number that `place` takes: of the row's first line, or of the row; {column: value}
RowReader = Callable[[str, Path, Sequence[str], str], Iterator[Row]]
SEPARATORS = (",", ";", "\t", "|")
LONGEST_HEADER = 2**16  # characters of the first line that are searched for another separator
LONGEST_FIELD = 2**30  # characters; if a closing quote is missing, the rest of the file is one field
_DATASET, _SPLITS = "dataset_info.json", "dataset_dict.json"  # files of Dataset.save_to_disk, DatasetDict.save_to_disk


class MissingColumn(ConfigError):
    """A table lacks a column."""


def is_table(path: Path) -> bool:
    """Return True if a file's name has the suffix of a table, or a folder was saved by Hugging Face datasets."""
    return format_suffix(path) in FORMATS or is_dataset(path)


def is_dataset(path: Path) -> bool:
    """Return True if datasets' `save_to_disk` wrote this folder."""
    return any((path / name).is_file() for name in (_DATASET, _SPLITS))


def table_names() -> str:
    """Return the suffixes of tables as text, for messages."""
    return f"{', '.join(FORMATS)} (also with {' or '.join(COMPRESSED)}), or a folder of Hugging Face datasets"


def place(path: Path, number: int) -> str:
    """Return the place of a row as text: "line 3" of a text file, "row 3" of a binary file."""
    return f"{'line' if format_suffix(path) in _TEXT else 'row'} {number}"


def read_rows(where: str, path: Path, columns: Sequence[str], need: str) -> Iterator[Row]:
    """Yield the rows of a table, each with the number that `place` takes. Text files are read row by row.

    Args:
        where: Beginning of error messages.
        path: A table, see is_table.
        columns: Columns that every row must have.
        need: End of error messages: text on the tables that are allowed.

    Raises:
        ConfigError: The file is not a table, or lacks a column (MissingColumn).
        OSError: The file cannot be read.
    """
    if is_dataset(path):
        yield from _dataset_rows(where, path, columns, need)
    elif (read_format := FORMATS.get(format_suffix(path))) is None:
        raise ConfigError(f"{where}: not the name of a table; allowed: {need}")
    else:
        yield from read_format(where, path, columns, need)


def _json_lines(where: str, path: Path, columns: Sequence[str], need: str) -> Iterator[Row]:
    """Yield the rows of a file with one JSON object a line. Blank lines are skipped. Arguments: as for read_rows."""
    for line, text in text_lines(where, path):
        if text.strip():
            yield line, _object(f"{where}, line {line}", text, columns, need)


def _object(here: str, text: str, columns: Sequence[str], need: str) -> dict[str, Any]:
    form = "allowed: one JSON object a line"
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{here}: broken JSON ({error}); {form}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{here}: holds {short(row)}; {form}")
    _check_keys(here, row, columns, need)
    return row


def _close(name: str, names: Iterable[str]) -> str:
    """Return a question with the name that is most like a missing name; "" if none is like it."""
    return "".join(f" (did you mean {one!r}?)" for one in get_close_matches(name, list(names), 1))


def _check_keys(here: str, row: dict[str, Any], columns: Sequence[str], need: str) -> None:
    for key in columns:
        if key not in row:
            named = ", ".join(map(repr, row)) or "none"
            raise MissingColumn(f"{here}: no {key!r}{_close(key, row)}; it has {named}; allowed: {need}")


def _json_rows(where: str, path: Path, columns: Sequence[str], need: str) -> Iterator[Row]:
    """Yield the objects of a JSON file that holds a list of objects. Arguments: as for read_rows."""
    text = "".join(line for _, line in text_lines(where, path))
    if not text.lstrip().startswith("["):  # several objects, one a line
        yield from _json_lines(where, path, columns, need)
        return
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: broken JSON ({error}); allowed: a list of objects") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ConfigError(f"{where}, item {number}: holds {short(row)}; allowed: a list of objects")
        _check_keys(f"{where}, item {number}", row, columns, need)
        yield number, row


def _csv_rows(where: str, path: Path, columns: Sequence[str], need: str, *, delimiter: str = ",") -> Iterator[Row]:
    """Yield the rows of a file whose first line names the columns. Arguments: as for read_rows.

    A row may span several lines. Empty lines are skipped."""
    names: list[str] = []
    _check_separator(where, path, columns, delimiter)
    for line, fields in _fields(where, path, delimiter):
        if not names:
            names = [name.strip() for name in fields]
            _check_columns(f"{where}, line {line}", names, columns, need)
        elif len(fields) != len(names):
            allowed = f"{len(names)}, one for each column that the first line names"
            raise ConfigError(f"{where}, line {line}: {counted(len(fields), 'field')}; allowed: {allowed}")
        else:
            yield line, dict(zip(names, fields, strict=True))


def _check_separator(where: str, path: Path, columns: Sequence[str], delimiter: str) -> None:
    """Raise MissingColumn if the first line lacks a column and another separator divides this line."""
    first = next((text for _, text in text_lines(where, path) if text.strip()), "")[:LONGEST_HEADER].replace("\r", "")
    parts = {one: [name.strip() for name in next(csv.reader([first], delimiter=one), [])] for one in SEPARATORS}
    own = parts[delimiter]
    for other in SEPARATORS if len(own) == 1 and not set(columns) <= set(own) else ():
        if len(parts[other]) > 1:
            named, suffix = ", ".join(map(repr, parts[other])), format_suffix(path)
            wrong = f"the columns {named} have the separator {other!r}"
            raise MissingColumn(f"{where}, line 1: {wrong}; allowed in a {suffix} file: {delimiter!r}")


def _fields(where: str, path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of the row's first line, fields) of each row of a CSV file, except empty rows."""
    csv.field_size_limit(LONGEST_FIELD)  # holds for the whole process; never lowered: other threads may be reading
    line = 1
    try:
        reader = csv.reader((text for _, text in text_lines(where, path)), delimiter=delimiter, strict=True)
        for row in reader:
            if row:
                yield line, row
            line = reader.line_num + 1
    except csv.Error as error:
        need = "fields with the delimiter, a quote or a line's end in them in quotes, quotes in them doubled"
        raise ConfigError(f"{where}, line {line}: {error}; allowed: {need}") from None


def _check_columns(here: str, columns: Sequence[str], wanted: Sequence[str], need: str) -> None:
    for name in wanted:
        if list(columns).count(name) > 1:
            raise ConfigError(f"{here}: the column {name!r} is there twice; allowed: once")
        if name not in columns:
            named = ", ".join(map(repr, columns))
            missing = f"no column {name!r}{_close(name, columns)}"
            raise MissingColumn(f"{here}: {missing}; there are {named}; allowed: {need}")


# -- binary tables


def _parquet_rows(where: str, path: Path, columns: Sequence[str], need: str) -> Iterator[Row]:
    """Yield the rows of a Parquet file. Arguments: as for read_rows."""
    parquet = package("pyarrow.parquet", path)
    with opened(path) as file, _arrow_errors(where, path):
        table = parquet.ParquetFile(file)
        _check_columns(where, table.schema_arrow.names, columns, need)
        yield from _rows(table.iter_batches(1000, columns=[*columns]))


def _arrow_rows(where: str, path: Path, columns: Sequence[str], need: str) -> Iterator[Row]:
    """Yield the rows of an Arrow file or stream. Arguments: as for read_rows."""
    ipc = package("pyarrow.ipc", path)
    with opened(path) as file, _arrow_errors(where, path):
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        stream = _ArrowStream(file)
        reader: Any = ipc.open_file(file) if is_file else ipc.open_stream(stream)
        _check_columns(where, reader.schema.names, columns, need)
        batches = (reader.get_batch(k) for k in range(reader.num_record_batches)) if is_file else reader
        yield from _rows(batch.select([*columns]) for batch in batches)
        if stream.short:
            what = "cut short: no marker of its end, which datasets and pyarrow write when they close a file"
            raise ConfigError(f"{where}: {what}; allowed: a whole file")


class _ArrowStream:
    """A file from which pyarrow reads an Arrow stream. pyarrow does not report a missing end marker; this class does.

    Attributes:
        short: True if a read got fewer bytes than requested: the end marker is missing, as pyarrow reads nothing
            behind this marker.
    """

    closed = False

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.short = file, False

    def read(self, size: int) -> bytes:
        """Read bytes from the file."""
        content = self._file.read(size)
        self.short |= len(content) < size
        return content


def _dataset_rows(where: str, path: Path, columns: Sequence[str], need: str) -> Iterator[Row]:
    """Yield the rows of a folder that Dataset.save_to_disk wrote. Arguments: as for read_rows."""
    if (path / _SPLITS).is_file():
        splits = ", ".join(str(one.parent) for one in sorted(path.glob(f"*/{_DATASET}")))
        raise ConfigError(f"{where}: a dataset with several splits; allowed: the folder of a split: {splits}")
    try:
        files = [path / one["filename"] for one in json.loads((path / "state.json").read_text())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{where}: cannot read state.json of this dataset ({error}); allowed: {need}") from None
    first = 0
    for file in files:
        number = 0
        for number, row in _arrow_rows(where, file, columns, need):
            yield first + number, row
        first += number


def _rows(batches: Any) -> Iterator[Row]:
    number = 0
    for batch in batches:
        batch.validate(full=True)  # otherwise texts that are not UTF-8 raise later, and wrong offsets read other memory
        for row in batch.to_pylist():
            number += 1
            yield number, row


class _arrow_errors:
    """Context manager: turns errors of pyarrow on a damaged file into a ConfigError that names the file."""

    def __init__(self, where: str, path: Path) -> None:
        self._where, self._path = where, path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        # pyarrow raises some errors about the content as an OSError without errno
        content = isinstance(error, OSError) and not error.errno
        if content or isinstance(error, package("pyarrow", self._path).ArrowException):
            text = " ".join(str(error).split())
            raise ConfigError(f"{self._where}: damaged, or of another format ({text}); allowed: a whole file") from None


# A new table format needs a function, which takes the arguments of read_rows, and an entry here with its file suffix.
_TEXT: dict[str, RowReader] = {
    ".csv": _csv_rows,
    ".tsv": partial(_csv_rows, delimiter="\t"),
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
}
FORMATS: dict[str, RowReader] = _TEXT | {
    ".json": _json_rows,
    ".parquet": _parquet_rows,
    ".arrow": _arrow_rows,
}
