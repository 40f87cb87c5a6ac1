"""Heads: the last part of a model, which makes logits and a loss from hidden states. Several models share a head.

Axes: batch, seq, embed, hidden (width of a head), vocab, masked (positions to predict), classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from nntile_py.errors import ConfigError
from nntile_py.graph import packed_inputs
from nntile_py.graph.graph import Graph
from nntile_py.graph.initializers import ZEROS
from nntile_py.graph.params import Array, Batch, Traced
from nntile_py.models.head_config import HeadConfig
from nntile_py.models.parts import INIT, dense, first_tokens, norm, of_sequences, padding
from nntile_py.tasks.activation import activation
from nntile_py.tasks.binary_cross_entropy import binary_cross_entropy
from nntile_py.tasks.contract import contract, linear
from nntile_py.tasks.cross_entropy import IGNORED, cross_entropy
from nntile_py.tasks.elementwise import dropout, rename
from nntile_py.tasks.gather import NOWHERE, gather
from nntile_py.tasks.op import Tensor, accumulation_dtype
from nntile_py.tasks.rms_norm import rms_norm
from nntile_py.tasks.select import select
from nntile_py.tasks.squared_error import squared_error


def predicted(g: Graph, batch: Batch, c: HeadConfig, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the hidden states that need logits, and their labels. Declares the input labels [batch, seq].

    Labels hold the token to predict at each position, -100 at positions without a prediction. With head: causal_lm the
    labels are the tokens themselves; the trainer shifts them by one position, and all positions are kept.

    With config.masked above 0, a training step gathers only the positions to predict: [batch, masked, embed]. With
    packed sequences it also does so if config.masked is None. With config.masked 0, and in an evaluation, which may
    return logits, all positions of x [batch, seq, embed] are kept. A step raises ValueError if a sequence has more than
    config.masked positions to predict.
    """
    tokens, options = {"batch": batch.size, "seq": batch.seq}, {"below": c.vocab, "ignored": IGNORED}
    if c.head == "causal_lm":
        return x, g.input("labels", tokens, **options, shifted=True, scale="loss_scale")
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
        ValueError: A row has more than `most` such positions.
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


def bare(g: Graph, c: HeadConfig, x: Tensor, pooler: str | None = None) -> Traced:
    """Return the outputs of a model without a loss: the hidden states `hidden`.

    With head: pooler also `pooled`, a vector for each sequence. Its dense layer has the weights named `pooler`.
    """
    outputs = {"hidden": x}
    if c.head == "pooler" and pooler:
        outputs["pooled"] = first_token(g, x, c, pooler, "tanh")
    return Traced(None, outputs)


def token_logits(
    g: Graph, x: Tensor, c: HeadConfig, words: Tensor, kind: str, names: tuple[str, str, str], decoder: str
) -> Tensor:
    """Return logits [..., vocab] of x [..., embed]: a dense layer, an activation, a norm, a product with `words`.

    Args:
        words: The table of token embeddings, which is the last product's weight with config.tie_embeddings.
        kind: The activation function.
        names: Names of the dense layer, of the norm, and of the bias [vocab] of the last product.
        decoder: Without config.tie_embeddings: name of the last product's weight, NAME.weight. Its bias is NAME.bias.
    """
    transform, normed, bias = names
    y = dense(g, x, transform, {"embed": c.embed}, {"hidden": words.size("embed")}, INIT)
    y = norm(g, rename(g, activation(g, y, kind), hidden="embed"), normed, c.layer_norm_eps)
    if not c.tie_embeddings:
        words, bias = g.param(decoder, words.sizes, INIT), f"{decoder.removesuffix('.weight')}.bias"
    return linear(g, y, words, [*x.axes[:-1], "vocab"], g.param(bias, {"vocab": c.vocab}, ZEROS))


def first_token(g: Graph, x: Tensor, c: HeadConfig, name: str, kind: str, dropped: float = 0.0) -> Tensor:
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


