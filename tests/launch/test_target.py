"""Profiles: which GPU a target has, and what a GPU host differs in from this machine."""

from __future__ import annotations

import sys
from decimal import Decimal
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.home import Home
from tasks.launch import labels, operation, quantity, target
from tasks.launch.target import Profile
from tasks.plan import gpus
from tests.double import cells
from warehouse.errors import BadInput

#: Recognisably fake.
DIGEST = "sha256:" + "0" * 64


class Nvml(ModuleType):
    """NVML of GPUs given as (name, MiB in all, MiB reserved, compute capability)."""

    NVMLError = type("NVMLError", (Exception,), {})
    nvmlMemory_v2 = 2

    def __init__(self, *devices: tuple[str, int, int, tuple[int, int]]) -> None:
        super().__init__("pynvml")
        self.devices = devices

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.devices[handle][0]

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> Any:
        total, reserved = (size * 2**20 for size in self.devices[handle][1:3])
        memory = SimpleNamespace(used=0, free=total, total=total)
        if version == 2:
            memory.reserved = reserved
        return memory

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return self.devices[handle][3]


def local_gpu(**changes: Any) -> Profile:
    facts = {"name": "x", "description": "x", "device": "cuda", "operation": "local.yaml"}
    return Profile.model_validate(facts | changes)


def test_nvml_names_the_gpu_and_its_memory_without_the_drivers_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = Nvml(("NVIDIA A10", 23_028, 440, (8, 6)), ("NVIDIA H100 80GB HBM3", 81_559, 551, (9, 0)))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = target.gpu(local_gpu(gpu="L4"))
    assert found is not None
    assert (found.name, found.source) == ("A10", "NVML on this machine")
    assert found.total_bytes == (23_028 - 440) * 2**20
    assert abs(found.total_bytes - gpus.find("A10").total_bytes) < 0.001 * found.total_bytes


def test_a_gpu_the_catalogue_lacks_has_its_own_name_and_capability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "NVIDIA GeForce RTX 4090"
    monkeypatch.setitem(sys.modules, "pynvml", Nvml((name, 24_564, 500, (8, 9))))
    found = target.gpu(local_gpu())
    assert found is not None
    assert (found.name, found.compute_capability, found.has_fp8) == (name, (8, 9), True)
    assert found.is_device(name, 24_564 * 2**20)
    assert not found.is_device("NVIDIA GeForce RTX 3090", 24_564 * 2**20)


def test_without_nvml_the_profile_names_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    assert target.gpu(local_gpu(gpu="nvidia l4")) == gpus.find("L4")
    assert target.gpu(local_gpu()) is None
    assert target.gpu(target.load("local")) is None


def test_a_clusters_gpu_is_never_the_one_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(("NVIDIA A10", 23_028, 440, (8, 6))))
    cluster = {"host": "http://x.invalid", "image": "i", "image_digest": DIGEST, "models": "/m"}
    assert target.gpu(local_gpu(gpu="H100", **cluster)) == gpus.find("H100")
    assert target.gpu(local_gpu(**cluster)) is None


def test_a_gpu_that_cannot_be_is_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("description: x\ndevice: cuda\noperation: local.yaml\ngpu: H900\n")
    with pytest.raises(BadInput, match=r"mine\.yaml: gpu: .*not in the catalogue"):
        target.load(str(path))
    path.write_text("description: x\ndevice: cpu\noperation: local.yaml\ngpu: H100\n")
    with pytest.raises(BadInput, match="device cpu has no gpu"):
        target.load(str(path))


def test_a_profile_that_names_itself_is_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: x\ndescription: x\ndevice: cpu\noperation: local.yaml\n")
    with pytest.raises(BadInput, match=r"mine\.yaml: name: it is that of the file"):
        target.load(str(path))


def test_a_gpu_host_gets_the_same_operation_as_this_machine(home: Home) -> None:
    here, there = target.load("local"), target.load("local-gpu")
    assert (there.device, there.is_embedded, there.image) == ("cuda", True, None)
    cell = cells.cell()
    one, other = (
        target.build(home, profile, cell, model="tiny-qwen3", run_limit_s=10)
        for profile in (here, there)
    )
    assert one == other


