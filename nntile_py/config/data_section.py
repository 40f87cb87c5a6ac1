"""The section `data` of a run's YAML: the text to train on."""

import os
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from nntile_py.errors import ConfigError
from nntile_py.schema import (
    Names,
    Positive,
    Rule,
    Section,
    Share,
    Size,
    Switch,
    absolute,
    validated,
)  # fmt: skip
from nntile_py.system.folders import STDLIB
from nntile_py.yaml_text import one_line, without_space

PAIRS = ("anchor", "positive")  # columns of the tables of sentence-transformers


def existing(key: str, path: str, others: str = "") -> str:
    """Return the absolute form of a path that must exist.

    Raises:
        ConfigError: The path does not exist. The message names `key`, and `others`: values allowed besides a path."""
    if not _exists(path):
        raise ConfigError(f"{key}: no such file: {path}; allowed: {others} a path that exists".replace(":  ", ": "))
    return str(absolute(path))


def _exists(path: str) -> bool:
    return "\0" not in path and os.path.exists(absolute(path))  # no file's name has a NUL character


TEXT_EXTENSIONS = [".txt", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".hpp", ".cu", ".html", ".tex"]


def check_columns(messages: str | None, prompt: str | None, response: str | None) -> None:
    """Raise ConfigError unless the keys of instructions belong together: messages, or prompt with response, or none."""
    if messages and (prompt or response):
        key = "prompt" if prompt else "response"
        need = "data.messages, or data.prompt with data.response"
        raise ConfigError(f"data.{key}: got data.messages too; allowed: {need}")
    if bool(prompt) != bool(response):
        missing, given = ("response", "prompt") if prompt else ("prompt", "response")
        raise ConfigError(f"data.{missing}: missing; allowed with data.{given}: the column of the {missing}s")


class SourceEntry(Section):
    """A source of a mixture of texts."""

    path: Annotated[str, Rule("'python-stdlib', or a path that exists", {"type": "string"})]
    """As `data.source`: `python-stdlib`, a text file, a table, a folder, or tokens."""
    weight: Positive = 1.0
    """Share of the training sequences that come from this source, relative to the weights of the others."""
    text: str | None = None
    """Column of a table with the text; null: data.text."""


def _sources(given: Any) -> Any:
    """Return data.source with absolute paths: a path, or a list of SourceEntry."""
    if isinstance(given, str):
        return given if given == STDLIB else existing("data.source", given, f"'{STDLIB}' or")
    if not isinstance(given, list) or not given:
        raise ConfigError(f"data.source: got {one_line(given)}; allowed: {_SOURCE}")
    return [_entry(f"data.source[{k}]", entry) for k, entry in enumerate(given)]


def _entry(key: str, given: Any) -> SourceEntry:
    """Return an entry of a list of sources with an absolute path. key: the entry's name in messages."""
    need = "a path, or {path: ..., weight: ..., text: ...}"
    if isinstance(given, str):
        name = given.partition(":")[0]
        if name in SourceEntry.model_fields and without_space(given) and not _exists(given):
            got = f"{one_line(given)}, with no space after the colon of the key {name}"
            raise ConfigError(f"{key}: got {got}; allowed: {need}")
        given = {"path": given}
    if not isinstance(given, dict | SourceEntry):
        raise ConfigError(f"{key}: got {one_line(given)}; allowed: {need}")
    entry = validated(SourceEntry, given, f"{key}.") if isinstance(given, dict) else given
    if entry.path != STDLIB:
        entry.path = existing(f"{key}.path", entry.path, f"'{STDLIB}' or")
    return entry


_SOURCE = "'python-stdlib', a path that exists, or a list of {path: ..., weight: ..., text: ...}"
_ENTRY = {"type": "object", "properties": {"path": {"type": "string"}, "weight": {"type": "number"},
          "text": {"type": ["string", "null"]}}, "required": ["path"], "additionalProperties": False}  # fmt: skip
_LIST = {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "string"}, _ENTRY]}}


