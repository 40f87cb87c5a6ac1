"""Sample text from a trained model: continue a prompt, or guess masked tokens."""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from nntile_py.config.run_config import RunConfig
from nntile_py.data.dataset import Evaluator
from nntile_py.data.special_tokens import SpecialTokens, special_tokens
from nntile_py.data.tokenizer import token_numbers
from nntile_py.errors import ConfigError, NotFinite
from nntile_py.inference.engine import Request
from nntile_py.inference.generated_text import Options
from nntile_py.inference.generator import Generator
from nntile_py.tasks.cross_entropy import IGNORED
from nntile_py.tasks.sample import NO_TOKEN, drawn

SEQUENCES = ("batch", "seq")  # axes of a training step's sequences, whose tile sizes a Generator does not take over


def generate(
    trainer: Evaluator, tokenizer: Tokenizer, config: RunConfig, stop: list[str],
    model: Callable[[], Any] | None = None,
) -> str:  # fmt: skip
    """Return the prompt of `config.sample` and its continuation by the model, as text.

    The continuation ends after `sample.tokens` tokens, at a token that ends a text, or when a signal comes. The draws
    depend on the config's seed alone, so that a Generator and the trainer give the same text.

    Args:
        trainer: Evaluates the model on the last `train.seq` tokens, once for each new token.
        tokenizer: Turns text into tokens.
        config: The run's config.
        stop: Names of the signals received so far.
        model: Returns the model with its present weights. A Generator continues the text by this model, instead of the
            trainer, if the text fits into `train.seq` tokens and the model can use a cache of keys and values.

    Raises:
        NotFinite: Logits are nan or infinite.
    """
    sample = config.sample
    special = special_tokens(tokenizer, config.tokenizer.path, config.model.from_)
    ids = tokenizer.encode(sample.prompt or "", add_special_tokens=False).ids or [special.end or 0]
    new: list[int] | None = None
    if model and len(ids) + sample.tokens <= config.train.seq:
        with suppress(ConfigError):  # the model cannot use a cache
            new = _cached(model(), tokenizer, special, config, ids, stop)
    if new is None:
        new = _evaluated(trainer, token_numbers(tokenizer), special.stops, config, ids, stop)
    return str(tokenizer.decode(ids + new))


def _cached(
    model: Any, tokenizer: Tokenizer, special: SpecialTokens, config: RunConfig, ids: list[int], stop: list[str]
) -> list[int]:
    """Return the new tokens that a Generator draws, with the precision and the tile sizes of the run."""
    tiles = {axis: size for axis, size in config.tile_sizes.items() if axis not in SEQUENCES}
    how: dict[str, Any] = {"tiles": tiles or None, "precision": config.precision, "batch": 1}
    new: list[int] = []
    with Generator(model, tokenizer=tokenizer, max_length=config.train.seq, **how) as generator:
        generator.special = special
        options = {"max_tokens": config.sample.tokens, "seed": config.seed, **_drawing(config)}
        for part in generator([ids], stream=True, **options):
            if stop:
                break
            new += [part.token] if part.reason != "stop" else []
    return new


def _evaluated(
    trainer: Evaluator, vocab: int, stops: Collection[int], config: RunConfig, ids: list[int], stop: list[str]
) -> list[int]:
    """Return the new tokens. Each token needs an evaluation of a whole batch. vocab: number of tokens to draw from."""
    batch, seq = config.train.batch, config.train.seq
    settings = Options(**_drawing(config)).settings
    row = Request(ids, config.sample.tokens, settings, (config.seed, 0)).new_row()
    while len(row.tokens) < row.limit and not stop:
        window = row.tokens[-seq:]
        padded = np.zeros((batch, seq), np.int64)  # after the window comes padding, which a causal model ignores
        padded[0, : len(window)] = window
        _, logits = trainer.evaluate({"input_ids": padded}, return_logits=True)
        token = drawn(logits[0, len(window) - 1, :vocab], np.array(settings), float(row.draws[len(row.tokens)]))
        if token == NO_TOKEN:
            raise NotFinite(f"sample: the logits after {len(row.tokens)} tokens are nan or infinite; allowed: finite")
        if token in stops:
            break
        row.tokens.append(token)
    return row.tokens[len(ids) :]


def _drawing(config: RunConfig) -> dict[str, Any]:
    return {"temperature": config.sample.temperature, "top_k": config.sample.top_k}


def fill_masked(trainer: Evaluator, tokenizer: Tokenizer, inputs: Mapping[str, Any], most: int) -> str:
    """Return the text of a masked sequence in which the model's guesses replace the masked tokens.

    A correct guess is shown as [['guess']], a wrong guess as [['guess', not 'token']].

    Args:
        trainer: Evaluates the model.
        tokenizer: Turns token numbers into text.
        inputs: Inputs that a MaskedCollator returned. The first row is shown.
        most: Largest number of tokens to show.
    """
    _, logits = trainer.evaluate(inputs, return_logits=True)
    most = min(most, int(np.asarray(inputs["attention_mask"])[0].sum()) if "attention_mask" in inputs else most)
    guesses = logits[0, :most, : token_numbers(tokenizer)].argmax(-1)

    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    parts: list[str] = []
    plain: list[int] = []  # decoded together, because a character may consist of several tokens
    rows = (inputs[name][0, :most].tolist() for name in ("input_ids", "labels"))
    for token, label, guess in zip(*rows, guesses.tolist(), strict=True):
        if label == IGNORED:
            plain.append(token)
            continue
        wrong = "" if guess == label else f", not {text([label])!r}"
        parts += [text(plain), f"[[{text([guess])!r}{wrong}]]"]
        plain = []
    return "".join([*parts, text(plain)])
