"""The labels of everything that is created on a cluster, so that ``kubectl`` finds and removes it.

Polyaxon sets name, instance, version, part-of, component and managed-by of ``app.kubernetes.io``
itself and would overwrite ours, so ours are others.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

#: On everything, also on what service.yaml and image.yaml create.
CREATED_BY = {"app.kubernetes.io/created-by": "memsweep"}
#: Selects all of it.
SELECTOR = ",".join(f"{key}={value}" for key, value in CREATED_BY.items())
MAX_LENGTH = 63

_VALUE = re.compile(r"^([A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?)?$")
_PREFIX = re.compile(r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$")
_HASH_DIGITS = 32


def of_target(target: str) -> dict[str, str]:
    """Return the labels of everything that a target's profile places."""
    return CREATED_BY | {"memsweep/target": value(target)}


def of_run(*, target: str, cell_key: str, setting_key: str, round_id: str | None) -> dict[str, str]:
    """Return the labels of a run; ``round_id`` is ``None`` where none is open yet."""
    found = of_target(target) | {
        "memsweep/cell": key(cell_key),
        "memsweep/setting": key(setting_key),
    }
    return found if round_id is None else found | {"memsweep/round": value(round_id)}


def key(sha256: str) -> str:
    """Return a key as a label: the whole one is longer than a label may be.

    The prefix also keeps digits from being read as a number on the way.
    """
    return f"sha256-{sha256[:_HASH_DIGITS]}"


def value(text: str) -> str:
    """Return any text as a label's value; what had to be changed ends with a part of its hash."""
    if is_value(text):
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[: MAX_LENGTH - len(digest) - 1]
    return f"{plain.strip('-_.')}-{digest}".lstrip("-")


def is_value(text: str) -> bool:
    """Tell whether Kubernetes takes ``text`` as a label's value."""
    return len(text) <= MAX_LENGTH and _VALUE.match(text) is not None


def is_key(text: str) -> bool:
    """Tell whether Kubernetes takes ``text`` as a label's key."""
    prefix, slash, name = text.rpartition("/")
    good_prefix = not slash or (len(prefix) <= 253 and _PREFIX.match(prefix) is not None)
    return bool(name) and is_value(name) and good_prefix


def problems(found: Mapping[str, object]) -> list[str]:
    """Return what Kubernetes would refuse of these labels."""
    return [
        f"{name}: {text}"
        for name, text in found.items()
        if not (is_key(name) and is_value(str(text)))
    ]
