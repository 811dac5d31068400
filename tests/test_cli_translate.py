"""`tformer translate` and `tformer score`: every option, pipes that stay open, pipes that break, endless input."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import re
import select
import shlex
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tformer_deploy.base.errors import DataError
from tformer_deploy.bundle.text import SPECIALS, Tokenizers, Words
from tformer_deploy.cli.lines import windows
from tformer_deploy.export.checked import export_checked
from tformer_deploy.model.checkpoint import model_tensors, save_checkpoint, save_tensors

from .command import COMMAND, Done, failed_line, printed, run_here, run_process
from .conftest import VOCAB, random_model, small_config

LINES = ["w5 w6", "", "w7 w8 w9", "w10", "w5 w6"]
TEXT = "\n".join([*LINES, ""]).encode()


@pytest.fixture
def translate(bundle: Path) -> Any:
    """Run `tformer translate` on the small model, outputs of at most 6 tokens."""

    def run(*arguments: object, stdin: bytes = TEXT, **options: Any) -> Done:
        return run_here("translate", bundle, "--threads", 1, "--max-tokens", 6, *arguments, stdin=stdin, **options)

    return run


def rows_of(done: Done) -> list[dict[str, Any]]:
    """What --json printed."""
    return [json.loads(line) for line in printed(done)]


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


# Options of translate


def test_json_has_all_of_a_result(translate: Any) -> None:
    rows = rows_of(translate("--json"))
    assert len(rows) == 5 and rows[0] == rows[4]
    assert rows[1] == {"text": "", "ids": [], "score": 0.0, "finished": True, "alignment": [], "alternatives": []}
    for row, text in zip(rows, printed(translate()), strict=True):
        assert sorted(row) == ["alignment", "alternatives", "finished", "ids", "score", "text"]
        assert row["text"] == text and row["alternatives"] == row["alignment"] == []
        assert not row["ids"] or (len(row["ids"]) == 6 and row["score"] < 0 and not row["finished"])


def test_n_best_of_a_beam(translate: Any) -> None:
    beam = ("--beams", 3, "--n-best", 3)
    rows = rows_of(translate(*beam, "--json"))
    expected = []
    for number, row in enumerate(rows):
        outputs = [row, *row["alternatives"]]
        assert len(outputs) == (3 if LINES[number] else 1)
        scores = [output["score"] for output in outputs]
        assert scores == sorted(scores, reverse=True), "all of one length"
        assert len({output["text"] for output in outputs}) == len(outputs)
        expected += [f"{number} ||| {output['text']} ||| {output['score']:.6f}" for output in outputs]
    assert printed(translate(*beam)) == expected
    best = [row["text"] for row in rows]
    assert printed(translate("--beams", 3)) == best
    assert printed(translate("--set", "beams=3")) == best
    assert printed(translate("--beams", 3, "--set", "beams=1")) == best, "a flag stands over --set"
    assert printed(translate()) != best


def test_samples_are_those_of_the_seed(translate: Any) -> None:
    def sample(*arguments: object, stdin: bytes = TEXT) -> list[str]:
        return printed(translate("--sample", *arguments, stdin=stdin))

    first = sample("--seed", 4)
    assert first == sample("--seed", 4, "--batch-tokens", 1) == sample("--set", "seed=4", "--set", "sampling=true")
    assert first != sample("--seed", 5) and first[0] != first[4], "the same source at another line"
    assert sample() == sample("--seed", 0) != first
    several = sample("--seed", 4, "--n-best", 2)
    assert [line.split(" ||| ")[0] for line in several] == ["0", "0", "1", "2", "2", "3", "3", "4", "4"]
    assert [several[i].split(" ||| ")[1] for i in (0, 2, 3, 5, 7)] == first
    assert sample("--set", "top_k=1", "--seed", 9) == printed(translate())
    assert sample("--seed", 4, stdin=TEXT[:-6]) == first[:4]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "lenght_penalty=0.6"], "'lenght_penalty': did you mean 'length_penalty'"),
        (["--set", "length_penalty"], "--set length_penalty: write NAME=VALUE"),
        (["--set", "length_penalty=much"], "decoding.length_penalty=much: must be a number"),
        (["--set", "no_repeat_ngram=2.5"], "no_repeat_ngram=2.5: must be a whole number"),
        (["--set", "align=maybe"], "align=maybe: must be true or false"),
        (["--set", "stop=exakt"], "unknown stop 'exakt': did you mean 'exact'"),
        (["--set", "suppress=4,five"], "suppress=five: must be a whole number"),
        (["--set", f"suppress=4,{VOCAB}"], f"token id {VOCAB} is outside the target vocabulary"),
        (["--set", "top_k=5"], "top_k=5: must be 0 without sampling"),
        (["--beams", "0"], "beams=0: must be at least 1"),
        (["--beams", "31"], "31 beams exceed the engine's limit of 30"),
        (["--n-best", "2"], "n_best=2: must be at most beams=1, or used with sampling"),
        (["--beams", "2", "--sample"], "beams=2: must be 1 with sampling"),
        (["--seed", "3"], "seed=3: must be 0 without sampling"),
        (["--max-tokens", "0"], "max_tokens=0: must be at least 1"),
        (["--first-token", "zebra"], "'zebra' is not in the vocabulary: tformer score --tokens shows"),
        (["--suppress", "w5", "--suppress", "zebra"], "'zebra' is not in the vocabulary"),
        (["--end-token", ""], "'' is not in the vocabulary"),
        (["--end-token", "w5", "--first-token", "w5"], "a forced token is an end token"),
        (["--prefix", "nowhere.txt"], "nowhere.txt: no such file"),
        (["--allowed", "nowhere.txt"], "nowhere.txt: no such file"),
        (
            ["--align"],
            "does not return attention: export with a recipe that has attention = true, such as fp32-attention",
        ),
        (["--set", "coverage_penalty=0.2"], "does not return attention"),
        (["--stream", "--json"], "--stream prints plain text: leave out --json and --align"),
        (["--stream", "--align"], "--stream prints plain text"),
        (["--stream", "--beams", "2"], "streaming shows one output as it grows: use beams=1"),
        (["--stream", "--sample", "--n-best", "2"], "streaming shows one output"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_are_one_clear_line(translate: Any, arguments: list[str], words: str) -> None:
    done = translate(*arguments)
    assert words in failed_line(done) and done.stdout == b""


def test_settings_act(translate: Any) -> None:
    greedy = rows_of(translate("--json"))
    short = rows_of(translate("--json", "--set", "max_ratio=0.7"))
    assert [len(row["ids"]) for row in short] == [2, 0, 2, 1, 2]
    assert all(row["ids"] == plain["ids"][: len(row["ids"])] for row, plain in zip(short, greedy, strict=True))
    once = rows_of(translate("--json", "--set", "no_repeat_ngram=1"))
    assert all(len(set(row["ids"])) == len(row["ids"]) for row in once) and once != greedy
    banned = greedy[0]["ids"][0]
    assert all(banned not in row["ids"] for row in rows_of(translate("--json", "--set", f"suppress={banned},4")))


def test_prefixes_begin_their_lines(translate: Any, tmp_path: Path) -> None:
    begins = ["w20 w21", "", "", "w22", "w23"]
    file = write(tmp_path / "prefixes.txt", *begins)
    free = printed(translate())
    for more in ((), ("--batch-tokens", 1), ("--beams", 2), ("--stream",)):  # one token: windows of two lines
        found = printed(translate("--prefix", file, *more))
        for line, begin, plain in zip(found, begins, free, strict=True):
            assert line.startswith(begin)
            assert begin or line == plain or "--beams" in more
    (tmp_path / "prefixes.txt.gz").write_bytes(gzip.compress(file.read_bytes()))
    assert printed(translate("--prefix", tmp_path / "prefixes.txt.gz")) == printed(translate("--prefix", file))


@pytest.mark.parametrize("more", [(), ("--stream",), ("--batch-tokens", "1")], ids=str)
def test_prefixes_must_be_as_many_as_lines(translate: Any, more: tuple[str, ...], tmp_path: Path) -> None:
    few, many = write(tmp_path / "few", *["w20"] * 4), write(tmp_path / "many", *["w20"] * 6)
    assert f"{few} has 4 lines, the input more: give one a line" in failed_line(translate("--prefix", few, *more))
    done = translate("--prefix", many, *more)
    last = done.stderr.decode().splitlines()[-1]
    assert done.returncode == 1 and f"error: {many} has 6 lines, the input 5: give one a line" in last
    assert f"{few} has 4 lines, the input 0" in failed_line(translate("--prefix", few, *more, stdin=b""))


def test_allowed_outputs_are_the_only_ones(translate: Any, bundle: Path, tmp_path: Path) -> None:
    """And they end by themselves, so that their scores are those of `tformer score`."""
    allowed = write(tmp_path / "allowed.txt", "w20 w21", "w20", "w22 w23 w24")
    for mode in ((), ("--beams", 3, "--n-best", 3, "--set", "length_penalty=0"), ("--sample", "--n-best", 4)):
        rows = rows_of(translate("--json", "--allowed", allowed, *mode))
        outputs = [(i, each) for i, row in enumerate(rows) if LINES[i] for each in [row, *row["alternatives"]]]
        assert all(each["finished"] and each["text"] in {"w20 w21", "w20", "w22 w23 w24"} for _, each in outputs)
        src = write(tmp_path / "src.txt", *(LINES[i] for i, _ in outputs))
        tgt = write(tmp_path / "tgt.txt", *(each["text"] for _, each in outputs))
        scores = [row["score"] for row in rows_of(run_here("score", bundle, "--src", src, "--tgt", tgt, "--json"))]
        assert scores == pytest.approx([each["score"] for _, each in outputs], abs=1e-5)
        texts = [{each["text"] for n, each in outputs if n == i} for i in (0, 2, 3, 4)]
        assert "--beams" not in mode or all(len(found) == 3 for found in texts)
    empty = write(tmp_path / "empty.txt")
    assert f"{empty} has no line" in failed_line(translate("--allowed", empty))
    (tmp_path / "latin.txt").write_bytes(b"w20\nw\xff\n")
    assert "latin.txt:2: not UTF-8" in failed_line(translate("--allowed", tmp_path / "latin.txt"))


def test_what_the_vocabulary_lacks_cannot_be_asked_for(translate: Any, tmp_path: Path) -> None:
    allowed = write(tmp_path / "allowed.txt", "w20 w21", "w20 日本 w22")
    done = translate("--allowed", allowed)
    assert f"{allowed}: allowed, line 2: '日本' is not in the vocabulary" in failed_line(done) and done.stdout == b""
    prefixes = write(tmp_path / "prefixes.txt", "w20", "", "", "w22 zebra", "w22")
    before = printed(translate("--prefix", write(tmp_path / "good.txt", "w20", "", "", "", "")))[:3]
    for more in ((), ("--stream",), ("--batch-tokens", 1)):
        done = translate("--prefix", prefixes, *more)
        assert "line 4, prefix: 'zebra' is not in the vocabulary" in failed_line(done)
        assert done.stdout.decode().splitlines() == before
    assert failed_line(translate("--allowed", write(tmp_path / "special.txt", "<unk>"))).count("'<unk>'") == 1


def test_tokens_by_their_names(translate: Any) -> None:
    greedy = rows_of(translate("--json"))
    first = rows_of(translate("--json", "--first-token", "w30", "--first-token", "w31"))
    assert all(row["ids"][:2] == [30, 31] for row in first if row["ids"])
    word = f"w{greedy[0]['ids'][2]}"
    suppressed = rows_of(translate("--json", "--suppress", word, "--suppress", "<unk>"))
    assert all(word not in row["text"].split() for row in suppressed) and suppressed[0]["ids"] != greedy[0]["ids"]
    ended = rows_of(translate("--json", "--end-token", word))
    for row, plain in zip(ended, greedy, strict=True):
        words = plain["text"].split()
        assert row["finished"] == (word in words or not words)
        assert row["text"].split() == (words[: words.index(word)] if word in words else words)


def test_alignments_are_printed(attention_bundle: Path) -> None:
    command = ("translate", attention_bundle, "--max-tokens", 4)
    rows = rows_of(run_here(*command, "--align", "--json", stdin=TEXT))
    assert [len(row["alignment"]) for row in rows] == [4, 0, 4, 4, 4]
    pairs = [" ".join(f"{source}-{i}" for i, source in enumerate(row["alignment"])) for row in rows]
    lines = printed(run_here(*command, "--align", stdin=TEXT))
    assert lines == [f"{row['text']} ||| {pair}" for row, pair in zip(rows, pairs, strict=True)]
    assert re.fullmatch(r"(\S+ ){4}\|\|\| [0-2]-0 [0-2]-1 [0-2]-2 [0-2]-3", lines[0]) and lines[1] == " ||| "
    assert printed(run_here(*command, "--set", "align=true", stdin=TEXT)) == lines
    best = printed(run_here(*command, "--align", "--beams", 2, "--n-best", 2, stdin=b"w5 w6\n"))
    assert len(best) == 2
    assert all(re.fullmatch(r"0 \|\|\| \S+( \S+){3} \|\|\| -\S+ \|\|\| [0-2]-0( [0-2]-\d){3}", line) for line in best)
    covered = printed(run_here(*command, "--beams", 2, "--set", "coverage_penalty=0.5", stdin=TEXT))
    assert len(covered) == 5


class Recorder(io.BytesIO):
    """Counts what arrives at once."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes] = []

    def write(self, data: Any) -> int:
        self.pieces.append(bytes(data))
        return super().write(data)


