"""The YAML of a run, typed and checked: every mistake is one ConfigError that names the key and what is allowed."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, SerializeAsAny, field_validator, model_validator

from nntile_py.errors import ConfigError
from nntile_py.graph.optimizers import SGD, AdamW
from nntile_py.graph.step import PRECISIONS, check_precision
from nntile_py.models.base import ModelConfig, find, of_hf_type, read_raw_config, resolved
from nntile_py.schema import (
    BelowOne,
    Betas,
    Count,
    Inside,
    Natural,
    NonNegative,
    Positive,
    Section,
    Share,
    Size,
    Switch,
    Workers,
    assignment,
    integer,
    only,
    read_yaml,
    short,
    validated,
)  # fmt: skip
from nntile_py.tiles.placement import Placement
from nntile_py.tiles.tasklist import Policy

SCHEDULER_CONFIGS = next(
    (d for p in Path(__file__).parents[1:3] if (d := p / "scheduler_configs").is_dir()), Path("scheduler_configs")
)

_SCHEDULERS = ["lws", "ws", "eager", "prio", "random", "dm", "dmda", "dmdap", "dmdar", "dmdas", "dmdasd"]
_SCHEDULERS += ["pheft", "peager", "heteroprio"]


class Data(Section):
    source: str = "python-stdlib"  # or the path of a text file or of a folder
    val_fraction: Share = 0.05
    max_bytes: Size | None = None
    extensions: list[str] = Field(
        default=[".txt", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".hpp", ".cu", ".html", ".tex"]
    )

    @field_validator("source")
    @classmethod
    def _exists(cls, source: str) -> str:
        return source if source == "python-stdlib" else _existing("data.source", source, "'python-stdlib' or")


class Tokenizer(Section):
    vocab_size: int | None = None  # default: 4096; of a tokenizer that is trained on the text
    path: str | None = None  # a tokenizer.json, used instead of training one

    @field_validator("vocab_size")
    @classmethod
    def _all_bytes(cls, size: int | None) -> int | None:
        if size is not None and size < 257:
            raise ValueError("an integer of at least 257: all bytes and the end-of-text token")
        return size

    @model_validator(mode="after")
    def _one_of_two(self) -> "Tokenizer":
        if self.path is None:
            self.vocab_size = self.vocab_size or 4096
            return self
        self.path = _existing("tokenizer.path", self.path)
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
        from nntile_py.tokenizer import load_tokenizer, token_numbers

        return token_numbers(load_tokenizer(Path(self.path)))


class Train(Section):
    steps: Count
    batch: Count  # sequences of one forward and backward pass
    seq: Annotated[int, *integer(2)]  # tokens of a sequence; its last one has no target
    grad_accumulation: Count = 1  # passes whose gradients are averaged into one step
    eval_every: Count = 100
    eval_batches: Count = 4
    log_every: Count = 10
    mask_probability: Inside = 0.15  # of a masked model (bert): the share of the tokens that are predicted


class Optimizer(Section):
    name: Literal["adamw", "sgd"] = "adamw"
    lr: Positive = AdamW.lr
    min_lr: NonNegative | None = None  # of the cosine's end; default: lr / 10
    betas: Betas = Field(default=[*AdamW.betas])  # adamw
    eps: Positive = AdamW.eps  # adamw
    weight_decay: NonNegative = AdamW.weight_decay
    momentum: BelowOne = SGD.momentum  # sgd
    warmup_steps: Natural = 0
    schedule: Literal["cosine", "constant"] = "cosine"
    clip_grad_norm: Positive | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_in_python(cls, given: Any) -> Any:
        """What differs from adamw has sgd's own default."""
        if not isinstance(given, dict) or given.get("name") != "sgd":
            return given
        return {"lr": SGD.lr, "weight_decay": SGD.weight_decay} | given

    @model_validator(mode="after")
    def _fitting(self) -> "Optimizer":
        if self.min_lr is None:
            self.min_lr = self.lr / 10
        if self.min_lr > self.lr:
            raise ConfigError(f"optimizer.min_lr: got {self.min_lr}; allowed: at most optimizer.lr = {self.lr}")
        if self.name == "adamw" and self.momentum:
            raise ConfigError(f"optimizer.momentum: got {self.momentum}; allowed: 0 unless optimizer.name is sgd")
        return self


class Tiles(Section):
    """Tile size of each axis; an axis left out, or no longer than its tile, is not cut."""

    batch: Count | None = None
    seq: Count | None = None
    embed: Count | None = None
    heads: Count | None = None
    ffn: Count | None = None
    vocab: Count | None = None


class Fusion(Section):
    bias: Switch = True
    activation: Switch = True
    reshape: Switch = True
    qkv: Switch = True
    residual_norm: Switch = True


class Disk(Section):
    """Where tiles go that find no place in main memory."""

    path: str  # a folder
    size: Size

    @field_validator("path")
    @classmethod
    def _exists(cls, path: str) -> str:
        return _existing("runtime.disk.path", path)