def test_the_image_is_the_one_the_cell_is_pinned_to(home: Home) -> None:
    from testkit.planning import demo

    profile = local_gpu(
        operation="gpu.yaml",
        host="http://x.invalid",
        image="registry.invalid/engine",
        image_digest="unresolved",
        models="/m",
    )
    planned = demo(device="cuda", engine_lock_sha256=None, image_digest=DIGEST).cells[0].cell
    built: Any = target.operation(home, profile, planned)
    assert built["runPatch"]["container"]["image"] == f"registry.invalid/engine@{DIGEST}"
    unresolved = demo(device="cuda", engine_lock_sha256=None).cells[0].cell
    with pytest.raises(BadInput, match="image_digest is unresolved"):
        target.operation(home, profile, unresolved)


CLUSTER: dict[str, Any] = {
    "operation": "gpu.yaml",
    "host": "http://x.invalid",
    "image": "registry.invalid/engine",
    "image_digest": DIGEST,
    "models": "/m",
}


def a_cell(**changes: Any) -> Any:
    from testkit.planning import demo

    pinned = {"device": "cuda", "engine_lock_sha256": None, "image_digest": DIGEST}
    return demo(**(pinned | changes)).cells[0].cell


def test_the_shipped_cluster_is_an_example_without_a_made_up_digest() -> None:
    shipped = target.load("cluster-a10")
    assert (shipped.is_embedded, shipped.image_digest) == (False, target.UNRESOLVED)
    assert (shipped.gpus, shipped.gpu, shipped.slots) == (1, "A10", 2)
    assert shipped.host == "https://polyaxon.example.com"


def test_a_cells_labels_name_target_round_and_keys(home: Home) -> None:
    cell = a_cell()
    profile = local_gpu(name="my cluster", **CLUSTER)
    built: Any = target.operation(home, profile, cell, round_id="demo-1a2b3c4d-my-cluster-1")
    found = built["runPatch"]["environment"]["labels"]
    assert found["app.kubernetes.io/created-by"] == "memsweep"
    assert found["memsweep/cell"] == f"sha256-{cell.cell_key[:32]}"
    assert found["memsweep/setting"] == f"sha256-{cell.setting_key[:32]}"
    assert found["memsweep/round"] == "demo-1a2b3c4d-my-cluster-1"
    assert found["memsweep/target"].startswith("my-cluster-")
    assert labels.problems(found) == []
    here: Any = target.operation(home, target.load("local"), cell, round_id="r-1")
    assert "runPatch" not in here


def test_nothing_is_built_for_a_cluster_without_a_label(home: Home) -> None:
    built: Any = target.build(home, local_gpu(**CLUSTER), {"x": None}, model="m", run_limit_s=1)
    assert built["runPatch"]["environment"]["labels"] == labels.of_target("x")


def test_the_clusters_clock_starts_before_the_run_does(home: Home) -> None:
    cell, waits = a_cell(revision=lambda name: "a" * 40), {"queue_s": 5000}
    plain = local_gpu(**CLUSTER, **waits)
    fetching = local_gpu(**CLUSTER, **waits, models_claim="c", fetch_s=700)
    run = cell.limits.run_s + 60
    assert target.limit_s(target.load("local"), cell) == run
    assert target.limit_s(plain, cell) == run + 5000
    assert target.limit_s(fetching, cell) == run + 5700
    built: Any = target.operation(home, fetching, cell)
    assert built["termination"]["timeout"] == int(run + 5700)
    assert built["termination"]["ttl"] == 86_400


def test_a_cell_that_needs_more_gpus_than_a_run_gets_is_refused(home: Home) -> None:
    cell = a_cell()
    server = cell.setting.server.model_copy(update={"tensor_parallel_size": 2})
    wide = cell.model_copy(update={"setting": cell.setting.model_copy(update={"server": server})})
    with pytest.raises(BadInput, match="needs 2 GPUs, but target x gives a run 1"):
        target.operation(home, local_gpu(**CLUSTER), wide)
    two = local_gpu(**CLUSTER, resources={"limits": {"nvidia.com/gpu": 2}})
    target.operation(home, two, wide)


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        (None, {"limits": {"nvidia.com/gpu": 1}}),
        (
            {"requests": {"cpu": "8"}, "limits": {"memory": "32Gi"}},
            {"requests": {"cpu": "8"}, "limits": {"nvidia.com/gpu": 1, "memory": "32Gi"}},
        ),
        (
            {"requests": {"nvidia.com/gpu": 2}},
            {"requests": {"nvidia.com/gpu": 2}, "limits": {"nvidia.com/gpu": 2}},
        ),
        ({"limits": {"nvidia.com/gpu": "4"}}, {"limits": {"nvidia.com/gpu": "4"}}),
    ],
)
def test_a_run_gets_a_gpu_whatever_else_the_profile_asks_for(
    home: Home, resources: dict[str, Any] | None, expected: dict[str, Any]
) -> None:
    profile = local_gpu(**CLUSTER, resources=resources)
    cell: Any = target.operation(home, profile, a_cell())
    inputs = {"model": "owner/name", "model_revision": "a" * 40, "max_model_len": "1024"}
    service: Any = target.service(home, profile, operation.read("service.yaml"), inputs)
    for built in (cell, service):
        assert built["runPatch"]["container"]["resources"] == expected
    assert profile.gpus == int(expected["limits"]["nvidia.com/gpu"])