@pytest.mark.parametrize("mode", [(), ("--sample", "--seed", "3"), ("--suppress", "<unk>")], ids=str)
def test_a_stream_is_the_translation_in_pieces(translate: Any, mode: tuple[str, ...]) -> None:
    text = b"\n\n" + TEXT
    out = Recorder()
    streamed = printed(translate("--stream", *mode, stdin=text, out=out))
    assert streamed == printed(translate(*mode, stdin=text))
    expected = [piece for line in streamed for piece in [*re.findall(r" ?\S+", line), "\n"]]
    flushed = [part for piece in out.pieces for part in re.findall(r"\n| ?\S+", piece.decode())]
    assert flushed == expected
    assert sum(b" w" in piece for piece in out.pieces) > 10
    assert all(len(re.findall(rb"\S+", piece)) <= 1 for piece in out.pieces)


# Lines in, lines out


def test_thousands_of_lines_come_back_in_order(translate: Any, tmp_path: Path) -> None:
    """Each prefix is the line's number in base 50."""
    count = 3000
    names = [f"w{5 + i // 2500} w{5 + i // 50 % 50} w{5 + i % 50}" for i in range(count)]
    file = write(tmp_path / "names.txt", *names)
    text = "".join(" ".join(["w7"] * (1 + i * 7919 % 20)) + "\n" for i in range(count)).encode()
    assert printed(translate("--prefix", file, "--max-tokens", 3, "--batch-tokens", 512, stdin=text)) == names


