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
from typing import BinaryIO

REPLACED = b"[redacted]"
#: Files of text; any other that holds the value of a secret is left out whole.
TEXT = frozenset(
    {".log", ".json", ".jsonl", ".txt", ".html", ".yaml", ".yml", ".md", ".csv", ".prom"}
)
#: Hashed before the run, and searched then (:meth:`Secrets.first`): never changed here.
HASHED = frozenset({"sweep.yaml", "cell.json", "prediction.json"})
_BLOCK = 1 << 20
_KEY_LINES = 300  # more than a private key has
_SECRET_NAME = re.compile(
    r"(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|(?:API|ACCESS|SECRET|PRIVATE|AUTH)[_-]?KEY)"
    r"(?:_ID)?$",
    re.IGNORECASE,
)
_SHORTEST = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """What secrets of one kind look like: what is cleaned here is what lint refuses."""

    kind: str
    #: What a text must hold, in small letters, to be searched at all: a log may have 100 MB.
    needles: tuple[bytes, ...]
    pattern: re.Pattern[bytes]  # its group 1 is no secret and stays
    #: Of a pattern that takes long and whose needles are everywhere: what else has to be there.
    hint: re.Pattern[bytes] | None = None

    def may_be_in(self, small: bytes) -> bool:
        """Whether a text, in small letters, is to be searched."""
        return any(needle in small for needle in self.needles) and (
            self.hint is None or self.hint.search(small) is not None
        )


#: Names whose value is a secret whatever it looks like.
_SURE = (
    rb"(?:(?:api|access|secret|private|auth)[_-]?key(?:[_-]?id)?|passw(?:or)?d|passphrase"
    rb"|(?:client|app|auth|api|webhook)[_-]?secret"
    rb"|(?:auth|access|refresh|bearer|api|hf|hub|hugging_?face|git(?:hub|lab)|bot|session|security"
    rb"|registry|private)[_-]?token)"
)
#: A token of a text, as a tokenizer names them, is no secret.
_TOKEN = rb"(?<!(?:stop|mask|next)[ _])(?<!(?:pad|eos|bos|sep|cls|unk)[ _])(?<!special[ _])token"
#: Names that logs use for other things too: the value has to look like a secret.
_VAGUE = rb"(?:(?:(?<![A-Za-z0-9_-])(?:--)?|(?-i:(?<=[A-Z0-9]_)(?=TOKEN)))" + _TOKEN + rb"|secret)"
#: A letter and a figure in it; no path, no figure with a unit, no date, no address in memory.
_MIXED = (
    rb"(?![/~.]|\d+[.]\d|\d+[a-z/%]{1,4}(?!\w)|\d{4}-\d\d-|0x)"
    rb"(?=[\w.~+/%=-]{0,200}\d)(?=[\w.~+/%=-]{0,200}[a-z])[\w.~+/%=-]{8,}"
)
#: A type, as the signature of a function in a traceback has it.
_TYPE = (
    rb"(?-i:(?:(?:typing|t|pydantic)\.)?"
    rb"(?:(?:Optional|Union|Annotated|Literal|ClassVar|Final|Callable|Sequence|Iterable|Mapping"
    rb"|[Tt]ype|[Ll]ist|[Dd]ict|[Tt]uple|[Ss]et)\["
    rb"|(?:str|bytes|int|float|bool|object|dict|list|Any|None)[=|)]"
    rb"|Secret(?:Str|Bytes)(?=[ \t]*(?:[^ \t(\w-]|$))))"
)
#: What a name has where there is no secret: a figure, a word for nothing, a place for a value.
_NOTHING = (
    rb"(?!(?:none|null|true|false|empty|redacted|[\d.]+)(?![^\s\"'\\,;\]})])|[<{*\[]"
    rb"|(?-i:\$[({A-Z_])|" + _TYPE + rb")"
)
_CHAR = rb"[^\s\"'\\,;\]}]"
#: What stands in quotes, or one word.
_VALUE = rb"(?:(?<=[\"'])[^\"'\\\r\n]{6,}|" + _CHAR + rb"{6,})"
_QUOTE = rb"(?:\\*[\"'])?"
_GIVEN = rb"[ \t]*\[?" + _QUOTE + rb")" + _NOTHING
#: Words that stand where a token would: "Bearer authentication is on".
_OF_LOGINS = (
    rb"(?!(?:auth(?:entication|enticated|enticator|ori[sz]ation|ori[sz]ed)|credentials?|challenges?"
    rb"|mechanism|middleware|protected|protocol|provider|required|requests?|responses?|security"
    rb"|support|supported|disabled)(?![.]?[\w~+/=-]))"
)
#: A line of nsswitch.conf: where accounts are looked up.
_ACCOUNTS = (
    rb"passwd:[ \t]+(?:(?:files|compat)\w*[ \t]+(?:systemd|sss|ldap|nis|winbind)\b|compat(?!"
    + _CHAR + rb"))"
)  # fmt: skip
_NAMES = (b"key", b"passw", b"passphrase", b"token", b"secret")
#: As they stand before a value: most lines of an engine's log speak of tokens.
_NAMED = re.compile(
    rb"(?:key|passwd|password|passphrase|token|secret)(?:[_-]?id)?[\"'\\]*[ \t]*[=:]"
)
_KEY = rb"[A-Z ]*PRIVATE KEY(?: BLOCK)?-----"
#: A word's beginning; a line's end as JSON writes it is no part of one.
_BEGIN = rb"(?:(?<![A-Za-z0-9])|(?<=\\[nrt]))"
_A_VALUE = "the value of a key, token or password"


