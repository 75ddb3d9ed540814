"""The submitted operation: the same for every target but for image, environment and resources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.canonical import canonical_json
from tasks.home import Home
from tasks.launch import operation, target
from tasks.launch.operation import Placement
from tasks.launch.target import Profile
from tests.double import cells
from warehouse.errors import BadInput

GOLDEN = Path(__file__).parent / "golden"
#: Recognisably fake.
DIGEST = "sha256:" + "0" * 64
PLACES = {
    "model_path": "/state/models/tiny-qwen3",
    "engine_bin": "/state/envs/engine/bin",
    "bench_python": "/state/envs/bench/bin/python",
    "code": "/state/cache/pod-code/0",
    "cache_folder": "/state/cache/engine",
    "path": "/state/envs/bench/bin:/usr/bin:/bin",
}


def a_cell() -> dict[str, Any]:
    return {
        "format": 1,
        "label": "x/y={{ globals.uuid }}",
        "expect": None,
        "n": [1, 2.5],
        "b": {"c": {}},
    }


def local() -> dict[str, object]:
    return operation.build(
        a_cell(), operation_file="local.yaml", parameters=PLACES, run_limit_s=901.5
    )


def gpu() -> dict[str, object]:
    return operation.build(
        a_cell(),
        operation_file="gpu.yaml",
        parameters={"model_path": "/models/tiny-qwen3"},
        run_limit_s=901.5,
        placement=Placement(
            image=f"registry.invalid/engine@{DIGEST}",
            environment={"nodeSelector": {"gpu": "a10"}},
            resources={"limits": {"nvidia.com/gpu": 1}},
        ),
    )


def placed() -> dict[str, object]:
    """The GPU operation with everything a profile can add."""
    volume, mount = {"name": "v", "emptyDir": {}}, {"name": "v", "mountPath": "/v"}
    return operation.build(
        a_cell(),
        operation_file="gpu.yaml",
        parameters={"model_path": "/models/tiny-qwen3"},
        run_limit_s=901.5,
        placement=Placement(
            image=f"registry.invalid/engine@{DIGEST}",
            environment={"nodeSelector": {"gpu": "a10"}, "labels": {"team": "a"}},
            labels={"memsweep/round": "r-1"},
            resources={"limits": {"nvidia.com/gpu": 1}},
            volumes=[volume],
            mounts=[mount],
            init=[{"container": {"name": "memsweep-model"}}],
            queue="agent/a10",
            namespace="ns",
            ttl_s=86_400,
        ),
    )


def compiled(built: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Compile with Polyaxon's own code, offline: what a server makes of the operation."""
    from polyaxon import settings
    from polyaxon._compiler.resolver import resolve
    from polyaxon._polyaxonfile.specs import OperationSpecification
    from polyaxon._schemas.agent import AgentConfig

    schema = {"hostPath": "/store", "mountPath": "/store"}
    store = {"name": "artifacts", "kind": "host_path", "schema": schema}
    agent = AgentConfig.from_dict({"namespace": "polyaxon", "artifacts_store": store})
    monkeypatch.setattr(settings, "AGENT_CONFIG", agent)
    read = OperationSpecification.read(built)
    params: Any
    unresolved, params = OperationSpecification.compile_operation_with_params(read)
    _, content = resolve(
        owner_name="default",
        project_name="memsweep",
        project_uuid="0" * 32,
        run_name="run",
        run_uuid="a" * 32,
        run_path="a" * 32,
        compiled_operation=unresolved,
        params=params,
    )
    return dict(json.loads(content.to_json()))


@pytest.mark.parametrize(("name", "built"), [("local", local()), ("gpu", gpu())])
def test_the_submitted_operation_is_the_golden_one(name: str, built: dict[str, object]) -> None:
    golden = GOLDEN / f"operation-{name}.json"
    assert built == json.loads(golden.read_text()), f"compare with {golden}"


def test_the_targets_differ_only_in_image_environment_and_resources() -> None:
    one, other = local(), gpu()
    assert one["component"] == other["component"]
    assert one["termination"] == {"maxRetries": 0, "timeout": 901}
    # Kubernetes has to be told as well that nothing is retried.
    assert other["termination"].pop("podFailurePolicy")  # type: ignore[attr-defined]
    assert other["termination"] == one["termination"]
    assert one["cache"] == other["cache"] == {"disable": True}
    assert one["params"]["cell"] == other["params"]["cell"]  # type: ignore[index]
    assert set(one["params"]) == set(other["params"])  # type: ignore[call-overload]
    # A local run's logs and outputs are the supervisor's, a cluster's are Polyaxon's to sync.
    assert set(other) - set(one) == {"runPatch", "plugins"}
    assert other["runPatch"] == {
        "environment": {"restartPolicy": "Never", "nodeSelector": {"gpu": "a10"}},
        "container": {
            "image": f"registry.invalid/engine@{DIGEST}",
            "resources": {"limits": {"nvidia.com/gpu": 1}},
        },
    }


def test_a_profile_adds_where_it_runs_and_nothing_about_what() -> None:
    plain, other = gpu(), placed()
    same = ("version", "kind", "name", "cache", "component", "params", "plugins")
    assert {name: other[name] for name in same} == {name: plain[name] for name in same}
    assert set(other) - set(plain) == {"queue", "namespace"}
    assert other["termination"] == {**plain["termination"], "ttl": 86_400}  # type: ignore[dict-item]
    patch, before = other["runPatch"], plain["runPatch"]
    assert set(patch) - set(before) == {"volumes", "init"}  # type: ignore[call-overload]
    assert set(patch["container"]) - set(before["container"]) == {"volumeMounts"}  # type: ignore[index]
    labels = {"team": "a", "memsweep/round": "r-1"}
    assert patch["environment"] == {**before["environment"], "labels": labels}  # type: ignore[index]


