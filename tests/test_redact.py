"""Secrets out of text: what is found, what is left alone, and that files stay what they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.context import read_sweep
from tasks.redact import REPLACED, SHAPES, Secrets, clean_folder, kinds
from warehouse.errors import BadInput

DATA = Path(__file__).parent / "data"
#: Made up, of the right form.
HUB = "hf_" + "Ab1" * 11
AWS = "AKIA" + "ABCD1234" * 2
#: Letters only, so that no other shape takes them for its own.
BODY = "MIIEvQIBADANBgkqhkiG9w0BAQEF"
KEY = f"-----BEGIN RSA PRIVATE KEY-----\n{BODY}\n{BODY}\n-----END RSA PRIVATE KEY-----"
NONE = Secrets()

#: One of each shape: the kind it is found as, a text that holds one, and the secret in it.
EACH = [
    ("a Hugging Face token", f"with {HUB}.", HUB),
    ("an AWS key", f"got {AWS}", AWS),
    *(
        ("a GitHub token", f"got {head}{'a1B2' * 9}", "a1B2" * 9)
        for head in ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_")
    ),
    ("a GitLab token", "got glpat-" + "x1_y" * 5, "x1_y" * 5),
    ("a Google key", "?x=AIza" + "Ab1_-" * 7, "Ab1_-" * 7),
    ("an API key", "got sk-" + "aB3-" * 6, "aB3-" * 6),
    ("an API key", "got nvapi-" + "aB3-" * 6, "aB3-" * 6),
    ("a Docker Hub token", "got dckr_pat_" + "aB3-" * 6, "aB3-" * 6),
    ("a Slack token", "got xoxb-123456789012-abcdef", "123456789012-abcdef"),
    ("an npm token", "got npm_" + "a1B2" * 9, "a1B2" * 9),
    ("a PyPI token", "got pypi-AgEIcHlwaS5vcmc" + "CJ1a-" * 6, "CJ1a-" * 6),
    ("a Stripe key", "got sk_live_" + "a1B2" * 6, "a1B2" * 6),
    ("a Stripe key", "got rk_live_" + "a1B2" * 6, "a1B2" * 6),
    ("a SendGrid key", "got SG." + "a1B_" * 5 + "." + "a1B-" * 10, "a1B-" * 10),
    ("a Google token", "got ya29.a0" + "Ab1_-" * 7, "Ab1_-" * 7),
    ("a DigitalOcean token", "got dop_v1_" + "0a1b" * 16, "0a1b" * 16),
    ("an age key", "got AGE-SECRET-KEY-1" + "QZ9X" * 14, "QZ9X" * 14),
    ("an Azure key", "AccountName=a;AccountKey=" + "a1B/" * 21 + "a1==;End=x", "a1B/" * 21),
    *(
        ("a login of curl", line, "opensesame")
        for line in (
            "curl -sS -u me:opensesame https://x.invalid",
            "curl --user=me:opensesame https://x.invalid",
            "curl https://x.invalid -u 'me:opensesame'",
            '{"said": "curl -u \\"me:opensesame\\" x"}',
            "['curl', '-u', 'me:opensesame']",
        )
    ),
    *(
        ("the address of a webhook", f"to https://{place}/{'a1B2' * 6}", "a1B2" * 6)
        for place in (
            "hooks.slack.com/services/T00000000/B00000000",
            "discord.com/api/webhooks/123456789",
            "discordapp.com/api/v10/webhooks/123456789",
            "example.webhook.office.com/webhookb2",
        )
    ),
    ("a JSON web token", "got eyJhbGciOiJI.eyJzdWIiOiIx.c2ln", "eyJzdWIiOiIx"),
    ("a private key", KEY, BODY),
    ("a login", "authorization: Bearer abcdef0123456789", "abcdef0123456789"),
    ("a login", "got Bearer authentication-9f8e7d", "9f8e7d"),
    ("a login", "got Bearer required9f8e7d", "9f8e7d"),
    ("a login in an address", "https://me:hunter2@registry.invalid/v2", "hunter2"),
    ("a signed address", "/file?X-Amz-Signature=0123456789abcdef&a=b", "0123456789abcdef"),
    *(
        ("the value of a key, token or password", line, secret)
        for line, secret in (
            ("secret=opensesame", "opensesame"),
            ("ssh passphrase=opensesame", "opensesame"),
            ("CLIENT_SECRET: opensesame", "opensesame"),
            ("GET /v1?token=abc123def HTTP/1.1", "abc123def"),
            ('{"token": "abc123def"}', "abc123def"),
            ('{"said": "{\\"token\\": \\"abc123def\\"}"}', "abc123def"),
            ("MY_TOKEN=abc123def", "abc123def"),
            ("apiKey: opensesame", "opensesame"),
            ("vllm serve m --api-key abc123 --port 8000", "abc123"),
            ("['vllm', 'serve', '--hf-token', 'abc123', '--port']", "abc123"),
            ("--api-key=supersecretvalue", "supersecretvalue"),
            ('  "password": "correct horse"', "horse"),
            ("spring.datasource.password: opensesame", "opensesame"),
            # What begins like a type, a word or a line of accounts, and is none.
            ("password: str0ngEnough, api_key: listless", "str0ngEnough"),
            ('"password": "SecretStr horse"', "horse"),
            ("hf_token: Optional-opensesame", "opensesame"),
            ("passwd: files1234", "files1234"),
            ("passwd: compat-99 systemd", "compat-99"),
            ("db.passwd: files1234 systemd", "files1234"),
            ("next page token: abc123def", "abc123def"),
            ("pad --token=abc123def", "abc123def"),
            ("stop secret: abc123def", "abc123def"),
        )
    ),
]


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
        "max_tokens=512 num_tokens=1024, tokens: 512, Maximum number of tokens: 8192",
        "max_num_batched_tokens: 2048, token_type: bearer, token_type_ids: tensor123",
        "pad_token='<pad>' eos_token_id=151645 eos_token='<|im_end|>' bos_token='[BOS1234]'",
        '{"logprobs": [{"token": "Parisian"}, {"token": "token_id:12345"}, {"token": 151645}]}',
        "Time per output token: 123.45ms, per token: 1234567us, first token: 12.345678 s",
        "token: 2026-01-02T03:04:05 and token=0x7f0123456789",
        "PermissionError: /etc/passwd: Permission denied",
        "/run/secrets/db_password: Permission denied, .cache/hf_token: permission denied",
        "error: argument --api-key: expected at least one argument",
        "usage: vllm serve [--api-key API_KEY [API_KEY ...]] [--hf-token [HF_TOKEN]]",
        "set it with --api-key argument, or --token option",
        'the secret: missing; secretName: memsweep-registry, "secrets": {"HF_TOKEN": {"name": 1}}',
        "password: ${DB_PASSWORD} --api-key=$(VLLM_API_KEY) api_key={{ key }} hf_token=<yours>",
        "password:\nsomething on the next line",
        "hf_config_path=None, hf_overrides={}, hf_token=None, sk-learn, xoxo",
        "def load(self, hf_token: Optional[str] = None, revision: Optional[str] = None) -> None:",
        "api_key: Optional[List[str]] = None, auth_token: typing.Union[str, None] = None",
        "api_key: list[str] | None, password: 'Optional[str]' = None, hf_token: Annotated[str, 1]",
        "f(api_key: str=None, password: None|str=None, hf_token: Any)->None, secret: str",
        "    api_key: SecretStr = Field(None), password: SecretStr | None, api_key: SecretStr",
        "stop token: im_end_20240101, pad token: endoftext12345678, PAD_TOKEN=endoftext12345678",
        *(
            f"{name} token: im_end_20240101"
            for name in ("eos", "bos", "Special", "unk", "mask", "next", "sep", "cls")
        ),
        "Bearer authentication enabled, bearer credentials. Bearer authorization, bearer required",
        "passwd: files1234 systemd",
        "docker run -u 1000:1000 x, curl -u 1000:1000, curl -u $ME:$WORD, curl -u me https://a:80/x",
        "msg.something_long_enough.another_long_part npm_config_cache pypi-agent hooks.slack.com/",
        "Enter passphrase for key '/home/me/.ssh/id': wrong",
        "passwd:         compat systemd\npasswd: compat",
    ],
)
def test_evidence_is_left_alone(line: str) -> None:
    assert NONE.clean(line.encode()) == (line.encode(), 0)


@pytest.mark.parametrize(("kind", "text", "secret"), EACH)
def test_each_shape_is_cleaned_and_named(kind: str, text: str, secret: str) -> None:
    cleaned = NONE.clean_text(text)
    assert secret not in cleaned
    assert REPLACED.decode() in cleaned
    assert kind in kinds(text)
    assert NONE.clean_text(cleaned) == cleaned, "what was taken out is no secret again"
    # As JSON writes it, after the end of a line.
    assert secret not in NONE.clean_text(json.dumps(f"line\n{text}"))


def test_every_shape_has_an_example() -> None:
    assert {kind for kind, _, _ in EACH} == {shape.kind for shape in SHAPES}


@pytest.mark.parametrize("path", sorted((DATA / "vllm-logs").glob("*.log")), ids=lambda p: p.name)
def test_logs_of_the_engine_stay_what_they_are(path: Path) -> None:
    log = path.read_bytes()
    assert NONE.clean(log) == (log, 0)


@pytest.mark.parametrize(
    "name", ["good-logs.jsonl", "failure-texts.jsonl", "metrics/0.27.0-qwen3.5-hybrid-idle.txt"]
)
def test_other_evidence_stays_what_it_is(name: str) -> None:
    text = (DATA / name).read_bytes()
    assert NONE.clean(text) == (text, 0)


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
    path.write_text(f"0123456789\n{KEY}\nafter\n")
    assert NONE.clean_file(path) == 1
    assert path.read_text() == "0123456789\n[redacted]\nafter\n"
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


def test_a_private_key_without_its_end_takes_no_other_lines_with_it() -> None:
    cut = KEY.partition("-----END")[0] + "INFO 11-29 the server goes on\n"
    assert NONE.clean_text(cut) == "[redacted]\nINFO 11-29 the server goes on\n"


@pytest.mark.parametrize(("kind", "text", "secret"), EACH)
def test_a_sweep_is_refused_for_a_secret_of_any_shape(
    kind: str, text: str, secret: str, tmp_path: Path
) -> None:
    sweep = tmp_path / "mine.yaml"
    indented = text.replace("\n", "\n  ")
    sweep.write_text(f"name: mine\ndescription: |\n  {indented}\nmodel: tiny-qwen3\n")
    with pytest.raises(BadInput, match="line 3 holds") as caught:
        read_sweep(str(sweep))
    assert secret not in str(caught.value)


@pytest.mark.parametrize(
    "one", ["-", "a.", "a-", "token=", "://", "password", "A1b2", "curl ", "curl -u a", "SG.aB"]
)
def test_long_lines_of_anything_are_searched_in_one_go(one: str) -> None:
    """What is quadratic would take many minutes here."""
    line = (one * 100_000).encode() + b' "password": "opensesame" --x'
    assert b"opensesame" not in NONE.clean(line)[0]


HEADER = "-----BEGIN PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("one", "each"),
    [
        (HEADER, 1),
        (f"{HEADER}\n{BODY}\n", 1),
        (f"{HEADER}{BODY} ", 1),
        (f"{HEADER}-----END", 1),
        ("-----END PRIVATE KEY-----", 0),
        ("-----BEGIN A ", 0),
        ("-----BEGIN PRIVATE KEY ", 0),
    ],
)
def test_a_million_bytes_of_beginnings_of_keys_are_searched(one: str, each: int) -> None:
    number = 1_000_000 // len(one)
    assert NONE.clean((one * number).encode())[1] == each * number


def test_the_search_for_the_end_of_a_key_stops_at_the_next() -> None:
    """How far each looks is what makes many of them slow: not as far as an end that they share."""
    text = f"{HEADER} one " * 500 + KEY.replace("RSA ", "")
    assert NONE.clean_text(text) == "[redacted] one " * 500 + "[redacted]"


def test_shipped_sweeps_hold_none() -> None:
    from flows.shipped import shipped

    assert [name for name, path in shipped().items() if NONE.first(path.read_text())] == []


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
