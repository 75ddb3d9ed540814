"""A whole answer: every token that was asked for, and an end. EvalScope's word is no evidence."""

from __future__ import annotations

import base64
import pickle
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tasks import answers
from tasks.capture import evalscope
from tasks.pod.bench import count_rows

KILLED = Path(__file__).parent / "data" / "evalscope-1.9.1" / "engine-killed.db"


def messages(reason: str | None, *, protocol: int = 4) -> str:
    """A stream's chunks as EvalScope keeps them, the last with a finish reason or without."""
    chunk = {"choices": [{"index": 0, "delta": {"content": "a "}, "finish_reason": reason}]}
    return base64.b64encode(pickle.dumps([chunk], protocol=protocol)).decode()


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize(
    ("reason", "ended"),
    [("length", True), ("stop", True), (None, False), ("abort", False), ("error", False)],
)
def test_a_finish_reason_is_seen_without_loading_the_pickle(
    reason: str | None, ended: bool, protocol: int
) -> None:
    assert answers.ended(messages(reason, protocol=protocol)) is ended


@pytest.mark.parametrize("content", [None, "", 7, "no base64!", base64.b64encode(b"text").decode()])
def test_what_is_no_pickle_does_not_tell(content: object) -> None:
    assert answers.ended(content) is None


def test_a_pickle_is_never_loaded() -> None:
    """This one would raise ZeroDivisionError if it were."""
    bomb = "gASVHAAAAAAAAACMCGJ1aWx0aW5zlIwEZXZhbJSTlIwDMS8wlIWUUpQu"
    assert answers.ended(bomb) is False


@pytest.mark.parametrize(
    ("row", "whole"),
    [
        ({}, True),
        ({"success": 0}, False),
        ({"success": None}, False),
        ({"prompt": 0}, False),
        ({"prompt": None}, False),
        ({"output": 127}, False),
        ({"output": 130}, True),
        ({"output": None}, False),
        ({"output": True}, False),
        ({"messages": messages("length")}, True),
        ({"messages": messages(None)}, False),
        ({"answer_tokens": 1, "output": 5}, True),
        ({"answer_tokens": 1, "output": 5, "messages": messages(None)}, False),
        ({"answer_tokens": 1, "output": 0, "messages": messages("stop")}, False),
    ],
)
def test_whole(row: dict[str, object], whole: bool) -> None:
    given: dict[str, object] = {
        "success": 1, "prompt": 518, "output": 128, "messages": "", "answer_tokens": 128,
    }  # fmt: skip
    assert answers.whole(**given | row) is whole  # type: ignore[arg-type]


def test_without_ignore_eos_one_token_may_be_all() -> None:
    assert answers.answer_tokens(output_tokens=128, ignore_eos=True) == 128
    assert answers.answer_tokens(output_tokens=128, ignore_eos=False) == 1


@pytest.mark.parametrize("wanted", [128, 1])
def test_of_a_killed_engine_only_whole_answers_count(wanted: int) -> None:
    """EvalScope wrote success 1 and 512 prompt tokens, counted by itself, for the cut streams.

    So it must be even where an answer may end early: the cut ones have five or six tokens.
    """
    with closing(sqlite3.connect(f"file:{KILLED}?immutable=1", uri=True)) as connection:
        said = connection.execute("SELECT success, prompt_tokens FROM result").fetchall()
    assert said == [(1, 512)] * 4 + [(0, None)] * 2 + [(1, 518)] * 2
    requests = evalscope.requests(KILLED.read_bytes(), answer_tokens=wanted)
    assert [request.success for request in requests] == [True] * 4 + [False] * 2 + [True] * 2
    assert [request.whole for request in requests] == [False] * 6 + [True] * 2
    assert [request.prompt_tokens for request in requests] == [None] * 6 + [518, 518]
    assert [request.completion_tokens for request in requests] == [None] * 6 + [128, 128]
    numbers = evalscope.load_point(requests, asked=8)
    assert (numbers.state, numbers.requests_succeeded) == ("partial", 2)
    assert (numbers.prompt_tokens_min, numbers.prompt_tokens_max) == (518, 518)
    assert evalscope.load_point(requests[:6], asked=6).state == "failed"


@pytest.mark.parametrize("wanted", [128, 1])
def test_the_run_and_the_parser_count_alike(tmp_path: Path, wanted: int) -> None:
    copy = tmp_path / "benchmark_data.db"
    copy.write_bytes(KILLED.read_bytes())
    rows = count_rows(copy, answer_tokens=wanted)
    assert (rows.total, rows.succeeded) == (8, 2)


def test_equal_requests_have_one_hash() -> None:
    wanted = answers.requests_sha256(['{"a": 1, "b": "é"}', "no json"])
    assert answers.requests_sha256(['{"b":"\\u00e9","a":1}', "no json"]) == wanted
    assert answers.requests_sha256(["no json", '{"a": 1, "b": "é"}']) != wanted
    assert answers.requests_sha256([]) is None
    assert answers.requests_sha256(["{}", None]) is None
