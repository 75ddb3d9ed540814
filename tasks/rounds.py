"""A round: one measuring of a whole sweep, and what is already done of it.

Kept as small files in ``rounds/<id>/`` of the state folder, so that a killed flow loses nothing:

* ``round.json``          what the round measures: sweep hash, label, when it was opened, and the
                          seed of the order its cells are measured in
* ``sweep.yaml``, ``prompts.json``     the sweep as it was then, and its prompt files by name
* ``repeats/<cell key>.<repeat>.json``   intent, then the run's UUID, then the sealed bundle
* ``left-out/<cell key>.<repeat>.json``  which run settles a repeat that a bisection leaves out
* ``predictions/<cell key>.json``      made and hashed before the run is created
* ``origins/<cell key>.<repeat>.<attempt>.json``   who and which code created that run
* ``deadlines/<run>.json``            why the flow itself stopped a run
* ``flows.jsonl``         every flow process that worked on it, with its Prefect flow run
* ``flow.lock``, ``flow.json``         held while a flow works on it; the kernel drops the lock

What is finished is decided by a sealed bundle whose manifest has the recorded hash, never by the
existence of one of these files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import filelock
from pydantic import TypeAdapter, ValidationError

from tasks import processes
from tasks.files import exclusive, read_json, write_json, write_text
from tasks.home import Home
from tasks.plan.sweep import Sweep, parse_sweep
from warehouse.errors import BadInput, CannotFindOut
from warehouse.registry import Outcome


def now() -> str:
    """Return the time as ISO 8601 UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


DEFAULT_TARGET = "local"
#: Opening a round is a few small files.
OPEN_S = 30.0

#: Outcomes after which a repeat is measured again, as a further attempt: nothing was found out
#: about the cell, or the prediction refused it and it is to be run after all. Every other typed
#: outcome is a result.
AGAIN = frozenset({Outcome.STOPPED.value, Outcome.LOST.value, Outcome.INFEASIBLE.value})


@dataclass(frozen=True, slots=True)
class RepeatState:
    """What is known of one repeat of one cell in one round."""

    cell_key: str
    repeat: int
    attempt: int
    run_uuid: str | None
    prediction_sha256: str | None
    outcome: str | None = None
    manifest_sha256: str | None = None
    at: str | None = None  # when this was written

    @property
    def to_be_repeated(self) -> bool:
        """Whether the recorded outcome asks for a further attempt."""
        return self.outcome in AGAIN


