"""Measure a trained model on a text file, a folder or a table: loss, perplexity, bits per byte, accuracy, F1."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nntile_py.config.inference_config import InferenceConfig
from nntile_py.config.table_models import CLASSIFICATION, CLASSIFIERS, CONTRASTIVE, OF_TABLES
from nntile_py.data.classification import TokenizedTexts, check_frames, tokenized
from nntile_py.data.collators import Array, MaskedCollator
from nntile_py.data.confusion import Confusion, LabelScores
from nntile_py.data.documents import Documents
from nntile_py.data.entities import EntityScores
from nntile_py.data.labelled_words import ONE, SEVERAL, WORDS, LabelKind, read_samples
from nntile_py.data.special_tokens import SpecialTokens, special_tokens
from nntile_py.data.tables import LabelledText, class_numbers, labels_of, unknown_label
from nntile_py.data.text_pairs import read_pairs
from nntile_py.data.tokenizer import CLS, MASK, MASKED, SEP, frame, special_numbers, token_numbers
from nntile_py.data.windows import causal_windows, masked_windows, spans
from nntile_py.errors import ConfigError
from nntile_py.inference.bound_model import BoundModel
from nntile_py.inference.conversations import Conversations, instructions_for
from nntile_py.inference.encoder import Encoder
from nntile_py.inference.evaluation_losses import Advance, Sums, binary_loss, causal_sums
from nntile_py.inference.open_model import OpenedModel
from nntile_py.inference.sentence import MODULES, has_modules, normalized, read_sentence_model
from nntile_py.system.units import counted
from nntile_py.tasks.cross_entropy import IGNORED

LONGEST, BATCH = 1024, 8  # default sizes without a run: tokens of a window, windows of a forward pass
RANKED = 256  # questions that are ranked together
SAME = 1e-6  # cosine similarities with a smaller difference count as equal
NOUNS = {CLASSIFICATION: "a classifier", CONTRASTIVE: "sentence embeddings"}
LANGUAGE_HEADS = {"causal_lm": "causal", "masked_lm": "masked"}


class Windows(NamedTuple):
    """How a text is read in windows.

    Attributes:
        seq: Tokens of a window.
        stride: Tokens from the beginning of a window to the beginning of the next window.
        batch: Windows of a forward pass.
    """

    seq: int
    stride: int
    batch: int


def aim_of(opened: OpenedModel) -> str:
    """Return what a model predicts: causal, masked, classification, or contrastive: vectors of sentences.

    Raises:
        ConfigError: The model predicts something else.
    """
    model = opened.model
    head, objective = getattr(model.config, "head", None), model.aim
    if head in CLASSIFIERS:
        return CLASSIFICATION
    if head in LANGUAGE_HEADS or (head is None and objective in LANGUAGE_HEADS.values()):
        return LANGUAGE_HEADS.get(head or "", objective or "")
    if has_modules(opened.folder):
        return CONTRASTIVE
    what = f"has head: {head}" if head else f"has the objective {objective}"
    need = f"models with the head {', '.join([*LANGUAGE_HEADS, *CLASSIFIERS])}, or a folder with {MODULES}"
    raise ConfigError(f"RUN: {opened.folder}: {type(model).__name__} {what}; allowed: {need}")


def windows_of(opened: OpenedModel, config: InferenceConfig, seq: int | None, stride: int | None) -> Windows:
    """Return how a text is read. Without the options `seq` and `stride`, the run's config or defaults decide.

    Raises:
        ConfigError: An option is out of range.
    """
    aim = aim_of(opened)
    least = {"causal": 2, "masked": 3}.get(aim, 1)
    most = getattr(opened.model.config, "positions", None)
    seq = seq or config.train.seq or min(most or LONGEST, LONGEST)
    if not least <= seq <= (most or seq):
        limit = f"at most the {most} positions of the model" if seq >= least else f"at least {least}"
        raise ConfigError(f"--seq: got {seq}; allowed: {limit}")
    longest = seq - 2 if aim == "masked" else seq
    if stride is not None and aim in OF_TABLES:
        raise ConfigError(f"--stride: got {stride} for {NOUNS[aim]}, whose texts are table rows; allowed: no --stride")
    if stride is not None and not 1 <= stride <= longest:
        limit = f"--seq = {seq}, less [CLS] and [SEP]" if aim == "masked" else f"--seq = {seq}"
        raise ConfigError(f"--stride: got {stride}; allowed: 1 to {longest} ({limit})")
    default = -(-seq // 2) if aim == "causal" else longest
    return Windows(seq, stride or default, config.train.batch or BATCH)


def measure(
    opened: OpenedModel, data: Path, config: InferenceConfig, windows: Windows, advance: Advance
) -> dict[str, Any]:
    """Measure a model on a file or folder, which fits the model. Needs a running Runtime.

    Args:
        opened: The model with its tokenizer.
        data: For a language model: a text file, a table, or a folder of such files. For other models: a table.
        config: Settings of the programs; columns of the table.
        windows: How the text is read.
        advance: Shows progress.

    Returns:
        {name: value}. The kind of model decides which of the measures `loss`, `perplexity`, `bits_per_byte`,
        `accuracy`, `f1_macro`, `f1`, `mrr` and of the counts `tokens`, `texts`, `words`, `cut` it has.

    Raises:
        ConfigError: The file does not fit the model.
    """
    aim = aim_of(opened)
    if aim in OF_TABLES:
        return (_classifier if aim == CLASSIFICATION else _sentences)(opened, data, config, windows, advance)
    if instructions := instructions_for(opened, data, config, aim == "causal"):
        rows = Documents(str(data), config.data.extensions, key="--data", instructions=instructions)
        return _answers(opened, Conversations(opened, rows, windows.seq), config, windows, advance)
    documents = _documents(data, config)
    return (_causal if aim == "causal" else _masked)(opened, documents, config, windows, advance)


# -- language models


def _documents(data: Path, config: InferenceConfig) -> list[str]:
    """Return the documents of a file or folder, as training reads them. Prints a note on files that are left out."""
    documents = Documents(str(data), config.data.extensions, config.data.text, key="--data")
    texts, begun = list[str](), False
    for part in documents:
        texts[-1:] = [texts[-1] + part.text] if begun else [*texts[-1:], part.text]
        begun = not part.last
    if note := documents.describe():
        print(f"note: {note}", file=sys.stderr)
    return texts


def _tokens(opened: OpenedModel, documents: Sequence[str], template: bool) -> tuple[Array, int]:
    """Return the token numbers, and the number of tokens without separators and the template's special tokens.

    The token that ends a document in training separates the documents.

    template: Add the special tokens of the tokenizer's template, such as <s>."""
    assert opened.tokenizer
    end, parts, own = _special(opened).end, list[int](), 0
    for number, encoding in enumerate(opened.tokenizer.encode_batch(list(documents), add_special_tokens=template)):
        parts += [end] if number and end is not None else []
        parts += encoding.ids
        own += len(encoding.ids) - sum(encoding.special_tokens_mask)
    ids = np.array(parts, np.int64)
    _check_numbers(opened, ids)
    if own < 2:
        raise ConfigError(f"--data: the text has {counted(own, 'token')}; allowed: at least 2")
    return ids, own


