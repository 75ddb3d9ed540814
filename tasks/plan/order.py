"""The order in which a plan's runs are started, by the keys of their cells; pure.

A machine drifts over a night (temperature, neighbours, caches that fill): repeats of a cell that
follow each other would all see the same hour and their spread would tell nothing of the drift.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

#: Start, middle and end: fewer values of the sentinel say nothing of a drift.
SENTINEL_REPEATS = 3

#: A cell's key and the number of the repeat, from 1.
Turn = tuple[str, int]


def interleaved(
    keys: Sequence[str], repeats: int, *, seed: int | None = None, lines: Iterable[list[str]] = ()
) -> list[Turn]:
    """Return every repeat of every cell, repeat 1 of all cells before repeat 2 of any.

    Within each repeat cells are shuffled by ``seed``, always the same way; ``None`` keeps the order
    of ``keys``. A cell never follows itself where another one could stand between. Cells of one of
    ``lines`` (along the axis of a frontier, by rising value) take their places in the order of
    :func:`bisection`.
    """
    lines = list(lines)
    turns: list[Turn] = []
    for repeat in range(1, repeats + 1):
        block = list(keys) if seed is None else shuffled(keys, f"{seed}:{repeat}")
        for line in lines:
            _bisect(block, line)
        if turns and len(block) > 1 and turns[-1][0] == block[0]:
            block[:2] = block[1::-1]
        turns += ((key, repeat) for key in block)
    return turns


def shuffled(keys: Iterable[str], salt: str) -> list[str]:
    """Return keys in an order that depends on ``salt`` and the keys alone, on every Python."""
    return sorted(keys, key=lambda key: hashlib.sha256(f"{salt}:{key}".encode()).digest())


def _bisect(block: list[str], line: list[str]) -> None:
    wanted = set(line)
    places = [place for place, key in enumerate(block) if key in wanted]
    for place, index in zip(places, bisection(len(line)), strict=True):
        block[place] = line[index]


def bisection(count: int) -> list[int]:
    """Return ``range(count)`` so that each index halves what lies between two earlier ones.

    Measured in this order, leaving out what earlier outcomes settle, a frontier is bisected: both
    ends, the middle, then only quarters of the half that holds the frontier.
    """
    if count < 3:
        return list(range(count))
    order, gaps = [0, count - 1], [(0, count - 1)]
    while gaps:
        halves = []
        for low, high in gaps:
            if high - low > 1:
                middle = (low + high) // 2
                order.append(middle)
                halves += [(low, middle), (middle, high)]
        gaps = halves
    return order


def around(others: Sequence[Turn], sentinel: str, repeats: int) -> Iterator[Turn]:
    """Yield ``others`` with the sentinel first, in the middle and last.

    ``repeats`` (at least :data:`SENTINEL_REPEATS`) of it are spread evenly over the two halves.
    """
    before = [_place(repeat, repeats, len(others)) for repeat in range(repeats)]
    repeat = 0
    for index in range(len(others) + 1):
        while repeat < repeats and before[repeat] == index:
            repeat += 1
            yield sentinel, repeat
        if index < len(others):
            yield others[index]


def _place(repeat: int, repeats: int, others: int) -> int:
    """Return how many of ``others`` come before one repeat of the sentinel, counted from 0."""
    middle, half = repeats // 2, others // 2
    if repeat <= middle:
        return half * repeat // middle
    return half + (others - half) * (repeat - middle) // (repeats - 1 - middle)
