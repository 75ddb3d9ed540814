"""A prompt file: the same reading on both sides, every token count stated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks import prompts
from tasks.prompts import Prompt


def test_both_forms_give_prompts_with_their_tokens() -> None:
    content = '\ufeff{"prompt": "two\\nlines", "tokens": 24}\r\n\n7\ttab\tin it \r\n9\tno line end'
    assert prompts.parse(content) == (
        Prompt("two\nlines", 24),
        Prompt("tab\tin it ", 7),
        Prompt("no line end", 9),
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("just text", "line 2: got 'just text', wanted a JSON object"),
        ("0\tx", "tokens: got 0"),
        ("-5\tx", "wanted a JSON object"),
        ("\u0663\tx", "wanted a JSON object"),
        ("1234567890\tx", "wanted a JSON object"),
        ("5\t  ", "prompt: got '  ', wanted a text"),
        ('{"prompt": "x"}', "got the keys ['prompt'], wanted prompt and tokens"),
        ('{"prompt": "x", "tokens": 1, "max_tokens": 2}', "wanted prompt and tokens"),
        ('{"prompt": "x", "tokens": true}', "tokens: got True"),
        ('{"prompt": "x", "tokens": 1.5}', "tokens: got 1.5"),
        ('{"prompt": 5, "tokens": 1}', "prompt: got 5"),
        ('{"prompt": "\\ud800", "tokens": 1}', "line 2: 'utf-8' codec"),
        ("{", "line 2: not JSON"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(line: str, said: str) -> None:
    with pytest.raises(ValueError, match="line 2") as caught:
        prompts.parse(f"3\tgood\n{line}\n")
    assert said in str(caught.value)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_a_prompt_is_refused(content: str) -> None:
    with pytest.raises(ValueError, match="got no prompt"):
        prompts.parse(content)


@given(st.text(max_size=200))
def test_any_content_gives_prompts_or_says_which_line(content: str) -> None:
    said = ""
    try:
        found = prompts.parse(content)
    except ValueError as error:
        found, said = (), str(error)
    assert bool(found) != said.startswith(("line ", "got no prompt"))
    assert all(prompt.tokens >= 1 and prompt.text.strip() for prompt in found)


@pytest.mark.parametrize(
    ("warmup", "number", "sent"),
    [
        (0, 3, "abc"),
        (1, 2, "cab"),
        (2, 3, "ababc"),
        (0, 5, "abcab"),
        (2, 4, "bcabca"),
        (7, 1, "bcabcaba"),
    ],
)
def test_measured_prompts_begin_with_the_first_and_the_warm_up_takes_the_next(
    warmup: int, number: int, sent: str
) -> None:
    held = tuple(Prompt(name, 1) for name in "abc")
    assert "".join(p.text for p in prompts.in_order(held, warmup=warmup, number=number)) == sent


def test_the_hash_is_that_of_the_file() -> None:
    """Of the bytes, line ends and all: what sha256sum prints."""
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert prompts.sha256("") == empty
    assert prompts.sha256("1\ta\r\n") != prompts.sha256("1\ta\n")
