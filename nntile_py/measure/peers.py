"""GPT-2 in PyTorch on several GPUs, a process for each: DDP, FSDP2, FSDP2 with its parameters in main memory.

The recipe of torch_gpt2.py, each rank with its part of the batch. FSDP2 as in torchtitan: each block compiled, then
sharded; bf16 weights and activations, fp32 shards, gradients reduced in fp32. On the CPU (gloo, fp32) for tests.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nntile_py.measure.common import CLIP, GPU_BETAS, GPU_LR, WEIGHT_DECAY, Step, batch, limit_memory, weights
from nntile_py.measure.peer_process import processes
from nntile_py.measure.torch_gpt2 import Model, head_loss


def peer(name: str, o: dict[str, Any], rank: int, port: int) -> tuple[Step, dict[str, Any]]:
    """A rank of a contestant."""
    world, low, offload = processes(o), bool(o["cuda"]) and o["dtype"] == "bf16", name == "fsdp2_offload"
    device = joined(o, rank, port, offload=offload)
    forward = ddp(o, device) if name == "ddp" else fsdp(o, device, world, low, offload)
    parameters = list(forward.parameters())
    optimizer = torch.optim.AdamW(parameters, GPU_LR, betas=GPU_BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    ids = torch.from_numpy(batch(o)).chunk(world)[rank].to(device)

    def run(n: int) -> list[float]:
        losses = []
        for _ in range(n):
            with torch.autocast(device.type, torch.bfloat16, enabled=low and name == "ddp"):
                loss = forward(ids, ids)
            loss.backward()
            clip(parameters)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
        mean = torch.stack(losses) / world
        dist.all_reduce(mean)
        return [float(x) for x in mean.tolist()]

    return run, {"processes": world}


def joined(o: dict[str, Any], rank: int, port: int, *, offload: bool = False) -> torch.device:
    """This rank's device, in a group with the others."""
    world = processes(o)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, o["cpus"] // world)))  # else all cores each
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else it looks the machine's own name up
    if o["cuda"]:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        limit_memory(o)
        torch.set_float32_matmul_precision("high")
        backend = "cpu:gloo,cuda:nccl" if offload else "nccl"  # norms of gradients that are in main memory
    else:
        device, backend = torch.device("cpu"), "gloo"
        torch.set_num_threads(max(1, o["cpus"] // world))
    dist.init_process_group(
        backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world,
        timeout=timedelta(seconds=o["time_limit"]),
    )  # fmt: skip
    return device


def replicated(model: nn.Module, device: torch.device) -> nn.Module:
    """The model with gradients that are the mean of all ranks'."""
    return DistributedDataParallel(
        model, device_ids=[device.index] if device.type == "cuda" else None, broadcast_buffers=False,
        gradient_as_bucket_view=True,
    )  # fmt: skip


def ddp(o: dict[str, Any], device: torch.device) -> nn.Module:
    with device:
        model = Model(o)
    model.load(weights(o, device))
    compiled: Any = torch.compile(replicated(model, device))  # cuts the graph where DDP's buckets are full
    return cast(nn.Module, compiled)


def fsdp(o: dict[str, Any], device: torch.device, world: int, low: bool, offload: bool) -> nn.Module:
    """Nothing is ever whole but one weight at a time: not at the start either."""
    with torch.device("meta"):
        model = Model(o)
    mesh = init_device_mesh(device.type, (world,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if low else MixedPrecisionPolicy()
    where = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    for number, block in enumerate(model.h):
        compiled: Any = torch.compile(block)
        model.h[number] = compiled
        fully_shard(compiled, mesh=mesh, mp_policy=policy, offload_policy=where)
    model.loss = torch.compile(head_loss)
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=where)
    model.to_empty(device="cpu" if offload else device)
    model.positions = torch.arange(o["seq"], device=device)

    def copy(shard: DTensor, value: torch.Tensor) -> None:
        parts = value.chunk(world)
        if mesh.get_local_rank() < len(parts):
            shard.to_local().copy_(parts[mesh.get_local_rank()])

    model.load(weights(o, device), copy)
    return model


def clip(parameters: list[nn.Parameter]) -> None:
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    torch.nn.utils.clip_grads_with_norm_(parameters, CLIP, whole)
