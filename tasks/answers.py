"""Which requests of EvalScope's database were answered whole, and which requests were sent.

EvalScope calls every stream under HTTP status 200 a success. An engine that dies ends its streams
with an error event under that status, so all of them are called successful, and because no usage
came EvalScope counts their tokens itself: 512 where the server counted 518, and as many output
tokens as the cut text makes. The run counts answers while it goes on and the parsers count them
again from the bundle; both take the rule from here. Standard library only.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Iterable

from tasks.canonical import canonical_json

#: How a whole answer ends, as a pickle writes such a text (short and long form).
_ENDINGS = tuple(
    head + reason
    for reason in (b"length", b"stop")
    for head in (b"\x8c" + bytes([len(reason)]), b"X" + len(reason).to_bytes(4, "little"))
)
_PICKLE = b"\x80"


def ended(messages: object) -> bool | None:
    """Return whether an answer's chunks hold a finish reason, None where that cannot be told.

    ``messages`` is the column ``response_messages``: a pickle in base64. It is never loaded, only
    looked through for the one text that every whole answer ends with.
    """
    if not isinstance(messages, str | bytes) or not messages:
        return None
    try:
        held = base64.b64decode(messages)
    except (binascii.Error, ValueError):
        return None
    if not held.startswith(_PICKLE):
        return None
    return any(ending in held for ending in _ENDINGS)


def whole(
    *, success: object, prompt: object, output: object, messages: object, answer_tokens: int
) -> bool:
    """Return whether a request was answered whole: with ``answer_tokens`` tokens, to its end.

    ``success``, ``prompt``, ``output`` and ``messages`` are the database's columns ``success``,
    ``prompt_tokens``, ``completion_tokens`` and ``response_messages``.
    """
    return (
        success in (1, "1", "true", "True")
        and _number(prompt) > 0
        and _number(output) >= max(1, answer_tokens)
        and ended(messages) is not False
    )


def answer_tokens(*, output_tokens: int, ignore_eos: bool) -> int:
    """Return how many tokens a whole answer has at least."""
    return output_tokens if ignore_eos else 1


def requests_sha256(bodies: Iterable[object]) -> str | None:
    """Return the sha256 of the requests ``bodies`` in the order they were sent, None without one.

    A body is the JSON text that was sent. It is hashed in canonical form, one line a request, so
    that equal requests are equal whoever wrote them.
    """
    digest, count = hashlib.sha256(), 0
    for body in bodies:
        if not isinstance(body, str) or not body:
            return None
        try:
            text = canonical_json(json.loads(body))
        except (ValueError, RecursionError):
            text = body
        digest.update(text.encode("utf-8", "surrogatepass") + b"\n")
        count += 1
    return digest.hexdigest() if count else None


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return float(value)
