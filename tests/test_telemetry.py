"""No command reports anything to anybody: no host is looked up, no connection made, no file left in the home folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from .command import COMMAND, Done
from .conftest import needs_vnni, write_lines

pytestmark = pytest.mark.long

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <resolv.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void note(const char *call, const char *name) {
    const char *path = getenv("NETWORK_LOG");
    char line[512];
    int length = snprintf(line, sizeof line, "%s %.400s\n", call, name ? name : "");
    int file = path ? open(path, O_WRONLY | O_APPEND | O_CREAT, 0600) : -1;
    if (file >= 0 && write(file, line, length) < 0) abort();
    if (file >= 0) close(file);
}

static int abroad(const struct sockaddr *to) {
    return to && (to->sa_family == AF_INET || to->sa_family == AF_INET6);
}

int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
    note("getaddrinfo", name);
    return EAI_FAIL;
}

#define LOOK_UP(call, parameters) \
    struct hostent *call parameters { note(#call, name); h_errno = NO_RECOVERY; return NULL; }
#define LOOK_UP_R(call, parameters) \
    int call parameters { note(#call, name); *found = NULL; *why = NO_RECOVERY; return EAGAIN; }
#define QUERY(call, parameters) int call parameters { note(#call, name); return -1; }
#define INTO struct hostent *into, char *room, size_t size, struct hostent **found, int *why
LOOK_UP(gethostbyname, (const char *name))
LOOK_UP(gethostbyname2, (const char *name, int family))
LOOK_UP_R(gethostbyname_r, (const char *name, INTO))
LOOK_UP_R(gethostbyname2_r, (const char *name, int family, INTO))
QUERY(res_query, (const char *name, int class, int type, unsigned char *answer, int size))
QUERY(res_search, (const char *name, int class, int type, unsigned char *answer, int size))
QUERY(res_nquery, (res_state state, const char *name, int class, int type, unsigned char *answer, int size))
QUERY(res_nsearch, (res_state state, const char *name, int class, int type, unsigned char *answer, int size))

int connect(int handle, const struct sockaddr *to, socklen_t size) {
    if (abroad(to)) { note("connect", ""); errno = ENETUNREACH; return -1; }
    int (*next)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "connect");
    return next(handle, to, size);
}

ssize_t sendto(int handle, const void *data, size_t length, int flags, const struct sockaddr *to, socklen_t size) {
    if (abroad(to)) { note("sendto", ""); errno = ENETUNREACH; return -1; }
    ssize_t (*next)(int, const void *, size_t, int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "sendto");
    return next(handle, data, length, flags, to, size);
}
"""
"""Stands before the system's library: writes down and refuses what leads into a network."""
CALLS = """
import contextlib, ctypes, socket
library = ctypes.CDLL(None)
for call in (
    lambda: socket.getaddrinfo("one.invalid", 1),
    lambda: library.gethostbyname(b"two.invalid"),
    lambda: library.res_query(b"three.invalid", 1, 1, bytes(99), 99),
    lambda: socket.socket().connect(("127.0.0.1", 9)),
    lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).sendto(b"x", ("::1", 9)),
    lambda: socket.socket(socket.AF_UNIX).connect("nowhere"),
):
    with contextlib.suppress(OSError):
        call()
"""
LOOK_UP = "import socket; socket.gethostbyname('four.invalid')"
SIZES = ("d_model=16", "d_ff=16", "encoder_layers=1", "decoder_layers=1")
SMALL = [part for size in SIZES for part in ("--set", f"model.{size}")]
RECIPES = ("fp32", "fp32-cpu", "int8", "int8-latency", "int4", "trt")
VARIANTS = RECIPES[:-1]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """The compiled library; None where there is no C compiler."""
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    if not shutil.which("cc"):
        return None
    library = folder / "shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, folder / "shim.c", "-ldl"], check=True, timeout=60)
    return library


