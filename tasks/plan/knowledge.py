"""What finished runs of a round settle about cells nobody has run yet; pure.

Along some settings the engine's memory failures are monotone: a pool that holds no request at 0.80
of the device holds none at 0.70. A cell that differs from a finished one in such a setting alone
need not be started to know how it ends. Only failures that the same start gives again count (a
typed refusal, an accelerator's out of memory), never a lost, stopped or unexplained end, and none
that another outcome of the round contradicts.

Sources: shared rules of vLLM 0.27.0 as read from its code and seen in its logs; each rule below
names its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from tasks.plan.cell import Cell
from tasks.plan.layout import RefusalType
from tasks.plan.plan import PlannedCell, PlannedRun
from tasks.plan.prediction import ABOVE_MEMORY
from tasks.plan.sweep import FRONTIER_AXES
from warehouse.registry import Outcome

Direction = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class Finished:
    """How one run of the round ended; ``failure`` is its type (tasks.capture.signatures)."""

    run_uuid: str
    cell: Cell
    outcome: str
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """A failure of one of ``types`` at a value of ``axis`` also comes at every lower (higher) one.

    ``profiled`` says that memory profiling has to size the pool, because utilization does not once
    it is set in bytes. ``same_load`` says that the failure came from serving.
    """

    axis: str
    towards: Direction
    types: frozenset[str]
    why: str
    profiled: bool = False
    same_load: bool = False


#: The pool does not hold one request of max_model_len.
_SHORT = frozenset({"kv_cache_smaller_than_one_request", "max_seq_len_exceeds_kv_cache"})
#: The pool is too small for anything the engine checks at start.
_TOO_SMALL = _SHORT | {"no_memory_for_cache_blocks", "mamba_blocks_below_max_num_seqs"}
#: What comes once the pool is allocated and has to live beside it.
_BESIDE_POOL = frozenset({"oom_kv_cache_allocation", "oom_graph_capture", "oom_sampler_warmup"})

RULES = (
    # available = ceil(total x utilization) - non-KV - graph estimate (v1/worker/utils.py 414,
    # gpu_worker.py 544-565): less utilization, fewer blocks.
    Rule("gpu_memory_utilization", "lower", _TOO_SMALL, "the pool only shrinks", profiled=True),
    # blocks = bytes // bytes per block (kv_cache_utils.py 993).
    Rule("kv_cache_memory_bytes", "lower", _TOO_SMALL, "the pool only shrinks"),
    # The need of one request, a ceiling over its length, never falls (kv_cache_utils.py 751, 937),
    # and batched tokens, which profiling depends on, are the same.
    Rule("max_model_len", "higher", _SHORT, "a longer request needs no less"),
    # FULL graphs of a hybrid: max_num_seqs > blocks is refused (config/compilation.py 1498-1507);
    # more sequences leave no more blocks.
    Rule(
        "max_num_seqs",
        "higher",
        frozenset({"mamba_blocks_below_max_num_seqs"}),
        "more sequences need no fewer blocks",
    ),
    # free < ceil(total x utilization) (v1/worker/utils.py 414-420; cpu_worker.py): whatever else is
    # on the device while the slot is ours, more is asked of the same.
    Rule(
        "gpu_memory_utilization",
        "higher",
        frozenset({"free_memory_below_utilization"}),
        "only more memory is asked for",
    ),
    # CPU build: available < requested (cpu_worker.py determine_available_memory).
    Rule(
        "kv_cache_memory_bytes",
        "higher",
        frozenset({"requested_kv_cache_exceeds_memory"}),
        "only more memory is asked for",
    ),
    # The profile run passes max_num_batched_tokens tokens and samples for max_num_seqs sequences
    # before there is a pool (mem_utils.py 317-326): its peak grows with both.
    Rule("max_num_batched_tokens", "higher", frozenset({"oom_profile"}), "the peak only grows"),
    Rule("max_num_seqs", "higher", frozenset({"oom_profile"}), "the peak only grows"),
    # Graphs, the sampler's warm-up and serving live in what the pool leaves; a larger pool leaves
    # less (gpu_worker.py 544-565; with bytes given, utilization is not respected: 467-498).
    Rule("gpu_memory_utilization", "higher", _BESIDE_POOL, "the pool only grows", profiled=True),
    Rule("kv_cache_memory_bytes", "higher", _BESIDE_POOL, "the pool only grows"),
    Rule(
        "gpu_memory_utilization",
        "higher",
        frozenset({"oom_serving"}),
        "the pool only grows",
        profiled=True,
        same_load=True,
    ),
    Rule(
        "kv_cache_memory_bytes",
        "higher",
        frozenset({"oom_serving"}),
        "the pool only grows",
        same_load=True,
    ),
)

#: Axes along which nothing fails for being lower: what works at a value works below it too. The
#: others fail at both ends (too little pool, too little beside it; fewer batched tokens than a
#: block of a hybrid with prefix caching, or than one image, holds) and work between two that do.
_WORKS_BELOW = frozenset({"max_model_len", "max_num_seqs"})


@dataclass(frozen=True, slots=True)
class Known:
    """An outcome that follows from a finished run, and why in words."""

    outcome: Outcome
    reason: str
    run_uuid: str


#: A cell without the value of one axis.
_Rest = tuple[object, ...]


@dataclass(slots=True)
class Knowledge:
    """What the finished runs of one round settle; :meth:`add` each as it ends."""

    #: For each rule: rest -> the failure that reaches furthest.
    _failed: list[dict[_Rest, Finished]] = field(
        default_factory=lambda: [{} for _ in RULES], init=False
    )
    #: rest -> the runs that worked at the lowest and the highest value.
    _worked: dict[_Rest, tuple[Finished, Finished]] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, finished: Iterable[Finished]) -> Knowledge:
        """Return what ``finished`` settles."""
        made = cls()
        for one in finished:
            made.add(one)
        return made

    def add(self, one: Finished) -> None:
        """Take in how a run ended; one that settles nothing is ignored."""
        if one.outcome == Outcome.OK:
            for axis in FRONTIER_AXES:
                if _value(one.cell, axis) is not None:
                    for same_load in (False, True):
                        self._add_worked(one, axis, same_load=same_load)
        elif one.outcome in (Outcome.REFUSED, Outcome.OOM):
            for rule, failed in zip(RULES, self._failed, strict=True):
                if one.failure in rule.types and _applies(rule, one.cell):
                    _add_failed(one, rule, failed)

    def _add_worked(self, one: Finished, axis: str, *, same_load: bool) -> None:
        rest = _rest(one.cell, axis, same_load=same_load)
        low, high = self._worked.get(rest, (one, one))
        value = _of(one, axis)
        if value < _of(low, axis):
            low = one
        if value > _of(high, axis):
            high = one
        self._worked[rest] = (low, high)

    def known(self, run: PlannedRun) -> Known | None:
        """Return the outcome of a run that need not be started, or ``None``.

        A sentinel and a cell that states what it expects are always measured. That a cell works is
        only concluded where its experiment bisects a frontier: elsewhere its figures are wanted.
        """
        planned = run.planned
        if run.sentinel or planned.cell.expect is not None:
            return None
        failing = next(self._failing(planned.cell), None) if any(self._failed) else None
        if failing is None and planned.bisect is not None and planned.infeasible is None:
            return self._working(planned.cell, planned.bisect)
        return failing

    def _failing(self, cell: Cell) -> Iterator[Known]:
        for rule, failed in zip(RULES, self._failed, strict=True):
            value = _value(cell, rule.axis) if failed else None
            if value is None or not _applies(rule, cell):
                continue
            rest = _rest(cell, rule.axis, same_load=rule.same_load)
            witness = failed.get(rest)
            if witness is None or not _reaches(rule, _of(witness, rule.axis), value):
                continue
            if self._contradicted(rule, rest, _of(witness, rule.axis)):
                continue
            yield Known(
                Outcome(witness.outcome),
                f"{witness.outcome} at {rule.axis} {_shown(_of(witness, rule.axis))} already "
                f"({witness.failure}, run {witness.run_uuid}), and at {_shown(value)} {rule.why}",
                witness.run_uuid,
            )

    def _contradicted(self, rule: Rule, rest: _Rest, failed: float) -> bool:
        """Whether something worked where the rule says that it fails."""
        worked = self._worked.get(rest)
        if worked is None:
            return False
        low, high = (_of(one, rule.axis) for one in worked)
        return low <= failed if rule.towards == "lower" else high >= failed

    def _working(self, cell: Cell, axis: str) -> Known | None:
        value = _value(cell, axis)
        worked = self._worked.get(_rest(cell, axis, same_load=True)) if self._worked else None
        if value is None or worked is None:
            return None
        low, high = worked
        from_below = axis in _WORKS_BELOW
        bottom, top = 0.0 if from_below else _of(low, axis), _of(high, axis)
        if not bottom < value < top or self._fails_within(cell, axis, bottom, top):
            return None
        at, run = _shown(top), high.run_uuid
        if not from_below:
            at, run = f"{_shown(bottom)} and {at}", f"{low.run_uuid} and {run}"
        said = f"ok at {axis} {at} already (run {run}), so at {_shown(value)} too"
        return Known(Outcome.OK, said, high.run_uuid)

    def _fails_within(self, cell: Cell, axis: str, bottom: float, top: float) -> bool:
        for rule, failed in zip(RULES, self._failed, strict=True):
            if rule.axis != axis or not failed:
                continue
            witness = failed.get(_rest(cell, axis, same_load=rule.same_load))
            if witness is not None and bottom <= _of(witness, axis) <= top:
                return True
        return False


def _add_failed(one: Finished, rule: Rule, failed: dict[_Rest, Finished]) -> None:
    rest = _rest(one.cell, rule.axis, same_load=rule.same_load)
    before = failed.get(rest)
    if before is None or _reaches(rule, _of(one, rule.axis), _of(before, rule.axis)):
        failed[rest] = one


def _value(cell: Cell, axis: str) -> float | None:
    value: float | None = getattr(cell.setting.server, axis)
    return value


def _of(one: Finished, axis: str) -> float:
    return float(getattr(one.cell.setting.server, axis))


def _shown(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"


def _applies(rule: Rule, cell: Cell) -> bool:
    server = cell.setting.server
    explicit = server.kv_cache_memory_bytes is not None
    return not (rule.profiled and explicit) and _value(cell, rule.axis) is not None


def _reaches(rule: Rule, failed: float, value: float) -> bool:
    """Whether a failure at ``failed`` says how a run at ``value`` ends: beyond it, not at it."""
    return value < failed if rule.towards == "lower" else value > failed


def _rest(cell: Cell, axis: str, *, same_load: bool) -> _Rest:
    """Return everything that has to be equal: the cell without one setting, and without its load
    where a failure came before any request."""
    setting = cell.setting
    server = tuple(value for name, value in setting.server if name != axis)
    load = setting.load if same_load else None
    return (axis, same_load, cell.harness, cell.pins, setting.model.name, server, load)


# What could be left out, before anything has run

#: How a run is guessed to end: outcome and type of failure.
Guess = tuple[Outcome, str | None]

_PREDICTED = {
    RefusalType.NO_MEMORY.value: "no_memory_for_cache_blocks",
    RefusalType.CONTEXT_DOES_NOT_FIT.value: "kv_cache_smaller_than_one_request",
    RefusalType.SEQUENCES_ABOVE_BLOCKS.value: "mamba_blocks_below_max_num_seqs",
    ABOVE_MEMORY: "requested_kv_cache_exceeds_memory",
}


def as_predicted(planned: PlannedCell) -> Guess:
    """Guess that a run ends as its prediction says, well where it says nothing."""
    if planned.infeasible is None:
        return planned.cell.expect or Outcome.OK, None
    return Outcome.REFUSED, _PREDICTED.get(planned.prediction.refusal_type or "")


def at_worst(planned: PlannedCell) -> Guess:
    """Guess that whatever the prediction leaves open is refused for want of KV memory."""
    open_ = planned.prediction.may_be_refused or not planned.prediction.known
    if planned.cell.expect is None and planned.infeasible is None and open_:
        return Outcome.REFUSED, "kv_cache_smaller_than_one_request"
    return as_predicted(planned)


def foreseen(runs: Iterable[PlannedRun], guess: Callable[[PlannedCell], Guess]) -> list[PlannedRun]:
    """Return the runs that are started, in order, where each ends as ``guess`` says."""
    knowledge, started = Knowledge(), []
    for run in runs:
        if knowledge.known(run) is None:
            outcome, failure = guess(run.planned)
            knowledge.add(Finished("a run before it", run.cell, outcome.value, failure))
            started.append(run)
    return started
