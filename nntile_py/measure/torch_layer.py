"""PyTorch's encoder layer, or multi-head attention, of a config's sizes: forward, backward or both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nntile_py.analysis.workloads import Phase
from nntile_py.config.run_config import RunConfig
from nntile_py.errors import ConfigError
from nntile_py.measure.torch_peers import CapturedCall, torch_device, torch_dtype


def torch_layer(
    config: RunConfig, work: str, phase: Phase, name: str,
    *, captured: bool = False, autotune: bool = False, stacked: bool = False,
) -> Callable[[int], None]:  # fmt: skip
    """Return a run of an encoder layer or of multi-head attention.

    It trains: with dropout, in the config's precision, with gradients of weights and x. Attention is
    scaled_dot_product_attention, which stores no scores. The layers are those of torch.nn.

    Args:
        name: torch_eager or torch_compile.
        captured: Launch the phase as one CUDA graph.
        autotune: torch.compile's mode max-autotune.
        stacked: Use layers with one product for Q, K and V instead of those of torch.nn.

    Raises:
        ConfigError: The model lacks the sizes of a layer; `captured` without a GPU.
    """
    import torch

    c: Any = config.model
    if missing := {"embed", "heads", "ffn", "dropout"} - type(c).model_fields.keys():
        raise ConfigError(f"model.type: got {c.type}, without {min(missing)}; allowed for {work} in PyTorch: encoder")
    if captured and not config.runtime.cuda:
        raise ConfigError("measure.captured: got true; allowed for PyTorch on CPU workers: null")
    device = torch_device(config)
    functorch: Any = torch._functorch
    functorch.config.donated_buffer = False  # the backward pass runs repeatedly
    dtype = torch_dtype(config.precision)
    module = torch_module(c, work, stacked, {"device": device, "dtype": dtype}).train()
    mode = "max-autotune-no-cudagraphs" if autotune else None
    forward = torch.compile(module, mode=mode, dynamic=False) if name == "torch_compile" else module
    shape = config.train.batch, config.train.seq, c.embed
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    dy, wanted = torch.randn_like(x), [x, *module.parameters()]

    def gradients(y: Any) -> None:
        torch.autograd.grad(y, wanted, dy, retain_graph=phase == "backward")

    if captured:
        replay = _captured(lambda: forward(x), gradients, phase)

        def once(_: Any = (wanted, dy)) -> None:  # a graph holds only addresses: the tensors must outlive it
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


def _captured(forward: Callable[[], Any], gradients: Callable[[Any], None], phase: Phase) -> Callable[[], Any]:
    """Return the phase as one CUDA graph; a backward pass is that of a forward pass in a graph of its own."""

    def both() -> Any:
        y = forward()
        gradients(y)
        return y

    first = CapturedCall(both if phase == "all" else forward, warm_up=both)
    if phase != "backward":
        return first
    second = CapturedCall(lambda: gradients(first.result), pool=first.graph.pool())
    first()

    def replay(of: Any = (first, second)) -> None:  # keeps both: the second graph reads the results of the first
        of[1]()

    return replay


def torch_module(c: Any, work: str, stacked: bool, options: dict[str, Any]) -> Any:
    """Return the encoder layer, or the attention, of a model's sizes; options: device and dtype of the parameters."""
    import torch

    if stacked:
        attention = _stacked(c, options)
        return attention if work == "mha" else _layer(c, attention, options)
    if work == "encoder":
        return torch.nn.TransformerEncoderLayer(c.embed, c.heads, c.ffn, c.dropout, batch_first=True, **options)
    attention = torch.nn.MultiheadAttention(c.embed, c.heads, c.attention_dropout, batch_first=True, **options)
    return _self_attention(attention)


def _stacked(c: Any, options: dict[str, Any]) -> Any:
    """Return multi-head attention of one input, with one product for Q, K and V."""
    import torch

    class StackedAttention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(c.embed, 3 * c.embed, **options)
            self.out = torch.nn.Linear(c.embed, c.embed, **options)

        def forward(self, x: Any) -> Any:
            parts = self.project(x).unflatten(-1, (3, c.heads, -1)).transpose(1, 3)
            q, k, v = parts.unbind(2)  # [batch, heads, seq, head_dim]
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=c.attention_dropout)
            return self.out(y.transpose(1, 2).flatten(2))

    return StackedAttention()


def _layer(c: Any, attention: Any, options: dict[str, Any]) -> Any:
    """Return the encoder layer around an attention, with ReLU and norms after the sums."""
    import torch

    class StackedLayer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention
            self.up = torch.nn.Linear(c.embed, c.ffn, **options)
            self.down = torch.nn.Linear(c.ffn, c.embed, **options)
            self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(c.embed, **options) for _ in range(2))
            self.dropout = torch.nn.Dropout(c.dropout)

        def forward(self, x: Any) -> Any:
            x = self.norms[0](x + self.dropout(self.attention(x)))
            inner = self.dropout(torch.relu(self.up(x)))
            return self.norms[1](x + self.dropout(self.down(inner)))

    return StackedLayer()


def _self_attention(attention: Any) -> Any:
    """Return the attention of one input to itself, without the probabilities."""
    import torch

    class UnweightedAttention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: Any) -> Any:
            return self.attention(x, x, x, need_weights=False)[0]

    return UnweightedAttention()
