"""What BERT and the models that came from it share: config, embedding, layers, heads, how transformers' is read.

Axes: batch, seq, embed, hidden (of a head), heads, head_dim, ffn, vocab, position, kind (of token), classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args

import numpy as np
from pydantic import model_validator

from nntile_py.errors import ConfigError
from nntile_py.graph import packed_inputs
from nntile_py.graph.graph import Graph
from nntile_py.graph.params import ZEROS, Array, Batch, Normal, Traced
from nntile_py.models.base import Model, TokenConfig
from nntile_py.models.hf_config import ACTIVATIONS, architecture, choice, padding_row
from nntile_py.models.parts import (
    ActivationName,
    Dense,
    LayerConfig,
    Sizes,
    check_length,
    dense,
    dense_weights,
    embedded_positions,
    first_tokens,
    norm,
    norm_weights,
    of_sequences,
    position_input,
)
from nntile_py.schema import BelowOne, Count, Natural
from nntile_py.tasks.activation import activation
from nntile_py.tasks.attention import attention
from nntile_py.tasks.contract import linear
from nntile_py.tasks.cross_entropy import IGNORED, cross_entropy
from nntile_py.tasks.elementwise import add, dropout, rename, transpose
from nntile_py.tasks.embedding import embedding
from nntile_py.tasks.gather import NOWHERE, gather
from nntile_py.tasks.mask import Mask
from nntile_py.tasks.op import Tensor, accumulation_dtype
from nntile_py.tasks.select import select
from nntile_py.tasks.squared_error import squared_error

INIT = Normal(0.02)
# Last parts of the names of transformers' classes, by head. A class with two heads reads as the last one.
CLASSES = {
    "masked_lm": "ForMaskedLM", "pretraining": "ForPreTraining", "regression": "ForSequenceClassification",
    "classification": "ForSequenceClassification", "token_classification": "ForTokenClassification",
    "pooler": "Model", "none": "Model",
}  # fmt: skip
KEYS = {
    "layers": "num_hidden_layers", "embed": "hidden_size", "heads": "num_attention_heads", "ffn": "intermediate_size",
    "vocab": "vocab_size", "positions": "max_position_embeddings", "kinds": "type_vocab_size",
    "activation": "hidden_act", "layer_norm_eps": "layer_norm_eps", "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
}  # fmt: skip
PADDED_KEYS = KEYS | {"padding_idx": "pad_token_id"}


class TextEncoderConfig(LayerConfig, TokenConfig):
    """Of BERT and its like; each adds `layer_norm_eps`."""

    positions: Count | None = None
    """Length of the longest sequence; null: `train.seq`."""
    head: Literal[
        "masked_lm", "pretraining", "regression", "classification", "token_classification", "pooler", "none"
    ] = "masked_lm"
    """What the model predicts. `nntile train` trains masked_lm and classification; pretraining, regression (mean
    squared error) and token_classification are trained from Python. Without a loss, for nt.Encoder: `none` returns
    hidden states, `pooler` also a vector for each sequence."""
    classes: Count | None = None
    """Number of classes of a head for classification or token_classification; for regression, the number of values to
    predict. Null: the number of `labels`; without `labels`: 2, for regression 1."""
    labels: list[str] | None = None
    """Names of a classifier's classes, in order. Null: `nntile train` sorts the labels of the table; numeric labels are
    sorted by value."""
    masked: Natural | None = None
    """For masked_lm and pretraining: the largest number of masked tokens in a sequence. A training step computes logits
    of the masked tokens only; loss and gradients do not change. 0: logits of all tokens. Null: in `nntile train`
    derived from train.mask_probability, with packed sequences the number of masked tokens, otherwise 0."""
    dropout: BelowOne = 0.0
    """Dropout of the embedding, of the residual branches and before a classifier."""
    activation: ActivationName = "gelu"
    """Activation function of the feed-forward part."""

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        self.check_size("embed", "heads")
        self.check_dropout()
        self.fill(classes=len(self.labels or ()) or (1 if self.head == "regression" else 2))
        if self.head == "classification" and self.classes == 1:
            need = "at least 2 with head: classification; head: regression predicts a number"
            raise ConfigError(f"model.classes: got 1; allowed: {need}")
        if self.labels is not None and len(self.labels) != self.classes:
            need = f"a name for each of model.classes = {self.classes}"
            raise ConfigError(f"model.labels: got {len(self.labels)} names; allowed: {need}")
        if self.labels is not None and len(set(self.labels)) != self.classes:
            raise ConfigError("model.labels: a name is there twice; allowed: each once")
        self.fill(ffn=4 * self.embed)
        return self


class TextEncoder(Model):
    """A model of this family."""

    objective = "masked"
    head_fields = ("head", "classes", "labels")
    stem: ClassVar[str]  # first part of the names of transformers' classes
    keys: ClassVar[Mapping[str, str]] = PADDED_KEYS  # fields of the config: keys of config.json
    fixed: ClassVar = {
        "is_decoder": (False, None), "add_cross_attention": (False, None), "is_encoder_decoder": (False, None),
        "position_embedding_type": ("absolute",), "tie_word_embeddings": (True,),
        "problem_type": (None, "single_label_classification", "regression"),
    }  # fmt: skip
    absent: ClassVar[dict[str, Any]] = {"pad_token_id": 0}
    decoder: ClassVar[str] = ""  # weight of a head that computes with the tokens' table, in some checkpoints

    @classmethod
    def architectures(cls) -> dict[str, str]:
        """Return transformers' class for each head of the model."""
        return {head: cls.stem + CLASSES[head] for head in get_args(cls.Config.model_fields["head"].annotation)}

    def copies(self) -> Mapping[str, str]:
        table = next(name for name in self.weight_shapes() if "embeddings" in name)
        return {self.decoder: table} if self.config.head in ("masked_lm", "pretraining") else {}

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        heads = {name: head for head, name in cls.architectures().items()}
        head = heads[architecture(raw, *heads)]
        act, names = choice(raw, cls.keys["activation"], *ACTIVATIONS), raw.get("id2label") or {}
        if not isinstance(names, dict):
            raise ConfigError(f"model: id2label is {names!r} in the model's config; allowed: an object")
        known = cls.Config.model_fields
        found = {
            name: raw[key] for name, key in cls.keys.items()
            if "dropout" not in name and (key in raw or known[name].is_required() or known[name].default is None)
        }  # fmt: skip
        if "padding_idx" in found:
            found["padding_idx"] = padding_row(raw)
        classes, problem = len(names) or raw.get("num_labels", 2), raw.get("problem_type")
        if head == "classification" and (problem == "regression" or (classes == 1 and problem is None)):
            head = "regression"
        labels = None if head == "regression" else _labels(names)
        return found | {"head": head, "activation": ACTIVATIONS[act], "classes": classes, "labels": labels}

    def hf_options(self) -> dict[str, Any]:
        pooled = "pooler" in self.architectures() and self.config.head == "none"
        return {"add_pooling_layer": False} if pooled else {}

    def hf_config(self) -> dict[str, Any]:
        c = self.config
        own = {"model_type": c.type, "architectures": [self.architectures()[c.head]], "num_labels": c.classes}
        if c.head == "regression":
            own["problem_type"] = "regression"
        if c.labels:
            own["id2label"] = {str(number): name for number, name in enumerate(c.labels)}
            own["label2id"] = {name: number for number, name in enumerate(c.labels)}
        return self.merged_hf(own | {key: getattr(c, name) for name, key in self.keys.items()})


