"""An operation as Polyaxon sees it and as the Kubernetes resource its agent would create.

No server and no cluster is asked. The one module that uses Polyaxon's inner modules (names with an
underscore), which is why its version is pinned; importing them costs 2.6 CPU-seconds, once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tasks.redact import Secrets
from warehouse.errors import BadInput

#: Stands where the run's own would: the server gives it. Digits only would be read as a number.
RUN_UUID = "UUID"
#: The agent's own artifacts store is not known here; only that there is one.
_STORE = {"name": "artifacts", "kind": "s3", "schema": {"bucket": "s3://artifacts"}}
_MAX_CAUSES = 10
_MAX_TOLD = 300
_HOST = "http://polyaxon"
_CONTEXT_ROOT = "/plx-context"


def problem(source: Path | Mapping[str, object], params: Mapping[str, object] | None) -> str | None:
    """Return what Polyaxon's own check says against a polyaxonfile, ``None`` where it says nothing.

    With ``params`` the inputs are checked too, strictly: unknown names are refused. Without, an
    input that is required and not given is no problem.
    """
    with _quietly():
        from polyaxon import polyaxonfile as polyaxons
        from polyaxon.exceptions import PolyaxonException

        try:
            if isinstance(source, Path):
                polyaxons.check_polyaxonfile(
                    polyaxonfile=str(source),
                    params=dict(params or {}),
                    is_cli=False,
                    verbose=False,
                    strict_params=True,
                    validate_params=params is not None,
                )
            else:
                polyaxons.get_op_specification(
                    config=_specification(source),
                    params=dict(params or {}),
                    strict_params=True,
                    validate_params=params is not None,
                )
        except (PolyaxonException, ValueError, TypeError, KeyError, AttributeError) as error:
            return _told(error)
    return None


def resource(
    operation: Mapping[str, object],
    *,
    namespace: str,
    owner: str,
    project: str,
    name: str = "run",
    params: Mapping[str, object] | None = None,
    host: str | None = None,
) -> dict[str, Any]:
    """Return the Kubernetes resource of an operation (or of a component with ``params``).

    ``host`` is Polyaxon's address as the pod would see it, which its agent knows.

    Raises:
        BadInput: Polyaxon cannot make one of it; the line says why.
    """
    with _quietly(), _agent(namespace, host):
        from kubernetes.client import ApiClient
        from polyaxon import polyaxonfile as polyaxons
        from polyaxon._contexts import paths
        from polyaxon._k8s.executor.base import BaseExecutor
        from polyaxon.exceptions import PolyaxonException

        try:
            specification = polyaxons.get_op_specification(
                config=_specification(operation),
                params=dict(params or {}),
                strict_params=True,
            )
            made = BaseExecutor.make_and_convert(
                owner_name=owner,
                project_name=project,
                run_uuid=RUN_UUID,
                run_name=name,
                content=specification.to_json(),
                default_auth=True,
            )
        except (PolyaxonException, ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadInput(
                f"operation {name}: Polyaxon cannot render it: {_told(error)}"
            ) from error
        text = json.dumps(ApiClient().sanitize_for_serialization(made))
        # Where Polyaxon keeps its files on this machine is nothing the pod has.
        plain: dict[str, Any] = json.loads(text.replace(paths.CONTEXT_ROOT, _CONTEXT_ROOT))
        return plain


def _specification(document: Mapping[str, object]) -> Any:
    from polyaxon import polyaxonfile as polyaxons

    read: Any = polyaxons.get_specification  # has no types
    return read(data=dict(document))


@contextlib.contextmanager
def _agent(namespace: str, host: str | None) -> Iterator[None]:
    """Let Polyaxon believe in an agent of this namespace, whatever this machine's settings are."""
    from polyaxon import settings
    from polyaxon._schemas.agent import AgentConfig
    from polyaxon._schemas.client import ClientConfig

    before = settings.AGENT_CONFIG, settings.CLIENT_CONFIG
    agent: Any = AgentConfig.from_dict({"namespace": namespace, "artifacts_store": _STORE})
    settings.AGENT_CONFIG, settings.CLIENT_CONFIG = agent, ClientConfig(host=host or _HOST)
    try:
        yield
    finally:
        settings.AGENT_CONFIG, settings.CLIENT_CONFIG = before


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep Polyaxon's own printing and its models' deprecations from the user."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _told(error: BaseException) -> str:
    """Return the innermost words of a chain of exceptions as one line, without any secret.

    Of a model's refusal only where and why: its own text repeats what the field holds.
    """
    inner = error
    for _ in range(_MAX_CAUSES):
        if isinstance(inner, ValidationError):
            return _first(inner)
        following = inner.__cause__ or inner.__context__
        if following is None or not str(following).strip():
            break
        inner = following
    text = Secrets.here().clean_text(" ".join(str(inner).split()))
    return text[:_MAX_TOLD] or type(inner).__name__


def _first(error: ValidationError) -> str:
    problems = error.errors(include_input=False, include_url=False, include_context=False)
    where = ".".join(str(part) for part in problems[0]["loc"])
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    text = Secrets.here().clean_text(" ".join(f"{where}: {problems[0]['msg']}".split()))
    return text.removeprefix(": ")[:_MAX_TOLD] + more
