"""What past boots in a published warehouse say about the next one, from bundles to the plan."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tasks import boots, bundle, record
from tasks.boots import PastBoots
from tasks.bundle import Identity
from tasks.home import Home
from tasks.plan import gpus
from tasks.plan.calibration import Pool, estimate_non_kv
from tasks.plan.cell import UNRESOLVED, Cell
from tasks.plan.prediction import predict
from tests.support.bundle_maker import HYBRID, Spec, write_outputs
from warehouse.errors import CannotFindOut
from warehouse.query import run_sql
from warehouse.registry import Outcome, Phase

GIB = 2**30
A10 = gpus.find("A10")
LOG = """INFO 11-29 12:00:00 [model_runner.py:1] Model loading took 8.61 GiB memory and 3.2 seconds
INFO 11-29 12:00:09 [gpu_worker.py:436] Available KV cache memory: {available} GiB
INFO 11-29 12:00:09 [kv_cache_utils.py:1087] GPU KV cache size: 273,563 tokens
"""


@dataclass
class GpuSpec(Spec):
    """A profiled boot on an A10."""

    available: str = "8.88"
    batched: int = 2048
    gpu: str = "NVIDIA A10"
    pool: Pool | None = None

    def cell(self) -> Cell:
        document = super().cell().model_dump(mode="json")
        document["pins"] |= {"device": "cuda", "engine_lock_sha256": "0" * 64}
        server = {"kv_cache_memory_bytes": None, "max_num_batched_tokens": self.batched}
        document["setting"]["server"] |= server
        return Cell.model_validate(document)


def seal(home: Home, spec: GpuSpec) -> Path:
    """Seal a bundle whose environment has a GPU, as NVML tells it."""
    folder = bundle.staging(home, spec.run_uuid)
    spec.log = spec.metrics = None
    cell = spec.cell()
    if spec.pool is not None:
        made = predict(cell, HYBRID, memory_total_bytes=None, gpu=A10, pool=spec.pool)
        spec.prediction = made.document(cell.cell_key, made_at="2026-11-29T11:59:00Z")
    write_outputs(folder, spec)
    (folder / "server.log").write_text(LOG.format(available=spec.available))
    environment = json.loads((folder / "environment.json").read_text())
    environment["gpus"] = [{"uuid": "GPU-0", "name": spec.gpu, "total_bytes": 23028 * 2**20}]
    (folder / "environment.json").write_text(json.dumps(environment))
    identity = Identity(
        run_uuid=spec.run_uuid,
        cell_key=cell.cell_key,
        setting_key=cell.setting_key,
        sweep="s",
        sweep_sha256="0" * 64,
        round="1",
        repeat=1,
        attempt=1,
    )
    facts: dict[str, object] = {"observed": "ok", "message": "", "reason": None, "incomplete": []}
    sealed = bundle.seal(home, folder, identity, outcome=Outcome.OK, phase=Phase.STOP, facts=facts)
    return sealed.folder


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Return a warehouse with two boots on an A10, one on another GPU, one with an estimate."""
    home = Home(tmp_path_factory.mktemp("boots"))
    estimate = Pool(round(8.9 * GIB), round(1.4 * GIB), "default")
    specs = [
        GpuSpec(),
        GpuSpec(available="8.28", batched=8192, pool=estimate),
        GpuSpec(gpu="NVIDIA L4", available="5.00"),
    ]
    report = record.ingest(home, [seal(home, spec) for spec in specs])
    assert report
    return home


def test_boots_of_the_same_thing_count_whatever_their_batch(published: Home) -> None:
    found = PastBoots(published.warehouse_snapshot, A10)(GpuSpec().cell())
    assert sorted(boot.max_num_batched_tokens for boot in found) == [2048, 8192]
    assert found[0].loading_bytes == pytest.approx(8.61 * GIB)
    # NVML's total would count what the driver reserves as non-KV.
    assert {boot.total_bytes for boot in found} == {A10.total_bytes}
    non_kv = estimate_non_kv(found, 4096)
    assert "2 batch sizes" in non_kv.source
    assert non_kv.value_bytes / GIB == pytest.approx(2.56, abs=0.02)


