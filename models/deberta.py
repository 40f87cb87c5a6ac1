"""DeBERTa (He et al. 2021) and its versions 2 and 3 as in transformers: attention by content and by relative position.

The score of a query q and a key k at distance d is (q k + q r_k[d] + k r_q[d]) / sqrt(3 head_dim). r_k[d] and r_q[d]
are projections of the embedding of d. Version 1 clips d. Versions 2 and 3 group distances into buckets; buckets of
large distances are wider, on a logarithmic scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from pydantic import model_validator

from nntile_py.errors import ConfigError
from nntile_py.graph.graph import Graph
from nntile_py.graph.params import ZEROS, Array, Batch, Part, Traced
from nntile_py.models.bert_parts import PADDED_KEYS, EncoderLayer, LayerNames, TextEncoder, TextEncoderConfig, embedded
from nntile_py.models.heads import bare, classified, first_token, predicted, token_logits
from nntile_py.models.hf_config import choice
from nntile_py.models.parts import INIT, Dense, PaddedConfig, Sizes, attention_mask, check_length, dense_weights, norm
from nntile_py.schema import Count, Positive, integer, short
from nntile_py.tasks.contract import contract
from nntile_py.tasks.cross_entropy import cross_entropy
from nntile_py.tasks.elementwise import dropout, rename, transpose
from nntile_py.tasks.embedding import embedding
from nntile_py.tasks.mask import Mask
from nntile_py.tasks.op import Tensor
from nntile_py.tasks.relative import relative_scores
from nntile_py.tasks.softmax import softmax

_HEAD = "lm_predictions.lm_head.dense", "lm_predictions.lm_head.LayerNorm", "lm_predictions.lm_head.bias"
_LEGACY_HEAD = "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias"
_KINDS = "c2p", "p2c"


class DeBERTaConfig(TextEncoderConfig, PaddedConfig):
    type: str = "deberta"
    head: Literal["masked_lm", "regression", "classification", "none"] = "masked_lm"
    """What the model predicts. `none`: the model returns hidden states and has no loss, for nt.Encoder."""
    legacy: bool = False
    """Names of the weights of the head for masked_lm. True: cls.predictions..., as in transformers' models with
    `legacy`; false: lm_predictions.lm_head..., as in the published checkpoints."""
    kinds: Annotated[int, *integer(0)] = 0
    """Number of token types (transformers' token_type_ids); 0: the model has no token types."""
    attention: Literal["naive"] = "naive"
    """The attention backend: only `naive`, which stores all scores in memory. Other backends have no relative
    positions."""
    layer_norm_eps: Positive = 1e-7
    """Added to the variance in LayerNorm."""
    c2p: bool = True
    """Attention scores include products of queries with embeddings of distances (content to position)."""
    p2c: bool = True
    """Attention scores include products of keys with embeddings of distances (position to content)."""
    relative_positions: Count | None = None
    """All distances from this number of tokens on share one embedding; null: `positions`."""
    position_biased_input: bool = False
    """The embedding of a token includes an embedding of its absolute position."""

    @property
    def buckets(self) -> int:
        """Number of buckets of distances in each direction; 0: each distance has its own embedding."""
        return 0

    @property
    def longest(self) -> int | None:
        """Number of tokens from which on all distances share one embedding."""
        return self.relative_positions or self.positions

    @model_validator(mode="after")
    def _relative(self) -> Self:
        if not (self.c2p or self.p2c):
            raise ConfigError("model.c2p: got false, and model.p2c is false; allowed: true for one of them or both")
        longest = self.longest
        if self.buckets and longest and not 1 <= self.buckets // 2 < longest - 1:
            need = f"0, or from 2 to {2 * longest - 3}, as the longest distance is {longest}"
            raise ConfigError(f"model.position_buckets: got {self.buckets}; allowed: {need}")
        return self


class DeBERTaV2Config(DeBERTaConfig):
    type: str = "deberta-v2"
    position_buckets: Annotated[int, *integer(0)] = 0
    """Number of embeddings of distances in each direction. Distances up to half of this number have their own
    embedding; larger distances share the other half, on a logarithmic scale. 0: each distance has its own embedding."""
    share_att_key: bool = True
    """Embeddings of distances are multiplied by the weights of queries and keys; false: by weights of their own."""
    norm_rel_ebd: bool = True
    """Apply a LayerNorm to the embeddings of distances."""

    @property
    def buckets(self) -> int:
        return self.position_buckets


# -- relative positions


def log_buckets(distance: Array, buckets: int, longest: int) -> Array:
    """Return the bucket (int64) of each distance between key and query.

    With m = buckets / 2, the bucket of a distance d up to m is d. The bucket of a larger d is
    m + ceil((m - 1) log(d / m) / log((longest - 1) / m)). Negative distances have negative buckets. The logarithm is
    computed in fp32, because its rounding decides where a bucket ends: results equal those of transformers'
    make_log_bucket_position.
    """
    import torch

    middle, size = buckets // 2, np.abs(distance)
    logarithm = torch.log(torch.from_numpy(np.maximum(size, middle)) / middle)
    steps = logarithm / torch.log(torch.tensor((longest - 1) / middle)) * (middle - 1)
    return np.where(size <= middle, distance, np.sign(distance) * (steps.ceil().long().numpy() + middle))


def distance_rows(places: int, length: int, buckets: int, longest: int) -> tuple[Array, Array]:
    """Return the rows of the distance table that are needed, in descending order, and an index into them.

    The index has an entry for each distance query - key from places - 1 down to -(places - 1).

    Args:
        places: Size of the axis seq.
        length: Length of the longest sequence. Distances of `length` or more have the row of distance length - 1.
        buckets: Number of buckets in each direction; 0: each distance has a row.
        longest: The number of rows in each direction without buckets.
    """
    distance, span = np.clip(np.arange(places - 1, -places, -1), 1 - length, length - 1), buckets or longest
    bucket = log_buckets(distance, buckets, longest) if buckets else distance
    rows, index = np.unique(-np.clip(bucket + span, 0, 2 * span - 1), return_inverse=True)
    return -rows, index


class Relative(NamedTuple):
    """Embeddings of distances between query and key, for RelativeScores.

    Attributes:
        table: Embeddings [relative, embed], only of the distances that occur.
        of_distance: Row of the table for each distance, [distance].
    """

    table: Tensor
    of_distance: Tensor


class DeBERTaLayer(EncoderLayer):
    """A layer of version 1. Its checkpoint has one weight that holds, head by head, query, key and value weights."""

    def __init__(self, g: Graph, c: Any, name: str, relative: Relative) -> None:
        self.own, self.relative = f"{name}.attention.self", relative
        super().__init__(g, c, name, LayerNames(*(f"attention.self.{one}_proj" for one in ("query", "key", "value"))))
        embed, heads = {"embed": c.embed}, {"heads": c.heads, "head_dim": c.embed // c.heads}
        self.position_key, self.position_query = self.position_weights(g, embed, heads)

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
        c, table = self.config, dropout(g, self.relative.table, self.config.dropout)
        if c.attention_dropout and g.row_numbers:
            told = "allowed with packed sequences: 0, as DeBERTa keeps its scores in memory"
            raise ConfigError(f"model.attention_dropout: got {c.attention_dropout}; {told}")
        q, k, v = (transpose(g, y(g, x), ["heads", "batch", "seq", "head_dim"]) for y in self.projections)
        k, v = rename(g, k, seq="key"), rename(g, v, seq="key")
        scale = 1 / math.sqrt(q.size("head_dim") * (1 + c.c2p + c.p2c))

        def products(content: Tensor, weights: Dense) -> Tensor:
            return contract(g, content, weights(g, table), [*content.axes[:3], "relative"], scale=scale)

        scores = contract(g, q, k, [*q.axes[:3], "key"], scale=scale)
        of_queries = products(q, self.position_key) if c.c2p and self.position_key else None
        of_keys = products(k, self.position_query) if c.p2c and self.position_query else None
        scores = relative_scores(g, scores, self.relative.of_distance, of_queries, of_keys)
        return contract(g, dropout(g, softmax(g, scores, mask), c.attention_dropout), v, q.axes)


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


class DeBERTa(TextEncoder):
    """DeBERTa, version 1. Inputs: input_ids, labels; optionally attention_mask, and token_type_ids if the model has
    token types.

    Labels by head. masked_lm: the masked token of each position, -100 at unmasked positions; classification: a class
    for each sequence, [batch]. Outputs at padding positions differ from transformers': here padding attends to the
    other tokens, in transformers to nothing."""

    Config: ClassVar[Any] = DeBERTaConfig
    Layer: ClassVar[Any] = DeBERTaLayer
    prefix = "deberta."
    stem = "Deberta"
    # Published checkpoints lack the key `legacy`, which counts as true, but name the head's weights as in _HEAD.
    old_names: ClassVar = dict(zip(_HEAD, _LEGACY_HEAD, strict=True))
    decoder = "cls.predictions.decoder.weight"
    fixed: ClassVar = TextEncoder.fixed | {
        "relative_attention": (True,), "talking_head": (False,), "conv_kernel_size": (0,),
        "pooler_hidden_act": ("gelu",),
    }  # fmt: skip
    absent: ClassVar = {
        "pad_token_id": 0, "relative_attention": False, "position_biased_input": True, "layer_norm_eps": 1e-7,
        "type_vocab_size": 0, "legacy": True,
    }  # fmt: skip
    keys: ClassVar = PADDED_KEYS | {"position_biased_input": "position_biased_input", "legacy": "legacy"}

    def relative(self, g: Graph, batch: Batch) -> Relative:
        """Look up the embeddings of the distances that occur in this batch, not of the whole table."""
        c, name = self.config, "deberta.encoder.rel_embeddings.weight"
        rows, index = distance_rows(batch.seq, batch.length, c.buckets, c.longest)
        size = 2 * (c.buckets or c.longest)
        used = g.input("relative_rows", {"relative": len(rows)}, below=size, default=rows)
        of_distance = g.input("relative_index", {"distance": len(index)}, below=len(rows), default=index)
        with g.scope("relative"):
            table = embedding(g, used, g.param(name, {"bucket": size, "embed": c.embed}, INIT))
            return Relative(self.normed(g, table), of_distance)

    def normed(self, g: Graph, table: Tensor) -> Tensor:
        """Return the embeddings of distances as the layers use them. Versions 2 and 3 may apply a norm."""
        return table

    def trace(self, g: Graph, batch: Batch) -> Traced:
        c = self.config
        check_length(batch, c.positions)
        places = c.position_biased_input
        x, words = embedded(g, batch, c, "deberta.embeddings", kinds=c.kinds > 0, places=places)
        relative, mask = self.relative(g, batch), attention_mask(g, batch)
        for layer in range(c.layers):
            x = self.Layer(g, c, f"deberta.encoder.layer.{layer}", relative)(g, x, mask, f"h{layer}")
        with g.scope("head"):
            if c.head == "none":
                return bare(g, c, x)
            if c.head in ("classification", "regression"):
                return classified(g, batch, c, first_token(g, x, c, "pooler.dense", "gelu"))
            y, labels = predicted(g, batch, c, x)
            logits = token_logits(g, y, c, words, c.activation, _LEGACY_HEAD if c.legacy else _HEAD)
            return Traced(cross_entropy(g, logits, labels), {"logits": logits})

    # -- transformers

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        width = raw["hidden_size"]
        for key in ("embedding_size", "pooler_hidden_size"):
            choice(raw, key, width)
        choice(raw, "attention_head_size", width // raw["num_attention_heads"])
        kinds, longest = _kinds(raw.get("pos_att_type")), raw.get("max_relative_positions", -1)
        fields = super().read_config(raw) | {kind: kind in kinds for kind in _KINDS}
        return fields | {"relative_positions": longest if longest > 0 else None}

    def hf_config(self) -> dict[str, Any]:
        c = self.config
        return super().hf_config() | {
            "relative_attention": True, "legacy": c.legacy, "max_relative_positions": c.relative_positions or -1,
            "pos_att_type": [kind for kind in _KINDS if getattr(c, kind)],
        }  # fmt: skip


class DeBERTaV2(DeBERTa):
    """DeBERTa, versions 2 and 3. The convolution in the larger models of version 2 is not supported. Inputs are those
    of DeBERTa."""

    Config = DeBERTaV2Config
    Layer = DeBERTaV2Layer
    stem = "DebertaV2"
    absent: ClassVar = DeBERTa.absent | {"share_att_key": False, "position_buckets": -1}
    keys: ClassVar = DeBERTa.keys | {"share_att_key": "share_att_key", "position_buckets": "position_buckets"}

    def normed(self, g: Graph, table: Tensor) -> Tensor:
        c = self.config
        return norm(g, table, "deberta.encoder.LayerNorm", c.layer_norm_eps) if c.norm_rel_ebd else table

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        kind, buckets = choice(raw, "norm_rel_ebd", "none", "layer_norm"), max(raw["position_buckets"], 0)
        return super().read_config(raw) | {"norm_rel_ebd": kind == "layer_norm", "position_buckets": buckets}

    def hf_config(self) -> dict[str, Any]:
        return super().hf_config() | {"norm_rel_ebd": "layer_norm" if self.config.norm_rel_ebd else "none"}


def _kinds(value: Any) -> list[str]:
    """Return the list of score terms, c2p and/or p2c, from pos_att_type: a list, or a text such as "c2p|p2c"."""
    found = value.split("|") if isinstance(value, str) else value
    if not found or not isinstance(found, list) or not set(found) <= set(_KINDS) or len(set(found)) < len(found):
        raise ConfigError(f"model: pos_att_type is {short(value)} in the model's config; allowed: c2p, p2c or both")
    return found
