"""Python's search for objects that refer to each other in a circle and that nobody else knows."""

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def unsearched(make: Callable[P, R]) -> Callable[P, R]:
    """Of a function that makes many objects to keep: no search meanwhile.

    It would come each time that there are a quarter more of them, and go through all that was imported, too."""

    @functools.wraps(make)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        searched = gc.isenabled()
        gc.disable()
        try:
            return make(*args, **kwargs)
        finally:
            if searched:
                gc.enable()

    return call
