"""PyTorch's own encoder layer, or multi-head attention, of a config's sizes: forward, backward alone, or both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nntile_py.analysis.workloads import Phase
from nntile_py.config.run import RunConfig
from nntile_py.errors import ConfigError

WORKS = ("encoder", "mha")


def torch_layer(config: RunConfig, work: str, phase: Phase, name: str) -> Callable[[int], None]:
    """What runs torch.nn.TransformerEncoderLayer or MultiheadAttention so many times; name: torch_eager, torch_compile.

    As while training, with dropout, in the config's precision; the backward pass makes the gradients of weights and x.
    Attention is scaled_dot_product_attention, which stores no scores. ConfigError: a model of other sizes' names."""
    import torch

    c: Any = config.model
    if missing := {"embed", "heads", "ffn", "dropout"} - type(c).model_fields.keys():
        raise ConfigError(f"model.type: got {c.type}, without {min(missing)}; allowed for {work} in PyTorch: encoder")
    torch._dynamo.reset()  # of what the process compiled before
    functorch: Any = torch._functorch
    functorch.config.donated_buffer = False  # the backward pass is run again and again
    device = torch.device("cuda" if config.runtime.cuda else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(config.workers)
    torch.set_float32_matmul_precision("high" if config.precision in ("bf16", "tf32") else "highest")
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    options: dict[str, Any] = {"batch_first": True, "device": device, "dtype": dtype}
    module: Any
    if work == "encoder":
        module = torch.nn.TransformerEncoderLayer(c.embed, c.heads, c.ffn, c.dropout, **options)
    else:
        module = _self_attention(torch.nn.MultiheadAttention(c.embed, c.heads, c.attention_dropout, **options))
    forward = torch.compile(module.train()) if name == "torch_compile" else module.train()
    shape = config.train.batch, config.train.seq, c.embed
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    dy, wanted = torch.randn_like(x), [x, *module.parameters()]

    def gradients(y: Any) -> None:
        torch.autograd.grad(y, wanted, dy, retain_graph=phase == "backward")

    kept = forward(x) if phase == "backward" else None

    def run(count: int) -> None:
        for _ in range(count):
            y = forward(x) if phase != "backward" else kept
            if phase != "forward":
                gradients(y)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return run


def _self_attention(attention: Any) -> Any:
    """Of one input, without the probabilities."""
    import torch

    class SelfAttention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: Any) -> Any:
            return self.attention(x, x, x, need_weights=False)[0]

    return SelfAttention()
