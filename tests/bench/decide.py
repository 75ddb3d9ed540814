"""How long a sweep of thousands of cells takes to be planned and decided.

    python -m tests.bench.decide

Decided is: which repeats of a round are finished, by state and the hash of each bundle's manifest.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from testkit.planning import surroundings

from tasks.canonical import sha256_file
from tasks.home import Home
from tasks.plan.plan import Plan, make_plan
from tasks.plan.sweep import parse_sweep
from tasks.rounds import Round, open_round

CELLS = 10_000
SWEEP = """
name: many
model: tiny-qwen35
repeats: 1
server: {{kv_cache_memory_bytes: 1073741824, max_num_batched_tokens: 4096}}
experiments:
  - name: grid
    vary: {{max_model_len: {lengths}, max_num_seqs: {sequences}}}
    points: [{{parallel: 1, number: 2}}, {{parallel: 16, number: 32}}]
"""
#: Files of a bundle, so that manifests have the size of real ones.
FILES = 45


def timed(work: Callable[[], object], *, times: int = 1) -> dict[str, float]:
    """Return wall and CPU seconds of ``work``: the best of some times, as noise only slows."""
    walls, cpus = [], []
    for _ in range(times):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        walls.append(round(time.perf_counter() - wall, 3))
        cpus.append(round(time.process_time() - cpu, 3))
    return {"wall_s": min(walls), "cpu_s": min(cpus)}


def sweep_text(cells: int) -> str:
    """Return a sweep of so many cells."""
    lengths = [1024 + 16 * n for n in range(cells // 100)]
    return SWEEP.format(lengths=lengths, sequences=[*range(1, 101)])


def plan(cells: int) -> Plan:
    """Return the plan of a sweep of so many cells."""
    return make_plan(parse_sweep(sweep_text(cells), where="many"), surroundings())


def finish(round_: Round, made: Plan) -> None:
    """Write the states and manifests of a round in which every run is finished."""
    states = round_.folder / "repeats"
    states.mkdir(parents=True)
    for number, run in enumerate(made.runs()):
        uuid = f"00000000-0000-4000-8000-{number:012d}"
        folder = round_.home.bundles / uuid
        folder.mkdir(parents=True)
        files = {f"raw/file_{n}.jsonl": {"bytes": n, "sha256": "0" * 64} for n in range(FILES)}
        manifest = {"run_uuid": uuid, "cell_key": run.cell.cell_key, "files": files}
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
        state = {
            "cell_key": run.cell.cell_key,
            "repeat": run.repeat,
            "attempt": 1,
            "run_uuid": uuid,
            "prediction_sha256": "0" * 64,
            "outcome": "ok",
            "manifest_sha256": sha256_file(folder / "manifest.json"),
            "at": "2026-11-29T12:00:00.000Z",
        }
        path = states / f"{run.cell.cell_key}.{run.repeat}.json"
        path.write_text(json.dumps(state, indent=1))


def measure(folder: Path, cells: int = CELLS) -> dict[str, dict[str, float]]:
    """Return the times of planning, ordering and deciding a sweep of so many cells."""
    text = sweep_text(cells)
    home = Home(folder)
    made: list[Plan] = []
    times = {"plan": timed(lambda: made.append(plan(cells)))}
    times["order"] = timed(lambda: [*made[0].runs(seed=1)], times=3)
    round_, _ = open_round(home, made[0].sweep, text, target="local", fresh=False)
    left: list[int] = []

    def decide() -> None:
        done = round_.all_finished()
        left.append(sum((r.cell.cell_key, r.repeat) not in done for r in made[0].runs()))

    times["none finished"] = timed(decide, times=3)
    finish(round_, made[0])
    times["all finished"] = timed(decide, times=3)
    assert left == [cells] * 3 + [0] * 3
    return times


def main() -> None:
    """Print the times."""
    with tempfile.TemporaryDirectory() as folder:
        for what, seconds in measure(Path(folder)).items():
            print(f"{CELLS} cells, {what}: {seconds['wall_s']} s ({seconds['cpu_s']} s of CPU)")


if __name__ == "__main__":
    main()
