"""From a sweep to a plan: cells with pins, predictions, refusals, deadlines, time and disk.

A plan is pure: it starts nothing, and what it needs to know of the machine or the cluster comes in
as :class:`Surroundings`. After it nothing downstream fills in a default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from tasks.plan import pool, sizing_lint
from tasks.plan.calibration import Boot, Pool
from tasks.plan.cell import MAX_CELL_BYTES, UNRESOLVED, Cell, Limits, LoadPoint, Pins, Setting
from tasks.plan.gpus import Gpu
from tasks.plan.model import describe
from tasks.plan.prediction import FIRST_BOOT, PROMPT_ABOVE_CONTEXT, Prediction, predict
from tasks.plan.sizing_lint import Finding
from tasks.plan.sweep import Experiment, Sweep
from tasks.plan.weights import Stored
from warehouse.errors import BadInput
from warehouse.registry import Outcome


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a plan has to know about where the runs will take place."""

    target: str
    device: Literal["cpu", "cuda"]
    slots: int  # runs at a time
    memory_total_bytes: int | None  # of the machine or, on cuda, of one GPU; None: not known
    engine_version: str
    engine_lock_sha256: str | None  # of the engine made here; None: the image holds it
    image_digest: str | None
    bench_version: str
    bench_lock_sha256: str
    revision: Callable[[str], str | None]  # model name -> revision, None while unknown
    config: Callable[[str, str], dict[str, object] | None]  # model name, revision -> config.json
    gpu: Gpu | None = None
    checkpoint: Callable[[str], Stored | None] | None = None  # model name -> its weights
    boots: Callable[[Cell], list[Boot]] | None = None  # past starts that count for a cell


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

    def findings(
        self, where: Surroundings, *, prefix_overlap_ratio: float | None = None
    ) -> list[Finding]:
        """Return the sizing mistakes of the cell, for people; nothing is refused by them.

        A pool set in bytes on the CPU sizes no GPU, and a cell that expects to fail is meant so:
        nothing is said about these.
        """
        server = self.cell.setting.server
        explicit = server.kv_cache_memory_bytes is not None
        meant = self.cell.expect not in (None, Outcome.OK)
        if meant or (explicit and where.device == "cpu"):
            return []
        config = self.prediction.model_config
        served = sizing_lint.Served(
            gpu_memory_utilization=server.gpu_memory_utilization,
            max_model_len=server.max_model_len,
            max_num_seqs=server.max_num_seqs,
            kv_cache_dtype=server.kv_cache_dtype,
            prefix_caching=server.enable_prefix_caching,
            points=tuple(
                sizing_lint.Point(
                    point.prompt_tokens, point.output_tokens, point.parallel, point.prefix_tokens
                )
                for point in self.cell.setting.load
            ),
            explicit_pool=explicit,
            description=None if config is None else describe(config),
            # Of a pool that cannot be served from, nothing but the refusal is worth a word.
            prediction=None if self.infeasible else self.prediction.capacity,
            gpu=where.gpu,
            prefix_overlap_ratio=prefix_overlap_ratio,
        )
        return sizing_lint.check(served)


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
            # Where the memory is not known, a size beyond it is the one the sweep states.
            memory_total_bytes=surroundings.memory_total_bytes or 0
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
    config = where.config(setting.model.name, pins.model_revision)
    prediction = predict(
        cell,
        config,
        memory_total_bytes=where.memory_total_bytes,
        gpu=where.gpu,
        pool=_pool(cell, config, where),
    )
    estimate = pace.start_s + pace.run_overhead_s + (0 if refused else sum(points))
    if kept and prediction.refusal is not None and cell.expect is None:
        # Kept to measure the refusal: that is what is then expected of it.
        served = prediction.refusal_type == PROMPT_ABOVE_CONTEXT
        expected = Outcome.BENCH_FAILED if served else Outcome.REFUSED
        cell = cell.model_copy(update={"expect": expected})
    return PlannedCell(cell, experiment.name, prediction, estimate)


def _pool(cell: Cell, config: dict[str, object] | None, where: Surroundings) -> Pool | str:
    """Return the estimated pool of a cell that sets no size, or why there is none."""
    server = cell.setting.server
    if config is None or server.kv_cache_memory_bytes is not None or where.device == "cpu":
        return FIRST_BOOT
    if where.gpu is None:
        return f"{FIRST_BOOT}: neither the profile nor this machine tells the GPU"
    return pool.estimate(
        server,
        config,
        describe(config),
        gpu=where.gpu,
        checkpoint=where.checkpoint(cell.setting.model.name) if where.checkpoint else None,
        boots=where.boots(cell) if where.boots else (),
    )


def _pins(sweep: Sweep, setting: Setting, where: Surroundings) -> Pins:
    revision = sweep.pins.model_revision or where.revision(setting.model.name) or UNRESOLVED
    engine = sweep.pins.engine_version or where.engine_version
    # An engine that is made here is pinned by its lock, one in an image by the image's digest.
    made_here = where.engine_lock_sha256 is not None
    if made_here and engine != where.engine_version:
        raise BadInput(
            f"sweep {sweep.name}: pins.engine_version is {engine}, but target {where.target} "
            f"offers {where.engine_version}"
        )
    digest = None if made_here else sweep.pins.image_digest or where.image_digest or UNRESOLVED
    return Pins(
        device=where.device,
        model_revision=revision,
        engine_version=engine,
        engine_lock_sha256=where.engine_lock_sha256,
        image_digest=digest,
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