def _check_numbers(opened: OpenedModel, ids: Array) -> None:
    """Raise ConfigError if a token number is not in the model's vocabulary."""
    vocab = getattr(opened.model.config, "vocab", None)
    if vocab and len(ids) and ids.max() >= vocab:
        need = f"a tokenizer of the model, whose token numbers are 0 to {vocab - 1}"
        raise ConfigError(f"RUN: {opened.tokenizer_file} has the token number {ids.max()}; allowed: {need}")


def _answers(
    opened: OpenedModel, conversations: Conversations, config: InferenceConfig, windows: Windows, advance: Advance
) -> dict[str, Any]:
    """Measure a causal model on conversations: the mean loss over the tokens of the answers."""
    _check_numbers(opened, conversations.ids)
    if conversations.left_out:
        count = counted(conversations.left_out, "conversation")
        print(f"note: {count} left out, without an answer in the first {windows.seq} tokens", file=sys.stderr)
    with BoundModel(opened.model, **config.bound, owner="RUN") as bound:
        sizes = windows.batch, min(windows.seq, conversations.longest)
        sums = causal_sums(bound, conversations, len(conversations), sizes, advance)
    loss, cut = sums.loss / sums.count, conversations.cut
    made = {"texts": len(conversations), "tokens": sums.count, "loss": loss, "perplexity": _exp(loss)}
    return made | ({"cut": cut} if cut else {})


