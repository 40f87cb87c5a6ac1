"""Reads a run's YAML as a RunConfig. If keys are wrong, a ConfigError names each of them and the allowed values."""

import functools
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny, create_model, model_validator

from nntile_py.config.data_section import PAIRS, DataSection
from nntile_py.config.logging_section import LoggingSection
from nntile_py.config.optimizer_section import OptimizerSection, optimizer_section, read_optimizer
from nntile_py.config.saved_code import check_code_of_run
from nntile_py.config.scheduler_file import apply_scheduler, is_path, override
from nntile_py.config.sections import (
    AUTO_TILES,
    CheckpointSection,
    DebugSection,
    ProfileSection,
    RuntimeSection,
    SampleSection,
    Tiles,
    TilesSection,
    TokenizerSection,
    TrainSection,
    default_prompt,
)
from nntile_py.config.table_models import (
    CLASSIFICATION,
    CLASSIFIERS,
    CONTRASTIVE,
    OF_TABLES,
    check_table,
    with_choices,
    with_labels,
)
from nntile_py.data.collators import most_masked
from nntile_py.data.token_files import TOKENIZER, is_token_folder
from nntile_py.errors import ConfigError
from nntile_py.graph.fusion import Fusion, every_rule
from nntile_py.graph.passes.fp8 import FP8
from nntile_py.graph.recompute_rule import AUTO, RECOMPUTE, WORDS, as_recompute
from nntile_py.graph.step import PRECISIONS, check_pack, check_precision
from nntile_py.models.base import ModelConfig
from nntile_py.models.hf_config import WEIGHTS, read_raw, weight_files
from nntile_py.models.registry import check_type_of_folder, find, objective_of, of_hf_type, resolved
from nntile_py.schema import (
    Names,
    Natural,
    Rule,
    Section,
    Switch,
    absolute,
    allowed,
    keys,
    only,
    read_yaml,
    section_of,
    validated,
)
from nntile_py.system.load import cores
from nntile_py.tasks.optimizer import OPTIMIZERS
from nntile_py.tiles.eviction import OFFLOAD_WORDS, OFFLOADED, Offloaded, as_offload, check_disk
from nntile_py.tiles.tasklist import Policy
from nntile_py.tiles.worker_kinds import check_workers
from nntile_py.yaml_text import dump, one_line

_OF_RUNS = ("metrics.jsonl", "checkpoints")  # beside one of these, or beside weights, config.yaml is a run's
DEFAULT_MODEL = "gpt2"


