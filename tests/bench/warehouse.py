"""How fast the warehouse takes in and answers, as ratios within one run of this file.

    python -m tests.bench.warehouse            # all of it, with 10,000 runs and 20 million samples
    python -m tests.bench.warehouse 1000       # the large warehouse with so many runs

CPU time of the ingesting process is what counts: a busy machine then does not decide. A sample is
one number at one time, as MLflow counts them; rows (ticks) are stated as well.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tasks import record
from tasks.home import Home
from tasks.rows import parse
from tests.support.bundle_maker import Ask, Lab, Spec
from warehouse.audit import audit
from warehouse.connection import open_snapshot, open_writer
from warehouse.publish import publish
from warehouse.query import named_queries
from warehouse.store import replace_runs
from warehouse.tables import TABLES

#: Numbers these bundles hold a tick: four families of /metrics and the memory of two processes.
NUMBERS_A_TICK = 6
SAMPLES_A_RUN = 2_000


def ticks(count: int) -> list[tuple[float, float | None, float, float, float]]:
    """Return so many samples of a server under load, 250 ms apart."""
    return [
        (1009.0 + 0.25 * i, (i % 60) / 63, float(i % 13), float(i % 7), float(i // 1000))
        for i in range(count)
    ]


def cpu(work: Callable[[], object]) -> float:
    """Return the CPU seconds of this process that ``work`` takes."""
    began = time.process_time()
    work()
    return time.process_time() - began


def long_runs(folder: Path, runs: int = 8, samples: int = 100_000) -> dict[str, float]:
    """Ingest runs of ``samples`` samples each: verifying, parsing and storing; best of three."""
    passes = [_long_runs(folder / str(number), runs, samples) for number in range(3)]
    return min(passes, key=lambda figures: figures["cpu_s"])


def _long_runs(folder: Path, runs: int, samples: int) -> dict[str, float]:
    lab = Lab(Home(folder / "home"))
    count = samples // NUMBERS_A_TICK
    paths = [
        lab.seal(repeat=i + 1, samples=ticks(count), ended_s=1010 + count / 4) for i in range(runs)
    ]
    record.ingest(lab.home, [lab.seal(repeat=99)])
    seconds = cpu(lambda: record.ingest(lab.home, paths, publish=False))
    with open_writer(lab.home.warehouse_live) as connection:
        rows = connection.execute(
            "SELECT (SELECT count(*) FROM server_sample), (SELECT count(*) FROM process_sample)"
        ).fetchone()
    assert rows is not None
    assert rows[0] >= runs * count
    return {
        "cpu_s": seconds,
        "samples_per_cpu_s": runs * samples / seconds,
        "rows_per_cpu_s": (rows[0] + rows[1]) / seconds,
    }


def small_bundles(folder: Path, bundles: int = 300) -> dict[str, float]:
    """Ingest whole small bundles in bulk, then the same again."""
    lab = Lab(Home(folder / "home"))
    requests = (tuple(Ask(1010 + 0.01 * i, 1013 + 0.01 * i) for i in range(64)),)
    paths = [lab.seal(repeat=i + 1, samples=ticks(60), requests=requests) for i in range(bundles)]
    record.ingest(lab.home, [lab.seal(repeat=9999)])
    first = cpu(lambda: record.ingest(lab.home, paths, publish=False))
    again = cpu(lambda: record.ingest(lab.home, paths, publish=False))
    return {"bundles_per_cpu_s": bundles / first, "unchanged_per_cpu_s": bundles / again}


MLFLOW = """
    import json, sys, time
    from mlflow.entities import Metric
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
    count, folder = int(sys.argv[1]), sys.argv[2]
    store = SqlAlchemyStore(f"sqlite:///{folder}/mlflow.db", f"{folder}/artifacts")
    experiment = store.create_experiment("bench")
    run = store.create_run(experiment, "user", 0, [], "run")
    metrics = [Metric("kv_usage_ratio", (i % 60) / 63, i, i) for i in range(count)]
    began = time.process_time()
    for at in range(0, count, 1000):  # its own limit of a batch
        store.log_batch(run.info.run_id, metrics[at : at + 1000], [], [])
    print(json.dumps({"cpu_s": time.process_time() - began}))
