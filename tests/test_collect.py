"""Collecting what a run left, where it arrives late, in part or with secrets in it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from testkit.planning import surroundings
from testkit.polyaxon import FakePolyaxon

from tasks import bundle, collect
from tasks.bundle import Bundle
from tasks.canonical import sha256_file
from tasks.collect import Origin
from tasks.home import Home
from tasks.launch.port import Condition, RunUnknown, RunView
from tasks.plan.plan import make_plan
from tasks.plan.sweep import parse_sweep
from tasks.rounds import RepeatState, open_round
from warehouse.errors import CannotFindOut, ServiceDown

SWEEP = """
name: late
model: tiny-qwen3
repeats: 1
server: {max_model_len: 2048, kv_cache_memory_bytes: 16777216, enforce_eager: true}
experiments:
  - name: fits
    points: [{parallel: 2, number: 4}]
"""
UUID = "00000000-0000-4000-8000-000000000001"
HUB = "hf_" + "Ab1" * 11
CONDITIONS = tuple(Condition(type=name) for name in ("compiled", "running", "succeeded"))


@dataclass
class Late(FakePolyaxon):
    """A store to which one more file is synced before each fetch; ``None`` is a fault."""

    arrivals: list[str | None] = field(default_factory=list)
    log: str = ""
    fetches: int = 0
    told: dict[str, object] = field(default_factory=dict)

    def fetch(self, run_uuid: str, into: Path) -> list[str]:
        self.fetches += 1
        name = self.arrivals.pop(0) if self.arrivals else "-"
        if name is None:
            raise CannotFindOut("did not hand out the outputs")
        left = self.outputs[run_uuid]
        if name != "-":
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(left / name, into / name)
        return [path.name for path in into.iterdir()]

    def logs(self, run_uuid: str) -> str:
        return self.log

    def log_outputs(self, run_uuid: str, outputs: dict[str, object]) -> None:
        self.told |= outputs


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time that passes only while somebody waits; the waits made."""
    waits: list[float] = []
    passing = SimpleNamespace(monotonic=lambda: sum(waits), sleep=waits.append)
    monkeypatch.setattr(collect, "time", passing)
    return waits


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """What a run left: two files and its end."""
    folder = tmp_path / "left"
    folder.mkdir()
    (folder / "server.log").write_text("INFO engine says nothing of interest\n")
    (folder / "server_info.json").write_text("{}\n")
    return folder


def end(folder: Path, **more: object) -> None:
    """Write the run's last file, which lists the others."""
    files = {
        path.name: {"sha256": sha256_file(path), "bytes": path.stat().st_size}
        for path in folder.iterdir()
    }
    document = {"observed": "ok", "phase": "collect", "message": "", "files": files, **more}
    (folder / "end.json").write_text(json.dumps(document))


@pytest.fixture
def collected(home: Home, left: Path) -> Callable[..., Bundle]:
    """Collect the run from a port."""

    def run(
        port: FakePolyaxon,
        status: str = "succeeded",
        deadline: tuple[str, bool] | None = None,
        **changes: object,
    ) -> Bundle:
        sweep = parse_sweep(SWEEP, where="x")
        plan = make_plan(sweep, surroundings())
        round_, _ = open_round(home, sweep, SWEEP, target="local", fresh=True)
        planned = next(iter(plan.runs()))
        state = RepeatState(planned.cell.cell_key, 1, 1, UUID, None)
        conditions = (*CONDITIONS[:-1], Condition(type=status, **changes))  # type: ignore[arg-type]
        view = RunView(UUID, status, True, conditions=conditions)
        port.outputs[UUID] = left
        if deadline is not None:
            round_.note_deadline(UUID, deadline[0], began=deadline[1])
        origin = Origin("f", "0" * 64, "local", lambda run: "1" * 64)
        return collect.collect(home, port, round_, planned, view, state, origin)

    return run


def test_outputs_that_arrive_late_make_a_whole_bundle(
    collected: Callable[..., Bundle], left: Path, clock: list[float]
) -> None:
    end(left)
    port = Late(sync_s=60, arrivals=[None, "end.json", "server.log", "server_info.json"])
    sealed = collected(port)
    assert sealed.manifest["incomplete"] == [
        "prediction.json: what was predicted before the run is gone"
    ]
    assert port.fetches == 4
    assert port.told == {"observed": "ok", "phase": "collect", "message": ""}
    assert clock == [2.0, 4.0, 8.0]
    assert bundle.verify(sealed.folder) == []


def test_what_does_not_arrive_in_time_makes_it_partial(
    collected: Callable[..., Bundle], left: Path, clock: list[float]
) -> None:
    end(left)
    sealed = collected(Late(sync_s=10, arrivals=["end.json", "server.log"]))
    assert sealed.manifest["outcome"] == "partial"
    assert any(
        str(one).startswith("server_info.json: the run left it")
        for one in sealed.manifest["incomplete"]  # type: ignore[attr-defined]
    )
    assert sum(clock) == 10.0


