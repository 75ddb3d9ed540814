"""How late is the server sampler, what does it cost, and does it change what it measures?

    python tests/bench/sampler.py proof                       # all of it, 25 minutes, quiet machine
    python tests/bench/sampler.py lateness [--seconds 600] [--interval 0.25] [--busy 1]
    python tests/bench/sampler.py throughput [--pairs 5]      # real vLLM and EvalScope, minutes

``lateness`` samples a server whose gauge follows a known function of CLOCK_MONOTONIC, with
``--busy`` processes spinning beside it and what else the run does meanwhile: resident memory every
second, and looking at its files fifty times a second. ``throughput`` runs equal EvalScope levels
alternately with and without the sampler and prints the interval of the difference. ``proof`` runs
``lateness`` with one busy core and with all of them busy, and ``throughput``; it refuses a machine
that is not quiet, holds the figures against what is wanted and exits 1 where one misses it. One
JSON object on standard output, what is going on on standard error.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tasks import processes
from tasks.pod.__main__ import be_punctual
from tasks.pod.outputs import Lines
from tasks.pod.sampler import MetricsTake, Sampler, Take
from tasks.processes import free_port

#: Size of a real page of vLLM 0.27.0.
PAGE_BYTES = 48_000
PERIOD_S = 7.0

SERVER = """
import http.server, math, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    def do_GET(self):
        value = 0.5 + 0.5 * math.sin(2 * math.pi * time.monotonic() / {period})
        page = ('vllm:request_latency_bucket{{le="0.5",engine="0"}} 0.0\\n' * {lines}
                + f'vllm:kv_cache_usage_perc{{{{engine="0"}}}} {{value!r}}\\n').encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
SPIN = "while True: pass"
#: What is wanted with one busy core: at least or at most.
WANTED: dict[str, tuple[str, float]] = {
    "lateness_p99_ms": ("<=", 10.0),
    "kept_percent": (">=", 99.5),
    "cpu_percent_of_a_core": ("<=", 2.0),
    "values_off_the_function": ("<=", 0),
}
#: A machine is quiet when nothing waits for a core: the kernel's share of such time, percent.
QUIET_PERCENT = 2.0


def gauge(at_s: float) -> float:
    """The server's gauge at a moment of CLOCK_MONOTONIC."""
    return 0.5 + 0.5 * math.sin(2 * math.pi * at_s / PERIOD_S)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that ``share`` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def within(value: float, start_s: float, end_s: float) -> bool:
    """Whether the gauge had ``value`` at some moment between start and end."""
    steps = [gauge(start_s + (end_s - start_s) * i / 50) for i in range(51)]
    slack = 2 * math.pi / PERIOD_S * 0.001
    return min(steps) - slack <= value <= max(steps) + slack


def judge(rows: Sequence[dict[str, Any]], cpu_s: float, wall_s: float) -> dict[str, Any]:
    """Return the figures of issue and README from the sampler's own rows."""
    taken = [row for row in rows if row["state"] != "missed"]
    late = [1000 * (row["t_s"] - row["due_s"]) for row in taken]
    wrong = [
        row["tick"]
        for row in taken
        if not within(row["values"]["kv_usage_ratio"], row["t_s"], row["t_s"] + row["took_s"])
    ]
    return {
        "ticks": len(rows),
        "kept_percent": 100 * len(taken) / len(rows),
        "lateness_p50_ms": quantile(late, 0.50),
        "lateness_p99_ms": quantile(late, 0.99),
        "lateness_max_ms": max(late),
        "took_p50_ms": 1000 * quantile([row["took_s"] for row in taken], 0.5),
        "cpu_percent_of_a_core": 100 * cpu_s / wall_s,
        "values_off_the_function": len(wrong),
    }


def lateness(seconds: float, interval_s: float, busy: int) -> dict[str, Any]:
    """Sample for ``seconds`` with ``busy`` spinning processes; returns the figures."""
    port = free_port()
    lines = PAGE_BYTES // 53
    program = SERVER.format(period=PERIOD_S, lines=lines)
    children = [subprocess.Popen([sys.executable, "-c", program, str(port)])]
    children += [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(busy)]
    try:
        time.sleep(1.0)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.jsonl"
            metrics = MetricsTake(port)
            take = Counted(metrics)
            sampler = Sampler("server", interval_s, Lines(path), take)
            beside = Sampler("process", 1.0, Lines(Path(folder) / "beside.jsonl"), resident)
            start = time.monotonic()
            beside.start()
            sampler.start()
            while time.monotonic() - start < seconds:
                path.stat()
                time.sleep(0.02)
            sampler.stop()
            beside.stop()
            metrics.close()
            wall = time.monotonic() - start
            rows = [json.loads(line) for line in path.read_text().splitlines()]
    finally:
        for child in children:
            child.kill()
            child.wait()
    settings = {"seconds": seconds, "interval_s": interval_s, "busy": busy, "cpus": os.cpu_count()}
    return settings | judge(rows, take.cpu_s, wall)


