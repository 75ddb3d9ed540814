"""A recorded run again: the same log, the same values, each when it was."""

from __future__ import annotations

import gzip
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tasks.pod.client import HTTP_ERRORS, Client
from tasks.pod.families import scan
from tasks.processes import free_port
from tests.double.engine import make_engine
from tests.double.replay import Recording, line_times, with_values
from tests.double.runs import MakeRun, PodRun

DATA = Path(__file__).parents[1] / "data"
#: Twelve run at once, the rest wait.
LOAD = [{"parallel": 16, "number": 20, "warmup": 1, "prompt_tokens": 600, "output_tokens": 48}]
SPEED = 2.0


def test_lines_of_a_real_log_come_with_their_stamps_and_the_server_is_up_when_it_was() -> None:
    log = (DATA / "vllm-logs" / "cpu-0.27.0-qwen3.5-hybrid-ok.log").read_bytes()
    lines = log.splitlines(keepends=True)
    times = line_times(lines, healthy_s=33.0)
    assert times == sorted(times)
    up = next(i for i, line in enumerate(lines) if b"Application startup complete" in line)
    assert times[up] == 33.0
    # The log says 18:25:01 where weights were loaded and 18:25:03 where it was up.
    loaded = next(i for i, line in enumerate(lines) if b"Loading weights took" in line)
    assert times[up] - times[loaded] == 2.0
    assert line_times(lines, healthy_s=None)[0] == 0.0


def test_a_page_keeps_all_but_the_sampled_values() -> None:
    page = (DATA / "metrics" / "0.27.0-qwen3.5-hybrid-idle.txt").read_text()
    values, _ = scan(page.encode())
    wanted: dict[str, float | None] = {name: float(i) for i, name in enumerate(values, 3)}
    changed = with_values(page, wanted)
    assert scan(changed.encode()) == (wanted, [])
    differing = [a for a, b in zip(page.split("\n"), changed.split("\n"), strict=True) if a != b]
    assert 0 < len(differing) <= 20
    assert with_values(page, dict.fromkeys(values)) == page


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> PodRun:
    """A run to play again; its samples packed, as in a bundle."""
    run = PodRun(tmp_path_factory.mktemp("recorded"), engine={"step_s": 0.004}, cell={"load": LOAD})
    assert run.run() == 0
    lines = run.outputs / "raw" / "server_samples.jsonl"
    lines.with_name(lines.name + ".gz").write_bytes(gzip.compress(lines.read_bytes()))
    lines.unlink()
    return run


def test_metrics_and_log_come_at_their_times(recorded: PodRun, tmp_path: Path) -> None:
    """What is answered is what was sampled last at that moment, and nothing else."""
    recording = Recording.read(recorded.outputs)
    engine = make_engine(tmp_path / "engine", replay=str(recorded.outputs), replay_speed=SPEED)
    port, log = free_port(), tmp_path / "server.log"
    with log.open("wb") as sink:
        argv = [str(engine / "vllm"), "serve", "m", "--port", str(port)]
        process = subprocess.Popen(argv, stdout=sink, stderr=subprocess.STDOUT)
    try:
        seen = watch(port, seconds=recording.samples[-1][0] / SPEED + 0.3)
    finally:
        process.terminate()
        assert process.wait(5) == 0
    assert log.read_bytes() == (recorded.outputs / "server.log").read_bytes()
    # It answered first when the recorded server did; from there the two clocks run alike.
    assert recording.healthy_s is not None
    first, _ = scan(recording.page.encode())
    late = []
    for at_s, values in seen:
        held = [at for at, sample in recording.samples if sample == values]
        assert held or values == first
        elapsed = recording.healthy_s + (at_s - seen[0][0]) * SPEED
        late.append(min((abs(elapsed - at) for at in held), default=0.0))
    assert len({tuple(values.items()) for _, values in seen}) > 5
    # Of some seconds: a clock at another speed would be off by more.
    assert sorted(late)[len(late) // 2] < 0.5


def watch(port: int, *, seconds: float) -> list[tuple[float, dict[str, float | None]]]:
    """Return what /metrics answers, and when, for ``seconds`` from its first answer on."""
    client = Client(port)
    seen: list[tuple[float, dict[str, float | None]]] = []
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            page = client.get("/metrics", timeout_s=1.0).body
        except HTTP_ERRORS:
            time.sleep(0.01)
            continue
        end = end if seen else time.monotonic() + seconds
        seen.append((time.monotonic(), scan(page)[0]))
        time.sleep(0.02)
    client.close()
    return seen


def test_a_replay_passes_for_the_server_that_was_recorded(
    recorded: PodRun, make_run: MakeRun
) -> None:
    """The run's own code measures it again and finds the recorded configuration."""
    again = make_run(engine={"replay": str(recorded.outputs)}, cell={"load": LOAD})
    assert again.run() == 0
    assert again.json("end.json")["observed"] == "ok"
    assert again.json("server_info.json")["checks"] == recorded.json("server_info.json")["checks"]
    rows = again.lines("raw/server_samples.jsonl")
    held = [sample for _, sample in Recording.read(recorded.outputs).samples]
    first, _ = scan((recorded.outputs / "metrics_first.txt").read_bytes())
    assert all(row["values"] in [*held, first] for row in rows if row["state"] != "missed")


def test_a_recorded_crash_ends_as_it_did(make_run: MakeRun, tmp_path: Path) -> None:
    crashed = make_run("crashed", engine={"die_on_first_request": True})
    assert crashed.run() == 0
    copy = tmp_path / "bundle"
    shutil.copytree(crashed.outputs, copy)
    engine = make_engine(tmp_path / "engine", replay=str(copy), replay_speed=2.0)
    start = time.monotonic()
    done = subprocess.run(
        [str(engine / "vllm"), "serve", "m", "--port", str(free_port())],
        capture_output=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == crashed.json("stop.json")["server_exit_code"] == 0
    assert done.stdout == (crashed.outputs / "server.log").read_bytes()
    ended_s = Recording.read(copy).ended_s
    assert ended_s is not None
    assert time.monotonic() - start >= ended_s / 2


def test_a_run_that_never_came_up_is_read(make_run: MakeRun) -> None:
    refused = make_run(cell={"server": {"max_model_len": 32_768}})
    assert refused.run() == 0
    recording = Recording.read(refused.outputs)
    assert (recording.healthy_s, recording.samples, recording.exit_code) == (None, [], 1)
