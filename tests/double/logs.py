"""Start-up log lines as vLLM 0.11.2, 0.27 and 0.32 print them on one engine.

The wording is from the engine's sources and from recorded logs (facts/vllm-evalscope.md); only
the numbers are computed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Boot:
    """The numbers a start-up log tells."""

    version: str
    model: str
    port: int
    max_model_len: int
    arguments: dict[str, object]
    num_blocks: int
    block_size: int
    state_blocks: int
    kv_cache_bytes: int
    total_bytes: int
    device: str = "cpu"

    @property
    def concurrency(self) -> float:
        """Requests of max_model_len that fit, as vLLM computes it."""
        need = -(-self.max_model_len // self.block_size) + self.state_blocks
        return self.num_blocks / need

    @property
    def tokens(self) -> int:
        """Tokens of the pool as vLLM logs it."""
        return int(self.concurrency * self.max_model_len)


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version."""
    return tuple(int(part) for part in version.split(".")[:2])


def _now() -> str:
    """Return the time as vLLM stamps a line."""
    return time.strftime("%m-%d %H:%M:%S")


def api(pid: int, text: str) -> str:
    """Return a line of the API process."""
    return f"(APIServer pid={pid}) INFO {_now()} {text}"


def engine(pid: int, text: str, *, level: str = "INFO", version: str = "0.27.0") -> str:
    """Return a line of the engine process; 0.11 numbers its data-parallel rank."""
    name = "EngineCore_DP0" if release(version) < (0, 13) else "EngineCore"
    return f"({name} pid={pid}) {level} {_now()} {text}"


def banner(boot: Boot, pid: int) -> list[str]:
    """Return what comes before the engine starts."""
    if release(boot.version) < (0, 13):
        return [
            api(pid, f"[api_server.py:1839] vLLM API server version {boot.version}"),
            api(pid, f"[utils.py:233] non-default args: {boot.arguments}"),
        ]
    return [
        api(pid, f"[api_utils.py:345]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version {boot.version}"),
        api(pid, f"[api_utils.py:345]   █▄█▀ █     █     █     █  model   {boot.model}"),
        api(pid, f"[api_utils.py:273] non-default args: {boot.arguments}"),
    ]


#: The engine's steps while it starts, in order; it can fail in each (``fail`` of the double).
STEPS = ("start", "load", "profile", "kv_cache", "graph", "warmup")


def engine_start(boot: Boot, pid: int, until: str = "warmup") -> list[str]:
    """Return the engine's lines up to and with those that say that it has reached step ``until``.

    With the last step that is everything but the line that it is done.
    """
    steps = {
        "start": _begun(boot),
        "load": _load(boot),
        "profile": _loaded(boot),
        "kv_cache": _sized(boot),
        "graph": _capture(boot),
        "warmup": _captured(boot),
    }
    lines = [line for step in STEPS[: STEPS.index(until) + 1] for line in steps[step]]
    return [_engine_line(boot, pid, line) for line in lines]


def engine_done(boot: Boot, pid: int) -> list[str]:
    """Return the line with which the engine is ready."""
    text = "[core.py:355] init engine (profile, create kv cache, warmup model) took 0.51 s"
    return [_engine_line(boot, pid, text)]


def _engine_line(boot: Boot, pid: int, line: str) -> str:
    """Return a line of the engine; a progress bar has no prefix."""
    return engine(pid, line, version=boot.version) if line.startswith("[") else line


def _begun(boot: Boot) -> list[str]:
    return [
        f"[core.py:121] Initializing a V1 LLM engine (v{boot.version}) with config: "
        f"model='{boot.model}'"
    ]


def _load(boot: Boot) -> list[str]:
    place = "cpu_model_runner.py:131" if boot.device == "cpu" else "gpu_model_runner.py:5306"
    lines = [
        f"[{place}] Starting to load model {boot.model}...",
        "Loading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?, ?it/s]",
    ]
    if boot.state_blocks:
        lines[:0] = [
            f"[interface.py:911] Setting attention block size to {boot.block_size} tokens to "
            "ensure that attention page size is >= mamba page size.",
            "[interface.py:935] Padding mamba page size by 22.14% to ensure that mamba page size "
            "and attention page size are exactly equal.",
        ]
    return lines


def _loaded(boot: Boot) -> list[str]:
    lines = [
        "Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00, 51.92it/s]",
        "[default_loader.py:430] Loading weights took 0.02 seconds",
    ]
    if boot.device == "cuda":
        lines.append(
            "[gpu_model_runner.py:5405] Model loading took 0.01 GiB memory and 0.31 seconds"
        )
    return lines


