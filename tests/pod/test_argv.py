"""The server's command line against a golden, one line an argument."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from testkit.planning import surroundings

from flows.shipped import find_sweep, shipped, shipped_model
from tasks.launch import models, operation
from tasks.plan.plan import make_plan
from tasks.plan.sweep import parse_sweep
from tasks.pod.argv import FLAGS, NEWER, child_environment, engine_argv, engine_variables
from tasks.pod.bench import level_arguments, offsets, prompt_lines
from tasks.pod.inputs import ServerSettings, parse_cell
from tests.double import cells

GOLDEN = Path(__file__).parent / "golden"
#: Of a version, every long option that its `vllm serve` takes.
KNOWN = Path(__file__).parents[1] / "data" / "vllm-flags"
CELLS: dict[str, dict[str, Any]] = {
    "argv-dense-16-mib": {},
    "argv-everything": {
        "gpu_memory_utilization": 0.85,
        "kv_cache_memory_bytes": None,
        "kv_cache_dtype": "fp8",
        "enable_prefix_caching": True,
        "enforce_eager": False,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "block_size": 32,
        "language_model_only": True,
        "seed": 7,
    },
}


@pytest.mark.parametrize("name", CELLS)
def test_argv(name: str) -> None:
    cell = parse_cell(cells.cell_text(server=CELLS[name]))
    argv = engine_argv(cell.server, engine=Path("/e/bin/vllm"), model=Path("/m/tiny"), port=8000)
    assert argv == (GOLDEN / f"{name}.txt").read_text().splitlines()


def test_every_setting_has_a_flag() -> None:
    assert list(FLAGS) != []
    assert set(FLAGS) == {field.name for field in fields(ServerSettings)}


def config(name: str, _: str) -> dict[str, object] | None:
    known = shipped_model(name)
    return models.config(name) if known is None else known.config


@pytest.mark.parametrize("name", sorted(shipped()))
def test_the_engine_of_a_shipped_sweep_knows_every_option_it_gets(name: str) -> None:
    where, text = find_sweep(name)
    parsed = parse_sweep(text, where=where)
    plan = make_plan(parsed, surroundings(device="cuda", engine_lock_sha256=None, config=config))
    for planned in plan.cells:
        cell = parse_cell(operation.cell_text(planned.cell.document()))
        argv = engine_argv(cell.server, engine=Path("/e/vllm"), model=Path("/m"), port=8000)
        lines = (KNOWN / f"{planned.cell.pins.engine_version}.txt").read_text().splitlines()
        assert {word for word in argv if word.startswith("--")} <= set(lines)
    assert plan.cells
    assert (plan.cells[0].cell.pins.engine_version == "0.11.2") == ("qwen3-4b" in name)


def test_every_flag_but_the_newer_is_known_to_all_versions() -> None:
    listed = {path.stem: set(path.read_text().splitlines()) for path in KNOWN.glob("*.txt")}
    assert set(listed) == {"0.11.2", "0.27.0"}
    old = {name for name, flag in FLAGS.items() if flag not in listed["0.11.2"]}
    assert old == NEWER
    assert set(FLAGS.values()) <= listed["0.27.0"]


def test_a_child_inherits_a_few_variables_only() -> None:
    surroundings = {
        "PATH": "/bin",
        "HOME": "/home/x",
        "HF_TOKEN": "secret",
        "VLLM_API_KEY": "secret",
        "VLLM_ATTENTION_BACKEND": "X",
        "PYTHONPATH": "/x",
        "PYTHONDONTWRITEBYTECODE": "1",
        "http_proxy": "http://proxy",
        "MEMSWEEP_CELL": "{}",
        "MEMSWEEP_RUN_UUID": "u",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    got = child_environment(surroundings, {"A": "b"})
    assert got == {
        "PATH": "/bin",
        "HOME": "/home/x",
        "CUDA_VISIBLE_DEVICES": "1",
        "MEMSWEEP_RUN_UUID": "u",
        "A": "b",
    }


def test_the_cpu_engine_stays_in_one_process_and_one_thread() -> None:
    cpu = engine_variables("cpu", Path("/c"))
    assert cpu["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert (cpu["OMP_NUM_THREADS"], cpu["VLLM_CPU_OMP_THREADS_BIND"]) == ("1", "nobind")
    cuda = engine_variables("cuda", Path("/c"))
    assert set(cpu) - set(cuda) == {
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "OMP_NUM_THREADS",
        "VLLM_CPU_OMP_THREADS_BIND",
    }
    assert cuda["VLLM_CACHE_ROOT"] == "/c/vllm"


def test_evalscopes_arguments() -> None:
    cell = parse_cell(cells.cell_text(load=[{"prefix_tokens": 64}]))
    arguments = level_arguments(
        cell.load[0],
        index=3,
        offset=11,
        url="http://127.0.0.1:8000/v1/chat/completions",
        model=Path("/m/tiny"),
        folder=Path("/o/bench"),
        limit_s=700.0,
    )
    lines = [f"{name}={value!r}" for name, value in arguments.items()]
    assert lines == (GOLDEN / "evalscope-arguments.txt").read_text().splitlines()


def test_evalscopes_arguments_for_a_prompt_file() -> None:
    """Its own data set for lines: a list of messages is sent as it is, whatever its length."""
    load = parse_cell(cells.cell_text(prompts="600\ta\n300\tb", load=[{"warmup": 1}])).load
    arguments = level_arguments(
        load[0],
        index=3,
        offset=0,
        url="http://127.0.0.1:8000/v1/chat/completions",
        model=Path("/m/tiny"),
        folder=Path("/o/bench"),
        limit_s=700.0,
    )
    assert arguments["dataset"] == "line_by_line"
    assert arguments["dataset_path"] == "/o/bench/prompts_3.jsonl"
    assert not {"min_prompt_length", "max_prompt_length", "prefix_length"} & set(arguments)
    lines = [json.loads(line)[0]["content"] for line in prompt_lines(load[0]).splitlines()]
    assert lines == ["a", "a", "b", "a", "b"]


def test_no_prompt_is_used_twice() -> None:
    load = parse_cell(cells.cell_text(load=[{"warmup": 2, "number": 8}, {"warmup": 0}, {}])).load
    assert offsets(load) == [0, 10, 14]
    frozen = parse_cell(cells.cell_text(prompts="5\ta")).load[0]
    assert offsets((load[0], frozen, load[1])) == [0, 0, 10]
