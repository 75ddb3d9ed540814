"""The GPUs a sizing question may name: usable memory as a runtime reports it, and number formats.

The advertised size is the wrong number to plan with: a "24 GB" L4 has 22.03 GiB for CUDA, and the
difference is worth several users. The totals here are what PyTorch prints as "total capacity" in
public out-of-memory messages (two decimals); driver and ECC move them by up to half a percent, so
a measured total always wins (``memsweep`` records it with every run).

Capabilities: NVIDIA's table of CUDA GPUs. Formats: bf16 from 8.0, fp8 from 8.9, fp4 from 10.0
(CUDA programming guide, compute capabilities).
"""

from __future__ import annotations

from dataclasses import dataclass

from warehouse.errors import BadInput

GIB = 2**30

#: Which public messages a total was taken from.
SEED = "recipe 'Where the GPU memory goes': CUDA reports 22.06 GiB on an A10"
MESSAGES = "total capacity in public PyTorch out-of-memory messages"

#: First compute capability with a number format in hardware.
FORMAT_SINCE: dict[str, tuple[int, int]] = {
    "fp16": (7, 0),
    "int8": (7, 2),
    "int4": (7, 5),
    "bf16": (8, 0),
    "fp8": (8, 9),
    "fp4": (10, 0),
}

#: NVML's and CUDA's totals of one device differ by less, those of two sizes of a GPU by more.
DEVICE_TOLERANCE = 0.03


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU model."""

    name: str
    #: Advertised size in units of 10**9 bytes.
    advertised_gb: int
    #: Total device memory as the CUDA runtime reports it, to 0.01 GiB.
    total_bytes: int
    compute_capability: tuple[int, int]
    source: str

    @property
    def formats(self) -> tuple[str, ...]:
        """Number formats the hardware computes with."""
        return tuple(
            name for name, since in FORMAT_SINCE.items() if self.compute_capability >= since
        )

    @property
    def has_fp8(self) -> bool:
        """FP8 kernels need compute capability 8.9."""
        return "fp8" in self.formats

    @property
    def default_batched_tokens(self) -> int:
        """vLLM's max_num_batched_tokens for an API server on this card (engine/arg_utils.py)."""
        return 8192 if self._is_large else 2048

    @property
    def default_sequences(self) -> int:
        """vLLM's max_num_seqs for an API server on this card (engine/arg_utils.py)."""
        return 1024 if self._is_large else 256

    def is_device(self, name: str, total_bytes: int) -> bool:
        """Whether a device that NVML calls ``name`` is this GPU, its memory included.

        NVML's total holds what the driver reserves (up to 2.1 %), CUDA's does not.
        """
        near = abs(total_bytes - self.total_bytes) <= DEVICE_TOLERANCE * self.total_bytes
        return near and _family(name) == _family(self.name)

    @property
    def _is_large(self) -> bool:
        return self.total_bytes >= 70 * GIB and not self.name.startswith("A100")


def _gpu(
    name: str, advertised_gb: int, total_gib: str, capability: tuple[int, int], source: str
) -> Gpu:
    whole, _, hundredths = total_gib.partition(".")
    total = (int(whole) * 100 + int(hundredths)) * GIB // 100
    return Gpu(name, advertised_gb, total, capability, source)


#: The catalogue, smallest first.
GPUS: tuple[Gpu, ...] = (
    _gpu("T4", 16, "14.74", (7, 5), MESSAGES),
    _gpu("L4", 24, "22.03", (8, 9), MESSAGES),
    _gpu("A10", 24, "22.06", (8, 6), SEED),
    _gpu("A100-40GB", 40, "39.49", (8, 0), MESSAGES),
    _gpu("L40S", 48, "44.39", (8, 9), MESSAGES),
    _gpu("H100", 80, "79.11", (9, 0), MESSAGES),
    _gpu("A100-80GB", 80, "79.25", (8, 0), MESSAGES),
    _gpu("H200", 141, "139.80", (9, 0), MESSAGES),
    _gpu("B200", 180, "178.35", (10, 0), MESSAGES),
)

_ALIASES = {"A100": "A100-80GB", "A100-40": "A100-40GB", "A100-80": "A100-80GB", "A10G": "A10"}


def _key(name: str) -> str:
    return name.upper().removeprefix("NVIDIA").strip(" -_").replace("_", "-").replace(" ", "-")


_FAMILIES = frozenset(gpu.name.partition("-")[0] for gpu in GPUS)


def _family(name: str) -> str:
    """Return "A100" of "NVIDIA A100-SXM4-80GB" and "A100-40GB"; a GPU not listed keeps its name."""
    words = name.upper().replace("-", " ").split()
    known = [_ALIASES.get(word, word) if word == "A10G" else word for word in words]
    return next((word for word in known if word in _FAMILIES), name)


def of_device(name: str, total_bytes: int) -> Gpu | None:
    """Return the catalogue's GPU that a device is, by NVML's name and total; None: another one."""
    return next((gpu for gpu in GPUS if gpu.is_device(name, total_bytes)), None)


def find(name: str) -> Gpu:
    """Return the GPU called ``name`` (case, blanks and "NVIDIA" do not matter).

    Raises:
        BadInput: the catalogue has no such GPU.
    """
    key = _key(name)
    key = _ALIASES.get(key, key)
    for gpu in GPUS:
        if _key(gpu.name) == key:
            return gpu
    raise BadInput(
        f"GPU {name!r}: not in the catalogue; known are {', '.join(gpu.name for gpu in GPUS)}"
    )
