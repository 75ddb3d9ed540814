"""KV usage between two scrapes: a lower and an upper curve from the requests themselves.

A sampler that looks every 250 ms misses the moment when the pool was fullest. Start, first token,
every further token and end of each request are known, though, and so is the block rule: how many
blocks a request of so many stored tokens holds. From these follow a curve that usage never fell
below and one that it never exceeded. Where they meet, the peak is exact; where requests waited or
were preempted, they bound it.

What each request holds, and why (vLLM 0.27.0, v1/core/sched/scheduler.py, kv_cache_manager.py):

- Waiting, it holds nothing; blocks for its prompt are taken when it is scheduled, some time between
  its start and its first token. The lower curve counts them from the first token on, the upper one
  from the start.
- With ``j`` tokens out, ``prompt + j - 1`` are stored; the step that makes the next one takes a
  slot for the last. The last token is never stored.
- A preempted request holds nothing until it is scheduled again. With ``p`` preemptions at most
  ``p`` requests are out at once: the lower curve gives up the ``p`` largest.
- All together hold at most the pool's blocks but one (block 0 is never given out), and at most
  ``max_num_seqs`` requests hold any.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from tasks.capture.evalscope import Request
from tasks.capture.windows import Sample

Case = Literal["exact", "bounded"]


@dataclass(frozen=True, slots=True)
class UsageRequest:
    """What the curves need of a request, all times on one clock.

    ``token_s`` are the times at which chunks with tokens arrived, the first one included; fewer
    chunks than tokens mean that some held several. ``end_s`` is None for a request without an end:
    it may have held blocks for ever, and surely held none. So it is with ``prompt_tokens`` None, as
    nobody counted them.
    """

    start_s: float
    end_s: float | None
    prompt_tokens: int | None
    output_tokens: int
    token_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class UsageBounds:
    """Two step functions over one list of times: entry ``i`` holds from ``times[i]`` on.

    Counts are blocks; ratios divide by ``denominator``, as vllm:kv_cache_usage_perc does. ``case``
    is ``exact`` when both peaks are equal: usage reached the one and never exceeded the other. So
    it is where nothing waits and nothing is preempted, but for a block taken at an unknown moment.
    """

    times: tuple[float, ...]
    lower: tuple[int, ...]
    upper: tuple[int, ...]
    denominator: int
    case: Case
    reason: str

    @property
    def peak_lower_ratio(self) -> float:
        """The highest usage that surely occurred."""
        return max(self.lower, default=0) / self.denominator

    @property
    def peak_upper_ratio(self) -> float:
        """The highest usage that may have occurred."""
        return max(self.upper, default=0) / self.denominator

    def between(self, start_s: float, end_s: float) -> tuple[float, float]:
        """Return the lowest lower and the highest upper ratio from ``start_s`` to ``end_s``."""
        first = max(0, bisect_right(self.times, start_s) - 1)
        last = max(first + 1, bisect_right(self.times, end_s))
        if not self.times or end_s < self.times[0]:
            return 0.0, 0.0
        low = min(self.lower[first:last])
        if start_s < self.times[0]:
            low = 0
        return low / self.denominator, max(self.upper[first:last]) / self.denominator


def from_requests(requests: Iterable[Request]) -> list[UsageRequest]:
    """Return what the curves need of EvalScope's requests.

    One that was not answered whole has no end and no prompt: nobody knows what it held.
    """
    found = []
    for request in requests:
        whole = request.whole and request.prompt_tokens is not None
        arrivals: tuple[float, ...] = ()
        if whole and request.first_token_s is not None:
            arrivals = tuple(accumulate((request.first_token_s, *request.inter_token_s)))
        found.append(
            UsageRequest(
                start_s=request.start_s,
                end_s=request.end_s if whole else None,
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.completion_tokens or 0,
                token_s=arrivals,
            )
        )
    return found


def usage_bounds(
    requests: Sequence[UsageRequest],
    *,
    blocks_of: Callable[[int], int],
    num_gpu_blocks: int,
    max_num_seqs: int | None = None,
    waited: bool,
    preemptions: int,
    largest_request_tokens: int | None = None,
    usage_excludes_null_block: bool = True,
) -> UsageBounds:
    """Return the lower and the upper usage curve of ``requests``.

    Args:
        requests: every request that ran in the window; one that is missing makes both too low.
        blocks_of: blocks that a request with so many stored tokens holds.
        num_gpu_blocks: blocks of the pool, the null block included.
        max_num_seqs: most requests that hold blocks at once, where known.
        waited: whether any request waited for a slot or for blocks; it explains a band, and does
            not change it: the times of first tokens tell already.
        preemptions: preemptions within the window.
        largest_request_tokens: what a request without an end may have stored at most; without it,
            one that has no end makes the upper curve the whole pool.
        usage_excludes_null_block: whether this version divides by the blocks but one (0.10.2 on).

    Raises:
        ValueError: the pool has no block to use.
    """
    usable = num_gpu_blocks - 1
    if usable < 1:
        raise ValueError(f"num_gpu_blocks: got {num_gpu_blocks}, wanted at least 2")
    tracks = [_track(request, blocks_of, largest_request_tokens, usable) for request in requests]
    times, lower, upper = _sweep(tracks, usable, max_num_seqs, preemptions)
    case: Case = "exact" if max(lower, default=0) == max(upper, default=0) else "bounded"
    return UsageBounds(
        times=tuple(times),
        lower=tuple(lower),
        upper=tuple(upper),
        denominator=usable if usage_excludes_null_block else num_gpu_blocks,
        case=case,
        reason=_reason(case, waited, preemptions),
    )


def _reason(case: Case, waited: bool, preemptions: int) -> str:
    if case == "exact":
        return "both curves peak alike"
    causes = []
    if waited:
        causes.append("requests waited")
    if preemptions:
        causes.append(f"{preemptions} preemptions")
    return " and ".join(causes) or "a block was taken between two chunks: the moment is not known"


@dataclass(frozen=True, slots=True)
class _Change:
    """From ``t_s`` on the request surely holds ``low`` and may hold ``high`` blocks."""

    t_s: float
    low: int
    high: int


def _track(
    request: UsageRequest,
    blocks_of: Callable[[int], int],
    largest: int | None,
    usable: int,
) -> list[_Change]:
    """Return how one request's holdings change."""
    prompt_tokens = request.prompt_tokens
    if prompt_tokens is None or request.end_s is None or not request.token_s:
        most = usable if largest is None else blocks_of(largest)
        changes = [_Change(request.start_s, 0, most)]
        if request.end_s is not None:
            changes.append(_Change(request.end_s, 0, 0))
        return changes
    changes = [_Change(request.start_s, 0, blocks_of(prompt_tokens))]
    chunks, tokens = len(request.token_s), request.output_tokens
    final = prompt_tokens + max(tokens, 1) - 1
    empty = max(0, chunks - tokens)  # chunks without a token: a role first, a usage last
    for index, t_s in enumerate(request.token_s):
        # Every chunk but the empty ones brought one token or more, and so do those to come.
        least = min(max(1, index + 1 - empty), tokens)
        most_tokens = min(tokens, max(index + 1, tokens - (chunks - 1 - index)))
        low = blocks_of(min(final, prompt_tokens + least - 1))
        high = blocks_of(min(final, prompt_tokens + most_tokens))
        if index == chunks - 1:
            low = 0  # the engine lets go when it has sampled the last token
        if (low, high) != (changes[-1].low, changes[-1].high):
            changes.append(_Change(t_s, low, high))
    changes.append(_Change(request.end_s, 0, 0))
    return changes


