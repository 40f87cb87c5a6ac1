"""Sample text from a trained model: continue a prompt, or guess masked tokens."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from nntile_py.config.run_config import RunConfig
from nntile_py.data.dataset import Evaluator
from nntile_py.data.special_tokens import special_tokens
from nntile_py.data.tokenizer import token_numbers
from nntile_py.tasks.cross_entropy import IGNORED


def generate(trainer: Evaluator, tokenizer: Tokenizer, config: RunConfig, stop: list[str]) -> str:
    """Return the prompt of `config.sample` and its continuation by the model, as text.

    Tokens are added until there are `sample.tokens`, a token that ends a text comes, or `stop` is not empty (a signal).
    """
    sample, batch, seq = config.sample, config.train.batch, config.train.seq
    special = special_tokens(tokenizer, config.tokenizer.path, config.model.from_)
    ids = tokenizer.encode(sample.prompt or "", add_special_tokens=False).ids or [special.end or 0]
    rng, tokens = np.random.default_rng([config.seed, 0]), token_numbers(tokenizer)
    for _ in range(sample.tokens):
        if stop:
            break
        window = ids[-seq:]
        padded = np.zeros((batch, seq), np.int64)  # a causal model ignores the padding, right of the window
        padded[0, : len(window)] = window
        _, logits = trainer.evaluate({"input_ids": padded}, return_logits=True)
        token = _draw(logits[0, len(window) - 1, :tokens], sample.temperature, sample.top_k, rng)
        if token in special.stops:
            break
        ids.append(token)
    return str(tokenizer.decode(ids))


def fill_masked(trainer: Evaluator, tokenizer: Tokenizer, inputs: Mapping[str, Any], most: int) -> str:
    """Return the text of a masked sequence in which the model's guesses replace the masked tokens.

    A correct guess is shown as [['guess']], a wrong guess as [['guess', not 'token']].

    Args:
        trainer: Evaluates the model.
        tokenizer: Turns token numbers into text.
        inputs: Inputs as of MaskedCollator, whose first row is shown.
        most: Largest number of tokens to show.
    """
    _, logits = trainer.evaluate(inputs, return_logits=True)
    most = min(most, int(np.asarray(inputs["attention_mask"])[0].sum()) if "attention_mask" in inputs else most)
    guesses = logits[0, :most, : token_numbers(tokenizer)].argmax(-1)

    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    parts: list[str] = []
    plain: list[int] = []  # decoded together: a character may be several tokens
    rows = (inputs[name][0, :most].tolist() for name in ("input_ids", "labels"))
    for token, label, guess in zip(*rows, guesses.tolist(), strict=True):
        if label == IGNORED:
            plain.append(token)
            continue
        wrong = "" if guess == label else f", not {text([label])!r}"
        parts += [text(plain), f"[[{text([guess])!r}{wrong}]]"]
        plain = []
    return "".join([*parts, text(plain)])


def _draw(logits: np.ndarray[Any, Any], temperature: float, top_k: int | None, rng: np.random.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits.astype(np.float64) / temperature
    if top_k is not None and top_k < len(scaled):
        scaled[scaled < np.partition(scaled, -top_k)[-top_k]] = -np.inf
    weights = np.exp(scaled - scaled.max())
    return int(rng.choice(len(weights), p=weights / weights.sum()))
