"""ModernBERT (Warner et al. 2024) as in transformers: rotary positions, gated feed-forward parts, local attention.

Each attention and feed-forward part is preceded by a norm without a bias, except that layer 0 has no norm before its
attention. If i is a multiple of `global_every`, layer i attends to all tokens; otherwise a token attends to tokens at
most local_attention / 2 positions away. Global and local layers have different rotary wavelengths. Axes: those of
bert_parts.py, and rotary (cosines and sines of a position).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from nntile_py.errors import ConfigError
from nntile_py.graph.graph import Graph
from nntile_py.graph.initializers import ONES, ZEROS, Normal
from nntile_py.graph.params import Batch, Traced
from nntile_py.models.bert_parts import PADDED_KEYS, TextEncoder, TextEncoderConfig
from nntile_py.models.head_config import EncoderHead
from nntile_py.models.heads import mean_of_tokens, predicted, sequence_or_token_head
from nntile_py.models.hf_config import ACTIVATIONS, choice, rope_scaling
from nntile_py.models.parts import (
    INIT,
    LAYER_TYPES,
    LayerTypes,
    PaddedConfig,
    attention_mask,
    check_layer_types,
    check_length,
    dense,
    first_tokens,
    rotary_input,
)
from nntile_py.schema import UNFILLED, Count, Filled, Positive, Switch
from nntile_py.tasks.activation import ActivationName, activation
from nntile_py.tasks.attention import attention
from nntile_py.tasks.contract import linear
from nntile_py.tasks.cross_entropy import cross_entropy
from nntile_py.tasks.elementwise import add, dropout, rename, transpose
from nntile_py.tasks.embedding import embedding
from nntile_py.tasks.gated import gated
from nntile_py.tasks.layer_norm import layer_norm
from nntile_py.tasks.mask import Mask
from nntile_py.tasks.op import Tensor
from nntile_py.tasks.rotary import rotary, rotary_table

_BIASES = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias", "decoder_bias")
_OTHER_DROPOUTS = ("embedding_dropout", "classifier_dropout")


class ModernBERTConfig(TextEncoderConfig, PaddedConfig):
    type: str = "modernbert"
    head: Literal[EncoderHead, "multiple_choice", "none"] = "masked_lm"
    """What the model predicts. `nntile train` trains masked_lm and classifiers, nt.Trainer each head with
    a loss. For nt.Encoder, without a loss: `none` returns hidden states."""
    ffn: Filled = UNFILLED
    """Width of the feed-forward part after its gate; null: 1.5 times `embed`."""
    local_attention: Count = 128
    """Window of the attention in local layers: a token attends to half this number of tokens on each side."""
    global_every: Count = 3
    """Distance between layers with global attention, beginning with the first layer; 1: all layers are global."""
    layer_types: LayerTypes | None = None
    """For each layer full_attention (global) or sliding_attention (local); null: as `global_every` says."""
    global_theta: Positive = 160000.0
    """Base of the rotary positions' wavelengths in global layers."""
    local_theta: Positive = 10000.0
    """Base of the rotary positions' wavelengths in local layers."""
    global_scaling: dict[str, Any] | None = None
    """Rotary positions for longer sequences in global layers, as `rope_scaling` of llama."""
    local_scaling: dict[str, Any] | None = None
    """Rotary positions for longer sequences in local layers, as `rope_scaling` of llama."""
    norm_bias: Switch = False
    """LayerNorms have biases."""
    attention_bias: Switch = False
    """Queries, keys, values and the product after attention have biases."""
    mlp_bias: Switch = False
    """The products of the feed-forward part have biases."""
    classifier_bias: Switch = False
    """The dense layer of the head has a bias."""
    decoder_bias: Switch = True
    """The product that computes logits of tokens has a bias."""
    head_activation: ActivationName = "gelu"
    """Activation of the head's dense layer."""
    pooling: Literal["cls", "mean"] = "cls"
    """The vector of a sequence for classification: `cls`, its first token's vector; `mean`, the mean of all its tokens'
    vectors."""
    layer_norm_eps: Positive = 1e-5
    """Added to the variance in LayerNorm."""

    @model_validator(mode="before")
    @classmethod
    def _narrower(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("ffn") is None and isinstance(given.get("embed"), int):
            return given | {"ffn": given["embed"] * 3 // 2}
        return given

    @model_validator(mode="after")
    def _types_of_layers(self) -> Self:
        check_layer_types(self)
        return self

    def is_global(self, layer: int) -> bool:
        return self.layer_types[layer] == LAYER_TYPES[0] if self.layer_types else layer % self.global_every == 0


class ModernBERT(TextEncoder[ModernBERTConfig]):
    """ModernBERT with the head that config.head names. Inputs: input_ids, labels; attention_mask if given.

    Labels by head. masked_lm: the masked token of each position, -100 at unmasked positions; classification: a class
    for each sequence, [batch].
    """

    Config = ModernBERTConfig
    prefix = "model."
    decoder = "decoder.weight"
    absent: ClassVar = {
        "pad_token_id": 50283, "hidden_activation": "gelu", "norm_eps": 1e-5, "local_attention": 128
    }  # fmt: skip
    stem = "ModernBert"
    keys: ClassVar = {name: key for name, key in PADDED_KEYS.items() if name != "kinds"} | {
        "activation": "hidden_activation", "layer_norm_eps": "norm_eps", "dropout": "mlp_dropout",
        "attention_dropout": "attention_dropout", "local_attention": "local_attention",
        "pooling": "classifier_pooling", "head_activation": "classifier_activation", **{name: name for name in _BIASES},
    }  # fmt: skip

    def trace(self, g: Graph, batch: Batch) -> Traced:
        c = self.config
        check_length(batch, c.positions)
        embed = {"embed": c.embed}
        ids = g.input("input_ids", {"batch": batch.size, "seq": batch.seq}, below=c.vocab)
        layers = _Layers(g, batch, c)
        with g.scope("embed"):
            words = g.param("model.embeddings.tok_embeddings.weight", {"vocab": c.vocab} | embed, INIT)
            x = embedding(g, ids, words, padding=c.padding_idx)
            x = dropout(g, layers.norm(x, "model.embeddings.norm"), c.dropout)
        for layer in range(c.layers):
            x = layers(x, layer)
        x = layers.norm(x, "model.final_norm")
        with g.scope("head"):

            def vector() -> Tensor:
                pooled = layers.transformed(mean_of_tokens(g, batch, x) if c.pooling == "mean" else first_tokens(g, x))
                return rename(g, pooled, embed="hidden")

            y = layers.transformed(x) if c.head in ("token_classification", "question_answering") else x
            if traced := sequence_or_token_head(g, batch, c, y, vector, answers="classifier", answer_dropout=c.dropout):
                return traced
            bias = g.param("decoder.bias", {"vocab": c.vocab}, ZEROS) if c.decoder_bias else None
            words = words if c.tie_embeddings else g.param(self.decoder, words.sizes, INIT)
            y, labels = predicted(g, batch, c, x)
            logits = linear(g, layers.transformed(y), words, [*y.axes[:-1], "vocab"], bias)
            return Traced(cross_entropy(g, logits, labels), {"logits": logits})

    # -- transformers

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        found = super().read_config(raw)
        act = choice(raw, "classifier_activation", "gelu", *ACTIVATIONS)
        return found | _ropes(raw) | _layer_types(raw, found["layers"]) | {"head_activation": ACTIVATIONS[act]}

    def hf_config(self) -> dict[str, Any]:
        c = self.config
        ropes = (c.global_theta, c.global_scaling), (c.local_theta, c.local_scaling)
        rope = {
            kind: {"rope_type": "default"} | (scaling or {}) | {"rope_theta": theta}
            for kind, (theta, scaling) in zip(LAYER_TYPES, ropes, strict=True)
        }
        own = {
            "layer_types": [LAYER_TYPES[not c.is_global(layer)] for layer in range(c.layers)], "rope_parameters": rope,
            **dict.fromkeys(_OTHER_DROPOUTS, c.dropout),
            **dict.fromkeys(f"{name}_token_id" for name in ("bos", "eos", "cls", "sep")),
        }  # fmt: skip
        return own | super().hf_config()


class _Layers:
    """Builds the layers of a model in a graph.

    Layers share one mask and one rotary table for global layers, and one of each for local layers. Without norm_bias,
    all norms share an input of zeros as their bias.
    """

    def __init__(self, g: Graph, batch: Batch, c: ModernBERTConfig) -> None:
        self.g, self.batch, self.c = g, batch, c
        self.zeros = None if c.norm_bias else g.input("norm_bias", {"embed": c.embed}, None, default=0.0)
        self.kinds: dict[bool, tuple[Mask, Tensor]] = {}

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Declare NAME.weight, with norm_bias also NAME.bias, and return the LayerNorm of x over the axis embed."""
        g, embed = self.g, {"embed": self.c.embed}
        weight, bias = g.param(f"{name}.weight", embed, ONES), self.zeros or g.param(f"{name}.bias", embed, ZEROS)
        return layer_norm(g, x, weight, bias, self.c.layer_norm_eps)

    def kind(self, everywhere: bool) -> tuple[Mask, Tensor]:
        """Return mask and rotary table of global layers (`everywhere`) or local layers, created at the first call."""
        if everywhere not in self.kinds:
            g, batch, c = self.g, self.batch, self.c
            name, theta, scaling = ("rotary", c.global_theta, c.global_scaling)
            if not everywhere:
                name, theta, scaling = "rotary_local", c.local_theta, c.local_scaling
            window = None if everywhere else c.local_attention // 2 + 1
            mask = self.kinds[not everywhere][0] if self.kinds else attention_mask(g, batch)
            mask = replace(mask, window=window, two_sided=not everywhere)
            table = rotary_table(self.head_dim, batch.length, theta, scaling, packed=bool(batch.packed))
            self.kinds[everywhere] = mask, rotary_input(g, batch, table, name)
        return self.kinds[everywhere]

    @property
    def head_dim(self) -> int:
        return int(self.c.embed // self.c.heads)

    def __call__(self, x: Tensor, layer: int) -> Tensor:
        """Return the output of layer number `layer` for x [batch, seq, embed]."""
        g, c, here = self.g, self.c, f"model.layers.{layer}"
        with g.scope(f"h{layer}.attn"):
            y = self.attended(self.norm(x, f"{here}.attn_norm") if layer else x, f"{here}.attn", c.is_global(layer))
            x = add(g, dropout(g, y, c.attention_dropout), x)
        with g.scope(f"h{layer}.mlp"):
            return add(g, self.fed(self.norm(x, f"{here}.mlp_norm"), f"{here}.mlp"), x)

    def attended(self, x: Tensor, name: str, everywhere: bool) -> Tensor:
        """Return self-attention of x with its projections: global attention if `everywhere`, else local attention."""
        g, c, (mask, table) = self.g, self.c, self.kind(everywhere)
        embed, heads = {"embed": c.embed}, {"heads": c.heads, "head_dim": self.head_dim}
        parts = []
        for number, one in enumerate("qkv"):
            part = (f"{name}.Wqkv.weight", f"{name}.Wqkv.bias", number, 3)
            parts.append(dense(g, x, f"{name}.Wqkv.{one}", embed, heads, INIT, bias=c.attention_bias, part=part))
        parts = [rotary(g, one, table) for one in parts[:2]] + parts[2:]
        q, k, v = (transpose(g, one, ["batch", "heads", "seq", "head_dim"]) for one in parts)
        a = transpose(g, attention(g, q, k, v, mask, c.attention, c.attention_dropout), ["batch", "seq", *heads])
        return dense(g, a, f"{name}.Wo", heads, embed, self.narrow, bias=c.attention_bias)

    def fed(self, x: Tensor, name: str) -> Tensor:
        """Return the gated feed-forward part of x."""
        g, c = self.g, self.c
        embed, ffn = {"embed": c.embed}, {"ffn": c.ffn}
        parts = []
        for number, one in enumerate(("input", "gate")):
            part = (f"{name}.Wi.weight", f"{name}.Wi.bias", number, 2)
            parts.append(dense(g, x, f"{name}.Wi.{one}", embed, ffn, INIT, bias=c.mlp_bias, part=part))
        y = dropout(g, gated(g, parts[0], parts[1], c.activation), c.dropout)
        return dense(g, y, f"{name}.Wo", ffn, embed, self.narrow, bias=c.mlp_bias)

    @property
    def narrow(self) -> Normal:
        """Initialisation of the last weight of a residual branch: a standard deviation that shrinks with the depth."""
        return Normal(INIT.std / (2 * self.c.layers) ** 0.5)

    def transformed(self, x: Tensor) -> Tensor:
        """Return x after the head's first part, which precedes decoder or classifier: dense layer, activation, norm."""
        g, c, embed = self.g, self.c, {"embed": self.c.embed}
        y = dense(g, x, "head.dense", embed, {"hidden": c.embed}, self.narrow, bias=c.classifier_bias)
        return self.norm(rename(g, activation(g, y, c.head_activation), hidden="embed"), "head.norm")


def _ropes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return bases of the rotary wavelengths, and their scaling, of global and local layers from config.json.

    Newer checkpoints have them in rope_parameters, older ones in global_rope_theta and local_rope_theta. A section
    rope_scaling counts for all layers.
    """
    rope, every = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    older = {name: raw.get(f"{name}_rope_theta") for name in ("global", "local")}
    for key, section in (("rope_parameters", rope), ("rope_scaling", every)):
        if not isinstance(section, dict):
            raise ConfigError(f"model: {key} is {section!r} in the model's config; allowed: an object")
    found: dict[str, Any] = {}
    for kind, name, default in zip(LAYER_TYPES, ("global", "local"), (160000.0, 10000.0), strict=True):
        own = (rope.get(kind) or {}) | every
        choice(own, "truncate", True)  # transformers ignores this key here
        found[f"{name}_theta"] = float(own.get("rope_theta", older[name] or default))
        found[f"{name}_scaling"] = rope_scaling(raw, own) if own.get("rope_type", "default") != "default" else None
    return found


def _layer_types(raw: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return which layers are global from config.json: global_every, or layer_types if the layers are irregular.

    Newer checkpoints list a type for each layer in layer_types; older ones have global_attn_every_n_layers.
    """
    kinds, number = raw.get("layer_types"), raw.get("global_attn_every_n_layers", 3)
    if kinds is None:
        return {"global_every": int(number)}
    every = kinds.index(LAYER_TYPES[0], 1) if isinstance(kinds, list) and LAYER_TYPES[0] in kinds[1:] else layers
    regular = kinds == [LAYER_TYPES[bool(layer % every)] for layer in range(layers)]
    return {"global_every": every} if regular else {"layer_types": kinds}
