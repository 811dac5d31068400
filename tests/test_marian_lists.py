"""Lexical shortlists of Marian, as files that the test writes in its layout."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from tformer_deploy.base.errors import ArtifactError
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.bundle.marian_lists import read_lists
from tformer_deploy.bundle.shortlist import open_shortlist

from .command import failed_line, printed, run_here

COPY = Path(__file__).parent / "bundles/v2/copy"
FIRST, VOCAB = 3, 64
LISTS = [[], [9, 12], [5], [], [7, 10, 13]]


def written(path: Path, lists: list[list[int]], first: int = FIRST) -> Path:
    """As `BinaryShortlistGenerator::generateBlob` writes it."""
    offsets = np.cumsum([0, *map(len, lists)]).astype("<u8")
    ids = np.array([i for own in lists for i in own], "<u4")
    body = struct.pack("<4Q", first, 50, len(offsets), len(ids)) + offsets.tobytes() + ids.tobytes()
    seed = 0
    for (value,) in struct.iter_unpack("<Q", body[: len(body) // 8 * 8]):
        seed = seed ^ ((value + 0x9E3779B9 + (seed << 6) + (seed >> 2)) % 2**64)
    path.write_bytes(struct.pack("<2Q", 0xF11A48D5013417F5, seed) + body)
    return path


@pytest.mark.parametrize("joint", [False, True])
def test_a_sentence_may_use_what_marian_would_let_it(joint: bool, tmp_path: Path) -> None:
    """The first ids, the lists of its words, and with a joint vocabulary the words themselves."""
    shortlist, settings = read_lists(written(tmp_path / "lex.bin", LISTS), VOCAB, VOCAB, joint)
    assert (settings.best, settings.frequent) == (50, FIRST)
    sources = np.array([[1, 4, 4], [3, 60, 1]], np.int32)
    found = shortlist.allowed(sources, np.array([3, 2], np.int32))
    for row, words in zip(found, ([1, 4, 4], [3, 60]), strict=True):
        wanted = {*range(FIRST), *(i for word in words if word < len(LISTS) for i in LISTS[word])}
        assert set(np.flatnonzero(row)) == wanted | (set(words) if joint else set())


def test_they_become_a_bundles_lists(tmp_path: Path) -> None:
    bundle, path = tmp_path / "bundle", written(tmp_path / "lex.bin", LISTS)
    shutil.copytree(COPY, bundle)
    printed(run_here("shortlist", str(bundle), "--marian", str(path)))
    opened = open_bundle(bundle)
    lists = opened.manifest["shortlist"]
    assert (lists["best"], lists["frequent"], lists["sentences"]) == (50, FIRST, 0)
    allowed = open_shortlist(opened, "fp32-cpu").allowed(np.array([[4]], np.int32), np.array([1], np.int32))
    assert {0, 1, 2, 7, 10, 13} <= set(np.flatnonzero(allowed[0]).tolist())
    (tmp_path / "a.txt").write_text("w9 w4\n")
    text = ("--src", str(tmp_path / "a.txt"), "--tgt", str(tmp_path / "a.txt"))
    (line,) = printed(run_here("shortlist", str(bundle), "--marian", str(path), *text, "--json"))
    assert json.loads(line)["sentences"] == 1
    assert "give --src and --tgt, or --marian FILE" in failed_line(run_here("shortlist", str(bundle)))


def test_files_that_are_damaged_or_of_others(tmp_path: Path) -> None:
    path = written(tmp_path / "lex.bin", LISTS)
    whole = path.read_bytes()
    cases = [
        (whole[:40], "is damaged"),
        (whole[:-4], "is damaged .it has"),
        (whole[:60] + b"\1" + whole[61:], "is damaged .it does not match its checksum"),
        (b"a b 0.5\n" * 20, "is no shortlist of Marian: give lex"),
        (written(path, [[]] * 70).read_bytes(), "has lists of 70 words: it is of another vocabulary"),
        (written(path, [[64]]).read_bytes(), "it is of another vocabulary"),
        (written(path, [[5]], first=65).read_bytes(), "it is of another vocabulary"),
    ]
    for content, message in cases:
        path.write_bytes(content)
        with pytest.raises(ArtifactError, match=message):
            read_lists(path, VOCAB, VOCAB, shared=False)
