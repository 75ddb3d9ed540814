"""The command line: a table of commands, no logic.

Every command lives in ``flows/commands`` and imports heavy packages only when it runs, so that
planning and parsing answer at once.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from flows.output import emit_text, say
from warehouse.errors import MemsweepError

#: Modules of flows/commands, in the order the help shows their groups.
MODULES = (
    "running",
    "status",
    "scheduling",
    "planning",
    "pinning",
    "linting",
    "capacity",
    "parse_log",
    "looking",
    "reporting",
    "auditing",
    "reproducing",
    "upkeep",
    "pruning",
    "services",
    "doctor",
)


def build() -> typer.Typer:
    """Return the application with every command registered."""
    app = typer.Typer(
        name="memsweep",
        help="How much GPU memory does this model, served this way, really need?",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name in MODULES:
        importlib.import_module(f"flows.commands.{name}").register(app)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        emit_text(version("memsweep"))
        raise typer.Exit


def _options(
    version_: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="print the version"),
    ] = False,
) -> None:
    """How much GPU memory does this model, served this way, really need?"""
    del version_  # handled by its callback


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; exits 0, 1, 2, 3 or 130 as the README's table says, never with a traceback
    for what the user or the machine did."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    _usable_streams()
    try:
        result = typer.main.get_command(build()).main(
            args=list(arguments) if arguments is not None else None,
            prog_name="memsweep",
            standalone_mode=False,
        )
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output went away (`memsweep runs | head`): not a fault.
        _drop_stdout()
        return 0
    except OSError as error:
        _drop_stdout()
        return _told(error)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the last line of defence
        return _told(error)
    return result if isinstance(result, int) else 0


def _usable_streams() -> None:
    """Make printing safe: a closed stream swallows, an odd encoding shows a question mark."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            sink = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until the end
            setattr(sys, name, sink)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _drop_stdout() -> None:
    """Let Python's last flush succeed; it would complain once more of a full disk or pipe."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _told(error: BaseException) -> int:
    """Say in one line what went wrong and return the exit code; no traceback for users."""
    if _comes_from_ctrl_c(error):
        error = KeyboardInterrupt()
    match error:
        case typer.Exit():
            return error.exit_code
        case typer.Abort() | KeyboardInterrupt():
            say("memsweep: interrupted")
            return 130
        case typer.TyperException():
            if words := _one_line(error):  # empty when help was printed for want of arguments
                where = getattr(getattr(error, "ctx", None), "command_path", "memsweep")
                say(f"memsweep: {words}; see: {where} --help")
            return 2
        case MemsweepError():
            say(f"memsweep: {' '.join(str(error).split())}")
            return error.exit_code
        case OSError():
            where = f"{error.filename}: " if error.filename else ""
            say(f"memsweep: {where}{error.strerror or error}")
            return 3
    if os.environ.get("MEMSWEEP_TRACEBACK"):
        raise error
    what = " ".join(str(error).split())[:500]
    kind = type(error).__name__
    say(f"memsweep: {kind}: {what} (not foreseen; MEMSWEEP_TRACEBACK=1 shows where)")
    return 3


def _comes_from_ctrl_c(error: BaseException | None) -> bool:
    """Whether a Ctrl-C is at the root: libraries turn one during their import into an error."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _one_line(error: typer.TyperException) -> str:
    """Return a usage error's words; Typer's own printing takes several lines and a box."""
    words = error.format_message() if hasattr(error, "format_message") else str(error)
    return " ".join(str(words).split()).rstrip(".")


if __name__ == "__main__":
    main()
