"""Executes compiled operations of an embedded Polyaxon server as local processes.

Polyaxon's own local executor crashes on every job, so this service does on one machine what the
cluster does elsewhere. It is one per state folder and nobody's child; its death leaves the runs
going, and the next supervisor finds them by what was written right after each start. Rules, each of
which something broke without (runs are sessions of processes):

* a run's identity is (session, start time of its leader, UUID), written by the launcher;
* a slot is held as long as any process of the run lives, whatever Polyaxon says;
* output goes to files, never to a pipe that dies with its reader;
* the reason is written before the signal, and the run's leader alone gets SIGTERM, because it has a
  server to stop and a record to finish; SIGKILL goes to the whole session;
* a final status is posted only when nothing of the run is left, and never a second one;
* only our own runs are executed: the server asks nobody who they are, so whoever reaches its port
  can create a run, and must not get a command of his own executed by that;
* a full disk costs reasons and lines of logs, never a signal and never the service.

``python -m tasks.launch.supervisor --home FOLDER`` with POLYAXON_HOST set; ``--drain`` only ends
what an earlier one left.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from tasks import files, processes
from tasks.canonical import canonical_json
from tasks.home import Home
from tasks.launch import environments
from tasks.launch import operation as operations
from tasks.launch.port import PolyaxonPort, RunUnknown, RunView, is_final
from tasks.launch.settings import artifacts_root, run_environment, run_outputs
from warehouse.errors import CannotFindOut, MemsweepError

Reason = Literal["stop", "timeout", "lost"]
T = TypeVar("T")

POLL_S = 0.4
#: What a run may take to end itself after SIGTERM when its cell does not say (limits.stop_s).
STOP_S = 60.0
#: Added to a run's own stop limit before SIGKILL: it has files to finish after its server is gone.
STOP_MARGIN_S = 20.0
#: What is left of a session after its leader's end gets this long before SIGKILL.
STRAY_S = 5.0
#: One call to Polyaxon; deadlines of runs must be looked after meanwhile.
CALL_S = 3.0
#: Posting last words at the end of the service's own life, all runs together.
LAST_WORDS_S = 20.0
SAY_AGAIN_S = 60.0
RUN_VARIABLE = "MEMSWEEP_RUN_UUID"
_MAX_LINE = 32_768
#: Files of a run's outputs folder that are copied on into Polyaxon's log, with their label.
_TAILED = {"server": "server.log", "bench": "bench.log"}


@dataclass(frozen=True, slots=True)
class Record:
    """What a later supervisor needs to find a run: ``runs/<uuid>.json``.

    ``launched_at`` is UTC for people, ``launched_s`` CLOCK_MONOTONIC of the boot ``boot_id`` for
    the deadline; ``deadline_s`` and ``stop_s`` are lengths, None for no deadline.
    """

    uuid: str
    pid: int
    start_ticks: int
    sid: int
    outputs: str
    launched_at: str
    launched_s: float
    deadline_s: float | None
    stop_s: float
    boot_id: str
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """What a compiled operation says about its one process."""

    command: list[str]
    environment: dict[str, str]
    outputs: Path
    timeout_s: float | None
    stop_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The final status of a run as it will be posted."""

    status: str
    reason: str
    message: str


class Folder:
    """Names of the supervisor's files, so that its readers join none of them again."""

    def __init__(self, home: Home) -> None:
        self.root = home.services / "supervisor"
        self.runs = self.root / "runs"
        self.lock = self.root / "lock"
        self.ready = self.root / "ready.json"
        #: Read again before every start, so that a change of slots ends no run.
        self.settings = self.root / "settings.json"

    def record(self, run_uuid: str) -> Path:
        return self.runs / f"{run_uuid}.json"

    def reason(self, run_uuid: str) -> Path:
        return self.runs / f"{run_uuid}.reason.json"

    def ended(self, run_uuid: str) -> Path:
        """Exit code (None when nobody was its parent) and verdict, written after the end."""
        return self.runs / f"{run_uuid}.ended.json"

    def log(self, run_uuid: str) -> Path:
        return self.runs / f"{run_uuid}.log"

    def offsets(self, run_uuid: str) -> Path:
        return self.runs / f"{run_uuid}.offsets.json"

    @property
    def slots(self) -> int:
        """Runs at the same time, as :func:`tasks.launch.services.up` was last asked for."""
        slots = (files.read_json(self.settings) or {}).get("slots")
        return slots if isinstance(slots, int) and slots >= 1 else 1

    def records(self) -> list[Record]:
        """Return the records of runs whose end was not settled yet, oldest first."""
        found = []
        for path in sorted(self.runs.glob("*.json")):
            if path.name.count(".") == 1 and (value := files.read_json(path)) is not None:
                # One that another version wrote is no record: its run is found by its mark.
                with contextlib.suppress(TypeError):
                    found.append(Record(**value))
        return sorted(found, key=lambda record: record.launched_at)


