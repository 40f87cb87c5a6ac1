"""Build a run's Dataset from its config, and check that the model can be trained on text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from nntile_py.config.data_section import DataSection
from nntile_py.config.run_config import RunConfig
from nntile_py.config.table_models import CLASSIFICATION, CLASSIFIERS, CONTRASTIVE, OF_TABLES
from nntile_py.data.chat_template import ChatTemplate
from nntile_py.data.classification import ClassificationDataset, read_labelled_corpus
from nntile_py.data.collators import CausalCollator, MaskedCollator
from nntile_py.data.corpus import Corpus, Reading, TextSource, read_corpus
from nntile_py.data.dataset import Dataset
from nntile_py.data.instructions import Columns, Instructions
from nntile_py.data.labelled_words import ONE, SEVERAL, WORDS
from nntile_py.data.special_tokens import SpecialTokens, special_tokens
from nntile_py.data.text_dataset import TextDataset
from nntile_py.data.text_pairs import PairDataset, read_pair_corpus
from nntile_py.data.token_classification import TokenClassificationDataset
from nntile_py.data.tokenization import Report, silent
from nntile_py.data.tokenizer import (
    CLS,
    MASK,
    MASKED,
    PAD,
    ROBERTA,
    SEP,
    frame,
    load_tokenizer,
    special_numbers,
    token_numbers,
)
from nntile_py.errors import ConfigError
from nntile_py.graph.bin_packing import bins_of
from nntile_py.graph.step import StepSpec
from nntile_py.models.registry import known, objective_of
from nntile_py.yaml_text import as_written

# SPECIAL: {objective of the model: special tokens that the tokenizer must have}.
# _LABEL_AXES: {objective, for a classifier its kind of labels: axes of the array of labels}.
SPECIAL: dict[str, Sequence[str]] = {"causal": (), "masked": MASKED, **dict.fromkeys(OF_TABLES, MASKED)}
_LABEL_AXES = {"causal": ["batch", "seq"], "masked": ["batch", "seq"], ONE: ["batch"],
               SEVERAL: ["batch", "classes"], WORDS: ["batch", "seq"], CONTRASTIVE: ["question"]}  # fmt: skip


def build_dataset(config: RunConfig, spec: StepSpec, report: Report = silent) -> Dataset:
    """Read the training data that `config` names, and return them as a Dataset, which makes the batches.

    report: Shows a message before work that takes seconds.

    Raises:
        ConfigError: The data or the tokenizer does not fit the config. (`check_objective` checks the model.)
    """
    made: dict[str | None, Callable[[RunConfig, StepSpec, Report], Dataset]] = {
        CLASSIFICATION: _classification_dataset, CONTRASTIVE: _pair_dataset,
    }  # fmt: skip
    return made.get(config.aim, _text_dataset)(config, spec, report)


def _text_dataset(config: RunConfig, spec: StepSpec, report: Report) -> TextDataset:
    """Return the dataset of a causal or masked model. A masked model's sequence is [CLS], part of the text, [SEP]."""
    data, train = config.data, config.train
    corpus = read_corpus(sources(config), reading(config, report), data.held_out)
    ends, collator = _masking(config, corpus) if config.aim == "masked" else ((), CausalCollator(train.seq))
    return TextDataset(
        corpus, collator, seq=train.seq, batch=train.batch, passes=train.grad_accumulation,
        eval_batches=train.eval_batches, seed=config.seed, ends=ends, bins=bins_of(spec) if spec.pack else None,
        concatenate=data.concatenate,
    )  # fmt: skip


def sources(config: RunConfig) -> list[TextSource]:
    """Return the sources of text that a config names."""
    return [TextSource(entry.path, entry.weight, entry.text or config.data.text) for entry in config.data.entries]


def reading(config: RunConfig, report: Report) -> Reading:
    """Return how a config says to read and tokenize text."""
    data, path = config.data, config.tokenizer.path
    tokenizer = load_tokenizer(Path(path)) if path else None
    return Reading(
        extensions=data.extensions, max_bytes=data.max_bytes, val_fraction=data.val_fraction, unit=data.sequences,
        tokenizer=tokenizer, vocab_size=config.tokenizer.size(), special=SPECIAL[config.aim or ""],
        end=_special_tokens(config, tokenizer).end if tokenizer else None, report=report,
        instructions=instructions_of(data, path),
    )  # fmt: skip


