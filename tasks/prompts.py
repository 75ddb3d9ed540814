"""Prompts from a file: frozen texts whose token counts are known before anything is sent.

The plan has no tokenizer and the run must send exactly what the cell was planned for, so the file
states each prompt's tokens and both sides read it here. Standard library only. One prompt a line:

    {"prompt": "Why is the sky blue?", "tokens": 24}
    24<TAB>Why is the sky blue?

``tokens`` is what the server counts for the prompt, chat template included: ``usage.prompt_tokens``
of one answer tells. Empty lines are left out.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its text and the tokens that the server counts for it."""

    text: str
    tokens: int


def parse(content: str) -> tuple[Prompt, ...]:
    """Return the prompts of a file's content; raises ``ValueError`` naming the line."""
    found = []
    for number, line in enumerate(content.removeprefix("\ufeff").split("\n"), 1):
        if line.strip():
            try:
                found.append(_prompt(line.removesuffix("\r")))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
    if not found:
        raise ValueError("got no prompt, wanted at least one line with a prompt and its tokens")
    return tuple(found)


def sha256(content: str) -> str:
    """Return the sha256 of a file's content, as ``sha256sum`` prints it."""
    return hashlib.sha256(content.encode("utf-8")).hexdigest()


def in_order(prompts: tuple[Prompt, ...], *, warmup: int, number: int) -> list[Prompt]:
    """Return what a load point sends: ``warmup`` prompts, then ``number`` measured ones.

    The measured requests are the file's prompts from the first on, again from the first where there
    are fewer. The warm-up takes those that follow, so that it does not send the first ones twice.
    """
    size = len(prompts)
    return [prompts[(number + i) % size] for i in range(warmup)] + [
        prompts[i % size] for i in range(number)
    ]


def _prompt(line: str) -> Prompt:
    if line.startswith("{"):
        try:
            held = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}") from None
        if not isinstance(held, dict) or set(held) != {"prompt", "tokens"}:
            raise ValueError(f"got the keys {sorted(held)}, wanted prompt and tokens")
        text, tokens = held["prompt"], held["tokens"]
    else:
        head, tab, text = line.partition("\t")
        if not tab or not head.isascii() or not head.isdigit() or len(head) > 9:
            raise ValueError(
                f"got {line[:40]!r}, wanted a JSON object with prompt and tokens, "
                "or the tokens, a tab and the prompt"
            )
        tokens = int(head)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"prompt: got {text!r:.40}, wanted a text")
    text.encode("utf-8")  # a lone surrogate cannot be sent
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"tokens: got {tokens!r:.40}, wanted a number of at least 1")
    return Prompt(text, tokens)
