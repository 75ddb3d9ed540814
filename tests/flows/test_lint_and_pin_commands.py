"""``lint`` and ``pin`` as typed: exit codes, lines, JSON and the files they leave."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from testkit.servers import MANIFEST, MANIFEST_DIGEST, Answer, Hub, registry, serving

from flows import cli
from tasks.launch import objects, operation, target

#: Recognisably fake; digits only would be taken for a number.
DIGEST, COMMIT = "sha256:" + "0" * 64, "a" * 40
GONE = "http://127.0.0.1:1"
SWEEP = """
name: mine
model: owner/name
pins: {image_digest: unresolved}
server: {max_model_len: 1024}
repeats: 3
experiments:
  - name: one
    vary: {max_num_seqs: [8, 16]}
    points: [{parallel: 4, number: 8}]
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of its own with one sweep and one cluster's profile."""
    monkeypatch.setenv("MEMSWEEP_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.sweep.yaml").write_text(SWEEP)
    shutil.copy(target.PROFILES / "cluster-a10.yaml", tmp_path / "far.yaml")
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    assert cli.run([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def both(path: str, headers: Any, url: str) -> Answer:
    """A registry and a hub at one address."""
    if path.startswith("/api/"):
        return Hub("owner/name", COMMIT, {})(path, headers, url)
    names = ("memsweep/engine:v0.27.0", "vllm/vllm-openai:v0.27.0")
    return registry(dict.fromkeys(names, MANIFEST))(path, headers, url)


# -- lint --------------------------------------------------------------------------------------


def test_what_is_shipped_is_clean(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["lint"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "nothing found" in err


def test_findings_are_lines_on_stdout_and_exit_1(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = {
        "kind": "component",
        "run": {"kind": "job", "container": {"image": "a:latest", "args": ["{{ nothing }}"]}},
    }
    (here / "bad.yaml").write_text(yaml.safe_dump(bad))
    assert cli.run(["lint", "bad.yaml", "mine.sweep.yaml"]) == 1
    out, err = capsys.readouterr()
    assert [line.partition(": ")[0] for line in out.splitlines()] == [
        "bad.yaml:cache",
        "bad.yaml:run.container.image",
        "bad.yaml:run.container.args[0]",
    ]
    assert err == "memsweep: 3 findings in 1 files\n"


def test_what_lint_prints_holds_no_secret(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A CI keeps what was printed, on both channels and in either form."""
    token, word = "hf_" + "Xy9" * 11, "hunter2hunter2"
    container = {
        "image": f"https://me:{word}@registry.invalid/image:v1",
        "command": ["sh", "-c"],
        "args": [
            f"curl -H 'Authorization: token {token}' {{{{ x }}}}",
            f"{{{{ x '{token}",
            f"--api-key={word}",
        ],
    }
    bad = {"kind": "component", "run": {"kind": "job", "container": container}}
    (here / "bad.yaml").write_text(yaml.safe_dump(bad))
    said: list[str] = []
    for more in ([], ["--json"]):
        assert cli.run(["lint", "bad.yaml", *more]) == 1
        said += capsys.readouterr()
    assert "an image that can change, got https://[redacted]@registry.invalid/image:v1" in said[0]
    assert not any(part in text for text in said for part in (token[:12], word))


@pytest.mark.parametrize(
    "environment",
    [
        {"password": "hunter2hunter2"},
        {"env": [{"name": "HF_TOKEN", "value": "hf_" + "aB3d" * 8}]},
        {"labels": {"x": "hf_" + "aB3d" * 8}},
    ],
)
def test_a_profile_that_holds_a_secret_is_neither_shown_nor_rendered(
    here: Path, capsys: pytest.CaptureFixture[str], environment: dict[str, Any]
) -> None:
    profile = yaml.safe_load((here / "far.yaml").read_text())
    (here / "far.yaml").write_text(yaml.safe_dump({**profile, "environment": environment}))
    wanted = ["lint", "mine.sweep.yaml", "--target", "far.yaml", "--objects", "--render", "out"]
    assert cli.run(wanted) == 1
    said = "".join(capsys.readouterr())
    assert "nothing is rendered" in said
    assert "written out" in said or "looks like" in said
    assert "hunter2" not in said
    assert "aB3d" not in said
    assert not (here / "out").exists()


def test_polyaxons_refusal_shows_no_value_of_a_field(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = yaml.safe_load((here / "far.yaml").read_text())
    profile["environment"] = {"bogus": "hunter2hunter2"}
    (here / "far.yaml").write_text(yaml.safe_dump(profile))
    assert cli.run(["lint", "mine.sweep.yaml", "--target", "far.yaml", "--objects"]) == 2
    said = "".join(capsys.readouterr())
    assert "environment.V1Environment.bogus: Extra inputs are not permitted" in said
    assert "hunter2" not in said
    assert "input_value" not in said
    assert "https://errors" not in said


def test_a_secret_given_as_a_parameter_is_written_nowhere(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    component = {
        "version": 1.1, "kind": "component", "name": "one", "cache": {"disable": True},
        "inputs": [{"name": "x", "type": "str"}],
        "run": {
            "kind": "job", "environment": {"restartPolicy": "Never"},
            "container": {"image": f"a/b@{DIGEST}", "args": ["{{ x }}"]},
        },
    }  # fmt: skip
    (here / "one.yaml").write_text(yaml.safe_dump(component))
    assert cli.run(["lint", "one.yaml", "-P", "x=word", "--render", "good"]) == 0
    assert [path.name for path in (here / "good").iterdir()] == ["one.yaml"]
    capsys.readouterr()
    secret = "hf_" + "aB3d" * 8
    assert cli.run(["lint", "one.yaml", "-P", f"x={secret}", "--render", "out"]) == 2
    said = "".join(capsys.readouterr())
    assert "not written" in said
    assert secret not in said
    assert not (here / "out").exists()


@pytest.mark.parametrize(
    "command", [["pin", "mine.sweep.yaml"], ["schedule", "mine.sweep.yaml", "--cron", "0 2 * * *"]]
)
def test_a_sweep_that_holds_a_secret_is_refused_as_run_does(
    here: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    secret = "hf_" + "aB3d" * 8
    (here / "mine.sweep.yaml").write_text(f"{SWEEP}description: with {secret}\n")
    assert cli.run(command) == 2
    said = "".join(capsys.readouterr())
    assert "looks like a secret" in said
    assert secret not in said


def test_an_unknown_target_is_bad_input_even_where_it_is_not_needed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run(["lint", "demo", "--target", "nosuch"]) == 2
    assert "target 'nosuch'" in capsys.readouterr().err


@pytest.mark.parametrize("minutes", ["inf", "nan", "-1"])
def test_a_budget_is_a_number_of_minutes(capsys: pytest.CaptureFixture[str], minutes: str) -> None:
    assert cli.run(["plan", "demo", "--budget", minutes]) == 2
    assert "--budget" in capsys.readouterr().err


def test_an_unknown_file_and_a_bad_parameter_are_bad_input(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run(["lint", "nowhere.yaml"]) == 2
    assert "neither a file nor shipped" in capsys.readouterr().err
    assert cli.run(["lint", "service.yaml", "-P", "max_model_len"]) == 2
    assert "wanted NAME=VALUE" in capsys.readouterr().err


def test_the_objects_of_a_sweep_are_listed_without_a_server(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = told(capsys, "lint", "mine.sweep.yaml", "--target", "far.yaml", "--objects", code=1)
    assert {one["what"] for one in shown["findings"]} == {"the image has no digest yet"}
    first, second = shown["objects"]
    assert first.keys() == {
        "sweep", "cell", "runs", "kind", "name", "namespace", "image", "labels", "requests",
        "timeout_s", "ttl_s",
    }  # fmt: skip
    assert shown.keys() == {"format", "checked", "findings", "objects", "needs", "at_once"}
    assert shown["findings"][0].keys() == {"file", "where", "what", "got", "wanted"}
    assert (first["cell"], second["cell"]) == ("one/max_num_seqs=8", "one/max_num_seqs=16")
    assert (first["runs"], first["kind"]) == (3, "Job (polyaxon.com/v1)")
    assert first["requests"]["nvidia.com/gpu"] == "1"
    assert first["ttl_s"] == 86_400
    assert first["labels"]["app.kubernetes.io/created-by"] == "memsweep"
    assert first["labels"]["memsweep/cell"] != second["labels"]["memsweep/cell"]
    assert shown["needs"]["mine.sweep.yaml"] == {
        "namespace": ["polyaxon"],
        "service account": ["memsweep"],
        "priority class": ["memsweep-batch"],
        "volume claim": ["memsweep-models"],
    }
    assert shown["at_once"]["mine.sweep.yaml"]["nvidia.com/gpu"] == "2"


def test_here_a_sweep_creates_no_objects(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["lint", "demo", "--objects"]) == 0
    assert "runs are processes on this machine" in capsys.readouterr().err


def test_a_pinned_sweep_is_rendered_to_files(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = SWEEP.replace("image_digest: unresolved", f"image_digest: '{DIGEST}'")
    (here / "mine.sweep.yaml").write_text(
        text.replace("pins: {", f"pins: {{model_revision: {COMMIT}, ")
    )
    wanted = ["lint", "mine.sweep.yaml", "--target", "far.yaml", "--objects", "--render", "out"]
    assert cli.run(wanted) == 0
    out, err = capsys.readouterr()
    assert "one/max_num_seqs=8" in out
    assert "kubectl -n polyaxon get jobs.polyaxon.com,pods -l app.kubernetes.io/created-by" in err
    made = [yaml.safe_load(path.read_text()) for path in sorted((here / "out").iterdir())]
    assert [one["kind"] for one in made] == ["Job", "Job"]
    assert DIGEST in json.dumps(made[0])


def test_a_service_is_rendered_as_the_profile_places_it(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    far = (here / "far.yaml").read_text()
    values = {
        "model": "Qwen/Qwen3-4B",
        "model_revision": COMMIT,
        "max_model_len": "4096",
        "max_num_seqs": "8",
    }
    given = [word for name, value in values.items() for word in ("-P", f"{name}={value}")]
    wanted = ["lint", "service.yaml", "--target", "far.yaml", "--render", "out"]
    assert cli.run([*wanted, *given]) == 1
    assert "the image has no digest yet" in capsys.readouterr().out
    assert not (here / "out").exists()

    (here / "far.yaml").write_text(
        far.replace("image_digest: unresolved", f"image_digest: {DIGEST}")
    )
    assert cli.run([*wanted, *given]) == 0
    assert "polyaxon run -p my-team/memsweep -f out/service.operation.yaml" in (
        capsys.readouterr().err
    )
    made = yaml.safe_load((here / "out" / "service.yaml").read_text())
    assert (made["kind"], made["metadata"]["namespace"]) == ("Service", "polyaxon")
    assert objects.pod_spec(made)["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-A10"}
    assert cli.run(["lint", "out/service.operation.yaml"]) == 0, "it is a polyaxonfile to submit"

    endless = yaml.safe_load((operation.FOLDER / "service.yaml").read_text())
    del endless["termination"]
    (here / "endless.yaml").write_text(yaml.safe_dump(endless))
    low = [word.replace("=4096", "=0") for word in given]
    assert cli.run([*wanted, *low]) == 1
    for bad, said in (
        ([*wanted, "-P", "model=a/b"], "model_revision is missing"),
        ([*wanted, *given, "-P", "model_path=/x"], "model_path is what target far says"),
        (["lint", "service.yaml", *given], "target local is this machine"),
        (
            ["lint", "endless.yaml", "--target", "far.yaml", *given],
            "wanted a name, and termination",
        ),
    ):
        capsys.readouterr()
        assert cli.run(bad) == 2
        assert said in capsys.readouterr().err


# -- pin ---------------------------------------------------------------------------------------


def test_pin_resolves_what_is_open_and_the_plan_takes_it(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = told(capsys, "plan", "mine.sweep.yaml", "--target", "far.yaml")
    assert any("image_digest" in one for one in before["unresolved"])
    with serving(both) as server:
        ends = ["--registry", server.url, "--hub", server.url]
        shown = told(capsys, "pin", "mine.sweep.yaml", "--target", "far.yaml", *ends, "--build")
    assert shown.keys() == {"format", "sweep", "file", "pins", "build", "unresolved"}
    assert shown["pins"][0].keys() == {"pin", "of", "value", "source", "at"}
    assert shown["unresolved"] == []
    values = {one["pin"]: one for one in shown["pins"]}
    assert values["image_digest"]["of"] == "registry.example.com/memsweep/engine:v0.27.0"
    assert values["image_digest"]["value"] == MANIFEST_DIGEST
    assert values["model_revision"]["value"] == COMMIT
    assert all(one["source"].startswith(server.url) and one["at"] for one in shown["pins"])
    assert shown["build"] == {
        "BASE_IMAGE": "vllm/vllm-openai",
        "BASE_DIGEST": MANIFEST_DIGEST,
        "ENGINE_VERSION": "0.27.0",
    }
    written = yaml.safe_load((here / "mine.sweep.pins.yaml").read_text())
    assert written["pins"] == {"image_digest": MANIFEST_DIGEST, "model_revision": COMMIT}
    after = told(capsys, "plan", "mine.sweep.yaml", "--target", "far.yaml")
    assert after["unresolved"] == []
    pins = after["cells"][0]["cell"]["pins"]
    assert (pins["image_digest"], pins["model_revision"]) == (MANIFEST_DIGEST, COMMIT)
    assert after["cells"][0]["cell_key"] != before["cells"][0]["cell_key"]
    assert after["cells"][0]["setting_key"] == before["cells"][0]["setting_key"]
    assert cli.run(["lint", "mine.sweep.pins.yaml"]) == 0


def test_what_cannot_be_resolved_is_named_and_never_made_up(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["pin", "mine.sweep.yaml", "--image", "a/b:v1", "--registry", GONE, "--hub", GONE]
    assert cli.run(arguments) == 3
    err = capsys.readouterr().err
    assert "not resolved: image a/b:v1" in err
    assert "model owner/name" in err
    assert len(err.strip().splitlines()) == 1
    assert not (here / "mine.sweep.pins.yaml").exists()


def test_what_was_resolved_is_kept_where_the_rest_cannot_be(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(both) as server:
        ends = ["--registry", GONE, "--hub", server.url]
        shown = told(capsys, "pin", "mine.sweep.yaml", "--image", "a/b:v1", *ends, code=3)
    assert [one["pin"] for one in shown["pins"]] == ["model_revision"]
    assert shown["unresolved"][0].startswith("image a/b:v1")
    written = yaml.safe_load((here / "mine.sweep.pins.yaml").read_text())
    assert written["pins"] == {"model_revision": COMMIT}


def test_what_an_earlier_call_resolved_is_kept_where_this_one_cannot(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["pin", "mine.sweep.yaml", "--image", "vllm/vllm-openai:v0.27.0", "--json", "--hub"]
    with serving(both) as server:
        assert cli.run([*arguments, server.url, "--registry", server.url]) == 0
        before = (here / "mine.sweep.pins.yaml").read_text()
        capsys.readouterr()
        assert cli.run([*arguments, server.url, "--registry", GONE]) == 3
    told = capsys.readouterr()
    assert MANIFEST_DIGEST in (here / "mine.sweep.pins.yaml").read_text()
    assert f"keeps {MANIFEST_DIGEST}" in told.err
    assert MANIFEST_DIGEST in before


def test_an_image_found_earlier_stays_where_only_the_model_is_asked_for(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(both) as server:
        ends = ["--registry", server.url, "--hub", server.url]
        far = told(capsys, "pin", "mine.sweep.yaml", "--target", "far.yaml", "--build", *ends)
        near = told(capsys, "pin", "mine.sweep.yaml", *ends)
    assert near["build"] == far["build"]
    assert sorted(one["pin"] for one in near["pins"]) == ["base", "image_digest", "model_revision"]
    written = yaml.safe_load((here / "mine.sweep.pins.yaml").read_text())
    assert written["pins"] == {"image_digest": MANIFEST_DIGEST, "model_revision": COMMIT}
    stated = SWEEP.replace("image_digest: unresolved", f"image_digest: '{DIGEST}'")
    (here / "mine.sweep.yaml").write_text(stated)
    with serving(both) as server:
        assert cli.run(["pin", "mine.sweep.yaml", "--hub", server.url]) == 0
    assert cli.run(["plan", "mine.sweep.yaml", "--target", "far.yaml"]) == 0, "it would contradict"


def test_a_shipped_sweeps_pins_go_to_this_directory(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(both) as server:
        far = ["--target", "far.yaml", "--registry", server.url]
        assert told(capsys, "pin", "demo", *far)["file"] == "demo.pins.yaml"
    assert (here / "demo.pins.yaml").is_file()


def test_a_sweep_without_open_pins_asks_nobody(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["pin", "demo", "--hub", GONE]) == 0
    assert "nothing is open" in capsys.readouterr().err
    assert not (here / "demo.pins.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--registry", "http://registry.example.com"], "http:// on this machine"),
        (["--hub", "https://me:word@hub.example.com"], "no place in an address"),
        (["--image", "a/b"], "NAME:TAG"),
        (["--image", f"a/b@{DIGEST}"], "NAME:TAG"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["pin", "mine.sweep.yaml", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.strip().splitlines()) == 1
    assert "word@" not in err
