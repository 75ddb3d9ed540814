"""Every known failure through the whole path: a server says its real words, the run notices, the
log is parsed, the outcome is decided.

A type that is recognised in a text file and lost on the way from the server to the record is as bad
as one that is not recognised.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tasks.capture import signatures, startup_log, text
from tasks.capture.failures import Failure
from tasks.outcome import decide_outcome
from tests.double.runs import PodRun, run_all
from warehouse.registry import Outcome, Phase

DATA = Path(__file__).parents[1] / "data"
TEXTS: list[dict[str, Any]] = [
    json.loads(line) for line in (DATA / "failure-texts.jsonl").read_text().splitlines()
]
NAMED = {f"{record['type']}-{number}": record for number, record in enumerate(TEXTS)}
SERVING = {signature.type for signature in signatures.SIGNATURES if signature.serving}
#: One text that says nothing but that memory ran out; where, the log around it tells.
PLAIN = next(text["lines"] for text in TEXTS if text["type"] == "oom")
#: Where the engine fails -> what the failure is then called, and its phase.
OUT_OF_MEMORY = {
    "load": ("oom_model_load", Phase.LOAD),
    "profile": ("oom_profile", Phase.PROFILE),
    "kv_cache": ("oom_kv_cache_allocation", Phase.KV_CACHE),
    "graph": ("oom_graph_capture", Phase.GRAPH),
    "warmup": ("oom_graph_capture", Phase.GRAPH),
    "serving": ("oom_serving", Phase.BENCH),
}


@dataclass(frozen=True)
class Ended:
    """What became of one run: what it saw, what its log says, and what is decided from both."""

    end: dict[str, Any]
    log: bytes
    failure: Failure | None
    outcome: Outcome
    phase: Phase


def ended(run: PodRun) -> Ended:
    end = run.json("end.json")
    log = (run.outputs / "server.log").read_bytes()
    failure = startup_log.parse(text.lines([log])).failure
    outcome, phase, _ = decide_outcome(
        end=end, polyaxon_status="succeeded", polyaxon_reason=None, failure=failure, problems=[]
    )
    return Ended(end, log, failure, outcome, phase)


def serving_text(kind: str) -> dict[str, Any] | None:
    """Return a text of a type that a started server can say; some types have others too."""
    for record in TEXTS:
        said = [text.message(line) for line in record["lines"]]
        for signature in signatures.SIGNATURES:
            matches = any(signature.pattern.search(line) for line in said)
            if signature.type == kind == record["type"] and signature.serving and matches:
                return record
    return None


def run_of(folder: Path, name: str, **engine: Any) -> PodRun:
    (folder / name).mkdir()
    return PodRun(folder / name, engine={"boot_s": 0.0, **engine})


@dataclass
class Telling(PodRun):
    """A run whose server only says its lines and leaves: no HTTP, no Python to start."""

    words: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        environment = super().environment()
        said = self.folder / "said.txt"
        said.write_bytes("".join(line + "\n" for line in self.words).encode())
        vllm = Path(environment["MEMSWEEP_ENGINE_BIN"]) / "vllm"
        vllm.write_text(f"#!/bin/sh\ncat {shlex.quote(str(said))}\nexit 1\n")
        bench = Path(environment["MEMSWEEP_BENCH_PYTHON"])
        bench.write_text("#!/bin/sh\nexec sleep 60\n")
        return environment


@pytest.fixture(scope="module")
def at_start(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Every text as the last words of a server that does not come up."""
    folder = tmp_path_factory.mktemp("start")
    runs: dict[str, PodRun] = {}
    for name, record in NAMED.items():
        (folder / name).mkdir()
        runs[name] = Telling(folder / name, words=tuple(record["lines"]))
    return all_ended(runs)


@pytest.fixture(scope="module")
def while_serving(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """One text of every type that a started server can die of, at its first request."""
    folder = tmp_path_factory.mktemp("serving")
    records = {kind: text for kind in SERVING if (text := serving_text(kind)) is not None}
    return all_ended(
        {
            kind: run_of(folder, kind, dying_s=0.05, fail=fail("serving", record["lines"]))
            for kind, record in records.items()
        }
    )


@pytest.fixture(scope="module")
def by_phase(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """The plain text at every step of a GPU's start, and under load."""
    folder = tmp_path_factory.mktemp("phases")
    return all_ended(
        {
            at: run_of(folder, at, device="cuda", fail=fail(at, PLAIN) | {"after": 2})
            for at in OUT_OF_MEMORY
        }
    )


def fail(at: str, lines: Iterable[str]) -> dict[str, Any]:
    return {"at": at, "lines": list(lines)}


def all_ended(runs: dict[str, PodRun]) -> dict[str, Ended]:
    run_all(list(runs.values()))
    return {name: ended(run) for name, run in runs.items()}


@pytest.mark.parametrize(("name", "record"), list(NAMED.items()), ids=list(NAMED))
def test_a_text_at_start(at_start: dict[str, Ended], name: str, record: dict[str, Any]) -> None:
    got = at_start[name]
    assert got.end["observed"] == "refused_or_crashed_at_start"
    assert got.log == "".join(line + "\n" for line in record["lines"]).encode()
    assert got.failure is not None
    assert (got.failure.type, got.failure.numbers) == (record["type"], record["numbers"])
    assert (got.outcome.value, got.phase) == (record["outcome"], got.failure.phase)


@pytest.mark.parametrize("kind", sorted(kind for kind in SERVING if serving_text(kind)))
def test_a_text_while_serving(while_serving: dict[str, Ended], kind: str) -> None:
    """The server is gone though nobody stopped it; only memory makes it more than a crash."""
    got = while_serving[kind]
    assert got.end["observed"] == "crashed"
    assert got.failure is not None
    assert got.failure.type == ("oom_serving" if kind == "oom" else kind)
    memory = got.failure.outcome is Outcome.OOM
    assert got.outcome is (Outcome.OOM if memory else Outcome.CRASHED)


@pytest.mark.parametrize("at", OUT_OF_MEMORY)
def test_memory_runs_out_at_a_phase(by_phase: dict[str, Ended], at: str) -> None:
    got, (kind, phase) = by_phase[at], OUT_OF_MEMORY[at]
    assert got.failure is not None
    assert (got.failure.type, got.failure.phase, got.outcome) == (kind, phase, Outcome.OOM)
    if at == "serving":
        assert (got.end["observed"], got.phase) == ("crashed", Phase.BENCH)
    else:
        assert (got.end["observed"], got.phase) == ("refused_or_crashed_at_start", phase)
