"""Keeps matplotlib out of the home folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ..files import scratch


@contextmanager
def no_fonts_at_home() -> Iterator[None]:
    """Let matplotlib, while it is imported, write its list of fonts to a scratch folder; it takes a quarter second."""
    before = os.environ.get("MPLCONFIGDIR")
    with scratch("tformer-fonts") as folder:
        os.environ["MPLCONFIGDIR"] = before or str(folder)
        try:
            yield
        finally:
            if before is None:
                del os.environ["MPLCONFIGDIR"]
