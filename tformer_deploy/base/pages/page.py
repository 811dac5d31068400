"""HTML pages from templates: tables as data, escaping, numbers as text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

_UNPRINTABLE = re.compile(r"[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Cell:
    """A cell that is more than text."""

    text: str
    bad: bool = False
    notes: Sequence[str] = ()
    """Lines in small print."""
    badge: str = ""
    """`good`, `bad` or `loosened`."""
    link: str = ""


Row = Sequence[str | Cell]


@dataclass(frozen=True)
class Table:
    """A table under a heading; the first column holds the rows' names."""

    title: str
    head: Sequence[str] = ()
    rows: Sequence[Row] = ()
    notes: Sequence[str] = ()
    """Paragraphs above the table."""
    shown: int | None = None
    """Rows that are visible at first; None: all."""
    folded: str = ""
    """Label of the folded rows."""


def page_text(value: Any) -> Any:
    """A text without characters that HTML forbids; markup and other values as they are."""
    return _UNPRINTABLE.sub("\ufffd", value) if isinstance(value, str) and not isinstance(value, Markup) else value


def short_number(value: float) -> str:
    """As in 1.23e-5, or 0.123 and 12.3 where that is short."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if not value or 0.01 <= abs(value) < 999.5:
        return f"{value:#.3g}".rstrip(".") if value else "0"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def limit_text(value: float) -> str:
    """As in 1e-4."""
    text = short_number(value)
    return re.sub(r"\.?0+e", "e", text) if "e" in text else f"{value:g}"


def counted(count: int, noun: str) -> str:
    """As in `1 tie`, `2 ties`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def render_page(template: str, **values: Any) -> str:
    """A rendered template, every value escaped."""
    env = Environment(
        loader=PackageLoader("tformer_deploy.base.pages"),
        autoescape=True,
        finalize=page_text,  # which sees a value before it is escaped
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return env.get_template(template).render(values)
