"""The commands that look, audit and keep: output forms, exit codes, keys that scripts rely on.

Keys of every `--json` stand in tests/data/json-keys-warehouse.json. MEMSWEEP_REGENERATE=1 rewrites
it and fails; keys are only ever added.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows import cli
from tasks import record
from tests.support.bundle_maker import Ask, Lab
from tests.warehouse.conftest import Stored
from warehouse.registry import Outcome, Phase

KEYS = Path(__file__).parents[1] / "data" / "json-keys-warehouse.json"
FIRST = "11111111-1111-4111-8111-111111111111"


@pytest.fixture(scope="module")
def two_rounds(tmp_path_factory: pytest.TempPathFactory, new_lab: Callable[[Path], Lab]) -> Lab:
    """Return two rounds and a failed run; tests only read it."""
    lab = new_lab(tmp_path_factory.mktemp("commands"))
    paths = [
        lab.seal(run_uuid=FIRST),
        lab.seal(round="2", started_s=1300.0, engine_version="0.28.0"),
        lab.seal(
            round="3",
            started_s=1100.0,
            label="misconfigured",
            max_model_len=65536,
            outcome=Outcome.REFUSED,
            phase=Phase.KV_CACHE,
            log="cpu-0.27.0-kv-cache-larger-than-memory.log",
            metrics=None,
            requests=(),
        ),
    ]
    record.ingest(lab.home, paths)
    return lab


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a way to run a command in a state folder: exit code, stdout, stderr."""

    def call(lab: Lab, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setenv("MEMSWEEP_HOME", str(lab.home.root))
        code = cli.run(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def keys(value: Any) -> Any:
    """Return the keys of a JSON value: of a list, those of its objects taken together."""
    if isinstance(value, dict):
        return {name: keys(part) for name, part in value.items()}
    if isinstance(value, list):
        merged: dict[str, Any] = {}
        for part in value:
            found = keys(part)
            if isinstance(found, dict):
                merged |= {k: v or merged.get(k) for k, v in found.items()}
        return [merged] if merged else []
    return None


COMMANDS: dict[str, tuple[str, ...]] = {
    "runs": ("runs", "--json"),
    "show": ("show", FIRST, "--json"),
    "query": ("query", "--json"),
    "query NAME": ("query", "runs_wide", "--json"),
    "sql": ("sql", "SELECT 1 AS one", "--json"),
    "sql --where": ("sql", "--where", "--json"),
    "compare": ("compare", "--json"),
    "compare A B": ("compare", "demo@1", "demo@2", "--fail-on", "outcome", "--json"),
    "compare --with published": ("compare", "misconfiguration", "--with", "published", "--json"),
    "report": ("report", FIRST, "--json"),
    "audit": ("audit", FIRST, "--json"),
    "audit --config": ("audit", "--config", "max_model_len=32768", "--json"),
    "verify": ("verify", "--json"),
    "ingest": ("ingest", "--json"),
    "rebuild": ("rebuild", "--json"),
}


def test_keys_scripts_rely_on(two_rounds: Lab, run: Run) -> None:
    """Every command prints one object, "format" first, with at least the recorded keys."""
    got = {}
    for name, arguments in COMMANDS.items():
        code, out, err = run(two_rounds, *arguments)
        assert code == 0, (name, err)
        document = json.loads(out)
        assert next(iter(document.items())) == ("format", 1), name
        got[name] = keys(document)
    if os.environ.get("MEMSWEEP_REGENERATE") and json.loads(KEYS.read_text()) != got:
        KEYS.write_text(json.dumps(got, indent=1, sort_keys=True) + "\n")
        pytest.fail(f"{KEYS.name} was rewritten: look at it (keys are only added) and commit it")
    assert got == json.loads(KEYS.read_text())


def test_runs_json_is_as_the_design_says(two_rounds: Lab, run: Run) -> None:
    """The keys of the design's interface section, in its order, times in ISO 8601 UTC."""
    document = json.loads(run(two_rounds, "runs", "--json")[1])
    wanted = [
        "run_uuid",
        "sweep",
        "round",
        "cell_key",
        "setting_key",
        "repeat",
        "attempt",
        "outcome",
        "phase",
        "started_at",
        "ended_at",
        "model",
        "model_revision",
        "engine_version",
        "image_digest",
        "hardware",
    ]
    for entry in document["runs"]:
        assert list(entry)[: len(wanted)] == wanted
        assert entry["started_at"].endswith("Z")


def test_tables_in_a_pipe_are_whole(two_rounds: Lab, run: Run) -> None:
    """No cell is cut or folded: a full UUID stands in one line."""
    for arguments in (("runs",), ("show", FIRST), ("compare",), ("query",), ("audit", FIRST)):
        code, out, err = run(two_rounds, *arguments)
        assert code == 0, err
        assert "…" not in out.replace("1, 2, …", "")
    assert any(FIRST in line for line in run(two_rounds, "runs")[1].splitlines())


def test_compare_shows_predicted_and_measured(two_rounds: Lab, run: Run) -> None:
    """Tokens, blocks and concurrency as predicted and as measured; load points with their bound."""
    _, out, _ = run(two_rounds, "compare", "demo@1")
    assert "975,890 / 975,890" in out
    assert "1,638 / 1,638" in out
    assert "29.78x / 29.78x" in out
    assert "0.01222" in out


def test_audit_prints_the_chain(two_rounds: Lab, run: Run) -> None:
    """From the number to the person, in text."""
    _, out, _ = run(two_rounds, "audit", FIRST, "kv_cache_size_tokens")
    for part in (
        "kv_cache_size_tokens: 975,890 tokens (measured)",
        "server.log line 43",
        "GPU KV cache size: 975,890 tokens",
        "server.log sha256 ",
        "manifest.json sha256 ",
        FIRST,
        "operation.json sha256 ",
        "engine_lock_sha256",
        "model_revision",
        "git commit",
        "tester",
        "prefect flow run",
    ):
        assert part in out, part


def test_broken_link_exits_with_1(stored: Stored, run: Run) -> None:
    """The chain is printed, the link named, the exit code says so."""
    with (stored.bundle / "server.log").open("a") as log:
        log.write("x")
    code, out, err = run(stored.lab, "audit", "latest", "kv_cache_size_tokens")
    assert code == 1
    assert "975,890" in out
    assert "broken link: server.log: sha256 is" in err
    code, out, err = run(stored.lab, "verify", "--json")
    assert code == 1
    assert json.loads(out)["differences"][0]["where"] == "server.log"


def test_sql_forms(two_rounds: Lab, run: Run, tmp_path: Path) -> None:
    """Table, JSON, CSV and Parquet say the same."""
    import pyarrow.parquet as pq

    statement = "SELECT repeat, round FROM run ORDER BY round"
    document = json.loads(run(two_rounds, "sql", statement, "--json")[1])
    assert (document["columns"], document["rows"]) == (
        ["repeat", "round"],
        [[1, "1"], [1, "2"], [1, "3"]],
    )
    rows = list(csv.reader(run(two_rounds, "sql", statement, "--csv")[1].splitlines()))
    assert rows == [["repeat", "round"], ["1", "1"], ["1", "2"], ["1", "3"]]
    file = tmp_path / "out.parquet"
    code, out, _ = run(two_rounds, "sql", statement, "--parquet", str(file))
    assert (code, out) == (0, "")
    assert pq.read_table(file).column("round").to_pylist() == ["1", "2", "3"]
    _, out, err = run(two_rounds, "sql", statement, "--max-rows", "1")
    assert "only the first 1 rows" in err


def test_where_is_a_file_duckdb_alone_can_read(two_rounds: Lab, run: Run) -> None:
    """What notebooks and other tools open is a plain DuckDB file."""
    import duckdb

    path = run(two_rounds, "sql", "--where")[1].strip()
    with duckdb.connect(path, read_only=True) as connection:
        assert connection.execute("SELECT count(*) FROM runs_wide").fetchone() == (3,)


def test_gate(two_rounds: Lab, run: Run) -> None:
    """A rule that holds exits 1 and says where; one that does not exits 0."""
    code, _, err = run(
        two_rounds, "compare", "demo@1", "demo@3", "--unlike", "--fail-on", "outcome"
    )
    assert code == 1
    assert "outcome ['ok'] became ['refused']" in err
    assert run(two_rounds, "compare", "demo@1", "demo@2", "--fail-on", "outcome")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "zzz"), "wanted a UUID"),
        (("show", "ffff"), "is not in the warehouse"),
        (("runs", "--since", "yesterday"), "--since: got 'yesterday'"),
        (("query", "nope"), "query 'nope' is unknown, wanted one of"),
        (("query", "runs_wide", "-p", "x"), "--param: got 'x', wanted NAME=VALUE"),
        (("query", "runs_wide", "-p", "x=1"), "parameter 'x' is unknown"),
        (("sql",), "no SQL was given"),
        (("sql", "DROP TABLE run"), "wanted SELECT"),
        (("sql", "SELECT * FROM nowhere"), "Table with name nowhere does not exist"),
        (("compare", "--fail-on", "outcome"), "need two sets"),
        (("compare", "demo@1", "demo@2", "--fail-on", "x"), "--fail-on: got 'x'"),
        (("compare", "demo@1", "demo@3"), "do not hold the same settings"),
        (("audit",), "wanted either RUN or --config"),
        (("audit", FIRST, "nope"), "nothing is stored as 'nope'"),
        (("audit", "--config", "nope=1"), "'nope' is no setting, pin or fact"),
        (("runs", "--limit", "1" + "0" * 30), "--limit"),
        (("audit", FIRST, "--load-point", "1" + "0" * 30), "--load-point"),
        (("query", "runs_wide", "--max-rows", "1" + "0" * 30), "--max-rows"),
        (("sql", "SELECT 1", "--max-rows", "1" + "0" * 30), "--max-rows"),
        (("sql", "SELECT 1", "--timeout", "inf"), "--timeout"),
        (("sql", "SELECT 1", "--timeout", "nan"), "--timeout"),
        (("sql", "SELECT 1", "--timeout", "1e300"), "--timeout"),
        (("query", "runs_wide", "--timeout", "-inf"), "--timeout"),
        (("ingest", "/nowhere"), "no manifest.json in it"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    two_rounds: Lab, run: Run, arguments: tuple[str, ...], message: str
) -> None:
    """What, where, got and wanted; no traceback; stdout stays empty."""
    code, out, err = run(two_rounds, *arguments)
    assert code == 2, err
    assert out == ""
    assert message in err
    assert len(err.strip().splitlines()) == 1, err


