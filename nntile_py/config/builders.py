"""Build the objects that a run's config describes: the model, the StepSpec, the tiling, the operator timings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from nntile_py.config.kept_tiles import ESTIMATED, MEASURED, KeptTiles, KeptTiling
from nntile_py.config.run_config import RunConfig
from nntile_py.config.sections import AUTO_TILES, TilesSection
from nntile_py.errors import ConfigError, operators_refuse
from nntile_py.graph.micro_batches import in_micro_batches
from nntile_py.graph.recompute_choice import Room, StepEstimate, fastest
from nntile_py.graph.step import TILE_DTYPE, StepSpec
from nntile_py.graph.tile_choice import TileSearch, program_of, search_tiles
from nntile_py.graph.timings import METHOD, Timings, opened
from nntile_py.models.base import Model
from nntile_py.models.registry import find, new
from nntile_py.system import launcher
from nntile_py.system.machine import gpus, processor
from nntile_py.system.version import VERSION
from nntile_py.system.worker_rates import measured_rates
from nntile_py.tiles import Tiling, device_model
from nntile_py.tiles.placement import Speed


def build_model(config: RunConfig) -> Model:
    """Return the model of `config.model`, with the weights of its folder or with initial weights from the seed."""
    model = config.model
    if model.from_ is not None:
        return find(model.type).from_hf(model.from_, seed=config.seed, **model.model_dump(by_alias=True))
    return new(model, config.seed)


@operators_refuse()
def step_spec(config: RunConfig, model: Model | None = None) -> StepSpec:
    """Return the StepSpec of a run: the model and all settings from which a training step's program is built.

    model: The model with its weights. Default: a new model, whose initial weights are drawn at their first use."""
    if config.train.auto_micro_batches:
        need = "a number; `nntile plan` shows the number that nntile train takes"
        raise ConfigError(f"train.grad_accumulation: got 'auto'; allowed here: {need}")
    return StepSpec(
        model or new(config.model, config.seed),
        config.train.batch,
        config.train.seq,
        tiling(config),
        precision=config.precision,
        optimizer=config.optimizer,
        clip_grad_norm=config.optimizer.clip_grad_norm,
        accumulate=config.accumulate,
        fusion=config.fusion,
        grad_accumulation=config.train.grad_accumulation,
        skip_above_norm=config.train.skip_above_norm,
        pack=config.train.pack,
        loss_scale=config.train.loss_scale,
        freeze=config.freeze,
        recompute=config.recompute,
        offload=config.offload,
        fp8=config.fp8,
        captured=config.captured,
        room=room(config),
        timings=timings(config) if config.layout == "searched" else None,
    )


def room(config: RunConfig) -> Room:
    """Return the workers and the memory of each rank, as the section `runtime` sets them."""
    runtime = config.runtime
    disk = runtime.disk.size if runtime.disk else 0
    gpus = config.workers if runtime.cuda else 0
    beside = 0 if runtime.cpus == "all" else int(runtime.cpus)  # CPU workers beside GPUs
    return Room.of(beside if gpus else config.workers, gpus, runtime.memory, runtime.cuda_memory, disk)


def micro_batches(config: RunConfig) -> dict[int, list[StepEstimate]]:
    """Return the estimates for `train.grad_accumulation: auto`, as {number of micro-batches: estimates}."""
    key = config.to_yaml()
    if key not in _micro_batches:
        whole = default_layouts(uncut(micro_batched(config, config.train.batch, 1)))
        _micro_batches[key] = dict(in_micro_batches(step_spec(whole)))
    return _micro_batches[key]


def with_micro_batches(config: RunConfig) -> RunConfig:
    """Return the config with a number of micro-batches in place of `train.grad_accumulation: auto`.

    The number is that of the fastest estimate that fits. `train.batch` is divided by this number: the result counts the
    sequences of one micro-batch.
    """
    if not config.train.auto_micro_batches:
        return config
    if launcher.started()[1] > 1:
        need = "a number, as the ranks' memory may differ"
        raise ConfigError(f"train.grad_accumulation: got 'auto'; allowed on several ranks: {need}")
    found = micro_batches(config)
    every = [(count, one) for count, estimates in found.items() for one in estimates]
    best = fastest([one for _, one in every])
    count = next(count for count, one in every if one is best)
    return micro_batched(config, config.train.batch // count, count)


def micro_batched(config: RunConfig, batch: int, count: int) -> RunConfig:
    """Return the config with this number of micro-batches of `batch` sequences."""
    train = config.train.model_copy(update={"batch": batch, "grad_accumulation": count})
    return config.model_copy(update={"train": train})


def default_layouts(config: RunConfig) -> RunConfig:
    """Return a copy of the config with `layout: default`, which needs no measured operator times."""
    return config.model_copy(update={"layout": "default"})


def predicted(config: RunConfig) -> float:
    """Return the share of tokens that have a loss: train.mask_probability for masked models, else 1."""
    return config.train.mask_probability if config.aim == "masked" else 1.0


def tiling(config: RunConfig) -> Tiling:
    """Return the config's tile sizes as a Tiling; for `tiles: auto` the tile sizes of `auto_tiles`."""
    return Tiling(auto_tiles(config).tiles if config.tiles == AUTO_TILES else config.tile_sizes)


def uncut(config: RunConfig) -> RunConfig:
    """Return the config with `tiles: {}` (no axis is cut) in place of `tiles: auto`; other configs unchanged."""
    return config.model_copy(update={"tiles": TilesSection()}) if config.tiles == AUTO_TILES else config


