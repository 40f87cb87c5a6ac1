"""Python's search for cycles among objects, where it only takes time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_search_for_cycles() -> Iterator[None]:
    """None is made inside: graphs and lists of tasks have none, and it takes a quarter of the time to make them."""
    searches = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searches:
            gc.enable()
