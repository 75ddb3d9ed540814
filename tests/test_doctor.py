"""Facts of a machine against the pins: each fault has a line that says what to do."""

from __future__ import annotations

from typing import Any

import pytest

from tasks import doctor, pins
from tasks.doctor import Check, State

GIB = 2**30


def facts(**changes: Any) -> dict[str, Any]:
    """What a healthy node with an A10 says."""
    found: dict[str, Any] = {
        "driver": "580.105.08",
        "driver_cuda": "13.0",
        "torch_cuda": "12.8",
        "no_gpu": None,
        "gpus": [
            {
                "name": "NVIDIA A10",
                "compute_capability": "8.6",
                "total_bytes": 24_146_608_128,
                "reserved_bytes": 459_863_491,
                "used_bytes": 459_000_000,
                "processes": [],
            }
        ],
        "packages": {
            "engine": {"vllm": pins.ENGINE_VERSION, "torch": f"{pins.TORCH_VERSION}+cu128"},
            "bench": {"evalscope": pins.BENCH_VERSION},
        },
        "free_bytes": {"state": 100 * GIB},
        "shm_bytes": 8 * GIB,
        "models": [],
    }
    return found | changes


def lines(device: Any = "cuda", **changes: Any) -> dict[str, Check]:
    return {one.name: one for one in doctor.of_machine(facts(**changes), device=device)}


def gpu(**changes: Any) -> list[dict[str, Any]]:
    return [facts()["gpus"][0] | changes]


def test_a_healthy_node_has_nothing_wrong() -> None:
    found = lines()
    assert {one.state for one in found.values()} == {State.OK}
    assert "22.06 GiB usable (23,686,744,637 bytes)" in found["GPU"].text
    assert found["CUDA"].text == "driver up to 13.0, torch built for 12.8"


@pytest.mark.parametrize(
    ("name", "changes", "text", "todo"),
    [
        ("driver", {"gpus": [], "no_gpu": "NVML says no"}, "NVML says no", "install NVIDIA's"),
        ("CUDA", {"driver_cuda": "12.4"}, "up to 12.4", "a driver for CUDA 12.8"),
        (
            "GPU processes",
            {"gpus": gpu(processes=[{"pid": 7, "used_bytes": GIB}])},
            "PID 7 (1.00 GiB)",
            "end them",
        ),
        (
            "vLLM",
            {"packages": {"engine": {"vllm": "0.1", "torch": None}, "bench": {"evalscope": None}}},
            f"0.1, wanted {pins.ENGINE_VERSION}",
            "another cell",
        ),
        (
            "EvalScope",
            {"packages": {"engine": {"vllm": "0.1", "torch": None}, "bench": {"evalscope": None}}},
            "not installed",
            "memsweep setup",
        ),
        ("disk (state)", {"free_bytes": {"state": GIB}}, "1.0 GiB free", "free some"),
        ("shared memory", {"shm_bytes": 64 * 2**20}, "0.1 GiB", "raise shm"),
    ],
)
def test_every_fault_says_what_to_do(
    name: str, changes: dict[str, Any], text: str, todo: str
) -> None:
    check = lines(**changes)[name]
    assert check.state is State.WRONG
    assert text in check.text
    assert todo in str(check.todo)


def test_cuda_versions_are_numbers_not_text() -> None:
    assert lines(driver_cuda="12.10", torch_cuda="12.8")["CUDA"].state is State.OK
    assert lines(driver_cuda="13.0", torch_cuda="9.2")["CUDA"].state is State.OK
    assert lines(torch_cuda=None)["CUDA"].state is State.UNKNOWN


def test_without_a_gpu_the_gpu_lines_say_none_on_a_cpu_target() -> None:
    found = lines("cpu", gpus=[], no_gpu="NVML says no", driver=None, driver_cuda=None)
    assert [found[name].state for name in ("driver", "CUDA", "GPU")] == [State.NONE] * 3
    assert "shared memory" not in found


def test_what_a_device_does_not_tell_is_unknown_not_fine() -> None:
    assert lines(gpus=gpu(processes=None))["GPU processes"].state is State.UNKNOWN
    assert lines(gpus=gpu(total_bytes=None))["GPU"].state is State.UNKNOWN
    assert lines(free_bytes={"state": None})["disk (state)"].state is State.UNKNOWN


def test_an_image_brings_its_own_torch() -> None:
    found = doctor.of_machine(facts(), device="cuda", needs_torch_pin=False)
    assert "torch" not in {one.name for one in found}


def test_models() -> None:
    whole = {"name": "a", "revision": "r", "weights_bytes": GIB, "tokenizer": True}
    cut = {"name": "b", "revision": None, "weights_bytes": None, "tokenizer": False}
    found = doctor.of_models(facts(models=[whole, cut]), generated=("a", "tiny"))
    assert [one.state for one in found] == [State.OK, State.WRONG, State.NONE]
    assert found[1].text == "b: no weights and no tokenizer"
    assert doctor.of_models(facts())[0].state is State.NONE


def test_ports_are_wrong_only_where_others_hold_them() -> None:
    ours, free = ("prefect", 20_001, "ours"), ("polyaxon", 20_002, "nobody")
    fine = doctor.of_ports([ours, free])
    assert (fine.state, fine.text) == (State.OK, "20001 (prefect, its own), 20002 (polyaxon, free)")
    taken = doctor.of_ports([ours, ("polyaxon", 20_002, "others")])
    assert (taken.state, taken.text) == (State.WRONG, "20002 of polyaxon: held by something else")
    assert "memsweep services up --polyaxon-port PORT" in str(taken.todo)
    assert doctor.of_ports([]).state is State.NONE


def test_the_flow_environment_is_as_pinned() -> None:
    found = doctor.of_flow(haupt="0.1", wants_haupt=True)
    assert [one.state for one in found] == [State.OK, State.OK, State.OK, State.WRONG]
    assert len(doctor.of_flow(haupt=None, wants_haupt=False)) == 3
