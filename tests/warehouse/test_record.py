"""Bundles to rows: every number with its source, whole runs, the same content every time."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import tasks.record
import tasks.rows
from tasks import record
from tasks.canonical import sha256_file
from tasks.capture.validity import CHECKS, Scope
from tasks.pins import PARSER_VERSION
from tasks.plan.cell import LoadPoint
from tests.support.bundle_maker import Ask, Lab, Spec, predicted
from tests.warehouse.conftest import Stored
from warehouse import ledger
from warehouse.connection import open_snapshot, open_writer
from warehouse.errors import CannotFindOut, CheckFailed
from warehouse.migrate import migrate
from warehouse.registry import LOAD_POINT, STARTUP, Outcome, Phase
from warehouse.store import content_hash, replace_run, row_counts


def ask(lab: Lab, sql: str, **parameters: object) -> list[tuple[Any, ...]]:
    """Return a query's rows from the published snapshot."""
    with open_snapshot(lab.home.warehouse_snapshot) as connection:
        return connection.execute(sql, parameters or None).fetchall()


def measured(lab: Lab, metric: str, load_point: int | None = None) -> tuple[Any, ...]:
    """Return (value, reason) of one measurement of the only run."""
    rows = ask(
        lab,
        "SELECT value, reason FROM measurement "
        "WHERE metric = $metric AND load_point IS NOT DISTINCT FROM $point",
        metric=metric,
        point=load_point,
    )
    assert len(rows) == 1
    return rows[0]


def live_hash(lab: Lab) -> str:
    """Return the content hash of the snapshot."""
    with open_snapshot(lab.home.warehouse_snapshot) as connection:
        return content_hash(connection)


def test_log_line_becomes_a_measurement_with_its_place(one_run: Stored) -> None:
    """The number, the file, the line and its text belong together."""
    lab = one_run.lab
    rows = ask(
        lab,
        "SELECT value, source, file, line, text FROM measurement "
        "WHERE metric = 'kv_cache_size_tokens'",
    )
    value, source, file, line, text = rows[0]
    assert (value, source, file, line) == (975890.0, "log", "server.log", 43)
    assert text.endswith("GPU KV cache size: 975,890 tokens")


def test_polyaxons_statuses_are_events_with_their_time(one_run: Stored) -> None:
    """As the adapter writes them: another key would leave every time of Polyaxon NULL."""
    rows = ask(
        one_run.lab,
        "SELECT event, happened_at::VARCHAR FROM event WHERE source = 'polyaxon'",
    )
    assert rows == [("running", "2026-11-29 12:00:01")]


def test_effective_configuration_fills_what_no_line_says(one_run: Stored) -> None:
    """Blocks are in no log line of 0.27: they come from cache_config_info, with its line."""
    lab = one_run.lab
    rows = ask(lab, "SELECT value, source, file FROM measurement WHERE metric = 'num_gpu_blocks'")
    assert rows == [(1638.0, "cache_config_info", "metrics_first.txt")]


def test_every_metric_has_a_row_and_absent_ones_a_reason(one_run: Stored) -> None:
    """NULL without a reason, or 0 for absent, would be read as a measurement."""
    lab = one_run.lab
    rows = ask(lab, "SELECT load_point, metric, value, reason FROM measurement")
    assert {m for p, m, _, _ in rows if p is None} == set(STARTUP)
    assert {m for p, m, _, _ in rows if p == 0} <= set(LOAD_POINT)
    assert all((value is None) == (reason is not None) for _, _, value, reason in rows)
    assert measured(lab, "peak_gpu_used_bytes", 0) == (None, "no GPU was sampled")
    assert measured(lab, "model_loading_bytes")[0] is None
    assert measured(lab, "prefix_cache_hits", 0) == (
        None,
        "prefix_cache_hits_total was not sampled",
    )


def test_peaks_are_taken_within_the_window_only(lab: Lab) -> None:
    """The warm-up's burst before the window is not the measurement's peak."""
    samples = (
        (1009.9, 0.9, 60.0, 50.0, 0.0),  # warm-up
        (1011.0, 0.01, 4.0, 1.0, 0.0),
        (1014.001, 0.8, 50.0, 40.0, 0.0),  # after the last request's end
    )
    record.ingest(lab.home, [lab.seal(samples=samples)])
    assert measured(lab, "peak_kv_usage_ratio", 0) == (0.01, None)
    assert measured(lab, "peak_requests_running", 0) == (4.0, None)
    assert measured(lab, "peak_requests_waiting", 0) == (1.0, None)


def test_preemptions_are_the_counters_growth_around_the_window(one_run: Stored) -> None:
    """Preemptions before the window do not count, those in it do."""
    lab = one_run.lab
    assert measured(lab, "preemptions", 0) == (2.0, None)


