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
from tasks.plan.model import ModelDescription, describe
from tasks.plan.order import SENTINEL_REPEATS, around, interleaved
from tasks.plan.prediction import FIRST_BOOT, PROMPT_ABOVE_CONTEXT, Prediction, predict
from tasks.plan.sizing_lint import Finding
from tasks.plan.sweep import NO_SENTINEL, Experiment, Sweep
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


#: Size of a bundle: measured on the embedded default. A history of own bundles corrects it
#: (tasks/plan/spending.py).
RUN_BYTES = 1_000_000
REQUEST_BYTES = 45_000


@dataclass(frozen=True, slots=True)
class PlannedCell:
    """One cell with its prediction and, where it cannot work, the reason."""

    cell: Cell
    experiment: str
    prediction: Prediction
    estimate_s: float
    #: Share of ``estimate_s`` that one server start costs, load apart.
    boot_s: float
    #: Axis whose frontier the cell's experiment bisects.
    bisect: str | None = None

    @property
    def infeasible(self) -> str | None:
        """Why the cell cannot work, by the prediction; ``None`` where nothing speaks against it."""
        return self.prediction.refusal

    @property
    def skipped(self) -> bool:
        """Whether ``run`` leaves the cell out (its outcome is then ``infeasible``)."""
        return self.infeasible is not None and self.cell.expect is None

    @property
    def disk_bytes(self) -> int:
        """Estimated size of one run's bundle."""
        load = self.cell.setting.load
        return RUN_BYTES + REQUEST_BYTES * sum(point.number + point.warmup for point in load)

    @property
    def gpus(self) -> int:
        """GPUs a run of the cell holds; 0 on a CPU."""
        server = self.cell.setting.server
        on_gpu = self.cell.pins.device == "cuda"
        return server.tensor_parallel_size * server.pipeline_parallel_size if on_gpu else 0

    def as_expected(self, outcome: str) -> bool:
        """Return whether an outcome counts as success for this cell.

        What is skipped is expected to be infeasible or, where it was measured all the same, to fail
        as predicted.
        """
        if self.skipped:
            return outcome in (Outcome.INFEASIBLE.value, _failing(self.prediction).value)
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
            description=self.prediction.description,
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
    #: Whether it is one of the runs that show the drift of the machine over a round.
    sentinel: bool = False

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
    #: Key of the cell that is measured at start, middle and end.
    sentinel: str | None = None

    def runs(self, seed: int | None = None) -> Iterator[PlannedRun]:
        """Yield every run that is to be started, in order (tasks/plan/order.py).

        Repeats are interleaved, cells within each in the file's order or shuffled by ``seed``,
        unless the sweep states that its order is meant; the sentinel has at least three repeats, at
        start, middle and end.
        """
        seed = None if self.sweep.order == "stated" else seed
        cells = {planned.cell.cell_key: planned for planned in self.cells if not planned.skipped}
        repeats = self.sweep.repeats
        others = [key for key in cells if key != self.sentinel]
        turns = interleaved(others, repeats, seed=seed, lines=self._lines())
        if self.sentinel is not None:
            turns = [*around(turns, self.sentinel, max(repeats, SENTINEL_REPEATS))]
        for key, repeat in turns:
            yield PlannedRun(cells[key], repeat, sentinel=key == self.sentinel)

    def skipped(self) -> Iterator[PlannedRun]:
        """Yield every run that the prediction refuses and that is left out."""
        for repeat in range(1, self.sweep.repeats + 1):
            for planned in self.cells:
                if planned.skipped:
                    yield PlannedRun(planned, repeat)

    def _lines(self) -> list[list[str]]:
        """Return the keys of each line of cells along a bisected axis, by rising value."""
        lines: dict[tuple[object, ...], list[tuple[float, str]]] = {}
        for planned in self.cells:
            key, server = planned.cell.cell_key, planned.cell.setting.server
            if planned.bisect is None or planned.skipped or key == self.sentinel:
                continue
            rest = tuple(value for name, value in server if name != planned.bisect)
            line = lines.setdefault((planned.experiment, *rest), [])
            line.append((getattr(server, planned.bisect), key))
        return [[key for _, key in sorted(line)] for line in lines.values()]

    @property
    def boots(self) -> int:
        """Server starts: one a run, because load points share their cell's server."""
        return sum(1 for _ in self.runs())

    @property
    def estimate_s(self) -> float:
        """Estimated wall time in seconds, on the target's slots."""
        return sum(run.planned.estimate_s for run in self.runs()) / self.surroundings.slots

    @property
    def unresolved(self) -> list[str]:
        """Every pin that is not resolved, as ``cell label: pin``."""
        return [f"{p.cell.label}: {name}" for p in self.cells for name in p.cell.pins.unresolved]


