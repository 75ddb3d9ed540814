"""What a plan costs: boots, minutes, GPU-hours and disk, and what a budget of them buys; pure.

Times and sizes come from past runs of the same setting on the same target where there are any,
else from the plan's rough estimate. The unit of a budget is one GPU for one second; on a CPU, where
no GPU is held, it is one slot for one second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tasks.plan.plan import PlannedRun


@dataclass(frozen=True, slots=True)
class Past:
    """What past runs of one setting on the target say."""

    runs: int
    last_at: datetime  # start of the newest, UTC
    median_s: float | None
    bundle_bytes: int | None  # of the largest


@dataclass(frozen=True, slots=True)
class History:
    """Past runs on a target by setting key."""

    settings: Mapping[str, Past] = field(default_factory=dict)
    #: Bytes of all bundles over what the plan would have estimated for them; None: no bundle yet.
    bundle_ratio: float | None = None

    def of(self, run: PlannedRun) -> Past | None:
        """Return what is known of a run's setting; ``None`` where it was never measured."""
        return self.settings.get(run.cell.setting_key)

    def seconds(self, run: PlannedRun) -> float:
        """Return how long a run takes: the median of past ones, else the estimate."""
        past = self.of(run)
        measured = past.median_s if past else None
        return run.planned.estimate_s if measured is None else measured

    def bundle_bytes(self, run: PlannedRun) -> int:
        """Return the disk a run's bundle takes: as the largest past one, else the estimate."""
        past = self.of(run)
        if past and past.bundle_bytes is not None:
            return past.bundle_bytes
        return round(run.planned.disk_bytes * (self.bundle_ratio or 1))


_NEVER = datetime.min.replace(tzinfo=UTC)
#: Before anything was measured.
NO_HISTORY = History()


def cost_s(run: PlannedRun, history: History) -> float:
    """Return what a run takes of a budget: seconds times GPUs, or slot-seconds on a CPU."""
    return history.seconds(run) * max(1, run.planned.gpus)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a budget buys, both parts in the order that was planned."""

    chosen: tuple[PlannedRun, ...]
    left_out: tuple[PlannedRun, ...]


def last_measured(runs: Iterable[PlannedRun], history: History) -> dict[str, datetime]:
    """Return by cell key when each cell was last measured; the least time if never.

    A line of cells whose frontier is bisected counts as one, measured when any of it was: what a
    bisection left out has no past of its own, and must not come before what settles it.
    """
    lines: dict[object, dict[str, datetime]] = {}
    for run in runs:
        past, key = history.of(run), run.cell.cell_key
        lines.setdefault(_line(run), {})[key] = past.last_at if past else _NEVER
    return {key: max(line.values()) for line in lines.values() for key in line}


def _line(run: PlannedRun) -> object:
    planned = run.planned
    if planned.bisect is None or run.sentinel:
        return run.cell.cell_key
    server = run.cell.setting.server
    return planned.experiment, tuple(value for name, value in server if name != planned.bisect)


def choose(
    runs: Sequence[PlannedRun],
    history: History,
    budget_s: float,
    last: Mapping[str, datetime] | None = None,
) -> Choice:
    """Return the runs that ``budget_s`` (GPU-seconds; slot-seconds on a CPU) buys, whole ones only.

    First the sentinel, without which a night cannot be compared, then cells that were never
    measured, then those measured longest ago (``last``, as :func:`last_measured` returns it of the
    whole plan where ``runs`` are only a part). One that no longer fits is passed over for the next:
    it comes first again in the next night.
    """
    measured = last_measured(runs, history) if last is None else last

    def turn(index: int) -> tuple[bool, datetime, int]:
        return not runs[index].sentinel, measured[runs[index].cell.cell_key], index

    left, chosen = budget_s, set()
    for index in sorted(range(len(runs)), key=turn):
        cost = cost_s(runs[index], history)
        if cost <= left:
            left -= cost
            chosen.add(index)
    return Choice(
        tuple(run for index, run in enumerate(runs) if index in chosen),
        tuple(run for index, run in enumerate(runs) if index not in chosen),
    )


@dataclass(frozen=True, slots=True)
class Spending:
    """What some runs cost."""

    boots: int
    wall_s: float  # on the target's slots
    gpu_s: float  # 0 on a CPU

    def document(self, *, cpu: bool) -> dict[str, object]:
        """Return it as JSON values; no GPU-hours on a CPU."""
        hours = None if cpu else round(self.gpu_s / 3600, 2)
        return {"boots": self.boots, "estimate_s": round(self.wall_s), "gpu_hours": hours}


def spending(
    runs: Iterable[PlannedRun], history: History, *, slots: int, grouped: bool = True
) -> Spending:
    """Return what ``runs`` cost: one server start each, or one a load point if not ``grouped``."""
    boots, wall, gpu = 0, 0.0, 0.0
    for run in runs:
        more = 0 if grouped else len(run.cell.setting.load) - 1
        seconds = history.seconds(run) + more * run.planned.boot_s
        boots += 1 + more
        wall += seconds / slots
        gpu += seconds * run.planned.gpus
    return Spending(boots, wall, gpu)
