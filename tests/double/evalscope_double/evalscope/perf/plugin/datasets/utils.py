"""Where EvalScope loads a tokenizer; the double counts words instead."""

from __future__ import annotations


def load_tokenizer(path: str) -> str:
    """Return something that stands for a tokenizer."""
    return path
