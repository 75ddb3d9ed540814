"""Charts as Vega-Lite specifications, drawn to SVG by vl-convert: no browser, no network.

One drawing serves light and dark: its colours come from one palette and are turned into the page's
variables afterwards. Colour never stands alone: shapes, dashes or words say the same. All data is
inline, and fields have fixed names, so that no text of a user is ever read as an expression.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

Spec = dict[str, Any]
Rows = Sequence[Mapping[str, object]]

#: Name of a page's variable -> (colour on light, colour on dark). No two names share a light one.
PALETTE: dict[str, tuple[str, str]] = {
    "ink": ("#1b2430", "#e8ebf0"),
    "dim": ("#566170", "#a7b1be"),
    "grid": ("#dde2e8", "#353f4c"),
    "s1": ("#0b62a8", "#6fb7f7"),
    "s2": ("#b4520a", "#f5a863"),
    "s3": ("#1b7f43", "#66d08d"),
    "s4": ("#7b3fa9", "#c79cf2"),
    "s5": ("#0e7a85", "#5fd0da"),
    "s6": ("#8a6d00", "#e0c14d"),
    "s7": ("#a3306e", "#f08fc0"),
    "s8": ("#6a717a", "#9aa4b0"),
    "good": ("#14703c", "#5ccb87"),
    "bad": ("#b3261e", "#ff8a80"),
    "warn": ("#9a5b00", "#f0b450"),
    "p1": ("#e3eaf2", "#27313d"),
    "p2": ("#dcefe2", "#20362a"),
    "p3": ("#f3ead8", "#3a3120"),
    "p4": ("#e2e0f5", "#2c2b46"),
    "p5": ("#f2dfe6", "#40262f"),
    "p6": ("#e6e6e6", "#303030"),
    "paper": ("#fefefe", "#151b23"),
}
SERIES = tuple(f"s{number}" for number in range(1, 9))
_DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [4, 4], [1, 3], [10, 4], [3, 1])
_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")
#: Versions of Vega-Lite that vl-convert holds; pinned, so that a page does not change by itself.
VEGA_LITE = "5.20"


FONT = "system-ui, sans-serif"


def light(name: str) -> str:
    """Return a palette colour as it stands in a specification."""
    return PALETTE[name][0]


_CONFIG: Spec = {
    "background": None,
    "font": FONT,
    "aria": True,
    "view": {"stroke": light("grid")},
    "axis": {
        "aria": False,
        "labelColor": light("dim"),
        "titleColor": light("ink"),
        "titleFontWeight": "normal",
        "titleFontSize": 14,
        "labelFontSize": 13,
        "gridColor": light("grid"),
        "domainColor": light("dim"),
        "tickColor": light("dim"),
        "labelLimit": 260,
    },
    "legend": {
        "aria": False,
        "labelColor": light("ink"),
        "titleColor": light("dim"),
        "titleFontWeight": "normal",
        "labelFontSize": 13,
        "titleFontSize": 13,
        "symbolStrokeWidth": 0,
        "labelLimit": 220,
        "orient": "bottom",
        "columns": 4,
    },
    "text": {"color": light("ink"), "fontSize": 13},
    "rule": {"color": light("dim")},
    "point": {"size": 55},
}


def draw(spec: Spec, *, prefix: str = "") -> str:
    """Return a specification as SVG text; ``prefix`` keeps its ids apart from other drawings'.

    Charts of a page are alike but for their data: what Vega-Lite makes of them is kept.
    """
    import vl_convert

    rows: dict[str, Any] = {}
    vega = json.loads(_compiled(json.dumps(whole(_named(spec, rows)))))
    for data in vega["data"]:
        if data["name"] in rows:
            data["values"] = rows[data["name"]]
    svg: str = vl_convert.vega_to_svg(json.dumps(vega), allowed_base_urls=[])
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    return re.sub(r"url\(#", f"url(#{prefix}", svg)


def _named(spec: Spec, rows: dict[str, Any]) -> Spec:
    """Return a specification with names in place of its data, which goes into ``rows``."""
    named = dict(spec)
    if "data" in spec:
        name = f"rows_{len(rows)}"
        rows[name] = spec["data"]["values"]
        named["data"] = {"name": name}
    if "layer" in spec:
        named["layer"] = [_named(layer, rows) for layer in spec["layer"]]
    return named


@lru_cache(maxsize=64)
def _compiled(spec: str) -> str:
    import vl_convert

    vega = vl_convert.vegalite_to_vega(spec, vl_version=VEGA_LITE, show_warnings=False)
    return json.dumps(vega)


def png(spec: Spec) -> bytes:
    """Return a specification as a PNG on white, at twice its size."""
    import vl_convert

    content: bytes = vl_convert.vegalite_to_png(
        whole(spec) | {"background": "white"},
        vl_version=VEGA_LITE,
        scale=2,
        allowed_base_urls=[],
        show_warnings=False,
    )
    return content


def whole(spec: Spec) -> Spec:
    """Return a specification with what all of them share."""
    return {"$schema": "https://vega.github.io/schema/vega-lite/v5.json", "config": _CONFIG, **spec}


_COLOURS = {colours[0]: name for name, colours in PALETTE.items()}
_QUOTED = re.compile(r'"(#[0-9a-f]{6})"')


#: What Vega writes and no browser needs: empty paths, defaults, and roles within one image.
_NOISE = re.compile(
    r'<path class="(?:background|foreground)" aria-hidden="true" d="(?:M0,0h0v0h0Z)?"[^>]*/>'
    r'| (?:aria-hidden="true"|pointer-events="none"|opacity="1"|stroke-miterlimit="10"'
    r'|font-family="[^"]*"|font-weight="normal"|role="graphics-(?:object|symbol)"'
    r'|xmlns:xlink="[^"]*"|version="1.1")(?=[ />])'
    r'|(?<=<g) class="mark-[^"]*"'
)


_PLACES = re.compile(r' (?:transform|d|x2|y2|x|y|width|height)="[^"]*"')
#: Texts are drawn smaller than they were measured: a reader's font may be wider than the library's.
_SIZE = re.compile(r'font-size="(\d+)px"')
_LONG = re.compile(r"(\d\.\d\d)\d+")


def themed(svg: str) -> str:
    """Return a drawing whose colours are the page's variables: it follows light and dark."""

    def variable(match: re.Match[str]) -> str:
        name = _COLOURS.get(match[1])
        return match[0] if name is None else f'"var(--{name})"'

    return _QUOTED.sub(variable, _slim(svg)).replace("<svg ", f'<svg font-family="{FONT}" ', 1)


