"""The demo's page in a real browser (1 minute; the demo's 10 more where no round of it is there).

Screenshots of every theme and width stay in MEMSWEEP_ARTIFACTS, else in .ci/artifacts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from testkit.browser import Browser, browser
from testkit.real import ROOT, Memsweep

from tasks import record
from tasks.home import Home
from tests.support.bundle_maker import Lab

pytestmark = pytest.mark.real

ARTIFACTS = Path(os.environ.get("MEMSWEEP_ARTIFACTS") or ROOT / ".ci/artifacts")
LOOKS = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]
HOSTILE = '<script>window.hacked=1</script><img src=x onerror="window.hacked=2"><b>bold</b>'


@pytest.fixture(scope="module")
def page(memsweep: Memsweep, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the demo's newest round; the demo is run where there is none."""
    if not memsweep.home.joinpath("warehouse/snapshot.duckdb").is_file() or not memsweep.rows(
        "SELECT 1 FROM run WHERE sweep = 'demo'"
    ):
        log = tmp_path_factory.mktemp("demo") / "demo.log"
        assert memsweep.start("demo", log=log).wait(timeout=1500) == 0, log.read_text()
    path = tmp_path_factory.mktemp("report") / "demo.html"
    made = memsweep.json("report", "demo", "-o", str(path))
    assert made["broken_links"] == 0
    return path


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser that all tests here share."""
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_it_opens_without_network_and_without_complaint(
    page: Path, tab: Browser, width: int, scheme: str
) -> None:
    """One request: the file itself. Nothing overflows the screen; theme and width are kept."""
    tab.look(width=width, scheme=scheme)
    tab.open(page)
    assert [url for url in tab.requests if not url.startswith("data:")] == [page.as_uri()]
    assert tab.complaints == []
    assert tab.value(f"document.documentElement.scrollWidth <= {width}")
    dark = "getComputedStyle(document.body).backgroundColor === 'rgb(21, 27, 35)'"
    assert tab.value(dark) is (scheme == "dark")
    assert len(tab.screenshot(ARTIFACTS / f"report-{scheme}-{width}.png")) > 50_000


def test_charts_show_the_warehouses_values(page: Path, tab: Browser, memsweep: Memsweep) -> None:
    """The words of the marks in the browser hold the stored peaks; every chart has ink."""
    tab.look(width=1280)
    tab.open(page)
    words = tab.value("[...document.querySelectorAll('svg [aria-label]')].map(m => m.ariaLabel)")
    (newest,) = memsweep.rows(
        "SELECT round FROM run WHERE sweep = 'demo' ORDER BY started_at DESC LIMIT 1"
    )
    points = memsweep.rows(
        "SELECT asked_prompt_tokens AS prompt, parallel, repeat, peak_requests_running AS running "
        f"FROM load_points_wide WHERE sweep = 'demo' AND round = '{newest['round']}' "
        "AND peak_requests_running IS NOT NULL"
    )
    assert len(points) == 11
    for point in points:
        begins = f"{point['prompt']:,} tokens × {point['parallel']}, repeat {point['repeat']}: "
        told = [text.removeprefix(begins) for text in words if text.startswith(begins)]
        assert f"{point['running']:,.0f}" in told, (point, told)
    empty = (
        "[...document.querySelectorAll('.panel svg')].filter(s => "
        "!s.querySelector('path[d*=L],[aria-label]')).length"
    )
    assert tab.value(empty) == 0
    titles = tab.value("[...document.querySelectorAll('h4')].map(h => h.textContent)")
    assert {"Peak cache used", "Peak running requests", "Peak waiting requests"} <= set(titles)
    assert tab.value("document.querySelectorAll('#time .panel svg').length") == 4


def test_a_number_opens_its_evidence(page: Path, tab: Browser) -> None:
    """A click on the measured tokens opens the run's chain and shows the log's line."""
    tab.look(width=1280)
    tab.open(page)
    shown = tab.value(
        "new Promise(done => { addEventListener('hashchange', () => setTimeout(() => { "
        "const at = document.querySelector(location.hash); "
        "done([at.closest('details').open, at.textContent, at.getBoundingClientRect().top]); }));"
        "document.querySelectorAll('#cells tbody tr a')[1].click(); })"
    )
    opened, text, top = shown
    assert opened is True
    assert "GPU KV cache size: 975,890 tokens" in text
    assert 0 <= top <= 900


def test_the_reader_can_choose_the_theme_and_take_the_data(page: Path, tab: Browser) -> None:
    """The button turns light into dark; charts and tables have their buttons, named for readers."""
    tab.look(width=1280, scheme="light")
    tab.open(page)
    tab.value("document.querySelector('header button').click()")
    assert tab.value("document.documentElement.dataset.theme") == "dark"
    tab.value("document.querySelector('header button').click()")
    assert tab.value("document.documentElement.dataset.theme") == "light"
    names = tab.value(
        "[...document.querySelectorAll('.panel .tools button, caption button')]"
        ".map(b => b.getAttribute('aria-label'))"
    )
    assert all(name.startswith(("Save chart", "Save table")) for name in names)
    saved = tab.value(
        "(async () => { let kept; const made = URL.createObjectURL; "
        "URL.createObjectURL = blob => { kept = blob; return made(blob); }; "
        "HTMLAnchorElement.prototype.click = () => {}; "
        "document.querySelector('table[data-name=cells] caption button').click(); "
        "return await kept.text(); })()"
    )
    assert "context-limit/max_model_len=32768,1,ok,975890.0,975890.0" in saved
    assert tab.complaints == []


def test_contrast_of_text_is_enough(page: Path, tab: Browser) -> None:
    """Every colour that text has stands out from its page by 4.5 to 1, in both themes."""
    from flows.report.charts import PALETTE

    del page, tab
    for side in (0, 1):
        paper = _luminance(PALETTE["paper"][side])
        for name in ("ink", "dim", "good", "bad", "warn"):
            other = _luminance(PALETTE[name][side])
            bright, faint = max(paper, other), min(paper, other)
            assert (bright + 0.05) / (faint + 0.05) >= 4.5, (name, side)


def _luminance(colour: str) -> float:
    """Return WCAG's relative luminance of ``#rrggbb``."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_hostile_names_do_nothing(tab: Browser, tmp_path: Path, memsweep: Memsweep) -> None:
    """Scripts and markup in names, hosts and logs are text: no script runs, no element appears."""
    del memsweep
    from flows.report.page import Request, build, write
    from warehouse.compare import choose
    from warehouse.connection import open_snapshot

    def shout(bundle: Path) -> None:
        log = bundle / "server.log"
        log.write_text(log.read_text().replace("GPU KV cache size", f"{HOSTILE} GPU KV cache size"))

    lab = Lab(Home(tmp_path / "home"))
    record.ingest(lab.home, [lab.seal(label=HOSTILE, host=HOSTILE, sweep="hostile", change=shout)])
    with open_snapshot(lab.home.warehouse_snapshot) as connection:
        chosen = choose(connection, None)
        built = build(lab.home, connection, Request(HOSTILE, (chosen,)))
    write(tmp_path / "hostile.html", built.html)
    tab.look(width=1280)
    tab.open(tmp_path / "hostile.html")
    assert tab.value("window.hacked === undefined && !document.querySelector('img, main b b')")
    assert tab.value("document.title") == HOSTILE
    assert HOSTILE in tab.value("document.querySelector('#evidence').textContent")
    assert [url for url in tab.requests if not url.startswith(("data:", "file:"))] == []
    assert (tab.complaints, tab.dialogs) == ([], [])


def test_on_paper_charts_and_tables_are_there(page: Path, tab: Browser) -> None:
    """Print is light, and what is folded on a screen is open."""
    tab.look(width=1280, scheme="dark", medium="print")
    tab.open(page)
    light = "getComputedStyle(document.body).backgroundColor === 'rgb(254, 254, 254)'"
    assert tab.value(light)
    tab.value("dispatchEvent(new Event('beforeprint'))")
    assert tab.value("[...document.querySelectorAll('details.behind')].every(d => d.open)")
    assert tab.value("getComputedStyle(document.querySelector('nav')).display") == "none"
    tab.screenshot(ARTIFACTS / "report-print.png")
