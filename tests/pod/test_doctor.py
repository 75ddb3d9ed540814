"""What the doctor finds where runs are executed, without starting or importing the engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tasks.pod import doctor


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """An engine, a bench environment and a model, as far as the doctor looks at them."""
    site = tmp_path / "engine/lib/python3.12/site-packages"
    for package, version in (("vllm", "0.27.0"), ("torch", "2.13.0+cu128")):
        info = site / f"{package}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        )
    (site / "torch").mkdir()
    (site / "torch/version.py").write_text(
        "debug = False\ncuda: Optional[str] = '12.8'\nhip = None\n"
    )
    info = tmp_path / "bench/lib/python3.12/site-packages/evalscope-1.9.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evalscope\nVersion: 1.9.1\n")
    model = tmp_path / "models/Owner/Name" / ("a" * 40)
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"12345678")
    (model / "tokenizer.json").write_text("{}")
    return tmp_path


def found_at(node: Path) -> dict[str, Any]:
    return doctor.facts(
        engine_bin=node / "engine/bin",
        bench_python=node / "bench/bin/python",
        models=node / "models",
        folders={"outputs": node / "not/there/yet"},
    )


class FakeNvml(ModuleType):
    """NVML of one GPU with one process on it."""

    class NVMLError(Exception):
        """What NVML raises."""

    nvmlMemory_v2 = 2

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA A10"

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.105.08"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13000

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> Any:
        return SimpleNamespace(used=20, free=70, total=100, reserved=10)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return 8, 6

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=1, usedGpuMemory=15)]


def test_versions_are_read_from_files(node: Path) -> None:
    found = found_at(node)
    assert found["packages"] == {
        "engine": {"vllm": "0.27.0", "torch": "2.13.0+cu128"},
        "bench": {"evalscope": "1.9.1"},
    }
    assert found["torch_cuda"] == "12.8"
    assert found["free_bytes"]["outputs"] > 0
    (model,) = found["models"]
    assert (model["name"], model["weights_bytes"]) == (f"Owner/Name/{'a' * 40}", 8)
    assert "vllm" not in sys.modules


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    found = found_at(tmp_path)
    assert found["packages"]["engine"] == {"vllm": None, "torch": None}
    assert (found["torch_cuda"], found["models"]) == (None, [])


def test_gpus_are_described(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml("pynvml"))
    found = found_at(node)
    assert (found["driver"], found["driver_cuda"], found["no_gpu"]) == ("580.105.08", "13.0", None)
    (gpu,) = found["gpus"]
    assert gpu == {
        "name": "NVIDIA A10",
        "uuid": "GPU-0",
        "compute_capability": "8.6",
        "total_bytes": 100,
        "reserved_bytes": 10,
        "used_bytes": 20,
        "free_bytes": 70,
        "processes": [{"pid": 1, "used_bytes": 15}],
    }


def test_as_a_run_it_prints_and_leaves_its_facts(node: Path, tmp_path: Path) -> None:
    """Test the very command of the operation, on an interpreter that sees only the run's code."""
    from tasks.home import Home
    from tasks.launch import environments

    code = environments.stage_pod_code(Home(tmp_path / "state"))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tasks.pod.doctor"],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(code),
            "MEMSWEEP_ENGINE_BIN": str(node / "engine/bin"),
            "MEMSWEEP_BENCH_PYTHON": str(node / "bench/bin/python"),
            "MEMSWEEP_MODEL_PATH": str(node / "models"),
            "MEMSWEEP_CACHE": str(node / "cache"),
            "MEMSWEEP_OUTPUTS": str(node / "outputs"),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed == json.loads((node / "outputs/doctor.json").read_text())
    assert printed["format"] == doctor.FORMAT
    assert printed["packages"]["engine"]["vllm"] == "0.27.0"
    assert set(printed["free_bytes"]) == {"outputs", "cache"}
