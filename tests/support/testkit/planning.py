"""Surroundings for plans in tests: a machine like the one the facts were measured on."""

from __future__ import annotations

from typing import Any

from flows.shipped import find_sweep
from tasks.launch import models
from tasks.plan.plan import Plan, Surroundings, make_plan
from tasks.plan.sweep import parse_sweep

MEMORY = 25_276_059_648
REVISION = "sha256:" + "0" * 64
LOCK = "0" * 64


def surroundings(**changes: Any) -> Surroundings:
    """Return surroundings with recognisably fake pins; ``changes`` replace fields."""
    facts: dict[str, Any] = {
        "target": "local",
        "device": "cpu",
        "slots": 1,
        "memory_total_bytes": MEMORY,
        "engine_version": "0.27.0",
        "engine_lock_sha256": LOCK,
        "image_digest": None,
        "bench_version": "1.9.1",
        "bench_lock_sha256": LOCK,
        "revision": lambda name: REVISION,
        "config": lambda name, revision: models.config(name),
    }
    return Surroundings(**(facts | changes))


def demo(**changes: Any) -> Plan:
    """Return the plan of the shipped demo."""
    where, text = find_sweep("demo")
    return make_plan(parse_sweep(text, where=where), surroundings(**changes))
