"""vLLM's block allocator and scheduler limits, exact for one engine without prefix caching.

Follows ``vllm/v1/core/sched/scheduler.py`` (0.27): running requests first, each step at most
``max_num_batched_tokens`` tokens, a request that gets no block preempts the last running one, a
waiting request is admitted only when its whole prompt fits the free blocks and nothing was
preempted in the step. One block is the null block: usage divides by blocks - 1.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field


@dataclass
class Request:
    """One request: ``computed`` of its tokens are in the cache, ``output`` of them generated."""

    name: str
    prompt: int
    max_output: int
    output: int = 0
    computed: int = 0
    blocks: int = 0
    preempted: int = 0

    @property
    def tokens(self) -> int:
        """Tokens there are now: prompt and what was generated."""
        return self.prompt + self.output

    @property
    def finished(self) -> bool:
        """Whether all output was generated."""
        return self.output >= self.max_output


@dataclass
class Scheduler:
    """The pool and the two queues; :meth:`step` is one engine step."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    state_blocks: int = 0  # per request, one for each mamba group
    running: list[Request] = field(default_factory=list)
    waiting: deque[Request] = field(default_factory=deque)
    used: int = 0
    preemptions: int = 0

    @property
    def usable(self) -> int:
        """Blocks that requests can have."""
        return self.num_blocks - 1

    @property
    def usage(self) -> float:
        """vLLM's kv_cache_usage_perc, 0..1."""
        return self.used / self.usable

    def need(self, tokens: int) -> int:
        """Blocks of a request of ``tokens`` tokens."""
        return math.ceil(tokens / self.block_size) + self.state_blocks

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def drop(self, request: Request) -> None:
        """Forget a request, as when its client went."""
        if request in self.running:
            self.running.remove(request)
            self._free(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def step(self) -> list[Request]:
        """Run one step; returns the requests that got a token."""
        budget = self.max_num_batched_tokens
        scheduled: list[tuple[Request, int]] = []
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            new = min(request.tokens - request.computed, budget)
            if new <= 0:
                index += 1
                continue
            while not self._allocate(request, request.computed + new):
                preempted = True
                victim = self.running.pop()
                self._preempt(victim)
                if victim is request:
                    break
            if request not in self.running:
                break
            scheduled.append((request, new))
            budget -= new
            index += 1
        while not preempted and self.waiting and budget > 0:
            if len(self.running) >= self.max_num_seqs:
                break
            request = self.waiting[0]
            new = min(request.tokens - request.computed, budget)
            if self.need(request.tokens) > self.usable - self.used:
                break
            self._allocate(request, request.computed + new)
            self.running.append(self.waiting.popleft())
            scheduled.append((request, new))
            budget -= new
        return self._advance(scheduled)

    def _advance(self, scheduled: list[tuple[Request, int]]) -> list[Request]:
        sampled: list[Request] = []
        for request, new in scheduled:
            if request not in self.running:
                continue  # preempted after it was scheduled
            request.computed += new
            if request.computed == request.tokens:
                request.output += 1
                sampled.append(request)
                if request.finished:
                    self.running.remove(request)
                    self._free(request)
        return sampled

    def _allocate(self, request: Request, tokens: int) -> bool:
        wanted = self.need(tokens) - request.blocks
        if wanted > self.usable - self.used:
            return False
        request.blocks += max(0, wanted)
        self.used += max(0, wanted)
        return True

    def _preempt(self, request: Request) -> None:
        self._free(request)
        request.computed = 0
        request.preempted += 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    def _free(self, request: Request) -> None:
        self.used -= request.blocks
        request.blocks = 0