def read_launch(content: str, home: Home, run_uuid: str) -> Launch:
    """Read command, environment and limits out of a compiled operation's JSON text.

    Raises:
        ValueError: it is no job of ours; the message says what is wrong with it.
    """
    operation = json.loads(content)
    if not isinstance(operation, dict):
        raise ValueError(f"got {type(operation).__name__}, wanted an object")
    container = (operation.get("run") or {}).get("container") or {}
    command = [str(part) for part in [*_list(container, "command"), *_list(container, "args")]]
    environment = {
        str(one["name"]): _text(one.get("value"))
        for one in _list(container, "env")
        if isinstance(one, dict) and "name" in one
    }
    outputs = run_outputs(home, run_uuid)
    _check_shape(command, environment, home, outputs)
    timeout = (operation.get("termination") or {}).get("timeout")
    return Launch(
        # Named in full: a run is started by our interpreter, wherever its PATH leads.
        command=[environment["MEMSWEEP_BENCH_PYTHON"], *command[1:]],
        environment=environment,
        outputs=outputs,
        timeout_s=None if timeout is None else float(timeout),
        stop_s=_stop_limit(environment),
    )


def _check_shape(
    command: list[str], environment: dict[str, str], home: Home, outputs: Path
) -> None:
    """Refuse whatever our component on this machine does not give. Raises ``ValueError``."""
    container = operations.read("component.yaml")["run"]["container"]
    if command != container["command"]:
        got, wanted = " ".join(command)[:200] or "none", " ".join(container["command"])
        raise ValueError(f"run.container has the command '{got}', wanted '{wanted}'")
    inputs = {one["name"]: one["value"].strip("{} ") for one in container["env"]}
    if set(environment) != set(inputs):
        odd = ", ".join(sorted(set(environment) ^ set(inputs)))[:200]
        raise ValueError(f"run.container.env: more, or less, than our component gives: {odd}")
    wanted_values = {**environments.places(home), "globals.run_outputs_path": str(outputs)}
    for name, value in environment.items():
        wanted_value = wanted_values.get(inputs[name], value)
        if value != wanted_value:
            raise ValueError(f"{name} is {value[:200]!r}, wanted {wanted_value!r}")
    code = environment["PYTHONPATH"]
    if not environments.is_staged(home, code):
        raise ValueError(f"PYTHONPATH {code[:200]!r} is no folder of the staged code of runs")


def _list(container: dict[str, Any], key: str) -> list[Any]:
    value = container.get(key) or []
    return value if isinstance(value, list) else [value]


def _text(value: object) -> str:
    """Return an environment value as text.

    Polyaxon's templates turn what reads like a Python literal into a value; JSON is then written
    again in the canonical form.
    """
    if isinstance(value, str):
        return value
    return "" if value is None else canonical_json(value)


def _stop_limit(environment: dict[str, str]) -> float:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return float(json.loads(environment["MEMSWEEP_CELL"])["limits"]["stop_s"])
    return STOP_S


