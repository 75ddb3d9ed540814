"""``parse-log``: any vLLM log to values, a diagnosis, and what to change."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.output import emit_json, emit_text, print_table, say
from warehouse.errors import BadInput

if TYPE_CHECKING:
    from tasks.capture.advice import Expected
    from tasks.capture.failures import Failure
    from tasks.capture.startup_log import StartupLog, Value

_CHUNK = 1 << 20


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("parse-log", rich_help_panel="Plan")(parse_log)


def parse_log(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a vLLM log; - reads stdin")],
    config: Annotated[
        Path | None,
        typer.Option("--config", help="the model's config.json: adds what the memory would hold"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Read any vLLM log, whole or an excerpt: values, diagnosis, and what to change.

    Works on logs of 0.5 to 0.33, with container prefixes, colours, several ranks and cut lines.

    Example: `memsweep parse-log server.log --config model/config.json`
    """
    from tasks.capture import advice, startup_log, text

    description = None
    if config is not None:
        from flows.commands.capacity import plain_config
        from tasks.plan import model

        with plain_config(str(config)):
            description = model.describe(model.load(config), where=str(config))
    log = startup_log.parse(text.lines(_chunks(file)))
    expected = None
    note = None
    if description is not None:
        try:
            expected = advice.expect(log, description)
        except BadInput as error:
            note = str(error)
    changes = advice.advise(log, expected)
    if json:
        emit_json(document(log, changes, expected, note))
    else:
        show(log, changes, expected, note)
    if not recognised(log):
        say(f"{file}: no line of vLLM's was recognised among {log.lines:,}; wanted a server's log")


def recognised(log: StartupLog) -> bool:
    """Whether anything in the text was understood: else it is no log of vLLM, or says nothing."""
    said = (log.values, log.failure, log.vllm_version, log.model, log.arguments, log.compile_cache)
    return any(said) or log.reached is not None


def _chunks(file: Path) -> Iterator[bytes]:
    """Yield the bytes of ``file`` piece by piece, compressed ones (.gz) unpacked.

    Raises:
        BadInput: the file cannot be read.
    """
    try:
        if str(file) == "-":
            while chunk := sys.stdin.buffer.read(_CHUNK):
                yield chunk
            return
        with file.open("rb") as raw:
            read: Callable[[int], bytes] = raw.read
            if file.suffix == ".gz":
                import gzip

                read = gzip.GzipFile(fileobj=raw).read
            while chunk := read(_CHUNK):
                yield chunk
    except (OSError, EOFError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadInput(f"{file}: cannot be read as a log: {reason}; give a log file") from error


def document(
    log: StartupLog, changes: list[str], expected: Expected | None, note: str | None = None
) -> dict[str, object]:
    """Return a parsed log as the JSON object of ``parse-log --json``."""
    result: dict[str, object] = {
        "vllm_version": log.vllm_version,
        "outcome": log.outcome,
        "failure": _failure(log),
        "values": {name: _value(value) for name, value in log.values.items()},
        "ranks": _ranks(log),
        "model": log.model,
        "arguments": log.arguments,
        "compile_cache": log.compile_cache,
        "reached": log.reached.value if log.reached else None,
        "starts": log.starts,
        "lines": log.lines,
        "recognised": recognised(log),
        "advice": changes,
    }
    if expected is not None:
        result["expected"] = _expected(expected)
    if note is not None:
        result["note"] = note
    return result


def _value(value: Value) -> dict[str, object]:
    return {
        "value": value.value,
        "low": value.low,
        "high": value.high,
        "line": value.line,
        "text": value.text,
        "rank": value.rank,
    }


def _failure(log: StartupLog) -> dict[str, object] | None:
    failure = log.failure
    if failure is None:
        return None
    result: dict[str, object] = {
        "type": failure.type,
        "phase": failure.phase.value if failure.phase_known else None,
        **failure.numbers,
        "outcome": failure.outcome.value,
        "line": failure.line,
        "text": failure.text,
    }
    if failure.tail:
        result["tail"] = list(failure.tail)
    return result


def _ranks(log: StartupLog) -> dict[str, list[dict[str, object]]]:
    """Return every value of the names that more than one line says."""
    named: dict[str, list[Value]] = {}
    for value in log.every:
        named.setdefault(value.name, []).append(value)
    return {
        name: [_value(value) for value in values]
        for name, values in named.items()
        if len({value.rank for value in values}) > 1
    }


def _expected(expected: Expected) -> dict[str, object]:
    layout = expected.layout
    result: dict[str, object] = {
        "max_model_len_tokens": layout.terms.length,
        "attention_block_size_tokens": layout.attention_block_size_tokens,
        "mamba_padding_percent": layout.mamba_padding_percent,
        "bytes_per_block": layout.bytes_per_block,
        "blocks_per_request": layout.blocks_per_request,
        "needed_bytes": expected.needed_bytes,
        "largest_max_model_len_tokens": expected.largest_max_model_len,
        "agrees": expected.agrees,
        "refused": None,
        "candidates": [],
    }
    found = expected.capacity
    if found is not None:
        result["refused"] = found.refusal.type.value if found.refusal else None
        result["candidates"] = [
            {
                "num_gpu_blocks": one.num_gpu_blocks,
                "kv_cache_size_tokens": one.kv_cache_size_tokens,
                "max_concurrency": one.max_concurrency,
            }
            for one in found.candidates
        ]
    return result


def show(
    log: StartupLog, changes: list[str], expected: Expected | None, note: str | None = None
) -> None:
    """Print a parsed log for people."""
    engine = f"vLLM {log.vllm_version}" if log.vllm_version else "vLLM, version not in the log"
    emit_text(
        f"{log.outcome}: {engine}, {log.lines:,} lines" + (f", {log.model}" * bool(log.model))
    )
    if log.starts > 1:
        emit_text(f"the log holds {log.starts} server starts; this is the last that says anything")
    if log.failure is not None:
        _show_failure(log.failure)
    for change in changes:
        emit_text(f"-> {change}")
    if log.values:
        print_table(
            "Values",
            ["value", "as said", "line", "rank"],
            [
                [name, _shown(name, value.value), value.line, value.rank]
                for name, value in log.values.items()
            ],
        )
    if expected is not None:
        _show_expected(expected)
    if note:
        say(f"no expected values: {note}")


def _show_failure(failure: Failure) -> None:
    where = f" in phase {failure.phase.value}" if failure.phase_known else ""
    emit_text(f"failure: {failure.type}{where} ({failure.outcome.value}), line {failure.line}")
    emit_text(f"  {failure.text.strip()}")
    for name, number in failure.numbers.items():
        emit_text(f"  {name} = {_shown(name, number)}")
    for line in failure.tail:
        emit_text(f"  | {line.rstrip()}")


def _show_expected(expected: Expected) -> None:
    described = _expected(expected)
    rows = [
        [name, _shown(name, value)]
        for name, value in described.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    print_table("By the capacity model", ["value", "expected"], rows)
    candidates = described["candidates"]
    if isinstance(candidates, list) and candidates:
        print_table(
            "Pool", list(candidates[0]), [list(candidate.values()) for candidate in candidates]
        )
    if expected.agrees is not None:
        emit_text(f"log and model {'agree' if expected.agrees else 'do NOT agree'} on tokens")


def _shown(name: str, value: int | float) -> str:
    if name.endswith("_bytes"):
        return f"{value:,} ({value / 2**30:.2f} GiB)"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
