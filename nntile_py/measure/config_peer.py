"""Contestants of `nntile bench step CONFIG`: a config's model here, and what transformers makes of it in PyTorch.

Both sides have the same start weights, inputs, precision and optimizer; ours is packed if train.pack says so, PyTorch's
inputs are padded, with their attention_mask. PyTorch trains under bf16 or fp16 autocast with a fused optimizer, and
infers with such weights; its attention is scaled_dot_product_attention. torch_bert.py has others, for BERT alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from nntile_py.analysis.workloads import Work, spec_of
from nntile_py.config.builders import build_model, predicted, step_spec
from nntile_py.config.run_config import RunConfig, load, runtime_options
from nntile_py.errors import ConfigError
from nntile_py.graph.bin_packing import bins_of
from nntile_py.graph.padding import lengths_of
from nntile_py.graph.step import StepSpec
from nntile_py.measure.common import Step, torch_device, torch_dtype, trained
from nntile_py.measure.peer_process import FOR_BERT, OF_CONFIG, RANKED
from nntile_py.tiles import Tiling

Array = np.ndarray[Any, Any]


def contestant(name: str, o: dict[str, Any], *place: int) -> tuple[Step, dict[str, Any]]:
    """Our side, or one of contestants.OF_CONFIG. place: rank and port, of one with several processes."""
    config = load(o["config"], o["sets"])
    work: Work = "inference" if o.get("inference") else "train"
    inputs = inputs_of(config, work, o.get("alpha", 1.0))
    if name == "nntile":
        run, facts = _ours(config, inputs, work)
    elif name == "ddp":
        from nntile_py.measure.torch_bert import ddp

        run, facts = ddp(config, inputs, o, *place)
    elif name in FOR_BERT:
        from nntile_py.measure.torch_bert import torch_bert

        run, facts = torch_bert(config, inputs, name, work)
    else:
        run, facts = torch_side(config, inputs, name, work), {}
    real, rows = inputs.get("attention_mask"), _rows(config, work)
    return run, facts | {"tokens": rows * config.train.seq if real is None else int(real.sum())}


def check_peer(config: RunConfig, name: str, *, inference: bool) -> None:
    """Raise ConfigError for a config that the contestant cannot run; before any contestant starts."""
    ranked, train, of = name in RANKED, config.train, f"with --peer {name}"
    if name not in OF_CONFIG or (ranked and inference):
        known = [one for one in OF_CONFIG if not (inference and one in RANKED)]
        beside = "--inference" if inference and ranked else "CONFIG"
        raise ConfigError(f"--peer: {name!r} is not allowed beside {beside}; use torch, {', '.join(known)}")
    gpus = config.workers if config.runtime.cuda else 0
    if not ranked and gpus > 1:
        raise ConfigError(f"runtime.cuda: got {config.runtime.cuda!r}; allowed {of}: 0 or 1; several are for ddp")
    if not ranked and name not in FOR_BERT:
        return
    if config.model.type != "bert":
        raise ConfigError(f"model.type: got {config.model.type}; allowed {of}: bert")
    work, head = ("a forward pass", "none") if inference else ("training", "masked_lm")
    if config.model.head != head:
        raise ConfigError(f"model.head: got {config.model.head}; allowed {of} in {work}: {head}")
    if train.grad_accumulation != 1:
        raise ConfigError(f"train.grad_accumulation: got {train.grad_accumulation}; allowed {of}: 1")
    # Flash attention is of 16 bits; a scaled loss of fp16 would need ranks to agree which steps are skipped.
    known = (["bf16"] if ranked else ["bf16", "fp16"]) if gpus else ["fp32"]
    if config.precision not in known:
        raise ConfigError(f"precision: got {config.precision}; allowed {of}: {' or '.join(known)}")
    if ranked and train.batch < (gpus or 2):
        raise ConfigError(f"train.batch: got {train.batch}; allowed {of}: at least {gpus or 2}, one for each rank")


def _rows(config: RunConfig, work: Work) -> int:
    """Sequences of a step, or of a forward pass."""
    return config.train.batch * (config.train.grad_accumulation if work == "train" else 1)


def inputs_of(config: RunConfig, work: Work, alpha: float = 1.0, spec: StepSpec | None = None) -> dict[str, Array]:
    """Random ones of the workload, padded; alpha: the mean length as a part of train.seq."""
    rows, trains = _rows(config, work), work == "train"
    return (spec or spec_of(config, work)).random_inputs(rows, config.seed, alpha, predicted(config), training=trains)


def _ours(config: RunConfig, inputs: dict[str, Array], work: Work) -> tuple[Step, dict[str, Any]]:
    from nntile_py.execution.runtime import Runtime
    from nntile_py.training.repeated_steps import forward_passes, same_steps
    from nntile_py.training.trainer import Trainer

    Runtime(**runtime_options(config.runtime.model_dump()), mpi=True).__enter__()  # for as long as the process lives
    spec = step_spec(config, build_model(config))
    if work != "train":
        made, passes = forward_passes(spec, inputs)
        return passes, {"tasks": len(made.forward.tasks.tasks), "flop": made.graph.flop()}
    trainer = Trainer.of_spec(just_filled(spec, inputs) if spec.pack else spec, seed=config.seed)
    return same_steps(trainer, inputs), {"tasks": trainer.tasks_per_step, "flop": trainer.flop_per_step}


def just_filled(spec: StepSpec, inputs: Mapping[str, Array]) -> StepSpec:
    """The same packed steps in as many bins, which have room for these sequences and, rounded up to whole sequences, no
    more: as PyTorch's arrays are as long as the batch has tokens."""
    lengths, parts = lengths_of(inputs, spec.seq), spec.grad_accumulation
    least = math.ceil(sum(lengths) / (spec.seq * spec.rows * parts))
    for size in range(least, spec.capacity // spec.seq):
        tiling = Tiling({**spec.tiling.tiles, "batch": size})
        narrow = replace(spec, batch=spec.rows * size, tiling=tiling)
        with suppress(ValueError):  # they do not fit
            bins_of(narrow).places(lengths, parts)
            return narrow
    return spec


def torch_side(config: RunConfig, arrays: dict[str, Array], name: str, work: Work) -> Step:
    """The workload, train, inference or attention, by `torch_eager` or `torch_compile`."""
    import torch

    device = torch_device(config)
    model = _attention() if work == "attention" else build_model(config).to_hf()
    if hasattr(getattr(model, "config", None), "use_cache"):  # keys and values for generation, of no use here
        model.config.use_cache = False
    forward = torch.compile(model) if name == "torch_compile" else model
    inputs = {key: torch.from_numpy(value).to(device) for key, value in arrays.items()}
    if work == "train":
        rows, count = config.train.batch, config.train.grad_accumulation
        parts = [{key: value[k * rows : (k + 1) * rows] for key, value in inputs.items()} for k in range(count)]
        return trained(config, model.to(device).train(), lambda part: forward(**part).loss, parts)
    dtype = torch_dtype(config.precision)
    model.to(device, dtype).eval()
    inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}

    def run(n: int) -> list[float]:
        with torch.inference_mode():
            for _ in range(n):
                found = forward(**inputs)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return n * [float(getattr(found, "loss", None) or 0.0)]

    return run


def _attention() -> Any:
    """Of inputs q, k, v [batch, seq, heads, head_dim]."""
    import torch

    class Attention(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, attention_mask: Any = None) -> Any:
            mask = None if attention_mask is None else attention_mask[:, None, None].bool()
            q, k, v = (one.transpose(1, 2) for one in (q, k, v))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)

    return Attention()
