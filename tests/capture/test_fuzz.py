"""No parser crashes, and noise gives no value: 2 seconds by default, 5 minutes in the soak tier.

The seeds are the recorded logs, pages and databases; they are cut, spliced, repeated and sprinkled
with foreign bytes, as disks, terminals and posters do.
"""

from __future__ import annotations

import contextlib
import random
import string
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.capture import (
    advice,
    arguments,
    curves,
    evalscope,
    metrics_page,
    startup_log,
    text,
    windows,
)
from warehouse.errors import CannotFindOut
from warehouse.registry import STARTUP

DATA = Path(__file__).parents[1] / "data"
LOGS = [path.read_bytes() for path in sorted((DATA / "vllm-logs").glob("*.log"))]
LOGS.append((DATA / "good-logs.jsonl").read_bytes())
LOGS.append((DATA / "failures.jsonl").read_bytes())
PAGES = [path.read_bytes()[:20_000] for path in sorted((DATA / "metrics").glob("*.txt"))]
DATABASES = [path.read_bytes() for path in sorted((DATA / "evalscope-1.9.1").rglob("*.db"))]
CHUNK = 4096


def parse_log(content: bytes) -> startup_log.StartupLog:
    """Parse and check what must hold for any content."""
    log = startup_log.parse(
        text.lines(content[i : i + CHUNK] for i in range(0, len(content), CHUNK))
    )
    for value in log.every:
        assert value.name in STARTUP
        assert value.low <= value.value <= value.high
        assert value.line >= 1
        # A value is always something that was printed: its digits are in its own text.
        assert any(letter.isdigit() for letter in value.text)
    assert (log.failure is not None) == (log.outcome == "failed")
    assert all(isinstance(line, str) for line in advice.advise(log))
    return log


def parse_page(content: bytes) -> None:
    page = metrics_page.parse(content.decode("utf-8", "replace"))
    metrics_page.families(page)
    metrics_page.cache_configs(page)


def parse_database(content: bytes) -> None:
    message = ""
    found: list[evalscope.Request] = []
    try:
        found = evalscope.requests(content)
    except CannotFindOut as error:
        message = str(error)
    assert message.isprintable()
    evalscope.load_point(found, asked=32)
    curves.usage_bounds(
        curves.from_requests(found),
        blocks_of=lambda tokens: -(-min(tokens, 10**9) // 128),
        num_gpu_blocks=64,
        waited=True,
        preemptions=1,
    )


def parse_rest(content: bytes) -> None:
    noise = content.decode("utf-8", "replace")
    arguments.fields(noise)
    windows.phases({"phases": [{"name": noise, "start_s": 1.0}, noise]})
    with contextlib.suppress(CannotFindOut):
        evalscope.summary(noise)


def mutated(seed: bytes, chance: random.Random) -> bytes:
    """Return ``seed`` as something between a disk and a reader might have left it."""
    content = bytearray(seed)
    for _ in range(chance.randint(1, 12)):
        at = chance.randrange(len(content) + 1)
        end = min(len(content), at + chance.randint(0, 400))
        kind = chance.randrange(8)
        if kind == 0:
            del content[at:end]
        elif kind == 1:
            content[at:at] = content[at:end] * chance.randint(1, 20)
        elif kind == 2:
            content[at:at] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 40)))
        elif kind == 3:
            content[at:end] = bytes(content[at:end]).replace(b"\n", b"\r\n")
        elif kind == 4:
            content[at:at] = b"\x1b[1;36m" * chance.randint(1, 9)
        elif kind == 5:
            content[at:end] = bytes(chance.sample(list(content[at:end]), end - at))
        elif kind == 6:
            content[at:at] = chance.choice((b"9" * 400, b"1e999", b"-", b"NaN", b"\x00", b",.,"))
        elif kind == 7 and content:
            del content[: at // 2]
    return bytes(content)


TARGETS: tuple[tuple[Callable[[bytes], object], list[bytes]], ...] = (
    (parse_log, LOGS),
    (parse_page, PAGES),
    (parse_database, DATABASES),
    (parse_rest, LOGS + PAGES),
)


def fuzz(seconds: float, seed: int) -> int:
    chance = random.Random(seed)
    until = time.monotonic() + seconds
    rounds = 0
    while time.monotonic() < until:
        for target, seeds in TARGETS:
            content = mutated(chance.choice(seeds), chance)
            try:
                target(content)
            except Exception as error:  # noqa: BLE001 - the point of this test
                pytest.fail(f"{target.__name__}, round {rounds} of seed {seed}: {error!r}")
            rounds += 1
    return rounds


def test_mutated_inputs_never_crash() -> None:
    assert fuzz(1.5, seed=20_260_801) > 20


@pytest.mark.soak
def test_mutated_inputs_never_crash_for_five_minutes() -> None:
    """5 minutes."""
    assert fuzz(300.0, seed=int(time.time())) > 1000


NOISE = st.text(alphabet=string.printable + "█▄│\x1b\x00é", max_size=400)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(NOISE, max_size=12))
def test_noise_gives_no_value_and_no_failure(lines: list[str]) -> None:
    log = parse_log("\n".join(lines).encode())
    assert log.values == {}
    assert log.vllm_version is None
    assert log.failure is None or log.failure.type == "unknown"


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=600))
def test_any_bytes(content: bytes) -> None:
    parse_log(content)
    parse_page(content)
    parse_database(content)
    parse_rest(content)


#: Lines that look like values and are none: other programs' words, cut words, other units.
NEAR = [
    "Model loading took a while and 3 seconds",
    "Available KV cache memory: unknown",
    "Available KV cache memory: GiB",
    "GPU KV cache size: many tokens",
    "GPU KV cache usage: 96.8%, Prefix cache hit rate: 0.0%",
    "Maximum concurrency for tokens per request: x",
    "Setting attention block size",
    "Graph capturing finished soon",
    "init engine took 3 s",
    "# GPU blocks: , # CPU blocks: ",
    "Checkpoint size: 75.68 GiB. Available RAM: 53.28 GiB.",
    "Sleep mode freed 3.2 GiB memory, 1.0 GiB memory is still in use.",
    "GPU 0 has 80 GiB; KV cache size: 12 tokens",
    "In v0.19, CUDA graph memory profiling will be enabled by default",
    "Python version 3.11.7, torch version 2.13.0",
]


@pytest.mark.parametrize("line", NEAR)
def test_near_misses_give_no_value(line: str) -> None:
    log = parse_log(line.encode())
    assert log.values == {}
    assert log.vllm_version is None
    assert log.failure is None
