"""A cell: one server configuration with its ordered load points, every pin resolved.

Nothing downstream fills in a default: what is not in a cell was not asked for. Two keys name it:

* ``setting_key`` hashes settings and load without pins (joins engine versions, nights, machines);
* ``cell_key`` hashes the setting key, the pins and the harness number.

Labels, expectations, deadlines and sampling intervals are carried along but not hashed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_serializer, model_validator
from pydantic_core.core_schema import SerializerFunctionWrapHandler

from tasks import prompts as prompt_file
from tasks.canonical import canonical_json, content_key
from tasks.pins import CELL_FORMAT, HARNESS
from warehouse.registry import Outcome

UNRESOLVED = "unresolved"

#: A cell travels in one environment variable (Linux: 128 KiB, its name included).
MAX_CELL_BYTES = 120_000

#: A hub id (owner/name) or the name of a generated model; never a path with "..".
MODEL_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?$"

# Strict: "2048" and true are slips, not numbers.
PositiveInt = Annotated[int, Field(ge=1, strict=True)]
NonNegativeInt = Annotated[int, Field(ge=0, strict=True)]


class Strict(BaseModel):
    """Base of every configuration and record model.

    Unknown keys are errors: a misspelt key would otherwise leave a default in force while the user
    believes to have changed it, and the measurement would be filed under the wrong configuration.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ServerSettings(Strict):
    """vLLM's arguments that can move a memory figure. Names are vLLM's own."""

    max_model_len: PositiveInt = Field(description="context limit, tokens")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of device memory")
    max_num_seqs: PositiveInt = Field(256, description="sequences scheduled in one step")
    max_num_batched_tokens: PositiveInt = Field(2048, description="tokens scheduled in one step")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="type of weights and activations"
    )
    kv_cache_dtype: str = Field(
        "auto", pattern=r"^[a-z0-9_]+$", description="type of the KV cache, vLLM's name"
    )
    kv_cache_memory_bytes: PositiveInt | None = Field(
        None, description="explicit size of the KV pool in bytes; skips profiling"
    )
    enable_prefix_caching: bool = Field(False, description="share equal prompt prefixes")
    enforce_eager: bool = Field(False, description="no compilation and no CUDA graphs")
    tensor_parallel_size: PositiveInt = Field(1, description="ranks that split each layer")
    pipeline_parallel_size: PositiveInt = Field(1, description="ranks that split the layers")
    block_size: PositiveInt | None = Field(None, description="tokens a block; None: vLLM's choice")
    language_model_only: bool = Field(False, description="drop the vision tower")
    seed: NonNegativeInt = Field(0, description="the engine's seed")

    @model_validator(mode="after")
    def _batch_holds_every_sequence(self) -> ServerSettings:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, wanted at least "
                f"max_num_seqs ({self.max_num_seqs}): vLLM refuses less"
            )
        return self


class Prompts(Strict):
    """A frozen prompt file (tasks/prompts.py) by its content; the cell carries the text along."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="sha256 of the file")
    tokens: tuple[PositiveInt, ...] = Field(
        min_length=1, description="tokens of every prompt as the server counts them"
    )


@functools.lru_cache(maxsize=64)
def prompts_of(content: str) -> Prompts:
    """Return what names a prompt file's content; raises ``ValueError`` naming the line."""
    return Prompts(
        sha256=prompt_file.sha256(content),
        tokens=tuple(prompt.tokens for prompt in prompt_file.parse(content)),
    )


