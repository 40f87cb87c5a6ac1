"""The sections of a run's YAML. The text below a key is what `nntile init`, editors and docs/reference tell of it."""

import functools
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field, create_model, field_validator, model_validator

from nntile_py.errors import ConfigError
from nntile_py.schema import (
    Count,
    File,
    Folder,
    Inside,
    Natural,
    NonNegative,
    Positive,
    Rows,
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
from nntile_py.tasks.optimizer import MOST_SCALE, OPTIMIZERS, Optimizer
from nntile_py.tiles.placement import Placement
from nntile_py.tiles.tasklist import Policy

_SCHEDULERS = ["lws", "ws", "eager", "prio", "random", "dm", "dmda", "dmdap", "dmdar", "dmdas", "dmdasd"]
_SCHEDULERS += ["pheft", "peager", "heteroprio"]


class DataSection(Section):
    """The text to train on."""

    source: Annotated[str, Rule("'python-stdlib', or the path of a text file or of a folder", {"type": "string"})] = (
        STDLIB
    )
    """The text: the sources of Python's standard library, a text file, or a folder with text files in it. Of a
    classifier (`model.head: classification`) a table, a file .csv, .tsv or .jsonl; `python-stdlib` has the functions
    of its larger packages, whose label is their package."""
    sequences: Literal["window", "lines", "paragraphs", "documents"] = "window"
    """What a sequence is: `window`, train.seq tokens from anywhere in the text; or the text's `lines`, its `paragraphs`
    (between empty lines) or its `documents` (files), cut into parts where they have more tokens than train.seq."""
    val_fraction: Share = 0.05
    """Share of the text that is not trained on; the held-out loss is measured on it. Of a table this share of the texts
    of each label."""
    held_out: File | None = None
    """Of a classifier: a table of its own to measure on; null: `val_fraction` of `source`."""
    text: str = "text"
    """Of a table: the column with the text; of JSON lines the key."""
    label: str = "label"
    """Of a table: the column with the label, which is a name or an integer; of JSON lines the key."""
    max_bytes: Size | None = None
    """Read no more than this much of the text; null reads all of it."""
    extensions: list[str] = Field(
        default=[".txt", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".hpp", ".cu", ".html", ".tex"]
    )
    """Of a folder: the files that are read, by the end of their names."""

    @field_validator("source")
    @classmethod
    def _exists(cls, source: str) -> str:
        return source if source == STDLIB else existing("data.source", source, f"'{STDLIB}' or")

    @field_validator("held_out")
    @classmethod
    def _too(cls, path: str | None) -> str | None:
        return path and existing("data.held_out", path)


class TokenizerSection(Section):
    """What turns text into tokens: one that is trained on the text, or one from a file."""

    vocab_size: Annotated[int, *integer(257)] | None = None
    """Tokens of a tokenizer trained on the text: at least all 256 bytes and the end-of-text token. 4096 where neither
    key is given; null where `path` is."""
    path: File | None = None
    """A `tokenizer.json`, used instead of training one."""

    @model_validator(mode="after")
    def _one_of_two(self) -> "TokenizerSection":
        if self.path is None:
            self.vocab_size = self.vocab_size or 4096
            return self
        self.path = existing("tokenizer.path", self.path)
        if self.vocab_size is not None:
            raise ConfigError(
                f"tokenizer.vocab_size: got {self.vocab_size}; allowed: null where tokenizer.path is given,"
                " as that file has a vocabulary already"
            )
        return self

    def size(self) -> int:
        """Tokens in the vocabulary."""
        if self.path is None:
            assert self.vocab_size is not None
            return self.vocab_size
        # Here: `tokenizers` is not needed to read most configs.
        from nntile_py.data.tokenizer import load_tokenizer, token_numbers

        return token_numbers(load_tokenizer(Path(self.path)))


class TrainSection(Section):
    """How long to train, on how much text at once, and how often to look at the result."""

    steps: Count
    """Updates of the weights."""
    batch: Rows
    """Sequences of one forward and backward pass."""
    seq: Annotated[int, *integer(2, 2**24)]
    """Tokens of a sequence."""
    pack: Switch = False
    """Sequences lie one behind the other instead of padded: in bins, one for each tile of the batch, all alike. A
    forward and backward pass then takes as many sequences as fit into train.batch * train.seq tokens."""
    grad_accumulation: Rows = 1
    """Forward and backward passes whose gradients are averaged into one update."""
    eval_every: Count = 100
    """Updates between two measurements of the held-out loss."""
    eval_batches: Count = 4
    """Batches of held-out text that a measurement reads. Of a classifier the last measurement reads all of it."""
    log_every: Count = 10
    """Updates between two printed lines; `metrics.jsonl` has all of them."""
    skip_above_norm: Positive | None = None
    """Leave the weights as they are in an update whose gradient norm is larger, or is not finite, and go on with the
    next; null never does."""
    loss_scale: Annotated[float, *number(least=1, most=MOST_SCALE)] | None = None
    """What the loss is multiplied by in the first update, so that gradients do not vanish. An update whose gradients
    overflow leaves the weights as they are and halves the factor; 2000 others in a row double it. Null: 65536 where
    precision is fp16, else the loss is not scaled."""
    mask_probability: Inside = 0.15
    """Of a masked model (bert, distilbert, ...): the share of the tokens that it is to predict."""


_TIME = r"(\d+(?:\.\d+)?)\s*(s|min|h)"


def seconds(time: str) -> float:
    """Of a text such as 10min, 90s or 1.5h."""
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
    """When the run saves all that it needs to go on; `nntile train CONFIG --resume` reads it."""

    every: Interval | None = "10min"
    """Updates, or the time, between two checkpoints; null: only at the end, or when the run is stopped."""
    keep: Count = 3
    """How many are kept, the newest; older ones are removed. Where the disk has no room for a new one beside them it is
    fewer, but the newest whole one stays until the new one is whole."""
    keep_every: Count | None = None
    """Those after a multiple of this many updates are kept for good; null: none."""
    async_: Switch = Field(default=True, alias="async")
    """Train on while a checkpoint is written. It takes main memory for a copy of weights and averages."""


class Schedule(Section):
    """Learning rate of each update, and the limit of the gradient's norm."""

    name: str = "adamw"
    """The method: AdamW, or SGD with momentum, both as in torch.optim."""
    min_lr: NonNegative | None = None
    """Learning rate at the end of the cosine schedule; null: a tenth of `lr`."""
    warmup_steps: Natural = 0
    """Updates in which the learning rate rises from 0 to `lr`."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """The learning rate after the warm-up: falls to `min_lr` as half a cosine, or stays at `lr`."""
    clip_grad_norm: Positive | None = None
    """Scale the gradient down to this norm where it is larger; null never does."""


class OptimizerSection(Optimizer, Schedule):
    """How the weights are updated."""

    @model_validator(mode="after")
    def _fitting(self) -> "OptimizerSection":
        if self.min_lr is None:
            self.__dict__["min_lr"] = self.lr / 10
        elif self.min_lr > self.lr:
            raise ConfigError(f"optimizer.min_lr: got {self.min_lr}; allowed: at most optimizer.lr = {self.lr}")
        return self


@functools.cache
def optimizer_section(name: str) -> type[OptimizerSection]:
    """The section `optimizer` of a YAML that names this method: settings of the method, and the schedule."""
    method = OPTIMIZERS[name]
    field = Field(name, description=Schedule.model_fields["name"].description)
    bases: Any = (method, OptimizerSection)
    names = {"__base__": bases, "__doc__": OptimizerSection.__doc__, "name": (Literal[name], field)}
    section: Any = create_model(method.__name__, **names)
    return cast(type[OptimizerSection], section)


def read_optimizer(given: Any) -> Any:
    """The section `optimizer` of the method that it names.

    Settings of another method have no effect: those of the default method may stay when another one is chosen, others
    only with their default value."""
    if not isinstance(given, dict):
        return given
    chosen = given.get("name", Schedule().name)
    if chosen not in [*OPTIMIZERS]:
        raise ConfigError(f"optimizer.name: got {chosen!r}; allowed: {' or '.join(map(repr, OPTIMIZERS))}")
    section = optimizer_section(chosen)
    for name, method in OPTIMIZERS.items():
        for key, field in method.model_fields.items():
            if key in given and key not in section.model_fields:
                if name != Schedule().name and given[key] != field.default:
                    need = f"{field.default:g} unless optimizer.name is {name}"
                    raise ConfigError(f"optimizer.{key}: got {short(given[key])}; allowed: {need}")
                given = {other: value for other, value in given.items() if other != key}
    return validated(section, given, "optimizer.")


class TilesSection(Section):
    """Tile size of each axis, in elements. An axis left out, or no longer than its tile, is not cut; the last tile of
    an axis may be smaller."""

    batch: Count | None = None
    """Sequences in a tile."""
    seq: Count | None = None
    """Positions of a sequence in a tile; cut, attention takes several tasks."""
    embed: Count | None = None
    """Entries of the model's width in a tile; cut, norms take several tasks."""
    heads: Count | None = None
    """Attention heads in a tile."""
    ffn: Count | None = None
    """Entries of the feed-forward part's width in a tile."""
    vocab: Count | None = None
    """Tokens of the vocabulary in a tile of the embedding and of the logits."""


class DiskSection(Section):
    """Where tiles go that find no place in main memory."""

    path: Folder
    """A folder; the files in it are gone when the run ends."""
    size: Size
    """Most bytes that may lie there."""

    @field_validator("path")
    @classmethod
    def _exists(cls, path: str) -> str:
        return existing("runtime.disk.path", path)


class RuntimeSection(Section):
    """StarPU: its workers, its memory, and how it schedules."""

    cpus: Workers = "all"
    """CPU workers, one a core; beside GPUs `all` means none."""
    cuda: Workers = 0
    """GPUs, a worker each. Of several ranks each has so many, and no GPU has two ranks."""
    scheduler: Annotated[
        str,
        *only(
            f"{', '.join(_SCHEDULERS)}, or modular-NAME",
            lambda v: v if isinstance(v, str) and (v in _SCHEDULERS or v.startswith("modular-")) else None,
            anyOf=[{"enum": _SCHEDULERS}, {"type": "string", "pattern": "^modular-"}],
        ),
    ] = "lws"
    """StarPU's scheduling policy."""
    memory: Size | None = None
    """Bytes of main memory that tiles may take; null: no bound."""
    cuda_memory: Size | None = None
    """Bytes of each GPU's memory that tiles may take; null: 85 % of it."""
    disk: DiskSection | None = None
    """Where tiles go that find no place in main memory; needs `memory`."""
    window: Count | None = None
    """Most tasks that are submitted and have not ended yet; null: no bound."""
    nodes: Count | None = None
    """How many machines, or ranks of MPI, a run has to have; null: as many as mpirun or srun starts. Points of a sweep
    are started by mpirun on so many; null: on one, without it."""
    shard_weights: Switch = False
    """On several ranks: a weight stays with the rank that updates it, and others borrow it just before they use it,
    which takes less memory and more messages. Averages of the optimizer are always in one place."""
    calibrate: Switch = False
    """Measure anew the task times that the `dm*` policies go by."""
    placement: Placement | None = None
    """Who chooses a task's worker: the `scheduler`, or a plan made before the run (`planned`); null: planned on several
    GPUs without CPU workers."""


class SchedulerFile(RuntimeSection):
    """A file that `scheduler` names holds keys of `runtime`, without the section's name, and may hold `accumulate`.
    Keys of the run's own YAML come before those of the file."""

    accumulate: Policy | None = None
    """How partial results of a tile meet, where the config does not say."""


class SampleSection(Section):
    """Text that `nntile train` has the model write at the end, as a sample."""

    prompt: str = "def "
    """Text that the model continues."""
    tokens: Natural = 64
    """Tokens to write (of a masked model: of held-out text to show; a classifier shows none); 0: no sample."""
    temperature: NonNegative = 0.8
    """How freely tokens are drawn; 0: always the likeliest."""
    top_k: Count | None = 40
    """Draw from this many likeliest tokens; null: from all."""


class DebugSection(Section):
    """What helps to find an error, and takes time."""

    nonfinite: Switch = False
    """Look at all that tasks write: a run whose loss is no finite number names the operator where it came from."""


class ProfileSection(Section):
    """Of `nntile profile`; of `nntile analyze` the peaks."""

    steps: Count = 3
    """Steps to look at."""
    warmup: Natural = 2
    """Steps before those, not looked at."""
    peak_flop: Positive | None = None
    """Flop/s that one worker can reach, with peak_bytes; null: measured."""
    peak_bytes: Positive | None = None
    """Bytes/s that one worker can reach, with peak_flop; null: measured."""

    @model_validator(mode="after")
    def _both(self) -> "ProfileSection":
        if (self.peak_flop is None) != (self.peak_bytes is None):
            raise ConfigError("profile.peak_flop, profile.peak_bytes: got one alone; allowed: both, or none")
        return self


def existing(key: str, path: str, others: str = "") -> str:
    """The whole path; ConfigError, which names `key` and the `others` that are allowed, where there is none."""
    found = absolute(path)
    if not os.path.exists(found):  # False too for what no path can be
        raise ConfigError(f"{key}: no such file: {path}; allowed: {others} a path that exists".replace(":  ", ": "))
    return str(found)
