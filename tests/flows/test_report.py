"""The page: whole in itself, readable without eyes or mouse, honest about what is missing.

Drawn from small sealed bundles; the page of real runs is looked at in tests/real/test_report.py.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows import cli
from flows.report import charts, nights, page, proof, serving
from flows.report.content import Entry, Page, table
from flows.report.data import course, gather, thinned
from flows.report.evidence import Evidence
from flows.report.page import Built, Request
from tasks import record
from tasks.files import write_json
from tasks.home import Home
from tasks.plan.cell import LoadPoint
from tests.support.bundle_maker import Ask, Lab
from warehouse.compare import Selection, cells, choose
from warehouse.connection import open_snapshot
from warehouse.errors import BadInput
from warehouse.registry import Outcome, Phase

RUN = "11111111-1111-4111-8111-111111111111"
HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)> {{7*7}} & \' = datum.value'


@dataclass
class Tag:
    """One element as a parser sees it."""

    name: str
    attributes: dict[str, str]
    text: str = ""


@dataclass
class Seen(HTMLParser):
    """Every element of a page with its text; scripts and styles are text of theirs."""

    tags: list[Tag] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._open: list[Tag] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        made = Tag(tag, {name: value or "" for name, value in attrs})
        self.tags.append(made)
        if tag not in ("meta", "link", "br", "img"):
            self._open.append(made)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(Tag(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop().name != tag:
            pass

    def handle_data(self, data: str) -> None:
        for tag in self._open:
            tag.text += data

    def of(self, name: str) -> list[Tag]:
        """Return the elements of a name."""
        return [tag for tag in self.tags if tag.name == name]


def seen(html: str) -> Seen:
    parsed = Seen()
    parsed.feed(html)
    return parsed


def built(home: Home, what: str | None = None, **more: Any) -> Built:
    with open_snapshot(home.warehouse_snapshot) as connection:
        chosen = choose(connection, what)
        return page.build(home, connection, Request(chosen.title, (chosen,), **more))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Two rounds: one with a refused cell and one whose names are hostile; tests only read it."""
    lab = Lab(Home(tmp_path_factory.mktemp("report") / "home"))
    record.ingest(
        lab.home,
        [
            lab.seal(run_uuid=RUN),
            lab.seal(repeat=2, started_s=1002.0),
            lab.seal(
                label="misconfigured",
                max_model_len=65536,
                started_s=1003.0,
                outcome=Outcome.REFUSED,
                phase=Phase.KV_CACHE,
                log="cpu-0.27.0-kv-cache-larger-than-memory.log",
                metrics=None,
                requests=(),
            ),
            lab.seal(sweep="hostile", label=HOSTILE, host=HOSTILE, started_s=1000.5),
        ],
    )
    return lab.home


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the drawing out where only the page around it is looked at."""
    monkeypatch.setattr(charts, "draw", lambda spec, **_: "<svg></svg>")


@pytest.fixture(scope="module")
def made(home: Home) -> Built:
    """The page of the newest round."""
    return built(home)


def test_the_page_is_whole_in_itself(made: Built) -> None:
    """Nothing is fetched: no address but that of SVG's name space, and a policy against all."""
    html = made.html
    addresses = set(re.findall(r"https?://[^\s\"'<>)]+", html))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://127.0.0.1:8000"}  # a pin, as text
    for tag in seen(html).tags:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            value = tag.attributes.get(name, "")
            assert value.startswith(("#", "data:,")) or not value, (tag.name, value)
    assert "url(http" not in html
    assert "@import" not in html