def _sized(boot: Boot) -> list[str]:
    size, total = round(boot.kv_cache_bytes / GIB, 2), round(boot.total_bytes / GIB, 2)
    if boot.device == "cuda":
        first = f"[gpu_worker.py:563] Available KV cache memory: {size} GiB"
    else:
        first = f"[cpu_worker.py:248] Explicitly set ({size}/{total}) GiB for KV cache on node 0."
    return [first, *_pool(boot)]


def _capture(boot: Boot) -> list[str]:
    if boot.device == "cpu":
        return []
    return ["Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):   0%|          | 0/51"]


def _captured(boot: Boot) -> list[str]:
    if boot.device == "cpu":
        return []
    return ["[gpu_model_runner.py:6913] Graph capturing finished in 3 secs, took 0.52 GiB"]


def pool(boot: Boot, pid: int) -> list[str]:
    """Return the lines that tell the pool's size, in one or two lines by version."""
    return [_engine_line(boot, pid, line) for line in _pool(boot)]


def _pool(boot: Boot) -> list[str]:
    size = f"KV cache size: {boot.tokens:,} tokens"
    fits = (
        f"Maximum concurrency for {boot.max_model_len:,} tokens per request: "
        f"{boot.concurrency:.2f}x"
    )
    if release(boot.version) >= (0, 28):
        name = "GPU" if boot.device == "cuda" else "CPU"
        return [f"[kv_cache_utils.py:2327] {name} {size}, {fits}"]
    return [f"[kv_cache_utils.py:2235] GPU {size}", f"[kv_cache_utils.py:2236] {fits}"]


def ready(boot: Boot, pid: int) -> list[str]:
    """Return the API process's last lines before it serves."""
    return [
        api(pid, f"[api_server.py:682] Starting vLLM server on http://127.0.0.1:{boot.port}"),
        f"(APIServer pid={pid}) INFO:     Started server process [{pid}]",
        f"(APIServer pid={pid}) INFO:     Application startup complete.",
    ]


def refused_kv(boot: Boot, pid: int) -> list[str]:
    """Return the refusal of a KV pool larger than the memory (CPU backend)."""
    free, total = boot.total_bytes / GIB * 0.87, boot.total_bytes / GIB
    text = (
        f"ValueError: Available memory on node 0 ({round(free, 2)}/{round(total, 2)} GiB) on kv "
        f"cache allocation is less than requested memory for kv ({boot.kv_cache_bytes / GIB} GiB)."
        " Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory used by "
        "other processes."
    )
    return _failed(boot, pid, text)


def refused_length(boot: Boot, pid: int) -> list[str]:
    """Return the refusal of a context limit that one request cannot reach."""
    needed = boot.max_model_len * boot.kv_cache_bytes / max(1, boot.num_blocks * boot.block_size)
    estimate = boot.num_blocks * boot.block_size
    text = (
        "ValueError: To serve at least one request with the model's max seq len "
        f"({boot.max_model_len}), ({needed / GIB:.2f} GiB KV cache is needed, which is larger than "
        f"the available KV cache memory ({boot.kv_cache_bytes / GIB:.2f} GiB). Based on the "
        f"available memory, the estimated maximum model length is {estimate}. Try increasing "
        "`gpu_memory_utilization` (which also controls CPU memory on the CPU backend) or "
        "decreasing `max_model_len` when initializing the engine. See "
        "https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."
    )
    return _failed(boot, pid, text)


def _failed(boot: Boot, pid: int, text: str) -> list[str]:
    return [
        engine(pid, "[core.py:1197] EngineCore failed to start.", level="ERROR"),
        engine(pid, f"[core.py:1197] {text}", level="ERROR", version=boot.version),
        *start_failed(pid),
    ]


def start_failed(pid: int) -> list[str]:
    """Return what the API process prints when its engine did not come up."""
    return [
        f"(APIServer pid={pid}) RuntimeError: Engine core initialization failed. See root cause "
        "above. Failed core proc(s): {'EngineCore': 1}"
    ]


def engine_died(boot: Boot, pid: int) -> list[str]:
    """Return what the API process prints when its engine died while serving."""
    del boot
    return [
        f"(APIServer pid={pid}) ERROR {_now()} [async_llm.py:704] AsyncLLM output_handler failed.",
        f"(APIServer pid={pid}) ERROR {_now()} [async_llm.py:704] "
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack "
        "trace (above) for the root cause.",
    ]
