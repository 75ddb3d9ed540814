"""Tables in a pipe: the same as Rich draws, whole, and without Rich."""

from __future__ import annotations

import io
import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows import output


def drawn_by_rich(title: str, columns: list[str], rows: list[list[str]], right: list[bool]) -> str:
    """Return the table as Rich draws it where everything fits, without blanks at line ends."""
    table = Table(
        title=Text(title), title_justify="left", header_style="bold", box=None, pad_edge=False
    )
    for column, numeric in zip(columns, right, strict=True):
        table.add_column(Text(column), justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    page = io.StringIO()
    Console(file=page, width=100_000, highlight=False, no_color=True).print(table)
    return "".join(line.rstrip() + "\n" for line in page.getvalue().split("\n")[:-1])


def printed(title: str, columns: list[str], rows: list[list[object]]) -> str:
    """Return what print_table writes into a pipe."""
    page, real = io.StringIO(), sys.stdout
    sys.stdout = page
    try:
        output.print_table(title, columns, rows)
    finally:
        sys.stdout = real
    return page.getvalue()


def test_a_table_in_a_pipe() -> None:
    """Numbers to the right, text to the left, None as a dash, wide letters counted as wide."""
    rows: list[list[object]] = [["東京", 1_000, None], ["a\nb", 7, "[bold]x[/]"]]
    assert printed("two", ["name", "count", "note"], rows) == (
        "two\nname  count  note\n東京   1000  –\na         7  [bold]x[/]\nb\n"
    )
    assert printed("", ["empty"], []) == "empty\n"


CELLS = st.text(
    st.one_of(st.characters(categories=("L", "N", "P", "S")), st.sampled_from(" \n\x07\r%x,.-1")),
    max_size=12,
)


@given(st.lists(st.tuples(CELLS, CELLS, CELLS), max_size=5))
def test_a_pipe_gets_what_rich_would_draw(cells: list[tuple[str, str, str]]) -> None:
    """Any cells, also of several lines and with letters of two cells; Rich would cut at a tab."""
    columns = ["a", "second", "c"]
    rows = [list(row) for row in cells]
    right = [bool(rows) and all(output._is_numeric(row[i]) for row in rows) for i in range(3)]
    assert printed("", columns, rows) == drawn_by_rich("", columns, rows, right)  # type: ignore[arg-type]


def test_a_pipe_never_folds_a_title_or_a_long_line() -> None:
    """Rich folds a title at its table's width and a line at its console's."""
    long = "y" * 200_000
    page = printed("a title that is longer than the table", ["n"], [[long]])
    assert page == f"a title that is longer than the table\nn\n{long}\n"


def test_rich_is_left_out_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich takes forty times as long for a large result."""

    def refuse(*_arguments: object, **_named: object) -> None:
        raise AssertionError("Rich was asked to draw")

    monkeypatch.setattr(output, "Table", refuse)
    assert printed("", ["n"], [[1], [22]]) == " n\n 1\n22\n"


def in_a_terminal(monkeypatch: pytest.MonkeyPatch, width: int, rows: list[list[object]]) -> str:
    """Return what print_table shows in a terminal of so many columns, colour codes left out."""
    monkeypatch.setattr(
        "flows.output.shutil.get_terminal_size", lambda: os.terminal_size((width, 40))
    )
    page = io.StringIO()
    monkeypatch.setattr(page, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", page)
    monkeypatch.setenv("TERM", "dumb")
    output.print_table("runs", ["run", "outcome", "peak"], rows)
    return page.getvalue()


def test_a_narrow_terminal_gets_blocks_and_no_cut_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where whole words do not fit side by side, each row is a block; else columns stay."""
    rows: list[list[object]] = [["0dcdd5d2-40b2-4ffb-8480-db657bec4c9a", "refused", 0.5]]
    wide = in_a_terminal(monkeypatch, 60, rows)
    assert len([line for line in wide.splitlines() if "0dcdd5d2-40b2" in line]) == 1
    assert "outcome  peak" in " ".join(wide.split("\n")[1].split()).replace(" ", "  ")
    narrow = in_a_terminal(monkeypatch, 40, rows)
    assert "0dcdd5d2-40b2-4ffb-8480-db657bec4c9a" in narrow
    assert "outcome refused" in " ".join(narrow.split())


def test_a_logs_control_characters_steer_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in a table nor in a line of data; a pipe gets the text as it is."""
    hostile = "a\x1b]0;title\x07\x9b2Jb\tc"
    assert not set("\x1b\x07\x9b") & set(in_a_terminal(monkeypatch, 80, [[hostile, "ok", 1]]))
    for terminal in (True, False):
        page = io.StringIO()
        monkeypatch.setattr(page, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setattr(sys, "stdout", page)
        output.emit_text(hostile)
        assert (page.getvalue() == hostile + "\n") is not terminal
        assert bool(set("\x1b\x07\x9b") & set(page.getvalue())) is not terminal


def test_what_a_cell_means_has_a_colour() -> None:
    """Outcomes by their first word; what is expected is no fault."""
    styles = {
        cell: output._style(cell) for cell in ("ok", "oom", "refused (as expected)", "975,890")
    }
    assert styles == {"ok": "green", "oom": "red", "refused (as expected)": "green", "975,890": ""}
    assert output._style("ALARM: 2") == "bold red"


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 60))
def test_a_sparkline_keeps_the_peak(values: list[float], width: int) -> None:
    """As many bars as fit, the highest one where the highest value is."""
    line = output.sparkline(values, width)
    assert len(line) == min(width, len(values))
    if max(values) - min(values) > 1:
        at = values.index(max(values)) * len(line) // len(values)
        assert line[at] == "█" or line[min(at + 1, len(line) - 1)] == "█"
