"""The sentinel of a sweep or night, and the key of a frontier: what is stated, what stays."""

from __future__ import annotations

import pytest
from testkit.planning import demo, surroundings

from flows.shipped import find_sweep
from tasks.canonical import content_key
from tasks.plan.plan import Plan, make_plan
from tasks.plan.sweep import parse_sweep
from warehouse.errors import BadInput

SWEEP = """
name: small
model: tiny-qwen3
server: {max_model_len: 2048, kv_cache_memory_bytes: 16777216, max_num_batched_tokens: 512}
experiments:
  - name: refused
    server: {kv_cache_memory_bytes: 1000000000000}
    points: [{parallel: 1, number: 2}]
    expect: refused
  - name: impossible
    server: {kv_cache_memory_bytes: 1000000000000}
    points: [{parallel: 1, number: 3}]
  - name: one
    vary: {max_num_seqs: [16, 32]}
    points: [{parallel: 1, number: 2}]
  - name: two
    points: [{parallel: 1, number: 4}]
"""


def plan(more: str = "", *, night: bool = False) -> Plan:
    return make_plan(parse_sweep(SWEEP + more, where="x"), surroundings(), night=night)


def shown(made: Plan) -> list[str]:
    return [f"{r.cell.label}#{r.repeat}{'*' if r.sentinel else ''}" for r in made.runs()]


def label(made: Plan) -> str | None:
    return next((r.cell.label for r in made.runs() if r.sentinel), None)


def test_a_sweep_that_states_none_has_none_but_a_night_has() -> None:
    assert plan().sentinel is None
    assert label(plan(night=True)) == "one/max_num_seqs=16"


def test_none_switches_a_nights_off_and_a_stated_one_holds_every_day() -> None:
    assert plan("sentinel: none\n", night=True).sentinel is None
    for night in (False, True):
        assert label(plan("sentinel: two\n", night=night)) == "two"
    assert label(plan("sentinel: one\n")) == "one/max_num_seqs=16"
    assert label(plan("sentinel: one/max_num_seqs=32\n")) == "one/max_num_seqs=32"


def test_it_is_measured_at_start_middle_and_end() -> None:
    assert shown(plan("sentinel: two\nrepeats: 1\n")) == [
        "two#1*",
        "refused#1",
        "two#2*",
        "one/max_num_seqs=16#1",
        "one/max_num_seqs=32#1",
        "two#3*",
    ]
    many = plan("sentinel: two\nrepeats: 5\n")
    assert [r.repeat for r in many.runs() if r.sentinel] == [1, 2, 3, 4, 5]
    assert many.boots == 4 * 5


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ("three", "sentinel 'three' is no cell and no experiment"),
        ("refused", "sentinel 'refused' cannot show a drift: KV cache of 1,000,000,000,000"),
        ("impossible", "sentinel 'impossible' cannot show a drift: KV cache"),
    ],
)
def test_what_can_be_no_sentinel_is_refused(stated: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        plan(f"sentinel: {stated}\n")


def test_the_demo_keeps_its_five_runs_and_its_identity() -> None:
    """A sweep that states none of the later keys has the hash it always had."""
    assert demo().boots == 5
    where, text = find_sweep("demo")
    sweep = parse_sweep(text, where=where)
    document = sweep.model_dump(mode="json")
    assert "sentinel" not in document
    assert all("bisect" not in experiment for experiment in document["experiments"])
    assert sweep.sha256 == content_key(document)
    stated = parse_sweep(text + "\nsentinel: recovery\n", where=where)
    assert stated.sha256 != sweep.sha256


def test_a_hash_of_before_still_holds() -> None:
    assert parse_sweep(SWEEP, where="x").sha256 == (
        "6120953634f2e785d9c1a3ebf08e050ed0a1edfe43678ec542cd460fde94d05d"
    )


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("bisect: max_model_len", "bisect is 'max_model_len', wanted one of .*max_num_seqs"),
        ("bisect: dtype", "bisect is 'dtype', wanted one of the settings in vary"),
        ("bisect: max_num_seqs\n    expect: ok", "bisect and expect: wanted one of them"),
    ],
)
def test_a_frontier_that_cannot_be_bisected_is_refused(keys: str, said: str) -> None:
    text = SWEEP.replace("vary: {max_num_seqs", f"{keys}\n    vary: {{max_num_seqs")
    with pytest.raises(BadInput, match=said):
        parse_sweep(text, where="x")


def test_a_frontier_holds_numbers_only() -> None:
    text = SWEEP.replace(
        "vary: {max_num_seqs: [16, 32]}",
        "bisect: kv_cache_memory_bytes\n    vary: {kv_cache_memory_bytes: [1, null]}",
    )
    with pytest.raises(BadInput, match=r"vary.kv_cache_memory_bytes holds None, wanted numbers"):
        parse_sweep(text, where="x")


def test_a_seed_shuffles_unless_the_order_is_stated() -> None:
    plain, stated = plan("repeats: 3\n"), plan("repeats: 3\norder: stated\n")
    shuffled = [(r.cell.label, r.repeat) for r in plain.runs(seed=1)]
    as_stated = [(r.cell.label, r.repeat) for r in plain.runs()]
    assert shuffled != as_stated
    assert sorted(shuffled) == sorted(as_stated)
    assert [(r.cell.label, r.repeat) for r in stated.runs(seed=1)] == as_stated


def test_a_copy_of_a_cell_has_keys_of_its_own() -> None:
    """Keys are kept once computed; a copy with another content must not keep them."""
    cell = plan().cells[0].cell
    keys = (cell.setting_key, cell.cell_key)
    server = cell.setting.server.model_copy(update={"seed": 7})
    changed = cell.model_copy(
        update={"setting": cell.setting.model_copy(update={"server": server})}
    )
    assert changed.setting_key != keys[0]
    assert changed.cell_key != keys[1]
    assert cell.model_copy(update={"label": "other"}).cell_key == keys[1]
