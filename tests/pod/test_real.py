"""The run's own code against real vLLM (CPU build) and real EvalScope; about 4 minutes, 5 starts.

Environments and models are those of the state folder (MEMSWEEP_HOME); what is missing is made
first, which takes minutes once.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from contextlib import closing

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
            "pins": {"model_revision": models.revision(Home.find(), "tiny-qwen3")},
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


def test_two_runs_send_the_same_and_say_so(make_run: MakeRun, places: dict[str, str]) -> None:
    """Random prompts of one seed and offset, and frozen ones: equal hashes, whatever the order.

    The first run states made-up token counts and learns the server's; the second states those.
    """
    texts = ["Why is the sky blue?", "Name three\nprimes, one a line.", "é ☃ 東京"]

    def measured(name: str, tokens: list[int]) -> PodRun:
        lines = [{"prompt": text, "tokens": n} for text, n in zip(texts, tokens, strict=True)]
        run = make_run(
            name,
            places=places,
            cell={
                "pins": {"model_revision": models.revision(Home.find(), "tiny-qwen3")},
                "prompts": "\n".join(map(json.dumps, lines)),
                "load": [
                    {"dataset": "random", "parallel": 4, "number": 8},
                    {"parallel": 2, "number": 6, "ignore_eos": False},
                ],
                "limits": LIMITS | {"load_point_s": [120.0, 120.0]},
            },
        )
        assert run.start().wait(300) == 0
        assert run.json("end.json")["observed"] == "ok", run.json("end.json")["message"]
        return run

    def served(run: PodRun) -> list[int]:
        path = run.outputs / "bench/load_point_1/parallel_2_number_6/benchmark_data.db"
        with closing(sqlite3.connect(path)) as rows:
            query = "SELECT prompt_tokens FROM result ORDER BY start_time"
            return [tokens for (tokens,) in rows.execute(query)]

    first = measured("first", [1, 1, 1])
    counts = served(first)
    assert counts[:3] == counts[3:]
    second = measured("second", counts[:3])
    points = [run.json("bench/load_points.json") for run in (first, second)]
    hashes = [[point["requests_sha256"] for point in run] for run in points]
    print(f"served {counts[:3]} tokens; requests {hashes[0]}")
    assert hashes[0] == hashes[1]
    assert len({*hashes[0]}) == 2
    assert [[p["prompt_tokens_differ"] for p in run] for run in points] == [[None, 6], [None, 0]]


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
