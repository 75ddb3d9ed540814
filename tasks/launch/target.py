"""Where runs are executed: a profile (this machine or a cluster) turned into what a run needs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, cast
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

import polyaxonfiles
from tasks.home import Home
from tasks.launch import environments, labels, pins, quantity
from tasks.launch import operation as operations
from tasks.launch.operation import Placement
from tasks.plan import gpus
from tasks.plan.cell import Cell
from tasks.pod.gpu import Gpus
from tasks.redact import kinds
from warehouse.errors import BadInput

PROFILES = Path(polyaxonfiles.__file__).parent / "profiles"
UNRESOLVED = "unresolved"
#: A run's own deadlines come first; Polyaxon's is the last resort.
_TIMEOUT_MARGIN_S = 60
_GPU_VENDOR = "nvidia.com/"
_GPU = f"{_GPU_VENDOR}gpu"
_COMMIT = re.compile(r"[0-9a-f]{40}")
#: DNS-1123 subdomain: what Kubernetes takes as the name of a claim or a secret.
_OBJECT = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_OBJECT_LENGTH = 253
_TOKEN_LENGTH = 32
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Of an address: what no part of one has, written as it is.
_NO_ADDRESS = re.compile(r"[^!-~]|[<>\"\\^`{|}]")
#: Names of the volumes of a cluster's pod.
_MODELS, _SHM = "memsweep-models", "memsweep-shm"
#: What the download of a model needs; it is over before the run begins.
_FETCH_RESOURCES = {
    "requests": {"cpu": "1", "memory": "1Gi"},
    "limits": {"memory": "1Gi"},
}


def _object_name(text: str) -> str:
    if len(text) > _OBJECT_LENGTH or _OBJECT.fullmatch(text) is None:
        raise ValueError(
            f"got {text!r}, wanted a name as Kubernetes has them: a-z, 0-9, - and ., with a letter "
            "or digit at both ends"
        )
    return text


def _variable(text: str) -> str:
    # Never shown: a token itself is what is put there by mistake. Polyaxon's are 40 hex digits.
    if kinds(text) or (len(text) >= _TOKEN_LENGTH and "_" not in text):
        raise ValueError("holds what looks like a token; wanted the name of a variable that has it")
    if _VARIABLE.fullmatch(text) is None:
        raise ValueError("wanted the name of a variable: A-Z, a-z, 0-9 and _, no digit first")
    return text


def _shaped(pattern: str, wanted: str) -> AfterValidator:
    """Return a check of a text's shape, which says what is wanted."""
    shape = re.compile(pattern)

    def check(text: str) -> str:
        if shape.fullmatch(text) is None:
            raise ValueError(f"got {text!r}, wanted {wanted}")
        return text

    return AfterValidator(check)


#: What Polyaxon takes as the name of a user, an organization, a project, an agent or a queue.
_NAME = r"[A-Za-z0-9_.-]*[A-Za-z0-9_][A-Za-z0-9_.-]*"
PolyaxonName = Annotated[str, _shaped(_NAME, "a name as Polyaxon has them: letters, digits, - _ .")]
QueueName = Annotated[str, _shaped(f"(?:{_NAME}/)?{_NAME}", "AGENT/QUEUE, or QUEUE")]
#: As registries take them: a host with a port, folders and a name in small letters.
ImageName = Annotated[
    str,
    _shaped(
        r"(?:[A-Za-z0-9.-]+(?::[0-9]+)?/)?[a-z0-9]+(?:(?:[._-]+|/)[a-z0-9]+)*",
        "HOST[:PORT]/NAME of an image, without tag and digest",
    ),
]
VariableName = Annotated[str, AfterValidator(_variable)]
ObjectName = Annotated[str, AfterValidator(_object_name)]
Quantities = dict[str, str | int | float]
#: By kind (``requests``, ``limits``).
Resources = dict[str, Quantities]