class Place:
    """An empty home, an empty folder for temporary files, and a file of what asks for a network."""

    def __init__(self, folder: Path, shim: Path | None) -> None:
        self.home, self.temporary, self.log = folder / "home", folder / "temporary", folder / "network"
        self.home.mkdir(parents=True)
        self.temporary.mkdir()
        self.env = {"PATH": os.environ["PATH"], "HOME": str(self.home), "TMPDIR": str(self.temporary)}
        self.env |= {name: os.environ[name] for name in ("OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA")}
        if shim:
            self.env |= {"LD_PRELOAD": str(shim), "NETWORK_LOG": str(self.log)}

    def python(self, code: str, *arguments: object) -> Done:
        """Run a program."""
        command = [sys.executable, "-c", code, *map(str, arguments)]
        return subprocess.run(command, env=self.env, capture_output=True, check=True, timeout=120)

    def files(self) -> list[str]:
        """What was left in both folders."""
        folders = self.home, self.temporary
        return sorted(str(path.relative_to(each)) for each in folders for path in each.rglob("*") if path.is_file())

    def asked(self) -> list[str]:
        """What was looked up or connected to."""
        return self.log.read_text().splitlines() if self.log.exists() else []


Quiet = Callable[..., Done]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory, shim: Path | None) -> Quiet:
    """Run the real command, which must leave nothing and ask for nothing."""

    def run(*arguments: object, stdin: bytes = b"") -> Done:
        place = Place(tmp_path_factory.mktemp("place") / "place", shim)
        command = [*COMMAND, *map(str, arguments)]
        done = subprocess.run(command, env=place.env, input=stdin, capture_output=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert place.files() == []
        assert place.asked() == []
        return done

    return run


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text that the exported model knows."""
    return write_lines(tmp_path_factory.mktemp("lines") / "lines")


@pytest.fixture(scope="module")
def exported(quiet: Quiet, run: Path, lines: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with every variant and with lists, both made by the command."""
    out = tmp_path_factory.mktemp("quiet") / "bundle"
    quiet("export", run, "--out", out, "--src", lines, *(part for name in RECIPES for part in ("--recipe", name)))
    quiet("shortlist", out, "--src", lines, "--tgt", lines)
    return out


def test_the_network_is_watched(shim: Path | None, tmp_path: Path) -> None:
    """Else the other tests would pass whatever happens."""
    if not shim:
        pytest.skip("there is no C compiler 'cc' to watch look-ups with")
    place = Place(tmp_path / "place", shim)
    place.python(CALLS)
    place.python(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {LOOK_UP!r}], stderr=-3)")
    asked = ["getaddrinfo one.invalid", "gethostbyname two.invalid", "res_query three.invalid", "connect ", "sendto "]
    assert place.asked() == [*asked, "getaddrinfo four.invalid"]


def test_onnxruntime_reports_unless_told_otherwise(tmp_path: Path) -> None:
    """Why `engines.ort.library` alone may import it; if it stops, this can go."""
    place = Place(tmp_path / "place", None)
    place.python("import onnxruntime")
    found = [name for name in place.files() if "onnxruntime" in name]
    if not found:
        pytest.skip("this onnxruntime leaves nothing in the home folder")
    shutil.rmtree(place.home)
    shutil.rmtree(place.temporary)
    place.home.mkdir()
    place.temporary.mkdir()
    place.python("import tformer_deploy.engines.ort.library")
    assert place.files() == []


def test_train_reports_nothing(quiet: Quiet, tmp_path: Path) -> None:
    """It draws its curves, too."""
    (tmp_path / "text").write_text("".join(f"{a} {b}\n" for a in ("red", "green", "blue") for b in ("house", "tree")))
    texts = [part for flag in ("src", "tgt", "valid-src", "valid-tgt") for part in (f"--{flag}", tmp_path / "text")]
    quiet("train", "--out", tmp_path / "out", *texts, "--vocab-size", 30, "--updates", 2, *SMALL)
    assert (tmp_path / "out/metrics.png").exists()