def test_only_our_script_may_run(made: Built) -> None:
    """The policy names the hash of the one script, and no element carries code."""
    parsed = seen(made.html)
    (script,) = parsed.of("script")
    digest = base64.b64encode(hashlib.sha256(script.text.encode()).digest()).decode()
    policy = next(
        tag.attributes["content"]
        for tag in parsed.of("meta")
        if tag.attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert not [t for t in parsed.tags if any(name.startswith("on") for name in t.attributes)]


def test_it_can_be_read_without_eyes_and_without_a_mouse(made: Built) -> None:
    """Landmarks, a heading for each section, a caption and a table for each chart, live links."""
    parsed = seen(made.html)
    assert all(len(parsed.of(name)) == 1 for name in ("main", "header", "nav", "footer", "h1"))
    assert parsed.of("html")[0].attributes["lang"] == "en"
    levels = [int(tag.name[1]) for tag in parsed.tags if re.fullmatch("h[1-6]", tag.name)]
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))
    assert (
        len(parsed.of("figure")) == len(parsed.of("figcaption")) == len(list(made.page.figures()))
    )
    assert len(parsed.of("table")) == len(list(made.page.tables()))
    images = [tag for tag in parsed.tags if tag.attributes.get("role") == "img"]
    assert len(images) == len(parsed.of("svg")) > 10
    assert all(tag.attributes["aria-label"] for tag in images)
    ids = [tag.attributes["id"] for tag in parsed.tags if "id" in tag.attributes]
    assert len(ids) == len(set(ids))
    for link in parsed.of("a"):
        assert link.attributes["href"].removeprefix("#") in ids, link
    for cell in parsed.of("th"):
        assert cell.attributes.get("scope") in ("col", "row")


def test_every_number_leads_to_its_evidence(made: Built) -> None:
    """The text behind a link says the number, its file and line, as audit does."""
    parsed = seen(made.html)
    proofs = {t.attributes["id"]: t.text for t in parsed.of("li") if "id" in t.attributes}
    links = [t for t in parsed.of("a") if t.attributes["href"][1:] in proofs]
    tokens = [proofs[t.attributes["href"][1:]] for t in links if t.text == "975,890"]
    assert any("GPU KV cache size: 975,890 tokens" in text for text in tokens)
    assert any("server.log line 43" in text for text in tokens)
    assert any("(predicted)" in text for text in tokens)
    assert any("1638 blocks" in text or "1,638 blocks" in text for text in proofs.values())
    assert made.broken_links == 0


@pytest.mark.usefixtures("undrawn")
def test_a_broken_link_is_told_first(tmp_path: Path) -> None:
    """A changed log breaks the chain: the page says so at its top and at the run."""
    lab = Lab(Home(tmp_path / "home"))
    bundle = lab.seal()
    record.ingest(lab.home, [bundle])
    with (bundle / "server.log").open("a") as log:
        log.write("x")
    found = built(lab.home)
    assert found.broken_links == 1
    assert found.page.banner[0].state == "bad"
    assert "chain of custody" in found.page.banner[0].text
    assert "broken link: server.log: sha256 is" in seen(found.html).of("main")[0].text


def test_hostile_text_stays_text(home: Home) -> None:
    """Names of a sweep, a cell and a host are shown as they are, in tables and in charts."""
    html = built(home, "hostile").html
    parsed = seen(html)
    assert len(parsed.of("script")) == 1
    assert not parsed.of("img")
    assert "49" not in [tag.text.strip() for tag in parsed.of("h3")]
    assert HOSTILE in [tag.text for tag in parsed.of("h3")]
    assert any(tag.text.startswith("<script>alert(") for tag in parsed.of("text"))
    assert any(HOSTILE in tag.attributes.get("aria-label", "") for tag in parsed.tags)


def test_a_failed_run_says_why_where_it_stands(made: Built) -> None:
    """The refused cell is on the map and in the table, with the line of its log."""
    assert "1 run did not end as expected: misconfigured refused" in made.page.banner[0].text
    rows = next(t for t in made.page.tables() if t.id == "cells").rows
    refused = next(row for row in rows if row[0].text == "misconfigured")
    assert refused[2].state == "bad"
    assert "Available memory on node 0" in refused[2].why
    places = next(t for t in made.page.tables() if t.id == "map").rows
    assert {"ok", "refused", "derived"} <= {row[2].text for row in places}


