"""The whole run, as a real process, against real little servers that fail in every known way.

A run that misses a crash files a broken measurement as good; one that leaves an engine behind
spoils the next measurement's memory. Both have happened with the exit codes of vLLM and EvalScope.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tasks.pod.families import scan
from tests.double.engine import MODEL_REVISION
from tests.double.runs import MakeRun, PodRun, end_what_is_left, run_all

TIGHT = [
    {"parallel": 16, "number": 32, "warmup": 2, "prompt_tokens": 600, "output_tokens": 48},
    {"parallel": 64, "number": 64, "warmup": 0, "prompt_tokens": 600, "output_tokens": 48},
]

POINTS = "bench/load_points.json"
PINNED = "sha256:" + "0" * 64
RECORDED = [
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a "
    "total capacity of 79.15 GiB of which 1.11 GiB is free.\r",
    "\x1b[31mRuntimeError: Engine core initialization failed.\x1b[0m",
]
TWELVE = {"parallel": 4, "number": 12}
FROZEN = ["one two", "three", "with\nline end"]
#: The double counts words and six tokens of a template: the last count is wrong.
PROMPT_FILE = "\n".join(
    json.dumps({"prompt": text, "tokens": tokens})
    for text, tokens in zip(FROZEN, (8, 7, 8), strict=True)
)
FIRST_GOES_WRONG = {"load": [{}, {}], "limits": {"load_point_s": [1.5, 20.0]}}
#: Runs that nobody has to do anything to, made once and side by side: they mostly wait.
PLAIN: dict[str, dict[str, Any]] = {
    "refused kv": {"cell": {"server": {"kv_cache_memory_bytes": 25_769_803_776}}},
    "refused length": {"cell": {"server": {"max_model_len": 32_768}}},
    "another model": {"cell": {"pins": {"model_revision": PINNED}}},
    "a commit": {"cell": {"pins": {"model_revision": "0" * 40}}},
    "recorded refusal": {"engine": {"refuse_lines": RECORDED, "refuse_exit_code": 2}},
    "hangs at boot": {"engine": {"hang_at_boot": True}, "cell": {"limits": {"start_s": 1.0}}},
    "dies at first": {"engine": {"die_on_first_request": True}},
    "hangs at first": {"engine": {"hang_on_request": True}, "cell": {"limits": {"ready_s": 1.0}}},
    "thinks": {"engine": {"think": True}},
    "other alias": {"engine": {"alias": "other"}},
    "other limit": {"engine": {"reported_max_model_len": 1024}},
    "sends": {"cell": {"load": [TWELVE, TWELVE]}, "engine": {"step_s": 0.002}},
    "sends the same": {"cell": {"load": [TWELVE, TWELVE]}},
    "sends another seed": {"cell": {"load": [TWELVE | {"seed": 43}]}},
    "frozen prompts": {"cell": {"prompts": PROMPT_FILE, "load": [{"number": 5, "warmup": 2}]}},
    "requests fail": {"engine": {"fail_requests_after": 8}, "cell": {"load": [{}, {}, {}]}},
    "every request fails": {"engine": {"fail_requests_after": 1}},
    "exit_at_level": {"bench": {"exit_at_level": "load_point_0"}, "cell": FIRST_GOES_WRONG},
    "die_at_level": {"bench": {"die_at_level": "load_point_0"}, "cell": FIRST_GOES_WRONG},
    "hang_at_level": {"bench": {"hang_at_level": "load_point_0"}, "cell": FIRST_GOES_WRONG},
    "no import": {"bench": {"no_import": True}},
    "no hook": {"bench": {"no_hook": True}},
    "holds the loop": {"bench": {"hold_loop_s": 0.3}},
    "ignores sigterm": {"engine": {"ignore_sigterm": True}, "cell": {"limits": {"stop_s": 0.5}}},
    "orphan in group": {"engine": {"orphan_worker": "group"}, "cell": {"limits": {"stop_s": 0.5}}},
    "orphan in session": {
        "engine": {"orphan_worker": "session"},
        "cell": {"limits": {"stop_s": 0.5}},
    },
    "garbled metrics": {
        "engine": {"garble_metrics_every": 2, "step_s": 0.005, "old_names": True},
        "cell": {"load": [{"number": 16}]},
    },
}

Finished = Callable[[str], PodRun]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Give one of the plain runs by its name, ended with exit code 0."""
    folder = tmp_path_factory.mktemp("plain")
    runs = {}
    for name, parts in PLAIN.items():
        (folder / name).mkdir()
        runs[name] = PodRun(folder / name, **parts)
    run_all(list(runs.values()))
    assert end_what_is_left(folder) == []

    def give(name: str) -> PodRun:
        assert runs[name].exit_code == 0, name
        return runs[name]

    return give


