"""The command line with faults at exact moments: ``python -m testkit.faulty_flow PLAN run SWEEP``.

Nothing in the product knows of it: the functions that make a step durable are wrapped from outside
before the flow's module is imported, and at a chosen moment one process is killed by its PID, once.
Every cell takes the next fault of the list as it begins, so faults come in the list's order,
whatever the order of the cells. A cell may miss its moment: a neighbour's fault kills the flow just
before it, and the next flow does that step for all bundles at once. Its fault is then the next one
taken, so a sweep needs some cells to spare. What was taken and done is kept as files that outlive
the process.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks import files, processes
from tasks.home import Home
from tasks.launch.supervisor import Folder

#: How long a victim that is just being started is waited for.
VICTIM_S = 120.0


@dataclass(frozen=True, slots=True)
class Fault:
    """Kill a process of this kind at this side (before, during, after) of this step."""

    step: str
    side: str
    kind: str

    @property
    def name(self) -> str:
        """Name of the fault, as tests print it."""
        what = "full" if self.kind == "disk" else "killed"
        return f"{self.kind} {what} {self.side} {self.step}"


class Faults:
    """The list of faults with what was taken and done of it, in a folder."""

    def __init__(self, folder: Path, home: Home, faults: list[Fault]) -> None:
        self.folder = folder
        self.home = home
        self.faults = faults
        self._lock = threading.Lock()

    @classmethod
    def load(cls, path: Path) -> Faults:
        """Read what :meth:`write` wrote."""
        value = json.loads(path.read_text(encoding="utf-8"))
        faults = [Fault(**one) for one in value["faults"]]
        return cls(path.parent, Home(Path(value["home"])), faults)

    def write(self) -> Path:
        """Write the list for child processes and return its file."""
        faults = [{"step": f.step, "side": f.side, "kind": f.kind} for f in self.faults]
        path = self.folder / "faults.json"
        files.write_json(path, {"home": str(self.home.root), "faults": faults})
        return path

    def of(self, cell_key: str) -> Fault | None:
        """Return the cell's fault; a cell seen for the first time takes the next one."""
        with self._lock:
            taken = self._taken()
            if cell_key not in taken:
                free = set(range(len(self.faults))) - set(taken.values())
                taken[cell_key] = min(free, default=None)
                files.write_json(self.folder / "taken.json", taken)
        number = taken[cell_key]
        return None if number is None else self.faults[number]

    def over(self, cell_keys: list[str]) -> None:
        """Take back the faults that these cells, whose last step is done, did not do."""
        with self._lock:
            taken = self._taken()
            missed = [key for key in cell_keys if taken.get(key) is not None]
            missed = [key for key in missed if not self._done_file(key).exists()]
            if missed:
                files.write_json(self.folder / "taken.json", {**taken, **dict.fromkeys(missed)})

    def _taken(self) -> dict[str, int | None]:
        """Return the number of each cell's fault; ``None`` for a cell without one."""
        return files.read_json(self.folder / "taken.json") or {}

    def _done_file(self, cell_key: str) -> Path:
        return self.folder / f"{cell_key}.done.json"

    def done(self) -> dict[str, dict[str, Any]]:
        """Return what was killed, by the cell's key."""
        found = (files.read_json(path) for path in self.folder.glob("*.done.json"))
        return {one["cell_key"]: one for one in found if one}

    def moment(self, step: str, side: str, cell_key: str | None, run_uuid: str | None) -> None:
        """Do the cell's fault if this is its moment and it was not done yet."""
        if cell_key is None:
            return
        fault = self.of(cell_key)
        if fault is None or (fault.step, fault.side) != (step, side):
            return
        done = self._done_file(cell_key)
        with self._lock:
            if done.exists():
                return
            victim = None if fault.kind == "disk" else self._victim(fault.kind, run_uuid)
            files.write_json(
                done,
                {"cell_key": cell_key, "fault": fault.name, "pid": victim, "run_uuid": run_uuid},
            )
        if fault.kind == "disk":
            fill(self.home)
        elif victim is not None:
            os.kill(victim, signal.SIGKILL)

    def _victim(self, kind: str, run_uuid: str | None) -> int | None:
        """Return the PID to kill, waiting for one that is just being started."""
        if kind == "flow":
            return os.getpid()
        until = time.monotonic() + VICTIM_S
        while time.monotonic() < until:
            record = (
                files.read_json(Folder(self.home).record(run_uuid))
                if kind == "run" and run_uuid
                else files.read_json(self.home.services / kind / "state.json")
            )
            if record and processes.alive(record["pid"], record["start_ticks"]):
                return int(record["pid"])
            time.sleep(0.01)
        return None