def _slim(svg: str) -> str:
    """Return a drawing without what nobody sees: noise, and more digits than a screen has."""
    svg = _SIZE.sub(lambda match: f'font-size="{int(match[1]) - 2}px"', svg)
    return _PLACES.sub(lambda match: _LONG.sub(r"\1", match[0]), _NOISE.sub("", svg))


# Parts that several charts share


def _values(rows: Iterable[Mapping[str, object]]) -> Spec:
    return {"values": [dict(row) for row in rows]}


#: One legend shows colour and shape of a series: they share all that it has.
_LEGEND: Spec = {"title": "prompt", "legend": {"columns": 2, "offset": 4}}


def _series(names: Sequence[str]) -> Spec:
    """Return the colours that tell series apart; dash or shape do so beside them."""
    if len(names) < 2:
        return {"color": {"value": light(SERIES[0])}}
    colours = [light(SERIES[number % len(SERIES)]) for number in range(len(names))]
    return {
        "color": {
            "field": "series",
            "type": "nominal",
            "scale": {"domain": list(names), "range": colours},
            **_LEGEND,
        }
    }


def _dashed(names: Sequence[str]) -> Spec:
    if len(names) < 2:
        return {}
    dashes = [_DASHES[number % len(_DASHES)] for number in range(len(names))]
    scale = {"domain": list(names), "range": dashes}
    return {"strokeDash": {"field": "series", "type": "nominal", "scale": scale, "legend": None}}


def _shaped(names: Sequence[str]) -> Spec:
    if len(names) < 2:
        return {}
    shapes = [_SHAPES[number % len(_SHAPES)] for number in range(len(names))]
    scale = {"domain": list(names), "range": shapes}
    return {"shape": {"field": "series", "type": "nominal", "scale": scale, **_LEGEND}}


_WORDS: Spec = {"description": {"field": "words", "type": "nominal"}}


def _counts(values: Iterable[object]) -> list[int]:
    return sorted({int(v) for v in values if isinstance(v, int | float)})


