"""What a plan costs in one order of its runs, by what is known of past ones; pure."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from tasks.plan.knowledge import as_predicted, at_worst, foreseen
from tasks.plan.plan import Plan, PlannedCell, PlannedRun
from tasks.plan.spending import NO_HISTORY, Choice, History, Spending, choose, cost_s, spending


@dataclass(frozen=True)
class Outlook:
    """What a plan costs by what is known of past runs, in one order."""

    plan: Plan
    history: History = NO_HISTORY
    seed: int | None = None
    budget_minutes: float | None = None

    @functools.cached_property
    def runs(self) -> list[PlannedRun]:
        """Every run, in the order it is started."""
        return [*self.plan.runs(self.seed)]

    @functools.cached_property
    def spending(self) -> dict[str, Spending]:
        """What the runs cost, and what they would cost otherwise."""
        slots = self.plan.surroundings.slots
        ways = {
            "as_planned": self.runs,
            "if_predictions_hold": foreseen(self.runs, as_predicted),
            "if_the_unknown_is_refused": foreseen(self.runs, at_worst),
        }
        costs = {name: spending(runs, self.history, slots=slots) for name, runs in ways.items()}
        apart = spending(self.runs, self.history, slots=slots, grouped=False)
        return costs | {"one_boot_a_load_point": apart}

    @functools.cached_property
    def choice(self) -> Choice | None:
        """What the budget buys; ``None`` where there is none."""
        if self.budget_minutes is None:
            return None
        return choose(self.runs, self.history, self.budget_minutes * 60)

    def run_s(self, planned: PlannedCell) -> float:
        """Return how long a run of a cell takes, as :attr:`spending` counts it, seconds."""
        past = self.history.settings.get(planned.cell.setting_key)
        return planned.estimate_s if past is None or past.median_s is None else past.median_s

    @property
    def disk_bytes(self) -> int:
        """Size of the bundles of all runs."""
        return sum(self.history.bundle_bytes(run) for run in self.runs)

    @property
    def sized_by(self) -> str:
        """Where the sizes of the bundles come from."""
        measured = sum(self.history.of(run) is not None for run in self.runs)
        rest = "estimated" if self.history.bundle_ratio is None else "estimated from others here"
        if not measured:
            return rest
        return "measured" if measured == len(self.runs) else f"{measured} measured, others {rest}"

    @property
    def unit(self) -> str:
        """What a budget is counted in."""
        return "GPU-minutes" if self.plan.surroundings.device == "cuda" else "slot-minutes"

    def minutes(self, runs: Iterable[PlannedRun]) -> float:
        """Return what runs take of a budget, in its unit."""
        return round(sum(cost_s(run, self.history) for run in runs) / 60, 1)
