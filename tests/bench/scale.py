"""What one server and one flow bear: many runs in flight at once, simulated at Polyaxon's API.

    python -m tests.bench.scale --runs 1000 --processes 30

The real Polyaxon server (haupt on SQLite) and the flow's own code; only what a pod would do is
played. Every run is a coroutine that posts its statuses and uploads a recorded bundle over HTTP;
the bundle is that of one real run of the doubles. The flow's side creates the runs, looks at all of
them in turn, and collects, seals and ingests each that has ended, with the functions the flow uses.
With ``--processes`` a real sweep of so many cells, each in processes of its own, goes on beside.

Times are wall times of this machine, its load included. The CPU time of the server a request is
what can be carried over to another machine.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import httpx
from testkit import doubles

from flows.context import Context, Wishes, open_context
from tasks import processes, record
from tasks.canonical import sha256_file
from tasks.collect import collect
from tasks.files import read_json
from tasks.home import VARIABLE, Home
from tasks.launch import services
from tasks.launch.polyaxon import PolyaxonClient
from tasks.launch.port import RunView
from tasks.launch.settings import client_environment, run_outputs
from tasks.launch.supervisor import Folder
from tasks.measure import Measuring, find_or_create, patiently
from tasks.plan.plan import PlannedRun
from tests.bench.gaps import percentile

F = TypeVar("F", int, float, float | int)

#: Apart from the supervisor's project: it would refuse these runs, and nobody is to start them.
PROJECT = "scale"
#: Cells that one flow measures at most at a time (flows/sweep.py); as many threads look here.
WATCHERS = 64
CREATORS = 8
#: Requests that all the coroutines have open at once.
CONNECTIONS = 32
REQUEST_S = 120.0
TRIES = 20
LOOK_S = 0.5
#: Left by every pod, to be found in its own run's bundle and in no other.
WHOSE = "whose.txt"
#: How long the engine of a real process beside the simulation boots.
BOOT_S = 60.0


@dataclass
class Meter:
    """Times of every sort of call and what went wrong, from all threads."""

    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    errors: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Note how long the body took, and a fault by its name."""
        began = time.perf_counter()
        try:
            yield
        except Exception as error:
            self.errors[f"{what}: {type(error).__name__}"] += 1
            raise
        self.seconds[what].append(time.perf_counter() - began)

    def figures(self, what: str) -> dict[str, float | int]:
        """Return number, median, 99th percentile and greatest of a sort of call, seconds."""
        taken = self.seconds[what]
        if not taken:
            return {"n": 0}
        shares = {"p50_s": 0.5, "p99_s": 0.99, "max_s": 1.0}
        return {"n": len(taken)} | {k: round(percentile(taken, s), 3) for k, s in shares.items()}


class TimedClient(PolyaxonClient):
    """The flow's client; what it is asked is timed, its own repeats included."""

    meter: Meter

    def create(self, *, operation: dict[str, object], name: str, meta: dict[str, str]) -> RunView:
        with self.meter.timed("create"):
            return super().create(operation=operation, name=name, meta=meta)

    def view(self, run_uuid: str) -> RunView:
        with self.meter.timed("view"):
            return super().view(run_uuid)

    def fetch(self, run_uuid: str, into: Path) -> list[str]:
        with self.meter.timed("fetch"):
            return super().fetch(run_uuid, into)


@dataclass
class Server:
    """The Polyaxon server's processes, found by what is recorded of it."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, home: Home) -> Server:
        state = read_json(home.services / "polyaxon" / "state.json")
        assert state is not None
        return cls(state["pid"], state["start_ticks"])

    def _members(self) -> list[processes.Process]:
        return processes.session(self.pid, self.start_ticks)

    def cpu_s(self) -> float:
        """Return the CPU seconds of all its processes so far."""
        ticks = 0
        for one in self._members():
            text = Path(f"/proc/{one.pid}/stat").read_text()
            ticks += sum(int(value) for value in text.rpartition(")")[2].split()[11:13])
        return ticks / os.sysconf("SC_CLK_TCK")

    def memory_mib(self) -> float:
        """Return the resident memory of all its processes together."""
        kib = 0
        for one in self._members():
            for line in Path(f"/proc/{one.pid}/status").read_text().splitlines():
                kib += int(line.split()[1]) if line.startswith("VmRSS:") else 0
        return kib / 1024


class Phase:
    """Wall seconds and the server's CPU seconds of one part."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._began, self._cpu = time.perf_counter(), server.cpu_s()

    def figures(self, requests: int) -> dict[str, float]:
        """Return the part's figures with so many requests in it."""
        wall, cpu = time.perf_counter() - self._began, self._server.cpu_s() - self._cpu
        return {
            "wall_s": round(wall, 1),
            "per_s": round(requests / wall, 2),
            "server_cpu_ms_each": round(1000 * cpu / max(1, requests), 1),
            "server_cores": round(cpu / wall, 2),
        }


