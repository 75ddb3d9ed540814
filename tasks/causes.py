"""Causes outside the cell: after one of these the same cell may well come out differently.

A further attempt costs a boot and GPU time, so only what has nothing to do with the cell is named
here. What would fail again in the same way (out of memory, a refused setting, a missing model, no
access) never is, even where Kubernetes uses the same word for both: there the message decides.

| cause | Polyaxon's or Kubernetes' reason | not when |
|---|---|---|
| `image_pull` | ErrImagePull, ImagePullBackOff, RegistryUnavailable | it is not there or not ours |
| `no_node_free` | Unschedulable, FailedScheduling | no resource is called insufficient |
| `node_lost` | NodeLost, NodeShutdown, NodeNotReady, NodeUnreachable, pod collection, taints | |
| `evicted` | Evicted, EvictionByEvictionAPI, TerminationByKubelet | the pod exceeded a limit |
| `preempted` | Preempted, Preempting, PreemptionByScheduler | |
| `network` | NetworkNotReady, FailedCreatePodSandBox | |
| `lost` | Lost: the local supervisor's, for a run that ended while nobody watched | |
| `hub_unreachable` | the engine's log: a download from the hub failed | it was to be offline |
| `port_in_use` | the engine's log: another process took the port between choice and start | |

DeadlineExceeded, Timeout, OOMKilled, Error, BackOff, CrashLoopBackOff, CreateContainerConfigError
and InvalidImageName are not in it. Sources: Kubernetes' documentation of pod disruptions, of node
shutdown and of images. What a Polyaxon agent passes on of these was not seen on a cluster.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tasks.launch.port import Condition, RunView


@dataclass(frozen=True, slots=True)
class _Cause:
    """``never`` and ``only`` look at messages: the same reason may stand for what stays wrong."""

    name: str
    reasons: frozenset[str]
    never: re.Pattern[str] | None = None
    only: re.Pattern[str] | None = None


_CAUSES = (
    _Cause(
        "image_pull",
        frozenset({"ErrImagePull", "ImagePullBackOff", "RegistryUnavailable"}),
        never=re.compile(
            r"(?i)not found|manifest unknown|unauthorized|denied|forbidden|no match for platform"
            r"|\b40[134]\b|authentication required|invalid reference"
        ),
    ),
    _Cause(
        "no_node_free",
        frozenset({"Unschedulable", "FailedScheduling"}),
        only=re.compile(r"(?i)insufficient"),
    ),
    _Cause(
        "node_lost",
        frozenset(
            {
                "NodeLost", "NodeShutdown", "NodeNotReady", "NodeUnreachable", "PodGC",
                "DeletionByPodGC", "DeletionByTaintManager", "TaintManagerEviction",
            }
        ),
    ),
    _Cause("node_lost", frozenset({"Terminated"}), only=re.compile(r"imminent node shutdown")),
    _Cause(
        "evicted",
        frozenset({"Evicted", "EvictionByEvictionAPI", "TerminationByKubelet"}),
        never=re.compile(r"(?i)exceed"),
    ),
    _Cause("preempted", frozenset({"Preempted", "Preempting", "PreemptionByScheduler"})),
    _Cause("network", frozenset({"NetworkNotReady", "FailedCreatePodSandBox"})),
    _Cause("lost", frozenset({"Lost"})),
)  # fmt: skip
#: Of no account for a run that ran after it.
_BEFORE_START = frozenset({"image_pull", "no_node_free"})
#: These say why a run ended; nothing else is to be looked for.
_SETTLED = frozenset({"Timeout", "DeadlineExceeded", "OOMKilled"})
#: What a run saw that did not come to an end of its own: Polyaxon's history may tell why.
_UNDECIDED = frozenset({"interrupted", "harness_error"})
#: Failures in the log that a signal to the whole pod leaves too.
_CONSEQUENCES = frozenset({"terminated_by_signal", "engine_dead", "process_died", "unknown"})
_OFFLINE = re.compile(r"(?i)offline")
_WORD = re.compile(r"[A-Z][A-Za-z]+")


def transient_cause(
    view: RunView,
    end: Mapping[str, object] | None,
    failure_type: str | None,
    failure_text: str = "",
) -> str | None:
    """Return the cause outside the cell that ended a run, by the table above, or ``None``.

    ``view`` is the run with all its conditions; ``end`` its ``end.json``; ``failure_type`` and
    ``failure_text`` are type and line of the failure in the engine's log
    (:class:`tasks.capture.failures.Failure`).

    Whoever asks has to know that nobody asked for a stop: a run that was stopped because no node
    was free for too long looks the same.
    """
    if end is not None and (end.get("observed") == "ok" or _was_told_to_end(end)):
        return None
    if failure_type is not None and failure_type not in _CONSEQUENCES:
        return _of_the_log(failure_type, failure_text)
    if end is not None and str(end.get("observed")) not in _UNDECIDED:
        return None
    ran, conditions = _since_running(view)
    if any(_SETTLED & _words(one) for one in conditions) or (ran and view.status == "stopped"):
        return None
    found = [
        (place, cause.name)
        for cause in _CAUSES
        if (place := _place(cause, conditions)) is not None
        and not (ran and cause.name in _BEFORE_START)
    ]
    return max(found)[1] if found else None


def _of_the_log(failure_type: str, text: str) -> str | None:
    if failure_type == "hub_unreachable":
        return None if _OFFLINE.search(text) else failure_type
    return failure_type if failure_type == "port_in_use" else None


def _was_told_to_end(end: Mapping[str, object]) -> bool:
    reason = end.get("reason")
    return isinstance(reason, Mapping) and reason.get("reason") in ("stop", "timeout")


def _since_running(view: RunView) -> tuple[bool, tuple[Condition, ...]]:
    """Return whether the run ran, and its conditions since it last began to."""
    running = [place for place, one in enumerate(view.conditions) if one.type == "running"]
    return bool(running), view.conditions[running[-1] if running else 0 :]


def _words(condition: Condition) -> frozenset[str]:
    """Return the words of reason and message that may be a reason; a status word counts too."""
    said = f"{condition.reason or ''} {condition.message or ''}"
    status = {"Unschedulable"} if condition.type == "unschedulable" else set()
    return frozenset(_WORD.findall(said)) | status


def _place(cause: _Cause, conditions: tuple[Condition, ...]) -> int | None:
    """Return where the conditions speak of a cause last; ``None`` when they do not."""
    own = [place for place, one in enumerate(conditions) if _words(one) & cause.reasons]
    if not own:
        return None
    # A pull that cannot work is told once with its cause, and then only as "Back-off".
    if cause.never and any(cause.never.search(conditions[at].message or "") for at in own):
        return None
    if cause.only and not cause.only.search(conditions[own[-1]].message or ""):
        return None
    return own[-1]
