"""A run measured again: the derived sweep has the very same cell; what is missing is said first."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from testkit.planning import demo, surroundings

from flows import cli, context
from flows.commands import reproducing, running
from flows.shipped import beside, find_sweep
from tasks import record, reproduce
from tasks.bundle import load
from tasks.home import Home
from tasks.launch import pins
from tasks.plan import gpus
from tasks.plan.cell import Cell
from tasks.plan.plan import PlannedCell, make_plan
from tasks.plan.sweep import parse_sweep
from tasks.reproduce import Original
from tasks.rounds import RepeatState, open_round
from tests.support.bundle_maker import Lab, Spec
from warehouse.errors import BadInput, CannotFindOut
from warehouse.registry import Outcome, Phase

UUID = "11111111-1111-4111-8111-111111111111"
#: The pins of the bundles that bundle_maker makes.
PINS: dict[str, Any] = {
    "revision": lambda name: "sha256:" + "0" * 63 + "1",
    "engine_lock_sha256": "0" * 63 + "2",
    "bench_lock_sha256": "0" * 63 + "3",
}
MACHINE = {"cpu_count": 2, "memory_total_bytes": 24 * 2**30, "machine": "Linux"}


def of(cell: Cell, **changes: Any) -> Original:
    facts: dict[str, Any] = {
        "run_uuid": UUID,
        "outcome": "ok",
        "sweep": "demo",
        "round": "demo-1",
        "target": "local",
        "cell": cell,
        "environment": {},
    }
    return Original(**(facts | changes))


def planned(home: Home, first: Original, **changes: Any) -> PlannedCell:
    path = str(reproduce.write_sweep(home, first, repeats=1))
    where, text = find_sweep(path)
    sweep = parse_sweep(text, where=where, read=beside(path))
    (cell,) = make_plan(sweep, surroundings(**changes), keep_infeasible=True).cells
    return cell


@pytest.mark.parametrize("number", range(5))
def test_every_cell_of_the_demo_keeps_its_key_and_its_label(home: Home, number: int) -> None:
    cell = demo().cells[number].cell
    again = planned(home, of(cell)).cell
    assert again.cell_key == cell.cell_key
    assert again.label == cell.label
    assert (again.expect, again.sampling, again.limits) == (cell.expect, cell.sampling, cell.limits)


PROMPTS = """
name: frozen
model: tiny-qwen3
server: {max_model_len: 2048, kv_cache_memory_bytes: 16777216, block_size: 16}
sampling: {server_interval_s: 0.5}
experiments:
  - name: e
    vary: {gpu_memory_utilization: [0.85], kv_cache_dtype: [auto]}
    points: [{parallel: 1, number: 1, prompts: p.txt}, {parallel: 2, number: 2, temperature: 0.5}]
