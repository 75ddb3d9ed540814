"""One streamed request over the standard library's client."""

from __future__ import annotations

import http.client
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Outcome:
    """What EvalScope keeps of one request."""

    request: str
    start_time: float = 0.0
    completed_time: float = 0.0
    success: bool = False
    chunk_times: list[float] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None


def send(url: str, body: dict[str, Any], start_s: float) -> Outcome:
    """Send one request and follow its stream; a failure is a value, as in EvalScope."""
    text = json.dumps(body)
    outcome = Outcome(text, start_time=start_s)
    target = urlsplit(url)
    connection = http.client.HTTPConnection(target.hostname or "", target.port or 0, timeout=60)
    try:
        connection.request("POST", target.path, body=text.encode())
        response = connection.getresponse()
        if response.status != 200:
            raise OSError(f"HTTP {response.status}")
        for line in response:
            if line.startswith(b"data: {"):
                _take(outcome, json.loads(line[6:]))
        # As in EvalScope: a stream that ended is a success, whatever was in it, and without the
        # server's usage the tokens are counted from what came.
        if outcome.completion_tokens is None:
            came = len(outcome.chunk_times)
            outcome.prompt_tokens = body["max_tokens"] if came else 0
            outcome.completion_tokens = came
        outcome.success, outcome.completed_time = True, time.perf_counter()
    except (OSError, http.client.HTTPException, ValueError) as error:
        outcome.error = str(error)
        outcome.completed_time = 0.0
    finally:
        connection.close()
    return outcome


def _take(outcome: Outcome, event: dict[str, Any]) -> None:
    usage = event.get("usage")
    if usage:
        outcome.prompt_tokens = usage["prompt_tokens"]
        outcome.completion_tokens = usage["completion_tokens"]
    elif event.get("choices"):
        outcome.chunk_times.append(time.perf_counter())
        outcome.messages.append(event)
