"""Encoder and decoder layers of Vaswani et al. 2017, as torch.nn.TransformerEncoder and torch.nn.TransformerDecoder.

Ivanov et al. 2021 ("Data movement is all you need") measure such layers: norm after the residual, ReLU, dropout. The
input x [batch, seq, embed] holds vectors, not tokens. Labels have the same shape; the loss is the mean squared error.
Axes: batch, seq, key (positions of the encoder's output), embed, heads, head_dim, ffn.
"""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from nntile_py.graph.graph import Graph
from nntile_py.graph.initializers import Init, Normal
from nntile_py.graph.params import Batch, Traced
from nntile_py.models.base import Model
from nntile_py.models.parts import LayerConfig, dense, norm
from nntile_py.schema import BelowOne, Count, Layers, Positive, Switch
from nntile_py.tasks.activation import activation
from nntile_py.tasks.attention import attention
from nntile_py.tasks.elementwise import add, dropout, transpose
from nntile_py.tasks.mask import Mask
from nntile_py.tasks.op import Tensor
from nntile_py.tasks.squared_error import squared_error

INIT: Init = Normal(0.02)


class TransformerEncoderConfig(LayerConfig):
    type: str = "encoder"
    layers: Layers = 1
    causal: Switch = False
    """Each position attends only to itself and earlier positions."""
    dropout: BelowOne = 0.0
    """Dropout of the residual branches and after the activation."""
    activation: Literal["relu", "gelu", "gelu_new"] = "relu"
    """Activation function of the feed-forward part."""
    layer_norm_eps: Positive = 1e-5
    """Added to the variance in LayerNorm."""

    @model_validator(mode="after")
    def _fitting(self) -> TransformerEncoderConfig:
        self.check_size("embed", "heads")
        self.check_dropout()
        self.fill(ffn=4 * self.embed)
        return self


class TransformerDecoderConfig(TransformerEncoderConfig):
    type: str = "decoder"
    causal: Switch = True
    memory: Count | None = None
    """Number of positions of the encoder's output; null: `train.seq`."""


class TransformerEncoder(Model[TransformerEncoderConfig]):
    """Encoder layers: self-attention and a feed-forward part."""

    Config = TransformerEncoderConfig

    def trace(self, g: Graph, batch: Batch) -> Traced:
        x = g.input("x", {"batch": batch.size, "seq": batch.seq, "embed": self.config.embed}, None)
        x.requires_grad = True  # compute the gradient of x too, as a layer inside a model must
        return self._loss(g, self.layers(g, x))

    def layers(self, g: Graph, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Return the output of the last layer. If `memory`, an encoder's output, is given, each layer attends to it."""
        for layer in range(self.config.layers):
            here = f"layers.{layer}"
            with g.scope(f"h{layer}.attn"):
                x = self._after(g, x, self.attend(g, x, x, f"{here}.self_attn", self.config.causal), f"{here}.norm1")
            if memory:
                with g.scope(f"h{layer}.cross"):
                    y = self.attend(g, x, memory, f"{here}.multihead_attn", causal=False)
                    x = self._after(g, x, y, f"{here}.norm2")
            with g.scope(f"h{layer}.mlp"):
                x = self._after(g, x, self._mlp(g, x, here), f"{here}.norm{3 if memory else 2}")
        return x

    def _after(self, g: Graph, x: Tensor, branch: Tensor, name: str) -> Tensor:
        """Return norm(x + dropout(branch)). name: prefix of the norm's weights."""
        return norm(g, add(g, x, dropout(g, branch, self.config.dropout)), name, self.config.layer_norm_eps)

    def attend(self, g: Graph, x: Tensor, memory: Tensor, name: str, causal: bool) -> Tensor:
        """Return multi-head attention of x to `memory`, with its input and output projections.

        `memory` is x for self-attention. `name` is the prefix of the weights' names.
        """
        c, embed = self.config, {"embed": self.config.embed}
        heads, parts = {"heads": c.heads, "head_dim": c.embed // c.heads}, []
        for number, (one, source) in enumerate((("q", x), ("k", memory), ("v", memory))):
            part = (f"{name}.in_proj_weight", f"{name}.in_proj_bias", number, 3)
            y = dense(g, source, f"{name}.in_proj.{one}", embed, heads, INIT, part=part)
            parts.append(transpose(g, y, ["batch", "heads", source.axes[1], "head_dim"]))
        q, k, v = parts
        a = attention(g, q, k, v, Mask(causal=causal), c.attention, c.attention_dropout)
        return dense(g, transpose(g, a, ["batch", "seq", *heads]), f"{name}.out_proj", heads, embed, INIT)

    def _mlp(self, g: Graph, x: Tensor, name: str) -> Tensor:
        c, embed, ffn = self.config, {"embed": self.config.embed}, {"ffn": self.config.ffn}
        y = dropout(g, activation(g, dense(g, x, f"{name}.linear1", embed, ffn, INIT), c.activation), c.dropout)
        return dense(g, y, f"{name}.linear2", ffn, embed, INIT)

    @staticmethod
    def _loss(g: Graph, y: Tensor) -> Traced:
        labels = g.input("labels", y.sizes, None, scale="mse_scale")
        return Traced(squared_error(g, y, labels), {"logits": y})


class TransformerDecoder(TransformerEncoder):
    """Decoder layers: self-attention, attention to an encoder's output `memory` [batch, key, embed], feed-forward."""

    Config = TransformerDecoderConfig

    def trace(self, g: Graph, batch: Batch) -> Traced:
        c, sizes = self.config, {"batch": batch.size, "seq": batch.seq, "embed": self.config.embed}
        x = g.input("x", sizes, None)
        memory = g.input("memory", {"batch": batch.size, "key": c.memory or batch.seq, "embed": c.embed}, None)
        x.requires_grad = memory.requires_grad = True  # compute both gradients, as layers inside a model must
        return self._loss(g, self.layers(g, x, memory))
