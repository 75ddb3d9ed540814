"""What a run gets: one cell and a few places, all from environment variables, checked strictly.

The cell was validated where it was made, by code that this environment cannot import. It is
checked again here because an unknown key would be a setting that is silently not applied, and
the measurement would be filed under a configuration that never ran.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

from tasks import prompts
from tasks.canonical import content_key
from tasks.prompts import Prompt

CELL_FORMAT = 1


T = TypeVar("T")


class InputError(Exception):
    """The run was given something it cannot use; nothing was started."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """vLLM's arguments, under vLLM's names. ``None`` leaves the choice to vLLM."""

    max_model_len: int
    gpu_memory_utilization: float
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str
    kv_cache_dtype: str
    kv_cache_memory_bytes: int | None
    enable_prefix_caching: bool
    enforce_eager: bool
    tensor_parallel_size: int
    pipeline_parallel_size: int
    block_size: int | None
    language_model_only: bool
    seed: int


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One EvalScope level: ``number`` requests, ``parallel`` at a time.

    ``prompts`` are those of a prompt file, empty where they are random.
    """

    prompt_tokens: int
    output_tokens: int
    parallel: int
    number: int
    warmup: int
    prefix_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool
    enable_thinking: bool
    dataset: str
    prompts: tuple[Prompt, ...] = ()


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines in seconds, made by the plan."""

    start_s: float
    ready_s: float
    load_point_s: tuple[float, ...]
    stop_s: float
    run_s: float


@dataclass(frozen=True, slots=True)
class Sampling:
    """Intervals of the samplers in seconds."""

    server_interval_s: float
    process_interval_s: float
    gpu_interval_s: float


@dataclass(frozen=True, slots=True)
class Cell:
    """The cell as far as the run needs it; ``document`` is all of it."""

    document: dict[str, object]
    server: ServerSettings
    load: tuple[LoadPoint, ...]
    limits: Limits
    sampling: Sampling
    device: str
    model_revision: str | None
    engine_version: str | None
    bench_version: str | None


@dataclass(frozen=True, slots=True)
class Inputs:
    """The cell and where everything is."""

    cell: Cell
    outputs: Path
    model: Path
    engine_bin: Path
    bench_python: Path
    cache: Path
    run_uuid: str
    reason_file: Path | None


def outputs_folder(environ: Mapping[str, str]) -> Path:
    """Return MEMSWEEP_OUTPUTS, read first so that a bad input can be reported in it."""
    return Path(_variable(environ, "MEMSWEEP_OUTPUTS"))


def read_inputs(environ: Mapping[str, str]) -> Inputs:
    """Read and check everything the run is given; raises :class:`InputError`."""
    reason = environ.get("MEMSWEEP_REASON_FILE")
    inputs = Inputs(
        cell=parse_cell(_cell_text(environ)),
        outputs=outputs_folder(environ),
        model=Path(_variable(environ, "MEMSWEEP_MODEL_PATH")),
        engine_bin=Path(_variable(environ, "MEMSWEEP_ENGINE_BIN")),
        bench_python=Path(_variable(environ, "MEMSWEEP_BENCH_PYTHON")),
        cache=Path(_variable(environ, "MEMSWEEP_CACHE")),
        run_uuid=_variable(environ, "MEMSWEEP_RUN_UUID"),
        reason_file=Path(reason) if reason else None,
    )
    for variable, path in (
        ("MEMSWEEP_MODEL_PATH", inputs.model / "config.json"),
        ("MEMSWEEP_ENGINE_BIN", inputs.engine_bin / "vllm"),
        ("MEMSWEEP_BENCH_PYTHON", inputs.bench_python),
    ):
        if not path.is_file():
            raise InputError(
                f"{variable}: {path} is not there, wanted a file; see `memsweep setup`"
            )
    return inputs


def parse_cell(text: str) -> Cell:
    """Parse and check a cell's JSON text; raises :class:`InputError` naming place and value."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise InputError(f"cell: not JSON ({error})") from error
    top = _object(document, "cell")
    if top.get("format") != CELL_FORMAT:
        raise InputError(f"cell.format: got {top.get('format')!r}, wanted {CELL_FORMAT}")
    setting = _object(top.get("setting"), "cell.setting")
    _check_key(top, "setting_key", setting)
    pins = _object(top.get("pins"), "cell.pins")
    _check_key(
        top,
        "cell_key",
        {"setting_key": content_key(setting), "pins": pins, "harness": top.get("harness")},
    )
    load = setting.get("load")
    if not isinstance(load, list) or not load:
        raise InputError(f"cell.setting.load: got {load!r:.80}, wanted at least one load point")
    cell = Cell(
        document=top,
        server=_build(ServerSettings, setting.get("server"), "cell.setting.server"),
        load=tuple(
            _load_point(point, top.get("prompts") or {}, f"cell.setting.load[{index}]")
            for index, point in enumerate(load)
        ),
        limits=_build(Limits, top.get("limits"), "cell.limits"),
        sampling=_build(Sampling, top.get("sampling"), "cell.sampling"),
        device=_choice(pins.get("device"), ("cpu", "cuda"), "cell.pins.device"),
        model_revision=_text_or_none(pins.get("model_revision"), "cell.pins.model_revision"),
        engine_version=_text_or_none(pins.get("engine_version"), "cell.pins.engine_version"),
        bench_version=_text_or_none(pins.get("bench_version"), "cell.pins.bench_version"),
    )
    _check_values(cell)
    return cell


