"""Do the numbers of a run come back? New ones against old ones, by what is known of the noise.

A number is judged by the strictest rule that applies: exact arithmetic must be equal; what a log
rounds must meet within the rounding; everything else is within the spread that earlier runs, or the
sentinel of their round, showed. Where nothing tells how much a number varies, the answer is that it
cannot be told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, variance
from typing import TYPE_CHECKING, Any

from tasks.plan.calibration import BOOT_SPREAD_RATIO
from warehouse.lookup import records
from warehouse.noise import Floors, floors
from warehouse.registry import EXACT, LOAD_POINT, STARTUP

if TYPE_CHECKING:
    import duckdb

#: Of each judged number; a run has dozens, and one in twenty would be a false alarm every time.
CONFIDENCE = 0.999
#: A limit wider than this share of the number would call anything reproduced.
WIDEST_RATIO = 0.5

#: Follow from the size of a pool that memory profiling found, which differs from boot to boot.
_OF_THE_POOL = frozenset(
    {"kv_cache_size_tokens", "num_gpu_blocks", "max_concurrency", "available_kv_cache_bytes"}
)
#: Say something about the machine's state before the run, not about the cell.
_OF_THE_MACHINE = frozenset({"available_memory_bytes", "initial_free_bytes"})
#: Checks of the measurement, not its results; the peak's bounds are the sampled peak's interval.
_OF_THE_HARNESS = frozenset(
    {
        "client_lag_p50_s",
        "client_lag_p99_s",
        "client_lag_max_s",
        "samples_outside_curves",
        "peak_kv_usage_case",
        "peak_kv_usage_lower_ratio",
        "peak_kv_usage_upper_ratio",
    }
)
#: Depend on the moment (who came first, what else the machine did), as every time and rate does.
_OF_THE_MOMENT = frozenset({"preemptions", "peak_requests_waiting", "peak_process_rss_bytes"})
_TIME_UNITS = frozenset({"s", "ms", "tokens/s"})

Key = tuple[int | None, str]


class Answer(StrEnum):
    """Whether a number, or a run, came back."""

    REPRODUCED = "reproduced"
    NOT = "not reproduced"
    UNKNOWN = "cannot tell"


@dataclass(frozen=True, slots=True)
class Number:
    """One measured number with the interval that its rounding, or its sampling, leaves."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Noise:
    """What is known of how much a number varies without cause."""

    #: All earlier runs of the cell on this class of hardware, the original among them.
    earlier: Sequence[Number]
    #: Rounds these runs are of: within one, how nights differ is not seen.
    rounds: int
    #: Spread of the rounds' sentinels; ``None``: none was measured.
    floor: float | None


@dataclass(frozen=True, slots=True)
class Judged:
    """One number of the run and of its reproduction."""

    load_point: int | None
    metric: str
    old: float | None
    new: float | None
    answer: Answer
    why: str

    @property
    def may_stay_open(self) -> bool:
        """Whether it depends on the moment: not knowing its noise leaves the memory's answer."""
        metric = STARTUP.get(self.metric) or LOAD_POINT.get(self.metric)
        return self.metric in _OF_THE_MOMENT or metric is None or metric.unit in _TIME_UNITS

    def document(self) -> dict[str, object]:
        """Return it as JSON values."""
        return {
            "load_point": self.load_point,
            "metric": self.metric,
            "old": self.old,
            "new": self.new,
            "verdict": self.answer.value,
            "why": self.why,
        }


def judge(
    metric: str, old: Number, new: Sequence[Number], noise: Noise, *, profiled: bool
) -> tuple[Answer, str]:
    """Return whether ``new`` is ``old`` again, and by which rule.

    ``profiled`` says that the engine sized its KV pool itself, so that the pool's figures may vary.
    """
    mean = fmean(number.value for number in new)
    if metric in EXACT and not (profiled and metric in _OF_THE_POOL):
        same = all(number.value == old.value for number in new)
        return (Answer.REPRODUCED, "equal") if same else (Answer.NOT, "exact, and not equal")
    if all(number.value == old.value for number in new):
        return Answer.REPRODUCED, "equal"
    if all(number.low <= old.high and old.low <= number.high for number in new):
        return Answer.REPRODUCED, "the same within its rounding or sampling"
    low = min(number.low for number in noise.earlier)
    high = max(number.high for number in noise.earlier)
    if len(noise.earlier) > 1 and low <= mean <= high:
        return Answer.REPRODUCED, f"within the range of {len(noise.earlier)} earlier runs"
    return _by_noise(metric, old, mean, len(new), noise, profiled=profiled)


