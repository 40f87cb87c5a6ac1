"""The model `nntile` of lm_eval, EleutherAI's evaluation harness. The extra `lm-eval` installs lm_eval."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import lm_eval.models  # noqa: F401, before register_model, which would otherwise hide the models of lm_eval
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from nntile_py.config.inference_config import inference_config, model_fields
from nntile_py.data.special_tokens import special_tokens
from nntile_py.errors import ConfigError
from nntile_py.execution.runtime import Runtime
from nntile_py.inference.evaluation import aim_of
from nntile_py.inference.generator import Generator
from nntile_py.inference.open_model import open_model
from nntile_py.inference.token_scorer import TokenScorer

MODEL = "nntile"  # value of lm_eval's --model
# Defaults of lm_eval's own model hf: tokens of a sequence if the model has no limit, new tokens if the task has none.
LONGEST, MOST_NEW = 2048, 256
_DRAWING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")  # gen_kwargs that Generator takes

run = cli_evaluate  # lm_eval's command line, with the model registered below

Encoded = tuple[Any, list[int], list[int]]  # (request's texts or None, tokens of the context, tokens to score)


@register_model(MODEL)
class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A causal model of nntile_py for lm_eval.

    Args:
        path: Folder of a run, a checkpoint, or a folder of save_pretrained.
        max_length: Largest number of tokens of a sequence. Default: the model's positions.
        batch_tokens: Largest number of tokens in one forward pass.
        settings: Keys of the run's config, as in --set: `precision`, `runtime.cuda`, `tiles.embed`, ...
            lm_eval's own arguments batch_size, max_batch_size and device have no effect.

    Raises:
        ConfigError: The folder or an argument is wrong, or the model does not predict the next token.
    """

    def __init__(
        self, path: str | None = None, max_length: int | None = None, batch_tokens: int = 4096, **settings: Any
    ) -> None:
        super().__init__()
        if path is None:
            raise ConfigError("--model_args: path is missing; allowed: path=FOLDER, the folder of a run or of a model")
        unused = ("batch_size", "max_batch_size", "device")
        overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items() if key not in unused]
        opened = open_model(str(path), model_fields(overrides))
        if (aim := aim_of(opened)) != "causal":
            need = "a model that predicts the next token"
            raise ConfigError(f"--model_args: path={path}: the model is {aim}; allowed: {need}")
        if opened.tokenizer is None:
            raise ConfigError(f"--model_args: path={path} has no tokenizer.json; allowed: a folder with a tokenizer")
        known = special_tokens(opened.tokenizer, str(opened.tokenizer_file), str(opened.folder))
        roles = [known.roles.get(role) for role in ("bos_token", "eos_token")]
        numbers = [opened.tokenizer.token_to_id(token) for token in roles if token]
        if not numbers or None in numbers:
            need = "a tokenizer with one of them, which lm_eval puts before a text without context"
            raise ConfigError(
                f"--model_args: path={path}: the tokenizer has no bos_token or eos_token; allowed: {need}"
            )
        self._first, self._last = int(numbers[0] or 0), int(numbers[-1] or 0)
        positions = getattr(opened.model.config, "positions", None)
        for name, value, most in (("max_length", max_length, positions), ("batch_tokens", batch_tokens, None)):
            if value is not None and (type(value) is not int or value < 1 or value > (most or value)):
                need = "a positive integer" + (f" of at most {most}, the positions of the model" if most else "")
                raise ConfigError(f"--model_args: {name}={value}; allowed: {need}")
        config = inference_config(opened.config, overrides)
        self.max_length = max_length or positions or LONGEST
        self.tokenizer = opened.tokenizer
        if Runtime.current is None:
            Runtime(**config.runtime).start()  # it stops when the process ends
        self._scorer = TokenScorer(opened.model, batch_tokens, **config.bound)
        self._opened, self._how = opened, {name: config.bound[name] for name in ("precision", "tiles")}

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, which lm_eval uses as a key of its request cache."""
        return str(self._opened.folder)

    @property
    def eot_token_id(self) -> int:
        """Number of the token that ends a text."""
        return self._last

    @property
    def prefix_token_id(self) -> int:
        """Number of the token before a text without context."""
        return self._first

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
        """Return a text's tokens; default: with the tokenizer's template, unless it starts with the prefix token."""
        if add_special_tokens is None:
            first = self.tokenizer.decode([self.prefix_token_id], skip_special_tokens=False)
            add_special_tokens = not string.startswith(first)
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens).ids)

    def _loglikelihood_tokens(
        self, requests: Sequence[Encoded], disable_tqdm: bool = False, **unused: Any
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood, greedy) of each request. A context that is too long is cut at its beginning."""
        for _texts, _context, continuation in requests:
            if not 1 <= len(continuation) <= self.max_length:
                need = f"1 to max_length = {self.max_length}"
                raise ConfigError(f"--tasks: a continuation of {len(continuation)} tokens; allowed: {need}")
        sequences = [(context + continuation)[-(self.max_length + 1) :] for _, context, continuation in requests]
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
            scores = self._scorer([ids[:-1] for ids in sequences], [targets for *_, targets in requests], bar.update)
        results = [(score.log_likelihood, score.greedy) for score in scores]
        for (texts, _, _), result in zip(requests, results, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, result)
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text. A text longer than `max_length` is read in windows."""
        windows: list[Encoded] = []
        ends = [0]
        for request in requests:
            (text,) = request.args
            pairs = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            windows += [(None, *make_disjoint_window(pair)) for pair in pairs]
            ends.append(len(windows))
        likelihoods = [likelihood for likelihood, _ in self._loglikelihood_tokens(windows, disable_tqdm)]
        sums = [sum(likelihoods[begin:end]) for begin, end in pairwise(ends)]
        for request, result in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, result)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context. A context that is too long is cut at its beginning."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        texts = [""] * len(requests)
        self._scorer.close()  # so that scorer and generator do not both keep weights in tiles
        with (
            Generator(self._opened, max_length=self.max_length, **self._how) as generator,
            tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests") as bar,
        ):
            for key, numbers in groups.items():
                options = self._options(json.loads(key))
                room = self.max_length - options["max_tokens"]
                ids = [
                    self.tok_encode(requests[number].args[0])[-room:] or [self.prefix_token_id] for number in numbers
                ]
                tokens = [list[int]() for _ in ids]
                for part in generator(ids, stream=True, **options):
                    tokens[part.index].append(part.token)
                    bar.update(1 if part.reason else 0)
                for number, new in zip(numbers, tokens, strict=True):
                    texts[number] = self._cut(self.tokenizer.decode(new), options["stop"])
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    @staticmethod
    def _cut(text: str, stops: Sequence[str]) -> str:
        """Return the part of a text before the first of `stops`."""
        return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]

    def _options(self, gen_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the Generator's options for the gen_kwargs of a task; without do_sample the text is greedy."""
        kwargs = normalize_gen_kwargs(gen_kwargs, MOST_NEW)
        most = kwargs.pop("max_gen_toks")
        if not 1 <= most < self.max_length:
            need = f"1 to {self.max_length - 1}, as a sequence has at most max_length = {self.max_length} tokens"
            raise ConfigError(f"--gen_kwargs: max_gen_toks={most}; allowed: {need}")
        stops = [text for text in kwargs.pop("until", []) if text]
        drawn = kwargs.pop("do_sample", False)
        if unknown := kwargs.keys() - {*_DRAWING}:
            need = ", ".join(["until", "max_gen_toks", "do_sample", *_DRAWING])
            raise ConfigError(f"--gen_kwargs: {min(unknown)} is unknown; allowed: {need}")
        options = kwargs if drawn else {"temperature": 0.0}
        return {"temperature": 1.0, **options, "max_tokens": most, "stop": stops}

    def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
        """Raise ConfigError: chat templates are not supported yet."""
        raise ConfigError(f"--apply_chat_template: not supported by the model {MODEL} yet; leave the option out")
