"""What the machinery costs: the gap between two runs of a slot, and the flow's CPU and memory.

    python -m tests.bench.gaps --cells 300 --seconds 10 --slots 3
    python -m tests.bench.gaps --flow 100 1000

The real command line, Prefect server, Polyaxon server and supervisor; doubles of engine and load,
which sleep where a real server would boot. Gaps are taken from the servers' own times: the final
condition of a run in Polyaxon (posted by the supervisor when nothing of the run is left) to the
condition `starting` of the next run on that slot; and, stricter, from the run's own last clock
reading to the next run's first. Slots are served first come first: with all times sorted, the
n-th start follows the (n - slots)-th end.

The flow's figures are getrusage's of the flow process and the children it waited for (the copies of
published snapshots). ``planned`` are cells of the sweep, ``run`` those that were still to be run;
the others are finished: copies of a measured bundle under the other cells' names, ingested before.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from testkit import doubles, endstate

from flows.context import surroundings
from tasks import bundle, record
from tasks.canonical import sha256_file
from tasks.files import read_json, write_json
from tasks.home import Home
from tasks.plan.plan import PlannedRun, make_plan
from tasks.plan.sweep import parse_sweep
from tasks.rounds import RepeatState, Round, open_round

#: What a double's run takes beside its engine's boot: start, load, stop.
OTHER_S = 1.0


def slot_gaps(starts: Sequence[float], ends: Sequence[float], slots: int) -> list[float]:
    """Return the seconds from each end to the start that took its slot."""
    starts, ends = sorted(starts), sorted(ends)
    return [starts[n] - ends[n - slots] for n in range(slots, len(starts))]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below or at which that share of the values lies (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * len(ordered) * 1000) // 1000) - 1)]


def figures(gaps: Sequence[float]) -> dict[str, float | int]:
    """Return median, p90, p99, greatest and number."""
    return {
        "n": len(gaps),
        "median_s": round(statistics.median(gaps), 3),
        "p90_s": round(percentile(gaps, 0.90), 3),
        "p99_s": round(percentile(gaps, 0.99), 3),
        "max_s": round(max(gaps), 3),
    }


def seconds(text: str) -> float:
    """Return an ISO 8601 time as seconds since the epoch."""
    return datetime.fromisoformat(text).timestamp()


def measure_gaps(folder: Path, cells: int, cell_s: float, slots: int) -> dict[str, object]:
    """Run so many cells of about ``cell_s`` seconds and return the gaps between them."""
    home = doubles.make_home(folder / "gaps", engine={"boot_s": max(0.1, cell_s - OTHER_S)})
    sweep, log = folder / "gaps.yaml", folder / "gaps.log"
    sweep.write_text(doubles.sweep_text("gaps", cells))
    target = doubles.write_profile(folder / f"slots-{slots}.yaml", slots)
    try:
        used = flow_usage(home, str(sweep), "--target", str(target), "--fresh", log=log)
    finally:
        left = doubles.end_services(home)
    round_ = endstate.newest_round(home, "gaps")
    polyaxon: tuple[list[float], list[float]] = ([], [])
    own: tuple[list[float], list[float]] = ([], [])
    for path in bundle.all_sealed(home):
        sealed = bundle.load(path)
        if sealed.manifest["round"] != round_.id:
            continue
        conditions = (sealed.json("polyaxon.json") or {})["conditions"]
        assert isinstance(conditions, list)
        polyaxon[0].append(next(seconds(c["at"]) for c in conditions if c["type"] == "starting"))
        polyaxon[1].append(seconds(conditions[-1]["at"]))
        own[0].append(seconds(str(sealed.manifest["started_at"])))
        own[1].append(seconds(str(sealed.manifest["ended_at"])))
    lengths = [end - start for start, end in zip(*own, strict=True)]
    return {
        "cells": cells,
        "slots": slots,
        "run_s_median": round(statistics.median(lengths), 2),
        "wall_s": round(max(own[1]) - min(own[0]), 1),
        "gap_by_polyaxon": figures(slot_gaps(*polyaxon, slots)),
        "gap_by_the_runs": figures(slot_gaps(*own, slots)),
        "flow": used,
        "left": left,
    }


def flow_usage(home: Home, *arguments: str, log: Path) -> dict[str, float | int]:
    """Run a sweep and return what its flow process used."""
    process = doubles.start(home, "run", *arguments, log=log)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"run {' '.join(arguments)} ended with {process.returncode}; see {log}")
    return {
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_mib": round(usage.ru_maxrss / 1024, 1),
    }


@dataclass(frozen=True)
class Cost:
    """What the flow used for a sweep of ``planned`` cells of which ``run`` were run."""

    planned: int
    run: int
    cpu_s: float
    peak_mib: float


def measure_flow(folder: Path, planned: Sequence[int], run: int) -> dict[str, object]:
    """Measure the flow on sweeps of several sizes, with the same number of cells to be run.

    The smallest is measured once more with all of its cells to be run: the slope by cell run.
    """
    home = doubles.make_home(folder / "flow")
    costs = []
    try:
        template = _template(home, folder)
        for count, to_run in [*((n, run) for n in planned), (min(planned), min(planned))]:
            costs.append(_cost(home, folder, count, to_run, template))
            print(json.dumps(costs[-1].__dict__), flush=True)
    finally:
        left = doubles.end_services(home)
    few, many, all_run = costs[0], costs[-2], costs[-1]
    return {
        "costs": [cost.__dict__ for cost in costs],
        "by_planned_cell": _slope(few, many, many.planned - few.planned),
        "by_run_cell": _slope(few, all_run, all_run.run - few.run),
        "left": left,
    }


def _slope(few: Cost, many: Cost, cells: int) -> dict[str, float]:
    return {
        "cpu_ms": round(1000 * (many.cpu_s - few.cpu_s) / cells, 2),
        "memory_kib": round(1024 * (many.peak_mib - few.peak_mib) / cells, 2),
    }


def _template(home: Home, folder: Path) -> Path:
    """Run one cell and return its bundle."""
    sweep = folder / "template.yaml"
    sweep.write_text(doubles.sweep_text("template", 1))
    flow_usage(home, str(sweep), log=folder / "template.log")
    return bundle.all_sealed(home)[0]


def _cost(home: Home, folder: Path, planned: int, to_run: int, template: Path) -> Cost:
    name = f"flow-{planned}-{to_run}"
    sweep_file = folder / f"{name}.yaml"
    text = doubles.sweep_text(name, planned)
    sweep_file.write_text(text)
    sweep = parse_sweep(text, where=name)
    plan = make_plan(sweep, surroundings(home, "local"))
    round_, _ = open_round(home, sweep, text, target="local", fresh=True)
    finished = list(plan.runs())[to_run:]
    record.ingest(home, [finish(home, round_, run, template) for run in finished])
    used = flow_usage(home, str(sweep_file), log=folder / f"{name}.log")
    return Cost(planned, to_run, used["cpu_s"], used["peak_mib"])


def finish(home: Home, round_: Round, run: PlannedRun, template: Path) -> Path:
    """Make a repeat finished without running it: a measured bundle under this cell's name."""
    cell = run.cell
    run_uuid = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{round_.id}:{cell.cell_key}:{run.repeat}"))
    target = home.bundles / run_uuid
    shutil.copytree(template, target)
    manifest = read_json(target / bundle.MANIFEST)
    orchestration = read_json(target / "orchestration.json")
    assert manifest is not None
    assert orchestration is not None
    (target / "cell.json").write_text(cell.canonical() + "\n", encoding="utf-8")
    predicted = run.planned.prediction.document(cell.cell_key, made_at=str(orchestration["at"]))
    write_json(target / "prediction.json", predicted)
    digest = sha256_file(target / "prediction.json")
    place = {"round": round_.id, "sweep": round_.sweep_name, "sweep_sha256": round_.sweep_sha256}
    write_json(target / "orchestration.json", orchestration | place | {"prediction_sha256": digest})
    (target / "sweep.yaml").write_text(round_.sweep_text, encoding="utf-8")
    changed = ("cell.json", "prediction.json", "orchestration.json", "sweep.yaml")
    own = {
        name: {"sha256": sha256_file(target / name), "bytes": (target / name).stat().st_size}
        for name in changed
    }
    names = {"run_uuid": run_uuid, "cell_key": cell.cell_key, "setting_key": cell.setting_key}
    manifest |= place | names | {"repeat": run.repeat, "files": manifest["files"] | own}
    write_json(target / bundle.MANIFEST, manifest)
    round_.save(
        RepeatState(
            cell_key=cell.cell_key,
            repeat=run.repeat,
            attempt=1,
            run_uuid=run_uuid,
            prediction_sha256=digest,
            outcome="ok",
            manifest_sha256=sha256_file(target / bundle.MANIFEST),
        )
    )
    return target


def main() -> None:
    """Read the options, measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", type=int, default=300, help="cells to measure gaps over")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a cell")
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--flow", type=int, nargs="+", help="planned cells: the flow's figures")
    parser.add_argument("--run", type=int, default=20, help="cells of these that are to be run")
    parser.add_argument("--folder", type=Path, default=Path(".memsweep-gaps"))
    given = parser.parse_args()
    folder: Path = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if given.flow:
        found = measure_flow(folder, given.flow, given.run)
    else:
        found = measure_gaps(folder, given.cells, given.seconds, given.slots)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