def told(what: str, figures: dict[str, F]) -> dict[str, F]:
    """Show a part's figures at once; what follows may take minutes."""
    print(f"{what}: {figures}", file=sys.stderr, flush=True)
    return figures


@dataclass
class Pods:
    """What the pods of all runs would do, one coroutine each."""

    host: str
    outputs: Path  # of the recorded run
    meter: Meter
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    live: int = 0
    begun_s: float | None = None
    posts: int = 0

    def client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=CONNECTIONS)
        return httpx.AsyncClient(
            base_url=self.host, limits=limits, timeout=REQUEST_S, trust_env=False
        )

    async def run(self, client: httpx.AsyncClient, run_uuid: str) -> None:
        """Live one run's life: its statuses, and at its end its bundle."""
        for status in ("starting", "running"):
            await self._status(client, run_uuid, status)
        self.live += 1
        await self.may_end.wait()
        place = f"/streams/v1/memsweep/default/{PROJECT}/runs/{run_uuid.replace('-', '')}/artifacts"
        told = {"untar": True, "path": "outputs", "overwrite": True}
        archive = packed(self.outputs, run_uuid)
        await self._send(
            "upload",
            lambda: client.post(
                place,
                data={"json": json.dumps(told)},
                files={"upload_file": ("outputs.tar.gz", archive)},
            ),
        )
        await self._status(client, run_uuid, "succeeded")
        self.live -= 1

    async def _status(self, client: httpx.AsyncClient, run_uuid: str, status: str) -> None:
        place = f"/api/v1/default/{PROJECT}/runs/{run_uuid.replace('-', '')}/statuses"
        condition = {"type": status, "status": True, "reason": "Simulated", "message": ""}
        await self._send("status", lambda: client.post(place, json={"condition": condition}))
        self.posts += 1

    async def _send(self, what: str, ask: Callable[[], Any]) -> None:
        """Send a request until it is taken; every answer that is not good counts as an error."""
        for _ in range(TRIES):
            try:
                with self.meter.timed(what):
                    (await ask()).raise_for_status()
            except httpx.HTTPStatusError as error:
                self.meter.errors[f"{what}: answered {error.response.status_code}"] += 1
            except httpx.TransportError:
                pass  # counted by its name
            else:
                return
            await asyncio.sleep(0.5)
        raise RuntimeError(f"{what} was not taken {TRIES} times")


@dataclass
class Flow:
    """The flow's side: what flows/sweep.py does with a run, but for more runs than one flow has."""

    context: Context
    meter: Meter
    until_s: float
    collected: int = 0
    left: int = 0
    _one_ingest: threading.Lock = field(default_factory=threading.Lock)

    @property
    def measuring(self) -> Measuring:
        return self.context.measuring

    def create(self, run: PlannedRun) -> RunView:
        with self.meter.timed("find, create, record"):
            view, _ = find_or_create(self.measuring, run)
        return view

    def watch(self, share: list[tuple[PlannedRun, str]]) -> None:
        """Look at runs in turn, as often as a flow does if the server can; take in the ended."""
        waiting = deque(share)
        while waiting and time.monotonic() < self.until_s:
            began = time.monotonic()
            run, run_uuid = waiting.popleft()
            # As a flow does: asked again for minutes when the server has no answer in its time.
            view = patiently(self.measuring, lambda: self.measuring.port.view(run_uuid))  # noqa: B023
            if not (view.is_final and self.take(run, view)):
                waiting.append((run, run_uuid))
            turn_s = self.measuring.poll_s / max(1, len(waiting))
            time.sleep(max(0.0, began + turn_s - time.monotonic()))
        self.left += len(waiting)

    def take(self, run: PlannedRun, view: RunView) -> bool:
        """Collect, seal and ingest one run that has ended; tell whether that was done.

        What went wrong is counted, and the run's turn comes again.
        """
        round_, home = self.context.round, self.measuring.home
        state = round_.state(run.cell.cell_key, run.repeat)
        assert state is not None
        try:
            with self.meter.timed("collect and seal"):
                bundle = collect(
                    home, self.measuring.port, round_, run, view, state, self.context.origin
                )
                outcome = str(bundle.manifest["outcome"])
                round_.save(replace(state, outcome=outcome, manifest_sha256=bundle.manifest_sha256))
            with self._one_ingest, self.meter.timed("ingest and publish"):
                record.ingest(home, [bundle.folder])
        except Exception:  # counted by its name  # noqa: BLE001
            return False
        whose = bundle.folder / WHOSE
        if not whose.is_file() or whose.read_text() != view.uuid:
            self.meter.errors["sealed with another run's outputs"] += 1
        if outcome != "ok":
            self.meter.errors[f"outcome {outcome}"] += 1
        self.collected += 1
        return True