class SecretKey(BaseModel):
    """One value of a Kubernetes secret, by reference: the value never leaves the cluster."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: ObjectName = Field(description="name of the secret")
    key: str = Field(description="key in it")


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
    approval_s: Annotated[float, Field(gt=0)] = Field(
        8 * 3600, description="longest wait for a run's approval in Polyaxon, s"
    )
    host: str | None = Field(None, description="Polyaxon's address; None: the embedded server")
    owner: PolyaxonName = Field("default", description="owner of the project in Polyaxon")
    project: PolyaxonName = Field("memsweep", description="project in Polyaxon")
    token_env: VariableName | None = Field(
        None, description="variable with the token; None: POLYAXON_AUTH_TOKEN, else polyaxon login"
    )
    verify_tls: bool = Field(True, description="whether the server's certificate is verified")
    ca_file: str | None = Field(
        None, description="its authority's certificates, PEM; None: system's"
    )
    request_s: Annotated[float, Field(gt=0)] = Field(
        10, description="longest wait for an answer, s"
    )
    call_s: Annotated[float, Field(gt=0)] = Field(
        60, description="longest time for which one question is asked again, s"
    )
    poll_s: Annotated[float, Field(ge=0.1, le=60)] = Field(
        0.5, description="how often each run's status is asked for, s"
    )
    collect_s: Annotated[float, Field(ge=0)] = Field(
        120, description="longest wait for outputs that are synced after a run's end, s"
    )
    managed_by: Literal["agent", "cli"] = Field(
        "agent", description="who executes: the server's agent; cli: a supervisor of ours beside it"
    )
    places: dict[str, str] | None = Field(
        None, description="places in the image, by the component's inputs, over the operation's"
    )
    image: ImageName | None = Field(None, description="engine image without tag or digest")
    image_digest: Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64}|unresolved)$")] | None = (
        Field(None, description="digest of the image; 'unresolved' until 'memsweep pin'")
    )
    models: str | None = Field(None, description="folder of the models where the run is executed")
    models_claim: ObjectName | None = Field(
        None, description="PersistentVolumeClaim mounted at models, kept from run to run"
    )
    fetch_s: Annotated[float, Field(gt=0)] | None = Field(
        None, description="longest download of a model into models_claim, s; None: it is there"
    )
    hub: str | None = Field(
        None, description="hub the models come from, https; None: the public one"
    )
    secrets: dict[str, SecretKey] = Field(
        default_factory=dict, description="variables of the download (HF_TOKEN), by reference"
    )
    shm: str = Field("8Gi", description="size of /dev/shm, in memory; counts as the run's")
    queue: QueueName | None = Field(None, description="AGENT/QUEUE of Polyaxon")
    namespace: ObjectName | None = Field(
        None,
        description="Kubernetes namespace that the agent manages; None: the agent's own",
    )
    collect_within_s: Annotated[int, Field(ge=3600)] = Field(
        86_400, description="longest delay of the collection, s; a finished pod is kept that long"
    )
    quota: dict[str, str | int] = Field(
        default_factory=dict, description="what all runs may request at the same time"
    )
    environment: dict[str, object] | None = Field(
        None, description="Polyaxon's environment section: node selector, tolerations, ..."
    )
    resources: dict[Literal["requests", "limits"], Quantities] | None = Field(
        None, description="the container's resources, Kubernetes' form; one GPU where none is named"
    )

    @field_validator("host")
    @classmethod
    def _the_host_is_an_address(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                address = urlsplit(value)
                # Asked for: a port that is no number is found only then.
                good = address.port != 0 and bool(address.hostname)
                good = good and address.scheme in ("http", "https")
                good = good and not (address.query or address.fragment or _NO_ADDRESS.search(value))
            except ValueError:
                good = False
            if not good:
                raise ValueError("wanted http://HOST[:PORT][/PATH] or https://HOST[:PORT][/PATH]")
            if address.username or address.password:
                raise ValueError("credentials have no place in an address; see token_env")
        return value

    @field_validator("hub")
    @classmethod
    def _the_hub_is_an_address(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                # A token would travel in clear to any other.
                pins.address(value, what="hub")
            except BadInput as error:
                raise ValueError(str(error)) from error
        return value

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
        if self.host is not None and not _is_mount(str(self.models)):
            raise ValueError(
                f"models: got {self.models!r}, wanted an absolute folder of the container, such as "
                "/models"
            )
        if self.fetch_s is not None and self.models_claim is None:
            raise ValueError("fetch_s is given without models_claim: nothing would be kept")
        if self.secrets and self.fetch_s is None:
            raise ValueError("secrets are for the download only, and fetch_s is not given")
        if "restartPolicy" in (self.environment or {}):
            raise ValueError("environment: restartPolicy is not a profile's: no run is repeated")
        quantity.parse(self.shm)
        self._has_a_gpu()
        self._stays_within_its_quota()
        return self

    @property
    def _gets_gpus(self) -> bool:
        """Whether a run's container asks a cluster for GPUs."""
        return self.device == "cuda" and not self.is_embedded

    def _has_a_gpu(self) -> None:
        for kind, named in (self.resources or {}).items():
            if self._gets_gpus and _GPU in named:
                count = quantity.parse(named[_GPU])
                if count < 1 or count != int(count):
                    raise ValueError(
                        f"resources.{kind}: {_GPU} is {named[_GPU]}, wanted 1 or more for device "
                        "cuda; left out, a run gets one"
                    )

    def _stays_within_its_quota(self) -> None:
        for name, most in self.quota.items():
            asked = self.requested(name)
            if asked is None or asked * self.slots > quantity.parse(most):
                got = f"{self.slots} slots of {asked}" if asked is not None else "no request of it"
                raise ValueError(f"quota of {name} is {most}, got {got} in resources")

    def requested(self, resource: str) -> Decimal | None:
        """Return what a run requests of a resource; a limit alone is a request too."""
        given = self.container_resources
        for kind in ("requests", "limits"):
            if resource in given.get(kind, {}):
                return quantity.parse(given[kind][resource])
        return None

    @property
    def container_resources(self) -> Resources:
        """What a run's container asks for: as stated, on a cluster with the GPU it computes on.

        That is one whole GPU where none, nor a slice of one, is named.
        """
        stated: Resources = {kind: dict(named) for kind, named in (self.resources or {}).items()}
        # A slice of a GPU has a name of its own, such as nvidia.com/mig-1g.10gb.
        named = {name for kind in stated.values() for name in kind if name.startswith(_GPU_VENDOR)}
        if self._gets_gpus and named <= {_GPU}:
            # Kubernetes takes a limit for a request, but no request without a limit.
            count = stated.get("requests", {}).get(_GPU, 1)
            stated["limits"] = {_GPU: count, **stated.get("limits", {})}
        return stated

    @property
    def gpus(self) -> int:
        """GPUs of a run; one where the profile does not say."""
        return int(self.requested(_GPU) or 1)

    @property
    def is_embedded(self) -> bool:
        """Whether runs are executed by the embedded services on this machine."""
        return self.host is None


