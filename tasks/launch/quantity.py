"""Kubernetes quantities (``8``, ``500m``, ``32Gi``) as numbers.

Polyaxon passes any text on: a misspelt one would be found by the cluster only, hours later in a
queue. Source: Kubernetes' API reference, resource.Quantity.
"""

from __future__ import annotations

import re
from decimal import Decimal

_QUANTITY = re.compile(
    r"^(?P<number>\d+(?:\.\d*)?|\.\d+)(?P<suffix>[numkMGTPE]|[KMGTPE]i|[eE][+-]?\d{1,3})?$"
)
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}


def parse(value: object) -> Decimal:
    """Return a quantity in its base unit (bytes, cores, pieces).

    Raises:
        ValueError: it is none, or it is negative; the text says what was wanted.
    """
    match = None if isinstance(value, bool) else _QUANTITY.match(str(value))
    if match is None:
        raise ValueError(f"got {value!r}, wanted a Kubernetes quantity such as 8, 500m or 32Gi")
    number, suffix = Decimal(match["number"]), match["suffix"] or ""
    if suffix in _BINARY:
        return number * Decimal(1024) ** _BINARY[suffix]
    if suffix in _DECIMAL:
        return number.scaleb(_DECIMAL[suffix])
    return number.scaleb(int(suffix[1:]))


def is_whole_only(resource: str) -> bool:
    """Tell whether a resource (``nvidia.com/gpu``) is given out in whole pieces only."""
    return "/" in resource and not resource.startswith("kubernetes.io/")