@dataclass(frozen=True, slots=True)
class Round:
    """One round's folder."""

    home: Home
    id: str
    sweep_name: str
    sweep_sha256: str
    label: str
    opened_at: str
    target: str
    seed: int | None = None  # of the cells' order; None: the plan's own order

    @property
    def is_night(self) -> bool:
        """Whether the label is a scheduled time: a night has a sentinel."""
        return re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ", self.label) is not None

    @property
    def folder(self) -> Path:
        """``rounds/<id>`` in the state folder."""
        return self.home.rounds / self.id

    @property
    def sweep_text(self) -> str:
        """The sweep file as it was when the round was opened.

        Raises :class:`CannotFindOut` where it is gone or damaged.
        """
        path = self.folder / "sweep.yaml"
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CannotFindOut(f"round {self.id}: {path} cannot be read: {error}") from error

    def sweep(self) -> Sweep:
        """The sweep as it was when the round was opened."""
        files = read_json(self.folder / "prompts.json") or {}
        return parse_sweep(
            self.sweep_text, where=f"round {self.id}", read=lambda name: str(files[name])
        )

    # -- repeats ----------------------------------------------------------------------------

    def _state_path(self, cell_key: str, repeat: int) -> Path:
        return self.folder / "repeats" / f"{cell_key}.{repeat}.json"

    def state(self, cell_key: str, repeat: int) -> RepeatState | None:
        """Return what is recorded of a cell's repeat, or ``None`` if nothing was intended yet."""
        value = read_json(self._state_path(cell_key, repeat))
        return _state(value) if value else None

    def states(self) -> list[RepeatState]:
        """Return the state of every recorded repeat."""
        paths = (self.folder / "repeats").glob("*.json")
        values = (read_json(path) for path in sorted(paths, key=str))  # paths compare slowly
        return [state for value in values if value and (state := _state(value))]

    def save(self, state: RepeatState) -> None:
        """Write a repeat's state, synced."""
        write_json(
            self._state_path(state.cell_key, state.repeat),
            {name: getattr(state, name) for name in FIELDS} | {"at": now()},
        )

    def is_open(self, cell_key: str, repeat: int) -> bool:
        """Whether an attempt was begun and not collected: its run may go on, whatever follows."""
        state = self.state(cell_key, repeat)
        return state is not None and state.manifest_sha256 is None

    def sealed(self, cell_key: str, repeat: int) -> RepeatState | None:
        """Return the state if its bundle is sealed with the recorded hash, else ``None``."""
        state = self.state(cell_key, repeat)
        return state if state is not None and self._is_sealed(state) else None

    def _is_sealed(self, state: RepeatState) -> bool:
        if state.run_uuid is None or state.manifest_sha256 is None:
            return False
        manifest = self.home.bundles.joinpath(state.run_uuid, "manifest.json")
        try:
            # Whole at once: a manifest is small, and there may be thousands of them.
            content = manifest.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return hashlib.sha256(content).hexdigest() == state.manifest_sha256

    def finished(self, cell_key: str, repeat: int) -> RepeatState | None:
        """Return the state if it is sealed with an outcome that is not to be measured again."""
        state = self.sealed(cell_key, repeat)
        return None if state is None or state.to_be_repeated else state

    def all_finished(self) -> dict[tuple[str, int], RepeatState]:
        """Return whatever :meth:`finished` would, by cell key and repeat, in one pass.

        Thousands of repeats are decided in under a second (tests/bench/decide.py).
        """
        return {
            (state.cell_key, state.repeat): state
            for state in self.states()
            if not state.to_be_repeated and self._is_sealed(state)
        }

    def note_left_out(self, cell_key: str, repeat: int, run_uuid: str, reason: str) -> None:
        """Record that a repeat is not measured because another run settles it."""
        value = {"run_uuid": run_uuid, "reason": reason, "at": now()}
        write_json(self.folder / "left-out" / f"{cell_key}.{repeat}.json", value)

    def left_out(self) -> set[tuple[str, int]]:
        """Return cell key and repeat of whatever another run of the round settles."""
        names = (path.name for path in (self.folder / "left-out").glob("*.*.json"))
        found = (re.fullmatch(r"([^.]+)\.([0-9]+)\.json", name) for name in names)
        return {(name[1], int(name[2])) for name in found if name}

    # -- predictions ------------------------------------------------------------------------

    def prediction_path(self, cell_key: str) -> Path:
        """Where a cell's prediction lies."""
        return self.folder / "predictions" / f"{cell_key}.json"

    def origin_path(self, cell_key: str, repeat: int, attempt: int) -> Path:
        """Where it stands who and what created an attempt's run."""
        return self.folder / "origins" / f"{cell_key}.{repeat}.{attempt}.json"

    # -- flows ------------------------------------------------------------------------------

    def note_flow(self, flow_run_id: str) -> None:
        """Record that this process works on the round as Prefect flow run ``flow_run_id``."""
        pid = os.getpid()
        line = {
            "flow_run_id": flow_run_id,
            "pid": pid,
            "start_ticks": processes.start_ticks(pid),
            "at": now(),
        }
        with (self.folder / "flows.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def dead_flows(self) -> list[str]:
        """Return the Prefect flow runs whose process is gone."""
        path = self.folder / "flows.jsonl"
        dead = []
        for line in (
            path.read_text(encoding="utf-8", errors="replace").splitlines()
            if path.is_file()
            else []
        ):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                if not processes.alive(entry["pid"], entry["start_ticks"]):
                    dead.append(entry["flow_run_id"])
        settled = self.folder / "settled.txt"
        known = set(settled.read_text().split()) if settled.exists() else set()
        return [flow for flow in dead if flow not in known]

    def note_settled(self, flow_run_id: str) -> None:
        """Record that a dead flow's run needs no further look."""
        with (self.folder / "settled.txt").open("a", encoding="utf-8") as file:
            file.write(flow_run_id + "\n")

    def holder(self) -> int | None:
        """Return the PID of the process that measures the round, or ``None``."""
        value = read_json(self.folder / "flow.json") or {}
        pid, ticks = value.get("pid"), value.get("start_ticks")
        if not isinstance(pid, int) or not isinstance(ticks, int | None):
            return None
        return pid if processes.alive(pid, ticks) else None

    def prefect_of_holder(self) -> str | None:
        """Return the Prefect API that the process which measures the round reports to."""
        value = (read_json(self.folder / "flow.json") or {}).get("prefect")
        return value if isinstance(value, str) else None

    @contextlib.contextmanager
    def only_flow(self) -> Iterator[None]:
        """Hold the round for this process; a second flow on it is refused with the holder's PID."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(self.folder / "flow.lock", timeout=0)
        try:
            lock.acquire()
        except filelock.Timeout as error:
            raise BadInput(
                f"round {self.id} is being measured by process {self.holder() or 'unknown'}; "
                "wait for it, or stop it with: memsweep stop"
            ) from error
        try:
            # An earlier request, forgotten before anybody can ask this process for a stop.
            self._stop_file.unlink(missing_ok=True)
            pid = os.getpid()
            write_json(
                self.folder / "flow.json",
                {
                    "pid": pid,
                    "start_ticks": processes.start_ticks(pid),
                    "prefect": os.environ.get("PREFECT_API_URL"),
                },
            )
            yield
        finally:
            (self.folder / "flow.json").unlink(missing_ok=True)
            lock.release()

    # -- deadlines --------------------------------------------------------------------------

    def _deadline_path(self, run_uuid: str) -> Path:
        return self.folder / "deadlines" / f"{run_uuid}.json"

    def note_deadline(self, run_uuid: str, reason: str, *, began: bool) -> None:
        """Record why the flow stops a run nobody asked to stop; Polyaxon keeps no reason.

        ``began``: whether the run was seen running, or only waited for its turn.
        """
        write_json(self._deadline_path(run_uuid), {"reason": reason, "began": began, "at": now()})

    def deadline_of(self, run_uuid: str) -> tuple[str, bool] | None:
        """Return reason and ``began`` as :meth:`note_deadline` recorded them of a run."""
        value = read_json(self._deadline_path(run_uuid))
        return None if value is None else (str(value.get("reason")), value.get("began") is True)

    # -- stop requests ----------------------------------------------------------------------

    @property
    def _stop_file(self) -> Path:
        return self.folder / "stop.json"

    def ask_stop(self, *, after_current: bool) -> None:
        """Ask the flow that works on the round to stop now, or after its current cells."""
        write_json(self._stop_file, {"after_current": after_current, "at": now()})

    def stop_asked(self) -> str | None:
        """Return ``now``, ``after-current`` or ``None``."""
        value = read_json(self._stop_file)
        if value is None:
            return None
        return "after-current" if value.get("after_current") else "now"


_FACTS = ("id", "sweep_name", "sweep_sha256", "label", "opened_at", "target")
FIELDS = (
    "cell_key",
    "repeat",
    "attempt",
    "run_uuid",
    "prediction_sha256",
    "outcome",
    "manifest_sha256",
    "at",
)


_STATE = TypeAdapter(RepeatState)


def _state(value: dict[str, object]) -> RepeatState | None:
    """Return the state that a file holds; ``None`` where it is not one (then it is made anew)."""
    try:
        return _STATE.validate_python({name: value.get(name) for name in FIELDS})
    except ValidationError:
        return None


def _later(moment: str, than: str) -> str:
    """Return a time, but always after another one."""
    if moment > than:
        return moment
    after = datetime.fromisoformat(than) + timedelta(milliseconds=1)
    return after.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _claim(home: Home, prefix: str, label: str | None) -> tuple[str, Path]:
    """Make the folder of a new round; return label and folder.

    Numbers come from the folders, not from what can be read in them: a damaged round keeps its own.
    A night whose opening was killed before its round.json was written is opened in its folder.
    """
    taken = (path.name.removeprefix(prefix) for path in home.rounds.glob(f"{prefix}*"))
    number = max((int(name) for name in taken if name.isdecimal()), default=0) + 1
    chosen = label or str(number)
    folder = home.rounds / f"{prefix}{chosen}"
    if (folder / "round.json").exists():
        raise CannotFindOut(
            f"round {folder.name}: its folder is there, but its round.json cannot be read; "
            f"move {folder} away to open it anew"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotFindOut(f"{folder}: cannot be made: {error.strerror}") from error
    return chosen, folder


def _plain(target: str) -> str:
    """Return a target (a profile's name or file) as part of a folder's name."""
    return re.sub(r"[^a-z0-9]+", "-", Path(target).stem.lower()).strip("-") or "target"


def rounds_of(home: Home, sweep_name: str | None = None) -> list[Round]:
    """Return the rounds in the state folder, oldest first, of one sweep name or of all."""
    paths = home.rounds.glob("*/round.json")
    read = (_round(home, path.parent.name, read_json(path) or {}) for path in paths)
    found = [r for r in read if r is not None and sweep_name in (None, r.sweep_name)]
    return sorted(found, key=lambda round_: (round_.opened_at, round_.id))


def damaged_rounds(home: Home) -> list[Path]:
    """Return the folders of rounds whose record cannot be read: nothing goes on with them."""
    folders = (path.parent for path in sorted(home.rounds.glob("*/round.json")))
    return [
        folder
        for folder in folders
        if _round(home, folder.name, read_json(folder / "round.json") or {}) is None
    ]


def _round(home: Home, folder: str, value: dict[str, object]) -> Round | None:
    """Return the round of a folder as its ``round.json`` tells; ``None`` where that is damaged."""
    facts = {"target": DEFAULT_TARGET} | {name: value[name] for name in _FACTS if name in value}
    texts = {name: fact for name, fact in facts.items() if isinstance(fact, str) and fact}
    seed = value.get("seed")
    if len(texts) != len(_FACTS) or texts["id"] != folder or not _is_time(texts["opened_at"]):
        return None
    return Round(home=home, **texts, seed=seed if isinstance(seed, int) else None)


def _is_time(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def newest_round(home: Home, sweep: Sweep, target: str, label: str | None = None) -> Round | None:
    """Return the round with which a sweep goes on on a target: its newest, or that of the label."""
    same = [
        r
        for r in rounds_of(home, sweep.name)
        if (r.sweep_sha256, r.target) == (sweep.sha256, target) and label in (None, r.label)
    ]
    return same[-1] if same else None


def open_round(
    home: Home,
    sweep: Sweep,
    sweep_text: str,
    *,
    target: str,
    fresh: bool,
    label: str | None = None,
) -> tuple[Round, bool]:
    """Return ``(round, is new)``: the sweep's newest round on the target, or a new one.

    A sweep whose content changed has another hash and so another round. ``label`` (a night's
    scheduled time) names the round to take or to open. Of two callers at once the second takes what
    the first opens.
    """
    with exclusive(home.rounds / "open.lock", wait_s=OPEN_S, what="rounds"):
        return _open_round(home, sweep, sweep_text, target=target, fresh=fresh, label=label)


def _open_round(
    home: Home, sweep: Sweep, sweep_text: str, *, target: str, fresh: bool, label: str | None
) -> tuple[Round, bool]:
    if not fresh and (newest := newest_round(home, sweep, target, label)) is not None:
        return newest, False
    known = rounds_of(home, sweep.name)
    place = "" if target == DEFAULT_TARGET else f"{_plain(target)}-"
    prefix = f"{sweep.name}-{sweep.sha256[:8]}-{place}"
    label, folder = _claim(home, prefix, label)
    round_id = folder.name
    value: dict[str, object] = {
        "format": 1,
        "id": round_id,
        "sweep_name": sweep.name,
        "sweep_sha256": sweep.sha256,
        "label": label,
        # The newest is the one opened last, also after the clock was set back.
        "opened_at": _later(now(), max((r.opened_at for r in known), default="")),
        "target": target,
        "seed": _seed_of(round_id),
    }
    write_text(folder / "sweep.yaml", sweep_text)
    if sweep.prompt_files:
        write_json(folder / "prompts.json", dict(sweep.prompt_files))
    write_json(folder / "round.json", value)
    opened = Round(
        home=home,
        id=round_id,
        sweep_name=sweep.name,
        sweep_sha256=sweep.sha256,
        label=label,
        opened_at=str(value["opened_at"]),
        target=target,
        seed=_seed_of(round_id),
    )
    return opened, True


def _seed_of(round_id: str) -> int:
    """Return the seed of a new round: another one each round, and nothing to be rolled for."""
    return int.from_bytes(hashlib.sha256(round_id.encode()).digest()[:4])
