"""Runs EvalScope's levels in a process of its own: ``PYTHON -P bench_driver.py SPEC.json``.

EvalScope's command line would do, but it tells neither where a warm-up ends nor that requests
failed (its exit code is 0 with all of them failed), its signal handlers outlive a level, and its
import takes seconds that fit beside the server's boot. So:

* it imports everything, says ``imported``, and before each level waits for a line ``go`` on
  standard input, so that no level begins against a server that has just died; when standard input
  closes, whoever started it is gone and it ends;
* levels run in a worker thread, where EvalScope installs no signal handlers; the main thread owns
  signals and deadlines and leaves with ``os._exit``;
* a hook around one private method marks warm-up and measurement, and watches how late the event
  loop runs meanwhile: a client that lags measures itself. When that method does not look as
  expected the hook is left out, the times come from the database's rows and the lag is unknown.

This file is run by the bench environment's Python and imports nothing of this project.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
import os
import select
import signal
import sys
import threading
import time
import traceback
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

#: Exit codes, for people: what counts is what was written.
DONE, DEADLINE, ORPHANED = 0, 3, 4
_PHASE_PARAMETERS = ["self", "requests", "is_warmup", "deadline"]
#: A wake-up of the loop is due this often while a level is measured: 50 a second cost a client
#: nothing and show every delay that matters beside answers of seconds.
LAG_INTERVAL_S = 0.02

Phase = Callable[..., Awaitable[None]]


class LoopLag:
    """How late the running event loop does what is due: wake-ups on an absolute schedule.

    A loop that was held up for a second was late for every wake-up of that second, so each of
    them counts with its own delay: a quantile is then a share of the time, not of the wake-ups
    that the loop found time for.
    """

    def __init__(self) -> None:
        self._late_s = array("d")
        self._due_s = time.monotonic() + LAG_INTERVAL_S

    async def watch(self) -> None:
        """Wake up until cancelled."""
        while True:
            await asyncio.sleep(self._due_s - time.monotonic())
            self._note()

    def summary(self) -> dict[str, float | int] | None:
        """Return what was seen, seconds; None where no wake-up was due."""
        self._note()
        late_s = sorted(self._late_s)
        if not late_s:
            return None
        return {
            "interval_s": LAG_INTERVAL_S,
            "wakeups": len(late_s),
            "p50_s": late_s[math.ceil(0.50 * len(late_s)) - 1],
            "p99_s": late_s[math.ceil(0.99 * len(late_s)) - 1],
            "max_s": late_s[-1],
        }

    def _note(self) -> None:
        now_s = time.monotonic()
        while self._due_s <= now_s:
            self._late_s.append(now_s - self._due_s)
            self._due_s += LAG_INTERVAL_S


class Driver:
    """The levels of one specification, in order."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self._events = Path(spec["events"]).open("a", encoding="utf-8")  # noqa: SIM115 - until exit
        self._lock = threading.Lock()
        self._run: Callable[[dict[str, Any]], Any] | None = None
        self.turns = threading.Semaphore(0)
        self.level: int | None = None
        self.deadline_s: float | None = None

    def say(self, event: str, **fields: object) -> None:
        """Append one event; the reader follows the file."""
        with self._lock:
            self._events.write(
                json.dumps({"t_s": time.monotonic(), "event": event, **fields}) + "\n"
            )
            self._events.flush()

    def load(self) -> None:
        """Import EvalScope and set the hook: seconds that pass while the server boots."""
        started = time.monotonic()
        main = importlib.import_module("evalscope.perf.main")
        self._run = main.run_perf_benchmark
        hooked = self._hook()
        self._warm_tokenizer()
        version = getattr(importlib.import_module("evalscope"), "__version__", None)
        self.say(
            "imported", seconds=time.monotonic() - started, version=version, phases_hooked=hooked
        )

    def levels(self) -> None:
        """Run every level; one that fails does not lose the others."""
        for level in self._spec["levels"]:
            index = level["index"]
            self.say("waiting", index=index)
            self.turns.acquire()
            self.level = index
            self.deadline_s = time.monotonic() + level["limit_s"]
            self.say("level_start", index=index)
            error: str | None = None
            try:
                assert self._run is not None, "load() comes first"
                self._run(dict(level["arguments"]))
            except BaseException as failure:  # noqa: BLE001 - EvalScope raises SystemExit too
                error = f"{type(failure).__name__}: {failure}"
                traceback.print_exc()
            self.deadline_s = None
            self.say("level_end", index=index, error=error)
        self.level = None

    def _hook(self) -> bool:
        try:
            strategies = importlib.import_module("evalscope.perf.core.strategies.closed_loop")
            strategy = strategies.ClosedLoopStrategy
            original: Phase = strategy._run_phase
            parameters = list(inspect.signature(original).parameters)
        except (ImportError, AttributeError, TypeError, ValueError):
            return False
        if parameters != _PHASE_PARAMETERS or not inspect.iscoroutinefunction(original):
            return False

        async def run_phase(
            strategy_self: object, requests: Any, is_warmup: bool, deadline: float | None = None
        ) -> None:
            name = "warmup" if is_warmup else "measure"
            self.say("phase_start", index=self.level, phase=name, requests=len(requests))
            lag = LoopLag()
            watch = asyncio.create_task(lag.watch())
            try:
                await original(strategy_self, requests, is_warmup=is_warmup, deadline=deadline)
            finally:
                self.say("phase_end", index=self.level, phase=name, loop_lag=lag.summary())
                watch.cancel()

        strategy._run_phase = run_phase
        return True

    def _warm_tokenizer(self) -> None:
        """Load the tokenizer once: its imports take seconds at the first level otherwise."""
        try:
            utils = importlib.import_module("evalscope.perf.plugin.datasets.utils")
            utils.load_tokenizer(self._spec["tokenizer_path"])
        except BaseException:  # noqa: BLE001 - only a head start; a level will tell what is wrong
            traceback.print_exc()


def guard(driver: Driver, worker: threading.Thread) -> None:
    """Pass each ``go`` on; leave at a level's deadline or when whoever started us is gone."""
    source = sys.stdin.fileno()
    while worker.is_alive():
        readable, _, _ = select.select([source], [], [], 0.1)
        if readable:
            data = os.read(source, 4096)
            if not data:
                driver.say("orphaned")
                os._exit(ORPHANED)
            for _ in range(data.count(b"go\n")):
                driver.turns.release()
        deadline, level = driver.deadline_s, driver.level
        if deadline is not None and time.monotonic() > deadline:
            driver.say("level_end", index=level, error="deadline of the load point is over")
            os._exit(DEADLINE)


def leave(number: int, _frame: object) -> None:
    """End at once: nothing here needs a clean-up that the database does not do itself."""
    os._exit(128 + number)


def main(argv: list[str]) -> None:
    """Run the specification named on the command line."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, leave)
    driver = Driver(json.loads(Path(argv[1]).read_text(encoding="utf-8")))
    try:
        driver.load()
    except BaseException as failure:  # noqa: BLE001 - told to the run, which has the log too
        traceback.print_exc()
        driver.say("import_failed", error=f"{type(failure).__name__}: {failure}")
        os._exit(1)
    worker = threading.Thread(target=driver.levels, name="levels", daemon=True)
    worker.start()
    guard(driver, worker)
    driver.say("done")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(DONE)


if __name__ == "__main__":
    main(sys.argv)