def engine_pids(run: PodRun) -> list[int]:
    """PIDs of the server's processes as the run sampled them last."""
    rows = run.lines("raw/process_samples.jsonl")
    return [process["pid"] for process in rows[-1]["processes"]] if rows else []


def assert_proven_clean(run: PodRun) -> dict[str, Any]:
    """Nothing of the server is left, by the run's own proof and by looking."""
    stop: dict[str, Any] = run.json("stop.json")
    assert stop["left"] == []
    assert stop["after_stop"]["processes"] == []
    assert stop["after_stop"]["port_listening"] is False
    assert stop["after_stop"]["mem_available_bytes"] > 0
    assert stop["port_free"] is True
    missing = stop["before"]["mem_available_bytes"] - stop["after_stop"]["mem_available_bytes"]
    assert stop["memory_back"] is (missing <= stop["memory_tolerance_bytes"])
    return stop


def assert_sealed(run: PodRun) -> dict[str, Any]:
    """end.json lists every other file with its true hash."""
    end: dict[str, Any] = run.json("end.json")
    files = {
        path.relative_to(run.outputs).as_posix(): path
        for path in run.outputs.rglob("*")
        if path.is_file() and path.name != "end.json"
    }
    assert end["files"].keys() == files.keys()
    for name, entry in end["files"].items():
        data = files[name].read_bytes()
        assert entry == {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}, name
    assert end["write_errors"] == []
    return end


