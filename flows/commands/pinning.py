"""``pin``: tags and branches resolved to digests and commits, written beside the sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.commands.planning import JsonOption, SweepArgument, TargetOption
from flows.output import emit_json, print_table, say
from flows.shipped import find_sweep, shipped
from tasks.launch import image as recipe
from tasks.launch import models, pins
from tasks.launch import target as targets
from tasks.pins import ENGINE_VERSION
from tasks.plan.cell import UNRESOLVED
from tasks.plan.sweep import Sweep, SweepPins, parse_sweep
from warehouse.errors import BadInput, CannotFindOut

Step = tuple[str, Callable[[], pins.Found]]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("pin", rich_help_panel="Plan")(pin)


def pin(
    sweep: SweepArgument,
    target: TargetOption = "local",
    image: Annotated[
        str | None,
        typer.Option(
            metavar="IMAGE:TAG", help="engine image; without it the target's, tagged vVERSION"
        ),
    ] = None,
    branch: Annotated[str, typer.Option(help="branch or tag of the model's repository")] = "main",
    build: Annotated[
        bool, typer.Option("--build", help="also the official vLLM image, to build ours from")
    ] = False,
    registry: Annotated[
        str | None, typer.Option(metavar="URL", help="ask this registry instead of the image's own")
    ] = None,
    hub: Annotated[
        str | None, typer.Option(metavar="URL", help="ask this hub; without it HF_ENDPOINT's")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="where the pins go")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Resolve a sweep's open pins where the registries answer, and write them beside it.

    Image tags become digests, model branches commits; each with its source and time. What a sweep
    states already is kept, and so is an image found earlier that this call does not ask for (with
    another target or --build). What cannot be resolved stays open and is named, with exit 3. The
    file SWEEP.pins.yaml is read with the sweep from then on (a shipped sweep's: in this folder).

    Example: `memsweep pin demo`
    """
    from flows.context import refuse_secrets

    registry = registry and pins.address(registry, what="--registry")
    hub = hub and pins.address(hub, what="--hub")
    shipped_path = shipped().get(sweep)
    place = pins.beside(shipped_path or Path(sweep), is_shipped=shipped_path is not None)
    where, text = find_sweep(sweep, with_pins=False)
    refuse_secrets(where, text)
    parsed = parse_sweep(text, where=where)
    wanted = _image(parsed, targets.load(target), image)
    steps = list(_steps(parsed, wanted, branch, registry, hub, build=build))
    found, missing = pins.resolve(iter(steps))
    path = output or place
    not_asked = _not_asked(parsed, wanted, build=build)
    kept = pins.kept(path, sweep=parsed.name, missing=missing, not_asked=not_asked) if found else []
    for one in kept:
        say(f"{one.what}: not resolved anew, {path} keeps {one.value} of {one.at}")
    sources = [*kept, *found]
    file = pins.PinsFile(
        format=pins.FORMAT,
        sweep=parsed.name,
        pins=SweepPins.model_validate(
            {one.pin: one.value for one in sources if one.pin in SweepPins.model_fields}
        ),
        build=_arguments(parsed, sources),
        sources=tuple(sources),
    )
    if found:
        path.write_text(pins.written(file), encoding="utf-8")
    _show(file, path if found else None, missing, json=json)
    if missing:
        raise CannotFindOut(f"sweep {parsed.name}: not resolved: {'; '.join(missing)}")


def _version(sweep: Sweep) -> str:
    return sweep.pins.engine_version or ENGINE_VERSION


def _image(sweep: Sweep, profile: targets.Profile, image: str | None) -> str | None:
    """Return the engine image whose digest is open, by tag; ``None`` where there is none."""
    if image is not None:
        return image
    if profile.image is None or sweep.pins.image_digest not in (None, UNRESOLVED):
        return None
    return f"{profile.image}:{recipe.TAG.format(version=_version(sweep))}"


def _not_asked(sweep: Sweep, image: str | None, *, build: bool) -> set[str]:
    """Return the pins that are open and that this call does not look for: images only.

    Which image there is depends on the target and the options; the model is the sweep's.
    """
    is_open = sweep.pins.image_digest in (None, UNRESOLVED)
    pins_left = {"image_digest": image is None and is_open, "base": not build}
    return {pin for pin, is_left in pins_left.items() if is_left}


def _steps(
    sweep: Sweep,
    image: str | None,
    branch: str,
    registry: str | None,
    hub: str | None,
    *,
    build: bool,
) -> Iterator[Step]:
    """Yield what is to be resolved, in words and as a call."""
    if image is not None:
        wanted = pins.image(image)
        yield f"image {image}", lambda: pins.digest_of(wanted, registry=registry)
    if build:
        base = pins.image(recipe.official(_version(sweep)))
        yield (
            f"image {base.text}",
            lambda: pins.digest_of(base, registry=registry).model_copy(update={"pin": "base"}),
        )
    names = {sweep.model, *(one.model for one in sweep.experiments if one.model)}
    open_models = sorted(name for name in names if not models.is_generated(name))
    if open_models and sweep.pins.model_revision in (None, UNRESOLVED):
        if len(open_models) > 1:
            raise BadInput(
                f"sweep {sweep.name}: one pin cannot hold the commits of {len(open_models)} models "
                f"({', '.join(open_models)}); make a sweep of each"
            )
        model = open_models[0]
        yield (
            f"model {model}",
            lambda: pins.commit_of(model, branch=branch, endpoint=hub),
        )


def _arguments(sweep: Sweep, found: list[pins.Found]) -> dict[str, str]:
    for one in found:
        # One that was kept may be of the version before.
        if one.pin == "base" and one.of == recipe.official(_version(sweep)):
            return recipe.arguments(
                base_image=pins.image(one.of).without_tag,
                base_digest=one.value,
                engine_version=_version(sweep),
            )
    return {}


def _show(file: pins.PinsFile, path: Path | None, missing: list[str], *, json: bool) -> None:
    document: dict[str, Any] = {
        "sweep": file.sweep,
        "file": None if path is None else str(path),
        "pins": [one.model_dump(mode="json") for one in file.sources],
        "build": file.build,
        "unresolved": missing,
    }
    if json:
        emit_json(document)
        return
    if file.sources:
        print_table(
            f"Pins of {file.sweep}",
            ["pin", "of", "value", "source"],
            [[one.pin, one.of, one.value, one.source] for one in file.sources],
        )
    elif not missing:
        say("nothing is open: the sweep states its pins, or its models are generated here")
    if file.build:
        say("build: " + " ".join(f"-P {k.lower()}={v}" for k, v in file.build.items()))
    if path is not None:
        say(f"written to {path}")
