"""Sections of a run's YAML. The text below a key appears in `nntile init`, in editors and in docs/reference."""

import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny, WrapValidator, model_validator

from nntile_py.errors import ConfigError
from nntile_py.schema import (
    Count,
    File,
    Folder,
    Inside,
    MemorySize,
    Names,
    Natural,
    NonNegative,
    Positive,
    Rows,
    RowsOrAuto,
    Rule,
    Section,
    Share,
    Size,
    Switch,
    Workers,
    absolute,
    integer,
    number,
    only,
    short,
    validated,
)  # fmt: skip
from nntile_py.system.folders import STDLIB
from nntile_py.tasks.optimizer import MOST_SCALE
from nntile_py.tiles.placement import Placement
from nntile_py.tiles.tasklist import Policy

_SCHEDULERS = ["lws", "ws", "eager", "prio", "random", "dm", "dmda", "dmdap", "dmdar", "dmdas", "dmdasd"]
_SCHEDULERS += ["pheft", "peager", "heteroprio"]
PAIRS = ("anchor", "positive")  # columns of the tables of sentence-transformers


def existing(key: str, path: str, others: str = "") -> str:
    """Return the absolute form of a path that must exist.

    Raises:
        ConfigError: The path does not exist. The message names `key`, and `others`: values allowed besides a path."""
    if "\0" in path or not os.path.exists(found := absolute(path)):  # no file's name has a NUL character
        raise ConfigError(f"{key}: no such file: {path}; allowed: {others} a path that exists".replace(":  ", ": "))
    return str(found)


TEXT_EXTENSIONS = [".txt", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".hpp", ".cu", ".html", ".tex"]


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
        raise ConfigError(f"data.source: got {short(given)}; allowed: {_SOURCE}")
    entries = []
    for k, entry in enumerate(given):
        key = f"data.source[{k}]"
        if not isinstance(entry, SourceEntry):
            entry = {"path": entry} if isinstance(entry, str) else entry
            if not isinstance(entry, dict):
                need = "a path, or {path: ..., weight: ..., text: ...}"
                raise ConfigError(f"{key}: got {short(entry)}; allowed: {need}")
            entry = validated(SourceEntry, entry, f"{key}.")
        if entry.path != STDLIB:
            entry.path = existing(f"{key}.path", entry.path, f"'{STDLIB}' or")
        entries.append(entry)
    return entries


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
        if bool(self.prompt) != bool(self.response) or (self.messages and self.prompt):
            raise ConfigError("data: allowed: data.messages, or data.prompt with data.response, or none of these keys")
        if (self.messages or self.prompt) and (not causal or self.concatenate or self.sequences != "window"):
            key = "data.messages" if self.messages else "data.prompt"
            need = "a causal model, data.concatenate: false and data.sequences: window"
            raise ConfigError(f"{key}: allowed with {need}; leave it out otherwise")


class TokenizerSection(Section):
    """The tokenizer: trained on the text, or read from a file."""

    vocab_size: Annotated[int, *integer(257)] | None = None
    """Vocabulary of a tokenizer that is trained on the text: at least the 256 bytes and the end-of-text token. Default:
    4096, and null if `path` is set."""
    path: File | None = None
    """A `tokenizer.json`, instead of a trained tokenizer."""

    @model_validator(mode="after")
    def _one_of_two(self) -> "TokenizerSection":
        if self.path is None:
            self.vocab_size = self.vocab_size or 4096
            return self
        self.path = existing("tokenizer.path", self.path)
        if self.vocab_size is not None:
            raise ConfigError(
                f"tokenizer.vocab_size: got {self.vocab_size}; allowed: null if tokenizer.path is set,"
                " since the file has a vocabulary"
            )
        return self

    def size(self) -> int:
        """Return the size of the vocabulary."""
        if self.path is None:
            assert self.vocab_size is not None
            return self.vocab_size
        # Imported here: most configs can be read without `tokenizers`.
        from nntile_py.data.tokenizer import load_tokenizer, token_numbers

        return token_numbers(load_tokenizer(Path(self.path)))


