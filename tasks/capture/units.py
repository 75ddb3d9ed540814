"""Printed sizes and counts to exact integers, with the interval that rounding leaves open.

vLLM prints GiB with two decimals and drops trailing zeros, so "34.3 GiB" stands for anything from
34.295 to 34.305. A number without that interval looks more exact than it is.
"""

from __future__ import annotations

import math

KIB = 1024
MIB = 1024**2
GIB = 1024**3
UNITS: dict[str, int] = {
    "bytes": 1,
    "byte": 1,
    "B": 1,
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
    "TiB": 1024**4,
    "GB": GIB,  # vLLM before 0.8 divided by 2**30 and printed GB
}


def decimals(printed: str) -> int:
    """Return the number of digits behind the point of ``printed``."""
    return len(printed.partition(".")[2])


def to_bytes(printed: str, unit: str = "GiB") -> int:
    """Return ``printed`` ``unit`` in bytes, cut to a whole byte.

    Raises:
        ValueError: ``printed`` is no number or ``unit`` is unknown.
    """
    if unit not in UNITS:
        raise ValueError(f"unit of size: got {unit!r}, wanted one of {', '.join(UNITS)}")
    return int(float(printed.replace(",", "")) * UNITS[unit])


def byte_interval(printed: str, unit: str = "GiB") -> tuple[int, int, int]:
    """Return ``printed`` ``unit`` in bytes with the lowest and highest value that prints so.

    Two decimals are the coarsest that vLLM rounds to: a shorter number has lost its zeros.
    """
    number = float(printed)
    half = 0.5 * 10.0 ** -max(2, decimals(printed)) if UNITS[unit] > 1 else 0.0
    size = UNITS[unit]
    return (
        int(number * size),
        math.floor((number - half) * size),
        math.ceil((number + half) * size),
    )


def interval(printed: str) -> tuple[float, float, float]:
    """Return ``printed`` as a number with the lowest and highest value that rounds to it."""
    number = float(printed)
    half = 0.5 * 10.0 ** -decimals(printed)
    digits = decimals(printed) + 1
    return number, round(number - half, digits), round(number + half, digits)


def count(printed: str) -> int:
    """Return a whole number that may carry thousands separators."""
    return int(printed.replace(",", "").replace("_", ""))