def sequence_or_token_head(
    g: Graph, batch: Batch, c: HeadConfig, x: Tensor, vector: Callable[[], Tensor], *, name: str = "classifier",
    pooler: str | None = None, answers: str = "qa_outputs", answer_dropout: float = 0.0,
) -> Traced | None:  # fmt: skip
    """Return loss and outputs of config.head for hidden states x; None if it predicts tokens of the vocabulary.

    Args:
        vector: Makes a vector for each sequence: [batch, hidden].
        name: Prefix of the weights of a classifier of sequences.
        pooler: Prefix of the weights of the pooler.
        answers: Prefix of the weights for question_answering.
        answer_dropout: Probability of dropout before these weights.
    """
    match c.head:
        case "none" | "pooler":
            return bare(g, c, x, pooler)
        case "sentence_embedding":
            return compared(g, batch, c, x)
        case "token_classification":
            return classified_tokens(g, batch, c, x)
        case "question_answering":
            return answered(g, batch, dropout(g, x, answer_dropout), answers)
        case "multiple_choice":
            return chosen(g, batch, c, dropout(g, vector(), c.dropout))
        case "classification" | "regression" | "multi_label_classification":
            return classified(g, batch, c, dropout(g, vector(), c.dropout), name)
    return None


def classified_tokens(g: Graph, batch: Batch, c: HeadConfig, x: Tensor) -> Traced:
    """Return loss and logits of token classification.

    Declares the input labels [batch, seq]: the class of each token, -100 for tokens that do not count.
    """
    logits = dense(g, dropout(g, x, c.dropout), "classifier", {"embed": c.embed}, {"classes": c.classes}, INIT)
    tokens = {"batch": batch.size, "seq": batch.seq}
    labels = g.input("labels", tokens, below=c.classes, ignored=IGNORED, scale="loss_scale")
    return Traced(cross_entropy(g, logits, labels), {"logits": logits})


def classified(
    g: Graph, batch: Batch, c: HeadConfig, vectors: Tensor, name: str = "classifier", *, bias: bool = True
) -> Traced:
    """Return loss and logits of a classifier of sequences, whose vectors are `vectors` [batch, hidden].

    Declares the input labels. With head: classification it is [batch]: the class of each sequence. With head:
    multi_label_classification it is [batch, classes]: 1 for a class that applies, 0 for another, -100 for a class that
    does not count. With head: regression it holds the numbers to predict: [batch], or [batch, classes] if there are
    several for each sequence.
    """
    logits = dense(g, vectors, name, {"hidden": c.embed}, {"classes": c.classes}, INIT, bias=bias)
    outputs, wide = {"logits": logits}, accumulation_dtype(g.dtype)
    if c.head == "regression":
        if batch.packed:
            return unpacked_head(g, c.head, outputs)
        y = select(g, logits, "classes", 0) if c.classes == 1 else logits
        numbers = g.input("labels", y.sizes, wide, scale="mse_scale")
        return Traced(squared_error(g, y, numbers), outputs)
    if c.head == "multi_label_classification":
        targets = g.input("labels", logits.sizes, wide, ignored=IGNORED, scale="loss_scale")
        return Traced(binary_cross_entropy(g, logits, targets), outputs)
    labels = g.input(
        "labels", of_sequences(batch), below=c.classes, ignored=IGNORED, scale="loss_scale",
        hint="; labels [batch, classes] need head: multi_label_classification",
    )  # fmt: skip
    return Traced(cross_entropy(g, logits, labels), outputs)


def answered(g: Graph, batch: Batch, x: Tensor, name: str) -> Traced:
    """Return loss and logits of the first and the last token of an answer in the text, as in transformers.

    Declares the inputs start_positions and end_positions [batch]. Negative positions count as 0. Positions of at least
    batch.seq are left out of the loss. The logits of padding take part in the softmax over the positions.
    """
    logits = dense(g, x, name, {"embed": x.size("embed")}, {"classes": 2}, INIT)
    if batch.packed:
        return unpacked_head(g, "question_answering", {"logits": logits})
    sequences, outside, loss = {"batch": batch.size}, batch.seq, None
    outputs = {f"{end}_logits": select(g, logits, "classes", number) for number, end in enumerate(("start", "end"))}
    for end, scores in zip(("start", "end"), outputs.values(), strict=True):
        given = f"{end}_positions"
        g.input(given, sequences, ignored=outside)
        positions = g.input(
            f"{end}_labels", sequences, below=outside, ignored=IGNORED, scale=f"{end}_scale", weight=0.5,
            default=partial(_inside, name=given, outside=outside),
        )  # fmt: skip
        loss = cross_entropy(g, scores, positions, loss=loss, scale=f"{end}_scale")
    return Traced(loss, outputs)


