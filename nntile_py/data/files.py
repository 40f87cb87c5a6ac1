"""Open data files: decompress them, find their format, and read them line by line."""

from __future__ import annotations

import codecs
import errno
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from nntile_py.errors import ConfigError
from nntile_py.system.folders import open_regular

COMPRESSED = (".gz", ".zst")
_CHUNK = 2**20  # bytes
_FED = 2**13  # bytes of a .zst file that are decompressed at a time, so that the result has at most 256 MiB
WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # byte order marks of UTF-16; UTF-32's (LE) begins with the first
# First bytes of binary formats and of encodings, for messages. They tell the format of a file, whatever its name is.
_SIGNATURES = {
    codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32", **dict.fromkeys(WIDE, "UTF-16"),
    b"PAR1": "Parquet", b"ARROW1": "Arrow", b"\x1f\x8b": "gzip", b"(\xb5/\xfd": "Zstandard", b"PK\x03\x04": "zip",
    b"%PDF": "PDF", b"\x89PNG": "PNG", b"\xff\xd8\xff": "JPEG", b"\x93NUMPY": "numpy", b"SQLite format 3": "SQLite",
    b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"7z\xbc\xaf": "7-Zip", b"\x89HDF": "HDF5",
}  # fmt: skip


def format_suffix(path: Path) -> str:
    """Return the suffix that names a file's format, in lower case: `.jsonl` for x.jsonl, x.JSONL.gz and x.jsonl.zst."""
    inner = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return inner.suffix.lower()


def binary_format(path: Path) -> str | None:
    """Return the name of a file's binary format or encoding, such as "PDF" or "UTF-16", by its first bytes; else None.

    Raises:
        OSError: The file cannot be read."""
    with opened(path) as file:
        first = file.read(16)
    return next((name for signature, name in _SIGNATURES.items() if first.startswith(signature)), None)


def text_in_utf8(kind: str | None) -> str:
    """Return the words for text in UTF-8, for a message that refuses a file of this binary format or encoding."""
    advice = f" (`iconv -f {kind} -t UTF-8` converts {kind})"
    return "text in UTF-8" + advice * (kind is not None and kind.startswith("UTF-"))


def opened(path: Path) -> IO[bytes]:
    """Open a regular file for reading. Files .gz and .zst are decompressed while they are read.

    Raises:
        OSError: The file cannot be read, or is not a regular file (a pipe might never end).
        ConfigError: The file is a .zst file, and the package zstandard is missing.
    """
    file, suffix = open_regular(path), path.suffix.lower()
    if suffix == ".gz":
        return _Decompressed(path, gzip.GzipFile(fileobj=file), file)
    if suffix == ".zst":
        zstandard = package("zstandard", path)
        return _Decompressed(path, _Frames(zstandard.ZstdDecompressor(), file), file)
    return file


class _Decompressed(io.BufferedReader):
    """Reads a decompressing stream. Damaged data raises an OSError that names the file."""

    def __init__(self, path: Path, stream: Any, file: IO[bytes]) -> None:
        super().__init__(_Stream(path, stream, file), _CHUNK)


class _Stream(io.RawIOBase):
    def __init__(self, path: Path, stream: Any, file: IO[bytes]) -> None:
        self._path, self._stream, self._file = path, stream, file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            content = self._stream.read(len(buffer))
        except (EOFError, OSError, zlib.error, ValueError, Exception) as error:
            if isinstance(error, OSError) and error.errno:
                raise
            raise OSError(errno.EINVAL, f"damaged or cut short ({error})", str(self._path)) from None
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._file.close()
        super().close()


class _Frames:
    """Reads the frames of a .zst file. zstandard's own reader takes a frame without its end for a complete frame."""

    def __init__(self, decompressor: Any, file: IO[bytes]) -> None:
        self._decompressor, self._file = decompressor, file
        self._frame: Any = None  # the decompressor of the current frame; None between frames
        self._input, self._output = b"", memoryview(b"")

    def read(self, size: int) -> memoryview:
        """Return the next bytes, at most `size`; none at the end of the file.

        Raises:
            EOFError: The file ends within a frame."""
        while not self._output:
            fed = self._input or self._file.read(_FED)
            if not fed and self._frame:
                raise EOFError("the file ends within a frame")
            if not fed:
                break
            self._frame = self._frame or self._decompressor.decompressobj()
            self._output, self._input = memoryview(self._frame.decompress(fed)), b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        content, self._output = self._output[:size], self._output[size:]
        return content


def package(name: str, path: Path) -> Any:
    """Import a package of the extra `data`.

    Raises:
        ConfigError: The package is missing. The message names the file that needs it."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        need = f"pip install {name.partition('.')[0]} (part of the extra nntile_py[data])"
        raise ConfigError(f"{path}: reading this file needs a package; allowed after: {need}") from None


def text_lines(where: str, path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number, line) of a file in UTF-8, from 1 on. A line keeps its end: \\n, \\r\\n, or none at the file's end.

    A byte order mark is no part of the text.

    Raises:
        ConfigError: A line is not UTF-8, or has a null byte. The message begins with `where`.
        OSError: The file cannot be read.
    """
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            if 0 in line or (number == 1 and line.startswith(WIDE)):
                kind = binary_format(path)
                what = f"is a {kind} file" if kind else f"line {number}: has a null byte"
                raise ConfigError(f"{where}, {what}; allowed: {text_in_utf8(kind)}")
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                wrong = f"line {number}: not UTF-8 ({error.reason})"
                raise ConfigError(f"{where}, {wrong}; allowed: text in UTF-8") from None
            yield number, text
