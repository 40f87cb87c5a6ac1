"""Contestants of `nntile bench step CONFIG`: a config's model here, and what transformers makes of it in PyTorch.

Both sides have the same start weights, inputs, precision and optimizer; ours is packed if train.pack says so, PyTorch's
inputs are padded, with their attention_mask. PyTorch trains under bf16 autocast, with
attention by scaled_dot_product_attention and a fused optimizer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nntile_py.bench.common import Step
from nntile_py.config.run import RunConfig, load, runtime_options
from nntile_py.config.spec import build_model, predicted, step_spec


def contestant(name: str, o: dict[str, Any]) -> tuple[Step, dict[str, Any]]:
    """Our side, or `torch_eager` or `torch_compile`."""
    config = load(o["config"], o["sets"])
    rows, inference = config.train.batch * config.train.grad_accumulation, o.get("inference", False)
    inputs = step_spec(config).random_inputs(rows, config.seed, o.get("alpha", 1.0), predicted(config))
    if name == "nntile":
        run, facts = _ours(config, inputs, inference)
    else:
        run, facts = _torch(config, inputs, name == "torch_compile", inference)
    real = inputs.get("attention_mask")
    return run, facts | {"tokens": rows * config.train.seq if real is None else int(real.sum())}


def _ours(
    config: RunConfig, inputs: dict[str, np.ndarray[Any, Any]], inference: bool
) -> tuple[Step, dict[str, Any]]:
    from nntile_py.execution.runtime import Runtime
    from nntile_py.training.trainer import Trainer

    Runtime(**runtime_options(config.runtime.model_dump())).__enter__()  # for as long as the process lives
    trainer = Trainer.of_spec(step_spec(config, build_model(config)), seed=config.seed)

    def run(n: int) -> list[float]:
        if inference:
            return [trainer.evaluate(inputs) for _ in range(n)]
        return [pending.result().loss for pending in [trainer.submit(inputs) for _ in range(n)]]

    return run, {"tasks": trainer.tasks_per_step, "flop": trainer.flop_per_step}


def _torch(
    config: RunConfig, arrays: dict[str, np.ndarray[Any, Any]], compiled: bool, inference: bool
) -> tuple[Step, dict[str, Any]]:
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
    inputs = {name: torch.from_numpy(value).to(device) for name, value in arrays.items()}
    parts = [
        {name: value[k * config.train.batch : (k + 1) * config.train.batch] for name, value in inputs.items()}
        for k in range(config.train.grad_accumulation)
    ]

    def look(n: int) -> list[float]:
        model.eval()
        with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16"):
            return torch.stack([forward(**inputs).loss for _ in range(n)]).tolist()

    def run(n: int) -> list[float]:
        if inference:
            return look(n)
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
