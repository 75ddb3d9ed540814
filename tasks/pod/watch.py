"""Waiting that notices at once when the run is interrupted or the server goes.

Every wait of the run goes through here. A plain blocking call would see a dead server only when
its own timeout is over, and SIGTERM after that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tasks.pod.interrupt import Interrupt
from tasks.pod.server import Server

T = TypeVar("T")
POLL_S = 0.05


class Interrupted(Exception):
    """Somebody asked the run to end."""


class ServerGone(Exception):
    """The server went though nobody stopped it."""


class DeadlineOver(Exception):
    """What was waited for did not happen in time."""


@dataclass(frozen=True, slots=True)
class Watch:
    """The two things that end any wait."""

    interrupt: Interrupt
    server: Server

    def check(self) -> None:
        """Raise :class:`Interrupted` or :class:`ServerGone` if it is so."""
        if self.interrupt.pending:
            raise Interrupted(f"signal {self.interrupt.signal}")
        if not self.server.alive:
            raise ServerGone(f"exit code {self.server.exit_code}")

    def sleep(self, seconds: float) -> None:
        """Sleep, but not past an interrupt or the server's end."""
        end = time.monotonic() + seconds
        while True:
            self.check()
            left = end - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(POLL_S, left))

    def call(self, function: Callable[[], T], *, limit_s: float, what: str) -> T:
        """Run a blocking call in a thread of its own and wait for it; its exception is raised here.

        Raises :class:`DeadlineOver` after ``limit_s``; the thread is left behind as a daemon.
        """
        work = _Work(function)
        thread = threading.Thread(target=work.run, name=what, daemon=True)
        thread.start()
        deadline = time.monotonic() + limit_s
        while thread.is_alive():
            thread.join(POLL_S)
            if not thread.is_alive():
                break
            self.check()
            if time.monotonic() > deadline:
                raise DeadlineOver(f"{what}: no answer within {limit_s:.0f} s")
        if work.error is not None:
            raise work.error
        return work.result[0]


class _Work(Generic[T]):
    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self.result: list[T] = []
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.result.append(self._function())
        except Exception as error:  # noqa: BLE001 - raised again in the waiting thread
            self.error = error
