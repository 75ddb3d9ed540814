"""What every command prints: stdout is data, stderr is talk.

One place for JSON envelopes and tables keeps ``--json`` and pipes the same everywhere: in a pipe no
table cell is cut or folded, and no colour code is written.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from rich.cells import cell_len
from rich.console import Console
from rich.control import strip_control_codes
from rich.table import Table
from rich.text import Text

from tasks.pins import JSON_FORMAT
from tasks.redact import Secrets


def emit_json(value: Mapping[str, object]) -> None:
    """Print one JSON object on stdout, ``"format"`` first (keys are only ever added)."""
    sys.stdout.write(json.dumps({"format": JSON_FORMAT, **value}, indent=2, default=str) + "\n")


def emit_text(text: str) -> None:
    """Print a line of data on stdout: as it is in a pipe, harmless in a terminal."""
    sys.stdout.write((_harmless(text) if sys.stdout.isatty() else text) + "\n")


def say(text: str) -> None:
    """Print a line of talk on stderr, whole whatever the terminal's width, without secrets."""
    sys.stderr.write(_harmless(Secrets.here().clean_text(text)) + "\n")
    sys.stderr.flush()


def _harmless(text: str) -> str:
    """Return a text whose control characters, as a log's lines hold them, steer no terminal."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, note: str | None = None
) -> None:
    """Print a table on stdout: fitted to a terminal, never cut or folded in a pipe.

    Cells are shown as text (``None`` as an en dash): nothing in them is taken as markup.
    """
    texts = [["–" if cell is None else str(cell) for cell in row] for row in rows]
    numeric = [
        bool(texts) and all(_is_numeric(row[index]) for row in texts)
        for index in range(len(columns))
    ]
    if sys.stdout.isatty():
        harmless = [[_harmless(cell) for cell in row] for row in texts]
        _print_fitted(_harmless(title), columns, harmless, numeric)
    else:
        sys.stdout.writelines(_whole_lines(title, columns, texts, numeric))
    if note:
        say(note)


def _print_fitted(
    title: str, columns: Sequence[str], texts: Sequence[Sequence[str]], numeric: Sequence[bool]
) -> None:
    width = shutil.get_terminal_size().columns
    console = Console(file=sys.stdout, width=width, highlight=False)
    words = [
        max(_longest_word(line) for line in (column, *(row[index] for row in texts)))
        for index, column in enumerate(columns)
    ]
    if sum(words) + 2 * (len(words) - 1) > width:
        _print_stacked(console, title, columns, texts)
        return
    table = Table(
        title=Text(title), title_justify="left", header_style="bold", box=None, pad_edge=False
    )
    for column, right, least in zip(columns, numeric, words, strict=True):
        table.add_column(
            Text(column), justify="right" if right else "left", overflow="fold", min_width=least
        )
    for row in texts:
        table.add_row(*(Text(cell, style=_style(cell)) for cell in row))
    console.print(table)


def _longest_word(text: str) -> int:
    return max((_width(word) for word in text.split()), default=0)


def _print_stacked(
    console: Console, title: str, columns: Sequence[str], texts: Sequence[Sequence[str]]
) -> None:
    """Print one block a row where a terminal is too narrow for whole words in columns."""
    if title:
        console.print(Text(title, style="italic"))
    for row in texts:
        parts = [Text(row[0] if row else "", style="bold")]
        for column, cell in zip(columns[1:], row[1:], strict=True):
            parts.append(Text.assemble((f"{column} ", "dim"), (cell, _style(cell))))
        console.print(Text("  ").join(parts), overflow="fold")


#: First word of a cell -> its style. Nothing is told by colour alone: the word stands there.
_STYLES = {
    **dict.fromkeys(("ok", "yes", "holds", "none", "equal"), "green"),
    **dict.fromkeys(("ALARM", "INVALID", "BROKEN"), "bold red"),
    **dict.fromkeys(("oom", "crashed", "lost", "timed_out", "bench_failed"), "red"),
    **dict.fromkeys(("not_ready", "config_mismatch"), "red"),
    **dict.fromkeys(("refused", "partial", "stopped", "different", "differs"), "yellow"),
    **dict.fromkeys(("–", "noted", "unknown", "infeasible"), "dim"),
}


def _style(cell: str) -> str:
    """Return how a cell looks in a terminal that has colours (NO_COLOR switches them off)."""
    if cell.endswith(("(unexpected)", " ABOVE")):
        return "bold red"
    if cell.endswith("(as expected)"):
        return "green"
    return _STYLES.get(cell.partition(" ")[0].rstrip(":,"), "")


_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a series as so many bars, each as high as the highest value of its stretch.

    The lowest bar is the series' smallest value, the highest one its largest.
    """
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [number * len(values) // count for number in range(count + 1)]
    tops = [max(values[a:b]) for a, b in pairwise(edges)]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_BARS[int((top - low) / span * (len(_BARS) - 1))] for top in tops)


def _whole_lines(
    title: str, columns: Sequence[str], texts: Sequence[Sequence[str]], numeric: Sequence[bool]
) -> Iterator[str]:
    """Yield the table as Rich draws it, but whole and without blanks at the ends of lines.

    Rich takes forty times as long, to fit a width that a pipe has not.
    """
    head = [_cell_lines(column) for column in columns]
    body = [[_cell_lines(cell) for cell in row] for row in texts]
    widths = [
        max(_width(line) for row in (head, *body) for line in row[index])
        for index in range(len(columns))
    ]
    if title:
        yield f"{title}\n"
    for row in (head, *body):
        for number in range(max((len(cell) for cell in row), default=0)):
            parts = (
                _padded(cell[number] if number < len(cell) else "", width, right=right)
                for cell, width, right in zip(row, widths, numeric, strict=True)
            )
            yield "  ".join(parts).rstrip() + "\n"


def _cell_lines(text: str) -> list[str]:
    """Return a cell's lines without what would move a terminal's cursor."""
    if text.isprintable():
        return [text]
    return strip_control_codes(text).expandtabs(8).split("\n")


def _padded(line: str, width: int, *, right: bool) -> str:
    blanks = " " * (width - _width(line))
    return blanks + line if right else line + blanks


def _width(line: str) -> int:
    return len(line) if line.isascii() and line.isprintable() else cell_len(line)


def _is_numeric(text: str) -> bool:
    stripped = text.replace(",", "").rstrip("x%s ").strip("–-+ ")
    return not stripped or stripped.replace(".", "", 1).isdigit()


def gib(value: float | None) -> str | None:
    """Return bytes as GiB for print, or ``None`` where nothing was measured."""
    return None if value is None else f"{value / 2**30:.2f} GiB"


def count(value: float | None) -> str | None:
    """Return an integer with thousands separators, or ``None`` where nothing was measured."""
    return None if value is None else f"{value:,.0f}"
