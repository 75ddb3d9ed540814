"""Profiles: which GPU a target has, and what a GPU host differs in from this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tasks.home import Home
from tasks.launch import target
from tasks.launch.target import Profile
from tasks.plan import gpus
from tests.double import cells
from warehouse.errors import BadInput

#: Recognisably fake.
DIGEST = "sha256:" + "0" * 64


class Nvml(ModuleType):
    """NVML of GPUs given as (name, MiB in all, MiB reserved, compute capability)."""

    NVMLError = type("NVMLError", (Exception,), {})
    nvmlMemory_v2 = 2

    def __init__(self, *devices: tuple[str, int, int, tuple[int, int]]) -> None:
        super().__init__("pynvml")
        self.devices = devices

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.devices[handle][0]

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> Any:
        total, reserved = (size * 2**20 for size in self.devices[handle][1:3])
        memory = SimpleNamespace(used=0, free=total, total=total)
        if version == 2:
            memory.reserved = reserved
        return memory

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return self.devices[handle][3]


def local_gpu(**changes: Any) -> Profile:
    facts = {"name": "x", "description": "x", "device": "cuda", "operation": "local.yaml"}
    return Profile.model_validate(facts | changes)


def test_nvml_names_the_gpu_and_its_memory_without_the_drivers_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = Nvml(("NVIDIA A10", 23_028, 440, (8, 6)), ("NVIDIA H100 80GB HBM3", 81_559, 551, (9, 0)))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = target.gpu(local_gpu(gpu="L4"))
    assert found is not None
    assert (found.name, found.source) == ("A10", "NVML on this machine")
    assert found.total_bytes == (23_028 - 440) * 2**20
    assert abs(found.total_bytes - gpus.find("A10").total_bytes) < 0.001 * found.total_bytes


def test_a_gpu_the_catalogue_lacks_has_its_own_name_and_capability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "NVIDIA GeForce RTX 4090"
    monkeypatch.setitem(sys.modules, "pynvml", Nvml((name, 24_564, 500, (8, 9))))
    found = target.gpu(local_gpu())
    assert found is not None
    assert (found.name, found.compute_capability, found.has_fp8) == (name, (8, 9), True)
    assert found.is_device(name, 24_564 * 2**20)
    assert not found.is_device("NVIDIA GeForce RTX 3090", 24_564 * 2**20)


def test_without_nvml_the_profile_names_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    assert target.gpu(local_gpu(gpu="nvidia l4")) == gpus.find("L4")
    assert target.gpu(local_gpu()) is None
    assert target.gpu(target.load("local")) is None


def test_a_clusters_gpu_is_never_the_one_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(("NVIDIA A10", 23_028, 440, (8, 6))))
    cluster = {"host": "http://x.invalid", "image": "i", "image_digest": DIGEST, "models": "/m"}
    assert target.gpu(local_gpu(gpu="H100", **cluster)) == gpus.find("H100")
    assert target.gpu(local_gpu(**cluster)) is None


def test_a_gpu_that_cannot_be_is_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("description: x\ndevice: cuda\noperation: local.yaml\ngpu: H900\n")
    with pytest.raises(BadInput, match=r"mine\.yaml: gpu: .*not in the catalogue"):
        target.load(str(path))
    path.write_text("description: x\ndevice: cpu\noperation: local.yaml\ngpu: H100\n")
    with pytest.raises(BadInput, match="device cpu has no gpu"):
        target.load(str(path))


def test_a_gpu_host_gets_the_same_operation_as_this_machine(home: Home) -> None:
    here, there = target.load("local"), target.load("local-gpu")
    assert (there.device, there.is_embedded, there.image) == ("cuda", True, None)
    cell = cells.cell()
    one, other = (
        target.build(home, profile, cell, model="tiny-qwen3", run_limit_s=10)
        for profile in (here, there)
    )
    assert one == other


def test_the_image_is_the_one_the_cell_is_pinned_to(home: Home) -> None:
    from testkit.planning import demo

    profile = local_gpu(
        operation="gpu.yaml",
        host="http://x.invalid",
        image="registry.invalid/engine",
        image_digest="unresolved",
        models="/m",
    )
    planned = demo(device="cuda", engine_lock_sha256=None, image_digest=DIGEST).cells[0].cell
    built: Any = target.operation(home, profile, planned)
    assert built["runPatch"]["container"]["image"] == f"registry.invalid/engine@{DIGEST}"
    unresolved = demo(device="cuda", engine_lock_sha256=None).cells[0].cell
    with pytest.raises(BadInput, match="image_digest is unresolved"):
        target.operation(home, profile, unresolved)
