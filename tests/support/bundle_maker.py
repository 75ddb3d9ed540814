"""Small whole bundles, sealed by the real code, for the tests of record and warehouse."""

from __future__ import annotations

import json
import shutil
import sqlite3
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tasks import bundle
from tasks.bundle import Identity
from tasks.home import Home
from tasks.launch.port import Condition
from tasks.plan.cell import Cell, Limits, LoadPoint, ModelRef, Pins, ServerSettings, Setting
from warehouse.registry import Outcome, Phase

DATA = Path(__file__).parents[1] / "data"
#: The clock of every test run: CLOCK_MONOTONIC 1000 s is this instant.
CLOCK = {"monotonic_s": 1000.0, "utc": "2026-11-29T12:00:00Z"}
#: The tiny hybrid of the embedded default, the fields that its memory depends on.
HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
    "tie_word_embeddings": True,
    "max_position_embeddings": 65536,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "layer_types": ["linear_attention"] * 3
    + ["full_attention"]
    + ["linear_attention"] * 3
    + ["full_attention"],
    "mamba_ssm_dtype": "float32",
}


@dataclass(frozen=True)
class Ask:
    """One request as EvalScope would note it; ``end_s`` 0 is a failed one."""

    start_s: float
    end_s: float = 0.0
    prompt: int | None = 518
    output: int | None = 128
    ttft_s: float = 0.1


@dataclass
class Spec:
    """What a test bundle holds; the defaults are the hybrid demo cell with one load point."""

    run_uuid: str = field(default_factory=lambda: str(uuid.uuid4()))
    sweep: str = "demo"
    round: str = "1"
    repeat: int = 1
    attempt: int = 1
    outcome: Outcome = Outcome.OK
    phase: Phase = Phase.STOP
    observed: str | None = "ok"
    label: str = "context-limit/max_model_len=32768"
    max_model_len: int = 32768
    kv_cache_memory_bytes: int | None = 2**30
    engine_version: str = "0.27.0"
    load: tuple[LoadPoint, ...] = (LoadPoint(parallel=4, number=4, warmup=1),)
    requests: Sequence[Sequence[Ask]] = (
        (
            Ask(1010.0, 1012.0),
            Ask(1010.0, 1012.5, prompt=520),
            Ask(1010.1, 1013.0),
            Ask(1010.2, 1014.0),
        ),
    )
    #: (time, KV usage, running, waiting, preemptions so far)
    samples: Sequence[tuple[float, float | None, float, float, float]] = (
        (1009.0, 0.003, 1, 0, 3),
        (1010.5, 0.00977, 4, 0, 3),
        (1012.2, 0.0122174709835, 4, 2, 3),
        (1013.5, 0.005, 2, 0, 4),
        (1015.0, 0.0, 0, 0, 5),
    )
    started_s: float = 1001.0
    ended_s: float = 1020.0
    #: 99th percentile of how late the client's event loop was, seconds; None: nobody watched it.
    client_lag_s: float | None = 0.004
    log: str | None = "cpu-0.27.0-qwen3.5-hybrid-ok.log"
    metrics: str | None = "0.27.0-qwen3.5-hybrid-under-load.txt"
    prediction: dict[str, Any] | None = field(default_factory=dict)  # None: no file; {}: computed
    sweep_text: str = "name: demo\n"
    host: str = "testhost"
    #: What a test spoils in the outputs before they are sealed.
    change: Callable[[Path], None] | None = None

    def cell(self) -> Cell:
        """Return the cell this bundle is of."""
        return Cell(
            label=self.label,
            setting=Setting(
                model=ModelRef(name="tiny-qwen35"),
                server=ServerSettings(
                    max_model_len=self.max_model_len,
                    kv_cache_memory_bytes=self.kv_cache_memory_bytes,
                    enforce_eager=True,
                ),
                load=self.load,
            ),
            pins=Pins(
                device="cpu",
                model_revision="sha256:" + "0" * 63 + "1",
                engine_version=self.engine_version,
                engine_lock_sha256="0" * 63 + "2",
                image_digest=None,
                bench_version="1.9.1",
                bench_lock_sha256="0" * 63 + "3",
            ),
            limits=Limits(start_s=1, ready_s=1, load_point_s=(1,), stop_s=1, run_s=4),
        )