def against_concurrency(
    lines: Rows, points: Rows, marks: Rows, *, names: Sequence[str], title: str, axis: str
) -> Spec:
    """Return lines of ``value`` over ``parallel``, one a series, with every point and its words.

    ``points`` with ``valid`` false are hollow crosses and no part of a line; ``marks`` are values
    that others published.
    """
    at = _counts(row["parallel"] for row in (*lines, *points, *marks))
    x: Spec = {
        "field": "parallel",
        "type": "quantitative",
        "title": "requests in flight",
        "scale": {"type": "log", "base": 2, "padding": 8} if len(at) > 1 else {"padding": 40},
        "axis": {"values": at, "format": "d", "grid": False},
    }
    y: Spec = {
        "field": "value",
        "type": "quantitative",
        "title": title,
        "scale": {"zero": True, "nice": True},
        "axis": {"format": axis, "tickCount": 5},
    }
    layers: list[Spec] = []
    if len(at) > 1:
        layers.append(
            {
                "data": _values(lines),
                "mark": {"type": "line", "strokeWidth": 2, "aria": False},
                "encoding": {"x": x, "y": y, **_series(names), **_dashed(names)},
            }
        )
    good = [row for row in points if row["valid"] is not False]
    bad = [row for row in points if row["valid"] is False]
    encoding = {"x": x, "y": y, **_series(names), **_shaped(names), **_WORDS}
    layers.append(
        {"data": _values(good), "mark": {"type": "point", "filled": True}, "encoding": encoding}
    )
    if bad:
        layers.append(
            {
                "data": _values(bad),
                "mark": {"type": "point", "shape": "cross", "filled": False, "size": 90},
                "encoding": {"x": x, "y": y, "color": {"value": light("bad")}, **_WORDS},
            }
        )
    if marks:
        layers.append(
            {
                "data": _values(marks),
                "mark": {"type": "point", "shape": "diamond", "filled": False, "size": 130},
                "encoding": {"x": x, "y": y, "color": {"value": light("ink")}, **_WORDS},
            }
        )
    return {"width": 222, "height": 165, "layer": layers}


PARTS = ("weights", "KV pool", "CUDA graphs", "activations", "other, outside torch", "unexplained")


_IN_USE: dict[str, Spec] = {
    "measured": {"type": "tick", "thickness": 3, "height": 24},
    "published": {"type": "point", "shape": "diamond", "filled": False, "size": 130},
}


def allocation(rows: Rows, totals: Rows, marks: Rows, *, order: Sequence[str]) -> Spec:
    """Return stacked bars of where device memory goes, one a configuration, in GiB.

    ``rows`` hold name, part, gib and words; ``totals`` the sum at the bar's end; ``marks`` what was
    in use, by their source: ``measured`` by the device itself, or ``published``.
    """
    colours = [light(name) for name in ("s1", "s3", "s4", "s2", "s5", "s8")]
    y: Spec = {"field": "name", "type": "nominal", "sort": list(order), "title": None}
    layers: list[Spec] = [
        {
            "data": _values(rows),
            "mark": {"type": "bar", "height": {"band": 0.7}},
            "encoding": {
                "y": y,
                "x": {
                    "field": "gib",
                    "type": "quantitative",
                    "stack": "zero",
                    "title": "GiB",
                    "axis": {"tickCount": 8},
                },
                "color": {
                    "field": "part",
                    "type": "nominal",
                    "title": None,
                    "scale": {"domain": list(PARTS), "range": colours},
                },
                "order": {"field": "order", "type": "quantitative"},
                **_WORDS,
            },
        },
        {
            "data": _values(totals),
            "mark": {"type": "text", "align": "left", "dx": 5, "aria": False},
            "encoding": {
                "y": y,
                "x": {"field": "gib", "type": "quantitative"},
                "text": {"field": "text", "type": "nominal"},
            },
        },
    ]
    for source, mark in _IN_USE.items():
        of_source = [row for row in marks if row["source"] == source]
        if of_source:
            layers.append(
                {
                    "data": _values(of_source),
                    "mark": {**mark, "color": light("ink")},
                    "encoding": {"y": y, "x": {"field": "gib", "type": "quantitative"}, **_WORDS},
                }
            )
    return {"width": 560, "height": {"step": 34}, "layer": layers}


PHASES = ("boot", "ready", "warmup", "measure", "drain", "stop")


