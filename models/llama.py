"""Llama (Touvron et al. 2023; Llama 3: Grattafiori et al. 2024), Mistral and Qwen 2 and 3, as in transformers.

RMSNorm before attention and before the feed-forward part, rotary positions, grouped-query attention, SwiGLU. Axes:
batch, seq, embed, heads, kv_heads, head_dim, ffn, vocab; rotary (cosines and sines of a position).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

from pydantic import model_validator

from nntile_py.errors import ConfigError
from nntile_py.graph.graph import Graph
from nntile_py.graph.initializers import ONES, Normal
from nntile_py.graph.params import Batch, Traced
from nntile_py.models.head_config import HeadedModel
from nntile_py.models.heads import decoder_head
from nntile_py.models.hf_config import ACTIVATIONS, choice, padding_row, rope_scaling
from nntile_py.models.parts import (
    LAYER_TYPES,
    DecoderConfig,
    LayerTypes,
    PaddedConfig,
    attention_mask,
    check_layer_types,
    check_length,
    dense,
    rotary_input,
)
from nntile_py.schema import UNFILLED, Count, Filled, Positive, Switch, short
from nntile_py.tasks.activation import ActivationName
from nntile_py.tasks.attention import attention
from nntile_py.tasks.elementwise import add, transpose
from nntile_py.tasks.embedding import embedding
from nntile_py.tasks.gated import gated
from nntile_py.tasks.mask import Mask
from nntile_py.tasks.op import Tensor
from nntile_py.tasks.rms_norm import rms_norm
from nntile_py.tasks.rotary import rotary, rotary_table

# {field of the config: key of config.json with the same value}
_KEYS = {
    "layers": "num_hidden_layers", "embed": "hidden_size", "heads": "num_attention_heads", "ffn": "intermediate_size",
    "vocab": "vocab_size", "positions": "max_position_embeddings", "tie_embeddings": "tie_word_embeddings",
    "rms_norm_eps": "rms_norm_eps", "kv_heads": "num_key_value_heads", "head_dim": "head_dim",
}  # fmt: skip


class RotaryDecoderConfig(DecoderConfig, PaddedConfig):
    """Config fields that Llama, Mistral and Qwen share."""

    kv_heads: Filled = UNFILLED
    """Number of heads of keys and values. If it is smaller than `heads`, groups of heads share keys and values. Null:
    `heads`."""
    head_dim: Filled = UNFILLED
    """Width of a head; null: `embed` divided by `heads`."""
    ffn: Count
    """Width of the feed-forward part."""
    activation: ActivationName = "silu"
    """Activation of the feed-forward part's gate."""
    rms_norm_eps: Positive = 1e-6
    """Added to the mean square in RMSNorm."""
    rope_theta: Positive = 10000.0
    """Base of the rotary positions' wavelengths."""
    rope_scaling: dict[str, Any] | None = None
    """Rotary positions for longer sequences, as in transformers: `rope_type` (default, linear, dynamic, llama3, yarn,
    longrope) and its keys."""

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        if self.head_dim is None:
            self.check_size("embed", "heads")
        self.fill(kv_heads=self.heads, head_dim=self.embed // self.heads)
        self.check_size("heads", "kv_heads")
        self.check_dropout()
        return self


class LlamaConfig(RotaryDecoderConfig):
    type: str = "llama"
    attention_bias: Switch = False
    """Queries, keys, values and the product after attention have biases."""
    mlp_bias: Switch = False
    """The products of the feed-forward part have biases."""


class Llama(HeadedModel[RotaryDecoderConfig]):
    """Llama with a language modelling head. Inputs: input_ids, labels; attention_mask if given."""

    Config: ClassVar[type[RotaryDecoderConfig]] = LlamaConfig
    objective = "causal"
    prefix = "model."
    stem = "Llama"
    bare = "causal_lm"
    head_weights = ("lm_head.weight",)
    norm_heads: ClassVar[bool] = False  # whether each head's query and key pass an RMSNorm
    keys: ClassVar[Mapping[str, str]] = _KEYS | {"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"}
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {"pretraining_tp": (1,), "is_encoder_decoder": (False, None)}

    def window(self, layer: int) -> int | None:
        """Return the window of a layer: how many positions, up to its own, a query attends to. None: no limit."""
        return None

    def biases(self) -> tuple[bool, bool, bool]:
        """Return three flags: biases of queries, keys and values; of attention's output projection; of the MLP."""
        return self.config.attention_bias, self.config.attention_bias, self.config.mlp_bias

    def trace(self, g: Graph, batch: Batch) -> Traced:
        c = self.config
        if c.positions:
            check_length(batch, c.positions)
        tokens, embed, ffn = {"batch": batch.size, "seq": batch.seq}, {"embed": c.embed}, {"ffn": c.ffn}
        heads, init = {"heads": c.heads, "head_dim": c.head_dim}, Normal(0.02)
        kv_heads = {"kv_heads": c.kv_heads, "head_dim": c.head_dim} if c.kv_heads < c.heads else heads

        def norm(x: Tensor, name: str) -> Tensor:
            return rms_norm(g, x, g.param(f"{name}.weight", embed, ONES), c.rms_norm_eps)

        def turned(x: Tensor, name: str, out: dict[str, int]) -> Tensor:
            y = dense(g, x, f"{name}_proj", embed, out, init, bias=biases[0])
            if self.norm_heads:
                y = rms_norm(g, y, g.param(f"{name}_norm.weight", {"head_dim": c.head_dim}, ONES), c.rms_norm_eps)
            return rotary(g, y, table)

        def attend(x: Tensor, name: str, mask: Mask) -> Tensor:
            q, k = turned(x, f"{name}.q", heads), turned(x, f"{name}.k", kv_heads)
            v = dense(g, x, f"{name}.v_proj", embed, kv_heads, init, bias=biases[0])
            q, k, v = (transpose(g, t, ["batch", t.axes[2], "seq", "head_dim"]) for t in (q, k, v))
            a = transpose(g, attention(g, q, k, v, mask, c.attention, c.attention_dropout), ["batch", "seq", *heads])
            return dense(g, a, f"{name}.o_proj", heads, embed, init, bias=biases[1])

        def mlp(x: Tensor, name: str) -> Tensor:
            biased = {"bias": biases[2]}
            gate, up = (dense(g, x, f"{name}.{part}_proj", embed, ffn, init, **biased) for part in ("gate", "up"))
            return dense(g, gated(g, gate, up, c.activation), f"{name}.down_proj", ffn, embed, init, **biased)

        ids = g.input("input_ids", tokens, below=c.vocab)
        angles = rotary_table(c.head_dim, batch.length, c.rope_theta, c.rope_scaling, packed=bool(batch.packed))
        table = rotary_input(g, batch, angles)
        mask, biases = attention_mask(g, batch, causal=True), self.biases()
        with g.scope("embed"):
            words = g.param("model.embed_tokens.weight", {"vocab": c.vocab} | embed, init)
            x = embedding(g, ids, words, padding=c.padding_idx)
        for layer in range(c.layers):
            here = f"model.layers.{layer}"
            with g.scope(f"h{layer}.attn"):
                own = replace(mask, window=self.window(layer))
                x = add(g, attend(norm(x, f"{here}.input_layernorm"), f"{here}.self_attn", own), x)
            with g.scope(f"h{layer}.mlp"):
                x = add(g, mlp(norm(x, f"{here}.post_attention_layernorm"), f"{here}.mlp"), x)
        with g.scope("head"):
            return decoder_head(g, batch, c, norm(x, "model.norm"), words, "padding_idx")

    # -- transformers

    def copies(self) -> Mapping[str, str]:
        tied = self.config.head == "causal_lm" and self.config.tie_embeddings
        return {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        head = cls.read_head(raw)
        act = choice(raw, "hidden_act", "silu", *ACTIVATIONS)
        parameters, scaling, theta = (raw.get(f"rope_{key}") for key in ("parameters", "scaling", "theta"))
        rope = scaling or parameters or {}
        if not isinstance(rope, dict):
            raise ConfigError(f"model: rope_parameters is {rope!r} in the model's config; allowed: an object")
        found = {name: raw.get(key) for name, key in cls.keys.items()}
        needed = ("layers", "embed", "heads", "ffn", "vocab")
        return head | {name: raw[cls.keys[name]] for name in needed} | {
            "activation": ACTIVATIONS[act], "padding_idx": padding_row(raw),
            "rope_theta": rope.get("rope_theta") or theta or 10000.0,
            "rope_scaling": rope_scaling(raw, rope),
        } | {name: value for name, value in found.items() if value is not None}  # fmt: skip

    def hf_config(self) -> dict[str, Any]:
        c = self.config
        rope = {"rope_type": "default"} | (c.rope_scaling or {}) | {"rope_theta": c.rope_theta}
        return self.merged_hf({key: getattr(c, name) for name, key in self.keys.items()} | {
            "model_type": c.type, **self.hf_head(), "hidden_act": c.activation,
            "rope_parameters": rope, "attention_dropout": c.attention_dropout, "bos_token_id": None,
            "eos_token_id": None, "pad_token_id": c.padding_idx,
        })  # fmt: skip


class MistralConfig(RotaryDecoderConfig):
    type: str = "mistral"
    window: Count | None = None
    """Positions that a query attends to, up to its own; null: all."""


class Mistral(Llama):
    """Mistral (Jiang et al. 2023): Llama whose layers attend to the last `window` positions."""

    Config = MistralConfig
    stem = "Mistral"
    keys = _KEYS | {"window": "sliding_window"}
    fixed: ClassVar = {"is_encoder_decoder": (False, None)}

    def window(self, layer: int) -> int | None:
        size: int | None = self.config.window
        return size

    def biases(self) -> tuple[bool, bool, bool]:
        return False, False, False


class Qwen2Config(RotaryDecoderConfig):
    type: str = "qwen2"
    window: Count | None = None
    """Positions that a query attends to, up to its own, in layers of the type sliding_attention; null: all."""
    layer_types: LayerTypes | None = None
    """With a window: for each layer full_attention or sliding_attention; null: all have the window."""

    @model_validator(mode="after")
    def _types_of_layers(self) -> Self:
        check_layer_types(self)
        return self


class Qwen2(Llama):
    """Qwen 2 and 2.5 (Yang et al. 2024): Llama with biases of queries, keys and values."""

    Config = Qwen2Config
    stem = "Qwen2"
    keys = _KEYS
    fixed: ClassVar = {"is_encoder_decoder": (False, None)}

    def window(self, layer: int) -> int | None:
        kinds = self.config.layer_types
        return None if kinds and kinds[layer] == LAYER_TYPES[0] else self.config.window

    def biases(self) -> tuple[bool, bool, bool]:
        return True, False, False

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        found = super().read_config(raw)
        size, first, kinds = raw.get("sliding_window"), raw.get("max_window_layers"), raw.get("layer_types")
        window = size if raw.get("use_sliding_window") else None
        if window and kinds is None:
            kinds = [LAYER_TYPES[layer >= (first or 0)] for layer in range(found["layers"])]
        if not window and kinds not in (None, [LAYER_TYPES[0]] * found["layers"]):
            need = f"{LAYER_TYPES[0]} in each layer, as use_sliding_window is not true"
            raise ConfigError(f"model: layer_types is {short(kinds)} in the model's config; allowed: {need}")
        return found | {"window": window, "layer_types": kinds if window else None}

    def hf_config(self) -> dict[str, Any]:
        c = self.config
        kinds = [LAYER_TYPES[self.window(layer) is not None] for layer in range(c.layers)]
        window = {"use_sliding_window": c.window is not None, "sliding_window": c.window, "layer_types": kinds}
        return window | super().hf_config()


class Qwen3Config(Qwen2Config):
    type: str = "qwen3"
    attention_bias: Switch = False
    """Queries, keys, values and the product after attention have biases."""


class Qwen3(Qwen2):
    """Qwen 3 (Yang et al. 2025): Qwen 2 whose queries and keys are normed in each head."""

    Config = Qwen3Config
    stem = "Qwen3"
    keys = _KEYS | {"attention_bias": "attention_bias"}
    norm_heads = True

    def biases(self) -> tuple[bool, bool, bool]:
        return self.config.attention_bias, self.config.attention_bias, False