def _load_point(value: object, texts: object, where: str) -> LoadPoint:
    """Build a load point, with the prompts of the file that it names by hash."""
    given = dict(_object(value, where))
    named = given.pop("prompts", None)
    point = _build(LoadPoint, given, where)
    if named is None:
        return point
    file, where = _object(named, f"{where}.prompts"), f"{where}.prompts"
    content = _object(texts, "cell.prompts").get(str(file.get("sha256")))
    if not isinstance(content, str) or prompts.sha256(content) != file.get("sha256"):
        raise InputError(f"{where}: cell.prompts does not hold the file {file.get('sha256')!r:.80}")
    try:
        found = prompts.parse(content)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from error
    if [prompt.tokens for prompt in found] != file.get("tokens"):
        raise InputError(f"{where}.tokens: not those that the file states")
    return replace(point, prompts=found)


def _check_values(cell: Cell) -> None:
    if len(cell.limits.load_point_s) != len(cell.load):
        raise InputError(
            f"cell.limits.load_point_s: got {len(cell.limits.load_point_s)} deadlines, "
            f"wanted one for each of the {len(cell.load)} load points"
        )
    if cell.sampling.server_interval_s < 0.05:
        raise InputError(
            f"cell.sampling.server_interval_s: got {cell.sampling.server_interval_s}, "
            "wanted at least 0.05"
        )
    for index, point in enumerate(cell.load):
        where = f"cell.setting.load[{index}]"
        _choice(point.dataset, ("file",) if point.prompts else ("random",), f"{where}.dataset")
        for name in ("prompt_tokens", "output_tokens", "parallel", "number"):
            if getattr(point, name) < 1:
                raise InputError(f"{where}.{name}: got {getattr(point, name)}, wanted at least 1")
    for name in ("dtype", "kv_cache_dtype"):
        value = getattr(cell.server, name)
        if not re.fullmatch(r"[a-z0-9_]+", value):
            raise InputError(f"cell.setting.server.{name}: got {value!r}, wanted a type's name")


def _check_key(top: dict[str, object], name: str, content: object) -> None:
    got, wanted = top.get(name), content_key(content)
    if got != wanted:
        raise InputError(f"cell.{name}: got {got!r}, but the content hashes to {wanted}")


def _cell_text(environ: Mapping[str, str]) -> str:
    text = environ.get("MEMSWEEP_CELL")
    if text:
        return text
    path = environ.get("MEMSWEEP_CELL_FILE")
    if not path:
        raise InputError("MEMSWEEP_CELL: not set, wanted the cell's JSON (or MEMSWEEP_CELL_FILE)")
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"MEMSWEEP_CELL_FILE: {path}: {error.strerror or error}") from error


def _variable(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name)
    if not value:
        raise InputError(f"{name}: not set, wanted by the run; the operation passes it")
    return value


def _object(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise InputError(f"{where}: got {value!r:.80}, wanted an object")
    return value


def _text_or_none(value: object, where: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise InputError(f"{where}: got {value!r:.80}, wanted a text or null")


def _choice(value: object, wanted: tuple[str, ...], where: str) -> str:
    if isinstance(value, str) and value in wanted:
        return value
    raise InputError(f"{where}: got {value!r:.80}, wanted one of {', '.join(wanted)}")


def _build(kind: type[T], value: object, where: str) -> T:
    """Build a dataclass of plain fields from an object with exactly its keys and types.

    Fields with a default are not among the keys: they are filled in elsewhere.
    """
    given = _object(value, where)
    wanted = {
        field.name: str(field.type)
        for field in fields(kind)  # type: ignore[arg-type]
        if field.default is MISSING
    }
    unknown = sorted(set(given) - set(wanted))
    missing = sorted(set(wanted) - set(given))
    if unknown or missing:
        raise InputError(f"{where}: unknown keys {unknown}, missing keys {missing}")
    return kind(**{name: _typed(given[name], wanted[name], f"{where}.{name}") for name in wanted})


def _typed(value: object, kind: str, where: str) -> object:
    """Return ``value`` if it is of the annotated ``kind`` (an int passes for a float)."""
    if kind.endswith(" | None"):
        if value is None:
            return None
        kind = kind.removesuffix(" | None")
    if kind.startswith("tuple") and isinstance(value, list):
        return tuple(_typed(item, "float", f"{where}[{i}]") for i, item in enumerate(value))
    number = isinstance(value, int | float) and not isinstance(value, bool)
    good = {
        "bool": isinstance(value, bool),
        "int": number and isinstance(value, int),
        "float": number and math.isfinite(float(value)) if number else False,  # type: ignore[arg-type]
        "str": isinstance(value, str),
    }
    if not good.get(kind, False):
        raise InputError(f"{where}: got {value!r:.80}, wanted {kind}")
    return value
