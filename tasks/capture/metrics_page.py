"""A whole Prometheus page of vLLM's /metrics to families, and what it says of the KV cache.

Used once per page when a bundle is read. The sampler inside a run scans only the families it wants
(tasks.pod); this parser is the reference it is checked against.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from warehouse.registry import SERVER_FAMILIES

CACHE_CONFIG = "vllm:cache_config_info"
#: Gauges that are no count: engines share nothing, so the fullest one is reported, not a sum.
_NOT_ADDED = frozenset(("kv_usage_ratio",))

_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?(?:\s+#.*)?$")
_LABEL = re.compile(r'\s*([A-Za-z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of a page. ``value`` may be NaN or infinite: that is what the server said."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(slots=True)
class Page:
    """A parsed page: samples by name, declared types, and lines that are no sample (1-based)."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    malformed: list[tuple[int, str]] = field(default_factory=list)

    @property
    def cache_config_info(self) -> dict[str, str] | None:
        """The labels of the first engine's vllm:cache_config_info, or None when it is not there."""
        found = self.samples.get(CACHE_CONFIG)
        return dict(found[0].labels) if found else None


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """One engine's effective cache configuration; None where the page or version does not say.

    ``kv_cache_size_tokens`` and ``max_concurrency`` come with vLLM 0.27.
    """

    engine: str | None
    block_size_tokens: int | None
    num_gpu_blocks: int | None
    kv_cache_size_tokens: int | None
    max_concurrency: float | None
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization_ratio: float | None
    enable_prefix_caching: bool | None
    mamba_block_size_tokens: int | None
    labels: dict[str, str]


def parse(text: str) -> Page:
    """Return the samples of ``text``; a garbled line is kept in ``malformed``, not guessed."""
    page = Page()
    for number, line in enumerate(text.split("\n"), 1):
        line = line.rstrip("\r")
        if not line.strip():
            continue
        if line.startswith("#"):
            parts = line.split(None, 3)
            if len(parts) == 4 and parts[1] == "TYPE":
                page.types[parts[2]] = parts[3].strip()
            continue
        sample = _sample(line)
        if sample is None:
            page.malformed.append((number, line[:300]))
        else:
            page.samples.setdefault(sample.name, []).append(sample)
    return page


def families(page: Page) -> dict[str, float | None]:
    """Return the sampled families under the registry's names, old metric names included.

    Counts are summed over engines and label values; a usage is the fullest engine's. A family that
    the page does not hold, or holds only as NaN, is None.
    """
    return {name: _combined(name, page, aliases) for name, (aliases, _) in SERVER_FAMILIES.items()}


def cache_configs(page: Page) -> list[CacheConfig]:
    """Return the cache configuration of every engine on the page."""
    return [_cache_config(sample.labels) for sample in page.samples.get(CACHE_CONFIG, [])]


def cache_config(labels: dict[str, str]) -> CacheConfig:
    """Return the cache configuration that the labels of vllm:cache_config_info state."""
    return _cache_config(labels)


def _cache_config(labels: dict[str, str]) -> CacheConfig:
    return CacheConfig(
        engine=labels.get("engine"),
        block_size_tokens=_whole(labels.get("block_size")),
        num_gpu_blocks=_whole(labels.get("num_gpu_blocks")),
        kv_cache_size_tokens=_whole(labels.get("kv_cache_size_tokens")),
        max_concurrency=_number(labels.get("kv_cache_max_concurrency")),
        kv_cache_memory_bytes=_whole(labels.get("kv_cache_memory_bytes")),
        gpu_memory_utilization_ratio=_number(labels.get("gpu_memory_utilization")),
        enable_prefix_caching=_flag(labels.get("enable_prefix_caching")),
        mamba_block_size_tokens=_whole(labels.get("mamba_block_size")),
        labels=dict(labels),
    )


def _sample(line: str) -> Sample | None:
    found = _LINE.match(line)
    if found is None:
        return None
    labels = _labels(found.group(2) or "")
    value = _float(found.group(3))
    if labels is None or value is None:
        return None
    return Sample(found.group(1), labels, value)


def _labels(text: str) -> dict[str, str] | None:
    labels: dict[str, str] = {}
    position = 0
    while position < len(text):
        found = _LABEL.match(text, position)
        if found is None:
            return None if text[position:].strip() else labels
        labels[found.group(1)] = re.sub(
            r"\\.", lambda escape: _ESCAPES.get(escape.group(0), escape.group(0)), found.group(2)
        )
        position = found.end()
    return labels


def _float(text: str) -> float | None:
    try:
        return float(text.replace("_", "x"))  # Python reads 1_0, Prometheus does not
    except ValueError:
        return None


def _combined(name: str, page: Page, aliases: tuple[str, ...]) -> float | None:
    for alias in aliases:
        values = [s.value for s in page.samples.get(alias, []) if math.isfinite(s.value)]
        if values:
            return max(values) if name in _NOT_ADDED else math.fsum(values)
    return None


def _number(text: str | None) -> float | None:
    value = None if text is None else _float(text)
    return value if value is not None and math.isfinite(value) else None


def _whole(text: str | None) -> int | None:
    value = _number(text)
    return int(value) if value is not None and value == int(value) else None


def _flag(text: str | None) -> bool | None:
    return {"True": True, "False": False, "true": True, "false": False}.get(text or "")