def _inside(given: Mapping[str, Array], name: str, outside: int) -> Array:
    """Return the positions of the input `name` as labels: 0 for negative positions, -100 from `outside` on."""
    return np.where(given[name] < outside, np.maximum(given[name], 0), IGNORED)


def chosen(g: Graph, batch: Batch, c: HeadConfig, vectors: Tensor) -> Traced:
    """Return loss and logits [question, choice] of a multiple choice, for vectors [batch, hidden].

    Each question has config.choices sequences, one after the other. Declares the input labels [question]: the number
    of the right choice.
    """
    logits = dense(g, vectors, "classifier", {"hidden": c.embed}, {"classes": 1}, INIT)
    if batch.packed:
        return unpacked_head(g, c.head, {"logits": logits})
    questions, rest = divmod(batch.size, c.choices)
    if rest and batch.size > 1:
        raise ConfigError(f"batch: got {batch.size}; allowed: a multiple of model.choices = {c.choices}")
    questions = max(questions, 1)
    places = np.arange(questions * c.choices).reshape(questions, c.choices) % batch.size
    sizes = {"question": questions, "choice": c.choices}
    rows = g.input("choice_places", sizes, below=batch.size, default=places)
    scores = select(g, gather(g, logits, rows), "classes", 0)
    labels = g.input(
        "labels", {"question": questions}, below=c.choices, ignored=IGNORED, scale="loss_scale", each=c.choices
    )
    return Traced(cross_entropy(g, scores, labels), {"logits": scores})


def compared(g: Graph, batch: Batch, c: HeadConfig, x: Tensor) -> Traced:
    """Return the contrastive loss of sentence embeddings, and cosine similarities / temperature [question, candidate].

    config.choices consecutive sequences of x [batch, seq, embed] belong together: the first is a question, the second
    its answer, the others are wrong answers. The candidates for each question are all answers, in the order of the
    questions, and then all wrong answers. The loss is the cross-entropy of the right candidate. Declares the input
    labels [question], by default the number of the question; -100: the question does not count.

    Source: Henderson et al. 2017, section 4.4; van den Oord et al. 2018, eq. 4; MultipleNegativesRankingLoss of
    sentence-transformers.
    """
    if batch.packed:
        return unpacked_head(g, c.head, {"hidden": x})
    questions, rest = divmod(batch.size, c.choices)
    if c.choices < 2 or (rest and batch.size > 1):
        need = "at least 2" if c.choices < 2 else f"with batch = {batch.size} a divisor of it"
        raise ConfigError(f"model.choices: got {c.choices}; allowed: {need}")
    vectors = mean_of_tokens(g, batch, x) if c.sentence_pooling == "mean" else first_tokens(g, x)
    # sqrt(embed) times the unit vector: its elements are about 1, which 16 bits hold well.
    scaled = rms_norm(g, vectors, g.input("unit_gamma", {"embed": c.embed}, None, default=1.0), 1e-12)
    places = np.arange(max(questions, 1) * c.choices).reshape(-1, c.choices) % batch.size
    groups = {"question": places[:, 0], "candidate": places[:, 1:].T.ravel()}
    first, others = (
        gather(g, scaled, g.input(f"{axis}_places", {axis: len(rows)}, below=batch.size, default=rows))
        for axis, rows in groups.items()
    )
    scores = contract(g, first, others, ["question", "candidate"], scale=1 / (c.embed * c.temperature))
    labels = g.input(
        "labels", {"question": len(places)}, below=len(groups["candidate"]), ignored=IGNORED, scale="loss_scale",
        each=c.choices, default=np.arange(len(places)),
    )  # fmt: skip
    return Traced(cross_entropy(g, scores, labels), {"logits": scores})


