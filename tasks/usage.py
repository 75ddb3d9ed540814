"""Usage between scrapes for one load point, as rows: two curves' peaks, and samples outside them.

A sampled peak is only what a scrape happened to see. What the requests say on top of it is derived,
stands beside it and never replaces it; where the requests cannot tell, there is a reason instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tasks.canonical import canonical_json
from tasks.capture import curves
from tasks.capture.curves import UsageBounds, UsageRequest
from tasks.capture.windows import Sample
from tasks.derived import Arithmetic

Row = dict[str, Any]
LOWER, UPPER = "peak_kv_usage_lower_ratio", "peak_kv_usage_upper_ratio"
CASE, OUTSIDE = "peak_kv_usage_case", "samples_outside_curves"
#: A sample stands for so much time around its stamp: the gauge shows the last finished step, and
#: client and scrape each hear of a step a little later than the engine made it.
SLACK_S = 0.15
_FORMULAS = {
    LOWER: "highest point of the usage that the requests surely reached",
    UPPER: "highest point of the usage that the requests never exceeded",
    CASE: "1: exact, both curves peak alike; 0: bounded by them",
    OUTSIDE: f"samples that no moment within {SLACK_S:g} s of theirs allows",
}


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a load point. ``preemptions`` and ``waited`` are None where unknown."""

    requests: Sequence[UsageRequest]
    sent: int | None
    samples: Sequence[Sample]
    blocks: int | None
    preemptions: float | None
    waited: bool | None
    prefix_caching: bool
    prefix_hits: float | None
    file: str


def rows(known: Known, arithmetic: Arithmetic) -> dict[str, Row]:
    """Return the four derived rows of a load point."""
    reason = _unknown(known)
    rule = None if reason or known.blocks is None else arithmetic.block_rule(known.blocks)
    if rule is None or known.blocks is None:
        why = reason or "the model's block arithmetic is not known"
        return {metric: _row(metric, None, {}, why) for metric in _FORMULAS}
    bounds = curves.usage_bounds(
        known.requests,
        blocks_of=rule.blocks_of,
        num_gpu_blocks=known.blocks,
        max_num_seqs=rule.max_num_seqs,
        waited=bool(known.waited),
        preemptions=int(known.preemptions or 0),
        largest_request_tokens=arithmetic.longest_request_tokens,
        usage_excludes_null_block=rule.usage_excludes_null_block,
    )
    inputs: Row = {
        "requests": len(known.requests),
        "num_gpu_blocks": known.blocks,
        "max_num_seqs": rule.max_num_seqs,
        "preemptions": known.preemptions,
        "waited": known.waited,
        "because": bounds.reason,
        "file": known.file,
    }
    found = {UPPER: _row(UPPER, bounds.peak_upper_ratio, inputs)}
    if known.preemptions is None:
        # Any request may have been out at any time: only the upper curve is sure.
        why = "preemptions within the window are not known"
        return found | {
            metric: _row(metric, None, inputs, why) for metric in (LOWER, CASE, OUTSIDE)
        }
    found[LOWER] = _row(LOWER, bounds.peak_lower_ratio, inputs)
    found[CASE] = _row(CASE, 1.0 if bounds.case == "exact" else 0.0, inputs)
    found[OUTSIDE] = _outside(known, bounds)
    return found


def _unknown(known: Known) -> str | None:
    """Return why no curve can be drawn, or None where one can."""
    if not known.requests:
        return "no request of this load point is on record"
    if known.sent is not None and known.sent != len(known.requests):
        return f"{len(known.requests)} of {known.sent} sent requests are on record"
    if known.blocks is None or known.blocks < 2:
        return "the number of blocks: not known"
    if known.prefix_caching and known.prefix_hits != 0:
        hits = "an unknown number of" if known.prefix_hits is None else f"{known.prefix_hits:g}"
        return f"requests share blocks: {hits} tokens hit the prefix cache"
    return None


def _outside(known: Known, bounds: UsageBounds) -> Row:
    judged = curves.outside(known.samples, bounds, slack_s=SLACK_S)
    count = judged.inside + len(judged.outside)
    inputs: Row = {"samples": count, "slack_s": SLACK_S, "file": known.file}
    if not count:
        return _row(OUTSIDE, None, inputs, "no sample of KV usage within the window")
    return _row(OUTSIDE, float(len(judged.outside)), inputs)


def _row(metric: str, value: float | None, inputs: Row, reason: str | None = None) -> Row:
    return {
        "value": value,
        "formula": _FORMULAS[metric],
        "inputs": canonical_json(inputs),
        "reason": reason,
    }