def instructions_of(data: DataSection, tokenizer: str | None) -> Instructions | None:
    """Return Instructions, which turn rows of tables into texts with answers; None if one column has the text.

    tokenizer: Path of a tokenizer.json, whose folder may have a chat template."""
    columns = Columns(data.messages or "", data.prompt or "", data.response or "")
    return Instructions(columns, ChatTemplate(Path(tokenizer).parent if tokenizer else None)) if any(columns) else None


def _special_tokens(config: RunConfig, tokenizer: Tokenizer) -> SpecialTokens:
    return special_tokens(tokenizer, config.tokenizer.path, config.model.from_)


def _masking(config: RunConfig, corpus: Corpus) -> tuple[tuple[int, ...], MaskedCollator]:
    """Return the tokens ([CLS], [SEP]) around each sequence of a masked model, and the collator that masks tokens."""
    # `or 0` never applies: check_objective refuses a tokenizer without these tokens.
    known = _special_tokens(config, corpus.tokenizer)
    numbers: dict[str, int] = {token: known.number(token) or 0 for token in MASKED}
    _check_padding(config, numbers[PAD], corpus.tokenizer)
    vocab, special = token_numbers(corpus.tokenizer), special_numbers(corpus.tokenizer)
    return (numbers[CLS], numbers[SEP]), MaskedCollator(
        config.train.seq, vocab, numbers[MASK], frozenset(special | set(numbers.values())), numbers[PAD],
        config.train.mask_probability, config.seed, getattr(config.model, "masked", None) or None,
    )  # fmt: skip


def _pair_dataset(config: RunConfig, spec: StepSpec, report: Report) -> PairDataset:
    data, train = config.data, config.train
    corpus = read_pair_corpus(
        data.name, data.texts, seq=train.seq, held_out=data.held_out, val_fraction=data.val_fraction,
        tokenizer=_framed_tokenizer(config), tokenizer_path=config.tokenizer.path,
        vocab_size=config.tokenizer.size(), report=report,
    )  # fmt: skip
    if train.batch > (most := corpus.columns * len(corpus.train)):
        need = f"at most {most}, the texts to train on: a row that is twice in a batch is a wrong answer for itself"
        raise ConfigError(f"train.batch: got {train.batch}; allowed: {need}")
    return PairDataset(
        corpus, seq=train.seq, batch=train.batch, passes=train.grad_accumulation, eval_batches=train.eval_batches,
        seed=config.seed, pad=_padding_token(config, corpus.tokenizer),
    )  # fmt: skip


def _framed_tokenizer(config: RunConfig) -> Tokenizer | None:
    """Return the tokenizer of tokenizer.path; None without a path.

    A tokenizer without a template gets [CLS] text [SEP] or <s> text </s>, if it has these tokens.
    """
    if tokenizer := load_tokenizer(Path(path)) if (path := config.tokenizer.path) else None:
        frame(tokenizer, _special_tokens(config, tokenizer).named)
    return tokenizer


def _padding_token(config: RunConfig, tokenizer: Tokenizer) -> int:
    """Return the number of the padding token for a model of tables: the tokenizer's, else the model's, else 0."""
    if (pad := _special_tokens(config, tokenizer).number(PAD)) is None:
        return getattr(config.model, "padding_token", None) or 0
    _check_padding(config, pad, tokenizer)
    return pad


def _classification_dataset(config: RunConfig, spec: StepSpec, report: Report) -> ClassificationDataset:
    data, train, model, path = config.data, config.train, config.model, config.tokenizer.path
    corpus = read_labelled_corpus(
        data.name, seq=train.seq, text=data.text, label=data.label, held_out=data.held_out,
        val_fraction=data.val_fraction, classes=model.classes if "classes" in type(model).model_fields else None,
        class_names=getattr(model, "labels", None), kind=CLASSIFIERS[model.head],
        tokenizer=_framed_tokenizer(config), tokenizer_path=path, vocab_size=config.tokenizer.size(), report=report,
    )  # fmt: skip
    made = TokenClassificationDataset if CLASSIFIERS[model.head] == WORDS else ClassificationDataset
    return made(
        corpus, seq=train.seq, batch=train.batch, passes=train.grad_accumulation, eval_batches=train.eval_batches,
        seed=config.seed, pad=_padding_token(config, corpus.tokenizer),
        bins=bins_of(spec) if spec.pack else None,
    )  # fmt: skip


