"""Executables that stand for vLLM and for EvalScope's Python, for the run's code to start.

The run's code is started unchanged: only MEMSWEEP_ENGINE_BIN and MEMSWEEP_BENCH_PYTHON point to
what is made here. Behaviour cannot come through the environment (the run strips it), so it is
baked into the executables.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from pathlib import Path

from tasks import revision

HERE = Path(__file__).parent


def make_engine(folder: Path, **config: object) -> Path:
    """Write ``folder/vllm`` that behaves as ``config`` says; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "double.json"
    settings.write_text(json.dumps(config), encoding="utf-8")
    script = HERE / "vllm_double.py"
    return _executable(
        folder / "vllm", f'exec {_quoted(sys.executable, script, settings)} "$@"'
    ).parent


def make_bench(folder: Path, **modes: object) -> Path:
    """Write a ``python`` that finds the double of EvalScope; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    return _executable(
        folder / "python",
        f"export PYTHONPATH={_quoted(HERE / 'evalscope_double')}${{PYTHONPATH:+:$PYTHONPATH}}\n"
        f"export EVALSCOPE_DOUBLE={shlex.quote(json.dumps(modes))}\n"
        f'exec {_quoted(sys.executable)} "$@"',
    )


#: The files of a model as far as the run looks at them.
_MODEL = {
    "config.json": b'{"architectures": ["Qwen3ForCausalLM"]}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"\0" * 64,
}
#: What cells pin for it; a true hash, because the run compares it.
MODEL_REVISION = revision.of({n: hashlib.sha256(b).hexdigest() for n, b in _MODEL.items()})


def make_model(folder: Path) -> Path:
    """Write the files of a model; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _MODEL.items():
        (folder / name).write_bytes(content)
    return folder


def _executable(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def _quoted(*words: object) -> str:
    return " ".join(shlex.quote(str(word)) for word in words)
