"""Contestants of `nntile bench step CONFIG`: a config's model here, and what transformers makes of it in PyTorch.

Both sides have the same start weights, inputs, precision and optimizer; ours is packed if train.pack says so, PyTorch's
inputs are padded, with their attention_mask. PyTorch trains under bf16 or fp16 autocast with a fused optimizer, and
infers with such weights; its attention is scaled_dot_product_attention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from nntile_py.analysis.workloads import Work, spec_of
from nntile_py.bench.common import Step, torch_device, torch_dtype
from nntile_py.config.run import RunConfig, load, runtime_options
from nntile_py.config.spec import build_model, predicted, step_spec
from nntile_py.execution.packed import bins_of, lengths_of
from nntile_py.graph.step import StepSpec
from nntile_py.tiles import Tiling

Array = np.ndarray[Any, Any]


def contestant(name: str, o: dict[str, Any]) -> tuple[Step, dict[str, Any]]:
    """Our side, or `torch_eager` or `torch_compile`."""
    config = load(o["config"], o["sets"])
    work: Work = "inference" if o.get("inference") else "train"
    inputs = inputs_of(config, work, o.get("alpha", 1.0))
    if name == "nntile":
        run, facts = _ours(config, inputs, work)
    else:
        run, facts = torch_side(config, inputs, name, work), {}
    real, rows = inputs.get("attention_mask"), _rows(config, work)
    return run, facts | {"tokens": rows * config.train.seq if real is None else int(real.sum())}


def _rows(config: RunConfig, work: Work) -> int:
    """Sequences of a step, or of a forward pass."""
    return config.train.batch * (config.train.grad_accumulation if work == "train" else 1)


def inputs_of(config: RunConfig, work: Work, alpha: float = 1.0, spec: StepSpec | None = None) -> dict[str, Array]:
    """Random ones of the workload, padded; alpha: the mean length as a part of train.seq."""
    rows, trains = _rows(config, work), work == "train"
    return (spec or spec_of(config, work)).random_inputs(rows, config.seed, alpha, predicted(config), training=trains)


def _ours(config: RunConfig, inputs: dict[str, Array], work: Work) -> tuple[Step, dict[str, Any]]:
    from nntile_py.bench.forward import forward_passes
    from nntile_py.execution.runtime import Runtime
    from nntile_py.training.same import same_steps
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
    for size in range(least, spec.tiling.tile("batch", spec.batch)):
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
        return _trained(config, model.to(device).train(), forward, inputs)
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


def _trained(config: RunConfig, model: Any, forward: Any, inputs: dict[str, Any]) -> Step:
    """Training steps, in grad_accumulation parts."""
    import torch

    how, device, dtype = config.optimizer, next(iter(inputs.values())).device, torch_dtype(config.precision)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    betas = (how.betas[0], how.betas[1])
    optimizer = torch.optim.AdamW(
        model.parameters(), how.lr, betas=betas, eps=how.eps, weight_decay=how.weight_decay, fused=True
    )
    parts = [
        {name: value[k * config.train.batch : (k + 1) * config.train.batch] for name, value in inputs.items()}
        for k in range(config.train.grad_accumulation)
    ]

    def run(n: int) -> list[float]:
        losses = []
        for _ in range(n):
            total = torch.zeros((), device=device)
            for part in parts:
                with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                    loss = forward(**part)
                scaler.scale(loss.loss / len(parts)).backward()
                total += loss.loss.detach() / len(parts)
            if how.clip_grad_norm:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), how.clip_grad_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            losses.append(total)
        return torch.stack(losses).tolist()

    return run
