"""A state folder whose engine and bench are the doubles: everything else in it is real.

The real command line, Prefect server, Polyaxon server and supervisor then run a cell in one to
three seconds, so that faults, kills and costs of the machinery can be shown over hundreds of cells.
Never for a figure of an engine: the doubles compute theirs.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from testkit.real import ROOT

from tasks import files, pins, revision
from tasks.home import VARIABLE, Home
from tasks.launch import environments, models, services
from tests.double.engine import make_bench, make_engine
from warehouse.errors import MemsweepError

MODEL = "tiny-qwen3"
#: Tokens of the dense model's block times bytes of a token: the pools of two cells differ by it.
BLOCK_BYTES = 262_144
SMALLEST_POOL_BYTES = 16 << 20

_TORCH = {"torch": pins.TORCH_VERSION, "torchvision": pins.TORCHVISION_VERSION}


def make_home(
    root: Path,
    *,
    engine: Mapping[str, object] | None = None,
    bench: Mapping[str, object] | None = None,
    polyaxon_server: Path | None = None,
) -> Home:
    """Make a state folder with doubles in ``root``, or bring one there up to date.

    ``engine`` and ``bench`` are what tests/double/README.md lists; ``polyaxon_server`` is the real
    environment of the Polyaxon server, linked (default: :func:`polyaxon_server`).
    """
    home = Home(root.resolve())
    make_engine(home.envs / "engine" / "bin", **(engine or {}))
    make_bench(home.envs / "bench" / "bin", **(bench or {}))
    python = home.envs / "engine" / "bin" / "python"
    if not python.is_symlink():
        python.symlink_to(sys.executable)
    torch = {"packages": {name: {"version": version} for name, version in _TORCH.items()}}
    _mark(home, "engine", torch=torch)
    _mark(home, "bench")
    link = home.envs / "polyaxon-server"
    if not link.exists():
        link.symlink_to(polyaxon_server or real_polyaxon_server())
    make_model(home)
    return home


def real_polyaxon_server() -> Path:
    """Return the Polyaxon server's real environment of MEMSWEEP_HOME, else of this checkout.

    It is made where it is missing: about a minute.
    """
    home = Home(Path(os.environ.get(VARIABLE) or ROOT / ".memsweep").resolve())
    environments.ensure(home, ("polyaxon-server",), progress=print)
    return home.envs / "polyaxon-server"


def _mark(home: Home, name: environments.Name, **more: object) -> None:
    marker = {
        "format": environments.MARKER_FORMAT,
        "name": name,
        "device": "cpu",
        "lock_sha256": environments.lock_sha256(name),
        **more,
    }
    files.write_json(environments.folder(home, name) / environments.MARKER, marker)


def make_model(home: Home) -> Path:
    """Write the dense tiny model as far as anything looks at it: config, one weight, its marker."""
    folder = models.folder(home, MODEL)
    folder.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"w": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}}).encode()
    contents = {
        "config.json": json.dumps(models.config(MODEL)).encode(),
        "tokenizer.json": b"{}",
        "model.safetensors": struct.pack("<Q", len(header)) + header + bytes(8),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    marker = {
        "name": MODEL,
        "revision": revision.of(revision.listing(folder)),
        "recipe": models._recipe(MODEL),
    }
    files.write_json(folder / revision.MARKER, marker)
    return folder


def sweep_text(name: str, cells: int, **changes: Any) -> str:
    """Return a sweep of so many short cells, all with another pool, so that none is mixed up.

    ``changes`` replace keys of the sweep file. JSON is YAML.
    """
    pools = [SMALLEST_POOL_BYTES + number * BLOCK_BYTES for number in range(cells)]
    sweep = {
        "name": name,
        "model": MODEL,
        "repeats": 1,
        "server": {"max_model_len": 2048, "enforce_eager": True},
        "load": {"prompt_tokens": 16, "output_tokens": 4, "warmup": 0},
        "experiments": [
            {
                "name": "short",
                "vary": {"kv_cache_memory_bytes": pools},
                "points": [{"parallel": 1, "number": 2}],
            }
        ],
    }
    return json.dumps(sweep | changes, indent=1) + "\n"


def write_profile(path: Path, slots: int) -> Path:
    """Write a target like the shipped ``local`` with so many slots; ``--target`` takes the file."""
    profile = {
        "description": f"This machine, doubles, {slots} slots",
        "device": "cpu",
        "operation": "local.yaml",
        "slots": slots,
        "queue_s": 3600,
    }
    path.write_text(json.dumps(profile), encoding="utf-8")
    return path


def end_services(home: Home) -> list[str]:
    """End the state folder's services and runs; return what could not be ended."""
    try:
        services.down(home)
    except MemsweepError as error:
        return [str(error)]
    return []


def environment(home: Home) -> dict[str, str]:
    """Return the environment of a command in this state folder."""
    own = {VARIABLE: str(home.root), "PYTHONUNBUFFERED": "1"}
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | own


def start(
    home: Home,
    *arguments: str,
    log: Path,
    program: Sequence[str] = ("flows.cli",),
    variables: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start the command line (or another module around it) in a session of its own."""
    own = environment(home) | dict(variables or {})
    own["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), str(ROOT / "tests/support"), own.get("PYTHONPATH")])
    )
    with log.open("ab") as sink:
        return subprocess.Popen(
            [sys.executable, "-m", *program, *arguments],
            cwd=ROOT,
            env=own,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run_to_the_end(
    home: Home,
    *arguments: str,
    log: Path,
    program: Sequence[str] = ("flows.cli",),
    calls: int = 1,
    timeout_s: float = 900,
) -> list[int]:
    """Call ``run`` until it exits 0, at most ``calls`` times; return every call's exit code.

    A call that was killed (-9) or whose cells did not all come out as expected (1) is followed by
    another one, as a user or a timer would do; so is one that could not find out (3).
    """
    until = time.monotonic() + timeout_s
    codes: list[int] = []
    while (not codes or codes[-1] in (-signal.SIGKILL, 1, 3)) and len(codes) < calls:
        process = start(home, "run", *arguments, log=log, program=program)
        try:
            codes.append(process.wait(timeout=max(1.0, until - time.monotonic())))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        arguments = tuple(one for one in arguments if one != "--fresh")
    return codes
