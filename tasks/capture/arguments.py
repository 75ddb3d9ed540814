"""The settings a vLLM log states: command line, ``Namespace(...)`` and the engine's config line.

The three are written in three ways, none of them JSON, and hold objects that no literal parser
reads. What cannot be read as a value stays the text that was printed.
"""

from __future__ import annotations

import ast
import re
import warnings

_OPEN = {"(": ")", "[": "]", "{": "}", "<": ">"}
_CLOSE = frozenset(_OPEN.values())
_QUOTES = "'\""
_KEY = re.compile(r"\s*['\"]?([A-Za-z_]\w*)['\"]?\s*[=:]\s*", re.DOTALL)
_LIMIT = 64_000
_WORDS: dict[str, object] = {"None": None, "True": True, "False": False}

Setting = object


def fields(text: str) -> dict[str, Setting]:
    """Return the settings in ``text``: ``{'a': 1, ...}``, ``Namespace(a=1, ...)`` or ``a=1, b=2``.

    A text that was cut keeps what is whole; the last, broken field is left out.
    """
    text = text.strip()[:_LIMIT]
    opened = re.match(r"(?:Namespace\(|\{)", text)
    body = text[opened.end() :] if opened else text
    found: dict[str, Setting] = {}
    for part, whole in _parts(body, inside=opened is not None):
        key = _KEY.match(part)
        if key is None or not whole:
            continue
        found[key.group(1)] = _value(part[key.end() :].strip())
    return found


def _parts(text: str, *, inside: bool) -> list[tuple[str, bool]]:
    """Split ``text`` at its top-level commas; the flag says whether the part is whole."""
    parts: list[tuple[str, bool]] = []
    stack: list[str] = []
    quote = ""
    start = 0
    index = -1
    while (index := index + 1) < len(text):
        letter = text[index]
        if quote:
            if letter == "\\":
                index += 1
            elif letter == quote:
                quote = ""
        elif letter in _QUOTES:
            quote = letter
        elif letter in _OPEN:
            stack.append(_OPEN[letter])
        elif stack and letter == stack[-1]:
            stack.pop()
        elif letter in _CLOSE and not stack and inside and letter != ">":
            parts.append((text[start:index], True))
            return parts
        elif letter == "," and not stack:
            parts.append((text[start:index], True))
            start = index + 1
    # The engine's config line ends without a bracket, so its last field is whole unless open.
    parts.append((text[start:], not (inside or quote or stack)))
    return parts


def _value(text: str) -> Setting:
    """Return the Python literal in ``text``, else the text."""
    if text in _WORDS:
        return _WORDS[text]
    if not text or len(text) > 2_000 or not (text[0] in "'\"[({-." or text[0].isdigit()):
        return text
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a path with a backslash is no mistake of ours
            value: Setting = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return text
    return value