@pytest.mark.parametrize(
    ("place", "value", "count"),
    [
        (("setting", "model", "name"), "other", 0),
        (("setting", "server", "tensor_parallel_size"), 2, 0),
        (("setting", "server", "enforce_eager"), False, 0),
        (("setting", "server", "max_num_seqs"), 8, 0),
        (("setting", "server", "gpu_memory_utilization"), 0.7, 2),
        (("setting", "server", "max_model_len"), 8192, 2),
        (("setting", "server", "kv_cache_dtype"), "fp8", 2),
        (("pins", "engine_lock_sha256"), "1" * 64, 0),
        (("pins", "model_revision"), "1" * 40, 0),
        (("pins", "model_revision"), UNRESOLVED, 2),
        (("pins", "device"), "cpu", 0),
    ],
)
def test_another_thing_does_not_count(
    published: Home, place: tuple[str, ...], value: object, count: int
) -> None:
    document: dict[str, Any] = GpuSpec().cell().model_dump(mode="json")
    at = document
    for name in place[:-1]:
        at = at[name]
    at[place[-1]] = value
    found = PastBoots(published.warehouse_snapshot, A10)(Cell.model_validate(document))
    assert len(found) == count


def test_another_gpu_does_not_count(published: Home) -> None:
    cell = GpuSpec().cell()
    assert len(PastBoots(published.warehouse_snapshot, gpus.find("L4"))(cell)) == 1
    assert PastBoots(published.warehouse_snapshot, gpus.find("H100"))(cell) == []
    assert PastBoots(published.warehouse_snapshot, None)(cell) == []


def test_the_warehouse_is_read_once_and_only_when_asked(
    published: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []
    real = boots.read

    def counted(snapshot: Path) -> list[boots.PastBoot]:
        calls.append(snapshot)
        return real(snapshot)

    monkeypatch.setattr(boots, "read", counted)
    past = PastBoots(published.warehouse_snapshot, A10)
    assert calls == []
    cell = GpuSpec().cell()
    assert len(past(cell)) == len(past(cell)) == 2
    assert len(calls) == 1


def test_without_a_warehouse_there_is_no_boot_and_a_damaged_one_is_told(tmp_path: Path) -> None:
    assert boots.read(tmp_path / "snapshot.duckdb") == []
    (tmp_path / "snapshot.duckdb").write_bytes(b"no database" * 1000)
    with pytest.raises(CannotFindOut, match="rebuild"):
        boots.read(tmp_path / "snapshot.duckdb")


def test_an_estimate_is_stored_as_one_and_raises_no_alarm(published: Home) -> None:
    """Test that 8.9 GiB estimated beside 8.28 measured is a residual, not an alarm."""
    rows = run_sql(
        published.warehouse_snapshot,
        "SELECT metric, load_point, kind, predicted, measured, residual, alarm FROM residual "
        "JOIN run USING (run_uuid) JOIN cell ON cell.cell_key = run.cell_key "
        "WHERE max_num_batched_tokens = 8192 AND predicted IS NOT NULL",
    ).rows
    by_metric = {(row[0], row[1]): row[2:] for row in rows}
    kind, predicted, measured, residual, alarm = by_metric["available_kv_cache_bytes", None]
    assert (kind, predicted, alarm) == ("estimate", round(8.9 * GIB), False)
    assert residual == measured - predicted
    kind, predicted, measured, _, alarm = by_metric["kv_cache_size_tokens", None]
    assert (kind, measured, alarm) == ("estimate", 273_563, False)
    assert predicted != measured
    assert by_metric["bytes_per_block", None][0] == "value"
    assert by_metric["peak_kv_usage_ratio", 0][0] == "estimate"