def test_line_ends_do_not_matter(translate: Any) -> None:
    expected = printed(translate())
    assert printed(translate(stdin=TEXT.replace(b"\n", b"\r\n"))) == expected
    assert printed(translate(stdin=TEXT[:-1])) == expected
    assert printed(translate(stdin=TEXT + b"\n\n")) == [*expected, "", ""]
    assert printed(translate(stdin=TEXT.replace(b" ", b"  \t"))) == expected
    assert printed(translate(stdin=b"\n")) == [""] and printed(translate(stdin=b"")) == []


def test_lines_that_cannot_be_read_are_named_after_all_before_them(translate: Any) -> None:
    good = b"w5\n" * 400
    expected = translate("--max-tokens", 1, stdin=good).stdout
    for more in ((), ("--stream",), ("--batch-tokens", 8)):
        done = translate(*more, "--max-tokens", 1, stdin=good + b"w\xff\nw6\n")
        assert "standard input, line 401: not UTF-8" in failed_line(done)
        long = translate(*more, "--max-tokens", 1, stdin=good + b"w6 " * 30 + b"\nw6\n")
        assert "line 401: a source of 31 tokens exceeds the limit of 24" in failed_line(long)
        assert done.stdout == long.stdout == expected


@pytest.mark.parametrize("verb", ["translate", "score"])
def test_a_closed_output_is_one_clear_line(bundle: Path, tmp_path: Path, verb: str) -> None:
    lines = write(tmp_path / "lines.txt", "w5")
    files = f"--src {lines} --tgt {lines}" if verb == "score" else ""
    command = f"{' '.join(COMMAND)} {verb} {bundle} {files} <{lines} >&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=120)
    assert "standard output is closed" in failed_line(done)


