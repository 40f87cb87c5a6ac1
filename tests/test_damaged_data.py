"""Data files that are cut short or damaged, and hostile chat templates, end with one message."""

import errno
import io
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nntile_py.data import chat_template
from nntile_py.data.chat_template import ChatTemplate
from nntile_py.data.files import opened
from nntile_py.data.instructions import Columns, Instructions
from nntile_py.data.rows import read_rows
from nntile_py.data.token_files import META, TokenWriter, read_token_file, read_token_folder
from nntile_py.errors import ConfigError
from nntile_py.training.prepare_command import prepare

MESSAGES = [{"role": "user", "content": "hello"}]


def test_a_zst_file_is_read_whole_or_refused(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    text = np.random.default_rng(0).bytes(500_000)
    frame = zstandard.ZstdCompressor().compress(text)
    skipped = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"  # a skippable frame
    path = tmp_path / "a.txt.zst"
    for content, read in ((frame, text), (frame + skipped + frame, text * 2), (b"", b"")):
        path.write_bytes(content)
        with opened(path) as file:
            assert file.read() == read
    for content in (frame[:-1], frame[:250_000], frame[:3], frame + frame[:9], frame + skipped[:-1], frame + b"junk"):
        path.write_bytes(content)
        with opened(path) as file, pytest.raises(OSError, match="damaged or cut short") as error:
            file.read()
        assert error.value.filename == str(path)


def test_damaged_arrow_and_parquet_files_are_named(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    bytes_ = pa.array([b"good", b"\xff\xfe"], pa.binary()).buffers()
    table = pa.table({"text": pa.StringArray.from_buffers(2, bytes_[1], bytes_[2])})  # not UTF-8
    parquet.write_table(table, tmp_path / "utf8.parquet")
    whole = pa.table({"text": ["some text"] * 1000})
    with pa.ipc.new_stream(tmp_path / "cut.arrow", whole.schema) as file:
        file.write_table(whole)
    content = (tmp_path / "cut.arrow").read_bytes()
    (tmp_path / "cut.arrow").write_bytes(content[: len(content) // 2])
    for name in ("utf8.parquet", "cut.arrow"):
        with pytest.raises(ConfigError, match=f"data.source: .*{name}: damaged, or of another format"):
            list(read_rows("data.source: " + name, tmp_path / name, ("text",), "a table"))


def test_an_arrow_stream_without_its_end_is_refused(tmp_path: Path) -> None:
    """Its rows would be those of a whole file. datasets closes its writer, which writes the marker."""
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"text": ["some text"] * 10})
    with pa.ipc.new_stream(tmp_path / "whole.arrow", table.schema) as file:
        file.write_table(table, 4)
    content, path = (tmp_path / "whole.arrow").read_bytes(), tmp_path / "cut.arrow"
    last_batch = content.rindex(b"\xff\xff\xff\xff", 0, -8)
    for size in (*range(len(content) - 8, len(content)), last_batch, len(content)):
        path.write_bytes(content[:size])
        rows = read_rows("data.source", path, ("text",), "a table")
        if size == len(content):
            assert len(list(rows)) == 10
        else:
            with pytest.raises(ConfigError, match=r"data\.source: (cut short: no marker|damaged)"):
                list(rows)


def test_damaged_token_files(tmp_path: Path) -> None:
    def index(lengths: list[int]) -> bytes:
        starts = (np.cumsum(lengths) - lengths) * 4
        head = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([4]) + len(lengths).to_bytes(8, "little") + bytes(8)
        return head + np.array(lengths, np.int32).tobytes() + starts.astype(np.int64).tobytes()

    for start, content, message in (
        (0, index([4, 6])[:12], "a.idx is cut short: 12 bytes; its header has 34"),
        (0, index([-2, 12]), "a.idx has a sequence of -2 tokens"),
        (-3, index([4, 6]), "token number -3, and the tokenizer has 300 tokens"),
    ):
        (tmp_path / "a.idx").write_bytes(content)
        np.arange(start, start + 10, dtype=np.int32).tofile(tmp_path / "a.bin")
        with pytest.raises(ConfigError, match=rf"data\.source: cannot read .*a\.bin \({message}\)"):
            read_token_file(tmp_path / "a.bin", 0, 300)
    for text in (json.dumps({"format": 1, "crc32": []}), "[" * 100_000):
        (tmp_path / META).write_text(text)
        with pytest.raises(ConfigError, match=r"data\.source: cannot read the tokens in "):
            read_token_folder(tmp_path)


def test_a_prepared_folder_with_another_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a line of text\n" * 50)
    prepare({"source": str(tmp_path / "text.txt")}, tmp_path / "tokens", None, 300, False, False, lambda text: None)
    facts = json.loads((tmp_path / "tokens" / META).read_text())
    (tmp_path / "tokens" / META).write_text(json.dumps(facts | {"dtype": "float16"}))
    with pytest.raises(ConfigError, match=r"\(dtype: 'float16'\)"):
        read_token_folder(tmp_path / "tokens")
    (tmp_path / "tokens" / META).write_text(json.dumps(facts))
    (tmp_path / "tokens" / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"\(tokenizer\.json is damaged\)"):
        read_token_folder(tmp_path / "tokens")


def test_a_chat_template_cannot_compute_for_hours(tmp_path: Path) -> None:
    for template in ("{{ (10**8) ** (10**7) }}", "{{ ('a' * 10**11) | length }}", "{{ 10**8 * ([1] * 10**7) }}",
                     "{{ ('f' * 10**6) | int(base=16) // 3 }}"):  # fmt: skip
        (tmp_path / "chat_template.jinja").write_text(template)
        with pytest.raises(ConfigError, match=r"chat template: (\*\*?|//) has .* (items|bits); the most is"):
            ChatTemplate(tmp_path).prompt(MESSAGES)
    for template, text in {"{{ '=' * 3 }}{{ 2 ** 10 }}{{ 3 * 4 }}": "===102412", "{{ 2 ** -1 * 1.5 }}": "0.75"}.items():
        (tmp_path / "chat_template.jinja").write_text(template)
        assert ChatTemplate(tmp_path).prompt(MESSAGES) == text


@pytest.mark.parametrize("other_thread", [False, True])
def test_a_chat_template_has_a_limit_of_time(
    other_thread: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line is within the limits, all together would take hours. The message names the row."""
    monkeypatch.setattr(chat_template, "MOST_SECONDS", 0.3)
    row = {"chat": [*MESSAGES, {"role": "assistant", "content": "hi"}]}
    lines = "('ab' * 10**6) | replace('a', 'c')", "('ab c ' * 10**5) | wordwrap(20)", "('a' * 10**7) in ('b' * 10**7)"
    for line in lines:
        text = f"{{% for i in range(99999) %}}{{% set x = {line} %}}{{% endfor %}}"
        (tmp_path / "chat_template.jinja").write_text(text)
        instructions = Instructions(Columns("chat"), ChatTemplate(tmp_path))
        begin = time.monotonic()
        with pytest.raises(ConfigError, match=r"^data\.source: a\.jsonl, line 3: chat template: it takes more"):
            if other_thread:
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(instructions.render, "data.source: a.jsonl, line 3", row).result()
            else:
                instructions.render("data.source: a.jsonl, line 3", row)
        assert time.monotonic() - begin < 10


def test_a_list_of_chat_templates_may_have_other_items(tmp_path: Path) -> None:
    entries = [3, {"name": "default", "template": "{{ messages | length }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entries}))
    assert ChatTemplate(tmp_path).prompt(MESSAGES) == "1"


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    class Full(io.BytesIO):
        name = str(tmp_path / "train.tokens")

        def write(self, data: Any, /) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as of a file, without its name

    writer = TokenWriter(tmp_path, "train", np.uint16)
    writer._files[0].close()
    writer._files[0] = Full()  # type: ignore[call-overload]
    with pytest.raises(OSError, match="No space left on device") as error:
        writer.append(np.zeros(9), np.array([9]))
    assert error.value.filename == Full.name
    writer.close()
