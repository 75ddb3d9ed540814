"""Was everything given back? What stop.json says beside the three states it was judged from."""

from __future__ import annotations

from collections.abc import Mapping

#: Other programs of the machine come and go too; an engine that stayed holds more than this.
MEMORY_TOLERANCE_BYTES = 512 << 20
GPU_TOLERANCE_BYTES = 256 << 20


def judge(before: Mapping[str, object], after: Mapping[str, object]) -> dict[str, object]:
    """Return the judgements on the states before start and after stop; None: cannot be told.

    ``memory_back`` is about the whole machine's memory, so on one that does other work it informs
    and proves nothing. ``gpu_memory_back`` holds for every device that was seen at both times.
    """
    listening = after.get("port_listening")
    return {
        "port_free": None if listening is None else not listening,
        "memory_back": _back(
            after.get("mem_available_bytes"),
            before.get("mem_available_bytes"),
            MEMORY_TOLERANCE_BYTES,
        ),
        "memory_tolerance_bytes": MEMORY_TOLERANCE_BYTES,
        "gpu_memory_back": _gpus_back(before.get("gpu_used_bytes"), after.get("gpu_used_bytes")),
        "gpu_memory_tolerance_bytes": GPU_TOLERANCE_BYTES,
    }


def _back(larger: object, smaller: object, tolerance: int) -> bool | None:
    """Tell whether ``larger`` falls short of ``smaller`` by no more than ``tolerance``."""
    if not isinstance(larger, int) or not isinstance(smaller, int):
        return None
    return smaller - larger <= tolerance


def _gpus_back(before: object, after: object) -> bool | None:
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return None
    found = [_back(used, after.get(uuid), GPU_TOLERANCE_BYTES) for uuid, used in before.items()]
    told = [one for one in found if one is not None]
    return all(told) if told else None
