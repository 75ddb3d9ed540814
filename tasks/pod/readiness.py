"""Is the server really ready? Health, models, then one completion, all kept as sent and answered.

A healthy server can still die on its first request (a kernel that does not support the model),
and one that thinks or answers under another name would be measured as something it is not.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tasks.pod.argv import SERVED_NAME
from tasks.pod.client import HTTP_ERRORS, Client, Reply
from tasks.pod.outputs import Outputs
from tasks.pod.watch import DeadlineOver, Watch

POLL_S = 0.2
_HEALTH_TIMEOUT_S = 5.0
_MAX_TOKENS = 8

REQUEST: dict[str, object] = {
    "model": SERVED_NAME,
    "messages": [{"role": "user", "content": "Say hello."}],
    "max_tokens": _MAX_TOKENS,
    "temperature": 0.0,
    "stream": False,
    "chat_template_kwargs": {"enable_thinking": False},
}


class NotReady(Exception):
    """The server lives but is not what was asked for, or too slow."""


@dataclass
class Readiness:
    """Takes the steps in order and writes readiness.json after each."""

    port: int
    outputs: Outputs
    watch: Watch
    found: dict[str, object] = field(default_factory=dict)

    def wait_healthy(self, limit_s: float) -> None:
        """Poll /health until 200, then look at /v1/models.

        Raises :class:`NotReady` after ``limit_s`` or for a wrong answer, and what
        :class:`~tasks.pod.watch.Watch` raises.
        """
        start = time.monotonic()
        polls, last = 0, "no answer yet"
        while True:
            self.watch.check()
            polls += 1
            reply, problem = self._get("/health")
            if reply is not None and reply.status == 200:
                break
            last = problem or f"HTTP {reply.status if reply else None}"
            if time.monotonic() - start > limit_s:
                self._keep("health", {"status": None, "polls": polls, "last": last})
                raise NotReady(f"/health: {last} after {limit_s:.0f} s, wanted 200")
            self.watch.sleep(POLL_S)
        self._keep("health", {"status": 200, "seconds": time.monotonic() - start, "polls": polls})
        self._check_models()

    def _check_models(self) -> None:
        reply, problem = self._get("/v1/models")
        answer = None if reply is None else reply.json()
        self._keep("models", {"status": reply.status if reply else None, "response": answer})
        names = model_names(answer)
        if SERVED_NAME not in names:
            raise NotReady(f"/v1/models: got {problem or names}, wanted {SERVED_NAME!r}")

    def complete(self, limit_s: float) -> None:
        """Send one completion with thinking off and check alias, finish, usage and reasoning.

        Raises :class:`NotReady` naming the failed checks, :class:`~tasks.pod.watch.ServerGone`
        when the request killed the server.
        """
        entry: dict[str, object] = {"request": REQUEST, "response": None, "status": None}
        self._keep("completion", entry)
        start = time.monotonic()
        try:
            reply = self.watch.call(
                lambda: Client(self.port).post(
                    "/v1/chat/completions", REQUEST, timeout_s=limit_s + _HEALTH_TIMEOUT_S
                ),
                limit_s=limit_s,
                what="/v1/chat/completions",
            )
        except DeadlineOver as error:
            raise NotReady(str(error)) from error
        except HTTP_ERRORS as error:
            # The connection breaks a moment before the process is gone: give it that moment.
            self.watch.sleep(2.0)
            raise NotReady(f"/v1/chat/completions: {type(error).__name__}: {error}") from error
        answer = reply.json()
        checks = completion_checks(reply.status, answer)
        kept = answer if answer is not None else reply.body.decode(errors="replace")[:4000]
        entry |= {"status": reply.status, "seconds": time.monotonic() - start}
        self._keep("completion", entry | {"response": kept, "checks": checks})
        failed = [name for name, good in checks.items() if not good]
        if failed:
            if reply.status >= 500:
                self.watch.sleep(2.0)  # an engine that died answers 500 before the server goes
            raise NotReady(f"/v1/chat/completions: failed checks: {', '.join(failed)}")

    def _get(self, path: str) -> tuple[Reply | None, str | None]:
        client = Client(self.port)
        try:
            reply = self.watch.call(
                lambda: client.get(path, timeout_s=_HEALTH_TIMEOUT_S),
                limit_s=_HEALTH_TIMEOUT_S + 1,
                what=path,
            )
        except (DeadlineOver, *HTTP_ERRORS) as error:
            return None, f"{type(error).__name__}: {error}"
        finally:
            client.close()
        return reply, None

    def _keep(self, name: str, value: dict[str, object]) -> None:
        self.found[name] = value
        self.outputs.write("readiness.json", self.found)


def model_names(answer: object) -> list[str]:
    """Return the model ids of a /v1/models answer."""
    return [str(entry["id"]) for entry in model_entries(answer) if "id" in entry]


def model_entries(answer: object) -> list[dict[str, object]]:
    """Return the entries of a /v1/models answer; empty when it is not one."""
    data = answer.get("data") if isinstance(answer, dict) else None
    return [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []


def completion_checks(status: int, answer: object) -> dict[str, bool]:
    """Return what must hold of the one completion, each by name."""
    document = answer if isinstance(answer, dict) else {}
    choices = document.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else {}
    choice = choice if isinstance(choice, dict) else {}
    message = choice.get("message")
    message = message if isinstance(message, dict) else {}
    content = message.get("content")
    return {
        "status": status == 200,
        "alias": document.get("model") == SERVED_NAME,
        "finish_reason": choice.get("finish_reason") in ("stop", "length"),
        "usage": _usage_adds_up(document.get("usage")),
        "no_reasoning": bool(message)
        and not message.get("reasoning_content")
        and not message.get("reasoning")
        and "<think>" not in (content if isinstance(content, str) else ""),
    }


def _usage_adds_up(usage: object) -> bool:
    if not isinstance(usage, dict):
        return False
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    return (
        isinstance(prompt, int)
        and isinstance(completion, int)
        and prompt > 0
        and 0 < completion <= _MAX_TOKENS
        and usage.get("total_tokens") == prompt + completion
    )