def make_plan(
    sweep: Sweep,
    surroundings: Surroundings,
    *,
    keep_infeasible: bool = False,
    night: bool = False,
) -> Plan:
    """Expand ``sweep`` for a target; ``keep_infeasible`` measures even what cannot work.

    A ``night`` has a sentinel even where the sweep states none.

    Raises :class:`BadInput` where a setting cannot be, where two cells are the same, where the
    model's architecture is unknown, or where the sentinel that is stated can be none.
    """
    known: _Known = {}
    cells = [
        _planned(sweep, experiment, label, setting, surroundings, known, kept=keep_infeasible)
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
    sentinel = _sentinel(sweep, cells, night=night)
    return Plan(sweep, surroundings, tuple(cells), sentinel)


def _sentinel(sweep: Sweep, cells: list[PlannedCell], *, night: bool) -> str | None:
    """Return the key of the sentinel: the one stated, else a night's first cell that can work."""
    stated = sweep.sentinel
    if stated == NO_SENTINEL or (stated is None and not night):
        return None
    named = [p for p in cells if stated in (None, p.cell.label, p.experiment)]
    if not named:
        raise BadInput(
            f"sweep {sweep.name}: sentinel {stated!r} is no cell and no experiment, wanted a "
            f"label like {cells[0].cell.label!r}, or none"
        )
    for planned in named:
        if planned.infeasible is None and planned.cell.expect in (None, Outcome.OK):
            return planned.cell.cell_key
    if stated is None:
        return None
    why = named[0].infeasible or f"it is expected to end as {named[0].cell.expect}"
    raise BadInput(
        f"sweep {sweep.name}: sentinel {stated!r} cannot show a drift: {why}; name another cell, "
        "or state sentinel: none"
    )


def _planned(
    sweep: Sweep,
    experiment: Experiment,
    label: str,
    setting: Setting,
    where: Surroundings,
    known: _Known,
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
    config, description = _model(where, setting.model.name, pins.model_revision, known)
    prediction = predict(
        cell,
        config,
        memory_total_bytes=where.memory_total_bytes,
        gpu=where.gpu,
        pool=_pool(cell, config, description, where),
        description=description,
    )
    boot = pace.start_s + pace.run_overhead_s
    estimate = boot + (0 if refused else sum(points))
    if kept and prediction.refusal is not None and cell.expect is None:
        # Kept to measure the refusal: that is what is then expected of it.
        cell = cell.model_copy(update={"expect": _failing(prediction)})
    return PlannedCell(cell, experiment.name, prediction, estimate, boot, experiment.bisect)


def _failing(prediction: Prediction) -> Outcome:
    """Return how a cell ends that is measured although its prediction refuses it."""
    served = prediction.refusal_type == PROMPT_ABOVE_CONTEXT
    return Outcome.BENCH_FAILED if served else Outcome.REFUSED


#: Config and description of a model by name and revision, each read once a plan.
_Known = dict[tuple[str, str], tuple[dict[str, object] | None, ModelDescription | None]]


def _model(
    where: Surroundings, name: str, revision: str, known: _Known
) -> tuple[dict[str, object] | None, ModelDescription | None]:
    if (name, revision) not in known:
        config = where.config(name, revision)
        known[name, revision] = config, None if config is None else describe(config)
    return known[name, revision]


def _pool(
    cell: Cell,
    config: dict[str, object] | None,
    description: ModelDescription | None,
    where: Surroundings,
) -> Pool | str:
    """Return the estimated pool of a cell that sets no size, or why there is none."""
    server = cell.setting.server
    if (
        config is None
        or description is None
        or server.kv_cache_memory_bytes is not None
        or where.device == "cpu"
    ):
        return FIRST_BOOT
    if where.gpu is None:
        return f"{FIRST_BOOT}: neither the profile nor this machine tells the GPU"
    return pool.estimate(
        server,
        config,
        description,
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