def test_counter_that_falls_is_no_number(lab: Lab) -> None:
    """A restarted server starts counting again: a negative growth is not stored."""
    samples = ((1009.0, 0.0, 0.0, 0.0, 9.0), (1015.0, 0.0, 0.0, 0.0, 1.0))
    record.ingest(lab.home, [lab.seal(samples=samples)])
    value, reason = measured(lab, "preemptions", 0)
    assert value is None
    assert "the server restarted" in reason
    assert measured(lab, "peak_kv_usage_ratio", 0) == (
        None,
        "no sample of kv_usage_ratio within the window of 4.000 s",
    )


def test_missed_ticks_are_not_zero(lab: Lab) -> None:
    """A tick without a value is left out of the peak."""
    samples = ((1010.5, None, 1.0, 0.0, 0.0), (1012.0, 0.005, 1.0, 0.0, 0.0))
    record.ingest(lab.home, [lab.seal(samples=samples)])
    assert measured(lab, "peak_kv_usage_ratio", 0) == (0.005, None)


def test_served_tokens_not_asked_ones(one_run: Stored) -> None:
    """512 asked, 518 to 520 served: what was served is recorded and the bound is taken from it."""
    lab = one_run.lab
    assert measured(lab, "prompt_tokens_min", 0) == (518.0, None)
    assert measured(lab, "prompt_tokens_max", 0) == (520.0, None)
    ((asked,),) = ask(lab, "SELECT asked_prompt_tokens FROM load_point")
    assert asked == 512
    rows = ask(
        lab,
        "SELECT value, inputs FROM derivation WHERE metric = 'peak_kv_usage_ratio_bound'",
    )
    assert rows[0][0] == pytest.approx(20 / 1637)
    assert json.loads(rows[0][1])["prompt_tokens"] == 520


def test_failed_requests_do_not_count(lab: Lab) -> None:
    """A failed request has no end: it is counted as failed and moves no statistic."""
    requests = ((Ask(1010.0, 1012.0), Ask(1010.0, 0.0), Ask(1010.0, 1013.0), Ask(1010.0, 0.0)),)
    record.ingest(
        lab.home, [lab.seal(requests=requests, outcome=Outcome.PARTIAL, observed="partial")]
    )
    assert measured(lab, "requests_succeeded", 0) == (2.0, None)
    assert measured(lab, "window_s", 0) == (3.0, None)
    rows = ask(
        lab, "SELECT passed, kind, detail FROM validity WHERE check_name = 'requests_complete'"
    )
    assert [row[:2] for row in rows] == [(False, "invalidates")]
    assert rows[0][2].endswith("asked 4, sent 4, succeeded 2, the load ended partial")
    assert ask(lab, "SELECT valid, failed_checks, broken_checks FROM load_points_wide") == [
        (False, 1, "requests_complete")
    ]


def test_load_point_that_was_never_reached_has_reasons(lab: Lab) -> None:
    """A load point after the crash has a row, no window and no numbers."""
    load = (
        LoadPoint(parallel=4, number=4, warmup=1),
        LoadPoint(parallel=16, number=16, warmup=1),
    )
    record.ingest(lab.home, [lab.seal(load=load)])
    assert ask(lab, "SELECT state, window_start_s FROM load_point WHERE load_point = 1") == [
        ("skipped", None)
    ]
    for metric in ("peak_kv_usage_ratio", "requests_succeeded"):
        value, reason = measured(lab, metric, 1)
        assert value is None
        assert reason.startswith("the load point was never")
    assert ask(lab, "SELECT 1 FROM validity WHERE load_point = 1 AND NOT passed") == []


def test_statistics_are_derived_not_measured(one_run: Stored) -> None:
    """Quantiles follow from requests; they stand in their own table with their formula."""
    lab = one_run.lab
    rows = ask(lab, "SELECT value, formula FROM derivation WHERE metric = 'latency_p50_ms'")
    assert rows[0][0] == pytest.approx(2700.0)
    assert rows[0][1].startswith("0.5 quantile of latency_s")
    assert not ask(lab, "SELECT 1 FROM measurement WHERE metric = 'latency_p50_ms'")


def test_wrong_prediction_shows_as_residual_and_stays_wrong(lab: Lab) -> None:
    """A prediction is never corrected by what came out."""
    spec = Spec()
    wrong = predicted(spec.cell())
    wrong["values"]["kv_cache_size_tokens"] = 975891
    wrong["load"][0]["peak_kv_usage_ratio_bound"] = 0.001
    spec.prediction = wrong
    record.ingest(lab.home, [lab.seal(spec)])
    rows = ask(
        lab,
        "SELECT metric, predicted, measured, residual, alarm FROM residual WHERE alarm ORDER BY 1",
    )
    assert [row[0] for row in rows] == ["kv_cache_size_tokens", "peak_kv_usage_ratio"]
    assert rows[0][1:] == (975891.0, 975890.0, -1.0, True)