def ruled_out(bundle: Path) -> None:
    """Make the prediction of a bundle refuse its cell."""
    prediction = json.loads((bundle / "prediction.json").read_text())
    refused = {"type": "max_model_len_above_memory", "message": "does not fit"}
    write_json(bundle / "prediction.json", prediction | {"refused": refused})


@pytest.mark.usefixtures("undrawn")
def test_infeasible_is_expected_only_by_the_own_prediction(tmp_path: Path) -> None:
    """One that another run's failure settled was to end well: page, index and compare say so."""
    unstarted: dict[str, Any] = {
        "outcome": Outcome.INFEASIBLE,
        "phase": Phase.QUEUE,
        "observed": None,
        "log": None,
        "metrics": None,
        "requests": (),
        "samples": (),
    }
    lab = Lab(Home(tmp_path / "home"))
    sealed = [
        lab.seal(label="ruled-out", max_model_len=65536, change=ruled_out, **unstarted),
        lab.seal(label="settled", max_model_len=131072, **unstarted),
        lab.seal(label="cut", outcome=Outcome.STOPPED, observed="interrupted"),
        lab.seal(label="cut", attempt=2, started_s=1100.0),
    ]
    record.ingest(lab.home, sealed)
    found = built(lab.home)
    lines = [line.text for line in found.page.banner]
    assert lines[0] == "1 run did not end as expected: settled infeasible", "cut was repeated"
    rows = next(t for t in found.page.tables() if t.id == "cells").rows
    told = {row[0].text: (row[2].text, row[2].state) for row in rows}
    assert told["ruled-out"] == ("infeasible (as expected)", "note")
    assert told["settled"] == ("infeasible (expected ok)", "bad")
    with open_snapshot(lab.home.warehouse_snapshot) as connection:
        chosen = choose(connection, None)
        judged = {c["label"]: c["as_expected"] for c in cells(connection, chosen.runs)}
        (night,) = nights.nights(connection)
    assert (judged["ruled-out"], judged["settled"]) == (True, False)
    assert night.unexpected == 1, "the stopped attempt was repeated"


def test_absent_numbers_say_why(made: Built) -> None:
    """Nothing is shown as 0 that was not measured, and the CPU has no device memory."""
    cells = [e for t in made.page.tables() for row in t.rows for e in row if e.text == "–"]
    assert any("not said before the failure" in entry.why for entry in cells)
    memory = next(section for section in made.page.sections if section.id == "memory")
    assert memory.lead.startswith("Not measured: the engine's CPU build logs no weights")


def test_values_of_the_charts_are_those_of_the_warehouse(made: Built) -> None:
    """The marks' words hold the peaks, repeat by repeat, and a line is the mean over repeats."""
    words = [tag.attributes.get("aria-label", "") for tag in seen(made.html).tags]
    figure = next(f for f in made.page.figures() if f.id.startswith("load-"))
    layers: Any = figure.panels[0].spec["layer"]
    rows = [row for layer in layers for row in layer["data"]["values"]]
    shown = [row["words"] for row in rows if "words" in row]
    assert any(re.fullmatch(r"512 tokens × 4, repeat [12]: 1\.222 %.*", text) for text in shown)
    assert set(shown) <= set(words)


@pytest.mark.usefixtures("undrawn")
def test_a_page_of_nothing_makes_sense(home: Home) -> None:
    """No run: one line says so, and nothing breaks."""
    with open_snapshot(home.warehouse_snapshot) as connection:
        empty = Selection("empty, round 1", [], "round")
        found = page.build(home, connection, Request("empty", (empty,)))
    assert [line.text for line in found.page.banner] == [
        "no run is here yet: there is nothing to show"
    ]
    assert len(seen(found.html).of("h1")) == 1