def with_tiles(config: RunConfig) -> RunConfig:
    """Return the config with the tile sizes of `auto_tiles` in place of `tiles: auto`."""
    return config.model_copy(update={"tiles": TilesSection(**tiling(config).tiles)})


def auto_tiles(config: RunConfig) -> KeptTiling:
    """Return the tiling that `tiles: auto` stands for, on this machine and with these ranks.

    A single process reads the tiling from the cache folder, or searches for a tiling and stores it there. Several ranks
    search with assumed rates and without the cache folder, so that ranks on different machines get the same tiling. No
    axis is cut for a single worker. No axis is cut either if no training step can be built, as for a model without a
    loss, because the search estimates training steps. The config's own tiles have no effect.
    """
    ranks = launcher.started()[1]
    key = uncut(config).to_yaml(), ranks
    if key not in _tilings:
        _tilings[key] = _found_tiles(config, ranks)
    return _tilings[key]


def search_for(config: RunConfig) -> TileSearch:
    """Return the tilings that `tiles: auto` compares, with estimates. The config's own tiles have no effect."""
    spec, ranks, gpu = _without_tiles(config), launcher.started()[1], config.runtime.cuda != 0
    one, speed = room(config), _worker_speed(config)
    if ranks > 1 and not gpu and config.runtime.memory is None:
        one = replace(one, bytes=UNLIMITED)  # the ranks' machines may differ, but all ranks must choose the same tiling
    every = replace(one, bytes=ranks * one.bytes, beyond=ranks * one.beyond)
    return search_tiles(spec, ranks * config.workers, every, speed)


def planned_speed(config: RunConfig) -> Speed:
    """Return the rates of one worker by which the config's step is planned.

    With `tiles: auto` for several CPU workers: the rates that were measured on this machine. Otherwise: the rates
    of the device model."""
    if config.tiles == AUTO_TILES and config.workers > 1:
        return _worker_speed(config)
    return device_model.worker(TILE_DTYPE[config.precision], config.runtime.cuda != 0)


def _worker_speed(config: RunConfig) -> Speed:
    """Return the rates of one worker: measured for the CPU workers of a single process, else of the device model."""
    gpu = config.runtime.cuda != 0
    speed = device_model.worker(TILE_DTYPE[config.precision], gpu)
    if gpu or launcher.started()[1] > 1:
        return speed
    flop_s, bytes_s = kept_tiles(config).rates(*_measurement(config))
    return replace(speed, flop_s=flop_s, bytes_s=bytes_s)


def kept_tiles(config: RunConfig) -> KeptTiles:
    """Return this machine's file of tilings for the config's workers."""
    return KeptTiles(measured_on(config)["device"])


def keep_measured(config: RunConfig, tiles: Mapping[str, int]) -> bool:
    """Store a measured tiling for a config, which `tiles: auto` then uses. The config's own tiles have no effect.

    Returns False if the tiling cannot be stored in the cache folder.
    """
    kept, program = kept_tiles(config), program_of(_without_tiles(config), room(config))
    measured = kept.keep(program, tiles, MEASURED)
    _tilings.clear()
    return kept.tiling(program) == measured


UNLIMITED = 1 << 60  # bytes

_tilings: dict[tuple[str, int], KeptTiling] = {}  # by the config's YAML and the number of ranks
_micro_batches: dict[str, dict[int, list[StepEstimate]]] = {}  # by the config's YAML


def _found_tiles(config: RunConfig, ranks: int) -> KeptTiling:
    if ranks * config.workers == 1:
        return KeptTiling({}, ESTIMATED)
    try:
        if ranks > 1:
            return KeptTiling(search_for(config).best.tiles, ESTIMATED)
        kept, program = kept_tiles(config), program_of(_without_tiles(config), room(config))
    except ConfigError:  # no training step can be built; a command that needs a training step reports this itself
        return KeptTiling({}, ESTIMATED)
    return kept.tiling(program) or kept.keep(program, search_for(config).best.tiles, ESTIMATED)


def _without_tiles(config: RunConfig) -> StepSpec:
    return step_spec(default_layouts(config).model_copy(update={"tiles": TilesSection()}))


def _measurement(config: RunConfig) -> tuple[str, Callable[[], tuple[float, float]]]:
    """Return the dtype of the config's products, and a function that measures a worker's rates in 0.2 s."""
    fp64 = config.precision == "fp64"

    def measure() -> tuple[float, float]:
        rates = measured_rates(config.workers, fp64, size=512, seconds=0.1)
        return rates.flop_s, rates.bytes_s

    return "fp64" if fp64 else "fp32", measure


@functools.cache
def _gpu() -> str:
    return gpus().partition(", ")[0].partition(" ")[2] or "GPU"


def measured_on(config: RunConfig) -> dict[str, str]:
    """Return the conditions under which this config's operator times are measured: device, versions, dtype, method.

    A file of operator times stores them; graph/timings.py explains the keys.
    """
    name = _gpu() if config.runtime.cuda else processor()
    versions = f"nntile_py {VERSION}, torch {version('torch')}"
    return {"device": f"{config.workers} x {name}", "version": versions, "dtype": config.precision, "method": METHOD}


def timings(config: RunConfig, path: Path | None = None, *, new: bool = False) -> Timings:
    """Return the measured operator times in the file `path`, by default the cache folder's file for this config.

    Raises:
        ConfigError: The file does not exist and `new` is False, or its times were measured under other conditions,
            such as another device (see `measured_on`)."""
    return opened(measured_on(config), path, new=new)
