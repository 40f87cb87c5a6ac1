"""GPT-2 in PyTorch on a GPU, as `nntile bench step --cuda 1` times it: bf16 autocast, fp32 master weights, fused AdamW.

The recipe of nanoGPT: scaled_dot_product_attention, tied head, cross-entropy of the flattened logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nntile_py.measure.common import CLIP, GPU_BETAS, GPU_LR, WEIGHT_DECAY, Step, batch, limit_memory, weights


class Block(nn.Module):
    def __init__(self, embed: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(embed), nn.LayerNorm(embed)
        self.c_attn, self.c_proj = nn.Linear(embed, 3 * embed), nn.Linear(embed, embed)
        self.c_fc, self.mlp_proj = nn.Linear(embed, 4 * embed), nn.Linear(4 * embed, embed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, e = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).split(e, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, e)
        x = x + self.c_proj(y)
        y = F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh")
        return torch.add(x, self.mlp_proj(y))


def head_loss(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = F.linear(x, weight)
    return F.cross_entropy(logits.view(-1, logits.size(-1)).float(), labels.view(-1), ignore_index=-100)


class Model(nn.Module):
    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(o["vocab"], o["embed"]), nn.Embedding(o["seq"], o["embed"])
        self.h = nn.ModuleList(Block(o["embed"], o["heads"]) for _ in range(o["layers"]))
        self.ln_f = nn.LayerNorm(o["embed"])
        self.register_buffer("positions", torch.arange(o["seq"]))
        self.loss = head_loss

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(self.positions)
        for block in self.h:
            x = block(x)
        return self.loss(self.ln_f(x), self.wte.weight, labels)

    def load(self, values: Iterable[tuple[str, torch.Tensor]], copy: Callable[..., Any] = torch.Tensor.copy_) -> None:
        """Weights under transformers' names, whose matrices are stored transposed."""
        own = {name.replace("_orig_mod.", ""): value for name, value in self.named_parameters()}  # of torch.compile
        with torch.no_grad():
            for name, value in values:
                short = name.removeprefix("transformer.").replace("attn.c_", "c_").replace("mlp.c_proj", "mlp_proj")
                short = short.replace("mlp.c_fc", "c_fc")
                matrix = value.dim() == 2 and not short.startswith("w")
                copy(own.pop(short), value.t() if matrix else value)
        assert not own, list(own)


def torch_on_gpu(o: dict[str, Any], compiled: bool) -> tuple[Step, dict[str, Any]]:
    limit_memory(o)
    torch.set_float32_matmul_precision("high")
    with torch.device("cuda"):
        model = Model(o)
    model.load(weights(o))
    optimizer = torch.optim.AdamW(model.parameters(), GPU_LR, betas=GPU_BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    forward = torch.compile(model) if compiled else model
    ids = torch.from_numpy(batch(o)).cuda()
    low = o["dtype"] == "bf16"

    def run(n: int) -> list[float]:
        losses = []
        for _ in range(n):
            with torch.autocast("cuda", torch.bfloat16, enabled=low):
                loss = forward(ids, ids)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
        return torch.stack(losses).tolist()

    return run, {}
