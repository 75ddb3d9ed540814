"""Why a server did not come up, or died: one typed failure from a log, or an honest "unknown".

The cause is rarely the last line: a worker's error is repeated by the engine core and then by the
API server, each in its own words and often interleaved with other ranks. So all matches are kept
and weighed at the end: a cause beats a consequence, and the earliest cause wins.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from tasks.capture import signatures, text
from tasks.capture.signatures import OOM, SIGNATURES, Signature, Weight
from warehouse.registry import Outcome, Phase

#: Matches and exceptions kept: the first ones hold the cause, the last ones what is left of it.
_KEEP = 64
_CONTINUATION = 8
_RECENT = 40
#: Text kept of an unknown failure.
_TAIL = 20

UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure: its ``type`` (see tasks.capture.signatures), where, and its numbers.

    ``phase`` is ``start`` where neither the text nor the log around it says where it happened;
    ``phase_known`` is then False.
    ``numbers`` holds what the text states: sizes in bytes, counts as integers, ratios as floats.
    ``tail`` holds the last lines of an unknown failure and is empty otherwise.
    """

    type: str
    phase: Phase
    numbers: dict[str, int | float]
    line: int
    text: str
    outcome: Outcome
    tail: tuple[str, ...] = ()
    phase_known: bool = True


@dataclass(slots=True)
class _Match:
    """A line that may be the failure, with what followed and preceded it."""

    line: int
    raw: str
    said: str
    signature: Signature | None
    reached: Phase | None
    frame: Phase | None
    started: bool
    before: tuple[str, ...] = ()
    after: list[str] = field(default_factory=list)
    closed: bool = False


_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failed|OutOfResources)"
    r"(?::\s|\(|$)"
)
_FRAME = re.compile(r'File "[^"]*", line \d+,? in (\w+)|^at: .*\bin (\w+)')
_ECHO = re.compile(r"^(?:raise\b|File \"|\^+$|~*\^|return\b|self\.|assert\b|at /|#)")
_QUIET = frozenset(("DEBUG", "INFO", "WARNING"))
_NOISE = re.compile(
    r"^(?:\[rank\d+\]:)?\[?[WI]\d{4}\b|\bWarning: |^warnings\.warn|^Exception ignored|"
    r"nanobind: |^\[(?:DEBUG|INFO|WARNING)\]|^Error retrieving |, retrying \d+ of \d+"
)
_LOADING = re.compile(r"checkpoint shards: +(\d+)%")
#: Source lines that say where an out-of-memory error came from when no frame does.
_HINTS: tuple[tuple[re.Pattern[str], Phase, str | None], ...] = (
    (
        re.compile(r"ESTIMATE_CUDAGRAPHS=0|capture_model\(|graph_pool|capture_end\("),
        Phase.GRAPH,
        None,
    ),
    (re.compile(r"Capturing (?:CUDA|cuda)"), Phase.GRAPH, None),
    (
        re.compile(r"warming up (?:sampler|pooler)|_dummy_sampler_run\(|logits\.sort\("),
        Phase.GRAPH,
        "oom_sampler_warmup",
    ),
    (
        re.compile(r"_allocate_kv_cache|initialize_kv_cache|initialize_from_config\("),
        Phase.KV_CACHE,
        None,
    ),
    (
        re.compile(r"profile_run\(|determine_(?:available_memory|num_available)"),
        Phase.PROFILE,
        None,
    ),
    (re.compile(r"load_model\(|load_weights\(|process_weights_after_loading"), Phase.LOAD, None),
    (re.compile(r"engine_step\(|EngineDeadError|run_engine_loop|step_async"), Phase.BENCH, None),
)


