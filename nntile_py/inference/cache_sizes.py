"""Computes the sizes of a cache of keys and values from the number of sequences and a limit in bytes."""

from __future__ import annotations

from nntile_py.errors import ConfigError
from nntile_py.graph.key_value_cache import CacheShape, Sampling
from nntile_py.inference.bound_model import BoundModel
from nntile_py.tasks.cached_attention import PAGES, PageParts
from nntile_py.tiles.dtypes import DTYPES


def cache_shape(bound: BoundModel, length: int, rows: int, most_bytes: int | None) -> CacheShape:
    """Return the sizes of a cache for `rows` sequences of `length` tokens.

    Args:
        bound: The model.
        length: Tokens of the longest sequence.
        rows: Number of rows of a decoding pass.
        most_bytes: Largest number of bytes of the cache; None: no limit, so that all rows may have `length` tokens.

    Raises:
        ConfigError: A sequence of `length` tokens does not fit.
    """
    pages_per_row, part_rows = CacheShape(length, 1).entries - PAGES, min(rows, bound.tiles.get("batch", rows))
    parts = -(-rows // part_rows)
    size, pages = part_rows * pages_per_row + 1, rows * pages_per_row + parts  # pages of one part, and of all parts
    if most_bytes is not None:
        graph = bound.spec(1, 1).generation(CacheShape(length, 2), Sampling(True), advances=True).graph
        pools = [tensor for (kind, _), tensor in graph.kept.items() if kind == "cache"]
        page_bytes = sum(t.numel // t.size("page") * DTYPES[t.dtype].bytes for t in pools)
        size = min(size, most_bytes // page_bytes // parts)
        pages = min(pages, parts * size)
        if size <= pages_per_row:
            need = f"at least {parts * (pages_per_row + 1) * page_bytes:,}, for a sequence of {length} tokens"
            need += f" in each of the {parts} tiles of the batch" if parts > 1 else ""
            raise ConfigError(f"cache: {most_bytes:,} bytes are not enough; allowed: {need}")
    return CacheShape(length, pages, parts=PageParts(size, part_rows) if parts > 1 else None)