def test_a_slice_of_a_gpu_is_asked_for_alone(home: Home) -> None:
    resources = {"limits": {"nvidia.com/mig-1g.10gb": 1, "memory": "32Gi"}}
    profile = local_gpu(**CLUSTER, resources=resources)
    built: Any = target.operation(home, profile, a_cell())
    assert built["runPatch"]["container"]["resources"] == resources


def test_a_run_on_a_clusters_cpus_asks_for_no_gpu() -> None:
    resources = {"limits": {"memory": "8Gi"}}
    profile = local_gpu(**CLUSTER | {"device": "cpu"}, resources=resources)
    assert profile.container_resources == resources


def test_what_is_a_folder_here_need_not_be_a_containers() -> None:
    assert local_gpu(models="relative/path").models == "relative/path"
    assert local_gpu(hub="http://127.0.0.1:8080").hub == "http://127.0.0.1:8080"


def test_a_service_gets_what_the_profile_gives_a_run(home: Home) -> None:
    component = operation.read("service.yaml")
    inputs = {"model": "owner/name", "model_revision": "a" * 40, "max_model_len": "1024"}
    profile = local_gpu(
        **CLUSTER,
        queue="agent/q",
        namespace="n",
        queue_s=100,
        resources={"limits": {"nvidia.com/gpu": 2}},
        places={"engine_bin": "/e"},
    )
    built: Any = target.service(home, profile, component, inputs)
    assert (built["queue"], built["namespace"]) == ("agent/q", "n")
    assert built["termination"]["timeout"] == component["termination"]["timeout"] + 100
    assert built["runPatch"]["container"]["image"] == f"registry.invalid/engine@{DIGEST}"
    assert {name: one["value"] for name, one in built["params"].items()} == {
        **inputs, "model_path": "/m/owner/name", "tensor_parallel_size": "2", "engine_bin": "/e",
    }  # fmt: skip
    unresolved = profile.model_copy(update={"image_digest": target.UNRESOLVED})
    with pytest.raises(BadInput, match="image_digest is unresolved"):
        target.service(home, unresolved, component, inputs)


