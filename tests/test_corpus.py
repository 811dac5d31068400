"""`tformer corpus` on one machine gives what `tformer translate` gives, whatever the shards, formats and kills."""

from __future__ import annotations

import errno
import fcntl
import gzip
import io
import json
import os
import pty
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tformer_deploy.base.errors import ArtifactError, DataError
from tformer_deploy.translate.batches import suitable_workers
from tformer_deploy.translate.corpus.compression import packed, split_lines, unpacked
from tformer_deploy.translate.corpus.cutting import Cutter, windows
from tformer_deploy.translate.corpus.job import CorpusOptions, here, translate_corpus
from tformer_deploy.translate.corpus.output import ERRORS, JOB, LIST
from tformer_deploy.translate.corpus.places import open_store
from tformer_deploy.translate.corpus.progress import Progress
from tformer_deploy.translate.corpus.shards import Done, Shard, Work
from tformer_deploy.translate.corpus.storage import RECORDS
from tformer_deploy.translate.opening import TranslatorOptions

from .command import COMMAND, failed_line, run_here
from .kills import contents, snapshots
from .params import long_but

BUNDLE = Path(__file__).parent / "bundles/v2/copy"
WINDOW = 8
"""Tokens of a batch, so that windows have 128 bytes."""


def number_lines(count: int, seed: int = 0) -> list[str]:
    """Digits; every 16th line is empty."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 13, count) * (rng.integers(0, 16, count) > 0)
    return [" ".join(map(str, rng.integers(1, 10, size))) for size in sizes]


LINES = number_lines(150)


def write(path: Path, lines: list[str]) -> Path:
    content = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(packed(content, path.suffix if path.suffix in (".gz", ".zst") else ""))
    return path


def write_rows(path: Path, lines: list[str]) -> Path:
    """A file of the format that its name tells."""
    if path.suffix == ".parquet":
        pa = pytest.importorskip("pyarrow", reason="the extra corpus is not installed")
        pytest.importorskip("pyarrow.parquet").write_table(pa.table({"text": lines}), path)
        return path
    return write(path, [json.dumps({"text": line}) for line in lines] if ".jsonl" in path.name else lines)


def corpus(*arguments: object, bundle: Path = BUNDLE) -> dict[str, Any]:
    """Run the command; what it says it has done."""
    done = run_here("corpus", bundle, "--batch-tokens", WINDOW, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def refused(*arguments: object, code: int = 1) -> str:
    return failed_line(run_here("corpus", BUNDLE, "--batch-tokens", WINDOW, *arguments), code)


def translated(lines: list[str], *options: object) -> bytes:
    """What `tformer translate` prints."""
    text = "".join(f"{line}\n" for line in lines).encode()
    done = run_here("translate", BUNDLE, "--batch-tokens", WINDOW, *options, stdin=text)
    assert done.returncode == 0, done.stderr
    return done.stdout


def shards(out: Path) -> list[Path]:
    return sorted(path for path in out.iterdir() if path.name[:12].isdecimal())


def rows_of(out: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


# The same as `translate`


@pytest.mark.parametrize(
    "options",
    long_but(
        {
            "greedy": (),
            "samples": ("--sample", "--seed", 3, "--n-best", 2),
            "beams": ("--beams", 3, "--n-best", 2, "--max-tokens", 6),
            "int8": ("--variant", "int8", "--workers", 1),
        },
        "samples",
        "int8",
    ),
)
def test_equals_translate_with_shards_of_any_size(options: tuple[object, ...], tmp_path: Path) -> None:
    """To the last digit of every score: windows are the same, and so is every batch."""
    text, plain, full = (
        write(tmp_path / "a.txt", LINES),
        translated(LINES, *options),
        translated(LINES, *options, "--json"),
    )
    counts = set()
    for size in (1, 40, 10_000):
        out = tmp_path / f"out{size}"
        done = corpus("--in", text, "--out", out, "--shard-lines", size, "--merge", *options)
        assert (out / "merged.txt").read_bytes() == plain == b"".join(path.read_bytes() for path in shards(out))
        assert done["lines"] == len(LINES) and done["shards"] == len(shards(out)) and done["errors"] == 0
        counts.add(done["shards"])
        corpus("--in", text, "--out", out, "--shard-lines", size, "--merge", "--details", "--force", *options)
        assert (out / "merged.jsonl").read_bytes() == full
    assert len(counts) == 3 and 1 in counts


def test_several_files_are_one_corpus(tmp_path: Path) -> None:
    """In the order of their names; seeds and numbers are those of the line in all of them."""
    for name, part in (("b", LINES[70:]), ("a", LINES[:70])):
        write(tmp_path / f"{name}.en.gz", part)
    options = ("--sample", "--seed", 3, "--n-best", 2)
    corpus("--in", tmp_path / "*.gz", "--out", tmp_path / "out", "--shard-lines", 20, "--merge", *options)
    merged = gzip.decompress((tmp_path / "out/merged.en.gz").read_bytes()).decode().splitlines()
    # What stands beside a line may change the last digits of a score.
    expected = translated(LINES, *options).decode().splitlines()
    assert [line.rpartition(" ||| ")[0] for line in merged] == [line.rpartition(" ||| ")[0] for line in expected]
    listed = rows_of(tmp_path / "out", LIST)
    assert [record["file"] for record in listed] == [path.name for path in shards(tmp_path / "out")]
    assert sum(record["lines"] for record in listed) == len(LINES)
    at = {record["first"]: (Path(record["input"]).name, record["line"]) for record in listed}
    assert at[0] == ("a.en.gz", 1) and at[70] == ("b.en.gz", 1)
    assert {len(record[name]) for record in listed for name in ("sha256", "bundle", "options")} == {64}
    assert all(record["tokens"] > 0 and record["seconds"] > 0 and record["worker"] for record in listed)


def test_odd_tables(tmp_path: Path) -> None:
    """A row that is no UTF-8 is a bad line; columns of one name, and files of different ones, are a line."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    content = pa.py_buffer(b"w5 w6\xff\xfe\xfd")
    bad = pa.Array.from_buffers(pa.string(), 2, [None, pa.py_buffer(np.array([0, 5, 8], np.int32)), content])
    pq.write_table(pa.table({"text": bad}), tmp_path / "bad.parquet")
    assert corpus("--in", tmp_path / "bad.parquet", "--out", tmp_path / "bad")["errors"] == 1
    assert "not UTF-8" in rows_of(tmp_path / "bad", "errors.jsonl")[0]["error"]
    pq.write_table(pa.Table.from_arrays([pa.array(["w5"])] * 2, ["text", "text"]), tmp_path / "twice.parquet")
    assert "several columns 'text'" in refused("--in", tmp_path / "twice.parquet", "--out", tmp_path / "twice")
    for name, kind in (("p1", pa.int64()), ("p2", pa.int32())):
        pq.write_table(pa.table({"text": ["w5"], "id": pa.array([1], kind)}), tmp_path / f"{name}.parquet")
    line = refused("--in", tmp_path / "p?.parquet", "--out", tmp_path / "out", "--merge")
    assert "the inputs differ in columns (pyarrow.Field<id: int32>)" in line