class Counted:
    """A take that notes the CPU time of the thread that calls it, seconds."""

    def __init__(self, take: Take) -> None:
        self._take = take
        self.cpu_s = 0.0

    def __call__(self) -> dict[str, object]:
        """Take a sample."""
        found = self._take()
        self.cpu_s = time.thread_time()
        return found


def resident() -> dict[str, object]:
    """Take what the run takes of its processes every second."""
    members = [one for one in processes.table().values() if one.running]
    return {"rss_bytes": sum(one.rss_bytes for one in members)}


def pressure_percent() -> float | None:
    """Return the share of the last ten seconds in which something waited for a core."""
    try:
        line = Path("/proc/pressure/cpu").read_text().splitlines()[0]
    except OSError:
        return None
    return float(line.split("avg10=")[1].split()[0])


def missed(figures: dict[str, Any]) -> list[str]:
    """Return which of the wanted figures were not reached."""
    return [
        f"{name}: got {figures[name]:.4g}, wanted {sign} {bound:g}"
        for name, (sign, bound) in WANTED.items()
        if not (figures[name] <= bound if sign == "<=" else figures[name] >= bound)
    ]


def proof(seconds: float, pairs: int, *, anyway: bool) -> dict[str, Any]:
    """Measure all there is to measure; ``missed`` lists what was wanted and not reached.

    Raises ``SystemExit`` on a machine that is not quiet, unless ``anyway``.
    """
    pressure = pressure_percent()
    if pressure is not None and pressure > QUIET_PERCENT and not anyway:
        raise SystemExit(
            f"not quiet: something waited for a core {pressure} % of the last 10 s, wanted at most "
            f"{QUIET_PERCENT} %; end it, or measure all the same with --anyway"
        )
    result: dict[str, Any] = {"pressure_percent_before": pressure}
    for name, busy in (("one_core_busy", 1), ("all_cores_busy", os.cpu_count() or 1)):
        sys.stderr.write(f"{name}: {seconds:g} s\n")
        result[name] = lateness(seconds, 0.25, busy)
    sys.stderr.write(f"throughput: {pairs} pairs on real vLLM and EvalScope\n")
    result["throughput"] = throughput(pairs)
    result["missed"] = missed(result["one_core_busy"])
    return result


def interval_of(differences: Sequence[float]) -> dict[str, float]:
    """Mean of paired differences, its 95 % interval and the smallest effect 80 % power shows."""
    from scipy import stats

    number = len(differences)
    error = statistics.stdev(differences) / math.sqrt(number)
    edge = float(stats.t.ppf(0.975, number - 1)) * error
    mean = statistics.fmean(differences)
    power = float(stats.t.ppf(0.80, number - 1)) * error
    return {
        "mean_percent": mean,
        "low_percent": mean - edge,
        "high_percent": mean + edge,
        "smallest_effect_percent": edge + power,
    }


def throughput(pairs: int) -> dict[str, Any]:
    """Run ``2 * pairs`` equal levels on one real server, the sampler on in every other one."""
    from tests.bench.sampler_real import Levels

    with tempfile.TemporaryDirectory() as folder:
        rates = Levels(Path(folder), pairs).run()
    differences = [100 * (with_sampler - without) / without for without, with_sampler in rates]
    return {
        "pairs_tokens_per_s": rates,
        "differences_percent": differences,
        **interval_of(differences),
    }


def main() -> int:
    """Run one of the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    late = commands.add_parser("lateness")
    late.add_argument("--seconds", type=float, default=600)
    late.add_argument("--interval", type=float, default=0.25)
    late.add_argument("--busy", type=int, default=1)
    commands.add_parser("throughput").add_argument("--pairs", type=int, default=5)
    whole = commands.add_parser("proof")
    whole.add_argument("--seconds", type=float, default=600)
    whole.add_argument("--pairs", type=int, default=5)
    whole.add_argument("--anyway", action="store_true", help="measure on a machine in use")
    options = parser.parse_args()
    # The run's pieces tell their events on standard output, which is for the result here.
    output = os.dup(1)
    os.dup2(2, 1)
    be_punctual()
    if options.command == "lateness":
        result = lateness(options.seconds, options.interval, options.busy)
    elif options.command == "throughput":
        result = throughput(options.pairs)
    else:
        result = proof(options.seconds, options.pairs, anyway=options.anyway)
    with os.fdopen(output, "w") as stream:
        stream.write(json.dumps({"format": 1, **result}, indent=1) + "\n")
    for line in result.get("missed", []):
        sys.stderr.write(line + "\n")
    return 1 if result.get("missed") else 0


if __name__ == "__main__":
    sys.exit(main())