@pytest.mark.usefixtures("undrawn")
def test_a_half_finished_round_says_what_is_missing(tmp_path: Path) -> None:
    """Planned cells without a run stand in the table and on the map as not measured yet."""
    from flows.shipped import find_sweep

    lab = Lab(Home(tmp_path / "home"))
    bundle = lab.seal(label="recovery", round="demo-1")
    record.ingest(lab.home, [bundle])
    sha256 = json.loads((bundle / "manifest.json").read_text())["sweep_sha256"]
    facts = {"id": "demo-1", "label": "1", "opened_at": "2026-11-29T12:00:00Z", "target": "local"}
    folder = lab.home.rounds / "demo-1"
    write_json(folder / "round.json", facts | {"sweep_name": "demo", "sweep_sha256": sha256})
    (folder / "sweep.yaml").write_text(find_sweep("demo")[1])
    found = built(lab.home)
    assert found.missing == 4
    assert any("4 planned runs not measured yet" in line.text for line in found.page.banner)
    rows = next(t for t in found.page.tables() if t.id == "map").rows
    assert "not measured yet" in {row[2].text for row in rows}


@pytest.mark.usefixtures("undrawn")
def test_several_prompt_lengths_are_several_lines(tmp_path: Path) -> None:
    """One line per prompt length, told apart by dash and shape as well as by colour."""
    load = tuple(
        LoadPoint(prompt_tokens=tokens, parallel=p, number=p, warmup=1)
        for tokens in (512, 2048)
        for p in (1, 2)
    )
    requests = [
        [Ask(1010.0 + i, 1010.9 + i, prompt=point.prompt_tokens) for _ in range(point.number)]
        for i, point in enumerate(load)
    ]
    lab = Lab(Home(tmp_path / "home"))
    samples = [(1010.2 + i, 0.1 * (i + 1), 1.0 + i, 0.0, 0.0) for i in range(4)]
    record.ingest(lab.home, [lab.seal(load=load, requests=requests, samples=samples)])
    found = built(lab.home)
    spec = next(f for f in found.page.figures() if f.id.startswith("load-")).panels[0].spec
    layers: Any = spec["layer"]
    line, points = layers[:2]
    assert line["encoding"]["color"]["scale"]["domain"] == ["512 tokens", "2,048 tokens"]
    assert len({tuple(d) for d in line["encoding"]["strokeDash"]["scale"]["range"]}) == 2
    assert len(set(points["encoding"]["shape"]["scale"]["range"])) == 2


def gpu_log(bundle: Path) -> None:
    """Make a run's log that of a GPU, and its samples those of one."""
    told = (
        "Model loading took 8.61 GiB memory and 1.703832 seconds",
        "Available KV cache memory: 8.88 GiB",
        "GPU KV cache size: 273,563 tokens",
        "Graph capturing finished in 5 secs, took 0.54 GiB",
    )
    lines = [f"(EngineCore_DP0 pid=9) INFO 11-29 18:25:01 [worker.py:1] {text}" for text in told]
    (bundle / "server.log").write_text("\n".join(lines) + "\n")
    gpu = {"uuid": "GPU-1", "used_bytes": round(19.35 * 2**30)}
    samples = [
        {"tick": n, "due_s": s, "t_s": s, "state": "ok", "reason": None, "gpus": [gpu]}
        for n, s in enumerate((1010.5, 1013.5))
    ]
    raw = bundle / "raw" / "gpu_samples.jsonl"
    raw.write_text("".join(json.dumps(sample) + "\n" for sample in samples))