def over_time(samples: Rows, spans: Rows, *, title: str, axis: str, colour: str) -> Spec:
    """Return one quantity over time with the run's phases shaded behind it."""
    present = [name for name in PHASES if any(span["phase"] == name for span in spans)]
    tints = {name: light(f"p{number + 1}") for number, name in enumerate(PHASES)}
    layers: list[Spec] = []
    if spans:
        layers.append(
            {
                "data": _values(spans),
                "mark": {"type": "rect", "aria": False},
                "encoding": {
                    "x": {"field": "start", "type": "quantitative"},
                    "x2": {"field": "end"},
                    "color": {
                        "field": "phase",
                        "type": "nominal",
                        "title": None,
                        "scale": {"domain": present, "range": [tints[name] for name in present]},
                        "legend": {"columns": 6, "symbolType": "square"},
                    },
                },
            }
        )
    layers.append(
        {
            "data": _values(samples),
            "mark": {
                "type": "line",
                "strokeWidth": 1.4,
                "color": light(colour),
                "interpolate": "step-after",
                "aria": False,
            },
            "encoding": {
                "x": {
                    "field": "t",
                    "type": "quantitative",
                    "title": "seconds since the run began",
                    "scale": {"nice": False},
                    "axis": {"grid": False},
                },
                "y": {
                    "field": "value",
                    "type": "quantitative",
                    "title": title,
                    "scale": {"zero": True},
                    "axis": {"format": axis, "tickCount": 5},
                },
            },
        }
    )
    return {"width": 420, "height": 150, "layer": layers}


#: How a cell can have come out -> (colour, sign that stands in the map beside the colour).
STATES: dict[str, tuple[str, str]] = {
    "ok": ("good", "✓"),
    "ok, some invalid": ("warn", "✓!"),
    "refused": ("s2", "R"),
    "out of memory": ("bad", "OOM"),
    "failed": ("s7", "✗"),
    "infeasible": ("s8", "–"),
    "derived": ("s1", "="),
    "not measured yet": ("dim", "…"),
}


def grid_map(rows: Rows, *, xs: Sequence[str], ys: Sequence[str], x: str, y: str) -> Spec:
    """Return the map of the grid: one square a cell, coloured and signed by how it came out."""
    states = [name for name in STATES if any(row["state"] == name for row in rows)]
    place: Spec = {
        "x": {
            "field": "x",
            "type": "nominal",
            "sort": list(xs),
            "title": x,
            "axis": {"labelAngle": 0 if len(xs) < 8 else -40, "grid": False},
        },
        "y": {"field": "y", "type": "nominal", "sort": list(ys), "title": y or None},
    }
    return {
        "width": {"step": 74},
        "height": {"step": 30},
        "layer": [
            {
                "data": _values(rows),
                "mark": {"type": "rect", "stroke": light("paper"), "strokeWidth": 2},
                "encoding": {
                    **place,
                    "color": {
                        "field": "state",
                        "type": "nominal",
                        "title": None,
                        "scale": {
                            "domain": states,
                            "range": [light(STATES[name][0]) for name in states],
                        },
                        "legend": {"columns": 3},
                    },
                    **_WORDS,
                },
            },
            {
                "data": _values(rows),
                "mark": {
                    "type": "text",
                    "color": light("paper"),
                    "fontWeight": "bold",
                    "aria": False,
                },
                "encoding": {**place, "text": {"field": "sign", "type": "nominal"}},
            },
        ],
    }


def residuals(rows: Rows, *, order: Sequence[str]) -> Spec:
    """Return how far measured numbers lie from predicted ones, in percent, by metric."""
    return {
        "width": 520,
        "height": {"step": 24},
        "layer": [
            {
                "data": {"values": [{"zero": 0}]},
                "mark": {"type": "rule", "aria": False, "color": light("dim")},
                "encoding": {"x": {"field": "zero", "type": "quantitative"}},
            },
            {
                "data": _values(rows),
                "mark": {"type": "point", "filled": True, "opacity": 0.75},
                "encoding": {
                    "x": {
                        "field": "percent",
                        "type": "quantitative",
                        "title": "measured minus predicted, % of predicted",
                        "scale": {"nice": True, "domainMin": -1, "domainMax": 1}
                        if all(abs(float(str(row["percent"]))) < 1 for row in rows)
                        else {"nice": True},
                    },
                    "y": {"field": "metric", "type": "nominal", "sort": list(order), "title": None},
                    "color": _verdict_colour("exact claim", "alarm"),
                    "shape": _verdict_shape("exact claim", "alarm"),
                    **_WORDS,
                },
            },
        ],
    }