class TrainSection(Section):
    """Length of training, size of a batch, and how often the held-out loss is measured."""

    steps: Count
    """Number of updates of the weights."""
    batch: Rows
    """Sequences of one forward and backward pass."""
    seq: Annotated[int, *integer(2, 2**24)]
    """Tokens of a sequence."""
    pack: Switch = False
    """Pack sequences into bins without padding, one bin for each tile of the batch; all bins have the same size. A
    forward and backward pass takes as many sequences as fit into train.batch * train.seq tokens."""
    grad_accumulation: RowsOrAuto = 1
    """Forward and backward passes whose gradients are averaged into one update. With auto,
    train.batch is the number of sequences of an update. The run divides this number by the number of passes: the
    fastest by estimate that fits into the memory of `runtime`."""
    eval_every: Count = 100
    """Updates between two measurements of the held-out loss."""
    eval_batches: Count = 4
    """Batches of held-out text in a measurement. The last measurement of a classifier reads all held-out text."""
    log_every: Count = 10
    """Updates between two printed lines; `metrics.jsonl` has a line for every update."""
    skip_above_norm: Positive | None = None
    """Skip an update if its gradient norm is larger than this, or not finite; null: never skip."""
    loss_scale: Annotated[float, *number(least=1, most=MOST_SCALE)] | None = None
    """Initial loss scale, which keeps small gradients from vanishing. An update whose gradients overflow is skipped and
    halves the scale; 2000 other updates in a row double it. Null: 65536 if precision is fp16, else no scale."""
    mask_probability: Inside = 0.15
    """Share of the tokens that a masked model (bert, distilbert, ...) predicts."""

    @property
    def auto_micro_batches(self) -> bool:
        """True: the number of micro-batches is not chosen yet."""
        return not isinstance(self.grad_accumulation, int)


_TIME = r"(\d+(?:\.\d+)?)\s*(s|min|h)"


def seconds(time: str) -> float:
    """Convert a text such as 10min, 90s or 1.5h to seconds."""
    match = re.fullmatch(_TIME, time)
    assert match
    return float(match[1]) * {"s": 1, "min": 60, "h": 3600}[match[2]]


def _interval(value: Any) -> int | str | None:
    if isinstance(value, str):
        return value if re.fullmatch(_TIME, value) and seconds(value) else None
    return value if type(value) is int and value >= 1 else None


Interval = Annotated[
    int | str,
    *only(
        "a number of updates of at least 1, or a time such as '10min', '90s' or '1.5h'", _interval,
        anyOf=[{"type": "integer", "minimum": 1}, {"type": "string", "pattern": f"^{_TIME}$"}],
    ),
]  # fmt: skip


class CheckpointSection(Section):
    """When the run saves a checkpoint, from which `nntile train CONFIG --resume` continues."""

    every: Interval | None = "10min"
    """Updates, or time, between two checkpoints; null: only at the end, or when the run is stopped."""
    keep: Count = 3
    """Number of checkpoints that are kept; the oldest are removed. If the disk has no room for a new checkpoint, more
    are removed, but the newest complete checkpoint stays until the new one is complete."""
    keep_every: Count | None = None
    """Checkpoints after a multiple of this many updates are never removed; null: no checkpoint is exempt."""
    best: Literal["held_out_loss"] | None = None
    """`held_out_loss`: save a checkpoint whenever the measured held-out loss is smaller than ever, and keep this
    checkpoint until a better one is complete. The link `best` in the run's folder names it. Null: only the newest
    checkpoints are kept."""
    async_: Switch = Field(default=True, alias="async")
    """Continue training while a checkpoint is written. This takes main memory for a copy of the weights and of the
    optimizer's averages."""


class TilesSection(Section):
    """Tile size of each axis, in elements. An axis left out, or no longer than its tile, is not cut; the last tile of
    an axis may be smaller."""

    batch: Count | None = None
    """Sequences in a tile."""
    seq: Count | None = None
    """Positions of a sequence in a tile. If `seq` is cut, attention takes several tasks."""
    embed: Count | None = None
    """Entries of the model's width in a tile. If `embed` is cut, norms take several tasks."""
    heads: Count | None = None
    """Attention heads in a tile."""
    ffn: Count | None = None
    """Entries of the feed-forward part's width in a tile."""
    vocab: Count | None = None
    """Tokens of the vocabulary in a tile of the embedding and of the logits."""

    @property
    def sizes(self) -> dict[str, int]:
        """The tile sizes that are given, by axis."""
        return self.model_dump(exclude_none=True)


AUTO_TILES: Literal["auto"] = "auto"
if TYPE_CHECKING:
    Tiles = TilesSection | Literal["auto"]
else:  # without a union, a message about a wrong tile size names only its key
    Tiles = Annotated[
        SerializeAsAny[TilesSection],
        WrapValidator(lambda given, section: given if given == AUTO_TILES else section(given)),
        Rule(f"'auto', or a section with {', '.join(TilesSection.model_fields)}", {"const": AUTO_TILES}),
    ]


