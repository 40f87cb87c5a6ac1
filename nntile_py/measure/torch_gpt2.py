"""GPT-2 in plain PyTorch, as nanoGPT writes it, on one GPU or several: eager, compiled, DDP, FSDP2.

Attention is scaled_dot_product_attention; the head is tied; labels are shifted before the measurement. FSDP2 follows
torchtitan: each block is compiled, then sharded; weights and activations are bf16, shards fp32, gradients are reduced
in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from nntile_py.config.builders import build_model
from nntile_py.config.run_config import RunConfig
from nntile_py.graph.initial_weights import DrawnWeights
from nntile_py.measure.contestants import world_size
from nntile_py.measure.torch_peers import Step, compiled, replicated, torch_device, torch_dtype, trained
from nntile_py.measure.workload_inputs import Array
from nntile_py.tasks.cross_entropy import IGNORED


class PlainBlock(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.heads = c.heads
        self.ln_1, self.ln_2 = nn.LayerNorm(c.embed), nn.LayerNorm(c.embed)
        self.c_attn, self.c_proj = nn.Linear(c.embed, 3 * c.embed), nn.Linear(c.embed, c.embed)
        self.c_fc, self.mlp_proj = nn.Linear(c.embed, c.ffn), nn.Linear(c.ffn, c.embed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, e = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).split(e, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, e)
        x = x + self.c_proj(y)
        y = F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh")
        return torch.add(x, self.mlp_proj(y))


def head_loss(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, scale: float) -> torch.Tensor:
    logits = F.linear(x, weight)
    flat = logits.view(-1, logits.size(-1)).float()
    return F.cross_entropy(flat, labels.view(-1), ignore_index=IGNORED, reduction="sum") * scale


class PlainGPT2(nn.Module):
    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        c = config.model
        self.wte, self.wpe = nn.Embedding(c.vocab, c.embed), nn.Embedding(c.positions, c.embed)
        self.h = nn.ModuleList(PlainBlock(c) for _ in range(c.layers))
        self.ln_f = nn.LayerNorm(c.embed)
        self.register_buffer("positions", torch.arange(config.train.seq))
        self.loss = head_loss

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, scale: float) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(self.positions)
        for block in self.h:
            x = block(x)
        return self.loss(self.ln_f(x), self.wte.weight, labels, scale)

    def load(self, values: Iterable[tuple[str, Array]], copy: Callable[..., Any] = torch.Tensor.copy_) -> None:
        """Copy weights into the model; their names are those of transformers, which stores matrices transposed.

        The model's own names may have torch.compile's prefix `_orig_mod.`.

        Args:
            copy: copies the second tensor into the first.
        """
        own = {name.replace("_orig_mod.", ""): value for name, value in self.named_parameters()}  # of torch.compile
        with torch.no_grad():
            for name, value in values:
                short = name.removeprefix("transformer.").replace("attn.c_", "c_").replace("mlp.c_proj", "mlp_proj")
                short = short.replace("mlp.c_fc", "c_fc")
                matrix = value.ndim == 2 and not short.startswith("w")
                tensor = torch.from_numpy(value)
                copy(own.pop(short), tensor.t() if matrix else tensor)
        assert not own, list(own)


def start_weights(config: RunConfig) -> Iterator[tuple[str, Array]]:
    """Yield name and value of each weight that nntile_py starts from; initial weights are computed one at a time."""
    model = build_model(config)
    if config.model.from_ is not None:
        yield from model.weights.items()
    else:
        yield from DrawnWeights(model.params(), config.seed).items()


def shifted(config: RunConfig, arrays: Mapping[str, Array], rank: int, world: int, device: Any) -> tuple[Any, ...]:
    """Return a rank's token ids, its shifted labels, and the factor of its sum of losses.

    With this factor, the mean over the ranks is the mean loss of all labels."""
    ids, labels = arrays["input_ids"], np.full_like(arrays["labels"], IGNORED)
    labels[:, :-1] = arrays["labels"][:, 1:]
    scale = world / max(int((labels != IGNORED).sum()), 1)
    rows = np.array_split(np.arange(len(ids)), world)[rank]
    return *(torch.from_numpy(np.ascontiguousarray(array[rows])).to(device) for array in (ids, labels)), scale


def loaded_gpt2(config: RunConfig, device: torch.device) -> PlainGPT2:
    """Return the model with the weights that nntile_py starts from."""
    with device:
        model = PlainGPT2(config)
    model.load(start_weights(config))
    return model


def torch_gpt2(config: RunConfig, arrays: Mapping[str, Array], name: str) -> Step:
    """Return a function that runs the training steps of torch_eager, torch_compile or torch_graphs on one device."""
    device = torch_device(config)
    model = loaded_gpt2(config, device)
    forward = compiled(model, name)
    return trained(config, model, lambda part: forward(*part), [shifted(config, arrays, 0, 1, device)])


def ranked_gpt2(config: RunConfig, arrays: Mapping[str, Array], name: str, rank: int, device: Any) -> Step:
    """Return a function that runs a rank's training steps by DDP or FSDP2. The process group must be joined before."""
    world = world_size(config)
    forward: Any
    if name == "ddp":
        # torch.compile cuts the graph at DDP's buckets.
        forward = torch.compile(replicated(loaded_gpt2(config, device), device))
    else:
        forward = _fsdp(config, device, world, offload=name == "fsdp2_offload")
    part = shifted(config, arrays, rank, world, device)
    return trained(config, forward, lambda part: forward(*part), [part], autocast=name == "ddp")


def _fsdp(config: RunConfig, device: torch.device, world: int, *, offload: bool) -> nn.Module:
    """Return the sharded model. Weights are initialised one at a time, so that memory never holds all of them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    with torch.device("meta"):
        model = PlainGPT2(config)
    mesh = init_device_mesh(device.type, (world,))
    low = torch_dtype(config.precision) != torch.float32
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if low else MixedPrecisionPolicy()
    where = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    for number, block in enumerate(model.h):
        compiled: Any = torch.compile(block)
        model.h[number] = compiled
        fully_shard(compiled, mesh=mesh, mp_policy=policy, offload_policy=where)
    model.loss = torch.compile(head_loss)
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=where)
    model.to_empty(device="cpu" if offload else device)
    model.positions = torch.arange(config.train.seq, device=device)

    def copy(shard: Any, value: torch.Tensor) -> None:
        parts = value.chunk(world)
        if dist.get_rank() < len(parts):
            shard.to_local().copy_(parts[dist.get_rank()])

    model.load(start_weights(config), copy)
    return model