def _by_noise(
    metric: str, old: Number, mean: float, count: int, noise: Noise, *, profiled: bool
) -> tuple[Answer, str]:
    difference = abs(mean - old.value)
    limits = {}
    if noise.floor is not None:
        limits["the sentinel's spread"] = noise.floor
    if profiled and metric in _OF_THE_POOL:
        limits["what two boots differ by"] = BOOT_SPREAD_RATIO * abs(old.value)
    if len(noise.earlier) > 1:
        limits[f"the noise of {len(noise.earlier)} runs"] = _limit(noise.earlier, count)
    if not limits:
        return Answer.UNKNOWN, "one earlier run and no sentinel: its noise is not known"
    source, limit = max(limits.items(), key=lambda item: item[1])
    if difference <= limit:
        if limit > WIDEST_RATIO * abs(old.value):
            return Answer.UNKNOWN, f"{source} is {limit:.4g}: too wide to tell anything"
        return Answer.REPRODUCED, f"differs by {difference:.4g}, {source} is {limit:.4g}"
    if noise.rounds < 2 and noise.floor is None and not (profiled and metric in _OF_THE_POOL):
        return (
            Answer.UNKNOWN,
            f"differs by {difference:.4g}, {source} is {limit:.4g}, but all of one round: how "
            "rounds differ is not known",
        )
    return Answer.NOT, f"differs by {difference:.4g}, {source} is only {limit:.4g}"


