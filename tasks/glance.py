"""A look at a run that goes on: which phase it is in and how full its cache is.

For people who wait; nothing here is evidence. Reads what the run has written so far, so it works
only where the run's outputs folder is on this machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tasks.files import read_json

#: The last line of the samples lies within so many bytes of the end.
TAIL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Glance:
    """What a run shows of itself; whatever it has not shown yet is ``None``."""

    phase: str | None = None  # boot, ready, warmup, measure, drain, stop
    load_point: int | None = None
    kv_usage_ratio: float | None = None
    requests_running: float | None = None
    requests_waiting: float | None = None


def glance(outputs: Path) -> Glance:
    """Return the phase the run entered last and its last sample of the server's metrics."""
    phases = (read_json(outputs / "phases.json") or {}).get("phases")
    marks = [
        one for one in (phases if isinstance(phases, list) else []) if isinstance(one, Mapping)
    ]
    mark = marks[-1] if marks else {}
    phase, point = mark.get("name"), mark.get("load_point")
    sample = _last_values(outputs / "raw" / "server_samples.jsonl")
    return Glance(
        phase=phase if isinstance(phase, str) else None,
        load_point=point if isinstance(point, int) else None,
        kv_usage_ratio=_number(sample.get("kv_usage_ratio")),
        requests_running=_number(sample.get("requests_running")),
        requests_waiting=_number(sample.get("requests_waiting")),
    )


def _last_values(path: Path) -> Mapping[str, object]:
    """Return the values of the last whole sample line, empty where there is none."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(0, end - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
        row = json.loads(lines[-1])
    except (OSError, ValueError, IndexError):
        return {}
    values = row.get("values") if isinstance(row, Mapping) else None
    return values if isinstance(values, Mapping) else {}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
