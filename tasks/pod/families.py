"""The few families of vLLM's /metrics page that are sampled, found without parsing the page.

A page has a thousand lines and is fetched up to twenty times a second: a full parse would take
more of a core than the sampler may. A misspelt family never raises, its column is just empty, so
a test holds this table equal to ``warehouse.registry.SERVER_FAMILIES`` (which the run's own code
does not import).
"""

from __future__ import annotations

import math
import re

#: Our name -> vLLM's names over the versions, the newest first. The first one present counts.
FAMILIES: dict[str, tuple[str, ...]] = {
    "kv_usage_ratio": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "requests_running": ("vllm:num_requests_running",),
    "requests_waiting": ("vllm:num_requests_waiting",),
    "preemptions_total": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
    "prompt_tokens_total": ("vllm:prompt_tokens_total",),
    "generation_tokens_total": ("vllm:generation_tokens_total",),
    "requests_succeeded_total": ("vllm:request_success_total",),
    "prefix_cache_queries_total": (
        "vllm:prefix_cache_queries_total",
        "vllm:gpu_prefix_cache_queries_total",
    ),
    "prefix_cache_hits_total": (
        "vllm:prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_hits_total",
    ),
}

#: A ratio of several engines is the fullest engine's: a sum would pass 1, a mean would hide it.
MAXIMUM = frozenset({"kv_usage_ratio"})

_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')


def scan(page: bytes) -> tuple[dict[str, float | None], list[str]]:
    """Return our families' values, summed over engines, and what was wrong with the page.

    An absent family is ``None``; one with an unreadable value is ``None`` too and named in the
    second result.
    """
    values: dict[str, float | None] = {}
    problems: list[str] = []
    page = b"\n" + page
    for name, aliases in FAMILIES.items():
        values[name] = None
        for alias in aliases:
            found = _series(page, alias.encode())
            if not found:
                continue
            try:
                numbers = [_number(text) for text in found]
            except ValueError as error:
                problems.append(f"{alias}: {error}")
            else:
                values[name] = max(numbers) if name in MAXIMUM else sum(numbers)
            break
    return values, problems


def _series(page: bytes, name: bytes) -> list[bytes]:
    """Return what stands after the labels in every line of the family ``name``."""
    found: list[bytes] = []
    wanted = b"\n" + name
    at = page.find(wanted)
    while at >= 0:
        start = at + len(wanted)
        end = page.find(b"\n", start)
        rest = page[start:] if end < 0 else page[start:end]
        if rest[:1] == b"{":
            found.append(rest[rest.rfind(b"}") + 1 :])
        elif rest[:1] in (b" ", b"\t"):
            found.append(rest)
        at = page.find(wanted, start)
    return found


def _number(text: bytes) -> float:
    fields = text.split()
    if not fields:
        raise ValueError("no value")
    value = float(fields[0])
    if not math.isfinite(value):
        raise ValueError(f"not a finite number: {fields[0].decode(errors='replace')}")
    return value


def cache_config(page: str) -> dict[str, str] | None:
    """Return the labels of ``vllm:cache_config_info`` (the effective configuration) or ``None``."""
    for line in page.splitlines():
        if line.startswith("vllm:cache_config_info{"):
            return dict(_LABEL.findall(line))
    return None
