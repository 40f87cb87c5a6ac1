"""Texts, or numbers of tokens, to what an encoder makes of them: hidden states, a vector of each, logits."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self, get_args

import numpy as np
from tokenizers import Tokenizer

from nntile_py import _core
from nntile_py.data.tokenizer import load_tokenizer
from nntile_py.errors import ConfigError
from nntile_py.execution.cuda_graph import Served
from nntile_py.execution.program import HostCopy, Store, whole
from nntile_py.execution.runtime import Runtime
from nntile_py.graph.bin_packing import Bins, SequencePlace
from nntile_py.graph.packed_inputs import rows_of
from nntile_py.graph.padding import MASK, padded
from nntile_py.graph.step import Evaluation, StepSpec, check_precision
from nntile_py.inference.texts import Tokens, to_tokens, tokens_of, with_limit
from nntile_py.models.hf_config import named, read_raw
from nntile_py.models.registry import from_hf, of_hf_type
from nntile_py.system.gc_pause import no_search_for_cycles
from nntile_py.tiles import Tiling
from nntile_py.typed import typed

Array = np.ndarray[Any, Any]
OUTPUTS = ("hidden", "mean", "pooled", "logits")
HEADS = {"hidden": "none", "mean": "none", "pooled": "pooler"}  # of the model that gives it; logits: its own
SMALLEST = 64  # places of a bin, which are this times 1, 2, 4, ...
CHUNK = 1024  # texts that are made into tokens together
IN_FLIGHT = 2  # passes that are submitted before the results of the first are taken


class Encoder:
    """What a model makes of texts: `encoder(texts)`, in the order of the texts.

    Sequences lie packed, without padding, in bins of 64, 128, 256, ... places, a bin for each worker. The program for
    bins of one size is built when it is first needed and kept: texts of other lengths need none of their own.

    A running Runtime is used; where none is, the encoder starts one on all cores, which lasts until `close()`, the end
    of a `with encoder:`, or until another Runtime is started. Not for several threads at once.

    Args:
        model: One of nt.models.
        output: hidden: the last layer's output, [tokens, embed] of each text. mean: its mean over the tokens, [embed].
            pooled: the vector that transformers calls pooler_output. logits: of a classifier [classes], else
            [tokens, vocab].
        tokenizer: Makes texts into tokens, with its template. A masked model's without one puts [CLS] before and [SEP]
            behind. None: token numbers alone can be encoded.
        tiles: {axis: size} over embed, heads, ffn, vocab. An axis left out is not cut.
        dtype: fp32; on CUDA workers also tf32, bf16 and fp16 (results come in float32), on CPU workers fp64.
        batch_tokens: Tokens that are computed together. More take more memory.
        max_length: Tokens of the longest text. Default: as many as the model has positions.
        captured: On one GPU: run each program as a CUDA graph, for which the weights stay on the GPU. Default: where
            that is faster, which the first pass of a program measures.

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
        dtype: str = "fp32",
        batch_tokens: int = 4096,
        max_length: int | None = None,
        captured: bool | None = None,
    ) -> None:
        _check_output(output)
        if not hasattr(model, "changed") or not hasattr(model, "weights"):
            raise ConfigError(f"model: {model!r:.60} is not allowed; use a model of nt.models")
        for name, value in (("batch_tokens", batch_tokens), ("max_length", max_length)):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name}: {value!r} is not allowed; use a positive integer")
        if not isinstance(captured, bool | None):
            raise ConfigError(f"captured: {captured!r} is not allowed; use True, False or None")
        if cut := {"batch", "seq"} & {*(tiles or {})}:
            raise ConfigError(f"tiles.{min(cut)}: not allowed here, as a bin is a tile; use embed, heads, ffn, vocab")
        positions = getattr(getattr(model, "config", None), "positions", None)
        if max_length and positions and max_length > positions:
            raise ConfigError(f"max_length: {max_length} is not allowed; the model has {positions} positions")
        self.model, self.output, self.dtype, self.batch_tokens = model, output, dtype, batch_tokens
        self.max_length, self.captured = max_length or positions or batch_tokens, captured
        self.cut = 0  # texts that had more tokens
        self._tiles, self._tokenizer = dict(tiles or {}), None
        if tokenizer is not None:
            self._tokenizer = with_limit(tokenizer, self.max_length, getattr(model, "objective", None) == "masked")
        self._model, self._name = _headed(model, output)
        graph, (_, made), _ = self._spec(1, self._capacity(1)).trace(training=False)  # refuses what is wrong
        if self._name not in made:
            raise ConfigError(f"output: {output!r} is not allowed; the model's own are {', '.join(made)}")
        self._axes, self._width = made[self._name].axes, made[self._name].shape[-1]
        self._apart = rows_of(graph.inputs) is not None
        self._running: _Running | None = None
        self._own: Runtime | None = None

    @classmethod
    @typed
    def from_hf(cls, folder: str | Path, output: str = "hidden", **options: Any) -> Self:
        """The encoder of a folder that `save_pretrained` or `nntile train` wrote: config.json, model.safetensors and,
        for texts, tokenizer.json. A model without a head is read, too. options: as of Encoder."""
        _check_output(output)
        with named(folder):
            kind = of_hf_type(read_raw(folder).get("model_type"))
        if output in HEADS:
            _check_head(kind, output, HEADS[output])
        model = from_hf(folder, **({"head": HEADS[output]} if output in HEADS else {}))
        path = Path(folder) / "tokenizer.json"
        if "tokenizer" not in options and path.is_file():
            options["tokenizer"] = load_tokenizer(path, "tokenizer")
        return cls(model, output, **options)

    def __repr__(self) -> str:
        return f"<Encoder of {type(self.model).__name__}: output={self.output!r}, dtype={self.dtype!r}>"

    @property
    def of_tokens(self) -> bool:
        """Whether the output has a row for each token, and not one for each text."""
        return self._axes[1] == "seq" and self.output != "mean"

    @typed
    def __call__(self, texts: Sequence[Any] | Array) -> Any:
        """What the model makes of texts, pairs of texts, or lists of token numbers, in their order.

        Returns a list of arrays [tokens, ...] for hidden states and logits of tokens, else one array [texts, ...].
        Raises ValueError for a sequence without tokens, or token numbers that the model does not have."""
        found = list(self.each(texts))
        if self.of_tokens:
            return found
        return np.stack(found) if found else np.zeros((0, self._width), np.float32)

    def each(self, texts: Sequence[Any] | Array) -> Iterator[Array]:
        """The same, one text after the other, as they are computed: for more texts than there is memory for."""
        given = tokens_of(texts)
        waiting: deque[_Pass] = deque()
        for first in range(0, len(given), CHUNK):
            tokens = self._tokens(given[first : first + CHUNK], first)
            running = self._bound()
            for part, bins, places in self._passes([len(one.ids) for one in tokens]):
                waiting.append(self._start(running, tokens[part], bins, places))
                if len(waiting) > IN_FLIGHT:
                    yield from self._result(waiting.popleft())
        while waiting:
            yield from self._result(waiting.popleft())

    def close(self) -> None:
        """Let go of programs and weights; stop the runtime if the encoder has started it."""
        self._running, own = None, self._own
        self._own = None
        if own is not None and Runtime.current is own:
            own.__exit__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):  # of an interpreter that ends, or an encoder that was never made
            self.close()

    @property
    def programs(self) -> int:
        """How many have been built on the runtime that was used last."""
        return len(self._running.forwards) if self._running else 0

    # -- inside

    def _tokens(self, texts: Sequence[Any], first: int) -> list[Tokens]:
        before, vocab = self.cut, getattr(self.model.config, "vocab", None)
        tokens = to_tokens(texts, self._tokenizer, self.max_length, vocab, first)
        self.cut += sum(one.cut for one in tokens)
        if self.cut and not before:
            told = f"texts with more than {self.max_length} tokens are cut there; `cut` says how many there were"
            warnings.warn(told, stacklevel=4)
        return tokens

    def _bound(self) -> _Running:
        """What is there on the running runtime."""
        if Runtime.current is None:
            own = Runtime()
            own.lent = True
            self._own = own.__enter__()
        runtime = Runtime.current
        assert runtime is not None
        if runtime.ranks:
            raise ConfigError("Encoder: not on several ranks so far; allowed: nt.Runtime(mpi=False), each for itself")
        if self._running is None or self._running.runtime is not runtime:
            check_precision("dtype", self.dtype, bool(_core.cuda_workers()))
            self._running = _Running(runtime, self.model, self.dtype == "tf32", self.captured)
        return self._running

    def _passes(self, lengths: Sequence[int]) -> Iterator[tuple[slice, Bins, list[SequencePlace]]]:
        """The sequences of each pass, its bins, their places: as many as there are tokens computed together."""
        workers, first = _core.cuda_workers() or _core.cpu_workers(), 0
        while first < len(lengths):
            end, total = first + 1, lengths[first]
            while end < len(lengths) and total + lengths[end] <= self.batch_tokens:
                total, end = total + lengths[end], end + 1
            while (found := self._fitting(lengths[first:end], workers)) is None:
                end -= 1
            yield slice(first, end), *found
            first = end

    def _fitting(self, lengths: Sequence[int], workers: int) -> tuple[Bins, list[SequencePlace]] | None:
        """The smallest bins in which the sequences find their places; None: larger ones than a pass is to have."""
        count = workers if len(lengths) >= workers else 1
        least = max(*lengths, -(-sum(lengths) // count))
        most = max(self._capacity(-(-self.batch_tokens // count)), self._capacity(max(lengths)))
        while (capacity := self._capacity(least)) <= most or len(lengths) == 1:
            rows = self._spec(count, capacity).batch // count if self._apart else None
            bins = Bins(count, capacity, max(lengths), rows=rows)
            try:
                return bins, bins.places(lengths)
            except ValueError:
                least = capacity + 1
        return None

    def _capacity(self, least: int) -> int:
        """Places of the smallest bins with room for so many tokens: 64, 128, ..., or a multiple of the longest text."""
        size = SMALLEST
        while size < least:
            size *= 2
        longest = min(size, self.max_length)
        return longest * -(-size // longest)

    def _spec(self, count: int, capacity: int) -> StepSpec:
        longest = min(capacity, self.max_length)
        number = capacity // longest
        tiling = Tiling({**self._tiles, "batch": number})
        return StepSpec(self._model, count * number, longest, tiling, self.dtype, pack=True)

    def _start(self, running: _Running, tokens: Sequence[Tokens], bins: Bins, places: list[SequencePlace]) -> _Pass:
        """Submit a pass."""
        spec = self._spec(bins.count, bins.capacity)
        forward = running.forward((bins.count, bins.capacity), lambda: spec.outputs(self._name))
        given = {"input_ids": [one.ids for one in tokens], "token_type_ids": [one.kinds for one in tokens]}
        known = {key for key, one in forward.inputs.items() if one.below != 1}  # RoBERTa's pairs are of one kind
        arrays = padded({key: value for key, value in given.items() if key in known}, bins.length)
        del arrays[MASK]
        filled = bins.filled(arrays, places, 1, shift=False)
        return _Pass(places, forward.start(filled.arrays, dict(filled.live[0])), forward)

    def _result(self, one: _Pass) -> Iterator[Array]:
        """Of each sequence of a pass."""
        value = one.forward.finish(one.copied)
        for place in one.places:
            if self._axes[1] != "seq":
                yield value[place.bin, place.number].copy()
                continue
            rows = value[place.bin, place.first : place.first + place.length]
            yield rows.mean(0, dtype=np.float64).astype(rows.dtype) if self.output == "mean" else rows.copy()


def _check_output(output: str) -> None:
    if output not in OUTPUTS:
        raise ConfigError(f"output: {output!r} is not allowed; use {', '.join(OUTPUTS)}")


def _check_head(cls: Any, output: str, head: str) -> None:
    """ConfigError where models of this class have no such head."""
    fields = getattr(getattr(cls, "Config", None), "model_fields", {})
    heads = get_args(fields["head"].annotation) if "head" in fields else ()
    if head not in heads:
        outputs = [name for name in OUTPUTS if HEADS.get(name) in (None, *heads)]
        raise ConfigError(f"output: {cls.__name__} has no {output!r}; allowed: {', '.join(outputs)}")


def _headed(model: Any, output: str) -> tuple[Any, str]:
    """The model with the head that makes the output, and what it calls that."""
    if output == "logits":
        return model, output
    _check_head(type(model), output, HEADS[output])
    return model.changed(head=HEADS[output]), "pooled" if output == "pooled" else "hidden"


class _Forward:
    """A forward pass bound to the running StarPU."""

    def __init__(self, made: Evaluation, store: Store, tf32: bool, captured: bool | None) -> None:
        self.inputs, self._low, self._store = made.graph.inputs, made.forward, store
        (self._output,) = made.outputs.values()
        self.program = Served(made.forward.tasks, store, tf32=tf32, captured=captured)

    def start(self, given: Mapping[str, Array], slots: dict[str, float]) -> HostCopy:
        """Submit it with these inputs; those that are left out have defaults."""
        found = dict(given)
        for name, one in self.inputs.items():
            rows = one.tensor.shape[0]
            value = one.checked(given[name], rows) if name in given else one.filled(rows, found)
            if value is None:
                need = ", ".join(n for n, i in self.inputs.items() if i.default is None)
                raise ConfigError(f"model: it needs {need}; allowed here: input_ids, and what has a default")
            found[name] = value  # others may be made of it
            self._store.write(self._low, one.tensor, value)
        self.program.run(slots)
        return self._store.copy(tile for _, tile in self._low.grid(self._output))

    def finish(self, copied: HostCopy) -> Array:
        """Wait for the output; raises TaskError if a task failed."""
        copied.wait()
        grid = self._low.grid(self._output)
        return whole(self._output, [(where, copied.array(number)) for number, (where, _) in enumerate(grid)])


class _Pass(NamedTuple):
    """One that was submitted."""

    places: list[SequencePlace]
    copied: HostCopy
    forward: _Forward


class _Running:
    """Weights and programs on one runtime."""

    def __init__(self, runtime: Runtime, model: Any, tf32: bool, captured: bool | None) -> None:
        self.runtime, self._model, self._tf32, self._captured = runtime, model, tf32, captured
        self._weights = Store()
        self.forwards: dict[Hashable, _Forward] = {}

    def forward(self, key: Hashable, make: Callable[[], Evaluation]) -> _Forward:
        """The program of this key; made, bound and given its weights when it is first asked for."""
        if key not in self.forwards:
            with no_search_for_cycles():
                self.forwards[key] = self._made(make)
        return self.forwards[key]

    def _made(self, make: Callable[[], Evaluation]) -> _Forward:
        made = make()
        for param in made.params:
            tiles = [tile.key for _, tile in made.forward.grid(param.tensor)]
            if not {*tiles} <= self._weights.handles.keys():
                self._weights.write(made.forward, param.tensor, param.weight(self._model.weights))
        store = Store()  # of its own: inputs and outputs of other sizes have the same names
        store.handles.update(self._weights.handles)
        store.residency = self._weights.residency
        return _Forward(made, store, self._tf32, self._captured)
