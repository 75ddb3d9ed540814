"""The command ``parse-log``: its JSON keys, its advice, and what it does with any file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from flows.commands import parse_log
from warehouse.errors import BadInput

DATA = Path(__file__).parents[1] / "data"
LOGS = DATA / "vllm-logs"
GIB = 2**30


@pytest.fixture
def app() -> typer.Typer:
    application = typer.Typer()
    application.callback()(lambda: None)
    parse_log.register(application)
    return application


def run(app: typer.Typer, *arguments: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(app, ["parse-log", *arguments], input=stdin)


def parsed(app: typer.Typer, *arguments: str, stdin: bytes | None = None) -> dict[str, Any]:
    result = run(app, *arguments, "--json", stdin=stdin)
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_json_keys_of_a_good_log(app: typer.Typer) -> None:
    document = parsed(app, str(LOGS / "cpu-0.27.0-qwen3.5-hybrid-ok.log"))
    assert list(document)[:5] == ["format", "vllm_version", "outcome", "failure", "values"]
    assert document["format"] == 1
    assert document["vllm_version"] == "0.27.0"
    assert document["outcome"] == "ok"
    assert document["failure"] is None
    value = document["values"]["kv_cache_size_tokens"]
    assert {key: value[key] for key in ("value", "low", "high", "line")} == {
        "value": 975_890,
        "low": 975_890,
        "high": 975_890,
        "line": 43,
    }
    assert "GPU KV cache size: 975,890 tokens" in value["text"]
    assert document["values"]["max_concurrency"]["low"] == 29.775
    assert document["advice"] == []


def test_json_of_a_refusal(app: typer.Typer) -> None:
    document = parsed(app, str(LOGS / "cpu-0.27.0-kv-cache-larger-than-memory.log"))
    failure = document["failure"]
    assert document["outcome"] == "failed"
    assert failure["type"] == "requested_kv_cache_exceeds_memory"
    assert failure["phase"] == "kv_cache"
    assert failure["outcome"] == "refused"
    assert failure["requested_kv_cache_bytes"] == 24 * GIB
    assert failure["available_memory_bytes"] == int(7.87 * GIB)
    # The command line's size is exact, the message's is rounded.
    assert document["values"]["requested_kv_cache_bytes"]["low"] == 25_769_803_776
    assert f"--kv-cache-memory-bytes {int(7.87 * GIB)}" in document["advice"][0]


def test_three_lines_are_enough(app: typer.Typer) -> None:
    text = b"...\r\nAvailable KV cache memory: 2.20 GiB\r\nGPU KV cache size: 72,992 tokens\r\n"
    document = parsed(app, "-", stdin=text)
    assert document["outcome"] == "incomplete"
    assert document["vllm_version"] is None
    assert document["values"]["kv_cache_size_tokens"]["line"] == 3


def test_several_ranks_are_all_there(app: typer.Typer) -> None:
    text = b"".join(
        b"(Worker_TP%d pid=%d) INFO 01-01 00:00:00 [a.py:1] Available KV cache memory: %d.50 GiB\n"
        % (rank, 100 + rank, 9 - rank)
        for rank in range(4)
    )
    document = parsed(app, "-", stdin=text)
    assert document["values"]["available_kv_cache_bytes"]["rank"] == "Worker_TP3"
    assert [value["rank"] for value in document["ranks"]["available_kv_cache_bytes"]] == [
        f"Worker_TP{rank}" for rank in range(4)
    ]


def test_config_adds_what_the_memory_holds(app: typer.Typer, tmp_path: Path) -> None:
    """Qwen3.5-4B with 8.88 GiB at 32,768: 551 blocks are the one count that logs 273,563 tokens."""
    log = tmp_path / "server.log"
    log.write_text(
        "INFO 01-01 00:00:00 [api_server.py:1] vLLM API server version 0.27.0\n"
        "INFO 01-01 00:00:00 [utils.py:1] non-default args: {'max_model_len': 32768, "
        "'dtype': 'bfloat16', 'enable_prefix_caching': False}\n"
        "Available KV cache memory: 8.88 GiB\nGPU KV cache size: 273,563 tokens\n"
        "Maximum concurrency for 32,768 tokens per request: 8.35x\n"
    )
    config = DATA / "model-configs" / "Qwen__Qwen3.5-4B.json"
    expected = parsed(app, str(log), "--config", str(config))["expected"]
    assert expected["attention_block_size_tokens"] == 528
    assert expected["blocks_per_request"] == 66
    assert expected["agrees"] is True
    assert {one["num_gpu_blocks"] for one in expected["candidates"]} == {550, 551}
    shown = run(app, str(log), "--config", str(config)).stdout
    assert "log and model agree on tokens" in shown


def test_config_says_which_context_fits(app: typer.Typer, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        "INFO 01-01 00:00:00 [api_server.py:1] vLLM API server version 0.27.0\n"
        "INFO 01-01 00:00:00 [utils.py:1] non-default args: {'max_model_len': 262144, "
        "'dtype': 'bfloat16', 'enable_prefix_caching': False}\n"
        "ValueError: To serve at least one request with the model's max seq len (262144), (8.19 "
        "GiB KV cache is needed, which is larger than the available KV cache memory (2.0 GiB). "
        "Try increasing `gpu_memory_utilization`.\n"
    )
    config = DATA / "model-configs" / "Qwen__Qwen3.5-4B.json"
    document = parsed(app, str(log), "--config", str(config))
    largest = document["expected"]["largest_max_model_len_tokens"]
    assert document["expected"]["refused"] == "max_model_len_does_not_fit"
    assert 60_000 < largest < 66_000  # 124 blocks of 16.5 MiB, 3 of them for states
    assert document["advice"][0] == f"Lower --max-model-len to at most {largest}."


def test_config_without_a_version_in_the_log(app: typer.Typer) -> None:
    config = DATA / "model-configs" / "Qwen__Qwen3.5-4B.json"
    document = parsed(app, "-", "--config", str(config), stdin=b"nothing\n")
    assert "version" in document["note"]
    assert "expected" not in document


def test_unknown_failure_shows_its_last_lines(app: typer.Typer) -> None:
    text = b"line one\nTraceback (most recent call last):\nQuantumError: nobody knows\n"
    document = parsed(app, "-", stdin=text)
    assert document["failure"]["type"] == "unknown"
    assert document["failure"]["phase"] is None
    assert document["failure"]["tail"][-1] == "QuantumError: nobody knows"
    assert "QuantumError: nobody knows" in run(app, "-", stdin=text).stdout


@pytest.mark.parametrize(
    "name", sorted(path.name for path in LOGS.glob("*.log")), ids=lambda name: name[4:-4]
)
def test_text_output_of_every_log(app: typer.Typer, name: str) -> None:
    result = run(app, str(LOGS / name))
    assert result.exit_code == 0
    first = result.stdout.splitlines()[0]
    assert first.startswith(("ok: ", "failed: "))
    assert ("-> " in result.stdout) == first.startswith("failed")


def test_compressed_and_foreign_bytes(app: typer.Typer, tmp_path: Path) -> None:
    packed = tmp_path / "server.log.gz"
    packed.write_bytes(gzip.compress(b"GPU KV cache size: 1,024 tokens\n"))
    assert parsed(app, str(packed))["values"]["kv_cache_size_tokens"]["value"] == 1024
    wide = tmp_path / "windows.log"
    wide.write_bytes("GPU KV cache size: 1,024 tokens\r\n".encode("utf-16"))
    assert parsed(app, str(wide))["values"]["kv_cache_size_tokens"]["value"] == 1024
    binary = tmp_path / "binary"
    binary.write_bytes(bytes(range(256)) * 4096)
    assert parsed(app, str(binary))["values"] == {}


def test_files_that_cannot_be_read(app: typer.Typer, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gz"
    broken.write_bytes(b"\x1f\x8b\x08broken")
    for path in (tmp_path / "absent.log", tmp_path, broken):
        result = run(app, str(path))
        assert isinstance(result.exception, BadInput)
        assert "\n" not in str(result.exception)


@pytest.mark.parametrize(
    ("text", "recognised"),
    [
        (b"", False),
        (b"Nov 29 12:00:00 host sshd[1]: session opened\nGET / 200\n", False),
        (b"Available KV cache memory: 2.20 GiB\n", True),
        (b"INFO 01-01 00:00:00 [api_server.py:1] vLLM API server version 0.27.0\n", True),
        (b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n", True),
    ],
)
def test_a_text_that_is_no_log_of_vllm_is_told(
    app: typer.Typer, text: bytes, recognised: bool
) -> None:
    """`incomplete` alone would look like a server that was still starting."""
    result = run(app, "-", "--json", stdin=text)
    document = json.loads(result.stdout)
    assert result.exit_code == 0
    assert document["recognised"] is recognised
    assert ("no line of vLLM's was recognised" in result.stderr) is not recognised


def test_a_config_of_endless_depth_is_bad_input(tmp_path: Path) -> None:
    log, config = tmp_path / "server.log", tmp_path / "config.json"
    log.write_text("")
    config.write_text("[" * 200_000 + "]" * 200_000)
    with pytest.raises(BadInput, match="nested too deeply"):
        parse_log.parse_log(log, config=config)
