"""The command line as its users see it: pipes, JSON, exit codes, one-line errors."""

from __future__ import annotations

import errno
import json
import os
import platform
import pty
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tformer_deploy import __version__
from tformer_deploy.bundle.recipe import named_recipes
from tformer_deploy.cli.export import complete_recipe
from tformer_deploy.cli.options import among
from tformer_deploy.importers.formats import FORMATS

from .command import COMMAND, Done, failed_line, printed, run_here, run_process
from .mutations import break_graph, scale_one_weight
from .params import long_but

VERBS = ["init", "train", "export", "translate", "encode", "score", "check", "bench", "inspect", "corpus"]
VERBS += ["prepare", "bleu", "student"]


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_an_example(verb: str) -> None:
    done = run_here(verb, "--help")
    assert done.returncode == 0
    assert f"tformer {verb} " in done.stdout.decode().split("Example: ")[1]


def test_installed_script() -> None:
    done = subprocess.run([Path(sys.executable).parent / "tformer", "--help"], capture_output=True, timeout=60)
    assert all(verb in done.stdout.decode() for verb in VERBS)


def test_translate_pipes(bundle: Path) -> None:
    done = run_process("translate", bundle, "--max-tokens", 6, stdin="w5 w6\n\n  w7 über\nw5 w6".encode())
    assert done.returncode == 0
    assert done.stderr == b"3 outputs were cut off at 6 tokens or another limit\n"
    lines = done.stdout.decode("utf-8").split("\n")
    assert len(lines) == 5 and lines[1] == "" and lines[4] == "" and lines[0] == lines[3] != ""
    assert run_process("translate", bundle).stdout == b""


def test_eager_and_ort_print_the_same(bundle: Path) -> None:
    text = "\n".join(" ".join(f"w{4 + (i * j) % 50}" for j in range(1, 2 + i % 20)) for i in range(30)).encode()
    for options in ((), ("--sample", "--seed", 5), ("--beams", 3, "--n-best", 2, "--max-tokens", 9)):
        done = [run_here("translate", bundle, *options, "--backend", name, stdin=text) for name in ("ort", "eager")]
        # Scores have digits of their own.
        ort, eager = ([line.split(" ||| ")[:2] for line in printed(each)] for each in done)
        assert ort == eager and len(ort) in (30, 60)


