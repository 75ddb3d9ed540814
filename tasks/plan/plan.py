"""From a sweep to a plan: cells with pins, predictions, refusals, deadlines, time and disk.

A plan is pure: it starts nothing, and what it needs to know of the machine or the cluster comes in
as :class:`Surroundings`. After it nothing downstream fills in a default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from tasks.plan.cell import MAX_CELL_BYTES, UNRESOLVED, Cell, Limits, LoadPoint, Pins, Setting
from tasks.plan.prediction import Prediction, predict
from tasks.plan.sweep import Experiment, Sweep
from warehouse.errors import BadInput
from warehouse.registry import Outcome


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a plan has to know about where the runs will take place."""

    target: str
    device: Literal["cpu", "cuda"]
    slots: int  # runs at a time
    memory_total_bytes: int
    engine_version: str
    engine_lock_sha256: str | None
    image_digest: str | None
    bench_version: str
    bench_lock_sha256: str
    revision: Callable[[str], str | None]  # model name -> revision, None while unknown
    config: Callable[[str], dict[str, object] | None]  # model name -> config.json


@dataclass(frozen=True, slots=True)
class Pace:
    """Rough times of one device, in seconds, for estimates only. Deadlines are far above."""

    start_s: float
    level_overhead_s: float
    step_s: float  # one decoding step of one sequence
    step_per_sequence_s: float  # and what each further sequence adds
    run_overhead_s: float = 5.0


#: CPU: tiny models on two cores, measured. CUDA: a 4B model on a 24 GB card, an assumption that
#: says so in the plan; a history of own runs replaces it.
PACES = {
    "cpu": Pace(start_s=35, level_overhead_s=4, step_s=0.020, step_per_sequence_s=0.0028),
    "cuda": Pace(start_s=120, level_overhead_s=8, step_s=0.030, step_per_sequence_s=0.0004),
}


@dataclass(frozen=True, slots=True)
class PlannedCell:
    """One cell with its prediction and, where it cannot work, the reason."""

    cell: Cell
    experiment: str
    prediction: Prediction
    estimate_s: float

    @property
    def infeasible(self) -> str | None:
        """Why the cell cannot work, by the prediction; ``None`` where nothing speaks against it."""
        return self.prediction.refusal

    @property
    def skipped(self) -> bool:
        """Whether ``run`` leaves the cell out (its outcome is then ``infeasible``)."""
        return self.infeasible is not None and self.cell.expect is None

    def as_expected(self, outcome: str) -> bool:
        """Return whether an outcome counts as success for this cell.

        What is skipped is expected to be infeasible.
        """
        if self.skipped:
            return outcome == Outcome.INFEASIBLE.value
        return outcome == (self.cell.expect or Outcome.OK).value


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One repeat of one cell."""

    planned: PlannedCell
    repeat: int

    @property
    def cell(self) -> Cell:
        """The cell this run measures."""
        return self.planned.cell


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a sweep will do on a target."""

    sweep: Sweep
    surroundings: Surroundings
    cells: tuple[PlannedCell, ...]

    def runs(self) -> Iterator[PlannedRun]:
        """Yield every run that is to be started, repeats interleaved."""
        yield from (run for run in self._repeats() if not run.planned.skipped)

    def skipped(self) -> Iterator[PlannedRun]:
        """Yield every run that the prediction refuses and that is left out."""
        yield from (run for run in self._repeats() if run.planned.skipped)

    def _repeats(self) -> Iterator[PlannedRun]:
        for repeat in range(1, self.sweep.repeats + 1):
            for planned in self.cells:
                yield PlannedRun(planned, repeat)

    @property
    def boots(self) -> int:
        """Server starts: one a run, because load points share their cell's server."""
        return sum(1 for _ in self.runs())

    @property
    def estimate_s(self) -> float:
        """Estimated wall time in seconds, on the target's slots."""
        return sum(run.planned.estimate_s for run in self.runs()) / self.surroundings.slots

    @property
    def disk_bytes(self) -> int:
        """Estimated size of the bundles: measured 1 MB a run and 45 KB a request."""
        requests = sum(
            point.number + point.warmup for run in self.runs() for point in run.cell.setting.load
        )
        return self.boots * 1_000_000 + requests * 45_000

    @property
    def unresolved(self) -> list[str]:
        """Every pin that is not resolved, as ``cell label: pin``."""
        return [f"{p.cell.label}: {name}" for p in self.cells for name in p.cell.pins.unresolved]


