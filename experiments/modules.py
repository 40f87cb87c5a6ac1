"""PyTorch modules in plain torch, as users write them, for captured.py: GPT-2, Qwen 2.5, ViT, an MLP-mixer, a U-Net."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Made = tuple[nn.Module, dict[str, torch.Tensor], Callable[[Any, Any], torch.Tensor]]  # module, batch, loss


def classification(output: torch.Tensor, inputs: Any) -> torch.Tensor:
    """Return the cross-entropy of outputs [rows, classes, ...]."""
    return functional.cross_entropy(output.float(), inputs["labels"])


class Layer(nn.Module):
    """A transformer layer with its norms first (GPT-2, ViT)."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, seq, width = x.shape
        parts = self.qkv(self.first(x)).split(width, 2)
        q, k, v = (part.view(rows, seq, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).reshape(rows, seq, width))
        return x + self.down(functional.gelu(self.up(self.second(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019) with tied embeddings."""

    def __init__(self, layers: int, width: int, heads: int, vocab: int, seq: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(seq, width)
        self.layers = nn.ModuleList(Layer(width, heads, True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits.flatten(0, 1)


def next_token(module: nn.Module, rows: int, seq: int, vocab: int) -> Made:
    """Return the module with random weights, a batch of random tokens, and the function of the next-token loss."""

    def loss(output: torch.Tensor, inputs: Any) -> torch.Tensor:
        return functional.cross_entropy(output.float(), inputs["labels"].view(-1))

    ids = torch.randint(0, vocab, (rows, seq))
    for value in module.parameters():
        if value.dim() > 1:
            nn.init.normal_(value, 0, 0.02)
    return module, {"input_ids": ids, "labels": ids.roll(-1, 1)}, loss


def gpt2(rows: int = 16, seq: int = 1024, layers: int = 12, width: int = 768, vocab: int = 50304) -> Made:
    return next_token(GPT(layers, width, width // 64, vocab, seq), rows, seq, vocab)


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32 (Zhang and Sennrich 2019)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


class QwenLayer(nn.Module):
    """A layer of Qwen 2.5: grouped heads with biases, rotary positions, SwiGLU."""

    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.heads, self.groups, self.head = heads, groups, width // heads
        self.first, self.second = RMSNorm(width), RMSNorm(width)
        self.q = nn.Linear(width, width)
        self.k, self.v = nn.Linear(width, groups * self.head), nn.Linear(width, groups * self.head)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows, seq, width = x.shape
        y = self.first(x)
        q, k, v = (part(y).view(rows, seq, -1, self.head).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = q * cos + half_turned(q) * sin, k * cos + half_turned(k) * sin
        k, v = (part.repeat_interleave(self.heads // self.groups, 1) for part in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, seq, width))
        y = self.second(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def half_turned(x: torch.Tensor) -> torch.Tensor:
    """Return (-b, a) for the halves a and b of the last dimension."""
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


class Qwen(nn.Module):
    """Qwen 2.5 (Qwen team 2024) with tied embeddings."""

    def __init__(self, layers: int, width: int, heads: int, groups: int, inner: int, vocab: int) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(vocab, width), RMSNorm(width)
        self.layers = nn.ModuleList(QwenLayer(width, heads, groups, inner) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        self.rotary = width // heads

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        steps = torch.arange(0, self.rotary, 2, device=x.device).float() / self.rotary
        angles = torch.outer(torch.arange(input_ids.shape[1], device=x.device).float(), 1e6**-steps)
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits.flatten(0, 1)


def qwen(rows: int = 4, seq: int = 1024, sizes: tuple[int, ...] = (28, 1536, 12, 2, 8960, 151936)) -> Made:
    """Return a Qwen of `sizes`: layers, width, heads, key heads, feed-forward width, vocabulary. Default: 1.5B."""
    return next_token(Qwen(*sizes), rows, seq, sizes[-1])


class VisionTransformer(nn.Module):
    """ViT (Dosovitskiy et al. 2021) of pictures of 224 x 224 in patches of 16 x 16."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 197, width))
        self.layers = nn.ModuleList(Layer(width, heads, False) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(x.shape[0], -1, -1), x), 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        y: torch.Tensor = self.head(self.norm(x)[:, 0])
        return y


def vit_large(rows: int = 64) -> Made:
    batch = {"pixels": torch.randn(rows, 3, 224, 224), "labels": torch.randint(0, 1000, (rows,))}
    return VisionTransformer(24, 1024, 16), batch, classification


class MixerBlock(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, 256), nn.GELU(), nn.Linear(256, patches))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.first(x).transpose(1, 2)).transpose(1, 2)
        y: torch.Tensor = x + self.channels(self.second(x))
        return y


class MLPMixer(nn.Module):
    """MLP-mixer (Tolstikhin et al. 2021), S/16."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 512, 16, 16)
        self.blocks = nn.ModuleList(MixerBlock(196, 512) for _ in range(8))
        self.norm, self.head = nn.LayerNorm(512), nn.Linear(512, 1000)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.head(self.norm(x).mean(1))
        return y


def mlp_mixer(rows: int = 8) -> Made:
    batch = {"pixels": torch.randn(rows, 3, 224, 224), "labels": torch.randint(0, 1000, (rows,))}
    return MLPMixer(), batch, classification


class DoubleConvolution(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(inner, outer, 3, padding=1), nn.Conv2d(outer, outer, 3, padding=1)
        self.norm_a, self.norm_b = nn.GroupNorm(8, outer), nn.GroupNorm(8, outer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.silu(self.norm_a(self.a(x)))
        return functional.silu(self.norm_b(self.b(x)))


class UNet(nn.Module):
    """U-Net (Ronneberger et al. 2015) with group norms and three levels."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(DoubleConvolution(*sizes) for sizes in ((3, 32), (32, 64), (64, 128)))
        self.up = nn.ModuleList([nn.ConvTranspose2d(128, 64, 2, 2), nn.ConvTranspose2d(64, 32, 2, 2)])
        self.join = nn.ModuleList([DoubleConvolution(128, 64), DoubleConvolution(64, 32)])
        self.head = nn.Conv2d(32, 2, 1)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x, skips = pixels, []
        for number, layer in enumerate(self.down):
            x = layer(functional.max_pool2d(x, 2) if number else x)
            skips.append(x)
        for up, join, skip in zip(self.up, self.join, skips[1::-1], strict=True):
            x = join(torch.cat([skip, up(x)], 1))
        y: torch.Tensor = self.head(x)
        return y


def u_net(rows: int = 4) -> Made:
    batch = {"pixels": torch.randn(rows, 3, 96, 96), "labels": torch.randint(0, 2, (rows, 96, 96))}
    return UNet(), batch, classification
