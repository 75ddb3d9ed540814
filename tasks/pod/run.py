"""One run from its first second to end.json: boot, ready, load, stop, proof that nothing is left.

Whatever happens in the middle, the end is the same: the load is stopped, the last metrics page is
taken, the server's processes are ended and counted, every file is hashed, end.json is written.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from tasks.pod import effective, stop
from tasks.pod.argv import (
    bench_variables,
    child_environment,
    engine_argv,
    engine_variables,
)
from tasks.pod.bench import Bench
from tasks.pod.client import HTTP_ERRORS, Client
from tasks.pod.clock import mapping, now_s
from tasks.pod.environment import CompileCache, describe
from tasks.pod.families import cache_config
from tasks.pod.gpu import Gpus
from tasks.pod.inputs import Inputs
from tasks.pod.interrupt import Interrupt, read_reason
from tasks.pod.outputs import END, Lines, Outputs
from tasks.pod.phases import Phases
from tasks.pod.processes import adopt_orphans, memory_bytes
from tasks.pod.readiness import NotReady, Readiness
from tasks.pod.sampler import MetricsTake, Sampler
from tasks.pod.server import Server
from tasks.pod.watch import Interrupted, ServerGone, Watch
from tasks.processes import free_port, listening

END_FORMAT = 1
#: Exit codes: a typed outcome is 0, so that no retry repeats a deterministic failure.
EXIT_TYPED, EXIT_HARNESS, EXIT_INTERRUPTED = 0, 70, 143

#: How long EvalScope's import may take once the server is ready; it began with the server's boot.
_IMPORT_LIMIT_S = 180.0
#: An interrupted run has little time before whoever interrupted it kills it.
_INTERRUPTED_STOP_S = 8.0
_LAST_PAGE_S = 3.0
_POLL_S = 0.02
#: An engine that died fails every request at once. Its API process knows within the first time
#: (/health is no longer 200) and is gone within the second.
_DYING_S, _DEAD_S = 0.3, 3.0


class Observed(StrEnum):
    """What the run saw. The record's outcome is decided from it and from what others know."""

    OK = "ok"
    PARTIAL = "partial"
    REFUSED_OR_CRASHED_AT_START = "refused_or_crashed_at_start"
    CRASHED = "crashed"
    NOT_READY = "not_ready"
    BENCH_FAILED = "bench_failed"
    CONFIG_MISMATCH = "config_mismatch"
    INTERRUPTED = "interrupted"
    HARNESS_ERROR = "harness_error"


@dataclass(frozen=True, slots=True)
class Ending:
    """What was observed, in which phase (values of ``warehouse.registry.Phase``), and a line."""

    observed: Observed
    phase: str
    message: str

    @property
    def exit_code(self) -> int:
        """Return the process's exit code."""
        return {
            Observed.INTERRUPTED: EXIT_INTERRUPTED,
            Observed.HARNESS_ERROR: EXIT_HARNESS,
        }.get(self.observed, EXIT_TYPED)


