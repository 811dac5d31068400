"""The programs in examples/ run as they are, on the demo's bundle or a model of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import tformer_deploy
from examples import own_module

from . import demo_folder
from .command import printed, run_process
from .cpp_library import built, onnxruntime

ROOT = Path(__file__).parent.parent
EXAMPLES, DEMO = ROOT / "examples", ROOT / ".demo"
needs_demo = pytest.mark.skipif(
    not (DEMO / "bundle").is_dir(), reason="`make demo` has not run: examples use its bundle"
)


def test_every_example_is_short_and_run_here() -> None:
    files = {path.name: path for path in EXAMPLES.iterdir() if path.is_file()}
    assert files.keys() == {"hugging_face.py", "own_module.py", "service.py", "minimal.cpp", "corpus.sh"}
    assert max(len(path.read_text(encoding="utf-8").splitlines()) for path in files.values()) <= 60
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"(examples/{name})" in page for name in files)


@pytest.mark.long
@needs_demo
def test_a_hugging_face_folder(tmp_path: Path) -> None:
    demo_folder.write_folder(DEMO / "run", tmp_path / "numbers")
    command = [sys.executable, EXAMPLES / "hugging_face.py", tmp_path / "numbers", "forty-two", "seven hundred"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.stdout.splitlines()[-2:] == ["zweiundvierzig", "siebenhundert"], done.stderr


@pytest.mark.long
def test_a_module_of_your_own(tmp_path: Path) -> None:
    """The bundle's words are those of a plain greedy loop around the module."""
    out = tmp_path / "bundle"
    assert printed(run_process("export", f"{EXAMPLES / 'own_module.py'}:make", "--out", out))[-1].endswith("written")
    line = "a dog runs"
    with tformer_deploy.load(out, max_tokens=8) as translator:
        (result,) = translator.translate([line])
    module = own_module.make().module.eval()
    src = torch.tensor([[*(own_module.WORDS.index(word) for word in line.split()), own_module.END]])
    ids = [own_module.START]
    with torch.no_grad():
        while len(ids) <= 8 and (len(ids) == 1 or ids[-1] != own_module.END):
            ids.append(int(module(src, torch.zeros_like(src, dtype=torch.bool), torch.tensor([ids]))[0, -1].argmax()))
    assert result.ids == [id for id in ids[1:] if id != own_module.END] != []


@pytest.fixture
def service() -> Iterator[str]:
    command = [sys.executable, EXAMPLES / "service.py", DEMO / "bundle", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT) as process:
        assert process.stdout
        yield process.stdout.readline().strip()
        process.kill()


@needs_demo
def test_a_service(service: str) -> None:
    with urllib.request.urlopen(service, b"forty-two\nfour hundred and two", timeout=60) as answer:
        found = json.load(answer)
    assert [each["text"] for each in found] == ["zweiundvierzig", "vierhundertzwei"]
    assert all(np.isfinite(each["score"]) for each in found)
    for body, status in ((b"nine " * 100, 400), (b"\xff", 400), (b" " * (1 << 20) + b"x", 413)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(service, body, timeout=60)
        assert refused.value.code == status and json.load(refused.value)["error"]


@pytest.mark.long
@needs_demo
def test_c_plus_plus_by_the_command_in_its_first_line(tmp_path: Path) -> None:
    if not shutil.which("pkg-config"):
        pytest.skip("pkg-config is not installed: apt-get install pkg-config")
    subprocess.run(["cmake", "--install", built(), "--prefix", tmp_path], check=True, capture_output=True)
    shutil.copy(EXAMPLES / "minimal.cpp", tmp_path)
    command = (EXAMPLES / "minimal.cpp").read_text().splitlines()[0].removeprefix("// ")
    library = next(tmp_path.rglob("tformer.pc")).parent
    subprocess.run(
        command.replace("/opt/tformer/lib", str(library.parent)),
        shell=True,
        cwd=tmp_path,
        env={**os.environ, "PKG_CONFIG_PATH": str(library)},
        check=True,
    )
    run: list[str | Path] = [tmp_path / "a.out", DEMO / "bundle", "forty-two"]
    environment = {"TFORMER_ONNXRUNTIME": onnxruntime()}
    assert subprocess.run(run, capture_output=True, env=environment, check=True).stdout == b"zweiundvierzig\n"


@needs_demo
def test_a_corpus(tmp_path: Path) -> None:
    lines = [{"text": "forty-two", "id": 7}, {"text": "nine"}]
    for name, line in zip("ab", lines, strict=True):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "tformer").write_text(f'#!/bin/sh\nexec {sys.executable} -m tformer_deploy "$@"\n')
    (tmp_path / "tformer").chmod(0o755)
    command = [EXAMPLES / "corpus.sh", DEMO / "bundle", tmp_path / "out", tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    done = subprocess.run(
        command,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    shards, *made = done.stdout.splitlines()[-3:]
    assert int(shards) == 2
    made_of = [json.loads(line) for line in made]
    assert [each["translation"] for each in made_of] == ["zweiundvierzig", "neun"]
    assert [{k: v for k, v in each.items() if k in ("text", "id")} for each in made_of] == lines