def _sweep(
    tracks: list[list[_Change]], usable: int, max_num_seqs: int | None, preemptions: int
) -> tuple[list[float], list[int], list[int]]:
    """Add the tracks up at every moment at which one of them changes."""
    events = sorted(
        (change.t_s, index, position)
        for index, changes in enumerate(tracks)
        for position, change in enumerate(changes)
    )
    held: dict[int, _Change] = {}
    times: list[float] = []
    lower: list[int] = []
    upper: list[int] = []
    low_sum = high_sum = 0
    for number, (t_s, index, position) in enumerate(events):
        old, new = held.get(index), tracks[index][position]
        low_sum += new.low - (old.low if old else 0)
        high_sum += new.high - (old.high if old else 0)
        if new.low or new.high:
            held[index] = new
        else:
            held.pop(index, None)
        if number + 1 < len(events) and events[number + 1][0] == t_s:
            continue
        low, high = low_sum, high_sum
        if preemptions and low:
            low -= sum(heapq.nlargest(preemptions, (change.low for change in held.values())))
        if max_num_seqs is not None and len(held) > max_num_seqs:
            high = sum(heapq.nlargest(max_num_seqs, (change.high for change in held.values())))
        times.append(t_s)
        lower.append(max(0, min(low, usable)))
        upper.append(min(high, usable))
    return times, lower, upper


@dataclass(frozen=True, slots=True)
class Outside:
    """How many samples lie between the curves, and those that do not."""

    inside: int
    outside: tuple[Sample, ...]


def outside(
    samples: Iterable[Sample], bounds: UsageBounds, *, slack_s: float, tolerance: float = 1e-9
) -> Outside:
    """Count the samples that no moment within ``slack_s`` of theirs allows.

    The gauge shows the last finished step, the client hears of a token after the server made it,
    and a scrape takes its time: a sample stands for a stretch around its stamp, not for an instant.
    Samples before the first and after the last request are not judged.
    """
    inside = 0
    wrong = []
    for sample in samples:
        if sample.value is None or not bounds.times:
            continue
        if sample.t_s < bounds.times[0] - slack_s or sample.t_s > bounds.times[-1] + slack_s:
            continue
        low, high = bounds.between(sample.t_s - slack_s, sample.t_s + slack_s)
        if low - tolerance <= sample.value <= high + tolerance:
            inside += 1
        else:
            wrong.append(sample)
    return Outside(inside, tuple(wrong))


def block_rule(groups: Sequence[tuple[str, int, int]]) -> Callable[[int], int]:
    """Return the block rule of KV groups given as (kind, block tokens, constant).

    Kinds: ``full`` takes ceil(tokens / block); ``state`` takes the constant, whatever the length;
    ``sliding`` takes as ``full`` does but at most the constant.

    Raises:
        ValueError: a kind is unknown or a block is not positive.
    """
    for kind, block, _ in groups:
        if kind not in ("full", "state", "sliding") or block < 1:
            raise ValueError(f"KV group: got {kind!r} with blocks of {block} tokens")

    def blocks_of(tokens: int) -> int:
        total = 0
        for kind, block, constant in groups:
            full = -(-tokens // block)
            if kind == "state":
                total += constant
            elif kind == "sliding":
                total += min(full, constant)
            else:
                total += full
        return total

    return blocks_of


def usage_at(bounds: UsageBounds, t_s: float) -> tuple[float, float]:
    """Return the lower and the upper ratio at one moment."""
    at = bisect_left(bounds.times, t_s + 1e-12) - 1
    if at < 0:
        return 0.0, 0.0
    return bounds.lower[at] / bounds.denominator, bounds.upper[at] / bounds.denominator
