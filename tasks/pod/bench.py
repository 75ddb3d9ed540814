"""The run's side of the load: starts the driver, follows its events, counts what succeeded.

Neither EvalScope's exit code nor its summary is evidence: it returns 0 with every request failed
and writes sentinels (-1, 0.0) into the summary. Nor is its column ``success``: an engine that dies
ends every stream with an error event under status 200, and all of them are called successful (seen
with 1.9.1 and vLLM 0.27.0). What counts are whole answers, see tasks/answers.py.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tasks import answers, prompts
from tasks.pod.argv import SERVED_NAME
from tasks.pod.clock import now_s
from tasks.pod.inputs import LoadPoint
from tasks.pod.outputs import Outputs
from tasks.pod.phases import Phases

FOLDER = "bench"
LOAD_POINTS = f"{FOLDER}/load_points.json"
#: EvalScope uses one setting as the total of a level's connection test and of every request.
MIN_TOTAL_TIMEOUT_S = 600
_ROWS_A_COMMIT = 8
_GRACE_S = 2.0


@dataclass
class LoadPointState:
    """What became of one load point; ``sent`` and ``succeeded`` count rows of the database.

    ``succeeded`` counts whole answers only, see :func:`count_rows`. ``requests_sha256`` hashes the
    measured requests as they were sent, in order; None where not every row kept its request.
    ``prompt_tokens_differ`` counts whole answers whose prompt had other tokens at the server than
    the prompt file states; None for random prompts.
    ``client_lag`` says how late the client's event loop ran while measuring (bench_driver.LoopLag),
    or is None and ``client_lag_reason`` says why.
    """

    index: int
    asked: int
    seed: int
    dataset_offset: int
    sent: int = 0
    succeeded: int = 0
    failed: int = 0
    state: str = "skipped"
    error: str | None = None
    requests_sha256: str | None = None
    prompt_tokens_differ: int | None = None
    client_lag: dict[str, object] | None = None
    client_lag_reason: str | None = "the load point was not begun"


@dataclass(frozen=True, slots=True)
class Rows:
    """What a level's database says; times are CLOCK_MONOTONIC seconds.

    ``prompt_tokens`` are the served ones in the order of sending, None for an answer not whole.
    """

    total: int
    succeeded: int
    first_start_s: float | None
    last_end_s: float | None
    requests_sha256: str | None
    prompt_tokens: tuple[int | None, ...] = ()


def level_arguments(
    point: LoadPoint,
    *,
    index: int,
    offset: int,
    url: str,
    model: Path,
    folder: Path,
    limit_s: float,
) -> dict[str, object]:
    """Return EvalScope's arguments for one load point: pure, tested against a golden."""
    source: dict[str, object] = {
        "dataset": point.dataset,
        "min_prompt_length": point.prompt_tokens,
        "max_prompt_length": point.prompt_tokens,
        "prefix_length": point.prefix_tokens,
    }
    if point.prompts:
        # A line that is a JSON list of messages is sent as it is, whatever its length.
        path = folder / prompts_name(index)
        source = {"dataset": "line_by_line", "dataset_path": str(path)}
    return {
        "model": SERVED_NAME,
        "model_id": SERVED_NAME,
        "api": "openai",
        "url": url,
        "tokenizer_path": str(model),
        **source,
        "apply_chat_template": True,
        "min_tokens": point.output_tokens if point.ignore_eos else None,
        "max_tokens": point.output_tokens,
        "parallel": point.parallel,
        "number": point.number,
        "warmup_num": point.warmup,
        "seed": point.seed,
        "dataset_offset": offset,
        "temperature": point.temperature,
        "stream": True,
        "extra_args": {
            "ignore_eos": point.ignore_eos,
            "chat_template_kwargs": {"enable_thinking": point.enable_thinking},
        },
        "no_test_connection": True,
        "connect_timeout": 30,
        "total_timeout": max(MIN_TOTAL_TIMEOUT_S, int(limit_s)),
        "sleep_interval": 0,
        "num_workers": 1,
        "db_commit_interval": _ROWS_A_COMMIT,
        "no_timestamp": True,
        "outputs_dir": str(folder),
        "name": f"load_point_{index}",
    }


def offsets(load: tuple[LoadPoint, ...]) -> list[int]:
    """Return where in the vocabulary each load point's prompts begin, so that none repeats one.

    A load point with a prompt file begins with its first prompt.
    """
    found, at = [], 0
    for point in load:
        found.append(0 if point.prompts else at)
        at += 0 if point.prompts else point.warmup + point.number
    return found


def prompts_name(index: int) -> str:
    """Return the name of the file of a load point's frozen prompts, below :data:`FOLDER`."""
    return f"prompts_{index}.jsonl"


def prompt_lines(point: LoadPoint) -> str:
    """Return what EvalScope is to send, in order, one list of messages a line."""
    sent = prompts.in_order(point.prompts, warmup=point.warmup, number=point.number)
    return "".join(json.dumps([{"role": "user", "content": prompt.text}]) + "\n" for prompt in sent)


