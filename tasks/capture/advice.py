"""What to change after a failure, with the numbers of its message and, given a config, the model's.

"Try increasing gpu_memory_utilization" leaves the arithmetic to the reader. Here it is done: how
much is missing, which setting closes the gap, and what the engine would then log.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tasks.capture.failures import Failure
from tasks.capture.startup_log import StartupLog
from tasks.plan import capacity
from tasks.plan.capacity import Capacity, ServingSettings
from tasks.plan.model import ModelDescription
from warehouse.errors import BadInput

GIB = 2**30
Numbers = Mapping[str, int | float]


@dataclass(frozen=True, slots=True)
class Expected:
    """What the capacity model says about the server of a log.

    ``capacity`` is for the memory that the log or its failure states; None where it states none.
    ``largest_max_model_len`` is the longest context that fits there, None where not needed or
    unknown.
    """

    settings: ServingSettings
    layout: capacity.Layout
    capacity: Capacity | None
    largest_max_model_len: int | None
    needed_bytes: int
    #: Whether the pool that the log states is among the candidates; None where one of them is
    #: missing. No agreement means other settings, another model, or another version's rules.
    agrees: bool | None


def expect(log: StartupLog, description: ModelDescription) -> Expected:
    """Return what the capacity model says for ``description`` served as ``log`` says.

    Raises:
        BadInput: the log names no version the model knows, or vLLM cannot serve the model so.
    """
    settings = settings_of(log)
    layout = capacity.layout(description, settings)
    found = _within(layout, log)
    largest = None
    if found is not None and found.refusal is not None:
        largest = found.refusal.estimated_max_model_len
    return Expected(
        settings=settings,
        layout=layout,
        capacity=found,
        largest_max_model_len=largest,
        needed_bytes=layout.blocks_per_request * layout.bytes_per_block,
        agrees=_agrees(log, found),
    )


def _agrees(log: StartupLog, found: Capacity | None) -> bool | None:
    logged = log.values.get("kv_cache_size_tokens")
    if logged is None or found is None:
        return None
    return any(one.kv_cache_size_tokens == logged.value for one in found.candidates)


def settings_of(log: StartupLog) -> ServingSettings:
    """Return the serving settings a log states; what it does not say is vLLM's default.

    Raises:
        BadInput: the log does not name the version of vLLM.
    """
    if log.vllm_version is None:
        raise BadInput(
            "the log does not name its vLLM version, and rules differ between versions; "
            "give a log that holds its first lines"
        )
    said = log.arguments or {}

    def number(*names: str) -> int | None:
        for name in names:
            value = said.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return None

    def word(name: str, default: str) -> str:
        value = said.get(name)
        return value.removeprefix("torch.") if isinstance(value, str) else default

    length = log.values.get("max_model_len_tokens")
    caching = said.get("enable_prefix_caching")
    return ServingSettings(
        vllm_version=log.vllm_version,
        device="cpu" if _on_cpu(log) else "cuda",
        max_model_len=int(length.value) if length else None,
        max_num_batched_tokens=number("max_num_batched_tokens"),
        max_num_seqs=number("max_num_seqs"),
        dtype=word("dtype", "auto"),
        kv_cache_dtype=word("kv_cache_dtype", "auto"),
        prefix_caching=caching if isinstance(caching, bool) else None,
        tensor_parallel=number("tensor_parallel_size") or 1,
        pipeline_parallel=number("pipeline_parallel_size") or 1,
        decode_context_parallel=number("decode_context_parallel_size") or 1,
        block_size=number("block_size"),
        enforce_eager=said.get("enforce_eager") is True,
    )


def _on_cpu(log: StartupLog) -> bool:
    said = log.arguments or {}
    texts = [value.text for value in log.every] + [log.failure.text if log.failure else ""]
    return said.get("device_config") == "cpu" or any("on node " in text for text in texts)


def _within(layout: capacity.Layout, log: StartupLog) -> Capacity | None:
    """Return the capacity of the pool that the log or its failure states, None where neither does.

    A size that was asked for is exact; a printed one allows every block count its rounding allows.
    """
    numbers = log.failure.numbers if log.failure else {}
    asked = log.values.get("requested_kv_cache_bytes")
    if asked is not None and asked.low == asked.high:
        return capacity.within(layout, available_bytes=int(asked.value))
    printed: int | float | None = None
    if "available_kv_bytes" in numbers:
        printed = numbers["available_kv_bytes"]
    elif "available_kv_cache_bytes" in log.values:
        printed = log.values["available_kv_cache_bytes"].value
    elif asked is not None:
        printed = asked.value
    if printed is None:
        return None
    return capacity.within(layout, available_gib=f"{printed / GIB:.2f}")


def advise(log: StartupLog, expected: Expected | None = None) -> list[str]:
    """Return what to change, most effective first; empty when there is nothing to change."""
    failure = log.failure
    if failure is None:
        return []
    rule = _RULES.get(failure.type)
    if rule is not None:
        return rule(failure, log, expected)
    fixed = _FIXED.get(failure.type)
    return [fixed] if fixed else [_NO_ADVICE]


_NO_ADVICE = (
    "No rule for this failure: read the line it names and the lines before it; set "
    "VLLM_LOGGING_LEVEL=DEBUG for more."
)

#: Advice that needs no arithmetic.
_FIXED: dict[str, str] = {
    "unknown": _NO_ADVICE,
    "memory_profiling_disturbed": "Another process released memory of the same GPU while vLLM "
    "measured it: start servers one after the other, or give each GPU to one process.",
    "nccl_cuda_oom": "NCCL found no device memory: lower --gpu-memory-utilization and look for an "
    "earlier out-of-memory error.",
    "killed_by_oom_killer": "The kernel ended the process for host memory: give the container more "
    "memory, or lower --swap-space, --kv-offloading-size and loading workers.",
    "killed_by_signal": "The process was killed from outside (137 and -9 are SIGKILL, mostly the "
    "kernel for host memory): look at the container's memory limit and at dmesg.",
    "host_out_of_memory": "Host memory ran out: give the container more memory, or load with fewer "
    "workers.",
    "shm_too_small": "Shared memory ran out: start the container with --ipc=host or a larger "
    "--shm-size; in Kubernetes mount an emptyDir of medium Memory at /dev/shm.",
    "disk_full": "The disk is full: free space where the model and VLLM_CACHE_ROOT live, or point "
    "HF_HOME and VLLM_CACHE_ROOT elsewhere.",
    "bad_flag": "This vLLM does not know the argument, or its value is not allowed: see "
    "`vllm serve --help=all` of the version that runs.",
    "pydantic_validation_error": "A setting is refused: the line names it.",
    "hybrid_model_refusal": "The setting does not go with a hybrid model: leave mamba and prefix "
    "caching flags at their defaults first.",
    "architecture_unsupported": "This vLLM does not serve the model's architecture: use a newer "
    "version, or the Transformers backend (--model-impl transformers).",
    "attention_backend_unsupported": "No attention backend serves this model on this device: leave "
    "--attention-backend unset, or use another dtype or KV cache dtype.",
    "quantization_unsupported": "The quantization does not go with this model or vLLM version.",
    "custom_code_not_trusted": "Read the model's code, then pass --trust-remote-code.",
    "mig_uuid_not_supported": "This vLLM wants indices in CUDA_VISIBLE_DEVICES: use 0, 1, ... "
    "instead of MIG UUIDs, or a newer version.",
    "gpu_uuid_not_supported": "This vLLM wants indices in CUDA_VISIBLE_DEVICES: use 0, 1, ... "
    "instead of GPU UUIDs, or a newer version.",
    "gated_model_no_access": "Accept the model's terms on its page and pass a token of that "
    "account as HF_TOKEN.",
    "model_not_found": "The path or repository does not exist or holds no config.json: check the "
    "spelling and the mount.",
    "hub_unreachable": "The model hub cannot be reached: download the model first and serve it "
    "from its folder, with HF_HUB_OFFLINE=1.",
    "weights_corrupt": "A weight file is broken (often a Git LFS pointer or a cut download): "
    "download it again and compare its sha256.",
    "vocabulary_not_loaded": "The harmony vocabulary is downloaded at start: allow it once, or "
    "place the .tiktoken files and set TIKTOKEN_ENCODINGS_BASE.",
    "no_kernel_image": "This build holds no kernels for the GPU: use a vLLM and torch built for "
    "its compute capability.",
    "kernel_image_invalid": "The kernels do not fit driver or GPU: match driver, CUDA and the "
    "vLLM build.",
    "driver_too_old": "The NVIDIA driver is older than the CUDA of this build: update the driver "
    "or use a build for an older CUDA.",
    "no_accelerator": "No GPU is visible: check --gpus or the device plugin, CUDA_VISIBLE_DEVICES "
    "and the driver.",
    "missing_cuda_library": "A CUDA library is missing: install the build that matches this CUDA, "
    "or set LD_LIBRARY_PATH.",
    "missing_module": "A Python module is missing in the engine's environment, or is of another "
    "version than the engine expects: install what its lock names.",
    "binary_mismatch": "Extension and torch do not match: install vLLM, torch and torchvision from "
    "one set of pins.",
    "missing_compiler": "Kernels are compiled at start: install the compiler the line names, or a "
    "build with precompiled kernels.",
    "python_version_incompatible": "The code needs another Python: use the version vLLM's release "
    "names.",
    "cuda_illegal_memory_access": "A kernel failed: try --enforce-eager and another attention "
    "backend; CUDA_LAUNCH_BLOCKING=1 names the kernel.",
    "custom_allreduce_error": "Try --disable-custom-all-reduce.",
    "attention_kernel_failed": "Try another --attention-backend.",
    "cuda_error": "CUDA_LAUNCH_BLOCKING=1 names the kernel that failed.",
    "nccl_error": "NCCL_DEBUG=INFO says more; often /dev/shm is too small or an interface is "
    "chosen wrongly (NCCL_SOCKET_IFNAME).",
    "port_in_use": "The port is taken: use another --port or end the process that listens there.",
    "engine_start_timeout": "Loading took longer than allowed: raise VLLM_ENGINE_READY_TIMEOUT_S "
    "or put the weights on faster storage.",
    "rendezvous_timeout": "Ranks did not find each other: check the address and port the line "
    "names, proxies (NO_PROXY), firewalls and VLLM_HOST_IP.",
    "cuda_after_fork": "Set VLLM_WORKER_MULTIPROC_METHOD=spawn and touch no CUDA before the engine "
    "starts.",
    "rpc_timeout": "A worker did not answer in time: look for its own error earlier in the log.",
    "terminated_by_signal": "It was ended from outside while starting: raise the start deadline.",
    "engine_dead": "The engine died while serving: the line named here is the first error before "
    "it.",
    "process_died": "A worker process died: look at dmesg and the container's memory limit.",
    "cpp_terminate": "A C++ library ended the process: look at the lines before it and at dmesg.",
    "segmentation_fault": "A native library crashed: match vLLM, torch and driver versions.",
    "triton_out_of_shared_memory": "A Triton kernel needs more shared memory than the GPU has: use "
    "another attention backend or a smaller head or block size.",
}


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def _floor(share: float) -> float:
    """Return a utilization rounded down to two decimals."""
    return math.floor(share * 100 + 1e-9) / 100


def _free_memory(failure: Failure, log: StartupLog, expected: Expected | None) -> list[str]:
    numbers = failure.numbers
    free, total = numbers.get("free_bytes"), numbers.get("total_bytes")
    wanted = numbers.get("desired_bytes")
    lines = []
    if free is not None and total:
        lines.append(
            f"Lower --gpu-memory-utilization to at most {_floor(min(free / total, 1.0)):.2f}: "
            f"{_gib(free)} of {_gib(total)} are free."
        )
    if free is not None and wanted is not None and wanted > free:
        lines.append(f"Or free {_gib(wanted - free)} that other processes hold.")
    if _on_cpu(log):
        lines.append("Or set the pool itself: --kv-cache-memory-bytes skips this check.")
    return lines + _pool(expected)


def _explicit_pool(failure: Failure, log: StartupLog, expected: Expected | None) -> list[str]:
    numbers = failure.numbers
    available = numbers.get("available_memory_bytes")
    asked = numbers.get("requested_kv_cache_bytes")
    lines = []
    if available is not None:
        lines.append(
            f"Ask for at most {_gib(available)}: --kv-cache-memory-bytes {int(available)}"
            + (f" (asked for {_gib(asked)})." if asked is not None else ".")
        )
    del log
    return lines + _pool(expected)


def _context(failure: Failure, log: StartupLog, expected: Expected | None) -> list[str]:
    numbers = failure.numbers
    estimate = numbers.get("estimated_max_model_len")
    if expected is not None and expected.largest_max_model_len is not None:
        estimate = expected.largest_max_model_len
    lines = []
    if estimate:
        lines.append(f"Lower --max-model-len to at most {int(estimate)}.")
    elif "kv_cache_tokens" in numbers:
        lines.append(f"Lower --max-model-len to at most {int(numbers['kv_cache_tokens'])}.")
    needed, available = numbers.get("needed_kv_bytes"), numbers.get("available_kv_bytes")
    if needed is not None and available is not None:
        missing = needed - available
        lines.append(f"Or give the KV cache {_gib(missing)} more{_by_utilization(missing, log)}.")
    return lines + _pool(expected)


def _by_utilization(missing: float, log: StartupLog) -> str:
    total = log.values.get("total_memory_bytes")
    held = log.values.get("gpu_memory_utilization_ratio")
    if total is None or held is None or _on_cpu(log):
        return ""
    share = math.ceil((held.value + missing / total.value) * 100) / 100
    if share > 0.98:
        return ", more than this GPU has"
    return f": --gpu-memory-utilization {share:.2f}"


def _no_blocks(failure: Failure, log: StartupLog, expected: Expected | None) -> list[str]:
    del failure
    loaded = log.values.get("model_loading_bytes")
    taken = f" (the model took {_gib(loaded.value)})" if loaded else ""
    return [
        f"Weights and activations fill what --gpu-memory-utilization allows{taken}: raise it, use "
        "more GPUs (--tensor-parallel-size), a quantized model, or a smaller "
        "--max-num-batched-tokens.",
        *_pool(expected),
    ]


def _mamba(failure: Failure, log: StartupLog, expected: Expected | None) -> list[str]:
    del log
    blocks = failure.numbers.get("mamba_cache_blocks")
    most = f"--max-num-seqs {int(blocks)}" if blocks else "--max-num-seqs"
    lines = [
        f"Set {most} or lower, or give the KV cache more memory; --enforce-eager skips the check."
    ]
    if expected is not None:
        size = expected.layout.bytes_per_block
        asked = failure.numbers.get("max_num_seqs")
        if asked:
            lines.append(f"{int(asked)} sequences need a pool of {_gib(asked * size)}.")
    return lines


def _oom(failure: Failure, log: StartupLog, expected: Expected | None) -> list[str]:
    numbers = failure.numbers
    tried, free = numbers.get("tried_bytes"), numbers.get("free_bytes")
    lines = [_OOM[failure.type]]
    if tried is not None and free is not None:
        if tried < free:
            lines.append(
                f"{_gib(tried)} did not fit although {_gib(free)} were free: memory is "
                "fragmented; try PYTORCH_ALLOC_CONF=expandable_segments:True."
            )
        else:
            lines.append(f"{_gib(tried - free)} were missing (tried {_gib(tried)}).")
    total = numbers.get("total_bytes")
    held = log.values.get("gpu_memory_utilization_ratio")
    if failure.type in _LOWER and tried is not None and total and held is not None:
        lower = _floor(held.value - max(tried, 0.01 * total) / total)
        lines.append(f"For example --gpu-memory-utilization {max(lower, 0.01):.2f}.")
    return lines + _pool(expected)


_LOWER = frozenset(("oom_kv_cache_allocation", "oom_graph_capture", "oom_serving",
                    "oom_sampler_warmup"))  # fmt: skip
_OOM: dict[str, str] = {
    "oom": "Device memory ran out; the text does not say in which step. Lower "
    "--gpu-memory-utilization if the model had been loaded, else use more GPUs.",
    "oom_model_load": "The weights do not fit: use more GPUs (--tensor-parallel-size), a quantized "
    "model or --cpu-offload-gb, and see that nothing else holds the GPU.",
    "oom_profile": "The profile run's activations do not fit beside the weights: lower "
    "--max-num-batched-tokens, --max-num-seqs or the multimodal limits.",
    "oom_kv_cache_allocation": "The pool is larger than what is left: lower "
    "--gpu-memory-utilization or --kv-cache-memory-bytes.",
    "oom_graph_capture": "CUDA graphs do not fit beside the pool: lower --gpu-memory-utilization, "
    "capture fewer sizes (--cudagraph-capture-sizes) or use --enforce-eager.",
    "oom_sampler_warmup": "The sampler's logits of all sequences do not fit: lower --max-num-seqs "
    "or --gpu-memory-utilization.",
    "oom_serving": "Serving needed more than was left beside the pool: lower "
    "--gpu-memory-utilization, --max-num-batched-tokens or --max-num-seqs.",
}


def _divisible(failure: Failure, log: StartupLog, expected: Expected | None) -> list[str]:
    del log, expected
    heads = failure.numbers.get("attention_heads")
    if not heads:
        return ["Use a --tensor-parallel-size that divides the model's sizes."]
    fits = [str(size) for size in range(1, 17) if int(heads) % size == 0]
    return [f"Use a --tensor-parallel-size that divides {int(heads)} heads: {', '.join(fits)}."]


def _model_length(failure: Failure, log: StartupLog, expected: Expected | None) -> list[str]:
    del log, expected
    most = failure.numbers.get("derived_max_model_len")
    return [f"Lower --max-model-len to at most {int(most)}." if most else "Lower --max-model-len."]


def _capability(failure: Failure, log: StartupLog, expected: Expected | None) -> list[str]:
    del log, expected
    wanted = failure.numbers.get("required_compute_capability")
    needs = f"compute capability {wanted}" if wanted else "a newer GPU"
    if failure.type.startswith("dtype"):
        return [f"Use --dtype half: bfloat16 needs {needs}."]
    return [f"Use a GPU of {needs}, or a model with another quantization."]


def _gpus(failure: Failure, log: StartupLog, expected: Expected | None) -> list[str]:
    del log, expected
    rank = failure.numbers.get("local_rank")
    least = f" ({int(rank) + 1} or more are needed)" if rank is not None else ""
    return [
        f"More GPUs are asked for than are visible{least}: lower --tensor-parallel-size, "
        "--pipeline-parallel-size or --data-parallel-size."
    ]


def _pool(expected: Expected | None) -> list[str]:
    """Return what the capacity model adds: one request's need and what the pool would hold."""
    if expected is None:
        return []
    lines = [
        f"One request of {expected.layout.terms.length:,} tokens needs "
        f"{expected.layout.blocks_per_request:,} blocks of {expected.layout.bytes_per_block:,} "
        f"bytes: {_gib(expected.needed_bytes)}."
    ]
    found = expected.capacity
    if found is not None and found.refusal is None and found.candidates:
        best = found.candidates[-1]
        lines.append(
            f"The pool holds {best.num_gpu_blocks:,} blocks: {best.kv_cache_size_tokens:,} tokens, "
            f"{best.max_concurrency:.2f} requests of full length."
        )
    return lines


_Rule = Callable[[Failure, StartupLog, "Expected | None"], list[str]]
_RULES: dict[str, _Rule] = {
    "free_memory_below_utilization": _free_memory,
    "requested_kv_cache_exceeds_memory": _explicit_pool,
    "kv_cache_smaller_than_one_request": _context,
    "max_seq_len_exceeds_kv_cache": _context,
    "no_memory_for_cache_blocks": _no_blocks,
    "mamba_blocks_below_max_num_seqs": _mamba,
    "tp_not_divisible": _divisible,
    "max_model_len_above_model": _model_length,
    "dtype_unsupported_compute_capability": _capability,
    "fp8_unsupported_compute_capability": _capability,
    "quantization_unsupported_compute_capability": _capability,
    "not_enough_gpus": _gpus,
    **dict.fromkeys(_OOM, _oom),
}
