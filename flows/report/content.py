"""What a page is made of: plain values between what the warehouse says and what a browser shows.

Sections are built from data without a word of HTML, and the template shows them without a word of
arithmetic. Text stays text: nothing here is markup, so nothing of a log or a name can become one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Ref(NamedTuple):
    """Which number this is, as ``memsweep audit`` is asked for it."""

    run_uuid: str
    load_point: int | None
    metric: str
    evidence: str  # measured, predicted, derived


@dataclass(frozen=True, slots=True)
class Entry:
    """One cell of a table.

    ``value`` is what CSV holds where the text is rounded; ``formula`` says how a number follows
    that was made for the page; ``why`` is the reason for an absence or a doubt.
    """

    text: str
    value: float | str | None = None
    ref: Ref | None = None
    formula: str = ""
    state: str = ""  # "", good, bad, note
    why: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under headings; ``id`` names its CSV file."""

    id: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Entry, ...], ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One drawing: its Vega-Lite specification, and what it shows in words."""

    id: str
    title: str
    spec: dict[str, object]
    words: str


@dataclass(frozen=True, slots=True)
class Figure:
    """Drawings that belong together, with the table of what they show."""

    id: str
    title: str
    caption: str
    panels: tuple[Panel, ...]
    table: Table
    #: Of many like it, only the first ones are open.
    folded: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with what stands under it."""

    id: str
    title: str
    lead: str
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    links: tuple[Line, ...] = ()


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text, marked by what it means, with a link where it leads somewhere."""

    text: str
    state: str = "note"
    link: str = ""


@dataclass(frozen=True, slots=True)
class Proof:
    """The evidence of one number, in words."""

    id: str
    head: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """Where a run's numbers come from: the numbers shown, and what they all have in common."""

    id: str
    title: str
    common: tuple[tuple[str, str], ...]
    proofs: tuple[Proof, ...]
    broken: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """A whole page, ready to be drawn."""

    title: str
    subtitle: str
    banner: tuple[Line, ...]
    pins: Table
    sections: tuple[Section, ...]
    chains: tuple[Chain, ...] = ()
    computed: tuple[Proof, ...] = ()
    footer: str = ""

    def figures(self) -> Iterable[Figure]:
        """Yield every figure of the page."""
        for section in self.sections:
            yield from section.figures

    def tables(self) -> Iterable[Table]:
        """Yield every table of the page, those behind figures included."""
        yield self.pins
        for section in self.sections:
            for figure in section.figures:
                yield figure.table
            yield from section.tables


def text(value: object) -> Entry:
    """Return a cell of plain text; ``None`` is an en dash."""
    return Entry("–" if value is None else str(value))


def row(*values: object) -> tuple[Entry, ...]:
    """Return a row; what is no cell yet becomes one of plain text."""
    return tuple(value if isinstance(value, Entry) else text(value) for value in values)


def table(
    id_: str,
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    note: str = "",
) -> Table:
    """Return a table of rows of cells or plain values."""
    return Table(id_, title, tuple(columns), tuple(row(*cells) for cells in rows), note)
