"""The table of requests: what it calls a success is a whole answer."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from tasks import requests
from tasks.plan.cell import LoadPoint
from tests.support.bundle_maker import Ask, Spec, write_outputs

CUT = Ask(1010.5, 1011.0, prompt=512, output=60)


def outputs(folder: Path, **load: object) -> Path:
    """A run's outputs with one whole answer, one that was cut and one that failed."""
    folder.mkdir()
    point = LoadPoint(parallel=3, number=3, **load)
    write_outputs(folder, Spec(load=(point,), requests=((Ask(1010.0, 1012.0), CUT, Ask(1011.0)),)))
    return folder


def test_a_cut_answer_is_no_success_and_has_no_served_tokens(tmp_path: Path) -> None:
    rows = requests.read(outputs(tmp_path / "run")).to_pydict()
    assert rows["success"] == [True, False, False]
    assert rows["prompt_tokens"] == [518, None, None]
    assert rows["completion_tokens"] == [128, None, None]
    # It took its time all the same: the window and the chunks are facts.
    assert rows["end_s"] == [1012.0, 1011.0, None]


def test_an_answer_that_may_end_early_is_whole_with_fewer_tokens(tmp_path: Path) -> None:
    rows = requests.read(outputs(tmp_path / "run", ignore_eos=False)).to_pydict()
    assert rows["success"] == [True, True, False]


def test_a_table_of_another_parser_version_is_read_again(tmp_path: Path) -> None:
    folder = outputs(tmp_path / "run")
    requests.write_table(folder)
    assert requests.read_table(folder).equals(requests.read(folder))
    other = requests.read(folder).slice(0, 1)
    pq.write_table(other, folder / requests.FILE)
    assert requests.read_table(folder).equals(requests.read(folder))
    pq.write_table(
        other.replace_schema_metadata(pq.read_schema(folder / requests.FILE).metadata),
        folder / requests.FILE,
    )
    assert requests.read_table(folder).num_rows == 3