def recorded(home: Home, folder: Path) -> Path:
    """Run one cell for real, which starts the services; return the folder of its outputs."""
    sweep = folder / "template.yaml"
    sweep.write_text(doubles.sweep_text("template", 1))
    codes = doubles.run_to_the_end(home, str(sweep), log=folder / "template.log", timeout_s=300)
    if codes != [0]:
        raise SystemExit(f"the run to be recorded ended with {codes}; see {folder}/template.log")
    recording = run_outputs(home, next(path.name for path in home.bundles.glob("*-*-*-*-*")))
    return nobodys(shutil.copytree(recording, folder / "recording"))


def nobodys(outputs: Path) -> Path:
    """Take out of a recording whose it is, so that every run of the simulation may leave it."""
    events = outputs / "events.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    for line in lines:
        line.pop("run_uuid", None)
    events.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    end = json.loads((outputs / "end.json").read_text())
    end["files"][events.name]["sha256"] = sha256_file(events)
    (outputs / "end.json").write_text(json.dumps(end))
    return outputs


def packed(outputs: Path, run_uuid: str) -> bytes:
    """Return a run's outputs as an archive, with a file that tells whose they are."""
    whole, told = io.BytesIO(), io.BytesIO(run_uuid.encode())
    with tarfile.open(fileobj=whole, mode="w:gz", compresslevel=1) as archive:
        for path in sorted(outputs.iterdir()):
            archive.add(path, arcname=path.name)
        whose = tarfile.TarInfo(WHOSE)
        whose.size = len(told.getvalue())
        archive.addfile(whose, told)
    return whole.getvalue()


def open_flow(home: Home, folder: Path, runs: int, host: str, meter: Meter, limit_s: float) -> Flow:
    """Plan a sweep of so many cells and open its round, as the flow does."""
    sweep = folder / "scale.yaml"
    sweep.write_text(doubles.sweep_text("scale", runs))
    client = TimedClient(host, project=PROJECT)
    client.meter = meter
    client.ensure_project()
    context = open_context(str(sweep), "local", Wishes(fresh=True), flow_run_id="simulated")
    measuring = replace(context.measuring, port=client, is_cancelled=lambda: False)
    return Flow(replace(context, measuring=measuring), meter, time.monotonic() + limit_s)


async def simulate(flow: Flow, pods: Pods, server: Server, hold_s: float) -> dict[str, Any]:
    """Bring all runs to life, keep them alive for a while under watch, then let all end."""
    loop, meter = asyncio.get_running_loop(), pods.meter
    runs = list(flow.context.plan.runs(seed=1))
    pool = ThreadPoolExecutor(max(CREATORS, WATCHERS))
    turns = asyncio.Semaphore(CREATORS)
    found: dict[str, Any] = {"runs": len(runs), "server_idle_mib": round(server.memory_mib())}
    peak = 0.0

    async with pods.client() as client:
        lives: list[asyncio.Task[None]] = []

        async def create(run: PlannedRun) -> tuple[PlannedRun, str]:
            async with turns:
                view = await loop.run_in_executor(pool, flow.create, run)
            lives.append(asyncio.create_task(pods.run(client, view.uuid)))
            return run, view.uuid

        phase = Phase(server)
        created = await asyncio.gather(*(create(run) for run in runs))
        found["creating"] = told("creating", phase.figures(len(runs)))
        phase, before = Phase(server), pods.posts
        while pods.live < len(runs):
            await asyncio.sleep(0.05)
        found["statuses posted while creating"] = before
        found["statuses after creating"] = told("statuses", phase.figures(pods.posts - before))

        meter.seconds["view"].clear()
        phase = Phase(server)
        watching = [
            loop.run_in_executor(pool, flow.watch, list(created[n::WATCHERS]))
            for n in range(min(WATCHERS, len(created)))
        ]
        until = time.monotonic() + hold_s
        while time.monotonic() < until:
            peak = max(peak, server.memory_mib())
            await asyncio.sleep(LOOK_S)
        found["all live"] = told("all live", phase.figures(len(meter.seconds["view"])))
        found["all live"]["wanted_per_s"] = len(runs) / flow.measuring.poll_s
        found["view with all live"] = told("view with all live", meter.figures("view"))
        found["server with all live"] = told("server", {"mib": round(peak)})
        for what in ("create", "find, create, record", "status"):
            found[what] = told(what, meter.figures(what))
        found["live meanwhile"] = pods.live

        meter.seconds["view"].clear()
        phase = Phase(server)
        pods.may_end.set()
        while not all(one.done() for one in watching):
            peak = max(peak, server.memory_mib())
            await asyncio.sleep(LOOK_S)
        for one in watching:
            await one
        found["ending"] = told("ending", phase.figures(flow.collected))
        _, unfinished = await asyncio.wait(lives, timeout=REQUEST_S)
        for life in unfinished:
            life.cancel()
        ends = await asyncio.gather(*lives, return_exceptions=True)
        found["pods that gave up or were cut off"] = sum(end is not None for end in ends)
    pool.shutdown()
    for what in ("upload", "view", "fetch", "collect and seal", "ingest and publish"):
        found[what] = meter.figures(what)
    return found | {
        "collected": flow.collected,
        "left at the limit": flow.left,
        "errors": dict(meter.errors),
        "server_peak_mib": round(peak),
    }


