"""What the page of a parity report is written with: escaped elements, numbers, the style sheet."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable

_UNPRINTABLE = re.compile(r"[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Html(str):
    """Text that is markup already; every other text is escaped."""


def tag(name: str, *children: object, **attributes: object) -> Html:
    """An element. The attribute `class_` is written `class`, `text_anchor` is `text-anchor`, an empty one left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items() if value != ""
    )
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def escape(value: object) -> Html:
    """Any text as markup; what no page may hold, such as a lone surrogate, is replaced."""
    return value if isinstance(value, Html) else Html(html.escape(_UNPRINTABLE.sub("\ufffd", str(value))))


def join(parts: Iterable[object]) -> Html:
    """Markup and texts one after the other."""
    return Html("".join(map(escape, parts)))


def number(value: float) -> str:
    """As in 1.23e-5, or 0.123 and 12.3 where that is short."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if not value or 0.01 <= abs(value) < 999.5:
        return f"{value:#.3g}".rstrip(".") if value else "0"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def limit_text(value: float) -> str:
    """As in 1e-4."""
    text = number(value)
    return re.sub(r"\.?0+e", "e", text) if "e" in text else f"{value:g}"


def note(*text: object) -> Html:
    """A paragraph in small print."""
    return tag("p", *text, class_="muted")


CSS = """
:root {
  --bg: #fff; --soft: #f4f6f8; --text: #1b1f24; --muted: #57606a; --line: #d5dae0; --counts: #b6c0cb; --mean: #6e7781;
  --good: #13702f; --good-bg: #e3f5e7; --bad: #c01c28; --bad-bg: #fdeaea; --warn: #875300; --warn-bg: #fdf1d3;
  --encoder: #2262c6; --decoder: #8339c2; }
@media screen and (prefers-color-scheme: dark) { :root {
  --bg: #14171b; --soft: #1d2126; --text: #e4e7eb; --muted: #a0a9b4; --line: #363c44; --counts: #4a545f;
  --mean: #97a1ac; --good: #5fd07f; --good-bg: #15301e; --bad: #ff7b78; --bad-bg: #3b1b1d; --warn: #f0b849;
  --warn-bg: #38290c; --encoder: #6ea8fe; --decoder: #cc9dff; } }
* { box-sizing: border-box; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
body { margin: 0; background: var(--bg); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 20px 16px 48px; }
h1, h2, h3, p, ul, dd, code { overflow-wrap: anywhere; }
h1, h2, h3 { margin: 0; line-height: 1.25; }
h1 { font-size: 30px; }
h1 span:not(.badge) { color: var(--text); font-size: 22px; font-weight: 600; margin-left: 6px; }
h2 { font-size: 20px; }
h3 { margin: 28px 0 8px; font-size: 16px; }
p { margin: 6px 0; }
ul { margin: 6px 0; padding-left: 20px; }
a { color: inherit; text-underline-offset: 3px; }
small, .muted, .legend { color: var(--muted); font-size: 13px; }
td small, th small { display: block; font-weight: 400; }
section { margin-top: 36px; padding-top: 20px; border-top: 2px solid var(--line); }
summary { cursor: pointer; padding: 4px 0; }
.eyebrow { margin: 0; color: var(--muted); font-size: 13px; letter-spacing: .04em; text-transform: uppercase; }
.verdict, .card { border-left: 6px solid; border-radius: 6px; padding: 12px 16px; margin: 10px 0; }
.card { background: var(--soft); }
.card.good { border-color: var(--good); }
.card.bad { border-color: var(--bad); }
.badge { display: inline-block; border: 1px solid; border-radius: 5px; padding: 1px 8px; white-space: nowrap;
  font: 600 13px/1.5 system-ui, sans-serif; vertical-align: 2px; }
.badge.warn { margin-left: 6px; }
h1 .badge.warn { margin-left: 12px; vertical-align: 4px; }
.verdict.good, .badge.good { color: var(--good); background: var(--good-bg); }
.verdict.bad, .badge.bad, td.bad { color: var(--bad); background: var(--bad-bg); }
.badge.warn { color: var(--warn); background: var(--warn-bg); }
td.bad { font-weight: 600; }
td.bad small { color: inherit; }
dl { display: flex; flex-wrap: wrap; gap: 10px 36px; margin: 16px 0; }
dt { color: var(--muted); font-size: 13px; }
dd { margin: 0; font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 12px; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th:first-child { padding-left: 0; }
th { font-weight: 600; }
thead th { color: var(--muted); font-size: 13px; vertical-align: bottom; }
.figures th:first-child { min-width: 110px; }
.figures td, .figures thead th:not(:first-child) { text-align: right; white-space: nowrap; }
.divergences td, .divergences th { padding-top: 2px; padding-bottom: 2px; }
.divergences :is(td, th):is(:nth-child(2), :nth-child(3)) { text-align: left !important; }

figure { margin: 0; }
svg { display: block; overflow: visible; }
svg text { fill: var(--muted); font-size: 12px; font-weight: 400; }
.legend span { display: inline-block; margin-right: 18px; }
.legend i { display: inline-block; width: 18px; margin-right: 6px; vertical-align: 4px; border-top: 3px solid; }
.legend .limit { border-top: 2px dashed var(--bad); }
.legend .largest { color: var(--encoder); }
.legend .mean { color: var(--mean); }
.legend .counts { height: 10px; border: 0; background: var(--counts); vertical-align: -1px; }
.legend .first { display: none; }
.legend .over { width: 9px; height: 9px; border: 0; border-radius: 5px; background: var(--bad); vertical-align: 0; }
.hit { fill: transparent; }
svg:hover > .hit, g:hover > .hit { fill: var(--text); fill-opacity: .08; }
.steps svg:hover > .hit { fill: transparent; }
.grid { stroke: var(--line); }
line.limit { stroke: var(--bad); stroke-width: 2; stroke-dasharray: 6 3; }
line.largest { stroke: var(--encoder); stroke-width: 2; }
line.mean { stroke: var(--mean); stroke-width: 1.5; }
circle.largest { fill: var(--encoder); }
circle.mean { fill: var(--mean); }
rect.counts { fill: var(--counts); }
.stem { stroke-width: 2; opacity: .5; }
.stem.encoder { stroke: var(--encoder); }
.stem.decoder { stroke: var(--decoder); }
.stem.over { stroke: var(--bad); }
.dot.encoder { fill: var(--encoder); }
.dot.decoder { fill: var(--decoder); }
.dot.over { fill: var(--bad); }
.dot.hollow { fill: var(--bg); stroke: var(--muted); stroke-width: 1.5; }
.layers { width: 100%; margin-top: 10px; }
.layers th, .layers td { border: 0; padding: 0; line-height: 18px; font-size: 13px; white-space: nowrap; }
.layers th[scope=row] { padding-right: 14px; font: 12px/18px ui-monospace, monospace; }
.layers th.bad { color: var(--bad); font-weight: 700; }
.layers .plot { width: 100%; padding-right: 8px; }
.layers td:not(.plot), .layers .plot ~ th { padding-left: 16px; text-align: right; }
.layers th[scope=rowgroup] { padding-top: 8px; }
.layers th.encoder { color: var(--encoder); }
.layers th.decoder { color: var(--decoder); }
.steps { display: grid; grid-template-columns: 50px 1fr; gap: 8px; margin-top: 10px; }

@media (max-width: 600px) {
  main { padding: 14px 12px 40px; }
  h1 { font-size: 25px; }
  th, td { padding: 5px; }
  .figures th:first-child { min-width: 0; }
  table, small { font-size: 12.5px; }
  .figures td small { white-space: normal; }
  .figures th small, .layers .wide, .layers .odd { display: none; }
}
@media print {
  body { font-size: 12px; }
  table, td small, th small { font-size: 10.5px; }
  th, td { padding: 3px 6px; }
  .figures th:first-child { min-width: 0; }
  .scroll { overflow: visible; }
  .card details::details-content { content-visibility: visible; block-size: auto; }
  tr, .card, .steps { break-inside: avoid; }
  h2, h3, .muted, .legend { break-after: avoid; }
}
"""
