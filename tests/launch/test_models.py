"""The generated models, as far as they need no engine environment."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

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
    first = models.listing_revision(tmp_path)
    assert first.startswith("sha256:")
    assert len(first) == 71
    (tmp_path / models.MARKER).write_text("{}")
    assert models.listing_revision(tmp_path) == first, "the marker names the revision"
    (tmp_path / "a").write_text("changed")
    assert models.listing_revision(tmp_path) != first


def test_an_outdated_recipe_gives_no_revision(home: Home) -> None:
    place = models.folder(home, "tiny-qwen3")
    place.mkdir(parents=True)
    (place / models.MARKER).write_text(json.dumps({"revision": "sha256:0", "recipe": "old"}))
    assert models.revision(home, "tiny-qwen3") is None


def test_the_training_text_is_the_same_everywhere() -> None:
    lines = make_model.training_text()
    assert all(lines), "no empty line: two line breaks have to stay two tokens"
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    assert digest == "d6cff8e255b8332a0469eb136c018f24e6fa0d7203fa5d42fdc23939df5cbc3d"