class DataSection(Section):
    """The text to train on."""

    source: Annotated[
        str | list[SourceEntry],
        Rule(_SOURCE, {"anyOf": [{"type": "string"}, _LIST]}),
        BeforeValidator(_sources),
    ] = STDLIB
    """The text: the sources of Python's standard library, a text file, a table (.jsonl, .csv, .tsv, .json, .parquet,
    .arrow) with a column of texts, a folder of such files, a folder of Hugging Face datasets, or tokens: a folder of
    `nntile data prepare`, a .bin file of nanoGPT, llm.c or Megatron. Text files and tables may end in .gz or .zst. A
    list of sources is a mixture. A classifier (`model.head: classification` or `multi_label_classification`) reads a
    table. For a classifier `python-stdlib` is the functions of the library's larger packages, each labelled with its
    package. A classifier of tokens (`token_classification`) reads a CoNLL file (.conll, .tsv, .txt ...) or a .jsonl
    file. With `model.head: sentence_embedding` a table has texts that belong together; `python-stdlib` is then the
    docstrings of the library, each with the code of its function."""
    sequences: Literal["window", "lines", "paragraphs", "documents"] = "window"
    """What a sequence is: train.seq tokens from anywhere in a document (`window`), a line, a paragraph (between empty
    lines) or a document (a file, or a row of a table). Longer lines, paragraphs and documents are split at train.seq
    tokens."""
    concatenate: Switch = False
    """Windows go across the documents, which follow each other in a new order in each epoch; false: a window ends with
    its document, and a shorter document is padded (or packed, see train.pack)."""
    val_fraction: Share = 0.05
    """Share of the text that is held out of training, to measure the held-out loss: the documents whose hash is small,
    or the end of the text if it has few documents. In a table of a classifier: this share of the texts of each label.
    """
    held_out: (
        Annotated[
            str,
            Rule("the path of a file or folder that exists", {"type": "string"}),
            AfterValidator(partial(existing, "data.held_out")),
        ]
        | None
    ) = None
    """Text, table or tokens to measure the held-out loss on; null: `val_fraction` of `source`."""
    text: str = "text"
    """Column of a table, or key of JSON lines, with the text."""
    label: str = "label"
    """Column of a classifier's table, or key of JSON lines, with the label: a name or an integer. With
    `model.head: multi_label_classification` it has any number of labels: a list in JSON lines, else names separated by
    commas. With `token_classification` text and label are lists in JSON lines: the words, and a label for each word."""
    texts: Names = PAIRS
    """With `model.head: sentence_embedding`: columns of the table with texts that belong together: a question, its
    answer, and any number of wrong answers."""
    messages: str | None = None
    """Column of a table with conversations: lists of messages with role and content. They become text by the chat
    template of the tokenizer's folder, and a causal model learns the messages of the assistant alone."""
    prompt: str | None = None
    """Column of a table with prompts, whose `response` a causal model learns alone."""
    response: str | None = None
    """Column of a table with the responses to `prompt`."""
    max_bytes: Size | None = None
    """Read at most this much of the text of each source; null: read all of it."""
    extensions: list[str] = Field(default=[*TEXT_EXTENSIONS, ".jsonl", ".csv", ".tsv", ".parquet", ".arrow"])
    """Only files whose names have one of these endings are read from a folder; .gz and .zst may follow the ending. The
    run tells how many files of which kinds it left out."""

    @property
    def entries(self) -> list[SourceEntry]:
        """The sources of the mixture; a single source is a list of one."""
        entries = [SourceEntry(path=self.source)] if isinstance(self.source, str) else self.source
        return [entry.model_copy(update={"text": entry.text or self.text}) for entry in entries]

    @property
    def name(self) -> str:
        """The sources as text, for messages."""
        return ", ".join(entry.path for entry in self.entries)

    def check_instructions(self, causal: bool) -> None:
        """Raise ConfigError unless the columns of instructions are complete and the model can learn them."""
        check_columns(self.messages, self.prompt, self.response)
        if (self.messages or self.prompt) and (not causal or self.concatenate or self.sequences != "window"):
            key = "data.messages" if self.messages else "data.prompt"
            need = "a causal model, data.concatenate: false and data.sequences: window"
            raise ConfigError(f"{key}: allowed with {need}; leave it out otherwise")