def judge(
    *,
    reason: str | None,
    end: dict[str, Any] | None,
    exit_code: int | None,
    deadline_s: float | None,
) -> Verdict:
    """Decide a run's final status from what is known after its last process is gone.

    ``exit_code`` is None for a run that was adopted: only its parent is told. ``end`` is the run's
    ``end.json``, None when it left none. A typed outcome is a success for Polyaxon whatever the
    outcome, so that nothing repeats a deterministic failure.
    """
    observed = None if end is None else str(end.get("observed"))
    typed = observed is not None and observed not in {"interrupted", "harness_error"}
    if reason == "stop":
        return Verdict("stopped", "Stop", f"stopped on request; observed: {observed or 'nothing'}")
    if typed and exit_code in {0, None}:
        return Verdict("succeeded", "Ended", f"observed: {observed}")
    if reason == "timeout":
        limit = "its limit" if deadline_s is None else f"{deadline_s:.0f} s"
        return Verdict("failed", "Timeout", f"did not end within {limit}")
    if reason == "lost":
        return Verdict("failed", "Lost", "ended after it had been declared lost")
    if exit_code is None:
        return Verdict(
            "failed", "Lost", "ended while no supervisor watched; left no complete end.json"
        )
    how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    return Verdict("failed", "ExitCode", f"ended with {how}; observed: {observed or 'nothing'}")


class Tail:
    """Copies growing files of a run, line by line, into Polyaxon's log of it.

    Where each file was left is kept on disk, so that a new supervisor continues there.
    """

    def __init__(self, run_uuid: str, sources: dict[str, Path], sink: Path, state: Path) -> None:
        self._pod = run_uuid
        self._sources = sources
        self._sink = sink
        self._state = state
        self._offsets: dict[str, int] = dict(files.read_json(state) or {})

    def pump(self, *, last: bool = False) -> None:
        """Copy on what has been added; with ``last`` an unfinished last line too.

        Raises OSError or CannotFindOut when the disk refuses; the next call copies it again.
        """
        before = dict(self._offsets)
        lines: list[str] = []
        for label, path in self._sources.items():
            lines += [self._line(label, text) for text in self._new(label, path, last)]
        if not lines:
            return
        try:
            self._sink.parent.mkdir(parents=True, exist_ok=True)
            self._append("".join(f"{line}\n" for line in lines).encode())
        except OSError:
            self._offsets = before
            raise
        files.write_json(self._state, self._offsets)

    def _append(self, data: bytes) -> None:
        """Append all of it or nothing: half a line would spoil the next one too."""
        with self._sink.open("ab", buffering=0) as sink:
            end = sink.tell()
            written = sink.write(data)
            if written != len(data):
                sink.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._sink))

    def _new(self, label: str, path: Path, last: bool) -> Iterator[str]:
        offset = self._offsets.get(label, 0)
        try:
            if path.stat().st_size <= offset:
                return
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read(4_000_000)
        except FileNotFoundError:
            return
        if not last:
            data = data[: data.rfind(b"\n") + 1] or (data if len(data) > _MAX_LINE else b"")
        self._offsets[label] = offset + len(data)
        for line in data.decode(errors="replace").splitlines():
            if line.strip():
                yield line[:_MAX_LINE]

    def _line(self, label: str, text: str) -> str:
        return json.dumps(
            {
                "value": text,
                "timestamp": datetime.now(UTC).isoformat(),
                "node": "local",
                "pod": self._pod,
                "container": label,
            }
        )


@dataclass(slots=True)
class Live:
    """A run under watch. ``process`` is None when it was adopted."""

    record: Record
    tail: Tail
    process: subprocess.Popen[bytes] | None = None
    signalled_s: float | None = None
    leader_gone_s: float | None = None
    #: Set once nothing of it is left; from then on only its last words are due.
    ended: bool = False
    exit_code: int | None = None
    #: Why it was signalled; the file that says so may not have been writable.
    reason: Reason | None = None

    def leader_ended(self) -> bool:
        """Tell whether the first process is gone; takes its exit code if it is our child."""
        if self.process is not None:
            code = self.process.poll()
            if code is not None:
                self.exit_code = code
            return code is not None
        return not processes.alive(self.record.pid, self.record.start_ticks)

    def members(self) -> list[processes.Process]:
        """Return every process of the run: its session, and what left it but bears its mark."""
        found = processes.session(self.record.sid, self.record.start_ticks)
        if self.leader_gone_s is not None:
            known = {process.pid for process in found}
            marked = processes.marked(RUN_VARIABLE, self.record.uuid)
            found += [process for process in marked if process.pid not in known]
        return found


