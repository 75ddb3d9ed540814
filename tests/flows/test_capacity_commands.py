"""``memsweep capacity`` and ``memsweep fit`` as a script calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from flows.commands import capacity
from warehouse.errors import BadInput

CONFIGS = Path(__file__).parents[1] / "data" / "model-configs"
QWEN35_4B = str(CONFIGS / "Qwen__Qwen3.5-4B.json")
BASE = ["--config", QWEN35_4B, "--vllm-version", "0.27.0", "--max-model-len", "32768"]


@pytest.fixture
def app() -> typer.Typer:
    """The two commands under a group of their own."""
    app = typer.Typer(pretty_exceptions_enable=False)
    capacity.register(app)
    return app


def call(app: typer.Typer, *arguments: str) -> dict[str, Any]:
    """Run a command with --json and return its object."""
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    value: dict[str, Any] = json.loads(result.stdout)
    return value


def test_capacity_prints_the_interface(app: typer.Typer) -> None:
    """Test keys and figures of the recipe's 32k start."""
    found = call(app, "capacity", *BASE, "--available-gib", "8.88")
    assert list(found)[:8] == [
        "format",
        "attention_block_size_tokens",
        "mamba_padding_percent",
        "bytes_per_block",
        "blocks_per_request",
        "kv_groups",
        "padding_layers",
        "candidates",
    ]
    assert found["attention_block_size_tokens"] == 528
    assert found["load"] is None
    assert [c["num_gpu_blocks"] for c in found["candidates"]] == [550, 551]
    assert found["candidates"][1] == {
        "num_gpu_blocks": 551,
        "kv_cache_size_tokens": 273_563,
        "max_concurrency": 551 / 66,
    }


def test_capacity_with_a_load(app: typer.Typer) -> None:
    """Test the load's keys, with and without a prompt length."""
    load = ("--requests", "64", "--tokens-per-request", "16512")
    found = call(app, "capacity", *BASE, "--num-gpu-blocks", "551", *load)["load"]
    assert found == {
        "running": 15,
        "waiting": 49,
        "peak_usage_ratio": 525 / 550,
        "running_at_admission": None,
        "preemptions_expected": None,
    }
    found = call(
        app, "capacity", *BASE, "--num-gpu-blocks", "551", *load, "--prompt-tokens", "16384"
    )["load"]
    assert (found["running_at_admission"], found["preemptions_expected"]) == (15, False)


def test_capacity_of_a_dense_model_has_no_padding(app: typer.Typer) -> None:
    """Test null where a figure does not apply, and the default context from the config."""
    found = call(
        app,
        "capacity",
        "--config",
        str(CONFIGS / "meta-llama__Llama-3.1-8B-Instruct.json"),
        "--vllm-version",
        "0.15.1",
        "--max-model-len",
        "8192",
        "--available-bytes",
        "28379000000",
    )
    assert found["mamba_padding_percent"] is None
    assert found["attention_block_size_tokens"] == 16
    assert found["kv_groups"] == 1


def test_capacity_tells_a_refusal(app: typer.Typer) -> None:
    """Test that a refusal comes with its numbers and the candidates stay."""
    found = call(app, "capacity", *BASE, "--num-gpu-blocks", "40")
    assert found["refusal"]["type"] == "max_model_len_does_not_fit"
    assert found["refusal"]["estimated_max_model_len"] == 37 * 528
    assert found["candidates"][0]["num_gpu_blocks"] == 40


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "exactly one"),
        (("--available-gib", "1", "--num-gpu-blocks", "3"), "exactly one"),
        (("--num-gpu-blocks", "3", "--requests", "2"), "belong together"),
        (("--num-gpu-blocks", "3", "--prompt-tokens", "2"), "needs"),
        (("--available-gib", "lots"), "available_gib"),
        (("--available-gib", "nan"), "available_gib"),
        (("--num-gpu-blocks", "3", "--compute-capability", "nine"), "8.9"),
        (("--num-gpu-blocks", "3", "--compute-capability", "8.²"), "8.9"),
        (("--num-gpu-blocks", "3", "--compute-capability", "٨.٩"), "8.9"),
        (("--num-gpu-blocks", "3", "--compute-capability", "8.9.1"), "8.9"),
        (("--num-gpu-blocks", "3", "--speculative", "mtp"), "METHOD:N"),
    ],
)
def test_capacity_refuses_bad_input(
    app: typer.Typer, arguments: tuple[str, ...], words: str
) -> None:
    """Test that bad input is one sentence, raised for exit code 2."""
    with pytest.raises(BadInput, match=words):
        CliRunner().invoke(app, ["capacity", *BASE, *arguments], catch_exceptions=False)