@pytest.mark.usefixtures("undrawn")
def test_the_bars_of_device_memory_add_up(tmp_path: Path) -> None:
    """What is in use is the sum of the logged terms and of what no line explains, by name."""
    lab = Lab(Home(tmp_path / "home"))
    record.ingest(lab.home, [lab.seal(change=gpu_log, metrics=None)])
    found = built(lab.home)
    figure = next(f for f in found.page.figures() if f.id == "memory")
    (row,) = figure.table.rows
    cells = dict(zip(figure.table.columns, row, strict=True))
    assert [cells[n].text for n in ("weights", "CUDA graphs")] == ["8.61 GiB", "552.96 MiB"]
    assert cells["activations"].text == "–"
    assert cells["in use (NVML)"].text == "19.35 GiB"
    terms = sum(float(cells[n].value or 0) for n in ("weights", "KV pool", "CUDA graphs"))
    assert float(cells["sum"].value or 0) == terms
    assert float(cells["unexplained"].value or 0) == round(19.35 * 2**30) - terms
    assert cells["unexplained"].why == (
        "of what is in use; not logged: activations, other, outside torch"
    )
    spec: Any = figure.panels[0].spec
    bars, totals = (layer["data"]["values"] for layer in spec["layer"][:2])
    assert [bar["part"] for bar in bars] == ["weights", "KV pool", "CUDA graphs", "unexplained"]
    assert totals[0]["text"] == "19.35 GiB"


@pytest.mark.usefixtures("undrawn")
def test_equal_configurations_have_bars_of_their_own(tmp_path: Path) -> None:
    """Two versions of one cell are not added up to one bar, of memory or of users."""
    lab = Lab(Home(tmp_path / "home"))
    sealed = [
        lab.seal(change=gpu_log, started_s=1001.0 + number, engine_version=version)
        for number, version in enumerate(("0.27.0", "0.26.0"))
    ]
    record.ingest(lab.home, sealed)
    figures = {figure.id: figure for figure in built(lab.home).page.figures()}
    for id_ in ("memory", "users"):
        spec: Any = figures[id_].panels[0].spec
        names = {row["name"] for row in spec["layer"][0]["data"]["values"]}
        assert len(names) == 2, id_
        assert any("0.26.0" in name for name in names)


def shared_gpu(bundle: Path) -> None:
    """Make the samples of a run's GPU name a process of somebody else's."""
    gpu_log(bundle)
    raw = bundle / "raw" / "gpu_samples.jsonl"
    raw.write_text(raw.read_text().replace('"gpus": [{', '"gpus": [{"foreign_pids": [4711], '))


@pytest.mark.usefixtures("undrawn")
def test_what_another_process_held_is_not_the_runs(tmp_path: Path) -> None:
    """Device memory in use is not told where it was not the run's alone."""
    lab = Lab(Home(tmp_path / "home"))
    record.ingest(lab.home, [lab.seal(change=shared_gpu, metrics=None)])
    figure = next(f for f in built(lab.home).page.figures() if f.id == "memory")
    told = dict(zip(figure.table.columns, figure.table.rows[0], strict=True))["in use (NVML)"]
    assert (told.text, told.why) == ("–", "another process used the GPU")


@pytest.mark.usefixtures("undrawn")
def test_an_invalid_load_point_is_told_wherever_its_numbers_stand(tmp_path: Path) -> None:
    """In the tables of load points and of peaks, and in the words of the marks."""
    lab = Lab(Home(tmp_path / "home"))
    record.ingest(lab.home, [lab.seal(client_lag_s=3.0)])
    found = built(lab.home)
    tables = {one.id: one for one in found.page.tables()}
    for id_ in ("load-0", "peaks"):
        assert [row[-1].text for row in tables[id_].rows] == ["INVALID"], id_
    for figure in found.page.figures():
        if figure.id in ("load-0", "peaks"):
            spec: Any = figure.panels[0].spec
            rows = [row for layer in spec["layer"] for row in layer["data"]["values"]]
            told = [str(row["words"]) for row in rows if "words" in row]
            assert told, figure.id
            assert all(text.endswith("(invalid)") for text in told), figure.id


