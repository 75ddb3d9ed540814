"""The closed loop: ``parallel`` requests in flight, one phase for warm-up, one for measuring."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from evalscope.perf.request import Outcome, send  # type: ignore[import-not-found]


class ClosedLoopStrategy:
    """Carries the one private method that the run hooks, under its real signature."""

    def __init__(
        self, arguments: dict[str, Any], collect: list[Outcome], *, hold_s: float = 0.0
    ) -> None:
        self.arguments = arguments
        self.collect = collect
        self.hold_s = hold_s

    async def run(self, requests: list[dict[str, Any]], warmup: int) -> None:
        """Run both phases, as EvalScope does."""
        if warmup:
            await self._run_phase(requests[:warmup], is_warmup=True, deadline=None)
        await self._run_phase(requests[warmup:], is_warmup=False, deadline=None)

    async def _run_phase(
        self, requests: list[dict[str, Any]], is_warmup: bool, deadline: float | None = None
    ) -> None:
        del deadline
        loop = asyncio.get_running_loop()
        waiting, turn = iter(requests), threading.Lock()

        def send_next() -> Outcome:
            with turn:  # EvalScope's one thread sends in order and stamps in order
                request, start_s = next(waiting), time.perf_counter()
            return send(self.arguments["url"], request, start_s)

        with ThreadPoolExecutor(self.arguments["parallel"]) as pool:
            sending = [loop.run_in_executor(pool, send_next) for _ in requests]
            if not is_warmup:
                time.sleep(self.hold_s)
            outcomes = await asyncio.gather(*sending)
        if not is_warmup:
            self.collect.extend(outcomes)
