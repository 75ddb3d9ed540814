"""A sweep file becomes cells with stable keys, and a plan whose figures are the demo's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.planning import demo, surroundings

from flows.shipped import find_sweep
from tasks.canonical import canonical_json
from tasks.derived import Arithmetic
from tasks.plan.cell import Cell
from tasks.plan.plan import make_plan
from tasks.plan.sweep import BeyondMachine, parse_sweep
from warehouse.errors import BadInput

MINIMAL = """
name: small
model: tiny-qwen3
server: {max_model_len: 2048, kv_cache_memory_bytes: 16777216}
experiments:
  - name: one
    points: [{parallel: 4, number: 8}]
"""


def test_the_demo_is_five_cells_and_five_boots() -> None:
    plan = demo()
    assert [planned.cell.label for planned in plan.cells] == [
        "context-limit/max_model_len=32768",
        "context-limit/max_model_len=8192",
        "pressure",
        "misconfiguration",
        "recovery",
    ]
    assert plan.boots == 5
    first, recovery = plan.cells[0].cell, plan.cells[4].cell
    assert first.setting.server == recovery.setting.server
    assert first.cell_key != recovery.cell_key


@pytest.mark.parametrize(
    ("index", "tokens", "blocks", "concurrency", "need"),
    [
        (0, 975_890, 1638, "29.78", 55),
        (1, 838_656, 1638, "102.38", 16),
        (2, 8_192, 64, "4.00", 16),
        (4, 975_890, 1638, "29.78", 55),
    ],
)
def test_the_demo_predicts_what_vllm_logs(
    index: int, tokens: int, blocks: int, concurrency: str, need: int
) -> None:
    prediction = demo().cells[index].prediction
    assert prediction.value("kv_cache_size_tokens") == tokens
    assert prediction.value("num_gpu_blocks") == blocks
    assert f"{prediction.value('max_concurrency'):.2f}" == concurrency
    assert prediction.value("blocks_per_request") == need


def test_the_hybrid_has_its_block_and_padding() -> None:
    prediction = demo().cells[0].prediction
    assert prediction.value("attention_block_size_tokens") == 640
    assert f"{prediction.value('mamba_padding_percent'):.2f}" == "22.14"


def test_pressure_admits_twelve_and_preempts() -> None:
    load = demo().cells[2].prediction.load[1]
    assert (load.running_at_admission, load.running) == (12, 10)
    assert load.preemptions_expected
    assert load.peak_kv_usage_ratio_bound == 1.0


def test_peak_bound_divides_by_blocks_less_the_null_block() -> None:
    planned = demo().cells[0]
    document = planned.prediction.document(planned.cell.cell_key, made_at=None)
    arithmetic = Arithmetic(planned.cell.document(), document)
    assert arithmetic.predicted_blocks == 1638

    def bound(parallel: int) -> float | None:
        return arithmetic.peak_bound(1638, prompt_tokens=520, output_tokens=128, parallel=parallel)

    assert bound(4) == pytest.approx(4 * 5 / 1637)
    assert bound(64) == pytest.approx(64 * 5 / 1637)


def test_what_no_machine_grants_is_refused_by_the_plan_and_still_run_when_expected() -> None:
    cell = demo().cells[3]
    assert cell.cell.setting.server.kv_cache_memory_bytes == 25_769_803_776
    assert cell.infeasible
    assert not cell.skipped
    assert cell.as_expected("refused")
    assert not cell.as_expected("ok")


def test_a_machine_that_could_grant_it_is_asked_for_twice_its_memory() -> None:
    assert BeyondMachine(beyond_machine=100).resolve(99) == 100
    assert BeyondMachine(beyond_machine=2**30).resolve(2**30 + 1) == 4 * 2**30


def test_without_an_expectation_an_infeasible_cell_is_skipped() -> None:
    text = MINIMAL.replace("16777216", "1000000000000")
    plan = make_plan(parse_sweep(text, where="x"), surroundings())
    assert plan.cells[0].skipped
    assert plan.boots == 0


def test_repeats_are_interleaved() -> None:
    text = MINIMAL.replace("experiments:", "repeats: 2\nexperiments:").replace(
        "server: {max", "server: {max_num_seqs: 16, max"
    )
    plan = make_plan(
        parse_sweep(text + "\n    vary: {max_num_batched_tokens: [1024, 2048]}", where="x"),
        surroundings(),
    )
    assert [run.repeat for run in plan.runs()] == [1, 1, 2, 2]


def test_vary_load_shares_one_boot() -> None:
    text = MINIMAL + "\n    vary_load: {prompt_tokens: [256, 512]}\n"
    plan = make_plan(parse_sweep(text, where="x"), surroundings())
    assert [p.prompt_tokens for p in plan.cells[0].cell.setting.load] == [256, 512]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("name: small", "name: small\nexperimints: []"), "experimints: no such key"),
        (
            ("kv_cache_memory_bytes: 16777216", "kv_cache_memory_bytes: lots"),
            "server.kv_cache_memory_bytes: Input should be a valid integer, got 'lots'",
        ),
        (("number: 8", "number: 2"), "number is 2, wanted at least parallel (4)"),
        (("max_model_len: 2048", "max_model_len: 600"), "wanted at most max_model_len (600)"),
        (("max_model_len: 2048", "max_model_len: -5"), "greater than or equal to 1, got -5"),
        (("max_model_len: 2048, ", ""), "max_model_len: Field required"),
        (("max_model_len: 2048", "max_model_len: true"), "valid integer, got True"),
        (("max_model_len: 2048", "max_model_len: '2048'"), "valid integer, got '2048'"),
        (
            ("points:", f"vary_load: {{seed: {[*range(2000)]}}}\n    points:"),
            "2000 load points, wanted at most 1000",
        ),
        (("- name: one", "- name: One!"), "experiments[0].name"),
        (("model: tiny-qwen3", "model: '$(reboot)'"), "f.yaml: model: String should match"),
        (("model: tiny-qwen3", "model: a/../../b"), "f.yaml: model: String should match"),
        (("number: 8}", "number: 8}, {parallel: 1}"), "number: Field required"),
        (("name: small", "name: small\nname: small"), "line 3: not valid YAML: the key 'name'"),
        (("name: small", "name: !!python/name:os.system small"), "not valid YAML"),
        (("name: small", "[]: {"), "not valid YAML"),
        (("points:", "vary: {max_len: [1]}\n    points:"), "unknown setting 'max_len'"),
    ],
)
def test_bad_input_is_one_line_that_says_where(change: tuple[str, str], said: str) -> None:
    with pytest.raises(BadInput) as caught:
        make_plan(parse_sweep(MINIMAL.replace(*change), where="f.yaml"), surroundings())
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_an_unknown_key_holds_is_not_shown() -> None:
    text = MINIMAL.replace("name: small", "name: small\napi_key: hunter2hunter2", 1)
    with pytest.raises(BadInput) as caught:
        parse_sweep(text, where="f.yaml")
    assert str(caught.value) == "f.yaml: api_key: no such key"


def test_equal_cells_are_refused() -> None:
    text = MINIMAL + "\n  - name: two\n    points: [{parallel: 4, number: 8}]\n"
    with pytest.raises(BadInput, match="cells one and two are the same"):
        make_plan(parse_sweep(text, where="x"), surroundings())


def test_an_unknown_sweep_names_the_shipped_ones() -> None:
    with pytest.raises(BadInput, match=r"neither a file nor one of .*demo"):
        find_sweep("no-such-sweep")


def test_unresolved_pins_are_listed() -> None:
    plan = demo(revision=lambda name: None)
    assert "pressure: model_revision" in plan.unresolved


def _shuffled(value: object, order: Callable[[list[Any]], list[Any]]) -> object:
    if isinstance(value, dict):
        return {key: _shuffled(value[key], order) for key in order(list(value))}
    if isinstance(value, list):
        return [_shuffled(item, order) for item in value]
    return value


@pytest.fixture(scope="module")
def first_cell() -> dict[str, Any]:
    """Return the document of the demo's first cell, planned once."""
    return demo().cells[0].cell.document()