class DiskSection(Section):
    """Disk space for tiles that do not fit into main memory."""

    path: Annotated[Folder, AfterValidator(partial(existing, "runtime.disk.path"))]
    """A folder; its files are removed when the run ends."""
    size: Size
    """Upper bound on the bytes in the folder. If several runs share the folder, the disk must have room for the sum of
    their sizes."""
    kinds: list[Literal["weights", "gradients", "optimizer"]] | None = None
    """Kinds of tensors that may go to the disk besides activations, such as [optimizer]; tensors of the other kinds
    stay in main memory. Null: all kinds."""


class RuntimeSection(Section):
    """StarPU: workers, memory and scheduling."""

    cpus: Workers = "all"
    """CPU workers, at most one for each core; with GPUs `all` means none."""
    cuda: Workers = 0
    """GPUs, one worker each. With several ranks: GPUs of each rank; ranks do not share a GPU."""
    scheduler: Annotated[
        str,
        *only(
            f"{', '.join(_SCHEDULERS)}, or modular-NAME",
            lambda v: v if isinstance(v, str) and (v in _SCHEDULERS or v.startswith("modular-")) else None,
            anyOf=[{"enum": _SCHEDULERS}, {"type": "string", "pattern": "^modular-"}],
        ),
    ] = "lws"
    """StarPU's scheduling policy."""
    memory: MemorySize | None = None
    """Upper bound on the main memory of tiles; null: no bound."""
    cuda_memory: MemorySize | None = None
    """Upper bound on the memory of tiles on each GPU; null: 85 % of its memory."""
    disk: DiskSection | None = None
    """Disk space for tiles that do not fit into main memory; needs `memory`."""
    window: Count | None = None
    """Upper bound on the tasks that are submitted and have not ended; null: no bound."""
    nodes: Count | None = None
    """Number of MPI ranks (machines) that a run needs; null: any number that mpirun or srun starts. A sweep starts each
    point with mpirun on this many ranks; null: without mpirun."""
    shard_weights: Switch = False
    """With several ranks: only the rank that updates a weight keeps it, and the other ranks receive a copy before each
    use. This takes less memory and more messages. Averages of the optimizer are never copied."""
    calibrate: Switch = False
    """Measure again the task times that the `dm*` scheduling policies use, instead of using stored times."""
    placement: Placement | None = None
    """How a task's worker is chosen: by the `scheduler` during the run, or by a plan before the run (`planned`). Null:
    planned on several GPUs without CPU workers, else scheduler."""
    on_cpu: list[str] | None = None
    """With GPUs and CPU workers: patterns, such as `adamw` or `embedding*`, for names of operators or kernels. CPU
    workers run all matching tasks, and GPUs run all other tasks. Null: the `scheduler` chooses for every task."""


class SchedulerFile(RuntimeSection):
    """The file that the key `scheduler` names. The file has the keys of `runtime` at the top level, such as `cuda: 1`,
    and optionally `accumulate`. Keys of the run's YAML take precedence over the file."""

    accumulate: Policy | None = None
    """Accumulation policy if the run's YAML has none."""


class SampleSection(Section):
    """A sample: text that the model generates at the end of `nntile train`."""

    prompt: str | None = None
    """Text that the model continues; "" begins a document. Null: `def ` for `data.source: python-stdlib`, else ""."""
    tokens: Natural = 64
    """Tokens to generate; for a masked model: tokens of held-out text to show. 0: no sample. Classifiers have none."""
    temperature: NonNegative = 0.8
    """Temperature of sampling; 0: always the most likely token."""
    top_k: Count | None = 40
    """Sample from this many most likely tokens; null: from all tokens."""


class DebugSection(Section):
    """Slow checks that help to find an error."""

    nonfinite: Switch = False
    """Check all values that tasks write. If the loss is not finite, the message names the operator that wrote the
    first such value."""


class ProfileSection(Section):
    """Settings of `nntile profile`. `nntile analyze` also uses the hardware peaks given here."""

    steps: Count = 3
    """Steps that are profiled."""
    warmup: Natural = 2
    """Steps before the profiled steps."""
    peak_flop: Positive | None = None
    """Peak flop/s of one worker; needs peak_bytes. Null: measured."""
    peak_bytes: Positive | None = None
    """Peak bytes/s of one worker; needs peak_flop. Null: measured."""

    @model_validator(mode="after")
    def _both(self) -> "ProfileSection":
        if (self.peak_flop is None) != (self.peak_bytes is None):
            raise ConfigError("profile.peak_flop, profile.peak_bytes: got only one of them; allowed: both, or none")
        return self