def check_objective(config: RunConfig, spec: StepSpec) -> str:
    """Check that the config's model can be trained on text. Returns its objective, see RunConfig.aim.

    Raises:
        ConfigError: The model cannot be trained on text, or the tokenizer lacks special tokens.
    """
    kind, objective = config.model.type, config.aim
    elsewhere = "train it from Python with nt.Trainer"
    if objective not in (None, *SPECIAL):
        raise ConfigError(f"model.type: {kind} has the objective {objective!r}; allowed: {', '.join(SPECIAL)}, None")
    if objective not in SPECIAL:
        text = ", ".join(name for name, cls in known().items() if cls.objective)
        if "objective" in type(config.model).model_fields:
            raise ConfigError(f"model.objective: missing; allowed: causal, masked, or {elsewhere}")
        raise ConfigError(
            f"model.type: {kind} is not trained on text (its objective is {objective}); allowed: {text}, or {elsewhere}"
        )
    declared = spec.padded.graphs.graph.inputs
    needed = {name: one for name, one in declared.items() if one.default is None or name == "labels"}
    axes = {name: list(one.tensor.axes) for name, one in needed.items()}
    of_labels = _LABEL_AXES[CLASSIFIERS.get(getattr(config.model, "head", ""), objective)]
    fits = axes == {"input_ids": ["batch", "seq"], "labels": of_labels}
    if not fits or (objective not in OF_TABLES and needed["labels"].below != needed["input_ids"].below):
        wanted = ", ".join(f"{name} [{', '.join(axes[name])}] below {one.below}" for name, one in needed.items())
        head = f" with head: {config.model.head}" if "head" in type(config.model).model_fields else ""
        gives = f"text gives input_ids [batch, seq] and labels [{', '.join(of_labels)}]"
        gives += ", both tokens" if objective not in OF_TABLES else ""
        raise ConfigError(f"model: {kind}{head} needs {wanted}; allowed: no others, as {gives}; {elsewhere}")
    if objective != "causal":
        _check_special_tokens(config, objective)
    return objective


def _check_special_tokens(config: RunConfig, objective: str) -> None:
    """Raise ConfigError if train.seq is too short for [CLS] and [SEP], or the tokenizer lacks special tokens."""
    if config.train.seq < 3:
        raise ConfigError(f"train.seq: got {config.train.seq}; allowed: at least 3, as {CLS} and {SEP} take two places")
    if (path := config.tokenizer.path) is None:
        least = 257 + len(MASKED)
        if config.tokenizer.size() < least:
            need = f"at least {least}: all bytes, the end-of-text token, {', '.join(MASKED)}"
            raise ConfigError(f"tokenizer.vocab_size: got {config.tokenizer.size()}; allowed: {need}")
        return
    tokenizer = load_tokenizer(Path(path))
    if objective in OF_TABLES:
        return  # a model of tables uses the tokenizer's template, which may have other special tokens
    if missing := _special_tokens(config, tokenizer).lacking():
        need = f"a tokenizer with {', '.join(MASKED)}, or with {', '.join(ROBERTA.values())}"
        raise ConfigError(f"tokenizer.path: {path} has no token {', '.join(missing)}; allowed: {need}")


def _check_padding(config: RunConfig, token: int, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if the model's padding token is another token than `token`, the tokenizer's padding token."""
    model = config.model
    key = "padding_idx" if objective_of(model) == "causal" else ""  # a classifier reads the last token before padding
    key = "padding_token" if hasattr(model, "padding_token") else key
    if hasattr(model, key) and (padding := getattr(model, key)) != token:
        name = tokenizer.id_to_token(token)
        raise ConfigError(f"model.{key}: got {as_written(padding)}; allowed: {token}, the tokenizer's {name}")
