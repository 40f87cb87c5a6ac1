"""Shared by BERT and its descendants: config, embedding, layers, and reading of transformers' config.

Axes: batch, seq, embed, heads, head_dim, ffn, vocab, position, kind (token type).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from pydantic import model_validator
from typing_extensions import TypeVar  # of pydantic

from nntile_py.graph import packed_inputs
from nntile_py.graph.graph import Graph
from nntile_py.graph.params import Array, Batch
from nntile_py.models.head_config import HeadConfig, HeadedModel
from nntile_py.models.hf_config import ACTIVATIONS, choice, padding_row
from nntile_py.models.model_config import TokenConfig
from nntile_py.models.parts import (
    INIT,
    Dense,
    LayerConfig,
    Sizes,
    check_length,
    dense,
    dense_weights,
    embedded_positions,
    given_positions,
    norm,
    norm_weights,
    position_input,
)
from nntile_py.schema import UNFILLED, BelowOne, Count, Filled, Natural, Positive, Switch
from nntile_py.tasks.activation import ActivationName, activation
from nntile_py.tasks.attention import attention
from nntile_py.tasks.elementwise import add, dropout, rename, transpose
from nntile_py.tasks.embedding import embedding
from nntile_py.tasks.mask import Mask
from nntile_py.tasks.op import Tensor

KEYS = {
    "layers": "num_hidden_layers", "embed": "hidden_size", "heads": "num_attention_heads", "ffn": "intermediate_size",
    "vocab": "vocab_size", "positions": "max_position_embeddings", "kinds": "type_vocab_size",
    "activation": "hidden_act", "layer_norm_eps": "layer_norm_eps", "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob", "tie_embeddings": "tie_word_embeddings",
}  # fmt: skip
PADDED_KEYS = KEYS | {"padding_idx": "pad_token_id"}


class TextEncoderConfig(HeadConfig, LayerConfig, TokenConfig):
    """Config of BERT and its descendants. Each subclass adds the field `layer_norm_eps`."""

    positions: Filled = UNFILLED
    """Length of the longest sequence; null: `train.seq`."""
    masked: Natural | None = None
    """For masked_lm and pretraining: the largest number of masked tokens in a sequence. A training step computes logits
    of the masked tokens only; loss and gradients do not change. 0: logits of all tokens. Null: in `nntile train`
    derived from train.mask_probability, with packed sequences the number of masked tokens, otherwise 0."""
    choices: Count = 2
    """For multiple_choice: how many consecutive sequences of the batch belong to a question. For sentence_embedding:
    how many consecutive sequences form a group of a question, its answer, and wrong answers."""
    sentence_pooling: Literal["mean", "cls"] = "mean"
    """For sentence_embedding: a sequence's vector is the mean of its tokens' hidden states, or the hidden state of its
    first token (`cls`)."""
    temperature: Positive = 0.05
    """For sentence_embedding: cosine similarities are divided by it before the softmax."""
    dropout: BelowOne = 0.0
    """Dropout of the embedding, of the residual branches and before a classifier."""
    activation: ActivationName = "gelu"
    """Activation function of the feed-forward part."""
    tie_embeddings: Switch = True
    """Compute logits of tokens with the weights of the embedding; false: with weights of their own."""

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        self.check_size("embed", "heads")
        self.check_dropout()
        self.fill(ffn=4 * self.embed)
        return self


EncoderConfigT = TypeVar("EncoderConfigT", bound=TextEncoderConfig, default=Any)


class TextEncoder(HeadedModel[EncoderConfigT]):
    """Base class of BERT and its descendants. A subclass sets `Config`, `stem` and other attributes, and `trace`."""

    objective = "masked"
    keys: ClassVar[Mapping[str, str]] = PADDED_KEYS  # {field of the config: key of config.json}
    fixed: ClassVar = {
        "is_decoder": (False, None), "add_cross_attention": (False, None), "is_encoder_decoder": (False, None),
        "position_embedding_type": ("absolute",),
    }  # fmt: skip
    absent: ClassVar[dict[str, Any]] = {"pad_token_id": 0}
    # Name under which some checkpoints also store the token embedding, which the head's last product shares.
    decoder: ClassVar[str] = ""

    def copies(self) -> Mapping[str, str]:
        table = next(name for name in self.weight_shapes() if "embeddings" in name)
        tied = self.config.tie_embeddings and self.config.head in ("masked_lm", "pretraining", "causal_lm")
        bias = self.decoder.removesuffix("weight") + "bias"
        own = bias.replace(".decoder.", ".")  # transformers adds the decoder's bias, tied to this bias
        biases = {bias: own} if own in self.weight_shapes() and bias not in self.weight_shapes() else {}
        return {self.decoder: table} | biases if tied else {}

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        act = choice(raw, cls.keys["activation"], "gelu", *ACTIVATIONS)
        known = cls.Config.model_fields
        found = {
            name: raw[key] for name, key in cls.keys.items()
            if "dropout" not in name and (key in raw or known[name].is_required() or known[name].default is None)
        }  # fmt: skip
        if "padding_idx" in found:
            found["padding_idx"] = padding_row(raw)
        return found | {"activation": ACTIVATIONS[act]} | cls.read_head(raw)

    def hf_options(self) -> dict[str, Any]:
        pooled = "pooler" in self.architectures() and self.config.head in ("sentence_embedding", "none")
        return {"add_pooling_layer": False} if pooled else {}

    def hf_config(self) -> dict[str, Any]:
        c = self.config
        return self.merged_hf(
            {"model_type": c.type} | self.hf_head() | {key: getattr(c, name) for name, key in self.keys.items()}
        )


# -- embedding


def counted_positions(g: Graph, batch: Batch, positions: int | None, padding: int) -> Tensor:
    """Declare the input `positions` [batch, seq] with RoBERTa's positions, by default computed from input_ids.

    Tokens that are not padding get padding + 1, padding + 2, ...; a padding token gets the position `padding`.
    `padding` is the number of the padding token. `positions` is the length of the longest sequence.
    """

    def counted(given: Mapping[str, Array]) -> Array:
        real = given["input_ids"] != padding
        count = np.cumsum(real, axis=1)
        if batch.packed:  # count anew in each sequence of a bin
            begin = np.arange(batch.seq) - packed_inputs.positions_of(given[packed_inputs.SEGMENTS], batch.seq)
            count = count - np.take_along_axis(count - real, begin, axis=1)
        numbers: Array = count * real + padding
        return numbers

    rows = check_length(batch, positions) + padding + 1
    if (given := given_positions(g, batch, rows)) is not None:
        return given
    return g.input("positions", {"batch": batch.size, "seq": batch.seq}, below=rows, default=counted)


def embedded(
    g: Graph,
    batch: Batch,
    c: TextEncoderConfig,
    name: str,
    *,
    kinds: bool = True,
    padding: int | None = None,
    places: bool = True,
    width: int = 0,
    expanded: str = "",
) -> tuple[Tensor, Tensor]:
    """Return the sum of token, position and token type embeddings after LayerNorm and dropout; and the token table.

    Declares the inputs input_ids and, if `kinds`, token_type_ids.

    Args:
        c: Config of the model.
        name: Prefix of the weights: NAME.word_embeddings.weight, NAME.LayerNorm.weight, ...
        kinds: Whether to add token type embeddings.
        padding: Number of the padding token. Positions are then counted from it (see counted_positions), and its rows
            in the tables of tokens and positions get no gradient. None: positions are 0, 1, ..., and row
            c.padding_idx of the token table gets no gradient.
        places: Whether to add position embeddings.
        width: Width of the tables (axis embed); 0: the model's width.
        expanded: Name of a product, without bias, that expands the sum to the model's width before the LayerNorm.
    """
    tokens, embed = {"batch": batch.size, "seq": batch.seq}, {"embed": width or c.embed}
    ids, positions, rows = g.input("input_ids", tokens, below=c.vocab), None, c.positions
    if places:
        positions = position_input(g, batch, rows) if padding is None else counted_positions(g, batch, rows, padding)
    with g.scope("embed"):
        words = g.param(f"{name}.word_embeddings.weight", {"vocab": c.vocab} | embed, INIT)
        x = embedding(g, ids, words, padding=c.padding_idx if padding is None else padding)
        if positions:
            rows += 0 if padding is None else padding + 1
            table = g.param(f"{name}.position_embeddings.weight", {"position": rows} | embed, INIT)
            x = embedded_positions(g, x, positions, table, padding=padding)
        if kinds:
            kind = g.input("token_type_ids", tokens, below=c.kinds, default=0)
            types = g.param(f"{name}.token_type_embeddings.weight", {"kind": c.kinds} | embed, INIT)
            x = add(g, x, embedding(g, kind, types))
        if expanded:
            y = dense(g, x, f"{name}.{expanded}", embed, {"hidden": c.embed}, INIT, bias=False)
            x = rename(g, y, hidden="embed")
        return dropout(g, norm(g, x, f"{name}.LayerNorm", c.layer_norm_eps), c.dropout), words


# -- layers


class LayerNames(NamedTuple):
    """Names of the weights of one layer in a checkpoint, without the layer's prefix."""

    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    attended: str = "attention.output.dense"
    attended_norm: str = "attention.output.LayerNorm"
    wide: str = "intermediate.dense"
    narrow: str = "output.dense"
    narrow_norm: str = "output.LayerNorm"


