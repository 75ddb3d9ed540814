"""The cell as the run reads it: whatever it does not know, it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.canonical import canonical_json, content_key
from tasks.plan.cell import Cell as PlannedCell
from tasks.pod.inputs import InputError, LoadPoint, ServerSettings, parse_cell, read_inputs
from tests.double import cells


def test_a_planned_cell_is_read_whole() -> None:
    """What the plan hands over and what the run reads are one thing."""
    planned = PlannedCell.parse(cells.cell(load=[{}, {"parallel": 4}]))
    cell = parse_cell(planned.canonical())
    assert cell.load[1].parallel == 4
    assert cell.limits.load_point_s == (20.0, 20.0)
    assert cell.document["cell_key"] == planned.cell_key


def test_every_setting_of_the_plan_is_known_here() -> None:
    """A setting that the plan gains and the run does not would be refused at the first run."""
    setting = PlannedCell.parse(cells.cell()).setting
    assert set(ServerSettings.__dataclass_fields__) == set(type(setting.server).model_fields)
    assert set(LoadPoint.__dataclass_fields__) == set(type(setting.load[0]).model_fields)


PROMPTS = "600\tone\n300\ttwo\n"


def test_a_prompt_file_comes_with_the_cell() -> None:
    point = parse_cell(cells.cell_text(prompts=PROMPTS)).load[0]
    assert [(prompt.text, prompt.tokens) for prompt in point.prompts] == [
        ("one", 600),
        ("two", 300),
    ]
    assert parse_cell(cells.cell_text()).load[0].prompts == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompts": {}}, "cell.prompts does not hold the file"),
        ({"prompts": None}, "cell.prompts does not hold the file"),
        ({"prompts": []}, "cell.prompts does not hold the file"),
        ({"prompts": 5}, "cell.prompts: got 5, wanted an object"),
        ({"content": PROMPTS + "\n"}, "cell.prompts does not hold the file"),
        ({"dataset": "random"}, "dataset: got 'random', wanted one of file"),
        ({"tokens": [600, 301]}, "prompts.tokens: not those that the file states"),
        ({"named": "x"}, "prompts: got 'x', wanted an object"),
    ],
)
def test_prompts_that_are_not_those_named_are_refused(given: dict[str, Any], message: str) -> None:
    """What is sent must be what the cell was planned and named for."""
    document = cells.cell(prompts=PROMPTS)
    point = document["setting"]["load"][0]
    digest = point["prompts"]["sha256"]
    if "content" in given:
        document["prompts"][digest] = given["content"]
    if "prompts" in given:
        document["prompts"] = given["prompts"]
    if "tokens" in given:
        point["prompts"]["tokens"] = given["tokens"]
    point |= {"dataset": given.get("dataset", "file")}
    point |= {"prompts": given["named"]} if "named" in given else {}
    document["setting_key"] = content_key(document["setting"])
    content = {name: document[name] for name in ("setting_key", "pins", "harness")}
    document["cell_key"] = content_key(content)
    with pytest.raises(InputError) as caught:
        parse_cell(canonical_json(document))
    assert message in str(caught.value)


def _changed(path: str, value: Any) -> str:
    document = json.loads(cells.cell_text())
    *parents, last = path.split("/")
    place = document
    for name in parents:
        place = place[int(name) if name.isdigit() else name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    if path.startswith("setting/"):
        key = content_key(document["setting"])
        content = {"setting_key": key, "pins": document["pins"], "harness": document["harness"]}
        document |= {"setting_key": key, "cell_key": content_key(content)}
    return canonical_json(document)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("setting/server/surprise", 1, "cell.setting.server: unknown keys ['surprise']"),
        ("setting/server/seed", ..., "missing keys ['seed']"),
        ("setting/server/max_num_seqs", True, "max_num_seqs: got True, wanted int"),
        ("setting/server/enforce_eager", 1, "enforce_eager: got 1, wanted bool"),
        ("setting/server/dtype", "a b", "dtype: got 'a b', wanted a type's name"),
        ("setting/load/0/number", 0, "cell.setting.load[0].number: got 0, wanted at least 1"),
        ("setting/load/0/dataset", "openqa", "dataset: got 'openqa', wanted one of random"),
        ("setting/load", [], "cell.setting.load: got [], wanted at least one load point"),
        ("pins/device", "tpu", "cell.cell_key: got"),
        ("cell_key", "0" * 64, "cell.cell_key: got '000"),
        ("setting_key", None, "cell.setting_key: got None"),
        ("limits/load_point_s", [1.0, 2.0], "got 2 deadlines, wanted one for each of the 1"),
        ("limits/start_s", None, "cell.limits.start_s: got None, wanted float"),
        ("sampling/server_interval_s", 0.01, "got 0.01, wanted at least 0.05"),
        ("format", 2, "cell.format: got 2, wanted 1"),
    ],
)
def test_what_is_wrong_is_named(path: str, value: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_cell(_changed(path, value))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_place_is_named(tmp_path: Path) -> None:
    environ = {
        "MEMSWEEP_CELL": cells.cell_text(),
        "MEMSWEEP_OUTPUTS": str(tmp_path),
        "MEMSWEEP_MODEL_PATH": str(tmp_path / "model"),
        "MEMSWEEP_ENGINE_BIN": str(tmp_path),
        "MEMSWEEP_BENCH_PYTHON": str(tmp_path),
        "MEMSWEEP_CACHE": str(tmp_path),
    }
    with pytest.raises(InputError, match="MEMSWEEP_RUN_UUID: not set"):
        read_inputs(environ)
    with pytest.raises(InputError, match=r"MEMSWEEP_MODEL_PATH: .*config\.json is not there"):
        read_inputs(environ | {"MEMSWEEP_RUN_UUID": "0"})


def test_a_cell_can_come_in_a_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"MEMSWEEP_CELL_FILE: .* No such file"):
        read_inputs({"MEMSWEEP_CELL_FILE": str(tmp_path / "cell.json")})
