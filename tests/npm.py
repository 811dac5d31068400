"""Packages from npm, for the tests of programs in JavaScript."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def folder_with(packages: list[str], factory: pytest.TempPathFactory) -> Path:
    """A folder whose node_modules has packages; skips the test where they cannot be installed.

    TFORMER_NODE_MODULES: a folder that has them already.
    """
    if given := os.environ.get("TFORMER_NODE_MODULES"):
        return Path(given)
    if not shutil.which("npm"):
        pytest.skip("npm is not installed: install Node.js")
    folder = factory.mktemp("packages")
    (folder / "package.json").write_text("{}")
    # The libraries for processors are in the packages; what their scripts fetch is for GPUs.
    command = ["npm", "install", "--silent", "--ignore-scripts", *packages]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"{', '.join(packages)} cannot be installed: {done.stderr.strip()[-200:]}")
    return folder