@pytest.mark.usefixtures("undrawn")
def test_a_peak_without_a_lower_bound_was_not_surely_reached(tmp_path: Path) -> None:
    """Where preemptions are not known, the upper bound is no peak that a scrape missed."""
    samples = [(1009.0 + n, 0.003, 1.0, 0.0, None) for n in range(7)]
    lab = Lab(Home(tmp_path / "home"))
    record.ingest(lab.home, [lab.seal(samples=samples)])
    figure = next(f for f in built(lab.home).page.figures() if f.id == "peaks")
    assert figure.table.rows[0][3].text == "–"
    assert figure.caption.startswith("At 0 of 1 load points")


def test_a_published_value_does_not_look_like_a_measured_one() -> None:
    """In the bars of device memory each source has its mark."""
    marks = [{"name": "a", "gib": 1.0, "source": s, "words": s} for s in ("measured", "published")]
    spec: Any = charts.allocation([], [], marks, order=["a"])
    drawn = {layer["data"]["values"][0]["words"]: layer["mark"] for layer in spec["layer"][2:]}
    assert drawn["measured"]["type"] == "tick"
    assert drawn["published"] | {"size": 0} == {
        "type": "point", "shape": "diamond", "filled": False, "size": 0,
        "color": charts.light("ink"),
    }  # fmt: skip


def test_load_points_that_differ_are_no_repeats() -> None:
    """A mean joins the same load point of several runs, and only valid ones."""
    row = {"series": "512 tokens", "parallel": 4, "valid": True}
    rows: list[dict[str, object]] = [
        row | {"point": 0, "value": 1.0},
        row | {"point": 0, "value": 3.0},
        row | {"point": 0, "value": 99.0, "valid": False},
        row | {"point": 1, "value": 8.0},
    ]
    assert [mean["value"] for mean in serving._means(rows)] == [2.0, 8.0]


@pytest.mark.parametrize(
    ("metric", "difference", "kind"),
    [
        ("output_tokens_per_s", 5.0, "better"),
        ("output_tokens_per_s", -5.0, "worse"),
        ("ttft_p50_ms", 5.0, "worse"),
        ("window_s", -5.0, "better"),
        ("kv_cache_size_tokens", -5.0, "worse"),
        ("num_gpu_blocks", -5.0, "changed"),
    ],
)
def test_a_change_is_worse_in_its_own_direction(metric: str, difference: float, kind: str) -> None:
    """A rate in tokens a second is no duration, though its name ends like one."""
    row = {"verdict": "different", "metric": metric, "difference": difference}
    assert proof._kind(row) == kind


@pytest.mark.usefixtures("undrawn")
def test_published_values_are_marks_beside_ours(tmp_path: Path) -> None:
    """A shipped sweep's figures are drawn where its cell has that load point, and told apart."""
    lab = Lab(Home(tmp_path / "home"))
    load = (LoadPoint(prompt_tokens=512, parallel=4, number=4, warmup=1),)
    sealed = lab.seal(sweep="context-limit", label="limit/max_model_len=32768", load=load)
    record.ingest(lab.home, [sealed])
    found = built(lab.home)
    spec: Any = next(f for f in found.page.figures() if f.id == "load-0").panels[0].spec
    marks = spec["layer"][-1]
    assert marks["mark"]["shape"] == "diamond"
    assert {row["value"] for row in marks["data"]["values"]} == {0.0364}
    rows = next(t for t in found.page.tables() if t.id == "published").rows
    assert {row[6].text for row in rows} <= {"not comparable", "not measured"}
    assert any(row[5].formula.endswith(" over 1 run") for row in rows)
    figure = {"metric": "kv_pool_bytes", "measured": 1e9, "unit": "bytes", "measured_runs": 2}
    pool = proof._measured(figure)
    assert pool is not None
    assert pool.formula.endswith("over 2 runs: blocks as measured × bytes a block as predicted")