def test_printed_digits_are_an_interval(one_run: Stored) -> None:
    """29.78x is printed of 29.7818…: no residual; a prediction of 29.79 would be one."""
    lab = one_run.lab
    rows = ask(
        lab, "SELECT predicted, residual, alarm FROM residual WHERE metric = 'max_concurrency'"
    )
    assert rows[0][0] == pytest.approx(29.781818)
    assert rows[0][1:] == (0.0, False)


def test_refused_start_keeps_its_failure(lab: Lab) -> None:
    """A cell that fails is a result: typed, with its numbers, its line and no load numbers."""
    spec = Spec(
        outcome=Outcome.REFUSED,
        phase=Phase.KV_CACHE,
        observed="refused_or_crashed_at_start",
        log="cpu-0.27.0-kv-cache-larger-than-memory.log",
        metrics=None,
        requests=(),
        samples=(),
    )
    record.ingest(lab.home, [lab.seal(spec)])
    ((outcome, numbers, line, text),) = ask(
        lab,
        "SELECT r.outcome, f.numbers, f.line, f.text FROM run r JOIN failure f USING (run_uuid)",
    )
    assert outcome == "refused"
    assert 25769803776 in json.loads(numbers).values()
    assert "less than requested memory for kv" in text
    assert "failure in line" in measured(lab, "kv_cache_size_tokens")[1]
    assert line > 0


def test_bundle_with_hardly_anything_is_a_record_too(lab: Lab) -> None:
    """A run that was lost at once still has a row that says so."""
    path = lab.seal(
        outcome=Outcome.LOST,
        phase=Phase.START,
        observed=None,
        log=None,
        metrics=None,
        prediction=None,
        requests=(),
        samples=(),
    )
    report = record.ingest(lab.home, [path])
    assert report.quarantined == []
    assert ask(lab, "SELECT outcome FROM run") == [("lost",)]
    assert measured(lab, "kv_cache_size_tokens") == (None, "the run left no server.log")


def test_ingest_twice_is_ingest_once(lab: Lab) -> None:
    """The second time nothing is read but the manifest."""
    paths = [lab.seal(), lab.seal(repeat=2)]
    record.ingest(lab.home, paths)
    before = live_hash(lab)
    with (paths[0] / "server.log").open("a") as log:
        log.write("not read again\n")
    again = record.ingest(lab.home, paths)
    assert (len(again.unchanged), again.ingested, again.quarantined) == (2, [], [])
    assert live_hash(lab) == before