def _labels(names: Mapping[Any, Any]) -> list[str] | None:
    """The classes' names of transformers' id2label; None where it has none of its own."""
    found = [names.get(str(number), names.get(number)) for number in range(len(names))]
    named = all(isinstance(one, str) for one in found) and len(set(found)) == len(found)
    return found if named and found != [f"LABEL_{number}" for number in range(len(found))] and found else None


# -- embedding


def counted_positions(g: Graph, batch: Batch, positions: int | None, padding: int) -> Tensor:
    """Positions [batch, seq] as RoBERTa counts them: padding + 1, padding + 2, ... over the tokens that are no padding.

    The token `padding` itself has the position `padding`. Made of input_ids unless a step gives them as `positions`.
    """

    def counted(given: Mapping[str, Array]) -> Array:
        real = given["input_ids"] != padding
        count = np.cumsum(real, axis=1)
        if batch.packed:  # from where each sequence begins
            begin = np.arange(batch.seq) - packed_inputs.positions_of(given[packed_inputs.SEGMENTS], batch.seq)
            count = count - np.take_along_axis(count - real, begin, axis=1)
        numbers: Array = count * real + padding
        return numbers

    rows = check_length(batch, positions) + padding + 1
    return g.input("positions", {"batch": batch.size, "seq": batch.seq}, below=rows, default=counted)