# No deadline: on a busy machine a single example can take long.
@settings(deadline=None)
@given(random=st.randoms(use_true_random=False))
def test_keys_ignore_the_order_of_keys(random: Any, first_cell: dict[str, Any]) -> None:
    document = first_cell
    shuffled = _shuffled(document, lambda keys: random.sample(keys, len(keys)))
    assert isinstance(shuffled, dict)
    assert Cell.parse(shuffled).cell_key == document["cell_key"]


def _leaves(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [leaf for key in value for leaf in _leaves(value[key], (*path, key))]
    if isinstance(value, list):
        return [leaf for i, item in enumerate(value) for leaf in _leaves(item, (*path, i))]
    return [path]


def test_every_hashed_field_moves_the_key_and_no_other_does() -> None:
    base = demo().cells[0].cell
    document = base.model_dump(mode="json")
    changes = {
        ("setting", "server", "max_model_len"): 32767,
        ("setting", "server", "seed"): 1,
        ("setting", "load", 0, "number"): 9,
        ("setting", "model", "name"): "other",
        ("pins", "model_revision"): "sha256:" + "1" * 64,
        ("pins", "bench_version"): "1.9.2",
        ("harness",): 99,
    }
    for path, value in changes.items():
        assert Cell.model_validate(_with(document, path, value)).cell_key != base.cell_key, path
    unhashed = {
        ("label",): "another name",
        ("limits", "run_s"): 5.0,
        ("expect",): "refused",
        ("sampling", "server_interval_s"): 0.5,
    }
    for path, value in unhashed.items():
        assert Cell.model_validate(_with(document, path, value)).cell_key == base.cell_key, path
    assert len(_leaves(document)) > 40


def _with(value: Any, path: tuple[Any, ...], leaf: object) -> Any:
    if not path:
        return leaf
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _with(value[path[0]], path[1:], leaf)
    return copy


def test_a_cell_whose_content_was_changed_is_refused() -> None:
    document = demo().cells[0].cell.document()
    changed = _with(document, ("setting", "server", "seed"), 7)
    with pytest.raises(ValueError, match=r"setting_key is .* hashes to"):
        Cell.parse(changed)


def test_the_canonical_form_has_one_spelling() -> None:
    assert canonical_json({"b": 1.5, "a": ["é", None]}) == '{"a":["\\u00e9",null],"b":1.5}'
    with pytest.raises(ValueError, match="Out of range"):
        canonical_json(float("nan"))


def test_keeping_infeasible_cells_expects_their_refusal_and_keeps_their_key() -> None:
    sweep = parse_sweep(MINIMAL.replace("16777216", "1000000000000"), where="x")
    skipped = make_plan(sweep, surroundings())
    kept = make_plan(sweep, surroundings(), keep_infeasible=True)
    assert [run.repeat for run in skipped.skipped()] == [1, 2]
    assert skipped.cells[0].as_expected("infeasible")
    assert kept.boots == 2
    assert kept.cells[0].as_expected("refused")
    assert kept.cells[0].cell.cell_key == skipped.cells[0].cell.cell_key
