"""What NVML says about the GPUs, where there are any.

Never started where there is none: rows of zeros would look like a GPU that used no memory.
Every figure a GPU does not report is ``None``. MIG devices are listed instead of their GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

#: Figures of one device beside its memory: our name -> (NVML function, arguments).
_FIGURES: dict[str, tuple[str, tuple[str, ...]]] = {
    "power_mw": ("nvmlDeviceGetPowerUsage", ()),
    "sm_clock_mhz": ("nvmlDeviceGetClockInfo", ("NVML_CLOCK_SM",)),
    "mem_clock_mhz": ("nvmlDeviceGetClockInfo", ("NVML_CLOCK_MEM",)),
    "temperature_c": ("nvmlDeviceGetTemperature", ("NVML_TEMPERATURE_GPU",)),
    "throttle_reasons": ("nvmlDeviceGetCurrentClocksThrottleReasons", ()),
    "ecc_uncorrected": (
        "nvmlDeviceGetTotalEccErrors",
        ("NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_VOLATILE_ECC"),
    ),
}


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU or MIG device; ``parent`` is the handle that power and clocks come from."""

    handle: Any
    parent: Any
    uuid: str
    name: str
    total_bytes: int | None


class Gpus:
    """The GPUs of this machine through an already imported and initialised ``pynvml``."""

    def __init__(self, nvml: ModuleType) -> None:
        self._nvml = nvml
        self.devices = list(self._find())
        self.driver_version = self._ask("nvmlSystemGetDriverVersion")
        version = self._ask("nvmlSystemGetCudaDriverVersion_v2")
        self.cuda_version = (
            f"{version // 1000}.{version % 1000 // 10}" if isinstance(version, int) else None
        )

    @classmethod
    def open(cls) -> tuple[Gpus | None, str | None]:
        """Return the GPUs, or ``None`` and why there are none."""
        try:
            import pynvml
        except ImportError:
            return None, "no GPU sampling: nvidia-ml-py is not installed here"
        try:
            pynvml.nvmlInit()
            gpus = cls(pynvml)
        except pynvml.NVMLError as error:
            return None, f"no GPU sampling: NVML says {error}"
        if not gpus.devices:
            return None, "no GPU sampling: NVML lists no device"
        return gpus, None

    def describe(self) -> list[dict[str, object]]:
        """Return what does not change: UUID, name and total bytes of each device."""
        return [
            {"uuid": device.uuid, "name": device.name, "total_bytes": device.total_bytes}
            for device in self.devices
        ]

    def sample(self, own_pids: Iterable[int]) -> dict[str, object]:
        """Return one row's fields for every device."""
        own = set(own_pids)
        return {"gpus": [self._device(device, own) for device in self.devices]}

    def used_bytes(self) -> dict[str, int | None]:
        """Return used bytes by device UUID."""
        return {device.uuid: self._memory(device)["used_bytes"] for device in self.devices}

    def _device(self, device: Device, own: set[int]) -> dict[str, object]:
        utilization = self._ask("nvmlDeviceGetUtilizationRates", device.parent)
        figures: dict[str, object] = {
            name: self._ask(function, device.parent, *(getattr(self._nvml, a, 0) for a in names))
            for name, (function, names) in _FIGURES.items()
        }
        listed = self._ask("nvmlDeviceGetComputeRunningProcesses", device.handle)
        rows = [
            {"pid": int(entry.pid), "used_bytes": entry.usedGpuMemory} for entry in listed or ()
        ]
        return {
            "uuid": device.uuid,
            **self._memory(device),
            "utilization_percent": None if utilization is None else utilization.gpu,
            **figures,
            "processes": None if listed is None else rows,
            "foreign_pids": foreign([int(entry.pid) for entry in listed or ()], own),
        }

    def _memory(self, device: Device) -> dict[str, int | None]:
        # Version 2 tells what the driver reserves apart from what is used.
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        memory = (
            self._ask("nvmlDeviceGetMemoryInfo", device.handle, version) if version else None
        ) or self._ask("nvmlDeviceGetMemoryInfo", device.handle)
        return {
            f"{name}_bytes": None if memory is None else getattr(memory, name, None)
            for name in ("used", "reserved", "free", "total")
        }

    def _find(self) -> Iterable[Device]:
        for index in range(self._nvml.nvmlDeviceGetCount()):
            parent = self._nvml.nvmlDeviceGetHandleByIndex(index)
            mode = self._ask("nvmlDeviceGetMigMode", parent)
            if mode and mode[0]:
                yield from self._mig(parent)
            else:
                yield self._describe(parent, parent)

    def _mig(self, parent: Any) -> Iterable[Device]:
        for index in range(self._ask("nvmlDeviceGetMaxMigDeviceCount", parent) or 0):
            handle = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", parent, index)
            if handle is not None:
                yield self._describe(handle, parent)

    def _describe(self, handle: Any, parent: Any) -> Device:
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        return Device(
            handle=handle,
            parent=parent,
            uuid=str(self._ask("nvmlDeviceGetUUID", handle)),
            name=str(self._ask("nvmlDeviceGetName", handle)),
            total_bytes=None if memory is None else int(memory.total),
        )

    def _ask(self, function: str, *arguments: Any) -> Any:
        """Call one NVML function; ``None`` where the device or the driver does not support it."""
        call: Callable[..., Any] | None = getattr(self._nvml, function, None)
        if call is None:
            return None
        try:
            return call(*arguments)
        except self._nvml.NVMLError:
            return None


def foreign(listed: list[int], own: set[int]) -> list[int] | None:
    """Return the listed PIDs that are not ours; ``None`` where PIDs cannot be compared.

    In a container NVML may speak of the host's PIDs, which mean nothing here.
    """
    if any(not Path(f"/proc/{pid}").exists() for pid in listed):
        return None
    return sorted(set(listed) - own)