#: Folders of the state folder that a test may have mounted as small file systems of its own.
SMALL = ("rounds", "bundles", "warehouse")
BALLAST = "ballast"


def fill(home: Home) -> None:
    """Leave no space for what the flow writes.

    In file systems of the test's own where it could mount some, else every file that this process
    opens there for writing is refused as the kernel would.
    """
    mounted = [home.root / name for name in SMALL if (home.root / name).is_mount()]
    for folder in mounted:
        with (folder / BALLAST).open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)):
                        pass
    if mounted:
        return
    full = tuple(f"{home.root / name}{os.sep}" for name in SMALL)
    writing = os.O_WRONLY | os.O_RDWR

    def refuse(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(full):
            flags = arguments[2]
            if isinstance(flags, int) and flags & writing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))

    sys.addaudithook(refuse)


def install(faults: Faults) -> None:
    """Wrap the functions that make a step durable. Before flows.sweep is imported."""
    import warehouse.publish
    import warehouse.store
    from tasks import bundle, collect, measure, record
    from tasks.launch.polyaxon import PolyaxonClient
    from tasks.rounds import Round

    ingesting = threading.local()

    def wrap(
        owner: Any, name: str, which: Callable[..., tuple[str, str | None, str | None]]
    ) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            step, cell_key, run_uuid = which(*arguments, **named)
            faults.moment(step, "before", cell_key, run_uuid)
            result = original(*arguments, **named)
            if step == "create":
                run_uuid = result.uuid
            faults.moment(step, "after", cell_key, run_uuid)
            return result

        setattr(owner, name, wrapped)

    def saved(_round: Any, state: Any) -> tuple[str, str | None, str | None]:
        if state.manifest_sha256 is not None:
            return "result", state.cell_key, state.run_uuid
        return ("intent" if state.run_uuid is None else "UUID"), state.cell_key, state.run_uuid

    wrap(Round, "save", saved)
    wrap(
        PolyaxonClient,
        "create",
        lambda _self, *, operation, name, meta: (
            "create",
            meta["cell_key"],
            None,
        ),
    )
    wrap(measure, "wait_until_final", lambda _m, run, view: ("wait", run.cell.cell_key, view.uuid))
    wrap(
        collect,
        "collect",
        lambda _home, _port, _round, run, view, *_: ("collect", run.cell.cell_key, view.uuid),
    )
    wrap(
        bundle,
        "seal",
        lambda _home, _folder, identity, **_: ("seal", identity.cell_key, identity.run_uuid),
    )
    wrap(
        warehouse.store,
        "replace_runs",
        lambda *_: ("ingest", getattr(ingesting, "cell_key", None), None),
    )
    wrap(
        warehouse.publish,
        "publish",
        lambda *_: ("publish", getattr(ingesting, "cell_key", None), None),
    )
    _mark_ingests(record, ingesting, faults)
    _watch_running(PolyaxonClient, faults)


def _mark_ingests(record: Any, ingesting: threading.local, faults: Faults) -> None:
    """Let the steps within an ingest know whose bundle it is; bulk ingests are nobody's."""
    original = record.ingest

    @functools.wraps(original)
    def ingest(home: Home, bundle_paths: Any, **named: Any) -> Any:
        paths = list(bundle_paths)
        manifests = [files.read_json(path / "manifest.json") for path in paths]
        keys = [manifest["cell_key"] for manifest in manifests if manifest]
        ingesting.cell_key = keys[0] if len(paths) == len(keys) == 1 else None
        try:
            result = original(home, paths, **named)
        finally:
            ingesting.cell_key = None
        faults.over(keys)
        return result

    record.ingest = ingest


def _watch_running(client: Any, faults: Faults) -> None:
    """Tell when the flow, while it waits, sees a run that goes on."""
    original = client.view

    @functools.wraps(original)
    def view(self: Any, run_uuid: str) -> Any:
        found = original(self, run_uuid)
        if found.status == "running":
            faults.moment("wait", "during", found.meta_info.get("cell_key"), found.uuid)
        return found

    client.view = view


if __name__ == "__main__":
    install(Faults.load(Path(sys.argv[1])))
    from flows.cli import main

    main(sys.argv[2:])
