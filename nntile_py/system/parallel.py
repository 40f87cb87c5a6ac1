"""Work on large arrays in threads, as many as this process may use cores. numpy's loops release Python's lock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from nntile_py.system.load import cores

BLOCK = 1 << 20  # elements of an array that one call works on
Item = TypeVar("Item")


def in_parallel(work: Callable[[Item], object], items: Iterable[Item]) -> None:
    """Call `work` with each item, in threads. Raises the first exception of a call."""
    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(work, items))


def blocks(size: int) -> Iterable[slice]:
    """Return the parts of a flat array of `size` elements: BLOCK elements each, and a last part with the rest."""
    return (slice(at, min(at + BLOCK, size)) for at in range(0, size, BLOCK))