class Runtime(Section):
    cpus: Workers = "all"
    cuda: Workers = 0
    scheduler: str = "lws"  # StarPU's scheduling policy
    memory: Size | None = None  # bytes of CPU memory that tiles may take
    cuda_memory: Size | None = None  # the same, of each GPU
    disk: Disk | None = None  # beyond runtime.memory, which must be given then
    window: Count | None = None  # most tasks submitted and not yet done
    calibrate: Switch = False
    placement: Placement | None = None  # who chooses a task's worker; several GPUs: planned

    @field_validator("scheduler")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in _SCHEDULERS and not name.startswith("modular-"):
            raise ValueError(f"{', '.join(_SCHEDULERS)}, or modular-NAME")
        return name


class SchedulerFile(Runtime):
    """A file of scheduler_configs/: the keys of `runtime`, and the default of `accumulate`."""

    accumulate: Policy | None = None


class Sample(Section):
    prompt: str = "def "
    tokens: Natural = 64  # 0: no sample
    temperature: NonNegative = 0.8  # 0: always the likeliest token
    top_k: Count | None = 40


class Profile(Section):
    """Of `nntile profile`."""

    steps: Count = 3
    warmup: Natural = 2  # steps before, not looked at
    peak_flop: Positive | None = None  # flop/s of one worker; default: measured
    peak_bytes: Positive | None = None  # bytes/s of one worker


def _precision(value: Any) -> str | None:
    return value if isinstance(value, str) and value in PRECISIONS else None


class RunConfig(Section):
    """Everything that decides a run. Made by `load`, which fills in all defaults."""

    model: SerializeAsAny[ModelConfig]
    data: Data = Data()
    tokenizer: Tokenizer = Tokenizer(vocab_size=4096)
    train: Train
    optimizer: Optimizer = Field(default_factory=Optimizer)
    precision: Annotated[
        str,
        *only(", ".join(f"{p} ({' and '.join(on)} workers)" for p, on in PRECISIONS.items()), _precision),
    ] = "fp32"
    tiles: Tiles = Tiles()
    accumulate: Policy = "chain"
    fusion: Fusion = Fusion()
    scheduler: str | None = None  # a name in scheduler_configs/, or the path of such a file
    runtime: Runtime = Runtime()
    seed: Natural = 0
    sample: Sample = Sample()
    profile: Profile = Profile()
    out: str | None = None  # default: runs/NAME of the config's file

    @field_validator("model", mode="before")
    @classmethod
    def _of_its_type(cls, given: Any) -> Any:
        return _model_section(given)

    @field_validator("fusion", mode="before")
    @classmethod
    def _all_or_none(cls, fusion: Any) -> Any:
        return dict.fromkeys(Fusion.model_fields, fusion) if isinstance(fusion, bool) else fusion

    @field_validator("scheduler")
    @classmethod
    def _from_anywhere(cls, name: str | None) -> str | None:
        return str(Path(name).expanduser().resolve()) if name and _is_path(name) else name

    @model_validator(mode="after")
    def _together(self) -> "RunConfig":
        model: Any = self.model  # its fields are its type's own
        seq = self.train.seq
        check_precision("precision", self.precision, self.runtime.cuda != 0)
        if self.runtime.cpus == 0 == self.runtime.cuda:
            raise ConfigError("runtime.cpus: got 0; allowed: at least 1, or 'all', where runtime.cuda is 0")
        if model.from_ and self.tokenizer.path is None:  # weights mean nothing with another vocabulary
            self.tokenizer = Tokenizer(path=str(Path(model.from_) / "tokenizer.json"))
        fields = type(model).model_fields
        if "positions" in fields:
            model = model.changed(positions=model.positions or seq)
            if seq > model.positions:
                raise ConfigError(f"train.seq: got {seq}; allowed: at most model.positions = {model.positions}")
        if "vocab" in fields:
            size = self.tokenizer.size()
            model = model.changed(vocab=model.vocab or size)
            if model.vocab < size:
                raise ConfigError(f"model.vocab: got {model.vocab}; allowed: at least the tokenizer's size, {size}")
        self.model = model
        return self

    @property
    def workers(self) -> int:
        """GPUs where there are any, else CPU cores. All GPUs of a machine that has none are taken for 8."""
        cores = len(os.sched_getaffinity(0))
        cuda, cpus = self.runtime.cuda, self.runtime.cpus
        return (_gpus() if cuda == "all" else int(cuda)) or (cores if cpus == "all" else int(cpus))

    @property
    def planned(self) -> bool:
        """Whether several GPUs without CPU workers run what a plan gives them."""
        several, of = self.runtime.cuda != 0 and self.workers > 1, self.runtime
        # "all" cores beside CUDA workers are none, as Runtime has it
        return several and of.cpus in (0, "all") and of.placement != "scheduler"

    def to_yaml(self) -> str:
        """The config with every default filled in; loading it gives the same config."""
        return yaml.safe_dump(self.model_dump(by_alias=True), sort_keys=False)


