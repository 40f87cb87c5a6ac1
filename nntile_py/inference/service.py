"""Service: one thread that generates and encodes texts for many callers, with a limited queue."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from nntile_py.data.chat_template import ChatTemplate, Message
from nntile_py.data.tables import check_whole
from nntile_py.errors import NNTileError, NotFinite
from nntile_py.inference.api_answer import ScoredToken
from nntile_py.inference.encoder import Encoder
from nntile_py.inference.engine import Event, Reason, Request
from nntile_py.inference.generated_text import MOST_TOKENS, Options
from nntile_py.inference.generator import Generator
from nntile_py.inference.open_model import OpenedModel, no_tokenizer
from nntile_py.inference.sentence import has_modules
from nntile_py.inference.text_stream import TextStream
from nntile_py.inference.texts import TokenizedText
from nntile_py.system.units import counted

ENDS = "the server ends"
MOST_CHARACTERS = 64  # largest number of characters, for each allowed token, of a text that is tokenized


class TooBusy(Exception):
    """The queue is full."""


@dataclass(frozen=True)
class JobPart:
    """A part of a job's text.

    Attributes:
        text: New text.
        tokens: Number of new tokens.
        reason: Why the text ends here; None: it continues.
        error: Message of the error that ended the job, or "".
        scored: The tokens of the text, if log-probabilities were asked for.
    """

    text: str = ""
    tokens: int = 0
    reason: Reason | None = None
    error: str = ""
    scored: Sequence[ScoredToken] = ()


@dataclass(eq=False)
class Job:
    """A text that is generated for a caller. The service's thread calls `tell` with each part.

    Attributes:
        request: The sequence in the engine.
        stream: Turns the new tokens into text.
        tell: Gets each part of the text.
        echoed: Text of the prompt. The first part then repeats it, with the log-probabilities of its tokens. None: the
            parts do not repeat the prompt.
    """

    request: Request
    stream: TextStream
    tell: Callable[[JobPart], None]
    echoed: str | None = None
    _begun: bool = False
    _held: list[ScoredToken] = field(default_factory=list)  # tokens whose text is held back

    def parts(self, tokenizer: Tokenizer) -> Iterator[JobPart]:
        """Yield the parts of the tokens that the engine has appended since the last call, up to the end of the text."""
        while self.request.events:
            if self.echoed is not None and not self._begun:
                yield JobPart(self.echoed, scored=self._prompt(tokenizer))
            self._begun = True
            yield self._part(self.request.events.popleft())

    def _prompt(self, tokenizer: Tokenizer) -> list[ScoredToken]:
        """Return the tokens of the prompt with their log-probabilities."""
        assert self.request.row and self.request.row.prompt_logprobs is not None
        stream, offsets = TextStream(tokenizer, []), []
        for token in self.request.prompt:
            offsets.append(min(stream.length, len(self.echoed or "")))
            stream.add(token)
        rows = zip(self.request.prompt, [None, *self.request.row.prompt_logprobs], offsets, strict=True)
        return [ScoredToken(*row) for row in rows]

    def _part(self, event: Event) -> JobPart:
        """Return the part that a new token adds.

        The field `scored` lists a token in the part that has the token's text, at the latest in the last part.
        """
        token, reason, logprobs = event
        before = len(self.echoed or "")
        if logprobs and reason != "stop":
            self._held.append(ScoredToken(token, logprobs, before + self.stream.length))
        text = "" if reason == "stop" else self.stream.add(token)
        reason = "stop" if self.stream.stopped else reason
        text += self.stream.finish() if reason else ""
        if not text and not reason:
            return JobPart("", 1)
        scored, self._held = self._held, []
        if self.stream.stopped:  # tokens of the stop text are no part of the answer
            scored = [one for one in scored if one.offset < before + len(self.stream.text)]
        return JobPart(text, 1, reason, scored=scored)


@dataclass(eq=False)
class _Vectors:
    """A request for the vectors of texts. Each call of `add` computes some of them."""

    tokens: Sequence[TokenizedText]
    future: Future[np.ndarray[Any, Any]] = field(default_factory=Future)
    _vectors: list[np.ndarray[Any, Any]] = field(default_factory=list)

    def add(self, encoder: Encoder) -> None:
        """Encode the next texts, about one pass of the encoder. After the last text, set the future's result."""
        first = len(self._vectors)
        sums = np.cumsum([len(text.ids) for text in self.tokens[first:]])
        count = max(int(np.searchsorted(sums, encoder.batch_tokens, side="right")), 1)
        self._vectors += encoder.each_tokenized([self.tokens[first : first + count]])
        if not all(np.isfinite(vector).all() for vector in self._vectors[first:]):
            raise NotFinite("input: a vector is nan or infinite; allowed: a model with finite weights")
        if len(self._vectors) >= len(self.tokens):
            self.end(np.stack(self._vectors))

    def end(self, result: np.ndarray[Any, Any] | BaseException) -> None:
        """Set the result of the future, or its error."""
        with suppress(InvalidStateError):  # the caller has cancelled the future
            if isinstance(result, BaseException):
                self.future.set_exception(result)
            else:
                self.future.set_result(result)


