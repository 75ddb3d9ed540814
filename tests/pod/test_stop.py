"""What is judged of the states before start and after stop."""

from __future__ import annotations

import pytest

from tasks.pod.stop import GPU_TOLERANCE_BYTES, MEMORY_TOLERANCE_BYTES, judge


def test_a_port_that_listens_is_not_free() -> None:
    assert judge({}, {"port_listening": True})["port_free"] is False
    assert judge({}, {"port_listening": False})["port_free"] is True
    assert judge({}, {})["port_free"] is None


@pytest.mark.parametrize(
    ("before", "after", "back"),
    [
        (10 << 30, 10 << 30, True),
        (10 << 30, 11 << 30, True),
        (10 << 30, (10 << 30) - MEMORY_TOLERANCE_BYTES, True),
        (10 << 30, (10 << 30) - MEMORY_TOLERANCE_BYTES - 1, False),
        (None, 10 << 30, None),
        (10 << 30, None, None),
    ],
)
def test_memory_is_back_within_the_tolerance(
    before: int | None, after: int | None, back: bool | None
) -> None:
    told = judge({"mem_available_bytes": before}, {"mem_available_bytes": after})
    assert told["memory_back"] is back
    assert told["memory_tolerance_bytes"] == MEMORY_TOLERANCE_BYTES


@pytest.mark.parametrize(
    ("before", "after", "back"),
    [
        ({"a": 0, "b": 0}, {"a": GPU_TOLERANCE_BYTES, "b": 0}, True),
        ({"a": 0, "b": 0}, {"a": GPU_TOLERANCE_BYTES + 1, "b": 0}, False),
        ({"a": 0, "b": None}, {"a": 0, "b": 1 << 40}, True),
        ({"a": None}, {"a": 0}, None),
        (None, None, None),
    ],
)
def test_every_gpu_gives_its_memory_back(
    before: dict[str, int | None] | None, after: dict[str, int | None] | None, back: bool | None
) -> None:
    told = judge({"gpu_used_bytes": before}, {"gpu_used_bytes": after})
    assert told["gpu_memory_back"] is back
