"""The run's own code against real vLLM (CPU build) and real EvalScope; about 2 minutes, 3 starts.

Environments and models are those of the state folder (MEMSWEEP_HOME); what is missing is made
first, which takes minutes once.
"""

from __future__ import annotations

import os
import signal
import time

import pytest

from tasks.home import Home
from tasks.launch import environments, models
from tests.double.runs import MakeRun, PodRun

pytestmark = pytest.mark.real

#: The demo's pressure cell: 64 blocks of 128 tokens, five a request when it is admitted.
PRESSURE = [
    {"parallel": 16, "number": 32, "warmup": 4, "output_tokens": 128},
    {"parallel": 64, "number": 64, "warmup": 4, "output_tokens": 128},
]
LIMITS = {"start_s": 300.0, "ready_s": 120.0, "stop_s": 30.0}


@pytest.fixture(scope="module")
def places() -> dict[str, str]:
    """Where the real parts are; makes what is missing."""
    home = Home.find()
    environments.ensure(home, ("engine", "bench"), progress=print)
    model = models.ensure(home, "tiny-qwen3", progress=print)
    return {
        "MEMSWEEP_MODEL_PATH": str(model),
        "MEMSWEEP_ENGINE_BIN": str(environments.folder(home, "engine") / "bin"),
        "MEMSWEEP_BENCH_PYTHON": str(environments.python(home, "bench")),
        "MEMSWEEP_CACHE": str(home.cache),
    }


def pressure(make_run: MakeRun, places: dict[str, str]) -> PodRun:
    return make_run(
        places=places,
        cell={
            "load": PRESSURE,
            "limits": LIMITS | {"load_point_s": [300.0, 300.0]},
            "sampling": {"server_interval_s": 0.25, "process_interval_s": 1.0},
        },
    )


def test_the_pressure_cell(make_run: MakeRun, places: dict[str, str]) -> None:
    run = pressure(make_run, places)
    assert run.start().wait(400) == 0
    assert run.json("end.json")["observed"] == "ok", (run.folder / "stdout.txt").read_text()
    info = run.json("server_info.json")
    assert info["cache_config_info"]["num_gpu_blocks"] == "64"
    assert info["cache_config_info"]["kv_cache_size_tokens"] == "8192"
    assert {check["state"] for check in info["checks"]} == {"equal", "unknown"}
    log = (run.outputs / "server.log").read_text()
    assert "KV cache size: 8,192 tokens" in log
    assert "4.00x" in log
    rows = [row for row in run.lines("raw/server_samples.jsonl") if row["state"] != "missed"]
    assert max(row["values"]["requests_running"] for row in rows) == 12
    assert max(row["values"]["requests_waiting"] for row in rows) > 12
    assert 0.9 <= max(row["values"]["kv_usage_ratio"] for row in rows) <= 1.0
    assert rows[-1]["values"]["preemptions_total"] > 0
    phases = run.json("phases.json")["phases"]
    hooked = [(p["name"], p["load_point"]) for p in phases if p["source"] == "hook"]
    assert hooked == [(n, i) for i in (0, 1) for n in ("warmup", "measure", "drain")]
    stop = run.json("stop.json")
    assert (stop["left"], stop["escalated"]) == ([], False)


def test_a_killed_engine_is_a_crash_though_everything_says_success(
    make_run: MakeRun, places: dict[str, str]
) -> None:
    """vLLM leaves with 0 and EvalScope calls every cut stream successful."""
    run = pressure(make_run, places).start()
    run.until(lambda: run.events("load_point_end"), 300)
    run.until_phase("measure", 1)
    time.sleep(1.0)
    started = run.json("server_info.json")["pid"]
    rows = run.lines("raw/process_samples.jsonl")[-1]["processes"]
    engine = max((p for p in rows if p["pid"] != started), key=lambda p: int(p["rss_bytes"]))
    os.kill(engine["pid"], signal.SIGKILL)
    assert run.wait(60) == 0
    end = run.json("end.json")
    assert (end["observed"], end["phase"]) == ("crashed", "bench")
    point = run.json("bench/load_points.json")[1]
    assert point["succeeded"] < point["asked"]
    assert run.json("stop.json")["left"] == []


def test_sigterm_while_it_boots(make_run: MakeRun, places: dict[str, str]) -> None:
    run = pressure(make_run, places).start()
    run.until_phase("boot")
    run.until((run.outputs / "server.log").read_bytes, 120)
    asked = time.monotonic()
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(60) == 143
    assert time.monotonic() - asked < 10
    assert run.json("stop.json")["left"] == []
