"""Secrets out of what is kept: text that comes from outside our own lists is searched for them.

What a run is given is an allow-list (:mod:`tasks.launch.settings`), so nothing of this should ever
be found; an engine's log, an image's own variables or what Polyaxon hands back may hold one all the
same. What is found is replaced, and how often is written into the bundle's manifest: the file then
differs from the one the run listed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

REPLACED = b"[redacted]"
#: Files of text; any other that holds the value of a secret is left out whole.
TEXT = frozenset(
    {".log", ".json", ".jsonl", ".txt", ".html", ".yaml", ".yml", ".md", ".csv", ".prom"}
)
#: Hashed before the run, and searched then (:meth:`Secrets.first`): never changed here.
HASHED = frozenset({"sweep.yaml", "cell.json", "prediction.json"})
_BLOCK = 1 << 20
_SECRET_NAME = re.compile(
    r"(?:TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|(?:API|ACCESS|SECRET|PRIVATE|AUTH)_?KEY)(?:_ID)?$",
    re.IGNORECASE,
)
_SHORTEST = 8
_ASSIGNED = (
    rb"(?i)((?:api[_-]?key|access[_-]?key|secret[_-]?key|secret[_-]?access[_-]?key|password|passwd"
    rb"|auth[_-]?token|access[_-]?token|hf[_-]?token)[\"']?\s*[=:]\s*\[?\s*(?:\\?[\"'])?)"
    rb"(?!none\b|null\b|true\b|false\b|empty\b|[\d.]+\b|\[redacted\])[^\s\"'\\,;\]}]{6,}"
)
#: (what a text must hold, in small letters, to be searched; the search). Group 1 stays.
_PATTERNS: tuple[tuple[tuple[bytes, ...], re.Pattern[bytes]], ...] = (
    ((b"hf_",), re.compile(rb"()\bhf_[A-Za-z0-9]{16,}\b")),
    ((b"akia", b"asia"), re.compile(rb"()\b(?:AKIA|ASIA)[0-9A-Z]{16}\b")),
    ((b"github_pat_", b"ghp_", b"gho_", b"ghs_"),
     re.compile(rb"()\b(?:github_pat_|gh[pos]_)[A-Za-z0-9_]{20,}\b")),
    ((b"sk-",), re.compile(rb"()\bsk-[A-Za-z0-9_-]{20,}\b")),
    ((b"eyj",), re.compile(rb"()\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+")),
    ((b"bearer", b"authorization"),
     re.compile(rb"(?i)(\b(?:bearer|authorization\"?\s*[=:]\s*\"?(?:token|basic|bearer))\s+)"
                rb"[A-Za-z0-9._~+/=-]{8,}")),
    ((b"://",), re.compile(rb"(?i)(\b[a-z][a-z0-9+.-]*://)[^\s/\"'@:\\]*:[^\s/\"'@\\]+(?=@)")),
    ((b"key", b"passw", b"token"), re.compile(_ASSIGNED)),
)  # fmt: skip


_remembered: set[str] = set()


def remember(secret: str) -> None:
    """Have a secret that came from elsewhere than a variable of such a name looked for too."""
    _remembered.add(secret)


@dataclass(frozen=True, slots=True)
class Secrets:
    """What is looked for beside the patterns: the values of secrets that this process knows."""

    values: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, environment: Mapping[str, str], more: Iterable[str] = ()) -> Secrets:
        """Return the values of all variables whose name says that they are secret.

        Paths, words without a digit and what is too short to be one are passed over: a bundle would
        lose words that mean something else.
        """
        found = [value for name, value in environment.items() if _SECRET_NAME.search(name)]
        kept = {value.strip() for value in (*found, *more) if _may_be_secret(value.strip())}
        # As they are, and as JSON writes them.
        written = kept | {json.dumps(value)[1:-1] for value in kept}
        return cls(tuple(sorted((one.encode() for one in written), key=len, reverse=True)))

    @classmethod
    def here(cls) -> Secrets:
        """Return those of this process: of its environment, and what it was told to remember."""
        return cls.of(os.environ, _remembered)

    def clean(self, text: bytes) -> tuple[bytes, int]:
        """Return a text without secrets, and how many were taken out."""
        count = 0
        for value in self.values:
            if value in text:
                count += text.count(value)
                text = text.replace(value, REPLACED)
        small = text.lower()
        for needles, pattern in _PATTERNS:
            if any(needle in small for needle in needles):
                text, found = pattern.subn(rb"\g<1>" + REPLACED, text)
                count += found
        return text, count

    def clean_text(self, text: str) -> str:
        """Return a text without secrets."""
        return self.clean(text.encode("utf-8", "surrogatepass"))[0].decode("utf-8", "surrogatepass")

    def first(self, text: str) -> int | None:
        """Return the number of the first line that holds a secret; ``None`` where none does."""
        for number, line in enumerate(text.splitlines(), start=1):
            if self.clean_text(line) != line:
                return number
        return None

    def clean_file(self, path: Path) -> int:
        """Take the secrets out of a file of text; return how many there were."""
        count, cleaned = 0, path.with_name(path.name + ".redacted")
        with path.open("rb") as source, cleaned.open("wb") as sink:
            while block := source.read(_BLOCK):
                text, found = self.clean(block + source.readline())
                sink.write(text)
                count += found
        # A file without any keeps its time and its place.
        if count:
            cleaned.replace(path)
        else:
            cleaned.unlink()
        return count

    def holds_value(self, path: Path) -> bool:
        """Whether a file of any kind holds the value of a secret as it is."""
        longest = max(map(len, self.values), default=0)
        rest = b""
        with path.open("rb") as source:
            while block := source.read(_BLOCK):
                if any(value in rest + block for value in self.values):
                    return True
                rest = block[-longest:]
        return False


def _may_be_secret(value: str) -> bool:
    return (
        len(value) >= _SHORTEST
        and not value.startswith(("/", "~", "./"))
        and (any(char.isdigit() for char in value) or len(value) >= 2 * _SHORTEST)
    )


def clean_folder(folder: Path, secrets: Secrets) -> dict[str, int]:
    """Take the secrets out of a folder's files; return how many of each, by its path.

    A file that is no text and holds the value of a secret is removed, as -1 says.
    """
    found: dict[str, int] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not path.is_file() or name in HASHED:
            continue
        if path.suffix in TEXT or not path.suffix:
            if count := secrets.clean_file(path):
                found[name] = count
        elif secrets.holds_value(path):
            path.unlink()
            found[name] = -1
    return found
