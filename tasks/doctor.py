"""Is everything here and compatible? The facts of a machine against the pins, one line each.

The facts come from tasks/pod/doctor.py, of this machine or of a cluster's node; here they are only
judged, so both are judged alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from tasks.pins import (
    BENCH_VERSION,
    DUCKDB_VERSION,
    ENGINE_VERSION,
    HAUPT_VERSION,
    POLYAXON_VERSION,
    PREFECT_VERSION,
    TORCH_VERSION,
)
from tasks.redact import Secrets

GIB = 2**30
#: Room for the bundles of a small sweep, their copies in Polyaxon and the warehouse.
DISK_BYTES = 2 * GIB
#: Below this an engine with several processes fails with a bus error.
SHM_BYTES = GIB


class State(StrEnum):
    """How one thing is."""

    OK = "ok"
    WRONG = "wrong"
    NONE = "none"  # not there, and not needed for this target
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Check:
    """One line: what was looked at, how it is, and what to do where it is wrong."""

    name: str
    state: State
    text: str
    todo: str | None = None

    def document(self) -> dict[str, str | None]:
        """Return it as JSON values."""
        return {
            "name": self.name,
            "state": self.state.value,
            "text": self.text,
            "todo": self.todo,
        }

    def cleaned(self, secrets: Secrets) -> Check:
        """Return it without the secrets in its texts."""
        todo = None if self.todo is None else secrets.clean_text(self.todo)
        return replace(self, text=secrets.clean_text(self.text), todo=todo)


def of_machine(
    facts: Mapping[str, Any],
    *,
    device: Literal["cpu", "cuda"],
    engine_version: str = ENGINE_VERSION,
    needs_torch_pin: bool = True,
) -> list[Check]:
    """Return the checks of a machine where runs are executed.

    ``needs_torch_pin`` is false where the engine comes in an image, which brings its own torch.
    """
    return [
        *_gpu_checks(facts, device),
        *_package_checks(facts, engine_version, needs_torch_pin=needs_torch_pin),
        *_room_checks(facts, device),
    ]


def _gpu_checks(facts: Mapping[str, Any], device: str) -> Iterator[Check]:
    if device == "cpu":
        text = "not needed: the engine computes on the CPU"
        yield from (Check(name, State.NONE, text) for name in ("driver", "CUDA", "GPU"))
        return
    if not facts["gpus"]:
        why = facts["no_gpu"] or "NVML lists no device"
        todo = (
            "install NVIDIA's driver, or give the container a GPU; without one use --target local"
        )
        yield Check("driver", State.WRONG, str(why).removeprefix("no GPU sampling: "), todo)
        yield from (Check(name, State.NONE, "no device") for name in ("CUDA", "GPU"))
        return
    yield Check("driver", State.OK, f"NVIDIA {facts['driver']}")
    yield _cuda(facts["driver_cuda"], facts["torch_cuda"])
    for gpu in facts["gpus"]:
        yield _gpu(gpu)
        yield _alone(gpu)


def _cuda(driver: str | None, torch: str | None) -> Check:
    if driver is None or torch is None:
        silent = "the driver" if driver is None else "torch"
        return Check("CUDA", State.UNKNOWN, f"{silent} does not tell its CUDA version")
    text = f"driver up to {driver}, torch built for {torch}"
    if _numbers(driver) >= _numbers(torch):
        return Check("CUDA", State.OK, text)
    todo = f"install a driver for CUDA {torch} or newer, or an engine built for CUDA {driver}"
    return Check("CUDA", State.WRONG, text, todo)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def _gpu(gpu: Mapping[str, Any]) -> Check:
    total, reserved = gpu["total_bytes"], gpu["reserved_bytes"] or 0
    if total is None:
        return Check("GPU", State.UNKNOWN, f"{gpu['name']}: does not tell its memory")
    usable = total - reserved
    text = f"{gpu['name']}: {usable / GIB:.2f} GiB usable ({usable:,} bytes)"
    if gpu["compute_capability"]:
        text += f", compute capability {gpu['compute_capability']}"
    return Check("GPU", State.OK, text)


def _alone(gpu: Mapping[str, Any]) -> Check:
    processes, used = gpu["processes"], gpu["used_bytes"]
    if processes is None:
        return Check("GPU processes", State.UNKNOWN, f"{gpu['name']}: does not list its processes")
    if not processes:
        held = "" if used is None else f"{used / 2**20:,.0f} MiB in use"
        return Check("GPU processes", State.OK, f"none; {held}".rstrip("; "))
    listed = ", ".join(f"PID {one['pid']}{_held(one)}" for one in processes)
    todo = "end them, or take another GPU: what they hold is missing from the KV pool"
    return Check("GPU processes", State.WRONG, listed, todo)


def _held(process: Mapping[str, Any]) -> str:
    used = process.get("used_bytes")
    return "" if used is None else f" ({used / GIB:.2f} GiB)"


def _package_checks(
    facts: Mapping[str, Any], engine_version: str, *, needs_torch_pin: bool
) -> Iterator[Check]:
    engine, bench = facts["packages"]["engine"], facts["packages"]["bench"]
    yield _version("vLLM", engine["vllm"], engine_version)
    if needs_torch_pin:
        yield _version("torch", engine["torch"], TORCH_VERSION)
    yield _version("EvalScope", bench["evalscope"], BENCH_VERSION)


def _version(name: str, found: str | None, wanted: str) -> Check:
    if found is None:
        todo = "make the environments with: memsweep setup; in an image: build it anew"
        return Check(name, State.WRONG, f"not installed, wanted {wanted}", todo)
    # "0.27.0+cpu" is the same source as 0.27.0.
    if found.partition("+")[0] == wanted:
        return Check(name, State.OK, found)
    todo = f"install {wanted}: figures of another version are another cell"
    return Check(name, State.WRONG, f"{found}, wanted {wanted}", todo)


def _room_checks(facts: Mapping[str, Any], device: str) -> Iterator[Check]:
    for name, free in facts["free_bytes"].items():
        if free is None:
            yield Check(f"disk ({name})", State.UNKNOWN, "does not tell its free space")
        else:
            text = f"{free / GIB:,.1f} GiB free"
            good = free >= DISK_BYTES
            todo = None if good else f"free some: {DISK_BYTES // GIB} GiB are wanted"
            yield Check(f"disk ({name})", State.OK if good else State.WRONG, text, todo)
    shm = facts["shm_bytes"]
    if device == "cuda" and shm is not None:
        good = shm >= SHM_BYTES
        todo = None if good else "raise shm in the profile, or the container's --shm-size"
        text = f"{shm / GIB:.1f} GiB free"
        yield Check("shared memory", State.OK if good else State.WRONG, text, todo)


def of_models(facts: Mapping[str, Any], *, generated: Sequence[str] = ()) -> list[Check]:
    """Return one line per model; ``generated`` ones are made by the first run that needs them."""
    checks = []
    known = {str(model["name"]) for model in facts["models"]}
    for model in facts["models"]:
        missing = [
            what
            for what, there in (
                ("weights", model["weights_bytes"]),
                ("tokenizer", model["tokenizer"]),
            )
            if not there
        ]
        if missing:
            text = f"{model['name']}: no {' and no '.join(missing)}"
            todo = "download the model completely"
            checks.append(Check("model", State.WRONG, text, todo))
        else:
            size, stated = f"{model['weights_bytes'] / 2**20:,.0f} MiB", model["revision"]
            text = f"{model['name']}: {size} of weights, {stated or 'revision not noted'}"
            checks.append(Check("model", State.OK, text))
    checks += [
        Check("model", State.NONE, f"{name}: generated by the first run that needs it")
        for name in generated
        if name not in known
    ]
    return checks or [Check("model", State.NONE, "none is here")]


def of_ports(ports: Sequence[tuple[str, int, str]]) -> Check:
    """Return the line of the embedded servers' ports: of each its name, number and holder.

    The holder is ``ours``, ``others`` or ``nobody``.
    """
    if not ports:
        return Check("ports", State.NONE, "none recorded: free ones are taken at the first start")
    taken = [(name, port) for name, port, holder in ports if holder == "others"]
    if not taken:
        said = {"ours": "its own", "nobody": "free"}
        listed = ", ".join(f"{port} ({name}, {said[holder]})" for name, port, holder in ports)
        return Check("ports", State.OK, listed)
    listed = ", ".join(f"{port} of {name}" for name, port in taken)
    options = " ".join(f"--{name}-port PORT" for name, _ in taken)
    todo = (
        "end what listens there, or move: memsweep services up takes a free port, "
        f"memsweep services up {options} yours"
    )
    return Check("ports", State.WRONG, f"{listed}: held by something else", todo)


def of_flow(*, haupt: str | None, wants_haupt: bool) -> list[Check]:
    """Return the checks of this side: the flow environment's own packages against the pins."""
    checks = [
        _version(name, _installed(package), wanted)
        for name, package, wanted in (
            ("Prefect", "prefect", PREFECT_VERSION),
            ("Polyaxon", "polyaxon", POLYAXON_VERSION),
            ("DuckDB", "duckdb", DUCKDB_VERSION),
        )
    ]
    if wants_haupt:
        checks.append(_version("Polyaxon server", haupt, HAUPT_VERSION))
    return checks


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
