"""Sections of a run's YAML. The text below a key appears in `nntile init`, in editors and in docs/reference."""

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, SerializeAsAny, WrapValidator, model_validator

from nntile_py.config.data_section import existing
from nntile_py.errors import ConfigError
from nntile_py.schema import (
    Count,
    DiskSize,
    File,
    Folder,
    Inside,
    MemorySize,
    Natural,
    NonNegative,
    Positive,
    Rows,
    RowsOrAuto,
    Rule,
    Section,
    Switch,
    Workers,
    integer,
    number,
    only,
)  # fmt: skip
from nntile_py.system.folders import STDLIB
from nntile_py.tasks.optimizer import MOST_SCALE
from nntile_py.tiles.placement import Placement
from nntile_py.tiles.tasklist import Policy

_SCHEDULERS = ["lws", "ws", "eager", "prio", "random", "dm", "dmda", "dmdap", "dmdar", "dmdas", "dmdasd"]
_SCHEDULERS += ["pheft", "peager", "heteroprio"]


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
    """Batches of held-out text in a measurement. Sequences of a shorter text repeat; a classifier reads each text at
    most once, and all held-out text in its last measurement."""
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
    size: DiskSize
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
    """Upper bound on the tasks that are submitted and have not ended; null: no bound, or 32 on a GPU if memory is
    nearly full."""
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
    """Text that the model continues; "" begins a document. Null: `def __init__(self` for
    `data.source: python-stdlib`, else ""."""
    tokens: Natural = 64
    """Tokens to generate; for a masked model: tokens of held-out text to show. 0: no sample. Classifiers have none."""
    temperature: NonNegative = 0.8
    """Temperature of sampling; 0: always the most likely token."""
    top_k: Count | None = 40
    """Sample from this many most likely tokens; null: from all tokens."""


def default_prompt(source: Any) -> str:
    """Return the value that replaces `sample.prompt: null`. source: the value of `data.source`."""
    return "def __init__(self" if source == STDLIB else ""


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
