"""How a run ended, decided from three witnesses: what the run saw, the engine's log, Polyaxon.

None is enough alone. Exit codes are no evidence (vLLM's and EvalScope's are 0 after failures), the
run cannot know why it was interrupted, and Polyaxon calls a run with a typed failure `succeeded`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from warehouse.registry import Outcome, Phase


class EngineFailure(Protocol):
    """What a start-up log's failure says (see :mod:`tasks.capture`)."""

    @property
    def type(self) -> str: ...
    @property
    def phase(self) -> Phase: ...
    @property
    def outcome(self) -> Outcome: ...
    @property
    def text(self) -> str: ...


#: Why a run was signalled, by the supervisor's reason file -> outcome.
INTERRUPTIONS = {
    "stop": Outcome.STOPPED,
    "timeout": Outcome.TIMED_OUT,
    "lost": Outcome.LOST,
}

#: What the run saw and nobody else can judge better.
SEEN = {
    "partial": Outcome.PARTIAL,
    "not_ready": Outcome.NOT_READY,
    "bench_failed": Outcome.BENCH_FAILED,
    "config_mismatch": Outcome.CONFIG_MISMATCH,
    "harness_error": Outcome.LOST,  # nothing was found out about the cell: measured again
}


def decide_outcome(
    *,
    end: Mapping[str, object] | None,
    polyaxon_status: str,
    polyaxon_reason: str | None,
    failure: EngineFailure | None,
    problems: Sequence[str],
    started: bool = True,
) -> tuple[Outcome, Phase, str]:
    """Return ``(outcome, phase, message)``.

    ``end`` is the run's ``end.json`` or ``None`` where it left none; ``failure`` what its log
    says; ``problems`` what of its files did not arrive whole; ``started`` whether the run ever left
    the queue.
    """
    if end is None:
        if not started:
            outcome = _by_polyaxon(polyaxon_status, polyaxon_reason)
            return outcome, Phase.QUEUE, f"never started; Polyaxon says {polyaxon_status}"
        return _without_end(polyaxon_status, polyaxon_reason, failure, problems)
    observed = str(end.get("observed"))
    phase = _phase(end.get("phase"))
    message = str(end.get("message") or "")
    if observed == "interrupted":
        reason = end.get("reason")
        said = str(reason.get("reason")) if isinstance(reason, Mapping) else ""
        outcome = INTERRUPTIONS.get(said) or _by_polyaxon(polyaxon_status, polyaxon_reason)
        return outcome, phase, message or f"interrupted: {said or polyaxon_reason or 'no reason'}"
    if observed == "refused_or_crashed_at_start":
        if failure is None:
            return Outcome.CRASHED, phase, message or "the server ended while starting"
        return failure.outcome, failure.phase, failure.text
    if observed == "crashed":
        oom = failure is not None and failure.outcome is Outcome.OOM
        return (Outcome.OOM if oom else Outcome.CRASHED), phase, message
    if observed in SEEN:
        return SEEN[observed], phase, message
    if observed == "ok":
        if problems:
            return Outcome.PARTIAL, Phase.COLLECT, f"{len(problems)} files: {problems[0]}"
        return Outcome.OK, phase, message
    return Outcome.CRASHED, phase, f"the run says {observed!r}, which this version does not know"


def _without_end(
    status: str, reason: str | None, failure: EngineFailure | None, problems: Sequence[str]
) -> tuple[Outcome, Phase, str]:
    outcome = _by_polyaxon(status, reason)
    if outcome is Outcome.LOST and status == "succeeded":
        return Outcome.PARTIAL, Phase.COLLECT, "Polyaxon says succeeded, end.json did not arrive"
    phase = failure.phase if failure else (Phase.COLLECT if problems else Phase.START)
    return outcome, phase, f"the run left no end.json; Polyaxon says {status} ({reason or '-'})"


def _by_polyaxon(status: str, reason: str | None) -> Outcome:
    if (reason or "").lower() == "timeout":
        return Outcome.TIMED_OUT
    return Outcome.STOPPED if status in ("stopped", "stopping") else Outcome.LOST


def _phase(value: object) -> Phase:
    try:
        return Phase(str(value))
    except ValueError:
        return Phase.COLLECT