def test_a_download_needs_a_commit(home: Home) -> None:
    fetching = local_gpu(**CLUSTER, models_claim="c", fetch_s=60)
    with pytest.raises(BadInput, match="downloads models by commit"):
        target.operation(home, fetching, a_cell())
    built: Any = target.operation(home, fetching, a_cell(revision=lambda name: "a" * 40))
    assert built["params"]["model_path"]["value"] == f"/m/tiny-qwen35/{'a' * 40}"
    (init,) = built["runPatch"]["init"]
    assert init["container"]["image"] == f"registry.invalid/engine@{DIGEST}"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fetch_s": 10}, "without models_claim"),
        ({"secrets": {"HF_TOKEN": {"name": "a", "key": "b"}}}, "for the download only"),
        ({"shm": "lots"}, "Kubernetes quantity"),
        ({"collect_within_s": 60}, "collect_within_s"),
        ({"quota": {"memory": "40Gi"}}, "got no request of it"),
        ({"quota": {"nvidia.com/gpu": 1}, "slots": 2}, "nvidia.com/gpu is 1, got 2 slots of 1"),
        ({"resources": {"limits": {"nvidia.com/gpu": 0}}}, "is 0, wanted 1 or more"),
        ({"resources": {"requests": {"nvidia.com/gpu": "0"}}}, "is 0, wanted 1 or more"),
        ({"resources": {"limits": {"nvidia.com/gpu": "500m"}}}, "is 500m, wanted 1 or more"),
        ({"resources": {"limit": {"memory": "1Gi"}}}, "limit"),
        ({"environment": {"restartPolicy": "OnFailure"}}, "restartPolicy is not a profile's"),
        ({"models": "relative/path"}, "got 'relative/path', wanted an absolute folder"),
        ({"models": "/models/../etc"}, "wanted an absolute folder"),
        ({"models": "/"}, "wanted an absolute folder"),
        ({"models_claim": "Bad_Name"}, "got 'Bad_Name', wanted a name as Kubernetes has them"),
        ({"namespace": "-x"}, "got '-x', wanted a name as Kubernetes has them"),
        (
            {"models_claim": "c", "fetch_s": 1, "secrets": {"T": {"name": "A b", "key": "k"}}},
            "got 'A b', wanted a name",
        ),
        ({"hub": "http://hub.invalid"}, "wanted https://HOST, or http:// on this machine"),
        ({"hub": "https://me:secret@hub.invalid"}, "credentials have no place"),
        (
            {"quota": {"memory": "40Gi"}, "slots": 2, "resources": {"limits": {"memory": "32Gi"}}},
            "quota of memory is 40Gi, got 2 slots",
        ),
        ({"secrets": {"HF_TOKEN": "hf_plain"}}, "secrets"),
        ({"owner": "a/../b"}, "got 'a/../b', wanted a name as Polyaxon has them"),
        ({"owner": ".."}, "wanted a name as Polyaxon has them"),
        ({"project": "<x>"}, "got '<x>', wanted a name as Polyaxon has them"),
        ({"image": "reg.invalid/<x>"}, "without tag and digest"),
        ({"image": "reg.invalid/x:latest"}, "without tag and digest"),
        ({"queue": "a/b/c"}, "wanted AGENT/QUEUE, or QUEUE"),
        ({"host": "https://h.invalid/\nX"}, "wanted http://HOST"),
        ({"host": "https://h.invalid:port"}, "wanted http://HOST"),
        ({"host": "https://h.invalid/?a=b"}, "wanted http://HOST"),
        ({"token_env": "MY-TOKEN"}, "wanted the name of a variable"),
        ({"token_env": "hf_" + "a1" * 16}, "holds what looks like a token"),
        ({"token_env": "a1" * 20}, "holds what looks like a token"),
    ],
)
def test_a_cluster_that_cannot_work_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        local_gpu(**CLUSTER | changes)


def test_a_token_in_place_of_its_variable_is_not_shown(tmp_path: Path) -> None:
    token, file = "a1" * 20, tmp_path / "mine.yaml"
    file.write_text(f"description: x\ndevice: cpu\noperation: cpu.yaml\ntoken_env: {token}\n")
    with pytest.raises(BadInput, match=r"token_env: .*looks like a token") as refused:
        target.load(str(file))
    assert token not in str(refused.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"queue": "my-agent/a10"},
        {"queue": "a10"},
        {"owner": "my.team_1", "project": "mem-sweep"},
        {"image": "reg.invalid:5000/team/a__b/engine-1.2"},
        {"host": "https://h.invalid:8443/polyaxon"},
        {"host": "http://[::1]:8000"},
        {"token_env": "POLYAXON_V2_TOKEN_OF_THE_SECOND_CLUSTER_WE_HAVE"},
    ],
)
def test_a_cluster_is_named_as_polyaxon_and_registries_have_it(changes: dict[str, Any]) -> None:
    assert local_gpu(**CLUSTER | changes).host


@pytest.mark.parametrize(
    ("text", "number"),
    [("8", 8), (8, 8), ("500m", "0.5"), ("32Gi", 32 * 2**30), ("1e3", 1000), ("1.5G", 1.5e9)],
)
def test_quantities(text: object, number: object) -> None:
    assert quantity.parse(text) == Decimal(str(number))


@pytest.mark.parametrize("text", ["banana", "", "32 Gi", "32gi", "-1", "1e", True, None, "0x10"])
def test_no_quantities(text: object) -> None:
    with pytest.raises(ValueError, match="Kubernetes quantity"):
        quantity.parse(text)


@given(st.text(max_size=100))
def test_any_text_becomes_a_label(text: str) -> None:
    made = labels.value(text)
    assert labels.is_value(made)
    assert made == text or made != labels.value(text + "x")