def _is_mount(folder: str) -> bool:
    """Tell whether Kubernetes can mount a volume there."""
    path = PurePosixPath(folder)
    is_below_root = path.is_absolute() and len(path.parts) > 1
    return is_below_root and ".." not in path.parts and ":" not in folder


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
        if "name" in value:
            raise BadInput(f"target {path}: name: it is that of the file, leave it out")
        return Profile.model_validate({**value, "name": path.stem})
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


def model_path(home: Home, profile: Profile, model: str, revision: str | None) -> str:
    """Return the folder a run serves the model from; downloaded ones lie apart by commit."""
    folder = model_folder(home, profile, model)
    return str(folder if profile.fetch_s is None or revision is None else folder / revision)


def parameters(
    home: Home, profile: Profile, model: str, revision: str | None = None
) -> dict[str, str]:
    """Return the places a run of this model needs on this target, by the component's inputs."""
    path = {"model_path": model_path(home, profile, model, revision)}
    if not profile.is_embedded:
        return {**path, **(profile.places or {})}
    return {**environments.places(home), **path, "code": str(environments.stage_pod_code(home))}


def build(
    home: Home,
    profile: Profile,
    document: Mapping[str, object],
    *,
    model: str,
    run_limit_s: float,
    revision: str | None = None,
    run_labels: Mapping[str, str] | None = None,
    is_dry: bool = False,
) -> dict[str, object]:
    """Return the operation of a cell's document on this target.

    ``run_labels`` are the target's where none are given: nothing is created without a label.
    ``is_dry`` is for looking at it only: an image without a digest is then called unresolved.

    Raises:
        BadInput: the image is unresolved: no pin is ever made up.
    """
    _need_digest(profile, is_dry=is_dry)
    places = parameters(home, profile, model, revision)
    return operations.build(
        document,
        operation_file=profile.operation,
        parameters=places,
        run_limit_s=run_limit_s,
        placement=(
            None
            if profile.is_embedded
            else _placement(
                profile,
                model,
                places["model_path"],
                labels.of_target(profile.name) if run_labels is None else run_labels,
            )
        ),
    )