def test_text_is_utf8_whatever_the_locale(tmp_path: Path) -> None:
    """The words of this bundle are ü4, ü5 and so on."""
    words = Words([*SPECIALS, *(f"ü{i}" for i in range(4, VOCAB))], None)
    weights = tmp_path / "run/weights/random.safetensors"
    save_tensors(weights, model_tensors(random_model(small_config())))
    save_checkpoint(tmp_path / "run", small_config(), Tokenizers(words, words), weights, {})
    export_checked(tmp_path / "run", tmp_path / "bundle")
    file = write(tmp_path / "lines.txt", "ü5 ü6")
    for command in (
        ("translate", tmp_path / "bundle", "--max-tokens", 4),
        ("translate", tmp_path / "bundle", "--max-tokens", 4, "--json"),
        ("translate", tmp_path / "bundle", "--max-tokens", 4, "--stream"),
        ("score", tmp_path / "bundle", "--src", file, "--tgt", file, "--tokens"),
        ("score", tmp_path / "bundle", "--src", file, "--tgt", file, "--tokens", "--json"),
    ):
        done = run_here(*command, stdin=file.read_bytes(), encoding="ascii")
        assert "ü" in printed(done)[0] and printed(done) == printed(run_here(*command, stdin=file.read_bytes()))


@pytest.fixture
def client() -> Iterator[socket.socket]:
    """The far end of standard input, which fails rather than waits for ever."""
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 5, 0))
    far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 19)
    with pytest.MonkeyPatch.context() as patch, near, far, near.makefile("r", encoding="utf-8") as stdin:
        patch.setattr("sys.stdin", stdin)
        yield far