def test_newer_parser_replaces_whole_runs(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of an older parser go, all of them; other runs stay."""
    path, other = lab.seal(), lab.seal(repeat=2)
    record.ingest(lab.home, [path, other])
    counts = ask(lab, "SELECT count(*) FROM server_sample")
    monkeypatch.setattr(tasks.record, "PARSER_VERSION", 1000)
    monkeypatch.setattr(tasks.rows, "PARSER_VERSION", 1000)
    report = record.ingest(lab.home, [path])
    assert (len(report.replaced), report.ingested) == (1, [])
    assert ask(lab, "SELECT count(*) FROM server_sample") == counts
    assert sorted(ask(lab, "SELECT parser_version FROM run")) == [(PARSER_VERSION,), (1000,)]


def test_flipped_byte_is_quarantined_with_its_reason_and_stops_nothing(lab: Lab) -> None:
    """One bad bundle: moved aside with the file named; the good ones are stored."""
    good, bad, last = lab.seal(), lab.seal(repeat=2), lab.seal(repeat=3)
    log = bad / "server.log"
    content = bytearray(log.read_bytes())
    content[100] ^= 1
    log.write_bytes(content)
    report = record.ingest(lab.home, [good, bad, last])
    assert len(report.ingested) == 2
    assert "server.log: content differs from the manifest" in report.quarantined[0].reason
    assert not bad.exists()
    (kept,) = record.reasons(lab.home)
    assert (kept.path / "bundle" / "server.log").is_file()
    assert "server.log" in kept.reason


def test_rewritten_manifest_is_caught_by_the_ledger(lab: Lab) -> None:
    """A manifest that was made to fit a changed file is not the one that was sealed."""
    path = lab.seal()
    record.ingest(lab.home, [path])
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["outcome"] = "crashed"
    (path / "manifest.json").write_text(json.dumps(manifest))
    report = record.ingest(lab.home, [path])
    assert "the bundle was changed after it was sealed" in report.quarantined[0].reason
    assert ask(lab, "SELECT outcome FROM run") == [("ok",)]


def test_bundle_from_elsewhere_is_copied_here(lab: Lab, tmp_path: Path) -> None:
    """Audits need the files: a foreign bundle becomes one of ours."""
    path = lab.seal()
    elsewhere = tmp_path / "usb" / path.name
    shutil.move(path, elsewhere)
    report = record.ingest(lab.home, [elsewhere])
    assert len(report.ingested) == 1
    assert (path / "manifest.json").is_file()
    assert elsewhere.is_dir()


def test_wrong_rows_store_nothing(lab: Lab) -> None:
    """A run is stored whole or not at all, also when it replaces one."""
    path = lab.seal()
    record.ingest(lab.home, [path])
    rows = tasks.rows.parse(path)
    tables = dict(rows.tables)
    tables["validity"] = tables["validity"].drop_columns(["detail"])
    with open_writer(lab.home.warehouse_live) as connection:
        before = row_counts(connection)
        with pytest.raises(CheckFailed, match="validity: columns \\['detail'\\]"):
            replace_run(connection, rows.run_uuid, tables)
        assert row_counts(connection) == before


def test_content_does_not_depend_on_order_or_number_of_ingests(lab: Lab, tmp_path: Path) -> None:
    """One by one, all at once, backwards and rebuilt: the same content hash."""
    commented = "# a comment\nname: demo\n"
    paths = [
        lab.seal(),
        lab.seal(repeat=2, sweep_text=commented),
        lab.seal(round="2", sweep="other"),
    ]
    for path in paths:
        record.ingest(lab.home, [path])
    one_by_one = live_hash(lab)
    other = Lab(type(lab.home)(tmp_path / "other"))
    shutil.copytree(lab.home.bundles, other.home.bundles)
    record.ingest(other.home, [other.home.bundles / path.name for path in reversed(paths)])
    assert live_hash(other) == one_by_one
    assert record.rebuild(lab.home).content_hash == one_by_one
    assert live_hash(lab) == one_by_one


def test_content_hash_sees_every_change(lab: Lab) -> None:
    """One number or one text changed: another hash; text cannot move between columns unseen."""
    record.ingest(lab.home, [lab.seal()])
    with open_writer(lab.home.warehouse_live) as connection:
        seen = {content_hash(connection)}
        for change in (
            "UPDATE server_sample SET kv_usage_ratio = 0.0030001 WHERE tick = 0",
            "UPDATE run SET message = '1', label = label",
            "UPDATE run SET message = NULL",
            "UPDATE cell SET model = model || 'x'",
            "DELETE FROM event WHERE source = 'polyaxon'",
        ):
            connection.execute(change)
            digest = content_hash(connection)
            assert digest not in seen, change
            seen.add(digest)


def test_verify_names_every_number_that_differs(lab: Lab) -> None:
    """A number changed in the warehouse shows with what the raw file says."""
    path = lab.seal()
    record.ingest(lab.home, [path], publish=False)
    with open_writer(lab.home.warehouse_live) as connection:
        connection.execute("UPDATE measurement SET value = 1 WHERE metric = 'kv_cache_size_tokens'")
        connection.execute("DELETE FROM server_sample WHERE tick = 1")
    record.ingest(lab.home, [path])  # publishes what is there
    found = [(d.where, d.what) for d in record.verify(lab.home).differences]
    assert found == [
        ("measurement [-, kv_cache_size_tokens].value", "stored 1.0, the raw files say 975890.0"),
        ("server_sample [1]", "in the raw files, but not stored"),
    ]


def test_verify_reads_raw_text_not_the_tables_made_from_it(lab: Lab) -> None:
    """A Parquet file that does not say what its lines say is found, although its hash is right."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    path = lab.seal()
    samples = pq.read_table(path / "server_samples.parquet")
    at = samples.schema.get_field_index("requests_running")
    samples = samples.set_column(at, "requests_running", pc.add(samples["requests_running"], 1.0))
    pq.write_table(samples, path / "server_samples.parquet")
    _reseal(path, "server_samples.parquet")
    record.ingest(lab.home, [path])
    found = [d.where for d in record.verify(lab.home).differences]
    assert "server_sample [0].requests_running" in found
    assert "measurement [0, peak_requests_running].value" in found


def _reseal(path: Path, name: str) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    file = path / name
    manifest["files"][name] = {"sha256": sha256_file(file), "bytes": file.stat().st_size}
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_verify_changes_nothing_and_names_missing_bundles_and_files(lab: Lab) -> None:
    """A bundle that went, a file that went, a file that came."""
    gone, cut, whole = lab.seal(), lab.seal(repeat=2), lab.seal(repeat=3)
    record.ingest(lab.home, [gone, cut, whole])
    shutil.rmtree(gone)
    (cut / "cell.json").unlink()
    (whole / "extra.txt").write_text("x")
    before = sorted(str(p) for p in lab.home.root.rglob("*"))
    found = {(d.run_uuid, d.where) for d in record.verify(lab.home).differences}
    assert (gone.name, "ledger") in found
    assert (gone.name, "run") in found
    assert (cut.name, "cell.json") in found
    assert (whole.name, "extra.txt") in found
    assert sorted(str(p) for p in lab.home.root.rglob("*")) == before


def test_verify_is_silent_when_all_agree(lab: Lab) -> None:
    """Nothing differs right after an ingest, and everything was looked at."""
    record.ingest(lab.home, [lab.seal(), lab.seal(repeat=2)])
    report = record.verify(lab.home)
    assert report.differences == []
    assert report.bundles == 2
    assert report.files > 30


def test_rebuild_does_not_need_the_old_file(lab: Lab) -> None:
    """A damaged warehouse is made anew from the bundles; a bad bundle is reported, not moved."""
    good, bad = lab.seal(), lab.seal(repeat=2)
    record.ingest(lab.home, [good])
    lab.home.warehouse_live.write_bytes(b"junk")
    (bad / "server.log").write_text("changed")
    with pytest.raises(CannotFindOut, match="memsweep rebuild"):
        record.ingest(lab.home, [good])
    report = record.rebuild(lab.home)
    assert report.runs == 1
    assert bad.is_dir()
    assert "server.log" in report.refused[0].reason
    assert len(ask(lab, "SELECT 1 FROM run")) == 1


def test_ledger_chain_shows_every_tampering(tmp_path: Path) -> None:
    """A changed, a missing and a cut line each show."""
    ledger.append(tmp_path, {"a": "1" * 64, "b": "2" * 64})
    ledger.append(tmp_path, {"b": "2" * 64, "c": "3" * 64})
    path = tmp_path / ledger.NAME
    whole = path.read_text()
    assert ledger.read(tmp_path).problems == []
    assert ledger.read(tmp_path).length == 3
    lines = whole.splitlines(keepends=True)
    for changed in (
        whole.replace("2" * 64, "4" * 64, 1),
        lines[0] + lines[2],
        lines[1] + lines[2],
        whole[:-20],
    ):
        path.write_text(changed)
        assert ledger.read(tmp_path).problems, changed
    path.write_text(whole)
    with pytest.raises(CheckFailed, match="changed after it was sealed"):
        ledger.append(tmp_path, {"a": "9" * 64})
    assert path.read_text() == whole
    path.write_bytes(whole.encode() + b"\xff\n")
    assert ledger.append(tmp_path, {"d": "5" * 64}).manifests.keys() == set("abcd")
    assert ledger.read(tmp_path).problems == [f"{ledger.NAME} line 4: not an entry"]


def test_stored_types(one_run: Stored) -> None:
    """UUIDs, times and JSON are stored as such, times in UTC."""
    lab = one_run.lab
    with open_snapshot(lab.home.warehouse_snapshot) as connection:
        kinds = connection.execute(
            "SELECT typeof(run_uuid), typeof(started_at), typeof(c.setting), "
            "started_at::VARCHAR FROM run JOIN cell c USING (cell_key)"
        ).fetchone()
        stamp = connection.execute(
            "SELECT sampled_at::VARCHAR FROM server_sample WHERE tick = 1"
        ).fetchone()
    assert kinds == ("UUID", "TIMESTAMP", "JSON", "2026-11-29 12:00:01")
    assert stamp == ("2026-11-29 12:00:10.5",)
    assert duckdb.__version__


def test_cells_nobody_ran_are_derived_from_the_measured_pool(one_run: Stored) -> None:
    """The seed's 8,192 figures follow from the 32,768 run's pool; its own limit is not repeated."""
    rows = {
        limit: (tokens, round(concurrency, 2))
        for limit, tokens, concurrency in ask(
            one_run.lab,
            "SELECT max_model_len_tokens, kv_cache_size_tokens, max_concurrency FROM derived_cell",
        )
    }
    assert rows[8192] == (838_656, 102.38)
    assert 32_768 not in rows
    assert max(rows) == 65_536  # the model's own limit


def test_bound_of_a_pool_that_could_not_be_predicted(lab: Lab) -> None:
    """Where the pool's size comes from profiling, the measured blocks bound the peak."""
    spec = Spec()
    unknown = predicted(spec.cell())
    unknown["values"] = {}
    spec.prediction = unknown
    record.ingest(lab.home, [lab.seal(spec)])
    ((value, formula),) = ask(
        lab,
        "SELECT value, formula FROM derivation WHERE metric = 'peak_kv_usage_ratio_bound'",
    )
    assert value == pytest.approx(20 / 1637)
    assert "measured blocks" in formula


def test_bundle_whose_rows_do_not_fit_stops_no_other(lab: Lab) -> None:
    """A bundle that passes every check of its files, but not the tables': only it is set aside."""
    good, bad, last = lab.seal(), lab.seal(repeat=2), lab.seal(repeat=3)
    manifest = json.loads((bad / "manifest.json").read_text())
    manifest["outcome"] = None
    (bad / "manifest.json").write_text(json.dumps(manifest))
    report = record.ingest(lab.home, [good, bad, last])
    assert sorted(report.ingested) == sorted([good.name, last.name])
    assert "the rows do not fit the tables: " in report.quarantined[0].reason
    assert not bad.exists()


def test_folder_under_another_name_is_refused(lab: Lab) -> None:
    """A bundle that was copied under another run's name is not that run."""
    path = lab.seal()
    copied = path.with_name("22222222-2222-4222-8222-222222222222")
    shutil.copytree(path, copied)
    report = record.ingest(lab.home, [path, copied])
    assert report.ingested == [path.name]
    assert "the folder another" in report.quarantined[0].reason


@pytest.mark.parametrize("name", ["../secret.txt", "raw/../../secret.txt", "/etc/hostname"])
def test_bundle_cannot_name_files_outside_itself(lab: Lab, name: str) -> None:
    """A manifest that lists a file elsewhere is refused before that file is looked at."""
    path = lab.seal()
    (lab.home.bundles / "secret.txt").write_text("x")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = {"sha256": sha256_file(lab.home.bundles / "secret.txt"), "bytes": 1}
    (path / "manifest.json").write_text(json.dumps(manifest))
    report = record.ingest(lab.home, [path])
    assert "lists a file outside the bundle" in report.quarantined[0].reason


NOISE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["", "\x00", "2026-11-29T12:00:00Z", "../../etc/passwd", "1e999"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


def places(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every part of a JSON value."""
    found = [path]
    parts = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, part in parts:
        found += places(part, (*path, key))
    return found


@pytest.fixture(scope="module")
def in_memory() -> duckdb.DuckDBPyConnection:
    """Return a warehouse in memory, the same for all examples."""
    connection = duckdb.connect()
    migrate(connection)
    return connection


EXAMPLES = int(os.environ.get("MEMSWEEP_EXAMPLES", "40"))


@settings(deadline=None, max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_content_is_taken_or_refused_never_a_crash(
    data: st.DataObject, one_run: Stored, in_memory: duckdb.DuckDBPyConnection
) -> None:
    """Whatever stands in a bundle's files, it becomes rows that fit or one reason."""
    name = data.draw(st.sampled_from([*sorted(p.name for p in one_run.bundle.glob("*.json"))]))
    kept = {p: p.read_bytes() for p in (one_run.bundle / name, one_run.bundle / "manifest.json")}
    document = json.loads((one_run.bundle / name).read_text())
    place = data.draw(st.sampled_from(places(document)))
    noise = data.draw(NOISE)
    if place:
        inner = document
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = noise
    else:
        document = noise
    try:
        (one_run.bundle / name).write_text(json.dumps(document))
        if name != "manifest.json":
            _reseal(one_run.bundle, name)
        with contextlib.suppress(CheckFailed):
            rows = tasks.rows.parse(one_run.bundle)
            replace_run(in_memory, rows.run_uuid, rows.tables)
            event(f"{name} taken")
    finally:
        for path, content in kept.items():
            path.write_bytes(content)


def checks(lab: Lab, load_point: int | None) -> dict[str, tuple[Any, ...]]:
    """Return (kind, passed, detail) of each check of a run or load point."""
    rows = ask(
        lab,
        "SELECT check_name, kind, passed, detail FROM validity "
        "WHERE load_point IS NOT DISTINCT FROM $point",
        point=load_point,
    )
    assert len(rows) == len({row[0] for row in rows})
    return {row[0]: row[1:] for row in rows}


def test_every_check_is_a_row_with_kind_and_reason(one_run: Stored) -> None:
    """The table of checks and the stored rows are the same list; unknown says what is missing."""
    run, point = checks(one_run.lab, None), checks(one_run.lab, 0)
    for found, scope in ((run, Scope.RUN), (point, Scope.LOAD_POINT)):
        wanted = {c.name: c.weight.value for c in CHECKS if c.scope in (scope, Scope.BOTH)}
        assert {name: row[0] for name, row in found.items()} == wanted
        assert all(row[2] for row in found.values())
    assert point["requests_complete"][1:] == (True, "asked 4, sent 4, succeeded 4")
    assert point["preempted"][:2] == ("notes", False)
    assert point["gpu_exclusive"][1:] == (None, "no GPU was sampled")
    assert run["settings_in_force"][1] is True
    assert "prediction 1638" in run["sources_agree"][2]
    assert run["port_free"][1] is None
    # Notes never count against a load point.
    assert ask(one_run.lab, "SELECT valid, failed_checks FROM load_points_wide") == [(True, 0)]
    assert ask(one_run.lab, "SELECT failed_checks FROM runs_wide") == [(0,)]


def test_a_wrong_setting_or_a_kept_port_invalidates_every_load_point(lab: Lab) -> None:
    """What is wrong with the run is wrong with all it measured; the outcome stays as decided."""

    def spoil(folder: Path) -> None:
        info = json.loads((folder / "server_info.json").read_text())
        wrong = {"name": "max_model_len", "wanted": 32768, "got": 8192, "state": "differs"}
        info["checks"].append(wrong)
        (folder / "server_info.json").write_text(json.dumps(info))
        stop = {"left": [], "port_free": False, "memory_back": False}
        stop |= {"before": {"mem_available_bytes": 2**34}}
        stop |= {"after_stop": {"mem_available_bytes": 2**33}}
        (folder / "stop.json").write_text(json.dumps(stop))

    record.ingest(lab.home, [lab.seal(Spec(change=spoil))])
    run = checks(lab, None)
    assert run["settings_in_force"][:2] == ("fails", False)
    assert run["settings_in_force"][2].endswith("max_model_len: wanted 32768, in force 8192")
    assert run["port_free"][:2] == ("invalidates", False)
    assert run["machine_memory_returned"][:2] == ("notes", False)
    assert "16.00 GiB available before start, 8.00 GiB" in run["machine_memory_returned"][2]
    assert ask(lab, "SELECT outcome, valid, broken_checks FROM load_points_wide") == [
        ("ok", False, "port_free, settings_in_force")
    ]


def test_a_wrong_prediction_is_kept_apart_from_log_and_server(lab: Lab) -> None:
    """Each source's number stands in the reason, none is replaced by another."""
    spec = Spec()
    spec.prediction = predicted(spec.cell())
    spec.prediction["values"]["num_gpu_blocks"] = 1600
    record.ingest(lab.home, [lab.seal(spec)])
    kind, passed, reason = checks(lab, None)["sources_agree"]
    assert (kind, passed) == ("invalidates", False)
    assert reason.endswith("num_gpu_blocks: cache_config_info 1638, prediction 1600")


def usage(lab: Lab) -> tuple[Any, ...]:
    """Return case, lower, sampled and upper peak and the samples outside of the only point."""
    return ask(
        lab,
        "SELECT peak_kv_usage_case, peak_kv_usage_lower_ratio, peak_kv_usage_ratio, "
        "peak_kv_usage_upper_ratio, samples_outside_curves FROM load_points_wide",
    )[0]


def test_usage_between_scrapes_stands_beside_the_sampled_peak(lab: Lab) -> None:
    """Four requests of five blocks each; the scrapes saw them only after two were gone."""
    quiet = ((1009.0, 0.0, 0.0, 0.0, 0.0), (1013.5, 5 / 1637, 1.0, 0.0, 0.0))
    asked = [Ask(1010.0, 1012.0)] * 3 + [Ask(1010.0, 1014.0)]
    record.ingest(lab.home, [lab.seal(samples=quiet, requests=[asked])])
    case, lower, sampled, upper, outside = usage(lab)
    assert case in ("exact", "bounded")
    assert sampled == pytest.approx(5 / 1637)
    assert sampled < lower <= upper == pytest.approx(20 / 1637)
    assert outside == 0
    assert checks(lab, 0)["samples_between_curves"][1] is True


def test_samples_that_the_requests_do_not_allow_are_counted(lab: Lab) -> None:
    """Something else used the pool, or a clock is off: noted with the number, not hidden."""
    odd = ((1011.0, 0.5, 4.0, 0.0, 0.0), (1011.5, 0.01, 4.0, 0.0, 0.0), (1013.0, 0.4, 2.0, 0, 0))
    record.ingest(lab.home, [lab.seal(samples=odd)])
    assert usage(lab)[4] == 2
    kind, passed, reason = checks(lab, 0)["samples_between_curves"]
    assert (kind, passed) == ("notes", False)
    assert "2 samples outside" in reason


def test_usage_that_cannot_be_told_is_null_with_its_reason(lab: Lab) -> None:
    """Without the counter of preemptions only the upper curve is sure; without a pool neither."""
    blind = [(t, v, 4.0, 0.0, None) for t, v in ((1009.0, 0.0), (1011.0, 0.01), (1015.0, 0.0))]
    record.ingest(lab.home, [lab.seal(samples=blind)])
    case, lower, _, upper, outside = usage(lab)
    assert (case, lower, outside) == (None, None, None)
    assert upper == pytest.approx(20 / 1637)
    rows = ask(lab, "SELECT reason FROM derivation WHERE metric = 'peak_kv_usage_lower_ratio'")
    assert rows == [("preemptions within the window are not known",)]


def test_a_counter_that_falls_and_recovers_is_a_restart(lab: Lab) -> None:
    """Growth from end to end would hide it: 3 to 5, with a restart in between."""
    fallen = [(1009.0, 0.0, 0, 0, 3), (1011.0, 0.01, 4, 0, 0), (1015.0, 0.0, 0, 0, 5)]
    record.ingest(lab.home, [lab.seal(samples=fallen)])
    assert measured(lab, "preemptions", 0)[0] is None
    for point in (None, 0):
        assert checks(lab, point)["server_uninterrupted"][:2] == ("invalidates", False)


def test_a_load_point_that_nobody_sampled_is_invalid(lab: Lab) -> None:
    """Peaks are NULL then, and so is trust: no sample is a gap as long as the window."""
    record.ingest(lab.home, [lab.seal(samples=())])
    kind, passed, reason = checks(lab, 0)["samples_complete"]
    assert (kind, passed) == ("invalidates", False)
    assert reason == "gaps in the samples: 0 of unknown samples"


def test_two_runs_with_the_same_requests_are_shown_by_sql(lab: Lab) -> None:
    """The hash and the differing prompts of load_points.json are columns, NULL where unknown."""

    def another(folder: Path) -> None:
        path = folder / "bench/load_points.json"
        (point,) = json.loads(path.read_text())
        path.write_text(
            json.dumps([point | {"requests_sha256": "f" * 64, "prompt_tokens_differ": 3}])
        )

    def older(folder: Path) -> None:
        path = folder / "bench/load_points.json"
        (point,) = json.loads(path.read_text())
        names = ("requests_sha256", "prompt_tokens_differ", "client_lag", "client_lag_reason")
        path.write_text(json.dumps([{k: v for k, v in point.items() if k not in names}]))

    paths = [lab.seal(), lab.seal(repeat=2)]
    paths += [lab.seal(repeat=3, change=another), lab.seal(repeat=4, change=older)]
    record.ingest(lab.home, paths)
    assert ask(
        lab,
        "SELECT repeat, requests_sha256, prompt_tokens_differ FROM load_points_wide ORDER BY 1",
    ) == [
        (1, "0" * 64, None),
        (2, "0" * 64, None),
        (3, "f" * 64, 3),
        (4, None, None),
    ]
    assert ask(
        lab,
        "SELECT list(repeat ORDER BY repeat) FROM load_point JOIN run USING (run_uuid) "
        "WHERE requests_sha256 IS NOT NULL GROUP BY requests_sha256 ORDER BY 1",
    ) == [([1, 2],), ([3],)]
    assert ask(
        lab,
        "SELECT value, m.reason FROM measurement m JOIN run USING (run_uuid) "
        "WHERE metric = 'client_lag_p99_s' AND repeat = 4",
    ) == [(None, "the run did not watch the client's event loop")]


def test_a_late_client_invalidates_what_it_measured(lab: Lab) -> None:
    """Its lag is a number with its place; one that is not known is no doubt, and says why."""
    for repeat, lag_s in enumerate((0.004, 0.3, None), start=1):
        record.ingest(lab.home, [lab.seal(repeat=repeat, client_lag_s=lag_s)])
    assert ask(
        lab,
        "SELECT client_lag_p50_s, client_lag_p99_s, client_lag_max_s, valid, broken_checks "
        "FROM load_points_wide ORDER BY repeat",
    ) == [
        (0.001, 0.004, 0.008, True, None),
        (0.075, 0.3, 0.6, False, "client_lag"),
        (None, None, None, True, None),
    ]
    assert ask(
        lab,
        "SELECT v.kind, v.passed, v.detail FROM validity v JOIN run USING (run_uuid) "
        "WHERE check_name = 'client_lag' ORDER BY repeat",
    ) == [
        (
            "invalidates",
            True,
            "event loop late by 0.004 s, allowed 0.270 s where a request takes 2.700 s",
        ),
        (
            "invalidates",
            False,
            "the client's own loop was late: event loop late by 0.300 s, allowed 0.270 s "
            "where a request takes 2.700 s",
        ),
        ("invalidates", None, "how late the client's event loop ran is not known"),
    ]
    assert ask(
        lab,
        "SELECT m.reason, file, text FROM measurement m JOIN run USING (run_uuid) "
        "WHERE metric = 'client_lag_p99_s' AND repeat > 1 ORDER BY repeat",
    ) == [
        (
            None,
            "bench/load_points.json",
            "client_lag.p99_s of 200 wake-ups, one every 0.02 s",
        ),
        ("the measurement did not end", None, None),
    ]


def test_rebuild_names_the_runs_whose_bundle_is_gone(lab: Lab) -> None:
    """A warehouse that silently lacks runs would pass for whole; the ledger knows them."""
    good, moved, spoilt = lab.seal(), lab.seal(repeat=2), lab.seal(repeat=3)
    record.ingest(lab.home, [good, moved, spoilt])
    assert record.rebuild(lab.home).refused == []
    shutil.rmtree(moved)
    lab.home.quarantine.mkdir()
    spoilt.rename(lab.home.quarantine / f"{spoilt.name}-20261129T120000000000")
    report = record.rebuild(lab.home)
    assert report.runs == 1
    told = {refused.path.name: refused.reason for refused in report.refused}
    assert told == {
        moved.name: f"run {moved.name} is in the ledger, but its bundle is not here: "
        "it was moved or deleted",
        spoilt.name: f"run {spoilt.name} is in the ledger, but its bundle is not here: it is in "
        f"quarantine, {lab.home.quarantine / spoilt.name}-20261129T120000000000",
    }