def _verdict_colour(good: str, bad: str) -> Spec:
    return {
        "field": "verdict",
        "type": "nominal",
        "title": None,
        "scale": {
            "domain": [good, "estimate", bad],
            "range": [light("s1"), light("s8"), light("bad")],
        },
    }


def _verdict_shape(good: str, bad: str) -> Spec:
    return {
        "field": "verdict",
        "type": "nominal",
        "title": None,
        "scale": {"domain": [good, "estimate", bad], "range": ["circle", "square", "cross"]},
    }


def true_peaks(rows: Rows) -> Spec:
    """Return the peak that the requests tell against the one a scrape happened to see.

    What lies above the diagonal was missed between two scrapes.
    """
    top = max((float(str(row["upper"])) for row in rows), default=1.0) * 1.05 or 1.0
    axis: Spec = {"format": ".0%", "tickCount": 6}
    x: Spec = {
        "field": "sampled",
        "type": "quantitative",
        "title": "highest sample of KV usage",
        "scale": {"domain": [0, top]},
        "axis": axis,
    }
    y: Spec = {
        "field": "upper",
        "type": "quantitative",
        "title": "true peak, between scrapes too",
        "scale": {"domain": [0, top]},
        "axis": axis,
    }
    ends = [{"sampled": 0, "upper": 0}, {"sampled": top, "upper": top}]
    return {
        "width": 360,
        "height": 300,
        "layer": [
            {
                "data": {"values": ends},
                "mark": {
                    "type": "line",
                    "strokeDash": [4, 4],
                    "color": light("dim"),
                    "strokeWidth": 1,
                    "aria": False,
                },
                "encoding": {"x": x, "y": y},
            },
            {
                "data": _values(rows),
                "mark": {"type": "rule", "strokeWidth": 2, "color": light("s2"), "aria": False},
                "encoding": {"x": x, "y": y, "y2": {"field": "lower"}},
            },
            {
                "data": _values(rows),
                "mark": {"type": "point", "filled": True},
                "encoding": {
                    "x": x,
                    "y": y,
                    "color": {
                        "field": "case",
                        "type": "nominal",
                        "title": None,
                        "scale": {
                            "domain": ["exact", "bounded"],
                            "range": [light("s1"), light("s2")],
                        },
                    },
                    "shape": {
                        "field": "case",
                        "type": "nominal",
                        "title": None,
                        "scale": {
                            "domain": ["exact", "bounded"],
                            "range": ["circle", "triangle-up"],
                        },
                    },
                    **_WORDS,
                },
            },
        ],
    }


def frontier(rows: Rows, *, x: str, order: Sequence[str]) -> Spec:
    """Return the longest context that worked and the shortest that did not, by memory."""
    verdicts = ["worked", "did not"]
    return {
        "width": {"step": 90},
        "height": 220,
        "data": _values(rows),
        "mark": {"type": "point", "filled": True, "size": 110},
        "encoding": {
            "x": {
                "field": "memory",
                "type": "nominal",
                "sort": list(order),
                "title": x,
                "axis": {"labelAngle": -30 if len(order) > 1 else 0, "labelLimit": 170},
            },
            "y": {
                "field": "tokens",
                "type": "quantitative",
                "title": "context limit, tokens",
                "scale": {"type": "log", "base": 2, "padding": 20},
                "axis": {
                    "values": _counts(row["tokens"] for row in rows),
                    "format": ",d",
                },
            },
            "color": {
                "field": "verdict",
                "type": "nominal",
                "title": None,
                "scale": {"domain": verdicts, "range": [light("good"), light("bad")]},
            },
            "shape": {
                "field": "verdict",
                "type": "nominal",
                "title": None,
                "scale": {"domain": verdicts, "range": ["triangle-up", "cross"]},
            },
            **_WORDS,
        },
    }


def spread(rows: Rows, *, order: Sequence[str], title: str) -> Spec:
    """Return every boot's value in percent of its cell's largest one."""
    lowest = min((float(str(row["percent"])) for row in rows), default=100.0)
    x: Spec = {
        "field": "percent",
        "type": "quantitative",
        "title": title,
        "scale": {"domain": [min(99.0, lowest - 0.5), 100.2], "nice": False},
    }
    y: Spec = {"field": "name", "type": "nominal", "sort": list(order), "title": None}
    return {
        "width": 480,
        "height": {"step": 26},
        "layer": [
            {
                "data": _values(rows),
                "mark": {"type": "rule", "strokeWidth": 2, "aria": False},
                "encoding": {
                    "x": {**x, "aggregate": "min"},
                    "x2": {"field": "percent", "aggregate": "max"},
                    "y": y,
                },
            },
            {
                "data": _values(rows),
                "mark": {"type": "point", "filled": True, "color": light("s1"), "opacity": 0.8},
                "encoding": {"x": x, "y": y, **_WORDS},
            },
        ],
    }