def test_no_warehouse_yet(lab: Lab, run: Run) -> None:
    """Before the first run every reader says how to get one."""
    for arguments in (("runs",), ("compare",), ("sql", "SELECT 1"), ("sql", "--where")):
        code, _, err = run(lab, *arguments)
        assert code == 2
        assert "no warehouse is published yet" in err


def test_quarantine_exits_with_1(lab: Lab, run: Run) -> None:
    """The good bundle is in, the bad one named, the exit code says that something is wrong."""
    good, bad = lab.seal(), lab.seal(repeat=2)
    (bad / "cell.json").write_text("{}")
    code, out, err = run(lab, "ingest", str(good), str(bad))
    assert code == 1
    assert "1 ingested" in out
    assert "cell.json: content differs from the manifest" in err


def test_rebuild_exits_with_1_when_a_listed_bundle_is_gone(stored: Stored, run: Run) -> None:
    """The warehouse is made, and the run that it lacks is named."""
    import shutil

    shutil.rmtree(stored.bundle)
    code, out, err = run(stored.lab, "rebuild")
    assert code == 1
    assert "0 runs" in out
    assert f"run {stored.bundle.name} is in the ledger, but its bundle is not here" in err
    assert len(err.strip().splitlines()) == 1


def test_show_names_the_requests_of_each_load_point(two_rounds: Lab, run: Run) -> None:
    """In text and in JSON: whoever compares two runs asks for the same requests first."""
    (point,) = json.loads(run(two_rounds, "show", FIRST, "--json")[1])["load_points"]
    assert (point["requests_sha256"], point["prompt_tokens_differ"]) == ("0" * 64, None)
    assert "0" * 64 in run(two_rounds, "show", FIRST)[1]


