"""Parallel text: files and their faults, generated tasks, and batches that lose and repeat nothing."""

from __future__ import annotations

import functools
import gzip
import itertools
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tformer_deploy.base.errors import ConfigError, DataError
from tformer_deploy.base.lines import read_lines
from tformer_deploy.bundle.text import SPECIALS, Tokenizers, Words
from tformer_deploy.model.config import BOS_ID, EOS_ID, PAD_ID
from tformer_deploy.train.data import (
    BatchStream,
    DataConfig,
    EncodedPairs,
    Parallel,
    load_data,
    make_task,
    read_parallel,
)
from tformer_deploy.translate.batches import pad

WORDS = Words([*SPECIALS, "w"], None)
sizes = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=40)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def make_corpus(pairs: list[tuple[int, int]], max_tokens: int = 100) -> EncodedPairs:
    """Pairs of so many words; eos makes each one longer."""
    text = Parallel([" ".join("w" * s) for s, _ in pairs], [" ".join("w" * t) for _, t in pairs])
    return EncodedPairs(text, Tokenizers(WORDS, WORDS), max_tokens)


def as_lists(plan: list[NDArray[np.int64]]) -> list[list[int]]:
    return [batch.tolist() for batch in plan]


# Files


@pytest.mark.parametrize("name", ["lines.en", "lines.en.gz"])
@pytest.mark.parametrize("content", ["A dog.\nÜber alles\n", "A dog.\r\nÜber alles\r\n", "A dog.\nÜber alles"])
def test_lines_of_plain_and_gz_files(name: str, content: str, tmp_path: Path) -> None:
    assert read_lines(write(tmp_path / name, content.encode())) == ["A dog.", "Über alles"]


def test_only_newlines_end_a_line(tmp_path: Path) -> None:
    """Other separators stand inside real sentences; splitting there would shift every later pair."""
    content = "a\u2028b\x0bc\x85d\n\nlast\n".encode()
    assert read_lines(write(tmp_path / "lines", content)) == ["a\u2028b\x0bc\x85d", "", "last"]


@pytest.mark.parametrize("name", ["lines.de", "lines.de.gz"])
def test_text_that_is_not_utf8_is_named_by_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"{name}:2: not UTF-8"):
        read_lines(write(tmp_path / name, "gut\nMädchen\n".encode("latin-1")))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "nowhere.en", "no such file"), (tmp_path, "is a folder: name a file")):
        with pytest.raises(DataError, match=words):
            read_lines(path)


