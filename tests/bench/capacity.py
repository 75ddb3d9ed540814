"""How many predictions a second one core makes from a parsed description.

    python -m tests.bench.capacity [SECONDS]

Each prediction starts from the description and the settings (nothing is kept between them) and
ends with candidates and the start-up check, for every recorded model.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from tasks.plan import capacity, model
from tasks.plan.capacity import ServingSettings

CONFIGS = Path(__file__).parents[1] / "data" / "model-configs"


@dataclass(frozen=True, slots=True)
class Rate:
    """Predictions of one model per second of CPU time."""

    model: str
    per_second: float


def rates(seconds: float) -> list[Rate]:
    """Measure every recorded model for ``seconds`` of CPU time each."""
    base = ServingSettings("0.27.0", max_model_len=8192, max_num_seqs=1, kv_cache_dtype="fp8")
    found = []
    for file in sorted(CONFIGS.glob("*.json")):
        description = model.describe(model.load(file))
        made, start = 0, time.process_time()
        while (spent := time.process_time() - start) < seconds:
            for step in range(100):
                settings = replace(base, max_num_batched_tokens=1024 + step)
                capacity.predict(description, settings, available_bytes=8_000_000_000 + step)
            made += 100
        found.append(Rate(file.stem, made / spent))
    return found


def main() -> None:
    """Print the rates, slowest first."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 0.5
    for rate in sorted(rates(seconds), key=lambda rate: rate.per_second):
        sys.stdout.write(f"{rate.per_second:10,.0f}/s  {rate.model}\n")


if __name__ == "__main__":
    main()
