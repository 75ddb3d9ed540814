"""A round survives a kill at any point, and only a sealed bundle makes a repeat finished."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from flows.shipped import find_sweep
from tasks import rounds
from tasks.files import read_json, write_json
from tasks.home import Home
from tasks.plan.sweep import parse_sweep
from tasks.rounds import RepeatState, Round, open_round, rounds_of
from warehouse.errors import BadInput, CannotFindOut

KEY = "a" * 64


def opened(home: Home, *, fresh: bool = False, label: str | None = None) -> tuple[Round, bool]:
    where, text = find_sweep("demo")
    return open_round(
        home, parse_sweep(text, where=where), text, target="local", fresh=fresh, label=label
    )


def state(**changes: object) -> RepeatState:
    base = RepeatState(cell_key=KEY, repeat=1, attempt=1, run_uuid=None, prediction_sha256=None)
    return replace(base, **changes)  # type: ignore[arg-type]


def test_the_newest_round_is_taken_and_fresh_opens_the_next(home: Home) -> None:
    first, new = opened(home)
    assert new
    assert opened(home) == (first, False)
    second, new = opened(home, fresh=True)
    assert new
    assert second.label == "2"
    assert opened(home)[0] == second
    assert [r.id for r in rounds_of(home, "demo")] == [first.id, second.id]


def test_the_newest_round_is_the_one_opened_last_though_the_clock_was_set_back(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "now", lambda: "2026-01-01T12:00:00.000Z")
    first, _ = opened(home)
    monkeypatch.setattr(rounds, "now", lambda: "2026-01-01T10:00:00.000Z")
    second, _ = opened(home, fresh=True)
    assert second.opened_at == "2026-01-01T12:00:00.001Z"
    assert opened(home)[0] == second
    assert [r.id for r in rounds_of(home, "demo")] == [first.id, second.id]


def test_a_label_names_one_round(home: Home) -> None:
    night = opened(home, label="2026-01-01T02:00Z")[0]
    opened(home, fresh=True)
    assert opened(home, label="2026-01-01T02:00Z") == (night, False)


def test_a_repeat_is_finished_only_with_its_sealed_bundle(home: Home) -> None:
    round_, _ = opened(home)
    assert round_.finished(KEY, 1) is None
    bundle = home.bundles / "u"
    bundle.mkdir(parents=True)
    (bundle / "manifest.json").write_text("{}")
    from tasks.canonical import sha256_file

    digest = sha256_file(bundle / "manifest.json")
    round_.save(state(run_uuid="u"))
    assert round_.finished(KEY, 1) is None
    round_.save(state(run_uuid="u", outcome="ok", manifest_sha256=digest))
    done = round_.finished(KEY, 1)
    assert done is not None
    assert done.outcome == "ok"
    (bundle / "manifest.json").write_text("{ }")
    assert round_.finished(KEY, 1) is None


def test_one_flow_at_a_time_and_the_lock_dies_with_its_process(home: Home) -> None:
    round_, _ = opened(home)
    code = (
        "import sys; from pathlib import Path; from tasks.home import Home;"
        "from tasks.rounds import rounds_of\n"
        "r = rounds_of(Home(Path(sys.argv[1])))[0]\n"
        "with r.only_flow():\n print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(home.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert round_.holder() == holder.pid
        with (
            pytest.raises(BadInput, match=f"being measured by process {holder.pid}"),
            round_.only_flow(),
        ):
            pass
        holder.kill()
        holder.wait(timeout=10)
    assert round_.holder() is None
    with round_.only_flow():
        assert round_.holder() == os.getpid()
    assert round_.holder() is None


def test_a_dead_process_is_a_dead_flow_and_a_torn_line_is_none(home: Home) -> None:
    round_, _ = opened(home)
    round_.note_flow("alive")
    with (round_.folder / "flows.jsonl").open("a") as file:
        file.write(json.dumps({"flow_run_id": "gone", "pid": os.getpid(), "start_ticks": 1}) + "\n")
        file.write('{"flow_run_id": "torn", "pi')
    assert round_.dead_flows() == ["gone"]


def test_stop_requests_are_read_and_forgotten(home: Home) -> None:
    round_, _ = opened(home)
    assert round_.stop_asked() is None
    round_.ask_stop(after_current=True)
    assert round_.stop_asked() == "after-current"
    round_.ask_stop(after_current=False)
    assert round_.stop_asked() == "now"
    with round_.only_flow():
        assert round_.stop_asked() is None


def test_of_two_who_open_a_round_at_once_both_get_the_same(home: Home) -> None:
    with ThreadPoolExecutor(8) as pool:
        rounds = [*pool.map(lambda _: opened(home), range(8))]
    assert len({round_.id for round_, _ in rounds}) == 1
    assert [new for _, new in rounds].count(True) == 1


def test_a_night_whose_opening_was_killed_is_opened_by_its_restart(home: Home) -> None:
    label = "2026-01-01T02-00-00Z"
    killed, _ = opened(home, label=label)
    (killed.folder / "round.json").unlink()
    again, new = opened(home, label=label)
    assert (again.id, new) == (killed.id, True)
    (again.folder / "round.json").write_text("{}")
    with pytest.raises(CannotFindOut, match=r"its round\.json cannot be read"):
        opened(home, label=label)


def test_writing_is_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a" / "x.json"
    write_json(path, {"a": 1})
    assert read_json(path) == {"a": 1}
    with pytest.raises(ValueError, match="Out of range"):
        write_json(path, {"a": float("nan")})
    assert read_json(path) == {"a": 1}
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]
    (tmp_path / "blocked").write_text("a file where a folder is wanted")
    with pytest.raises(CannotFindOut, match="cannot be written"):
        write_json(tmp_path / "blocked" / "x.json", {})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("round.json", "{}"),
        ("round.json", "not json"),
        ("round.json", "[1]"),
        ("flow.json", '{"pid": "x"}'),
        ("flow.json", '{"pid": null, "start_ticks": []}'),
        ("flows.jsonl", '7\n{"pid": []}\nx\n'),
        (f"repeats/{KEY}.1.json", '{"cell_key": 5}'),
        (f"repeats/{KEY}.1.json", "\x00"),
        (f"repeats/{KEY}.1.json", "[" * 100_000),
        (
            f"repeats/{KEY}.1.json",
            json.dumps({"cell_key": KEY, "repeat": 1, "attempt": 1} | {"outcome": []}),
        ),
        (
            f"repeats/{KEY}.1.json",
            json.dumps({"cell_key": KEY, "repeat": 1, "attempt": 1} | {"run_uuid": 5}),
        ),
        (f"left-out/{KEY}.x.json", "{}"),
        (f"left-out/{KEY}.1.2.json", "{}"),
    ],
)
def test_a_damaged_file_costs_only_itself(home: Home, name: str, text: str) -> None:
    round_, _ = opened(home)
    opened(home, fresh=True)
    round_.save(state())
    (round_.folder / name).parent.mkdir(exist_ok=True)
    (round_.folder / name).write_text(text)
    left = rounds_of(home)
    assert left[-1].label == "2"
    for one in left:
        assert one.left_out() == set()
        assert all(isinstance(found.run_uuid, str | None) for found in one.states())
        assert all(isinstance(found.outcome, str | None) for found in one.states())
        assert one.holder() is None
        assert one.dead_flows() == []
        assert len(one.states()) <= 1


@pytest.mark.parametrize(
    "fact", [{"id": "../elsewhere"}, {"opened_at": "yesterday"}, {"opened_at": "2026-11-29"}]
)
def test_a_round_is_the_one_of_its_folder_and_of_a_time(home: Home, fact: dict[str, str]) -> None:
    """Nobody may be led to another folder, and `prune` compares the time."""
    path = opened(home)[0].folder / "round.json"
    write_json(path, (read_json(path) or {}) | fact)
    assert rounds_of(home) == []


def test_a_rounds_sweep_that_is_no_text_is_told(home: Home) -> None:
    round_, _ = opened(home)
    (round_.folder / "sweep.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(CannotFindOut, match=r"sweep\.yaml cannot be read"):
        round_.sweep()


def test_a_round_keeps_its_sweeps_prompt_files(home: Home, tmp_path: Path) -> None:
    """They may be edited or gone when it goes on; it measures what it was opened for."""
    text = (
        "name: frozen\nmodel: tiny-qwen3\n"
        "server: {max_model_len: 2048, kv_cache_memory_bytes: 16777216}\n"
        "experiments: [{name: one, points: [{parallel: 1, number: 1, prompts: ../a b.txt}]}]\n"
    )
    sweep = parse_sweep(text, where="x", read={"../a b.txt": "5\tone\r\n"}.__getitem__)
    opened, _ = open_round(home, sweep, text, target="local", fresh=False)
    again = opened.sweep()
    assert again.prompt_files == {"../a b.txt": "5\tone\r\n"}
    assert again.sha256 == sweep.sha256
    other = parse_sweep(text, where="x", read={"../a b.txt": "5\ttwo\n"}.__getitem__)
    assert open_round(home, other, text, target="local", fresh=False)[1]


def test_a_round_that_cannot_be_read_keeps_its_number_and_blocks_nothing(home: Home) -> None:
    first, _ = opened(home)
    (first.folder / "round.json").write_text("{}")
    second, new = opened(home)
    assert (new, second.label) == (True, "2")
    assert opened(home) == (second, False)


def test_a_round_of_before_targets_is_the_local_targets(home: Home) -> None:
    round_, _ = opened(home)
    facts = json.loads((round_.folder / "round.json").read_text())
    del facts["target"]
    (round_.folder / "round.json").write_text(json.dumps(facts))
    assert opened(home) == (round_, False)


def test_one_pass_finds_what_asking_for_each_does(home: Home) -> None:
    round_, _ = opened(home)
    assert round_.all_finished() == {}
    from tasks.canonical import sha256_file

    cases = {
        "ok": {"outcome": "ok"},
        "refused": {"outcome": "refused"},
        "lost": {"outcome": "lost"},
        "changed": {"outcome": "ok"},
        "gone": {"outcome": "ok"},
        "open": {},
    }
    for number, (name, facts) in enumerate(cases.items()):
        folder = home.bundles / name
        folder.mkdir(parents=True)
        manifest = folder / "manifest.json"
        manifest.write_text("{}")
        digest = sha256_file(manifest) if facts else None
        key = f"{number:064x}"
        round_.save(state(cell_key=key, run_uuid=name, manifest_sha256=digest, **facts))
    (home.bundles / "changed" / "manifest.json").write_text("{ }")
    (home.bundles / "gone" / "manifest.json").unlink()
    found = round_.all_finished()
    assert [one.run_uuid for one in found.values()] == ["ok", "refused"]
    for number in range(len(cases)):
        key = f"{number:064x}"
        assert found.get((key, 1)) == round_.finished(key, 1)
