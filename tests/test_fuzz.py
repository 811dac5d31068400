"""Anything at all in a manifest, header, recipe, --config, reference or what is imported: a documented exit code, and
one line.

`TFORMER_FUZZ_SECONDS=1200 pytest -n 0 --long tests/test_fuzz.py` looks for longer than half a minute.
"""

from __future__ import annotations

import copy
import io
import json
import os
import shutil
import time
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tformer_deploy.base.headers import digest
from tformer_deploy.importers.run import FORMATS
from tformer_deploy.importers.weights import load_torch

from .command import Done, run_here
from .params import long_but
from .test_import_options import of_format

SECONDS = float(os.environ.get("TFORMER_FUZZ_SECONDS", "30"))

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    # What lies near something that is right.
    | st.sampled_from(
        [
            "",
            ".",
            "..",
            "/",
            "a\x00b",
            "../x",
            "fp32",
            "int8",
            "trt",
            "words",
            "0" * 64,
            2**31,
            2**63,
            10**400,
            -1,
            0,
            1,
        ]
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def edits(draw: st.DrawFn, value: Any, others: st.SearchStrategy[Any] = JSON_VALUES) -> Any:
    """A value with one to three places changed, taken away, added or exchanged."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        place, key = draw(st.sampled_from(places(value)))
        what = draw(st.sampled_from(("change", "remove", "add", "exchange")))
        if what == "remove":
            del place[key]
        elif what == "exchange":
            other, name = draw(st.sampled_from(places(value)))
            place[key] = copy.deepcopy(other[name])
        elif what == "add" and isinstance(place, dict):
            place[draw(st.text(max_size=8) | st.just(str(key) + "x"))] = draw(others)
        else:
            place[key] = draw(others)
        if not places(value):
            break
    return value


STRANGE = st.sampled_from((torch.zeros(2), torch.ones(2, 2, dtype=torch.int64), torch.zeros(0), torch.tensor(1.0)))
"""Tensors where other things were, and others."""


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container below a value with every key of it."""
    found: list[tuple[Any, Any]] = []
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            found += [(value, key), *places(value[key])]
    return found


@st.composite
def damages(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes that were cut, changed, doubled or nested."""
    what = draw(st.sampled_from(("cut", "flip", "insert", "nest", "any")))
    at = draw(st.integers(0, max(0, len(content) - 1)))
    if what == "cut":
        return content[:at]
    if what == "flip":
        return content[:at] + bytes([content[at] ^ draw(st.integers(1, 255))]) + content[at + 1 :]
    if what == "insert":
        return content[:at] + draw(st.binary(max_size=20)) + content[at:]
    if what == "nest":
        return content[:at] + b"[" * draw(st.sampled_from((10, 2_000, 200_000))) + content[at:]
    return draw(st.binary(max_size=200))


def look(strategy: st.SearchStrategy[Any], share: float, run: Callable[[Any], Done]) -> None:
    """Try examples of a strategy for a share of the time; one that fails is made as short as it gets."""
    end, tried = time.monotonic() + share * SECONDS, 0

    @settings(max_examples=15, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def attempt(example: Any) -> None:
        nonlocal tried
        if tried and time.monotonic() > end:  # what is accepted may take seconds
            return
        tried += 1
        done = run(example)
        lines = done.stderr.decode().splitlines()
        assert done.returncode in (0, 1, 2, 3, 130), lines
        assert done.returncode != 1 or (len(lines) == 1 and lines[0].startswith("error: ")), lines
        assert "a bug in tformer" not in str(lines), lines

    while time.monotonic() < end:
        attempt()
    print(f"{tried} cases")


@pytest.fixture(scope="module")
def place(variants_bundle: Path, run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    shutil.copytree(variants_bundle, folder / "bundle")
    shutil.copytree(run, folder / "run")
    (folder / "lines").write_text("w5 w6\nw7\n")
    return folder


def toml(value: Any) -> str:
    """A value as TOML writes it within a line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return '""' if value is None else json.dumps(value)


def toml_file(value: dict[str, Any]) -> bytes:
    return "".join(f"{json.dumps(key)} = {toml(each)}\n" for key, each in value.items()).encode("utf-8", "replace")


def either(value: Any, write: Callable[[Any], bytes]) -> st.SearchStrategy[bytes]:
    """A file with other values, or with other bytes."""
    return edits(value).map(write) | damages(write(value))


def to_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def signed(value: Any) -> bytes:
    """A header with the hash that it should have."""
    return to_json({**value, "sha256": digest(value)} if isinstance(value, dict) else value)


VERBS = st.sampled_from(("inspect", "translate", "shortlist"))


@pytest.mark.long
def test_manifests(place: Path) -> None:
    bundle, path = place / "bundle", place / "bundle/manifest.json"
    lines = {"shortlist": ["--src", place / "lines", "--tgt", place / "lines"], "translate": ["--max-tokens", 3]}
    right = path.read_bytes()

    def run(example: tuple[str, bytes]) -> Done:
        verb, content = example
        path.write_bytes(content)
        return run_here(verb, bundle, *lines.get(verb, []), stdin=b"w5 w6\n")

    look(st.tuples(VERBS, either(json.loads(right), to_json)), 0.3, run)
    path.write_bytes(right)


@pytest.mark.long
def test_checkpoint_headers(place: Path) -> None:
    path = place / "run/checkpoint.json"
    right = json.loads(path.read_bytes())

    def run(example: tuple[bool, bytes]) -> Done:
        inspect, content = example
        path.write_bytes(content)
        if inspect:
            return run_here("inspect", place / "run")
        eager = ["--backend", "eager", "--checkpoint", place / "run", "--max-tokens", 3]
        return run_here("translate", place / "bundle", *eager, stdin=b"w5 w6\n")

    look(st.tuples(st.booleans(), either(right, signed)), 0.2, run)
    path.write_bytes(to_json(right))


@pytest.mark.long
def test_recipes(place: Path) -> None:
    recipe = {
        "target": "ort-cpu", "precision": "int8", "cache": "static", "opset": 23, "top_k": 4, "attention": False,
        "axes": {"batch": {"min": 1, "opt": 2, "max": 8}, "src_len": {"min": 1, "opt": 8, "max": 16}},
        "tolerance": {"encoder": 0.5, "scores": 1.0, "tokens": False},
    }  # fmt: skip
    path = place / "recipe.toml"

    def run(content: bytes) -> Done:
        path.write_bytes(content)
        return run_here("export", place / "run", "--out", place / "bundle", "--recipe", path)  # which exists

    look(either(recipe, toml_file), 0.15, run)


@pytest.mark.long
def test_config_files(place: Path) -> None:
    config = {
        "model": {"d_model": 16, "heads": 2, "d_ff": 16, "norm": "standard", "dropout": 0.1, "final_norm": True},
        "train": {"lr": 0.1, "warmup": 10, "precision": "fp32", "updates": 3, "seed": 1},
    }
    path = place / "config.toml"

    def run(content: bytes) -> Done:
        path.write_bytes(content)
        return run_here("train", "--out", place / "run", "--task", "copy", "--config", path)  # which exists

    look(either(config, toml_file), 0.15, run)


@pytest.mark.long
def test_references(place: Path) -> None:
    path, bundle = place / "reference.npz", place / "bundle"
    options = ["--src", place / "lines", "--max-tokens", 4, "--invariance", 1, "--checkpoint", place / "run"]
    assert run_here("check", bundle, *options, "--save-reference", path).returncode == 0
    right = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    header = json.loads(np.load(io.BytesIO(parts["header.npy"])).tobytes())

    def with_part(name: str, content: bytes) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for each, old in parts.items():
                archive.writestr(each, content if each == name else old)
        return buffer.getvalue()

    def with_header(value: Any) -> bytes:
        buffer = io.BytesIO()
        np.save(buffer, np.frombuffer(to_json(value), np.uint8))
        return with_part("header.npy", buffer.getvalue())

    def run(content: bytes) -> Done:
        path.write_bytes(content)
        return run_here("check", bundle, "--reference", path, "--variant", "fp32", "--checkpoint", place / "run")

    damaged_part = st.sampled_from(sorted(parts)).flatmap(
        lambda name: damages(parts[name]).map(lambda content: with_part(name, content))
    )
    look(edits(header).map(with_header) | damaged_part | damages(right), 0.2, run)


def saved(value: Any) -> bytes:
    """As torch.save writes it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def changed(path: Path) -> st.SearchStrategy[bytes]:
    """A file of a source with other values, if it is known how to write them, or with other bytes."""
    content = path.read_bytes()
    if path.suffix == ".json":
        return either(json.loads(content), to_json)
    if path.suffix == ".npz":
        with zipfile.ZipFile(path) as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
        return damages(content) | one_damaged(parts)
    if content[:4] != b"PK\x03\x04":
        return damages(content)
    with zipfile.ZipFile(path) as archive:
        pickled = {name: archive.read(name) for name in archive.namelist()}
    value = load_torch(path)
    return damages(content) | one_damaged(pickled) | edits(plain(value), JSON_VALUES | STRANGE).map(saved)


def plain(value: Any) -> Any:
    """With options as a dict, which `edits` knows, and tensors that are not mapped from the file."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, torch.Tensor):
        return value.clone()
    return plain(vars(value)) if isinstance(value, Namespace) else value


def one_damaged(parts: dict[str, bytes]) -> st.SearchStrategy[bytes]:
    """A zip with other bytes in one of its parts."""

    def packed(name: str, content: bytes) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for each, old in parts.items():
                archive.writestr(each, content if each == name else old)
        return buffer.getvalue()

    return st.sampled_from(sorted(parts)).flatmap(
        lambda name: damages(parts[name]).map(lambda content: packed(name, content))
    )


@pytest.mark.parametrize("name", long_but(list(FORMATS), "torch", "opennmt-py", "marian"))
def test_what_is_imported(name: str, tmp_path: Path) -> None:
    source, options = of_format(name, tmp_path)
    words = [path for path in options.values() if isinstance(path, Path)]
    files = sorted({*(path for path in tmp_path.rglob("*") if path.is_file()), *words})
    right = {path: path.read_bytes() for path in files}
    flags = [each for key, value in options.items() for each in (f"--{key.replace('_', '-')}", value)]
    seen = [name, source]

    def run(example: tuple[Path, bytes, bool]) -> Done:
        path, content, named = example
        path.write_bytes(content)
        try:
            what = seen if named else seen[1:]
            return run_here("import", *what, *flags, "--out", tmp_path.with_suffix(".run"), "--no-compare", "--force")
        finally:
            path.write_bytes(right[path])

    look(st.sampled_from(files).flatmap(lambda path: st.tuples(st.just(path), changed(path), st.booleans())), 0.04, run)
