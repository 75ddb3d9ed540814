"""What past starts of the engine left for the KV cache, from the published warehouse.

They calibrate the pool of the next start. A start counts only for a cell with the same model,
engine and GPU and with every setting that moves the memory beside weights and cache; the rest
(share of memory, context limit, batched tokens, cache dtype, ...) may differ, and batched tokens
are what the estimate is made over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.plan.calibration import Boot
from tasks.plan.cell import UNRESOLVED, Cell
from tasks.plan.gpus import Gpu

#: Settings that decide what profiling finds beside weights and cache: activations and graphs.
SAME_SERVER = (
    "dtype",
    "enforce_eager",
    "language_model_only",
    "max_num_seqs",
    "pipeline_parallel_size",
    "tensor_parallel_size",
)
SAME_PINS = ("device", "engine_version", "engine_lock_sha256", "image_digest")

_QUERY = """
SELECT c.setting, c.pins, r.gpu_name, r.gpu_total_bytes, r.total_memory_bytes,
    r.model_loading_bytes, r.available_kv_cache_bytes
FROM runs_wide r JOIN cell c ON c.cell_key = r.cell_key
WHERE r.device = 'cuda' AND r.kv_cache_memory_bytes IS NULL AND r.gpu_name IS NOT NULL
    AND r.gpu_total_bytes IS NOT NULL AND r.model_loading_bytes IS NOT NULL
    AND r.available_kv_cache_bytes IS NOT NULL
ORDER BY r.started_at NULLS FIRST, r.run_uuid
"""


@dataclass(frozen=True, slots=True)
class PastBoot:
    """One start: what was asked and pinned, on which device, and what it found."""

    setting: Mapping[str, Any]
    pins: Mapping[str, Any]
    gpu_name: str
    gpu_total_bytes: int
    #: Total as the engine logged it; None: it did not.
    logged_total_bytes: int | None
    loading_bytes: int
    available_bytes: int

    def counts_for(self, cell: Cell, gpu: Gpu) -> bool:
        """Whether it says what the memory of ``cell`` on ``gpu`` will be."""
        setting, pins = cell.setting.model_dump(mode="json"), cell.pins
        revision = self.pins.get("model_revision")
        return (
            self.setting["model"] == setting["model"]
            and pins.model_revision in (UNRESOLVED, revision)
            and all(self.pins.get(name) == getattr(pins, name) for name in SAME_PINS)
            and all(
                self.setting["server"].get(name) == setting["server"][name] for name in SAME_SERVER
            )
            and gpu.is_device(self.gpu_name, self.gpu_total_bytes)
        )

    def on(self, gpu: Gpu) -> Boot:
        """Return its figures; NVML's total, which holds what the driver reserves, is not used."""
        server = self.setting["server"]
        return Boot(
            total_bytes=self.logged_total_bytes or gpu.total_bytes,
            utilization=server["gpu_memory_utilization"],
            loading_bytes=self.loading_bytes,
            available_bytes=self.available_bytes,
            max_num_batched_tokens=server["max_num_batched_tokens"],
        )


@dataclass(slots=True)
class PastBoots:
    """The boots of a warehouse, read once, when first asked for."""

    snapshot: Path
    gpu: Gpu | None
    _all: list[PastBoot] | None = field(default=None, init=False)

    def __call__(self, cell: Cell) -> list[Boot]:
        """Return the boots that count for ``cell``, oldest first.

        Raises:
            CannotFindOut: the snapshot is there and cannot be read.
        """
        gpu = self.gpu
        if gpu is None or cell.pins.device != "cuda":
            return []
        if self._all is None:
            self._all = read(self.snapshot)
        return [past.on(gpu) for past in self._all if past.counts_for(cell, gpu)]


def read(snapshot: Path) -> list[PastBoot]:
    """Return every profiled boot on a GPU in the snapshot; none where nothing is published.

    Raises:
        CannotFindOut: the snapshot cannot be read.
    """
    if not snapshot.is_file():
        return []
    from warehouse.query import run_sql

    rows = run_sql(snapshot, _QUERY).rows
    return [
        PastBoot(
            setting=json.loads(setting),
            pins=json.loads(pins),
            gpu_name=name,
            gpu_total_bytes=int(device_total),
            logged_total_bytes=None if logged is None else int(logged),
            loading_bytes=int(loading),
            available_bytes=int(available),
        )
        for setting, pins, name, device_total, logged, loading, available in rows
    ]
