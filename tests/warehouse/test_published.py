"""``compare --with published``: own runs of a shipped sweep beside what its documents print."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from flows import cli
from flows.commands.published import given
from tasks import record
from tasks.home import Home
from tasks.plan.cell import Cell, LoadPoint
from tests.support.bundle_maker import Ask, Lab, Spec
from warehouse.registry import Outcome, Phase

GIB = 2**30
A10 = {"uuid": "GPU-0", "name": "NVIDIA A10", "total_bytes": 24_146_608_128}
LIMIT = "limit/max_model_len=32768"
#: As the recipe prints them.
LOG = """INFO 11-29 12:00:01 [gpu_worker.py:1] Available KV cache memory: 8.88 GiB
INFO 11-29 12:00:02 [kv_cache_utils.py:2] GPU KV cache size: 273,563 tokens
INFO 11-29 12:00:02 [kv_cache_utils.py:3] Maximum concurrency for 32,768 tokens per request: 8.35x
"""
OOM = (
    "(EngineCore pid=9) ERROR 11-29 12:00:05 [core.py:9] torch.OutOfMemoryError: CUDA out of "
    "memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 22.06 GiB of which 1.01 GiB "
    "is free.\n"
)
#: What a run of the control load at 551 blocks shows: four requests hold 20 of 550 blocks.
SHORT = tuple(Ask(1010.0 + n / 10, 1013.0 + n / 10, prompt=520) for n in range(8))


@dataclass
class GpuSpec(Spec):
    """A bundle of one cell of a shipped sweep, on a GPU."""

    shipped: str = "context-limit"
    label: str = LIMIT
    gpu: dict[str, Any] = field(default_factory=lambda: dict(A10))
    text: str = LOG
    blocks: int = 551
    engine: str = "0.27.0"

    def cell(self) -> Cell:
        cell = given(self.shipped, Home.find())[0].planned(self.label).cell
        pins = cell.pins.model_copy(
            update={
                "model_revision": "0" * 40,
                "image_digest": "sha256:" + "0" * 64,
                "engine_version": self.engine,
            }
        )
        return cell.model_copy(update={"pins": pins})


def on_gpu(**changes: Any) -> GpuSpec:
    spec = GpuSpec(
        sweep=changes.get("shipped", "context-limit"),
        log=None,
        metrics=None,
        load=(LoadPoint(parallel=4, number=8),),
        requests=(SHORT,),
        samples=[(1009.0, 0.0, 0, 0, 0), (1011.5, 20 / 550, 4, 0, 0), (1015.0, 0.0, 0, 0, 0)],
        prediction={"values": {"bytes_per_block": 17_301_504}},
        **changes,
    )

    def change(folder: Path) -> None:
        (folder / "server.log").write_text(spec.text)
        config = f'vllm:cache_config_info{{block_size="528",num_gpu_blocks="{spec.blocks}"}} 1.0\n'
        (folder / "metrics_first.txt").write_text(config)
        path = folder / "environment.json"
        gpus = [spec.gpu] if spec.gpu else []
        path.write_text(json.dumps(json.loads(path.read_text()) | {"gpus": gpus}))
        lines = [
            {
                "tick": tick,
                "due_s": t_s,
                "t_s": t_s,
                "state": "ok",
                "gpus": [{"uuid": "GPU-0", "used_bytes": round(used * GIB)}],
            }
            for tick, (t_s, used) in enumerate([(1002.0, 1.0), (1008.5, 19.35), (1012.0, 19.4)])
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "raw" / "gpu_samples.jsonl").write_text(text)

    return replace(spec, change=change)


@pytest.fixture
def compare(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, Any]]:
    """Ingest bundles and return what ``compare NAME --with published --json`` says of them."""
    monkeypatch.setenv("MEMSWEEP_HOME", str(lab.home.root))

    def call(name: str, *specs: Spec) -> dict[str, Any]:
        report = record.ingest(lab.home, [lab.seal(spec) for spec in specs])
        assert not report.quarantined, report.quarantined
        assert cli.run(["compare", name, "--with", "published", "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return call


def cell_of(found: dict[str, Any], label: str) -> dict[str, Any]:
    (cell,) = [cell for cell in found["cells"] if cell["label"] == label]
    return dict(cell)


def figure(cell: dict[str, Any], metric: str) -> dict[str, Any]:
    return dict(next(f for f in cell["figures"] if f["metric"] == metric))


def test_a_run_on_the_same_card_is_as_printed(compare: Callable[..., dict[str, Any]]) -> None:
    found = compare("context-limit", on_gpu())
    cell = cell_of(found, LIMIT)
    assert (cell["unlike"], cell["outcomes"], len(cell["runs"])) == ([], ["ok"], 1)
    said = {f["metric"]: f["verdict"] for f in cell["figures"]}
    assert said == {
        "available_kv_cache_bytes": "as printed",
        "max_concurrency": "as printed",
        "gpu_used_after_start_bytes": "as printed",
        "requests_bytes": "not measured",
        "peak_requests_running": "as printed",
        "peak_kv_usage_ratio": "as printed",
    }
    used = figure(cell, "gpu_used_after_start_bytes")
    assert used["measured"] == round(19.35 * GIB)
    assert figure(cell, "max_concurrency")["difference"] == pytest.approx(0, abs=0.005)
    # The other cells were not run.
    other = cell_of(found, "limit/max_model_len=8192")
    assert {f["verdict"] for f in other["figures"]} == {"not measured"}
    assert found["selection"]["kind"] == "round"


def test_another_pool_differs_and_says_by_how_much(
    compare: Callable[..., dict[str, Any]],
) -> None:
    text = LOG.replace("8.88", "8.50").replace("8.35x", "8.00x")
    cell = cell_of(compare("context-limit", on_gpu(text=text, blocks=528)), LIMIT)
    concurrency = figure(cell, "max_concurrency")
    assert concurrency["verdict"] == "differs"
    assert concurrency["difference"] == pytest.approx(-0.35)
    assert concurrency["relative"] == pytest.approx(-0.35 / 8.35)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"gpu": {"uuid": "GPU-0", "name": "NVIDIA L4", "total_bytes": 24_152_899_584}}, "NVIDIA"),
        ({"gpu": {}}, "cpu x2, published A10"),
        ({"engine": "0.28.0"}, "0.28.0, published 0.27.0"),
    ],
)
def test_what_is_not_comparable_says_why(
    compare: Callable[..., dict[str, Any]], changes: dict[str, Any], why: str
) -> None:
    cell = cell_of(compare("context-limit", on_gpu(**changes)), LIMIT)
    concurrency = figure(cell, "max_concurrency")
    assert (concurrency["verdict"], concurrency["comparable"]) == ("not comparable", False)
    assert why in concurrency["why_not"][0]
    assert why in cell["unlike"][0]


def test_invalid_load_points_are_left_out(compare: Callable[..., dict[str, Any]]) -> None:
    """Test that a load that was cut short says nothing, and the server's start still does."""
    cut = replace(on_gpu(), requests=(SHORT[:6],))
    cell = cell_of(compare("context-limit", cut), LIMIT)
    assert figure(cell, "peak_kv_usage_ratio")["verdict"] == "not measured"
    assert figure(cell, "max_concurrency")["verdict"] == "as printed"


