"""Encoder: turns texts or token numbers into hidden states, a vector for each text, or logits."""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self, get_args

import numpy as np
from tokenizers import Tokenizer

from nntile_py import _core
from nntile_py.data.tokenizer import load_tokenizer
from nntile_py.errors import ConfigError, TaskError
from nntile_py.execution.forward_program import ForwardProgram, MissingInput
from nntile_py.execution.host_copy import HostCopy
from nntile_py.execution.runtime import Runtime, in_turns
from nntile_py.graph.bin_packing import Bins
from nntile_py.graph.packed_inputs import rows_of
from nntile_py.graph.padding import MASK, padded
from nntile_py.graph.passes.fp8 import FP8
from nntile_py.graph.step import StepSpec
from nntile_py.graph.step_inputs import SequencePlace
from nntile_py.inference.bound_model import BoundModel
from nntile_py.inference.open_model import class_of_encoder, saved_adapters
from nntile_py.inference.sentence import SentenceModel, has_modules, read_sentence_model
from nntile_py.inference.texts import TokenizedText, listed, prompted, to_tokens, with_limit
from nntile_py.models.hf_config import named
from nntile_py.typed import typed

Array = np.ndarray[Any, Any]
OUTPUTS = ("hidden", "mean", "pooled", "logits", "sentence")
# {output: the head that the model must have}. `logits` is not listed: it uses the model's own head.
HEADS = {"hidden": "none", "mean": "none", "sentence": "none", "pooled": "pooler"}
SMALLEST = 64  # tokens of the smallest bin; larger bins have 2, 4, ... times as many
CHUNK = 1024  # number of texts that are tokenized together
IN_FLIGHT = 2  # number of passes that are submitted before the results of the first pass are read


