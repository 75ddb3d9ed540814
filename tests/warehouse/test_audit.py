"""The chain of custody: every stored number resolves, and each broken link is named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from tests.warehouse.conftest import Stored
from warehouse import ledger
from warehouse.audit import Audit, audit
from warehouse.connection import open_snapshot, open_writer
from warehouse.errors import BadInput
from warehouse.publish import publish


def follow(stored: Stored, metric: str | None = None, load_point: int | None = None) -> Audit:
    """Audit the run from the published snapshot."""
    home = stored.lab.home
    with open_snapshot(home.warehouse_snapshot) as connection:
        return audit(connection, home.bundles, stored.bundle.name, metric, load_point=load_point)


def test_every_stored_number_resolves(one_run: Stored) -> None:
    """Measured, predicted and derived: each goes back to a file whose hash holds."""
    chain = follow(one_run)
    assert chain.broken == []
    assert len(chain.values) > 60
    for value in chain.values:
        if value["value"] is None:
            assert value["evidence"] == "predicted" or value["reason"], value
        else:
            assert value.get("file_sha256"), value


def test_chain_of_a_log_line(one_run: Stored) -> None:
    """Number, line number and text, file hash, manifest, run, pins, sweep, code, person, flow."""
    chain = follow(one_run, "kv_cache_size_tokens").document()
    measured, predicted = chain["values"]
    assert (measured["value"], measured["line"], measured["unit"]) == (975890, 43, "tokens")
    assert "GPU KV cache size: 975,890 tokens" in measured["text"]
    assert predicted["evidence"] == "predicted"
    assert len(chain["manifest"]["sha256"]) == 64
    assert len(chain["operation"]["sha256"]) == 64
    assert chain["environment"]["engine_lock_sha256"].endswith("2")
    assert chain["code"] == {
        "memsweep_version": None,
        "git_commit": "0" * 40,
        "git_dirty": False,
    }
    assert chain["started_by"] == "tester"
    assert chain["prefect_flow_run_id"].endswith("1")
    assert chain["sweep"]["round"] == "1"
    assert json.loads(json.dumps(chain)) == chain


def test_chain_of_samples_and_requests(one_run: Stored) -> None:
    """A peak shows the raw sample, a growth both ends, an extreme its request."""
    (peak,) = follow(one_run, "peak_requests_waiting").values[:1]
    assert json.loads(peak["raw"][0])["values"]["requests_waiting"] == 2
    (growth,) = follow(one_run, "preemptions").values
    assert [json.loads(line)["tick"] for line in growth["raw"]] == [0, 4]
    (longest,) = follow(one_run, "prompt_tokens_max", 0).values
    assert (longest["source"], longest["line"]) == ("requests", 2)
    assert longest["file"].endswith("benchmark_data.db")


def _cut_ledger(stored: Stored) -> None:
    (stored.lab.home.bundles / ledger.NAME).write_text("")


def _edit(name: str) -> Callable[[Stored], None]:
    def change(stored: Stored) -> None:
        with (stored.bundle / name).open("ab") as file:
            file.write(b" ")

    return change


def _remove(name: str) -> Callable[[Stored], None]:
    def change(stored: Stored) -> None:
        (stored.bundle / name).unlink()

    return change


def _store(sql: str) -> Callable[[Stored], None]:
    def change(stored: Stored) -> None:
        home = stored.lab.home
        with open_writer(home.warehouse_live) as connection:
            connection.execute(sql)
            publish(connection, home.warehouse_live, home.warehouse_snapshot)

    return change


@pytest.mark.parametrize(
    ("metric", "tamper", "link"),
    [
        ("kv_cache_size_tokens", _edit("server.log"), r"server\.log: sha256 is"),
        ("kv_cache_size_tokens", _remove("server.log"), r"server\.log: cannot be read"),
        ("kv_cache_size_tokens", _edit("manifest.json"), r"manifest\.json: sha256 is"),
        ("kv_cache_size_tokens", _remove("manifest.json"), r"manifest\.json: the bundle is not"),
        ("kv_cache_size_tokens", _edit("operation.json"), r"operation\.json: sha256 is"),
        ("kv_cache_size_tokens", _edit("sweep.yaml"), r"sweep\.yaml: sha256 is"),
        ("kv_cache_size_tokens", _edit("prediction.json"), r"prediction\.json: sha256 is"),
        ("kv_cache_size_tokens", _cut_ledger, r"ledger\.jsonl: has no entry"),
        (
            "kv_cache_size_tokens",
            _store("UPDATE measurement SET line = 42 WHERE metric = 'kv_cache_size_tokens'"),
            r"server\.log line 42: reads",
        ),
        (
            "kv_cache_size_tokens",
            _store("UPDATE artifact SET sha256 = 'x' WHERE path = 'cell.json'"),
            r"cell\.json: the manifest lists it otherwise",
        ),
        (
            "kv_cache_size_tokens",
            _store("DELETE FROM artifact WHERE path = 'server.log'"),
            r"server\.log: not among the run's artifacts",
        ),
        (
            "kv_cache_size_tokens",
            _store("UPDATE run SET started_by = NULL"),
            "who started it: not recorded",
        ),
        (
            "kv_cache_size_tokens",
            _store("UPDATE environment SET engine_lock_sha256 = NULL"),
            "image digest or engine lock: not recorded",
        ),
        (
            "kv_cache_size_tokens",
            _store("UPDATE prediction SET made_at = '2027-01-01'"),
            "predicted at 2027-01-01T00:00:00Z, after the run began",
        ),
        (
            "peak_requests_waiting",
            _store("UPDATE measurement SET value = 7 WHERE metric = 'peak_requests_waiting'"),
            r"peak_requests_waiting \(load point 0\): stored 7.0, the samples say 2.0",
        ),
        (
            "peak_requests_waiting",
            _store("UPDATE measurement SET line = 99 WHERE metric = 'peak_requests_waiting'"),
            "no tick 99",
        ),
        (
            "prompt_tokens_max",
            _store("UPDATE measurement SET value = 512 WHERE metric = 'prompt_tokens_max'"),
            r"row 2: prompt_tokens is 520.0, stored 512.0",
        ),
        (
            "prompt_tokens_max",
            _edit("bench/load_point_0/parallel_4_number_4/benchmark_data.db"),
            r"benchmark_data\.db: sha256 is",
        ),
    ],
)
def test_each_broken_link_is_named(
    stored: Stored, metric: str, tamper: Callable[[Stored], None], link: str
) -> None:
    """Whatever is changed between the number and its origin shows, by name."""
    tamper(stored)
    chain = follow(stored, metric)
    assert any(re.search(link, broken) for broken in chain.broken), chain.broken


def test_unknown_metric_names_the_known_ones(one_run: Stored) -> None:
    """A misspelt name is answered with what there is."""
    with pytest.raises(
        BadInput, match=r"nothing is stored as 'kv_tokens', wanted one of: .*kv_cache"
    ):
        follow(one_run, "kv_tokens")
    with pytest.raises(BadInput, match="of load point 7"):
        follow(one_run, "preemptions", 7)


def test_absent_number_is_not_a_broken_link(one_run: Stored) -> None:
    """What was not measured has a reason; the rest of the chain still holds."""
    chain = follow(one_run, "peak_gpu_used_bytes")
    assert chain.broken == []
    assert chain.values[0]["value"] is None
    assert chain.values[0]["reason"] == "no GPU was sampled"
