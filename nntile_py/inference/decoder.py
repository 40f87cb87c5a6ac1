"""Decoder: prefill and decoding passes of a causal model, with keys and values in the pages of a cache."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from nntile_py import _core
from nntile_py.errors import ConfigError
from nntile_py.execution.forward_program import ForwardProgram
from nntile_py.execution.host_copy import HostCopy
from nntile_py.execution.program import Store
from nntile_py.execution.runtime import Runtime
from nntile_py.graph import key_value_cache as kv
from nntile_py.graph.built_step import Evaluation
from nntile_py.graph.key_value_cache import IDS, RING, TOKENS, CacheShape, Sampling
from nntile_py.graph.params import Input
from nntile_py.inference.bound_model import BoundModel
from nntile_py.inference.token_logprobs import TokenLogProbs
from nntile_py.system.interrupts import uninterrupted
from nntile_py.tasks.cached_attention import COUNT, PAGES, PAST
from nntile_py.tasks.sample import NO_TOKEN, SETTINGS
from nntile_py.tiles.dtypes import host_dtype
from nntile_py.tiles.placement import assign_parts

Array = np.ndarray[Any, Any]
GREEDY = (0.0, 0.0, 1.0, 0.0, 1.0)  # settings of a row that takes the largest logit, in the order of SETTINGS
# Sizes of prefill passes: number of rows, and number of new tokens of a row. There are few sizes, because GPU kernels
# are compiled and measured for each size.
PREFILL_ROWS = {"CPU": (1, 2, 4, 8), "CUDA": (1, 8)}
PREFILL_TOKENS = {"CPU": (16, 32, 64, 128, 256), "CUDA": (64, 512)}
CHANGED = (
    "generation: model.weights or the Runtime has changed while texts were generated; allowed: a change before or"
    " after a generation"
)
MOST_PADDING = 0.25  # largest share of padding in a prefill pass; with more padding, two smaller passes are faster


@dataclass(eq=False)
class Row:
    """A row of a pass: a sequence that the passes continue.

    Attributes:
        tokens: Token numbers: the prompt, then the drawn tokens.
        limit: Largest number of tokens, with the prompt.
        settings: Sampling settings, in the order of SETTINGS.
        draws: fp32 [limit + 1]: for each position, the random number in [0, 1) that draws its token.
        pages: Numbers of the cache's pages that hold the row's keys and values.
        part: Number of the part of the cache that has these pages.
        past: Number of tokens in the cache after all submitted passes.
        logprobs: How many most probable tokens to return with each new token; None: no log-probabilities.
        prompt_logprobs: List to which the prefill appends the log-probabilities of the prompt's tokens, from the second
            token on. None: they are not computed.
    """

    tokens: list[int]
    limit: int
    settings: tuple[float, ...] = GREEDY
    draws: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    pages: list[int] = field(default_factory=list)
    part: int = 0
    past: int = 0
    logprobs: int | None = None
    prompt_logprobs: list[TokenLogProbs] | None = None


class DrawnToken(NamedTuple):
    """A token that a pass has drawn. logprobs: None if the row asks for no log-probabilities."""

    number: int
    logprobs: TokenLogProbs | None = None


@dataclass(frozen=True)
class PendingTokens:
    """Tokens of submitted decoding passes, which are being copied to main memory.

    Attributes:
        program: The program of the passes.
        copies: {output: its copy to main memory}.
        positions: For each row, the position of the token that the first of these passes draws.
        ranks: For each row, the number of most probable tokens, see Row.logprobs.
        count: Number of passes.
    """

    program: ForwardProgram
    copies: dict[str, HostCopy]
    positions: list[int]
    ranks: list[int | None]
    count: int


@dataclass
class Passes:
    """Programs that all compute the same decoding pass. They run alternately."""

    programs: list[ForwardProgram]

    def next_program(self) -> ForwardProgram:
        """Return the program of the next pass."""
        self.programs = [*self.programs[1:], self.programs[0]]
        return self.programs[-1]


class Decoder:
    """The cache of keys and values, and the programs that read and write it, on the running Runtime.

    Args:
        bound: The model.
        rows: Largest number of rows of a pass.
        shape: Sizes of the cache.
        vocab: Number of tokens that may be drawn; None: the model's whole vocabulary.
    """

    def __init__(self, bound: BoundModel, rows: int, shape: CacheShape, vocab: int | None = None) -> None:
        self.bound, self.rows, self.shape, self.vocab = bound, rows, shape, vocab
        self._cache: Store | None = None
        self._free: list[list[int]] = []  # numbers of the free pages of each part of the cache

    # -- pages

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that a sequence of `tokens` tokens needs."""
        return -(-tokens // self.shape.slots)

    def part_of(self, place: int) -> int:
        """Return the part of the cache that has the pages of row number `place` of the decoding passes."""
        return self.shape.parts.of_row(place) if self.shape.parts else 0

    def free_pages(self, part: int) -> int:
        """Return the number of pages of a part that belong to no row."""
        self._bind()
        return len(self._free[part])

    def admit(self, row: Row, place: int = 0) -> bool:
        """Reserve pages for `limit` tokens of a row. Return False if too few pages are free.

        Args:
            place: Number of the row in the decoding passes.
        """
        self._bind()
        part, need = self.part_of(place), self.pages_for(row.limit)
        if need > len(free := self._free[part]):
            return False
        row.part, row.pages, self._free[part] = part, free[:need], free[need:]
        return True

    def release(self, row: Row) -> None:
        """Free a row's pages."""
        self._free[row.part] += row.pages
        row.pages = []

    def release_all(self) -> None:
        """Free the pages of all rows."""
        pages, parts = self.shape.pages, self.shape.parts
        size = parts.pages if parts else pages
        self._free = [list(range(1, min(size, pages - first))) for first in range(0, pages, size)]

    # -- passes

    def prefill(self, rows: Sequence[Row]) -> list[DrawnToken]:
        """Write the tokens of new rows into the cache, and return the next token of each row."""
        next_tokens: dict[Row, DrawnToken] = {}
        remaining, sampling = list(rows), sampling_of(rows, self.vocab)
        while remaining:
            parts = sorted({row.part for row in remaining})
            # First submit all passes, then read results: GPUs with different parts of the cache work at the same time.
            passes = [self._submit_prefill([row for row in remaining if row.part == part], sampling) for part in parts]
            for program, those, seq in passes:
                next_tokens |= _prefilled(program, those, seq)
            remaining = [row for row in remaining if row not in next_tokens]
        return [next_tokens[row] for row in rows]

    def _submit_prefill(self, rows: Sequence[Row], sampling: Sampling) -> tuple[ForwardProgram, Sequence[Row], int]:
        """Submit a prefill pass over some of these rows, whose pages are all in one part of the cache.

        Returns:
            The pass's program, the rows of the pass, and the largest number of new tokens of a row.
        """
        device = "CUDA" if _core.cuda_workers() else "CPU"
        # A pass with logits of all positions has one row only, because these logits need much memory.
        scored = [row for row in rows if row.prompt_logprobs is not None]
        most = min(PREFILL_ROWS[device][-1], self.shape.parts.rows if self.shape.parts else self.rows)
        those = scored[:1] or rows[:most]
        longest = max(len(row.tokens) - row.past for row in those)
        seq = min(prefill_size(longest, PREFILL_TOKENS[device]), self.bound.tiles.get("seq", longest))
        count = min(most, next(size for size in PREFILL_ROWS[device] if size >= len(those)))
        program = self.program(count, seq, replace(sampling, prompts=bool(scored)), part=those[0].part)
        program.write(self._arrays(program, those, seq))
        program.run({})
        return program, those, seq

    def start(self, rows: Sequence[Row | None]) -> Passes:
        """Return decoding passes over these rows, and write the inputs of the first pass.

        Args:
            rows: The last token of each row is not in the cache yet. None: an empty row.
        """
        used = [row for row in rows if row]
        programs = self._alternating(len(rows), sampling_of(used, self.vocab))
        programs[0].write(self._arrays(programs[0], rows, 1))
        return Passes(programs)

    @property
    def passes_at_once(self) -> int:
        """Largest number of decoding passes whose tokens are copied to main memory together."""
        return RING if _core.cuda_workers() else 1

    def decode(self, passes: Passes, rows: Sequence[Row | None], count: int) -> PendingTokens:
        """Submit `count` decoding passes, at most `passes_at_once`. `tokens` waits for the tokens that they draw.

        Further passes may be submitted before `tokens` is called.
        """
        program, positions = passes.next_program(), [row.past + 1 if row else 0 for row in rows]
        for _ in range(count):
            program.run({})
        for row in rows:
            if row:
                row.past += count
        copies = {name: program.start_copy(name) for name in _drawn_outputs(program)}
        ranks = [row.logprobs if row else None for row in rows]
        return PendingTokens(program, copies, positions, ranks, count)

    @staticmethod
    def tokens(pending: PendingTokens) -> list[list[DrawnToken]]:
        """Wait for submitted passes. Return a list for each pass, with the token of each row."""
        drawn = {name: pending.program.finish_copy(name, copy) for name, copy in pending.copies.items()}
        rows = list(enumerate(zip(pending.positions, pending.ranks, strict=True)))
        return [[_drawn_token(drawn, k, at + n, ranks) for k, (at, ranks) in rows] for n in range(pending.count)]

    # -- inside

    def _bind(self) -> None:
        """Bind the model, with an empty cache if the weights or the Runtime have changed.

        Raises:
            ConfigError: The weights or the Runtime have changed while rows have pages.
        """
        if self.bound.stale:
            if self._cache is not None and sum(map(len, self._free)) < self.shape.pages - self.shape.part_count:
                raise ConfigError(CHANGED)
            self._cache = None
        self.bound.bind()
        if self._cache is None:
            self._cache = Store()
            self.release_all()

    def program(self, rows: int, seq: int, sampling: Sampling, *, part: int | None = None) -> ForwardProgram:
        """Return the program of a pass over `seq` new tokens of each of `rows` rows.

        Args:
            part: For a prefill pass: the part of the cache that has the pages of all rows. None: a decoding pass.
        """
        return self._program((rows, seq, sampling, part), {})

    def _alternating(self, rows: int, sampling: Sampling) -> list[ForwardProgram]:
        """Return two programs of a decoding pass that share all tiles except the outputs.

        While the tokens of one pass are copied to main memory, the other program can run the next pass.
        """
        first = self.program(rows, 1, sampling)
        shared = {key: tile for key, tile in first.input_tiles().items() if key[1] not in first.outputs}  # type: ignore[index]
        second = self._program((rows, 1, sampling, None, "alternate"), shared)
        return [first, second]

    def _program(self, key: tuple[Any, ...], shared: Mapping[Hashable, _core.Tile]) -> ForwardProgram:
        """Return the program of a pass, see `program`. shared: tiles of another program to use, besides the cache."""
        self._bind()
        assert self._cache is not None
        key = (self.shape, *key)
        if key not in self.bound.programs:
            _, rows, seq, sampling, part, *_ = key
            tiles, shape = {"seq": seq} if "seq" in self.bound.tiles else {}, self.shape
            if shape.parts and part is not None:
                tiles, shape = tiles | {"batch": rows}, replace(shape, parts=replace(shape.parts, first=part))
            evaluation = self.bound.spec(rows, seq, tiles=tiles).generation(
                shape, sampling, advances=part is None, partial_sums=not _core.cuda_workers()
            )
            runtime, workers = Runtime.current, _core.cuda_workers() or _core.cpu_workers()
            if shape.parts and runtime and runtime.placement == "planned":  # so that workers do not exchange pages
                assign_parts(evaluation.forward.tasks, shape.parts.first, shape.part_count, workers)
            self._add_pools(evaluation)
            try:
                program = self.bound.program(key, lambda: evaluation, {**self._cache.handles, **shared})
                # On a GPU, the first runs of a program run each kernel several times, to choose the fastest one. The
                # first runs get no tokens, and leave the cache unchanged.
                program.write(self._arrays(program, [], seq))
                for _ in range(2):
                    program.run({})
            except BaseException:  # such as Ctrl-C, after which the program may lack inputs
                self.bound.programs.pop(key, None)
                raise
        return self.bound.programs[key]

    def _add_pools(self, evaluation: Evaluation) -> None:
        """Create the tiles of cached keys and values, unless an earlier program has created them."""
        assert self._cache is not None
        for (kind, _), tensor in evaluation.graph.kept.items():
            if kind == "cache" and not {t.key for _, t in evaluation.forward.grid(tensor)} <= {*self._cache.handles}:
                with uninterrupted():
                    self._cache.zero(evaluation.forward, tensor)

    def _arrays(self, program: ForwardProgram, rows: Sequence[Row | None], seq: int) -> dict[str, Array]:
        """Return the inputs of a pass over each row's next tokens, at most `seq`, that are not in the cache."""
        arrays = {name: _initial(declared) for name, declared in program.inputs.items()}
        if "settings" in arrays:
            arrays["settings"][:] = GREEDY
        for number, row in enumerate(rows):
            if row is None:
                continue
            new = row.tokens[row.past : row.past + seq]
            arrays[IDS][number, : len(new)] = new
            arrays["page_table"][number, [PAST, COUNT]] = row.past, len(new)
            arrays["page_table"][number, PAGES : PAGES + len(row.pages)] = row.pages
            if "settings" in arrays:
                arrays["settings"][number] = row.settings
                arrays["draws"][number, : len(row.draws)] = row.draws
            if "history" in arrays:
                arrays["history"][number, : len(row.tokens)] = row.tokens
            if kv.TARGETS in arrays:
                following = row.tokens[row.past + 1 : row.past + seq + 1]
                arrays[kv.TARGETS][number] = [*following, *[NO_TOKEN] * (seq - len(following))]
        return arrays


def _drawn_outputs(program: ForwardProgram) -> list[str]:
    """Return the names of the outputs that describe drawn tokens."""
    return [name for name in (TOKENS, kv.LOGPROBS, kv.RANKED) if name in program.outputs]


def _drawn_token(outputs: Mapping[str, Array], row: int, position: int, ranks: int | None) -> DrawnToken:
    """Return the token that a pass drew for a position of a row. ranks: see Row.logprobs."""
    column = position % RING
    number = int(outputs[TOKENS][row, column])
    if ranks is None or number == NO_TOKEN:
        return DrawnToken(number)
    values, ids = (outputs[name][row, column] for name in (kv.LOGPROBS, kv.RANKED))
    return DrawnToken(number, TokenLogProbs.of_ranks(values, ids, ranks))


def _prefilled(program: ForwardProgram, rows: Sequence[Row], seq: int) -> dict[Row, DrawnToken]:
    """Wait for a prefill pass over at most `seq` new tokens of each row.

    Returns:
        The token that the pass drew for each row whose prompt is complete.
    """
    for row in rows:
        first, row.past = row.past, min(row.past + seq, len(row.tokens))
        if row.prompt_logprobs is not None:
            row.prompt_logprobs += _of_prompt(program, row, first)
    complete = {row: k for k, row in enumerate(rows) if row.past == len(row.tokens)}
    drawn = {name: program.read(name) for name in _drawn_outputs(program)} if complete else {}
    return {row: _drawn_token(drawn, k, row.past, row.logprobs) for row, k in complete.items()}


def _of_prompt(program: ForwardProgram, row: Row, first: int) -> list[TokenLogProbs]:
    """Return the log-probabilities that a prefill pass computed: of the prompt's tokens from number first + 1 on."""
    count = min(row.past, len(row.tokens) - 1) - first
    values, ids = (program.read(name)[0, :count] for name in (kv.PROMPT_LOGPROBS, kv.PROMPT_RANKED))
    return [TokenLogProbs.of_ranks(*pair, row.logprobs or 0) for pair in zip(values, ids, strict=True)]


def prefill_size(tokens: int, sizes: Sequence[int]) -> int:
    """Return the number of tokens of each row in the next prefill pass.

    Args:
        tokens: Largest number of tokens of a row that are not in the cache yet.
        sizes: The allowed results, in ascending order.
    """
    padded = next((size for size in sizes if size >= tokens), sizes[-1])
    without_padding = [size for size in sizes if size <= tokens]
    few = padded - tokens <= MOST_PADDING * padded
    return padded if few or not without_padding else without_padding[-1]


def _initial(declared: Input) -> Array:
    """Return the default value of a program's input; zeros if it has none."""
    if (default := declared.filled(1, {})) is not None:
        return default
    return np.zeros(declared.tensor.shape, host_dtype(declared.tensor.dtype))


def sampling_of(rows: Sequence[Row], vocab: int | None) -> Sampling:
    """Return how passes over these rows choose tokens."""
    settings = [dict(zip(SETTINGS, row.settings, strict=True)) for row in rows]
    penalised = any(values["repetition_penalty"] != 1 for values in settings)
    greedy = not penalised and all(values["temperature"] == 0 for values in settings)
    return Sampling(greedy, penalised, vocab, logprobs=any(row.logprobs is not None for row in rows))
