"""How a finished run ended, from its bundle's log, for what follows about cells not run yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.home import Home
from tasks.witnesses import finished
from tests.support.bundle_maker import Lab, Spec
from warehouse.registry import Outcome

TOO_LONG = "cpu-0.27.0-max-model-len-does-not-fit.log"
ABOVE = "cpu-0.27.0-utilization-above-free-memory.log"


@pytest.mark.parametrize(
    ("log", "outcome", "failure"),
    [
        (TOO_LONG, Outcome.REFUSED, "kv_cache_smaller_than_one_request"),
        (ABOVE, Outcome.REFUSED, "free_memory_below_utilization"),
        (TOO_LONG, Outcome.LOST, None),
        (None, Outcome.OOM, None),
        ("cpu-0.27.0-qwen3.5-hybrid-ok.log", Outcome.OK, None),
    ],
)
def test_a_typed_end_has_its_logs_failure(
    log: str | None, outcome: Outcome, failure: str | None, tmp_path: Path
) -> None:
    lab = Lab(Home(tmp_path / "home"))
    spec = Spec(log=log, outcome=outcome)
    uuid = lab.seal(spec).name
    found = finished(lab.home, spec.cell(), uuid, outcome.value)
    assert (found.run_uuid, found.outcome, found.failure) == (uuid, outcome.value, failure)