def test_a_file_without_a_suffix(tmp_path: Path) -> None:
    text = write(tmp_path / "corpus1", LINES)
    arguments = "--in", text, "--out", tmp_path / "out", "--shard-lines", 40
    count = corpus(*arguments)["shards"]
    assert corpus(*arguments)["existing_shards"] == count == len(shards(tmp_path / "out")) > 1
    write(text, LINES[::-1])  # as many bytes
    assert "choose another folder" in refused(*arguments)
    corpus(*arguments, "--force")
    assert len(shards(tmp_path / "out")) == len(rows_of(tmp_path / "out", LIST))


@pytest.mark.parametrize("name", [LIST, "errors.jsonl", "merged.txt"])
def test_files_of_others_stay_as_they_are(name: str, tmp_path: Path) -> None:
    text, theirs = write(tmp_path / "a.txt", LINES[:3]), tmp_path / "out" / name
    theirs.parent.mkdir()
    theirs.write_text("precious\n")
    for more in ((), ("--force",)):
        assert f"{name} in the output folder is of no job" in refused("--in", text, "--out", theirs.parent, *more)
    assert [path.name for path in theirs.parent.iterdir() if path.name != ".lock"] == [name]
    assert "lies in the output folder" in refused("--in", theirs, "--out", theirs.parent)
    assert theirs.read_text() == "precious\n"


def test_another_job_leaves_no_merged_file_of_the_last(tmp_path: Path) -> None:
    text = write(tmp_path / "a.txt", LINES[:3])
    corpus("--in", text, "--out", tmp_path / "out", "--merge")
    write(text, LINES[5:9])
    corpus("--in", text, "--out", tmp_path / "out", "--force")
    assert not (tmp_path / "out/merged.txt").exists()


def test_force_leaves_nothing_that_was_made_of_replaced_shards(tmp_path: Path) -> None:
    """Of the same job too, in which a line has changed and the file's size has not; nor while it works."""
    text, out = write(tmp_path / "a.txt", ["1 2", "3 4"]), tmp_path / "out"
    corpus("--in", text, "--out", out, "--merge")
    write(text, ["1 2", "4 3"])
    there: set[str] = set()

    def seen(work: Work, shards: Iterator[Shard], progress: Progress) -> Iterator[Done]:
        there.update(path.name for path in out.iterdir())
        return here(work, shards, progress)

    options = TranslatorOptions(BUNDLE, workers=0, batch_tokens=WINDOW)
    translate_corpus(CorpusOptions([str(text)], str(out), options, force=True), execute=seen)
    (one,) = shards(out)
    assert one.read_bytes() == translated(["1 2", "4 3"])
    assert there.isdisjoint([LIST, ERRORS, "merged.txt"])
    assert not (out / "merged.txt").exists() and len(rows_of(out, LIST)) == 1


@pytest.mark.parametrize("prefix", ["", "file://", "local://", "FILE://"])
def test_an_input_in_the_output_folder_is_refused(prefix: str, tmp_path: Path) -> None:
    text = write(tmp_path / "a.txt", LINES[:3])
    line = refused("--in", text, "--out", f"{prefix}{tmp_path}")
    assert f"{text} lies in the output folder" in line and [*tmp_path.iterdir()] == [text]


def test_options_of_ray_need_an_address(tmp_path: Path) -> None:
    text = write(tmp_path / "a.txt", LINES[:3])
    line = refused("--in", text, "--out", tmp_path / "out", "--num-cpus", 2)
    assert line == "error: num_cpus is of workers on Ray: give an address, or leave it out"


def test_a_file_is_named_once(tmp_path: Path) -> None:
    text = write(tmp_path / "a.txt", LINES[:3])
    assert f"{text} is named twice" in refused("--in", f"local://{text}", "--in", text, "--out", tmp_path / "out")