class TestGoodRun:
    """One run under memory pressure, looked at from all sides."""

    @pytest.fixture
    def run(self, make_run: MakeRun) -> PodRun:
        """The demo's pressure cell on the double: 64 blocks, 16 and 64 in parallel."""
        run = make_run(engine={"step_s": 0.003}, cell={"load": TIGHT})
        assert run.run() == 0, (run.folder / "stdout.txt").read_text()
        return run

    def test_leaves_a_complete_measurement(self, run: PodRun) -> None:
        end = assert_sealed(run)
        assert (end["observed"], end["phase"], end["reason"]) == ("ok", "bench", None)
        assert end["started_s"] < end["ended_s"]
        stop = assert_proven_clean(run)
        assert stop["before"]["processes"] == []
        assert stop["after_ready"]["port_listening"] is True
        assert len(stop["after_ready"]["processes"]) == 2
        assert (stop["escalated"], stop["exited_before_stop"]) == (False, False)
        self._load_points(run)
        self._phases(run)
        self._samples(run)
        self._configuration(run)
        self._nothing_secret(run)

    def _load_points(self, run: PodRun) -> None:
        points = run.json("bench/load_points.json")
        assert [(p["asked"], p["sent"], p["succeeded"], p["state"]) for p in points] == [
            (32, 32, 32, "ok"),
            (64, 64, 64, "ok"),
        ]
        assert [(p["seed"], p["dataset_offset"]) for p in points] == [(42, 0), (42, 34)]
        assert (
            run.outputs / "bench/load_point_1/parallel_64_number_64/benchmark_data.db"
        ).is_file()

    def _phases(self, run: PodRun) -> None:
        phases = run.json("phases.json")["phases"]
        assert [(p["name"], p["load_point"]) for p in phases] == [
            ("boot", None),
            ("ready", None),
            ("warmup", 0),
            ("measure", 0),
            ("drain", 0),
            ("measure", 1),
            ("drain", 1),
            ("stop", None),
        ]
        assert all(p["start_s"] <= p["end_s"] for p in phases)
        starts = [p["start_s"] for p in phases]
        assert starts == sorted(starts)

    def _samples(self, run: PodRun) -> None:
        rows = run.lines("raw/server_samples.jsonl")
        assert [row["tick"] for row in rows] == list(range(len(rows)))
        values = [row["values"] for row in rows if row["state"] != "missed"]
        # 63 usable blocks, 5 a request when admitted: 12 at once, the pool nearly full. Samples
        # between the extremes are all that a busy machine may give.
        assert 10 <= max(v["requests_running"] for v in values) <= 12
        assert 50 / 63 <= max(v["kv_usage_ratio"] for v in values) <= 1
        assert 12 < max(v["requests_waiting"] for v in values) <= 64
        assert values[-1]["preemptions_total"] > 0
        last, _ = scan((run.outputs / "metrics_last.txt").read_bytes())
        assert last["requests_succeeded_total"] == 1 + 2 + 32 + 64
        processes = run.lines("raw/process_samples.jsonl")
        assert max(row["rss_bytes"] for row in processes) > 1 << 20
        assert not (run.outputs / "raw/gpu_samples.jsonl").exists()

    def _configuration(self, run: PodRun) -> None:
        info = run.json("server_info.json")
        assert info["cache_config_info"]["num_gpu_blocks"] == "64"
        assert {check["state"] for check in info["checks"]} == {"equal", "unknown"}
        assert info["version"] == {"version": "0.27.0"}
        environment = run.json("environment.json")
        assert environment["gpus"] == []
        assert "no GPU sampling" in environment["no_gpu"]
        assert environment["compile_cache"] == "off"
        assert run.json("readiness.json")["completion"]["checks"] == {
            "status": True,
            "alias": True,
            "finish_reason": True,
            "usage": True,
            "no_reasoning": True,
        }
        first = (run.outputs / "metrics_first.txt").read_text()
        assert "vllm:cache_config_info" in first
        assert "vllm:num_preemptions_total" in (run.outputs / "metrics_last.txt").read_text()

    def _nothing_secret(self, run: PodRun) -> None:
        for path in run.outputs.rglob("*"):
            assert not path.is_file() or b"hf_secret" not in path.read_bytes(), path


