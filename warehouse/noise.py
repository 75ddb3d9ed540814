"""The noise floor of a round: how far its sentinel, an unchanged cell, differed from itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from warehouse.lookup import records
from warehouse.registry import EXACT

if TYPE_CHECKING:
    import duckdb

#: A round by its sweep and label.
Round = tuple[str, str]
#: One value alone has no spread.
_LEAST_RUNS = 2


@dataclass(frozen=True, slots=True)
class Floors:
    """The noise floors of some rounds (view ``noise_floor``), by round and metric."""

    rows: Mapping[Round, Mapping[str, list[dict[str, Any]]]]

    def sentinels(self, rounds: Iterable[Round]) -> list[dict[str, Any]]:
        """Return which cell told the noise of each round, and by how many runs."""
        found = []
        for round_ in sorted(set(rounds) & self.rows.keys()):
            rows = [row for rows in self.rows[round_].values() for row in rows]
            runs = max(row["runs"] for row in rows)
            sweep, label = round_
            found.append({"sweep": sweep, "round": label, "label": rows[0]["label"], "runs": runs})
        return found

    def floor(
        self,
        rounds: Iterable[Round],
        setting_key: str,
        load_point: int | None,
        metric: str,
        mean: float,
    ) -> float | None:
        """Return the largest floor of ``rounds`` for a number, in its unit; ``None``: no sentinel.

        The sentinel's own cell has the spread of that very number. Another cell has the same share
        of its ``mean``: the largest that the metric showed at any load point of the sentinel. Only
        exact metrics are not carried over: whether they vary depends on how a cell's pool is sized.
        """
        found = [
            spread
            for round_ in set(rounds)
            for row in self.rows.get(round_, {}).get(metric, ())
            if (spread := _spread(row, setting_key, load_point, mean)) is not None
        ]
        return max(found, default=None)


def _spread(
    row: Mapping[str, Any], setting_key: str, load_point: int | None, mean: float
) -> float | None:
    if row["setting_key"] == setting_key:
        return float(row["spread"]) if row["load_point"] == load_point else None
    both_of_a_run = (row["load_point"] is None) == (load_point is None)
    if row["metric"] in EXACT or row["spread_ratio"] is None or not both_of_a_run:
        return None
    return float(row["spread_ratio"]) * abs(mean)


def floors(connection: duckdb.DuckDBPyConnection, rounds: Iterable[Round]) -> Floors:
    """Read the noise floors of ``rounds``."""
    wanted = sorted(set(rounds))
    found: dict[Round, dict[str, list[dict[str, Any]]]] = {}
    for row in records(
        connection,
        "SELECT f.* FROM noise_floor f JOIN (SELECT unnest($sweeps::VARCHAR[]) AS sweep, "
        "unnest($rounds::VARCHAR[]) AS round) USING (sweep, round) WHERE runs >= $least "
        "ORDER BY ALL",
        {
            "sweeps": [sweep for sweep, _ in wanted],
            "rounds": [round_ for _, round_ in wanted],
            "least": _LEAST_RUNS,
        },
    ):
        round_ = found.setdefault((row["sweep"], row["round"]), {})
        round_.setdefault(row["metric"], []).append(row)
    return Floors(found)
