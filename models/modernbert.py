"""ModernBERT (Warner et al. 2024) as in transformers: rotary positions, gated feed-forward parts, local attention.

Each attention and feed-forward part is preceded by a norm without a bias, except that layer 0 has no norm before its
attention. If i is a multiple of `global_every`, layer i attends to all tokens; otherwise a token attends to tokens at
most local_attention / 2 positions away. Global and local layers have different rotary wavelengths. Axes: those of
bert_parts.py, and rotary (cosines and sines of a position).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from nntile_py.errors import ConfigError
from nntile_py.graph.graph import Graph
from nntile_py.graph.params import ONES, ZEROS, Batch, Normal, Traced
from nntile_py.models.bert_parts import PADDED_KEYS, TextEncoder, TextEncoderConfig
from nntile_py.models.heads import bare, classified, predicted
from nntile_py.models.hf_config import choice
from nntile_py.models.parts import INIT, PaddedConfig, attention_mask, check_length, dense, first_tokens, rotary_input
from nntile_py.schema import Count, Positive
from nntile_py.tasks.activation import activation
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

_KINDS = ("full_attention", "sliding_attention")  # values of layer_types in transformers' config.json
_NO_BIASES = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")
_OTHER_DROPOUTS = ("embedding_dropout", "classifier_dropout")


class ModernBERTConfig(TextEncoderConfig, PaddedConfig):
    type: str = "modernbert"
    head: Literal["masked_lm", "regression", "classification", "none"] = "masked_lm"
    """What the model predicts. `none`: the model returns hidden states and has no loss, for nt.Encoder."""
    ffn: Count | None = None
    """Width of the feed-forward part after its gate; null: 1.5 times `embed`."""
    local_attention: Count = 128
    """Window of the attention in local layers: a token attends to half this number of tokens on each side."""
    global_every: Count = 3
    """Distance between layers with global attention, beginning with the first layer; 1: all layers are global."""
    global_theta: Positive = 160000.0
    """Base of the rotary positions' wavelengths in global layers."""
    local_theta: Positive = 10000.0
    """Base of the rotary positions' wavelengths in local layers."""
    layer_norm_eps: Positive = 1e-5
    """Added to the variance in LayerNorm."""

    @model_validator(mode="before")
    @classmethod
    def _narrower(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("ffn") is None and isinstance(given.get("embed"), int):
            return given | {"ffn": given["embed"] * 3 // 2}
        return given

    def is_global(self, layer: int) -> bool:
        return layer % self.global_every == 0


class ModernBERT(TextEncoder):
    """ModernBERT with the head that config.head names. Inputs: input_ids, labels; attention_mask if given.

    Labels by head. masked_lm: the masked token of each position, -100 at unmasked positions; classification: a class
    for each sequence, [batch].
    """

    Config = ModernBERTConfig
    prefix = "model."
    decoder = "decoder.weight"
    fixed: ClassVar = TextEncoder.fixed | dict.fromkeys(_NO_BIASES, (False,)) | {
        "decoder_bias": (True,), "classifier_activation": ("gelu",)
    }  # fmt: skip
    absent: ClassVar = {
        "pad_token_id": 50283, "hidden_activation": "gelu", "norm_eps": 1e-5, "local_attention": 128
    }  # fmt: skip
    stem = "ModernBert"
    keys: ClassVar = {name: key for name, key in PADDED_KEYS.items() if name != "kinds"} | {
        "activation": "hidden_activation", "layer_norm_eps": "norm_eps", "dropout": "mlp_dropout",
        "attention_dropout": "attention_dropout", "local_attention": "local_attention",
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
            if c.head == "none":
                return bare(g, c, x)
            if c.head in ("classification", "regression"):
                pooled = layers.transformed(first_tokens(g, x))
                return classified(g, batch, c, rename(g, pooled, embed="hidden"))
            bias = g.param("decoder.bias", {"vocab": c.vocab}, ZEROS)
            y, labels = predicted(g, batch, c, x)
            logits = linear(g, layers.transformed(y), words, [*y.axes[:-1], "vocab"], bias)
            return Traced(cross_entropy(g, logits, labels), {"logits": logits})

    # -- transformers

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        found = super().read_config(raw)
        if raw.get("classifier_pooling") and found["head"] in ("classification", "regression"):
            choice(raw, "classifier_pooling", "cls")
        return found | _thetas(raw) | {"global_every": _global_every(raw, found["layers"])}

    def hf_config(self) -> dict[str, Any]:
        c = self.config
        rope = dict(zip(_KINDS, ({"rope_type": "default", "rope_theta": t} for t in (c.global_theta, c.local_theta)),
                        strict=True))  # fmt: skip
        own = {
            "layer_types": [_KINDS[not c.is_global(layer)] for layer in range(c.layers)], "rope_parameters": rope,
            **dict.fromkeys(_OTHER_DROPOUTS, c.dropout),
            **dict.fromkeys(f"{name}_token_id" for name in ("bos", "eos", "cls", "sep")),
        }  # fmt: skip
        pooled = {"classifier_pooling": "cls"} if c.head in ("classification", "regression") else {}
        return own | super().hf_config() | pooled


class _Layers:
    """Builds the layers of a model in a graph.

    Layers share one mask and one rotary table for global layers, and one of each for local layers. All norms share
    an input of zeros as their bias.
    """

    def __init__(self, g: Graph, batch: Batch, c: Any) -> None:
        self.g, self.batch, self.c = g, batch, c
        self.zeros = g.input("norm_bias", {"embed": c.embed}, None, default=0.0)
        self.kinds: dict[bool, tuple[Mask, Tensor]] = {}

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Declare NAME.weight and return the LayerNorm of x over the axis embed, without a bias."""
        weight = self.g.param(f"{name}.weight", {"embed": self.c.embed}, ONES)
        return layer_norm(self.g, x, weight, self.zeros, self.c.layer_norm_eps)

    def kind(self, everywhere: bool) -> tuple[Mask, Tensor]:
        """Return mask and rotary table of global layers (`everywhere`) or local layers, created at the first call."""
        if everywhere not in self.kinds:
            g, batch, c = self.g, self.batch, self.c
            theta, name = (c.global_theta, "rotary") if everywhere else (c.local_theta, "rotary_local")
            window = None if everywhere else c.local_attention // 2 + 1
            mask = self.kinds[not everywhere][0] if self.kinds else attention_mask(g, batch)
            mask = replace(mask, window=window, two_sided=not everywhere)
            table = rotary_table(self.head_dim, batch.length, theta)
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
            parts.append(dense(g, x, f"{name}.Wqkv.{one}", embed, heads, INIT, bias=False, part=part))
        parts = [rotary(g, one, table) for one in parts[:2]] + parts[2:]
        q, k, v = (transpose(g, one, ["batch", "heads", "seq", "head_dim"]) for one in parts)
        a = transpose(g, attention(g, q, k, v, mask, c.attention, c.attention_dropout), ["batch", "seq", *heads])
        return dense(g, a, f"{name}.Wo", heads, embed, self.narrow, bias=False)

    def fed(self, x: Tensor, name: str) -> Tensor:
        """Return the gated feed-forward part of x."""
        g, c = self.g, self.c
        embed, ffn = {"embed": c.embed}, {"ffn": c.ffn}
        parts = []
        for number, one in enumerate(("input", "gate")):
            part = (f"{name}.Wi.weight", f"{name}.Wi.bias", number, 2)
            parts.append(dense(g, x, f"{name}.Wi.{one}", embed, ffn, INIT, bias=False, part=part))
        y = dropout(g, gated(g, parts[0], parts[1], c.activation), c.dropout)
        return dense(g, y, f"{name}.Wo", ffn, embed, self.narrow, bias=False)

    @property
    def narrow(self) -> Normal:
        """Initialisation of the last weight of a residual branch: a standard deviation that shrinks with the depth."""
        return Normal(INIT.std / (2 * self.c.layers) ** 0.5)

    def transformed(self, x: Tensor) -> Tensor:
        """Return x after the head's first part, which precedes decoder or classifier: dense layer, gelu, norm."""
        y = dense(self.g, x, "head.dense", {"embed": self.c.embed}, {"hidden": self.c.embed}, self.narrow, bias=False)
        return self.norm(rename(self.g, activation(self.g, y, "gelu"), hidden="embed"), "head.norm")


def _thetas(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the bases of the rotary wavelengths of global and local layers from config.json.

    Newer checkpoints have them in rope_parameters, older ones in global_rope_theta and local_rope_theta.
    """
    rope, older = raw.get("rope_parameters") or {}, {k: raw.get(f"{k}_rope_theta") for k in ("global", "local")}
    if not isinstance(rope, dict):
        raise ConfigError(f"model: rope_parameters is {rope!r} in the model's config; allowed: an object")
    found: dict[str, Any] = {}
    for kind, name, default in zip(_KINDS, ("global", "local"), (160000.0, 10000.0), strict=True):
        own = rope.get(kind) or {}
        choice(own, "rope_type", "default")
        found[f"{name}_theta"] = own.get("rope_theta", older[name] or default)
    return {name: float(theta) for name, theta in found.items()}


def _global_every(raw: Mapping[str, Any], layers: int) -> int:
    """Return the distance between global layers from config.json.

    Newer checkpoints list a type for each layer in layer_types; older ones have global_attn_every_n_layers.
    """
    kinds, number = raw.get("layer_types"), raw.get("global_attn_every_n_layers", 3)
    if kinds is None:
        return int(number)
    every = kinds.index(_KINDS[0], 1) if isinstance(kinds, list) and _KINDS[0] in kinds[1:] else max(layers, 1)
    if kinds != [_KINDS[bool(layer % every)] for layer in range(layers)]:
        need = f"{_KINDS[0]} in every n-th layer from the first on, {_KINDS[1]} in the others"
        raise ConfigError(f"model: layer_types is {kinds} in the model's config; allowed: {need}")
    return every
