"""The environment of every process the project starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows import context
from tasks import schedules
from tasks.home import Home
from tasks.launch import settings

SERVICES = ["prefect", "polyaxon", "supervisor", "scheduler"]


def every_block(home: Home) -> list[dict[str, str]]:
    blocks = [
        settings.service_environment(home, name, polyaxon_host="http://x") for name in SERVICES
    ]
    return [*blocks, settings.run_environment(home)]


def test_nothing_is_passed_on_that_is_not_on_the_list(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("PYTHONPATH", "/somewhere/else")
    monkeypatch.setenv("MEMSWEEP_RUN_UUID", "outer")
    for block in every_block(home):
        assert {
            "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV",
            "MEMSWEEP_RUN_UUID",
        }.isdisjoint(block)  # fmt: skip
        assert block.get("PYTHONPATH") != "/somewhere/else"
        assert "PATH" in block
        assert block["HOME"].startswith(str(home.root)), "nothing is written to the user's home"


def test_server_supervisor_and_client_share_the_same_roots(home: Home) -> None:
    server = settings.service_environment(home, "polyaxon", polyaxon_host="http://x")
    worker = settings.service_environment(home, "supervisor", polyaxon_host="http://x")
    client = settings.client_environment(home, prefect_api_url="http://p", polyaxon_host="http://x")
    for name in ("POLYAXON_ARTIFACTS_ROOT", "POLYAXON_CONTEXT_ROOT", "POLYAXON_ARCHIVES_ROOT"):
        assert server[name] == worker[name] == client[name]
        assert server[name].startswith(str(home.root))
    assert server["POLYAXON_ARCHIVES_ROOT"] != server["POLYAXON_ARTIFACTS_ROOT"]
    assert worker["POLYAXON_HOST"] == client["POLYAXON_HOST"] == "http://x"


def test_the_servers_database_loses_no_write(home: Home) -> None:
    server = settings.service_environment(home, "polyaxon", polyaxon_host="http://x")
    options = json.loads(server["POLYAXON_DB_OPTIONS"])
    assert options["transaction_mode"] == "IMMEDIATE"
    assert "journal_mode=WAL" in options["init_command"]


def test_prefect_keeps_leases_on_disk_and_sends_nothing_home(home: Home) -> None:
    server = settings.service_environment(home, "prefect", polyaxon_host="http://x")
    assert server["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    assert server["DO_NOT_TRACK"] == "1"
    assert server["PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"].endswith("filesystem")
    assert server["PREFECT_HOME"].startswith(str(home.root))
    assert "PREFECT_API_URL" not in server, "a server with it takes itself for a client"


def test_the_scheduler_gets_the_webhooks_of_what_is_scheduled_and_nothing_else(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_HOOK", "https://hooks.example/secret")
    monkeypatch.setenv("OTHER_HOOK", "https://hooks.example/other")
    schedules.save(
        home,
        schedules.Schedule(
            "demo", "demo", "local", "0 2 * * *", "UTC", "/", "", webhook_env="MY_HOOK"
        ),
    )
    block = settings.service_environment(home, "scheduler", polyaxon_host="")
    assert block["MY_HOOK"] == "https://hooks.example/secret"
    assert "OTHER_HOOK" not in block
    assert block["MEMSWEEP_HOME"] == str(home.root)
    assert block["PREFECT_HOME"].startswith(str(home.root))
    assert "MY_HOOK" not in settings.service_environment(home, "supervisor", polyaxon_host="")


def test_a_night_on_a_cluster_finds_its_token_and_no_other_service_has_it(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "planted-value-7")
    monkeypatch.setenv("POLYAXON_AUTH_TOKEN", "planted-value-8")
    monkeypatch.delenv("POLYAXON_HOME", raising=False)
    profile = tmp_path / "there.yaml"
    profile.write_text(
        "{description: x, device: cuda, operation: gpu.yaml, host: 'https://x.invalid', image: i,"
        f" image_digest: 'sha256:{'0' * 64}', models: /m, token_env: MY_TOKEN}}"
    )
    schedules.save(
        home, schedules.Schedule("demo", "demo", str(profile), "0 2 * * *", "UTC", "/", "")
    )
    block = settings.service_environment(home, "scheduler", polyaxon_host="")
    assert block["MY_TOKEN"] == "planted-value-7"
    assert block["POLYAXON_HOME"] == str(Path.home() / ".polyaxon")
    assert "POLYAXON_AUTH_TOKEN" not in block
    # A flow's process, which points at the embedded server, starts a dead scheduler again.
    monkeypatch.setenv("POLYAXON_HOME", "/theirs")
    monkeypatch.setenv("MEMSWEEP_POLYAXON_HOME", "to be restored")
    monkeypatch.delenv("MEMSWEEP_POLYAXON_HOME")
    context._point_at_embedded({"POLYAXON_HOME": "/embedded"})
    block = settings.service_environment(home, "scheduler", polyaxon_host="")
    assert block["POLYAXON_HOME"] == "/theirs"
    for name in ("prefect", "polyaxon", "supervisor"):
        others = settings.service_environment(home, name, polyaxon_host="")
        assert "planted-value-7" not in others.values()
    profile.unlink()
    assert "MY_TOKEN" not in settings.service_environment(home, "scheduler", polyaxon_host="")