def test_init_and_inspect_report_nothing(quiet: Quiet, exported: Path, tmp_path: Path) -> None:
    quiet("init", "--preset", "tiny", "--vocab-size", 60, "--out", tmp_path / "out", *SMALL)
    quiet("inspect", exported)


@pytest.mark.parametrize(
    "options",
    [
        *(["--variant", name] for name in VARIANTS),
        ["--backend", "ort:trt"],
        ["--backend", "eager"],
        ["--backend", "openvino"],
        ["--variant", "int8", "--shortlist"],
        ["--variant", "int4", "--workers", "2", "--beams", "3"],
    ],
    ids=" ".join,
)
def test_translate_reports_nothing(options: list[str], quiet: Quiet, exported: Path) -> None:
    if "openvino" in options and not find_spec("openvino"):
        pytest.skip("OpenVINO is not installed: pip install '.[openvino]'")
    if "--shortlist" in options:
        needs_vnni("int8")
    assert quiet("translate", exported, *options, stdin=b"w5 w6\nw7\n").stdout.count(b"\n") == 2


def test_score_and_check_report_nothing(quiet: Quiet, exported: Path, lines: Path, tmp_path: Path) -> None:
    (tmp_path / "few").write_text("w5 w6\nw7\n")
    quiet("score", exported, "--variant", "int8", "--src", lines, "--tgt", lines)
    page = tmp_path / "check.html"
    quiet("check", exported, "--backend", "ort", "--variant", "int8", "--src", tmp_path / "few", "--html", page)


def test_bench_reports_nothing(quiet: Quiet, exported: Path, tmp_path: Path) -> None:
    """Nor do its workers."""
    options = ["--backend", "ort", "--variant", "int8", "--profile", "--html", tmp_path / "bench.html"]
    quiet("bench", exported, *options, "--batch", 1, "--new-tokens", 2, "--rounds", 1)


def test_build_reports_nothing(quiet: Quiet, exported: Path, lines: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")
    quiet("build", exported, "--src", lines, "--profile", "1x1x24x24")


def test_no_thread_of_the_library_stays(exported: Path, tmp_path: Path) -> None:
    """Its telemetry has one, which ends with the process."""
    place = Place(tmp_path / "place", None)
    place.env["OPENBLAS_NUM_THREADS"] = "1"
    done = place.python(
        "import os, sys, time, tformer_deploy\n"
        "for variant in sys.argv[2:]:\n"
        "    with tformer_deploy.load(sys.argv[1], variant=variant, threads=1) as translator:\n"
        "        translator.translate(['w5 w6'])\n"
        "        end = time.monotonic() + 20\n"  # those that loaded the graphs may still be ending
        "        while len(os.listdir('/proc/self/task')) > 1 and time.monotonic() < end: time.sleep(0.01)\n"
        "        print(os.environ['ORT_DISABLE_TELEMETRY'], len(os.listdir('/proc/self/task')))\n",
        exported,
        "int8",
        *VARIANTS,
    )
    assert done.stdout.decode().split() == ["1", "1"] * (1 + len(VARIANTS))
    assert place.files() == []


def test_tests_and_benchmarks_import_it_from_there_too() -> None:
    root = Path(__file__).parent.parent
    own = re.compile(r"^\s*(import|from) onnxruntime\b", re.MULTILINE)
    files = [path for folder in ("tests", "benchmarks") for path in (root / folder).rglob("*.py")]
    stranger = root / "tests/test_feeding.py"  # a runtime that sees nothing of the package, and says no itself
    assert [path for path in files if own.search(path.read_text())] == [stranger]
    text = stranger.read_text()
    assert text.index('os.environ["ORT_DISABLE_TELEMETRY"] = "1"') < text.index("import onnxruntime")
