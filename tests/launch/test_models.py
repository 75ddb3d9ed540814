"""The generated models, as far as they need no engine environment."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks import revision
from tasks.home import Home
from tasks.launch import make_model, models
from warehouse.errors import BadInput


def test_the_configurations_are_those_the_demo_counts_on() -> None:
    dense, hybrid = models.config("tiny-qwen3"), models.config("tiny-qwen35")
    shared = {"num_key_value_heads": 2, "head_dim": 64, "dtype": "bfloat16", "vocab_size": 2048}
    assert shared.items() <= dense.items()
    assert shared.items() <= hybrid.items()
    assert dense["num_hidden_layers"] == 4
    assert hybrid["layer_types"].count("full_attention") == 2
    assert hybrid["layer_types"].count("linear_attention") == 6
    assert hybrid["mamba_ssm_dtype"] == "float32", "CPU kernels fail on the first request otherwise"
    assert hybrid["linear_key_head_dim"] == hybrid["linear_value_head_dim"] == 128


def test_an_unknown_model_is_named_with_the_known_ones() -> None:
    with pytest.raises(BadInput, match="tiny-qwen3 and tiny-qwen35"):
        models.config("Qwen/Qwen3-4B")


def test_a_model_has_no_revision_before_it_is_generated(home: Home) -> None:
    assert models.revision(home, "tiny-qwen3") is None
    assert models.revision(home, "Qwen/Qwen3-4B") is None


def test_generating_needs_the_engine(home: Home) -> None:
    with pytest.raises(BadInput, match="memsweep setup"):
        models.ensure(home, "tiny-qwen3", progress=lambda _: None)


def test_a_revision_is_that_of_the_files_content(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).write_text(name)
    first = revision.of(revision.listing(tmp_path))
    assert first is not None
    assert first.startswith("sha256:")
    assert len(first) == 71
    (tmp_path / revision.MARKER).write_text("{}")
    assert revision.of(revision.listing(tmp_path)) == first, "the marker names the revision"
    (tmp_path / "a").write_text("changed")
    assert revision.of(revision.listing(tmp_path)) not in (first, None)


def test_a_file_that_is_too_large_leaves_the_revision_open(tmp_path: Path) -> None:
    (tmp_path / "small").write_text("1")
    (tmp_path / "large").write_text("12")
    listed = revision.listing(tmp_path, max_bytes=1)
    assert listed["large"] is None
    assert listed["small"] is not None
    assert revision.of(listed) is None
    assert revision.of({}) is None


def test_a_model_whose_files_changed_is_generated_again(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = models.folder(home, "tiny-qwen3")
    made: list[str] = []

    def generate(home: Home, name: str, progress: Callable[[str], None]) -> None:
        made.append(name)
        place.mkdir(parents=True, exist_ok=True)
        (place / "model.safetensors").write_bytes(b"weights")
        stated = revision.of(revision.listing(place))
        marker = {"revision": stated, "recipe": models._recipe(name)}
        (place / revision.MARKER).write_text(json.dumps(marker))

    monkeypatch.setattr(models, "_generate", generate)
    told: list[str] = []
    for _ in range(2):
        models.ensure(home, "tiny-qwen3", progress=told.append)
    assert (made, told) == (["tiny-qwen3"], []), "what is whole is left alone"
    (place / "model.safetensors").write_bytes(b"weight5")
    models.ensure(home, "tiny-qwen3", progress=told.append)
    assert len(made) == 2
    assert told == ["tiny-qwen3: its files are not those of its revision"]


def test_an_outdated_recipe_gives_no_revision(home: Home) -> None:
    place = models.folder(home, "tiny-qwen3")
    place.mkdir(parents=True)
    (place / revision.MARKER).write_text(json.dumps({"revision": "sha256:0", "recipe": "old"}))
    assert models.revision(home, "tiny-qwen3") is None


def test_the_training_text_is_the_same_everywhere() -> None:
    lines = make_model.training_text()
    assert all(lines), "no empty line: two line breaks have to stay two tokens"
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    assert digest == "d6cff8e255b8332a0469eb136c018f24e6fa0d7203fa5d42fdc23939df5cbc3d"
