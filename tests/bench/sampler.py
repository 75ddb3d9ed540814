"""How late is the server sampler, what does it cost, and does it change what it measures?

    python tests/bench/sampler.py lateness [--seconds 600] [--interval 0.25] [--busy 1]
    python tests/bench/sampler.py throughput [--pairs 5]      # real vLLM and EvalScope, minutes

``lateness`` samples a server whose gauge follows a known function of CLOCK_MONOTONIC, with
``--busy`` processes spinning beside it. ``throughput`` runs equal EvalScope levels alternately
with and without the sampler and prints the interval of the difference. One JSON object on
standard output.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tasks.pod.outputs import Lines
from tasks.pod.sampler import MetricsTake, Sampler
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
            sampler = Sampler("server", interval_s, Lines(path), MetricsTake(port))
            before = resource.getrusage(resource.RUSAGE_SELF)
            start = time.monotonic()
            sampler.start()
            time.sleep(seconds)
            sampler.stop()
            wall = time.monotonic() - start
            after = resource.getrusage(resource.RUSAGE_SELF)
            rows = [json.loads(line) for line in path.read_text().splitlines()]
    finally:
        for child in children:
            child.kill()
            child.wait()
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    settings = {"seconds": seconds, "interval_s": interval_s, "busy": busy, "cpus": os.cpu_count()}
    return settings | judge(rows, cpu, wall)


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
    options = parser.parse_args()
    # The run's pieces tell their events on standard output, which is for the result here.
    output = os.dup(1)
    os.dup2(2, 1)
    if options.command == "lateness":
        result = lateness(options.seconds, options.interval, options.busy)
    else:
        result = throughput(options.pairs)
    with os.fdopen(output, "w") as stream:
        stream.write(json.dumps({"format": 1, **result}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