class TestStart:
    """A server that does not come up, or comes up as something else."""

    @pytest.mark.parametrize(
        ("name", "text"),
        [("refused kv", "on kv cache"), ("refused length", "max seq len (32768)")],
    )
    def test_a_refusal_is_a_result(self, finished: Finished, name: str, text: str) -> None:
        run = finished(name)
        end = assert_sealed(run)
        assert (end["observed"], end["phase"]) == ("refused_or_crashed_at_start", "start")
        assert "exit code 1" in end["message"]
        assert text in (run.outputs / "server.log").read_text()
        assert run.json("stop.json")["exited_before_stop"] is True
        assert {p["state"] for p in run.json("bench/load_points.json")} == {"skipped"}
        assert_proven_clean(run)

    def test_another_model_than_the_pinned_one_is_not_served(self, finished: Finished) -> None:
        run = finished("another model")
        end = assert_sealed(run)
        assert (end["observed"], end["phase"]) == ("config_mismatch", "start")
        assert end["message"] == f"model_revision: got {MODEL_REVISION}, wanted {PINNED}"
        (check,) = run.json("server_info.json")["checks"]
        assert (check["name"], check["state"]) == ("model_revision", "differs")
        assert not (run.outputs / "server.log").exists()
        assert run.json("environment.json")["model"]["revision"] == MODEL_REVISION
        assert_proven_clean(run)

    def test_a_commit_of_a_hub_is_no_hash_to_compare(self, finished: Finished) -> None:
        run = finished("a commit")
        assert run.json("end.json")["observed"] == "ok"
        check = run.json("server_info.json")["checks"][0]
        assert (check["name"], check["got"], check["state"]) == ("model_revision", None, "unknown")

    def test_recorded_refusals_are_kept_word_for_word(self, finished: Finished) -> None:
        run = finished("recorded refusal")
        log = (run.outputs / "server.log").read_bytes()
        assert all(line.encode() in log for line in RECORDED)
        assert "exit code 2" in run.json("end.json")["message"]

    def test_a_server_that_never_answers_is_not_ready(self, finished: Finished) -> None:
        run = finished("hangs at boot")
        end = run.json("end.json")
        assert (end["observed"], end["phase"]) == ("not_ready", "start")
        assert "after 1 s, wanted 200" in end["message"]
        assert_proven_clean(run)

    def test_a_healthy_server_that_dies_on_its_first_request_crashed(
        self, finished: Finished
    ) -> None:
        run = finished("dies at first")
        end = run.json("end.json")
        # Its API process leaves with 0, which is no evidence of a good end.
        assert (end["observed"], end["phase"]) == ("crashed", "ready")
        assert run.json("stop.json")["server_exit_code"] == 0
        assert run.json("readiness.json")["health"]["status"] == 200
        assert_proven_clean(run)

    def test_a_server_that_hangs_on_its_first_request_is_not_ready(
        self, finished: Finished
    ) -> None:
        run = finished("hangs at first")
        end = run.json("end.json")
        assert (end["observed"], end["phase"]) == ("not_ready", "ready")
        assert "no answer within 1 s" in end["message"]

    @pytest.mark.parametrize(
        ("name", "check"), [("thinks", "no_reasoning"), ("other alias", "other")]
    )
    def test_a_server_that_is_something_else_is_not_ready(
        self, finished: Finished, name: str, check: str
    ) -> None:
        run = finished(name)
        end = run.json("end.json")
        assert end["observed"] == "not_ready"
        assert check in end["message"]

    def test_another_configuration_than_asked_for_is_not_measured(self, finished: Finished) -> None:
        run = finished("other limit")
        end = run.json("end.json")
        assert (end["observed"], end["phase"]) == ("config_mismatch", "ready")
        assert end["message"] == "max_model_len: got 1024, wanted 2048"
        assert {p["state"] for p in run.json("bench/load_points.json")} == {"skipped"}