class LoadPoint(Strict):
    """One EvalScope level: ``number`` requests, ``parallel`` at a time."""

    prompt_tokens: PositiveInt = Field(
        512, description="tokens asked for a prompt; of a prompt file, those of its longest"
    )
    output_tokens: PositiveInt = Field(128, description="tokens asked for an answer")
    parallel: PositiveInt = Field(description="requests in flight")
    number: PositiveInt = Field(description="requests measured")
    warmup: NonNegativeInt = Field(4, description="requests before the measurement")
    prefix_tokens: NonNegativeInt = Field(0, description="tokens every prompt begins with")
    temperature: float = Field(0.0, ge=0, description="sampling temperature")
    seed: NonNegativeInt = Field(42, description="seed of the random prompts")
    ignore_eos: bool = Field(True, description="answers always have their full length")
    enable_thinking: bool = Field(False, description="passed to the chat template")
    dataset: Literal["random", "file"] = Field("random", description="where prompts come from")
    prompts: Prompts | None = Field(None, description="the prompt file of dataset file")

    @model_serializer(mode="wrap")
    def _without_absent_prompts(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave the key out where there is no file: cells of random prompts keep their keys."""
        document: dict[str, Any] = handler(self)
        if document.get("prompts") is None:
            document.pop("prompts", None)
        return document

    @model_validator(mode="after")
    def _prompts_of_a_file(self) -> LoadPoint:
        if (self.prompts is not None) != (self.dataset == "file"):
            got = "none" if self.prompts is None else "a prompt file"
            raise ValueError(
                f"dataset is {self.dataset} with prompts {got}, wanted dataset file with one or "
                "dataset random without; state prompts: FILE"
            )
        if self.prompts is not None:
            longest = max(self.prompts.tokens)
            if (self.prompt_tokens, self.prefix_tokens) != (longest, 0):
                raise ValueError(
                    f"prompt_tokens is {self.prompt_tokens} and prefix_tokens {self.prefix_tokens},"
                    f" wanted {longest} and 0, as the prompt file states"
                )
        return self

    @model_validator(mode="after")
    def _enough_requests(self) -> LoadPoint:
        if self.number < self.parallel:
            raise ValueError(
                f"number is {self.number}, wanted at least parallel ({self.parallel}): "
                "the concurrency would never be reached"
            )
        return self


class ModelRef(Strict):
    """Which model; its revision is a pin."""

    name: str = Field(pattern=MODEL_NAME, description="hub id or tiny model")


class Setting(Strict):
    """What is asked of the server and of the load, without pins."""

    model: ModelRef
    server: ServerSettings
    load: tuple[LoadPoint, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _fits_context(self) -> Setting:
        for index, point in enumerate(self.load):
            tokens = point.prefix_tokens + point.prompt_tokens + point.output_tokens
            if tokens > self.server.max_model_len:
                raise ValueError(
                    f"load[{index}] needs {tokens} tokens (prompt {point.prompt_tokens} + prefix "
                    f"{point.prefix_tokens} + output {point.output_tokens}), wanted at most "
                    f"max_model_len ({self.server.max_model_len})"
                )
        return self

    @property
    def key(self) -> str:
        """sha256 of the canonical settings and load."""
        return content_key(self.model_dump(mode="json"))


class Pins(Strict):
    """Everything that is fixed by content; ``unresolved`` where it is not known yet."""

    device: Literal["cpu", "cuda"]
    model_revision: str = Field(pattern=r"^(sha256:[0-9a-f]{64}|[0-9a-f]{40}|unresolved)$")
    engine_version: str
    engine_lock_sha256: str | None = Field(pattern=r"^[0-9a-f]{64}$")
    image_digest: str | None = Field(pattern=r"^(sha256:[0-9a-f]{64}|unresolved)$")
    bench_version: str
    bench_lock_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    @property
    def unresolved(self) -> list[str]:
        """Names of pins that are not resolved; a run is refused while there is one."""
        return [name for name, value in self if value == UNRESOLVED]


class Limits(Strict):
    """Deadlines of one run in seconds, computed by the plan."""

    start_s: float
    ready_s: float
    load_point_s: tuple[float, ...]
    stop_s: float
    run_s: float


class Sampling(Strict):
    """Intervals of the samplers in seconds."""

    server_interval_s: float = Field(0.25, ge=0.05, le=60)
    process_interval_s: float = Field(1.0, ge=0.1, le=60)
    gpu_interval_s: float = Field(1.0, ge=0.1, le=60)


class Cell(Strict):
    """One server configuration with its load points and pins: a value, its keys are its content."""

    format: int = CELL_FORMAT
    harness: int = HARNESS
    label: str = Field(description="experiment and what varies in it; not hashed")
    setting: Setting
    pins: Pins
    limits: Limits
    expect: Outcome | None = Field(None, description="the outcome that counts as success")
    sampling: Sampling = Sampling()
    prompts: dict[str, str] = Field(
        default_factory=dict, description="content of every prompt file by its sha256; not hashed"
    )

    @model_serializer(mode="wrap")
    def _without_absent_prompts(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = handler(self)
        if not document.get("prompts"):
            document.pop("prompts", None)
        return document

    @model_validator(mode="after")
    def _carries_its_prompts(self) -> Cell:
        named = {
            point.prompts.sha256: point.prompts for point in self.setting.load if point.prompts
        }
        if set(named) != set(self.prompts):
            raise ValueError(
                f"prompts: got the files {sorted(self.prompts)}, wanted {sorted(named)}"
            )
        for digest, content in self.prompts.items():
            if prompts_of(content) != named[digest]:
                raise ValueError(f"prompts: the content of {digest} is not what the load names")
        return self

    @functools.cached_property
    def setting_key(self) -> str:
        """sha256 of settings and load without pins."""
        return self.setting.key

    @functools.cached_property
    def cell_key(self) -> str:
        """sha256 of setting key, pins and harness number."""
        return content_key(
            {
                "setting_key": self.setting_key,
                "pins": self.pins.model_dump(mode="json"),
                "harness": self.harness,
            }
        )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy that computes its keys anew: it may have another content."""
        copied = super().model_copy(update=update, deep=deep)
        for name in ("setting_key", "cell_key"):
            copied.__dict__.pop(name, None)
        return copied

    def document(self) -> dict[str, object]:
        """Return the JSON object handed to the run, both keys included."""
        return {
            **self.model_dump(mode="json"),
            "setting_key": self.setting_key,
            "cell_key": self.cell_key,
        }

    def canonical(self) -> str:
        """Return the canonical JSON text of :meth:`document`."""
        return canonical_json(self.document())

    @classmethod
    def parse(cls, document: dict[str, object]) -> Cell:
        """Read a cell from its document; raises ``ValueError`` when a key does not match."""
        fields = {k: v for k, v in document.items() if k not in ("setting_key", "cell_key")}
        cell = cls.model_validate(fields)
        for name in ("setting_key", "cell_key"):
            got, wanted = document.get(name), getattr(cell, name)
            if got is not None and got != wanted:
                raise ValueError(f"{name} is {got}, but the cell's content hashes to {wanted}")
        return cell
