"""What is still to be started of a round: in order, with what is tried again behind the rest.

Retried by cause: only an outcome after which nothing is known of the cell (a lost node, the
network, an image that could not be pulled) is worth another attempt at once; a refusal or an
out-of-memory error would only come again.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from tasks.plan.plan import PlannedRun
from warehouse.registry import Outcome

#: Waits before the second and the third attempt of a repeat, seconds; there is no fourth in one
#: flow, but the next `run` of the sweep makes one.
RETRY_AFTER_S = (2.0, 20.0)
#: So many cells that fail alike, before any came out as expected, stop a sweep.
ALIKE = 3


@dataclass(frozen=True, slots=True)
class CellResult:
    """How one repeat of one cell came out."""

    label: str
    repeat: int
    run_uuid: str
    outcome: str
    as_expected: bool
    reused: bool
    #: Phase and message of what went wrong; empty where nothing did.
    failure: str = ""
    #: Why nothing was found out, so that the repeat is worth another attempt.
    transient: str | None = None
    #: How long its run lasted, seconds.
    took_s: float | None = None  # unknown, or not measured by this flow


Key = tuple[str, int]


def key_of(run: PlannedRun) -> Key:
    """Return cell key and repeat of a run."""
    return run.cell.cell_key, run.repeat


def never_measured_first(
    runs: Sequence[PlannedRun], last: Mapping[str, datetime]
) -> list[PlannedRun]:
    """Return runs in the order in which those that a budget buys are started.

    Within each repeat cells that were never measured come first, then those measured longest ago
    (``last``: :func:`tasks.plan.spending.last_measured`). Equals keep their order; the sentinel
    keeps its places at start, middle and end.
    """

    def turn(run: PlannedRun) -> tuple[int, datetime]:
        return run.repeat, last[run.cell.cell_key]

    others = iter(sorted((run for run in runs if not run.sentinel), key=turn))
    return [run if run.sentinel else next(others) for run in runs]


class Pending:
    """Runs that are not started yet; safe to use from the cells' threads."""

    def __init__(self, runs: Iterable[PlannedRun]) -> None:
        self._waiting: deque[tuple[float, PlannedRun]] = deque((0.0, run) for run in runs)
        self._tries: dict[Key, int] = {}
        #: How often the runs changed.
        self.changes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._waiting)

    def runs(self) -> list[PlannedRun]:
        """Return the runs in their order."""
        with self._lock:
            return [run for _, run in self._waiting]

    def take(self, among: Collection[Key] | None = None) -> PlannedRun | None:
        """Return the first run whose time has come and forget it; ``None`` if there is none.

        ``among`` are the runs that may be started, where not all may.
        """
        moment = time.monotonic()
        with self._lock:
            for index, (due, run) in enumerate(self._waiting):
                if due <= moment and (among is None or key_of(run) in among):
                    del self._waiting[index]
                    self.changes += 1
                    return run
        return None

    def again(self, run: PlannedRun) -> float | None:
        """Put a run behind the others; return its wait in seconds, ``None`` after its last try."""
        key = key_of(run)
        with self._lock:
            tried = self._tries.get(key, 0)
            if tried >= len(RETRY_AFTER_S):
                return None
            self._tries[key] = tried + 1
            wait = RETRY_AFTER_S[tried]
            self._waiting.append((time.monotonic() + wait, run))
            self.changes += 1
            return wait


def all_alike(results: Sequence[CellResult]) -> str | None:
    """Return how the first cells of a sweep all failed, ``None`` where they did not.

    Looks at runs of this flow and earlier ones alike; what the plan refused was no run.
    """
    ran = [result for result in results if result.outcome != Outcome.INFEASIBLE.value]
    if any(result.as_expected for result in ran):
        return None
    measured = [result for result in ran if not result.reused]
    kinds = {(result.outcome, re.sub(r"\d+", "#", result.failure)) for result in measured}
    if len({result.label for result in measured}) < ALIKE or len(kinds) > 1:
        return None
    first = measured[0]
    return f"{first.outcome}{f': {first.failure}' if first.failure else ''}"
