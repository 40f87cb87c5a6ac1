"""Generator: continues prompts with a causal model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self, overload

import numpy as np
from tokenizers import Tokenizer

from nntile_py import _core
from nntile_py.data.special_tokens import special_tokens
from nntile_py.data.tokenizer import token_numbers, without_limits
from nntile_py.errors import ConfigError, NNTileError
from nntile_py.execution.cuda_graph import SHARE
from nntile_py.execution.runtime import Runtime, in_turns
from nntile_py.graph.step import TILE_DTYPE
from nntile_py.inference.bound_model import BoundModel
from nntile_py.inference.cache_sizes import cache_shape
from nntile_py.inference.decoder import Decoder
from nntile_py.inference.engine import Engine, Event, Reason, Request
from nntile_py.inference.generated_text import MOST_TOKENS, GeneratedPart, GeneratedText, Options
from nntile_py.inference.open_model import OpenedModel, open_model
from nntile_py.inference.text_stream import TextStream
from nntile_py.inference.texts import TokenizedText, check_tokens, listed, tokenized
from nntile_py.inference.token_logprobs import TokenLogProbs
from nntile_py.models.base import Model
from nntile_py.schema import SIZES, in_bytes
from nntile_py.system.load import cores
from nntile_py.tiles.dtypes import DTYPES
from nntile_py.typed import plain, typed

STEP = 256  # the cache's sequence length is a multiple of this number of tokens, so that few calls need a larger cache


Prompts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


class Generator:
    """Continues prompts with a causal model. Keys and values of earlier tokens are kept in the pages of a cache.

        generator = nt.Generator("runs/my_run")
        print(generator("def", max_tokens=50, temperature=0)[0].text)

    Prompts of unequal lengths are continued together, up to `batch` at once. When a text ends, a waiting prompt takes
    its place. The generator uses the running Runtime. If no Runtime runs, the generator starts one on all cores. That
    Runtime stops at `close()`, at the end of `with generator:`, or when the user starts a Runtime.

    Args:
        model: A causal model of nt.models or of a user's own class; or a folder: of a run, of a checkpoint, or of
            transformers' save_pretrained.
        tokenizer: Turns texts into tokens. Default: the folder's tokenizer. Without a tokenizer, prompts are lists
            of token numbers.
        tiles: {axis: tile size} for any of the axes batch, seq (new tokens of a pass), embed, heads, ffn, vocab.
            Default: on CPU workers, as many tiles of heads, ffn and vocab as there are workers. On several GPUs, as
            many tiles of the batch as there are GPUs, if the weights take at most a quarter of each GPU's memory.
            Otherwise, no axis is cut.
        precision: fp32; on CUDA workers also tf32, bf16 and fp16, on CPU workers fp64.
        batch: Largest number of texts that are continued at once.
        max_length: Largest number of tokens of a prompt with its continuation. Default: the model's positions.
        cache: Bytes of the cache, such as "2GiB". Default: as much as the texts of a call need.
        captured: On GPUs: run passes as CUDA graphs. Default: the first passes measure whether graphs are faster.
        model_type: If the folder's model is a class of your own: my_file.py:MyModel, whose code then runs.

    Raises:
        ConfigError: A value is out of range, or the model does not predict the next token.
    """

    @typed
    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Tokenizer | None = None,
        tiles: Mapping[str, int] | None = None,
        precision: str = "fp32",
        batch: int = 8,
        max_length: int | None = None,
        cache: int | str | None = None,
        captured: bool | None = None,
        model_type: str | None = None,
    ) -> None:
        files: tuple[str, ...] = ()
        if isinstance(model, str | Path):
            model = open_model(model, {"type": model_type}, torch_modules=False)
        elif model_type is not None:
            raise ConfigError("model_type: allowed with a folder")
        if isinstance(model, OpenedModel):
            files = (str(model.tokenizer_file), str(model.folder)) if tokenizer is None else ()
            model, tokenizer = model.model, tokenizer or model.tokenizer
        self.special = special_tokens(tokenizer, *files) if tokenizer else None
        for name, value in (("batch", batch), ("max_length", max_length)):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name}: got {value!r}; allowed: a positive integer")
        if isinstance(model, Model) and model.aim != "causal":
            need = "a model that predicts the next token, such as GPT2LMHeadModel or LlamaForCausalLM"
            raise ConfigError(f"model: got {type(model).__name__}; allowed: {need}")
        positions = getattr(getattr(model, "config", None), "positions", None)
        if max_length and positions and max_length > positions:
            raise ConfigError(f"max_length: got {max_length}; allowed: at most {positions}, the positions of the model")
        self.model, self.precision, self.batch = model, precision, batch
        self.tokenizer = without_limits(tokenizer) if tokenizer else None
        self.max_length = max_length or positions
        self._cache_bytes = None if cache is None else in_bytes(plain(cache))
        if cache is not None and self._cache_bytes is None:
            raise ConfigError(f"cache: got {cache!r}; allowed: {SIZES}")
        self._tiles, self._captured = tiles, captured
        self._bound: BoundModel | None = None
        self._engine: Engine | None = None
        self._vocab = token_numbers(tokenizer) if tokenizer else None

    def __repr__(self) -> str:
        return f"<Generator of {type(self.model).__name__}: precision={self.precision!r}, batch={self.batch}>"

    @overload
    def __call__(self, prompts: Prompts, *, stream: Literal[False] = False, **options: Any) -> list[GeneratedText]: ...
    @overload
    def __call__(self, prompts: Prompts, *, stream: Literal[True], **options: Any) -> Iterator[GeneratedPart]: ...

    def __call__(
        self, prompts: Prompts, *, stream: bool = False, **options: Any
    ) -> list[GeneratedText] | Iterator[GeneratedPart]:
        """Continue prompts.

        Args:
            prompts: A text, a list of texts, a list of token numbers, or a list of such lists.
            stream: Return an iterator of GeneratedPart, which yields each token as soon as it is drawn.
            options: See Options: max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop,
                logprobs.

        Returns:
            A GeneratedText for each prompt.

        Raises:
            ValueError: A prompt is too long, or has token numbers that the model does not have. A list of token numbers
                is empty. A text is empty, and the tokenizer's files name no token that begins a text.
            ConfigError: An option is unknown or out of range, or the weights or the Runtime changed during the call.
            NotFinite: Logits are nan or infinite.
        """
        known = [field.name for field in fields(Options)]
        if unknown := [name for name in options if name not in known]:
            raise ConfigError(f"{unknown[0]}: unknown option; allowed: {', '.join(known)}")
        chosen = Options(**options)
        tokens = self.tokens(prompts, chosen)
        parts = self._parts(tokens, chosen)
        return parts if stream else _collected(parts, tokens, decoded=self.tokenizer is not None)

    def tokens(self, prompts: Prompts, options: Options, noun: str = "prompts") -> list[list[int]]:
        """Return the tokens of prompts. Raises ValueError, see `__call__`. noun: word for the prompts in messages."""
        texts = listed(prompts, noun)
        if options.stop and self.tokenizer is None:
            raise ConfigError(f"stop: got {options.stop!r} without a tokenizer; allowed: a tokenizer, or max_tokens")
        vocab = getattr(getattr(self.model, "config", None), "vocab", None)
        longest = (self.max_length or 2**31) - (options.max_tokens or 1)
        if longest < 1:
            both = f"a prompt and its continuation together have at most {self.max_length} tokens"
            need = f"less than {self.max_length}, as {both}"
            raise ConfigError(f"max_tokens: got {options.max_tokens}; allowed: {need}")
        tokens = tokenized(texts, self.tokenizer, 0, noun, pairs=False)
        tokens = [text if len(text.ids) else self._beginning(text, f"{noun}[{k}]") for k, text in enumerate(tokens)]
        reason = f"max_length is {self.max_length}"
        if options.max_tokens:
            reason = f"the prompt and max_tokens = {options.max_tokens} together have at most {self.max_length} tokens"
        elif self.max_length == getattr(getattr(self.model, "config", None), "positions", None):
            reason = f"the model has {self.max_length} positions"
        check_tokens(tokens, longest, vocab, 0, noun, reason)
        return [text.ids.tolist() for text in tokens]

    def _beginning(self, empty: TokenizedText, name: str) -> TokenizedText:
        """Return the token that begins a text, for an empty text. name: Name of the prompt in messages."""
        if not empty.is_text:
            return empty
        start = self.special.ids.get("bos_token_id") if self.special else None
        if start is None and self.special:
            start = self.special.end
        if start is None:
            need = "a text that is not empty, as the tokenizer's files name no token that begins a text"
            raise ValueError(f"{name}: got an empty text; allowed: {need}")
        return empty._replace(ids=np.atleast_1d(start)[:1])  # config.json may have a list of numbers

    @in_turns
    def engine(self, rows: int, length: int) -> Engine:
        """Return the engine that continues sequences, with a cache for at least `rows` sequences of `length` tokens.

        If the present engine has a smaller cache, it finishes its requests, and a new engine replaces it.
        """
        if self._bound is None:
            options: dict[str, Any] = {"captured": self._captured, "accumulate": "tree", "owner": "Generator"}
            self._bound = BoundModel(self.model, self.precision, self._cuts(), **options)
        now = self._engine.decoder if self._engine else None
        length = min(-(-length // STEP) * STEP, self.max_length or 2**31)
        if self._engine and now and now.shape.length >= length and now.rows >= rows:
            return self._engine
        while self._engine and self._engine.busy:
            self._engine.step()
        if now:
            self._engine.close() if self._engine else None
            rows, length = max(rows, now.rows), max(length, now.shape.length)
        self._bound.programs = {}
        decoder = Decoder(self._bound, rows, cache_shape(self._bound, length, rows, self._cache_bytes), self._vocab)
        self._engine = Engine(decoder)
        return self._engine

    @in_turns
    def close(self) -> None:
        """Release weights, programs and cache; stop the Runtime if the generator started it."""
        bound, self._bound, engine, self._engine = self._bound, None, self._engine, None
        if engine and Runtime.current is not None:
            engine.close()
        if bound:
            bound.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- inside

    def _cuts(self) -> dict[str, int]:
        """Return the tile sizes. Default: one task of a product per CPU worker, or one tile of the batch per GPU."""
        if self._tiles is not None:
            return dict(self._tiles)
        runtime, config = Runtime.current, getattr(self.model, "config", None)
        if runtime and runtime.cuda > 1 and self.batch > 1:
            weights = sum(value.size for value in self.model.weights.values())
            fit = weights * DTYPES[TILE_DTYPE.get(self.precision, "fp32")].bytes <= (runtime.cuda_memory or 0) // SHARE
            return {"batch": -(-self.batch // runtime.cuda)} if fit else {}
        workers = (0 if runtime.cuda else _core.cpu_workers()) if runtime else cores()
        sizes = {axis: getattr(config, axis, None) or 1 for axis in ("heads", "ffn", "vocab")}
        group = sizes["heads"] // (getattr(config, "kv_heads", None) or sizes["heads"])
        cuts = {axis: -(-size // workers) for axis, size in sizes.items() if 1 < workers <= size}
        if "heads" in cuts:  # a tile has complete groups of query heads that share a key head
            cuts["heads"] = -(-cuts["heads"] // group) * group
        return cuts

    def _parts(self, prompts: list[list[int]], options: Options) -> Iterator[GeneratedPart]:
        """Yield the new tokens of all prompts as soon as they are drawn."""
        rows = min(self.batch, 1 << (len(prompts) - 1).bit_length()) if prompts else 1
        stops = self.special.stops if self.special else frozenset[int]()
        room = [(self.max_length or 2**31) - len(ids) for ids in prompts]
        most = [options.max_tokens or min(MOST_TOKENS, tokens) for tokens in room]
        longest = max((len(ids) + new for ids, new in zip(prompts, most, strict=True)), default=1)
        texts: dict[Request, _Text] = {}
        for number, ids in enumerate(prompts):
            how = options.settings, (options.seed, number), stops, f"prompts[{number}]"
            request = Request(ids, most[number], *how, logprobs=options.logprobs)
            stream = TextStream(self.tokenizer, ids, options.stop) if self.tokenizer else None
            texts[request] = _Text(number, stream)
        active, engine = set(texts), None
        try:
            with Runtime.turn:  # no other thread may replace the engine until it has all requests
                engine = self.engine(rows, longest)
                for request in texts:
                    engine.add(request)
            while active:
                if not any(request.events for request in active):
                    _raise_errors(active)
                    engine.step()
                for request in [request for request in texts if request in active and request.events]:
                    part = texts[request].part(request.events.popleft())
                    if part.reason:
                        active.remove(request)
                        engine.cancel(request)
                    yield part
        finally:
            for request in active:
                if engine:
                    engine.cancel(request)


def _raise_errors(requests: Collection[Request]) -> None:
    """Raise the error that has ended a text, if there is one."""
    for request in requests:
        if request.error:
            raise request.error
        if request.ended:
            raise NNTileError("generation: the Generator was closed before the texts ended")


@dataclass(frozen=True)
class _Text:
    """A text that is being generated: the number of its prompt, and the stream that decodes its tokens."""

    index: int
    stream: TextStream | None

    def part(self, event: Event) -> GeneratedPart:
        """Return the part that a new token adds to the text."""
        token, reason, logprobs = event
        if not self.stream:
            return GeneratedPart(self.index, token, "", reason, logprobs)
        text = "" if reason == "stop" else self.stream.add(token)
        if self.stream.stopped:
            reason = "stop"
        return GeneratedPart(self.index, token, text + (self.stream.finish() if reason else ""), reason, logprobs)


def _collected(
    parts: Iterator[GeneratedPart], prompts: Sequence[Sequence[int]], *, decoded: bool
) -> list[GeneratedText]:
    """Join the parts of each text. decoded: The parts have text, because the generator has a tokenizer."""
    texts, tokens = [""] * len(prompts), [list[int]() for _ in prompts]
    logprobs: list[list[TokenLogProbs] | None] = [None for _ in prompts]
    reasons: list[Reason] = ["length"] * len(prompts)
    for part in parts:
        texts[part.index] += part.text
        if part.reason != "stop":
            tokens[part.index].append(part.token)
        if part.logprobs:
            kept = logprobs[part.index] = logprobs[part.index] or []
            kept += [part.logprobs] if part.reason != "stop" else []
        reasons[part.index] = part.reason or "length"
    rows = zip(texts, tokens, prompts, reasons, logprobs, strict=True)
    return [
        GeneratedText(text if decoded else None, new, len(ids), reason, values)
        for text, new, ids, reason, values in rows
    ]
