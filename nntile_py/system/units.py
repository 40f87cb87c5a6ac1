"""Numbers with units, short enough for a label."""

from __future__ import annotations


def si(number: float) -> str:
    """Write 1234567 as '1.23 M', to go before a unit."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} P"


def size(count: float) -> str:
    """Write a number of bytes."""
    return f"{si(count)}B"


def duration(seconds: float) -> str:
    """Write a time in s, ms or us."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def percent(share: float | None) -> str:
    """Write a share as percent; '-' if it is not known."""
    if share is None:
        return "-"
    return f"{share:.0%}" if share >= 0.1 or share == 0 else f"{share:.1%}"
