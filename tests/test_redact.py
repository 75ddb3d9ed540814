"""Secrets out of text: what is found, what is left alone, and that files stay what they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.context import read_sweep
from tasks.redact import REPLACED, Secrets, clean_folder
from warehouse.errors import BadInput

#: Made up, of the right form.
HUB = "hf_" + "Ab1" * 11
AWS = "AKIA" + "ABCD1234" * 2
NONE = Secrets()


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        (f"HF_TOKEN={HUB}", HUB),
        (f"login with {HUB}.", HUB),
        (f"aws_access_key_id = {AWS}", AWS),
        ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfi", "wJalrXUtnFEMI/K7MDENG/bPxRfi"),
        ("authorization: Bearer abcdef0123456789", "abcdef0123456789"),
        ('{"Authorization": "token 0123456789abcdef"}', "0123456789abcdef"),
        ("non-default args: {'api_key': ['not-a-real-one'], 'port': 8000}", "not-a-real-one"),
        ('  "password": "correct horse"', "correct"),
        ("https://user:hunter2hunter@registry.invalid/v2", "hunter2hunter"),
        ("github_pat_" + "a1B2" * 8, "a1B2" * 8),
        ("my_password=opensesame1", "opensesame1"),
    ],
)
def test_a_secret_of_a_known_form_is_taken_out(line: str, secret: str) -> None:
    text, count = NONE.clean(line.encode())
    assert count >= 1
    assert secret.encode() not in text
    assert REPLACED in text
    if line.startswith("{"):
        assert line.startswith("{'") or json.loads(text)


@pytest.mark.parametrize(
    "line",
    [
        "INFO 11-29 GPU KV cache size: 975,890 tokens",
        '{"cell_key": "0123456789abcdef0123456789abcdef", "setting_key": "0123456789abcdef"}',
        "non-default args: {'api_key': None, 'max_num_batched_tokens': 2048}",
        '{"eos_token": "<|im_end|>", "pad_token_id": 151643, "api_key": "EMPTY"}',
        'vllm:request_success_total{finished_reason="length",model_name="tiny"} 12',
        "http://127.0.0.1:8000/v1/models",
        '{"password": null, "access_token": 12345678}',
        "the task-scheduler and risk-assessment-of-many-things",
    ],
)
def test_evidence_is_left_alone(line: str) -> None:
    assert NONE.clean(line.encode()) == (line.encode(), 0)


def test_values_of_secret_variables_are_taken_out_whatever_they_look_like() -> None:
    secrets = Secrets.of(
        {
            "MY_TOKEN": 'quo"ted-1',
            "DEPLOY_PASSWORD": "longenoughwithoutdigits",
            "GOOGLE_APPLICATION_CREDENTIALS": "/home/me/key-1.json",
            "SOME_SECRET": "localhost",
            "SHORT_TOKEN": "a1",
            "PATH": "/usr/bin:/opt/1",
            "MAX_TOKENS": "123456789",
        }
    )
    text = json.dumps({"said": 'quo"ted-1'}) + " longenoughwithoutdigits"
    cleaned, count = secrets.clean(text.encode())
    assert (cleaned, count) == (b'{"said": "[redacted]"} [redacted]', 2)
    kept = b"/home/me/key-1.json localhost a1 /usr/bin:/opt/1 123456789"
    assert secrets.clean(kept) == (kept, 0)


def test_a_folder_is_cleaned_and_told_about(tmp_path: Path) -> None:
    secrets = Secrets.of({"MY_TOKEN": "plain-value-1"})
    (tmp_path / "bench").mkdir()
    (tmp_path / "server.log").write_text(f"a\n{HUB} and plain-value-1\nb\n")
    (tmp_path / "clean.log").write_text("nothing here\n")
    (tmp_path / "cell.json").write_text(f'{{"a": "{HUB}"}}')
    (tmp_path / "bench" / "data.db").write_bytes(b"\0\1plain-value-1\0")
    (tmp_path / "bench" / "other.db").write_bytes(b"\0\1\2")
    before = (tmp_path / "clean.log").stat()
    assert clean_folder(tmp_path, secrets) == {"server.log": 2, "bench/data.db": -1}
    assert (tmp_path / "server.log").read_text() == "a\n[redacted] and [redacted]\nb\n"
    assert (tmp_path / "clean.log").stat() == before
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {"server.log", "clean.log", "cell.json", "other.db"}


def test_a_secret_where_two_blocks_meet_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.redact._BLOCK", 16)
    path = tmp_path / "server.log"
    path.write_text("0123456789\n" + HUB + "\n" + "x" * 40 + "\n")
    assert NONE.clean_file(path) == 1
    path.write_bytes(b"\0" * 12 + b"plain-value-1" + b"\0" * 20)
    assert Secrets.of({"MY_TOKEN": "plain-value-1"}).holds_value(path)


def test_nothing_that_is_said_holds_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.output import say

    monkeypatch.setenv("SOME_API_KEY", "planted-value-7")
    say(f"PREFECT_API_URL is https://me:planted-1@x.invalid, not {HUB} or planted-value-7 \udcff")
    said = "PREFECT_API_URL is https://[redacted]@x.invalid, not [redacted] or [redacted] \ufffd\n"
    assert capsys.readouterr().err == said


def test_the_line_of_a_secret_is_told() -> None:
    assert NONE.first(f"name: x\nhub: {HUB}\n") == 2
    assert NONE.first("name: x\n") is None


def test_a_sweep_is_refused_for_a_secret_in_its_file_or_its_prompts(tmp_path: Path) -> None:
    secret = HUB
    text = (
        "name: mine\nmodel: tiny-qwen3\n"
        "server: {max_model_len: 2048, kv_cache_memory_bytes: 16777216}\n"
        "experiments: [{name: one, points: [{parallel: 1, number: 1, prompts: p.txt}]}]\n"
    )
    sweep, prompts = tmp_path / "mine.yaml", tmp_path / "p.txt"
    sweep.write_text(text)
    prompts.write_text("5\tone\n")
    assert read_sweep(str(sweep))[0].name == "mine"
    prompts.write_text(f"5\tone\n5\tmy {secret}\n")
    with pytest.raises(BadInput, match=r"prompts p\.txt: line 2 holds") as caught:
        read_sweep(str(sweep))
    assert secret not in str(caught.value)
    sweep.write_text(f"# {secret}\n{text}")
    with pytest.raises(BadInput, match="line 1 holds"):
        read_sweep(str(sweep))
