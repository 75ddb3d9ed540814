"""A cell's settings as vLLM's command line and environment: pure, tested against a golden.

Everything the server gets is decided here; what the surroundings have in their environment
(secrets, Python's and vLLM's own variables) stays outside unless it is on the list.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tasks.pod.inputs import ServerSettings

#: Fixed, so that no result depends on what a model is called or where it lies.
SERVED_NAME = "memsweep"

#: Field of :class:`ServerSettings` -> vLLM's flag, in the order of the command line. Booleans
#: become ``--x`` or ``--no-x``; ``None`` leaves the flag out. All pinned versions know them, but
#: for those of :data:`NEWER`.
FLAGS: dict[str, str] = {
    "max_model_len": "--max-model-len",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "dtype": "--dtype",
    "kv_cache_dtype": "--kv-cache-dtype",
    "kv_cache_memory_bytes": "--kv-cache-memory-bytes",
    "block_size": "--block-size",
    "tensor_parallel_size": "--tensor-parallel-size",
    "pipeline_parallel_size": "--pipeline-parallel-size",
    "seed": "--seed",
    "enable_prefix_caching": "--enable-prefix-caching",
    "enforce_eager": "--enforce-eager",
    "language_model_only": "--language-model-only",
}

#: Left out while false, which is vLLM's default: 0.11.2 does not know the flag. A cell that asks
#: such an engine for it ends with the engine's own refusal.
NEWER = frozenset({"language_model_only"})

#: What a child may inherit. No PYTHON*, no VLLM_*, no proxy, no token: none of them is in the cell.
INHERITED = (
    # The run's mark: by it whoever ends what a killed run left finds what left its session too.
    "MEMSWEEP_RUN_UUID",
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
)

#: One process less to import torch in, and no spinning threads beside a busy neighbour.
CPU_ONLY = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

OFFLINE = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


def engine_argv(settings: ServerSettings, *, engine: Path, model: Path, port: int) -> list[str]:
    """Return the whole command line of the server."""
    argv = [str(engine), "serve", str(model), "--served-model-name", SERVED_NAME]
    argv += ["--host", "127.0.0.1", "--port", str(port)]
    for name, flag in FLAGS.items():
        value = getattr(settings, name)
        if value is None or (name in NEWER and not value):
            continue
        if isinstance(value, bool):
            argv.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            argv += [flag, str(value)]
    return argv


def engine_variables(device: str, cache: Path) -> dict[str, str]:
    """Return the variables that this project sets for the server."""
    variables = {**OFFLINE, "VLLM_CACHE_ROOT": str(cache / "vllm")}
    return {**variables, **CPU_ONLY} if device == "cpu" else variables


def bench_variables(cache: Path) -> dict[str, str]:
    """Return the variables that this project sets for EvalScope."""
    return {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "MODELSCOPE_CACHE": str(cache / "modelscope"),
        "TOKENIZERS_PARALLELISM": "false",
        "NO_PROXY": "127.0.0.1,localhost",
    }


def child_environment(environ: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """Return a child's whole environment: the inherited few and what is set."""
    return {**{name: environ[name] for name in INHERITED if name in environ}, **variables}