@dataclass
class Lab:
    """A state folder and a maker of sealed bundles in it."""

    home: Home

    def seal(self, spec: Spec | None = None, **changes: Any) -> Path:
        """Seal a bundle and return its folder."""
        spec = spec or Spec(**changes)
        folder = bundle.staging(self.home, spec.run_uuid)
        write_outputs(folder, spec)
        if spec.change is not None:
            spec.change(folder)
        cell = spec.cell()
        sealed = bundle.seal(
            self.home,
            folder,
            Identity(
                run_uuid=spec.run_uuid,
                cell_key=cell.cell_key,
                setting_key=cell.setting_key,
                sweep=spec.sweep,
                sweep_sha256="0" * 60 + f"{sum(spec.sweep.encode()) % 10000:04d}",
                round=spec.round,
                repeat=spec.repeat,
                attempt=spec.attempt,
            ),
            outcome=spec.outcome,
            phase=spec.phase,
            facts={
                "observed": spec.observed,
                "message": "",
                "reason": None,
                "started_at": utc(spec.started_s),
                "ended_at": utc(spec.ended_s),
                "incomplete": [],
            },
        )
        return sealed.folder


def utc(stamp_s: float) -> str:
    """Return a test clock's stamp as ISO 8601."""
    start = datetime(2026, 11, 29, 12, tzinfo=UTC)
    text = (start + timedelta(seconds=stamp_s - 1000.0)).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def write_outputs(folder: Path, spec: Spec) -> None:
    """Write everything that a run and its collector leave."""
    cell = spec.cell()
    _json(folder / "cell.json", cell.document())
    (folder / "sweep.yaml").write_text(spec.sweep_text)
    if spec.prediction is not None:
        _json(folder / "prediction.json", spec.prediction or predicted(cell))
    _json(folder / "clock.json", CLOCK)
    if spec.log:
        shutil.copyfile(DATA / "vllm-logs" / spec.log, folder / "server.log")
    if spec.metrics:
        shutil.copyfile(DATA / "metrics" / spec.metrics, folder / "metrics_first.txt")
    _write_samples(folder / "raw", spec)
    _write_bench(folder / "bench", spec)
    _write_facts(folder, spec)


def predicted(cell: Cell) -> dict[str, Any]:
    """Return the prediction that the plan makes of a cell."""
    from tasks.plan.prediction import predict

    return predict(cell, HYBRID, memory_total_bytes=64 * 2**30).document(
        cell.cell_key, made_at="2026-11-29T11:59:00Z"
    )