class TestLoad:
    """The load fails, or the server does under it."""

    @pytest.mark.parametrize("load", [[{"number": 64}, {}], [{"number": 64, "parallel": 64}]])
    def test_an_engine_killed_under_load_is_a_crash(
        self, make_run: MakeRun, load: list[dict[str, int]]
    ) -> None:
        """Also in the last level, where every row then says success and the API still answers."""
        run = make_run(engine={"step_s": 0.05}, cell={"load": load}).start()
        run.until_phase("measure", 0)
        run.until(lambda: len(engine_pids(run)) == 2)
        engine = next(pid for pid in engine_pids(run) if pid != run.json("server_info.json")["pid"])
        killed = time.monotonic()
        os.kill(engine, signal.SIGKILL)
        assert run.wait() == 0
        assert time.monotonic() - killed < 5
        end = assert_sealed(run)
        assert (end["observed"], end["phase"]) == ("crashed", "bench")
        assert "nobody stopped it (exit code 0)" in end["message"]
        points = run.json("bench/load_points.json")
        assert points[0]["state"] in ("failed", "partial")
        assert points[0]["succeeded"] < points[0]["asked"]
        assert [p["state"] for p in points[1:]] == ["skipped"] * (len(load) - 1)
        assert_proven_clean(run)

    def test_two_runs_are_shown_to_have_sent_the_same(self, finished: Finished) -> None:
        """Whatever order the answers came in; another seed or offset sends something else."""
        runs = [finished(name) for name in ("sends", "sends the same", "sends another seed")]
        one, two, other = ([p["requests_sha256"] for p in run.json(POINTS)] for run in runs)
        assert one == two
        assert len({*one, *other}) == 3
        assert all(len(digest) == 64 for digest in one)

    def test_frozen_prompts_are_sent_in_order_and_their_tokens_checked(
        self, finished: Finished
    ) -> None:
        """The double counts words and six tokens of a template; the last count is stated wrong."""
        run = finished("frozen prompts")
        end = assert_sealed(run)
        assert end["observed"] == "ok"
        (point,) = run.json(POINTS)
        assert (point["succeeded"], point["prompt_tokens_differ"]) == (5, 1)
        sent = (run.outputs / "bench/prompts_0.jsonl").read_text().splitlines()
        assert [FROZEN.index(json.loads(line)[0]["content"]) for line in sent] == [
            2,
            0,
            0,
            1,
            2,
            0,
            1,
        ]
        database = run.outputs / "bench/load_point_0/parallel_2_number_5/benchmark_data.db"
        with closing(sqlite3.connect(database)) as connection:
            rows = connection.execute(
                "SELECT json_extract(request, '$.messages[0].content') FROM result"
                " ORDER BY start_time"
            ).fetchall()
        assert [FROZEN.index(text) for (text,) in rows] == [0, 1, 2, 0, 1]

    def test_requests_that_fail_make_a_part(self, finished: Finished) -> None:
        run = finished("requests fail")
        end = run.json("end.json")
        assert end["observed"] == "partial"
        points = run.json("bench/load_points.json")
        # One completion before, then one warm-up and four requests a level: two levels go wrong.
        assert [(p["succeeded"], p["failed"], p["state"]) for p in points] == [
            (4, 0, "ok"),
            (1, 3, "partial"),
            (0, 4, "failed"),
        ]
        assert points[2]["error"] == "0 of 4 requests were answered whole"

    def test_no_request_that_succeeds_is_a_failed_bench(self, finished: Finished) -> None:
        run = finished("every request fails")
        assert run.json("end.json")["observed"] == "bench_failed"

    def test_a_level_that_fails_does_not_lose_the_others(self, finished: Finished) -> None:
        errors = {
            "exit_at_level": "SystemExit: 1",
            "die_at_level": "ended in the middle",
            "hang_at_level": "deadline of the load point is over",
        }
        for mode in errors:
            run = finished(mode)
            points = run.json("bench/load_points.json")
            assert [p["state"] for p in points] == ["failed", "ok"], mode
            assert errors[mode] in points[0]["error"]
            assert run.json("end.json")["observed"] == "partial"

    def test_a_bench_that_cannot_be_imported_is_a_failed_bench(self, finished: Finished) -> None:
        run = finished("no import")
        end = run.json("end.json")
        assert end["observed"] == "bench_failed"
        assert "cannot be imported" in end["message"]

    def test_without_the_hook_the_window_comes_from_the_rows(self, finished: Finished) -> None:
        run = finished("no hook")
        marks = [p for p in run.json("phases.json")["phases"] if p["load_point"] == 0]
        assert [(p["name"], p["source"]) for p in marks] == [("measure", "database")]
        assert marks[0]["start_s"] < marks[0]["end_s"]
        (point,) = run.json(POINTS)
        assert point["client_lag"] is None
        assert point["client_lag_reason"] == "EvalScope's phases could not be hooked"

    def test_a_client_whose_loop_was_held_up_says_so(self, finished: Finished) -> None:
        (point,) = finished("holds the loop").json(POINTS)
        assert point["client_lag_reason"] is None
        # Held up for 0.3 s, late for what was due first by all but one interval.
        assert point["client_lag"]["max_s"] >= 0.28
        assert point["client_lag"]["wakeups"] >= 14

    def test_a_load_point_that_did_not_end_has_a_reason_for_no_lag(
        self, finished: Finished
    ) -> None:
        points = finished("hang_at_level").json(POINTS)
        assert points[0]["client_lag"] is None
        assert points[0]["client_lag_reason"] == "the measurement did not end"
        assert points[1]["client_lag"]["p99_s"] >= 0
        (skipped,) = finished("other limit").json(POINTS)
        assert skipped["client_lag_reason"] == "the load point was not begun"


