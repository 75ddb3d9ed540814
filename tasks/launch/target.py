"""Where runs are executed: a profile (this machine or a cluster) turned into what a run needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

import polyaxonfiles
from tasks.home import Home
from tasks.launch import environments
from tasks.launch import operation as operations
from tasks.plan import gpus
from tasks.plan.cell import Cell
from tasks.pod.gpu import Gpus
from warehouse.errors import BadInput

PROFILES = Path(polyaxonfiles.__file__).parent / "profiles"
UNRESOLVED = "unresolved"
#: A run's own deadlines come first; Polyaxon's is the last resort.
_TIMEOUT_MARGIN_S = 60


class Profile(BaseModel):
    """One target, as a file of ``polyaxonfiles/profiles/`` describes it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(description="the file's name without its ending")
    description: str = Field(description="one line for people")
    device: Literal["cpu", "cuda"] = Field(description="what the engine computes on")
    operation: str = Field(description="file of polyaxonfiles/ that is submitted")
    gpu: str | None = Field(
        None, description="GPU of the catalogue (tasks/plan/gpus.py), for predictions"
    )
    slots: Annotated[int, Field(ge=1)] = Field(1, description="runs at the same time")
    queue_s: Annotated[float, Field(gt=0)] = Field(3600, description="longest wait for a slot, s")
    host: str | None = Field(None, description="Polyaxon's address; None: the embedded server")
    owner: str = Field("default", description="owner of the project in Polyaxon")
    project: str = Field("memsweep", description="project in Polyaxon")
    image: str | None = Field(None, description="engine image without tag or digest")
    image_digest: Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64}|unresolved)$")] | None = (
        Field(None, description="digest of the image; 'unresolved' until 'memsweep pin'")
    )
    models: str | None = Field(None, description="folder of the models where the run is executed")
    environment: dict[str, object] | None = Field(
        None, description="Polyaxon's environment section: node selector, tolerations, ..."
    )
    resources: dict[str, object] | None = Field(
        None, description="the container's resources, Kubernetes' form"
    )

    @field_validator("gpu")
    @classmethod
    def _the_gpu_is_known(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                gpus.find(value)
            except BadInput as error:
                raise ValueError(str(error)) from error
        return value

    @model_validator(mode="after")
    def _a_cluster_is_complete(self) -> Profile:
        if self.gpu is not None and self.device == "cpu":
            raise ValueError("a profile with device cpu has no gpu")
        if self.host is not None and None in (self.image, self.image_digest, self.models):
            raise ValueError("a profile with a host needs image, image_digest and models")
        return self

    @property
    def is_embedded(self) -> bool:
        """Whether runs are executed by the embedded services on this machine."""
        return self.host is None


def names() -> list[str]:
    """Return the names of the shipped profiles."""
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def load(name: str) -> Profile:
    """Return a shipped profile by name, or one from a file.

    Raises:
        BadInput: there is none, or something in it is not as it must be.
    """
    shipped = PROFILES / f"{name}.yaml"
    path = shipped if name in names() else Path(name)
    if not path.is_file():
        raise BadInput(
            f"target {name!r}: neither a shipped profile ({', '.join(names())}) nor a file"
        )
    try:
        value = yaml.safe_load(path.read_text())
        if not isinstance(value, dict):
            raise BadInput(f"target {path}: got {type(value).__name__}, wanted a mapping")
        return Profile(name=path.stem, **value)
    except yaml.YAMLError as error:
        raise BadInput(f"target {path}: no YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "profile"
        raise BadInput(f"target {path}: {where}: {first['msg']}") from error


def gpu(profile: Profile) -> gpus.Gpu | None:
    """Return the GPU of a target: measured where runs are executed here, else as its file names it.

    ``None`` on the CPU, and where neither tells.
    """
    if profile.device == "cpu":
        return None
    here = _gpu_here() if profile.is_embedded else None
    return here or (gpus.find(profile.gpu) if profile.gpu else None)


def _gpu_here() -> gpus.Gpu | None:
    """Return the smallest GPU of this machine as NVML tells it; ``None`` without one.

    What CUDA reports is NVML's total without what the driver reserves for itself.
    """
    found, _ = Gpus.open()
    if found is None:
        return None
    states = cast("list[dict[str, Any]]", found.sample(())["gpus"])
    described = []
    for device, state in zip(found.devices, states, strict=True):
        total = device.total_bytes
        known = None if total is None else gpus.of_device(device.name, total)
        capability = known.compute_capability if known else _capability(device.parent)
        if total is not None and capability is not None:
            described.append(
                gpus.Gpu(
                    name=known.name if known else device.name,
                    advertised_gb=known.advertised_gb if known else round(total / 1e9),
                    total_bytes=total - (state["reserved_bytes"] or 0),
                    compute_capability=capability,
                    source="NVML on this machine",
                )
            )
    return min(described, key=lambda one: one.total_bytes, default=None)


def _capability(handle: object) -> tuple[int, int] | None:
    import pynvml

    try:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    except pynvml.NVMLError:
        return None
    return int(major), int(minor)


def model_folder(home: Home, profile: Profile, model: str) -> Path:
    """Return where a model lies for the runs of a target; a cluster's folder is not here."""
    return (Path(profile.models) if profile.models else home.models) / model


def parameters(home: Home, profile: Profile, model: str) -> dict[str, str]:
    """Return the places a run of this model needs on this target, by the component's inputs."""
    if not profile.is_embedded:
        return {"model_path": str(model_folder(home, profile, model))}
    return {
        **environments.places(home),
        "model_path": str(model_folder(home, profile, model)),
        "code": str(environments.stage_pod_code(home)),
    }


def build(
    home: Home, profile: Profile, document: Mapping[str, object], *, model: str, run_limit_s: float
) -> dict[str, object]:
    """Return the operation of a cell's document on this target.

    Raises:
        BadInput: the image is unresolved: no pin is ever made up.
    """
    if profile.image_digest == UNRESOLVED:
        raise BadInput(
            f"target {profile.name}: image_digest is unresolved; run 'memsweep pin' where the "
            "registry can be reached"
        )
    image = None if profile.image is None else f"{profile.image}@{profile.image_digest}"
    return operations.build(
        document,
        operation_file=profile.operation,
        parameters=parameters(home, profile, model),
        run_limit_s=run_limit_s,
        image=image,
        environment=profile.environment,
        resources=profile.resources,
    )


def operation(home: Home, profile: Profile, cell: Cell) -> dict[str, object]:
    """Return the operation of a cell on this target; with its deadline plus a margin.

    The image is the one the cell is pinned to, which a sweep may state instead of the profile.
    """
    digest = cell.pins.image_digest
    return build(
        home,
        profile if digest is None else profile.model_copy(update={"image_digest": digest}),
        cell.document(),
        model=cell.setting.model.name,
        run_limit_s=cell.limits.run_s + _TIMEOUT_MARGIN_S,
    )