class RunConfig(Section):
    """All settings of a run. `load` reads a YAML and fills in all defaults."""

    model: Annotated[SerializeAsAny[ModelConfig], BeforeValidator(lambda given: _model_section(given))]
    """The model: its type and sizes, or the folder to read it from."""
    data: DataSection = DataSection()
    tokenizer: TokenizerSection = TokenizerSection(vocab_size=4096)
    train: TrainSection
    optimizer: Annotated[SerializeAsAny[OptimizerSection], BeforeValidator(read_optimizer)] = Field(
        default_factory=lambda: optimizer_section("adamw")()
    )
    checkpoint: CheckpointSection = CheckpointSection()
    precision: Annotated[
        str,
        *only(
            ", ".join(f"{p} ({' and '.join(on)} workers)" for p, on in PRECISIONS.items()),
            lambda v: v if isinstance(v, str) and v in PRECISIONS else None,
            enum=[*PRECISIONS],
        ),
    ] = "fp32"
    """Number format of products and activations. `fp8`: as `bf16`, except that products of layers have 8-bit
    operands; see the section `fp8`."""
    fp8: FP8 = FP8()
    freeze: Names = ()
    """Patterns of names of weights in checkpoints, such as `*.wte.*`, with the wildcards *, ? and [...]. These weights
    are not trained: they have no gradient and no optimizer state."""
    recompute: Annotated[
        str | Sequence[str],
        *only(
            WORDS,
            as_recompute,
            anyOf=[{"enum": [*RECOMPUTE, AUTO]}, {"type": "array", "items": {"type": "string"}}],
        ),
    ] = "none"
    """Operators whose results are not kept in memory. The backward pass computes these results again.
    `attention`: the attention of each layer. `layer`: all operators of each layer. `auto`: the fastest of `none`,
    `attention` and `layer` that fits into the memory of `runtime`, by the estimates of `nntile plan`; on one rank only.
    A list: the operators of layers whose names match a pattern, such as `*.mlp.*`. Losses and gradients have the same
    bits as with `none`."""
    offload: Annotated[
        Sequence[Offloaded], *only(OFFLOAD_WORDS, as_offload, type="array", items={"enum": [*OFFLOADED]})
    ] = ()
    """Kinds of tensors that leave a GPU for main memory between uses. GPUs only. Other tiles leave a GPU only if its
    memory is full. With `runtime.disk`, `runtime.disk.kinds` limits which kinds may go on to the disk."""
    captured: Switch | None = None
    """Run training steps on one GPU as CUDA graphs, which launch many short kernels at once. Null: if the mean task is
    estimated to take less than 0.05 ms, graphs are possible, and a quarter of `runtime.cuda_memory` holds their tiles.
    `true`: also with longer tasks; refused where graphs are impossible. Results have the same bits."""
    tiles: Tiles = AUTO_TILES
    """Tile size of each axis, in elements. An axis left out, or no longer than its tile, is not cut; the last tile of
    an axis may be smaller. `{}`: no axis is cut. `auto`: the tiling with the shortest estimated step on the workers of
    `runtime`; a run stores the tile sizes in its config.yaml, and a resumed run has the same."""
    accumulate: Policy = "chain"
    """How several tasks add to one tile, as they do if `tiles` cuts an axis over which a product sums. `chain`: in a
    fixed order (with the same `tiles`, the same bits for any number of workers and any scheduler). `commute`: in any
    order. `redux`: in a copy for each worker (STARPU_REDUX). `tree`: in pairs."""
    fusion: Annotated[
        Fusion,
        Rule(f"a section with {', '.join(Fusion.model_fields)}, or true or false for all these", {"type": "boolean"}),
        BeforeValidator(lambda given: every_rule(given) if isinstance(given, bool) else given),
    ] = Fusion()
    layout: Literal["default", "searched"] = "default"
    """Order of a tensor's axes in memory in a training step: as the model declares them (`default`), or the fastest by
    the times that `nntile layouts tune` measured (`searched`). Files of weights are the same."""
    scheduler: Annotated[
        str | None, AfterValidator(lambda name: str(absolute(name)) if name and is_path(name) else name)
    ] = None
    """A file with keys of `runtime`: a name in scheduler_configs/ (such as cpu, gpu, multi_gpu), or a path. Keys in the
    section `runtime` override the file."""
    runtime: RuntimeSection = RuntimeSection()
    seed: Natural = 0
    """Seed of the initial weights, of the order of the text, of dropout and of the sample."""
    sample: SampleSection = SampleSection()
    logging: LoggingSection = LoggingSection()
    profile: ProfileSection = ProfileSection()
    debug: DebugSection = DebugSection()
    out: str | None = None
    """Folder of the run; null: runs/NAME for the config NAME.yaml."""

    @model_validator(mode="after")
    def _together(self) -> "RunConfig":
        model: Any = self.model  # Any: its fields depend on model.type
        seq = self.train.seq
        check_precision("precision", self.precision, self.runtime.cuda != 0)
        if self.runtime.cpus == 0 == self.runtime.cuda:
            raise ConfigError("runtime.cpus: got 0; allowed: at least 1, or 'all', if runtime.cuda is 0")
        runtime = self.runtime
        check_workers(runtime.on_cpu, runtime.cpus, runtime.cuda, runtime.placement)
        check_disk(runtime.disk, runtime.memory)
        check_pack(self.train.pack, self.tile_sizes.get("seq"))
        if self.train.pack and self.layout == "searched":
            raise ConfigError("layout: got searched; allowed with train.pack: default")
        fields = type(model).model_fields
        if self.aim in OF_TABLES:
            check_table(self.data, model.head)
            labelled = self.aim == CLASSIFICATION
            model = with_labels(model, self.data) if labelled else with_choices(model, self.data, self.train)
        else:
            self._check_text()
        if model.from_ and "vocab" in fields and self.tokenizer.path is None:
            self.tokenizer = TokenizerSection(path=_tokenizer_in(Path(model.from_)))
        if "positions" in fields:
            model = model.changed(positions=model.positions or seq)
            if seq > model.positions:
                raise ConfigError(f"train.seq: got {seq}; allowed: at most model.positions = {model.positions}")
        if "masked" in fields:
            share = self.train.mask_probability
            model = model.changed(masked=most_masked(seq, share) if model.masked is None else model.masked)
            if 0 < model.masked < seq * share:
                need = f"0, or at least the {math.ceil(seq * share)} tokens of train.mask_probability = {share}"
                raise ConfigError(f"model.masked: got {model.masked}; allowed: {need}")
        if "vocab" in fields:
            size = self.tokenizer.size()
            model = model.changed(vocab=model.vocab or size)
            if model.vocab < size:
                raise ConfigError(f"model.vocab: got {model.vocab}; allowed: at least the tokenizer's size, {size}")
        self.model = model
        if self.sample.prompt is None:
            self.sample = self.sample.model_copy(update={"prompt": default_prompt(self.data.source)})
        return self

    def _check_text(self) -> None:
        """Check the section `data` of a model that is trained on text, and take the tokenizer of prepared tokens."""
        data = self.data
        if data.texts != PAIRS:
            raise ConfigError("data.texts: allowed with model.head: sentence_embedding; leave it out otherwise")
        if data.label != "label":
            need = f"label, since only classifiers (model.head: {' or '.join(CLASSIFIERS)}) read labels"
            raise ConfigError(f"data.label: got {data.label}; allowed: {need}")
        if data.concatenate and (self.train.pack or data.sequences != "window"):
            key = "train.pack: true" if self.train.pack else f"data.sequences: {data.sequences}"
            raise ConfigError(f"data.concatenate: got true; allowed with {key}: false")
        data.check_instructions(self.aim == "causal")
        first = Path(data.entries[0].path)
        if "tokenizer" not in self.model_fields_set and not self.model.from_ and is_token_folder(first):
            self.tokenizer = TokenizerSection(path=str(first / TOKENIZER))

    @property
    def aim(self) -> str | None:
        """The training objective: `causal`, `masked`, `classification` or `contrastive`; None: not trained on text."""
        head = getattr(self.model, "head", None)
        if head == "sentence_embedding":
            return CONTRASTIVE
        if head in CLASSIFIERS:
            return CLASSIFICATION
        return "causal" if head == "causal_lm" else objective_of(self.model)

    @property
    def workers(self) -> int:
        """Number of GPUs, or of CPU workers without GPUs. `cuda: all` counts as 8 on a machine without GPUs."""
        cuda, cpus = self.runtime.cuda, self.runtime.cpus
        return (_gpus() if cuda == "all" else int(cuda)) or (cores() if cpus == "all" else int(cpus))

    @property
    def tile_sizes(self) -> dict[str, int]:
        """The tile sizes of `tiles`, by axis; {} for `auto`, see builders.with_tiles."""
        return self.tiles.sizes if isinstance(self.tiles, TilesSection) else {}

    @property
    def planned(self) -> bool:
        """Whether a plan assigns tasks to workers before the run: with several GPUs, no CPU workers, and a
        runtime.placement other than `scheduler`."""
        several, of = self.runtime.cuda != 0 and self.workers > 1, self.runtime
        # As in Runtime, "all" means no CPU workers if there are GPUs.
        return several and of.cpus in (0, "all") and of.placement != "scheduler"

    @property
    def short_warmup(self) -> str | None:
        """A message if optimizer.warmup_steps exceeds train.steps, so that the warm-up does not end; else None."""
        how, steps = self.optimizer, self.train.steps
        if how.warmup_steps <= steps:
            return None
        return (
            f"optimizer.warmup_steps = {how.warmup_steps} is more than train.steps = {steps}: the learning rate ends at"
            f" {how.lr * steps / how.warmup_steps:.3g} and never reaches optimizer.lr = {how.lr:.3g}"
        )

    def to_yaml(self) -> str:
        """Return the config as YAML with every default filled in; loading the text gives the same config."""
        return dump(self.model_dump(mode="json", by_alias=True), sort_keys=False)


