"""Numbers as people read them, each still tied to what it stands for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from flows.report.content import Entry
from warehouse.audit import unit_of

if TYPE_CHECKING:
    from flows.report.data import Number

GIB = 2**30
MIB = 2**20


def size(value: float) -> str:
    """Return bytes in the largest binary unit that leaves a whole part."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if abs(value) >= factor:
            return f"{value / factor:,.2f} {unit}"
    return f"{value:,.0f} B"


def percent(ratio: float) -> str:
    """Return a ratio in percent with as many digits as tell small ones apart."""
    return f"{ratio * 100:.{2 if abs(ratio) >= 0.1 else 3}f} %"


def count(value: float) -> str:
    """Return a number with separators; fractions only where there are any."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"


_BY_UNIT: dict[str, Any] = {
    "bytes": size,
    "ratio": percent,
    "x": lambda value: f"{value:.2f}x",
    "s": lambda value: f"{value:,.2f} s",
    "ms": lambda value: f"{value:,.1f} ms",
    "percent": lambda value: f"{value:g} %",
}


def worded(metric: str, value: float) -> str:
    """Return a value in the unit of its metric."""
    words: str = _BY_UNIT.get(unit_of(metric), count)(value)
    return words


def shown(number: Number, *, state: str = "", why: str = "") -> Entry:
    """Return a stored number as a table's cell; an absent one says why it is."""
    if number.value is None:
        return Entry("–", why=why or number.reason or "")
    return Entry(
        worded(number.ref.metric, number.value), number.value, number.ref, state=state, why=why
    )


def made(value: float, text: str, formula: str, *, state: str = "", why: str = "") -> Entry:
    """Return a number that was computed for the page, with how it follows."""
    return Entry(text, value, formula=formula, state=state, why=why)


def several(count: int, noun: str) -> str:
    """Return a number with its noun in singular or plural."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def joined(names: Iterable[object], *, most: int = 6) -> str:
    """Return names in one line, the first few of many."""
    listed = [str(name) for name in names]
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def told_apart(names: Sequence[str], *more: Sequence[str]) -> list[str]:
    """Return names with the next list's text added wherever several are still the same.

    A chart adds up bars of one name: two runs must never share one.
    """
    found = list(names)
    for texts in more:
        seen = Counter(found)
        found = [
            f"{name}, {text}" if seen[name] > 1 else name
            for name, text in zip(found, texts, strict=True)
        ]
    return found


def one_line(text: object, *, most: int = 240) -> str:
    """Return a text without line breaks, cut where it is long."""
    line = " ".join(str(text).split())
    return line if len(line) <= most else f"{line[:most]} … (cut)"