def may_be_failure(line: str) -> bool:
    """Return True when ``line`` may belong to a failure. Cheap: called for every line of a log."""
    return (
        "rror" in line
        or "xception" in line
        or "ailed" in line
        or '", line ' in line
        or "out of " in line
        or "Tried to allocate" in line
        or " died" in line
        or "already dead" in line
        or "is dead" in line
        or "terminate" in line
        or "illed" in line
        or "only supported on" in line
        or "No available memory" in line
        or "To serve at least" in line
        or "exceeds available" in line
        or "exited with" in line
        or "exit code" in line
        or "egmentation fault" in line
        or "imeout" in line
        or "OutOfResources" in line
        or "KeyboardInterrupt" in line
        or "oom-kill" in line
        or "/dev/shm" in line
        or "kernel image" in line
        or "hutdown" in line
        or "hutting down" in line
        or "required for" in line
        or "nccl" in line
        or "timed out" in line
        or "select device driver" in line
    )


def _shuts_down(said: str) -> bool:
    """Return True for what a server says that was told to end: what follows is no failure."""
    return (
        "[shutdown]" in said
        or "Shutting down" in said
        or "Killing local vLLM worker" in said
        or "Received signal 15" in said
    )


def is_quiet(line: str, said: str) -> bool:
    """Return True for a line that is no failure whatever it says: equal for all of its shape.

    What is logged as INFO may quote anything, users' prompts included.
    """
    return text.level(line) in _QUIET or _NOISE.search(said) is not None


class FailureFinder:
    """Collects what may be a failure while a log goes by; :meth:`result` decides."""

    __slots__ = ("_first", "_frame", "_frame_line", "_last", "_open", "_stopping")

    def __init__(self) -> None:
        self._first: list[_Match] = []
        self._last: deque[_Match] = deque(maxlen=_KEEP)
        self._open: list[_Match] = []
        self._frame: Phase | None = None
        self._frame_line = 0
        self._stopping = False

    @property
    def waiting(self) -> bool:
        """True while a match still wants to see the lines after it."""
        return bool(self._open)

    def seen(self) -> bool:
        """Return True when any line looked like a failure, known or not."""
        return bool(self._first)

    def found(self) -> bool:
        """Return True when a known failure has been seen."""
        return any(match.signature for match in self._first)

    def follow(self, line: str, said: str) -> None:
        """Take ``line``, of which ``said`` is the message, as the continuation of matches."""
        plain = text.uncoloured(line)
        if not plain:
            return
        for match in self._open:
            match.after.append(said if said == plain else f"\x00{said}")
        self._open = [match for match in self._open if len(match.after) < _CONTINUATION]

    def feed(
        self,
        number: int,
        line: str,
        said: str,
        *,
        quiet: bool,
        started: bool,
        reached: Phase | None,
        recent: Iterable[str],
    ) -> None:
        """Look at one interesting line.

        ``said`` is its message, ``quiet`` what :func:`is_quiet` says of it, ``recent`` are the
        lines up to and with this one.
        """
        if not said or self._stopping:
            return
        if _shuts_down(said):
            self._stopping = started or "Killing local" in said
            return
        if _ECHO.match(said):
            frame = _FRAME.search(said)
            if frame:
                self._take_frame(number, frame.group(1) or frame.group(2))
            return
        if quiet:
            return
        classify = _classify if len(said) > _SHORT else _classify_again
        signature = classify(said, started=started)
        if signature is None and _EXCEPTION.match(said) is None:
            return
        self._keep(
            _Match(
                line=number,
                raw=line,
                said=said,
                signature=signature,
                reached=reached,
                frame=self._frame if number - self._frame_line < _RECENT else None,
                started=started,
                before=tuple(recent) if len(self._first) < _KEEP else (),
            )
        )

    def _take_frame(self, number: int, function: str) -> None:
        phase = signatures.FRAMES.get(function)
        fresh = number - self._frame_line > _RECENT
        if phase is None:
            return
        if function in signatures.SERVING_FRAMES and self._frame is not None and not fresh:
            return
        self._frame, self._frame_line = phase, number

    def _keep(self, match: _Match) -> None:
        if len(self._first) < _KEEP:
            self._first.append(match)
        else:
            self._last.append(match)
        if match.signature is None or match.signature.details:
            self._open.append(match)

    def result(
        self, started: bool, reached: Phase | None, tail: Iterable[str], *, alive: int = 0
    ) -> Failure | None:
        """Return the failure that the log shows, or None.

        ``alive`` is the last line that shows a started server at work: what looked like a failure
        before it, and killed nothing, was none (a prompt, a request's own error).
        """
        # What happened before a server started did not keep it from starting.
        matches = [m for m in (*self._first, *self._last) if m.started or not started]
        for match in matches:
            if match.signature is None:
                match.signature = _rewrapped(match)
        known = [match for match in matches if match.signature is not None]
        if started and all(_weight(match) > Weight.CONSEQUENCE for match in known):
            known = [match for match in known if match.line > alive]
        best = _heaviest(known)
        if best is not None and _weight(best) > Weight.CONSEQUENCE:
            return _typed(best, known)
        unknown = [match for match in matches if match.signature is None]
        if best is not None:
            return _consequence(best, unknown, started=started, tail=tail)
        if started or not unknown:
            return None
        return _unknown(unknown, reached, tail)