def test_export_has_every_table_with_its_comments(
    two_rounds: Lab, run: Run, tmp_path: Path
) -> None:
    """Parquet files say what their columns mean."""
    import pyarrow.parquet as pq

    folder = tmp_path / "export"
    code, _, err = run(two_rounds, "export", str(folder))
    assert code == 0, err
    schema = pq.read_schema(folder / "measurement.parquet")
    assert schema.field("value").metadata[b"comment"].endswith(b"[metric; measured]")
    assert schema.metadata[b"comment"] == b"one measured number, or why there is none"
    assert pq.read_table(folder / "run.parquet").num_rows == 3
    assert run(two_rounds, "export", str(folder))[0] == 2


def test_invalid_load_points_are_marked_and_left_out_aloud(
    new_lab: Callable[[Path], Lab], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cell table names the broken check; a comparison says how many it left out and why."""
    monkeypatch.setenv("COLUMNS", "250")
    lab = new_lab(tmp_path)
    cut = ((Ask(1010.0, 1012.0), Ask(1010.0, 1012.5), Ask(1010.1, 1013.0), Ask(1010.2)),)
    record.ingest(lab.home, [lab.seal(), lab.seal(round="2", started_s=1300.0, requests=cut)])
    _, out, err = run(lab, "compare", "demo@2")
    assert "INVALID: requests_complete" in out
    assert "1 load points are invalid" in err
    _, out, err = run(lab, "compare", "demo@1")
    assert "INVALID" not in out + err
    assert "0.01222" in out
    _, out, err = run(lab, "compare", "demo@1", "demo@2")
    assert "1 invalid load points of B left out: requests_complete" in err
    _, out, _ = run(lab, "show", "latest")
    assert "BROKEN" in out
    assert "noted" in out
    assert "peak_kv_usage_upper_ratio" in out