def bars(rows: Rows, *, order: Sequence[str], title: str) -> Spec:
    """Return one bar a name, the best one marked by a star in its words and by its colour."""
    y: Spec = {"field": "name", "type": "nominal", "sort": list(order), "title": None}
    x: Spec = {"field": "value", "type": "quantitative", "title": title, "axis": {"format": ",d"}}
    return {
        "width": 480,
        "height": {"step": 28},
        "layer": [
            {
                "data": _values(rows),
                "mark": {"type": "bar", "height": {"band": 0.65}},
                "encoding": {
                    "x": x,
                    "y": y,
                    "color": {
                        "field": "best",
                        "type": "nominal",
                        "legend": None,
                        "scale": {"domain": [True, False], "range": [light("good"), light("s1")]},
                    },
                    **_WORDS,
                },
            },
            {
                "data": _values(rows),
                "mark": {"type": "text", "align": "left", "dx": 5, "aria": False},
                "encoding": {"x": x, "y": y, "text": {"field": "text", "type": "nominal"}},
            },
        ],
    }


def changes(rows: Rows, *, order: Sequence[str]) -> Spec:
    """Return changes from A to B in percent, with their interval where repeats give one."""
    verdicts = ["worse", "better", "changed", "within noise", "noise unknown"]
    colours = [light(name) for name in ("bad", "good", "s1", "s8", "warn")]
    shapes = ["cross", "triangle-up", "diamond", "circle", "square"]
    y: Spec = {"field": "name", "type": "nominal", "sort": list(order), "title": None}
    x: Spec = {"field": "percent", "type": "quantitative", "title": "change from A to B, %"}
    channel: Spec = {"field": "verdict", "type": "nominal", "title": None}
    return {
        "width": 420,
        "height": {"step": 22},
        "layer": [
            {
                "data": {"values": [{"zero": 0}]},
                "mark": {"type": "rule", "aria": False},
                "encoding": {"x": {"field": "zero", "type": "quantitative"}},
            },
            {
                "data": _values(row for row in rows if row["low"] is not None),
                "mark": {"type": "rule", "strokeWidth": 2, "aria": False},
                "encoding": {
                    "y": y,
                    "x": {"field": "low", "type": "quantitative"},
                    "x2": {"field": "high"},
                },
            },
            {
                "data": _values(rows),
                "mark": {"type": "point", "filled": True, "size": 70},
                "encoding": {
                    "x": x,
                    "y": y,
                    "color": {**channel, "scale": {"domain": verdicts, "range": colours}},
                    "shape": {**channel, "scale": {"domain": verdicts, "range": shapes}},
                    **_WORDS,
                },
            },
        ],
    }


def trend(rows: Rows, *, nights: Sequence[str], title: str) -> Spec:
    """Return one line a cell over nights, in percent of its first night; a fall is red."""
    x: Spec = {
        "field": "night",
        "type": "ordinal",
        "sort": list(nights),
        "title": None,
        "axis": {"labelAngle": -40, "labelLimit": 200},
    }
    y: Spec = {
        "field": "percent",
        "type": "quantitative",
        "title": title,
        "scale": {"zero": False, "padding": 12},
    }
    return {
        "width": 420,
        "height": 180,
        "layer": [
            {
                "data": _values(rows),
                "mark": {"type": "line", "strokeWidth": 1.5, "opacity": 0.6, "aria": False},
                "encoding": {
                    "x": x,
                    "y": y,
                    "detail": {"field": "cell", "type": "nominal"},
                    "color": {"value": light("s1")},
                },
            },
            {
                "data": _values(rows),
                "mark": {"type": "point", "filled": True},
                "encoding": {
                    "x": x,
                    "y": y,
                    "color": {
                        "field": "fell",
                        "type": "nominal",
                        "legend": None,
                        "scale": {"domain": [True, False], "range": [light("bad"), light("s1")]},
                    },
                    "shape": {
                        "field": "fell",
                        "type": "nominal",
                        "legend": None,
                        "scale": {"domain": [True, False], "range": ["triangle-down", "circle"]},
                    },
                    **_WORDS,
                },
            },
        ],
    }
