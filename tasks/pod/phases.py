"""The phases of a run on one clock: boot, ready, warm-up and measurement per load point, stop.

Peaks are taken per window; without the windows a warm-up's peak would be a measurement's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from tasks.pod.clock import now_s
from tasks.pod.outputs import Outputs

NAMES = ("boot", "ready", "warmup", "measure", "drain", "stop")


@dataclass
class Mark:
    """One phase: where its times come from is told, since the database's are a fall-back."""

    name: str
    load_point: int | None
    start_s: float
    end_s: float | None = None
    source: str = "run"


class Phases:
    """Marks phases and keeps phases.json up to date with every change."""

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs
        self._marks: list[Mark] = []

    def start(
        self,
        name: str,
        load_point: int | None = None,
        *,
        at_s: float | None = None,
        source: str = "run",
    ) -> None:
        """Begin a phase now, or at ``at_s`` when another process saw it begin."""
        start = now_s() if at_s is None else at_s
        self._marks.append(Mark(name, load_point, start, source=source))
        self._outputs.event("phase_start", phase=name, load_point=load_point)
        self._write()

    def end(self, name: str, load_point: int | None = None, *, at_s: float | None = None) -> None:
        """End an open phase; nothing happens when it is not open."""
        for mark in self._marks:
            if (mark.name, mark.load_point, mark.end_s) == (name, load_point, None):
                mark.end_s = now_s() if at_s is None else at_s
                self._outputs.event("phase_end", phase=name, load_point=load_point)
                self._write()
                return

    def add(self, name: str, load_point: int, start_s: float, end_s: float, source: str) -> None:
        """Add a phase that was found out afterwards."""
        self._marks.append(Mark(name, load_point, start_s, end_s, source))
        self._write()

    def has(self, name: str, load_point: int) -> bool:
        """Return whether that phase was marked."""
        return any((mark.name, mark.load_point) == (name, load_point) for mark in self._marks)

    def close(self) -> None:
        """End whatever is open: the run is over."""
        for mark in self._marks:
            if mark.end_s is None:
                mark.end_s = now_s()
        self._write()

    def _write(self) -> None:
        self._outputs.write("phases.json", {"phases": [asdict(mark) for mark in self._marks]})
