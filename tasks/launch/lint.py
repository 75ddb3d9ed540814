"""What is wrong with a sweep, a polyaxonfile or a profile, found before anything is submitted.

Polyaxon's own check passes an undefined ``{{ name }}`` (it renders empty, and a flag silently loses
its value), any text as a quantity, an image by tag, and a secret written out. All of these would be
found hours later on a cluster, or never.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from tasks.home import Home
from tasks.launch import labels, pins, quantity, render, target
from tasks.plan import published
from tasks.plan.cell import UNRESOLVED
from tasks.plan.plan import Plan
from tasks.plan.sweep import parse_sweep, parse_yaml, prompts_in
from tasks.redact import Secrets, is_secret_name, kinds
from warehouse.errors import BadInput

#: Names Polyaxon gives to every template beside a component's inputs and outputs.
_SECTIONS = frozenset({"params", "inputs", "outputs", "artifacts", "connections", "init", "matrix"})
_GLOBALS = frozenset(
    {
        "owner_name", "project_name", "project_unique_name", "project_uuid", "username",
        "user_email", "run_info", "name", "uuid", "namespace", "iteration", "context_path",
        "artifacts_path", "run_artifacts_path", "run_outputs_path", "run_relative_outputs_path",
        "store_path", "created_at", "compiled_at", "schedule_at", "started_at", "finished_at",
        "duration", "cloning_kind", "original_uuid", "is_independent", "status",
    }
)  # fmt: skip
#: Those of which every name is known here.
_OWNERS = frozenset({"globals", "params", "inputs", "outputs"})
_BY_DIGEST = re.compile(r"^[^@\s]+@sha256:[0-9a-f]{64}$")
_ONE_NAME = re.compile(r"^\{\{\s*(\w+)\s*\}\}$")
_OTHER_TYPES = {"integer": "int", "string": "str", "number": "float", "boolean": "bool"}
#: Maps of the environment section whose values Polyaxon turns into text again.
_TEXT_MAPS = ("labels.", "annotations.", "nodeSelector.")
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ash"})
#: What an input's regex has to end with, so that nothing but an image by digest matches.
_DIGEST_END = "@sha256:[0-9a-f]{64}$"
#: A login before the name of an image, which has no scheme to know an address by.
_LOGIN = re.compile(r"(?<![^\s'\"])[^\s/@:'\"]+:[^\s/@'\"]+@(?!sha256:)")
#: What an input with the name of a secret is called. No field of Kubernetes or Polyaxon is here:
#: ``secret`` is a mapping, and secretName, secretRef and imagePullSecrets say themselves that they
#: hold none.
_NAMES_ONE = frozenset({"imagePullSecret", "image_pull_secret"})
_MAX_SHOWN = 60
#: What is wanted in place of a secret.
_BY_REFERENCE, _BY_KEY = "a secret by reference", "valueFrom.secretKeyRef"
_SILENT = "a restart would hide the first attempt, and podFailurePolicy asks for Never"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, and where."""

    file: str
    where: str
    what: str
    got: str | None = None
    wanted: str | None = None

    @property
    def is_secret(self) -> bool:
        """Whether it is a secret written out."""
        return self.wanted in (_BY_REFERENCE, _BY_KEY)

    @property
    def line(self) -> str:
        """The finding as one line: ``FILE:where: what, got, wanted``."""
        told = self.document()
        got = "" if self.got is None else f", got {told['got']}"
        wanted = "" if self.wanted is None else f", wanted {told['wanted']}"
        return " ".join(f"{told['file']}:{told['where']}: {told['what']}{got}{wanted}".split())

    def document(self) -> dict[str, str | None]:
        """Return the finding for ``--json``: without secrets, as CI keeps what is printed."""
        return {name: None if text is None else _clean(text) for name, text in asdict(self).items()}


def _clean(text: str) -> str:
    """Return a text of a checked file as it may be shown."""
    return _LOGIN.sub("[redacted]@", Secrets.here().clean_text(text))


def _short(text: str) -> str:
    """Return the beginning of a text; cleaned while it is whole: a secret's half has no shape."""
    return _clean(text)[:_MAX_SHOWN]


def file(
    path: Path, *, name: str | None = None, params: Mapping[str, str] | None = None
) -> list[Finding]:
    """Return what is wrong with a sweep, its pins or figures, a polyaxonfile or a profile.

    ``params`` are values for a component's inputs, which are then checked too.

    Raises:
        BadInput: the file cannot be read.
    """
    shown = name or str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from error
    try:
        document = parse_yaml(text, where=shown)
    except BadInput as error:
        return [_refused(shown, error)]
    found = list(_secrets(shown, document))
    if not isinstance(document, dict):
        return [*found, Finding(shown, "file", "not a mapping", type(document).__name__)]
    if document.get("kind") in ("component", "operation"):
        return found + _polyaxonfile(path, shown, document, params)
    return found + _by_its_reader(path, shown, text, document)


