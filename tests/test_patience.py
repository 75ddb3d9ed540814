"""A wait with an upper limit: what is told, what is raised, and what comes too late."""

from __future__ import annotations

import threading

import pytest

from tasks.patience import within


def test_what_is_asked_in_time_is_returned_or_raised() -> None:
    assert within(30, lambda: 7, name="x") == 7
    assert within(30, lambda: None, name="x") is None

    def refused() -> int:
        raise KeyError("no")

    with pytest.raises(KeyError):
        within(30, refused, name="x")


def test_what_takes_longer_is_not_waited_for() -> None:
    over = threading.Event()
    with pytest.raises(TimeoutError, match="x: nothing within 0 s"):
        within(0.05, over.wait, name="x")
    over.set()