@pytest.mark.parametrize("name", ["lines.en", "lines.en.gz"])
def test_an_endless_line_is_not_read_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that a small .gz unpacks to."""
    path = write(tmp_path / name, b"one\ntwo\n" + bytes(100 << 20))
    tracemalloc.start()
    with pytest.raises(DataError, match=rf"{name}:3: longer than 1048576 bytes: split it$"):
        read_lines(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
    monkeypatch.setattr("tformer_deploy.base.lines.LINE_BYTES", 5)
    assert read_lines(write(path, "12345\nüü1\n\n12345".encode())) == ["12345", "üü1", "", "12345"]
    for content, line in (("123456", 1), ("1\nüüü\n", 2), ("123456\n", 1), ("1\n\n\n      ", 4)):
        with pytest.raises(DataError, match=f":{line}: longer than 5 bytes"):
            read_lines(write(path, content.encode()))


GZIPPED = gzip.compress(bytes(np.random.default_rng(0).integers(97, 122, 5000, np.uint8)))


@pytest.mark.parametrize(
    "content",
    [GZIPPED[: len(GZIPPED) // 2], GZIPPED[:100] + bytes(500) + GZIPPED[600:], b"never compressed\n"],
    ids=["truncated", "overwritten", "plain"],
)
def test_damaged_gz_file(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "lines.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"lines\.gz: cannot be read"):
        read_lines(tmp_path / "lines.gz")


def test_unequal_numbers_of_lines(tmp_path: Path) -> None:
    src, tgt = write(tmp_path / "a", b"1\n2\n3\n"), write(tmp_path / "b", b"1\n2\n")
    with pytest.raises(DataError, match=r"a has 3 lines, .*b has 2"):
        read_parallel(src, tgt)


def test_pairs_with_an_empty_side_are_left_out(tmp_path: Path) -> None:
    pair = read_parallel(write(tmp_path / "a", b"1\n\n3\n4\n"), write(tmp_path / "b", b"one\ntwo\n \nfour\n"))
    assert pair == Parallel(["1", "4"], ["one", "four"])


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_empty_files(content: bytes, tmp_path: Path) -> None:
    src, tgt = write(tmp_path / "a", content), write(tmp_path / "b", content)
    with pytest.raises(DataError, match="no line with text on both sides"):
        read_parallel(src, tgt)


# Where text comes from


def make_multi30k(folder: Path) -> Path:
    for name, content in {
        "train.en": b"A dog.\nA cat.\n",
        "train.de.gz": b"Ein Hund.\nEine Katze.\n",
        "val.en.gz": b"A girl.\n",
        "val.de": "Ein Mädchen.\n".encode(),
    }.items():
        write(folder / name, content)
    return folder


def test_multi30k_in_both_directions(tmp_path: Path) -> None:
    folder = str(make_multi30k(tmp_path))
    train, valid = load_data(DataConfig(multi30k=folder))
    assert train == Parallel(["A dog.", "A cat."], ["Ein Hund.", "Eine Katze."])
    assert valid == Parallel(["A girl."], ["Ein Mädchen."])
    back, _ = load_data(DataConfig(multi30k=folder, pair="de-en"))
    assert back == Parallel(train.tgt, train.src)


def test_multi30k_names_what_is_missing(tmp_path: Path) -> None:
    folder = make_multi30k(tmp_path)
    (folder / "val.de").unlink()
    with pytest.raises(DataError, match=r"val\.de\(\.gz\): no such file.*--multi30k"):
        load_data(DataConfig(multi30k=str(folder)))
    with pytest.raises(DataError, match=r"train\.fr\(\.gz\)"):
        load_data(DataConfig(multi30k=str(folder), pair="en-fr"))
    with pytest.raises(ConfigError, match="--pair german"):
        load_data(DataConfig(multi30k=str(folder), pair="german"))


def test_files_on_both_sides(tmp_path: Path) -> None:
    names = {key: str(write(tmp_path / key, f"{key}\n".encode())) for key in ("src", "tgt", "valid_src", "valid_tgt")}
    assert load_data(DataConfig(**names)) == (Parallel(["src"], ["tgt"]), Parallel(["valid_src"], ["valid_tgt"]))
    for missing in ("tgt", "valid_src", "valid_tgt"):
        with pytest.raises(ConfigError, match=f"--{missing.replace('_', '-')}"):
            load_data(DataConfig(**{**names, missing: ""}))


@pytest.mark.parametrize("config", [DataConfig(), DataConfig(task="copy", multi30k="folder")])
def test_exactly_one_origin(config: DataConfig) -> None:
    with pytest.raises(ConfigError, match="--src and --tgt, --multi30k, --task"):
        load_data(config)


def test_files_beside_another_origin_are_refused() -> None:
    with pytest.raises(ConfigError, match="--valid-src belongs to --src: leave it out with --task"):
        load_data(DataConfig(task="copy", valid_src="nowhere"))


# Tasks


@pytest.fixture
def quick_number_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real words below 100 and digits above: spelling 60,000 numbers takes seconds."""
    num2words = pytest.importorskip("num2words", reason="number words need the 'train' extra")
    spell = functools.cache(num2words.num2words)
    monkeypatch.setattr(num2words, "num2words", lambda n, lang: spell(n, lang=lang) if n < 100 else f"{lang} {n}")


@pytest.mark.parametrize("name", ["copy", "numbers"])
def test_tasks_are_the_same_every_time_and_held_out_lines_are_new(name: str, quick_number_words: None) -> None:
    train, valid = load_data(DataConfig(task=name))
    assert (train, valid) == make_task(name)
    assert len(valid.src) == len(valid.tgt) == 500 and len(train.src) == len(train.tgt) > 5000
    for side in ("src", "tgt"):
        assert not set(getattr(train, side)) & set(getattr(valid, side))
        assert len(set(getattr(train, side))) == len(train.src)


def test_copy_repeats_four_to_ten_symbols() -> None:
    train, valid = make_task("copy")
    assert train.src == train.tgt and valid.src == valid.tgt
    assert {len(line.split()) for line in train.src} == set(range(4, 11))
    assert {symbol for line in train.src for symbol in line.split()} == {str(i) for i in range(1, 11)}


def test_numbers_are_translated(quick_number_words: None) -> None:
    train, valid = make_task("numbers")
    translations = dict(zip(train.src + valid.src, train.tgt + valid.tgt, strict=True))
    assert translations["seven"] == "sieben" and translations["forty-two"] == "zweiundvierzig"
    assert max(len(line) for line in train.src if line.startswith("en ")) == len("en 999999")


def test_unknown_task_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'numbrs': did you mean 'numbers'\? valid: copy, numbers"):
        make_task("numbrs")


# Batches