# Formats


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_rows_of_json_keep_their_members(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("zstandard", reason="the extra corpus is not installed")
    raw = [f'{{"id": 1.50, "src":{json.dumps(line)}, "id": 1e400 }}' for line in LINES]
    raw[3] = ' { "src" : null}'
    texts = ["" if i == 3 else line for i, line in enumerate(LINES)]
    options = ("--beams", 2, "--n-best", 2)
    out = tmp_path / "out"
    text = write(tmp_path / f"a.jsonl{suffix}", raw)
    corpus("--in", text, "--out", out, "--column", "src", "--shard-lines", 50, "--merge", "--details", *options)
    (merged,) = out.glob("merged*")
    assert merged.name == f"merged.jsonl{suffix}"
    lines = [line for line, _ in split_lines(unpacked(merged.open("rb"), suffix, ""), 1 << 20)]
    expected = [json.loads(line) for line in translated(texts, *options, "--json").splitlines()]
    for line, before, result in zip(lines, raw, expected, strict=True):
        assert line.decode().startswith(before.strip()[:-1].rstrip() + ", ")
        row = json.loads(line)
        assert [row["translation"], row["translation_score"], row["translation_ids"]] == [
            result[name] for name in ("text", "score", "ids")
        ]
        others = [{name: each[name] for name in ("text", "score", "ids")} for each in result["alternatives"]]
        assert row["translation_alternatives"] == others


def test_tables_keep_their_columns(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="the extra corpus is not installed")
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = [line if line else None for line in LINES]
    table = pa.table({"n": range(len(LINES)), "text": text, "x": [[0.5, i] for i in range(len(LINES))]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=33)
    out = tmp_path / "out"
    command = (
        "--in",
        tmp_path / "a.parquet",
        "--out",
        out,
        "--shard-lines",
        30,
        "--merge",
        "--beams",
        3,
        "--n-best",
        2,
    )
    assert corpus(*command)["shards"] > 3
    merged = pq.read_table(out / "merged.parquet")
    assert merged.select(["n", "text", "x"]) == table
    expected = [json.loads(line) for line in translated(LINES, "--beams", 3, "--n-best", 2, "--json").splitlines()]
    assert merged["translation"].to_pylist() == [result["text"] for result in expected]
    assert merged["translation_score"].to_pylist() == [result["score"] for result in expected]
    alternatives = [[{k: a[k] for k in ("text", "score")} for a in result["alternatives"]] for result in expected]
    assert merged["translation_alternatives"].to_pylist() == alternatives
    assert corpus(*command)["existing_shards"] == len(shards(out))
    assert "no column 'nowhere': name one of n, text, x" in refused(
        *command[:2], "--out", tmp_path / "b", "--column", "nowhere"
    )
    assert "is int64, no text" in refused(*command[:2], "--out", tmp_path / "b", "--column", "n")
    assert "a column 'x' already" in refused(*command[:2], "--out", tmp_path / "b", "--into", "x")


def test_alignments_are_written(attention_bundle: Path, tmp_path: Path) -> None:
    text = write(tmp_path / "a.jsonl", ['{"text": "w5 w6 w7"}', '{"text": ""}'])
    corpus("--in", text, "--out", tmp_path / "out", "--align", "--max-tokens", 5, bundle=attention_bundle)
    (one,) = shards(tmp_path / "out")
    rows = [json.loads(line) for line in one.read_text().splitlines()]
    assert len(rows[0]["translation_alignment"]) == 5 and rows[1]["translation_alignment"] == []


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({}, "no such file: check the path, and quote a pattern"),
        ({"a.txt": b""}, "the input has no line"),
        ({"a.txt": b"1\n", "b.jsonl": b"{}\n"}, "files of several formats (.jsonl, .txt)"),
        ({"a.gz": gzip.compress(b"1 2\n" * 9999)[:-20]}, "a.gz: cannot be read: Compressed file ended"),
        ({"a.gz": b"1 2\n"}, "a.gz: cannot be read: Not a gzipped file"),
        ({"a.txt.bz2": b"1 2\n"}, "a.txt.bz2: cannot be unpacked: pack it anew with gzip or zstd"),
        ({"a.zst": b"1 2\n"}, "a.zst: cannot be read: damaged"),
        ({"a.parquet": b"1 2\n"}, "a.parquet: cannot be read: "),
        ({"a.jsonl": b'{"text": "1", "translation_score": 0}\n'}, "a.jsonl:1 has a column 'translation_score' already"),
        ({"a.jsonl": b'{"text": "1"}\n{"text": "1", "translation": ""}\n'}, "a.jsonl:2 has a column 'translation' alr"),
        ({"A.TXT.BZ2": b"1 2\n"}, "A.TXT.BZ2: cannot be unpacked"),
        ({"a.tar.gz": gzip.compress(b"1 2\n")}, "a.tar.gz: an archive of files: unpack it"),
        ({"a.TGZ": b"1 2\n"}, "a.TGZ: an archive of files: unpack it"),
        ({"A.PARQUET": b"1 2\n"}, "A.PARQUET: cannot be read: "),
    ],
)
def test_bad_inputs_are_one_clear_line(names: dict[str, bytes], words: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="the extra corpus is not installed")
    for name, content in names.items():
        (tmp_path / name).write_bytes(content)
    assert words in refused("--in", tmp_path / "*.*", "--out", tmp_path / "out")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--out", ""), "--out is empty: name a folder"),
        (("--out", "out", "--column", "src"), "--column src: lines of text have no columns"),
        (("--out", "out", "--into", "de"), "--into de: lines of text have no columns"),
    ],
)
def test_options_of_nothing_are_refused(
    flags: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in refused("--in", write(tmp_path / "a.txt", ["3 4"]), *flags)
    assert not list(tmp_path.glob("**/shard*")) and not (tmp_path / "job.json").exists()


def test_an_empty_input_leaves_its_folder_free(tmp_path: Path) -> None:
    text = write(tmp_path / "a.txt", [])
    assert "the input has no line" in refused("--in", text, "--out", tmp_path / "out")
    corpus("--in", write(text, ["3 4"]), "--out", tmp_path / "out")


# Lines that cannot be translated


def test_bad_lines_are_listed_and_empty(tmp_path: Path) -> None:
    bad = {7: b"1 \xff 2", 40: b"3 " * 60, 41: b"1 " * 2000, 149: b"\xc3"}
    reasons = {7: "not UTF-8", 40: "a source of 61 tokens", 41: "longer than 300 bytes", 149: "not UTF-8"}
    lines = [bad.get(i, line.encode()) for i, line in enumerate(LINES)]
    write(tmp_path / "a.txt", ["1"] * 5)
    (tmp_path / "b.txt").write_bytes(b"\n".join(lines))
    command = ("--in", tmp_path / "*.txt", "--max-line-bytes", 300, "--shard-lines", 30)
    out = tmp_path / "out"
    assert corpus(*command, "--out", out, "--merge")["errors"] == 4
    expected = translated(["1"] * 5 + ["" if i in bad else line for i, line in enumerate(LINES)]).splitlines()
    assert (out / "merged.txt").read_bytes().splitlines() == expected
    found = rows_of(out, ERRORS)
    assert [(Path(e["input"]).name, e["line"], e["number"]) for e in found] == [("b.txt", i + 1, i + 5) for i in bad]
    assert all(reasons[e["line"] - 1] in e["error"] for e in found)
    assert sum(record["errors"] for record in rows_of(out, LIST)) == 4
    done = run_here("corpus", BUNDLE, "--batch-tokens", WINDOW, *command, "--out", out)
    assert b"4 lines could not be translated and are empty: errors.jsonl" in done.stdout
    strict = refused(*command, "--out", tmp_path / "strict", "--strict")
    assert "b.txt:8: not UTF-8 (invalid start byte)" in strict
    assert not (tmp_path / "strict" / LIST).exists()
    line = refused(*command, "--out", out, "--strict")
    assert "b.txt:8: not UTF-8 (invalid start byte)" in line and "an earlier run without --strict left it empty" in line


def test_suffixes_may_be_upper_case(tmp_path: Path) -> None:
    lines = [json.dumps({"text": line}) for line in LINES[:3]]
    (tmp_path / "A.JSONL.GZ").write_bytes(gzip.compress("\n".join(lines).encode()))
    corpus("--in", tmp_path / "A.JSONL.GZ", "--out", tmp_path / "out", "--merge")
    rows = gzip.decompress((tmp_path / "out/merged.jsonl.gz").read_bytes()).splitlines()
    assert [json.loads(row)["text"] for row in rows] == LINES[:3]


def test_rows_are_utf8(tmp_path: Path) -> None:
    """A mark at the beginning is none of the object; other encodings are not guessed."""
    text, other = b'{"text": "1 2"}\n', b"{\x00}\x00\n"
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + text + other + b'{"text": "\xff"}\n')
    assert corpus("--in", tmp_path / "a.jsonl", "--out", tmp_path / "out")["errors"] == 2
    reasons = [row["error"] for row in rows_of(tmp_path / "out", ERRORS)]
    assert "not JSON" in reasons[0] and reasons[1] == "not UTF-8 (invalid start byte): convert it"