@dataclass
class Bench:
    """The driver process and the state of every load point."""

    load: tuple[LoadPoint, ...]
    limits_s: tuple[float, ...]
    python: Path
    environment: dict[str, str]
    model: Path
    port: int
    outputs: Outputs
    phases: Phases
    states: list[LoadPointState] = field(default_factory=list)
    imported: bool = False
    waiting: int | None = None
    failure: str | None = None
    _hooked: bool = False
    _process: subprocess.Popen[bytes] | None = None
    _starts: int = 0
    _read: int = 0
    _current: int | None = None
    _events: Path | None = None

    def __post_init__(self) -> None:
        self.states = [
            LoadPointState(index, point.number, point.seed, offset)
            for index, (point, offset) in enumerate(zip(self.load, offsets(self.load), strict=True))
        ]
        self._write()

    @property
    def pid(self) -> int | None:
        """PID of the driver, also its process group."""
        return None if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        """Whether the driver runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pending(self) -> list[int]:
        """Load points that were not begun."""
        return [state.index for state in self.states if state.state == "skipped"]

    def start(self) -> None:
        """Start a driver for what is pending; it waits for :meth:`go` before each load point.

        Raises ``OSError`` when it cannot be started.
        """
        name = f"{FOLDER}/driver_{self._starts}"
        self._starts, self._read = self._starts + 1, 0
        self._events = self.outputs.path(f"{name}.jsonl")
        self._events.touch()
        spec = {
            "events": str(self._events),
            "tokenizer_path": str(self.model),
            "levels": [self._level(index) for index in self.pending],
        }
        self.outputs.write(f"{name}.json", spec)
        for index in self.pending:
            if self.load[index].prompts:
                lines = prompt_lines(self.load[index])
                self.outputs.write_bytes(f"{FOLDER}/{prompts_name(index)}", lines.encode())
        self.imported, self.waiting, self.failure = False, None, None
        with self.outputs.path("bench.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    str(self.python),
                    "-P",
                    str(Path(__file__).with_name("bench_driver.py")),
                    str(self.outputs.path(f"{name}.json")),
                ],
                env=self.environment,
                cwd=self.outputs.path(FOLDER).parent,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def go(self) -> None:
        """Let the driver begin the load point it waits for."""
        self.waiting = None
        if self._process is not None and self._process.stdin is not None:
            try:
                self._process.stdin.write(b"go\n")
                self._process.stdin.flush()
            except OSError as error:
                self.failure = self.failure or f"the driver did not take the start: {error}"

    def follow(self) -> None:
        """Read what the driver said since the last call."""
        for event in self._new_events():
            handler = getattr(self, f"_on_{event.get('event')}", None)
            if handler is not None:
                handler(event)

    def end(self, error: str | None = None) -> None:
        """End the driver and whatever it started; an open load point ends with ``error``."""
        self.kill()
        self.follow()
        if self._current is not None:
            self._close_level(self._current, error or "the driver ended in the middle", now_s())

    def kill(self) -> None:
        """TERM, then KILL the driver's process group; never raises."""
        process = self._process
        if process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
            except (ProcessLookupError, PermissionError):
                break
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                continue
        if process.stdin is not None:
            try:
                process.stdin.close()
            except OSError:
                return

    def _level(self, index: int) -> dict[str, object]:
        return {
            "index": index,
            "limit_s": self.limits_s[index],
            "arguments": level_arguments(
                self.load[index],
                index=index,
                offset=self.states[index].dataset_offset,
                url=f"http://127.0.0.1:{self.port}/v1/chat/completions",
                model=self.model,
                folder=self.outputs.root / FOLDER,
                limit_s=self.limits_s[index],
            ),
        }

    def _new_events(self) -> list[dict[str, object]]:
        if self._events is None:
            return []
        try:
            with self._events.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        found: list[dict[str, object]] = []
        for line in whole.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                found.append(event)
        return found

    def _on_imported(self, event: dict[str, object]) -> None:
        self.imported, self._hooked = True, event.get("phases_hooked") is True
        self.outputs.event(
            "bench_imported",
            seconds=event.get("seconds"),
            version=event.get("version"),
            phases_hooked=event.get("phases_hooked"),
        )

    def _on_import_failed(self, event: dict[str, object]) -> None:
        self.failure = f"EvalScope cannot be imported: {event.get('error')}"

    def _on_waiting(self, event: dict[str, object]) -> None:
        self.waiting = _index(event)

    def _on_level_start(self, event: dict[str, object]) -> None:
        index = _index(event)
        self._current = index
        self.states[index].state = "failed"
        self.states[index].client_lag_reason = (
            "the measurement did not end"
            if self._hooked
            else "EvalScope's phases could not be hooked"
        )
        self.outputs.event("load_point_start", index=index, at_s=event.get("t_s"))
        self._write()

    def _on_phase_start(self, event: dict[str, object]) -> None:
        self.phases.start(str(event.get("phase")), _index(event), at_s=_time(event), source="hook")

    def _on_phase_end(self, event: dict[str, object]) -> None:
        index, name, at = _index(event), str(event.get("phase")), _time(event)
        self.phases.end(name, index, at_s=at)
        if name == "measure":
            lag, state = event.get("loop_lag"), self.states[index]
            state.client_lag = dict(lag) if isinstance(lag, dict) else None
            state.client_lag_reason = None if state.client_lag else "the measurement was too short"
            if at is not None:
                self.phases.start("drain", index, at_s=at, source="hook")

    def _on_level_end(self, event: dict[str, object]) -> None:
        error = event.get("error")
        self._close_level(_index(event), str(error) if error else None, _time(event) or now_s())

    def _close_level(self, index: int, error: str | None, at_s: float) -> None:
        self._current = None
        state, point = self.states[index], self.load[index]
        for name in ("warmup", "measure", "drain"):
            self.phases.end(name, index, at_s=at_s)
        database = (
            self.outputs.root
            / FOLDER
            / f"load_point_{index}"
            / f"parallel_{point.parallel}_number_{point.number}"
            / "benchmark_data.db"
        )
        try:
            rows = count_rows(
                database,
                answer_tokens=answers.answer_tokens(
                    output_tokens=point.output_tokens, ignore_eos=point.ignore_eos
                ),
            )
        except (OSError, sqlite3.Error) as problem:
            rows = Rows(0, 0, None, None, None)
            error = error or f"{database.name}: {problem}"
        state.sent, state.succeeded = rows.total, rows.succeeded
        state.failed, state.error = rows.total - rows.succeeded, error
        state.requests_sha256 = rows.requests_sha256
        state.prompt_tokens_differ = differing_tokens(point, rows)
        state.state = verdict(state)
        if state.error is None and state.state != "ok":
            state.error = f"{state.succeeded} of {state.asked} requests were answered whole"
        if rows.first_start_s and rows.last_end_s and not self.phases.has("measure", index):
            self.phases.add("measure", index, rows.first_start_s, rows.last_end_s, "database")
        self.outputs.event(
            "load_point_end",
            index=index,
            state=state.state,
            succeeded=state.succeeded,
            asked=state.asked,
            error=state.error,
        )
        self._write()

    def _write(self) -> None:
        self.outputs.write(LOAD_POINTS, [asdict(state) for state in self.states])


