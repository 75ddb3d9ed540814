"""Is the configuration in force the one that was asked for?

vLLM changes settings on its own (it caps, resolves and falls back); a result must never be filed
under a configuration that did not run. Each check says wanted and got; what the server does not
tell is ``unknown``, not equal.
"""

from __future__ import annotations

from collections.abc import Mapping

from tasks.pod.argv import SERVED_NAME
from tasks.pod.inputs import Cell
from tasks.pod.readiness import model_entries

#: Setting -> label of vllm:cache_config_info that tells its effective value.
LABELS = {
    "block_size": "block_size",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "kv_cache_dtype": "cache_dtype",
    "kv_cache_memory_bytes": "kv_cache_memory_bytes",
    "enable_prefix_caching": "enable_prefix_caching",
}


def compare(
    cell: Cell, *, version: object, models: object, labels: Mapping[str, str] | None
) -> list[dict[str, object]]:
    """Return one check for each setting the server tells something about."""
    entry = next((e for e in model_entries(models) if e.get("id") == SERVED_NAME), {})
    told = version.get("version") if isinstance(version, dict) else None
    checks = [
        _check("served_name", SERVED_NAME, entry.get("id")),
        _check("max_model_len", cell.server.max_model_len, entry.get("max_model_len")),
        _check("engine_version", cell.engine_version, _release(told)),
    ]
    for setting, label in LABELS.items():
        wanted = getattr(cell.server, setting)
        checks.append(_check(setting, wanted, None if labels is None else labels.get(label)))
    return checks


def compare_model(cell: Cell, model: object) -> dict[str, object]:
    """Return the check of the model's files, as environment.json describes them, against the pin.

    A pin is a hash of the files, or a commit of a hub that the download has written down.
    ``unknown`` where it did not, or where a file is too large to be hashed before every start.
    """
    pinned = cell.model_revision
    held: object = model
    if pinned is not None and not pinned.startswith("sha256:"):
        held = model.get("fetched") if isinstance(model, dict) else None
    got = held.get("revision") if isinstance(held, dict) else None
    return _check("model_revision", pinned, got)


def mismatches(checks: list[dict[str, object]]) -> list[str]:
    """Return the checks that differ, as text."""
    return [
        f"{check['name']}: got {check['got']}, wanted {check['wanted']}"
        for check in checks
        if check["state"] == "differs"
    ]


def _check(name: str, wanted: object, got: object) -> dict[str, object]:
    if wanted is None or got is None:
        state = "unknown"  # left to vLLM, or not told by it
    else:
        state = "equal" if _same(wanted, got) else "differs"
    return {"name": name, "wanted": wanted, "got": got, "state": state}


def _same(wanted: object, got: object) -> bool:
    if isinstance(wanted, bool):
        return str(got).lower() == str(wanted).lower()
    if isinstance(wanted, int | float):
        try:
            return float(str(got)) == float(wanted)
        except ValueError:
            return False
    return str(wanted) == str(got)


def _release(version: object) -> str | None:
    """Return a version without its local part: ``0.27.0+cpu`` is 0.27.0."""
    return version.partition("+")[0] if isinstance(version, str) else None
