"""Shortlists: what is learned from parallel text, how it lies in a bundle, the commands, what is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tformer_deploy.bundle.shortlist as module
from tformer_deploy import load
from tformer_deploy.base.errors import ArtifactError, ConfigError, DataError
from tformer_deploy.base.files import sha256
from tformer_deploy.bundle.manifest import MANIFEST, Bundle, hashes, open_bundle
from tformer_deploy.bundle.shortlist import (
    ITERATIONS,
    Settings,
    add_shortlist,
    coverage,
    learn,
    open_shortlist,
    packed,
    translation_table,
    unpacked,
)
from tformer_deploy.bundle.text import Specials
from tformer_deploy.engines import make_engine

from .command import failed_line, printed, run_here
from .conftest import VOCAB, needs_vnni

COPY, NAMES = (Path(__file__).parent / "bundles/v2" / name for name in ("copy", "names"))
Pairs = list[tuple[list[int], list[int]]]


def toy(count: int, seed: int = 0) -> Pairs:
    """Source token n is target token 63 - n, in another order, beside one that is always there."""
    rng = np.random.default_rng(seed)
    sources = [rng.integers(4, 30, rng.integers(2, 9)).tolist() for _ in range(count)]
    return [(source, rng.permutation([63 - n for n in source] + [5]).tolist()) for source in sources]


def text(pairs: Pairs, side: int) -> list[str]:
    return [" ".join(f"w{n}" for n in pair[side]) for pair in pairs]


# Learning


def test_the_translation_of_every_word_is_found() -> None:
    shortlist = learn(toy(300), VOCAB, VOCAB, Settings(best=1, frequent=1), shared=False)
    assert shortlist.always.tolist() == [0, 1, 2, 3, 5]
    for n in range(4, 30):
        begin, end = shortlist.offsets[n : n + 2]
        assert shortlist.targets[begin:end].tolist() == [63 - n]
    allowed = shortlist.allowed(np.array([[7, 8], [9, 1]], np.int32), np.array([2, 1], np.int32))
    assert [np.flatnonzero(row).tolist() for row in allowed] == [[0, 1, 2, 3, 5, 55, 56], [0, 1, 2, 3, 5, 54]]


def test_chances_are_those_of_a_plain_model_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks as in one piece, words that are repeated included."""
    pairs = [*toy(40), ([7, 7, 9], [5, 5, 11]), ([4], []), ([], [6])]
    chances: dict[tuple[int, int], float] = defaultdict(lambda: 1.0)
    for _ in range(ITERATIONS):
        counts: dict[tuple[int, int], float] = defaultdict(float)
        for source, target in pairs:
            words = [*source, VOCAB] if source else []
            for t in target:
                total = sum(chances[s, t] for s in words)
                for s in words:
                    counts[s, t] += chances[s, t] / total
        sums: dict[int, float] = defaultdict(float)
        for (s, _), count in counts.items():
            sums[s] += count
        chances = defaultdict(float, {(s, t): count / sums[s] for (s, t), count in counts.items()})
    for chunk in (10_000, 7):
        monkeypatch.setattr(module, "CHUNK", chunk)
        keys, found = translation_table(pairs, VOCAB, VOCAB)
        assert [divmod(key, VOCAB) for key in keys.tolist()] == sorted(chances)
        assert np.allclose(found, [chances[key] for key in sorted(chances)], rtol=1e-12)


def test_words_of_a_joint_vocabulary_may_be_copied() -> None:
    plain, joint = (learn(toy(50), VOCAB, VOCAB, Settings(2, 1), shared) for shared in (False, True))
    unseen = np.array([[40]], np.int32), np.array([1], np.int32)
    assert not plain.allowed(*unseen)[0, 40] and joint.allowed(*unseen)[0, 40]
    both = np.array([[7, 40, 3]], np.int32), np.array([3], np.int32)
    assert (joint.allowed(*both) >= plain.allowed(*both)).all()


def test_coverage_counts_end_tokens() -> None:
    pairs = toy(100)
    shortlist = learn(pairs, VOCAB, VOCAB, Settings(1, 1), shared=False)
    found = coverage(shortlist, [([7, 8], [56, 5, 20])], 3)
    assert (found.sentences, found.tokens, found.size) == (1, 3 / 4, 7.0)
    assert str(found) == "75.00% of the target tokens of 1 sentences, lists of 7 tokens"
    assert coverage(shortlist, pairs, 3).tokens == 1


def test_text_without_words_is_refused() -> None:
    with pytest.raises(DataError, match="no sentence pair has tokens on both sides: give parallel text"):
        learn([([], [4]), ([5], [])], VOCAB, VOCAB, Settings(), shared=False)
    with pytest.raises(ConfigError, match="--best 0: must be at least 1"):
        Settings(best=0)


# In a bundle