def verdict(state: LoadPointState) -> str:
    """Return ``ok`` only when every request asked for succeeded and nothing was reported."""
    if state.succeeded == state.asked == state.sent and state.error is None:
        return "ok"
    return "partial" if state.succeeded else "failed"


def count_rows(database: Path, *, answer_tokens: int) -> Rows:
    """Count a level's requests; one succeeded when it was answered whole.

    The hash is over the requests in the order they were sent: EvalScope stamps each as it sends it
    and writes it when it is done. Raises ``OSError`` or ``sqlite3.Error`` when the database cannot
    be read.
    """
    if not database.is_file():
        raise FileNotFoundError(f"{database.name} was not written")
    # Opened for writing on purpose: after a kill SQLite rolls an open transaction back first.
    with closing(sqlite3.connect(database, timeout=_GRACE_S)) as connection:
        total, first, last = connection.execute(
            "SELECT count(*), min(nullif(start_time, 0)), max(nullif(completed_time, 0))"
            " FROM result"
        ).fetchone()
        rows = connection.execute(
            "SELECT success, prompt_tokens, completion_tokens, response_messages FROM result"
            " ORDER BY start_time, rowid"
        )
        served = [
            prompt
            if answers.whole(
                success=success,
                prompt=prompt,
                output=output,
                messages=messages,
                answer_tokens=answer_tokens,
            )
            else None
            for success, prompt, output, messages in rows
        ]
        bodies = connection.execute("SELECT request FROM result ORDER BY start_time, rowid")
        sent = answers.requests_sha256(body for (body,) in bodies)
    succeeded = sum(prompt is not None for prompt in served)
    return Rows(int(total), succeeded, first, last, sent, tuple(served))


def differing_tokens(point: LoadPoint, rows: Rows) -> int | None:
    """Return how many whole answers had another prompt length than the prompt file states."""
    if not point.prompts:
        return None
    stated = prompts.in_order(point.prompts, warmup=0, number=rows.total)
    return sum(
        got is not None and got != wanted.tokens
        for got, wanted in zip(rows.prompt_tokens, stated, strict=True)
    )


def _index(event: dict[str, object]) -> int:
    index = event.get("index")
    return index if isinstance(index, int) else 0


def _time(event: dict[str, object]) -> float | None:
    at = event.get("t_s")
    return float(at) if isinstance(at, int | float) else None
