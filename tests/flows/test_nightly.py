"""The policy of a night, its verdict and what it tells, without a Prefect server."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed, Failed

from flows import nightly
from flows.nightly import Found, Webhook
from tasks import notify, schedules
from tasks.home import Home
from tasks.launch import lint
from tasks.launch.lint import Finding
from tasks.launch.services import Endpoints
from tasks.plan.sweep import Sweep, parse_sweep
from tasks.rounds import Round, open_round
from tasks.schedules import Night, Schedule
from warehouse.errors import BadInput

SWEEP = """
name: small
model: tiny-qwen3
repeats: 1
server: {max_model_len: 2048, kv_cache_memory_bytes: 16777216, enforce_eager: true}
experiments:
  - {name: e, points: [{parallel: 1, number: 1}]}
"""
LABEL = "2026-11-29T02-00-00Z"


def sweep() -> Sweep:
    return parse_sweep(SWEEP, where="x")


@pytest.fixture
def this(home: Home) -> Night:
    """A night that is due now."""
    label = schedules.label_of(datetime.now(UTC))
    return replace(
        schedules.note_process(home, "f1", "small"), sweep="small", target="local", night=label
    )


def begin(home: Home, this: Night, *, most_late: float = 6.0) -> tuple[Found, State[str]]:
    return nightly._night(home, this, "small", "local", most_late, None)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand for the measuring: the labels of the nights that got that far."""
    labels: list[str] = []

    def measure(home: Home, this: Night, *_: object) -> tuple[Found, State[str]]:
        del home
        labels.append(str(this.night))
        return Found("ok", "1 of 1"), Completed(message="1 of 1")

    monkeypatch.setattr(nightly, "_measure", measure)
    return labels


def test_a_night_in_time_is_measured_under_its_label(
    home: Home, this: Night, measured: list[str]
) -> None:
    found, state = begin(home, this)
    assert (found.verdict, state.is_completed()) == ("ok", True)
    assert measured == [this.night]


def test_a_night_that_is_too_late_is_missed_and_nothing_else(
    home: Home, this: Night, measured: list[str]
) -> None:
    due = datetime.now(UTC) - timedelta(hours=6, minutes=1)
    late = replace(this, night=schedules.label_of(due))
    found, state = begin(home, late)
    assert (found.verdict, state.name, state.is_failed()) == ("missed", "Missed", True)
    assert "6.0 h late, at most 6 h" in found.message
    assert measured == []
    assert begin(home, late, most_late=7.0)[0].verdict == "ok"


def test_a_night_that_is_started_again_is_never_too_late(
    home: Home, this: Night, measured: list[str]
) -> None:
    rounds(home, LABEL)
    again = replace(this, night=LABEL)
    assert begin(home, again, most_late=0.0)[0].verdict == "ok"
    assert measured == [LABEL]