@functools.cache
def of_model(config: type[ModelConfig], optimizer: str = "adamw") -> type[RunConfig]:
    """Return a subclass of RunConfig whose fields `model` and `optimizer` have all keys of these classes.

    It serves to list and describe the keys; `load` returns plain RunConfigs.
    """
    texts = (Field(description=RunConfig.model_fields[name].description) for name in ("model", "optimizer"))
    model, method = zip((config, optimizer_section(optimizer)), texts, strict=True)
    return create_model("RunConfig", __base__=RunConfig, model=model, optimizer=method)


Saved = Callable[[str | None], Path]


def load(
    path: str | Path, overrides: Iterable[str] = (), saved: Saved | None = None, of_run: bool = False
) -> RunConfig:
    """Read the config of a YAML file. Precedence: overrides, the file, its scheduler file, defaults.

    Args:
        path: The YAML file.
        overrides: Texts such as "tiles.embed=96".
        saved: For a resumed run: a function from the value of the key `out` to the checkpoint's folder. If the path
            of `model.from` or `tokenizer.path` does not exist any more, the checkpoint's copy is used.
        of_run: True if a run saved the file. A config.yaml in the folder of a run is always treated as saved by a run.

    Raises:
        ConfigError: A key or a value is not allowed. Or a file saved by a run, which may be a download, names a Python
            file whose code would be run, and `overrides` do not name this file.
    """
    tree, path, overrides = read_yaml(Path(path), "CONFIG", RunConfig), Path(path), list(overrides)
    if "config" in tree and tree.keys() & {"grid", "list", "random"}:
        need = f"the config of a run, such as {tree['config']}; `nntile sweep {path}` runs the sweep"
        raise ConfigError(f"CONFIG: {path} is the file of a sweep; allowed: {need}")
    if of_run or (path.name == "config.yaml" and any((path.parent / name).exists() for name in (*WEIGHTS, *_OF_RUNS))):
        check_code_of_run(tree, path, overrides)
    return resolve(tree, overrides, str(path), saved)


