"""DeBERTa (He et al. 2021) and its versions 2 and 3 as in transformers: attention by content and by relative position.

The score of a query q and a key k at distance d is (q k + q r_k[d] + k r_q[d]) / sqrt(3 head_dim). r_k[d] and r_q[d]
are projections of the embedding of d. Version 1 clips d. Versions 2 and 3 group distances into buckets; buckets of
large distances are wider, on a logarithmic scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import model_validator

from nntile_py.errors import ConfigError
from nntile_py.graph.graph import Graph
from nntile_py.graph.initializers import ZEROS
from nntile_py.graph.params import Batch, Part, Traced
from nntile_py.models.bert_parts import PADDED_KEYS, EncoderLayer, LayerNames, TextEncoder, TextEncoderConfig, embedded
from nntile_py.models.deberta_parts import (
    POSITION_KINDS,
    Padding,
    Relative,
    convolved,
    distance_rows,
    padding_of,
    position_kinds,
)
from nntile_py.models.head_config import EncoderHead
from nntile_py.models.heads import first_token, predicted, sequence_or_token_head, token_logits
from nntile_py.models.hf_config import ACTIVATIONS, choice
from nntile_py.models.parts import (
    INIT,
    Dense,
    PaddedConfig,
    Sizes,
    attention_mask,
    check_length,
    dense_weights,
    norm,
)
from nntile_py.schema import UNFILLED, Count, Filled, Positive, integer
from nntile_py.tasks.activation import ActivationName
from nntile_py.tasks.attention import attention, cut_positions
from nntile_py.tasks.attention_relative import relative_attention
from nntile_py.tasks.contract import contract
from nntile_py.tasks.cross_entropy import cross_entropy
from nntile_py.tasks.elementwise import dropout, rename, transpose
from nntile_py.tasks.embedding import embedding
from nntile_py.tasks.mask import Mask
from nntile_py.tasks.op import Tensor
from nntile_py.tasks.relative import relative_scores
from nntile_py.tasks.softmax import softmax
from nntile_py.tiles.dtypes import is_low

_HEAD = "lm_predictions.lm_head.dense", "lm_predictions.lm_head.LayerNorm", "lm_predictions.lm_head.bias"
_LEGACY_HEAD = "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias"
FUSED_HEAD_DIM = 64  # the largest head_dim for which `model.attention: auto` chooses the fused kernels


class DeBERTaConfig(TextEncoderConfig, PaddedConfig):
    type: str = "deberta"
    head: Literal[EncoderHead, "none"] = "masked_lm"
    """What the model predicts. `nntile train` trains masked_lm and classifiers, nt.Trainer each head with
    a loss. For nt.Encoder, without a loss: `none` returns hidden states."""
    legacy: bool = False
    """Names of the weights of the head for masked_lm. True: cls.predictions..., as in transformers' models with
    `legacy`; false: lm_predictions.lm_head..., as in the published checkpoints."""
    kinds: Annotated[int, *integer(0)] = 0
    """Number of token types (transformers' token_type_ids); 0: the model has no token types."""
    attention: Literal["auto", "naive", "segments"] = "auto"  # type: ignore[assignment]
    """The attention backend. `naive`: stores all scores in memory. `segments`: fused kernels for packed sequences
    (`train.pack`) and for padded ones; like `naive` if `tiles.seq` cuts sequences. `auto`: `segments` for packed
    sequences (if heads have at most 64 elements, or with `attention_dropout`), else `naive`, which is faster for padded
    sequences on GPUs."""
    layer_norm_eps: Positive = 1e-7
    """Added to the variance in LayerNorm."""
    embedding: Filled = UNFILLED
    """Width of the embedding; null: `embed`. If it differs from `embed`, a product expands it to `embed`."""
    pooler_activation: ActivationName = "gelu"
    """Activation of the dense layer before a classifier."""
    relative_attention: bool = True
    """Attention scores include products with embeddings of distances, as `c2p` and `p2c` say."""
    c2p: bool = True
    """Attention scores include products of queries with embeddings of distances (content to position)."""
    p2c: bool = True
    """Attention scores include products of keys with embeddings of distances (position to content)."""
    relative_positions: Count | None = None
    """All distances from this number of tokens on share one embedding; null: `positions`."""
    position_biased_input: bool = False
    """The embedding of a token includes an embedding of its absolute position."""

    @property
    def relative(self) -> bool:
        """Whether the scores depend on distances."""
        return self.relative_attention and (self.c2p or self.p2c)

    def check_dropout(self) -> None:
        """All backends of DeBERTa have dropout of attention weights."""

    def fuses(self, packed: bool) -> bool:
        """Return whether attention stores no scores. packed: whether sequences are packed."""
        # Not all GPUs have the shared memory that the fused kernels need for wider heads.
        chosen = packed and (self.embed // self.heads <= FUSED_HEAD_DIM or self.attention_dropout > 0)
        return chosen if self.attention == "auto" else self.attention == "segments"

    @property
    def buckets(self) -> int:
        """Number of buckets of distances in each direction; 0: each distance has its own embedding."""
        return 0

    @property
    def longest(self) -> int:
        """Number of tokens from which on all distances share one embedding."""
        return self.relative_positions or self.positions

    @model_validator(mode="after")
    def _relative(self) -> Self:
        self.fill(embedding=self.embed)
        if not self.legacy and not self.tie_embeddings:
            raise ConfigError("model.tie_embeddings: got false; allowed: true, or legacy: true, whose head can differ")
        if not self.legacy and self.head == "masked_lm" and self.embedding != self.embed:
            need = f"model.embed = {self.embed}, or legacy: true, whose head has this width"
            raise ConfigError(f"model.embedding: got {self.embedding}; allowed: {need}")
        longest = self.longest
        if self.relative and self.buckets and longest and not 1 <= self.buckets // 2 < longest - 1:
            need = f"0, or from 2 to {2 * longest - 3}, as the longest distance is {longest}"
            raise ConfigError(f"model.position_buckets: got {self.buckets}; allowed: {need}")
        return self


class DeBERTaV2Config(DeBERTaConfig):
    type: str = "deberta-v2"
    head: Literal[EncoderHead, "multiple_choice", "none"] = "masked_lm"  # type: ignore[assignment]
    """What the model predicts. `nntile train` trains masked_lm and classifiers, nt.Trainer each head with
    a loss. For nt.Encoder, without a loss: `none` returns hidden states."""
    position_buckets: Annotated[int, *integer(0)] = 0
    """Number of embeddings of distances in each direction. Distances up to half of this number have their own
    embedding; larger distances share the other half of the embeddings, on a logarithmic scale. 0: each distance has its
    own embedding."""
    share_att_key: bool = True
    """Embeddings of distances are multiplied by the weights of queries and keys; false: by weights of their own."""
    norm_rel_ebd: bool = True
    """Apply a LayerNorm to the embeddings of distances."""
    conv: Annotated[int, *integer(0)] = 0
    """Number of positions, an odd number, that a convolution of the embeddings takes; its result is added to the output
    of the first layer. 0: no convolution."""
    conv_activation: ActivationName = "tanh"
    """Activation of the convolution."""

    @property
    def buckets(self) -> int:
        return self.position_buckets

    @model_validator(mode="after")
    def _odd(self) -> Self:
        if self.conv and self.conv % 2 == 0:
            raise ConfigError(f"model.conv: got {self.conv}; allowed: 0 or an odd number")
        return self


# -- relative positions


class DeBERTaLayer(EncoderLayer):
    """A layer of version 1. Its checkpoint has one weight that holds, head by head, query, key and value weights."""

    def __init__(
        self, g: Graph, c: DeBERTaConfig, name: str, relative: Relative | None, padding: Padding | None
    ) -> None:
        self.own, self.relative, self.padding = f"{name}.attention.self", relative, padding
        super().__init__(g, c, name, LayerNames(*(f"attention.self.{one}_proj" for one in ("query", "key", "value"))))
        embed, heads = {"embed": c.embed}, {"heads": c.heads, "head_dim": c.embed // c.heads}
        self.position_key, self.position_query = self.position_weights(g, embed, heads) if relative else (None, None)

    def projected(self, g: Graph, at: LayerNames, embed: Sizes, heads: Sizes) -> list[Dense]:
        made = []
        for number, one in enumerate("qkv"):
            part = Part(f"{self.own}.in_proj.weight", number, 3, "head_dim")
            weight = g.param(f"{self.own}.in_proj.{one}", {**heads, **embed}, INIT, part)
            bias = None if one == "k" else g.param(f"{self.own}.{one}_bias", heads, ZEROS)
            made.append(Dense(weight, bias, embed, heads))
        return made

    def position_weights(self, g: Graph, embed: Sizes, heads: Sizes) -> tuple[Dense | None, Dense | None]:
        """Declare the weights that project embeddings of distances to keys (for c2p) and queries (for p2c), or None."""
        key = dense_weights(g, f"{self.own}.pos_proj", embed, heads, INIT, bias=False) if self.config.c2p else None
        return key, dense_weights(g, f"{self.own}.pos_q_proj", embed, heads, INIT) if self.config.p2c else None

    def attend(self, g: Graph, x: Tensor, mask: Mask) -> Tensor:
        cut = not mask.segments and cut_positions(g.cuts, x.size("seq"), x.size("seq"))
        fused = self.config.fuses(packed=bool(mask.segments)) and not cut
        y, v = (self.fused if fused else self.stored)(g, x, mask)
        if not self.padding:
            return y
        return self.padding.attended(y, v if "key" in v.axes else rename(g, v, seq="key"))

    @property
    def scale(self) -> float:
        c = self.config
        return 1 / math.sqrt(c.embed // c.heads * (1 + c.c2p + c.p2c))

    def fused(self, g: Graph, x: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        """Return the attention's output and the values, without scores in memory."""
        q, k, v = (weights(g, x) for weights in self.projections)
        rate = self.config.attention_dropout
        if not self.relative:
            y = attention(g, q, k, v, mask, "segments", rate, self.scale)
            # In steps with padding the values have another reader, so the projections would merge only in other steps.
            g.projections.pop()
            return y, v
        products = self.by_distance(g, q, k)
        return relative_attention(g, q, k, v, mask, self.relative.of_distance, *products, rate, self.scale), v

    def stored(self, g: Graph, x: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        """Return the attention's output and the values, with the scores in memory."""
        c = self.config
        if c.attention_dropout and g.row_numbers:
            need = "allowed with packed sequences: 0, or model.attention: segments"
            raise ConfigError(f"model.attention_dropout: got {c.attention_dropout}; {need}")
        # With heads as the first axis, a product with embeddings of distances is one matrix product for each head. With
        # dropout, batch is the first axis: the order of axes determines the random numbers, and `fused` has this order.
        axes = ["batch", "heads"] if c.attention_dropout * g.training else ["heads", "batch"]
        q, k, v = (transpose(g, weights(g, x), [*axes, "seq", "head_dim"]) for weights in self.projections)
        k, v = rename(g, k, seq="key"), rename(g, v, seq="key")
        scores = contract(g, q, k, [*axes, "seq", "key"], scale=self.scale)
        if self.relative:
            products = self.by_distance(g, q, k, self.scale)
            scores = relative_scores(g, scores, self.relative.of_distance, *products)
        return contract(g, dropout(g, softmax(g, scores, mask), c.attention_dropout), v, q.axes), v

    def by_distance(self, g: Graph, q: Tensor, k: Tensor, scale: float = 1.0) -> tuple[Tensor | None, Tensor | None]:
        """Return the scaled products of queries and of keys with the embeddings of distances."""
        c = self.config
        assert self.relative
        table = dropout(g, self.relative.table, c.dropout)

        def products(content: Tensor, weights: Dense) -> Tensor:
            axes = ["relative" if axis == "head_dim" else axis for axis in content.axes]
            return contract(g, content, weights(g, table), axes, scale=scale)

        of_queries = products(q, self.position_key) if c.c2p and self.position_key else None
        return of_queries, products(k, self.position_query) if c.p2c and self.position_query else None


class DeBERTaV2Layer(DeBERTaLayer):
    """A layer of versions 2 and 3."""

    def projected(self, g: Graph, at: LayerNames, embed: Sizes, heads: Sizes) -> list[Dense]:
        return EncoderLayer.projected(self, g, at, embed, heads)

    def position_weights(self, g: Graph, embed: Sizes, heads: Sizes) -> tuple[Dense | None, Dense | None]:
        c = self.config
        if c.share_att_key:
            return self.projections[1], self.projections[0]
        key = dense_weights(g, f"{self.own}.pos_key_proj", embed, heads, INIT) if c.c2p else None
        return key, dense_weights(g, f"{self.own}.pos_query_proj", embed, heads, INIT) if c.p2c else None


# -- models


class DeBERTa(TextEncoder[DeBERTaConfig]):
    """DeBERTa, version 1. Inputs: input_ids, labels; optionally attention_mask, and token_type_ids if the model has
    token types.

    Labels by head. masked_lm: the masked token of each position, -100 at unmasked positions; classification: a class
    for each sequence, [batch]. Padding attends to all positions alike, as in transformers.

    Checkpoints without relative attention, or without its terms c2p and p2c, may have embeddings of distances and, from
    version 2 on, a norm of these embeddings. transformers computes nothing from these weights. They are not kept: the
    config that `to_hf` writes switches relative attention off."""

    Config = DeBERTaConfig
    Layer: ClassVar[type[DeBERTaLayer]] = DeBERTaLayer
    prefix = "deberta."
    stem = "Deberta"
    # Published checkpoints lack the key `legacy`, which counts as true, but name the head's weights as in _HEAD.
    old_names: ClassVar = dict(zip(_HEAD, _LEGACY_HEAD, strict=True))
    decoder = "cls.predictions.decoder.weight"
    fixed: ClassVar = TextEncoder.fixed | {
        "talking_head": (False,), "conv_kernel_size": (0,),
    }  # fmt: skip
    absent: ClassVar = {
        "pad_token_id": 0, "relative_attention": False, "position_biased_input": True, "layer_norm_eps": 1e-7,
        "type_vocab_size": 0, "legacy": True,
    }  # fmt: skip
    keys: ClassVar = PADDED_KEYS | {
        "position_biased_input": "position_biased_input", "legacy": "legacy",
        "relative_attention": "relative_attention",
    }  # fmt: skip

    def relative(self, g: Graph, batch: Batch) -> Relative | None:
        """Look up the embeddings of the distances that occur in this batch, not of the whole table."""
        if not self.config.relative:
            return None
        c, name = self.config, "deberta.encoder.rel_embeddings.weight"
        rows, index = distance_rows(batch.seq, batch.length, c.buckets, c.longest)
        if is_low(g.dtype):  # GPUs multiply matrices faster if each row has a multiple of 16 bytes
            rows = np.pad(rows, (0, -len(rows) % 8), mode="edge")
        size = 2 * (c.buckets or c.longest)
        used = g.input("relative_rows", {"relative": len(rows)}, below=size, default=rows)
        of_distance = g.input("relative_index", {"distance": len(index)}, below=len(rows), default=index)
        with g.scope("relative"):
            table = embedding(g, used, g.param(name, {"bucket": size, "embed": c.embed}, INIT))
            return Relative(self.normed(g, table), of_distance)

    def normed(self, g: Graph, table: Tensor) -> Tensor:
        """Return the embeddings of distances as the layers use them. Versions 2 and 3 may apply a norm."""
        return table

    def after_first(self, g: Graph, batch: Batch, x: Tensor, first: Tensor, padding: Padding | None) -> Tensor:
        """Return the input of the second layer, from the first layer's output x and its input `first`."""
        return x

    def trace(self, g: Graph, batch: Batch) -> Traced:
        c = self.config
        check_length(batch, c.positions)
        x, words = embedded(
            g, batch, c, "deberta.embeddings", kinds=c.kinds > 0, places=c.position_biased_input, width=c.embedding,
            expanded="embed_proj" if c.embedding != c.embed else "",
        )  # fmt: skip
        relative, mask, padding = self.relative(g, batch), attention_mask(g, batch), padding_of(g, batch)
        first = x = padding.zeroed(x) if padding else x
        for layer in range(c.layers):
            x = self.Layer(g, c, f"deberta.encoder.layer.{layer}", relative, padding)(g, x, mask, f"h{layer}")
            if layer == 0:
                x = self.after_first(g, batch, x, first, padding)
        with g.scope("head"):
            pooled = partial(first_token, g, x, c, "pooler.dense", c.pooler_activation)
            if traced := sequence_or_token_head(g, batch, c, x, pooled):
                return traced
            y, labels = predicted(g, batch, c, x)
            logits = token_logits(g, y, c, words, c.activation, _LEGACY_HEAD if c.legacy else _HEAD, self.decoder)
            return Traced(cross_entropy(g, logits, labels), {"logits": logits})

    # -- transformers

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        width = raw["hidden_size"]
        choice(raw, "pooler_hidden_size", width)
        choice(raw, "attention_head_size", width // raw["num_attention_heads"])
        kinds, longest = position_kinds(raw.get("pos_att_type")), raw.get("max_relative_positions", -1)
        fields = super().read_config(raw) | {kind: kind in kinds for kind in POSITION_KINDS}
        return fields | {
            "relative_positions": longest if longest > 0 else None, "embedding": raw.get("embedding_size"),
            "tie_embeddings": raw.get("tie_word_embeddings", True) or not raw["legacy"],
            "pooler_activation": ACTIVATIONS[choice(raw, "pooler_hidden_act", "gelu", *ACTIVATIONS)],
        }  # fmt: skip

    def hf_config(self) -> dict[str, Any]:
        c = self.config
        return super().hf_config() | {
            "relative_attention": c.relative, "legacy": c.legacy, "max_relative_positions": c.relative_positions or -1,
            "pos_att_type": [kind for kind in POSITION_KINDS if getattr(c, kind)], "embedding_size": c.embedding,
            "pooler_hidden_act": c.pooler_activation, "pooler_hidden_size": c.embed,
        }  # fmt: skip


class DeBERTaV2(DeBERTa):
    """DeBERTa, versions 2 and 3. Inputs and labels: as for DeBERTa."""

    Config = DeBERTaV2Config
    Layer = DeBERTaV2Layer
    stem = "DebertaV2"
    fixed: ClassVar = {key: values for key, values in DeBERTa.fixed.items() if key != "conv_kernel_size"} | {
        "conv_groups": (1,)
    }  # fmt: skip
    absent: ClassVar = DeBERTa.absent | {"share_att_key": False, "position_buckets": -1}
    keys: ClassVar = DeBERTa.keys | {"share_att_key": "share_att_key", "position_buckets": "position_buckets"}

    def normed(self, g: Graph, table: Tensor) -> Tensor:
        c = self.config
        return norm(g, table, "deberta.encoder.LayerNorm", c.layer_norm_eps) if c.norm_rel_ebd else table

    def after_first(self, g: Graph, batch: Batch, x: Tensor, first: Tensor, padding: Padding | None) -> Tensor:
        if not self.config.conv:
            return x
        y = convolved(g, batch, self.config, first, x)
        return padding.zeroed(y) if padding else y

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        kind, buckets = choice(raw, "norm_rel_ebd", "none", "layer_norm"), max(raw["position_buckets"], 0)
        return super().read_config(raw) | {
            "norm_rel_ebd": kind == "layer_norm", "position_buckets": buckets, "conv": raw.get("conv_kernel_size", 0),
            "conv_activation": ACTIVATIONS[choice(raw, "conv_act", "tanh", *ACTIVATIONS)],
        }  # fmt: skip

    def hf_config(self) -> dict[str, Any]:
        c = self.config
        return super().hf_config() | {
            "norm_rel_ebd": "layer_norm" if c.norm_rel_ebd and c.relative else "none",
            "conv_kernel_size": c.conv, "conv_act": c.conv_activation,
        }  # fmt: skip