def _by_its_reader(
    path: Path, shown: str, text: str, document: Mapping[str, object]
) -> list[Finding]:
    """Return why the reader of a sweep, a profile or pins refuses a file."""
    try:
        if "experiments" in document:
            sweep = parse_sweep(text, where=shown, read=prompts_in(path.parent))
            for _ in sweep.expand(memory_total_bytes=0):
                pass
        elif {"device", "operation"} <= document.keys():
            return list(_profile(shown, target.load(str(path))))
        elif {"pins", "sources"} <= document.keys():
            pins.parse(text, where=shown)
        elif "sweep" in document and {"documents", "of"} & document.keys():
            published.parse(text, where=shown)
        else:
            wanted = "a sweep, a polyaxonfile, a profile, pins or published figures"
            return [Finding(shown, "file", "of no known kind", wanted=wanted)]
    except (BadInput, OSError) as error:
        return [_refused(shown, error)]
    return []


def _refused(shown: str, error: Exception) -> Finding:
    message = str(error)
    for prefix in (f"{shown}: ", f"target {shown}: "):
        message = message.removeprefix(prefix)
    return Finding(shown, "file", message)


def _profile(shown: str, profile: target.Profile) -> Iterator[Finding]:
    yield from _resources(shown, "resources", profile.resources)
    yield from _labels(shown, "environment", profile.environment)
    yield from _literals(shown, "environment", profile.environment)


def _polyaxonfile(
    path: Path, shown: str, document: dict[str, Any], params: Mapping[str, str] | None
) -> list[Finding]:
    """Return what is wrong with a polyaxonfile, the component it refers to included."""
    whole = dict(document)
    if (reference := document.get("pathRef")) is not None:
        try:
            component = (path.parent / str(reference)).read_text(encoding="utf-8")
            whole["component"] = parse_yaml(component, where=str(reference))
        except (BadInput, OSError, UnicodeDecodeError) as error:
            return [_refused(shown, error)]
        del whole["pathRef"]
    found = list(_own_checks(shown, whole))
    if told := render.problem(path, params):
        found.append(Finding(shown, "file", f"Polyaxon's check: {told}"))
    return found


def operation(
    built: Mapping[str, object], *, name: str, is_cluster: bool, asks_polyaxon: bool = True
) -> list[Finding]:
    """Return what is wrong with an operation as it would be submitted."""
    found = [*_own_checks(name, built), *_secrets(name, _without_cell(built))]
    if is_cluster:
        found += _must_have(name, built)
    if asks_polyaxon and (told := render.problem(built, {})):
        found.append(Finding(name, "operation", f"Polyaxon's check: {told}"))
    return found


def before_submit(home: Home, profile: target.Profile, plan: Plan) -> None:
    """Refuse a plan whose operations are wrong, before the first is submitted.

    Operations of a plan differ in their cell only, so Polyaxon itself is asked about the first one
    on a cluster; on this machine the operation is ours and Polyaxon is not imported for it.

    Raises:
        BadInput: the first finding, and how many there are.
    """
    found: list[Finding] = []
    seen: set[str] = set()
    for run in plan.runs():
        if run.cell.cell_key in seen:
            continue
        built = target.operation(home, profile, run.cell)
        is_cluster = not profile.is_embedded
        found += operation(
            built,
            name=f"cell {run.cell.label}",
            is_cluster=is_cluster,
            asks_polyaxon=is_cluster and not seen,
        )
        seen.add(run.cell.cell_key)
    if found:
        raise BadInput(
            f"{found[0].line}; {len(found)} findings in all, see: memsweep lint SWEEP "
            "--target PROFILE --objects"
        )


def _without_cell(built: Mapping[str, object]) -> dict[str, object]:
    """Leave out the cell's text: prompts may look like anything, and are data."""
    params = built.get("params")
    left = {k: v for k, v in params.items() if k != "cell"} if isinstance(params, dict) else params
    return {**built, "params": left}


def _must_have(name: str, built: Mapping[str, Any]) -> Iterator[Finding]:
    container = _at(built, "runPatch", "container")
    if not container.get("image"):
        yield Finding(name, "runPatch.container.image", "no image", wanted="one by digest")
    ended = _at(built, "termination")
    for key in ("timeout", "ttl"):
        if not ended.get(key):
            yield Finding(name, f"termination.{key}", "not given", wanted="seconds")