def next_sentence(
    g: Graph, batch: Batch, c: HeadConfig, pooled: Tensor, label: str, loss: Tensor | None = None
) -> Traced:
    """Return loss and logits of BERT's second pre-training task: whether sentence B follows sentence A.

    Declares an input named `label` [batch]: 0 if sentence B follows, 1 if not. Adds the loss to `loss` if it is given.
    """
    scale = "next_scale" if loss else "loss_scale"
    nexts = g.input(label, of_sequences(batch), below=2, ignored=IGNORED, scale=scale)
    logits = dense(g, pooled, "cls.seq_relationship", {"hidden": c.embed}, {"classes": 2}, INIT)
    return Traced(cross_entropy(g, logits, nexts, loss=loss, scale=scale), {"logits": logits})


def unpacked_head(g: Graph, head: str, outputs: dict[str, Tensor]) -> Traced:
    """Return outputs without a loss, for packed sequences. Raises ConfigError in training: this head does not pack."""
    if g.training:
        raise ConfigError(f"model.head: got {head}; allowed with packed sequences: another head")
    return Traced(None, outputs)


def decoder_head(g: Graph, batch: Batch, c: HeadConfig, x: Tensor, words: Tensor, padding: str) -> Traced:
    """Return loss and outputs of a decoder's head for hidden states x.

    Args:
        words: The table of token embeddings. With config.tie_embeddings it is also the weight that gives the logits.
        padding: Key of the config that holds the number of the padding token, see last_tokens.
    """
    if c.head == "none":
        return bare(g, c, x)
    if c.head != "causal_lm":
        return classified(g, batch, c, last_tokens(g, batch, c, x, padding), "score", bias=False)
    tokens = {"batch": batch.size, "seq": batch.seq}
    labels = g.input("labels", tokens, below=c.vocab, ignored=IGNORED, shifted=True, scale="loss_scale")
    table = words if c.tie_embeddings else g.param("lm_head.weight", words.sizes, INIT)
    logits = linear(g, x, table, ["batch", "seq", "vocab"])
    return Traced(cross_entropy(g, logits, labels), {"logits": logits})


def last_tokens(g: Graph, batch: Batch, c: HeadConfig, x: Tensor, key: str) -> Tensor:
    """Return the vector of each sequence's last token that is not padding: [batch, hidden] of x [batch, seq, embed].

    key: Key of the config that holds the number of the padding token. If its value is None, the result is the vector of
    the last position.

    Raises:
        ConfigError: The value is null, although the batch has several sequences that are not packed.
    """
    if (padding := getattr(c, key)) is None and batch.size > 1 and not batch.packed:
        need = "the number of the padding token (pad_token_id), as the head reads the last other token of each sequence"
        raise ConfigError(f"model.{key}: got null; allowed with head: {c.head}: {need}")

    def places(given: Mapping[str, Array]) -> Array:
        ids = given["input_ids"]
        real = np.ones(ids.shape, bool) if padding is None else ids != padding
        if not batch.packed:
            last: Array = (np.arange(batch.seq) * real).argmax(axis=1)[:, None]
            return last
        first, end = given[packed_inputs.SEGMENTS][:, :-1], given[packed_inputs.SEGMENTS][:, 1:]
        upto = np.maximum.accumulate(np.where(real, np.arange(batch.seq), NOWHERE), axis=1)
        last = np.maximum(np.take_along_axis(upto, np.maximum(end - 1, 0), axis=1), first)
        return np.where(first < end, last, NOWHERE)

    sizes = {"batch": batch.size} | ({"sequence": batch.seq} if batch.packed else {"last": 1})
    rows = g.input("last_tokens", sizes, below=batch.seq, ignored=NOWHERE, default=places)
    y = rename(g, gather(g, x, rows), embed="hidden")
    return y if batch.packed else select(g, y, "last", 0)
