"""Contestants of `nntile bench step CONFIG`: a config's model here, and what transformers makes of it in PyTorch.

Both sides have the same start weights, inputs, precision and optimizer; PyTorch trains under bf16 autocast, with
attention by scaled_dot_product_attention and a fused optimizer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nntile_py.bench.common import Step
from nntile_py.config.run import RunConfig, load, runtime_options
from nntile_py.config.spec import build_model, step_spec
from nntile_py.graph.declared import random_inputs


def contestant(name: str, o: dict[str, Any]) -> tuple[Step, dict[str, Any]]:
    """Our side, or `torch_eager` or `torch_compile`."""
    config = load(o["config"], o["sets"])
    return _ours(config) if name == "nntile" else _torch(config, name == "torch_compile")


def _inputs(config: RunConfig) -> dict[str, np.ndarray[Any, Any]]:
    rows = config.train.batch * config.train.grad_accumulation
    return random_inputs(step_spec(config).trace()[0], rows, config.seed)


def _ours(config: RunConfig) -> tuple[Step, dict[str, Any]]:
    from nntile_py.execution.runtime import Runtime
    from nntile_py.training.trainer import Trainer

    Runtime(**runtime_options(config.runtime.model_dump())).__enter__()  # for as long as the process lives
    trainer = Trainer.of_spec(step_spec(config, build_model(config)), seed=config.seed)
    inputs = _inputs(config)

    def run(n: int) -> list[float]:
        return [pending.result().loss for pending in [trainer.submit(inputs) for _ in range(n)]]

    return run, {"tasks": trainer.tasks_per_step, "flop": trainer.flop_per_step}


def _torch(config: RunConfig, compiled: bool) -> tuple[Step, dict[str, Any]]:
    import torch

    how, device = config.optimizer, torch.device("cuda" if config.runtime.cuda else "cpu")
    torch.set_float32_matmul_precision("high" if config.precision in ("bf16", "tf32") else "highest")
    model = build_model(config).to_hf().to(device).train()
    if hasattr(model.config, "use_cache"):  # keys and values for generation, of no use here
        model.config.use_cache = False
    betas = (how.betas[0], how.betas[1])
    optimizer = torch.optim.AdamW(
        model.parameters(), how.lr, betas=betas, eps=how.eps, weight_decay=how.weight_decay, fused=True
    )
    forward = torch.compile(model) if compiled else model
    inputs = {name: torch.from_numpy(value).to(device) for name, value in _inputs(config).items()}
    parts = [
        {name: value[k * config.train.batch : (k + 1) * config.train.batch] for name, value in inputs.items()}
        for k in range(config.train.grad_accumulation)
    ]

    def run(n: int) -> list[float]:
        losses = []
        for _ in range(n):
            total = torch.zeros((), device=device)
            for part in parts:
                with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16"):
                    loss = forward(**part)
                (loss.loss / len(parts)).backward()
                total += loss.loss.detach() / len(parts)
            if how.clip_grad_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), how.clip_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(total)
        return torch.stack(losses).tolist()

    return run, {}
