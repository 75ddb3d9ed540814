"""Is that process still the one we mean? A PID alone is not an identity: it is reused.

Linux only (``/proc``), as is everything that serves vLLM.
"""

from __future__ import annotations

from pathlib import Path


def start_ticks(pid: int) -> int | None:
    """Return when ``pid`` started in clock ticks since boot; ``None`` if gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name in parentheses may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def alive(pid: int, ticks: int | None) -> bool:
    """Return whether ``pid`` runs and, where ``ticks`` is known, is the process meant."""
    now = start_ticks(pid)
    return now is not None and (ticks is None or now == ticks)