def test_what_has_come_is_not_held_back(client: socket.socket) -> None:
    groups = windows(1 << 30)
    client.sendall(b"one\ntwo\n")
    assert next(groups) == ["one", "two"]
    client.sendall(b"three\nfo")
    assert next(groups) == ["three"]
    # One read takes 65536 bytes; the beginning of a line behind them must not hold back those before.
    client.sendall(b"ur\n" + b"five\n" * 13105 + b"seventh\nei")
    assert next(groups) == ["four", *["five"] * 13105, "seventh"]
    client.sendall(b"ght\n\n\n")
    assert next(groups) == ["eight", "", ""]
    client.sendall(b"nine")
    client.shutdown(socket.SHUT_WR)
    assert list(groups) == [["nine"]]


def test_input_need_not_be_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\r\n\nthree")))
    assert [[line.strip() for line in window] for window in windows(9)] == [["one", "two"], ["", "three"]]


def test_windows_are_bounded_and_complete(client: socket.socket) -> None:
    lines = [b"x" * (i * 37 % 50) for i in range(20_000)] + [b""] * 5000 + [b"y" * 300_000, b"z"]
    sender = threading.Thread(target=lambda: (client.sendall(b"\n".join(lines)), client.shutdown(socket.SHUT_WR)))
    sender.start()
    found = list(windows(1000))
    sender.join()
    assert [line.encode() for window in found for line in window] == lines
    assert all(sum(len(line) + 1 for line in window[:-1]) < 1000 for window in found)
    assert len(found) < 1200


