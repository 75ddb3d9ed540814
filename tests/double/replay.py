"""A recorded run again: its log and its metrics, each at the moment it was written down.

For parsers and samplers a recording is the only server that is certainly true; here it also takes
its time. Everything is relative to the start of the server. Log lines carry whole seconds, and only
some do: a line without a stamp comes with the one before it, and the line that says that the server
is up is put where the run found it healthy. ``/metrics`` is the recorded page with the values that
were sampled last; answers to prompts are made up at once.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import signal
import sys
import time
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.pod.families import FAMILIES
from tests.double.wire import chunk, event, follow, reply

_STAMP = re.compile(rb"\b(?:[A-Z]+) (\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)\b")
_UP = b"Application startup complete"
_DAY_S = 86_400


@dataclass(frozen=True)
class Recording:
    """What a run left, in seconds from the start of its server.

    ``healthy_s`` is None where it never was, ``ended_s`` where somebody stopped it.
    """

    lines: list[tuple[float, bytes]]
    samples: list[tuple[float, dict[str, float | None]]]
    page: str
    healthy_s: float | None
    ended_s: float | None
    exit_code: int
    info: dict[str, Any]
    completion: object

    @classmethod
    def read(cls, folder: Path) -> Recording:
        """Read a run's outputs or its bundle."""
        events = {line["event"]: line["t_s"] for line in _json_lines(folder, "events.jsonl")}
        start = events["server_start"]
        healthy = events.get("server_healthy")
        healthy_s = None if healthy is None else healthy - start
        end_s = events.get("run_end", start) - start
        log = (folder / "server.log").read_bytes().splitlines(keepends=True)
        stop = _json(folder, "stop.json")
        gone = bool(stop.get("exited_before_stop"))
        readiness = _json(folder, "readiness.json")
        page = folder / "metrics_first.txt"
        return cls(
            # Whole seconds: the last lines may seem to come after the end.
            lines=[
                (min(at, max(end_s, 0.0)), line)
                for at, line in zip(line_times(log, healthy_s), log, strict=True)
            ],
            samples=[
                (row["t_s"] - start, row["values"])
                for row in _json_lines(folder, "raw/server_samples.jsonl")
                if row["state"] != "missed"
            ],
            page=page.read_text(encoding="utf-8") if page.is_file() else "",
            healthy_s=healthy_s,
            ended_s=end_s if gone else None,
            exit_code=int(stop.get("server_exit_code") or 0) if gone else 0,
            info=_json(folder, "server_info.json"),
            completion=readiness.get("completion", {}).get("response"),
        )

    def page_at(self, elapsed_s: float) -> str:
        """Return the /metrics page as it was ``elapsed_s`` after the start of the server."""
        index = bisect_right([at for at, _ in self.samples], elapsed_s) - 1
        return with_values(self.page, self.samples[index][1]) if index >= 0 else self.page


def line_times(lines: Iterable[bytes], healthy_s: float | None) -> list[float]:
    """Return when each line of a log was written, seconds from the start of the server."""
    times: list[float] = []
    first: int | None = None
    now, up = 0, None
    for line in lines:
        stamp = _STAMP.search(line, 0, 200)
        if stamp:
            month, day, hour, minute, second = (int(part) for part in stamp.groups())
            seconds = (month * 31 + day) * _DAY_S + hour * 3600 + minute * 60 + second
            first = seconds if first is None else first
            now = max(now, seconds - first)
        if up is None and _UP in line:
            up = now
        times.append(float(now))
    before = 0.0 if healthy_s is None or up is None else max(0.0, healthy_s - up)
    return [at + before for at in times]


def with_values(page: str, values: dict[str, float | None]) -> str:
    """Return ``page`` with the sampled values; of several series of a family the first has all."""
    wanted = {name: values.get(key) for key, names in FAMILIES.items() for name in names}
    seen: set[str] = set()
    lines = []
    for line in page.split("\n"):
        name = re.match(r"[\w:]+", line)
        value = wanted.get(name.group()) if name else None
        if name and value is not None and not line.startswith("#"):
            head = line.rpartition(" ")[0]
            line = f"{head} {0.0 if name.group() in seen else float(value)}"
            seen.add(name.group())
        lines.append(line)
    return "\n".join(lines)


class Replay:
    """A server that lives a recording again, ``speed`` times as fast."""

    def __init__(self, folder: Path, speed: float) -> None:
        self._recording = Recording.read(folder)
        self._speed = speed
        self._start_s = time.monotonic()

    async def serve(self, host: str, port: int) -> int:
        """Live it; returns the exit code."""
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        tasks = [asyncio.create_task(self._log()), asyncio.create_task(self._listen(host, port))]
        ended = self._recording.ended_s
        waits: list[asyncio.Task[Any]] = [asyncio.create_task(stopped.wait())]
        if ended is not None:
            waits.append(asyncio.create_task(self._until(ended)))
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not stopped.is_set():
            await tasks[0]
        for task in tasks:
            task.cancel()
        return 0 if stopped.is_set() else self._recording.exit_code

    async def _until(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, self._start_s + at_s / self._speed - time.monotonic()))

    async def _log(self) -> None:
        for at_s, line in self._recording.lines:
            await self._until(at_s)
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()

    async def _listen(self, host: str, port: int) -> None:
        if self._recording.healthy_s is None:
            return
        await self._until(self._recording.healthy_s)
        async with await asyncio.start_server(self._client, host, port) as server:
            await server.serve_forever()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await follow(reader, writer, self._answer)

    async def _answer(
        self, method: str, path: str, body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        recording = self._recording
        if path == "/health":
            reply(writer, 200, b"")
        elif path == "/version":
            reply(writer, 200, recording.info["version"])
        elif path == "/v1/models":
            reply(writer, 200, recording.info["models"])
        elif path == "/metrics":
            elapsed = (time.monotonic() - self._start_s) * self._speed
            page = recording.page_at(elapsed)
            reply(writer, 200, page.encode(), kind="text/plain; version=0.0.4")
        elif method == "POST":
            self._complete(json.loads(body), writer)
        else:
            reply(writer, 404, {"detail": "Not Found"})
        await writer.drain()

    def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if not body.get("stream"):
            reply(writer, 200, self._recording.completion)
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        tokens = int(body.get("max_tokens") or 1)
        for number in range(1, tokens + 1):
            finish = "length" if number == tokens else None
            delta = {"index": 0, "delta": {"content": "a "}, "finish_reason": finish}
            event(writer, {"choices": [delta]})
        usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
        event(writer, {"choices": [], "usage": usage})
        chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


def _json(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    held: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return held


def _json_lines(folder: Path, name: str) -> list[dict[str, Any]]:
    path, packed = folder / name, folder / f"{name}.gz"
    if path.is_file():
        text = path.read_text("utf-8")
    elif packed.is_file():
        text = gzip.decompress(packed.read_bytes()).decode("utf-8")
    else:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