def _limit(earlier: Sequence[Number], count: int) -> float:
    """Return how far the mean of ``count`` new runs may be from one old run (Student's t)."""
    from scipy import stats

    values = [number.value for number in earlier]
    spread = math.sqrt(variance(values) * (1 + 1 / count))
    quantile = float(stats.t(len(values) - 1).ppf(1 - (1 - CONFIDENCE) / 2))
    return quantile * spread


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a run came back, with every number it was decided from."""

    answer: Answer
    why: str
    old_outcome: str
    new_outcomes: tuple[str, ...]
    earlier_runs: tuple[str, ...]
    numbers: tuple[Judged, ...]

    def document(self) -> dict[str, object]:
        """Return it as JSON values."""
        return {
            "verdict": self.answer.value,
            "why": self.why,
            "old_outcome": self.old_outcome,
            "new_outcomes": list(self.new_outcomes),
            "earlier_runs": list(self.earlier_runs),
            "metrics": [number.document() for number in self.numbers],
        }


def judge_run(
    connection: duckdb.DuckDBPyConnection,
    run_uuid: str,
    again: Sequence[str],
    *,
    profiled: bool,
    same_hardware: bool | None,
) -> Verdict:
    """Judge the runs ``again`` against ``run_uuid``; all of them are in the warehouse."""
    run = _runs(connection, [run_uuid])[0]
    new_runs = _runs(connection, again)
    earlier = _earlier(connection, run, again)
    outcomes = tuple(one["outcome"] for one in new_runs)
    numbers = tuple(_numbers(connection, run, new_runs, earlier, profiled=profiled))
    answer, why = _overall(run["outcome"], outcomes, numbers, same_hardware=same_hardware)
    told = tuple(one["run_uuid"] for one in earlier)
    return Verdict(answer, why, run["outcome"], outcomes, told, numbers)


def _overall(
    old: str, new: Sequence[str], numbers: Sequence[Judged], *, same_hardware: bool | None
) -> tuple[Answer, str]:
    if not new:
        return Answer.UNKNOWN, "the new run found nothing out"
    if same_hardware is False:
        return Answer.UNKNOWN, "the new run was on another class of hardware"
    others = sorted(set(new) - {old})
    if others:
        return Answer.NOT, f"the outcome was {old} and is {', '.join(others)}"
    wrong = [number for number in numbers if number.answer is Answer.NOT]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return Answer.NOT, f"{wrong[0].metric}{more}: {wrong[0].why}"
    unknown = [n for n in numbers if n.answer is Answer.UNKNOWN and not n.may_stay_open]
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        return Answer.UNKNOWN, f"{unknown[0].metric}{more}: {unknown[0].why}"
    left_open = sum(number.answer is Answer.UNKNOWN for number in numbers)
    rest = f"; {left_open} times and counts cannot be told" if left_open else ""
    return Answer.REPRODUCED, f"outcome {old}, {len(numbers) - left_open} numbers come back{rest}"


def _numbers(
    connection: duckdb.DuckDBPyConnection,
    run: Mapping[str, Any],
    again: Sequence[Mapping[str, Any]],
    earlier: Sequence[Mapping[str, Any]],
    *,
    profiled: bool,
) -> Iterable[Judged]:
    every = {one["run_uuid"]: one for one in (run, *again, *earlier)}
    stored = _stored(connection, list(every))
    noise = floors(connection, {(one["sweep"], one["round"]) for one in every.values()})
    mine = stored.get(run["run_uuid"], {})
    theirs = [stored.get(one["run_uuid"], {}) for one in again]
    keys = sorted(
        mine.keys() | {key for side in theirs for key in side},
        key=lambda key: (key[0] is not None, key[0] or 0, key[1]),
    )
    for key in keys:
        point, metric = key
        if metric in _OF_THE_MACHINE | _OF_THE_HARNESS:
            continue
        old, new = mine.get(key), [side[key] for side in theirs if key in side]
        if old is None or not new:
            yield _one_sided(key, old, new)
            continue
        known = [stored[one["run_uuid"]].get(key) for one in earlier if one["run_uuid"] in stored]
        found = Noise(
            earlier=[number for number in known if number is not None],
            rounds=len({(one["sweep"], one["round"]) for one in earlier}),
            floor=_floor(noise, run, again, key, old.value),
        )
        answer, why = judge(metric, old, new, found, profiled=profiled)
        mean = fmean(number.value for number in new)
        yield Judged(point, metric, old.value, mean, answer, why)


def _one_sided(key: Key, old: Number | None, new: Sequence[Number]) -> Judged:
    side = "this time only" if old is None else "the first time only"
    return Judged(
        key[0],
        key[1],
        None if old is None else old.value,
        fmean(number.value for number in new) if new else None,
        Answer.UNKNOWN,
        f"measured {side}",
    )


def _floor(
    noise: Floors,
    run: Mapping[str, Any],
    again: Sequence[Mapping[str, Any]],
    key: Key,
    value: float,
) -> float | None:
    rounds = [(one["sweep"], one["round"]) for one in (run, *again)]
    return noise.floor(rounds, run["setting_key"], key[0], key[1], value)


def _runs(connection: duckdb.DuckDBPyConnection, runs: Sequence[str]) -> list[dict[str, Any]]:
    return records(
        connection,
        "SELECT run_uuid, sweep, round, cell_key, setting_key, outcome, hardware FROM run "
        "WHERE run_uuid IN (SELECT unnest($runs::VARCHAR[])::UUID) ORDER BY started_at, run_uuid",
        {"runs": list(runs)},
    )


def _earlier(
    connection: duckdb.DuckDBPyConnection, run: Mapping[str, Any], again: Sequence[str]
) -> list[dict[str, Any]]:
    """Return every run of the same cell that ended alike on the same hardware, but the new ones."""
    return records(
        connection,
        "SELECT run_uuid, sweep, round, cell_key, setting_key, outcome, hardware FROM run "
        "WHERE cell_key = $cell AND outcome = $outcome AND hardware IS NOT DISTINCT FROM $hardware "
        "AND run_uuid NOT IN (SELECT unnest($again::VARCHAR[])::UUID) "
        "ORDER BY started_at, run_uuid",
        {
            "cell": run["cell_key"],
            "outcome": run["outcome"],
            "hardware": run["hardware"],
            "again": list(again),
        },
    )


def _stored(
    connection: duckdb.DuckDBPyConnection, runs: Sequence[str]
) -> dict[str, dict[Key, Number]]:
    """Return every usable number of the runs; a sampled peak with what it was between samples."""
    found: dict[str, dict[Key, Number]] = {}
    for row in records(
        connection,
        "SELECT n.* FROM (SELECT run_uuid, load_point, metric, value, low, high FROM measurement "
        "UNION ALL SELECT run_uuid, load_point, metric, value, NULL, NULL FROM derivation) n "
        "LEFT JOIN load_point_validity v ON v.run_uuid = n.run_uuid "
        "AND v.load_point = n.load_point "
        "WHERE n.value IS NOT NULL AND v.valid IS DISTINCT FROM false "
        "AND n.run_uuid IN (SELECT unnest($runs::VARCHAR[])::UUID)",
        {"runs": list(runs)},
    ):
        value = row["value"]
        low = value if row["low"] is None else row["low"]
        high = value if row["high"] is None else row["high"]
        of_run = found.setdefault(row["run_uuid"], {})
        of_run[(row["load_point"], row["metric"])] = Number(value, low, high)
    for of_run in found.values():
        for (point, metric), number in list(of_run.items()):
            lower = of_run.get((point, "peak_kv_usage_lower_ratio"))
            upper = of_run.get((point, "peak_kv_usage_upper_ratio"))
            if metric == "peak_kv_usage_ratio" and lower is not None and upper is not None:
                low = max(number.value, lower.value)
                of_run[(point, metric)] = Number(number.value, low, max(low, upper.value))
    return found
