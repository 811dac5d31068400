"""What each extra brings: one table, that of pyproject.toml, and messages that say what works from a checkout."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tformer_deploy import __version__
from tformer_deploy.base.errors import EXTRAS

ROOT = Path(__file__).parent.parent
BUNDLE = ROOT / "tests/bundles/v2/copy"
IMPORTED = {
    "pyyaml": "yaml",
    "onnxruntime-gpu": "onnxruntime",
    "cuda-python": "cuda",
    "prometheus-client": "prometheus_client",
    "grpcio": "grpc",
    "protobuf": "google",
    "tensorrt-rtx-cu13": "tensorrt_rtx",
    "ray[serve]": "ray",
}
"""Packages that are imported by another name."""
COMES_ALONG = {"markupsafe"}
"""With another package of its extra."""
ABSENT = sorted({module for extra, modules in EXTRAS.items() for module in modules if extra not in ("cpu", "gpu")})
"""What a machine with the extra `cpu` alone has not."""


def test_the_table_is_that_of_the_project() -> None:
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    del stated["dev"]
    assert stated.pop("native") == [f"tformer-native=={__version__}"]  # which is built here, and says so where it lacks
    found = {
        extra: {IMPORTED.get(name, name) for name in (re.split("[>=<]", each)[0] for each in packages)}
        for extra, packages in stated.items()
    }
    assert {extra: set(modules) - COMES_ALONG for extra, modules in EXTRAS.items()} == found
    readme = (ROOT / "README.md").read_text()
    install = readme[readme.index("## Install") : readme.index('## What "equal" means')]
    assert all(f"`{extra}`" in install for extra in EXTRAS), "the page that lists them lacks one"


TORCH, PAGES, TENSORRT = "'torch'", "'jinja2'", "TensorRT is not installed"
VERBS: dict[str, tuple[list[Any], str, str]] = {
    "train": (["--task", "copy", "--out", "OUT"], TORCH, "'.[train]'"),
    "init": (["--preset", "tiny", "--vocab-size", 99, "--out", "OUT"], TORCH, "'.[train]'"),
    "import": (["annotated", "LINES", "--out", "OUT"], TORCH, "'.[train]'"),
    "export": (["LINES", "--out", "OUT"], TORCH, "'.[export]'"),
    "check": ([BUNDLE], TORCH, "'.[train]' in a checkout of tformer-deploy; or give --reference FILE"),
    "check --html": ([BUNDLE, "--html", "OUT"], PAGES, "'.[report]'"),
    "bench --html": ([BUNDLE, "--html", "OUT"], "'markupsafe'", "'.[report]'"),
    "translate": ([BUNDLE, "--backend", "eager"], TORCH, "'.[train]'"),
    "score": ([BUNDLE, "--src", "LINES", "--tgt", "LINES", "--backend", "eager"], TORCH, "'.[train]'"),
    "encode": ([BUNDLE, "--backend", "eager"], TORCH, "'.[train]'"),
    "build": ([BUNDLE, "--precision", "fp32"], TENSORRT, "'.[trt]' or '.[trt-rtx]'"),
    "corpus --address": ([BUNDLE, "--in", "LINES", "--out", "OUT", "--address", "auto"], "'ray'", "'.[cluster]'"),
    "corpus s3": ([BUNDLE, "--in", "s3://bucket/a", "--out", "OUT"], "'fsspec'", "'.[corpus]'"),
    "corpus parquet": ([BUNDLE, "--in", "LINES.parquet", "--out", "OUT"], "'pyarrow'", "'.[corpus]'"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_names_the_extra_and_the_way(verb: str, tmp_path: Path) -> None:
    """In a process where nothing but the extra `cpu` can be imported; the real machine is in test_deployment.py."""
    arguments, package, words = VERBS[verb]
    places = {"OUT": tmp_path / "out", "LINES": tmp_path / "lines", "LINES.parquet": tmp_path / "a.parquet"}
    for name in ("lines", "a.parquet"):
        (tmp_path / name).write_text("1 2\n")
    code = f"import sys; sys.modules.update(dict.fromkeys({ABSENT})); from tformer_deploy.cli import main; main()"
    command = [sys.executable, "-c", code, verb.split()[0], *(str(places.get(str(each), each)) for each in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and done.stdout == "", line
    assert (
        package in line and f"not installed: pip install {words}" in line and "in a checkout of tformer-deploy" in line
    )
