"""From a run's config to what it describes: model, optimizer, StepSpec."""

from __future__ import annotations

from nntile_py.config.run import RunConfig
from nntile_py.errors import ConfigError
from nntile_py.graph.fusion import Fusion
from nntile_py.graph.optimizers import SGD, AdamW, Optimizer
from nntile_py.graph.step import StepSpec
from nntile_py.models.base import Model, find, new
from nntile_py.tiles import Tiling


def build_model(config: RunConfig) -> Model:
    """The model of `config.model`: read from its folder, or freshly initialised from the seed."""
    made = config.model
    if made.from_ is not None:
        return find(made.type).from_hf(made.from_, seed=config.seed, **made.model_dump(by_alias=True))
    return new(made, config.seed)


def build_optimizer(config: RunConfig) -> Optimizer:
    """The optimizer that `config` asks for."""
    how = config.optimizer
    if how.name == "adamw":
        betas = how.betas[0], how.betas[1]
        return AdamW(lr=how.lr, betas=betas, eps=how.eps, weight_decay=how.weight_decay, decay=how.decay)
    return SGD(lr=how.lr, momentum=how.momentum, weight_decay=how.weight_decay, decay=how.decay)


def step_spec(config: RunConfig, model: Model | None = None) -> StepSpec:
    """What decides the programs of a run; `model` where one is there already."""
    try:
        return StepSpec(
            model or new(config.model, config.seed),
            config.train.batch,
            config.train.seq,
            tiling(config),
            dtype=config.precision,
            optimizer=build_optimizer(config),
            clip_grad_norm=config.optimizer.clip_grad_norm,
            policy=config.accumulate,
            fusion=Fusion.of(config.fusion.model_dump()),
            grad_accumulation=config.train.grad_accumulation,
            skip_above_norm=config.train.skip_above_norm,
            pack=config.train.pack,
        )
    except ValueError as error:  # of the operators: sizes that they do not take
        raise ConfigError(str(error)) from None


def predicted(config: RunConfig) -> float:
    """The share of the tokens that the model is to predict."""
    return config.train.mask_probability if find(config.model.type).objective == "masked" else 1.0


def tiling(config: RunConfig) -> Tiling:
    """The tile sizes that are given."""
    return Tiling(config.tiles.model_dump(exclude_none=True))
