"""How finished runs ended, read from their bundles, for what follows about others."""

from __future__ import annotations

from tasks.collect import failure_in
from tasks.home import Home
from tasks.plan.cell import Cell
from tasks.plan.knowledge import Finished
from warehouse.registry import Outcome

#: Ends whose cause stands in the server's log and may settle other cells.
_TYPED = (Outcome.REFUSED, Outcome.OOM)


def finished(home: Home, cell: Cell, run_uuid: str, outcome: str) -> Finished:
    """Return how a run with a sealed bundle ended; its log is only read where it failed so."""
    failure = None
    if outcome in _TYPED:
        failure = failure_in(home.bundles / run_uuid / "server.log")
    return Finished(run_uuid, cell, outcome, None if failure is None else failure.type)