"""


def mlflow(folder: Path, samples: int = 100_000) -> dict[str, float]:
    """Log as many samples to MLflow's tracking store on SQLite; best of three.

    MEMSWEEP_BENCH_MLFLOW names a Python that has it; without it one is made with uv.
    """
    python = os.environ.get("MEMSWEEP_BENCH_MLFLOW")
    if not python:
        made = folder / "mlflow"
        subprocess.run(["uv", "venv", "-q", made], check=True)
        python = str(made / "bin" / "python")
        subprocess.run(
            ["uv", "pip", "install", "-q", "--no-config", "--python", python, "mlflow"], check=True
        )
    passes = []
    for number in range(3):
        place = folder / f"pass-{number}"
        place.mkdir()
        done = subprocess.run(
            [python, "-c", textwrap.dedent(MLFLOW), str(samples), str(place)],
            capture_output=True,
            text=True,
            check=True,
        )
        passes.append(float(json.loads(done.stdout.splitlines()[-1])["cpu_s"]))
    return {"cpu_s": min(passes), "samples_per_cpu_s": samples / min(passes)}


def _copies(template: dict[str, pa.Table], runs: list[str], first: int) -> dict[str, pa.Table]:
    """Return the rows of many runs that are like one: other UUID, time, round and setting."""
    tables = {}
    for name, rows in template.items():
        count, number = rows.num_rows, len(runs)
        many = pa.concat_tables([rows] * number)
        if "run_uuid" in rows.column_names:
            spread = pa.DictionaryArray.from_arrays(
                pa.array(np.repeat(np.arange(number, dtype=np.int32), count)), pa.array(runs)
            )
            many = many.set_column(
                many.schema.get_field_index("run_uuid"), "run_uuid", spread.cast(pa.string())
            )
        tables[name] = many
    run = tables["run"]
    start = datetime(2026, 1, 1)  # noqa: DTZ001
    stamps = [start + timedelta(minutes=first + i) for i in range(len(runs))]
    for column, values in {
        "started_at": pa.array(stamps, pa.timestamp("us")),
        "round": pa.array([f"{(first + i) // 50}" for i in range(len(runs))]),
        "setting_key": pa.array([f"{(first + i) % 50:064d}" for i in range(len(runs))]),
        "repeat": pa.array([i % 3 + 1 for i in range(len(runs))], pa.int32()),
    }.items():
        run = run.set_column(run.schema.get_field_index(column), column, values)
    tables["run"] = run
    return tables


def _large(lab: Lab, runs: int) -> Iterator[tuple[int, float]]:
    """Fill a warehouse; yield (runs so far, CPU seconds of this process so far)."""
    spec = Spec(samples=ticks(SAMPLES_A_RUN), ended_s=1010 + SAMPLES_A_RUN / 4)
    template = dict(parse(lab.seal(spec)).tables)
    del template["process_sample"]  # 20 million samples are asked for, not 60
    spent = 0.0
    with open_writer(lab.home.warehouse_live) as connection:
        for first in range(0, runs, 100):
            names = [str(uuid.uuid4()) for _ in range(min(100, runs - first))]
            tables = _copies(template, names, first)
            # As one transaction of many runs: what an ingest of so many bundles hands over.
            spent += cpu(lambda: replace_runs(connection, {"many": tables}))  # noqa: B023
            yield first + len(names), spent
        done = publish(connection, lab.home.warehouse_live, lab.home.warehouse_snapshot)
        print(f"publish: {done.bytes / 1e6:.0f} MB in {done.seconds:.2f} s", flush=True)


def large(folder: Path, runs: int = 10_000) -> dict[str, Any]:
    """Fill a warehouse with ``runs`` runs of 2,000 samples and ask everything of it."""
    lab = Lab(Home(folder / "home"))
    record.ingest(lab.home, [lab.seal(run_uuid="11111111-1111-4111-8111-111111111111")])
    points = {}
    for count, spent in _large(lab, runs):
        if count in (100, 300, 1000, 3000, 10_000) or count == runs:
            points[count] = spent
            print(f"{count:6d} runs: {spent:8.2f} CPU-s, {1000 * spent / count:.2f} ms a run")
    counts = sorted(points)
    slope = float(np.polyfit(np.log(counts), np.log([points[c] for c in counts]), 1)[0])
    return {
        "slope": slope,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "live_mb": lab.home.warehouse_live.stat().st_size / 1e6,
        **_ask(lab.home),
    }


def _ask(home: Home) -> dict[str, Any]:
    """Return milliseconds of an audit and of every named query, second time, in process."""
    found: dict[str, Any] = {"queries_ms": {}}
    run = "11111111-1111-4111-8111-111111111111"
    with open_snapshot(home.warehouse_snapshot) as connection:
        for name, metric in (
            ("audit_ms", "kv_cache_size_tokens"),
            ("audit_samples_ms", "preemptions"),
        ):
            found[name] = _second(
                lambda metric=metric: audit(connection, home.bundles, run, metric)  # type: ignore[misc]
            )
        for name, query in named_queries().items():
            bound = {p.name: p.default for p in query.parameters}
            found["queries_ms"][name] = _second(
                lambda sql=query.sql, bound=bound: connection.execute(sql, bound or None).fetchmany(
                    1000
                )  # type: ignore[misc]
            )
    found["slowest_query_ms"] = max(found["queries_ms"].values())
    return found


def _second(work: Callable[[], object]) -> float:
    work()
    began = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - began)


def in_folder(work: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Run one benchmark in a folder that is removed after it."""
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        return work(folder)
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """Print everything."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    ours = in_folder(long_runs)
    theirs = in_folder(mlflow)
    print("long runs", ours)
    print("mlflow", theirs)
    print("ratio", ours["samples_per_cpu_s"] / theirs["samples_per_cpu_s"])
    print("small bundles", in_folder(small_bundles))
    print("large", json.dumps(in_folder(lambda folder: large(folder, runs)), indent=1))
    assert set(TABLES)


if __name__ == "__main__":
    main()