class Encoder:
    """Encodes texts with a model: `encoder(texts)` returns outputs in the order of the texts.

    Sequences are packed, without padding, into bins of 64, 128, 256, ... tokens, one bin for each worker. For each size
    of bins, a program is built at its first use and kept. A program serves texts of all lengths.

    The encoder uses the running Runtime. If no Runtime runs, the encoder starts one on all cores. That Runtime stops at
    `close()`, at the end of `with encoder:`, or when the user starts a Runtime. Several threads may call one encoder.

    Args:
        model: A model of nt.models.
        output: `hidden`: the last layer's output, [tokens, embed] for each text. `mean`: the mean of `hidden` over the
            tokens, [embed]. `pooled`: transformers' pooler_output. `logits`: [classes] for a classifier, else
            [tokens, vocab]. `sentence`: the vector that sentence-transformers computes; from_hf reads its settings.
        tokenizer: Turns texts into tokens, with its template. For a masked model, a tokenizer without a template gets
            [CLS] text [SEP]. None: only token numbers can be encoded.
        tiles: {axis: tile size} for any of the axes embed, heads, ffn, vocab. An axis left out is not cut.
        precision: fp32; on CUDA workers also tf32, bf16, fp16 and fp8 (results come in float32), on CPU workers fp64.
        batch_tokens: Largest number of tokens in one forward pass. More tokens take more memory. A longer text has a
            pass of its own.
        max_length: Largest number of tokens of a text. Longer texts are cut, longer lists of token numbers refused.
            Default: the model's number of positions, or a smaller limit of `sentence`.
        captured: On one GPU: run each program as a CUDA graph; the weights then stay on the GPU. Default: the first
            pass of a program measures whether a graph is faster.
        prompt: Text that is put before each text.
        sentence: Settings of a folder of sentence-transformers, which `from_hf` reads.
        fp8: nt.FP8(...) or {option: value}: options of `precision="fp8"`. With scales="row", the results of a text do
            not depend on other texts, and a program can run as a CUDA graph.

    Raises:
        ConfigError: A value is out of range, or the model has no such output.
    """

    @typed
    def __init__(
        self,
        model: Any,
        output: str = "hidden",
        *,
        tokenizer: Tokenizer | None = None,
        tiles: Mapping[str, int] | None = None,
        precision: str = "fp32",
        batch_tokens: int = 4096,
        max_length: int | None = None,
        captured: bool | None = None,
        prompt: str = "",
        sentence: SentenceModel | None = None,
        fp8: FP8 | Mapping[str, Any] | None = None,
    ) -> None:
        _check_output(output)
        if not hasattr(model, "changed") or not hasattr(model, "weights"):
            need = "a model of nt.models, or nt.Encoder.from_hf(...) with a folder"
            raise ConfigError(f"model: got {model!r:.60}; allowed: {need}")
        for name, value in (("batch_tokens", batch_tokens), ("max_length", max_length)):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name}: got {value!r}; allowed: a positive integer")
        if not isinstance(captured, bool | None):
            raise ConfigError(f"captured: got {captured!r}; allowed: True, False or None")
        if cut := {"batch", "seq"} & {*(tiles or {})}:
            raise ConfigError(f"tiles.{min(cut)}: got a size, but a bin is one tile; allowed: embed, heads, ffn, vocab")
        positions = getattr(getattr(model, "config", None), "positions", None)
        if max_length and positions and max_length > positions:
            raise ConfigError(f"max_length: got {max_length}; allowed: at most {positions}, the positions of the model")
        self.model, self.output, self.precision, self.batch_tokens = model, output, precision, batch_tokens
        limits = [limit for limit in (positions, sentence and sentence.max_length) if limit]
        self.max_length, self.captured = max_length or min(limits, default=batch_tokens), captured
        self._warned = False  # whether the user knows that texts are cut
        self.cut = 0  # number of texts that were cut, because they had more than max_length tokens
        self._tokenizer: Tokenizer | None = None
        if tokenizer is not None:
            self._tokenizer = with_limit(tokenizer, self.max_length, getattr(model, "objective", None) == "masked")
        self.prompt, self._sentence, self._prompt_tokens = prompt, sentence, 0
        if output == "sentence":
            if sentence is None or sentence.pooling is None:
                raise ConfigError("output: got 'sentence' in Encoder(...); allowed: Encoder.from_hf(...) with a folder")
            self._prompt_tokens = sentence.prompt_tokens(self._tokenizer, prompt) if self._tokenizer else 0
        self._model, self._name = _headed(model, output)
        self._bound_model = BoundModel(
            self._model, precision, tiles, fp8=FP8.of(fp8), captured=captured, source=model, owner="Encoder"
        )
        graph, (_, outputs), _ = self._spec(1, self._capacity(1)).trace(training=False)  # checks the sizes
        if self._name not in outputs:
            raise ConfigError(f"output: got {output!r}; allowed: {', '.join(outputs)}")
        self._axes, self._width = outputs[self._name].axes, outputs[self._name].shape[-1]
        if sentence and output == "sentence":
            self._width = len(sentence.vector(np.zeros((1, self._width)), 0))
        self._limits_rows = rows_of(graph.inputs) is not None

    @classmethod
    @typed
    def from_hf(
        cls, folder: str | Path, output: str | None = None, *, prompt: str | None = None,
        prompt_name: str | None = None, model_type: str | None = None, **options: Any,
    ) -> Self:  # fmt: skip
        """Return an encoder with the model of a folder that `save_pretrained` or `nntile train` wrote.

        The folder has config.json, model.safetensors and, for texts, tokenizer.json. The model may lack a head. If
        sentence-transformers wrote the folder, the encoder prepares and cuts texts as sentence-transformers does.

        Args:
            folder: The folder. Its adapters are added to the weights, except for the output `logits`.
            output: See Encoder. Default: `sentence` for a folder of sentence-transformers, else `hidden`.
            prompt: Text that is put before each text. Default: the prompt `prompt_name`.
            prompt_name: Name of a prompt of the folder. Default: the folder's default prompt, if it has one.
            model_type: If the folder's model is a class of your own: my_file.py:MyModel, whose code then runs.
            options: Further arguments of Encoder.
        """
        output = output or ("sentence" if has_modules(Path(folder)) else "hidden")
        _check_output(output)
        with named(folder):
            sentence = read_sentence_model(Path(folder), output == "sentence")
            known = sentence or SentenceModel(Path(folder), None, False, {}, None)
            folder, prompt = known.folder, known.prompt(prompt, prompt_name)
        with named(folder):
            kind = class_of_encoder(Path(folder), model_type)
        if output in HEADS:
            _check_head(kind, output, HEADS[output])
        if adapters := saved_adapters(Path(folder)):
            model = kind.from_hf(folder, **adapters)
            model = model.merged() if output in HEADS else model  # without the head, its adapters would have no place
        else:
            fields: dict[str, Any] = {"head": HEADS[output]} if output in HEADS else {}
            model = kind.from_hf(folder, **fields)
        path = Path(folder) / "tokenizer.json"
        if "tokenizer" not in options and path.is_file():
            options["tokenizer"] = load_tokenizer(path, "tokenizer")
        return cls(model, output, prompt=prompt, **{"sentence": sentence} | options)

    def __repr__(self) -> str:
        return f"<Encoder of {type(self.model).__name__}: output={self.output!r}, precision={self.precision!r}>"

    @property
    def of_tokens(self) -> bool:
        """True if the output has a row for each token, False if it has a row for each text."""
        return self._axes[1] == "seq" and self.output not in ("mean", "sentence")

    @typed
    def __call__(self, texts: Sequence[Any] | Array) -> Any:
        """Encode texts, pairs of texts, or lists of token numbers.

        A single text or list of token numbers is encoded as a list of one, so that its result is [1, ...].

        Returns:
            One array [texts, ...]; for outputs with a row for each token a list of arrays [tokens, ...].

        Raises:
            ValueError: A sequence has no tokens, or token numbers that the model does not have.
        """
        outputs = list(self.each(texts))
        if self.of_tokens:
            return outputs
        return np.stack(outputs) if outputs else np.zeros((0, self._width), np.float32)

    def each(self, texts: Sequence[Any] | Array) -> Iterator[Array]:
        """Yield the output of each text as soon as it is computed, so that not all outputs need to be in memory."""
        texts = listed(texts)
        return self.each_tokenized(self._chunk(texts[k : k + CHUNK], k) for k in range(0, len(texts), CHUNK))

    def each_tokenized(self, chunks: Iterable[Sequence[TokenizedText]]) -> Iterator[Array]:
        """Yield the output of each text, as `each` does. chunks: lists of texts that `tokens` returned."""
        waiting: deque[_Pass] = deque()
        for tokens in chunks:
            runtime = self._bound_model.bind()
            for part, bins, places in self._passes([len(text.ids) for text in tokens]):
                waiting.append(self._start(runtime, tokens[part], bins, places))
                if len(waiting) > IN_FLIGHT:
                    yield from self._results(waiting.popleft())
        while waiting:
            yield from self._results(waiting.popleft())

    def tokens(self, texts: Sequence[Any], first: int = 0, noun: str = "texts") -> list[TokenizedText]:
        """Return the tokens of texts, cut at `max_length`. Another thread may call this while the encoder computes.

        Args:
            texts: Texts, pairs of texts, or lists of token numbers.
            first: Number of the first text, for messages.
            noun: Word for the texts in messages.

        Raises:
            ValueError: A sequence has no tokens, or token numbers that the model does not have.
        """
        vocab, prepare = getattr(self.model.config, "vocab", None), self._sentence.prepared if self._sentence else str
        texts = prompted(texts, self.prompt, prepare, first)
        tokens = to_tokens(texts, self._tokenizer, self.max_length, vocab, first, noun)
        with Runtime.turn:
            self.cut += sum(text.cut for text in tokens)
        return tokens

    def close(self) -> None:
        """Release programs and weights; stop the runtime if the encoder started it."""
        self._bound_model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):  # the interpreter may be ending, or __init__ has failed
            self.close()

    @property
    def programs(self) -> int:
        """Number of programs that the encoder has built on its latest Runtime."""
        return len(self._bound_model.programs)

    # -- inside

    def _chunk(self, texts: Sequence[Any], first: int) -> list[TokenizedText]:
        """Return the tokens of texts, and warn if texts are cut for the first time. first: number of the first text."""
        tokens = self.tokens(texts, first)
        if not self._warned and any(text.cut for text in tokens):
            self._warned = True
            message = f"texts with more than {self.max_length} tokens are cut at this limit; encoder.cut counts them"
            warnings.warn(message, stacklevel=_users_level())
        return tokens

    def _passes(self, lengths: Sequence[int]) -> Iterator[tuple[slice, Bins, list[SequencePlace]]]:
        """Divide sequences of these lengths into passes.

        Yield for each pass the slice of its sequences, its bins, and the place of each sequence in a bin."""
        workers, first = _core.cuda_workers() or _core.cpu_workers(), 0
        while first < len(lengths):
            end, total = first + 1, lengths[first]
            while end < len(lengths) and total + lengths[end] <= self.batch_tokens:
                total, end = total + lengths[end], end + 1
            while (fitting := self._fitting(lengths[first:end], workers)) is None:
                end -= 1
            yield slice(first, end), *fitting
            first = end

    def _fitting(self, lengths: Sequence[int], workers: int) -> tuple[Bins, list[SequencePlace]] | None:
        """Return the smallest bins that hold sequences of these lengths, and the place of each sequence in a bin.

        Return None if these bins would have more than about `batch_tokens` tokens in total."""
        count = workers if len(lengths) >= workers else 1
        least = max(*lengths, -(-sum(lengths) // count))
        most = max(self._capacity(-(-self.batch_tokens // count)), self._capacity(max(lengths)))
        while (capacity := self._capacity(least)) <= most or len(lengths) == 1:
            rows = self._spec(count, capacity).batch // count if self._limits_rows else None
            bins = Bins(count, capacity, max(lengths), rows=rows)
            try:
                return bins, bins.places(lengths)
            except ValueError:
                least = capacity + 1
        return None

    def _capacity(self, least: int) -> int:
        """Return the size of the smallest bin that holds `least` tokens: 64, 128, 256, ... tokens.

        A size above max_length is rounded up to a multiple of max_length."""
        size = SMALLEST
        while size < least:
            size *= 2
        longest = min(size, self.max_length)
        return longest * -(-size // longest)

    def _spec(self, count: int, capacity: int) -> StepSpec:
        longest = min(capacity, self.max_length)
        number = capacity // longest
        return self._bound_model.spec(count * number, longest, tiles={"batch": number}, pack=True)

    @in_turns
    def _start(
        self, runtime: Runtime, tokens: Sequence[TokenizedText], bins: Bins, places: list[SequencePlace]
    ) -> _Pass:
        """Submit a pass and a copy of its output to main memory."""
        if runtime is not Runtime.current:
            raise TaskError("Encoder: the Runtime has stopped while texts were encoded")
        spec = self._spec(bins.count, bins.capacity)
        program = self._bound_model.program((bins.count, bins.capacity), lambda: spec.outputs(self._name))
        inputs = {"input_ids": [text.ids for text in tokens], "token_type_ids": [text.kinds for text in tokens]}
        # RoBERTa has only one token type, so its token types are left out.
        known = {name for name, declared in program.inputs.items() if declared.below != 1}
        padded_arrays = padded({name: value for name, value in inputs.items() if name in known}, bins.length)
        del padded_arrays[MASK]
        filled = bins.filled(padded_arrays, places, 1, shift=False)
        try:
            program.write(program.check(filled.arrays))
        except MissingInput as error:
            allowed = "input_ids, and inputs with a default"
            raise ConfigError(f"model: it needs {', '.join(error.needed)}; allowed here: {allowed}") from None
        program.run(dict(filled.live[0]))
        return _Pass(places, program, program.start_copy(self._name), [text.is_text for text in tokens])

    def _results(self, submitted: _Pass) -> Iterator[Array]:
        """Wait for a pass and yield the output of each of its sequences. Raises TaskError if a task failed."""
        value = submitted.program.finish_copy(self._name, submitted.copied)
        for place, text in zip(submitted.places, submitted.are_texts, strict=True):
            if self._axes[1] != "seq":
                yield value[place.bin, place.number].copy()
                continue
            rows = value[place.bin, place.first : place.first + place.length]
            if self.output == "sentence" and self._sentence:
                yield self._sentence.vector(rows, self._prompt_tokens if text else 0)
                continue
            yield rows.mean(0, dtype=np.float64).astype(rows.dtype) if self.output == "mean" else rows.copy()


def _users_level() -> int:
    """Return the `stacklevel` with which the caller's warning names the user's line: the first outside the package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and str(frame.f_globals.get("__name__")).startswith("nntile_py."):
        frame, level = frame.f_back, level + 1
    return level


def _check_output(output: str) -> None:
    if output not in OUTPUTS:
        raise ConfigError(f"output: got {output!r}; allowed: {', '.join(OUTPUTS)}")


def _check_head(cls: Any, output: str, head: str) -> None:
    """Raise ConfigError if models of the class `cls` cannot have the head `head`."""
    fields = getattr(getattr(cls, "Config", None), "model_fields", {})
    heads = get_args(fields["head"].annotation) if "head" in fields else ()
    if head not in heads:
        outputs = [name for name in OUTPUTS if HEADS.get(name) in (None, *heads)]
        raise ConfigError(f"output: {cls.__name__} has no {output!r}; allowed: {', '.join(outputs)}")


def _headed(model: Any, output: str) -> tuple[Any, str]:
    """Return the model with the head that an output of Encoder needs, and the model's own name of this output."""
    if output == "logits":
        return model, output
    _check_head(type(model), output, HEADS[output])
    return model.changed(head=HEADS[output]), "pooled" if output == "pooled" else "hidden"


class _Pass(NamedTuple):
    """A submitted pass.

    Attributes:
        places: The place of each sequence in a bin.
        program: The program of the pass.
        copied: The copy of the output to main memory.
        are_texts: For each sequence, whether it was a text, not token numbers.
    """

    places: list[SequencePlace]
    program: ForwardProgram
    copied: HostCopy
    are_texts: list[bool]
