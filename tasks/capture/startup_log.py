"""A vLLM log to typed values and a diagnosis, for 0.5 to 0.33, any device and any rank layout.

A pattern that matches nothing never raises: its value is just absent. So every form is listed here
with the versions that print it, and a value keeps its line, its text and what rounding leaves open.
Pure: lines in, values out, one pass, memory that does not grow with the log.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from tasks.capture import arguments, text, units
from tasks.capture.failures import Failure, FailureFinder, is_quiet, may_be_failure
from warehouse.registry import Phase

#: Values of one name that are kept one by one; a log that repeats a start thousands of times must
#: not fill the memory. The ruling value still takes all of them into account.
KEPT_PER_NAME = 512
#: Last lines kept for an unknown failure.
TAIL_LINES = 20

LogOutcome = Literal["ok", "failed", "incomplete"]


@dataclass(frozen=True, slots=True)
class Value:
    """One number of a log: ``low`` and ``high`` are the values that would have printed the same.

    ``line`` counts from 1, ``text`` is the raw line (cut when very long), ``rank`` the process that
    said it where the log names one.
    """

    name: str
    value: int | float
    low: int | float
    high: int | float
    line: int
    text: str
    rank: str | None


@dataclass(slots=True)
class StartupLog:
    """What a log says about one server start: the last one that says anything.

    ``values`` holds the ruling value of each name (see :data:`RULING`), ``every`` all of them.
    ``arguments`` are the engine's settings overlaid by the command line's. ``compile_cache`` is
    ``hit`` when compiled code was loaded, ``miss`` when something was compiled, None when the log
    does not say. ``reached`` is the furthest step the log shows. ``starts`` counts server starts.
    """

    values: dict[str, Value]
    every: list[Value]
    failure: Failure | None
    outcome: LogOutcome
    vllm_version: str | None
    arguments: dict[str, object] | None
    tail: list[str]
    model: str | None = None
    compile_cache: Literal["hit", "miss"] | None = None
    reached: Phase | None = None
    starts: int = 1
    lines: int = 0


#: Which of several values rules. Ranks share the smallest pool; the fullest rank decides what fits;
#: times are those of the slowest. The default is the last one said.
RULING: dict[str, Literal["min", "max", "last"]] = {
    "available_kv_cache_bytes": "min",
    "kv_cache_size_tokens": "min",
    "max_concurrency": "min",
    "num_gpu_blocks": "min",
    "initial_free_bytes": "min",
    "total_memory_bytes": "min",
    "requested_kv_cache_bytes": "min",
    "model_loading_bytes": "max",
    "model_loading_s": "max",
    "weights_loading_s": "max",
    "weights_and_non_torch_bytes": "max",
    "weights_bytes": "max",
    "non_torch_bytes": "max",
    "peak_activation_bytes": "max",
    "graph_capture_bytes": "max",
    "graph_capture_s": "max",
    "graph_estimate_bytes": "max",
    "graph_pool_bytes": "max",
    "init_engine_s": "max",
    "compilation_s": "max",
}

_GIB = r"(-?\d[\d.]*) ?(GiB|GB)"

Kind = Literal["bytes", "count", "number"]


@dataclass(frozen=True, slots=True)
class _Form:
    """One line form: the literal that every such line holds, its pattern, and its groups' meaning.

    ``groups`` maps a name in the pattern to (metric, kind); a byte group is GiB unless the pattern
    has a group ``<name>_unit``. ``reached`` is the step that such a line proves.
    """

    literal: str
    pattern: re.Pattern[str]
    groups: tuple[tuple[str, str, Kind], ...]
    reached: Phase | None = None


def _form(
    literal: str, pattern: str, *groups: tuple[str, str, Kind], reached: Phase | None = None
) -> _Form:
    return _Form(literal, re.compile(pattern), groups, reached)


_N = r"-?\d+(?:\.\d+)?"
_COUNT = r"\d[\d,]*"

#: Every form that holds numbers. File and line are of vLLM 0.27.0 unless a version is named.
FORMS: tuple[_Form, ...] = (
    # v1/worker/gpu_model_runner.py:5406, v1/worker/gpu/model_runner.py:330 (V2: no word "memory")
    _form(
        "Model loading took",
        rf"Model loading took (?P<b>{_N}) ?Gi?B(?: memory)? and (?P<s>{_N}) ?s",
        ("b", "model_loading_bytes", "bytes"),
        ("s", "model_loading_s", "number"),
        reached=Phase.PROFILE,
    ),
    # 0.5 ... 0.7: worker/model_runner.py, "GB" of 2**30 bytes; the time came with 0.7
    _form(
        "Loading model weights took",
        rf"Loading model weights took (?P<b>{_N}) ?Gi?B(?: and (?P<s>{_N}) ?s)?",
        ("b", "model_loading_bytes", "bytes"),
        ("s", "model_loading_s", "number"),
        reached=Phase.PROFILE,
    ),
    # model_executor/model_loader/default_loader.py:431
    _form(
        "Loading weights took",
        rf"Loading weights took (?P<s>{_N}) ?s",
        ("s", "weights_loading_s", "number"),
        reached=Phase.LOAD,
    ),
    # v1/worker/gpu_worker.py:564
    _form(
        "Available KV cache memory",
        rf"Available KV cache memory: ?(?P<b>{_N}) ?GiB",
        ("b", "available_kv_cache_bytes", "bytes"),
        reached=Phase.KV_CACHE,
    ),
    # v1/worker/gpu_worker.py:480, with --kv-cache-memory-bytes
    _form(
        "memory for KV Cache as specified",
        rf"Initial free memory:? (?P<f>{_N}) ?GiB,? reserved (?P<b>{_N}) ?GiB memory for KV Cache",
        ("f", "initial_free_bytes", "bytes"),
        ("b", "requested_kv_cache_bytes", "bytes"),
        reached=Phase.KV_CACHE,
    ),
    # v1/worker/cpu_worker.py:218 and :239
    _form(
        "GiB for KV cache on node",
        rf"Explicitly set \((?P<b>{_N})/(?P<t>{_N})\) ?GiB for KV cache on node",
        ("b", "requested_kv_cache_bytes", "bytes"),
        ("t", "total_memory_bytes", "bytes"),
        reached=Phase.KV_CACHE,
    ),
    _form(
        "GiB for KV cache on node",
        rf"Auto set \((?P<b>{_N})/(?P<t>{_N})\) ?GiB for KV cache on node \d+"
        rf"(?:, with (?P<r>{_N}) ?GiB requested memory for the worker\."
        rf"(?: (?P<n>{_N}) ?GiB memory was consumed)?)?",
        ("b", "available_kv_cache_bytes", "bytes"),
        ("t", "total_memory_bytes", "bytes"),
        ("r", "requested_memory_bytes", "bytes"),
        ("n", "weights_and_non_torch_bytes", "bytes"),
        reached=Phase.KV_CACHE,
    ),
    # v1/core/kv_cache_utils.py:2235; from 0.28 in one line with the concurrency, any device name,
    # perhaps "GPU + host"
    _form(
        "KV cache size",
        rf"\b[A-Z]{{3,5}}(?: \+ host)? KV cache size: ?(?P<n>{_COUNT}) tokens",
        ("n", "kv_cache_size_tokens", "count"),
        reached=Phase.KV_CACHE,
    ),
    _form(
        "Maximum concurrency for",
        rf"Maximum concurrency for (?P<l>{_COUNT}) tokens per request: ?(?P<x>{_N})x",
        ("x", "max_concurrency", "number"),
        ("l", "max_model_len_tokens", "count"),
        reached=Phase.KV_CACHE,
    ),
    # platforms/interface.py:912 and :750, platforms/xpu.py:406; models/config.py up to 0.2x
    _form(
        "etting attention block size to",
        rf"etting attention block size to (?P<n>{_COUNT}) tokens",
        ("n", "attention_block_size_tokens", "count"),
    ),
    # platforms/interface.py:936
    _form(
        "mamba page size by",
        rf"Padding mamba page size by (?P<p>{_N})%",
        ("p", "mamba_padding_percent", "number"),
    ),
    # v1/core/kv_cache_utils.py:1262
    _form(
        "padding layers",
        rf"Add (?P<n>\d+) padding layers, may waste at most (?P<p>{_N})%",
        ("n", "kv_padding_layers", "count"),
        ("p", "kv_padding_waste_percent", "number"),
    ),
    # v1/worker/gpu_model_runner.py:6807
    _form(
        "Estimated CUDA graph memory",
        rf"Estimated CUDA graph memory: ?(?P<b>{_N}) ?GiB",
        ("b", "graph_estimate_bytes", "bytes"),
        reached=Phase.PROFILE,
    ),
    # v1/worker/gpu_model_runner.py:6914; before 0.8 without the size
    _form(
        "Graph capturing finished",
        rf"Graph capturing finished in (?P<s>{_N}) ?secs?(?:, took (?P<b>{_N}) ?GiB)?",
        ("s", "graph_capture_s", "number"),
        ("b", "graph_capture_bytes", "bytes"),
        reached=Phase.GRAPH,
    ),
    # v1/worker/gpu_worker.py:726
    _form(
        "graph pool memory",
        rf"CUDA graph pool memory: (?P<b>{_N}) ?GiB \(actual\), (?P<e>{_N}) ?GiB \(estimated\)",
        ("b", "graph_pool_bytes", "bytes"),
        ("e", "graph_estimate_bytes", "bytes"),
        reached=Phase.GRAPH,
    ),
    # v1/worker/gpu_worker.py:767 (0.11: "for weight" and "for non-torch memory", DEBUG)
    _form(
        "Desired GPU memory utilization is",
        rf"Free memory on device[^(]*\((?P<f>{_N})/(?P<t>{_N}) ?GiB\) on startup\. "
        rf"Desired GPU memory utilization is \({_N}, (?P<r>{_N}) ?GiB\)\."
        rf"(?: Actual usage is (?:(?P<c>{_N}) ?GiB for consumed memory|(?P<w>{_N}) ?GiB for weight)"
        rf"[^,]*, (?P<a>{_N}) ?GiB for peak activation"
        rf"(?:, (?P<n>{_N}) ?GiB for non-torch memory)?)?",
        ("f", "initial_free_bytes", "bytes"),
        ("t", "total_memory_bytes", "bytes"),
        ("r", "requested_memory_bytes", "bytes"),
        ("c", "weights_and_non_torch_bytes", "bytes"),
        ("w", "weights_bytes", "bytes"),
        ("a", "peak_activation_bytes", "bytes"),
        ("n", "non_torch_bytes", "bytes"),
        reached=Phase.GRAPH,
    ),
    # v1/worker/gpu_worker.py:552, DEBUG
    _form(
        "; Requested memory:",
        rf"Initial free memory: (?P<f>{_N}) ?GiB; Requested memory: {_N} \(util\), "
        rf"(?P<r>{_N}) ?GiB",
        ("f", "initial_free_bytes", "bytes"),
        ("r", "requested_memory_bytes", "bytes"),
    ),
    # v1/worker/gpu_worker.py:579
    _form(
        "The current --gpu-memory-utilization=",
        rf"The current --gpu-memory-utilization=(?P<u>{_N}) is equivalent",
        ("u", "gpu_memory_utilization_ratio", "number"),
    ),
    # v1/worker/gpu_worker.py:594, and 0.18 and 0.19 ("In v0.19, ..." is not the version running)
    _form(
        " --gpu-memory-utilization from ",
        rf"increas(?:e|ing) --gpu-memory-utilization from (?P<u>{_N}) to {_N}",
        ("u", "gpu_memory_utilization_ratio", "number"),
    ),
    # The engine's own refusals hold what it had found: v1/worker/cpu_worker.py:86 and :209
    _form(
        "Available memory on node",
        rf"Available memory on node \d+ \((?P<a>{_N})/(?P<t>{_N}) ?GiB\) on (?:startup|kv cache)"
        rf"(?:.*?requested memory for kv \((?P<r>{_N}) ?GiB\))?",
        ("a", "available_memory_bytes", "bytes"),
        ("t", "total_memory_bytes", "bytes"),
        ("r", "requested_kv_cache_bytes", "bytes"),
    ),
    # v1/worker/utils.py:420 (the device's name since 0.17)
    _form(
        "on startup is less than desired GPU",
        rf"Free memory on device[^(]*\((?P<a>{_N})/(?P<t>{_N}) ?GiB\) on startup is less",
        ("a", "available_memory_bytes", "bytes"),
        ("t", "total_memory_bytes", "bytes"),
    ),
    # v1/engine/core.py:339 ("seconds" up to 0.1x, then "s" with the compilation's share)
    _form(
        "init engine (profile",
        rf"init engine \(profile, create kv cache, warmup model\) took (?P<s>{_N}) ?s\w*"
        rf"(?: \(compilation: (?P<c>{_N}) ?s)?",
        ("s", "init_engine_s", "number"),
        ("c", "compilation_s", "number"),
        reached=Phase.READY,
    ),
    # compilation/monitor.py ("takes" up to 0.17)
    _form(
        "torch.compile t",
        rf"torch\.compile (?:takes|took) (?P<s>{_N}) ?s in total",
        ("s", "compilation_s", "number"),
        reached=Phase.PROFILE,
    ),
    # model_executor/model_loader/base_loader.py:82 of 0.32
    _form(
        "Initializing model took",
        rf"Initializing model took (?P<s>{_N}) ?s",
        ("s", "model_init_s", "number"),
        reached=Phase.LOAD,
    ),
    # config/model.py:1883
    _form(
        "Using max model len",
        rf"Using max model len (?P<n>{_COUNT})",
        ("n", "max_model_len_tokens", "count"),
    ),
    # v1/core/kv_cache_utils.py:2040
    _form(
        "Auto-fit max_model_len: reduced",
        rf"Auto-fit max_model_len: reduced from \d+ to (?P<n>{_COUNT}) to fit",
        ("n", "max_model_len_tokens", "count"),
    ),
    # v1/metrics/loggers.py up to 0.1x
    _form(
        "num_gpu_blocks is",
        rf"\bnum_gpu_blocks is:? ?(?P<n>{_COUNT})",
        ("n", "num_gpu_blocks", "count"),
        reached=Phase.KV_CACHE,
    ),
    # V0 up to 0.9: executor/executor_base.py ("# GPU blocks", "# cuda blocks", "# CUDA blocks")
    _form(
        " blocks: ",
        rf"# (?:[GX]PU|[Cc][Uu][Dd][Aa]|rocm|ROCm|xpu) blocks: (?P<n>{_COUNT}), # CPU blocks",
        ("n", "num_gpu_blocks", "count"),
        reached=Phase.KV_CACHE,
    ),
    # V0 from 0.6.5: worker/worker.py
    _form(
        "x gpu_memory_utilization (",
        rf"total_gpu_memory \((?P<t>{_N}) ?GiB\) x gpu_memory_utilization \((?P<u>{_N})\) = "
        rf"(?P<r>{_N}) ?GiB",
        ("t", "total_memory_bytes", "bytes"),
        ("u", "gpu_memory_utilization_ratio", "number"),
        ("r", "requested_memory_bytes", "bytes"),
        reached=Phase.PROFILE,
    ),
    _form(
        "model weights take",
        rf"model weights take (?P<w>{_N}) ?GiB; non_torch_memory takes (?P<n>{_N}) ?GiB; "
        rf"PyTorch activation peak memory takes (?P<a>{_N}) ?GiB; "
        rf"the rest of the memory reserved for KV Cache is (?P<b>{_N}) ?GiB",
        ("w", "weights_bytes", "bytes"),
        ("n", "non_torch_bytes", "bytes"),
        ("a", "peak_activation_bytes", "bytes"),
        ("b", "available_kv_cache_bytes", "bytes"),
        reached=Phase.PROFILE,
    ),
)

#: Lines that prove a step without holding a number.
_STEPS: tuple[tuple[str, Phase], ...] = (
    ("Starting to load model", Phase.LOAD),
    ("Loading model from scratch", Phase.LOAD),
    ("checkpoint shards:", Phase.LOAD),
    ("Capturing CUDA graph", Phase.GRAPH),
    ("Capturing the model for CUDA graphs", Phase.GRAPH),
    ("Available routes are", Phase.READY),
)
_STARTED = ("Application startup complete", "Uvicorn running on")
_HITS = ("Directly load", "oaded AOT compiled")
_MISSES = (
    "Cache the graph ",
    "Compiling a graph for",
    "saved AOT compiled function",
)
#: What the lines hold that :meth:`_Parser._steps` and :meth:`_Parser._settings` look at.
_STEP_LITERALS = (
    *(literal for literal, _ in _STEPS),
    *_STARTED,
    "ompil",
    "Cache the graph",
)
_SETTING_LITERALS = ("ersion", "engine (v", "args: ", "with config: ")
_VERSION = re.compile(
    r"(?:vLLM (?:API server|server|engine) version v?|█ +version v?|LLM engine \(v)"
    r"(\d+\.\d+(?:\.\d+)*(?:\.?(?:rc|dev|post|a|b)\d+)*(?:\+[\w.]+)?)"
)
_ARGUMENTS = re.compile(r"(?:non-default args: (?=\{)|\bargs: (?=Namespace\())")
_ENGINE = re.compile(r"Initializing an? (?:\w+ )?(?:LLM )?engine \([^)]*\) with config: ")

#: Shapes of lines that are remembered, and how long a line may be for it.
_SHAPES_KEPT = 4096
_SHAPE_LIMIT = 400
_ORDER = {phase: index for index, phase in enumerate(Phase)}


def parse(lines: Iterable[str]) -> StartupLog:
    """Return what ``lines`` of a vLLM log say.

    ``lines`` may come with or without line ends and may be an excerpt of any length. Never raises
    for what a log contains.
    """
    return _Parser().run(lines)


def says_something(line: str) -> bool:
    """Return True when ``line`` may say a value, a setting or a step.

    Called for every line: literals before patterns, and long ones, which are searched faster.
    """
    return (
        "GiB" in line
        or " took " in line
        or " takes " in line
        or " per request: " in line
        or "KV cache size" in line
        or " blocks" in line
        or "attention block size" in line
        or "mamba page size" in line
        or "padding layers" in line
        or "version " in line
        or "args: " in line
        or " with config: " in line
        or "max model len" in line
        or "Auto-fit max_model_len" in line
        or "startup complete" in line
        or "Uvicorn running" in line
        or "compile" in line
        or "graph" in line
        or "Graph" in line
        or "checkpoint shards" in line
        or "to load model" in line
        or "Loading model" in line
        or " GB" in line
        or "AOT " in line
        or "num_gpu_blocks" in line
        or "routes are" in line
        or "init engine" in line
    )


@dataclass(frozen=True, slots=True)
class _Shape:
    """What holds for every line of a shape (:func:`text.shape`): what to look for in it, and where.

    ``forms`` are those whose literal it holds; ``span`` is where its message stands, None where
    that has to be found out in each line.
    """

    forms: tuple[_Form, ...]
    settings: bool
    steps: bool
    failure: bool
    quiet: bool
    span: tuple[int, int] | None

    @classmethod
    def of(cls, line: str) -> _Shape:
        """Return the shape of a line."""
        plain = text.uncoloured(line[: text.LINE_LIMIT]) if says_something(line) else ""
        failure = may_be_failure(line)
        return cls(
            forms=tuple(form for form in FORMS if form.literal in plain),
            settings=any(literal in plain for literal in _SETTING_LITERALS),
            steps=any(literal in plain for literal in _STEP_LITERALS),
            failure=failure,
            quiet=failure and is_quiet(line, text.message(line)),
            span=text.message_span(line),
        )

    @property
    def value(self) -> bool:
        """Whether such a line may say a value, a setting or a step."""
        return bool(self.forms) or self.settings or self.steps

    def said(self, line: str) -> str:
        """Return the message of ``line``, one of this shape."""
        return text.message(line) if self.span is None else line[self.span[0] : self.span[1]]


#: Not looked at yet, as against None: looked at and empty.
_UNKNOWN = _Shape((), False, False, False, False, None)


@dataclass(slots=True)
class _Start:
    """What is known about one server start."""

    values: dict[str, Value] = field(default_factory=dict)
    every: list[Value] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    settings: list[tuple[bool, str, int, str]] = field(default_factory=list)
    version: str | None = None
    started: bool = False
    alive: int = 0
    cache: Literal["hit", "miss"] | None = None
    reached: Phase | None = None
    failures: FailureFinder = field(default_factory=FailureFinder)

    def add(self, value: Value) -> None:
        """Keep a value and let it rule where it should."""
        count = self.counts.get(value.name, 0) + 1
        self.counts[value.name] = count
        if count <= KEPT_PER_NAME:
            self.every.append(value)
        held = self.values.get(value.name)
        self.values[value.name] = value if held is None else _ruling(held, value)

    def spoken(self) -> bool:
        """Return True when this start got further than naming its version."""
        begun = self.reached not in (None, Phase.START)
        return self.started or begun or self.failures.found()


class _Parser:
    """One pass over a log; holds one :class:`_Start` and the last that failed."""

    def __init__(self) -> None:
        self.start = _Start()
        self.failed: tuple[_Start, tuple[str, ...]] | None = None
        self.starts = 1
        self.tail: deque[str] = deque(maxlen=2 * TAIL_LINES)

    def run(self, lines: Iterable[str]) -> StartupLog:
        tail = self.tail
        shapes: dict[bytes, _Shape | None] = {}  # None: such lines say nothing
        number = 0
        for number, line in enumerate(lines, 1):
            if len(line) < 4 and not line.strip():
                continue
            tail.append(line)
            # Most of a long log: requests, throughput, routes. They say nothing about memory.
            if "HTTP/1." in line or " throughput: " in line or " Route: /" in line:
                if ('"POST ' in line and '" 200' in line) or " throughput: " in line:
                    self.start.alive = number
                continue
            key = text.shape(line) if len(line) < _SHAPE_LIMIT else None
            shape = shapes.get(key, _UNKNOWN) if key is not None else _UNKNOWN
            if shape is _UNKNOWN:
                shape = _Shape.of(line)
                if not shape.value and not shape.failure:
                    shape = None
                if key is not None and len(shapes) < _SHAPES_KEPT:
                    shapes[key] = shape
            if shape is None:
                if self.start.failures.waiting:
                    self.start.failures.follow(line, text.message(line))
                continue
            self._line(number, line, shape)
        return self._result(number)

    def _line(self, number: int, line: str, shape: _Shape) -> None:
        """Take a line that may say something."""
        said = shape.said(line)
        if self.start.failures.waiting:
            self.start.failures.follow(line, said)
        if shape.value:
            self._value_line(number, line, shape)
        if shape.failure:
            self.start.failures.feed(
                number,
                line,
                said,
                quiet=shape.quiet,
                started=self.start.started,
                reached=self.start.reached,
                recent=self.tail,
            )

    def _value_line(self, number: int, line: str, shape: _Shape) -> None:
        plain = text.uncoloured(line[: text.LINE_LIMIT])
        for form in shape.forms:
            found = form.pattern.search(plain)
            if found:
                self._take(form, found, number, line)
        if shape.settings:
            self._settings(number, plain, line)
        if shape.steps:
            self._steps(plain)

    def _take(self, form: _Form, found: re.Match[str], number: int, line: str) -> None:
        start = self.start
        for group, name, kind in form.groups:
            printed = found.group(group)
            if printed is None:
                continue
            try:
                value, low, high = _READ[kind](printed)
            except (ValueError, OverflowError):
                continue
            start.add(
                Value(
                    name=name,
                    value=value,
                    low=low,
                    high=high,
                    line=number,
                    text=text.excerpt(line, found.start(), found.end()),
                    rank=text.rank(line),
                )
            )
        start.reached = _further(start.reached, form.reached)

    def _settings(self, number: int, plain: str, line: str) -> None:
        version = _VERSION.search(plain) if "ersion" in plain or "engine (v" in plain else None
        if version:
            engine = "engine (v" in version.group(0)
            if not engine and self.start.spoken():
                self._restart()
            if self.start.version is None or not engine:
                self.start.version = version.group(1)
            self.start.reached = _further(self.start.reached, Phase.START)
        if len(self.start.settings) >= _SETTINGS_KEPT:
            return
        if "args: " in plain and (found := _ARGUMENTS.search(plain)):
            self.start.settings.append((False, plain[found.end() :], number, line))
        elif "with config: " in plain and (found := _ENGINE.search(plain)):
            self.start.settings.append((True, plain[found.end() :], number, line))

    def _restart(self) -> None:
        """Begin a new start: a container that came back writes on into the same log."""
        if self.start.failures.seen():
            self.failed = (self.start, tuple(self.tail))
        self.start = _Start()
        self.starts += 1

    def _steps(self, plain: str) -> None:
        start = self.start
        for literal, phase in _STEPS:
            if literal in plain:
                start.reached = _further(start.reached, phase)
        if not start.started and (_STARTED[0] in plain or _STARTED[1] in plain):
            start.started = True
            start.reached = _further(start.reached, Phase.READY)
        if "ompil" not in plain and "Cache the graph" not in plain:
            return
        if any(literal in plain for literal in _MISSES):
            start.cache = "miss"
        elif start.cache is None and any(literal in plain for literal in _HITS):
            start.cache = "hit"

    def _result(self, count: int) -> StartupLog:
        start = self.start
        failure = start.failures.result(start.started, start.reached, self.tail, alive=start.alive)
        if failure is None and not start.started and self.failed is not None:
            earlier, ended = self.failed
            failure = earlier.failures.result(
                earlier.started, earlier.reached, ended, alive=earlier.alive
            )
            start = start if failure is None else earlier
        settings = _settings(start)
        model = settings.get("model") or settings.get("model_tag")
        outcome: LogOutcome = "incomplete"
        if failure is not None:
            outcome = "failed"
        elif start.started:
            outcome = "ok"
        return StartupLog(
            values=dict(sorted(start.values.items())),
            every=sorted(start.every, key=lambda value: value.line),
            failure=failure,
            outcome=outcome,
            vllm_version=start.version,
            arguments=settings or None,
            tail=[text.excerpt(line) for line in [*self.tail][-TAIL_LINES:]],
            model=model if isinstance(model, str) else None,
            compile_cache=start.cache,
            reached=start.reached,
            starts=self.starts,
            lines=count,
        )


#: Lines of settings kept of one start: a command line and one configuration per engine.
_SETTINGS_KEPT = 16


def _settings(start: _Start) -> dict[str, object]:
    """Return a start's settings, the command line's over the engine's, and add them as values.

    A line that says a value itself rules over a setting, whichever came first.
    """
    engine: dict[str, object] = {}
    command: dict[str, object] = {}
    said = dict(start.values)
    for is_engine, printed, number, line in start.settings:
        found = arguments.fields(printed)
        (engine if is_engine else command).update(found)
        for key, name in _SETTINGS:
            value = found.get(key)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            at = max(0, line.find(key))
            shown = text.excerpt(line, at, at + 80)
            said_exactly = Value(name, value, value, value, number, shown, text.rank(line))
            start.add(said_exactly)
            if name in _EXACT_SETTINGS:
                start.values[name] = said_exactly
    for name, value in said.items():
        exact = start.values[name]
        # An asked size is exact where the line rounds it; both are of one start.
        if name not in _EXACT_SETTINGS or not value.low <= exact.value <= value.high:
            start.values[name] = value
    return engine | {key: value for key, value in command.items() if value is not None}


_EXACT_SETTINGS = frozenset(("requested_kv_cache_bytes",))
#: Settings that are values too: what the engine was started with, where no line of its own says it.
_SETTINGS: tuple[tuple[str, str], ...] = (
    ("max_seq_len", "max_model_len_tokens"),
    ("max_model_len", "max_model_len_tokens"),
    ("gpu_memory_utilization", "gpu_memory_utilization_ratio"),
    ("kv_cache_memory_bytes", "requested_kv_cache_bytes"),
    ("tensor_parallel_size", "tensor_parallel_size"),
    ("pipeline_parallel_size", "pipeline_parallel_size"),
)


def _read_count(printed: str) -> tuple[int, int, int]:
    number = units.count(printed)
    return number, number, number


_READ: dict[Kind, Callable[[str], tuple[int | float, int | float, int | float]]] = {
    "bytes": units.byte_interval,
    "number": units.interval,
    "count": _read_count,
}


def _further(held: Phase | None, reached: Phase | None) -> Phase | None:
    if reached is None or (held is not None and _ORDER[held] >= _ORDER[reached]):
        return held
    return reached


def _ruling(held: Value, new: Value) -> Value:
    rule = RULING.get(new.name, "last")
    if rule == "last":
        return new
    better = new.value < held.value if rule == "min" else new.value > held.value
    return new if better else held