def _shape(
    kind: str, pattern: bytes, *needles: bytes, hint: re.Pattern[bytes] | None = None
) -> Shape:
    return Shape(kind, needles, re.compile(pattern), hint)


def _word(kind: str, pattern: bytes, *needles: bytes) -> Shape:
    """Return a shape that begins a word."""
    return _shape(kind, rb"(" + _BEGIN + rb")" + pattern, *needles)


SHAPES = (
    _word("a Hugging Face token", rb"hf_[A-Za-z0-9]{16,}", b"hf_"),
    _word("an AWS key", rb"(?:AKIA|ASIA)[0-9A-Z]{16}(?![0-9A-Za-z])", b"akia", b"asia"),
    _word("a GitHub token", rb"(?:github_pat_|gh[pousr]_)[A-Za-z0-9_]{20,}",
          b"github_pat_", b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_"),
    _word("a GitLab token", rb"gl(?:pat|dt|rt|ptt|cbt|ft)-[A-Za-z0-9_.-]{20,}",
          b"glpat-", b"gldt-", b"glrt-", b"glptt-", b"glcbt-", b"glft-"),
    _word("a Google key", rb"AIza[A-Za-z0-9_-]{35}", b"aiza"),
    _word("an API key", rb"(?:sk|nvapi)-[A-Za-z0-9_-]{20,}", b"sk-", b"nvapi-"),
    _word("a Docker Hub token", rb"dckr_(?:pat|oat)_[A-Za-z0-9_-]{20,}", b"dckr_"),
    _word("a Slack token", rb"xox[abeprs]-[A-Za-z0-9-]{10,}", b"xox"),
    _word("an npm token", rb"npm_[A-Za-z0-9]{36,}", b"npm_"),
    _word("a PyPI token", rb"pypi-AgE[A-Za-z0-9_-]{20,}", b"pypi-age"),
    _word("a Stripe key", rb"[sr]k_(?:live|test)_[A-Za-z0-9]{16,}", b"k_live_", b"k_test_"),
    _word("a SendGrid key", rb"SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}", b"sg."),
    _word("a Google token", rb"ya29\.[A-Za-z0-9_-]{20,}", b"ya29."),
    _word("a DigitalOcean token", rb"do[opr]_v1_[0-9a-f]{32,}", b"_v1_"),
    _word("an age key", rb"AGE-SECRET-KEY-1[0-9A-Z]{40,}", b"age-secret-key-1"),
    _shape("an Azure key",
           rb"(?i)((?:Account|SharedAccess)Key[ \t]*=[ \t]*)[A-Za-z0-9+/]{32,}={0,2}",
           b"accountkey", b"sharedaccesskey"),
    _shape("the address of a webhook",
           rb"(?i)((?:hooks\.slack\.com/(?:services|workflows|triggers)"
           rb"|discord(?:app)?\.com/api/(?:v\d{1,2}/)?webhooks"
           rb"|webhook\.office\.com/webhookb2|outlook\.office\.com/webhook)/)"
           + _NOTHING + rb"[^\s\"'<>\\]{16,}",
           b"hooks.slack.com", b"/webhooks/", b".office.com/webhook"),
    _word("a JSON web token", rb"eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*",
          b"eyj"),
    # To its end; where that is missing, as far as its lines go on. The way to the end is gone once:
    # it stops where another begins, and what was passed is not gone back over.
    _shape("a private key",
           rb"()-----BEGIN " + _KEY + rb"(?:(?:[^-]|(?!-----BEGIN |-----END " + _KEY
           + rb")-){0,16384}+-----END " + _KEY + rb"|(?:(?:\s|\\[nr])+[A-Za-z0-9+/=]{16,})*)",
           b"-----begin "),
    _shape("a login",
           rb"(?i)(\b(?:bearer|authorization\\?[\"']?\s*[=:]\s*\\?[\"']?(?:token|basic|bearer))\s+)"
           + _OF_LOGINS + rb"[A-Za-z0-9._~+/=-]{8,}", b"bearer", b"authorization"),
    _shape("a login in an address",
           rb"(?i)(\b[a-z][a-z0-9+.-]{0,30}://)[^\s/\"'@:\\]*:(?!\{\{)[^\s/\"'@\\]+(?=@)", b"://"),
    _shape("a signed address",
           rb"(?i)([?&](?:x-amz-(?:signature|credential|security-token)|signature|sig|key)=)"
           + _NOTHING + rb"[^&\s\"'<>\\]{16,}", b"x-amz-", b"signature=", b"sig=", b"key="),
    # As far as the next one, so that many are searched in one go; not two figures, as in docker's
    # -u 1000:1000.
    _shape("a login of curl",
           rb"(" + _BEGIN + rb"curl\b(?:(?!curl)[^\r\n]){0,200}?[\s\"'](?:-u|--user)"
           rb"(?:\\{0,8}[\"']?,?[ \t]+|=)?(?:\\{0,8}[\"'])?"
           rb"(?!\d+:\d+(?![^\s\"']))[^\s:/\"'-][^\s:/\"']{0,100}:)"
           + _NOTHING + rb"[^\s\"'\\]{4,}", b"curl"),
    # NAME=VALUE, and NAME: VALUE where no path is told about (/etc/passwd: Permission denied) and
    # no option (--api-key: expected one argument).
    _shape(_A_VALUE, rb"(?i)((?:" + _SURE + rb"|secret)" + _QUOTE + rb"[ \t]*=" + _GIVEN + _VALUE,
           *_NAMES, hint=_NAMED),
    _shape(_A_VALUE, rb"(?i)((?<![\w./-])(?!-|" + _ACCOUNTS + rb")[\w.-]*" + _SURE + _QUOTE
           + rb"[ \t]*:" + _GIVEN + _VALUE, *_NAMES, hint=_NAMED),
    _shape(_A_VALUE, rb"(?i)(" + _VAGUE + _QUOTE + rb"[ \t]*[=:]" + _GIVEN + _MIXED,
           *_NAMES, hint=_NAMED),
    # --NAME VALUE, in a printed list of arguments too; no name of a value as in a usage line.
    _shape(_A_VALUE, rb"((?<![\w-])--(?i:[\w-]*" + _SURE + rb"|token|secret)"
           + rb"[\"']?,?[ \t]+[\"']?)" + _NOTHING + rb"(?![-/]|[A-Z_]+(?![\w-]))"
           + rb"(?=" + _CHAR + rb"*\d|" + _CHAR + rb"{16})" + _CHAR + rb"{6,}", b"--"),
)  # fmt: skip


def kinds(text: str) -> list[str]:
    """Return what a text seems to hold, each kind once: of the known shapes only."""
    raw = text.encode("utf-8", "surrogatepass")
    small = raw.lower()
    found = (one.kind for one in SHAPES if one.may_be_in(small) and one.pattern.search(raw))
    return list(dict.fromkeys(found))


def is_secret_name(name: str) -> bool:
    """Whether the name of a variable or a field says that its value is a secret."""
    return _SECRET_NAME.search(name) is not None


_remembered: set[str] = set()


def remember(secret: str) -> None:
    """Have a secret that came from elsewhere than a variable of such a name looked for too."""
    _remembered.add(secret)


@dataclass(frozen=True, slots=True)
class Secrets:
    """What is looked for beside the shapes: the values of secrets that this process knows."""

    values: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, environment: Mapping[str, str], more: Iterable[str] = ()) -> Secrets:
        """Return the values of all variables whose name says that they are secret.

        Paths, words without a digit and what is too short to be one are passed over: a bundle would
        lose words that mean something else.
        """
        found = [value for name, value in environment.items() if is_secret_name(name)]
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
        for shape in SHAPES:
            if shape.may_be_in(small):
                text, found = shape.pattern.subn(rb"\g<1>" + REPLACED, text)
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
                text, found = self.clean(_to_a_cut(block, source))
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


def _to_a_cut(block: bytes, source: BinaryIO) -> bytes:
    """Read on to the end of a line, and of a private key, which is the one secret of many."""
    block += source.readline()
    for _ in range(_KEY_LINES):
        if block.rfind(b"-----BEGIN ") <= block.rfind(b"-----END "):
            break
        block += source.readline()
    return block


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
