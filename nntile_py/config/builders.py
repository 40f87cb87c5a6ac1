"""Build the objects that a run's config describes: the model, the StepSpec, the tiling, the operator timings."""

from __future__ import annotations

import functools
from importlib.metadata import version
from pathlib import Path

from nntile_py.config.run_config import RunConfig
from nntile_py.errors import operators_refuse
from nntile_py.graph.recompute_choice import Room
from nntile_py.graph.step import StepSpec
from nntile_py.graph.timings import METHOD, Timings, opened
from nntile_py.models.base import Model
from nntile_py.models.registry import find, new
from nntile_py.system.machine import gpus, processor
from nntile_py.system.version import VERSION
from nntile_py.tiles import Tiling


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
        room=room(config),
        timings=timings(config) if config.layout == "searched" else None,
    )


def room(config: RunConfig) -> Room:
    """Return the workers and the memory that the section `runtime` gives a run, on each rank."""
    runtime = config.runtime
    disk = runtime.disk.size if runtime.disk else 0
    gpus = config.workers if runtime.cuda else 0
    beside = 0 if runtime.cpus == "all" else int(runtime.cpus)  # CPU workers beside GPUs
    return Room.of(beside if gpus else config.workers, gpus, runtime.memory, runtime.cuda_memory, disk)


def default_layouts(config: RunConfig) -> RunConfig:
    """Return a copy of the config with `layout: default`, which needs no measured operator times."""
    return config.model_copy(update={"layout": "default"})


def predicted(config: RunConfig) -> float:
    """Return the share of tokens for which the model computes a loss: train.mask_probability for masked models, else
    1."""
    return config.train.mask_probability if config.aim == "masked" else 1.0


def tiling(config: RunConfig) -> Tiling:
    """Return the config's tile sizes as a Tiling."""
    return Tiling(config.tiles.model_dump(exclude_none=True))


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
