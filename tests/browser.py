"""The browser that tests of pages use."""

from __future__ import annotations

import shutil

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(
    not BROWSER, reason="there is no Chromium to see pages with: apt-get install chromium"
)
