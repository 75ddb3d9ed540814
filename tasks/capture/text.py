"""One log line as other programs leave it, reduced to what vLLM wrote.

Real logs carry colours, carriage returns, container, Kubernetes and journal prefixes, boxes of
terminal interfaces and nested process names. Without one place that knows them every pattern would
have to, and would miss the first prefix nobody thought of. Text in, text out; nothing is opened.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator

#: A line longer than this is cut: nothing that vLLM says about memory is longer, and a log without
#: line breaks must not fill the memory.
LINE_LIMIT = 65_536
#: Raw text kept beside a value.
TEXT_LIMIT = 600

_ANSI = re.compile(r"(?:\x1b|#033|\^\[|\\u001b|\\x1b)\[[0-9;:?]*[A-Za-z]")
_BOX = " \t\r\n│|┃║\ufeff"

_DATE = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*(?:Z|[+-]\d\d:?\d\d)?"
_NAMED = r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)"
_MONTH = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun|Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)\w*"
#: What stands before a message, one alternative a program that puts it there.
_PREFIX = re.compile(
    "|".join(
        (
            rf"{_DATE} - [\w.]+ - {_NAMED} - ",  # Python's logging as others configure it
            rf"\[?{_DATE}\]?[:,]?\s+(?:std(?:out|err) F )?",  # container runtimes, CI
            r"\[\d\d:\d\d:\d\d\]\s+",
            rf"{_MONTH} +\d+ [\d:]+ \S+ [\w.@/-]+(?:\[\d+\])?:\s",  # journald
            rf"(?:std(?:out|err)|health|server)/{_NAMED}\s+",
            r"[\w.@/-]{1,80}\s{1,3}\|\s",  # compose
            r"\[(?:pod/|resource\.labels|Stage-|rank)[^\]]{0,160}\]:?\s?",  # Kubernetes, torch
            r"\((?:[A-Za-z]\w*)(?:[ _](?:pid|rank|TP|PP|DP|EP)[^()]{0,80})?\)\s?",
            rf"{_NAMED} {_DATE}\s+",
            rf"{_NAMED} \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?\s"  # vLLM, with and without "["
            r"(?:\[[^\]\s]{1,160}\]\s?|[\w./-]{1,120}:\d+\]\s?)?",
            r"\[[\w./-]{1,120}\.py:\d+\]\s?",
            rf"{_NAMED}:\s+",  # uvicorn
        )
    )
)
_LEVEL = re.compile(
    rf"\b({_NAMED})(?: \d\d-\d\d \d\d:\d\d:\d\d|:[ \t]{{2,}}|(?= \[\w+\.py|\]| - ))"
)
_PROCESS = re.compile(r"\(((?:\w*Worker\w*|EngineCore\w*|DPCoordinator)(?: [^()]{0,80})?)\)")
_TORCH_RANK = re.compile(r"\[(rank\d+)\]:")
_PID = re.compile(r"\s*,?\s*\b(?:pid=\d+|ip=[\d.]+)")


def uncoloured(line: str) -> str:
    """Return ``line`` without terminal colours, carriage returns and box characters around it."""
    if _coloured(line):
        line = _ANSI.sub("", line)
    if "\r" in line:
        line = line.replace("\r", " ")
    line = line.strip(_BOX)
    return line.removesuffix("^M").rstrip()


def _coloured(line: str) -> bool:
    """Return True for an escape character, also as journald, terminals and JSON write it."""
    return (
        "\x1b" in line or "#033[" in line or "^[[" in line or "\\u001b[" in line or "\\x1b[" in line
    )


def message(line: str) -> str:
    """Return what the program itself said: ``line`` without colours and without any prefix."""
    text = uncoloured(line)
    return text[_prefix_end(text) :].strip()


def _prefix_end(text: str) -> int:
    position = 0
    for _ in range(10):
        found = _PREFIX.match(text, position)
        if found is None or found.end() == position:
            break
        position = found.end()
    return position


#: A line with its digits made equal: stamps, process numbers and counters are what differs between
#: lines that say the same. No pattern for prefixes, levels and noise asks for a certain digit.
_DIGITS = bytes.maketrans(b"123456789", b"000000000")


def shape(line: str) -> bytes:
    """Return what ``line`` has in common with the lines that differ from it in their digits only.

    Whatever is found in a line by looking for text without digits is found in all of its shape, at
    the same place: it need be looked for once.
    """
    return line.encode("utf-8", "surrogatepass").translate(_DIGITS)


def message_span(line: str) -> tuple[int, int] | None:
    """Return where :func:`message` stands in every line of this shape, None where it is altered."""
    text = uncoloured(line)
    if "\r" in line or _coloured(line):
        return None
    first = line.find(text)
    start, end = _prefix_end(text), len(text)
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    return first + start, first + end


def level(line: str) -> str | None:
    """Return the innermost log level of ``line`` (DEBUG ... CRITICAL), or None where it has none.

    A log exporter's outer INFO can hide an ERROR, so the last one in the prefix counts.
    """
    found = None
    for match in _LEVEL.finditer(line, 0, 400):
        found = match.group(1)
    return found


def rank(line: str) -> str | None:
    """Return the name of the process that wrote ``line`` (``Worker_TP1``), or None.

    The innermost of nested names counts. A process without a rank in its name keeps its pid, so
    that two of them stay apart; an engine core does not (one per data-parallel rank, numbered).
    """
    name = None
    for found in _PROCESS.finditer(line, 0, 400):
        name = found.group(1)
    if name is None:
        torch = _TORCH_RANK.search(line, 0, 400)
        return torch.group(1) if torch else None
    bare = _PID.sub("", name).strip(" ,")
    if bare.startswith("EngineCore") or any(letter.isdigit() for letter in bare):
        return bare
    return name


def excerpt(line: str, start: int = 0, end: int = 0) -> str:
    """Return ``line`` as raw text to keep: without line end, and cut around ``start:end``."""
    line = line.rstrip("\r\n")
    if len(line) <= TEXT_LIMIT:
        return line
    first = max(0, min(start - TEXT_LIMIT // 4, len(line) - TEXT_LIMIT))
    last = max(first + TEXT_LIMIT, min(end, first + 2 * TEXT_LIMIT))
    return line[first:last]


def lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of a file given as ``chunks`` of bytes, each at most LINE_LIMIT characters.

    Only a line feed ends a line, so numbers agree with an editor's. Bytes that are not UTF-8 become
    the replacement character; UTF-16 with a byte-order mark is recognised.
    """
    rest = b""
    cutting = False
    encoding = ""
    for chunk in chunks:
        if not encoding:
            encoding = "utf-16" if chunk[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"
            if encoding == "utf-16":
                yield from _utf16(chunk, chunks)
                return
        pieces = (rest + chunk).split(b"\n")
        rest = pieces.pop()
        for piece in pieces:
            if cutting:
                cutting = False
                continue
            yield piece[:LINE_LIMIT].decode("utf-8", "replace")
        if len(rest) > LINE_LIMIT:
            if not cutting:
                yield rest[:LINE_LIMIT].decode("utf-8", "replace")
            rest, cutting = b"", True
    if rest and not cutting:
        yield rest[:LINE_LIMIT].decode("utf-8", "replace")


def _utf16(first: bytes, others: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of a UTF-16 file (Windows' ``>`` redirection writes them)."""
    decoder = codecs.getincrementaldecoder("utf-16")("replace")

    def again() -> Iterator[bytes]:
        yield decoder.decode(first).encode("utf-8", "replace")
        for chunk in others:
            yield decoder.decode(chunk).encode("utf-8", "replace")

    yield from lines(again())