class Service:
    """Continues prompts and encodes texts in a thread of its own. Needs a running Runtime until `stop`.

    Args:
        opened: The model with its tokenizer.
        precision: See Generator.
        batch: Largest number of texts that are continued at once.
        max_length: Largest number of tokens of a prompt with its continuation. Default: the model's positions, at most
            2048.
        cache: Bytes of the cache, see Generator.
        queue: Largest number of texts, and of requests for vectors, that wait.

    Raises:
        ConfigError: A value is out of range, or the folder has no tokenizer.
    """

    def __init__(
        self, opened: OpenedModel, *, precision: str = "fp32", batch: int = 8, max_length: int | None = None,
        cache: str | None = None, queue: int = 64,
    ) -> None:  # fmt: skip
        if opened.tokenizer is None:
            raise no_tokenizer(opened.folder)
        self.opened, self.tokenizer, self._precision = opened, opened.tokenizer, precision
        self.generates = type(opened.model).objective == "causal" and _head(opened) in (None, "causal_lm")
        positions = getattr(opened.model.config, "positions", None)
        self.max_length = max_length or min(positions or 2048, 2048)
        self.room, self.failed = queue + batch, ""
        self._encoder: Encoder | None = None
        self._new_encoder = threading.Lock()
        self._jobs: set[Job] = set()
        self._embedding: set[_Vectors] = set()  # requests for vectors that are not answered yet
        self._new: deque[Job | Callable[[], None]] = deque()
        self._change, self.ending = threading.Condition(), False
        if self.generates:
            how: dict[str, Any] = {"precision": precision, "batch": batch, "max_length": self.max_length}
            self.generator = Generator(opened, cache=cache, **how)
            self._engine = self.generator.engine(batch, self.max_length)
        self._thread = threading.Thread(target=self._run, name="service", daemon=True)
        self._thread.start()

    def tokens(self, prompts: str | Sequence[Any], options: Options, noun: str) -> list[list[int]]:
        """Return the tokens of prompts, which are texts or lists of token numbers. noun: word for them in messages.

        Raises:
            ValueError: A prompt is empty, or is too long together with its continuation.
        """
        for number, text in enumerate([prompts] if isinstance(prompts, str) else prompts):
            _check_characters(f"{noun}[{number}]", text, self.max_length)
        return self.generator.tokens(prompts, options, noun)

    def tokens_of_chat(self, messages: Sequence[Message], template: ChatTemplate) -> list[int]:
        """Return the tokens of the prompt that continues a chat. The folder's template writes special tokens itself."""
        _check_characters("messages", [part for one in messages for part in one.values()], self.max_length)
        text = template.prompt([*messages])
        _check_characters("messages", text, self.max_length)
        check_whole("messages", text, ValueError)
        return list(self.tokenizer.encode_batch([text], add_special_tokens=not template.own)[0].ids)

    def tokens_to_embed(self, texts: Sequence[Any]) -> list[TokenizedText]:
        """Return the tokens of texts, or of lists of token numbers, for `embed`. Raises ValueError for empty texts."""
        with self._new_encoder:
            self._encoder = self._encoder or _encoder(self.opened, self._precision)
        most = self._encoder.max_length * MOST_CHARACTERS  # tokenizing a very long text takes too long
        return self._encoder.tokens([_cut(text, most) for text in texts], noun="input")

    def add(
        self, ids: list[int], options: Options, seed: tuple[int, ...], tell: Callable[[JobPart], None],
        echoed: str | None = None,
    ) -> Job:  # fmt: skip
        """Put a prompt into the queue. See Job for the arguments.

        Raises:
            TooBusy: The queue is full.
            NNTileError: The service has failed or is ending.
            ValueError: The cache has no room for the prompt and its continuation.
        """
        decoder = self._engine.decoder
        most = options.max_tokens or MOST_TOKENS
        if decoder.pages_for(len(ids) + most) > decoder.shape.most_pages:
            raise ValueError("the prompt and max_tokens need more room than the cache has")
        special = self.generator.special
        stops = special.stops if special else frozenset[int]()
        scores: dict[str, Any] = {"logprobs": options.logprobs, "of_prompt": echoed is not None}
        request = Request(ids, most, options.settings, seed, stops, **scores)
        job = Job(request, TextStream(self.tokenizer, ids, options.stop), tell, echoed)
        with self._change:
            self._check_room()
            self._new.append(job)
            self._change.notify()
        return job

    def check_room(self, count: int) -> None:
        """Raise an error if the service cannot take `count` more texts; see `add`."""
        with self._change:
            self._check_room(count)

    def _check_room(self, count: int = 1) -> None:
        """Raise an error if the service cannot take `count` more texts or requests for vectors."""
        if self.failed or self.ending:
            raise NNTileError(self.failed or ENDS)
        waiting = len(self._jobs) + sum(isinstance(work, Job) for work in self._new) + len(self._embedding)
        if waiting + count > self.room:
            more = f", and this request has {count}" if count > 1 else ""
            raise TooBusy(f"{counted(waiting, 'text')} generated or waiting{more}; allowed: {self.room}")

    def cancel(self, job: Job) -> None:
        """End a job; its further tokens are dropped."""
        job.request.ended = True
        self._later(lambda: self._engine.cancel(job.request))

    def embed(self, tokens: Sequence[TokenizedText]) -> Future[np.ndarray[Any, Any]]:
        """Return a future of the vectors [texts, embed] of texts that `tokens_to_embed` returned.

        The caller may cancel the future.

        Raises:
            TooBusy: The queue is full.
            NNTileError: The service has failed or is ending.
        """
        work = _Vectors(tokens)
        with self._change:
            self._check_room()
            self._embedding.add(work)
            self._new.append(lambda: self._embed_part(work))
            self._change.notify()
        return work.future

    def _embed_part(self, work: _Vectors) -> None:
        """Encode the next texts of a request. Then queue the rest of the request behind other requests."""
        try:
            if not work.future.done():  # else the caller has cancelled it
                assert self._encoder
                work.add(self._encoder)
        except Exception as error:  # the future passes the error to the caller
            work.end(error)
        if work.future.done():
            self._embedding.discard(work)
        else:
            self._later(lambda: self._embed_part(work))

    def end(self) -> None:
        """End the thread after its present step, and all open requests by the error ENDS. Does not wait."""
        with self._change:
            self.ending = True
            self._change.notify()

    def stop(self) -> None:
        """End the thread after its present step, and release weights and cache."""
        self.end()
        self._thread.join()
        if self._encoder:
            self._encoder.close()
        if self.generates:
            self.generator.close()

    # -- the thread

    def _later(self, work: Callable[[], None]) -> None:
        with self._change:
            self._new.append(work)
            self._change.notify()

    def _run(self) -> None:
        try:
            while True:
                with self._change:
                    while not (self._new or self._jobs or self.ending):
                        self._change.wait()
                    if self.ending:
                        break
                    new, self._new = self._new, deque()
                    self._jobs |= {work for work in new if isinstance(work, Job)}
                for work in new:
                    self._engine.add(work.request) if isinstance(work, Job) else work()
                if self._jobs:
                    if self._engine.busy:
                        self._engine.step()
                    self._tell()
        except BaseException as error:  # a task has failed: the server cannot go on
            with self._change:  # later requests are refused
                self.failed = str(error) or type(error).__name__
        self._give_up(self.failed or ENDS)

    def _give_up(self, reason: str) -> None:
        """End all open requests by an error. The thread calls this at its end."""
        for job in [*self._jobs, *(work for work in self._new if isinstance(work, Job))]:
            job.tell(JobPart(error=reason))
        self._jobs.clear()
        self._new.clear()
        for work in [*self._embedding]:
            work.end(NNTileError(reason))
        self._embedding.clear()

    def _tell(self) -> None:
        """Pass the new tokens of all jobs to their callers, and remove jobs that have ended."""
        for job in [*self._jobs]:
            request, ended = job.request, job.request.ended
            for part in job.parts(self.tokenizer):
                job.tell(part)
                if part.reason:
                    self._engine.cancel(request)
                    request.events.clear()
                    ended = True
            if request.error:
                job.tell(JobPart(error=str(request.error)))
            if ended:
                self._jobs.discard(job)