def test_a_bad_line_is_named_in_any_window(client: socket.socket) -> None:
    client.sendall(b"a\n" * 710 + b"\xc3\nb\n")
    client.shutdown(socket.SHUT_WR)
    found: list[str] = []
    with pytest.raises(DataError, match="line 711: not UTF-8"):
        for window in windows(100):
            found += window
    assert found == ["a"] * 710


def test_lines_have_a_longest(client: socket.socket) -> None:
    """What comes after the longest is not waited for: the line is refused while its sender goes on."""
    client.sendall(b"12345678\n12345\n\n" + b"1" * 9)
    found: list[str] = []
    with pytest.raises(DataError, match=r"^standard input, line 4: longer than 8 bytes: split it, or raise"):
        for window in windows(100, 8):
            found += window
    assert found == ["12345678", "12345", ""]
    client.sendall(b"1\n12345678")
    client.shutdown(socket.SHUT_WR)
    assert list(windows(100, 8)) == [["1", "12345678"]]


def test_nothing_after_a_line_that_is_too_long_is_read(client: socket.socket) -> None:
    """Neither the rest of what has come already, nor what comes later."""
    client.sendall(b"1\n123456789\n3\n" + b"x\n" * 40_000)
    client.shutdown(socket.SHUT_WR)
    found: list[str] = []
    with pytest.raises(DataError, match=r"^standard input, line 2: longer than 8 bytes"):
        for window in windows(100, 8):
            found += window
    assert found == ["1"]


def test_lines_of_many_pieces_have_a_longest(client: socket.socket) -> None:
    def send() -> None:
        with suppress(OSError):  # nobody reads to the end
            for _ in range(20):
                client.sendall(b"x" * 70_001)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(DataError, match="line 1: longer than 1000000 bytes"):
        list(windows(100, 1_000_000))
    client.shutdown(socket.SHUT_RDWR)
    sender.join()


def test_an_endless_line_is_an_error_at_once(bundle: Path) -> None:
    """Behind the results of the lines before it; neither kept nor split into tokens."""
    command = [*COMMAND, "translate", str(bundle), "--max-tokens", "1", "--threads", "1"]
    expected = subprocess.run(command, input=b"w5\nw6\n", capture_output=True, timeout=60).stdout
    text = f"(printf 'w5\\nw6\\n'; cat /dev/zero) | {shlex.join(command)}; ulimit -v"
    limited = f"ulimit -v 4000000; {text}"
    done = subprocess.run(["bash", "-c", limited], capture_output=True, timeout=60)
    assert done.stderr == b"error: standard input, line 3: longer than 1048576 bytes: split it, or raise " + (
        b"--max-line-bytes\n"
    )
    assert done.stdout == expected + b"4000000\n"


def test_the_longest_line_can_be_chosen(translate: Any) -> None:
    done = translate("--max-line-bytes", 6, stdin=b"w5 w6\nw5 w7\nw5 w6 w7\n")
    assert "line 3: longer than 6 bytes" in failed_line(done) and done.stdout.count(b"\n") == 2
    later = b"w5\n" * 30_000  # more than one read of the input
    assert translate("--max-line-bytes", 6, stdin=b"w5 w6\nw5 w6 w7\n" + later).stdout.count(b"\n") == 1
    wide = b"w5" + b" " * (2 << 20) + b"w6\n"
    assert "line 1: longer than 1048576 bytes" in failed_line(translate(stdin=wide))
    assert printed(translate("--max-line-bytes", 3 << 20, stdin=wide)) == printed(translate(stdin=b"w5 w6\n"))
    assert translate("--max-line-bytes", 0).returncode == 2