def embedded(
    g: Graph,
    batch: Batch,
    c: Any,
    name: str,
    *,
    kinds: bool = True,
    padding: int | None = None,
    places: bool = True,
    width: int = 0,
) -> tuple[Tensor, Tensor]:
    """The normed sum of the embeddings of tokens, positions and token types; and the tokens' table.

    Their tables are NAME.word_embeddings.weight and so on. Inputs: input_ids, token_type_ids if there are kinds.
    padding: number of the padding token from which positions are counted (see counted_positions), and of the rows
    without a gradient in the tables of tokens and positions; None: positions are 0, 1, ..., and the row
    config.padding_idx of the tokens' table has no gradient.
    places: whether there is a table of positions. width: of the tables, where it is another one than the model's; it
    has the axis embed, too.
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
        return dropout(g, norm(g, x, f"{name}.LayerNorm", c.layer_norm_eps), c.dropout), words


# -- layers


class LayerNames(NamedTuple):
    """What a checkpoint calls the weights of one layer, behind the layer's own name."""

    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    attended: str = "attention.output.dense"
    attended_norm: str = "attention.output.LayerNorm"
    wide: str = "intermediate.dense"
    narrow: str = "output.dense"
    narrow_norm: str = "output.LayerNorm"


class EncoderLayer:
    """Attention and a feed-forward part, each with its norm after the residual, and their weights: NAME.query, ..."""

    def __init__(self, g: Graph, c: Any, name: str, names: LayerNames) -> None:
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
        """The weights of queries, keys and values."""
        return [dense_weights(g, one, embed, heads, INIT) for one in (at.query, at.key, at.value)]

    def attend(self, g: Graph, x: Tensor, mask: Mask) -> Tensor:
        """The heads' output, with the axes batch, seq, heads and head_dim in any order."""
        c = self.config
        q, k, v = (transpose(g, y(g, x), ["batch", "heads", "seq", "head_dim"]) for y in self.projections)
        return attention(g, q, k, v, mask, c.attention, c.attention_dropout)

    def __call__(self, g: Graph, x: Tensor, mask: Mask, scope: str) -> Tensor:
        """The layer's output for x [batch, seq, embed]."""
        c = self.config
        with g.scope(f"{scope}.attn"):
            y = self.attended(g, transpose(g, self.attend(g, x, mask), ["batch", "seq", "heads", "head_dim"]))
            x = self.attended_norm(g, add(g, dropout(g, y, c.dropout), x), c.layer_norm_eps)
        with g.scope(f"{scope}.mlp"):
            y = self.narrow(g, activation(g, self.wide(g, x), c.activation))
            return self.narrow_norm(g, add(g, dropout(g, y, c.dropout), x), c.layer_norm_eps)


# -- heads