"""


def test_frozen_prompts_and_odd_settings_are_kept(home: Home) -> None:
    sweep = parse_sweep(PROMPTS, where="x", read=lambda name: "5\ta prompt\n7\tanother\n")
    (cell,) = make_plan(sweep, surroundings()).cells
    again = planned(home, of(cell.cell)).cell
    assert again.cell_key == cell.cell.cell_key
    assert again.prompts == cell.cell.prompts
    assert again.sampling == cell.cell.sampling
    assert again.label == "e/gpu_memory_utilization=0.85/kv_cache_dtype=auto"


def test_a_label_of_another_form_costs_nothing_but_the_label(home: Home) -> None:
    cell = demo().cells[0].cell.model_copy(update={"label": "Measured By Hand"})
    again = planned(home, of(cell)).cell
    assert (again.label, again.cell_key) == ("cell", cell.cell_key)


def test_pins_that_moved_are_named_with_both_values(home: Home) -> None:
    cell = demo().cells[0].cell
    first = of(cell)
    now = planned(home, first, revision=lambda name: None, engine_lock_sha256="f" * 64).cell
    lines = reproduce.cannot_be_had(first, now, target="local")
    assert len(lines) == 2
    assert any("model_revision" in one and "unresolved" in one for one in lines)
    assert any("f" * 64 in one for one in lines)
    made_first = reproduce.cannot_be_had(first, now, target="local", generated=True)
    assert len(made_first) == 1
    assert reproduce.cannot_be_had(first, planned(home, first).cell, target="local") == []
    older = of(cell.model_copy(update={"harness": 0}))
    assert "harness 0" in reproduce.cannot_be_had(older, cell, target="local")[0]


def test_a_run_in_an_image_asks_for_that_image(home: Home) -> None:
    digest = "sha256:" + "0" * 64
    there = make_plan(
        demo().sweep, surroundings(engine_lock_sha256=None, image_digest=digest)
    ).cells[0]
    first = of(there.cell)
    again = planned(home, first, engine_lock_sha256=None).cell
    assert again.cell_key == there.cell.cell_key
    here = planned(home, first).cell
    assert any("image_digest" in x for x in reproduce.cannot_be_had(first, here, target="local"))


PROFILE = """
description: a cluster
device: cuda
operation: gpu.yaml
gpu: A10
host: https://polyaxon.example.com
image: registry.example.com/team/engine
image_digest: unresolved
models: /models
models_claim: models
fetch_s: 60
resources: {requests: {nvidia.com/gpu: 1}, limits: {nvidia.com/gpu: 1}}
"""


def test_what_registry_and_hub_say_of_a_clusters_run_comes_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "cluster.yaml"
    profile.write_text(PROFILE)
    cell = demo().cells[0].cell
    digest, commit = "sha256:" + "0" * 64, "0" * 40
    there = {"image_digest": digest, "model_revision": commit}
    first = of(cell.model_copy(update={"pins": cell.pins.model_copy(update=there)}))
    asked: list[object] = []

    def answers(image: object, model: object) -> None:
        def one(answer: object, *given: object) -> object:
            asked.append(given)
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(pins, "image_is_there", lambda *given: one(image, *given))
        monkeypatch.setattr(pins, "commit_of", lambda name, **_: one(model, name))

    answers(True, None)
    reproducing._ask_sources(first, str(profile))
    assert asked == [("registry.example.com/team/engine", digest), (cell.setting.model.name,)]
    assert capsys.readouterr().err == ""
    answers(False, None)
    with pytest.raises(BadInput, match=f"the registry has no image .*{digest} any more"):
        reproducing._ask_sources(first, str(profile))
    answers(CannotFindOut("no network"), BadInput("no such commit"))
    reproducing._ask_sources(first, str(profile))
    told = " ".join(capsys.readouterr().err.split())
    assert "not known whether the image can still be had: no network" in told
    assert "the model can be had only where it is already: no such commit" in told
    asked.clear()
    reproducing._ask_sources(first, "local")
    assert asked == []


A10 = {"name": "NVIDIA A10", "total_bytes": 24_146_608_128}


def test_other_hardware_is_named() -> None:
    pins = demo().cells[0].cell.pins
    environment = {"cpu_count": 2, "memory_total_bytes": 24 * 2**30, "platform": "Linux-test"}

    def lines(**here: Any) -> list[str]:
        return reproduce.other_hardware(environment, pins=pins, here=here, gpu=None)

    assert lines(**MACHINE) == []
    assert "this machine has 4" in lines(**MACHINE | {"cpu_count": 4})[0]
    assert "memory" in lines(**MACHINE | {"memory_total_bytes": 32 * 2**30})[0]
    assert lines(**MACHINE | {"memory_total_bytes": 24 * 2**30 - 2**20}) == []
    assert "this machine is arm64" in lines(**MACHINE | {"machine": "arm64"})[0]
    cuda = pins.model_copy(update={"device": "cuda"})

    def on_gpu(gpu: gpus.Gpu | None) -> list[str]:
        return reproduce.other_hardware({"gpus": [A10]}, pins=cuda, here={}, gpu=gpu)

    assert on_gpu(gpus.find("A10")) == []
    assert on_gpu(None) == []
    assert "the target L4" in on_gpu(gpus.find("L4"))[0]


def test_classes_of_hardware_after_the_run() -> None:
    cpu = {"gpus": [], "cpu_count": 2, "memory_total_bytes": 24 * 2**30}
    assert reproduce.same_class(cpu, dict(cpu)) is True
    assert reproduce.same_class(cpu, cpu | {"cpu_count": 4}) is False
    assert reproduce.same_class({"gpus": [A10]}, cpu) is False
    assert reproduce.same_class({"gpus": [A10]}, {"gpus": [A10]}) is True
    assert reproduce.same_class({}, cpu) is None


# The command


@pytest.fixture(scope="module")
def one_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a state folder with one ingested run; tests copy it."""
    made = Lab(Home(tmp_path_factory.mktemp("one") / "home"))
    record.ingest(made.home, [made.seal(run_uuid=UUID)])
    return made.home.root