def _cut(text: Any, most: int) -> Any:
    """Return the first `most` characters of a text, or of each text of a pair; token numbers are left unchanged."""
    if isinstance(text, list):
        return [part[:most] if isinstance(part, str) else part for part in text]
    return text[:most] if isinstance(text, str) else text


def _check_characters(here: str, text: Any, longest: int) -> None:
    """Raise ValueError if a text, or a list of texts together, has far more characters than `longest` tokens have.

    here: Beginning of the message.
    """
    parts, most = text if isinstance(text, list) else [text], longest * MOST_CHARACTERS
    if (count := sum(len(part) for part in parts if isinstance(part, str))) > most:
        raise ValueError(f"{here}: {count} characters; allowed: {most}, {MOST_CHARACTERS} for each of {longest} tokens")


def new_seed() -> int:
    """Return a random seed."""
    return int.from_bytes(os.urandom(6), "big")


def _head(opened: OpenedModel) -> str | None:
    return getattr(opened.model.config, "head", None)


def _encoder(opened: OpenedModel, precision: str) -> Encoder:
    """Return an Encoder: for a folder of sentence-transformers its vectors, else the mean of the hidden states."""
    if has_modules(opened.folder):
        return Encoder.from_hf(opened.folder, precision=precision)
    return Encoder(opened.model, "mean", tokenizer=opened.tokenizer, precision=precision)