def _write_samples(raw: Path, spec: Spec) -> None:
    raw.mkdir()
    server, process = [], []
    for tick, (t_s, usage, running, waiting, preemptions) in enumerate(spec.samples):
        server.append(
            {
                "tick": tick,
                "due_s": t_s,
                "t_s": t_s,
                "took_s": 0.01,
                "state": "ok",
                "reason": None,
                "values": {
                    "kv_usage_ratio": usage,
                    "requests_running": running,
                    "requests_waiting": waiting,
                    "preemptions_total": preemptions,
                    "prefix_cache_hits_total": None,
                },
            }
        )
        process.append(
            {
                "tick": tick,
                "due_s": t_s,
                "t_s": t_s,
                "state": "ok",
                "processes": [
                    {"pid": 10, "start_ticks": 5, "name": "vllm", "rss_bytes": 1000 + tick},
                    {"pid": 11, "start_ticks": 6, "name": "VLLM::EngineCore", "rss_bytes": 2000},
                ],
            }
        )
    for name, lines in (("server", server), ("process", process)):
        (raw / f"{name}_samples.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))


def _write_bench(folder: Path, spec: Spec) -> None:
    folder.mkdir()
    reports = []
    for index, point in enumerate(spec.load):
        requests = spec.requests[index] if index < len(spec.requests) else ()
        good = sum(1 for request in requests if request.end_s)
        reports.append(
            {
                "index": index,
                "asked": point.number,
                "sent": len(requests),
                "succeeded": good,
                "failed": len(requests) - good,
                "state": "ok" if good == point.number else "partial" if good else "skipped",
                "error": None,
                "seed": point.seed,
                "dataset_offset": 0,
                "requests_sha256": "0" * 63 + str(index),
                "prompt_tokens_differ": None,
                **_client_lag(spec.client_lag_s),
            }
        )
        if requests:
            level = (
                folder / f"load_point_{index}" / f"parallel_{point.parallel}_number_{point.number}"
            )
            level.mkdir(parents=True)
            _write_database(level / "benchmark_data.db", requests)
    _json(folder / "load_points.json", reports)


def _client_lag(p99_s: float | None) -> dict[str, Any]:
    if p99_s is None:
        return {"client_lag": None, "client_lag_reason": "the measurement did not end"}
    lag = {"interval_s": 0.02, "wakeups": 200, "p50_s": p99_s / 4, "p99_s": p99_s}
    return {"client_lag": lag | {"max_s": p99_s * 2}, "client_lag_reason": None}


def _write_database(path: Path, requests: Sequence[Ask]) -> None:
    """Write EvalScope 1.9.1's result table, as far as its numbers go."""
    connection = sqlite3.connect(path)
    connection.execute(
        "CREATE TABLE result(request TEXT, start_time REAL, inter_token_latencies TEXT, success "
        "INTEGER, response_messages TEXT, completed_time REAL, latency REAL, first_chunk_latency "
        "REAL, prompt_tokens INTEGER, completion_tokens INTEGER, max_gpu_memory_cost REAL, "
        "time_per_output_token REAL, request_id TEXT)"
    )
    for request in requests:
        good = request.end_s > 0
        connection.execute(
            "INSERT INTO result VALUES ('{}', ?, ?, ?, '', ?, ?, ?, ?, ?, 0.0, ?, NULL)",
            (
                request.start_s,
                "[0.01, 0.02, 0.03]" if good else "[]",
                int(good),
                request.end_s,
                request.end_s - request.start_s if good else None,
                request.ttft_s if good else None,
                request.prompt if good else None,
                request.output if good else None,
                0.02 if good else None,
            ),
        )
    connection.commit()
    connection.close()


def _write_facts(folder: Path, spec: Spec) -> None:
    _json(
        folder / "environment.json",
        {
            "python": "3.11.7",
            "platform": "Linux-test",
            "host": spec.host,
            "cpu_count": 2,
            "memory_total_bytes": 24 * 2**30,
            "packages": {
                "engine": {
                    "vllm": {"version": f"{spec.engine_version}+cpu", "record_sha256": None}
                },
                "bench": {"evalscope": {"version": "1.9.1", "record_sha256": None}},
            },
            "model": {"sha256": {"config.json": "0" * 64}, "weights": []},
            "driver": None,
            "cuda": None,
            "gpus": [],
            "compile_cache": "off",
        },
    )
    _json(
        folder / "server_info.json",
        {
            "argv": ["vllm", "serve"],
            "env": {"OMP_NUM_THREADS": "1"},
            "version": {"version": spec.engine_version},
            "cache_config_info": {"block_size": "640"},
            "checks": [{"name": "served_name", "wanted": "m", "got": "m", "state": "equal"}],
        },
    )
    _json(folder / "readiness.json", {"completion": {"checks": {"alias": True}}})
    _json(
        folder / "phases.json",
        {
            "phases": [
                {"name": "boot", "load_point": None, "start_s": 1001.0, "end_s": 1008.0},
                {"name": "measure", "load_point": 0, "start_s": 1009.9, "end_s": 1014.1},
            ]
        },
    )
    _json(folder / "stop.json", {"left": [], "escalated": False})
    (folder / "events.jsonl").write_text('{"t_s": 1001.0, "event": "start", "pid": 7}\n')
    _json(folder / "end.json", {"observed": spec.observed, "phase": spec.phase.value})
    _json(folder / "operation.json", {"component": {"name": "cell"}, "run": spec.run_uuid})
    _json(
        folder / "polyaxon.json",
        {
            "host": "http://127.0.0.1:8000",
            "owner": "default",
            "project": "memsweep",
            "run_uuid": spec.run_uuid,
            "status": "succeeded",
            "conditions": [Condition("running", at="2026-11-29T12:00:01+00:00").to_json()],
        },
    )
    _json(
        folder / "orchestration.json",
        {
            "git_commit": "0" * 40,
            "git_dirty": False,
            "who": "tester",
            "host": spec.host,
            "flow_lock_sha256": "0" * 63 + "4",
            "prefect_flow_run_id": "00000000-0000-0000-0000-000000000001",
        },
    )


def _json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def sentinel(folder: Path) -> None:
    """Say in a bundle's outputs that the run was one of the sentinel's (a ``change`` of a Spec)."""
    path = folder / "orchestration.json"
    _json(path, json.loads(path.read_text()) | {"sentinel": True})