@dataclass
class Beside:
    """A real sweep in processes of their own beside the simulation; nothing for 0 cells."""

    home: Home
    folder: Path
    cells: int
    process: subprocess.Popen[bytes] | None = None
    most: int = 0
    _over: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        if not self.cells:
            return
        sweep = self.folder / "processes.yaml"
        sweep.write_text(doubles.sweep_text("processes", self.cells))
        target = doubles.write_profile(self.folder / "processes-target.yaml", self.cells)
        log = self.folder / "processes.log"
        self.process = doubles.start(self.home, "run", str(sweep), "--target", str(target), log=log)
        threading.Thread(target=self._count, daemon=True).start()

    def _count(self) -> None:
        while not self._over.wait(LOOK_S):
            self.most = max(self.most, len(Folder(self.home).records()))

    def end(self, timeout_s: float = 600) -> dict[str, int | None]:
        """Wait for its end; return the exit code and the most runs that lived at a time."""
        if self.process is None:
            return {"cells": 0}
        try:
            code: int | None = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._over.set()
        return {"cells": self.cells, "exit_code": code, "most_at_once": self.most}


def measure(
    folder: Path, runs: int, real: int, hold_s: float, limit_s: float, server: Path | None
) -> dict[str, Any]:
    """Return the figures of one simulation."""
    home = doubles.make_home(
        folder / "home", engine={"boot_s": BOOT_S if real else 0.1}, polyaxon_server=server
    )
    os.environ[VARIABLE] = str(home.root)
    beside = Beside(home, folder, real)
    try:
        outputs = recorded(home, folder)
        ends = services.endpoints(home)
        assert ends is not None
        os.environ.update(
            client_environment(
                home, prefect_api_url=ends.prefect_api_url, polyaxon_host=ends.polyaxon_host
            )
        )
        meter = Meter()
        flow = open_flow(home, folder, runs, ends.polyaxon_host, meter, limit_s)
        beside.start()
        load = os.getloadavg()[0]
        found = asyncio.run(
            simulate(flow, Pods(ends.polyaxon_host, outputs, meter), Server.of(home), hold_s)
        )
        found |= {
            "recorded_bundle_kb": round(len(packed(outputs, "")) / 1000, 1),
            "beside": beside.end(),
            "machine": {
                "cores": os.cpu_count(),
                "load_before": round(load, 1),
                "load_after": round(os.getloadavg()[0], 1),
            },
        }
    finally:
        beside.end(timeout_s=0)
        left = doubles.end_services(home)
    return found | {"left": left}


def main() -> None:
    """Read the options, simulate and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=1000, help="runs in flight at once")
    parser.add_argument("--processes", type=int, default=0, help="cells run for real beside them")
    parser.add_argument("--hold", type=float, default=20.0, help="seconds with all runs live")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for all of it")
    parser.add_argument("--folder", type=Path, default=Path(".memsweep-scale"))
    parser.add_argument("--polyaxon-server", type=Path, help="its environment, to be linked")
    given = parser.parse_args()
    # Ended from outside, it still ends its services.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder: Path = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    found = measure(
        folder, given.runs, given.processes, given.hold, given.limit, given.polyaxon_server
    )
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