def test_layout_is_comparable_on_any_card(compare: Callable[..., dict[str, Any]]) -> None:
    """Test the block size: arithmetic of model and settings, whatever the GPU's memory."""
    log = LOG + (
        "INFO 11-29 12:00:00 [interface.py:9] Setting attention block size to 528 tokens to ensure "
        "that attention page size is >= mamba page size.\n"
    )
    l4 = {"uuid": "GPU-0", "name": "NVIDIA L4", "total_bytes": 24_152_899_584}
    label = "budget/gpu_memory_utilization=0.9"
    spec = on_gpu(shipped="memory-utilization", label=label, gpu=l4, text=log)
    cell = cell_of(compare("memory-utilization", spec), label)
    assert figure(cell, "attention_block_size_tokens")["verdict"] == "as printed"
    assert figure(cell, "kv_cache_size_tokens")["verdict"] == "not comparable"
    assert figure(cell, "kv_pool_bytes")["measured"] == 551 * 17_301_504


def test_an_out_of_memory_is_compared_with_its_message(
    compare: Callable[..., dict[str, Any]],
) -> None:
    failed = on_gpu(
        shipped="misconfiguration",
        label="misconfiguration",
        text=OOM,
        outcome=Outcome.OOM,
        phase=Phase.KV_CACHE,
        observed="server_exited",
    )
    cell = cell_of(compare("misconfiguration", failed), "misconfiguration")
    assert (cell["published_outcome"], cell["outcomes"]) == ("oom", ["oom"])
    for metric in ("oom_total_bytes", "oom_tried_bytes", "oom_free_bytes"):
        assert figure(cell, metric)["verdict"] == "as printed", metric


def test_text_names_what_cannot_be_compared(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEMSWEEP_HOME", str(lab.home.root))
    record.ingest(lab.home, [lab.seal(on_gpu(engine="0.28.0"))])
    # The newest round is of a sweep with figures: no name is needed.
    assert cli.run(["compare", "--with", "published"]) == 0
    out, err = capsys.readouterr()
    assert "not comparable" in out
    assert f"{LIMIT}: not comparable - engine: 0.28.0, published 0.27.0" in err


def test_a_sweep_without_figures_is_bad_input(
    one_run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEMSWEEP_HOME", str(one_run.lab.home.root))
    assert cli.run(["compare", "demo", "--with", "published"]) == 2
    assert "sweep 'demo': no published figures" in capsys.readouterr().err