def test_labels_are_no_part_of_the_template_key() -> None:
    one, other = placed(), placed()
    other["runPatch"]["environment"]["labels"]["memsweep/round"] = "r-2"  # type: ignore[index]
    assert operation.template_key(one) == operation.template_key(other)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Polyaxon's own models.
def test_compiled_by_polyaxon_too_they_differ_only_in_these(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = compiled(local(), monkeypatch), compiled(gpu(), monkeypatch)
    assert other["run"].pop("environment") == {
        "restartPolicy": "Never",
        "nodeSelector": {"gpu": "a10"},
    }
    container, far = one["run"]["container"], other["run"]["container"]
    assert far.pop("image") == f"registry.invalid/engine@{DIGEST}"
    assert far.pop("resources") == {"limits": {"nvidia.com/gpu": 1}}
    here = {item["name"]: item["value"] for item in container.pop("env")}
    there = {item["name"]: item["value"] for item in far.pop("env")}
    assert container == far
    assert here.keys() == there.keys()
    differing = {name for name in here if here[name] != there[name]}
    assert differing <= {
        "PATH", "PYTHONPATH", "MEMSWEEP_MODEL_PATH", "MEMSWEEP_ENGINE_BIN", "MEMSWEEP_CACHE",
        "MEMSWEEP_BENCH_PYTHON",
    }  # fmt: skip
    assert json.loads(here["MEMSWEEP_CELL"]) == a_cell()
    assert here["MEMSWEEP_RUN_UUID"] == "a" * 32


def test_no_shell_and_no_cell_text_in_the_command() -> None:
    container = operation.read("component.yaml")["run"]["container"]
    assert container["command"] == ["python", "-P", "-m", "tasks.pod"]
    assert "args" not in container
    assert "image" not in container


def test_every_template_of_the_component_names_an_input_or_a_global() -> None:
    component = operation.read("component.yaml")
    inputs = {one["name"] for one in component["inputs"]}
    used = [one["value"] for one in component["run"]["container"]["env"]]
    names = {value.removeprefix("{{ ").removesuffix(" }}") for value in used}
    assert {name for name in names if not name.startswith("globals.")} == inputs


texts = st.text(alphabet='{}%#"\\ ab\n', max_size=20)


@given(texts, texts)
def test_any_cell_survives_as_text_without_template_syntax(key: str, value: str) -> None:
    cell = {"none": None, key: {"inner": [value, {}]}}
    text = operation.cell_text(cell)
    assert json.loads(text) == cell
    assert canonical_json(json.loads(text)) == canonical_json(cell)
    assert all(start not in text for start in ("{{", "{%", "{#"))


def test_a_cell_that_polyaxon_would_turn_into_a_value_is_refused() -> None:
    with pytest.raises(BadInput, match="would not hand it on as text"):
        operation.cell_text({"format": 1})
    with pytest.raises(BadInput, match="120000"):
        operation.cell_text({"none": None, "label": "x" * 130_000})


def test_the_template_key_is_that_of_component_and_inputs() -> None:
    assert operation.template_key(local()) == operation.template_key(local())
    assert operation.template_key(local()) != operation.template_key(gpu())
    longer = operation.build(
        a_cell(), operation_file="local.yaml", parameters=PLACES, run_limit_s=1
    )
    assert operation.template_key(local()) == operation.template_key(longer)


def test_the_local_profile_names_places_in_the_state_folder(home: Home) -> None:
    profile = target.load("local")
    assert (profile.device, profile.is_embedded, profile.slots) == ("cpu", True, 1)
    built = target.build(home, profile, cells.cell(), model="tiny-qwen3", run_limit_s=10)
    params = {name: one["value"] for name, one in built["params"].items()}  # type: ignore[attr-defined]
    assert params["model_path"] == str(home.models / "tiny-qwen3")
    assert params["path"].startswith(str(home.envs / "bench" / "bin") + ":")
    assert Path(params["code"], "tasks", "pod", "__main__.py").is_file()


def test_an_unresolved_image_is_never_submitted(home: Home) -> None:
    profile = Profile(
        name="x",
        description="x",
        device="cuda",
        operation="gpu.yaml",
        host="http://polyaxon.invalid",
        image="registry.invalid/engine",
        image_digest="unresolved",
        models="/models",
    )
    with pytest.raises(BadInput, match="image_digest is unresolved"):
        target.build(home, profile, cells.cell(), model="m", run_limit_s=10)


def test_bad_profiles_say_where(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("description: x\ndevice: tpu\noperation: local.yaml\n")
    with pytest.raises(BadInput, match=r"mine\.yaml: device: "):
        target.load(str(path))
    path.write_text("- 1\n")
    with pytest.raises(BadInput, match="wanted a mapping"):
        target.load(str(path))
    path.write_text("a: [\n")
    with pytest.raises(BadInput, match="no YAML"):
        target.load(str(path))
    with pytest.raises(BadInput, match="neither a shipped profile"):
        target.load("nowhere")
    with pytest.raises(BadInput, match="not among the shipped ones"):
        operation.read("../pyproject.toml")
