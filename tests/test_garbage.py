"""Python's search for circles of objects is off while a function makes many, and on again whatever becomes of it."""

import gc

import pytest

from nntile_py.system.garbage import unsearched


@unsearched
def searched(depth: int) -> bool:
    if depth:
        searched(depth - 1)
    return gc.isenabled()


@unsearched
def failing() -> None:
    raise ValueError


def test_it_is_on_again() -> None:
    assert gc.isenabled() and not searched(1) and gc.isenabled()
    with pytest.raises(ValueError):
        failing()
    assert gc.isenabled()


def test_what_was_off_stays_off() -> None:
    gc.disable()
    try:
        assert not searched(1) and not gc.isenabled()
    finally:
        gc.enable()
