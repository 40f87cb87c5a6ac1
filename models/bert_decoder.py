"""BERT and RoBERTa as decoders: a token sees the tokens before it, and each layer may attend to an encoder's output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import model_validator
from typing_extensions import TypeVar  # of pydantic

from nntile_py.errors import ConfigError
from nntile_py.graph.graph import Graph
from nntile_py.graph.params import Batch
from nntile_py.models.bert_parts import EncoderLayer, LayerNames, TextEncoder, TextEncoderConfig
from nntile_py.models.parts import INIT, attention_mask, dense_weights, norm_weights
from nntile_py.schema import Count, Switch
from nntile_py.tasks.attention import attention
from nntile_py.tasks.elementwise import add, dropout, transpose
from nntile_py.tasks.mask import Mask
from nntile_py.tasks.op import Tensor

CROSS = "crossattention"  # prefix of the weights of a layer's attention to an encoder's output
MEMORY, MEMORY_MASK = "encoder_hidden_states", "encoder_attention_mask"  # inputs


class DecodableConfig(TextEncoderConfig):
    """Config of a TextEncoder that can also be a decoder."""

    decoder: Switch = False
    """A token sees only the tokens up to its own position (transformers' is_decoder)."""
    cross_attention: Switch = False
    """Each layer also attends to an encoder's output (transformers' add_cross_attention): the input
    encoder_hidden_states [batch, key, embed], from Python. encoder_attention_mask [batch, key] may be given too."""
    memory: Count | None = None
    """With cross_attention: positions of the encoder's output; null: as many as the sequence has."""

    @model_validator(mode="after")
    def _check_decoder(self) -> Self:
        for key in ("cross_attention", "head"):
            if not self.decoder and (value := getattr(self, key)) in (True, "causal_lm"):
                raise ConfigError(f"model.decoder: got False; allowed with {key}: {str(value).lower()}: true")
        return self


DecodableConfigT = TypeVar("DecodableConfigT", bound=DecodableConfig, default=Any)


class DecodableEncoder(TextEncoder[DecodableConfigT]):
    """A TextEncoder that can also be a decoder."""

    fixed: ClassVar = {
        key: values for key, values in TextEncoder.fixed.items() if key not in ("is_decoder", "add_cross_attention")
    }

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        flags = {"decoder": bool(raw.get("is_decoder")), "cross_attention": bool(raw.get("add_cross_attention"))}
        return super().read_config(raw) | flags

    def hf_config(self) -> dict[str, Any]:
        c = self.config
        return super().hf_config() | {"is_decoder": c.decoder, "add_cross_attention": c.cross_attention}

    def encoded(self, g: Graph, batch: Batch, x: Tensor, name: str) -> Tensor:
        """Return the output of the last layer for embedded tokens x [batch, seq, embed].

        name: Prefix of the weights: NAME.0.attention.self.query.weight, ...
        """
        c, mask = self.config, attention_mask(g, batch, causal=self.config.decoder)
        memory = declared_memory(g, batch, c) if c.cross_attention else None
        for number in range(c.layers):
            here = f"{name}.{number}"
            layer = DecoderLayer(g, c, here, memory) if memory else EncoderLayer(g, c, here, LayerNames())
            x = layer(g, x, mask, f"h{number}")
        return x


def declared_memory(g: Graph, batch: Batch, c: DecodableConfig) -> tuple[Tensor, Mask]:
    """Declare the inputs encoder_hidden_states and encoder_attention_mask. Return the first input, and a Mask.

    The Mask hides padding if a step has an encoder_attention_mask.
    """
    if batch.packed:
        raise ConfigError("model.cross_attention: got True; allowed with packed sequences: false")
    sizes = {"batch": batch.size, "key": c.memory or batch.seq}
    memory = g.input(MEMORY, sizes | {"embed": c.embed}, None)
    padded = batch.has(MEMORY_MASK, neutral=1)
    return memory, Mask(padding=g.input(MEMORY_MASK, sizes, below=2) if padded else None)


class DecoderLayer(EncoderLayer):
    """An EncoderLayer that attends to an encoder's output between its self-attention and its feed-forward part.

    memory: The encoder's output [batch, key, embed], and the mask of its positions.
    """

    def __init__(self, g: Graph, c: DecodableConfig, name: str, memory: tuple[Tensor, Mask]) -> None:
        super().__init__(g, c, name, LayerNames())
        self.memory, self.memory_mask = memory
        embed, heads = {"embed": c.embed}, {"heads": c.heads, "head_dim": c.embed // c.heads}
        parts = ("query", "key", "value")
        self.cross = [dense_weights(g, f"{name}.{CROSS}.self.{one}", embed, heads, INIT) for one in parts]
        self.crossed = dense_weights(g, f"{name}.{CROSS}.output.dense", heads, embed, INIT)
        self.crossed_norm = norm_weights(g, f"{name}.{CROSS}.output.LayerNorm", c.embed)

    def between(self, g: Graph, x: Tensor, scope: str) -> Tensor:
        c, memory = self.config, self.memory
        with g.scope(f"{scope}.cross"):
            query, key, value = self.cross
            q = transpose(g, query(g, x), ["batch", "heads", "seq", "head_dim"])
            k, v = (transpose(g, one(g, memory), ["batch", "heads", "key", "head_dim"]) for one in (key, value))
            y = attention(g, q, k, v, self.memory_mask, c.attention, c.attention_dropout)
            y = self.crossed(g, transpose(g, y, ["batch", "seq", "heads", "head_dim"]))
            return self.crossed_norm(g, add(g, dropout(g, y, c.dropout), x), c.layer_norm_eps)