@settings(max_examples=60)
@given(pairs=sizes, batch_tokens=st.integers(1, 60), seed=st.integers(0, 9), epoch=st.integers(0, 9))
def test_plan_holds_every_pair_once_within_the_budget(
    pairs: list[tuple[int, int]], batch_tokens: int, seed: int, epoch: int
) -> None:
    corpus = make_corpus(pairs)
    plan = corpus.plan(batch_tokens, seed, epoch)
    assert sorted(i for batch in as_lists(plan) for i in batch) == list(range(len(pairs)))
    for indices in plan:
        batch = corpus.batch(indices, PAD_ID, BOS_ID)
        assert len(indices) == 1 or max(batch.src_ids.size, batch.tgt_out.size) <= batch_tokens
    assert as_lists(corpus.plan(batch_tokens, seed, epoch)) == as_lists(plan)


def test_plan_differs_between_epochs_and_seeds_and_buckets_by_length() -> None:
    corpus = make_corpus([(i % 30, (i + 3) % 30) for i in range(300)])
    plans = [as_lists(corpus.plan(200, seed, epoch)) for seed, epoch in ((1, 0), (1, 1), (2, 0))]
    for one, other in itertools.combinations(plans, 2):
        assert one != other and {frozenset(batch) for batch in one} != {frozenset(batch) for batch in other}
    padded = sum(corpus.batch(np.array(batch), PAD_ID, BOS_ID).tgt_out.size for batch in plans[0])
    assert padded < 1.1 * sum(corpus.target_tokens(np.array(batch)) for batch in plans[0])
    lengths = [corpus.target_tokens(np.array(batch)) / len(batch) for batch in plans[0]]
    assert lengths != sorted(lengths)  # short batches do not all come first


def test_batch_is_padded_and_shifted() -> None:
    batch = make_corpus([(2, 1), (0, 3)]).batch(np.array([1, 0]), PAD_ID, BOS_ID)
    w, e, p, b = 4, EOS_ID, PAD_ID, BOS_ID
    assert batch.src_ids.tolist() == [[e, p, p], [w, w, e]]
    assert batch.src_lengths.tolist() == [1, 3]
    assert batch.tgt_out.tolist() == [[w, w, w, e], [w, e, p, p]]
    assert batch.tgt_in.tolist() == [[b, w, w, w], [b, w, e, p]]
    for array in (batch.src_ids, batch.src_lengths, batch.tgt_in, batch.tgt_out):
        assert array.dtype == np.int32


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(2, 99), max_size=6), min_size=1, max_size=5))
def test_pad_keeps_rows_on_the_left(rows: list[list[int]]) -> None:
    padded = pad([np.array(row, np.int32) for row in rows], PAD_ID)
    longest = max(map(len, rows))
    assert padded.tolist() == [row + [PAD_ID] * (longest - len(row)) for row in rows]


def test_too_long_pairs_are_counted_and_left_out() -> None:
    corpus = make_corpus([(4, 4), (5, 1), (1, 5), (0, 4)], max_tokens=5)  # eos counts
    assert corpus.left_out == 2
    assert [len(ids) for ids in corpus.src] == [5, 1] and [len(ids) for ids in corpus.tgt] == [5, 5]
    assert sorted(i for batch in as_lists(corpus.plan(50, 0, 0)) for i in batch) == [0, 1]
    with pytest.raises(DataError, match=r"longer than 3 tokens: raise train\.max_tokens"):
        make_corpus([(4, 4)], max_tokens=3)


@settings(max_examples=20)
@given(pairs=sizes, seen=st.integers(0, 30), seed=st.integers(0, 9))
def test_stream_goes_on_where_it_stopped(pairs: list[tuple[int, int]], seen: int, seed: int) -> None:
    corpus = make_corpus(pairs)
    stream = BatchStream(corpus, 40, seed)
    batches = iter(stream)
    for _ in range(seen):
        next(batches)
    resumed = BatchStream(corpus, 40, seed, stream.epoch, stream.index)
    assert as_lists(list(itertools.islice(resumed, 12))) == as_lists(list(itertools.islice(batches, 12)))


def test_stream_follows_the_plans_of_its_epochs() -> None:
    corpus = make_corpus([(i % 7, i % 5) for i in range(40)])
    plans = [corpus.plan(30, 3, epoch) for epoch in range(3)]
    expected = [batch for plan in plans for batch in plan]
    stream = BatchStream(corpus, 30, 3)
    assert as_lists(list(itertools.islice(stream, len(expected)))) == as_lists(expected)
    assert (stream.epoch, stream.index) == (2, len(plans[2]))