def test_colours_follow_the_theme(made: Built) -> None:
    """No drawing holds a colour of its own, so that dark is readable."""
    for drawing in re.findall(r"<svg.*?</svg>", made.html, re.S):
        assert not re.findall(r'(?:fill|stroke)="#[0-9a-f]{6}"', drawing)


@given(
    st.lists(st.floats(0, 1, allow_nan=False), min_size=1, max_size=400),
    st.integers(min_value=2, max_value=20),
)
def test_thinning_loses_no_peak(values: list[float], buckets: int) -> None:
    """Highest, lowest, first and last stay; order and times are those of the samples."""
    t_s, value = np.arange(len(values), dtype=float), np.array(values)
    at, kept = thinned(t_s, value, buckets)
    assert kept.max() == value.max()
    assert kept.min() == value.min()
    assert (kept[0], kept[-1]) == (value[0], value[-1])
    assert len(kept) <= max(2 * buckets + 2, 0) or len(values) <= 2 * buckets
    assert (np.diff(at) > 0).all()
    assert (value[at.astype(int)] == kept).all()


def test_a_phases_peak_is_of_every_sample(tmp_path: Path) -> None:
    """A phase shorter than a stretch of the drawing keeps its own highest sample."""
    lab = Lab(Home(tmp_path / "home"))
    usage = [0.5 if number == 104 else 0.1 if number % 2 else 0.9 for number in range(150)]
    samples = [(1001.0 + n / 10, value, 1.0, 0.0, 0.0) for n, value in enumerate(usage)]
    phases = [{"name": "measure", "load_point": 0, "start_s": 1011.35, "end_s": 1011.45}]

    def with_phases(bundle: Path) -> None:
        write_json(bundle / "phases.json", {"phases": phases})

    record.ingest(lab.home, [lab.seal(run_uuid=RUN, samples=samples, change=with_phases)])
    with open_snapshot(lab.home.warehouse_snapshot) as connection:
        (one,) = gather(connection, "", [RUN]).runs
        seen_ = course(connection, one, buckets=3)
    (span,) = [span for span in seen_.spans if span.phase == "measure"]
    assert span.peaks["kv_usage_ratio"] == 0.5


def test_files_of_charts_and_tables(made: Built, tmp_path: Path) -> None:
    """Every chart as SVG and PNG in its own colours, every table as CSV with whole numbers."""
    small = Page(
        title="small",
        subtitle="",
        banner=(),
        pins=table("pins", "Pins", ("pin", "value"), [["=cmd()", Entry("1.00 GiB", 2**30)]]),
        sections=made.page.sections[1:2],
    )
    files = page.export(small, tmp_path / "out")
    by_name = {path.name: path for path in files}
    assert by_name["map.png"].read_bytes().startswith(b"\x89PNG")
    assert "#14703c" in by_name["map.svg"].read_text()
    rows = list(csv.reader(by_name["pins.csv"].read_text().splitlines()))
    assert rows == [["pin", "value"], ["'=cmd()", str(2**30)]]


def test_evidence_knows_equal_formulas_as_one() -> None:
    """A formula that many cells share has one text."""
    rows = [[Entry("1", 1, formula="1 + 0")], [Entry("1", 1, formula="1 + 0")], [Entry("–")]]
    one = table("t", "T", ("n",), rows)
    evidence = Evidence([one])
    assert [evidence.link(row[0]) for row in one.rows] == ["f0", "f0", ""]
    assert len(evidence.computed) == 1


# Nights and comparisons


def less(bundle: Path) -> None:
    """Make a run's log say that its pool holds less."""
    log = bundle / "server.log"
    log.write_text(log.read_text().replace("975,890 tokens", "900,000 tokens"))