@dataclass(slots=True)
class Supervisor:
    """The service's state and its one step; :func:`main` repeats it."""

    home: Home
    port: PolyaxonPort
    poll_s: float = POLL_S
    stop_margin_s: float = STOP_MARGIN_S
    live: dict[str, Live] = field(default_factory=dict)
    _said: dict[str, float] = field(default_factory=dict)

    @property
    def folder(self) -> Folder:
        return Folder(self.home)

    @property
    def store(self) -> Path:
        return artifacts_root(self.home)

    def adopt(self) -> None:
        """Take over the runs an earlier supervisor started, going or ended."""
        for record in self.folder.records():
            one = Live(record, self._tail(record.uuid, Path(record.outputs)))
            one.exit_code = record.exit_code
            self.live[record.uuid] = one
            say(f"run {record.uuid}: adopted, session {record.sid}")
            if record.boot_id != processes.boot_id():
                one.ended = True
            elif (reason := self._reason(record.uuid)) is not None:
                # Its writer may have died before it sent the signal; a second one does no harm.
                self._signal(one, reason)

    def step(self) -> bool:
        """Look at everything once; tell whether something changed, so that no pause is due."""
        active = self.asked(self.port.active)
        changed = False
        statuses = None if active is None else {run.uuid: run.status for run in active}
        for run_uuid in list(self.live):
            changed |= self._watch(self.live[run_uuid], statuses)
        if changed:
            return True  # The list is older than what was just said to Polyaxon.
        for run in active or []:
            if run.uuid in self.live:
                continue
            if run.status in {"starting", "running", "processing", "stopping"}:
                changed |= self._settle_unknown(run)
            elif self.has_free_slot():
                changed |= self._start(run.uuid)
        return changed

    def has_free_slot(self) -> bool:
        """Tell whether fewer runs have living processes than there are slots."""
        return sum(not one.ended for one in self.live.values()) < self.folder.slots

    def shut_down(self) -> None:
        """Stop every run, going or queued, and say so to Polyaxon as far as it answers."""
        self._stop_queued()
        for one in self.live.values():
            if not one.ended:
                self._signal(one, "stop")
        while going := [one for one in self.live.values() if not one.ended]:
            for one in going:
                self._watch_processes(one)
            time.sleep(0.05)
        deadline = time.monotonic() + LAST_WORDS_S
        while self.live and time.monotonic() < deadline:
            for one in list(self.live.values()):
                self._finish(one)
            time.sleep(0.2 if self.live else 0)
        # What was created meanwhile would be started by the next supervisor, for nobody.
        self._stop_queued()

    def _stop_queued(self) -> None:
        """Stop the runs that were not started."""
        for run in self.asked(self.port.active) or []:
            if run.uuid not in self.live:
                self.asked(partial(self._stop, run.uuid))

    def asked(self, question: Callable[[], T]) -> T | None:
        """Ask Polyaxon; None when it does not answer now. The same fault is said once a minute."""
        try:
            return question()
        except CannotFindOut as error:
            self.complain(f"going on without an answer: {error}")
            return None

    def complain(self, text: str) -> None:
        """Say what went wrong; the same once a minute."""
        now = time.monotonic()
        if now - self._said.get(text, -SAY_AGAIN_S) >= SAY_AGAIN_S:
            self._said[text] = now
            say(text)

    @contextlib.contextmanager
    def _if_possible(self) -> Iterator[None]:
        """Go on when the disk refuses something that is good to have but must hold up nothing."""
        try:
            yield
        except (OSError, CannotFindOut) as error:
            self.complain(f"going on without it: {error}")

    def _watch(self, one: Live, statuses: dict[str, str] | None) -> bool:
        """Look after one run; True when it ended or its last words were said."""
        if statuses is not None and statuses.get(one.record.uuid) == "starting":
            # Not said when it was started. Nobody must take a run that ran for one that did not.
            self.asked(lambda: self._post_running(one.record))
        if one.ended:
            return self._finish(one)
        wanted = None if one.signalled_s is not None else self._wanted_end(one, statuses)
        if wanted is not None:
            self._signal(one, wanted)
        if self._watch_processes(one):
            return self._finish(one) or True
        return False

    def _wanted_end(self, one: Live, statuses: dict[str, str] | None) -> Reason | None:
        record = one.record
        if record.deadline_s is not None and _age_s(record) > record.deadline_s:
            return "timeout"
        if statuses is None:
            return None
        status = statuses.get(record.uuid) or self._unlisted(record.uuid)
        if status is not None and is_final(status):
            # A status posted after a final one is dropped silently, so nobody else would notice.
            return "stop" if status == "stopped" else "lost"
        return "stop" if status == "stopping" else None

    def _unlisted(self, run_uuid: str) -> str | None:
        """Return the status of a run that no list shows: it is final, archived or deleted."""

        def look() -> str:
            try:
                return self.port.view(run_uuid).status
            except RunUnknown:
                return "stopping"  # deleted: nobody waits for it any more

        return self.asked(look)

    def _signal(self, one: Live, reason: Reason) -> None:
        """Write why, then ask the run's leader to end."""
        record = one.record
        one.reason = reason
        with self._if_possible():
            path = self.folder.reason(record.uuid)
            if not path.exists():
                files.write_json(path, {"reason": reason, "at": _now()})
        one.signalled_s = time.monotonic()
        say(f"run {record.uuid}: {reason}, SIGTERM to {record.pid}")
        leader = processes.read(record.pid)
        if leader is not None and leader.start_ticks == record.start_ticks:
            processes.send([leader], signal.SIGTERM)

    def _watch_processes(self, one: Live) -> bool:
        """Push on what is left of a run; True when nothing is."""
        with self._if_possible():
            one.tail.pump()
        now = time.monotonic()
        if not one.leader_ended():
            limit = one.record.stop_s + self.stop_margin_s
            if one.signalled_s is not None and now - one.signalled_s > limit:
                say(f"run {one.record.uuid}: still there {limit:.0f} s after SIGTERM: SIGKILL")
                processes.send(one.members(), signal.SIGKILL)
            return False
        if one.leader_gone_s is None:
            one.leader_gone_s = now
        if members := one.members():
            if now - one.leader_gone_s > STRAY_S:
                names = ", ".join(f"{process.pid} {process.name}" for process in members)
                say(f"run {one.record.uuid}: SIGKILL of what its leader left: {names}")
                processes.send(members, signal.SIGKILL)
            return False
        one.ended = True
        return True

    def _finish(self, one: Live) -> bool:
        """Say a run's last words to Polyaxon; False when it did not answer, then tried again."""
        record = one.record
        outputs = Path(record.outputs)
        with self._if_possible():
            one.tail.pump(last=True)
        if one.exit_code is not None and record.exit_code is None:
            record = replace(record, exit_code=one.exit_code)
            with self._if_possible():
                files.write_json(self.folder.record(record.uuid), asdict(record))
                one.record = record
        log = self.folder.log(record.uuid)
        with self._if_possible():
            if log.exists():
                outputs.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(log, outputs / "pod.log")
        end = files.read_json(outputs / "end.json")
        verdict = judge(
            reason=self._reason(record.uuid) or one.reason,
            end=end,
            exit_code=one.exit_code,
            deadline_s=record.deadline_s,
        )
        if not self._post_end(record.uuid, verdict, end):
            return False
        with self._if_possible():
            files.write_json(
                self.folder.ended(record.uuid),
                {"uuid": record.uuid, "exit_code": one.exit_code, "at": _now(), **asdict(verdict)},
            )
        self.folder.record(record.uuid).unlink(missing_ok=True)
        self.folder.offsets(record.uuid).unlink(missing_ok=True)
        del self.live[record.uuid]
        say(f"run {record.uuid}: {verdict.status} ({verdict.reason}): {verdict.message}")
        return True

    def _reason(self, run_uuid: str) -> Reason | None:
        written = files.read_json(self.folder.reason(run_uuid))
        return None if written is None else written.get("reason", "stop")

    def _stop(self, run_uuid: str) -> bool:
        self.port.stop(run_uuid)
        return True

    def _post_end(self, run_uuid: str, verdict: Verdict, end: dict[str, Any] | None) -> bool:
        def post() -> bool:
            if end is not None:
                told = {key: end.get(key) for key in ("observed", "phase", "message")}
                self.port.log_outputs(run_uuid, told)
            self.port.post_status(run_uuid, verdict.status, verdict.reason, verdict.message)
            return True

        def post_if_known() -> bool:
            with contextlib.suppress(RunUnknown):  # Deleted meanwhile: there is nobody to tell.
                post()
            return True

        return bool(self.asked(post_if_known))

    def _start(self, run_uuid: str) -> bool:
        """Start a compiled run, unless it is no longer one."""
        view: RunView | None = self.asked(lambda: self.port.view(run_uuid))
        if view is None or view.status not in {"compiled", "starting"}:
            return False
        content = self.asked(lambda: self.port.content(run_uuid))
        if content is None:
            return False
        try:
            launch = read_launch(content, self.home, run_uuid)
        except ValueError as error:
            return self._refuse(run_uuid, "BadOperation", f"cannot be executed here: {error}")
        if self.asked(lambda: self._post(run_uuid, "starting", "a slot is free")) is None:
            return False
        try:
            one = self._launch(run_uuid, launch)
        except (OSError, CannotFindOut) as error:
            return self._refuse(run_uuid, "CannotStart", f"{launch.command[0]}: {error}")
        self.live[run_uuid] = one
        say(f"run {run_uuid}: started, session {one.record.sid}")
        self.asked(lambda: self._post_running(one.record))
        return True

    def _post_running(self, record: Record) -> bool:
        return self._post(record.uuid, "running", f"session {record.sid}")

    def _post(self, run_uuid: str, status: str, message: str) -> bool:
        self.port.post_status(run_uuid, status, "Supervisor", message)
        return True

    def _refuse(self, run_uuid: str, reason: str, message: str) -> bool:
        def post() -> bool:
            self.port.post_status(run_uuid, "failed", reason, message)
            return True

        say(f"run {run_uuid}: {reason}: {message}")
        return bool(self.asked(post))

    def _launch(self, run_uuid: str, launch: Launch) -> Live:
        launch.outputs.mkdir(parents=True, exist_ok=True)
        log = self.folder.log(run_uuid)
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = run_environment(self.home) | launch.environment
        environment[RUN_VARIABLE] = run_uuid
        environment["MEMSWEEP_REASON_FILE"] = str(self.folder.reason(run_uuid))
        with log.open("ab") as output:
            process = subprocess.Popen(
                launch.command,
                env=environment,
                cwd=launch.outputs.parent,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        # Nothing between the start and this write: a kill here is what makes a run hard to find.
        record = Record(
            uuid=run_uuid,
            pid=process.pid,
            start_ticks=processes.start_ticks(process.pid) or 0,
            sid=process.pid,
            outputs=str(launch.outputs),
            launched_at=_now(),
            launched_s=time.monotonic(),
            deadline_s=launch.timeout_s,
            stop_s=launch.stop_s,
            boot_id=processes.boot_id(),
        )
        try:
            files.write_json(self.folder.record(run_uuid), asdict(record))
        except CannotFindOut:
            # Nobody would find it after our own death; and on such a disk it could record nothing.
            processes.send(processes.session(record.sid, record.start_ticks), signal.SIGKILL)
            process.wait()
            raise
        return Live(record, self._tail(run_uuid, launch.outputs), process)

    def _settle_unknown(self, run: RunView) -> bool:
        """Deal with a run that Polyaxon calls going and of which nothing was written here.

        Either an earlier supervisor died between start and record: then the process bears the
        run's mark and is adopted. Or it never came to start: a run still ``starting`` is started,
        any other is lost.
        """
        found = processes.marked(RUN_VARIABLE, run.uuid)
        leader = next((process for process in found if process.pid == process.session), None)
        outputs = self.store / run.uuid.replace("-", "") / "outputs"
        if leader is not None:
            record = Record(
                uuid=run.uuid,
                pid=leader.pid,
                start_ticks=leader.start_ticks,
                sid=leader.session,
                outputs=str(outputs),
                launched_at=_now(),
                launched_s=time.monotonic(),
                deadline_s=self._timeout(run.uuid),
                stop_s=STOP_S,
                boot_id=processes.boot_id(),
            )
            with self._if_possible():
                files.write_json(self.folder.record(run.uuid), asdict(record))
            self.live[run.uuid] = Live(record, self._tail(run.uuid, outputs))
            say(f"run {run.uuid}: found without a record and adopted, session {leader.session}")
            return True
        if run.status == "starting" and not self.folder.log(run.uuid).exists():
            return self.has_free_slot() and self._start(run.uuid)
        if found:
            processes.send(found, signal.SIGKILL)
            return True
        end = files.read_json(outputs / "end.json")
        reason = "stop" if run.status == "stopping" else None
        verdict = judge(reason=reason, end=end, exit_code=None, deadline_s=None)
        say(f"run {run.uuid}: {run.status} in Polyaxon, no process here: {verdict.status}")
        return self._post_end(run.uuid, verdict, end)

    def _timeout(self, run_uuid: str) -> float | None:
        content = self.asked(lambda: self.port.content(run_uuid))
        try:
            return None if content is None else read_launch(content, self.home, run_uuid).timeout_s
        except ValueError:
            return None

    def _tail(self, run_uuid: str, outputs: Path) -> Tail:
        sources = {"run": self.folder.log(run_uuid)}
        sources |= {label: outputs / name for label, name in _TAILED.items()}
        sink = outputs.parent / "plxlogs" / "memsweep.jsonl"
        return Tail(run_uuid, sources, sink, self.folder.offsets(run_uuid))


def _age_s(record: Record) -> float:
    return time.monotonic() - record.launched_s


def say(text: str) -> None:
    """Write one line to the service's log, unless the disk is full."""
    with contextlib.suppress(OSError):
        print(f"{_now()} {text}", flush=True)  # noqa: T201


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def main(arguments: list[str] | None = None) -> int:
    """Run the service until SIGTERM; 3 when another one holds this state folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--project", default="memsweep")
    parser.add_argument("--drain", action="store_true", help="end what is left, then leave")
    given = parser.parse_args(arguments)
    home = Home(given.home.resolve())
    try:
        with files.exclusive(Folder(home).lock, wait_s=5, what="supervisor"):
            return _serve(home, given.project, given.drain)
    except MemsweepError as error:
        say(str(error))
        return error.exit_code
    except OSError as error:  # Before anything was started; see Supervisor for what comes later.
        say(f"cannot work: {error}")
        return CannotFindOut.exit_code


def _serve(home: Home, project: str, drain: bool) -> int:
    from tasks.launch.polyaxon import PolyaxonClient

    leave = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: leave.set())
    port = PolyaxonClient(os.environ["POLYAXON_HOST"], project=project, call_s=CALL_S)
    supervisor = Supervisor(home, port)
    supervisor.adopt()
    if not drain:
        _work(supervisor, leave)
    supervisor.shut_down()
    say("left")
    return 0


def _work(supervisor: Supervisor, leave: threading.Event) -> None:
    ready = supervisor.folder.ready
    ready.unlink(missing_ok=True)
    announced = False
    while not leave.is_set():
        if not announced and supervisor.asked(lambda: _made_ready(supervisor, ready)):
            announced = True
            say(f"ready at {supervisor.port.host}, {supervisor.folder.slots} slot(s)")
        try:
            changed = supervisor.step()
        except OSError as error:
            supervisor.complain(f"going on after {type(error).__name__}: {error}")
            changed = False
        if not changed:
            leave.wait(supervisor.poll_s)
    ready.unlink(missing_ok=True)


def _made_ready(supervisor: Supervisor, ready: Path) -> bool:
    supervisor.port.ensure_project()
    files.write_json(ready, {"pid": os.getpid(), "at": _now()})
    return True


if __name__ == "__main__":
    sys.exit(main())