def operation(
    home: Home, profile: Profile, cell: Cell, *, round_id: str | None = None, is_dry: bool = False
) -> dict[str, object]:
    """Return the operation of a cell on this target; with its deadline plus a margin.

    The image is the one the cell is pinned to, which a sweep may state instead of the profile.
    ``round_id`` becomes a label on a cluster.

    Raises:
        BadInput: the image is unresolved, the cell needs more GPUs than a run gets, or its model is
            pinned to no commit that could be downloaded.
    """
    server = cell.setting.server
    needed = server.tensor_parallel_size * server.pipeline_parallel_size
    if not profile.is_embedded and needed > profile.gpus:
        raise BadInput(
            f"cell {cell.label}: needs {needed} GPUs, but target {profile.name} gives a run "
            f"{profile.gpus}; raise {_GPU} under resources in the profile"
        )
    revision = cell.pins.model_revision
    if profile.fetch_s is not None and not is_dry and not _COMMIT.fullmatch(revision):
        raise BadInput(
            f"cell {cell.label}: model {cell.setting.model.name} is pinned to {revision:.20}, but "
            f"target {profile.name} downloads models by commit; run 'memsweep pin', or take a "
            "target that holds the model (no fetch_s)"
        )
    digest = cell.pins.image_digest
    return build(
        home,
        profile if digest is None else profile.model_copy(update={"image_digest": digest}),
        cell.document(),
        model=cell.setting.model.name,
        revision=revision,
        run_limit_s=limit_s(profile, cell),
        run_labels=labels.of_run(
            target=profile.name,
            cell_key=cell.cell_key,
            setting_key=cell.setting_key,
            round_id=round_id,
        ),
        is_dry=is_dry,
    )


def service(
    home: Home,
    profile: Profile,
    component: Mapping[str, Any],
    inputs: Mapping[str, str],
    *,
    is_dry: bool = False,
) -> dict[str, object]:
    """Return the operation of a model server (service.yaml) on this target.

    ``inputs`` are the component's; the model's folder and the count of GPUs are the profile's.
    ``is_dry`` is for looking at it only: an image without a digest is then called unresolved.

    Raises:
        BadInput: the target is this machine, the component has no deadline, no model is given, an
            input is the profile's to say, or the image is unresolved.
    """
    name, lasts_s = component.get("name"), (component.get("termination") or {}).get("timeout")
    if not name or not isinstance(lasts_s, int):
        raise BadInput(f"service {name}: wanted a name, and termination.timeout in seconds")
    if profile.is_embedded:
        raise BadInput(
            f"{name}: target {profile.name} is this machine, a service is served on a cluster; "
            "give --target PROFILE with a host"
        )
    if missing := [one for one in ("model", "model_revision") if one not in inputs]:
        raise BadInput(f"{name}: {missing[0]} is missing, give it with -P {missing[0]}=…")
    _need_digest(profile, is_dry=is_dry)
    model = inputs["model"]
    placed = {
        "model_path": model_path(home, profile, model, inputs["model_revision"]),
        "tensor_parallel_size": str(profile.gpus),
        **{k: v for k, v in (profile.places or {}).items() if k == "engine_bin"},
    }
    if stated := sorted(placed.keys() & inputs.keys()):
        raise BadInput(f"{name}: {stated[0]} is what target {profile.name} says, leave it out")
    return operations.build_service(
        component,
        {**inputs, **placed},
        run_limit_s=lasts_s + _before_run_s(profile),
        placement=_placement(profile, model, placed["model_path"], labels.of_target(profile.name)),
    )


