"""Is a difference more than noise? Welch's interval over repeats, or what effect would show.

A mean of few repeats without its uncertainty is an anecdote: nothing is called a change that the
spread of the repeats explains, or that an unchanged cell showed within one round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import variance
from typing import Literal

CONFIDENCE = 0.95
POWER = 0.80

WITHIN_NOISE: Literal["within the night's noise"] = "within the night's noise"
Verdict = Literal["equal", "different", "not significant", "unknown", "within the night's noise"]
#: Verdicts after which nothing has changed as far as anybody can tell.
NO_CHANGE = frozenset({"equal", "not significant", WITHIN_NOISE})


@dataclass(frozen=True, slots=True)
class Effect:
    """B minus A of one metric.

    ``low`` and ``high`` are the confidence interval of the difference of means; ``detectable`` is
    the smallest difference that these repeats would have shown with the stated power. All are
    ``None`` where the number of repeats gives no noise to go by.
    """

    n_a: int
    n_b: int
    mean_a: float
    mean_b: float
    difference: float
    relative: float | None
    low: float | None
    high: float | None
    p_value: float | None
    detectable: float | None
    verdict: Verdict
    #: Largest difference that a round's sentinel, an unchanged cell, showed; ``None``: no sentinel.
    noise_floor: float | None = None

    def document(self) -> dict[str, object]:
        """Return it as JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}


def effect(
    a: Sequence[float], b: Sequence[float], *, exact: bool, noise_floor: float | None = None
) -> Effect:
    """Compare the repeats of two sets, neither of them empty.

    ``exact`` metrics are integer arithmetic of the engine: any difference is one. For others one
    repeat a side says nothing about noise, so the verdict is ``unknown``.

    ``noise_floor`` is the spread (highest minus lowest) of a cell that was measured again and again
    within a round. Three values know their standard deviation only to a factor of 0.5 to 6, and the
    repeats of a cell may all have seen one hour: so no distribution is assumed, and a difference up
    to that spread is none, whatever the repeats' own interval says.
    """
    mean_a, mean_b = math.fsum(a) / len(a), math.fsum(b) / len(b)
    difference = mean_b - mean_a
    relative = difference / abs(mean_a) if mean_a else None
    low = high = p_value = detectable = None
    verdict: Verdict
    if set(a) == set(b) and len(set(a)) == 1:
        verdict, low, high = "equal", 0.0, 0.0
    elif len(set(a)) == 1 and len(set(b)) == 1 and (exact or min(len(a), len(b)) > 1):
        # Repeats without any spread on both sides: the difference itself is all there is.
        verdict, low, high = "different", difference, difference
    elif min(len(a), len(b)) < 2:
        verdict = "unknown"
    else:
        low, high, p_value, detectable = _welch(a, b)
        verdict = "different" if p_value < 1 - CONFIDENCE else "not significant"
    unexplained = verdict in ("different", "unknown")
    if unexplained and noise_floor is not None and abs(difference) <= noise_floor:
        verdict = WITHIN_NOISE
    return Effect(
        n_a=len(a),
        n_b=len(b),
        mean_a=mean_a,
        mean_b=mean_b,
        difference=difference,
        relative=relative,
        low=low,
        high=high,
        p_value=p_value,
        detectable=detectable,
        verdict=verdict,
        noise_floor=noise_floor,
    )


def _welch(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float, float]:
    """Return interval, p-value and detectable effect of Welch's unequal-variances t-test.

    Both sets have at least two values and at least one of them some spread. Variances are taken
    exactly; SciPy's own test warns and cancels where one side does not vary.
    """
    from scipy import stats

    share_a, share_b = variance(a) / len(a), variance(b) / len(b)
    error = math.sqrt(share_a + share_b)
    freedom = (share_a + share_b) ** 2 / (share_a**2 / (len(a) - 1) + share_b**2 / (len(b) - 1))
    difference = math.fsum(b) / len(b) - math.fsum(a) / len(a)
    t = stats.t(freedom)
    quantile = float(t.ppf(1 - (1 - CONFIDENCE) / 2))
    p_value = 2 * float(t.sf(abs(difference) / error))
    detectable = (quantile + float(t.ppf(POWER))) * error
    return difference - quantile * error, difference + quantile * error, p_value, detectable
