"""Python's search for cycles is off where it only takes time, and on again whatever becomes of that."""

import gc

import pytest

from nntile_py.system.gc_pause import no_search_for_cycles


@no_search_for_cycles()
def searches(depth: int) -> bool:
    if depth:
        searches(depth - 1)
    return gc.isenabled()


@no_search_for_cycles()
def fails() -> None:
    raise ValueError


def test_it_is_on_again() -> None:
    assert gc.isenabled() and not searches(1) and gc.isenabled()
    with pytest.raises(ValueError):
        fails()
    assert gc.isenabled()


def test_what_was_off_stays_off() -> None:
    gc.disable()
    try:
        assert not searches(1) and not gc.isenabled()
    finally:
        gc.enable()
