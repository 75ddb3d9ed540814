"""What follows by arithmetic from what a run measured: bounds of its load, cells nobody ran.

All of it is derived: it stands in tables of its own and never fills a gap in a measured column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tasks.plan import capacity
from tasks.plan.capacity import Capacity
from tasks.plan.cell import Cell
from tasks.plan.model import describe
from tasks.plan.prediction import serving
from warehouse.errors import BadInput

Row = dict[str, Any]

#: Context limits that are filled in: those people choose.
CONTEXT_LIMITS = tuple(2**power for power in range(10, 21))
FORMULA = "the pool's blocks as measured, blocks a request by the engine's arithmetic"


@dataclass(frozen=True, slots=True)
class BlockRule:
    """How many blocks a request holds, and what vLLM divides by to call it usage."""

    blocks_of: Callable[[int], int]
    usage_excludes_null_block: bool
    max_num_seqs: int


class Arithmetic:
    """The engine's block arithmetic for one run's model and settings."""

    def __init__(self, cell: Mapping[str, Any], prediction: Mapping[str, Any]) -> None:
        """Take ``cell.json`` and ``prediction.json``, which holds the model's config."""
        self._cell = Cell.parse(dict(cell))
        config = prediction.get("model_config")
        self._config: dict[str, object] | None = config if isinstance(config, dict) else None
        values = prediction.get("values")
        blocks = values.get("num_gpu_blocks") if isinstance(values, Mapping) else None
        self.predicted_blocks: int | None = int(blocks) if blocks is not None else None

    def capacity(self, blocks: int, *, max_model_len: int | None = None) -> Capacity | None:
        """Return what a pool of ``blocks`` blocks holds; ``None``: arithmetic does not know."""
        if self._config is None:
            return None
        settings = serving(
            self._cell.setting.server,
            version=self._cell.pins.engine_version,
            device=self._cell.pins.device,
        )
        if max_model_len is not None:
            settings = replace(settings, max_model_len=max_model_len)
        try:
            return capacity.predict(describe(self._config), settings, num_gpu_blocks=blocks)
        except BadInput:
            return None

    def block_rule(self, blocks: int) -> BlockRule | None:
        """Return the block rule of this run's model; ``None``: arithmetic does not know."""
        held = self.capacity(blocks)
        if held is None:
            return None
        terms = held.layout.terms
        return BlockRule(
            cache(lambda tokens: capacity.blocks_held(held, tokens)),
            terms.rules.usage_excludes_null_block,
            terms.sequences,
        )

    @property
    def longest_request_tokens(self) -> int:
        """Most tokens a request may have, prompt and answer."""
        return self._cell.setting.server.max_model_len

    def peak_bound(
        self, blocks: int, *, prompt_tokens: int, output_tokens: int, parallel: int
    ) -> float | None:
        """Return the highest KV usage that so many requests of these served lengths can reach.

        The last sampled token has no KV yet: a request stores prompt + output - 1 tokens. Usage
        divides by blocks - 1.
        """
        held = self.capacity(blocks)
        if held is None:
            return None
        load = capacity.load(
            held,
            blocks,
            requests=parallel,
            tokens_per_request=prompt_tokens + output_tokens - 1,
            prompt_tokens=prompt_tokens,
        )
        return load.peak_usage_ratio

    def other_limits(self, blocks: int) -> list[Row]:
        """Return what the same pool holds at other context limits, up to the model's own."""
        longest = self._config.get("max_position_embeddings") if self._config else None
        rows = []
        for limit in CONTEXT_LIMITS:
            if limit == self._cell.setting.server.max_model_len:
                continue
            if isinstance(longest, int) and limit > longest:
                break
            held = self.capacity(blocks, max_model_len=limit)
            if held is None or held.refusal is not None or held.nominal is None:
                continue
            rows.append(
                {
                    "max_model_len_tokens": limit,
                    "kv_cache_size_tokens": held.nominal.kv_cache_size_tokens,
                    "max_concurrency": held.nominal.max_concurrency,
                    "num_gpu_blocks": blocks,
                    "blocks_per_request": held.blocks_per_request,
                    "formula": FORMULA,
                }
            )
        return rows
