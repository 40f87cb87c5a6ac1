"""Formats numbers with units, short enough for a label."""

from __future__ import annotations


def si(number: float) -> str:
    """Return a number with an SI prefix and three digits, such as '1.23 M' for 1234567. The unit follows directly."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} P"


def counted(number: int, noun: str) -> str:
    """Return a number with a noun in the singular or the plural, such as '1 step' or '1,234 steps'."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def size(count: float) -> str:
    """Return a number of bytes as text, such as '1.23 MB'."""
    return f"{si(count)}B"


def room(count: float) -> str:
    """Return a number of bytes as text in MiB, such as '1,234.5 MiB'; in KiB below 0.1 MiB."""
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 / 10 else f"{count / 2**10:.1f} KiB"


def duration(seconds: float) -> str:
    """Return a time, in seconds, as text with the unit s, ms or us."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def clock_text(seconds: float) -> str:
    """Return a time, in seconds, as text with hours, minutes and seconds, such as '0:01:02' for 62."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def percent(share: float | None) -> str:
    """Return a share as text in percent, such as '12%' for 0.12; '-' for None."""
    if share is None:
        return "-"
    return f"{share:.0%}" if share >= 0.1 or share == 0 else f"{share:.1%}"