def make_plan(sweep: Sweep, surroundings: Surroundings, *, keep_infeasible: bool = False) -> Plan:
    """Expand ``sweep`` for a target; ``keep_infeasible`` measures even what cannot work.

    Raises :class:`BadInput` where a setting cannot be, where two cells are the same, or where the
    model's architecture is unknown.
    """
    cells = [
        _planned(sweep, experiment, label, setting, surroundings, kept=keep_infeasible)
        for experiment, label, setting in sweep.expand(
            memory_total_bytes=surroundings.memory_total_bytes
        )
    ]
    seen: dict[str, str] = {}
    for planned in cells:
        key, label = planned.cell.cell_key, planned.cell.label
        if key in seen:
            raise BadInput(
                f"sweep {sweep.name}: cells {seen[key]} and {label} are the same configuration and "
                "load; remove one, or state repeats"
            )
        seen[key] = label
    return Plan(sweep, surroundings, tuple(cells))


def _planned(
    sweep: Sweep,
    experiment: Experiment,
    label: str,
    setting: Setting,
    where: Surroundings,
    *,
    kept: bool,
) -> PlannedCell:
    pins = _pins(sweep, setting, where)
    pace = PACES[where.device]
    points = [_point_seconds(point, pace) for point in setting.load]
    refused = experiment.expect is not None and experiment.expect is not Outcome.OK
    cell = Cell(
        label=label,
        setting=setting,
        pins=pins,
        limits=_limits(setting),
        expect=experiment.expect,
        sampling=sweep.sampling,
        prompts=sweep.prompt_texts(setting),
    )
    size = len(cell.canonical()) if cell.prompts else 0
    if size > MAX_CELL_BYTES:
        raise BadInput(
            f"sweep {sweep.name}, cell {label}: {size} bytes with its prompts, wanted at most "
            f"{MAX_CELL_BYTES}; use fewer or shorter prompts"
        )
    config = where.config(setting.model.name)
    prediction = predict(cell, config, memory_total_bytes=where.memory_total_bytes)
    estimate = pace.start_s + pace.run_overhead_s + (0 if refused else sum(points))
    if kept and prediction.refusal is not None and cell.expect is None:
        # Kept to measure the refusal: that is what is then expected of it.
        cell = cell.model_copy(update={"expect": Outcome.REFUSED})
    return PlannedCell(cell, experiment.name, prediction, estimate)


def _pins(sweep: Sweep, setting: Setting, where: Surroundings) -> Pins:
    revision = sweep.pins.model_revision or where.revision(setting.model.name) or UNRESOLVED
    engine = sweep.pins.engine_version or where.engine_version
    if where.device == "cpu" and engine != where.engine_version:
        raise BadInput(
            f"sweep {sweep.name}: pins.engine_version is {engine}, but target {where.target} "
            f"offers {where.engine_version}"
        )
    digest = (sweep.pins.image_digest or where.image_digest) if where.device == "cuda" else None
    return Pins(
        device=where.device,
        model_revision=revision,
        engine_version=engine,
        engine_lock_sha256=where.engine_lock_sha256 if where.device == "cpu" else None,
        image_digest=(digest or UNRESOLVED) if where.device == "cuda" else None,
        bench_version=where.bench_version,
        bench_lock_sha256=where.bench_lock_sha256,
    )


def _point_seconds(point: LoadPoint, pace: Pace) -> float:
    def waves(number: int, parallel: int) -> float:
        width = min(number, parallel)
        if not width:
            return 0.0
        step = pace.step_s + pace.step_per_sequence_s * width
        return -(-number // width) * point.output_tokens * step

    warmup = waves(point.warmup, point.parallel)
    return pace.level_overhead_s + warmup + waves(point.number, point.parallel)


def _limits(setting: Setting) -> Limits:
    """Deadlines: generous, because a busy machine was seen to be ten times slower than a quiet one;
    their job is that nothing hangs for ever."""
    points = tuple(
        300.0 + (point.number + point.warmup) * point.output_tokens * 0.2 for point in setting.load
    )
    start, ready, stop = 900.0, 180.0, 60.0
    return Limits(
        start_s=start,
        ready_s=ready,
        load_point_s=points,
        stop_s=stop,
        run_s=start + ready + sum(points) + stop + 120.0,
    )