@pytest.fixture
def lab(home: Home, one_run: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A warehouse with one run, a target that offers its pins, nothing that starts a service."""
    shutil.copytree(one_run, home.root)
    made = Lab(home)
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)  # no test here cuts the power
    monkeypatch.setenv("MEMSWEEP_HOME", str(home.root))
    monkeypatch.setattr(reproduce, "this_machine", lambda: MACHINE)
    monkeypatch.setattr(context, "surroundings", lambda *_args, **_named: surroundings(**PINS))
    monkeypatch.setattr(context, "prepare", lambda *_args: None)
    return made


@pytest.fixture
def measures(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Let a measuring of the derived sweep leave bundles like the given ones."""

    def will_leave(*specs: Spec) -> list[dict[str, Any]]:
        asked: list[dict[str, Any]] = []

        def measure(path: str, target: str, wishes: dict[str, Any], **_named: Any) -> None:
            asked.append({"path": path, "target": target, **wishes})
            where, text = find_sweep(path)
            sweep = parse_sweep(text, where=where)
            round_, _ = open_round(lab.home, sweep, text, target=target, fresh=wishes["fresh"])
            for repeat, spec in enumerate(specs, start=1):
                left = replace(spec, sweep=sweep.name, round=round_.id, repeat=repeat)
                folder = lab.seal(left)
                cell = left.cell()
                sealed = load(folder)
                round_.save(
                    RepeatState(
                        cell_key=cell.cell_key,
                        repeat=repeat,
                        attempt=1,
                        run_uuid=left.run_uuid,
                        prediction_sha256=None,
                        outcome=left.outcome.value,
                        manifest_sha256=sealed.manifest_sha256,
                    )
                )
                record.ingest(lab.home, [folder])

        monkeypatch.setattr(running, "measure", measure)
        return asked

    return will_leave


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run(["reproduce", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_same_again_is_reproduced(
    measures: Callable[..., list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = measures(Spec())
    code, out, err = call(capsys, UUID[:6], "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["format"], found["verdict"], found["run_uuid"]) == (1, "reproduced", UUID)
    assert list(found) == [
        "format",
        "run_uuid",
        "target",
        "verdict",
        "why",
        "old_outcome",
        "new_outcomes",
        "earlier_runs",
        "metrics",
        "runs",
    ]
    wanted = {("load_point", "metric", "old", "new", "verdict", "why")}
    assert {tuple(row) for row in found["metrics"]} == wanted
    assert found["new_outcomes"] == ["ok"]
    assert {row["verdict"] for row in found["metrics"]} == {"reproduced"}
    assert any(row["metric"] == "kv_cache_size_tokens" for row in found["metrics"])
    (wish,) = asked
    assert (wish["target"], wish["fresh"]) == ("local", True)
    # A second call measures again: the first reproduction is finished.
    measures(Spec())
    code, out, err = call(capsys, UUID)
    assert code == 0
    assert "noise: 2 earlier runs" in err


def test_other_numbers_are_not(
    measures: Callable[..., list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Test that exact arithmetic in the log must be the very same."""
    measures(Spec(change=_other_tokens))
    code, out, err = call(capsys, UUID)
    assert code == 1
    assert "not reproduced" in out
    assert "kv_cache_size_tokens" in err


def _other_tokens(folder: Path) -> None:
    log = folder / "server.log"
    log.write_text(log.read_text().replace("975,890", "975,000"))


def test_another_outcome_is_not_reproduced(
    measures: Callable[..., list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    refused = Spec(
        outcome=Outcome.REFUSED,
        phase=Phase.KV_CACHE,
        log="cpu-0.27.0-kv-cache-larger-than-memory.log",
        metrics=None,
        requests=(),
    )
    measures(refused)
    code, _, err = call(capsys, UUID)
    assert code == 1
    assert "the outcome was ok and is refused" in err


def test_a_run_that_is_lost_tells_nothing(
    measures: Callable[..., list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    measures(Spec(outcome=Outcome.LOST, phase=Phase.BENCH))
    code, _, err = call(capsys, UUID)
    assert code == 3
    assert "cannot tell: the new run found nothing out" in err


def test_what_cannot_be_had_is_one_line_before_anything_starts(
    lab: Lab, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = surroundings(**PINS | {"engine_lock_sha256": "f" * 64})
    monkeypatch.setattr(context, "surroundings", lambda *_args, **_named: other)
    monkeypatch.setattr(reproduce, "this_machine", lambda: MACHINE | {"cpu_count": 96})

    def started(*_args: Any) -> None:
        raise AssertionError("started")

    monkeypatch.setattr(context, "prepare", started)
    code, out, err = call(capsys, UUID)
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert "engine_lock_sha256" in err
    assert "96" in err


def test_runs_without_a_result_or_a_whole_bundle_are_refused(lab: Lab) -> None:
    with pytest.raises(BadInput, match="only a sealed bundle"):
        reproduce.original(lab.home, "22222222-2222-4222-8222-222222222222")
    lost = lab.seal(outcome=Outcome.LOST, phase=Phase.BENCH)
    with pytest.raises(BadInput, match="ended as lost"):
        reproduce.original(lab.home, lost.name)
    with (lab.home.bundles / UUID / "server.log").open("a") as log:
        log.write("x")
    with pytest.raises(BadInput, match="not as it was sealed"):
        reproduce.original(lab.home, UUID)


def test_the_target_is_the_one_that_was_given(lab: Lab) -> None:
    """A bundle holds a profile's name, which finds no profile that came from a file."""
    where, text = find_sweep("demo")
    sweep = parse_sweep(text, where=where)
    round_, _ = open_round(lab.home, sweep, text, target="/mine/a10.yaml", fresh=True)
    assert reproduce.original(lab.home, UUID).target == "local"
    round_.save(RepeatState("key", 1, 1, UUID, None))
    assert reproduce.original(lab.home, UUID).target == "/mine/a10.yaml"


def test_an_interrupted_reproduction_goes_on(lab: Lab) -> None:
    first = reproduce.original(lab.home, UUID)
    assert not reproduce.is_unfinished(lab.home, first, "local", repeats=1)
    path = str(reproduce.write_sweep(lab.home, first, repeats=1))
    where, text = find_sweep(path)
    open_round(lab.home, parse_sweep(text, where=where), text, target="local", fresh=True)
    assert reproduce.is_unfinished(lab.home, first, "local", repeats=1)
    assert not reproduce.is_unfinished(lab.home, first, "elsewhere", repeats=1)
