"""Reading: only SELECT, nothing but the snapshot, with limits; named queries bind what they get."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import duckdb
import pytest

from tasks import record
from tests.support.bundle_maker import Ask, Lab, sentinel
from warehouse.compare import cells, choose
from warehouse.connection import open_snapshot
from warehouse.errors import BadInput, CannotFindOut
from warehouse.lookup import RUN_KEYS, moment, resolve_run, runs, show, under
from warehouse.query import named_queries, plain, run_named, run_sql, run_sql_arrow
from warehouse.registry import Outcome, Phase


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, new_lab: Callable[[Path], Lab]) -> Lab:
    """Return a warehouse of two rounds, a failure and an older engine; tests only read it."""
    made = new_lab(tmp_path_factory.mktemp("filled"))
    slower = ((Ask(1010.0, 1014.0), Ask(1010.0, 1014.5), Ask(1010.1, 1015), Ask(1010.2, 1016)),)
    paths = [
        made.seal(run_uuid="11111111-1111-4111-8111-111111111111", change=sentinel),
        made.seal(run_uuid="11112222-1111-4111-8111-111111111111", repeat=2),
        made.seal(round="2", started_s=1300.0, ended_s=1400.0, requests=slower),
        made.seal(round="2", started_s=1310.0, repeat=2, engine_version="0.28.0"),
        made.seal(
            round="2",
            started_s=1320.0,
            max_model_len=65536,
            label="context-limit/max_model_len=65536",
            outcome=Outcome.OOM,
            phase=Phase.KV_CACHE,
            log="cpu-0.27.0-kv-cache-larger-than-memory.log",
            metrics=None,
            requests=(),
        ),
    ]
    record.ingest(made.home, paths)
    return made


@pytest.fixture
def snapshot(filled: Lab) -> Path:
    """Return the published file."""
    return filled.home.warehouse_snapshot


INJECTIONS = (
    "x' OR '1'='1",
    "'; DROP TABLE run; --",
    "x'); DELETE FROM run; --",
    '" OR 1=1 --',
    "$sweep",
    "\\'; SELECT 1",
    "%",
    "x\x00y",
    "select 1",
)


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO run SELECT * FROM run",
        "UPDATE run SET outcome = 'ok'",
        "DELETE FROM run",
        "DROP TABLE run",
        "CREATE TABLE x (a INTEGER)",
        "CREATE TEMP TABLE x (a INTEGER)",
        "CREATE MACRO f() AS 1",
        "ATTACH ':memory:' AS other",
        "COPY run TO 'out.csv'",
        "EXPORT DATABASE 'out'",
        "SET memory_limit = '100GB'",
        "RESET enable_external_access",
        "PRAGMA enable_profiling",
        "INSTALL httpfs",
        "LOAD httpfs",
        "CHECKPOINT",
        "BEGIN",
        "CALL pragma_version()",
        "USE main",
        "SELECT 1; SELECT 2",
        "SELECT 1; DROP TABLE run",
        "",
        ";",
        "not sql",
    ],
)
def test_anything_but_one_select_is_refused(snapshot: Path, statement: str) -> None:
    """Readers change nothing and set nothing, whatever they send."""
    with pytest.raises(BadInput, match="SQL: "):
        run_sql(snapshot, statement)


@pytest.mark.parametrize(
    "source",
    [
        "read_csv('/etc/passwd')",
        "read_text('/etc/passwd')",
        "read_blob('/etc/passwd')",
        "read_parquet('*.parquet')",
        "glob('/*')",
        "'/etc/passwd'",
        "read_json('http://localhost/x.json')",
        "snapshot",
    ],
)
def test_nothing_outside_the_snapshot_can_be_read(snapshot: Path, source: str) -> None:
    """No file, no network, no variable of this process."""
    with pytest.raises(BadInput, match="SQL: "):
        run_sql(snapshot, f"SELECT * FROM {source}")


def test_external_access_cannot_be_switched_back_on(snapshot: Path) -> None:
    """The configuration is locked, also for our own code paths."""
    import duckdb

    with open_snapshot(snapshot) as connection, pytest.raises(duckdb.Error, match="locked"):
        connection.execute("SET enable_external_access = true")


def test_rows_are_limited_and_it_is_said(snapshot: Path) -> None:
    """A cut result is never passed off as whole."""
    result = run_sql(snapshot, "SELECT * FROM range(10) t(i) ORDER BY i DESC", max_rows=3)
    assert (result.rows, result.truncated) == ([(9,), (8,), (7,)], True)
    assert not run_sql(snapshot, "SELECT * FROM range(3)", max_rows=3).truncated
    table, cut = run_sql_arrow(snapshot, "SELECT * FROM range(10) t(i)", max_rows=3)
    assert (table.num_rows, cut) == (3, True)


def test_time_is_limited(snapshot: Path) -> None:
    """A query that would run for hours ends with what to do."""
    began = time.monotonic()
    endless = (
        "SELECT count(*) FROM range(10000000) a, range(10000000) b WHERE a.range + b.range = 3"
    )
    with pytest.raises(CannotFindOut, match=r"no answer within 0\.3 s"):
        run_sql(snapshot, endless, timeout_s=0.3)
    assert time.monotonic() - began < 10


def test_explain_works(snapshot: Path) -> None:
    """Looking at a plan is reading."""
    assert run_sql(snapshot, "EXPLAIN SELECT * FROM run").rows


def test_every_named_query_runs_and_is_described(snapshot: Path) -> None:
    """Each answers something on the example warehouse and says what it is for."""
    for name, query in named_queries().items():
        assert query.description.endswith((".", "?")) or "(" in query.description, name
        result = run_named(snapshot, name, {})
        assert result.rows, name
        assert not result.truncated, name


def test_named_queries_answer(snapshot: Path) -> None:
    """The numbers of the examples come out."""
    (row,) = run_named(snapshot, "oom_frontier", {}).rows[:1]
    assert row[5:7] == (32768, 65536)
    changes = run_named(snapshot, "since_last_night", {"sweep": "demo"}).rows
    assert ("context-limit/max_model_len=32768", 0, "prompt_tokens_max") in [r[:3] for r in changes]
    boots = run_named(snapshot, "boot_to_boot", {}).rows
    assert boots[0][3] == 3
    failures = run_named(snapshot, "failures", {"outcome": "oom"})
    assert failures.rows[0][failures.columns.index("line")] > 0


@pytest.mark.parametrize("value", INJECTIONS[:3])
def test_parameters_are_bound_never_text(snapshot: Path, value: str) -> None:
    """Nothing that is given as a value of any parameter becomes SQL."""
    for name, query in named_queries().items():
        for parameter in query.parameters:
            with (
                pytest.raises(BadInput, match="Conver")
                if parameter.name == "tolerance"
                else contextlib.nullcontext()
            ):
                result = run_named(snapshot, name, {parameter.name: value})
                assert result.rows == [], (name, parameter.name)
    assert run_sql(snapshot, "SELECT count(*) FROM run").rows == [(5,)]


@pytest.mark.parametrize("value", INJECTIONS)
def test_filters_and_names_are_bound_or_refused(snapshot: Path, value: str) -> None:
    """Filters, RUN, selections and --config take text and do nothing with it but compare."""
    with open_snapshot(snapshot) as connection:
        for name in ("sweep", "round", "model", "outcome", "engine", "cell", "setting"):
            assert runs(connection, {name: value}) == []
        assert under(connection, {"model": value}) == []
        for refuse in (
            lambda: resolve_run(connection, value),
            lambda: choose(connection, value),
            lambda: runs(connection, {"since": value}),
            lambda: runs(connection, {value: "x"}),
            lambda: under(connection, {value: "x"}),
        ):
            with pytest.raises(BadInput):
                refuse()
    with pytest.raises(BadInput, match="is unknown"):
        run_named(snapshot, value, {})
    with pytest.raises(BadInput, match="is unknown"):
        run_named(snapshot, "runs_wide", {value: "x"})


def test_runs_are_found_by_filters_newest_first(snapshot: Path) -> None:
    """Every filter narrows; keys and order are those scripts rely on."""
    with open_snapshot(snapshot) as connection:
        every = runs(connection, {})
        assert len(every) == 5
        assert tuple(every[0]) == RUN_KEYS
        assert every[0]["started_at"] == "2026-11-29T12:05:20Z"
        assert [len(runs(connection, f)) for f in ({"outcome": "oom"}, {"engine": "0.28.0"})] == [
            1,
            1,
        ]
        assert len(runs(connection, {"round": "1", "sweep": "demo"})) == 2
        assert len(runs(connection, {"since": "2026-11-29T13:05:00+01:00"})) == 3
        assert len(runs(connection, {"until": "2026-11-29T12:05:00Z"})) == 2
        assert len(runs(connection, {}, limit=2)) == 2
        assert len(runs(connection, {"hardware": "CPU"})) == 5


def test_run_names(snapshot: Path) -> None:
    """A UUID, a unique prefix with or without dashes, or latest; ambiguity is refused."""
    wanted = "11111111-1111-4111-8111-111111111111"
    with open_snapshot(snapshot) as connection:
        for text in (wanted, wanted.upper(), wanted.replace("-", ""), "11111", "11111111-11"):
            assert resolve_run(connection, text) == wanted
        assert resolve_run(connection, "latest") not in (wanted,)
        with pytest.raises(BadInput, match="names more than one: 1111"):
            resolve_run(connection, "1111")
        with pytest.raises(BadInput, match="is not in the warehouse"):
            resolve_run(connection, "ffffffff")


def test_show_holds_everything_of_a_run(snapshot: Path) -> None:
    """One object, JSON through and through."""
    with open_snapshot(snapshot) as connection:
        shown = show(connection, "11111111-1111-4111-8111-111111111111")
    assert json.loads(json.dumps(shown)) == shown
    assert shown["run"]["outcome"] == "ok"
    assert shown["counts"] == {
        "server_samples": 5,
        "gpu_samples": 0,
        "process_samples": 10,
        "requests": 4,
        "startup_values": shown["counts"]["startup_values"],
    }
    assert {"environment", "measurements", "residuals", "load_points", "artifacts"} <= set(shown)


def test_newest_round_is_compared_with_its_predictions(snapshot: Path) -> None:
    """Without an argument: the round that ran last, cell by cell."""
    with open_snapshot(snapshot) as connection:
        chosen = choose(connection, None)
        found = cells(connection, chosen.runs)
    assert chosen.title == "demo, round 2"
    assert [cell["outcome"] for cell in found] == ["ok", "ok", "oom"]
    tokens = found[0]["metrics"]["kv_cache_size_tokens"]
    assert (tokens["predicted"], tokens["measured"], tokens["alarm"]) == (975890, 975890, False)
    point = found[0]["load_points"][0]
    assert point["peak_requests_running"] == 4
    assert point["peak_kv_usage_ratio"] <= point["served_peak_bound"] + 1e-9
    assert found[0]["alarms"] == []


def test_selections(snapshot: Path) -> None:
    """A sweep is its newest round; @ names a round; a version is all its runs; else a run."""
    with open_snapshot(snapshot) as connection:
        assert choose(connection, "demo").title == "demo, round 2"
        assert len(choose(connection, "demo@1").runs) == 2
        assert len(choose(connection, "0.28.0").runs) == 1
        assert choose(connection, "11112").kind == "run"
        with pytest.raises(BadInput, match="has no round '9'"):
            choose(connection, "demo@9")


def test_audit_backwards(snapshot: Path) -> None:
    """From a setting as vLLM names it, a pin or a fact to the runs measured under it."""
    with open_snapshot(snapshot) as connection:
        assert len(under(connection, {"max_model_len": "65536"})) == 1
        assert len(under(connection, {"engine_version": "0.28.0", "host": "testhost"})) == 1
        assert len(under(connection, {"enforce_eager": "true"})) == 5
        assert under(connection, {"max_model_len": "1"}) == []


def test_values_as_json_can_hold_them() -> None:
    """Times are UTC with their mark, not-a-number is null, bytes are hex."""
    assert plain(datetime(2026, 11, 29, 1, 2, 3)) == "2026-11-29T01:02:03Z"  # noqa: DTZ001
    assert plain(datetime(2026, 11, 29, tzinfo=UTC)) == "2026-11-29T00:00:00+00:00"
    assert plain(date(2026, 11, 29)) == "2026-11-29"
    assert plain(float("nan")) is None
    assert plain(float("inf")) is None
    assert plain(Decimal("3.00")) == 3
    assert plain(Decimal("3.5")) == 3.5
    assert plain(b"\x01\xff") == "01ff"
    assert plain(timedelta(seconds=90)) == "90 s"
    assert plain({"a": [1, (2.5, None)]}) == {"a": [1, [2.5, None]]}


def test_times_of_filters() -> None:
    """A date is its midnight in UTC; another zone is converted; nonsense is named."""
    assert moment("2026-11-29", "since") == datetime(2026, 11, 29)  # noqa: DTZ001
    assert moment("2026-11-29T01:00:00+02:00", "since").hour == 23
    with pytest.raises(BadInput, match="--since: got 'yesterday'"):
        moment("yesterday", "since")


def test_a_graph_estimate_that_was_not_logged_is_not_taken_for_zero() -> None:
    text = named_queries()["memory_after_start"].sql
    assert "graph_estimate_bytes, 0" not in text
    connection = duckdb.connect()
    columns = {
        "run_uuid": "'u'", "model": "'m'", "hardware": "'h'", "engine_version": "'v'",
        "outcome": "'ok'", "max_model_len_tokens": "1", "gpu_memory_utilization_ratio": "0.9",
        "measured_gpu_memory_utilization_ratio": "0.9", "requested_memory_bytes": "100",
        "total_memory_bytes": "200", "weights_bytes": "10", "model_loading_bytes": "10",
        "available_kv_cache_bytes": "50", "requested_kv_cache_bytes": "NULL::BIGINT",
        "non_torch_bytes": "5", "weights_and_non_torch_bytes": "15", "peak_activation_bytes": "7",
        "graph_capture_bytes": "3",
    }  # fmt: skip
    for estimate, wanted in (("8", 20), ("NULL::BIGINT", None)):
        listed = ", ".join(
            f"{v} AS {n}" for n, v in {**columns, "graph_estimate_bytes": estimate}.items()
        )
        connection.execute(f"CREATE OR REPLACE VIEW runs_wide AS SELECT {listed}")
        cursor = connection.execute(text, {"model": None})
        names = [column[0] for column in cursor.description or []]
        (row,) = cursor.fetchall()
        assert row[names.index("unexplained_bytes")] == wanted
