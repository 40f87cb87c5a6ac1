"""PyTorch's encoder layer, or multi-head attention, of a config's sizes: forward, backward or both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nntile_py.analysis.workloads import Phase
from nntile_py.config.run_config import RunConfig
from nntile_py.errors import ConfigError
from nntile_py.measure.torch_peers import CapturedCall, torch_device, torch_dtype


def torch_layer(
    config: RunConfig, work: str, phase: Phase, name: str,
    *, captured: bool = False, autotune: bool = False, stacked: bool = False,
) -> Callable[[int], None]:  # fmt: skip
    """Return a function that runs an encoder layer or multi-head attention in training mode and the config's precision.

    The backward pass computes gradients of weights and x. Attention is scaled_dot_product_attention, which stores no
    scores.

    Args:
        work: encoder or mha.
        phase: forward, backward, or all: both.
        name: torch_eager or torch_compile.
        captured: Launch the phase as one CUDA graph.
        autotune: Use torch.compile's mode max-autotune.
        stacked: Use layers with one product for Q, K and V, instead of the layers of torch.nn.

    Raises:
        ConfigError: The model lacks the sizes of a layer; `captured` without a GPU.
    """
    c: Any = config.model
    _check(config, work, captured)
    device = torch_device(config)
    functorch: Any = torch._functorch
    functorch.config.donated_buffer = False  # keep what forward saved: backward runs repeatedly
    dtype = torch_dtype(config.precision)
    with device:
        module = torch_module(c, work, stacked).to(dtype).train()
    mode = "max-autotune-no-cudagraphs" if autotune else None
    forward = torch.compile(module, mode=mode, dynamic=False) if name == "torch_compile" else module
    shape = config.train.batch, config.train.seq, c.embed
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    dy, wanted = torch.randn_like(x), [x, *module.parameters()]

    def gradients(y: Any) -> None:
        torch.autograd.grad(y, wanted, dy, retain_graph=phase == "backward")

    if captured:
        replay = _captured(lambda: forward(x), gradients, phase)

        def once(_: Any = (wanted, dy)) -> None:  # a graph holds only addresses: `_` keeps the tensors
            replay()
    else:
        kept = forward(x) if phase == "backward" else None

        def once(_: Any = None) -> None:
            y = forward(x) if phase != "backward" else kept
            if phase != "forward":
                gradients(y)

    def run(count: int) -> None:
        for _ in range(count):
            once()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return run


def _check(config: RunConfig, work: str, captured: bool) -> None:
    """Raise ConfigError if PyTorch cannot compute the work of this config."""
    c = config.model
    if missing := {"embed", "heads", "ffn", "dropout"} - type(c).model_fields.keys():
        raise ConfigError(f"model.type: got {c.type}, without {min(missing)}; allowed for {work} in PyTorch: encoder")
    if captured and not config.runtime.cuda:
        raise ConfigError("measure.captured: got true; allowed for PyTorch on CPU workers: null")


def _captured(forward: Callable[[], Any], gradients: Callable[[Any], None], phase: Phase) -> Callable[[], Any]:
    """Return a function that launches the phase as one CUDA graph.

    For a backward pass, this function first runs the forward pass once, as another CUDA graph.
    """

    def both() -> Any:
        y = forward()
        gradients(y)
        return y

    first = CapturedCall(both if phase == "all" else forward, warm_up=both)
    if phase != "backward":
        return first
    second = CapturedCall(lambda: gradients(first.result), pool=first.graph.pool())
    first()

    def replay(of: Any = (first, second)) -> None:  # `of` keeps both graphs: the second reads results of the first
        of[1]()

    return replay


def torch_module(c: Any, work: str, stacked: bool) -> Any:
    """Return the PyTorch module of an encoder layer, or of attention, with the sizes of the model config `c`."""
    if work == "mha":
        return StackedAttention(c) if stacked else UnweightedAttention(c)
    if stacked:
        return StackedLayer(c)
    return nn.TransformerEncoderLayer(c.embed, c.heads, c.ffn, c.dropout, batch_first=True)


class UnweightedAttention(nn.Module):
    """Self-attention of torch.nn that returns no probabilities."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(c.embed, c.heads, c.attention_dropout, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.attention(x, x, x, need_weights=False)[0]


class StackedAttention(nn.Module):
    """Self-attention with one product for Q, K and V."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.heads, self.dropout = c.heads, c.attention_dropout
        self.project, self.out = nn.Linear(c.embed, 3 * c.embed), nn.Linear(c.embed, c.embed)

    def forward(self, x: torch.Tensor) -> Any:
        parts = self.project(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        q, k, v = parts.unbind(2)  # [batch, heads, seq, head_dim]
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        return self.out(y.transpose(1, 2).flatten(2))


class StackedLayer(nn.Module):
    """Post-norm encoder layer of a Transformer with StackedAttention and ReLU."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.attention, self.dropout = StackedAttention(c), nn.Dropout(c.dropout)
        self.up, self.down = nn.Linear(c.embed, c.ffn), nn.Linear(c.ffn, c.embed)
        self.norms = nn.ModuleList(nn.LayerNorm(c.embed) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.norms[0](x + self.dropout(self.attention(x)))
        inner = self.dropout(torch.relu(self.up(x)))
        return self.norms[1](x + self.dropout(self.down(inner)))