# -- our own checks, on the composed document --------------------------------------------------


def _own_checks(shown: str, whole: Mapping[str, Any]) -> Iterator[Finding]:
    inner = whole.get("component")
    component: Mapping[str, Any] = inner if isinstance(inner, dict) else whole
    inputs = {
        one["name"]: one
        for kind in ("inputs", "outputs")
        for one in _listed(component.get(kind))
        if isinstance(one, dict) and "name" in one
    }
    yield from _cache(shown, whole, component)
    yield from _termination(shown, whole, component)
    yield from _restarts(shown, whole, component)
    yield from _types(shown, inputs)
    for where, value in _walk(whole):
        if isinstance(value, str):
            yield from _templates(shown, where, value, inputs.keys())
        elif isinstance(value, dict):
            yield from _node(shown, where, value, inputs)


def _cache(shown: str, whole: Mapping[str, Any], component: Mapping[str, Any]) -> Iterator[Finding]:
    stated = [_at(one, "cache") for one in _parts(whole, component) if one.get("cache")]
    for cache in stated:
        if cache.get("disable") is not True:
            what, got = "an equal run would not be measured", str(cache.get("disable"))
            yield Finding(shown, "cache.disable", what, got, "true")
    if not stated:
        what = "not stated: Polyaxon may answer from its cache"
        yield Finding(shown, "cache", what, wanted="disable: true")


def _termination(
    shown: str, whole: Mapping[str, Any], component: Mapping[str, Any]
) -> Iterator[Finding]:
    for one in _parts(whole, component):
        retries = _at(one, "termination").get("maxRetries", 0)
        if retries != 0:
            what = "a retry under the same UUID would hide the first attempt"
            yield Finding(shown, "termination.maxRetries", what, str(retries), "0")


def _restarts(
    shown: str, whole: Mapping[str, Any], component: Mapping[str, Any]
) -> Iterator[Finding]:
    """Check what becomes of a container that ends: a job's is never started again in silence.

    Of a service Polyaxon makes a Deployment, for which Kubernetes takes ``Always`` only, which is
    also what it has where nothing is said.
    """
    run = _at(component, "run")
    at_run = "run" if whole is component else "component.run"
    stated = {
        f"{where}.environment.restartPolicy": _at(section, "environment").get("restartPolicy")
        for where, section in ((at_run, run), ("runPatch", _at(whole, "runPatch")))
    }
    # The patch wins.
    told = [(where, policy) for where, policy in stated.items() if policy is not None]
    where, policy = told[-1] if told else (f"{at_run}.environment.restartPolicy", None)
    if run.get("kind") == "service":
        if policy not in (None, "Always"):
            what = "a service is a Deployment, for which Kubernetes refuses it"
            yield Finding(shown, where, what, str(policy), "none, or Always")
        return
    parts = _parts(whole, component)
    has_rules = any(_at(one, "termination").get("podFailurePolicy") for one in parts)
    if policy != "Never" and (has_rules or policy is not None):
        yield Finding(shown, where, _SILENT, str(policy), "Never")


