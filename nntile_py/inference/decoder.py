"""Decoder: prefill and decoding passes of a causal model, with keys and values in the pages of a cache."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nntile_py import _core
from nntile_py.errors import ConfigError
from nntile_py.execution.forward_program import ForwardProgram
from nntile_py.execution.program import HostCopy, Store
from nntile_py.graph.key_value_cache import IDS, RING, TOKENS, CacheShape, Sampling
from nntile_py.graph.params import Input
from nntile_py.graph.step import Evaluation
from nntile_py.inference.bound_model import BoundModel
from nntile_py.tasks.cached_attention import COUNT, PAGES, PAST
from nntile_py.tasks.sample import SETTINGS
from nntile_py.tiles.dtypes import DTYPES, host_dtype

Array = np.ndarray[Any, Any]
NO_FILTERS = (0.0, 0.0, 1.0, 0.0, 1.0)  # settings that take the largest logit, in the order of SETTINGS
# Sizes of prefill passes: number of rows, and number of new tokens of a row. A GPU kernel is compiled and measured for
# each size, so there are few.
PREFILL_ROWS = {"CPU": (1, 2, 4, 8), "CUDA": (1, 8)}
PREFILL_TOKENS = {"CPU": (16, 32, 64, 128, 256), "CUDA": (64, 512)}
MOST_PADDING = 0.25  # share of a prefill pass that may be padding before two smaller passes are faster


@dataclass(eq=False)
class Row:
    """A sequence that is continued.

    Attributes:
        tokens: Numbers of its tokens: the prompt, then the drawn tokens.
        limit: Largest number of tokens.
        settings: In the order of SETTINGS.
        draws: fp32 [limit + 1]: the draw for each position.
        pages: Numbers of its pages.
        past: Number of its tokens that are in the cache, after the passes submitted so far.
    """

    tokens: list[int]
    limit: int
    settings: tuple[float, ...] = NO_FILTERS
    draws: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    pages: list[int] = field(default_factory=list)
    past: int = 0


@dataclass(frozen=True)
class Copied:
    """The copy of the tokens of decoding passes to main memory.

    Attributes:
        program: The program of the passes.
        copy: The copy.
        first: For each row, the position of the first pass's token.
        count: Number of passes.
    """

    program: ForwardProgram
    copy: HostCopy
    first: list[int]
    count: int


@dataclass
class Passes:
    """Programs of decoding passes of the same rows, which run in turns."""

    programs: list[ForwardProgram]

    def next_program(self) -> ForwardProgram:
        """Return the program of the next pass."""
        self.programs = [*self.programs[1:], self.programs[0]]
        return self.programs[-1]


class Decoder:
    """The programs of a generation and its cache, on the running Runtime.

    Args:
        bound: The model.
        rows: Largest number of rows of a pass.
        shape: Sizes of the cache.
        vocab: Number of tokens that may be drawn; None: all of the model's.
    """

    def __init__(self, bound: BoundModel, rows: int, shape: CacheShape, vocab: int | None = None) -> None:
        self.bound, self.rows, self.shape, self.vocab = bound, rows, shape, vocab
        self._cache: Store | None = None
        self._free: list[int] = []

    # -- pages

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages for a sequence of so many tokens."""
        return -(-tokens // self.shape.slots)

    @property
    def free_pages(self) -> int:
        """Number of pages that no row has."""
        self._bind()
        return len(self._free)

    def admit(self, row: Row) -> bool:
        """Give a row the pages for `limit` tokens, and return True; return False if too few pages are free."""
        self._bind()
        need = self.pages_for(row.limit)
        if need > len(self._free):
            return False
        row.pages, self._free = self._free[:need], self._free[need:]
        return True

    def release(self, row: Row) -> None:
        """Take back a row's pages."""
        self._free += row.pages
        row.pages = []

    def release_all(self) -> None:
        """Take back the pages of all rows."""
        self._free = list(range(1, self.shape.pages))

    # -- passes

    def prefill(self, rows: Sequence[Row]) -> list[int]:
        """Write the tokens of new rows into the cache, and return the next token of each row."""
        first: dict[Row, int] = {}
        todo, device = list(rows), "CUDA" if _core.cuda_workers() else "CPU"
        while todo:
            part = todo[: PREFILL_ROWS[device][-1]]
            left = max(len(row.tokens) - row.past for row in part)
            seq = min(prefill_size(left, PREFILL_TOKENS[device]), self.bound.tiles.get("seq", left))
            count = next(size for size in PREFILL_ROWS[device] if size >= len(part))
            program = self.program(count, seq, sampling_of(rows, self.vocab), advances=False)
            program.write(self._arrays(program, part, seq))
            program.run({})
            for row in part:
                row.past = min(row.past + seq, len(row.tokens))
            ended = {row: k for k, row in enumerate(part) if row.past == len(row.tokens)}
            drawn = program.read(TOKENS) if ended else np.zeros((0, RING))
            first |= {row: int(drawn[k, row.past % RING]) for row, k in ended.items()}
            todo = [row for row in todo if row not in ended]
        return [first[row] for row in rows]

    def start(self, rows: Sequence[Row | None]) -> Passes:
        """Return decoding passes for these rows, prepared for the first pass.

        Each row's last token is not in the cache yet. None: the row is empty.
        """
        present = [row for row in rows if row]
        programs = self._alternating(len(rows), sampling_of(present, self.vocab))
        programs[0].write(self._arrays(programs[0], rows, 1))
        return Passes(programs)

    @property
    def passes_at_once(self) -> int:
        """Number of decoding passes whose tokens are read together."""
        return RING if _core.cuda_workers() else 1

    def decode(self, passes: Passes, rows: Sequence[Row | None], count: int) -> Copied:
        """Submit `count` decoding passes, at most `passes_at_once`, and return the copy of their tokens.

        Further passes may be submitted before `tokens` waits for these.
        """
        program, first = passes.next_program(), [row.past + 1 if row else 0 for row in rows]
        for _ in range(count):
            program.run({})
        for row in rows:
            if row:
                row.past += count
        return Copied(program, program.start_copy(TOKENS), first, count)

    @staticmethod
    def tokens(copied: Copied) -> list[list[int]]:
        """Wait for passes, and return for each pass the token of each row."""
        drawn = copied.program.finish_copy(TOKENS, copied.copy)
        numbers = range(copied.count)
        return [[int(drawn[k, (at + n) % RING]) for k, at in enumerate(copied.first)] for n in numbers]

    # -- inside

    def _bind(self) -> None:
        stale = self.bound.stale
        self.bound.bind()
        if stale or self._cache is None:
            self._cache = Store()
            self.release_all()

    def program(self, rows: int, seq: int, sampling: Sampling, *, advances: bool) -> ForwardProgram:
        """Return the program of a pass over `seq` new tokens of each of `rows` rows."""
        return self._program((rows, seq, sampling, advances), {})

    def _alternating(self, rows: int, sampling: Sampling) -> list[ForwardProgram]:
        """Return two programs of a decoding pass that share all tiles except the drawn tokens.

        While the tokens of one pass are copied to main memory, the other program can run the next pass.
        """
        first = self.program(rows, 1, sampling, advances=True)
        shared = {key: tile for key, tile in first.input_tiles().items() if key[1] != TOKENS}  # type: ignore[index]
        second = self._program((rows, 1, sampling, True, "alternate"), shared)
        return [first, second]

    def _program(self, key: tuple[Any, ...], shared: Mapping[Hashable, _core.Tile]) -> ForwardProgram:
        """Return a program, see `program`. shared: tiles that it shares with another one, besides the cache."""
        self._bind()
        assert self._cache is not None
        key = (self.shape, *key)
        if key not in self.bound.programs:
            _, rows, seq, sampling, advances, *_ = key
            tiles = {"seq": seq} if "seq" in self.bound.tiles else {}
            evaluation = self.bound.spec(rows, seq, tiles=tiles).generation(self.shape, sampling, advances=advances)
            self._add_pools(evaluation)
            program = self.bound.program(key, lambda: evaluation, {**self._cache.handles, **shared})
            # The first runs of a program on a GPU choose its kernels, for which they run several times: without tokens.
            program.write(self._arrays(program, [], seq))
            for _ in range(2):
                program.run({})
        return self.bound.programs[key]

    def _add_pools(self, evaluation: Evaluation) -> None:
        """Create the tiles of cached keys and values at the first program."""
        assert self._cache is not None
        for (kind, _), tensor in evaluation.graph.kept.items():
            if kind == "cache" and not {t.key for _, t in evaluation.forward.grid(tensor)} <= {*self._cache.handles}:
                self._cache.zero(evaluation.forward, tensor)

    def _arrays(self, program: ForwardProgram, rows: Sequence[Row | None], seq: int) -> dict[str, Array]:
        """Return the inputs of a pass that continues each row with its first tokens that are not in the cache."""
        arrays = {name: _initial(one) for name, one in program.inputs.items()}
        if "settings" in arrays:
            arrays["settings"][:] = NO_FILTERS
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
        return arrays


def prefill_size(left: int, sizes: Sequence[int]) -> int:
    """Return how many tokens of each row a prefill pass computes.

    Args:
        left: Tokens of the longest row that are not in the cache.
        sizes: The sizes of passes, ascending.
    """
    fits = next((size for size in sizes if size >= left), sizes[-1])
    below = [size for size in sizes if size <= left]
    return fits if not below or fits - left <= MOST_PADDING * fits else below[-1]


def _initial(declared: Input) -> Array:
    """Return the default of a program's input, or zeros."""
    if (default := declared.filled(1, {})) is not None:
        return default
    return np.zeros(declared.tensor.shape, host_dtype(declared.tensor.dtype))


def sampling_of(rows: Sequence[Row], vocab: int | None) -> Sampling:
    """Return how passes of these rows choose tokens."""
    columns = [dict(zip(SETTINGS, row.settings, strict=True)) for row in rows]
    penalised = any(one["repetition_penalty"] != 1 for one in columns)
    return Sampling(not penalised and all(one["temperature"] == 0 for one in columns), penalised, vocab)


def cache_shape(bound: BoundModel, length: int, rows: int, room: int | None) -> CacheShape:
    """Return the sizes of a cache for `rows` sequences of `length` tokens.

    Args:
        bound: The model.
        length: Tokens of the longest sequence.
        rows: Number of rows of a decoding pass.
        room: Largest number of bytes of the cache; None: all rows may have `length` tokens.

    Raises:
        ConfigError: A sequence of `length` tokens does not fit.
    """
    shape = CacheShape(length, 1)
    each = shape.entries - PAGES
    pages = rows * each
    if room is not None:
        graph = bound.spec(1, 1).generation(CacheShape(length, 2), Sampling(True), advances=True).graph
        pools = [tensor for (kind, _), tensor in graph.kept.items() if kind == "cache"]
        one_page = sum(t.numel // t.size("page") * DTYPES[t.dtype].bytes for t in pools)
        pages = min(pages, room // one_page - 1)
        if pages < each:
            need = f"at least {(each + 1) * one_page:,}, for a sequence of {length} tokens"
            raise ConfigError(f"cache: {room:,} bytes are not enough; allowed: {need}")
    return CacheShape(length, pages + 1)