def test_input_that_breaks_off_is_named_after_all_before_it(
    client: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.read

    def broken(source: int, size: int) -> bytes:
        if not select.select([source], [], [], 0)[0]:
            raise OSError(errno.EIO, "Input/output error")
        return read(source, size)

    client.sendall(b"one\ntwo\nthr")
    monkeypatch.setattr("os.read", broken)
    found: list[str] = []
    with pytest.raises(DataError, match=r"^standard input, line 3: cannot be read: Input/output error: give a file or"):
        for window in windows(100):
            found += window
    assert found == ["one", "two"]


def read_line(process: subprocess.Popen[bytes]) -> bytes:
    """A line that must come within a minute."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 60)[0], "no answer"
    return process.stdout.readline()


def peak_kib(process: subprocess.Popen[bytes]) -> int:
    status = Path(f"/proc/{process.pid}/status")
    if not status.is_file():
        pytest.skip("peak memory is read from /proc")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
    assert found
    return int(found[1])


@pytest.mark.long
def test_lines_are_answered_one_by_one_and_forgotten(bundle: Path) -> None:
    """One process: single lines are answered while the input stays open, and 200,000 more need no more memory."""
    command = [*COMMAND, "translate", str(bundle), "--max-tokens", "1", "--threads", "1"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, bufsize=0, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        stdin, answers = process.stdin, []
        for text in (b"w5\n", b"w6 w7\n", b"w5\n", b"\n"):
            stdin.write(text)
            answers.append(read_line(process))
        assert answers[0] == answers[2] and answers[3] == b"\n"

        def feed(lines: int) -> None:
            sender = threading.Thread(target=lambda: [stdin.write(b"w5\n" * 1000) for _ in range(lines // 1000)])
            sender.start()
            size = lines * len(answers[0])
            while size:
                chunk = process.stdout.read(min(size, 1 << 16)) if process.stdout else b""
                assert chunk
                size -= len(chunk)
            sender.join()

        feed(20_000)
        before = peak_kib(process)
        feed(200_000)
        assert peak_kib(process) - before < 8000, "not 40 bytes a line"
        stdin.write(b"w6 w7")
        stdin.close()
        assert process.stdout.read() == answers[1]
        assert process.stderr.read() == b"220004 outputs were cut off at 1 tokens or another limit\n"
    assert process.returncode == 0


@pytest.mark.parametrize("more", ["", "--stream", "--json --beams 2"])
def test_a_broken_pipe_ends_endless_input_quietly(bundle: Path, more: str) -> None:
    command = f"yes w5 | {' '.join(COMMAND)} translate {bundle} --max-tokens 1 --threads 1 {more} | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=120)
    assert done.stdout.count(b"\n") == 1 and done.stderr == b""


# Scores


@pytest.fixture
def pairs(tmp_path: Path) -> tuple[Path, Path]:
    """Sources and targets, an empty one on either side."""
    return (
        write(tmp_path / "src.txt", "w5 w6", "", "w7 w8 w9", "w10"),
        write(tmp_path / "tgt.txt", "w20 w21", "w5", "", "w22 zebra"),
    )


def test_scores_are_the_sums_of_their_tokens(bundle: Path, pairs: tuple[Path, Path]) -> None:
    command = ("score", bundle, "--src", pairs[0], "--tgt", pairs[1], "--threads", 1)
    totals = printed(run_here(*command))
    rows = rows_of(run_here(*command, "--json", "--tokens"))
    assert totals == [f"{row['score']:.6f}" for row in rows]
    pieces = [["w20", "w21", SPECIALS[3]], ["w5", SPECIALS[3]], [SPECIALS[3]], ["w22", SPECIALS[0], SPECIALS[3]]]
    assert [[piece for piece, _ in row["tokens"]] for row in rows] == pieces
    assert all(row["score"] == sum(value for _, value in row["tokens"]) for row in rows)
    for line, row in zip(printed(run_here(*command, "--tokens")), rows, strict=True):
        fields = [f"{row['score']:.6f}", *(f"{piece} {value:.6f}" for piece, value in row["tokens"])]
        assert line.split("\t") == fields
    plain = rows_of(run_here(*command, "--json"))
    assert [row["score"] for row in plain] == [row["score"] for row in rows]
    assert all(row["tokens"] == [] for row in plain)
    eager = rows_of(run_here(*command, "--json", "--backend", "eager"))
    assert [row["score"] for row in eager] == pytest.approx([row["score"] for row in rows], abs=1e-4)


def test_scores_of_compressed_files_and_of_several_windows(
    bundle: Path, pairs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = printed(run_here("score", bundle, "--src", pairs[0], "--tgt", pairs[1]))
    zipped = [path.with_suffix(".txt.gz") for path in pairs]
    for path, gz in zip(pairs, zipped, strict=True):
        gz.write_bytes(gzip.compress(path.read_bytes().replace(b"\n", b"\r\n")))
    monkeypatch.setattr("tformer_deploy.cli.score.WINDOW", 3)
    found = printed(run_here("score", bundle, "--src", zipped[0], "--tgt", zipped[1]))
    assert [float(total) for total in found] == pytest.approx([float(total) for total in expected], abs=2e-6)


def test_scores_of_bad_files_are_one_clear_line(
    bundle: Path, pairs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tformer_deploy.cli.score.WINDOW", 2)

    def failure(src: Path, tgt: Path) -> str:
        return failed_line(run_here("score", bundle, "--src", src, "--tgt", tgt))

    short = write(tmp_path / "short.txt", "w5", "w6", "w7")
    done = run_here("score", bundle, "--src", pairs[0], "--tgt", short)
    assert f"{pairs[0]} has 4 lines, {short} 3: they must be parallel" in failed_line(done) and done.stdout == b""
    assert f"{short} has 3 lines, {pairs[1]} 4" in failure(short, pairs[1])
    long = write(tmp_path / "long.txt", "w5", "w5 " * 23, "w5 " * 24, "w5")
    assert "line 3: a target of 25 tokens exceeds the limit of 24" in failure(pairs[0], long)
    assert "line 3: a source of 25 tokens exceeds the limit of 24" in failure(long, pairs[1])
    assert "nowhere: no such file" in failure(pairs[0], tmp_path / "nowhere")
    (tmp_path / "latin.txt").write_bytes(b"w5\nw5\nw5\nw\xff\n")
    assert "latin.txt:4: not UTF-8" in failure(pairs[0], tmp_path / "latin.txt")
    empty = write(tmp_path / "empty.txt")
    assert printed(run_here("score", bundle, "--src", empty, "--tgt", empty)) == []


def test_scores_into_a_broken_pipe_end_quietly(bundle: Path, pairs: tuple[Path, Path]) -> None:
    command = f"{' '.join(COMMAND)} score {bundle} --src {pairs[0]} --tgt {pairs[1]} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=120)
    assert done.stdout == done.stderr == b""


def test_score_is_a_command_of_its_own(bundle: Path, pairs: tuple[Path, Path]) -> None:
    done = run_process("score", bundle, "--src", pairs[0], "--tgt", pairs[1])
    assert done.returncode == 0 and done.stderr == b"" and len(done.stdout.splitlines()) == 4


def test_a_misspelled_option_is_told_its_name(bundle: Path) -> None:
    line = failed_line(run_here("translate", bundle, "--set", "beam=3"))
    assert "unknown key of [decoding] 'beam': did you mean 'beams'?" in line
