"""How fast and in how much memory ``parse-log`` reads 100 MB: run it, or see parse_log_test.py.

    python tests/bench/parse_log.py [MEGABYTES]

Kinds: ``serving`` (one start, then requests and throughput lines, as a server writes them for
days), ``restarts`` (a start-up log again and again, as a crash loop's), ``failures`` (a failed
start with its tracebacks again and again), ``one-line`` (no line break at all). Every start has its
own stamps and process numbers, so that no line is ever the same again.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "tests" / "data" / "vllm-logs"
KINDS = ("serving", "restarts", "failures", "one-line")


def content(kind: str, size: int) -> Iterator[bytes]:
    """Yield about ``size`` bytes of a log."""
    start = (LOGS / "cpu-0.27.0-qwen3-dense-three-processes-ok.log").read_bytes()
    start = start[: start.index(b"[shutdown]")] if b"[shutdown]" in start else start
    again = {
        "serving": b"".join(
            b'(APIServer pid=1) INFO:     127.0.0.1:%d - "POST /v1/chat/completions HTTP/1.1" 200 '
            b"OK\n(APIServer pid=1) INFO 11-29 18:25:03 [loggers.py:257] Engine 000: Avg prompt "
            b"throughput: %d.1 tokens/s, Avg generation throughput: 88.2 tokens/s, Running: 12 "
            b"reqs, Waiting: 55 reqs, GPU KV cache usage: 96.8%%, Prefix cache hit rate: 0.0%%\n"
            % (30_000 + i, i)
            for i in range(2_000)
        ),
        "restarts": (LOGS / "cpu-0.27.0-qwen3.5-hybrid-ok.log").read_bytes(),
        "failures": (LOGS / "cpu-0.27.0-kv-cache-larger-than-memory.log").read_bytes(),
        "one-line": b"x" * (1 << 20),
    }[kind]
    sent = turn = 0
    if kind == "serving":
        yield start
        sent = len(start)
    while sent < size:
        yield again if kind == "one-line" else varied(again, turn)
        sent, turn = sent + len(again), turn + 1


_TIME = re.compile(rb"\b(\d\d-\d\d) \d\d:\d\d:\d\d\b")
_PID = re.compile(rb"pid=\d+")


def varied(log: bytes, turn: int) -> bytes:
    """Return a log as another start would write it."""
    clock = b"%02d:%02d:%02d" % (turn // 3600 % 24, turn // 60 % 60, turn % 60)
    log = _TIME.sub(lambda found: found.group(1) + b" " + clock, log)
    return _PID.sub(b"pid=%d" % (10_000 + turn % 50_000), log)


def measure(kind: str, size: int) -> dict[str, Any]:
    """Parse one log in this process and return what it cost, making the log left out."""
    from tasks.capture import startup_log, text

    with tempfile.TemporaryFile() as file:
        for piece in content(kind, size):
            file.write(piece)
        file.seek(0)
        wall, cpu = time.perf_counter(), time.process_time()
        log = startup_log.parse(text.lines(iter(lambda: file.read(1 << 20), b"")))
    return {
        "kind": kind,
        "megabytes": size / 1e6,
        "lines": log.lines,
        "outcome": log.outcome,
        "wall_s": round(time.perf_counter() - wall, 2),
        "cpu_s": round(time.process_time() - cpu, 2),
        "peak_mib": peak_kib() // 1024,
    }


def peak_kib() -> int:
    """Return this process's peak of resident memory; ru_maxrss would count the parent's too."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def alone(kind: str, size: int) -> dict[str, Any]:
    """Measure in a process of its own, so that its peak of memory is its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--one", kind, str(size)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--one"]:
        sys.path.insert(0, str(ROOT))
        sys.stdout.write(json.dumps(measure(arguments[1], int(arguments[2]))))
        return
    size = int(float(arguments[0]) * 1e6) if arguments else 100_000_000
    for kind in KINDS:
        sys.stdout.write(json.dumps(alone(kind, size)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
