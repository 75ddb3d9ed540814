"""What a sweep would create on a cluster, and what has to be there already; no server is asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from tasks.home import Home
from tasks.launch import quantity, render, target
from tasks.launch.target import Profile
from tasks.plan.plan import Plan, PlannedCell

#: Where a profile names no namespace, the agent's own is used, which is not known here.
AGENTS_NAMESPACE = "agent"


@dataclass(frozen=True, slots=True)
class Created:
    """One kind of object that the runs of a cell create; its name ends with the run's UUID."""

    cell: str
    runs: int
    kind: str
    name: str
    namespace: str
    image: str
    labels: dict[str, str]
    requests: dict[str, str]  # of the pod, Kubernetes' quantities
    timeout_s: int
    ttl_s: int
    resource: dict[str, Any]

    def document(self) -> dict[str, object]:
        """Return the object for ``--json``, without its full text."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "resource"}


@dataclass(frozen=True, slots=True)
class Listing:
    """All objects of a plan on a target."""

    created: tuple[Created, ...]
    needs: dict[str, list[str]]  # kind -> names that must exist
    at_once: dict[str, str]  # what runs request at the same time, at most


def listing(home: Home, profile: Profile, plan: Plan) -> Listing:
    """Return what the runs of a plan would create; nothing on this machine, where they are
    processes.

    Raises:
        BadInput: Polyaxon cannot render an operation, or a cell does not fit the profile.
    """
    if profile.is_embedded:
        return Listing((), {}, {})
    created = [_created(home, profile, planned, plan) for planned in _measured(plan)]
    most = _sum([_largest(created)] * profile.slots)
    return Listing(tuple(created), _needs(profile, created), _texts(most))


def _measured(plan: Plan) -> Iterator[PlannedCell]:
    yield from (planned for planned in plan.cells if not planned.skipped)


def _created(home: Home, profile: Profile, planned: PlannedCell, plan: Plan) -> Created:
    operation = target.operation(home, profile, planned.cell, is_dry=True)
    made = render.resource(
        operation,
        namespace=profile.namespace or AGENTS_NAMESPACE,
        owner=profile.owner,
        project=profile.project,
        name=planned.experiment,
        host=profile.host,
    )
    pod = pod_spec(made)
    ended = made["termination"]
    return Created(
        cell=planned.cell.label,
        runs=plan.sweep.repeats,
        kind=f"{made['kind']} ({made['apiVersion']})",
        name=made["metadata"]["name"],
        namespace=made["metadata"]["namespace"],
        image=pod["containers"][0]["image"],
        labels={k: v for k, v in made["metadata"]["labels"].items() if render.RUN_UUID not in v},
        requests=_texts(pod_requests(pod)),
        timeout_s=ended["activeDeadlineSeconds"],
        ttl_s=ended["ttlSecondsAfterFinished"],
        resource=made,
    )


def pod_spec(resource: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pod's specification inside Polyaxon's resource."""
    specs = (v for k, v in resource.items() if k.endswith("Spec"))
    spec: dict[str, Any] = next(specs)["template"]["spec"]
    return spec


def pod_requests(pod: Mapping[str, Any]) -> dict[str, Decimal]:
    """Return what a pod requests: its containers together, or an init container that needs more."""
    together = _sum([_requests(one) for one in pod["containers"]])
    for one in pod.get("initContainers") or []:
        for name, value in _requests(one).items():
            together[name] = max(value, together.get(name, Decimal(0)))
    return together


def _requests(container: Mapping[str, Any]) -> dict[str, Decimal]:
    resources = container.get("resources") or {}
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: quantity.parse(value) for name, value in asked.items()}


def _sum(many: list[dict[str, Decimal]]) -> dict[str, Decimal]:
    total: dict[str, Decimal] = {}
    for one in many:
        for name, value in one.items():
            total[name] = total.get(name, Decimal(0)) + value
    return total


def _largest(created: list[Created]) -> dict[str, Decimal]:
    largest: dict[str, Decimal] = {}
    for one in created:
        for name, value in one.requests.items():
            largest[name] = max(quantity.parse(value), largest.get(name, Decimal(0)))
    return largest


def _texts(found: Mapping[str, Decimal]) -> dict[str, str]:
    return {name: _text(value) for name, value in found.items()}


def _text(value: Decimal) -> str:
    mebibytes = value / 2**20
    if mebibytes >= 1 and mebibytes == int(mebibytes):
        whole = int(mebibytes)
        return f"{whole // 1024}Gi" if whole % 1024 == 0 else f"{whole}Mi"
    return f"{value.normalize():f}"


def _needs(profile: Profile, created: list[Created]) -> dict[str, list[str]]:
    """Return what the objects refer to and nobody here creates."""
    needs: dict[str, set[str]] = {}
    for one in created:
        pod = pod_spec(one.resource)
        needs.setdefault("namespace", set()).add(one.namespace)
        for kind, name in (
            ("service account", pod.get("serviceAccountName")),
            ("priority class", pod.get("priorityClassName")),
            ("queue", profile.queue),
        ):
            if name:
                needs.setdefault(kind, set()).add(name)
        for volume in pod.get("volumes") or []:
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                needs.setdefault("volume claim", set()).add(claim)
    if created:
        needs["secret"] = {one.name for one in profile.secrets.values()}
        secrets = (profile.environment or {}).get("imagePullSecrets")
        needs["secret"] |= set(secrets) if isinstance(secrets, list) else set()
    return {kind: sorted(names) for kind, names in needs.items() if names}
