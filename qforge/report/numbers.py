"""How numbers are printed: digits that mean something, units, intervals."""

from __future__ import annotations

from collections.abc import Sequence

MISSING = "–"


def number(value: float | None, digits: int = 4) -> str:
    """`digits` decimals, or two significant digits for what would vanish."""
    if value is None:
        return MISSING
    if value != 0 and abs(value) < 10.0 ** (1 - digits):
        return f"{value:.1e}"
    return f"{value:,.{digits}f}"


def percent(value: float | None, digits: int = 2, *, sign: bool = False) -> str:
    """A share as percent."""
    if value is None:
        return MISSING
    return f"{value:+.{digits}%}" if sign else f"{value:.{digits}%}"


def interval(ends: Sequence[float] | None, digits: int = 4) -> str:
    """`low to high`; without ends, a dash."""
    return MISSING if ends is None else f"{number(ends[0], digits)} to {number(ends[1], digits)}"


def size(value: float | None) -> str:
    """Bytes in decimal units, as file listings and disks count them."""
    if value is None:
        return MISSING
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= factor:
            return f"{value / factor:,.1f} {unit}"
    return f"{value:,.0f} B"


def seconds(value: float | None) -> str:
    """`0.4 s`, `12 s`, `3 min 05 s`, `2 h 10 min`."""
    if value is None:
        return MISSING
    if value < 10:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def figure(name: str, value: float | None) -> str:
    """A gate's figure in the way that fits its name."""
    if value is None:
        return MISSING
    if name.endswith("_bytes"):
        return f"{value:,.0f} ({size(value)})"
    return number(value, 4)