class Run:
    """One execution of one cell."""

    def __init__(self, inputs: Inputs, outputs: Outputs, interrupt: Interrupt) -> None:
        self._inputs = inputs
        self._cell = inputs.cell
        self._outputs = outputs
        self._interrupt = interrupt
        self._phases = Phases(outputs)
        self._started_s = now_s()
        self._phase = "start"
        self._samplers: list[Sampler] = []
        self._checks: list[dict[str, object]] = []
        self._stop: dict[str, object] = {}
        self._gpus, self._no_gpu = Gpus.open()
        self._compile_cache = CompileCache(inputs.cache, eager=self._cell.server.enforce_eager)
        self._server = self._make_server()
        self._watch = Watch(interrupt, self._server)
        self._bench = self._make_bench()

    def execute(self) -> int:
        """Run the cell; returns the exit code. Never raises."""
        ending = self._guarded()
        self._clean_up(ending)
        return finish(self._outputs, ending, self._started_s, self._inputs, self._interrupt)

    # The measurement -------------------------------------------------------------------------

    def _guarded(self) -> Ending:
        try:
            return self._measure()
        except Interrupted as error:
            return Ending(Observed.INTERRUPTED, self._phase, str(error))
        except ServerGone as error:
            return self._server_gone(str(error))
        except NotReady as error:
            return Ending(Observed.NOT_READY, self._phase, str(error))
        except Exception as error:  # noqa: BLE001 - the clean-up must come whatever happened
            self._outputs.event("harness_error", traceback=traceback.format_exc())
            message = f"{type(error).__name__}: {error}"
            return Ending(Observed.HARNESS_ERROR, self._phase, message)

    def _server_gone(self, how: str) -> Ending:
        if self._phase == "start":
            message = f"the server ended before it was ready ({how}); see server.log"
            return Ending(Observed.REFUSED_OR_CRASHED_AT_START, "start", message)
        message = f"the server went though nobody stopped it ({how}); see server.log"
        return Ending(Observed.CRASHED, self._phase, message)

    def _measure(self) -> Ending:
        self._describe()
        differing = effective.mismatches(self._checks)
        if differing:
            self._server_info()
            return Ending(Observed.CONFIG_MISMATCH, "start", "; ".join(differing))
        self._boot()
        self._become_ready()
        differing = self._check_configuration()
        if differing:
            return Ending(Observed.CONFIG_MISMATCH, "ready", "; ".join(differing))
        self._phase = "bench"
        problem = self._load()
        if not self._server_answers():
            self._watch.sleep(_DEAD_S)
            message = "the server no longer answers /health; see server.log"
            return Ending(Observed.CRASHED, "bench", message)
        self._watch.check()
        return self._judge(problem)

    def _describe(self) -> None:
        self._outputs.write("clock.json", mapping())
        self._outputs.event("run_start", run_uuid=self._inputs.run_uuid, pid=os.getpid())
        self._environment = describe(self._inputs, self._gpus, self._no_gpu)
        self._outputs.write("environment.json", self._environment)
        self._checks = [effective.compare_model(self._cell, self._environment["model"])]
        self._outputs.event("gpu_sampling", on=self._gpus is not None, why_not=self._no_gpu)
        adopt_orphans()
        self._snapshot("before")

    def _boot(self) -> None:
        if self._interrupt.pending:
            raise Interrupted(f"signal {self._interrupt.signal}")
        self._phases.start("boot")
        self._server.start()
        self._outputs.event("server_start", pid=self._server.pid, port=self._server.port)
        self._server_info()
        self._sample("process", self._cell.sampling.process_interval_s, self._take_processes)
        if self._gpus is not None:
            self._sample("gpu", self._cell.sampling.gpu_interval_s, self._take_gpus)
        # EvalScope's import takes seconds of one core: let it pass while the server boots.
        self._start_bench()

    def _become_ready(self) -> None:
        readiness = Readiness(self._server.port, self._outputs, self._watch)
        readiness.wait_healthy(self._cell.limits.start_s)
        self._phase = "ready"
        self._phases.end("boot")
        self._phases.start("ready")
        self._outputs.event("server_healthy")
        take = MetricsTake(self._server.port)
        self._sample("server", self._cell.sampling.server_interval_s, take)
        readiness.complete(self._cell.limits.ready_s)
        self._outputs.event("server_ready")
        self._phases.end("ready")
        self._snapshot("after_ready")
        self._environment["compile_cache"] = self._compile_cache.state()
        self._outputs.write("environment.json", self._environment)

    def _check_configuration(self) -> list[str]:
        page = self._page("metrics_first.txt")
        client = Client(self._server.port)
        try:
            version = client.get("/version", timeout_s=_LAST_PAGE_S).json()
            models = client.get("/v1/models", timeout_s=_LAST_PAGE_S).json()
        except HTTP_ERRORS as error:
            self._watch.check()
            raise NotReady(f"/version, /v1/models: {type(error).__name__}: {error}") from error
        finally:
            client.close()
        labels = None if page is None else cache_config(page.decode(errors="replace"))
        self._checks += effective.compare(self._cell, version=version, models=models, labels=labels)
        self._server_info(version=version, models=models, cache_config_info=labels)
        return effective.mismatches(self._checks)

    def _load(self) -> str | None:
        """Run every load point; returns why it ended early, if the load itself is to blame."""
        while True:
            before = self._bench.pending
            problem = self._drive()
            pending = self._bench.pending
            if problem or not pending:
                return problem
            if pending == before:
                return "the load driver ended before its first load point"
            if not self._server_answers():
                return problem  # told once, by whoever asked for the load
            # The driver went in the middle (a deadline, a crash): a new one takes the rest.
            self._outputs.event("bench_restart", pending=pending)
            self._start_bench()

    def _start_bench(self) -> None:
        self._bench.start()
        if self._bench.pid is not None:
            self._server.others.add(self._bench.pid)

    def _drive(self) -> str | None:
        """Wait for the import, let the driver go, follow it to its end."""
        bench = self._bench
        deadline = time.monotonic() + _IMPORT_LIMIT_S
        while not bench.imported:
            self._watch.check()
            bench.follow()
            if bench.failure is not None or (not bench.running and not bench.imported):
                bench.failure = bench.failure or "the load driver ended before it was ready"
                return bench.failure
            if time.monotonic() > deadline:
                bench.failure = f"EvalScope was not imported within {_IMPORT_LIMIT_S:.0f} s"
                return bench.failure
            time.sleep(_POLL_S)
        while bench.running:
            self._watch.check()
            bench.follow()
            if bench.waiting is not None:
                self._before_level(bench.waiting)
                bench.go()
            time.sleep(_POLL_S)
        bench.end()
        return bench.failure

    def _before_level(self, index: int) -> None:
        """After a level that went wrong, see first whether the server went with it."""
        if index > 0 and self._bench.states[index - 1].state != "ok":
            self._watch.sleep(_DYING_S)
            if not self._server_answers():
                self._watch.sleep(_DEAD_S)

    def _server_answers(self) -> bool:
        client = Client(self._server.port)
        try:
            return client.get("/health", timeout_s=5.0).status == 200
        except HTTP_ERRORS:
            self._watch.check()
            return False
        finally:
            client.close()

    def _judge(self, problem: str | None) -> Ending:
        states = self._bench.states
        succeeded = sum(state.succeeded for state in states)
        asked = sum(state.asked for state in states)
        if all(state.state == "ok" for state in states):
            return Ending(Observed.OK, "bench", f"{succeeded} of {asked} requests succeeded")
        details = problem or "; ".join(
            f"load point {state.index}: {state.error or state.state}"
            for state in states
            if state.state != "ok"
        )
        observed = Observed.PARTIAL if succeeded else Observed.BENCH_FAILED
        return Ending(observed, "bench", f"{succeeded} of {asked} requests succeeded; {details}")

    # The clean-up ----------------------------------------------------------------------------

    def _clean_up(self, ending: Ending) -> None:
        interrupted = ending.observed is Observed.INTERRUPTED
        limit = self._cell.limits.stop_s
        alive = self._server.alive
        self._attempt("end the load", lambda: self._bench.end(ending.message))
        self._attempt("stop phase", lambda: self._phases.start("stop"))
        if alive and not interrupted:
            self._attempt("last metrics page", lambda: self._page("metrics_last.txt"))
        self._attempt("stop samplers", lambda: self._stop_samplers("server"))
        self._attempt(
            "stop the server",
            lambda: self._stop_server(min(limit, _INTERRUPTED_STOP_S) if interrupted else limit),
        )
        self._attempt("stop samplers", self._stop_samplers)
        self._attempt("prove", self._prove)
        self._attempt("close phases", self._phases.close)

    def _attempt(self, what: str, step: Callable[[], object]) -> None:
        """Take one step of the clean-up; a failure is told and the next step follows."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 - see above
            self._outputs.errors.append(f"{what}: {type(error).__name__}: {error}")

    def _stop_server(self, limit_s: float) -> None:
        exited = self._server.exit_code
        escalated = self._server.stop(limit_s)
        self._stop |= {
            "escalated": escalated,
            "exited_before_stop": exited is not None,
            "server_exit_code": self._server.exit_code,
            "left": [process.document() for process in self._server.members()],
        }
        self._outputs.event("server_stopped", exit_code=self._server.exit_code, killed=escalated)

    def _prove(self) -> None:
        before, after = self._stop.get("before"), self._snapshot("after_stop")
        self._stop |= stop.judge(before if isinstance(before, dict) else {}, after)
        self._outputs.write("stop.json", self._stop)

    def _stop_samplers(self, name: str | None = None) -> None:
        for sampler in list(self._samplers):
            if name in (None, sampler.name):
                self._samplers.remove(sampler)
                self._outputs.event("sampler_stopped", sampler=sampler.name, **sampler.stop())

    # Pieces ----------------------------------------------------------------------------------

    def _make_server(self) -> Server:
        inputs, port = self._inputs, free_port()
        variables = engine_variables(self._cell.device, inputs.cache)
        return Server(
            argv=engine_argv(
                self._cell.server, engine=inputs.engine_bin / "vllm", model=inputs.model, port=port
            ),
            environment=child_environment(os.environ, variables),
            port=port,
            log=self._outputs.root / "server.log",
            folder=inputs.cache,
        )

    def _make_bench(self) -> Bench:
        inputs = self._inputs
        return Bench(
            load=self._cell.load,
            limits_s=self._cell.limits.load_point_s,
            python=inputs.bench_python,
            environment=child_environment(os.environ, bench_variables(inputs.cache)),
            model=inputs.model,
            port=self._server.port,
            outputs=self._outputs,
            phases=self._phases,
        )

    def _sample(self, name: str, interval_s: float, take: Callable[[], dict[str, object]]) -> None:
        lines = Lines(self._outputs.path(f"raw/{name}_samples.jsonl"))
        sampler = Sampler(name, interval_s, lines, take)
        self._samplers.append(sampler)
        sampler.start()

    def _take_processes(self) -> dict[str, object]:
        members = self._server.members()
        return {
            "processes": [process.document() for process in members],
            "rss_bytes": sum(process.rss_bytes for process in members),
        }

    def _take_gpus(self) -> dict[str, object]:
        assert self._gpus is not None, "only sampled where there are some"
        return self._gpus.sample(process.pid for process in self._server.members())

    def _server_info(self, **told: object) -> None:
        self._outputs.write(
            "server_info.json",
            {
                "argv": self._server.argv,
                "env": engine_variables(self._cell.device, self._inputs.cache),
                "port": self._server.port,
                "pid": self._server.pid,
                "version": None,
                "models": None,
                "cache_config_info": None,
                "checks": self._checks,
                **told,
            },
        )

    def _page(self, name: str) -> bytes | None:
        client = Client(self._server.port)
        try:
            reply = client.get("/metrics", timeout_s=_LAST_PAGE_S)
        except HTTP_ERRORS as error:
            self._outputs.event("no_metrics_page", file=name, error=str(error))
            return None
        finally:
            client.close()
        self._outputs.write_bytes(name, reply.body)
        return reply.body

    def _snapshot(self, when: str) -> dict[str, object]:
        members = self._server.members()
        state: dict[str, object] = {
            "t_s": now_s(),
            "processes": [process.document() for process in members],
            "port_listening": listening(self._server.port),
            "mem_available_bytes": memory_bytes("MemAvailable"),
        }
        if self._gpus is not None:
            state["gpu_used_bytes"] = self._gpus.used_bytes()
        self._stop[when] = state
        self._outputs.write("stop.json", self._stop)
        return state


def finish(
    outputs: Outputs,
    ending: Ending,
    started_s: float,
    inputs: Inputs | None,
    interrupt: Interrupt,
) -> int:
    """Write end.json, the last file, and return the exit code."""
    reason = None
    if inputs is not None and interrupt.pending:
        reason = read_reason(inputs.reason_file)
    outputs.event("run_end", observed=ending.observed.value, message=ending.message)
    outputs.close()
    files = outputs.hashes()
    written = outputs.write(
        END,
        {
            "format": END_FORMAT,
            "observed": ending.observed.value,
            "phase": ending.phase,
            "reason": reason,
            "message": ending.message,
            "started_s": started_s,
            "ended_s": now_s(),
            "write_errors": outputs.errors,
            "files": files,
        },
    )
    return ending.exit_code if written else EXIT_HARNESS