def resolve(tree: dict[str, Any], overrides: Iterable[str], what: str, saved: Saved | None = None) -> RunConfig:
    """Return the config of a parsed YAML `tree`, which is changed. `what` names the YAML in errors; see `load`."""
    chosen = tree.get("scheduler")
    for item in overrides:
        override(tree, item)
    for name, key, file in (("model", "from", ""), ("tokenizer", "path", "tokenizer.json")) if saved else ():
        section = tree.get(name)
        source = section.get(key) if isinstance(section, dict) else None
        if saved and isinstance(section, dict) and isinstance(source, str) and not os.path.exists(absolute(source)):
            section[key] = str(saved(tree.get("out")) / file)
    try:
        empty = {key: AUTO_TILES if key == "tiles" else {} for key, value in tree.items() if value is None}
        tree |= {key: value for key, value in empty.items() if _is_section(key)}
        if tree.get("scheduler") is not None:
            # A scheduler from the command line takes precedence over the file's section `runtime`.
            apply_scheduler(tree, wins=tree["scheduler"] != chosen, overrides=overrides)
        return validated(RunConfig, tree, elsewhere=lambda: _known_keys(tree.get("model")))
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from error


def all_keys(model: type[ModelConfig]) -> list[str]:
    """Return all dotted keys of a run's YAML, such as train.steps, for a model with this config class."""
    return list(dict.fromkeys(key for name in OPTIMIZERS for key, _ in keys(of_model(model, name))))


