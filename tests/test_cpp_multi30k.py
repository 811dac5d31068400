"""1,000 sentences of Multi30K with a trained model: `tformer-cpp translate` prints what `tformer translate` does.

The data are not a part of the project. `TFORMER_MULTI30K` names a folder with `multi30k/test_2016_flickr.en.gz` and
`multi30k-run`, a run that was trained as benchmarks/README.md says.
"""

from __future__ import annotations

import gzip
import os
import subprocess
from pathlib import Path

import pytest

from .command import COMMAND
from .conftest import export_unchecked
from .cpp_library import ROOT, built, onnxruntime
from .params import long_but

DATA = Path(os.environ.get("TFORMER_MULTI30K", ROOT.parent / "shared" / "data"))
SENTENCES = 1000
VARIANTS = ["fp32", "fp32-cpu", "int8"]


@pytest.fixture(scope="session")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = DATA / "multi30k" / "test_2016_flickr.en.gz"
    if not file.is_file():
        pytest.skip(f"{file} is missing: TFORMER_MULTI30K names the folder that has Multi30K")
    text = tmp_path_factory.mktemp("text") / "test_2016_flickr.en"
    text.write_bytes(gzip.decompress(file.read_bytes()))
    return text


@pytest.fixture(scope="session")
def trained(sentences: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A bundle of the trained model, exported without its check, with the variants that the tests of this run need."""
    run = DATA / "multi30k-run"
    if not run.is_dir():
        pytest.skip(f"{run} is missing: TFORMER_MULTI30K names the folder that has a trained run")
    variants = VARIANTS if request.config.getoption("--long") else VARIANTS[:1]
    return export_unchecked(run, tmp_path_factory.mktemp("multi30k") / "bundle", variants)


@pytest.mark.parametrize("search", [[], ["--beams", "5", "--n-best", "5"]], ids=["greedy", "5 best of 5 beams"])
@pytest.mark.parametrize("variant", long_but(VARIANTS, "fp32"))
def test_every_byte_is_that_of_python(variant: str, search: list[str], trained: Path, sentences: Path) -> None:
    flags = [trained, "--variant", variant, *search, "--threads", "1"]
    environment = {**os.environ, "TFORMER_ONNXRUNTIME": onnxruntime()}

    def translated(*program: str | Path) -> bytes:
        # From a file: what a pipe holds depends on time, and so would batches and the last digits of scores.
        with sentences.open("rb") as lines:
            command = [*program, "translate", *flags]
            return subprocess.run(command, stdin=lines, stdout=subprocess.PIPE, check=True, env=environment).stdout

    found, expected = translated(built() / "examples" / "tformer-cpp"), translated(*COMMAND)
    assert found.count(b"\n") == (5 if search else 1) * SENTENCES
    assert found == expected
