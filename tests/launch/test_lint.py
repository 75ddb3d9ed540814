"""Lint: what Polyaxon's own check lets pass is found, and what comes with the project is clean."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.home import Home
from tasks.launch import lint, target
from tasks.launch.target import Profile
from warehouse.errors import BadInput

ROOT = Path(__file__).parent.parent.parent
#: Recognisably fake.
DIGEST = "sha256:" + "0" * 64
IMAGE = f"registry.invalid/image@{DIGEST}"


def component(**changes: Any) -> dict[str, Any]:
    """A polyaxonfile with nothing wrong; ``changes`` replace its sections."""
    document: dict[str, Any] = {
        "version": 1.1,
        "kind": "component",
        "name": "x",
        "cache": {"disable": True},
        "inputs": [{"name": "length", "type": "int"}],
        "run": {
            "kind": "job",
            "container": {
                "image": IMAGE,
                "command": ["vllm"],
                "args": ["--max-model-len={{ length }}", "{{ globals.run_outputs_path }}"],
                "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "8Gi"}},
            },
        },
    }
    return document | changes


def with_run(**changes: Any) -> dict[str, Any]:
    document = component()
    document["run"] |= changes
    return document


def with_container(**changes: Any) -> dict[str, Any]:
    document = component()
    document["run"]["container"] |= changes
    return document


def found(tmp_path: Path, document: object, **options: Any) -> list[str]:
    path = tmp_path / "file.yaml"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return [one.line for one in lint.file(path, name="file.yaml", **options)]


def test_a_good_file_has_no_findings(tmp_path: Path) -> None:
    assert found(tmp_path, component()) == []
    assert found(tmp_path, component(), params={"length": "8"}) == []


@pytest.mark.parametrize(
    ("document", "where", "said"),
    [
        (
            with_container(args=["{{ lenght }}"]),
            "run.container.args[0]",
            "got {{ lenght }}, wanted an input",
        ),
        (
            with_container(args=["{{ globals.outputs }}"]),
            "run.container.args[0]",
            "{{ globals.outputs }}",
        ),
        (
            with_container(args=["{{ params.other }}"]),
            "run.container.args[0]",
            "{{ params.other }}",
        ),
        (with_container(args=["{{ length "]), "run.container.args[0]", "no template"),
        (
            with_container(resources={"limits": {"memory": "banana"}}),
            "run.container.resources.limits.memory",
            "got 'banana', wanted a Kubernetes quantity",
        ),
        (
            with_container(resources={"limits": {"nvidia.com/gpu": "0.5"}}),
            "run.container.resources.limits.nvidia.com/gpu",
            "whole pieces",
        ),
        (
            with_container(
                resources={"requests": {"nvidia.com/gpu": 2}, "limits": {"nvidia.com/gpu": 1}}
            ),
            "run.container.resources.requests.nvidia.com/gpu",
            "got 2 and 1",
        ),
        (
            with_container(image="vllm/vllm-openai:latest"),
            "run.container.image",
            "an image that can change",
        ),
        (
            with_container(image="vllm/vllm-openai"),
            "run.container.image",
            "an image that can change",
        ),
        (with_container(image="{{ length }}"), "run.container.image", "an image that can change"),
        (
            with_container(image="a/b@unresolved"),
            "run.container.image",
            "wanted memsweep pin SWEEP",
        ),
        (
            with_container(env=[{"name": "HF_TOKEN", "value": "planted-value"}]),
            "run.container.env[0]",
            "the value of HF_TOKEN is written out, wanted valueFrom.secretKeyRef",
        ),
        (
            with_container(env=[{"name": "HF_TOKEN", "value": "{{ length }}"}]),
            "run.container.env[0]",
            "HF_TOKEN is written out",
        ),
        (
            with_container(env=[{"DB_PASSWORD": "planted-value"}]),
            "run.container.env[0]",
            "DB_PASSWORD",
        ),
        *(
            (
                with_run(connections=[{name: "hunter2hunter2"}]),
                "run.connections[0]",
                f"the value of {name} is written out",
            )
            for name in ("clientSecret", "webhookSecret", "tlsSecret", "secret")
        ),
        (
            component(params={"clientSecret": {"value": "hunter2hunter2"}}),
            "params",
            "the value of clientSecret is written out",
        ),
        (with_container(args=["hf_" + "x" * 34]), "run.container.args[0]", "a Hugging Face token"),
        (with_container(args=["AKIA" + "A" * 16]), "run.container.args[0]", "an AWS key"),
        (
            with_container(args=["https://me:planted@host/x"]),
            "run.container.args[0]",
            "a login in an address",
        ),
        (component(cache={"disable": False}), "cache.disable", "got False, wanted true"),
        (component(cache=None), "cache", "wanted disable: true"),
        (component(termination={"maxRetries": 2}), "termination.maxRetries", "got 2, wanted 0"),
        (
            with_container(command=["/bin/bash", "-c"], args=["vllm --len {{ length }}"]),
            "run.container.command",
            "can become a command",
        ),
        (
            with_run(environment={"labels": {"a b": "c"}}),
            "run.environment.labels",
            "not a label, got a b: c",
        ),
        (
            with_run(volumes=[{"name": "v", "emptyDir": {"sizeLimit": "much"}}]),
            "run.volumes[0].emptyDir.sizeLimit",
            "'much'",
        ),
        (
            with_run(environment={"nodeSelector": {"gpu": "True"}}),
            "run.environment.nodeSelector.gpu",
            "hands on another value, got 'True'",
        ),
        (
            with_run(environment={"tolerations": [{"key": "gpu", "value": "1"}]}),
            "run.environment.tolerations[0].value",
            "hands on another value, got '1'",
        ),
        (with_container(imge=IMAGE), "file", "Polyaxon's check"),
        (
            with_container(args=["--api-key=supersecretplantedvalue"]),
            "run.container.args[0]",
            "the value of a key, token or password",
        ),
        (
            with_container(args=["serve", "--api-key", "planted", "--port", "80"]),
            "run.container.args[2]",
            "the value of a key, token or password",
        ),
        (
            with_container(command=["vllm", "--hf-token", "planted-1"]),
            "run.container.command[2]",
            "the value of a key, token or password",
        ),
        (
            with_container(env=[{"name": "MY_PASSWORD", "value": 12345678}]),
            "run.container.env[0]",
            "the value of MY_PASSWORD is written out",
        ),
        (
            with_container(env=[{"MY_PASSWORD": 12345678}]),
            "run.container.env[0]",
            "the value of MY_PASSWORD is written out",
        ),
        (
            with_container(args=['{{ globals["bogus"] }}']),
            "run.container.args[0]",
            "got {{ globals.bogus }}, wanted a known global",
        ),
        (
            with_container(args=["{{ params['lenght'] }}"]),
            "run.container.args[0]",
            "got {{ params.lenght }}, wanted an input",
        ),
        (
            with_container(args=["{{ globals[length] }}"]),
            "run.container.args[0]",
            "got {{ globals[…] }}",
        ),
        (with_container(args=["{{ outputs.nope }}"]), "run.container.args[0]", "outputs.nope"),
        (
            with_run(environment={"restartPolicy": "OnFailure"}),
            "run.environment.restartPolicy",
            "got OnFailure, wanted Never",
        ),
        (
            component(termination={"podFailurePolicy": {"rules": []}}),
            "run.environment.restartPolicy",
            "got None, wanted Never",
        ),
        (
            with_run(kind="service", environment={"restartPolicy": "Never"}),
            "run.environment.restartPolicy",
            "got Never, wanted none, or Always",
        ),
        (
            with_container(
                resources={"requests": {"memory": "9Gi"}, "limits": {"memory": "8192Mi"}}
            ),
            "run.container.resources.requests.memory",
            "more requested than the limit allows, which Kubernetes refuses, got 9Gi and 8192Mi",
        ),
        (
            component(inputs=[{"name": "length", "type": "integer"}]),
            "inputs.length.type",
            "got integer, wanted int",
        ),
    ],
)
def test_what_is_wrong_is_found_where_it_is(
    document: dict[str, Any], where: str, said: str, tmp_path: Path
) -> None:
    lines = found(tmp_path, document)
    matching = [one for one in lines if one.startswith(f"file.yaml:{where}: ") and said in one]
    assert len(matching) == 1, lines
    assert not any("planted" in one for one in lines)


HUB = "hf_" + "Xy9" * 11


@pytest.mark.parametrize(
    "document",
    [
        with_container(
            command=["/bin/sh", "-c"],
            args=[f"curl -H 'Authorization: token {HUB}' {{{{ length }}}}"],
        ),
        # Cut at its end it would have no shape any more.
        with_container(command=["sh", "-c"], args=["x" * 44 + f" {HUB} {{{{ length }}}}"]),
        with_container(args=[f"{{{{ length '{HUB}"]),
        with_container(args=["x" * 44 + f" {HUB} {{{{ length"]),
        with_container(image=f"https://me:{HUB}@registry.invalid/image:v1"),
        with_container(image="me:hunter2hunter2@registry.invalid/image:v1"),
        with_container(image=f"me:hunter2hunter2@{IMAGE}"),
        component(inputs=[{"name": "length", "type": HUB}]),
        component(inputs=[{"name": "length", "type": "int", "value": f"password={HUB}"}]),
        with_run(environment={"labels": {f"a {HUB}": "b"}}),
        with_run(environment={"restartPolicy": HUB}),
    ],
)
def test_a_finding_shows_no_secret(document: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(yaml.safe_dump(document))
    findings = lint.file(path, name="file.yaml")
    assert findings
    for one in findings:
        for said in (one.line, json.dumps(one.document())):
            assert not any(part in said for part in (HUB[:12], "hunter2"))


def test_what_only_looks_like_a_secret_passes(tmp_path: Path) -> None:
    document = with_container(
        args=["--api-key={{ length }}", "--api-key", "$(KEY)", "--max-tokens=512", "--pad-token"],
        env=[{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "x", "key": "token"}}}],
    )
    document["run"]["environment"] = {
        "serviceAccountName": "x",
        "imagePullSecrets": ["registry-login"],
        "imagePullSecret": "registry-login",
    }
    document["run"]["volumes"] = [
        {"name": "v", "secret": {"secretName": "registry-login"}},
        {"name": "w", "csi": {"nodePublishSecretRef": {"name": "registry-login"}}},
    ]
    document["inputs"].append(
        {"name": "image_pull_secret", "type": "str", "value": "registry-login"}
    )
    found_here = found(tmp_path, document)
    assert [one for one in found_here if "looks like" in one or "is written out" in one] == []
    built = {"cache": {"disable": True}, "params": {"max_token": {"value": 512}}}
    assert lint.operation(built, name="x", is_cluster=False, asks_polyaxon=False) == []


@pytest.mark.parametrize(
    "change",
    [
        {"run": "x"}, {"cache": True}, {"termination": 5}, {"inputs": 5}, {"runPatch": [1]},
        with_run(container="x"), with_run(environment="x"), with_container(args=5),
        with_container(resources={"limits": 5, "requests": [1]}),
    ],
)  # fmt: skip
def test_sections_of_another_kind_do_not_break_the_check(
    change: dict[str, Any], tmp_path: Path
) -> None:
    lines = found(tmp_path, component() | change)
    assert all(one.startswith("file.yaml:") for one in lines)


def test_a_service_says_nothing_of_restarts_or_always(tmp_path: Path) -> None:
    for environment in ({}, {"restartPolicy": "Always"}):
        assert found(tmp_path, with_run(kind="service", environment=environment)) == []


def test_a_patch_wins_over_what_a_component_says_of_restarts() -> None:
    def lines(inner: dict[str, Any], patch: dict[str, Any]) -> list[str]:
        built = {
            "kind": "operation",
            "cache": {"disable": True},
            "runPatch": {"environment": patch},
            "component": inner,
        }
        found_here = lint.operation(built, name="x", is_cluster=False, asks_polyaxon=False)
        return [one.line.partition(": ")[0] for one in found_here]

    never = {"restartPolicy": "Never"}
    where = "x:runPatch.environment.restartPolicy"
    assert lines(with_run(environment=never), {"restartPolicy": "OnFailure"}) == [where]
    assert lines(with_run(environment={"restartPolicy": "OnFailure"}), never) == []
    assert lines(with_run(kind="service"), never) == [where]


@pytest.mark.parametrize(
    "command", [["/bin/bash", "-c"], ["/usr/bin/env", "sh", "-c"], ["python", "-c"]]
)
def test_a_parameter_is_never_part_of_code(command: list[str], tmp_path: Path) -> None:
    (line,) = found(tmp_path, with_container(command=command, args=["run {{ length }}"]))
    assert "a parameter inside a shell line can become a command" in line
    assert found(tmp_path, with_container(command=command, args=["run"])) == []


def test_a_component_that_is_not_there_is_a_finding(tmp_path: Path) -> None:
    (line,) = found(tmp_path, {"kind": "operation", "pathRef": "gone.yaml"})
    assert line.startswith("file.yaml:file: ")
    assert "gone.yaml" in line


END = "@sha256:[0-9a-f]{64}$"


@pytest.mark.parametrize(
    ("regex", "is_good"),
    [
        (f"^[a-z./]+{END}", True),
        (f"^(?:a|b[|])/\\|[]|x]+{END}", True),
        ("^moby/buildkit:v[0-9.]+$", False),
        (r"^registry\.example\.com/.+$", False),
        ("^[a-z./]+@sha256:", False),
        ("^[a-z./]+@sha256:[0-9a-f]{64}", False),
        (f"^a:latest$|^b{END}", False),
        (f"^(a:latest$|b{END}", False),
        (f"^[a-z{END}", False),
        (f"(?x)^.*#{END}", False),
        (f"(?m)^.*{END}", False),
        (f"^a\\{END}", False),
        ("", False),
        (None, False),
    ],
)
def test_an_image_by_input_has_to_be_forced_to_a_digest(
    regex: str | None, is_good: bool, tmp_path: Path
) -> None:
    document = with_container(image="{{ image }}")
    validation = {} if regex is None else {"regex": regex}
    entry = {"name": "image", "type": "str", "validation": validation}
    document["inputs"] = [{"name": "length", "type": "int"}, entry]
    lines = [one for one in found(tmp_path, document) if "an image that can change" in one]
    assert len(lines) == (0 if is_good else 1)


def test_texts_that_stay_what_they_are_pass(tmp_path: Path) -> None:
    good = {
        "nodeSelector": {"nvidia.com/gpu.present": "true", "count": "1"},
        "labels": {"team": "7"},
        "tolerations": [{"key": "gpu", "operator": "Equal", "value": "true"}],
    }
    assert found(tmp_path, with_run(environment=good)) == []


def test_params_are_checked_strictly_when_given(tmp_path: Path) -> None:
    document = component()
    document["inputs"][0]["validation"] = {"ge": 8}
    (low,) = found(tmp_path, document, params={"length": "1"})
    assert "greater than or equal to `8`" in low
    (unknown,) = found(tmp_path, document, params={"length": "8", "lenght": "9"})
    assert "lenght" in unknown


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- 1\n", "not a mapping"),
        ("a: [", "not valid YAML"),
        ("a: 1\n", "of no known kind"),
        ("name: x\nmodel: m\nexperiments: []\n", "experiments"),
        ("description: x\ndevice: tpu\noperation: gpu.yaml\n", "device"),
        ("pins: {}\nsources: []\n", "format"),
    ],
)
def test_other_files_are_read_by_their_readers(text: str, said: str, tmp_path: Path) -> None:
    (line,) = found(tmp_path, text)
    assert said in line
    assert line.startswith("file.yaml:file: ")


def test_a_profile_is_checked_for_tags_and_quantities(tmp_path: Path) -> None:
    shipped = yaml.safe_load((target.PROFILES / "cluster-a10.yaml").read_text())
    (line,) = found(tmp_path, shipped | {"image": "registry.invalid/engine:v1"})
    assert "got 'registry.invalid/engine:v1'" in line
    shipped["quota"] = {}
    shipped["resources"]["requests"]["cpu"] = "many"
    shipped["environment"]["nodeSelector"]["a"] = "1e5"
    lines = found(tmp_path, shipped)
    assert any("resources.requests.cpu" in one for one in lines)
    assert any("environment.nodeSelector.a: Polyaxon hands on another" in one for one in lines)
    assert len(lines) == 2


def test_a_profile_says_nothing_of_restarts(tmp_path: Path) -> None:
    shipped = yaml.safe_load((target.PROFILES / "cluster-a10.yaml").read_text())
    shipped["environment"]["restartPolicy"] = "OnFailure"
    (line,) = found(tmp_path, shipped)
    assert "restartPolicy" in line


def tracked() -> list[str]:
    out = subprocess.run(
        ["git", "ls-files", "*.yaml", "*.yml"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    return [n for n in out.stdout.splitlines() if (ROOT / n).is_file()]


def test_every_tracked_yaml_is_clean() -> None:
    """Recorded inputs under tests/ are data; everything else that is YAML is checked."""
    checked = [name for name in tracked() if not name.startswith(("tests/", "."))]
    assert any(name.startswith("flows/sweeps/") for name in checked)
    assert any(name.startswith("polyaxonfiles/profiles/") for name in checked)
    assert [f.line for n in checked for f in lint.file(ROOT / n, name=n)] == []


# -- before a sweep is submitted ---------------------------------------------------------------


def cluster(**changes: Any) -> Profile:
    shipped = target.load("cluster-a10").model_dump()
    return Profile.model_validate(shipped | {"image_digest": DIGEST} | changes)


def a_plan(**changes: Any) -> Any:
    from testkit.planning import demo

    pinned = {"device": "cuda", "engine_lock_sha256": None, "image_digest": DIGEST}
    return demo(**(pinned | {"revision": lambda name: "a" * 40} | changes))


def test_a_good_plan_passes_on_a_cluster_and_here(home: Home) -> None:
    from testkit.planning import demo

    lint.before_submit(home, cluster(), a_plan())
    lint.before_submit(home, target.load("local"), demo())


def test_a_bad_profile_stops_the_sweep_before_anything_is_submitted(home: Home) -> None:
    bad = cluster(environment={"serviceAccountNme": "x"})
    with pytest.raises(BadInput, match="Polyaxon's check") as error:
        lint.before_submit(home, bad, a_plan())
    assert "\n" not in str(error.value)
    labels = cluster(environment={"labels": {"a b": "c"}})
    with pytest.raises(BadInput, match="not a label"):
        lint.before_submit(home, labels, a_plan())


def test_a_local_sweep_is_checked_without_importing_polyaxon(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    from testkit.planning import demo

    def asked(*_: object) -> None:
        raise AssertionError("Polyaxon was asked")

    monkeypatch.setattr("tasks.launch.render.problem", asked)
    lint.before_submit(home, target.load("local"), demo())


def test_what_a_cluster_operation_must_have_is_missed() -> None:
    bare = {
        "kind": "operation",
        "cache": {"disable": True},
        "termination": {"maxRetries": 0},
        "component": component(),
        "params": {"length": {"value": 8}},
    }
    lines = [f.line for f in lint.operation(bare, name="x", is_cluster=True, asks_polyaxon=False)]
    assert [line.partition(": ")[0] for line in lines] == [
        "x:runPatch.container.image",
        "x:termination.timeout",
        "x:termination.ttl",
    ]


def test_prompts_inside_a_cell_are_data() -> None:
    document = component(inputs=[{"name": "cell", "type": "str"}])
    document["run"]["container"]["args"] = ["{{ cell }}"]
    built = {
        "kind": "operation",
        "cache": {"disable": True},
        "component": document,
        "params": {"cell": {"value": "my password is hf_" + "x" * 34}},
    }
    assert lint.operation(built, name="x", is_cluster=False, asks_polyaxon=False) == []