def test_an_object_may_be_twice_as_long_as_its_text(tmp_path: Path) -> None:
    rows = [json.dumps({"text": "1", "more": "x" * size}) for size in (30, 90)]
    text = write(tmp_path / "a.jsonl", rows)
    assert corpus("--in", text, "--out", tmp_path / "out", "--max-line-bytes", 40)["errors"] == 1
    (row,) = rows_of(tmp_path / "out", ERRORS)
    assert row["error"] == "an object longer than 80 bytes: split it, or raise --max-line-bytes"


def test_allowed_outputs_may_be_an_iterator(tmp_path: Path) -> None:
    """It is read once, and is a part of what identifies a job."""
    text, found = write(tmp_path / "a.txt", LINES[:3]), []
    for name, outputs in (("a", ["1 2", "3"]), ("b", ["5"])):
        translator = TranslatorOptions(BUNDLE, workers=1, allowed=iter(outputs))
        translate_corpus(CorpusOptions([str(text)], str(tmp_path / name), translator))
        (shard,) = shards(tmp_path / name)
        assert set(shard.read_text().splitlines()) <= {*outputs, ""}
        found.append(shard.name)
    assert found[0] != found[1]


def test_bad_rows_are_listed_and_empty(tmp_path: Path) -> None:
    rows = ['{"text": "1 2"}', "[1]", "{", '{"other": 5}', '{"text": 5}', '{"text": "\\ud800"}', "{}"]
    text = write(tmp_path / "a.jsonl", rows)
    assert corpus("--in", text, "--out", tmp_path / "out")["errors"] == 6
    (one,) = shards(tmp_path / "out")
    found = [json.loads(line) for line in one.read_text().splitlines()]
    assert [row["translation"] for row in found] == ["1 2", *[""] * 6]
    assert found[3]["other"] == 5 and found[4]["text"] == 5 and set(found[1]) == {"translation", "translation_score"}
    reasons = [
        "no JSON object",
        "not JSON",
        "no column 'text': it has other",
        "no text",
        "lone surrogate",
        "it has none",
    ]
    assert all(reason in e["error"] for reason, e in zip(reasons, rows_of(tmp_path / "out", ERRORS), strict=True))


# Exactly once


def comparable(folder: Path) -> list[tuple[str, bytes]]:
    """All that a job leaves, but for what its processes took."""
    found = []
    for name, content in contents(folder):
        if Path(name).name == LIST or (Path(name).parent.name == RECORDS and content):
            rows = [json.loads(line) for line in content.splitlines()]
            kept = [{k: v for k, v in row.items() if k not in ("seconds", "worker")} for row in rows]
            content = json.dumps(kept).encode()
        found.append((name, content))
    return found


@pytest.mark.long
def test_a_kill_at_any_moment_leaves_what_the_next_run_completes(tmp_path: Path) -> None:
    text = write(tmp_path / "a.txt", LINES)
    here = tmp_path / "here"
    command = ("--in", text, "--shard-lines", 50, "--merge")
    here.mkdir()
    with snapshots(here, tmp_path / "states") as states:
        corpus(*command, "--out", here / "out")
    assert len(states) > 20
    found = []
    for state in states:
        whole = (
            {path.name: path.stat().st_mtime_ns for path in shards(state / "out")} if (state / "out").exists() else {}
        )
        done = corpus(*command, "--out", state / "out")
        assert comparable(state) == comparable(here)
        assert done["existing_shards"] == len(whole), "only what is missing is done"
        assert all((state / "out" / name).stat().st_mtime_ns == time for name, time in whole.items())
        found.append(done["existing_shards"])
    assert found == sorted(found) and set(found) == set(range(len(shards(here / "out")) + 1))


def test_an_interrupt_leaves_what_is_done(tmp_path: Path) -> None:
    text, out = write(tmp_path / "a.txt", LINES * 8), tmp_path / "out"
    command = [*COMMAND, "corpus", BUNDLE, "--in", text, "--out", out, "--shard-lines", 20, "--merge"]
    words = [*map(str, command), "--batch-tokens", str(WINDOW)]
    # What a shell starts in the background ignores interrupts, and so would its children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    running = subprocess.Popen(words, stderr=subprocess.PIPE)
    signal.signal(signal.SIGINT, before)
    while not out.is_dir() or len(shards(out)) < 2:
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    said = running.communicate(timeout=60)[1].decode()
    assert running.returncode == 130 and "shards are done: run the same command again for the others" in said
    assert not (out / LIST).exists() and not list(out.rglob(".*"))
    assert corpus(*words[5:])["existing_shards"] >= 2
    assert (out / "merged.txt").read_bytes() == translated(LINES * 8)


