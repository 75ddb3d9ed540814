"""What may be tried again: by Polyaxon's history, the run's own end and the engine's log."""

from __future__ import annotations

import pytest

from tasks.causes import transient_cause
from tasks.launch.port import Condition, RunView

Told = tuple[str, str | None, str | None]
BUSY = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."
PULL = "failed to pull and unpack image: dial tcp 10.0.0.1:443: i/o timeout"
GONE = "rpc error: code = NotFound: registry/engine@sha256:00: not found"


def view(status: str, *conditions: Told) -> RunView:
    return RunView(
        uuid="00000000-0000-0000-0000-000000000001",
        status=status,
        is_final=True,
        conditions=tuple(Condition(*one) for one in conditions),
    )


RAN: Told = ("running", None, None)


@pytest.mark.parametrize(
    ("status", "conditions", "cause"),
    [
        ("failed", [("warning", "ErrImagePull", PULL)], "image_pull"),
        ("failed", [("warning", "ImagePullBackOff", "Back-off pulling image")], "image_pull"),
        ("failed", [("unschedulable", "Unschedulable", BUSY)], "no_node_free"),
        ("stopped", [("unschedulable", None, BUSY), ("stopped", None, None)], "no_node_free"),
        ("failed", [RAN, ("failed", "NodeLost", None)], "node_lost"),
        ("failed", [RAN, ("failed", "PodFailed", "DisruptionTarget: NodeShutdown")], "node_lost"),
        (
            "failed",
            [RAN, ("failed", "Terminated", "terminated in response to imminent node shutdown.")],
            "node_lost",
        ),
        ("failed", [RAN, ("failed", "DeletionByTaintManager", None)], "node_lost"),
        ("failed", [RAN, ("failed", "Evicted", "The node was low on resource: memory")], "evicted"),
        ("failed", [RAN, ("failed", "PreemptionByScheduler", None)], "preempted"),
        ("failed", [("warning", "NetworkNotReady", "cni plugin not initialized")], "network"),
        ("failed", [RAN, ("failed", "Lost", "ended while no supervisor watched")], "lost"),
    ],
)
def test_a_cause_outside_the_cell_is_named(status: str, conditions: list[Told], cause: str) -> None:
    assert transient_cause(view(status, *conditions), None, None) == cause


@pytest.mark.parametrize(
    ("status", "conditions"),
    [
        # The image is not there: told once, then only as the back-off.
        ("failed", [("warning", "ErrImagePull", GONE), ("warning", "ImagePullBackOff", "wait")]),
        ("failed", [("warning", "ErrImagePull", "401 Unauthorized")]),
        ("failed", [("warning", "InvalidImageName", None)]),
        # No node will ever match.
        ("failed", [("unschedulable", "Unschedulable", "0/4: didn't match node selector")]),
        # The pod's own doing.
        ("failed", [RAN, ("failed", "Evicted", "Usage of EmptyDir exceeds the limit 1Gi")]),
        ("failed", [RAN, ("failed", "OOMKilled", None), ("failed", "Evicted", None)]),
        ("failed", [RAN, ("failed", "DeadlineExceeded", None)]),
        ("failed", [RAN, ("failed", "Timeout", "did not end within 60 s")]),
        ("failed", [RAN, ("failed", "ExitCode", "ended with exit code 1")]),
        ("failed", [RAN, ("failed", "Error", None)]),
        # Overcome long before the end.
        ("failed", [("warning", "ErrImagePull", PULL), RAN, ("failed", "Error", None)]),
        ("failed", [("unschedulable", None, BUSY), RAN, ("failed", "Error", None)]),
        ("failed", [RAN, ("warning", "Preempted", None), RAN, ("failed", "Error", None)]),
        # Somebody asked for it.
        ("stopped", [RAN, ("stopping", "Evicted", None)]),
        ("failed", []),
    ],
)
def test_what_would_fail_again_is_none(status: str, conditions: list[Told]) -> None:
    assert transient_cause(view(status, *conditions), None, None) is None


EVICTED = view("failed", RAN, ("failed", "Evicted", None))


@pytest.mark.parametrize(
    "observed", ["ok", "crashed", "refused_or_crashed_at_start", "not_ready", "bench_failed"]
)
def test_a_run_that_came_to_its_own_end_is_not_tried_again(observed: str) -> None:
    assert transient_cause(EVICTED, {"observed": observed}, None) is None


def test_an_interrupted_run_is_explained_by_polyaxon_unless_it_knows_why() -> None:
    assert transient_cause(EVICTED, {"observed": "interrupted"}, None) == "evicted"
    for why in ("stop", "timeout"):
        end = {"observed": "interrupted", "reason": {"reason": why}}
        assert transient_cause(EVICTED, end, None) is None


@pytest.mark.parametrize(
    ("failure", "text", "cause"),
    [
        ("hub_unreachable", "ConnectionError: ... huggingface.co", "hub_unreachable"),
        ("hub_unreachable", "OfflineModeIsEnabled: Cannot reach the hub", None),
        ("port_in_use", "OSError: Address already in use", "port_in_use"),
        ("oom_profile", "CUDA out of memory", None),
        ("kv_cache_smaller_than_one_request", "", None),
        ("bad_flag", "", None),
        ("model_not_found", "", None),
        ("gated_model_no_access", "", None),
    ],
)
def test_the_engines_log_decides_before_polyaxon(
    failure: str, text: str, cause: str | None
) -> None:
    assert transient_cause(EVICTED, {"observed": "crashed"}, failure, text) == cause


def test_no_line_of_a_log_undoes_a_good_end_or_one_that_was_asked_for() -> None:
    text = "ConnectionError: ... huggingface.co"
    assert transient_cause(EVICTED, {"observed": "ok"}, "hub_unreachable", text) is None
    for why in ("stop", "timeout"):
        end = {"observed": "interrupted", "reason": {"reason": why}}
        assert transient_cause(EVICTED, end, "hub_unreachable", text) is None


def test_what_a_signal_leaves_in_the_log_explains_nothing() -> None:
    end = {"observed": "interrupted"}
    assert transient_cause(EVICTED, end, "terminated_by_signal") == "evicted"
    assert transient_cause(EVICTED, end, "oom_serving") is None