def test_a_file_that_arrived_in_part_is_waited_for(
    collected: Callable[..., Bundle],
    left: Path,
    clock: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end(left)
    whole = (left / "server.log").read_text()
    (left / "server.log").write_text(whole[:5])

    def sleep(seconds: float) -> None:
        clock.append(seconds)
        (left / "server.log").write_text(whole)

    passing = SimpleNamespace(monotonic=lambda: sum(clock), sleep=sleep)
    monkeypatch.setattr(collect, "time", passing)
    port = Late(sync_s=60, arrivals=["end.json", "server_info.json", "server.log", "server.log"])
    assert not any(
        "server.log" in str(one)
        for one in collected(port).manifest["incomplete"]  # type: ignore[attr-defined]
    )


def test_a_lost_pod_is_lost_with_what_polyaxon_collected_of_its_log(
    collected: Callable[..., Bundle], left: Path, clock: list[float]
) -> None:
    port = Late(sync_s=5, log="the last words\n")
    sealed = collected(port, "failed", reason="NodeLost")
    assert (sealed.manifest["outcome"], sum(clock)) == ("lost", 5.0)
    assert sealed.manifest["transient_cause"] == "node_lost"
    assert (sealed.folder / "polyaxon.log").read_text() == "the last words\n"
    assert bundle.verify(sealed.folder) == []


@pytest.mark.parametrize(
    ("status", "began", "wanted"),
    [
        ("stopped", True, ("timed_out", "collect", "stopped by the flow: too long")),
        # Nothing is known of the cell: it is measured again, but not at once.
        ("stopped", False, ("lost", "queue", "stopped by the flow: too long")),
        # It ended by itself before the stop came through.
        ("failed", True, ("lost", "collect", "the run left no end.json; Polyaxon says failed (-)")),
    ],
)
def test_a_run_that_the_flow_stopped_is_not_one_that_a_user_stopped(
    collected: Callable[..., Bundle], status: str, began: bool, wanted: tuple[str, ...]
) -> None:
    sealed = collected(FakePolyaxon(), status, deadline=("too long", began))
    assert tuple(sealed.manifest[key] for key in ("outcome", "phase", "message")) == wanted
    assert sealed.manifest["transient_cause"] is None


def test_a_run_deleted_in_polyaxon_is_sealed_as_lost(
    collected: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> Any:
        raise RunUnknown("no such run")

    port = FakePolyaxon()
    for asked in ("fetch", "content", "logs", "log_outputs"):
        monkeypatch.setattr(port, asked, gone)
    going = tuple(
        Condition(type=name, at=f"2026-11-30T01:0{n}:00.000Z")
        for n, name in enumerate(("compiled", "running"))
    )
    monkeypatch.setattr(sys.modules[__name__], "CONDITIONS", (*going, going[-1]))
    # Its last condition is no end: nobody saw one.
    sealed = collected(port, "running")
    assert sealed.manifest["started_at"] == going[0].at
    assert sealed.manifest["ended_at"] is None
    assert sealed.manifest["outcome"] == "lost"
    assert "no such run" in str(sealed.manifest["incomplete"])
    assert bundle.verify(sealed.folder) == []


def test_outputs_that_are_written_in_place_are_not_waited_for(
    collected: Callable[..., Bundle], left: Path, clock: list[float]
) -> None:
    port = Late(arrivals=["server.log"])
    assert collected(port, "failed").manifest["outcome"] == "lost"
    assert (port.fetches, clock) == (1, [])


def test_outputs_that_cannot_be_had_at_the_end_are_no_result(
    collected: Callable[..., Bundle], left: Path, clock: list[float]
) -> None:
    with pytest.raises(CannotFindOut, match="did not hand out"):
        collected(Late(sync_s=5, arrivals=[None] * 20))


def test_a_server_that_is_down_is_not_waited_for_here(
    collected: Callable[..., Bundle], clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = Late(sync_s=60)

    def fetch(*_: object) -> list[str]:
        raise ServiceDown("down")

    monkeypatch.setattr(port, "fetch", fetch)
    with pytest.raises(ServiceDown):
        collected(port)
    assert clock == []


def test_secrets_are_taken_out_and_that_is_told(
    collected: Callable[..., Bundle],
    left: Path,
    clock: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "planted-value-7")
    (left / "server.log").write_text(f"token {HUB}\nkey planted-value-7\n")
    (left / "data.db").write_bytes(b"\0planted-value-7\0")
    end(left, observed="crashed", message=f"it said {HUB}")

    class Telling(FakePolyaxon):
        def content(self, run_uuid: str) -> str:
            return json.dumps({"env": [{"value": "planted-value-7"}]})

    sealed = collected(Telling())
    assert sealed.manifest["redacted"] == {
        "data.db": -1, "end.json": 1, "operation.json": 1, "server.log": 2,
    }  # fmt: skip
    assert sealed.manifest["message"] == "it said [redacted]"
    # The run's own hashes were compared before; what was left out is told.
    assert [one for one in sealed.manifest["incomplete"] if "prediction" not in one] == [  # type: ignore[attr-defined]
        "data.db: left out: it holds a secret"
    ]
    assert bundle.verify(sealed.folder) == []
    everything = b"".join(path.read_bytes() for path in sealed.folder.rglob("*") if path.is_file())
    assert HUB.encode() not in everything
    assert b"planted-value-7" not in everything
    assert json.loads((sealed.folder / "operation.json").read_text()) == {
        "env": [{"value": "[redacted]"}]
    }