@pytest.fixture(scope="module")
def two_nights(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Two nights of one sweep; in the second the pool is smaller."""
    lab = Lab(Home(tmp_path_factory.mktemp("nights") / "home"))
    first, second = "2026-11-28T02:00:00Z", "2026-11-29T02:00:00Z"
    record.ingest(
        lab.home,
        [lab.seal(round=first), lab.seal(round=second, started_s=1500.0, change=less)],
    )
    for label in (first, second):
        facts = {"label": label, "opened_at": label, "target": "local", "sweep_name": "demo"}
        folder = lab.home.rounds / f"demo-{label}"
        write_json(folder / "round.json", facts | {"id": f"demo-{label}", "sweep_sha256": "0" * 64})
    return lab.home


def test_a_night_that_lost_memory_says_so_first(two_nights: Home) -> None:
    """The night's page and the index both begin with what got worse; the index links the page."""
    path = nights.night_page(two_nights, "demo-2026-11-29T02:00:00Z")
    html = path.read_text()
    first = seen(html).of("li")[0]
    assert first.attributes["class"] == "bad"
    assert "kv_cache_size_tokens 975890 became 900000" in first.text
    index = seen((two_nights.reports / nights.INDEX).read_text())
    assert index.of("li")[0].attributes["class"] == "bad"
    assert "900000" in index.of("li")[0].text
    files = [t.attributes["href"] for t in index.of("a") if t.attributes["href"].endswith(".html")]
    assert files == [path.name]
    assert [t.text for t in index.of("td") if re.match(r"\d+ worse", t.text)]


@pytest.mark.usefixtures("undrawn")
def test_the_first_night_has_nothing_to_be_worse_than(two_nights: Home) -> None:
    """Without a round before it a night is no regression."""
    html = nights.night_page(two_nights, "demo-2026-11-28T02:00:00Z").read_text()
    assert "became" not in seen(html).of("header")[0].text


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a way to run a command in a state folder: exit code, stdout, stderr."""

    def call(home: Home, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setenv("MEMSWEEP_HOME", str(home.root))
        code = cli.run(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.mark.usefixtures("undrawn")
def test_the_command_prints_the_file(home: Home, run: Run, tmp_path: Path) -> None:
    """stdout is the file, stderr what is to be seen at once; -o says where it goes."""
    code, out, err = run(home, "report", "demo", "-o", str(tmp_path / "page.html"))
    assert (code, out) == (0, f"{tmp_path / 'page.html'}\n")
    assert "did not end as expected" in err
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_a_page_replaces_a_file_only_and_not_the_link_to_it(tmp_path: Path) -> None:
    """A pipe or a device (`-o /dev/null`, as root) would be gone for everybody."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match="is a pipe or a device"):
        page.write(tmp_path / "pipe", "x")
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "link").symlink_to("page.html")
    page.write(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "page.html").read_text() == "x"


@pytest.mark.usefixtures("undrawn")
def test_night_and_comparison(two_nights: Home, run: Run) -> None:
    """A night by its date, and two rounds against each other, each with what changed."""
    for wanted in (
        ("--night", "2026-11-29"),
        ("--compare", "demo@2026-11-28T02:00:00Z", "demo@2026-11-29T02:00:00Z"),
    ):
        code, out, err = run(two_nights, "report", *wanted, "--json")
        assert code == 0, err
        found = json.loads(out)
        assert Path(found["file"]).parent == two_nights.reports
        assert found["sections"][0] == "changes"
        assert any("kv_cache_size_tokens" in line["text"] for line in found["banner"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--night", "1999-01-01"), "no round of that date"),
        (("--night", "2026-11"), "the newest: 2026-11-29"),
        (("demo", "--night", "2026-11-29"), "wanted one of"),
        (("nosuch",), "wanted a UUID"),
        (("--night", ""), "no round of that date"),
        (("demo", "-o", "."), "is a folder"),
    ],
)
def test_bad_input_is_one_line(
    home: Home, run: Run, arguments: tuple[str, ...], words: str
) -> None:
    """Exit code 2 and what was wanted."""
    code, out, err = run(home, "report", *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1
