"""What the contestants of `nntile bench step` share: the recipe, the batch, the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nntile_py.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from nntile_py.config.run_config import RunConfig

RESERVE = 2**30  # bytes of a GPU that ours leaves to kernels' workspaces, where its memory is limited
LR, WEIGHT_DECAY, CLIP = 1e-3, 0.1, 1.0
GPU_LR, GPU_BETAS = 3e-4, (0.9, 0.95)  # larger models
Step = Callable[[int], list[float]]  # runs n steps, returns their losses


def shape(o: dict[str, Any]) -> Any:
    """The GPT-2 that the options describe."""
    from nntile_py.models.gpt2 import GPT2Config

    sizes = {name: o[name] for name in ("layers", "embed", "heads", "vocab", "attention") if name in o}
    return GPT2Config(**sizes, positions=o["seq"])


def batch(o: dict[str, Any]) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, o["vocab"], (o["batch"], o["seq"]))


def weights(o: dict[str, Any], device: Any = "cuda") -> Iterator[tuple[str, Any]]:
    """(name in transformers, tensor), one after the other, the same in each process: GPT-2's initialisation."""
    import torch

    from nntile_py.graph.params import Normal
    from nntile_py.models.gpt2 import GPT2

    generator = torch.Generator(device).manual_seed(0)
    inits = {source.weight: (source.shape, p.init) for p in GPT2(shape(o)).params() for source in p.sources}
    for name, (size, init) in inits.items():
        value = torch.empty(size, device=device)
        if isinstance(init, Normal):
            yield name, value.normal_(0, init.std, generator=generator)
        else:
            yield name, value.fill_(init.value)


def torch_dtype(precision: str) -> Any:
    """Of PyTorch's activations in a precision: float32 where there are no others."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)


def limit_memory(o: dict[str, Any], device: int | None = None) -> None:
    """What ATen's allocator may take of a GPU, default the current one."""
    import torch

    if o["cuda_memory"]:
        device = torch.cuda.current_device() if device is None else device
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, o["cuda_memory"] * 2**30 / total), device)


def torch_device(config: RunConfig) -> torch.device:
    """Where PyTorch runs what a config says, with its threads and precision; forgets what was compiled before."""
    import torch

    torch._dynamo.reset()
    device = torch.device("cuda" if config.runtime.cuda else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(config.workers)
    torch.set_float32_matmul_precision("highest" if config.precision in ("fp32", "fp64") else "high")
    return device


def trained(config: RunConfig, model: Any, loss_of: Callable[[Any], Any], parts: Sequence[Any]) -> Step:
    """Training steps, each the mean of the losses of its parts."""
    import torch

    how, device, dtype = config.optimizer, next(model.parameters()).device, torch_dtype(config.precision)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    settings = {name: value for name, value in how.settings.items() if name != "decay"}
    optimizer = getattr(torch.optim, how.method.__name__)(model.parameters(), **settings, fused=True)

    def run(n: int) -> list[float]:
        losses = []
        for _ in range(n):
            total = torch.zeros((), device=device)
            for part in parts:
                with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                    loss = loss_of(part)
                scaler.scale(loss / len(parts)).backward()
                total += loss.detach() / len(parts)
            if how.clip_grad_norm:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), how.clip_grad_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            losses.append(total)
        return torch.stack(losses).tolist()

    return run


def parse_tiles(text: str) -> dict[str, int]:
    """`batch=2,embed=96` as a dictionary; empty: uncut."""
    from nntile_py.tiles import Tiling

    result = {}
    for item in filter(None, text.split(",")):
        axis, _, size = item.partition("=")
        if not size.isdigit():
            raise ConfigError(f"--tiles: {item!r} is not allowed; write axis=size,axis=size")
        result[axis] = int(size)
    return Tiling(result).tiles