@pytest.mark.parametrize(
    "version", ["9", "", "0", "banana", "0.²7", "0.٢٧.0", "0.27.0.0.0", "0." + "9" * 5000, "0.8.5"]
)
@pytest.mark.parametrize("command", ["capacity", "fit"])
def test_nonsense_versions_are_refused(app: typer.Typer, command: str, version: str) -> None:
    """Test that no version is answered by the rules of whatever its digits come to."""
    more = {
        "capacity": ("--num-gpu-blocks", "551"),
        "fit": ("--gpu", "L4", "--p95-tokens", "1000", "--weights-gib", "5"),
    }[command]
    with pytest.raises(BadInput, match=r"(?i)vllm.version.*give"):
        CliRunner().invoke(
            app,
            [command, "--config", QWEN35_4B, "--vllm-version", version, *more],
            catch_exceptions=False,
        )


@pytest.mark.parametrize(
    ("version", "rules"),
    [("0.27.0", "0.27.0"), ("0.33.0", "0.33.0"), ("0.99.0", "0.33.0"), ("9.0.0", "0.33.0")],
)
def test_rules_of_another_version_are_told(app: typer.Typer, version: str, rules: str) -> None:
    """Test that a version newer than any that was read is named, in JSON and on stderr."""
    capacity_of = ["capacity", *BASE, "--num-gpu-blocks", "551"]
    fit_of = ["fit", "--config", QWEN35_4B, "--gpu", "L4", "--p95-tokens", "1000"]
    for arguments in (capacity_of, [*fit_of, "--weights-gib", "5"]):
        given = [*arguments, "--vllm-version", version, "--json"]
        result = CliRunner().invoke(app, given, catch_exceptions=False)
        assert json.loads(result.stdout)["version_rules"] == rules
        assert ("its rules are assumed" in result.stderr) is (rules != version)


@pytest.mark.parametrize("command", ["capacity", "fit"])
def test_a_config_of_endless_depth_is_bad_input(
    app: typer.Typer, command: str, tmp_path: Path
) -> None:
    """Test that recursion is one sentence, not an unforeseen fault."""
    path = tmp_path / "config.json"
    path.write_text('{"a":' * 200_000 + "1" + "}" * 200_000)
    more = {
        "capacity": ("--vllm-version", "0.27.0", "--num-gpu-blocks", "551"),
        "fit": ("--gpu", "L4", "--p95-tokens", "1000", "--weights-gib", "5"),
    }[command]
    with pytest.raises(BadInput, match="nested too deeply"):
        CliRunner().invoke(app, [command, "--config", str(path), *more], catch_exceptions=False)


def test_capacity_for_people(app: typer.Typer) -> None:
    """Test that the table shows what vLLM will log."""
    result = CliRunner().invoke(app, ["capacity", *BASE, "--num-gpu-blocks", "551"])
    assert "273,563" in result.stdout
    assert "8.35x" in result.stdout
    assert "528 tokens" in result.stdout


def test_fit_shows_both_of_the_guides_calculations(app: typer.Typer) -> None:
    """Test 47 and 45 users on an L4, and GPUs for a hundred."""
    found = call(
        app,
        "fit",
        "--config",
        QWEN35_4B,
        "--gpu",
        "l4",
        "--p95-tokens",
        "16000",
        "--weights-gib",
        "4.9",
        "--kv-cache-dtype",
        "fp8",
        "--users",
        "100",
    )
    (fit,) = found["fits"]
    assert (fit["guide_example"]["users"], fit["real_blocks"]["users"]) == (47, 45)
    assert fit["blocks_per_user"] == 19
    assert fit["users_low"] < fit["users"] < fit["users_high"]
    assert fit["gpus_needed"] == -(-100 // fit["users"])
    assert fit["notes"]


def test_fit_over_the_catalogue_keeps_what_does_not_fit(app: typer.Typer) -> None:
    """Test that without --gpu every card is answered, a too small one with its reason."""
    found = call(
        app, "fit", "--config", QWEN35_4B, "--p95-tokens", "16000", "--weights-bytes", str(10**11)
    )
    assert {fit["gpu"] for fit in found["fits"]} >= {"H200", "B200"}
    assert all("do not fit" in row["reason"] for row in found["unfit"])
    assert len({fit["gpu"] for fit in found["fits"]} | {r["gpu"] for r in found["unfit"]}) == 9


def test_fit_reads_the_checkpoint_beside_the_config(app: typer.Typer, tmp_path: Path) -> None:
    """Test an index next to the config, and a table of precisions from it."""
    (tmp_path / "config.json").write_text(Path(QWEN35_4B).read_text())
    index = {"metadata": {"total_size": 9_320_000_000}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    base = ("fit", "--config", str(tmp_path), "--gpu", "A10", "--p95-tokens", "8192")
    found = call(app, *base)
    assert found["weights"] == [{"name": "as stored", "bytes": 9_320_000_000}]
    found = call(app, *base, "--precision", "bf16", "--precision", "int4")
    assert [row["name"] for row in found["weights"]] == ["bf16", "int4"]


def test_fit_without_any_size_says_what_to_give(app: typer.Typer) -> None:
    """Test that a config too short to count parameters is refused, not guessed."""
    with pytest.raises(BadInput, match="weights' size"):
        CliRunner().invoke(
            app,
            ["fit", "--config", QWEN35_4B, "--gpu", "L4", "--p95-tokens", "1000"],
            catch_exceptions=False,
        )