@pytest.fixture
def bundle(variants_bundle: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(variants_bundle, tmp_path / "bundle"))


@pytest.fixture(scope="module")
def listed(variants_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a shortlist. Read only."""
    copy = Path(shutil.copytree(variants_bundle, tmp_path_factory.mktemp("listed") / "bundle"))
    add(copy)
    return copy


def add(bundle: Path, settings: Settings | None = None) -> Any:
    pairs = toy(200)
    return add_shortlist(open_bundle(bundle), text(pairs, 0), text(pairs, 1), settings or Settings(3, 4))


def contents(bundle: Path) -> dict[str, str]:
    return {**hashes(bundle), MANIFEST: (bundle / MANIFEST).read_text()}


def test_a_bundle_keeps_one_shortlist(bundle: Path) -> None:
    before = contents(bundle)
    found = add(bundle)
    first = open_bundle(bundle).manifest["shortlist"]
    assert first == {
        "file": first["file"],
        "best": 3,
        "frequent": 4,
        "sentences": 200,
        "tokens": 1.0,
        "size": found.size,
    }
    after = contents(bundle)
    assert set(after) == {*before, first["file"]} and all(
        after[name] == before[name] for name in before if name != MANIFEST
    )
    learned = learn(toy(200), VOCAB, VOCAB, Settings(3, 4), shared=True)
    opened = open_shortlist(open_bundle(bundle), "int8")
    for name in ("always", "offsets", "targets"):
        assert (getattr(opened, name) == getattr(learned, name)).all()
    add(bundle)
    assert contents(bundle) == after, "the same text gives the same file"
    add(bundle, Settings(1, 1))
    second = open_bundle(bundle).manifest["shortlist"]["file"]
    assert second != first["file"] and list(bundle.glob("shortlist-*")) == [bundle / second]


@pytest.mark.parametrize("again", [False, True])
def test_a_failure_leaves_the_bundle_as_it_was(again: bool, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if again:
        add(bundle)
    before = contents(bundle)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_json", fail)
        for settings in (Settings(3, 4), Settings(2, 1)):
            with pytest.raises(OSError, match="disk full"):
                add(bundle, settings)
            assert contents(bundle) == before
    open_bundle(bundle)


def test_damaged_missing_and_foreign_lists_are_refused(listed: Path, tmp_path: Path) -> None:
    def copied(name: str) -> tuple[Path, Path]:
        copy = Path(shutil.copytree(listed, tmp_path / name))
        return copy, next(copy.glob("shortlist-*"))

    copy, file = copied("damaged")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ArtifactError, match=f"{file.name} does not match its SHA-256"):
        open_bundle(copy, graphs=False)
    file.unlink()
    with pytest.raises(ArtifactError, match=f"{file.name} is missing"):
        open_bundle(copy, graphs=False)

    copy, file = copied("unlisted")
    manifest = json.loads((copy / MANIFEST).read_text())
    del manifest["files"][file.name]
    (copy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match=f"no hash of {file.name}"):
        open_bundle(copy)

    opened = open_bundle(listed)
    whole, own = unpacked(next(listed.glob("shortlist-*")))
    for name, lists, hashes_, message in (
        ("foreign", {}, (own[0], bytes(32)), "is of another bundle's tokenizers"),
        ("swapped", {}, (bytes(32), own[1]), "is of another bundle's tokenizers"),
        ("other", {"offsets": np.zeros(3, np.int64), "targets": whole.targets[:0]}, own, "is of another bundle's"),
        ("outside", {"always": np.array([VOCAB], np.int32)}, own, "is damaged .a token is outside the vocabulary"),
        ("below", {"targets": whole.targets - VOCAB}, own, "is damaged .a token is outside the vocabulary"),
        ("uneven", {"targets": np.array([4], np.int32)}, own, r"is damaged .it has 1 tokens, not \d+"),
        ("back", {"offsets": whole.offsets[::-1]}, own, "is damaged"),
        ("none", {"always": whole.always[:0]}, own, "is damaged"),
    ):
        copy, file = copied(name)
        parts = {part: getattr(whole, part) for part in ("always", "offsets", "targets", "vocab")}
        file.write_bytes(packed(SimpleNamespace(**{**parts, **lists}), hashes_))  # type: ignore[arg-type]
        edit(copy)
        with pytest.raises(ArtifactError, match=f"{message}.*: make it again with tformer shortlist"):
            open_shortlist(open_bundle(copy), "int8")
    assert open_shortlist(opened, "int8").vocab == VOCAB
    content = next(listed.glob("shortlist-*")).read_bytes()
    for name, changed in {
        "empty": b"",
        "text": b"no lists",
        "header": content[:128],
        "short": content[:-1],
        "long": content + b"\0",
        "newer": content.replace(b"shortlist 1", b"shortlist 2", 1),
        "many": content[:28] + b"\xff" * 4 + content[32:],
    }.items():
        copy, file = copied(name)
        file.write_bytes(changed)
        edit(copy)
        with pytest.raises(ArtifactError, match=r"is damaged .*: make it again with tformer shortlist"):
            open_shortlist(open_bundle(copy), "int8")


def test_a_file_of_lists_is_its_header_and_three_arrays(listed: Path) -> None:
    """As docs/bundle.md has it, read without our reader."""
    path = next(listed.glob("shortlist-*"))
    raw, lists = path.read_bytes(), open_shortlist(open_bundle(listed), "int8")
    assert path.name == f"shortlist-{sha256(path)[:12]}.bin" and raw[:20] == b"tformer shortlist 1\n"
    assert not any(raw[104:128])
    sources, targets, every = np.frombuffer(raw, "<u4", 3, 20).tolist()
    own = int(np.frombuffer(raw, "<u8", 1, 32)[0])
    tokenizer = sha256(listed / "tokenizer.words")
    assert raw[40:72].hex() == raw[72:104].hex() == tokenizer
    assert (sources, targets) == (VOCAB, VOCAB)
    offsets = np.memmap(path, "<i8", "r", 128, (sources + 1,))
    always = np.memmap(path, "<i4", "r", 128 + offsets.nbytes, (every,))
    tokens = np.memmap(path, "<i4", "r", 128 + offsets.nbytes + always.nbytes, (own,))
    assert len(raw) == 128 + offsets.nbytes + always.nbytes + tokens.nbytes
    for ours, theirs in ((lists.offsets, offsets), (lists.always, always), (lists.targets, tokens)):
        assert (ours == theirs).all()


def test_text_that_the_vocabulary_has_nothing_of_is_refused(bundle: Path) -> None:
    """Lists of it would allow no words at all, and cover all of it."""
    with pytest.raises(DataError, match="the target vocabulary has no token of this text"):
        add_shortlist(open_bundle(bundle), ["w5 w6"], ["Wort Worte"], Settings())


def test_lists_have_the_targets_own_special_tokens() -> None:
    specials = Specials(pad=40, bos=40, eos=7, unk=9)
    shortlist = learn(toy(50), VOCAB, VOCAB, Settings(1, 1), shared=True, specials=specials)
    assert shortlist.always.tolist() == [5, 7, 9, 40]
    allowed = shortlist.allowed(np.array([[0, 3]], np.int32), np.array([2], np.int32))
    assert np.flatnonzero(allowed).tolist() == [0, 3, 5, 7, 9, 40], "what is no special token may be copied"


def edit(bundle: Path) -> None:
    """Make the hashes fit."""
    manifest = json.loads((bundle / MANIFEST).read_text())
    (bundle / MANIFEST).write_text(json.dumps({**manifest, "files": hashes(bundle)}))


def test_engines_without_graphs_for_it_refuse(
    listed: Path, variants_bundle: Path, bundle: Path, tmp_path: Path
) -> None:
    opened = open_bundle(listed)
    for name in ("eager", "ort"):
        message = (
            f"--shortlist: {name} has no graphs for it: use --backend ort --variant fp32-cpu|int8|int8-latency|int4"
        )
        with pytest.raises(ConfigError, match=re.escape(message)):
            make_engine(name, opened, shortlist=True)
    with pytest.raises(ConfigError, match=r"has no shortlist: tformer shortlist .* --src FILE --tgt FILE"):
        make_engine("ort:int8", open_bundle(variants_bundle), shortlist=True)
    with pytest.raises(ConfigError, match="it: export again with --recipe int8"):
        make_engine("ort", open_bundle(NAMES), shortlist=True)
    with pytest.raises(ConfigError, match=r"use --backend native --variant native-int8-bf16-cache$"):
        make_engine("ort", alone(COPY, "native-int8-bf16-cache", tmp_path / "alone"), shortlist=True)
    with pytest.raises(ConfigError, match="has no graphs for shortlists: export it again, with --recipe int8"):
        add_shortlist(open_bundle(NAMES), ["a"], ["b"], Settings())
    add(bundle)
    assert without_lists(bundle).variants
    with pytest.raises(ConfigError, match=r"variant int8 of .* has no graphs for shortlists: leave the shortlist out"):
        make_engine("ort:int8", open_bundle(bundle), shortlist=True)
    with load(bundle, variant="int8") as old, load(variants_bundle, variant="int8") as new:
        assert old.translate(["w5 w6"]) == new.translate(["w5 w6"])


def test_the_first_program_uses_the_list() -> None:
    """`native` alone names no variant."""
    with make_engine("native", open_bundle(COPY), threads=1, shortlist=True) as engine:
        state = engine.encode(np.array([[5, 6, 3]], np.int32), np.array([3], np.int32))
        assert (engine.step(np.array([[2]], np.int32), state, full=True).log_probs == -np.inf).any()


def alone(bundle: Path, variant: str, copy: Path) -> Bundle:
    """A bundle with the standard graphs and one variant."""
    shutil.copytree(bundle, copy)
    manifest = json.loads((copy / MANIFEST).read_text())
    for name in set(manifest["variants"]) - {variant}:
        shutil.rmtree(copy / name)
        del manifest["variants"][name]
    (copy / MANIFEST).write_text(json.dumps({**manifest, "files": hashes(copy)}))
    return open_bundle(copy)


def without_lists(bundle: Path) -> Bundle:
    """Take away the graphs that shortlists need."""
    for path in bundle.glob("*/short_*.onnx"):
        path.unlink()
    edit(bundle)
    return open_bundle(bundle)


# Commands


def write(folder: Path, pairs: Pairs) -> list[Path]:
    paths = [folder / "text.src", folder / "text.tgt"]
    for side, path in enumerate(paths):
        path.write_text("".join(f"{line}\n" for line in text(pairs, side)))
    return paths


def test_shortlist_command_and_inspect(bundle: Path, tmp_path: Path) -> None:
    src, tgt = write(tmp_path, toy(60))
    arguments = ["shortlist", bundle, "--src", src, "--tgt", tgt, "--best", 2]
    lines = printed(run_here(*arguments, "--frequent", 5))
    assert len(lines) == 1 and "100.00% of the target tokens of 60 sentences, lists of" in lines[0]
    found = json.loads(printed(run_here(*arguments, "--json"))[0])
    assert found["sentences"] == 60 and found["tokens"] == 1.0 and found["bundle"] == str(bundle)
    shown = printed(run_here("inspect", bundle))
    assert [
        line for line in shown if line.startswith("  shortlist  best 2, frequent 100: 100.00% of its text's tokens")
    ]
    assert any(line.endswith(".bin") for line in shown)
    assert "has no graphs for shortlists" in failed_line(run_here("shortlist", NAMES, *arguments[2:]))
    tgt.write_text("w4\n")
    assert "has 60 lines" in failed_line(run_here(*arguments))


def test_lists_that_would_be_too_long_are_refused_before_anything_is_learned(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src, tgt = write(tmp_path, toy(60))
    arguments = ["shortlist", bundle, "--src", src, "--tgt", tgt, "--best"]
    monkeypatch.setattr(module, "MAX_ENTRIES", 5 * (VOCAB + 1))
    assert printed(run_here(*arguments, 4)), "and the source token itself, as the vocabulary is joint"
    monkeypatch.setattr(module, "learn", lambda *_: pytest.fail("it has learned"))
    for best in (5, 10**9):
        line = failed_line(run_here(*arguments, best))
        assert line == f"error: --best {best}: at most 4 for {VOCAB} source entries"
    monkeypatch.setattr(module, "MAX_ENTRIES", VOCAB * (VOCAB + 1))
    Settings(best=10**9).check(VOCAB, VOCAB, shared=True)


@pytest.mark.parametrize("variant", ["fp32-cpu", "int8", "int8-latency", "int4"])
def test_translate_uses_the_list(variant: str, listed: Path) -> None:
    needs_vnni(variant)
    lines = ["w5 w6 w7", "", "w20 w21", "w8"]
    done = run_here("translate", listed, "--variant", variant, "--shortlist", "--json", stdin="\n".join(lines).encode())
    rows = [json.loads(line) for line in printed(done)]
    assert rows[1]["text"] == "" and all(row["ids"] for row in rows[:1] + rows[2:])
    shortlist = open_shortlist(open_bundle(listed), variant)
    for line, row in zip(lines, rows, strict=True):
        source = np.array([[int(word[1:]) for word in line.split()]], np.int32)
        if source.size:
            assert shortlist.allowed(source, np.array([source.size]))[0, row["ids"]].all()
    with load(listed, variant=variant, shortlist=True) as translator:
        assert [result.ids for result in translator.translate(lines)] == [row["ids"] for row in rows]
    begun = run_here("translate", listed, "--variant", variant, "--shortlist", "--first-token", "w33", stdin=b"w5\n")
    assert printed(begun)[0].startswith("w33"), "though no list has it"


def test_translate_refuses_in_one_line(listed: Path, variants_bundle: Path) -> None:
    for arguments, message in (
        ([variants_bundle, "--variant", "int8"], "has no shortlist: tformer shortlist"),
        ([listed, "--backend", "eager"], "eager has no graphs for it: use --backend ort --variant fp32-cpu|int8"),
        ([listed, "--variant", "fp32"], "--shortlist: ort has no graphs for it"),
    ):
        assert message in failed_line(run_here("translate", *arguments, "--shortlist", stdin=b"w5\n"))
