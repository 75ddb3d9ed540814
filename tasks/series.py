"""One value a tick, and the window it is looked at in: what figures and doubts have in common."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Window:
    """When a load point was measured, CLOCK_MONOTONIC seconds."""

    start_s: float
    end_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Series:
    """One value a tick, missed ticks left out."""

    tick: npt.NDArray[np.int64]
    t_s: Numbers
    value: Numbers

    def within(self, window: Window) -> Series:
        """Return the part that was taken within a window."""
        keep = (self.t_s >= window.start_s) & (self.t_s <= window.end_s)
        return Series(self.tick[keep], self.t_s[keep], self.value[keep])

    def around(self, window: Window) -> Series:
        """Return the part within a window with the last value before and the first one after."""
        first = max(0, int(np.searchsorted(self.t_s, window.start_s, "right")) - 1)
        last = int(np.searchsorted(self.t_s, window.end_s, "left")) + 1
        return Series(self.tick[first:last], self.t_s[first:last], self.value[first:last])

    def falls(self) -> int:
        """Return how often a value is lower than the one before."""
        return int(np.count_nonzero(np.diff(self.value) < 0))

    def __len__(self) -> int:
        return len(self.tick)


def series(samples: pa.Table | None, column: str) -> Series | None:
    """Return a column of samples, without ticks that were missed or did not hold it."""
    if samples is None:
        return None
    value = samples[column].cast(pa.float64()).to_numpy(zero_copy_only=False)
    t_s = samples["t_s"].to_numpy(zero_copy_only=False)
    keep = ~(np.isnan(value) | np.isnan(t_s))
    return Series(samples["tick"].to_numpy()[keep], t_s[keep], value[keep])
