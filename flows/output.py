"""What every command prints: stdout is data, stderr is talk.

One place for JSON envelopes and tables keeps ``--json`` and pipes the same everywhere: in a pipe no
table cell is cut or folded, and no colour code is written.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tasks.pins import JSON_FORMAT


def emit_json(value: Mapping[str, object]) -> None:
    """Print one JSON object on stdout, ``"format"`` first (keys are only ever added)."""
    sys.stdout.write(json.dumps({"format": JSON_FORMAT, **value}, indent=2, default=str) + "\n")


def emit_text(text: str) -> None:
    """Print a line of data on stdout."""
    sys.stdout.write(text + "\n")


def say(text: str) -> None:
    """Print a line of talk on stderr, whole whatever the terminal's width."""
    # Lines of a log can hold control characters; none of them may steer a terminal.
    shown = "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
    sys.stderr.write(shown + "\n")
    sys.stderr.flush()


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, note: str | None = None
) -> None:
    """Print a table on stdout: fitted to a terminal, never cut or folded in a pipe.

    Cells are shown as text (``None`` as an en dash): nothing in them is taken as markup.
    """
    table = Table(
        title=Text(title), title_justify="left", header_style="bold", box=None, pad_edge=False
    )
    texts = [["–" if cell is None else str(cell) for cell in row] for row in rows]
    for index, column in enumerate(columns):
        numeric = bool(texts) and all(_is_numeric(row[index]) for row in texts)
        table.add_column(
            Text(column),
            justify="right" if numeric else "left",
            overflow="fold",
            no_wrap=not sys.stdout.isatty(),
        )
    for row in texts:
        table.add_row(*(Text(cell) for cell in row))
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else 100_000
    out = Console(file=sys.stdout, width=width, highlight=False, no_color=not terminal)
    if not terminal:
        # Rich pads lines to the widest row; a pipe should get no trailing blanks.
        with out.capture() as captured:
            out.print(table)
        sys.stdout.write("\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n")
    else:
        out.print(table)
    if note:
        say(note)


def _is_numeric(text: str) -> bool:
    stripped = text.replace(",", "").rstrip("x%s ").strip("–-+ ")
    return not stripped or stripped.replace(".", "", 1).isdigit()


def gib(value: float | None) -> str | None:
    """Return bytes as GiB for print, or ``None`` where nothing was measured."""
    return None if value is None else f"{value / 2**30:.2f} GiB"


def count(value: float | None) -> str | None:
    """Return an integer with thousands separators, or ``None`` where nothing was measured."""
    return None if value is None else f"{value:,.0f}"
