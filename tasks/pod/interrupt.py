"""SIGTERM, SIGINT and SIGHUP as a plain flag.

A signal handler that raises would tear the clean-up apart, and one that sets a
``threading.Event`` can deadlock with the main thread that waits on it. The main thread looks at
the flag every few tens of milliseconds instead.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupt:
    """Whether somebody asked the run to end, and with which signal."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def install(self) -> Interrupt:
        """Take over the signals; call it once, in the main thread, first of all."""
        for number in SIGNALS:
            signal.signal(number, self._received)
        return self

    def _received(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = number

    @property
    def pending(self) -> bool:
        """Whether a signal has arrived."""
        return self.signal is not None


def read_reason(path: Path | None) -> dict[str, object] | None:
    """Return what the supervisor wrote before its signal, or ``None``; never raises."""
    if path is None:
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
