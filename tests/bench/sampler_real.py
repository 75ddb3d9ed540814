"""Equal EvalScope levels on one real server, with and without the sampler (for sampler.py)."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from tasks.home import Home
from tasks.launch import environments, models
from tasks.pod.argv import bench_variables, child_environment, engine_argv, engine_variables
from tasks.pod.bench import Bench
from tasks.pod.inputs import parse_cell
from tasks.pod.interrupt import Interrupt
from tasks.pod.outputs import Lines, Outputs
from tasks.pod.phases import Phases
from tasks.pod.readiness import Readiness
from tasks.pod.sampler import MetricsTake, Sampler
from tasks.pod.server import Server
from tasks.pod.watch import Watch
from tasks.processes import free_port
from tests.double import cells

LEVEL = {"parallel": 8, "number": 96, "warmup": 8, "output_tokens": 128}


class Levels:
    """One server start, ``2 * pairs`` levels; in every other level the sampler runs."""

    def __init__(self, folder: Path, pairs: int) -> None:
        home = Home.find()
        environments.ensure(home, ("engine", "bench"), progress=print)
        model = models.ensure(home, "tiny-qwen3", progress=print)
        self.cell = parse_cell(
            cells.cell_text(
                server={"kv_cache_memory_bytes": 1 << 28},
                load=[LEVEL] * (2 * pairs),
                limits={"load_point_s": [300.0] * (2 * pairs)},
            )
        )
        self.outputs = Outputs(folder / "outputs")
        port = free_port()
        self.server = Server(
            argv=engine_argv(
                self.cell.server,
                engine=environments.folder(home, "engine") / "bin" / "vllm",
                model=model,
                port=port,
            ),
            environment=child_environment(os.environ, engine_variables("cpu", home.cache)),
            port=port,
            log=self.outputs.root / "server.log",
            folder=home.cache,
        )
        self.bench = Bench(
            load=self.cell.load,
            limits_s=self.cell.limits.load_point_s,
            python=environments.python(home, "bench"),
            environment=child_environment(os.environ, bench_variables(home.cache)),
            model=model,
            port=port,
            outputs=self.outputs,
            phases=Phases(self.outputs),
        )

    def run(self) -> list[tuple[float, float]]:
        """Return output tokens per second of each pair: without and with the sampler."""
        self.server.start()
        try:
            watch = Watch(Interrupt(), self.server)
            readiness = Readiness(self.server.port, self.outputs, watch)
            readiness.wait_healthy(300)
            readiness.complete(120)
            self.bench.start()
            self._levels()
        finally:
            self.bench.end()
            self.server.stop(30)
            self.outputs.close()
        rates = [self._rate(index) for index in range(len(self.cell.load))]
        # Within a pair the order changes from pair to pair, so that a drift cancels out.
        pairs = [(rates[i], rates[i + 1]) for i in range(0, len(rates), 2)]
        return [pair if i % 2 == 0 else (pair[1], pair[0]) for i, pair in enumerate(pairs)]

    def _levels(self) -> None:
        sampler: Sampler | None = None
        while self.bench.running:
            self.bench.follow()
            if self.bench.waiting is not None:
                if sampler is not None:
                    sampler.stop()
                    sampler = None
                if self._sampled(self.bench.waiting):
                    lines = Lines(self.outputs.path(f"raw/{self.bench.waiting}.jsonl"))
                    sampler = Sampler("server", 0.25, lines, MetricsTake(self.server.port))
                    sampler.start()
                self.bench.go()
            time.sleep(0.02)
        if sampler is not None:
            sampler.stop()

    def _sampled(self, index: int) -> bool:
        second = index % 2 == 1
        return second if index // 2 % 2 == 0 else not second

    def _rate(self, index: int) -> float:
        state, point = self.bench.states[index], self.cell.load[index]
        assert state.state == "ok", json.dumps(state.error)
        database = (
            self.outputs.root
            / f"bench/load_point_{index}/parallel_{point.parallel}_number_{point.number}"
            / "benchmark_data.db"
        )
        with closing(sqlite3.connect(database)) as connection:
            tokens, start, end = connection.execute(
                "SELECT sum(completion_tokens), min(start_time), max(completed_time) FROM result"
            ).fetchone()
        return float(tokens / (end - start))
