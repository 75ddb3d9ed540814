"""``python -P -m tasks.pod.doctor``: what is on the machine where runs are executed, as JSON.

It runs with the same image, mounts and variables as a cell, so what it finds is what a cell would
find. It only looks: nothing is imported of the engine, nothing is started, nothing is judged. The
flow's side says what is wrong (tasks/doctor.py).
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType
from typing import Any

from tasks import revision
from tasks.pod.gpu import Gpus
from tasks.pod.processes import memory_bytes

FORMAT = 1
FILE = "doctor.json"
#: torch/version.py says which CUDA it was built for; importing torch would take seconds.
_TORCH_CUDA = re.compile(r"^cuda(?:\s*:[^=]*)?\s*=\s*['\"](?P<version>[\d.]+)['\"]", re.M)


def facts(
    *,
    engine_bin: Path,
    bench_python: Path,
    models: Path,
    folders: Mapping[str, Path],
) -> dict[str, object]:
    """Return what is there; ``None`` stands for what is not, or does not tell.

    ``models`` holds model folders, or is one; ``folders`` are places whose free space matters.
    """
    gpus, no_gpu = Gpus.open()
    engine = _sites(engine_bin.parent)
    return {
        "format": FORMAT,
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu_count": os.cpu_count(),
        "memory_total_bytes": memory_bytes("MemTotal"),
        "memory_available_bytes": memory_bytes("MemAvailable"),
        "driver": None if gpus is None else gpus.driver_version,
        "driver_cuda": None if gpus is None else gpus.cuda_version,
        "no_gpu": no_gpu,
        "gpus": [] if gpus is None else _describe(gpus),
        "packages": {
            "engine": _packages(engine, ("vllm", "torch")),
            "bench": _packages(_sites(bench_python.parent.parent), ("evalscope",)),
        },
        "torch_cuda": _torch_cuda(engine),
        "free_bytes": {name: _free(folder) for name, folder in folders.items()},
        "shm_bytes": _free(Path("/dev/shm")),
        "models": _models(models),
    }


def _describe(gpus: Gpus) -> list[dict[str, Any]]:
    sampled = gpus.sample(())["gpus"]
    states: list[dict[str, Any]] = sampled if isinstance(sampled, list) else []
    return [
        {
            "name": device.name,
            "uuid": device.uuid,
            "compute_capability": _capability(device.parent),
            **{
                name: state.get(name)
                for name in ("total_bytes", "reserved_bytes", "used_bytes", "free_bytes")
            },
            "processes": state.get("processes"),
        }
        for device, state in zip(gpus.devices, states, strict=True)
    ]


def _capability(handle: object) -> str | None:
    pynvml: ModuleType | None = sys.modules.get("pynvml")
    if pynvml is None:
        return None
    try:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    except pynvml.NVMLError:
        return None
    return f"{major}.{minor}"


def _sites(root: Path) -> list[str]:
    """Return the folders of packages installed below ``root``."""
    found = (
        *root.glob("lib*/python3*/site-packages"),
        *root.glob("lib/python3*/dist-packages"),
    )
    return [str(path) for path in found]


def _packages(sites: list[str], names: tuple[str, ...]) -> dict[str, str | None]:
    installed = {
        distribution.metadata["Name"].lower(): distribution.version
        for distribution in distributions(path=sites)
        if distribution.metadata["Name"]
    }
    return {name: installed.get(name) for name in names}


def installed(root: Path, name: str) -> str | None:
    """Return the version of a package in the environment at ``root``; ``None``: not there."""
    return _packages(_sites(root), (name,))[name]


def _torch_cuda(sites: list[str]) -> str | None:
    for site in sites:
        try:
            text = (Path(site) / "torch" / "version.py").read_text(encoding="utf-8")
        except OSError:
            continue
        match = _TORCH_CUDA.search(text)
        return match["version"] if match else None
    return None


def _free(folder: Path) -> int | None:
    """Return the free bytes where ``folder`` is or would be."""
    for path in (folder, *folder.parents):
        try:
            return shutil.disk_usage(path).free
        except OSError:
            continue
    return None


def _models(folder: Path) -> list[dict[str, object]]:
    """Return the models in ``folder`` with what of each is there; weights are not read."""
    found: list[dict[str, object]] = []
    # A folder is a model, or holds them by name, by owner/name, or by owner/name/commit.
    places = ("config.json", "*/config.json", "*/*/config.json", "*/*/*/config.json")
    for config in sorted(path for place in places for path in folder.glob(place)):
        model = config.parent
        weights = [*model.glob("*.safetensors"), *model.glob("*.bin")]
        found.append(
            {
                "name": model.relative_to(folder).as_posix() if model != folder else model.name,
                "revision": _stated_revision(model),
                "weights_bytes": sum(path.stat().st_size for path in weights) if weights else None,
                "tokenizer": any(model.glob("tokenizer*")),
            }
        )
    return found


def _stated_revision(model: Path) -> str | None:
    """Return the revision that is noted beside the files; they are not hashed here."""
    try:
        value = json.loads((model / revision.MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    stated = value.get("revision") if isinstance(value, dict) else None
    return stated if isinstance(stated, str) else None


def main() -> int:
    """Look, print the facts and leave them among the run's outputs; return the exit code."""
    environment = os.environ
    outputs = Path(environment.get("MEMSWEEP_OUTPUTS") or ".")
    found = facts(
        engine_bin=Path(environment.get("MEMSWEEP_ENGINE_BIN") or "/usr/local/bin"),
        bench_python=Path(environment.get("MEMSWEEP_BENCH_PYTHON") or sys.executable),
        models=Path(environment.get("MEMSWEEP_MODEL_PATH") or "/models"),
        folders={
            "outputs": outputs,
            "cache": Path(environment.get("MEMSWEEP_CACHE") or "/tmp"),
        },
    )
    text = json.dumps(found, indent=1, sort_keys=True) + "\n"
    outputs.mkdir(parents=True, exist_ok=True)
    (outputs / FILE).write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
