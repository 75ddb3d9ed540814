"""A real Polyaxon server takes what is submitted to a cluster (1 to 3 minutes).

Its agent would make of the compiled run what the goldens show: the half that runs in the cluster is
Polyaxon's own code too, and is called here on what the server compiled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from testkit.cluster import NAMES, golden, submitted

from tasks.home import Home
from tasks.launch import environments, objects, render, services
from tasks.launch.polyaxon import PolyaxonClient

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Home, PolyaxonClient]]:
    """Start real services once, in a state folder of their own."""
    shared = Home.find()
    environments.ensure(shared, ("polyaxon-server",), progress=print)
    home = Home(tmp_path_factory.mktemp("state"))
    home.envs.mkdir(parents=True)
    (home.envs / "polyaxon-server").symlink_to(shared.envs / "polyaxon-server")
    client = PolyaxonClient(services.up(home, progress=print).polyaxon_host)
    client.ensure_project()
    yield home, client
    services.down(home)


def converted(content: str, run_uuid: str, name: str, home: Home) -> dict[str, Any]:
    """Return what an agent creates of a compiled run, with the golden's names in it."""
    from polyaxon._k8s.executor.base import BaseExecutor

    uuid = run_uuid.replace("-", "")
    with render._agent("polyaxon", None):
        made = BaseExecutor.convert(
            owner_name="my-team",
            project_name="memsweep",
            run_name=name,
            run_uuid=uuid,
            content=content,
            default_auth=True,
        )
    text = json.dumps(made)
    text = re.sub(r"(polyaxon-init-git-memsweep)-[0-9a-f]+", r"\1-RANDOM", text)
    # The server and the agent's code put their own folder where a pod has Polyaxon's.
    text = text.replace(str(home.root / "services" / "polyaxon"), "/plx-context")
    return dict(json.loads(text.replace(uuid, render.RUN_UUID)))


@pytest.mark.parametrize("name", NAMES)
def test_the_server_compiles_it_to_the_golden(name: str, site: tuple[Home, PolyaxonClient]) -> None:
    home, client = site
    # The embedded server's agent manages no namespace but its own.
    operation = submitted(name, home, namespace=None)
    run = client.create(operation=operation, name=name, meta={"cell_key": name})
    assert "compiled" in [one.type for one in client.view(run.uuid).conditions]
    made = converted(client.content(run.uuid), run.uuid, name, home)
    assert made["termination"] == golden(name)["termination"]
    assert made["metadata"]["labels"] == golden(name)["metadata"]["labels"]
    assert objects.pod_spec(made) == objects.pod_spec(golden(name))


def test_a_namespace_that_no_agent_manages_does_not_compile(
    site: tuple[Home, PolyaxonClient],
) -> None:
    home, client = site
    run = client.create(operation=submitted("cell", home), name="x", meta={"cell_key": "x"})
    view = client.view(run.uuid)
    assert view.status == "failed"
    assert "namespace" in str(view.message)