def load(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """The config of a YAML file, with `overrides` such as "tiles.embed=96" laid over it.

    Priority: overrides, the file, its scheduler's file, defaults. Raises ConfigError."""
    tree = read_yaml(Path(path), "CONFIG", RunConfig)
    chosen = tree.get("scheduler")
    for item in overrides:
        _override(tree, item)
    try:
        tree = {key: {} if value is None and _is_section(key) else value for key, value in tree.items()}
        if tree.get("scheduler") is not None:
            # A scheduler chosen on the command line is meant to win over the file's own runtime keys.
            _apply_scheduler(tree, wins=tree["scheduler"] != chosen, overrides=overrides)
        return validated(RunConfig, tree)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def load_scheduler(name: str) -> dict[str, Any]:
    """The keys that a scheduler file sets, checked. `name`: of a file in scheduler_configs/, or a path."""
    if not isinstance(name, str):
        raise ConfigError(f"scheduler: got {name!r}; allowed: a name in scheduler_configs/ or the path of a YAML file")
    path = Path(name).expanduser() if _is_path(name) else SCHEDULER_CONFIGS / f"{name}.yaml"
    if not path.is_file():
        names = sorted(p.stem for p in SCHEDULER_CONFIGS.glob("*.yaml"))
        raise ConfigError(f"scheduler: no such file: {path}; allowed: the path of a YAML file, or {', '.join(names)}")
    try:
        return validated(SchedulerFile, read_yaml(path, "scheduler", SchedulerFile)).model_dump(exclude_unset=True)
    except ConfigError as error:
        raise ConfigError(f"scheduler {path}: {error}") from None


def runtime_options(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of nntile_py.Runtime, from a name in scheduler_configs/, a path, or keys. Resolves 'all'."""
    if isinstance(config, Mapping):
        options = validated(SchedulerFile, dict(config)).model_dump(exclude_unset=True)
    else:
        options = load_scheduler(str(config))
    options.pop("accumulate", None)
    if options.get("cpus") == "all":
        options["cpus"] = None
    if options.get("cuda") == "all":
        import torch  # here: reading a config needs no torch

        options["cuda"] = torch.cuda.device_count()
    return options


def _gpus() -> int:
    from torch.cuda import device_count

    return int(device_count()) or 8


def _apply_scheduler(tree: dict[str, Any], wins: bool, overrides: Iterable[str]) -> None:
    keys = load_scheduler(tree["scheduler"])
    runtime = tree.get("runtime", {})
    if not isinstance(runtime, dict):
        return  # validation refuses it
    if (policy := keys.pop("accumulate", None)) is not None and (wins or "accumulate" not in tree):
        tree["accumulate"] = policy
    tree["runtime"] = runtime | keys if wins else keys | runtime
    if wins:
        for item in overrides:
            if item.startswith(("runtime.", "accumulate")):
                _override(tree, item)


def _override(tree: dict[str, Any], item: str) -> None:
    key, value = assignment(item)
    names = key.split(".")
    for name in names[:-1]:
        inner = tree.get(name)
        if isinstance(inner, bool) and name == "fusion":
            inner = dict.fromkeys(Fusion.model_fields, inner)
        if inner is None:
            inner = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {item}: {name} is {short(inner)}, not a section")
        tree[name] = inner
        tree = inner
    tree[names[-1]] = value


def _is_section(key: str) -> bool:
    field = RunConfig.model_fields.get(key)
    return field is not None and isinstance(field.annotation, type) and issubclass(field.annotation, Section)


def _is_path(name: str) -> bool:
    return "/" in name or name.endswith((".yaml", ".yml"))


def _existing(key: str, path: str, others: str = "") -> str:
    found = Path(path).expanduser().resolve()
    if not found.exists():
        raise ConfigError(f"{key}: no such file: {path}; allowed: {others} a path that exists".replace(":  ", ": "))
    return str(found)


def _model_section(given: Any) -> Any:
    """The section `model`: of the type that it names, or that the folder of `from` holds."""
    if not isinstance(given, dict):
        return given
    given = {key: value for key, value in given.items() if value is not None}
    if "type" in given:
        given["type"] = resolved(given["type"])
    if (source := given.get("from")) is None:
        return validated(find(given.get("type", "gpt2")).Config, given, "model.")
    folder = Path(str(source)).expanduser().resolve()
    need = "allowed: a folder that save_pretrained wrote, with config.json and model.safetensors"
    try:
        raw = read_raw_config(folder)
        cls = find(given["type"]) if "type" in given else of_hf_type(raw.get("model_type"))
        saved = cls.read_config(raw)
    except ConfigError as error:
        raise ConfigError(f"model.from: {folder}: {error}; {need}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"model.from: cannot read {folder}/config.json ({error!r}); {need}") from None
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"model.from: {folder} holds no weights in safetensors; {need}")
    given |= {"from": str(folder)}
    for key in saved.keys() & given.keys():
        if given[key] != saved[key]:
            raise ConfigError(f"model.{key}: got {given[key]!r}; allowed: {saved[key]!r}, as in {folder}/config.json")
    return validated(cls.Config, saved | given, "model.")
