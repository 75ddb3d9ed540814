"""What is left of 10,000 cells is known in under a second: CPU time, so that a busy machine
does not decide."""

from __future__ import annotations

from pathlib import Path

from tests.bench import decide


def test_ten_thousand_cells_are_decided_in_a_second(tmp_path: Path) -> None:
    """No pass over the round costs a second, and planning costs less than a millisecond a cell."""
    times = decide.measure(tmp_path)
    for what, seconds in times.items():
        print(f"{decide.CELLS} cells, {what}: {seconds['wall_s']} s ({seconds['cpu_s']} s of CPU)")
    assert times["none finished"]["cpu_s"] < 1
    assert times["all finished"]["cpu_s"] < 1
    assert times["order"]["cpu_s"] < 1
    assert times["plan"]["cpu_s"] < 10
