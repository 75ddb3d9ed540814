"""SIGTERM at random moments of the whole run; about 3 minutes."""

from __future__ import annotations

import random
import signal
import time

import pytest

from tests.double.runs import MakeRun

pytestmark = pytest.mark.soak

RUNS = 120
SEED = 20_261_129


def test_sigterm_at_any_moment(make_run: MakeRun) -> None:
    """Every run ends typed and sealed, with nothing left; the fixture looks for processes."""
    chance = random.Random(SEED)
    codes: dict[int, int] = {}
    for number in range(RUNS):
        run = make_run(f"run{number}", cell={"load": [{"number": 8}, {}]}).start()
        assert run.process is not None
        # Earlier than this Python itself is still starting and simply ends.
        run.until((run.outputs / "events.jsonl").exists)
        time.sleep(chance.uniform(0, 1.6))
        run.process.send_signal(chance.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))
        code = run.wait(30)
        codes[code] = codes.get(code, 0) + 1
        end = run.json("end.json")
        assert (end["observed"], code) in {("interrupted", 143), ("ok", 0)}, end
        assert end["write_errors"] == []
        assert run.json("stop.json")["after_stop"]["processes"] == []
        assert run.json("stop.json")["left"] == []
    assert set(codes) <= {0, 143}
    assert codes.get(143, 0) > RUNS / 4
