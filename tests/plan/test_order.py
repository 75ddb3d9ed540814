"""Repeats lie apart, the order is the seed's alone, the sentinel stands at start, middle, end."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.plan.order import around, bisection, interleaved, shuffled

KEYS = st.lists(st.text("abcdef0123456789", min_size=4, max_size=4), unique=True, max_size=12)
REPEATS = st.integers(1, 6)
SEEDS = st.one_of(st.none(), st.integers(0, 2**32))


@settings(deadline=None)
@given(KEYS, REPEATS, SEEDS)
def test_every_repeat_once_and_in_rounds(keys: list[str], repeats: int, seed: int | None) -> None:
    turns = interleaved(keys, repeats, seed=seed)
    assert Counter(turns) == Counter((k, r) for k in keys for r in range(1, repeats + 1))
    assert [repeat for _, repeat in turns] == sorted(repeat for _, repeat in turns)


@settings(deadline=None)
@given(KEYS, REPEATS, SEEDS)
def test_no_cell_follows_itself_where_another_could(
    keys: list[str], repeats: int, seed: int | None
) -> None:
    turns = interleaved(keys, repeats, seed=seed)
    twice = [a for (a, _), (b, _) in itertools.pairwise(turns) if a == b]
    assert len(keys) == 1 or not twice


def test_without_a_seed_the_file_decides_and_with_one_the_seed() -> None:
    keys = [f"{number:064x}" for number in range(20)]
    assert [key for key, _ in interleaved(keys, 1)] == keys
    one, other = interleaved(keys, 2, seed=1), interleaved(keys, 2, seed=2)
    assert one == interleaved(keys, 2, seed=1)
    assert one == interleaved(keys[::-1], 2, seed=1)
    assert one != other
    assert [key for key, _ in one[:20]] != [key for key, _ in one[20:]]


def test_the_shuffle_is_the_same_for_ever() -> None:
    """A round goes on in the order it began with, on another Python too."""
    assert shuffled("abcde", "7:1") == ["e", "b", "c", "a", "d"]


@settings(deadline=None)
@given(KEYS, st.integers(3, 8))
def test_the_sentinel_is_first_in_the_middle_and_last(keys: list[str], repeats: int) -> None:
    others = [(key, 1) for key in keys]
    turns = list(around(others, "s", repeats))
    assert [turn for turn in turns if turn[0] != "s"] == others
    assert [repeat for key, repeat in turns if key == "s"] == list(range(1, repeats + 1))
    assert turns[0][0] == turns[-1][0] == "s"
    middle = next(place for place, turn in enumerate(turns) if turn == ("s", repeats // 2 + 1))
    before = sum(key != "s" for key, _ in turns[:middle])
    assert before == len(others) // 2


@pytest.mark.parametrize(
    ("count", "repeats", "gaps"), [(6, 3, [3, 3]), (7, 3, [3, 4]), (8, 5, [2, 2, 2, 2])]
)
def test_the_others_lie_evenly_between(count: int, repeats: int, gaps: list[int]) -> None:
    turns = list(around([(str(n), 1) for n in range(count)], "s", repeats))
    places = [place for place, (key, _) in enumerate(turns) if key == "s"]
    assert [b - a - 1 for a, b in itertools.pairwise(places)] == gaps


@settings(deadline=None)
@given(st.integers(0, 200))
def test_bisection_is_a_permutation_that_halves(count: int) -> None:
    order = bisection(count)
    assert sorted(order) == list(range(count))
    assert order[:3] in ([0, count - 1, (count - 1) // 2], list(range(count)))


@settings(deadline=None)
@given(st.integers(2, 200), st.integers(0, 200))
def test_measuring_only_the_unsettled_finds_the_frontier_in_few_steps(
    count: int, first_bad: int
) -> None:
    good, bad, measured = -1, count, 0
    for index in bisection(count):
        if good < index < bad:
            measured += 1
            if index < first_bad:
                good = index
            else:
                bad = index
    assert bad == min(first_bad, count)
    assert measured <= 3 + count.bit_length()


def test_a_line_takes_its_places_in_bisection_order() -> None:
    line = ["v1", "v2", "v3", "v4", "v5"]
    turns = interleaved(["a", *line, "b"], 1, lines=[line])
    assert [key for key, _ in turns] == ["a", "v1", "v5", "v3", "v2", "v4", "b"]
    mixed = [key for key, _ in interleaved(["a", *line, "b"], 1, seed=3, lines=[line])]
    assert [key for key in mixed if key in line] == ["v1", "v5", "v3", "v2", "v4"]
