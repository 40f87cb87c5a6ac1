"""Heads: the last part of a model, which makes logits and a loss from hidden states. Several models share a head.

Axes: batch, seq, embed, hidden (width of a head), vocab, masked (positions to predict), classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nntile_py.errors import ConfigError
from nntile_py.graph.graph import Graph
from nntile_py.graph.params import ZEROS, Array, Batch, Traced
from nntile_py.models.parts import INIT, dense, first_tokens, norm, of_sequences, padding
from nntile_py.tasks.activation import activation
from nntile_py.tasks.contract import contract, linear
from nntile_py.tasks.cross_entropy import IGNORED, cross_entropy
from nntile_py.tasks.elementwise import dropout, rename
from nntile_py.tasks.gather import NOWHERE, gather
from nntile_py.tasks.op import Tensor, accumulation_dtype
from nntile_py.tasks.select import select
from nntile_py.tasks.squared_error import squared_error


def predicted(g: Graph, batch: Batch, c: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the hidden states that need logits, and their labels. Declares the input labels [batch, seq].

    Labels hold the token to predict at each position, -100 at positions without a prediction. With config.masked above
    0, a training step gathers only the positions to predict: [batch, masked, embed]. With packed sequences it also
    does so if config.masked is None. With config.masked 0, and in an evaluation, which may return logits, all positions
    of x [batch, seq, embed] are kept. A step raises ValueError if a sequence has more than config.masked positions to
    predict.
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
    """Return the positions [rows, most] of labels other than -100 in each row of `labels` [rows, seq], then -1.

    Raises:
        ValueError: A row has more than `most` of them.
    """
    counts = (labels != IGNORED).sum(axis=1)
    if counts[row := int(counts.argmax())] > most:
        need = f"at most {most}, for which model.masked was set (0: any number)"
        raise ValueError(f"labels[{row}]: {counts[row]} tokens are to be predicted; allowed: {need}")
    first = np.argsort(labels == IGNORED, axis=1, kind="stable")[:, :most]  # stable: positions stay in order
    places: Array = np.where(np.arange(most) < counts[:, None], first, NOWHERE)
    return places


def labels_at(labels: Array, places: Array) -> Array:
    """Return the labels at the positions `places` of each row; -100 where the position is -1."""
    return np.where(places == NOWHERE, IGNORED, np.take_along_axis(labels, np.maximum(places, 0), axis=1))


def bare(g: Graph, c: Any, x: Tensor, pooler: str | None = None) -> Traced:
    """Return the outputs of a model without a loss: the hidden states `hidden`.

    With head: pooler also `pooled`, a vector for each sequence. Its dense layer has the weights named `pooler`.
    """
    outputs = {"hidden": x}
    if c.head == "pooler" and pooler:
        outputs["pooled"] = first_token(g, x, c, pooler, "tanh")
    return Traced(None, outputs)


def token_logits(
    g: Graph, x: Tensor, c: Any, words: Tensor, kind: str, names: tuple[str, str, str], decoder: str
) -> Tensor:
    """Return logits [..., vocab] of x [..., embed]: a dense layer, an activation, a norm, a product with `words`.

    Args:
        words: The table of token embeddings, which is the last product's weight with config.tie_embeddings.
        kind: The activation function.
        names: Names of the dense layer, of the norm, and of the bias [vocab] of the last product.
        decoder: Name of the last product's weight if it is not the table. The bias then has the name of this weight.
    """
    transform, normed, bias = names
    y = dense(g, x, transform, {"embed": c.embed}, {"hidden": words.size("embed")}, INIT)
    y = norm(g, rename(g, activation(g, y, kind), hidden="embed"), normed, c.layer_norm_eps)
    if not c.tie_embeddings:
        words, bias = g.param(decoder, words.sizes, INIT), f"{decoder.removesuffix('.weight')}.bias"
    return linear(g, y, words, [*x.axes[:-1], "vocab"], g.param(bias, {"vocab": c.vocab}, ZEROS))


def first_token(g: Graph, x: Tensor, c: Any, name: str, kind: str, dropped: float = 0.0) -> Tensor:
    """Return a vector for each sequence, [batch, hidden]: dropout, dense layer and activation of its first token.

    `name` is the prefix of the dense layer's weights, `kind` the activation, `dropped` the dropout probability.
    """
    first = dropout(g, first_tokens(g, x), dropped)
    return activation(g, dense(g, first, name, {"embed": c.embed}, {"hidden": c.embed}, INIT), kind)


def mean_of_tokens(g: Graph, batch: Batch, x: Tensor) -> Tensor:
    """Return the mean vector of each sequence's tokens, [batch, embed] of x [batch, seq, embed], without padding."""
    if batch.packed:
        raise ConfigError("model.pooling: got mean; allowed with packed sequences: cls")
    sizes, mask = {"batch": batch.size, "seq": batch.seq}, padding(g, batch)

    def shares(given: Mapping[str, Array]) -> Array:
        real = given["attention_mask"] != 0
        result: Array = real / real.sum(axis=1, keepdims=True)
        return result

    weights = g.input("token_shares", sizes, None, default=shares if mask else 1 / batch.seq)
    return contract(g, weights, x, ["batch", "embed"])


def classified_tokens(g: Graph, batch: Batch, c: Any, x: Tensor) -> Traced:
    """Return loss and logits of token classification.

    Declares the input labels [batch, seq]: the class of each token, -100 for tokens that do not count.
    """
    logits = dense(g, dropout(g, x, c.dropout), "classifier", {"embed": c.embed}, {"classes": c.classes}, INIT)
    tokens = {"batch": batch.size, "seq": batch.seq}
    labels = g.input("labels", tokens, below=c.classes, ignored=IGNORED, scale="loss_scale")
    return Traced(cross_entropy(g, logits, labels), {"logits": logits})


def classified(g: Graph, batch: Batch, c: Any, pooled: Tensor, name: str = "classifier") -> Traced:
    """Return loss and logits of a classifier of sequences, whose vectors are `pooled`.

    Declares the input labels [batch]: the class of each sequence. With head: regression the labels are the numbers to
    predict: [batch], or [batch, classes] if there are several for each sequence.
    """
    logits = dense(g, dropout(g, pooled, c.dropout), name, {"hidden": c.embed}, {"classes": c.classes}, INIT)
    if c.head == "regression":
        if batch.packed:
            raise ConfigError("model.head: got regression; allowed with packed sequences: another head")
        y = select(g, logits, "classes", 0) if c.classes == 1 else logits
        numbers = g.input("labels", y.sizes, accumulation_dtype(g.dtype), scale="mse_scale")
        return Traced(squared_error(g, y, numbers), {"logits": logits})
    labels = g.input("labels", of_sequences(batch), below=c.classes, ignored=IGNORED, scale="loss_scale")
    return Traced(cross_entropy(g, logits, labels), {"logits": logits})
