"""Real uv, packages and torch: environments and models (about 3 minutes, 6 on a busy machine)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks import revision
from tasks.home import Home
from tasks.launch import environments, models

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
ENSURE = (
    "import sys; from pathlib import Path; from tasks.home import Home;"
    "from tasks.launch import environments as e;"
    "e.ensure(Home(Path(sys.argv[1])), ('polyaxon-server',), progress=print)"
)


def test_a_killed_install_is_made_whole_by_the_next_call(home: Home) -> None:
    caller = subprocess.Popen([sys.executable, "-c", ENSURE, str(home.root)], cwd=ROOT)
    packages = environments.folder(home, "polyaxon-server") / "lib"
    deadline = time.monotonic() + 60
    while not packages.exists() or len(list(packages.glob("*/site-packages/*"))) < 20:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    caller.send_signal(signal.SIGKILL)
    caller.wait(10)
    assert not environments.is_complete(home, "polyaxon-server")
    environments.ensure(home, ("polyaxon-server",), progress=print)
    haupt = environments.python(home, "polyaxon-server").with_name("haupt")
    done = subprocess.run([haupt, "--help"], capture_output=True, text=True, check=True)
    assert "sandbox" in done.stdout


def test_the_environments_are_what_their_markers_say() -> None:
    home = Home.find()
    environments.ensure(home, progress=print)
    wanted = {
        "engine": "import vllm, torch, torchvision; print(torch.__version__)",
        "bench": "import evalscope.perf.main, pynvml; print('ok')",
        "polyaxon-server": "import haupt; print('ok')",
    }
    for name in environments.NAMES:
        marker = json.loads((environments.folder(home, name) / environments.MARKER).read_text())
        assert marker["lock_sha256"] == environments.lock_sha256(name)
        done = subprocess.run(
            [environments.python(home, name), "-c", wanted[name]],
            capture_output=True,
            text=True,
            check=True,
        )
        if name == "engine":
            torch = marker["torch"]["packages"]["torch"]
            assert torch["version"] == done.stdout.strip().splitlines()[-1]
            assert len(torch["files_sha256"]) == 64
    vllm = environments.python(home, "engine").with_name("vllm")
    done = subprocess.run([vllm, "--version"], capture_output=True, text=True, check=True)
    assert "0.27.0+cpu" in done.stdout
    compiled = environments.folder(home, "engine") / "lib"
    assert next(compiled.glob("*/site-packages/vllm/__pycache__/*.pyc"), None) is not None


@pytest.mark.parametrize("name", models.NAMES)
def test_a_model_is_generated_equal_twice(home: Home, name: str) -> None:
    shared = Home.find()
    environments.ensure(shared, ("engine",), progress=print)
    home.envs.mkdir(parents=True)
    (home.envs / "engine").symlink_to(environments.folder(shared, "engine"))
    place = models.ensure(home, name, progress=print)
    first = models.revision(home, name)
    assert first == revision.of(revision.listing(place))
    assert json.loads((place / "config.json").read_text()) == models.config(name)
    (place / revision.MARKER).unlink()
    models.ensure(home, name, progress=print)
    assert models.revision(home, name) == first
