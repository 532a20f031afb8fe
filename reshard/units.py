"""Numbers as people read them."""

from __future__ import annotations

_UNITS = ("bytes", "kB", "MB", "GB", "TB")


def size(nbytes: float) -> str:
    """`nbytes` in decimal units, as disks and the Hub count: 807 GB."""
    unit = 0
    while nbytes >= 1000 and unit < len(_UNITS) - 1:
        nbytes /= 1000
        unit += 1
    decimals = 0 if unit == 0 or nbytes >= 100 else 1 if nbytes >= 10 else 2
    return f"{nbytes:,.{decimals}f} {_UNITS[unit]}"


def counted(number: int, what: str) -> str:
    """`1 tensor`, `2,924 tensors`"""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def span(first: int, last: int) -> str:
    """Consecutive numbers: `3`, or `3-7`."""
    return f"{first}-{last}" if last > first else str(first)
