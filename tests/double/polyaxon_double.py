"""A Polyaxon of a few dictionaries, behind the port: for tests of who posts what, and when."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

from tasks.launch.port import LIVE_STATUSES, RunUnknown, RunView, is_final
from warehouse.errors import ServiceDown


class PolyaxonDouble:
    """Keeps runs in memory, drops statuses after a final one, and can be down."""

    host = "http://double"
    owner = "default"
    project = "memsweep"
    sync_s = 0.0

    def __init__(self) -> None:
        self.is_down = False
        self.statuses: dict[str, list[tuple[str, str, str]]] = {}
        self.contents: dict[str, str] = {}
        self.outputs: dict[str, dict[str, object]] = {}
        self.metas: dict[str, dict[str, str]] = {}
        self.dropped: list[tuple[str, str]] = []

    def add(self, content: dict[str, object], run_uuid: str, status: str = "compiled") -> str:
        """Add a run as if a flow had created it."""
        self.contents[run_uuid] = json.dumps(content)
        self.outputs[run_uuid] = {}
        self.statuses[run_uuid] = [(status, "", "")]
        return run_uuid

    def status(self, run_uuid: str) -> str:
        """Return a run's status now."""
        return self.statuses[run_uuid][-1][0]

    def names(self, run_uuid: str) -> list[str]:
        """Return all statuses of a run in order."""
        return [name for name, _, _ in self.statuses[run_uuid]]

    def check(self) -> dict[str, str]:
        return {"host": self.host, "version": "0", "distribution": "double"}

    def ensure_project(self) -> None:
        self._answer()

    def find(self, meta: dict[str, str]) -> list[RunView]:
        self._answer()
        return [self.view(one) for one, held in self.metas.items() if meta.items() <= held.items()]

    def active(self) -> list[RunView]:
        self._answer()
        return [self.view(one) for one in self.statuses if self.status(one) in LIVE_STATUSES]

    def create(self, *, operation: dict[str, object], name: str, meta: dict[str, str]) -> RunView:
        run_uuid = str(uuid.uuid4())
        self.metas[run_uuid] = {**meta, "name": name}
        return self.view(self.add(operation, run_uuid))

    def view(self, run_uuid: str) -> RunView:
        self._answer()
        if run_uuid not in self.statuses:
            raise RunUnknown(run_uuid)
        status, reason, message = self.statuses[run_uuid][-1]
        meta = self.metas.get(run_uuid, {})
        return RunView(
            run_uuid, status, is_final(status), reason, message, None, meta, self.outputs[run_uuid]
        )

    def content(self, run_uuid: str) -> str:
        self._answer()
        return self.contents[run_uuid]

    def stop(self, run_uuid: str) -> None:
        self._answer()
        if self.status(run_uuid) == "compiled":
            self.statuses[run_uuid].append(("stopped", "", ""))
        elif not is_final(self.status(run_uuid)):
            self.statuses[run_uuid].append(("stopping", "", ""))

    def log_outputs(self, run_uuid: str, outputs: dict[str, object]) -> None:
        self._answer()
        self.outputs[run_uuid].update(outputs)

    def post_status(self, run_uuid: str, status: str, reason: str, message: str) -> None:
        self._answer()
        if run_uuid not in self.statuses:
            raise RunUnknown(run_uuid)
        if is_final(self.status(run_uuid)):
            self.dropped.append((run_uuid, status))
            return
        self.statuses[run_uuid].append((status, reason, message))

    def logs(self, run_uuid: str) -> str:
        raise AssertionError("a supervisor does not ask for it")

    def fetch(self, run_uuid: str, into: Path) -> list[str]:
        raise AssertionError("a supervisor does not ask for it")

    def _answer(self) -> None:
        if self.is_down:
            raise ServiceDown("the double is down")