#: Signatures that can match before and after a server started.
_APPLY = {
    started: tuple(signature for signature in SIGNATURES if signature.serving or not started)
    for started in (False, True)
}
#: Messages up to this length are remembered: ranks and tracebacks say the same again and again.
_SHORT = 400


def _classify(said: str, *, started: bool) -> Signature | None:
    """Return the heaviest signature that ``said`` matches."""
    best: Signature | None = None
    for signature in _APPLY[started]:
        if signature.literal not in said or (best and signature.weight <= best.weight):
            continue
        if signature.pattern.search(said):
            best = signature
    return best


_classify_again = functools.lru_cache(maxsize=1024)(_classify)


def _rewrapped(match: _Match) -> Signature | None:
    """Return the signature of an exception whose text a terminal's width has cut in pieces."""
    more = _continuation(match)
    if not more:
        return None
    for joined in (" ".join([match.said, *more]), "".join([match.said, *more])):
        signature = _classify(joined, started=match.started)
        if signature is not None:
            return signature
    return None


def _continuation(match: _Match) -> list[str]:
    """Return the lines after a match that have no prefix of their own and are no traceback."""
    more: list[str] = []
    for said in match.after:
        if said.startswith(("\x00", "Traceback")) or _ECHO.match(said):
            break
        if _EXCEPTION.match(said) and "Error" in said.split(":")[0]:
            break
        more.append(said)
    return more


def _weight(match: _Match) -> Weight:
    return match.signature.weight if match.signature else Weight.CONSEQUENCE


def _heaviest(matches: list[_Match]) -> _Match | None:
    """Return the earliest of the heaviest matches."""
    best: _Match | None = None
    for match in matches:
        if best is None or _weight(match) > _weight(best):
            best = match
    return best


def _numbers(match: _Match) -> dict[str, int | float]:
    """Return the numbers a match and its continuation state."""
    signature = match.signature
    if signature is None:
        return {}
    more = _continuation(match)
    joined = [match.said, " ".join([match.said, *more]), "".join([match.said, *more])]
    result: dict[str, int | float] = {}
    for pattern in (signature.pattern, *signature.details):
        for candidate in joined if more else joined[:1]:
            found = pattern.search(candidate)
            if found:
                for name, value in signatures.numbers(found).items():
                    result.setdefault(name, value)
                break
    return result


def _typed(best: _Match, known: list[_Match]) -> Failure:
    """Return the failure of a known cause, with the fullest numbers any of its texts state."""
    signature = best.signature
    assert signature is not None
    kind = signature.type
    numbers = _numbers(best)
    for other in known:
        same = other.signature is not None and other.signature.type == kind
        if same and not numbers and other is not best:
            richer = _numbers(other)
            if richer:
                best, numbers = other, richer
    if kind in (OOM, "oom_sampler_warmup", "nccl_cuda_oom"):
        return _out_of_memory(best, known, numbers)
    phase = signature.phase
    if phase is None:
        phase = Phase.BENCH if best.started else best.frame or best.reached
    return Failure(
        type=kind,
        phase=phase or Phase.START,
        phase_known=phase is not None,
        numbers=numbers,
        line=best.line,
        text=text.excerpt(best.raw),
        outcome=signature.outcome,
    )


