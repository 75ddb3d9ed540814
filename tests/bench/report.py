"""How long the page of a large sweep takes, and how large it is.

python -m tests.bench.report            # 60 cells, 4 load points, 2 repeats
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import uuid
from pathlib import Path

from flows.report.page import Request, build
from tasks import record
from tasks.home import Home
from tasks.plan.cell import LoadPoint
from tests.support.bundle_maker import Ask, Lab
from warehouse.compare import choose
from warehouse.connection import open_snapshot

CONCURRENCY = (1, 4, 16, 64)
#: Samples a run, 250 ms apart: ten minutes of serving.
SAMPLES = 2_400


def large_sweep(folder: Path, *, cells: int = 60, repeats: int = 2) -> Home:
    """Ingest a sweep of so many cells with four load points each; return its state folder."""
    lab = Lab(Home(folder / "home"))
    load = tuple(LoadPoint(parallel=p, number=p, warmup=1) for p in CONCURRENCY)
    requests = [
        [Ask(1010.0 + 100 * i + 0.01 * n, 1090.0 + 100 * i + 0.02 * n) for n in range(parallel)]
        for i, parallel in enumerate(CONCURRENCY)
    ]
    samples = [
        (1009.0 + 0.25 * i, (i % 60) / 630, float(i % 13), float(i % 7), float(i // 1000))
        for i in range(SAMPLES)
    ]
    paths = [
        lab.seal(
            run_uuid=str(uuid.UUID(int=1000 * repeat + cell, version=4)),
            repeat=repeat,
            label=f"grid/max_model_len={2048 + 512 * cell}",
            max_model_len=2048 + 512 * cell,
            load=load,
            requests=requests,
            samples=samples,
            started_s=1001.0 + 2 * cell + repeat / 10,
            ended_s=1620.0 + 2 * cell,
        )
        for repeat in range(1, repeats + 1)
        for cell in range(cells)
    ]
    record.ingest(lab.home, paths)
    return lab.home


def measure(folder: Path) -> dict[str, float]:
    """Build the page of a large sweep: seconds of wall and CPU time, and bytes."""
    home = large_sweep(folder)
    with open_snapshot(home.warehouse_snapshot) as connection:
        chosen = choose(connection, None)
        wall, cpu = time.monotonic(), time.process_time()
        built = build(home, connection, Request(chosen.title, (chosen,)))
        wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    return {
        "seconds": wall,
        "cpu_s": cpu,
        "bytes": len(built.html.encode()),
        "runs": len(built.data.runs),
        "load_points": len(built.data.points),
        "numbers": sum(len(chain.proofs) for chain in built.page.chains),
        "charts": built.summary()["charts"],
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        sys.stdout.write(json.dumps(measure(Path(place)), indent=1) + "\n")
