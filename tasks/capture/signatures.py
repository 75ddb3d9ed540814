"""The known ways in which a vLLM server fails, one table: text, phase, outcome, and numbers.

A failure without a type is a line of prose that nobody can count. Each entry here has at least one
text that this project did not write; tests/data/failure-texts.jsonl says which, with its link or
the file and line of the engine's source.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from tasks.capture import units
from warehouse.registry import Outcome, Phase


class Weight(IntEnum):
    """How much a match tells about the cause; a heavier match beats an earlier lighter one."""

    CONSEQUENCE = 1  # says that something died, not why
    HINT = 2  # a likely cause, or a second failure that often follows the first
    CAUSE = 3


@dataclass(frozen=True, slots=True)
class Signature:
    """One failure: ``literal`` is in every text of it, ``pattern`` decides.

    ``phase`` is None where the same text comes in several phases: it is then the step the log had
    reached. Named groups of ``pattern`` and ``details`` are its numbers (see :func:`numbers`); a
    detail is searched for in the text and in its continuation lines. ``serving`` says that it can
    end a server that had started; others are requests' errors or noise by then.
    """

    type: str
    literal: str
    pattern: re.Pattern[str]
    outcome: Outcome
    phase: Phase | None
    details: tuple[re.Pattern[str], ...] = ()
    weight: Weight = Weight.CAUSE
    serving: bool = False


def _sign(
    type_: str,
    literal: str,
    pattern: str,
    outcome: Outcome,
    phase: Phase | None,
    *details: str,
    weight: Weight = Weight.CAUSE,
    serving: bool = False,
) -> Signature:
    return Signature(
        type=type_,
        literal=literal,
        pattern=re.compile(pattern),
        outcome=outcome,
        phase=phase,
        details=tuple(re.compile(detail) for detail in details),
        weight=weight,
        serving=serving,
    )


_N = r"-?\d+(?:\.\d+)?"
_SIZE = r"(?P<{0}>-?[\d.]*\d) (?P<{0}_unit>bytes|[KMGT]iB)"


def _size(name: str) -> str:
    return _SIZE.format(name)


_ = r"\s+"
#: torch's own message, in the wording before 2.2 and after.
OOM_DETAILS = (
    rf"Tried to allocate {_size('tried_bytes')}",
    r"Tried to allocate [\d.]+ \w+ \([GNX]PU (?P<gpu_index>\d+);",
    rf"GPU{_}(?P<gpu_index>\d+){_}has{_}a{_}total{_}capacity{_}of{_}{_size('total_bytes')}",
    rf"\([GNX]PU \d+; {_size('total_bytes')} total capacity",
    rf"{_size('allocated_bytes')} already allocated",
    rf"of{_}which{_}{_size('free_bytes')}{_}is{_}free",
    rf"already allocated; {_size('free_bytes')} free",
    rf"{_size('reserved_bytes')} reserved in total by PyTorch",
    rf"(?:this process|Process \d+) has {_size('process_in_use_bytes')} memory in use",
    rf"Of the allocated memory {_size('allocated_bytes')} is allocated by PyTorch",
    rf"with {_size('private_pools_bytes')} allocated in private pools",
    rf"and {_size('reserved_unallocated_bytes')} is reserved by PyTorch but unallocated",
)
#: Every out-of-memory error of an accelerator; its phase and final type come from the context.
OOM = "oom"

R, C = Outcome.REFUSED, Outcome.CRASHED

SIGNATURES: tuple[Signature, ...] = (
    # ------------------------------------------------------------ memory: the engine's own checks
    _sign(
        "free_memory_below_utilization",
        "on startup",
        r"Free memory on device(?: (?:cuda|xpu|hip)?:?(?P<gpu_index>\d+))? ?"
        rf"\((?P<free_bytes>{_N})/(?P<total_bytes>{_N}) ?GiB\) on startup is less than",
        R,
        Phase.START,
        rf"utilization{_}\((?P<gpu_memory_utilization>{_N}),{_}(?P<desired_bytes>{_N}){_}GiB\)",
    ),
    _sign(
        "free_memory_below_utilization",
        "Available memory on node",
        rf"Available memory on node (?P<node>\d+) \((?P<free_bytes>{_N})/"
        rf"(?P<total_bytes>{_N}) ?GiB\) on startup is less than desired CPU memory",
        R,
        Phase.START,
        rf"utilization{_}\((?P<gpu_memory_utilization>{_N}),{_}(?P<desired_bytes>{_N}){_}GiB\)",
    ),
    _sign(
        "requested_kv_cache_exceeds_memory",
        "on kv cache allocation",
        rf"Available memory on node (?P<node>\d+) \((?P<available_memory_bytes>{_N})/"
        rf"(?P<total_memory_bytes>{_N}) ?GiB\) on kv cache allocation is less than",
        R,
        Phase.KV_CACHE,
        rf"requested{_}memory{_}for{_}kv{_}\((?P<requested_kv_cache_bytes>{_N})"
        rf"(?:/(?P<desired_bytes>{_N}))?{_}GiB\)",
    ),
    _sign(
        "kv_cache_smaller_than_one_request",
        "To serve at least one request",
        r"To serve at least one request with",
        R,
        Phase.KV_CACHE,
        rf"max{_}seq{_}len{_}\((?P<max_model_len>\d+)\)",
        rf"\((?P<needed_kv_bytes>{_N}){_}(?:GiB|GB){_}KV{_}cache{_}is{_}needed",
        rf"available{_}KV{_}cache{_}memory{_}\((?P<available_kv_bytes>{_N}){_}(?:GiB|GB)\)",
        rf"estimated{_}maximum{_}model{_}length{_}is{_}(?P<estimated_max_model_len>\d+)",
    ),
    _sign(
        "max_seq_len_exceeds_kv_cache",
        "max seq len",
        rf"model's{_}max{_}seq{_}len{_}\((?P<max_model_len>\d+)\){_}is{_}larger{_}than{_}the"
        rf"{_}maximum",
        R,
        Phase.KV_CACHE,
        rf"stored{_}in{_}KV{_}cache{_}\((?P<kv_cache_tokens>\d+)\)",
    ),
    _sign(
        "no_memory_for_cache_blocks",
        "No available memory for the cache blocks",
        r"No available memory for the cache blocks",
        R,
        Phase.KV_CACHE,
    ),
    _sign(
        "mamba_blocks_below_max_num_seqs",
        "exceeds available Mamba cache",
        r"max_num_seqs \((?P<max_num_seqs>\d+)\) exceeds available Mamba cache",
        R,
        Phase.KV_CACHE,
        rf"Mamba{_}cache{_}blocks{_}\((?P<mamba_cache_blocks>\d+)\)",
    ),
    _sign(
        "memory_profiling_disturbed",
        "Error in memory profiling",
        rf"Error in memory profiling\. Initial free memory:? (?P<free_bytes>{_N})",
        R,
        Phase.PROFILE,
        rf"current{_}free{_}memory:?{_}(?P<free_after_bytes>{_N})",
    ),
    # ------------------------------------------------------------ memory: the allocator said no
    _sign(
        "oom_sampler_warmup",
        "warming up",
        r"out of memory occurred when warming up (?:sampler|pooler)",
        Outcome.OOM,
        Phase.GRAPH,
        rf"with (?P<dummy_requests>\d+){_}dummy{_}requests",
        *OOM_DETAILS,
    ),
    _sign(
        OOM,
        "out of memory",
        r"(?:OutOfMemoryError\b.*|\b(?:CUDA|HIP|XPU|hip|cuda|NPU) (?:error: )?)out of memory\b"
        r"(?! occurred when)",
        Outcome.OOM,
        None,
        *OOM_DETAILS,
        serving=True,
    ),
    _sign(
        OOM,
        "Tried to allocate",
        rf"Tried to allocate {_N} [KMGT]iB",
        Outcome.OOM,
        None,
        *OOM_DETAILS,
        serving=True,
    ),
    _sign(
        OOM,
        "OUT_OF",
        r"UR_RESULT_ERROR_OUT_OF_(?:DEVICE_MEMORY|HOST_MEMORY|RESOURCES)|CUDA_ERROR_OUT_OF_MEMORY"
        r"|CUBLAS_STATUS_ALLOC_FAILED|RESOURCE_EXHAUSTED",
        Outcome.OOM,
        None,
        serving=True,
    ),
    _sign(
        OOM,
        "CUBLAS_STATUS_ALLOC_FAILED",
        r"CUBLAS_STATUS_ALLOC_FAILED",
        Outcome.OOM,
        None,
        serving=True,
    ),
    _sign(
        "nccl_cuda_oom",
        "uda failure",
        r"Cuda failure (?:2 )?'out of memory'",
        Outcome.OOM,
        None,
        serving=True,
    ),
    _sign(
        "triton_out_of_shared_memory",
        "out of resource",
        r"out of resource: shared memory",
        R,
        None,
        r"Required: (?P<required_shared_memory_bytes>\d+)",
        r"Hardware limit: ?(?P<shared_memory_limit_bytes>\d+)",
        serving=True,
    ),
    # ------------------------------------------------------------ memory of the host, disk
    _sign(
        "killed_by_oom_killer",
        "illed",
        r"OOMKilled|killed by SIGKILL by OOM killer|Out of memory: Killed process"
        r"|Memory cgroup out of memory|oom-kill:|due to memory pressure \(OOM\)"
        r"|killed due to the node running low on memory",
        Outcome.OOM,
        None,
        serving=True,
    ),
    _sign(
        "killed_by_oom_killer",
        "oom-kill",
        r"oom-kill:",
        Outcome.OOM,
        None,
        serving=True,
    ),
    _sign(
        "killed_by_signal",
        "137",
        r"exit(?:ed)?(?: with)?[ _](?:code|status)[:=]? ?(?P<exit_code>137)\b",
        C,
        None,
        weight=Weight.HINT,
        serving=True,
    ),
    _sign(
        "killed_by_signal",
        "Killed",
        r"^Killed$|: line \d+: +\d+ Killed\b|^\[\d+\][+-]? +\d+ [Kk]illed\b",
        C,
        None,
        weight=Weight.HINT,
        serving=True,
    ),
    _sign(
        "killed_by_signal",
        "-9",
        r"(?:died|dead|exit)[^\n]{0,60}exit ?code: ?(?P<exit_code>-9)\b"
        r"|Failed core proc\(s\): \{[^}]*: (?P<exit_code_core>-9)\b",
        C,
        None,
        weight=Weight.HINT,
        serving=True,
    ),
    _sign(
        "host_out_of_memory",
        "llocate",
        r"DefaultCPUAllocator: (?:can't|not enough)|DefaultCPUAllocator:.*tried to allocate"
        r"|unable to mmap \d+ bytes.*Cannot allocate memory|\[Errno 12\] Cannot allocate memory",
        Outcome.OOM,
        None,
        r"tried to allocate (?P<tried_bytes>\d+) bytes",
        r"unable to mmap (?P<tried_bytes>\d+) bytes",
        serving=True,
    ),
    _sign(
        "shm_too_small",
        "shm",
        r"[Ee]rror while creating shared memory segment /dev/shm"
        r"|failed to extend /dev/shm\S* to \d+ bytes"
        r"|/dev/shm[^\n]{0,200}No space left on device"
        r"|insufficient shared memory \(shm\)",
        C,
        None,
        r"\(size (?P<shm_bytes>\d+)\)",
        r"to (?P<shm_bytes>\d+) bytes",
        serving=True,
    ),
    _sign(
        "shm_too_small",
        "osix_fallocate",
        r"posix_fallocate failed ?: No space left on device",
        C,
        None,
        serving=True,
    ),
    _sign(
        "shm_too_small",
        "us error",
        r"Fatal Python error: Bus error|\bBus error \(core dumped\)|^Bus error$",
        C,
        None,
        weight=Weight.HINT,
        serving=True,
    ),
    _sign(
        "disk_full",
        "o space left on device",
        r"No space left on device|no space left on device",
        C,
        None,
        weight=Weight.CAUSE,
        serving=True,
    ),
    _sign("disk_full", "Not enough free disk", r"Not enough free disk space to download", C, None),
    # ------------------------------------------------------------ settings that cannot work
    _sign("bad_flag", "error: ", r"\berror: unrecognized arguments: ", R, Phase.START),
    _sign(
        "bad_flag",
        "error: ",
        r"\berror: (?:argument [-\w/]+: |the following arguments are required|ambiguous option)",
        R,
        Phase.START,
    ),
    _sign(
        "max_model_len_above_model",
        "greater than the derived max_model_len",
        r"User-specified max_model_len \((?P<max_model_len>\d+)\) is greater than the derived",
        R,
        Phase.START,
        r"derived max_model_len \([\w.]+=(?P<derived_max_model_len>\d+)",
    ),
    _sign(
        "tp_not_divisible",
        "divisible by",
        rf"attention heads \((?P<attention_heads>\d+)\){_}must be divisible by"
        rf"{_}(?:tensor parallel size|.*tensor_parallel_size.*)"
        rf"{_}?\((?P<tensor_parallel_size>\d+)\)",
        R,
        Phase.START,
    ),
    _sign(
        "tp_not_divisible",
        " divisible by ",
        r"(?P<size>\d+) is not divisible by (?P<divisor>\d+)$",
        R,
        None,
    ),
    _sign(
        "dtype_unsupported_compute_capability",
        "only supported on GPUs with compute",
        r"(?i)b?float16 is only supported on GPUs with compute capability of at least "
        rf"(?P<required_compute_capability>{_N})",
        R,
        None,
        rf"GPU{_}has{_}compute{_}capability{_}(?P<compute_capability>\d+(?:\.\d+)?)",
    ),
    _sign(
        "fp8_unsupported_compute_capability",
        "is not supported for the current GPU",
        r"quantization method fp8\w* is not supported for the current GPU",
        R,
        None,
        r"Minimum capability: (?P<required_compute_capability_x10>\d+)",
        r"Current capability: (?P<compute_capability_x10>\d+)",
    ),
    _sign(
        "quantization_unsupported_compute_capability",
        "is not supported for the current GPU",
        r"quantization method \w+ is not supported for the current GPU",
        R,
        None,
        r"Minimum capability: (?P<required_compute_capability_x10>\d+)",
        r"Current capability: (?P<compute_capability_x10>\d+)",
    ),
    _sign(
        "quantization_unsupported",
        "uantization",
        r"Unknown quantization method|[Qq]uantization method \w+ is not supported(?! for the)"
        r"|\w+ quantization is currently not supported|Cannot find the config file for \w+"
        r"|\S+ is not supported for quantization method",
        R,
        None,
    ),
    _sign(
        "architecture_unsupported",
        "odel architecture",
        r"Model architectures? \[.*\] (?:are|is) not supported|Model architectures .*failed to be"
        r" inspected|has no vLLM implementation"
        r"|Model architecture \S+ (?:was supported in vLLM until|is not supported in-tree)",
        R,
        Phase.START,
    ),
    _sign(
        "architecture_unsupported",
        "ransformers does not recognize",
        r"Transformers does not recognize this architecture",
        R,
        Phase.START,
    ),
    _sign(
        "hybrid_model_refusal",
        "mamba",
        r"--mamba-block-size can only be set with|required for mamba cache mode"
        r"|mamba[_ -]cache[_ -]mode .*(?:not supported|requires)"
        r"|[Pp]refix caching is not supported (?:for|with) .*(?:mamba|hybrid)",
        R,
        Phase.START,
    ),
    _sign(
        "attention_backend_unsupported",
        "ttention backend",
        r"No valid attention backend found|[Aa]ttention backend \S+ is not supported"
        r"|Invalid attention backend",
        R,
        None,
    ),
    _sign(
        "attention_backend_unsupported",
        "Selected backend",
        r"Selected backend \S+ is not valid for",
        R,
        None,
    ),
    _sign(
        "attention_backend_unsupported",
        "ead size",
        r"[Hh]ead size \d+ is not supported by|Unexpected head dim size",
        R,
        None,
        serving=True,
    ),
    _sign(
        "custom_code_not_trusted",
        "trust_remote_code",
        r"(?:requires you to execute|contains custom code|need(?:s)? .{0,40}custom code)"
        r".*trust_remote_code",
        R,
        Phase.START,
    ),
    _sign(
        "not_enough_gpus",
        "out of",
        r"(?:DP adjusted )?local[_ ]rank (?P<local_rank>\d+) is out of bounds",
        R,
        Phase.START,
    ),
    _sign(
        "not_enough_gpus",
        "orld size",
        r"[Ww]orld size \((?P<world_size>\d+)\) is larger than the number of available GPUs"
        r" \((?P<gpus>\d+)\)",
        R,
        Phase.START,
    ),
    _sign(
        "not_enough_gpus",
        "nvalid device ordinal",
        r"CUDA error: invalid device ordinal",
        R,
        Phase.START,
    ),
    _sign(
        "not_enough_gpus",
        "GPU",
        r"The number of required \w*GPUs exceeds the total number of available"
        r"|tensor_parallel_size .* exceeds .*available GPUs",
        R,
        Phase.START,
    ),
    _sign(
        "mig_uuid_not_supported",
        "MIG-",
        r"invalid literal for int\(\) with base 10: 'MIG-",
        R,
        Phase.START,
    ),
    _sign(
        "gpu_uuid_not_supported",
        "invalid literal for int",
        r"invalid literal for int\(\) with base 10: 'GPU-",
        R,
        Phase.START,
    ),
    _sign(
        "pydantic_validation_error",
        "validation error",
        r"(?:ValidationError: )?\d+ validation errors? for (?!\w*Request\b)\w*(?:Config|Args)\b",
        R,
        Phase.START,
        weight=Weight.HINT,
    ),
    _sign(
        "pydantic_validation_error",
        "Value error, ",
        r"^(?:\S+: )?Value error, ",
        R,
        Phase.START,
        weight=Weight.HINT,
    ),
    # ------------------------------------------------------------ the model cannot be had
    _sign(
        "gated_model_no_access",
        "gated repo",
        r"trying to access a gated repo|Cannot access gated repo|is a gated repository"
        r"|GatedRepoError",
        R,
        Phase.LOAD,
    ),
    _sign(
        "gated_model_no_access",
        "Access to model",
        r"Access to model \S+ is restricted",
        R,
        Phase.LOAD,
    ),
    _sign(
        "gated_model_no_access",
        "Client Error",
        r"40[13] Client Error: (?:Unauthorized|Forbidden) for url",
        R,
        Phase.LOAD,
    ),
    _sign(
        "model_not_found",
        "local ",
        r"is not a local folder and is not a valid model identifier"
        r"|is not a local folder or a valid repository name"
        r"|Invalid repository ID or local directory specified",
        R,
        Phase.LOAD,
    ),
    _sign(
        "model_not_found",
        "epo",
        r"RepositoryNotFoundError|Repository Not Found for url|RevisionNotFoundError"
        r"|HFValidationError: Repo id must be in the form",
        R,
        Phase.LOAD,
    ),
    _sign(
        "model_not_found",
        "odel",
        r"Cannot find any model weights with|does not appear to have a file named"
        r"|Incorrect path_or_model_id|OSError: Can't load the (?:configuration|model|tokenizer)"
        r"|No such file or directory: '[^']*(?:\.safetensors|config\.json)",
        R,
        Phase.LOAD,
    ),
    _sign(
        "hub_unreachable",
        "onne",
        r"couldn't connect to '?https?://[^ ]*(?:huggingface|hf\.co|modelscope)"
        r"|Cannot (?:send a request|reach) .*offline|LocalEntryNotFoundError"
        r"|(?:ConnectionError|MaxRetryError|ConnectTimeout).*(?:huggingface\.co|hf\.co|modelscope)",
        C,
        Phase.LOAD,
        weight=Weight.HINT,
    ),
    _sign(
        "hub_unreachable",
        "LocalEntryNotFoundError",
        r"LocalEntryNotFoundError|OfflineModeIsEnabled",
        C,
        Phase.LOAD,
        weight=Weight.HINT,
    ),
    _sign(
        "weights_corrupt",
        "deserializing header",
        r"Error while deserializing header: \w+",
        C,
        Phase.LOAD,
    ),
    _sign(
        "vocabulary_not_loaded",
        "HarmonyError",
        r"HarmonyError: error downloading or loading vocab",
        C,
        None,
    ),
    # ------------------------------------------------------------ builds, drivers, libraries
    _sign(
        "no_kernel_image",
        "no kernel image",
        r"no kernel image is available for execution",
        C,
        None,
        serving=True,
    ),
    _sign(
        "kernel_image_invalid",
        "kernel image is invalid",
        r"device kernel image is invalid",
        C,
        None,
        serving=True,
    ),
    _sign(
        "driver_too_old",
        "driver",
        r"NVIDIA driver on your system is too old"
        r"|CUDA driver version is insufficient for CUDA runtime version"
        r"|unsupported display driver / cuda driver combination",
        C,
        Phase.START,
        r"found version (?P<driver_cuda_version>\d+)",
    ),
    _sign(
        "driver_too_old",
        "unsupported toolchain",
        r"provided PTX was compiled with an unsupported toolchain",
        C,
        None,
        serving=True,
    ),
    _sign(
        "no_accelerator",
        "device type",
        r"Failed to infer device type|Device string must not be empty",
        R,
        Phase.START,
    ),
    _sign(
        "no_accelerator",
        "GPU",
        r"No CUDA GPUs are available|Found no NVIDIA driver on your system"
        r"|No HIP GPUs are available",
        R,
        Phase.START,
    ),
    _sign(
        "no_accelerator",
        "could not select device driver",
        r"could not select device driver \S+ with capabilities: \[\[gpu\]\]",
        R,
        Phase.START,
    ),
    _sign(
        "no_accelerator",
        "not compiled with CUDA",
        r"Torch not compiled with CUDA enabled",
        R,
        Phase.START,
    ),
    _sign(
        "missing_cuda_library",
        "cannot open shared object file",
        r"lib(?:cu|nv|nccl|hip|roc|mkl|tbb)[\w.+-]*: cannot open shared object file",
        C,
        Phase.START,
    ),
    _sign(
        "missing_module",
        "No module named",
        r"(?:ModuleNotFoundError|ImportError): No module named",
        C,
        None,
    ),
    _sign(
        "missing_module",
        "cannot import name",
        r"ImportError: cannot import name '\w+' from",
        C,
        None,
    ),
    _sign(
        "missing_module",
        "PackageNotFoundError",
        r"PackageNotFoundError: No package metadata was found for",
        C,
        Phase.START,
    ),
    _sign(
        "binary_mismatch",
        "",
        r"Tried to instantiate class '[\w.]+', but it does not exist"
        r"|operator \w+::\w+ does not exist|undefined symbol: \w+"
        r"|'_C' object has no attribute|'_OpNamespace' '\w+' object has no attribute"
        r"|Could not run '\w+::\w+' with arguments from the '\w+' backend",
        C,
        Phase.START,
    ),
    _sign(
        "missing_compiler",
        "n",
        r"Could not find nvcc|nvcc: not found|No such file or directory: '?\S*(?:nvcc|gcc|g\+\+|"
        r"ninja|clang)\b|Failed to find C compiler|Ninja build failed|CUDA_HOME environment"
        r" variable is not set|fatal error: Python\.h: No such file",
        C,
        None,
        serving=True,
    ),
    _sign(
        "python_version_incompatible",
        "",
        r"type 'array\.array' is not subscriptable|requires a different Python"
        r"|unsupported operand type\(s\) for \|: 'type' and",
        C,
        None,
        serving=True,
    ),
    # ------------------------------------------------------------ kernels and processes
    _sign(
        "cuda_illegal_memory_access",
        "illegal memory access",
        r"an illegal memory access was encountered|cudaErrorIllegalAddress",
        C,
        None,
        serving=True,
    ),
    _sign(
        "custom_allreduce_error",
        "custom_all_reduce",
        r"Failed: Cuda error \S*custom_all_reduce\.cuh:\d+",
        C,
        None,
        serving=True,
    ),
    _sign(
        "attention_kernel_failed",
        "",
        r"Batch(?:Prefill|Decode)With\w+ failed with error"
        r"|FlashAttention .*(?:only supports|failed)",
        C,
        None,
        serving=True,
    ),
    _sign(
        "cuda_error",
        "CUDA error",
        r"CUDA error: (?!out of memory)(?!no kernel)(?!device kernel)(?!an illegal)"
        r"(?!invalid device ordinal)",
        C,
        None,
        weight=Weight.HINT,
        serving=True,
    ),
    _sign(
        "nccl_error",
        "NCCL",
        r"NCCL error\b|ncclUnhandledCudaError|ncclSystemError|ncclInternalError"
        r"|ncclInvalidUsage|Watchdog caught collective operation timeout",
        C,
        None,
        weight=Weight.HINT,
        serving=True,
    ),
    _sign(
        "nccl_error",
        "nccl",
        r"\bnccl(?:System|Internal|Remote|UnhandledCuda)Error",
        C,
        None,
        weight=Weight.HINT,
        serving=True,
    ),
    _sign(
        "cuda_after_fork",
        "re-initialize CUDA",
        r"Cannot re-initialize CUDA in forked subprocess",
        C,
        Phase.START,
    ),
    _sign(
        "port_in_use",
        "ddress already in use",
        r"[Aa]ddress already in use",
        C,
        Phase.START,
        r"bind on address \('[^']*', (?P<port>\d+)",
    ),
    _sign("port_in_use", "EADDRINUSE", r"EADDRINUSE", C, Phase.START),
    _sign(
        "cpp_terminate",
        "terminate called",
        r"terminate called (?:after throwing|without an active)",
        C,
        None,
        weight=Weight.HINT,
        serving=True,
    ),
    _sign(
        "segmentation_fault",
        "-11",
        r"Failed core proc\(s\): \{[^}]*: (?P<exit_code>-11)\b|died[^\n]*exit code: ?-11\b",
        C,
        None,
        weight=Weight.HINT,
        serving=True,
    ),
    _sign(
        "segmentation_fault",
        "egmentation fault",
        r"Segmentation fault|Fatal Python error: Segmentation",
        C,
        None,
        weight=Weight.HINT,
        serving=True,
    ),
    # ------------------------------------------------------------ time ran out
    _sign(
        "engine_start_timeout",
        "imed out waiting for",
        r"Timed out waiting for engine(?:s| core processes)",
        Outcome.NOT_READY,
        None,
        r"Waited (?P<waited_s>\d+) ?s",
    ),
    _sign(
        "engine_start_timeout",
        "did not start within",
        r"(?:engine|server) (?:process )?(?:did not start|failed to start) within",
        Outcome.NOT_READY,
        None,
        r"within (?P<waited_s>\d+)",
    ),
    _sign(
        "rendezvous_timeout",
        "socket has timed out",
        r"The client socket has timed out after \d+",
        Outcome.NOT_READY,
        Phase.START,
        r"timed out after (?P<waited_ms>\d+)ms",
        r"timed out after (?P<waited_s>\d+)s",
        serving=True,
    ),
    _sign(
        "rpc_timeout",
        "imeout",
        r"RPC call to \w+ timed out|^(?:raise )?TimeoutError\b(?!: Timed out waiting for)"
        r"|execute_model timed out",
        C,
        None,
        weight=Weight.HINT,
        serving=True,
    ),
    _sign(
        "rpc_timeout",
        "timed out",
        r"RPC call to \w+ timed out",
        C,
        None,
        weight=Weight.HINT,
        serving=True,
    ),
    _sign(
        "terminated_by_signal",
        "erminated",
        r"KeyboardInterrupt: terminated",
        Outcome.STOPPED,
        None,
        weight=Weight.HINT,
    ),
    # ------------------------------------------------------------ something died; the cause is
    # elsewhere in the log, if anywhere
    _sign(
        "engine_dead",
        "EngineDeadError",
        r"EngineDeadError",
        C,
        Phase.BENCH,
        weight=Weight.CONSEQUENCE,
        serving=True,
    ),
    _sign(
        "engine_dead",
        "EngineCore encountered",
        r"EngineCore encountered (?:a fatal error|an issue)",
        C,
        Phase.BENCH,
        weight=Weight.CONSEQUENCE,
        serving=True,
    ),
    _sign(
        "engine_dead",
        "ngine ",
        r"LLMEngine is already dead|[Ee]ngine process \(pid \d+\) died",
        C,
        Phase.BENCH,
        weight=Weight.CONSEQUENCE,
        serving=True,
    ),
    _sign(
        "engine_dead",
        "EngineDeadError",
        r"AsyncEngineDeadError|MQEngineDeadError",
        C,
        Phase.BENCH,
        weight=Weight.CONSEQUENCE,
        serving=True,
    ),
    _sign(
        "process_died",
        "died",
        r"(?:[Ww]orker proc|Engine core proc|RayWorkerProc|VllmWorkerProcess)[^\n]* died",
        C,
        None,
        r"exit code: ?(?P<exit_code>-?\d+)",
        weight=Weight.CONSEQUENCE,
        serving=True,
    ),
    _sign(
        "process_died",
        "actor",
        r"The actor (?:is dead|died)",
        C,
        None,
        weight=Weight.CONSEQUENCE,
        serving=True,
    ),
    _sign(
        "start_failed",
        "ailed",
        r"Engine core initialization failed|EngineCore failed to start|"
        r"WorkerProc (?:initialization failed|failed to start)|Engine process failed to start",
        C,
        None,
        weight=Weight.CONSEQUENCE,
    ),
)

#: Types that only say that something died.
CONSEQUENCES = frozenset(s.type for s in SIGNATURES if s.weight is Weight.CONSEQUENCE)

#: A traceback's function -> the step it belongs to. The innermost known one decides.
FRAMES: dict[str, Phase] = {
    "load_model": Phase.LOAD,
    "load_weights": Phase.LOAD,
    "get_model": Phase.LOAD,
    "make_layers": Phase.LOAD,
    "create_weights": Phase.LOAD,
    "initialize_model": Phase.LOAD,
    "process_weights_after_loading": Phase.LOAD,
    "profile_run": Phase.PROFILE,
    "determine_available_memory": Phase.PROFILE,
    "determine_num_available_blocks": Phase.PROFILE,
    "profile_cudagraph_memory": Phase.PROFILE,
    "initialize_kv_cache": Phase.KV_CACHE,
    "initialize_kv_cache_tensors": Phase.KV_CACHE,
    "_allocate_kv_cache": Phase.KV_CACHE,
    "_allocate_kv_cache_tensors": Phase.KV_CACHE,
    "allocate_kv_cache": Phase.KV_CACHE,
    "initialize_cache": Phase.KV_CACHE,
    "initialize_from_config": Phase.KV_CACHE,
    "_init_cache_engine": Phase.KV_CACHE,
    "capture_model": Phase.GRAPH,
    "_capture_cudagraphs": Phase.GRAPH,
    "capture": Phase.GRAPH,
    "compile_or_warm_up_model": Phase.GRAPH,
    "kernel_warmup": Phase.GRAPH,
    "_dummy_sampler_run": Phase.GRAPH,
    "execute_dummy_batch": Phase.BENCH,
    "execute_model": Phase.BENCH,
    "sample_tokens": Phase.BENCH,
    "engine_step": Phase.BENCH,
    "step_async": Phase.BENCH,
    "run_busy_loop": Phase.BENCH,
    "run_engine_loop": Phase.BENCH,
    "_process_engine_step": Phase.BENCH,
}
#: A frame of start-up outranks the ones of serving inside it: profiling calls execute_model too.
SERVING_FRAMES = frozenset(name for name, phase in FRAMES.items() if phase is Phase.BENCH)

#: The type of an out-of-memory error by the step it happened in.
OOM_BY_PHASE: dict[Phase, str] = {
    Phase.START: "oom_model_load",
    Phase.LOAD: "oom_model_load",
    Phase.PROFILE: "oom_profile",
    Phase.KV_CACHE: "oom_kv_cache_allocation",
    Phase.GRAPH: "oom_graph_capture",
    Phase.BENCH: "oom_serving",
}


def numbers(found: re.Match[str]) -> dict[str, int | float]:
    """Return the numbers of a match: its named groups, sizes in bytes, counts as integers."""
    result: dict[str, int | float] = {}
    groups = found.groupdict()
    for name, printed in groups.items():
        if printed is None or name.endswith("_unit"):
            continue
        try:
            key, value = _number(name, printed, groups.get(f"{name}_unit"))
        except (ValueError, OverflowError):
            continue
        result[key] = value
    return result


def _number(name: str, printed: str, unit: str | None) -> tuple[str, int | float]:
    if name.endswith("_x10"):
        return name.removesuffix("_x10"), int(printed) / 10
    if name == "exit_code_core":
        return "exit_code", int(printed)
    if unit is not None:
        return name, units.to_bytes(printed, unit)
    if name.endswith("_bytes"):
        # Plain whole numbers are bytes already; the engine's own checks print GiB.
        exact = name in _EXACT_BYTES
        return name, int(printed) if exact else units.to_bytes(printed, "GiB")
    return name, float(printed) if "." in printed else int(printed)


_EXACT_BYTES = frozenset(
    ("required_shared_memory_bytes", "shared_memory_limit_bytes", "shm_bytes", "tried_bytes")
)
