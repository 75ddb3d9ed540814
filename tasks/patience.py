"""An upper limit for a wait that has none of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, ask: Callable[[], T], *, name: str) -> T:
    """Return what ``ask`` returns, or raise what it raises, if that takes at most so long.

    It runs in a thread called ``name``: httpx, for one, bounds every read but no whole answer, and
    a server can drip it. A thread left over dies with the process.

    Raises:
        TimeoutError: there is nothing yet.
    """
    told: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            told.put((ask(), None))
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            told.put((None, error))

    threading.Thread(target=work, name=name, daemon=True).start()
    try:
        answer, error = told.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"{name}: nothing within {seconds:.0f} s") from None
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]  # None only where ask returned it
