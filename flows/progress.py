"""What a terminal shows while a sweep is measured: cells, phase, cache usage, time left.

One live block at the bottom, above which every line that is said scrolls by. Where nobody looks (a
pipe, a log, CI) there is none: the lines alone tell the story.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tasks.glance import Glance

REFRESHES_PER_S = 1.0
BAR_COLUMNS = 30


@dataclass(frozen=True, slots=True)
class Going:
    """One run that goes on: its cell, since when (``time.monotonic``), and what it shows."""

    label: str
    repeat: int
    load_points: int
    since_s: float
    seen: Glance


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a round stands: counts of runs, seconds left by the plan's estimates."""

    done: int
    total: int
    unexpected: int
    left_s: float
    going: Sequence[Going]


def wanted() -> bool:
    """Whether somebody looks: a terminal that can move its cursor, and no CI."""
    return (
        sys.stderr.isatty()
        and os.environ.get("TERM", "dumb") != "dumb"
        and not os.environ.get("CI")
    )


@contextmanager
def shown(look: Callable[[], Standing]) -> Iterator[None]:
    """Show what ``look`` returns for as long as the body runs, once a second."""
    if not wanted():
        yield
        return
    console = Console(file=sys.stderr)
    with Live(
        console=console,
        get_renderable=lambda: block(look(), time.monotonic()),
        refresh_per_second=REFRESHES_PER_S,
        transient=True,
        # Lines of data on stdout may go elsewhere and are no business of this block.
        redirect_stdout=False,
    ):
        yield


def block(standing: Standing, now_s: float) -> Group:
    """Return the live block: a bar, and one line per run that goes on."""
    head = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=max(1, standing.total), completed=standing.done, width=BAR_COLUMNS)
    facts = f"{standing.done} of {standing.total} runs"
    if standing.unexpected:
        facts += f", {standing.unexpected} not as expected"
    if standing.done < standing.total:
        facts += f", about {max(1, round(standing.left_s / 60))} min left"
    head.add_row(bar, Text(facts))
    runs = Table.grid(padding=(0, 2))
    for one in standing.going:
        minutes, seconds = divmod(int(now_s - one.since_s), 60)
        runs.add_row(
            Text(f"{one.label} #{one.repeat}", overflow="ellipsis", no_wrap=True),
            Text(f"{minutes}:{seconds:02d}"),
            Text(_phase(one)),
            Text(_usage(one.seen)),
        )
    return Group(head, runs)


def _phase(one: Going) -> str:
    if one.seen.phase is None:
        return "queued"
    if one.seen.load_point is None:
        return one.seen.phase
    return f"{one.seen.phase} {one.seen.load_point + 1}/{one.load_points}"


def _usage(seen: Glance) -> str:
    if seen.kv_usage_ratio is None:
        return ""
    counts = {"running": seen.requests_running, "waiting": seen.requests_waiting}
    told = [f"{count:.0f} {name}" for name, count in counts.items() if count is not None]
    return ", ".join([f"KV cache {seen.kv_usage_ratio:.1%}", *told])
