"""A sweep file: base settings, what varies, the load and the pins, as a user writes them.

Without a strict reader a misspelt key would silently keep a default and the sweep would measure
something else than it says.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, PrivateAttr, ValidationError, model_serializer, model_validator
from pydantic_core.core_schema import SerializerFunctionWrapHandler

from tasks.canonical import content_key
from tasks.plan.cell import (
    MODEL_NAME,
    LoadPoint,
    ModelRef,
    PositiveInt,
    Sampling,
    ServerSettings,
    Setting,
    Strict,
    prompts_of,
)
from warehouse.errors import BadInput
from warehouse.registry import Outcome

#: A prompt file travels inside the cell, which is smaller still.
MAX_PROMPT_BYTES = 1 << 20
NAME = r"^[a-z0-9][a-z0-9-]{0,62}$"
GIB = 2**30

#: Strict: "2048" and true are slips, not numbers.
Whole = Annotated[int, Field(strict=True)]

#: Cells of one sweep; more is nearly always a slip in a grid.
MAX_CELLS = 20_000
#: Load points of one cell, for the same reason.
MAX_POINTS = 1_000

#: Settings along which the engine's memory failures are monotone (tasks/plan/knowledge.py).
FRONTIER_AXES = (
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
)
#: What a sweep states for a night without a sentinel.
NO_SENTINEL = "none"


class BeyondMachine(Strict):
    """A KV-cache size that no machine can grant, to measure the refusal.

    ``beyond_machine`` bytes where the machine has less memory than that, else twice the machine's
    memory (rounded up to whole GiB, so that it does not change with the kernel's own share).
    """

    beyond_machine: PositiveInt = Field(description="bytes asked for on an ordinary machine")

    def resolve(self, memory_total_bytes: int) -> int:
        """Return the bytes to ask for on a machine with ``memory_total_bytes`` of memory."""
        if memory_total_bytes < self.beyond_machine:
            return self.beyond_machine
        return 2 * -(-memory_total_bytes // GIB) * GIB


class ServerPatch(Strict):
    """Part of the server's settings; whatever is left out comes from the level above."""

    max_model_len: Whole | None = None
    gpu_memory_utilization: float | None = None
    max_num_seqs: Whole | None = None
    max_num_batched_tokens: Whole | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    kv_cache_memory_bytes: BeyondMachine | Whole | None = None
    enable_prefix_caching: bool | None = None
    enforce_eager: bool | None = None
    tensor_parallel_size: Whole | None = None
    pipeline_parallel_size: Whole | None = None
    block_size: Whole | None = None
    language_model_only: bool | None = None
    seed: Whole | None = None

    def given(self) -> dict[str, Any]:
        """Return only what the file states."""
        return {name: getattr(self, name) for name in self.model_fields_set}


#: What a prompt file states itself.
_LENGTHS = frozenset(("prompt_tokens", "prefix_tokens", "dataset"))


class LoadPatch(Strict):
    """Part of a load point; whatever is left out comes from the level above."""

    prompt_tokens: Whole | None = None
    output_tokens: Whole | None = None
    parallel: Whole | None = None
    number: Whole | None = None
    warmup: Whole | None = None
    prefix_tokens: Whole | None = None
    temperature: float | None = None
    seed: Whole | None = None
    ignore_eos: bool | None = None
    enable_thinking: bool | None = None
    dataset: str | None = None
    prompts: str | None = Field(
        None, description="prompt file (tasks/prompts.py), beside the sweep, for random prompts"
    )

    @model_serializer(mode="wrap")
    def _without_absent_prompts(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = handler(self)
        if document.get("prompts") is None:
            document.pop("prompts", None)
        return document

    @model_validator(mode="after")
    def _one_source_of_lengths(self) -> LoadPatch:
        both = sorted(_LENGTHS & self.model_fields_set) if self.prompts else []
        if both:
            raise ValueError(f"prompts and {both[0]}: wanted one of them, the file states lengths")
        return self

    def given(self) -> dict[str, Any]:
        """Return only what the file states."""
        return {name: getattr(self, name) for name in self.model_fields_set}


class SweepPins(Strict):
    """What the sweep fixes by content; the target gives the rest."""

    engine_version: str | None = Field(None, description="vLLM's version")
    image_digest: str | None = Field(
        None, pattern=r"^(sha256:[0-9a-f]{64}|unresolved)$", description="the GPU image"
    )
    model_revision: str | None = Field(
        None, pattern=r"^([0-9a-f]{40}|unresolved)$", description="the model's commit"
    )


Axis = Annotated[list[Any], Field(min_length=1)]


def _is_absent(value: object) -> bool:
    """A key that a sweep does not state is none of its identity: older sweeps keep their hash."""
    return value is None


class Experiment(Strict):
    """Cells that belong together: one server setting per combination of ``vary``."""

    name: str = Field(pattern=NAME)
    description: str = ""
    model: str | None = Field(None, pattern=MODEL_NAME, description="overrides the sweep's model")
    server: ServerPatch = ServerPatch()
    vary: dict[str, Axis] = Field(default_factory=dict, description="server setting -> values")
    load: LoadPatch = LoadPatch()
    vary_load: dict[str, Axis] = Field(default_factory=dict, description="load setting -> values")
    points: list[LoadPatch] = Field(min_length=1, description="load points, in this order")
    expect: Outcome | None = Field(None, description="the outcome that counts as success")
    bisect: str | None = Field(
        None,
        exclude_if=_is_absent,
        description="axis of vary whose frontier is bisected: settled cells are left out",
    )

    @model_validator(mode="after")
    def _axes_exist(self) -> Experiment:
        for axes, known, where in (
            (self.vary, ServerSettings.model_fields, "vary"),
            (self.vary_load, LoadPoint.model_fields, "vary_load"),
        ):
            for name in axes:
                if name not in known:
                    raise ValueError(
                        f"{where}: unknown setting {name!r}, wanted one of {', '.join(known)}"
                    )
        return self

    @model_validator(mode="after")
    def _frontier_can_be_found(self) -> Experiment:
        axis = self.bisect
        if axis is None:
            return self
        usable = [name for name in FRONTIER_AXES if name in self.vary]
        if axis not in usable:
            raise ValueError(
                f"bisect is {axis!r}, wanted one of the settings in vary along which failures are "
                f"monotone ({', '.join(usable) or 'there is none'})"
            )
        if self.expect is not None:
            raise ValueError("bisect and expect: wanted one of them, an expectation is measured")
        odd = [value for value in self.vary[axis] if not isinstance(value, int | float)]
        if odd:
            raise ValueError(f"bisect: vary.{axis} holds {odd[0]!r}, wanted numbers only")
        return self


class Sweep(Strict):
    """One sweep file."""

    name: str = Field(pattern=NAME)
    description: str = ""
    model: str = Field(
        pattern=MODEL_NAME, description="hub id, or the name of a tiny model the project generates"
    )
    repeats: int = Field(2, ge=1, le=100, description="runs of every cell in a round")
    pins: SweepPins = SweepPins()
    server: ServerPatch = ServerPatch()
    load: LoadPatch = LoadPatch()
    sampling: Sampling = Sampling()
    order: Literal["stated"] | None = Field(
        None,
        exclude_if=_is_absent,
        description="stated: cells in the order of the file, where one prepares the next; absent: "
        "shuffled by the round's seed",
    )
    sentinel: str | None = Field(
        None,
        exclude_if=_is_absent,
        description="label of the cell, or its experiment, that is measured at start, middle and "
        "end; none switches a night's own off",
    )
    experiments: list[Experiment] = Field(min_length=1)
    _files: dict[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _names_differ(self) -> Sweep:
        names = [experiment.name for experiment in self.experiments]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"experiments: the name {twice[0]!r} is used twice")
        return self

    @property
    def sha256(self) -> str:
        """The sweep's identity: sha256 of its canonical form (comments and key order aside).

        Prompt files count by their content.
        """
        document = self.model_dump(mode="json")
        if self._files:
            files = {name: prompts_of(content).sha256 for name, content in self._files.items()}
            document["prompt_files"] = files
        return content_key(document)

    @property
    def prompt_files(self) -> Mapping[str, str]:
        """Content of every prompt file by the name the sweep gives it."""
        return self._files

    def prompt_texts(self, setting: Setting) -> dict[str, str]:
        """Return the content of the prompt files that a setting's load uses, by sha256."""
        if not self._files:
            return {}
        texts = {prompts_of(content).sha256: content for content in self._files.values()}
        used = {point.prompts.sha256 for point in setting.load if point.prompts}
        return {digest: texts[digest] for digest in sorted(used)}

    def with_prompts(self, read: Callable[[str], str], *, where: str) -> Sweep:
        """Return the sweep with its prompt files read; raises :class:`BadInput` naming one."""
        files = {}
        for name in self._prompt_names():
            try:
                files[name] = read(name)
                prompts_of(files[name])
            except ValueError as error:
                raise BadInput(f"{where}: prompts {name}: {error}") from error
        result = self.model_copy()
        result._files = files
        return result

    def _prompt_names(self) -> list[str]:
        patches = [self.load]
        names: set[object] = set()
        for experiment in self.experiments:
            patches += [experiment.load, *experiment.points]
            names.update(experiment.vary_load.get("prompts", ()))
        names.update(patch.prompts for patch in patches)
        return sorted(name for name in names if isinstance(name, str))

    def expand(self, *, memory_total_bytes: int) -> Iterator[tuple[Experiment, str, Setting]]:
        """Yield ``(experiment, label, setting)`` per cell, in the file's order.

        Load points that share a server setting share a cell, so one start serves them all.
        """
        size = sum(
            _product(len(values) for values in experiment.vary.values())
            for experiment in self.experiments
        )
        if size > MAX_CELLS:
            raise BadInput(f"sweep {self.name}: {size} cells, wanted at most {MAX_CELLS}")
        for experiment in self.experiments:
            load = self._load(experiment)
            for chosen in _combinations(experiment.vary):
                server = {**self.server.given(), **experiment.server.given(), **chosen}
                label = "/".join([experiment.name, *(f"{k}={v}" for k, v in chosen.items())])
                yield (
                    experiment,
                    label,
                    self._setting(experiment, label, server, load, memory_total_bytes),
                )

    def _load(self, experiment: Experiment) -> list[dict[str, Any]]:
        count = len(experiment.points) * _product(len(v) for v in experiment.vary_load.values())
        if count > MAX_POINTS:
            raise BadInput(
                f"sweep {self.name}, experiment {experiment.name}: {count} load points, wanted at "
                f"most {MAX_POINTS} for one server start"
            )
        levels = (self.load.given(), experiment.load.given())
        return [
            self._frozen(_overlaid(*levels, chosen, point.given()))
            for chosen in _combinations(experiment.vary_load)
            for point in experiment.points
        ]

    def _frozen(self, point: dict[str, Any]) -> dict[str, Any]:
        """Return a load point with what its prompt file states, where it has one."""
        name = point.pop("prompts", None)
        if name is None:
            return point
        if name not in self._files:
            raise BadInput(f"sweep {self.name}: prompts {name!r}: the file was not read")
        file = prompts_of(self._files[name])
        lengths = {"dataset": "file", "prompt_tokens": max(file.tokens), "prefix_tokens": 0}
        return {**point, **lengths, "prompts": file}

    def _setting(
        self,
        experiment: Experiment,
        label: str,
        server: dict[str, Any],
        load: list[dict[str, Any]],
        memory_total_bytes: int,
    ) -> Setting:
        asked = server.get("kv_cache_memory_bytes")
        if isinstance(asked, BeyondMachine):
            server = {**server, "kv_cache_memory_bytes": asked.resolve(memory_total_bytes)}
        try:
            return Setting(
                model=ModelRef(name=experiment.model or self.model),
                server=ServerSettings.model_validate(server),
                load=tuple(LoadPoint.model_validate(point) for point in load),
            )
        except ValidationError as error:
            raise BadInput(f"sweep {self.name}, cell {label}: {first_problem(error)}") from error


def _overlaid(*levels: dict[str, Any]) -> dict[str, Any]:
    """Return a load point's settings, each level over the one before.

    A prompt file takes the place of lengths stated above it, and lengths that of a file.
    """
    result: dict[str, Any] = {}
    for given in levels:
        if given.get("prompts") is not None:
            result = {name: value for name, value in result.items() if name not in _LENGTHS}
        elif _LENGTHS & given.keys():
            result.pop("prompts", None)
        result |= given
    return result


def _product(sizes: Iterator[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _combinations(axes: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def machine_memory_bytes() -> int:
    """Return the machine's memory in bytes (what the kernel calls MemTotal)."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def first_problem(error: ValidationError) -> str:
    """Return a validation error's first problem as one line: where, what, what was got."""
    # An unknown key comes first: a misspelt one is often the cause of a "field required" too. Of
    # the forms that a value may have the plain one is told.
    turn = {"extra_forbidden": 0, "model_type": 2}
    problems = sorted(error.errors(), key=lambda problem: turn.get(problem["type"], 1))
    first = problems[0]
    where = ""
    for part in first["loc"]:
        if part in ("int", "BeyondMachine"):
            continue  # which form, by the name of its type
        where += f"[{part}]" if isinstance(part, int) else f".{part}" if where else str(part)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "no such key"
    got = first.get("input")
    # What an unknown key holds is nobody's business: it may be a secret.
    silent = isinstance(got, dict | list) or first["type"] in ("value_error", "extra_forbidden")
    shown = "" if silent else f", got {got!r}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{where}: {message}{shown}{more}" if where else f"{message}{shown}{more}"


class _UniqueKeys(yaml.SafeLoader):
    """Safe YAML in which a key given twice is an error: PyYAML alone keeps the last, silently."""


def _unique_mapping(loader: _UniqueKeys, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[object] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str | int | float | bool):
            raise yaml.constructor.ConstructorError(
                None, None, "a key must be a plain value", key_node.start_mark
            )
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} is given twice", key_node.start_mark
            )
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def parse_yaml(text: str, *, where: str) -> object:
    """Read safe YAML; raises :class:`BadInput` with file, line and problem in one line."""
    try:
        # S506 does not apply: the loader is a SafeLoader.
        return yaml.load(text, Loader=_UniqueKeys)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise BadInput(f"{where}{line}: not valid YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise BadInput(f"{where}: not valid YAML: {' '.join(str(error).split())}") from error
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where}: not valid YAML: {' '.join(str(error).split())[:200]}") from error


def prompts_in(folder: Path) -> Callable[[str], str]:
    """Return a reader of the prompt files that a sweep in ``folder`` names.

    It raises :class:`BadInput` for a file that is not there, too large or no UTF-8, and for a pipe
    or a device: it has no size, and may have no end.
    """

    def read(name: str) -> str:
        path = folder / name
        try:
            if path.exists() and not path.is_file():
                raise BadInput(f"{path}: is no file, wanted one of prompts")
            if path.stat().st_size > MAX_PROMPT_BYTES:
                raise BadInput(
                    f"{path}: {path.stat().st_size} bytes, wanted at most {MAX_PROMPT_BYTES}"
                )
            return path.read_bytes().decode("utf-8")
        except OSError as error:
            raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise BadInput(f"{path}: not UTF-8: {error}") from error

    return read


def parse_sweep(text: str, *, where: str, read: Callable[[str], str] | None = None) -> Sweep:
    """Read a sweep from its text; raises :class:`BadInput` in one line.

    ``read`` gives the content of the prompt files that the sweep names; without it they stay unread
    and the sweep cannot be expanded.
    """
    document = parse_yaml(text, where=where)
    if not isinstance(document, dict):
        raise BadInput(
            f"{where}: got {type(document).__name__}, "
            "wanted a mapping with name, model and experiments"
        )
    try:
        sweep = Sweep.model_validate(document)
    except ValidationError as error:
        raise BadInput(f"{where}: {first_problem(error)}") from error
    return sweep if read is None else sweep.with_prompts(read, where=where)