def test_check_says_what_it_found(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("w5 w6 w7\n\nw8\n")
    done = run_here("check", bundle, "--backend", "ort", "--src", tmp_path / "lines.txt", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["passed"] and report["sentences"] == 2
    (engine,) = report["engines"]
    assert engine["engine"] == "ort" and engine["passed"]
    assert [(each["mode"], each["equal"]) for each in engine["outputs"]] == [
        ("greedy", 2),
        ("beam", 2),
        ("sampling", 2),
    ]


def test_check_refuses_bad_options_before_it_runs(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("eager PyTorch has run")

    monkeypatch.setattr("tformer_deploy.check.Gate.reference", forbidden)
    lines, short = tmp_path / "lines.txt", tmp_path / "short.txt"
    lines.write_text("w5\nw6\n")
    short.write_text("w5\n")
    for arguments, words in (
        (["--backend", "ort", "--backend", "rot"], "unknown backend 'rot': did you mean 'ort'"),
        (["--src", lines, "--tgt", short], "lines.txt has 2 lines, "),
        (["--tgt", lines], "--tgt needs the sources it translates: add --src or --reference"),
        (
            ["--html", tmp_path / "nowhere/page.html"],
            "page.html cannot be written: name a file in a folder that exists",
        ),
        (["--save-reference", tmp_path], "cannot be written"),
        (["--save-reference", lines / "eager.npz"], "cannot be written"),
        (["--save-reference", tmp_path / "eager.npz", "--html", tmp_path / "page.html"], "--html needs a check"),
    ):
        assert words in failed_line(run_here("check", bundle, *arguments))
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    monkeypatch.delitem(sys.modules, "tformer_deploy.train.metrics", raising=False)
    assert "'.[train]'" in failed_line(run_here("check", bundle, "--src", lines, "--tgt", lines))
    assert sorted(tmp_path.iterdir()) == [lines, short]


def test_a_report_outlives_its_page(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tformer_deploy.check.page.check_page", full)
    (tmp_path / "lines.txt").write_text("w5\n")
    small = ("--src", tmp_path / "lines.txt", "--max-tokens", 3, "--invariance", 1)
    done = run_here("check", bundle, *small, "--html", tmp_path / "page.html", "--json")
    assert "No space left" in failed_line(done)
    assert json.loads(done.stdout)["passed"]


def test_failed_check_exits_with_3(bundle: Path, run: Path, tmp_path: Path) -> None:
    broken = break_graph(bundle, tmp_path / "bundle", "decoder_step", scale_one_weight)
    done = run_process("check", broken, "--checkpoint", run)
    assert done.returncode == 3
    assert "FAILED: scores differ" in done.stdout.decode() and done.stdout.decode().splitlines()[-1] == "failed"


def test_what_has_no_original_is_refused_before_the_check(bundle: Path, tmp_path: Path) -> None:
    saved = tmp_path / "reference"
    done = run_here("check", bundle, "--original", "--save-reference", saved, "--backend", "ort")
    assert "was not imported: there is no original to compare with" in failed_line(done) and not saved.exists()
    done = run_here("check", bundle, "--original", "--reference", saved)
    assert "--original runs the checkpoint in PyTorch, which --reference replaces" in failed_line(done)


def test_inspect_describes_both_kinds(bundle: Path, run: Path) -> None:
    text = run_here("inspect", bundle).stdout.decode()
    assert "every hash verified" in text and "opset 23" in text and "encoder.onnx" in text
    assert "check      passed, " in text and "ort: greedy " in text and " equal, scores within " in text
    report = json.loads(run_here("inspect", bundle, "--json").stdout)["check"]
    assert report["passed"] and report["engines"][0]["engine"] == "ort"
    assert json.loads(run_here("inspect", run, "--json").stdout)["model"]["d_model"] == 32


def test_init_is_seeded(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        done = run_here(
            "init", "--out", tmp_path / name, "--preset", "tiny", "--vocab-size", 40, "--seed", seed, "--json"
        )
        assert json.loads(done.stdout)["parameters"] == 1_330_688
    a, b, c = ((tmp_path / name / "weights/random.safetensors").read_bytes() for name in "abc")
    assert a == b != c
    assert "--force" in failed_line(run_here("init", "--out", tmp_path / "a", "--preset", "tiny", "--vocab-size", 40))
    refused = failed_line(run_here("init", "--out", tmp_path / "d", "--set", "train.lr=5"))
    assert refused == "error: train.lr: nothing is trained here: leave it out" and not (tmp_path / "d").exists()
    assert failed_line(run_here("import", "hf", "none", "--out", tmp_path / "d", "--set", "train.lr=5")) == refused
    (tmp_path / "config.toml").write_text("[train]\nlr = 0.1\n")
    refused = failed_line(run_here("init", "--out", tmp_path / "d", "--config", tmp_path / "config.toml"))
    assert refused == "error: train.lr: nothing is trained here: leave it out"


BAD_INPUT: list[tuple[list[str], bytes, list[str]]] = [
    (["translate", "BUNDLE"], b"w5 " * 40, ["line 1", "41 tokens", "limit of 24"]),
    (["translate", "BUNDLE"], b"w5\nw\xff\n", ["line 2", "UTF-8"]),
    (
        ["translate", "BUNDLE", "--backend", "trt8"],
        b"w5",
        ["unknown backend", "valid: cpp, eager, eager@cuda, openvino, openvino:bf16, ort"],
    ),
    (["translate", "EMPTY"], b"w5", ["is not a bundle"]),
    (["translate", "NOWHERE"], b"w5", ["is not a bundle"]),
    (["translate", "RUN"], b"w5", ["is not a bundle", "it is a run folder: make a bundle of it with tformer export"]),
    (["translate", "BUNDLE", "--backend", "eager", "--checkpoint", "NOWHERE"], b"w5", ["--checkpoint"]),
    (["translate", "BUNDLE", "--checkpoint", "RUN"], b"w5", ["--checkpoint", "only eager reads it"]),
    (["encode", "BUNDLE", "--checkpoint", "RUN"], b"w5", ["only eager reads it"]),
    (["bench", "BUNDLE", "--backend", "ort", "--checkpoint", "RUN"], b"", ["only eager reads it"]),
    (["check", "BUNDLE", "--beams", "31"], b"", ["--beams 31: a variant of this bundle takes at most 30"]),
    (["check", "BUNDLE", "--max-tokens", "25"], b"", ["--max-tokens 25: a variant of this bundle takes at most 24"]),
    (["check", "BUNDLE", "--html", "PAGE", "--save-reference", "PAGE", "--backend", "ort"], b"", ["is named twice"]),
    (["check", "BUNDLE", "--src", "NOWHERE"], b"", ["no such file"]),
    (["check", "BUNDLE", "--checkpoint", "EMPTY"], b"", ["is not a checkpoint"]),
    (["export", "BUNDLE", "--out", "NOWHERE"], b"", ["is not a checkpoint"]),
    (["export", "RUN", "--out", "NOWHERE", "--recipe", "fp23"], b"", ["unknown recipe 'fp23'", "'fp32'"]),
    (["export", "RUN", "--out", "BUNDLE"], b"", ["exists already", "--force"]),
    (["inspect", "EMPTY"], b"", ["is not a checkpoint"]),
]


@pytest.mark.parametrize(("arguments", "stdin", "words"), BAD_INPUT, ids=lambda value: "-".join(map(str, value))[:40])
def test_bad_input_is_one_clear_line(
    arguments: list[str], stdin: bytes, words: list[str], bundle: Path, run: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    places = {
        "BUNDLE": bundle,
        "RUN": run,
        "EMPTY": tmp_path / "empty",
        "NOWHERE": tmp_path / "nowhere",
        "PAGE": tmp_path / "page",
    }
    line = failed_line(run_here(*(places.get(argument, argument) for argument in arguments), stdin=stdin))
    assert all(word in line for word in words), line
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_recipe_with_unknown_key_names_the_nearest(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("presicion = 'fp32'\n")
    line = failed_line(run_here("export", run, "--out", tmp_path / "out", "--recipe", tmp_path / "mine.toml"))
    assert "did you mean 'precision'" in line and not (tmp_path / "out").exists()


def test_full_disk_leaves_nothing(run: Path, bundle: Path, tmp_path: Path) -> None:
    """A file-size limit stands in for a full disk: the write fails in the same place."""
    whole = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, whole[1]))
    try:
        done = run_here("export", run, "--out", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, whole)
    assert "make room or choose another folder" in failed_line(done)
    assert list(tmp_path.iterdir()) == []


def test_wrong_usage_is_2(bundle: Path) -> None:
    assert run_here("translate", bundle, "--no-such-option").returncode == 2
    assert run_here("trunslate").returncode == 2


def test_moved_bundle_still_translates(bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle, tmp_path / "elsewhere/bundle")
    done = run_here("translate", tmp_path / "elsewhere/bundle", "--max-tokens", 3, stdin=b"w5\n")
    assert done.returncode == 0 and done.stdout.strip()
    assert "--checkpoint" in failed_line(run_here("check", tmp_path / "elsewhere/bundle"))


# Streams and errors of the system


def shell(command: str, **options: Any) -> Done:
    """Run a line of the shell, in which `tformer` is the command."""
    text = command.replace("tformer", shlex.join(COMMAND))
    return subprocess.run(["bash", "-c", text], capture_output=True, timeout=120, **options)


@pytest.mark.parametrize("closed", long_but(["2>&-", "0</dev/null 2>&-", "2>/dev/full"], "2>&-", "2>/dev/full"))
def test_nothing_depends_on_standard_error(bundle: Path, closed: str) -> None:
    expected = run_here("inspect", bundle)
    done = shell(f"tformer inspect {bundle} {closed}")
    assert (done.returncode, done.stdout) == (0, expected.stdout)
    for command, code in (("inspect nowhere", 1), ("inspect", 2), ("--nonsense", 2), ("translate nowhere", 1)):
        done = shell(f"tformer {command} {closed}")
        assert (done.stdout, done.stderr) == (b"", b"")
        assert done.returncode == (1 if "full" in closed else code)  # there the library's own message fails


@pytest.mark.parametrize("backend", long_but(["ort", "eager"], "ort"))
def test_a_translation_does_without_standard_error(bundle: Path, backend: str) -> None:
    command = f"printf 'w5\\nw6\\n' | tformer translate {bundle} --max-tokens 4 --backend {backend}"
    expected = shell(command)
    assert expected.returncode == 0 and expected.stdout.count(b"\n") == 2 and expected.stderr
    for closed in ("2>&-", "2>/dev/full"):
        done = shell(f"{command} {closed}")
        assert (done.returncode, done.stdout) == (0, expected.stdout)


def test_closed_descriptors_are_not_taken(bundle: Path) -> None:
    """By the bundle's files, which would get what is printed."""
    script = (
        "import os, sys; from tformer_deploy.cli.lines import open_streams; open_streams(); "
        "places = [os.readlink(f'/proc/self/fd/{n}') for n in range(3)]; "
        "print(places, file=open(sys.argv[1], 'w')); "
        "print('lost', file=sys.stderr); os.system('cat; echo lost; echo lost >&2')"
    )
    with tempfile.NamedTemporaryFile() as file:
        command = f"{sys.executable} -c {shlex.quote(script)} {file.name} 0<&- 1>&- 2>&-"
        done = subprocess.run(["bash", "-c", command], timeout=60)
        assert done.returncode == 0 and file.read() == b"['/dev/null', '/dev/null', '/dev/null']\n"
    done = shell(f"tformer translate {bundle} 0<&-")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert shell(f"tformer translate {bundle} 0<&- 1>&- 2>&-").returncode == 1, "standard output is wanted"


def test_an_output_that_is_full_or_gone(bundle: Path) -> None:
    for command in (f"translate {bundle} --max-tokens 2", f"inspect {bundle} --json", "--help"):
        done = shell(f"echo w5 | tformer {command} >/dev/full")
        line = failed_line_at_the_end(done)
        assert line.removeprefix("error: ").removeprefix("standard output: ") == (
            "No space left on device: make room or choose another folder"
        )
        done = shell(f"echo w5 | tformer {command} | true; exit ${{PIPESTATUS[1]}}")
        assert done.returncode in (0, 1) and b"error" not in done.stderr and b"Exception" not in done.stderr


def failed_line_at_the_end(done: Done) -> str:
    """The error line of a command that may have had something else to say before."""
    lines = done.stderr.decode().splitlines()
    assert done.returncode == 1 and sum(line.startswith("error: ") for line in lines) == 1 and len(lines) <= 2, lines
    return lines[-1]


@pytest.mark.parametrize("blocking", ["stdin", "stdout"])
def test_streams_need_not_block(bundle: Path, blocking: str) -> None:
    """The caller, such as Node, sets O_NONBLOCK; what is late is waited for, on either side."""
    command = [*COMMAND, "translate", str(bundle), "--max-tokens", "24", "--threads", "1", "--json"]
    expected = subprocess.run(command, input=b"w5 w6\n" * 400, capture_output=True, timeout=60).stdout
    (read_in, write_in), (read_out, write_out) = os.pipe(), os.pipe()
    os.set_blocking(read_in if blocking == "stdin" else write_out, False)
    with subprocess.Popen(command, stdin=read_in, stdout=write_out, stderr=subprocess.PIPE) as process:
        os.close(read_in)
        os.close(write_out)
        for part in (b"w5 ", b"w6\n" + b"w5 w6\n" * 399):
            time.sleep(0.8)
            os.write(write_in, part)
        os.close(write_in)
        time.sleep(1)  # longer than the pipe has room
        with os.fdopen(read_out, "rb") as output:
            assert len(expected) > 1 << 16 and output.read() == expected
        assert process.stderr is not None and b"error" not in process.stderr.read()
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_while_waiting_is_quiet(bundle: Path, number: int) -> None:
    """And what else ends a process from outside."""
    command = [*COMMAND, "translate", str(bundle), "--max-tokens", "1", "--threads", "1"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(
        command, bufsize=0, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler), **pipes
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write(b"w5\n")
        assert process.stdout.readline()
        process.send_signal(number)
        assert process.wait(30) == 130 and process.stdout.read() == process.stderr.read() == b""


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_removes_what_an_export_has_begun(run: Path, tmp_path: Path, number: int) -> None:
    as_usual = ["env", "--default-signal=HUP"]  # nohup has programs ignore it
    command = [*as_usual, *COMMAND, "export", str(run), "--out", str(tmp_path / "bundle")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while not list(tmp_path.glob(".bundle.*.tmp/*")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(60) == 130 and process.stderr is not None and process.stderr.read() == b""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "x.en"), "x.en: Permission denied: get permission for it"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x"), "x: No such file or directory: check the "),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "x"), "x: Is a directory: name a file"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "x"), "x: Not a directory: choose another folder"),
        (OSError(errno.ENOSPC, "No space left on device", "x"), "x: No space left on device: make room or choose "),
        (OSError(errno.EROFS, "Read-only file system", "x"), "x: Read-only file system: choose another folder"),
        (OSError(errno.EIO, "Input/output error", "x"), "x: Input/output error: check the file and its disk"),
        (OSError(errno.EMFILE, "Too many open files", "x"), "x: Too many open files: raise the limit, ulimit -n"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x"), "x: File name too long: use a shorter name"),
        (OSError(errno.EXDEV, "Invalid link", "a", None, "b"), "a: b: Invalid link: check the file"),
        (OSError("odd"), "odd: check the file and its disk"),
        (MemoryError(), "out of memory: ask for less at a time"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory: ask for less at a time"),
        (
            ValueError("embedded\nnull byte"),
            "a bug in tformer, ValueError: embedded null byte: run it with tformer",
        ),
        (RecursionError("too deep"), "a bug in tformer, RecursionError: too deep: "),
        (
            UnicodeEncodeError("utf-8", "x\udcff", 1, 2, "surrogates not allowed"),
            "a bug in tformer, UnicodeEncodeError",
        ),
        (AssertionError(), "a bug in tformer, AssertionError: "),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_every_error_is_one_line(error: Exception, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("tformer_deploy.bundle.manifest.open_bundle", fail)
    assert failed_line(run_here("translate", "x")).startswith(f"error: {words}")
    with pytest.raises(type(error)):
        run_here("--debug", "translate", "x")


def test_paths_that_are_not_utf8_are_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the escapes of JSON, whoever refuses them or not."""
    out = tmp_path / os.fsdecode(b"r\xff")
    assert f"{tmp_path}/r\\" in failed_line(run_here("inspect", out))
    assert run_here("inspect", out, "--nonsense").returncode == 2
    monkeypatch.setattr("tformer_deploy.train.runs.init_checkpoint", lambda *_: 5)
    small = ("init", "--preset", "tiny", "--vocab-size", 60, "--out", out)
    assert printed(run_here(*small)) == [f"{tmp_path}/r\\udcff: 5 parameters"]
    for encoding in ("utf-8", "ascii"):
        (line,) = printed(run_here(*small, "--json", encoding=encoding))
        assert json.loads(line) == {"out": str(out), "parameters": 5}


def test_arguments_need_not_be_utf8(bundle: Path) -> None:
    bad = os.fsdecode(b"w\xff")
    for option in ("--first-token", "--suppress", "--end-token"):
        assert "'w\\udcff' is not in the vocabulary" in failed_line(run_here("translate", bundle, option, bad))
    for option in ("--prefix", "--allowed", "--backend", "--variant", "--device", "--set"):
        assert "w\\udcff" in failed_line(run_here("translate", bundle, option, bad))


def test_versions_are_told_without_importing(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run_process("--version")
    lines = dict(line.split(" ") for line in printed(done))
    assert lines["tformer"] == __version__ and lines["python"] == platform.python_version()
    assert lines["onnx"] == metadata.version("onnx") and lines["torch"] == metadata.version("torch")
    assert "tensorrt-rtx-cu13" in lines or not find_spec("tensorrt_rtx")
    code = (
        "import sys\nsys.argv = ['tformer', '--version']\nfrom tformer_deploy.cli import main\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'onnx', 'onnxruntime', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    assert done.stderr == b"[]\n"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("tformer tra", {"train", "translate"}),
        ("tformer export --rec", {"--recipe"}),
        ("tformer export --recipe int", {"int4", "int8", "int8-latency"}),
    ],
)
def test_the_shell_completes(typed: str, expected: set[str]) -> None:
    """As the line that `--install-completion` adds to a bash asks it."""
    words = typed.split(" ")
    asked = {"_TFORMER_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    tformer = Path(sys.executable).parent / "tformer"
    done = subprocess.run([tformer], capture_output=True, env={**os.environ, **asked}, timeout=60, text=True)
    assert set(done.stdout.split()) == expected and done.stderr == ""
    in_bash = ["bash", "-c", f"{tformer} --show-completion; exit $?"]  # it asks for the shell that it is called from
    shown = subprocess.run(in_bash, capture_output=True, timeout=60, text=True, check=True)
    assert "_TFORMER_COMPLETE=complete_bash" in shown.stdout


def test_ctrl_c_before_the_command_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tformer_deploy.cli.app", stopped)
    assert run_here("--version").returncode == 130


@pytest.mark.parametrize("verb", [("init", "--preset", "tiny"), ("train", "--task", "copy")], ids=lambda verb: verb[0])
def test_no_folder_is_not_the_current_one(
    verb: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_here(*verb, "--out", "")
    assert done.returncode == 2 and b"it is empty: name a folder, or . for this one" in done.stderr
    assert not list(tmp_path.iterdir())


def on_a_terminal(command: list[str], stdin: bytes, both: bool) -> tuple[str, str]:
    """What a command writes to a terminal for standard error, and standard output if `both`; else, to a pipe."""
    leader, terminal = pty.openpty()
    out = terminal if both else subprocess.PIPE
    shown: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # the end of a terminal
            while part := os.read(leader, 1 << 16):
                shown.append(part)

    env = {**os.environ, "TERM": "xterm"}  # a dumb one shows no bar
    with subprocess.Popen([*COMMAND, *command], stdin=subprocess.PIPE, stdout=out, stderr=terminal, env=env) as process:
        os.close(terminal)
        reader = threading.Thread(target=read)
        reader.start()
        piped, _ = process.communicate(stdin, timeout=120)
        reader.join()
    os.close(leader)
    assert process.returncode == 0, shown
    return b"".join(shown).decode(), (piped or b"").decode()


def test_progress_on_a_terminal_shares_no_line_with_results(bundle: Path) -> None:
    command = ["translate", str(bundle), "--max-tokens", "3"]
    shown, _ = on_a_terminal(command, b"w5 w6\nw7\n", both=True)
    assert "\x1b" not in shown, "no bar where results go to the same terminal"
    bar, results = on_a_terminal(command, b"w5 w6\nw7\n", both=False)
    assert "lines" in bar and results.splitlines() == shown.splitlines()[:2]


@pytest.mark.long
def test_progress_is_shown_where_results_go_to_a_file(bundle: Path, tmp_path: Path) -> None:
    command = ["encode", str(bundle), "--backend", "eager", "--out", str(tmp_path / "v.npy")]
    bar, _ = on_a_terminal(command, b"w5 w6\nw7\n", both=True)
    assert "lines" in bar and "2 lines of" in bar


@pytest.mark.long
def test_progress_names_what_runs(bundle: Path) -> None:
    bar, _ = on_a_terminal(["check", str(bundle), "--invariance", "2"], b"", both=False)
    assert "check: eager PyTorch" in bar and "check: ort" in bar


def test_help_lists_whole_sentences_recipes_and_formats() -> None:
    listed = run_here("--help").stdout.decode()
    assert "..." not in listed.partition("Commands:")[2]
    assert " ".join(listed.split()).count("compare every token with eager PyTorch") == 1
    recipes = "".join(run_here("export", "--help").stdout.decode().split())  # a name may go on in the next line
    assert all(name in recipes for name in named_recipes())
    formats = "".join(run_here("import", "--help").stdout.decode().split())
    assert "".join(among(FORMATS).split()) in formats
    assert [name for name, _ in complete_recipe("native-int")] == [
        "native-int4",
        "native-int8",
        "native-int8-bf16-cache",
        "native-int8-trained",
    ]