class TestInterrupt:
    """SIGTERM at every stage: everything collected, nothing left, exit 143."""

    @pytest.mark.parametrize(
        ("engine", "phase", "load_point", "seen_in"),
        [
            ({"hang_at_boot": True}, "boot", None, "start"),
            ({"hang_on_request": True}, "ready", None, "ready"),
            ({"step_s": 0.05}, "measure", 0, "bench"),
        ],
    )
    def test_sigterm(
        self,
        make_run: MakeRun,
        engine: dict[str, Any],
        phase: str,
        load_point: int | None,
        seen_in: str,
    ) -> None:
        run = make_run(engine=engine, cell={"load": [{"number": 64}]}).start()
        run.until_phase(phase, load_point)
        run.reason_file.write_text(json.dumps({"reason": "stop", "at": "2026-01-01T00:00:00Z"}))
        assert run.process is not None
        asked = time.monotonic()
        run.process.send_signal(signal.SIGTERM)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 143
        assert time.monotonic() - asked < 5
        end = assert_sealed(run)
        assert (end["observed"], end["phase"]) == ("interrupted", seen_in)
        assert end["reason"]["reason"] == "stop"
        assert_proven_clean(run)
        assert run.lines("raw/process_samples.jsonl")

    def test_a_closed_standard_output_does_not_stop_the_clean_up(self, make_run: MakeRun) -> None:
        run = make_run(engine={"hang_at_boot": True})
        reader, writer = os.pipe()
        environment = run.environment()
        import subprocess
        import sys

        run.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tasks.pod"],
            env=environment,
            cwd=run.folder,
            stdout=writer,
            stderr=writer,
            start_new_session=True,
        )
        os.close(writer)
        run.until_phase("boot")
        os.close(reader)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 143
        assert run.json("end.json")["observed"] == "interrupted"


class TestStop:
    """Servers that do not want to go."""

    def test_a_server_that_ignores_sigterm_is_killed(self, finished: Finished) -> None:
        run = finished("ignores sigterm")
        stop = assert_proven_clean(run)
        assert (stop["escalated"], stop["server_exit_code"]) == (True, -9)
        assert run.json("end.json")["observed"] == "ok"

    @pytest.mark.parametrize("kind", ["group", "session"])
    def test_an_orphaned_worker_is_killed(self, finished: Finished, kind: str) -> None:
        run = finished(f"orphan in {kind}")
        stop = assert_proven_clean(run)
        assert len(stop["after_ready"]["processes"]) == 3
        assert stop["escalated"] is True

    def test_garbled_metrics_are_missed_ticks_with_reasons(self, finished: Finished) -> None:
        run = finished("garbled metrics")
        rows = run.lines("raw/server_samples.jsonl")
        missed = [row for row in rows if row["state"] == "missed"]
        reasons = {row["reason"].split(":")[0].split(" of ")[0] for row in missed}
        assert reasons >= {"HTTP 500", "unreadable page"}
        assert all("values" not in row for row in missed)
        kept = [row for row in rows if row["state"] != "missed"]
        assert kept
        assert all(row["values"]["kv_usage_ratio"] is not None for row in kept)


class TestInputs:
    """Bad inputs start nothing and say why."""

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "cell: not JSON"),
            ('{"format": 2}', "cell.format: got 2, wanted 1"),
        ],
    )
    def test_a_bad_cell_is_a_harness_error(
        self, make_run: MakeRun, text: str, message: str
    ) -> None:
        run = make_run(text=text)
        assert run.run() == 70
        end = run.json("end.json")
        assert end["observed"] == "harness_error"
        assert end["message"].startswith(message)
        assert not (run.outputs / "server.log").exists()


def test_the_runs_own_code_loads_nothing_but_the_standard_library(tmp_path: Path) -> None:
    """Its environment holds EvalScope, not this project's libraries."""
    import subprocess
    import sys

    code = (
        "import sys; before = set(sys.modules); import tasks.pod.run, tasks.pod.__main__\n"
        "names = {m.partition('.')[0] for m in set(sys.modules) - before}\n"
        "print(sorted(names - set(sys.stdlib_module_names) - {'tasks'}))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={"PYTHONPATH": str(root)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
