"""Imports matplotlib without writing to the home folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ..files import scratch


@contextmanager
def no_fonts_at_home() -> Iterator[None]:
    """While matplotlib is imported, have it write its font cache to a scratch folder, which takes 0.25 s each time."""
    before = os.environ.get("MPLCONFIGDIR")
    with scratch("tformer-fonts") as folder:
        os.environ["MPLCONFIGDIR"] = before or str(folder)
        try:
            yield
        finally:
            if before is None:
                del os.environ["MPLCONFIGDIR"]
