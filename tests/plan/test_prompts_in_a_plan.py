"""Frozen prompts in a sweep: named by file, identified by content, carried by the cell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from testkit.planning import surroundings

from flows.shipped import beside, find_sweep
from tasks.launch import lint, operation
from tasks.plan.cell import MAX_CELL_BYTES, Cell, prompts_of
from tasks.plan.plan import Plan, make_plan
from tasks.plan.sweep import MAX_PROMPT_BYTES, parse_sweep
from warehouse.errors import BadInput

CONTENT = "600\tlong\n300\tshort\n"
SWEEP = """
name: frozen
model: tiny-qwen3
server: {max_model_len: 2048, kv_cache_memory_bytes: 16777216}
load: {prompt_tokens: 512, prefix_tokens: 16}
experiments:
  - name: one
    points:
      - {parallel: 1, number: 2, output_tokens: 32, prompts: a.txt}
      - {parallel: 2, number: 4}
"""


def planned(text: str = SWEEP, **files: str) -> Plan:
    held = {"a.txt": CONTENT} | {f"{name}.txt": content for name, content in files.items()}
    return make_plan(parse_sweep(text, where="x", read=held.__getitem__), surroundings())


def test_a_point_takes_its_lengths_from_the_file_and_the_next_one_from_above() -> None:
    cell = planned().cells[0].cell
    first, second = cell.setting.load
    assert (first.dataset, first.prompt_tokens, first.prefix_tokens) == ("file", 600, 0)
    assert first.prompts is not None
    assert first.prompts.tokens == (600, 300)
    assert (second.dataset, second.prompt_tokens, second.prompts) == ("random", 512, None)
    assert cell.prompts == {first.prompts.sha256: CONTENT}


def test_the_document_is_read_back_and_random_points_look_as_ever() -> None:
    """Cells without a prompt file keep the keys they had before there were prompt files."""
    cell = planned().cells[0].cell
    document = json.loads(cell.canonical())
    assert Cell.parse(document) == cell
    assert "prompts" not in document["setting"]["load"][1]
    random = planned(SWEEP.replace(", prompts: a.txt", "")).cells[0].cell.document()
    assert "prompts" not in random
    assert "prompts" not in json.dumps(random)


def test_the_content_is_part_of_the_identity_and_the_name_is_none_of_the_cells() -> None:
    plan, other = planned(), planned(a="600\tlong\n300\tother\n")
    assert plan.sweep.sha256 != other.sweep.sha256
    assert plan.cells[0].cell.setting_key != other.cells[0].cell.setting_key
    renamed = planned(SWEEP.replace("a.txt", "b.txt"), b=CONTENT)
    assert renamed.cells[0].cell.cell_key == plan.cells[0].cell.cell_key


def test_files_can_be_varied_and_the_more_specific_level_rules() -> None:
    text = SWEEP.replace("prefix_tokens: 16", "prompts: a.txt").replace(
        "    points:", "    vary_load: {prompts: [b.txt, a.txt]}\n    points:"
    )
    text = text.replace("load: {prompt_tokens: 512, prompts", "load: {prompts").replace(
        "number: 4}", "number: 4, prompt_tokens: 100}"
    )
    load = planned(text, b="700\tx").cells[0].cell.setting.load
    assert [point.prompt_tokens for point in load] == [600, 100, 600, 100]
    text = text.replace(", prompts: a.txt}\n      -", "}\n      -")
    load = planned(text, b="700\tx").cells[0].cell.setting.load
    assert [point.prompt_tokens for point in load] == [700, 100, 600, 100]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("prompts: a.txt", "prompts: a.txt, prompt_tokens: 5"), "prompts and prompt_tokens"),
        (("prompts: a.txt", "dataset: file"), "dataset is file with prompts none"),
        (("prompts: a.txt", "prompts: [1]"), "prompts: Input should be a valid string"),
        (("max_model_len: 2048", "max_model_len: 631"), "load[0] needs 632 tokens"),
    ],
)
def test_bad_input_is_one_line(change: tuple[str, str], said: str) -> None:
    with pytest.raises(BadInput) as caught:
        planned(SWEEP.replace(*change))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bad_line_names_file_and_line() -> None:
    with pytest.raises(BadInput, match=r"x: prompts a.txt: line 2: got 'word'"):
        planned(a="5\tgood\nword\n")


def test_a_sweep_whose_files_were_not_read_cannot_be_planned() -> None:
    with pytest.raises(BadInput, match="the file was not read"):
        make_plan(parse_sweep(SWEEP, where="x"), surroundings())


def test_what_does_not_fit_into_a_cell_is_refused_by_the_plan() -> None:
    line = "600\t" + "word " * 400 + "\n"
    fits = line * (MAX_CELL_BYTES // len(line) - 2)
    cell = planned(a=fits).cells[0].cell
    assert operation.cell_text(cell.document())
    with pytest.raises(BadInput, match="with its prompts, wanted at most 120000"):
        planned(a=fits + line * 4)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("prompts",), {}),
        (("prompts",), {"0" * 64: CONTENT}),
        (("setting", "load", 0, "prompts", "tokens"), [600, 301]),
        (("setting", "load", 0, "prompt_tokens"), 599),
        (("setting", "load", 0, "dataset"), "random"),
    ],
)
def test_a_cell_that_does_not_carry_what_it_names_is_refused(
    place: tuple[str | int, ...], value: object
) -> None:
    document: dict[str, Any] = json.loads(planned().cells[0].cell.canonical())
    at: Any = document
    for name in place[:-1]:
        at = at[name]
    at[place[-1]] = value
    del document["setting_key"], document["cell_key"]
    with pytest.raises(ValueError, match=r"prompt"):
        Cell.parse(document)


def test_a_pipe_or_a_device_is_no_prompt_file(tmp_path: Path) -> None:
    """It has no size to be refused by, and may have no end."""
    path = tmp_path / "my.sweep.yaml"
    path.write_text(SWEEP)
    (tmp_path / "a.txt").symlink_to("/dev/null")
    with pytest.raises(BadInput, match=r"a.txt: is no file"):
        parse_sweep(SWEEP, where="x", read=beside(str(path)))
    (found,) = lint.file(path)
    assert "a.txt: is no file" in found.line


def test_files_are_looked_for_beside_the_sweep(tmp_path: Path) -> None:
    path = tmp_path / "my.sweep.yaml"
    path.write_text(SWEEP)
    where, text = find_sweep(str(path))
    with pytest.raises(BadInput, match=r"a.txt: cannot be read: No such file"):
        parse_sweep(text, where=where, read=beside(str(path)))
    (tmp_path / "a.txt").write_bytes(b"5\t\xff")
    with pytest.raises(BadInput, match=r"a.txt: not UTF-8"):
        parse_sweep(text, where=where, read=beside(str(path)))
    (tmp_path / "a.txt").write_text("x" * (MAX_PROMPT_BYTES + 1))
    with pytest.raises(BadInput, match=r"a.txt: 1048577 bytes, wanted at most"):
        parse_sweep(text, where=where, read=beside(str(path)))
    content = CONTENT.replace("\n", "\r\n")
    (tmp_path / "a.txt").write_bytes(content.encode())
    sweep = parse_sweep(text, where=where, read=beside(str(path)))
    assert sweep.prompt_files == {"a.txt": content}
    assert prompts_of(content).tokens == (600, 300)
