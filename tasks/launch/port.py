"""The narrow port behind which Polyaxon stands: all that the project asks of it.

One adapter (:mod:`tasks.launch.polyaxon`) speaks it over Polyaxon's real client; everything else
knows only these names, so a change of Polyaxon's API has one place to be dealt with.
"""

from __future__ import annotations

import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from warehouse.errors import CannotFindOut

#: After one of these Polyaxon drops every further status without an error.
FINAL_STATUSES = frozenset({"succeeded", "failed", "stopped", "skipped", "upstream_failed", "done"})
#: What a run that somebody has to look after is in; a cluster's agent knows more of them than ours.
LIVE_STATUSES = (
    "created", "on_schedule", "resuming", "compiled", "queued", "scheduled", "starting", "running",
    "processing", "stopping", "retrying", "warning", "unschedulable", "unknown",
)  # fmt: skip
#: The key every run of ours carries in its meta_info. Its value must not look like a number:
#: Polyaxon's filters would compare it as one and find nothing.
META_MARK = "memsweep"


class RunUnknown(CannotFindOut):
    """The server answers, and has no run of this UUID."""


class AccessRefused(CannotFindOut):
    """The server answers, and refuses the token or what it may do (401, 403)."""


def canonical_uuid(text: str) -> str:
    """Return a UUID with dashes, as DuckDB prints it; Polyaxon leaves them out.

    Raises:
        ValueError: ``text`` is no UUID.
    """
    return str(uuid.UUID(text))


def is_final(status: str) -> bool:
    """Tell whether no further status can follow."""
    return status in FINAL_STATUSES


@dataclass(frozen=True, slots=True)
class Condition:
    """One status of a run's history; both times in ISO 8601 UTC.

    ``at`` is when the run took this status first, ``updated_at`` when that was last confirmed.
    """

    type: str
    reason: str | None = None
    message: str | None = None
    at: str | None = None
    updated_at: str | None = None

    def to_json(self) -> dict[str, str | None]:
        """Return it as ``polyaxon.json`` of a bundle holds it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RunView:
    """A run as Polyaxon tells it now; ``uuid`` in canonical form, times in ISO 8601 UTC.

    ``pending`` is what a run that does not go on by itself waits for: ``approval``, ``upload``,
    ``build`` or ``cache``.
    """

    uuid: str
    status: str
    is_final: bool
    reason: str | None = None
    message: str | None = None
    created_at: str | None = None
    meta_info: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, object] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()
    pending: str | None = None


class PolyaxonPort(Protocol):
    """What a flow and the supervisor ask of Polyaxon.

    Every method has its own deadline and repeats what may be repeated. All raise ServiceDown when
    the server does not answer in time, RunUnknown when it has no such run, AccessRefused
    when it refuses the token, CannotFindOut when it answers with something else unusable.
    """

    @property
    def host(self) -> str:
        """Address of the server, without a path."""

    @property
    def owner(self) -> str:
        """Owner of the project; always ``default`` on an embedded server."""

    @property
    def project(self) -> str:
        """Project that holds the runs."""

    @property
    def sync_s(self) -> float:
        """How long outputs may go on arriving after the end of a run, s; 0 where it wrote them."""

    def check(self) -> dict[str, str]:
        """Return what the server says about itself: host, version, distribution."""

    def ensure_project(self) -> None:
        """Create the project if it is not there."""

    def find(self, meta: dict[str, str]) -> list[RunView]:
        """Return all runs whose meta_info holds every one of these values, oldest first.

        The views of a list carry no conditions.
        """

    def active(self) -> list[RunView]:
        """Return our runs (``managed_by=cli``, marked) without a final status, oldest first."""

    def create(self, *, operation: dict[str, object], name: str, meta: dict[str, str]) -> RunView:
        """Create a run and return it; ``meta`` must be unique to it.

        A request whose answer was lost is repeated only when no run of this ``meta`` shows. Should
        both have been carried out all the same, the oldest is returned: :meth:`find` tells all of
        them, for the caller to keep that one (or the one it recorded) and stop the others.
        """

    def view(self, run_uuid: str) -> RunView:
        """Return a run with all its conditions."""

    def content(self, run_uuid: str) -> str:
        """Return the compiled operation as JSON text, as Polyaxon holds it."""

    def stop(self, run_uuid: str) -> None:
        """Ask for a run to be stopped; no error when it has ended already."""

    def log_outputs(self, run_uuid: str, outputs: dict[str, object]) -> None:
        """Merge values into a run's outputs."""

    def post_status(self, run_uuid: str, status: str, reason: str, message: str) -> None:
        """Post a status; dropped silently by Polyaxon when the run has a final one."""

    def logs(self, run_uuid: str) -> str:
        """Return the run's whole log as text, one line per line; empty when there is none."""

    def fetch(self, run_uuid: str, into: Path) -> list[str]:
        """Copy the run's outputs folder into ``into``; return the relative paths of its files.

        A run that left nothing gives an empty list: one that never came to run, or whose folder
        Polyaxon shows to be empty. Outputs that cannot be had now raise CannotFindOut.
        """
