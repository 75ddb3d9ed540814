"""flows/README.md is the command reference, made from the commands themselves.

Regenerate with MEMSWEEP_REGENERATE=1; the test fails after rewriting, so that CI cannot pass on a
reference nobody has looked at.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from pathlib import Path

import typer
from pydantic import BaseModel
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from flows import cli
from tasks.plan.cell import LoadPoint, Sampling, ServerSettings
from tasks.plan.sweep import Experiment, LoadPatch, ServerPatch, Sweep, SweepPins

REFERENCE = Path(__file__).parent.parent / "flows/README.md"
HEAD = """# flows

The flow (`sweep.py`), the command line (`cli.py`, `commands/`) and the shipped sweeps (`sweeps/`).
Every `--json` prints one object that begins with `"format": 1`; keys are only ever added. stdout is
data, stderr is talk. RUN is a UUID, a unique prefix of one, or `latest`; SWEEP a shipped name or a
file.

Made from the commands by tests/test_reference.py (MEMSWEEP_REGENERATE=1 rewrites it).
"""


#: Keys whose models leave it to their names.
SAYS = {
    "name": "small letters, digits and -",
    "description": "for people; part of the sweep's hash, not of a cell's",
    "pins": "what is fixed by content; see below",
    "server": "settings of the server; see below",
    "load": "settings of the load; see below",
    "sampling": "how often is sampled; see below",
    "experiments": "the cells; see below",
    "server_interval_s": "between two scrapes of the server's metrics, s",
    "gpu_interval_s": "between two samples of the GPU, s",
    "process_interval_s": "between two samples of the processes' memory, s",
}


def leaves(group: TyperGroup, prefix: str = "memsweep") -> list[tuple[str, TyperCommand]]:
    found: list[tuple[str, TyperCommand]] = []
    for name, command in group.commands.items():
        full = f"{prefix} {name}"
        if isinstance(command, TyperGroup):
            found += leaves(command, full)
        else:
            assert isinstance(command, TyperCommand)
            found.append((full, command))
    return found


def commands() -> list[tuple[str, TyperCommand]]:
    group = typer.main.get_command(cli.build())
    assert isinstance(group, TyperGroup)
    return leaves(group)


def options(command: TyperCommand) -> list[TyperOption]:
    return [p for p in command.params if isinstance(p, TyperOption) and p.name != "help"]


def arguments(command: TyperCommand) -> list[str]:
    found = []
    for parameter in command.params:
        if isinstance(parameter, TyperArgument):
            name = parameter.metavar or str(parameter.name).upper()
            more = "…" if parameter.nargs == -1 and "…" not in name else ""
            text = f"{name}{more}"
            found.append(text if parameter.required or "[" in text else f"[{text}]")
    return found


def keys() -> Iterator[str]:
    """Yield tables of all keys of a sweep file, from the models that read it."""
    yield "\n## Keys of a sweep\n"
    for title, model, words in (
        ("The file", Sweep, Sweep),
        ("`experiments`: a list of these", Experiment, Experiment),
        ("`server`, and what `vary` may name: vLLM's options", ServerPatch, ServerSettings),
        ("`load`, each of `points`, and what `vary_load` may name", LoadPatch, LoadPoint),
        ("`pins`", SweepPins, SweepPins),
        ("`sampling`", Sampling, Sampling),
    ):
        yield f"\n{title}:\n\n| key | meaning | left out |\n|---|---|---|\n"
        for name in model.model_fields:
            field = words.model_fields[name]
            says_little = field.is_required() or field.default_factory is not None
            says_little = says_little or isinstance(field.default, BaseModel | None)
            default = "" if says_little or field.default == "" else f"`{field.default}`"
            own = model.model_fields[name].description
            yield f"| `{name}` | {own or field.description or SAYS[name]} | {default} |\n"


def render() -> str:
    parts = [HEAD]
    for name, command in commands():
        parts.append(f"\n## `{' '.join([name, *arguments(command)])}`\n")
        parts.append("\n" + inspect.cleandoc(command.help or "") + "\n")
        if options(command):
            parts.append("\n| option | meaning |\n|---|---|\n")
            for option in options(command):
                names = ", ".join([*option.opts, *option.secondary_opts])
                parts.append(f"| `{names}` | {(option.help or '').replace('|', chr(92) + '|')} |\n")
    return "".join([*parts, *keys()])


def test_the_reference_is_what_the_commands_say() -> None:
    made = render()
    if os.environ.get("MEMSWEEP_REGENERATE"):
        REFERENCE.write_text(made)
        raise AssertionError(f"{REFERENCE} was rewritten; look at it and run again without")
    assert REFERENCE.read_text() == made


def test_every_command_and_option_has_help_and_every_command_an_example() -> None:
    for name, command in commands():
        assert "Example" in (command.help or ""), f"{name}: no example in its help"
        for option in options(command):
            assert option.help, f"{name}: {option.name} has no help"