def _known_keys(model: Any) -> list[str]:
    """Return all dotted keys of a run whose section `model` has this content, which may itself be invalid."""
    try:
        return all_keys(find(model.get("type", DEFAULT_MODEL) if isinstance(model, dict) else DEFAULT_MODEL).Config)
    except ConfigError:
        return all_keys(ModelConfig)


def _gpus() -> int:
    from torch.cuda import device_count

    return int(device_count()) or 8


def _is_section(key: str) -> bool:
    return key in RunConfig.model_fields and section_of(RunConfig.model_fields[key]) is not None


def _tokenizer_in(folder: Path) -> str:
    """Return the path of tokenizer.json in a model's folder, because its weights need the tokenizer of their training.

    Raises:
        ConfigError: The folder has no tokenizer.json.
    """
    if not (path := folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"model.from: {folder} has no tokenizer.json, and the model's weights need its own tokenizer; allowed: a"
            " folder with tokenizer.json (save_pretrained of transformers' tokenizer writes it), or give tokenizer.path"
        )
    return str(path)


def _model_section(given: Any) -> Any:
    """Return the section `model` as a ModelConfig: of its `type`, or of the type of the model in the folder `from`."""
    if not isinstance(given, dict):
        return given
    given = {key: value for key, value in given.items() if value is not None}
    if "type" in given:
        given["type"] = resolved(given["type"])
    if (source := given.get("from")) is None:
        return _checked(find(given.get("type", DEFAULT_MODEL)).Config, given)
    folder = absolute(str(source))
    need = f"allowed: a folder that save_pretrained wrote, with config.json and {' or '.join(WEIGHTS)}"
    if not folder.is_dir():
        raise ConfigError(f"model.from: no such folder: {folder}; {need}")
    raw: dict[str, Any] = {}
    try:
        raw = read_raw(folder)
        cls = find(given["type"]) if "type" in given else of_hf_type(raw.get("model_type"))
        saved = cls.saved_fields(raw)
        weight_files(folder)
    except ConfigError as error:
        check_type_of_folder(given.get("type"), raw, folder)
        told = str(error).removeprefix("model: ")
        told += f"; {need}" * ("allowed: " not in told)
        place = f"{folder}: " * (str(folder) not in told)
        raise ConfigError(f"model.from: {place}{told}") from None
    given |= {"from": str(folder)}
    head = given.get("head", saved.get("head"))
    # Another head starts from random weights, so the saved settings of the head are dropped. They are dropped for a
    # classifier too: table_models.with_labels compares the saved labels with the data.
    if head in CLASSIFIERS or head != saved.get("head"):
        given["head"], saved = head, {key: value for key, value in saved.items() if key not in cls.head_fields}
    for key in saved.keys() & given.keys():
        if given[key] != saved[key]:
            got, need = one_line(given[key]), one_line(saved[key])
            raise ConfigError(f"model.{key}: got {got}; allowed: {need}, as in {folder}/config.json")
    try:
        return _checked(cls.Config, saved | given)
    except ConfigError as error:
        raise ConfigError(f"{error} (sizes come from {folder}/config.json)") from None


def _checked(config: type[ModelConfig], given: dict[str, Any]) -> ModelConfig:
    own = [key for key, _ in keys(config)]
    for key in given:  # a message of `validated` would suggest keys of the section `model` only
        if key not in own:
            raise ConfigError(f"model.{key}: unknown key; {allowed(key, own, all_keys(config))}")
    return validated(config, given, "model.")