def _out_of_memory(best: _Match, known: list[_Match], numbers: dict[str, int | float]) -> Failure:
    """Return an out-of-memory failure, its phase taken from the traceback or the log around it."""
    assert best.signature is not None
    kind = best.signature.type
    warmups = [m for m in known if m.signature and m.signature.type == "oom_sampler_warmup"]
    allocations = [m for m in known if m.signature and m.signature.type == OOM]
    if warmups:
        numbers = numbers | _numbers(warmups[0])
        if allocations:
            numbers = _numbers(allocations[0]) | numbers
        phase: Phase | None = Phase.GRAPH
        kind = "oom_sampler_warmup"
    else:
        phase, kind = _where(best, kind)
    return Failure(
        type=kind,
        phase=phase or Phase.START,
        phase_known=phase is not None,
        numbers=numbers,
        line=best.line,
        text=text.excerpt(best.raw),
        outcome=Outcome.OOM,
    )


def _where(match: _Match, kind: str) -> tuple[Phase | None, str]:
    """Return the phase and type of an out-of-memory error."""
    phase: Phase | None = Phase.BENCH if match.started else match.frame
    special: str | None = None
    if phase is None:
        phase, special = _hinted(match)
    if phase is None and match.reached is not None:
        phase = Phase.GRAPH if match.reached is Phase.READY else match.reached
    if kind == "nccl_cuda_oom":
        return phase, kind
    if phase is None:
        return None, OOM
    return phase, special or signatures.OOM_BY_PHASE.get(phase, OOM)


def _hinted(match: _Match) -> tuple[Phase | None, str | None]:
    """Return the phase that the message, the lines before it or the lines after it give away."""
    plain_after = [said.lstrip("\x00") for said in match.after]
    before = [text.message(line) for line in match.before[-_RECENT:-1]]
    for lines in ([match.said], _continuation(match), before[::-1], plain_after):
        loaded = False  # the bar nearest to the match counts, not one of its earlier states
        for said in lines:
            for pattern, phase, special in _HINTS:
                if pattern.search(said):
                    return phase, special
            loading = _LOADING.search(said)
            if loading and int(loading.group(1)) < 100 and not loaded:
                return Phase.LOAD, None
            loaded = loaded or loading is not None
    return None, None


def _consequence(
    best: _Match, unknown: list[_Match], *, started: bool, tail: Iterable[str]
) -> Failure:
    """Return what is left when the log only says that something died."""
    assert best.signature is not None
    causes = [match for match in unknown if not _wrapper(match.said)]
    cause = causes[0] if causes else best
    serving = best.started or started or best.signature.type == "engine_dead"
    if best.signature.type == "start_failed" or (causes and not serving):
        return _unknown(causes or [best], cause.reached, tail)
    phase = Phase.BENCH if serving else cause.frame or cause.reached
    return Failure(
        type=best.signature.type,
        phase=phase or Phase.START,
        phase_known=phase is not None,
        numbers=_numbers(best),
        line=cause.line,
        text=text.excerpt(cause.raw),
        outcome=best.signature.outcome,
    )


_WRAPPERS = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|please check the stack"
    r"|EngineDeadError|BrokenPipeError|CancelledError|SystemExit|KeyboardInterrupt"
)


def _wrapper(said: str) -> bool:
    """Return True when an exception only passes another one on."""
    return _WRAPPERS.search(said) is not None


def _unknown(matches: list[_Match], reached: Phase | None, tail: Iterable[str]) -> Failure:
    """Return a failure of unknown type, with the last lines of the log."""
    causes = [match for match in matches if not _wrapper(match.said)] or matches
    cause = causes[0]
    phase = Phase.BENCH if cause.started else cause.frame or reached
    return Failure(
        type=UNKNOWN,
        phase=phase or Phase.START,
        phase_known=phase is not None,
        numbers={},
        line=cause.line,
        text=text.excerpt(cause.raw),
        outcome=Outcome.CRASHED,
        tail=tuple(text.excerpt(line) for line in [*tail][-_TAIL:]),
    )
