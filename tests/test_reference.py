"""flows/README.md is the command reference, made from the commands themselves.

Regenerate with MEMSWEEP_REGENERATE=1; the test fails after rewriting, so that CI cannot pass on a
reference nobody has looked at.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import click
import typer

from flows import cli

REFERENCE = Path(__file__).parent.parent / "flows/README.md"
HEAD = """# flows

The flow (`sweep.py`), the command line (`cli.py`, `commands/`) and the shipped sweeps (`sweeps/`).
Every `--json` prints one object that begins with `"format": 1`; keys are only ever added. stdout is
data, stderr is talk. RUN is a UUID, a unique prefix of one, or `latest`; SWEEP a shipped name or a
file.

Made from the commands by tests/test_reference.py (MEMSWEEP_REGENERATE=1 rewrites it).
"""


def leaves(group: click.Group, prefix: str = "memsweep") -> list[tuple[str, click.Command]]:
    found: list[tuple[str, click.Command]] = []
    for name, command in group.commands.items():
        full = f"{prefix} {name}"
        if isinstance(command, click.Group):
            found += leaves(command, full)
        else:
            found.append((full, command))
    return found


def commands() -> list[tuple[str, click.Command]]:
    group = typer.main.get_command(cli.build())
    assert isinstance(group, click.Group)
    return leaves(group)


def render() -> str:
    parts = [HEAD]
    for name, command in commands():
        usage = " ".join(
            parameter.make_metavar(click.Context(command))
            for parameter in command.params
            if isinstance(parameter, click.Argument)
        )
        parts.append(f"\n## `{name}{' ' + usage if usage else ''}`\n")
        parts.append("\n" + inspect.cleandoc(command.help or "") + "\n")
        options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
        if options:
            parts.append("\n| option | meaning |\n|---|---|\n")
            for option in options:
                names = ", ".join([*option.opts, *option.secondary_opts])
                parts.append(f"| `{names}` | {(option.help or '').replace('|', chr(92) + '|')} |\n")
    return "".join(parts)


def test_the_reference_is_what_the_commands_say() -> None:
    made = render()
    if os.environ.get("MEMSWEEP_REGENERATE"):
        REFERENCE.write_text(made)
        raise AssertionError(f"{REFERENCE} was rewritten; look at it and run again without")
    assert REFERENCE.read_text() == made


def test_every_command_and_option_has_help_and_every_command_an_example() -> None:
    for name, command in commands():
        assert "Example" in (command.help or ""), f"{name}: no example in its help"
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{name}: {parameter.name} has no help"
