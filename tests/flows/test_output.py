"""Tables in a pipe: the same as Rich draws, whole, and without Rich."""

from __future__ import annotations

import io
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