def test_webhooks_are_told_of_nights_that_could_not_tell(
    home: Home, this: Night, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_at = "2026-11-28T10:00:00.000Z"
    hook = Schedule("small", "demo", "local", "0 2 * * *", "UTC", "/", made_at, webhook="http://h")
    schedules.save(home, hook)
    gone = replace(this, start_ticks=1, began_at="2026-11-29T02:00:00.000Z", ended_at="2026-11-29")
    nights: dict[str, dict[str, Any]] = {
        "settled by services up": {"verdict": "died"},
        "killed before its webhook": {"verdict": "failed"},
        "well": {"verdict": "ok"},
        "told": {"verdict": "died", "webhook": "sent"},
        "older than the schedule": {"verdict": "died", "began_at": "2026-11-27T02:00:00.000Z"},
        "about to tell": {"verdict": "failed", "start_ticks": this.start_ticks},
    }
    for name, changes in nights.items():
        schedules.save_night(home, replace(gone, flow_run_id=name, **changes))
    told: list[object] = []
    monkeypatch.setattr(notify, "post", lambda _, document: told.append(document["flow_run_id"]))
    monkeypatch.setattr(nightly, "crash_dead_nights", lambda *_: [])
    for _ in range(2):
        nightly._tell_of_the_dead(home, "http://prefect/api")
        assert sorted(map(str, told)) == ["killed before its webhook", "settled by services up"]


def test_a_night_that_overlaps_is_skipped_and_says_whom_it_found(
    home: Home, this: Night, measured: list[str]
) -> None:
    schedules.save_night(home, replace(this, flow_run_id="f0", night=LABEL))
    with schedules.only_night(home, "small", "f0"):
        found, state = begin(home, this)
    assert (found.verdict, state.name, state.is_cancelled()) == ("skipped", "Skipped", True)
    assert f"night {LABEL} (process {this.pid}) still goes on" in found.message
    assert str(this.night) not in found.message, "nor any other that only waits to be skipped"
    assert measured == []


def test_a_night_gives_way_to_a_run_of_the_sweep(home: Home, this: Night) -> None:
    round_, _ = open_round(home, sweep(), SWEEP, target="local", fresh=True)
    nightly._refuse_while_measured(home, "small")
    with round_.only_flow(), pytest.raises(schedules.StillGoing, match=f"{round_.id} is being"):
        nightly._refuse_while_measured(home, "small")
    del this


def test_what_no_night_can_measure_is_a_failed_night_in_one_line(
    home: Home, this: Night, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: object) -> tuple[Found, State[str]]:
        raise BadInput("sweep gone:\n  no such file")

    monkeypatch.setattr(nightly, "_measure", measure)
    found, state = begin(home, this)
    assert (found.verdict, found.message) == ("failed", "sweep gone: no such file")
    assert (state.name, state.is_failed()) == ("BadInput", True)


def test_a_night_here_refuses_wrong_operations_as_a_run_does(
    home: Home, this: Night, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = Endpoints("http://prefect/api", "http://polyaxon")
    monkeypatch.setattr(nightly, "need_disk", lambda *_: None)
    monkeypatch.setattr(nightly, "prepare", lambda *_: ends)
    wrong = Finding("cell e", "cache", "not stated", wanted="disable: true")
    looked_at: list[str] = []

    def find_wrong(_built: object, *, name: str, **_: object) -> list[Finding]:
        looked_at.append(name)
        return [wrong]

    monkeypatch.setattr(lint, "operation", find_wrong)
    found, state = nightly._night(home, this, "demo", "local", 6.0, None)
    assert (found.verdict, state.name) == ("failed", "BadInput")
    assert found.message.startswith(f"{wrong.line}; {len(looked_at)} findings in all")


def rounds(home: Home, *labels: str | None) -> list[Round]:
    return [
        open_round(home, sweep(), SWEEP, target="local", fresh=True, label=label)[0]
        for label in labels
    ]


def test_the_night_before_is_the_latest_earlier_night_and_no_run(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights = rounds(
        home, "2026-11-26T02-00-00Z", LABEL, None, "2026-11-28T02-00-00Z", "2026-11-27T02-00-00Z"
    )
    whole: set[str] = set()
    monkeypatch.setattr(nightly, "_is_whole", lambda _home, round_: round_.label in whole)

    def before(mine: Round) -> str | None:
        found = nightly.night_before(home, nights, mine)
        return None if found is None else found.label

    assert before(nights[0]) is None
    assert before(nights[1]) == "2026-11-28T02-00-00Z"
    whole |= {"2026-11-26T02-00-00Z", "2026-11-27T02-00-00Z"}
    assert before(nights[1]) == "2026-11-27T02-00-00Z", "a stopped night says little"


@pytest.mark.parametrize(
    ("state", "worse", "verdict", "name"),
    [
        (Completed(message="m"), [], "ok", "Completed"),
        (Completed(message="m"), ["fewer tokens"], "regression", "Regression"),
        (Failed(name="NotAsExpected", message="m"), [], "failed", "NotAsExpected"),
        (Failed(name="NotAsExpected", message="m"), ["fewer"], "failed", "NotAsExpected"),
        (Cancelled(message="m"), ["fewer"], "stopped", "Cancelled"),
    ],
)
def test_the_verdict(
    home: Home,
    this: Night,
    monkeypatch: pytest.MonkeyPatch,
    state: State[str],
    worse: list[str],
    verdict: str,
    name: str,
) -> None:
    rounds(home, this.night)
    rows = [{"message": text} for text in worse]
    monkeypatch.setattr(nightly, "_looked_up", lambda *_: ([], rows))
    found, after = nightly._judged(home, this, sweep(), state)
    assert (found.verdict, after.name) == (verdict, name)
    assert list(found.regressions) == rows
    assert found.counts is not None
    assert found.counts["runs"]
    assert (found.counts["measured"], found.counts["unexpected"]) == (0, 0)
    assert found.round is not None
    assert found.round.label == this.night


@pytest.mark.parametrize("verdict", ["ok", "failed", "regression", "missed", "skipped", "stopped"])
def test_a_webhook_is_told_what_is_not_well(verdict: Any) -> None:
    asked = Webhook("http://h/x", None, always=False)
    assert asked.wants(verdict) == (verdict not in ("ok", "stopped"))
    assert Webhook("http://h/x", None, always=True).wants(verdict)
    assert not Webhook(None, None, always=True).wants(verdict)


def test_a_webhooks_variable_that_is_not_set_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_HOOK", raising=False)
    told = Webhook(None, "NO_SUCH_HOOK", always=False).post({})
    assert "NO_SUCH_HOOK is not set" in told


CELL: dict[str, Any] = {
    "label": "e", "repeat": 1, "outcome": "oom", "expect": None, "as_expected": False,
    "run_uuid": "00000000-0000-4000-8000-000000000001", "message": "out of memory",
    "metrics": {"kv_cache_size_tokens": {"predicted": 8192.0, "measured": None}},
}  # fmt: skip


def test_what_the_webhook_gets(home: Home, this: Night) -> None:
    before, round_ = rounds(home, LABEL, this.night)
    counts = {"runs": 1, "measured": 1, "unexpected": 1}
    worse = [{"message": "e: outcome"}]
    found = Found("failed", "0 of 1", round_, [CELL], counts, worse, before)
    told = nightly._document(home, this, found)
    assert list(told) == [
        "format", "night", "sweep", "target", "verdict", "message", "began_at", "ended_at", "round",
        "flow_run_id", "counts", "unexpected", "regressions", "state_folder", "report",
        "commands",
    ]  # fmt: skip
    assert told["unexpected"] == [
        {
            "label": "e", "repeat": 1, "outcome": "oom", "run_uuid": CELL["run_uuid"],
            "message": "out of memory", "expected": "ok",
        }
    ]  # fmt: skip
    assert told["commands"] == [
        "memsweep status",
        f"memsweep compare small@{round_.id}",
        f"memsweep compare small@{before.id} small@{round_.id}",
        f"memsweep show {CELL['run_uuid']}",
    ]


def test_the_summary_holds_links_and_no_data(home: Home, this: Night) -> None:
    row = nightly.table_row(home, CELL, "http://p/ui/default/memsweep/runs")
    assert row["Polyaxon"] == ("http://p/ui/default/memsweep/runs/00000000000040008000000000000001")
    assert (row["KV tokens predicted"], row["KV tokens measured"]) == ("8,192", "")
    assert row["as expected"] == "NO"
    text = nightly.page(home, this, Found("missed", "7 h late"))
    assert "7 h late" in text
    assert "none was measured" in text


def test_neither_summary_nor_webhook_fails_a_night(
    home: Home, this: Night, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("Prefect is away")

    monkeypatch.setattr(nightly, "create_markdown_artifact", broken)
    monkeypatch.setattr(notify, "post", lambda *_: "webhook http://h/…: it answered 500")
    nightly._end(home, this, Found("failed", "m"), Webhook("http://h/x", None, always=False))
    (kept,) = schedules.nights(home)
    assert (kept.verdict, kept.webhook) == ("failed", "webhook http://h/…: it answered 500")
    assert kept.ended_at is not None


def test_the_page_of_a_night_is_named_in_polyaxon_and_its_want_fails_nothing(
    home: Home, this: Night, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    round_, _ = open_round(home, sweep(), SWEEP, target="local", fresh=False, label=LABEL)
    found = Found("failed", "m", round_, [CELL, CELL | {"outcome": "infeasible", "run_uuid": "x"}])
    named: list[tuple[str, dict[str, object]]] = []

    class Port:
        def log_outputs(self, run_uuid: str, outputs: dict[str, object]) -> None:
            named.append((run_uuid, outputs))

    made = tmp_path / "night.html"
    monkeypatch.setattr(nightly, "night_page", lambda home, round_id: made)
    monkeypatch.setattr(nightly, "port_of", lambda home, target: Port())
    assert nightly._report(home, this, found) == made
    assert named == [(CELL["run_uuid"], {"night_page": made.as_uri()})]
    assert nightly._document(home, this, found, made)["report"] == str(made)

    def broken(home: Home, round_id: str) -> Path:
        raise ValueError("no such font")

    monkeypatch.setattr(nightly, "night_page", broken)
    assert nightly._report(home, this, found) is None