def predicted(g: Graph, batch: Batch, c: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of x [batch, seq, embed] that logits are needed of, and their labels.

    The input is labels [batch, seq]: the token of each position, -100 where none is to be predicted. Where
    config.masked says how many are, a training step takes those rows alone, [batch, masked, embed]; of packed sequences
    as many as there are. An evaluation takes all, as it may return the logits. ValueError in a step: a row has more.
    """
    tokens, options = {"batch": batch.size, "seq": batch.seq}, {"below": c.vocab, "ignored": IGNORED}
    most = batch.seq if batch.packed else min(batch.seq, c.masked or 0)
    if c.masked == 0 or not most or not g.training:
        return x, g.input("labels", tokens, **options, scale="loss_scale")
    g.input("labels", tokens, **options, max_count=most)
    masked = {"batch": batch.size, "masked": most}
    places = g.input(
        "masked_places", masked, below=batch.seq, ignored=NOWHERE,
        default=lambda given: masked_places(given["labels"], most),
    )  # fmt: skip
    labels = g.input(
        "masked_labels", masked, **options, scale="loss_scale",
        default=lambda given: labels_at(given["labels"], given["masked_places"]),
    )  # fmt: skip
    return gather(g, x, places), labels


def masked_places(labels: Array, most: int) -> Array:
    """The positions [rows, most] of the labels [rows, seq] that count, then -1. ValueError: more count in a row."""
    counts = (labels != IGNORED).sum(axis=1)
    if counts[row := int(counts.argmax())] > most:
        need = f"at most {most}, for which model.masked was set (0: any number)"
        raise ValueError(f"labels[{row}]: {counts[row]} tokens are to be predicted; allowed: {need}")
    first = np.argsort(labels == IGNORED, axis=1, kind="stable")[:, :most]  # those that count, in their order
    places: Array = np.where(np.arange(most) < counts[:, None], first, NOWHERE)
    return places


def labels_at(labels: Array, places: Array) -> Array:
    """The labels at these places, -100 where a place is none."""
    return np.where(places == NOWHERE, IGNORED, np.take_along_axis(labels, np.maximum(places, 0), axis=1))


def bare(g: Graph, c: Any, x: Tensor, pooler: str | None = None) -> Traced:
    """What a model without a loss ends in: the hidden states; with head: pooler, what stands for a sequence besides,
    whose product has the weights `pooler`."""
    outputs = {"hidden": x}
    if c.head == "pooler" and pooler:
        outputs["pooled"] = first_token(g, x, c, pooler, "tanh")
    return Traced(None, outputs)


def token_logits(g: Graph, x: Tensor, c: Any, words: Tensor, kind: str, names: tuple[str, str, str]) -> Tensor:
    """Logits [..., vocab] of x [..., embed] by the tokens' own table, after a product, the activation `kind`, a norm.

    names: of the product, of the norm, of the bias for each token of the vocabulary.
    """
    transform, normed, bias = names
    y = dense(g, x, transform, {"embed": c.embed}, {"hidden": words.size("embed")}, INIT)
    y = norm(g, rename(g, activation(g, y, kind), hidden="embed"), normed, c.layer_norm_eps)
    return linear(g, y, words, [*x.axes[:-1], "vocab"], g.param(bias, {"vocab": c.vocab}, ZEROS))


def first_token(g: Graph, x: Tensor, c: Any, name: str, kind: str, dropped: float = 0.0) -> Tensor:
    """What stands for a sequence [batch, hidden]: a product and the activation `kind` of its first position, of which
    the share `dropped` is dropped before."""
    first = dropout(g, first_tokens(g, x), dropped)
    return activation(g, dense(g, first, name, {"embed": c.embed}, {"hidden": c.embed}, INIT), kind)


def classified_tokens(g: Graph, batch: Batch, c: Any, x: Tensor) -> Traced:
    """Logits and loss of labels [batch, seq], the class of each token, -100 where it does not count."""
    logits = dense(g, dropout(g, x, c.dropout), "classifier", {"embed": c.embed}, {"classes": c.classes}, INIT)
    tokens = {"batch": batch.size, "seq": batch.seq}
    labels = g.input("labels", tokens, below=c.classes, ignored=IGNORED, scale="loss_scale")
    return Traced(cross_entropy(g, logits, labels), {"logits": logits})


def classified(g: Graph, batch: Batch, c: Any, pooled: Tensor, name: str = "classifier") -> Traced:
    """Logits and loss of labels [batch], the class of each sequence; with head: regression its number, or its numbers
    [batch, classes]."""
    logits = dense(g, dropout(g, pooled, c.dropout), name, {"hidden": c.embed}, {"classes": c.classes}, INIT)
    if c.head == "regression":
        if batch.packed:
            raise ConfigError("model.head: got regression; allowed with packed sequences: another head")
        y = select(g, logits, "classes", 0) if c.classes == 1 else logits
        numbers = g.input("labels", y.sizes, accumulation_dtype(g.dtype), scale="mse_scale")
        return Traced(squared_error(g, y, numbers), {"logits": logits})
    labels = g.input("labels", of_sequences(batch), below=c.classes, ignored=IGNORED, scale="loss_scale")
    return Traced(cross_entropy(g, logits, labels), {"logits": logits})
