"""An outcome is decided from the run, the engine's log and Polyaxon; none is enough alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tasks.outcome import decide_outcome
from warehouse.registry import Outcome, Phase


@dataclass(frozen=True)
class Said:
    type: str
    phase: Phase
    outcome: Outcome
    text: str


REFUSED = Said("kv", Phase.KV_CACHE, Outcome.REFUSED, "Available memory on node 0 ...")
OOM = Said("oom", Phase.BENCH, Outcome.OOM, "CUDA out of memory")


def end(
    observed: str, phase: str = "stop", reason: dict[str, object] | None = None
) -> dict[str, object]:
    return {"observed": observed, "phase": phase, "reason": reason, "message": ""}


@pytest.mark.parametrize(
    ("seen", "status", "reason", "failure", "problems", "outcome"),
    [
        (end("ok"), "succeeded", None, None, [], Outcome.OK),
        (end("ok"), "succeeded", None, None, ["server.log: gone"], Outcome.PARTIAL),
        (end("partial"), "succeeded", None, None, [], Outcome.PARTIAL),
        (end("refused_or_crashed_at_start"), "succeeded", None, REFUSED, [], Outcome.REFUSED),
        (end("refused_or_crashed_at_start"), "succeeded", None, OOM, [], Outcome.OOM),
        (end("refused_or_crashed_at_start"), "succeeded", None, None, [], Outcome.CRASHED),
        (end("crashed", "bench"), "succeeded", None, OOM, [], Outcome.OOM),
        (end("crashed", "bench"), "succeeded", None, REFUSED, [], Outcome.CRASHED),
        (end("interrupted", reason={"reason": "stop"}), "stopped", None, None, [], Outcome.STOPPED),
        (
            end("interrupted", reason={"reason": "timeout"}),
            "failed",
            None,
            None,
            [],
            Outcome.TIMED_OUT,
        ),
        (end("interrupted", reason={"reason": "lost"}), "failed", None, None, [], Outcome.LOST),
        (end("interrupted"), "stopped", None, None, [], Outcome.STOPPED),
        (end("interrupted"), "failed", "Timeout", None, [], Outcome.TIMED_OUT),
        (end("interrupted"), "failed", None, None, [], Outcome.LOST),
        (end("bench_failed"), "succeeded", None, None, [], Outcome.BENCH_FAILED),
        (end("not_ready"), "succeeded", None, None, [], Outcome.NOT_READY),
        (end("config_mismatch"), "succeeded", None, None, [], Outcome.CONFIG_MISMATCH),
        (end("harness_error"), "failed", None, None, [], Outcome.LOST),
        (end("a new word"), "succeeded", None, None, [], Outcome.CRASHED),
        (None, "stopped", None, None, [], Outcome.STOPPED),
        (None, "failed", "Timeout", None, [], Outcome.TIMED_OUT),
        (None, "failed", "Lost", None, [], Outcome.LOST),
        (None, "succeeded", None, None, [], Outcome.PARTIAL),
    ],
)
def test_outcomes(
    seen: dict[str, object] | None,
    status: str,
    reason: str | None,
    failure: Said | None,
    problems: list[str],
    outcome: Outcome,
) -> None:
    got, phase, message = decide_outcome(
        end=seen,
        polyaxon_status=status,
        polyaxon_reason=reason,
        failure=failure,
        problems=problems,
    )
    assert got is outcome
    assert isinstance(phase, Phase)
    assert isinstance(message, str)


def test_a_refusal_keeps_the_engines_phase_and_words() -> None:
    _, phase, message = decide_outcome(
        end=end("refused_or_crashed_at_start", "start"),
        polyaxon_status="succeeded",
        polyaxon_reason=None,
        failure=REFUSED,
        problems=[],
    )
    assert phase is Phase.KV_CACHE
    assert message.startswith("Available memory on node 0")


def test_a_run_that_never_started_ended_in_the_queue() -> None:
    outcome, phase, _ = decide_outcome(
        end=None,
        polyaxon_status="stopped",
        polyaxon_reason=None,
        failure=None,
        problems=[],
        started=False,
    )
    assert (outcome, phase) == (Outcome.STOPPED, Phase.QUEUE)
