"""A Polyaxon in memory, behind the same port as the real one."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

from tasks.launch.port import RunUnknown, RunView


@dataclass
class FakePolyaxon:
    """A Polyaxon in memory; ``script`` gives each run's further statuses, one a look.

    ``outputs`` are the folders that runs left, by UUID.
    """

    runs: dict[str, tuple[RunView, dict[str, str]]] = field(default_factory=dict)
    script: dict[str, list[str]] = field(default_factory=dict)
    die_after_create: bool = False
    stopped: list[str] = field(default_factory=list)
    outputs: dict[str, Path] = field(default_factory=dict)
    host: str = "http://127.0.0.1:1"
    owner: str = "default"
    project: str = "memsweep"
    sync_s: float = 0.0

    def find(self, meta: dict[str, str]) -> list[RunView]:
        return [
            view
            for view, own in self.runs.values()
            if all(own.get(key) == value for key, value in meta.items())
        ]

    def create(self, *, operation: dict[str, object], name: str, meta: dict[str, str]) -> RunView:
        del operation, name
        uuid = f"00000000-0000-4000-8000-{len(self.runs) + 1:012d}"
        view = RunView(uuid=uuid, status="compiled", is_final=False, meta_info=meta)
        self.runs[uuid] = (view, meta)
        if self.die_after_create:
            raise KeyboardInterrupt
        return view

    def view(self, run_uuid: str) -> RunView:
        if run_uuid not in self.runs:
            raise RunUnknown(f"run {run_uuid}: not there")
        view, meta = self.runs[run_uuid]
        left = self.script.get(run_uuid) or self.script.get("*") or []
        if left:
            status = left.pop(0)
            final = status in ("succeeded", "failed", "stopped")
            view = replace(view, status=status, is_final=final)
            self.runs[run_uuid] = (view, meta)
        return view

    def stop(self, run_uuid: str) -> None:
        if run_uuid not in self.runs:
            raise RunUnknown(f"run {run_uuid}: not there")
        self.stopped.append(run_uuid)
        self.script[run_uuid] = ["stopping", "stopped"]

    def check(self) -> dict[str, str]:
        return {}

    def ensure_project(self) -> None: ...

    def active(self) -> list[RunView]:
        return []

    def content(self, run_uuid: str) -> str:
        return "{}"

    def log_outputs(self, run_uuid: str, outputs: dict[str, object]) -> None: ...

    def post_status(self, run_uuid: str, status: str, reason: str, message: str) -> None: ...

    def logs(self, run_uuid: str) -> str:
        return ""

    def fetch(self, run_uuid: str, into: Path) -> list[str]:
        if run_uuid in self.outputs:
            shutil.copytree(self.outputs[run_uuid], into, dirs_exist_ok=True)
        return [path.name for path in into.iterdir()]
