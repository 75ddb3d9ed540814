"""The Prefect tasks: thin, over plain functions that need no engine to be tested.

Results are never cached: what is finished is decided by round, cell key, repeat and a verified
bundle. Deadlines are in the polling loop, because Prefect does not enforce a timeout on a blocking
task.
"""

from __future__ import annotations

from collections.abc import Callable

from prefect import task
from prefect.cache_policies import NO_CACHE


@task(
    name="measure-cell",
    task_run_name="{label} repeat {repeat}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=0,
)
def measure_cell(label: str, repeat: int, work: Callable[[], str]) -> str:
    """Measure one repeat of one cell and return its outcome.

    Hand ``work`` over in Prefect's ``quote``, so that Prefect does not look into what it holds.
    """
    del label, repeat  # they name the task run
    return work()
