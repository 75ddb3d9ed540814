"""The GPU sampler against a stand-in for NVML that supports as little as some devices do."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tasks.pod.gpu import Gpus, foreign


class FakeNvml(ModuleType):
    """NVML of one GPU, optionally split by MIG; a function it lacks is not supported."""

    class NVMLError(Exception):
        """What NVML raises."""

    nvmlMemory_v2 = 2
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *, devices: int = 1, mig: int = 0, init: str | None = None) -> None:
        super().__init__("pynvml")
        self.devices, self.mig, self.init = devices, mig, init

    def nvmlInit(self) -> None:
        if self.init:
            raise self.NVMLError(self.init)

    def nvmlDeviceGetCount(self) -> int:
        return self.devices

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"gpu{index}"

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        del handle
        if not self.mig:
            raise self.NVMLError("Not Supported")
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        del handle
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, parent: str, index: int) -> str:
        if index >= self.mig:
            raise self.NVMLError("Not Found")
        return f"{parent}.mig{index}"

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return f"UUID-{handle}"

    def nvmlDeviceGetName(self, handle: str) -> str:
        return f"Fake {handle}"

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.1"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12080

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int | None = None) -> Any:
        del handle
        memory = SimpleNamespace(used=10, free=80, total=100)
        if version == 2:
            memory.reserved = 10
        return memory

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        assert ".mig" not in handle, "asked of the parent"
        return SimpleNamespace(gpu=55)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        raise self.NVMLError(f"Not Supported by {handle}")

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        del handle
        return 1000 + kind

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        del handle
        return [
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=7),
            SimpleNamespace(pid=1, usedGpuMemory=None),
        ]


def test_a_gpu_is_sampled_and_what_it_lacks_is_none() -> None:
    gpus = Gpus(FakeNvml())
    assert (gpus.driver_version, gpus.cuda_version) == ("570.1", "12.8")
    assert gpus.describe() == [{"uuid": "UUID-gpu0", "name": "Fake gpu0", "total_bytes": 100}]
    assert gpus.used_bytes() == {"UUID-gpu0": 10}
    assert gpus.sample([os.getpid()]) == {
        "gpus": [
            {
                "uuid": "UUID-gpu0",
                "used_bytes": 10,
                "reserved_bytes": 10,
                "free_bytes": 80,
                "total_bytes": 100,
                "utilization_percent": 55,
                "power_mw": None,
                "sm_clock_mhz": 1001,
                "mem_clock_mhz": 1002,
                "temperature_c": None,
                "throttle_reasons": None,
                "ecc_uncorrected": None,
                "processes": [
                    {"pid": os.getpid(), "used_bytes": 7},
                    {"pid": 1, "used_bytes": None},
                ],
                "foreign_pids": [1],
            }
        ]
    }


def test_mig_devices_stand_for_their_gpu() -> None:
    gpus = Gpus(FakeNvml(mig=2))
    assert [device.uuid for device in gpus.devices] == ["UUID-gpu0.mig0", "UUID-gpu0.mig1"]
    sampled = gpus.sample([])["gpus"]
    assert isinstance(sampled, list)
    assert [gpu["utilization_percent"] for gpu in sampled] == [55, 55]


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (None, "nvidia-ml-py is not installed"),
        (FakeNvml(init="Driver Not Loaded"), "NVML says Driver Not Loaded"),
        (FakeNvml(devices=0), "NVML lists no device"),
    ],
)
def test_where_there_is_none_it_says_why(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType | None, why: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    gpus, reason = Gpus.open()
    assert gpus is None
    assert reason is not None
    assert why in reason


def test_pids_of_another_namespace_cannot_be_judged() -> None:
    assert foreign([2**22 + 1], set()) is None
    assert foreign([], set()) == []
    assert foreign([os.getpid()], {os.getpid()}) == []