def test_the_cores_of_the_first_run_decide_the_batches(tmp_path: Path) -> None:
    """Wherever the job goes on; a job that replaces another one is this machine's."""
    text, out = write(tmp_path / "a.txt", LINES), tmp_path / "out"
    command = ("--in", text, "--out", out, "--shard-lines", 50)

    def least() -> int:
        return int(json.loads((out / JOB).read_text())["work"]["options"]["least_batches"])

    corpus(*command, "--workers", 3)
    assert least() == 3
    assert corpus(*command, "--workers", 1)["existing_shards"] == len(shards(out)) and least() == 3
    assert corpus(*command, "--workers", 2, "--beams", 2, "--force")["existing_shards"] == 0 and least() == 2


@pytest.mark.parametrize("option", ["--suppress", "--first-token", "--end-token"])
def test_a_job_with_tokens_goes_on_with_other_workers(option: str, tmp_path: Path) -> None:
    command = ("--in", write(tmp_path / "a.txt", LINES[:9]), "--out", tmp_path / "out", option, 9)
    corpus(*command, "--workers", 1)
    assert corpus(*command, "--workers", 2)["existing_shards"] == len(shards(tmp_path / "out"))


def test_the_largest_file_decides_whether_batches_are_split(tmp_path: Path) -> None:
    """Not the first, which may be a line or two."""
    short, long = write(tmp_path / "a.txt", LINES[:1]), write(tmp_path / "b.txt", LINES * 4)
    corpus("--in", short, "--in", long, "--out", tmp_path / "out", "--batch-tokens", 4096)
    least = json.loads((tmp_path / "out" / JOB).read_text())["work"]["options"]["least_batches"]
    assert least == suitable_workers(len(LINES * 4))


def test_what_has_changed_is_refused(tmp_path: Path) -> None:
    text, out = write(tmp_path / "a.txt", LINES), tmp_path / "out"
    bundle = tmp_path / "bundle"
    shutil.copytree(BUNDLE, bundle)

    def run(*more: object) -> tuple[object, ...]:
        return "corpus", bundle, "--batch-tokens", WINDOW, "--in", text, "--out", out, "--shard-lines", 50, *more

    assert run_here(*run()).returncode == 0
    before = contents(out)
    for options, words in (
        (("--beams", 2), "decoding was {}, is {'beams': 2}"),
        (("--shard-lines", 60), "shard_lines was 50, is 60"),
        (("--variant", "int8"), "variant was None, is int8"),
    ):
        line = failed_line(run_here(*run(*options)))
        assert words in line and "--force" in line
    manifest = bundle / "manifest.json"
    manifest.write_text(manifest.read_text() + "\n")
    assert "bundle was " in failed_line(run_here(*run()))
    shutil.copy(BUNDLE / "manifest.json", manifest)
    size = text.stat().st_size
    write(text, [*LINES, "1"])
    assert f"input a.txt of {size} bytes, now a.txt of {size + 2} bytes" in failed_line(run_here(*run()))
    other = LINES[:140] + [line[::-1] for line in LINES[140:]]
    write(text, other)
    line = failed_line(run_here(*run()))
    assert "a.txt, lines" in line and "not the text of" in line and "--force" in line
    write(tmp_path / "b.txt", LINES)
    assert contents(out) == before, "what is refused changes nothing"
    done = run_here(*run("--force", "--merge"))
    assert done.returncode == 0 and b"of them by an earlier run" in done.stdout
    assert (out / "merged.txt").read_bytes() == translated(other)
    done = run_here(*run("--force", "--merge", "--beams", 3))
    assert (out / "merged.txt").read_bytes() == translated(other, "--beams", 3) and b"earlier" not in done.stdout
    for content in ("{}", "[" * 99999):
        (out / JOB).write_text(content)
        assert "job.json is damaged" in failed_line(run_here(*run()))
    (out / JOB).unlink()
    assert "shards without job.json" in failed_line(run_here(*run()))


