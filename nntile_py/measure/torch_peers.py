"""Common parts of PyTorch's contestants: training steps, devices, CUDA graphs, ranks, and the models of transformers.

nntile_py and PyTorch have equal initial weights, inputs, precision and optimizer. PyTorch trains under bf16 or fp16
autocast with a fused optimizer; its forward passes have weights of this dtype. Attention is
scaled_dot_product_attention.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from nntile_py.analysis.workloads import Work
from nntile_py.config.builders import build_model
from nntile_py.config.run_config import RunConfig
from nntile_py.measure.contestants import COMPILE_MODES, world_size
from nntile_py.measure.workload_inputs import Array
from nntile_py.system.load import cores

Step = Callable[[int], list[float]]  # runs n steps; returns their losses
CONNECT_LIMIT = 600.0  # seconds for ranks to connect


# -- training steps


def torch_dtype(precision: str) -> Any:
    """Return the dtype of PyTorch's activations under a precision: bfloat16 (also for fp8), float16, else float32."""
    return {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)


def torch_device(config: RunConfig) -> Any:
    """Return the config's torch device. Also set PyTorch's threads and precision, and drop earlier compilations."""
    torch._dynamo.reset()
    device = torch.device("cuda" if config.runtime.cuda else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(config.workers)
    torch.set_float32_matmul_precision("highest" if config.precision in ("fp32", "fp64") else "high")
    return device


def trained(
    config: RunConfig, model: Any, loss_of: Callable[[Any], Any], parts: Sequence[Any], *, autocast: bool = True
) -> Step:
    """Return a function that runs training steps: forward, backward, clipping, optimizer.

    Args:
        loss_of: returns the loss of a micro-batch.
        parts: micro-batches of a step; the step's loss is the mean of the micro-batches' losses.
        autocast: run the forward pass under autocast.
    """
    how, dtype, parameters = config.optimizer, torch_dtype(config.precision), list(model.parameters())
    device = torch.device("cuda" if config.runtime.cuda else "cpu")
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    settings = {name: value for name, value in how.settings.items() if name not in ("decay", "groups")}
    optimizer = getattr(torch.optim, how.method.__name__)(parameters, **settings, fused=True)

    def run(n: int) -> list[float]:
        losses = []
        for _ in range(n):
            total = torch.zeros((), device=device)
            for part in parts:
                with torch.autocast(device.type, dtype, enabled=autocast and dtype != torch.float32):
                    loss = loss_of(part)
                scaler.scale(loss / len(parts)).backward()
                total += loss.detach() / len(parts)
            if how.clip_grad_norm:
                scaler.unscale_(optimizer)
                clip_gradients(parameters, how.clip_grad_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            losses.append(total)
        return torch.stack(losses).tolist()

    return run


def clip_gradients(parameters: Sequence[Any], limit: float) -> None:
    """Clip the gradients to a global norm of `limit`. If gradients are sharded, the norm is that of all shards."""
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    norm: Any = get_total_norm([p.grad for p in parameters if p.grad is not None])
    clip_grads_with_norm_(parameters, limit, norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


class CapturedCall:
    """A call as one CUDA graph. Calling the object launches the graph, which overwrites `result` in place.

    Args:
        warm_up: runs before the capture; None: not needed.
        pool: memory pool of another graph, if this graph reads that graph's results; None: a pool of its own.
    """

    def __init__(self, call: Callable[[], Any], warm_up: Callable[[], Any] | None = None, pool: Any = None) -> None:
        if warm_up:  # compiles, chooses kernels and allocates workspaces before the capture
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    warm_up()
            torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.result = call()

    def __call__(self) -> Any:
        self.graph.replay()
        return self.result


# -- any model


def compiled(model: Any, name: str) -> Any:
    """Return the module as the contestant `name` runs it: compiled in a mode of torch.compile, or eager."""
    return torch.compile(model, mode=COMPILE_MODES[name]) if name in COMPILE_MODES else model


def transformers_model(config: RunConfig, arrays: Mapping[str, Array], name: str, work: Work) -> Step:
    """Return a function that runs a workload's steps with the model of Hugging Face transformers.

    Args:
        name: torch_eager, torch_compile or torch_graphs.
        work: train, inference, or attention alone.
    """
    device = torch_device(config)
    model: Any = PlainAttention() if work == "attention" else build_model(config).to_hf()
    if hasattr(getattr(model, "config", None), "use_cache"):  # keys and values for generation, not used here
        model.config.use_cache = False
    forward = compiled(model, name)
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
                output = forward(**inputs)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return n * [float(getattr(output, "loss", None) or 0.0)]

    return run


class PlainAttention(torch.nn.Module):
    """Attention of q, k, v [batch, seq, heads, head_dim]."""

    def forward(self, q: Any, k: Any, v: Any, attention_mask: Any = None) -> Any:
        mask = None if attention_mask is None else attention_mask[:, None, None].bool()
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, mask)


# -- a process for each GPU


def join_ranks(config: RunConfig, rank: int, port: int, *, offload: bool) -> Any:
    """Join the process group; return this rank's device."""
    world = world_size(config)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, cores() // world)))  # default: all cores
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # default: the address of the host name
    if config.runtime.cuda:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
        backend = "cpu:gloo,cuda:nccl" if offload else "nccl"  # gloo: norms of gradients in main memory
    else:
        device, backend = torch.device("cpu"), "gloo"
        torch.set_num_threads(max(1, config.workers // world))
    dist.init_process_group(
        backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world,
        timeout=timedelta(seconds=CONNECT_LIMIT),
    )  # fmt: skip
    return device


def replicated(model: Any, device: Any) -> Any:
    """Return the model under DDP, which averages gradients over all ranks."""
    return DistributedDataParallel(
        model, device_ids=[device.index] if device.type == "cuda" else None, broadcast_buffers=False,
        gradient_as_bucket_view=True,
    )  # fmt: skip