def _at(node: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """Return a section; an empty one where there is none, or something else in its place."""
    for name in names:
        inner = node.get(name)
        node = inner if isinstance(inner, Mapping) else {}
    return node


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _parts(whole: Mapping[str, Any], component: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return an operation and its component; one of them where there is only one."""
    return [whole] if whole is component else [whole, component]


def _types(shown: str, inputs: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Find types of other schemas, of which Polyaxon says nothing that can be understood."""
    for name, one in inputs.items():
        kind = str(one.get("type"))
        if kind in _OTHER_TYPES:
            yield Finding(shown, f"inputs.{name}.type", "unknown type", kind, _OTHER_TYPES[kind])


def _templates(shown: str, where: str, text: str, names: Any) -> Iterator[Finding]:
    if "{{" not in text and "{%" not in text:
        return
    import jinja2
    from jinja2 import meta, nodes

    try:
        parsed = jinja2.Environment(autoescape=False).parse(text)
    except jinja2.TemplateSyntaxError as error:
        yield Finding(shown, where, f"no template: {error.message}", repr(_short(text)))
        return
    for name in sorted(meta.find_undeclared_variables(parsed)):
        if name not in names and name not in _SECTIONS and name != "globals":
            wanted = f"an input, or globals.NAME; inputs are {', '.join(sorted(names)) or 'none'}"
            yield Finding(
                shown, where, "an undefined name renders empty", f"{{{{ {name} }}}}", wanted
            )
    looked_up: list[tuple[nodes.Expr, object]] = [
        *((one.node, one.attr) for one in parsed.find_all(nodes.Getattr)),
        # In brackets a name may be made by the template: that one cannot be looked up here.
        *((one.node, getattr(one.arg, "value", None)) for one in parsed.find_all(nodes.Getitem)),
    ]
    for owner, key in looked_up:
        if isinstance(owner, nodes.Name) and owner.name in _OWNERS:
            yield from _lookup(shown, where, owner.name, key, names)


def _lookup(shown: str, where: str, owner: str, key: object, names: Any) -> Iterator[Finding]:
    """Check ``globals.NAME`` or ``inputs["NAME"]``."""
    known = _GLOBALS if owner == "globals" else {*names, "as_args"}
    if key not in known:
        got = f"{{{{ {owner}.{key} }}}}" if isinstance(key, str) else f"{{{{ {owner}[…] }}}}"
        wanted = "a known global" if owner == "globals" else "an input"
        yield Finding(shown, where, "an undefined name renders empty", got, wanted)


def _node(
    shown: str, where: str, node: Mapping[str, Any], inputs: Mapping[str, Any]
) -> Iterator[Finding]:
    """Check one mapping by what it holds."""
    if isinstance(node.get("resources"), dict):
        yield from _resources(shown, f"{where}.resources", node["resources"])
    if isinstance(node.get("emptyDir"), dict) and "sizeLimit" in node["emptyDir"]:
        size = node["emptyDir"]["sizeLimit"]
        yield from _quantity(shown, f"{where}.emptyDir.sizeLimit", "sizeLimit", size)
    if isinstance(node.get("environment"), dict):
        place = f"{where}.environment".lstrip(".")
        yield from _labels(shown, place, node["environment"])
        yield from _literals(shown, place, node["environment"])
    if isinstance(node.get("image"), str) and where.rpartition(".")[2].startswith(
        ("container", "sidecars", "containers")
    ):
        yield from _image(shown, f"{where}.image", node["image"], inputs)
    yield from _shell(shown, where, node)


def _image(shown: str, where: str, image: str, inputs: Mapping[str, Any]) -> Iterator[Finding]:
    wanted = f"IMAGE@sha256:…, or an input whose regex ends with {_DIGEST_END}"
    named = _ONE_NAME.match(image)
    if image.endswith(f"@{UNRESOLVED}"):
        yield Finding(shown, where, "the image has no digest yet", image, "memsweep pin SWEEP")
        return
    if named is None:
        if _LOGIN.search(image):
            yield Finding(shown, where, "a login in it", image, "imagePullSecrets")
        if not _BY_DIGEST.match(image):
            yield Finding(shown, where, "an image that can change", image, wanted)
        return
    regex = _at(inputs, named[1], "validation").get("regex")
    if regex is None or not _asks_for_a_digest(str(regex)):
        yield Finding(shown, where, "an image that can change", image, wanted)


def _asks_for_a_digest(regex: str) -> bool:
    """Whether nothing but a text that ends with a digest matches; in doubt it is no.

    Polyaxon matches from the start only, so the pattern has to close itself. An alternative beside
    the ending, or a flag that changes what the ending means, would let others pass.
    """
    before = regex.removesuffix(_DIGEST_END)
    plain = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "", before)
    if before == regex or "(?" in plain.replace("(?:", ""):
        return False
    try:
        re.compile(before)  # the ending stands by itself, in no group or class
    except re.error:
        return False
    while (inner := re.sub(r"\([^()]*\)", "", plain)) != plain:
        plain = inner
    return "|" not in plain


def _shell(shown: str, where: str, node: Mapping[str, Any]) -> Iterator[Finding]:
    command = node.get("command")
    if not isinstance(command, list) or not command:
        return
    # Also behind env or a wrapper; and the text after -c is code for other interpreters too.
    if "-c" not in command and not any(PurePosixPath(str(c)).name in _SHELLS for c in command):
        return
    for text in [*command, *_listed(node.get("args"))]:
        if "{{" in str(text):
            what = "a parameter inside a shell line can become a command"
            yield Finding(shown, f"{where}.command", what, _short(str(text)), "arguments, no shell")


def _resources(shown: str, where: str, resources: object) -> Iterator[Finding]:
    if not isinstance(resources, dict):
        return
    for kind in ("requests", "limits"):
        for name, value in _at(resources, kind).items():
            yield from _quantity(shown, f"{where}.{kind}.{name}", str(name), value)
    limits, requests = _at(resources, "limits"), _at(resources, "requests")
    for name in requests:
        got = f"{requests[name]} and {limits.get(name)}"
        if quantity.is_whole_only(str(name)) and str(requests[name]) != str(limits.get(name)):
            what = "requests and limits of such a resource have to be equal"
            yield Finding(shown, f"{where}.requests.{name}", what, got)
        elif name in limits and _is_above(requests[name], limits[name]):
            what = "more requested than the limit allows, which Kubernetes refuses"
            yield Finding(shown, f"{where}.requests.{name}", what, got)


def _is_above(requested: object, limit: object) -> bool:
    """Whether a request is above its limit; what is no quantity is told elsewhere."""
    try:
        return quantity.parse(requested) > quantity.parse(limit)
    except ValueError:
        return False


def _quantity(shown: str, where: str, name: str, value: object) -> Iterator[Finding]:
    if isinstance(value, str) and "{{" in value:
        return
    try:
        number = quantity.parse(value)
    except ValueError as error:
        yield Finding(shown, where, f"no quantity: {error}")
        return
    if quantity.is_whole_only(name) and number != int(number):
        yield Finding(shown, where, "given out in whole pieces only", str(value), "an integer")


def _labels(shown: str, where: str, environment: object) -> Iterator[Finding]:
    found = environment.get("labels") if isinstance(environment, dict) else None
    for bad in labels.problems(found if isinstance(found, dict) else {}):
        wanted = "at most 63 of A-Z a-z 0-9 _ . - and a letter or digit at both ends"
        yield Finding(shown, f"{where}.labels", "not a label", bad, wanted)


def _literals(shown: str, where: str, environment: object) -> Iterator[Finding]:
    """Find texts that Polyaxon reads as a Python value and hands on as such.

    A label becomes another text; a toleration's value becomes a number, which Kubernetes refuses.
    """
    for place, text in _walk(environment, where):
        if not isinstance(text, str) or "{{" in text:
            continue
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        # A number in one of these maps becomes the same text again; True becomes "true".
        in_map = place.removeprefix(f"{where}.").startswith(_TEXT_MAPS)
        same_again = in_map and isinstance(value, int | float) and str(value) == text
        if isinstance(value, bool) or not same_again:
            yield Finding(shown, place, "Polyaxon hands on another value", repr(text), "a word")


def _secrets(shown: str, document: object) -> Iterator[Finding]:
    """Find secrets written out; a finding never repeats one."""
    for where, value in _walk(document):
        if isinstance(value, dict):
            yield from _secret_values(shown, where, value)
            for name, listed in value.items():
                if isinstance(listed, list):
                    yield from _secret_options(shown, f"{where}.{name}".lstrip("."), listed)
        elif isinstance(value, str):
            for kind in kinds(value):
                yield Finding(shown, where, f"looks like {kind}", wanted=_BY_REFERENCE)


def _secret_options(shown: str, where: str, listed: list[object]) -> Iterator[Finding]:
    """Find ``--api-key`` whose value is the next argument."""
    for number, (option, value) in enumerate(pairwise(listed), start=1):
        is_option = isinstance(option, str) and option.startswith("--") and "=" not in option
        if is_option and isinstance(value, str) and not value.startswith("-") and not kinds(value):
            for kind in kinds(f"{option}={value}"):
                what = f"looks like {kind}"
                yield Finding(shown, f"{where}[{number}]", what, wanted=_BY_REFERENCE)


def _secret_values(shown: str, where: str, node: Mapping[str, Any]) -> Iterator[Finding]:
    """Find a value under a name that says it is a secret."""
    is_variable = "name" in node and "value" in node
    pairs = [(node["name"], node["value"])] if is_variable else []
    pairs += [(name, value) for name, value in node.items() if not isinstance(value, list)]
    for name, value in pairs:
        held = value.get("value") if isinstance(value, dict) else value
        if _is_written_out(str(name), held):
            what = f"the value of {name} is written out"
            yield Finding(shown, where or str(name), what, wanted=_BY_KEY)


def _is_written_out(name: str, held: object) -> bool:
    """Whether a field of that name holds a secret; YAML reads one of digits only as a number."""
    if not is_secret_name(name) or name in _NAMES_ONE or isinstance(held, bool):
        return False
    # So many tokens, or the number of one, are no secret.
    is_count = isinstance(held, int | float) and name.lower().endswith("token")
    return isinstance(held, str | int | float) and held != "" and not is_count


def _walk(value: object, where: str = "") -> Iterator[tuple[str, object]]:
    """Yield every mapping and every plain value with its place."""
    if isinstance(value, Mapping):
        yield where, value
        for name, inner in value.items():
            yield from _walk(inner, f"{where}.{name}" if where else str(name))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _walk(inner, f"{where}[{index}]")
    else:
        yield where, value