NO_ERRORS = b'{"lines": 1, "tokens": 1, "cut": 0, "errors": [1]}'
DAMAGE: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("shard", lambda content: content[: len(content) // 2]),
    ("shard", lambda content: content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]),
    ("shard", lambda content: b""),
    ("record", lambda content: content[: len(content) // 2]),
    ("record", lambda content: b"{}"),
    ("record", lambda content: NO_ERRORS),
    ("record", lambda content: b"[" * 99999),
]


@pytest.mark.parametrize("suffix", long_but((".txt", ".txt.gz", ".parquet"), ".txt.gz"))
def test_what_was_damaged_is_made_again(suffix: str, tmp_path: Path) -> None:
    """Shards and their records; the same command said that all was done."""
    text, out = write_rows(tmp_path / f"a{suffix}", LINES), tmp_path / "out"
    asked = TranslatorOptions(BUNDLE, workers=1, batch_tokens=WINDOW)
    options = CorpusOptions([str(text)], str(out), asked, shard_lines=50)
    assert translate_corpus(options).damaged == []
    whole = {path: path.read_bytes() for path in shards(out)}
    shard = shards(out)[1]
    record = out / "records" / f"{shard.name.split('.')[0]}.json"
    for name, damage in DAMAGE:
        path = shard if name == "shard" else record
        path.write_bytes(damage(path.read_bytes()))
        done = translate_corpus(options)
        assert (done.damaged, done.existing_shards) == ([shard.name], len(whole) - 1)
        assert {each: each.read_bytes() for each in shards(out)} == whole
    record.unlink()
    command = run_here("corpus", BUNDLE, "--batch-tokens", WINDOW, "--in", text, "--out", out, "--shard-lines", 50)
    words = f"changed since an earlier run wrote them, so translated again: {shard.name}"
    assert command.returncode == 0 and words in command.stdout.decode()
    assert {each: each.read_bytes() for each in shards(out)} == whole and translate_corpus(options).damaged == []


def test_two_runs_at_once(tmp_path: Path) -> None:
    """On one machine the second says that there is a first."""
    text, out = write(tmp_path / "a.txt", LINES), tmp_path / "out"
    with open_store(str(out)).held():
        assert "is being changed by another process" in refused("--in", text, "--out", out)
    assert not list(out.iterdir())
    assert corpus("--in", text, "--out", out)["lines"] == len(LINES)


def test_folders_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS; two runs there do what two runs in a bucket do."""

    def failing(number: int) -> Any:
        def flock(*arguments: Any) -> Any:
            raise OSError(number, os.strerror(number))

        return flock

    text = write(tmp_path / "a.txt", LINES)
    monkeypatch.setattr(fcntl, "flock", failing(errno.EBADF))
    assert corpus("--in", text, "--out", tmp_path / "out")["lines"] == len(LINES)
    monkeypatch.setattr(fcntl, "flock", failing(errno.EIO))
    assert "Input/output error" in refused("--in", text, "--out", tmp_path / "out")


def test_a_job_whose_folder_was_taken_leaves_the_others_shards(tmp_path: Path) -> None:
    """Where there are no locks: it began first, and ends last."""
    fsspec = pytest.importorskip("fsspec", reason="the extra corpus is not installed")
    text, out = write(tmp_path / "a.txt", LINES), "memory://taken/out"

    def late(work: Work, shards: Iterator[Shard], progress: Progress) -> Iterator[Done]:
        corpus("--in", text, "--out", out, "--force", "--beams", 2, "--merge")
        left.update(fsspec.filesystem("memory").find("/taken/out", detail=True))
        return iter(())

    left: dict[str, Any] = {}
    options = TranslatorOptions(BUNDLE, workers=0, batch_tokens=WINDOW)
    with pytest.raises(ArtifactError, match="another job has taken the output folder"):
        translate_corpus(CorpusOptions([str(text)], out, options, force=True), execute=late)
    assert left and fsspec.filesystem("memory").find("/taken/out", detail=True) == left


# Object stores


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A bucket of a local S3 server."""
    server = pytest.importorskip("moto.server", reason="moto is not installed")
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
    names = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    running = server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    running.start()
    with pytest.MonkeyPatch.context() as patch:
        host, port = running.get_host_and_port()
        for name, value in {**names, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem().mkdir("corpus")
        yield "s3://corpus"
    running.stop()


@pytest.mark.long
def test_from_bucket_to_bucket(bucket: str, tmp_path: Path) -> None:
    import s3fs

    fs = s3fs.S3FileSystem()
    for name, part in (("a", LINES[:70]), ("b", LINES[70:])):
        fs.put_file(str(write(tmp_path / f"{name}.txt.gz", part)), f"{bucket}/in/{name}.txt.gz")
    command = ("--in", f"{bucket}/in/*.gz", "--out", f"{bucket}/out", "--shard-lines", 30, "--merge")
    done = corpus(*command)
    local = tmp_path / "out"
    corpus("--in", tmp_path / "*.gz", "--out", local, "--shard-lines", 30, "--merge")
    fs.invalidate_cache()
    names = {path.rsplit("/", 1)[-1] for path in fs.ls(f"{bucket}/out")}
    assert names == {path.name for path in local.iterdir()} and done["shards"] == len(shards(local))
    for path in (*shards(local), local / "merged.txt.gz", local / ERRORS):
        assert fs.cat_file(f"{bucket}/out/{path.name}") == path.read_bytes()
    lost = shards(local)[2].name
    fs.rm_file(f"{bucket}/out/{lost}")
    assert corpus(*command)["existing_shards"] == done["shards"] - 1
    assert fs.cat_file(f"{bucket}/out/{lost}") == (local / lost).read_bytes()
    assert "decoding was {}" in refused(*command, "--beams", 2)
    for name in ("*.txt", "c.txt", ""):
        assert "no such file" in refused("--in", f"{bucket}/in/{name}", "--out", f"{bucket}/out")
    taken = refused("--in", f"{bucket}/in/a.txt.gz", "--out", f"{bucket.replace('s3', 's3a')}/in/", "--force")
    assert f"{bucket}/in/a.txt.gz lies in the output folder" in taken
    line = refused("--in", f"{bucket}/in/a.txt.gz", "--out", "s3://nowhere/out")
    assert line == "error: s3://nowhere/out: The specified bucket does not exist: check the path"


@pytest.mark.long
def test_runs_into_one_bucket_do_not_harm_each_other(bucket: str, tmp_path: Path) -> None:
    """There are no locks: each writes the same bytes."""
    text = write(tmp_path / "a.txt", LINES)
    command = [*COMMAND, "corpus", BUNDLE, "--batch-tokens", WINDOW, "--in", text, "--shard-lines", 10, "--merge"]
    command = [*map(str, command), "--out", f"{bucket}/both"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    said = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    import s3fs

    fs = s3fs.S3FileSystem()
    assert fs.cat_file(f"{bucket}/both/merged.txt") == translated(LINES)
    listed = [json.loads(line) for line in fs.cat_file(f"{bucket}/both/{LIST}").splitlines()]
    assert sum(record["lines"] for record in listed) == len(LINES)


def test_an_upload_that_fails_is_no_file(bucket: str) -> None:
    store = open_store(f"{bucket}/uploads")
    with pytest.raises(ZeroDivisionError), store.writing("a") as file:
        file.write(b"x" * (6 << 20))  # more than one part
        raise ZeroDivisionError
    assert store.names() == set()
    with store.writing("a") as file:
        file.write(b"x" * (6 << 20))
    assert store.names() == {"a"} and len(store.read("a")) == 6 << 20


def test_places_without_whole_objects(tmp_path: Path) -> None:
    """There a file is written beside its place, and moved."""
    fsspec = pytest.importorskip("fsspec", reason="the extra corpus is not installed")
    text = write(tmp_path / "a.txt", LINES)
    corpus("--in", text, "--out", "memory://somewhere/out", "--merge")
    fs = fsspec.filesystem("memory")
    assert fs.cat_file("/somewhere/out/merged.txt") == translated(LINES)
    with pytest.raises(ZeroDivisionError), open_store("memory://somewhere/out").writing("b"):
        raise ZeroDivisionError
    assert not [path for path in fs.find("/somewhere/out") if ".tmp" in path or path.endswith("/b")]
    assert "Protocol not known: nowhere" in refused("--in", "nowhere://a", "--out", tmp_path / "out")


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """S3 without keys, at an address where nobody answers."""
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    none = dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull)
    off = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_MAX_ATTEMPTS": "1", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**none, **off, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3fs.S3FileSystem, "cachable", False)  # one that is open has other keys
    return monkeypatch


@pytest.mark.parametrize("keys", [False, True])
def test_a_store_that_does_not_answer_is_one_clear_line(keys: bool, s3: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if keys:
        s3.setenv("AWS_ACCESS_KEY_ID", "a")
        s3.setenv("AWS_SECRET_ACCESS_KEY", "b")
    text, words = write(tmp_path / "a.txt", LINES[:3]), "Could not connect" if keys else "Unable to locate credentials"
    for place in ("s3://x/a.txt", "s3://x/*.txt"):
        line = refused("--in", place, "--out", tmp_path / "out")
        assert line.startswith(f"error: {place}: {words}") and "check the address, the network and your keys" in line
    line = refused("--in", text, "--out", "s3://x/out")
    assert line.startswith(f"error: s3://x/out: {words}") and "check the address, the network and your keys" in line


def test_a_host_that_refuses_is_no_missing_file(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    line = refused("--in", "http://127.0.0.1:9/x.txt", "--out", tmp_path / "out")
    assert line.startswith("error: http://127.0.0.1:9/x.txt: Cannot connect") and "no such file" not in line


def test_passwords_and_signatures_stay_out_of_messages_and_output(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    secret = "http://me:SECRET@127.0.0.1:{}/{}?signature=SECRET#SECRET"
    line = refused("--in", secret.format(9, "x.txt"), "--out", tmp_path / "no")
    assert line.startswith("error: http://127.0.0.1:9/x.txt: Cannot connect") and "SECRET" not in line
    write(tmp_path / "a.txt.gz", [*LINES[:9], " ".join(["1"] * 99)])

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(tmp_path))

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        corpus("--in", secret.format(server.server_port, "a.txt.gz"), "--out", tmp_path / "out")
        line = refused("--in", secret.format(server.server_port, "b.txt"), "--out", tmp_path / "no")
        assert "/b.txt" in line and "SECRET" not in line
        server.shutdown()
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {"manifest.jsonl", "errors.jsonl", "job.json"} < {path.name for path in files}
    assert not [path for path in files if "SECRET" in path.name or b"SECRET" in path.read_bytes()]
    assert json.loads((tmp_path / "out/errors.jsonl").read_text())["input"].endswith("/a.txt.gz")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_from_a_server_that_says_no_size(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    content = write(tmp_path / f"a.txt{suffix}", LINES).read_bytes()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        corpus("--in", f"http://127.0.0.1:{server.server_port}/a.txt{suffix}", "--out", tmp_path / "out", "--merge")
        server.shutdown()
    corpus("--in", tmp_path / f"a.txt{suffix}", "--out", tmp_path / "same", "--merge")
    (ours,), (same,) = (folder.glob("merged.*") for folder in (tmp_path / "out", tmp_path / "same"))
    assert ours.read_bytes() == same.read_bytes()


@pytest.mark.parametrize("error", [RuntimeError("it is dead"), BrokenPipeError(errno.EPIPE, "it is dead")])
@pytest.mark.parametrize("suffix", [".txt", ".gz", ".parquet"])
def test_a_store_that_is_lost_is_one_clear_line(
    suffix: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a file of it is read or written, too."""
    memory = pytest.importorskip("fsspec.implementations.memory", reason="the extra corpus is not installed")
    pa = pytest.importorskip("pyarrow", reason="the extra corpus is not installed")
    import pyarrow.parquet as pq

    def lost(*arguments: object) -> None:
        raise error

    table = io.BytesIO()
    pq.write_table(pa.table({"text": ["1 2"]}), table)
    memory.MemoryFileSystem().pipe_file(f"/lost/a{suffix}", table.getvalue())
    with monkeypatch.context() as patch:
        patch.setattr(memory.MemoryFile, "read", lost)
        line = refused("--in", f"memory://lost/a{suffix}", "--out", tmp_path / "out")
        assert f"memory:///lost/a{suffix}: it is dead: check the address" in line
    monkeypatch.setattr(memory.MemoryFile, "write", lost)
    line = refused("--in", write(tmp_path / "a.txt", LINES[:3]), "--out", "memory://lost/out")
    assert "memory://lost/out: it is dead: check the address" in line


def test_a_store_whose_listing_takes_no_options_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As sftp's."""
    memory = pytest.importorskip("fsspec.implementations.memory", reason="the extra corpus is not installed")
    listing = memory.MemoryFileSystem.ls
    monkeypatch.setattr(memory.MemoryFileSystem, "ls", lambda self, path, detail=False: listing(self, path, detail))
    text = write(tmp_path / "a.txt", LINES[:3])
    for _ in range(2):
        corpus("--in", text, "--out", "memory://plain/out")


# Progress


def test_progress_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Progress(total_bytes=100)
    assert progress.eta_seconds is None and "? left" in progress.line()
    monkeypatch.setattr(time, "perf_counter", lambda: progress.started + 10)
    progress.workers, progress.bytes = 2, 20.0  # found
    progress.advance(1000, 5000, 20.0)
    assert progress.eta_seconds == pytest.approx(30) and progress.tokens_per_second == pytest.approx(500)
    assert progress.line().startswith("1,000 lines, ") and "0:00:30 left, 2 workers" in progress.line()
    assert progress.state()["done"] == 0.4
    progress.advance(1500, 7500, 60.0)
    assert progress.state()["done"] == 0.9999 and progress.eta_seconds > 0, "a shard is still written"
    monkeypatch.undo()
    text = write(tmp_path / "a.txt", LINES)
    done = run_here("corpus", BUNDLE, "--in", text, "--out", tmp_path / "out")
    last = json.loads(done.stderr.splitlines()[-1])
    assert last["lines"] == len(LINES) and last["done"] == 1 and last["eta_seconds"] == 0 and last["tokens"] > 0


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".jsonl.zst", ".parquet"])
def test_progress_is_what_has_been_translated(suffix: str, tmp_path: Path) -> None:
    """Not what has been read or unpacked ahead; after a kill, what is left is known from the first shard on."""
    pytest.importorskip("zstandard", reason="the extra corpus is not installed")
    lines = number_lines(400)
    inputs, out, states = [tmp_path / f"{name}{suffix}" for name in "ab"], tmp_path / "out", list[dict[str, Any]]()
    for path, some in zip(inputs, (lines[:300], lines[300:]), strict=True):
        write_rows(path, some)
    asked = TranslatorOptions(BUNDLE, workers=1, batch_tokens=16, decoding={"max_tokens": 2})
    options = CorpusOptions([str(path) for path in inputs], str(out), asked, shard_lines=20)
    sizes = [path.stat().st_size for path in inputs]

    class Killed(Exception):
        pass

    def watched(least: int) -> Progress:
        progress = Progress()

        def changed() -> None:
            states.append(progress.state())
            if progress.lines >= least:
                raise Killed

        progress.changed = changed
        return progress

    with pytest.raises(Killed):
        translate_corpus(options, watched(150))
    for state in states:
        expected = sizes[0] * state["lines"] / 300 / sum(sizes)  # all lines are nearly as long
        assert state["done"] == pytest.approx(expected, abs=0.03), state
    states.clear()
    progress = watched(1000)
    translate_corpus(options, progress)
    assert progress.existing_shards and progress.state()["done"] == 1 and progress.state()["eta_seconds"] == 0
    new = [state for state in states if state["lines"]]
    assert all(state["done"] < 1 for state in states[:-1]), "the last shard is being written"
    assert len(new) > 5 and all(state["eta_seconds"] is not None for state in new)
    assert new[0]["eta_seconds"] > 0 and new[0]["done"] < 0.5


def test_progress_of_inputs_whose_size_nobody_knows() -> None:
    progress = Progress(workers=1)
    progress.advance(10, 50, 20.0)
    assert progress.state()["done"] is None and progress.state()["eta_seconds"] is None and "? left" in progress.line()
    progress.finish()
    assert progress.state()["done"] == 1 and progress.state()["eta_seconds"] == 0


def test_a_terminal_shows_a_bar(tmp_path: Path) -> None:
    text = write(tmp_path / "a.txt", LINES)
    ours, theirs = pty.openpty()
    command = [*COMMAND, "corpus", BUNDLE, "--in", text, "--out", tmp_path / "out"]
    environment = os.environ | {"TERM": "xterm"}
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    while chunk := _read(ours):
        shown += chunk
    os.close(ours)
    assert process.wait(60) == 0 and b"tokens/s" in shown and b"left" in shown and b"{" not in shown


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # its other end is closed
        return b""


# Parts


@given(st.lists(st.binary(max_size=9)), st.integers(1, 8))
def test_lines_are_those_between_line_ends(chunks: list[bytes], most: int) -> None:
    expected = b"".join(chunks).split(b"\n")
    expected = expected if expected[-1] else expected[:-1]
    ends = accumulate(map(len, chunks))
    found = list(split_lines(zip(chunks, ends, strict=False), most))
    assert [line for line, _ in found] == [line[: most + 1] for line in expected]
    places = accumulate(len(line) + 1 for line in expected)
    assert [place for _, place in found] == [min(place, sum(map(len, chunks))) for place in places]


@given(st.lists(st.integers(0, 30)), st.integers(1, 60), st.integers(1, 20))
def test_shards_are_whole_windows(sizes: list[int], budget: int, lines: int) -> None:
    whole = list(windows(sizes, budget))
    assert [i for each in whole for i in range(each.start, each.stop)] == list(range(len(sizes)))
    assert all(sum(sizes[each]) + each.stop - each.start >= budget for each in whole[:-1])
    cutter, ends = Cutter(lines, budget), []
    for number, size in enumerate(sizes, 1):
        if cutter.ends(size):
            ends.append(number)
    assert set(ends) <= {each.stop for each in whole}
    assert all(end - start >= lines for start, end in zip([0, *ends], ends, strict=False))
    parts = [sizes[start:end] for start, end in zip([0, *ends], [*ends, len(sizes)], strict=True)]
    starts = [0, *ends]
    again = [
        slice(s + w.start, s + w.stop) for s, part in zip(starts, parts, strict=True) for w in windows(part, budget)
    ]
    assert again == whole, "the windows of a shard are those of the whole"


def test_damage_is_found_wherever_it_is() -> None:
    pytest.importorskip("zstandard", reason="the extra corpus is not installed")
    for suffix in (".gz", ".zst"):
        content = packed(b"1 2 3\n" * 1000, suffix) + packed(b"4\n", suffix)
        assert b"".join(chunk for chunk, _ in unpacked(io.BytesIO(content), suffix, "a")) == b"1 2 3\n" * 1000 + b"4\n"
        for cut in range(1, len(content) - 1):
            if cut != len(packed(b"1 2 3\n" * 1000, suffix)):
                with pytest.raises(DataError, match="a: cannot be read"):
                    list(unpacked(io.BytesIO(content[:cut]), suffix, "a"))


def test_what_is_packed_a_thousandfold_comes_in_pieces() -> None:
    pytest.importorskip("zstandard", reason="the extra corpus is not installed")
    for suffix in (".gz", ".zst"):
        sizes = [len(chunk) for chunk, _ in unpacked(io.BytesIO(packed(bytes(100 << 20), suffix)), suffix, "a")]
        assert sum(sizes) == 100 << 20 and max(sizes) <= 16 << 20