def _causal(
    opened: OpenedModel, documents: Sequence[str], config: InferenceConfig, windows: Windows, advance: Advance
) -> dict[str, Any]:
    """Measure a causal model: the mean loss over the tokens of all windows."""
    ids, own = _tokens(opened, documents, template=True)
    seq = min(windows.seq, len(ids))
    stride = min(windows.stride, seq)
    with BoundModel(opened.model, **config.bound, owner="RUN") as bound:
        count = sum(1 for _ in spans(len(ids), seq, stride))
        sums = causal_sums(bound, causal_windows(ids, seq, stride), count, (windows.batch, seq), advance)
    loss = sums.loss / sums.count
    bits = loss / math.log(2) * own / sum(len(text.encode()) for text in documents)
    return {"tokens": sums.count, "loss": loss, "perplexity": _exp(loss), "bits_per_byte": bits}


def _masked(
    opened: OpenedModel, documents: Sequence[str], config: InferenceConfig, windows: Windows, advance: Advance
) -> dict[str, Any]:
    """Measure a masked model: mean loss and accuracy at masked tokens. The seed decides which tokens are masked."""
    ids, _ = _tokens(opened, documents, template=False)
    seen, labels, ends = mask_text(opened, ids, config.train.mask_probability, config.values.seed)
    all_windows = list(masked_windows(ids, seen, labels, ends, windows.seq, windows.stride))
    sums = Sums()
    with _encoder(opened, config, windows) as encoder:
        for (_, wanted), logits in zip(all_windows, encoder.each([inputs for inputs, _ in all_windows]), strict=True):
            places = wanted != IGNORED
            if places.any():
                sums.add_logits(logits[places], wanted[places])
            advance("windows", 1, len(all_windows))
    if not sums.count:
        need = "a longer text, another seed, or a larger train.mask_probability"
        raise ConfigError(f"--data: none of the text's {len(ids)} tokens is masked; allowed: {need}")
    return {"tokens": sums.count, "loss": sums.loss / sums.count, "accuracy": sums.correct / sums.count}


def mask_text(opened: OpenedModel, ids: Array, probability: float, seed: int) -> tuple[Array, Array, tuple[int, int]]:
    """Return a text after masking, its labels (-100 at tokens that are not masked), and the numbers of [CLS] and [SEP].

    As in training, MaskedCollator chooses the tokens to mask. Equal arguments always give the same choice."""
    assert opened.tokenizer
    known = _special(opened)
    if missing := known.lacking():
        raise ConfigError(f"RUN: {opened.tokenizer_file} has no {', '.join(missing)}; allowed: a tokenizer with them")
    numbers: dict[str, int] = {token: known.number(token) or 0 for token in MASKED}
    special = frozenset(special_numbers(opened.tokenizer) | {*numbers.values()})
    collate = MaskedCollator(
        len(ids), token_numbers(opened.tokenizer), numbers[MASK], special, probability=probability, seed=seed,
        most=len(ids),
    )  # fmt: skip
    masked = collate([ids])
    return masked["input_ids"][0], masked["labels"][0], (numbers[CLS], numbers[SEP])


# -- classifiers


def _classifier(
    opened: OpenedModel, data: Path, config: InferenceConfig, windows: Windows, advance: Advance
) -> dict[str, Any]:
    """Measure a classifier of texts or of words on a table: mean loss, accuracy and F1."""
    kind = CLASSIFIERS[opened.model.config.head]
    samples, names, numbers = labelled_rows(opened, data, config)
    assert opened.tokenizer
    frame(opened.tokenizer, _special(opened).named)
    check_frames(opened.tokenizer, str(opened.tokenizer_file), "RUN")
    texts, cut = tokenized(opened.tokenizer, samples, numbers, windows.seq)
    with _encoder(opened, config, windows) as encoder:
        sums, scores = _scored(encoder, texts, kind, names, advance)
    if not sums.count:
        raise ConfigError(f"--data: {data}: no word has a token; allowed: words with letters")
    metrics = {name: value for name, value in scores.metrics().items() if isinstance(value, float)}
    counted = {"texts": len(texts), **({"words": sums.count} if kind == WORDS else {})}
    return counted | {"loss": sums.loss / sums.count} | metrics | ({"cut": cut} if cut else {})