class EncoderLayer:
    """One encoder layer: attention and a feed-forward part, each followed by residual and norm.

    The constructor declares the weights NAME.attention.self.query.weight, ...; `layer(g, x, mask, scope)` applies
    them. Several calls share the weights.
    """

    def __init__(self, g: Graph, c: TextEncoderConfig, name: str, names: LayerNames) -> None:
        embed, heads = {"embed": c.embed}, {"heads": c.heads, "head_dim": c.embed // c.heads}
        ffn, at = {"ffn": c.ffn}, LayerNames(*(f"{name}.{one}" for one in names))
        self.config = c
        self.projections = self.projected(g, at, embed, heads)
        self.attended = dense_weights(g, at.attended, heads, embed, INIT)
        self.attended_norm = norm_weights(g, at.attended_norm, c.embed)
        self.wide = dense_weights(g, at.wide, embed, ffn, INIT)
        self.narrow = dense_weights(g, at.narrow, ffn, embed, INIT)
        self.narrow_norm = norm_weights(g, at.narrow_norm, c.embed)

    def projected(self, g: Graph, at: LayerNames, embed: Sizes, heads: Sizes) -> list[Dense]:
        """Declare and return the weights of queries, keys and values."""
        return [dense_weights(g, one, embed, heads, INIT) for one in (at.query, at.key, at.value)]

    def attend(self, g: Graph, x: Tensor, mask: Mask) -> Tensor:
        """Return the attention's output before the output projection.

        Its axes are batch, seq, heads and head_dim, in any order.
        """
        c = self.config
        q, k, v = (transpose(g, y(g, x), ["batch", "heads", "seq", "head_dim"]) for y in self.projections)
        return attention(g, q, k, v, mask, c.attention, c.attention_dropout)

    def between(self, g: Graph, x: Tensor, scope: str) -> Tensor:
        """Return x after the layer's parts between attention and feed-forward part; here there are none."""
        return x

    def __call__(self, g: Graph, x: Tensor, mask: Mask, scope: str) -> Tensor:
        """Return the layer's output for x [batch, seq, embed]. `scope` prefixes the operators' names, such as h0."""
        c = self.config
        with g.scope(f"{scope}.attn"):
            y = self.attended(g, transpose(g, self.attend(g, x, mask), ["batch", "seq", "heads", "head_dim"]))
            x = self.attended_norm(g, add(g, dropout(g, y, c.dropout), x), c.layer_norm_eps)
        x = self.between(g, x, scope)
        with g.scope(f"{scope}.mlp"):
            y = self.narrow(g, activation(g, self.wide(g, x), c.activation))
            return self.narrow_norm(g, add(g, dropout(g, y, c.dropout), x), c.layer_norm_eps)