def _need_digest(profile: Profile, *, is_dry: bool) -> None:
    if profile.image_digest == UNRESOLVED and not is_dry:
        raise BadInput(
            f"target {profile.name}: image_digest is unresolved; run 'memsweep pin' where the "
            "registry can be reached"
        )


def limit_s(profile: Profile, cell: Cell) -> float:
    """Return the deadline given to Polyaxon, seconds.

    On a cluster the clock starts when the pod is created: waiting for a card and the download of
    the model count too.
    """
    run = cell.limits.run_s + _TIMEOUT_MARGIN_S
    return run if profile.is_embedded else run + _before_run_s(profile)


def _before_run_s(profile: Profile) -> float:
    """Return how long a cluster's pod may be there before what it is for begins, seconds."""
    return profile.queue_s + (profile.fetch_s or 0)


def _placement(
    profile: Profile,
    model: str,
    folder: str,
    run_labels: Mapping[str, str],
) -> Placement:
    """Return what a cluster's profile adds to the operation of a run."""
    image = f"{profile.image}@{profile.image_digest}"
    shm = {"medium": "Memory", "sizeLimit": profile.shm}
    volumes: list[dict[str, object]] = [{"name": _SHM, "emptyDir": shm}]
    mounts: list[dict[str, object]] = [{"name": _SHM, "mountPath": "/dev/shm"}]
    if profile.models_claim is not None:
        claim = {"claimName": profile.models_claim}
        volumes.append({"name": _MODELS, "persistentVolumeClaim": claim})
        mounts.append({"name": _MODELS, "mountPath": profile.models, "readOnly": True})
    return Placement(
        image=image,
        environment=profile.environment or {},
        labels=run_labels,
        resources=profile.container_resources,
        volumes=volumes,
        mounts=mounts,
        init=[_download(profile, image, model, folder)] if profile.fetch_s else [],
        queue=profile.queue,
        namespace=profile.namespace,
        ttl_s=profile.collect_within_s,
    )


def _download(profile: Profile, image: str, model: str, folder: str) -> dict[str, object]:
    """Return the init container that downloads a model's commit once and checks every file."""
    values = {
        "PYTHONPATH": "/opt/memsweep",
        "MEMSWEEP_MODEL_NAME": model,
        "MEMSWEEP_MODEL_PATH": folder,
        "MEMSWEEP_FETCH_S": str(int(profile.fetch_s or 0)),
        **({"HF_ENDPOINT": profile.hub} if profile.hub else {}),
    }
    env: list[dict[str, object]] = [{"name": name, "value": v} for name, v in values.items()]
    env += [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret.name, "key": secret.key}}}
        for name, secret in profile.secrets.items()
    ]
    return {
        "container": {
            "name": "memsweep-model",
            "image": image,
            "command": ["/opt/bench/bin/python", "-P", "-m", "tasks.pod.fetch"],
            "env": env,
            "resources": _FETCH_RESOURCES,
            "volumeMounts": [{"name": _MODELS, "mountPath": profile.models}],
        }
    }