def labelled_rows(
    opened: OpenedModel, data: Path, config: InferenceConfig
) -> tuple[list[LabelledText], list[str], dict[str, int]]:
    """Return the rows of a classifier's table, the names of its classes, and {label in the table: number of its class}.

    Raises:
        ConfigError: The file is not such a table, or has a label that is not a class of the model.
    """
    model = opened.model.config
    samples = read_samples("--data", str(data), config.data.text, config.data.label, CLASSIFIERS[model.head])
    names = model.labels or list(map(str, range(model.classes or len(labels_of(str(data), samples)))))
    numbers = class_numbers(model.labels, len(names), samples)
    if unknown := unknown_label(samples, numbers):
        need = f"the classes of the model: {', '.join(numbers)}"
        raise ConfigError(f"--data: {data}, line {unknown[0]}: the label {unknown[1]!r}; allowed: {need}")
    return samples, names, numbers


def _scored(
    encoder: Encoder, texts: TokenizedTexts, kind: LabelKind, names: list[str], advance: Advance
) -> tuple[Sums, Any]:
    """Return the losses of a classifier's predictions, and the scores of its classes."""
    score_types: dict[str, Any] = {ONE: Confusion, SEVERAL: lambda names: LabelScores(len(names)), WORDS: EntityScores}
    sums, scores = Sums(), score_types[kind](names)
    for logits, wanted in zip(encoder.each(texts.sequences), texts.classes, strict=True):
        if kind == WORDS:
            places = np.flatnonzero(wanted[: len(logits)] != IGNORED)
            sums.add_logits(logits[places], wanted[places].astype(np.int64))
            scores.add(wanted[places], logits[places].argmax(-1))
        elif kind == SEVERAL:
            sums.loss += float(binary_loss(logits.astype(np.float64), wanted).mean())
            sums.count += 1
            scores.add(wanted[None], logits[None] > 0)
        else:
            sums.add_logits(logits[None], wanted[None])
            scores.add(wanted[None], logits[None].argmax(-1))
        advance("texts", 1, len(texts))
    return sums, scores


# -- sentence embeddings


def _sentences(
    opened: OpenedModel, data: Path, config: InferenceConfig, windows: Windows, advance: Advance
) -> dict[str, Any]:
    """Measure vectors of sentences on a table of questions, answers and wrong answers.

    All answers and wrong answers of the table are candidates for each question, compared by cosine similarity.
    accuracy: the share of the questions whose own answer comes first. mrr: the mean of 1 / rank of the own answer. A
    candidate of equal similarity, such as the same answer in another row, does not rank before it."""
    rows = read_pairs("--data", str(data), config.data.texts)
    texts = [row[column] for column in range(len(rows[0])) for row in rows]
    sentence, found = read_sentence_model(opened.folder, pooled=True), list[Array]()
    assert sentence
    how = {"tokenizer": opened.tokenizer, "sentence": sentence, "prompt": sentence.prompt(None, None)}
    with _encoder(opened, config, windows, "sentence", **how) as encoder:
        for vector in encoder.each(texts):
            found.append(normalized(vector))
            advance("texts", 1, len(texts))
    vectors, ranks = np.stack(found), list[Array]()
    questions, candidates = vectors[: len(rows)], vectors[len(rows) :]
    for first in range(0, len(rows), RANKED):
        similar = questions[first : first + RANKED] @ candidates.T
        own = np.arange(first, first + len(similar))
        ranks.append(1 + (similar > similar[own - first, own][:, None] + SAME).sum(1))
    rank = np.concatenate(ranks)
    cut = {"cut": encoder.cut} if encoder.cut else {}
    return {"texts": len(texts), "accuracy": float((rank == 1).mean()), "mrr": float((1 / rank).mean())} | cut


# -- shared


def _encoder(
    opened: OpenedModel, config: InferenceConfig, windows: Windows, output: str = "logits", **how: Any
) -> Encoder:
    """Return an Encoder of the model. Tile sizes of batch and seq are dropped: for an Encoder, each bin is a tile."""
    tiles = {axis: size for axis, size in config.bound["tiles"].items() if axis not in ("batch", "seq")}
    return Encoder(
        opened.model, output, tiles=tiles, precision=config.values.precision,
        batch_tokens=windows.batch * windows.seq, max_length=windows.seq, **how,
    )  # fmt: skip


def _special(opened: OpenedModel) -> SpecialTokens:
    assert opened.tokenizer
    return special_tokens(opened.tokenizer, str(opened.tokenizer_file), str(opened.folder))


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
