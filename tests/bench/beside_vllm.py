"""The same small sweep by this project and by vLLM's own `vllm bench sweep serve`, interleaved.

    MEMSWEEP_HOME=FOLDER python tests/bench/beside_vllm.py [--repeats 3] [--kill]   # 15 minutes

FOLDER holds the environments (`memsweep setup`). Both use the same engine environment, model,
server flags, environment variables, load points, request counts and warm-ups; each starts two
servers and puts two load points on each. Time is from the command to its last result written. The
project's services are up before, as they are in daily use; what starting them costs is told apart.
pandas, which vLLM's summary needs and its CPU build lacks, is laid beside the engine's packages.

``--kill`` shows instead what each leaves after SIGKILL of its controlling process under load: the
processes that go on, and what a second call of the same command does. One JSON object on standard
output.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from testkit.real import Memsweep, wait_for

from tasks import processes
from tasks.files import read_json
from tasks.home import Home
from tasks.launch import environments, models
from tasks.launch.settings import inherited, run_outputs
from tasks.launch.supervisor import Folder
from tasks.plan.cell import ServerSettings
from tasks.pod import argv
from tasks.pod.inputs import ServerSettings as PodSettings
from tasks.processes import free_port

MODEL = "tiny-qwen3"
CONTEXTS = (2048, 1024)
POINTS = ({"parallel": 4, "number": 16}, {"parallel": 16, "number": 32})
PROMPT_TOKENS, OUTPUT_TOKENS, WARMUP = 256, 64, 4
POOL_BYTES = 64 << 20
NAME = "beside-vllm"
#: Longest wait for one sweep of either side.
SWEEP_S = 1200.0

SWEEP: dict[str, Any] = {
    "name": NAME,
    "model": MODEL,
    "repeats": 1,
    "order": "stated",
    "server": {"kv_cache_memory_bytes": POOL_BYTES, "enforce_eager": True},
    "load": {
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "warmup": WARMUP,
        "seed": 42,
    },
    "experiments": [
        {"name": "both", "vary": {"max_model_len": list(CONTEXTS)}, "points": list(POINTS)}
    ],
}


class Theirs:
    """`vllm bench sweep serve` on the engine's environment, with our flags and variables."""

    def __init__(self, home: Home, folder: Path) -> None:
        self.home, self.folder = home, folder
        self.port = free_port()
        self.vllm = environments.python(home, "engine").with_name("vllm")
        self.overlay = self._pandas()
        serve = self._serve_command()
        (folder / "serve.json").write_text(
            json.dumps([{"max_model_len": context} for context in CONTEXTS])
        )
        (folder / "bench.json").write_text(
            json.dumps(
                [{"max_concurrency": p["parallel"], "num_prompts": p["number"]} for p in POINTS]
            )
        )
        self.command = [
            str(self.vllm), "bench", "sweep", "serve",
            "--serve-cmd", " ".join(serve), "--bench-cmd", " ".join(self._bench_command()),
            "--serve-params", str(folder / "serve.json"),
            "--bench-params", str(folder / "bench.json"),
            "--num-runs", "1", "-o", str(folder / "results"),
        ]  # fmt: skip

    def _pandas(self) -> Path:
        target = self.folder / "pandas"
        python = environments.python(self.home, "engine")
        subprocess.run(
            [
                "uv", "pip", "install", "--quiet", "--no-deps", "--python", python,
                "--target", target, "--compile-bytecode",
                "pandas", "python-dateutil", "pytz", "tzdata", "six",
            ],
            check=True, timeout=600,
        )  # fmt: skip
        return target

    def _serve_command(self) -> list[str]:
        settings = ServerSettings.model_validate(SWEEP["server"] | {"max_model_len": CONTEXTS[0]})
        pod = PodSettings(**settings.model_dump())
        command = argv.engine_argv(
            pod, engine=self.vllm, model=models.folder(self.home, MODEL), port=self.port
        )
        at = command.index("--max-model-len")
        return command[:at] + command[at + 2 :]

    def _bench_command(self) -> list[str]:
        return [
            str(self.vllm), "bench", "serve", "--backend", "openai-chat",
            "--endpoint", "/v1/chat/completions", "--host", "127.0.0.1", "--port", str(self.port),
            "--model", str(models.folder(self.home, MODEL)),
            "--served-model-name", argv.SERVED_NAME, "--dataset-name", "random",
            "--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS),
            "--ignore-eos", "--num-warmups", str(WARMUP), "--seed", "42", "--temperature", "0",
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        """Return the variables our run gives its server, and where pandas lies."""
        ours = argv.engine_variables("cpu", self.home.cache)
        home = str(self.home.cache / "run-home")
        return inherited() | ours | {"PYTHONPATH": str(self.overlay), "HOME": home}

    def start(self, name: str, *more: str) -> subprocess.Popen[bytes]:
        """Start the sweep in a session of its own."""
        with (self.folder / f"{name}.log").open("ab") as sink:
            return subprocess.Popen(
                [*self.command, "-e", name, *more],
                env=self.environment(), cwd=self.folder, stdin=subprocess.DEVNULL, stdout=sink,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def measure(self, number: int) -> dict[str, Any]:
        """Run the sweep once; seconds in all, and in the load itself by its own results."""
        began = time.monotonic()
        process = self.start(f"e{number}")
        code = process.wait(timeout=SWEEP_S)
        seconds = time.monotonic() - began
        results = self.results(f"e{number}")
        assert code == 0, f"exit {code}: see {self.folder}/e{number}.log"
        assert len(results) == len(CONTEXTS) * len(POINTS), results
        return {"seconds": seconds, "load_s": sum(one["duration"] for one in results)}

    def results(self, name: str) -> list[dict[str, Any]]:
        """Return the results that are there."""
        found = (self.folder / "results" / name).rglob("run=*.json")
        return [json.loads(path.read_text()) for path in found]

    def client_import_s(self) -> float:
        """Return how long a load client of theirs takes before it does anything."""
        began = time.monotonic()
        subprocess.run(
            [environments.python(self.home, "engine"), "-c", "import vllm.benchmarks.serve"],
            env=self.environment(), check=True, capture_output=True, timeout=300,
        )  # fmt: skip
        return time.monotonic() - began

    def servers(self) -> list[int]:
        """Return PIDs of processes that serve on our port's command line."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            words = _words(path)
            if "serve" in words and str(self.port) in words and "sweep" not in words:
                found.append(int(path.parent.name))
        return found


def _words(path: Path) -> list[str]:
    try:
        return path.read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


class Ours:
    """`memsweep run` of the same sweep."""

    def __init__(self, home: Home, folder: Path) -> None:
        self.home, self.folder = home, folder
        self.memsweep = Memsweep(home.root)
        self.sweep = folder / f"{NAME}.yaml"
        self.sweep.write_text(json.dumps(SWEEP))

    def measure(self, number: int) -> dict[str, Any]:
        """Run the sweep once in a new round; exits when everything is in the warehouse."""
        began = time.monotonic()
        process = self.memsweep.start(
            "run", str(self.sweep), "--fresh", log=self.folder / f"ours{number}.log"
        )
        code = process.wait(timeout=SWEEP_S)
        seconds = time.monotonic() - began
        assert code == 0, f"exit {code}: see {self.folder}/ours{number}.log"
        rows = self.memsweep.rows(
            "SELECT run_uuid::VARCHAR AS run FROM run WHERE sweep = 'beside-vllm' "
            f"ORDER BY started_at DESC LIMIT {len(CONTEXTS)}"
        )
        imports, load = 0.0, 0.0
        for row in rows:
            folder = self.home.bundles / row["run"]
            events = (folder / "events.jsonl").read_text().splitlines()
            imports += sum(
                event.get("seconds") or 0.0
                for event in map(json.loads, events)
                if event.get("event") == "bench_imported"
            )
            phases = (read_json(folder / "phases.json") or {})["phases"]
            load += sum(p["end_s"] - p["start_s"] for p in phases if p["name"] == "measure")
        return {"seconds": seconds, "load_s": load, "client_import_s": imports}


def compare(ours: Ours, theirs: Theirs, repeats: int) -> dict[str, Any]:
    """Measure both in turn, the order swapped each time."""
    mine, other, imports = [], [], []
    for number in range(repeats):
        sides: list[Callable[[], None]] = [
            lambda n=number: mine.append(ours.measure(n)),  # type: ignore[misc]
            lambda n=number: other.append(theirs.measure(n)),  # type: ignore[misc]
        ]
        for side in sides if number % 2 == 0 else reversed(sides):
            side()
        imports.append(theirs.client_import_s())
        print(f"pair {number + 1}: {mine[-1]} / {other[-1]}", file=sys.stderr, flush=True)
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(mine, other, strict=True)]
    clients = len(CONTEXTS) * len(POINTS)
    return {
        "ours": mine,
        "theirs": other,
        "their_client_import_s": [each * clients for each in imports],
        "ratio_of_each_pair": ratios,
        "ratio_of_medians": statistics.median(a["seconds"] for a in mine)
        / statistics.median(b["seconds"] for b in other),
    }


def kill(ours: Ours, theirs: Theirs) -> dict[str, Any]:
    """Kill each side's controlling process under load, look at what is left, and call it again."""
    return {"ours": _kill_ours(ours), "theirs": _kill_theirs(theirs)}


def _kill_ours(ours: Ours) -> dict[str, Any]:
    home = ours.home
    flow = ours.memsweep.start("run", str(ours.sweep), "--fresh", log=ours.folder / "killed.log")

    def under_load() -> str | None:
        for record in Folder(home).records():
            phases = read_json(run_outputs(home, record.uuid) / "phases.json") or {}
            names = [phase["name"] for phase in phases.get("phases", [])]
            if "measure" in names and processes.session(record.sid, record.start_ticks):
                return record.uuid
        return None

    run = wait_for("a run under load", under_load, timeout=300)
    os.kill(flow.pid, signal.SIGKILL)
    flow.wait()
    again = ours.memsweep.call("run", str(ours.sweep), timeout=SWEEP_S)
    rows = ours.memsweep.rows(
        "SELECT run_uuid::VARCHAR AS run, outcome, attempt FROM run WHERE sweep = 'beside-vllm' "
        "AND round = (SELECT max_by(round, started_at) FROM run WHERE sweep = 'beside-vllm')"
    )
    return {
        "run_under_load": run,
        "second_call_exit": again.returncode,
        "adopted": f"run {run} adopted" in again.stderr,
        "runs": rows,
        "processes_left": [asdict(one) for one in Folder(home).records()],
    }


def _kill_theirs(theirs: Theirs) -> dict[str, Any]:
    sweep = theirs.start("killed")
    client = ["bench", "serve", str(theirs.port)]

    def loads() -> bool:
        lines = map(_words, Path("/proc").glob("[0-9]*/cmdline"))
        return any(all(w in words for w in client) and "sweep" not in words for words in lines)

    wait_for("a client under load", loads, timeout=300)
    time.sleep(15)
    os.kill(sweep.pid, signal.SIGKILL)
    sweep.wait()
    time.sleep(10)
    left = theirs.servers()
    # Each server is the leader of a session; its engine renames itself and is found by no words.
    groups = {os.getpgid(pid) for pid in left}
    results = len(theirs.results("killed"))
    again = theirs.start("killed", "--resume")
    try:
        code: int | None = again.wait(timeout=SWEEP_S)
    except subprocess.TimeoutExpired:
        code = None
        again.kill()
    after = theirs.servers()
    for group in groups | {os.getpgid(pid) for pid in after}:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    return {
        "processes_10_s_after": len(left),
        "results_kept": results,
        "second_call_exit": code,
        "results_after": len(theirs.results("killed")),
        "processes_after_second_call": len(after),
    }


@contextmanager
def both(folder: Path) -> Iterator[tuple[Ours, Theirs, float]]:
    """Yield both sides and the seconds that starting the services took."""
    home = Home.find()
    ours, theirs = Ours(home, folder), Theirs(home, folder)
    began = time.monotonic()
    done = ours.memsweep.call("services", "up", timeout=600)
    assert done.returncode == 0, done.stderr
    models.ensure(home, MODEL, progress=lambda text: print(text, file=sys.stderr))
    try:
        yield ours, theirs, time.monotonic() - began
    finally:
        ours.memsweep.call("services", "down", timeout=300)


def main() -> None:
    """Measure and print one JSON object; exits 1 where the ratio is above 1."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kill", action="store_true")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="beside-vllm-"))
    try:
        with both(folder) as (ours, theirs, services_s):
            result = kill(ours, theirs) if given.kill else compare(ours, theirs, given.repeats)
    except BaseException:
        print(f"logs are kept in {folder}", file=sys.stderr)
        raise
    shutil.rmtree(folder)
    json.dump({"format": 1, "services_up_s": services_s, **result}, sys.stdout, indent=1)
    print()
    if not given.kill and result["ratio_of_medians"] > 1:
        sys.exit(1)


if __name__ == "__main__":
    main()
