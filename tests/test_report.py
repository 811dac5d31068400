"""The pages of check and bench in a real browser, and what is said where they cannot be made."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from tformer_deploy.bench import page as bench
from tformer_deploy.bench.measure import Sample
from tformer_deploy.bench.plan import Point
from tformer_deploy.bench.report import BenchReport as Benchmark
from tformer_deploy.bench.report import EngineFigures as Measured
from tformer_deploy.bench.report import Latency, NodeKind, PointReport, Spread
from tformer_deploy.bench.roofline import Bound
from tformer_deploy.check import page as check

from .browser import BROWSER, needs_browser
from .command import failed_line
from .test_check_html import Page, engine, report

LIGHT, DARK = (255, 255, 255), (0x14, 0x17, 0x1B)


def benchmark(*names: str) -> Benchmark:
    """Two engines at four points."""
    found = Benchmark({"processor": "A processor", "cores": "2"}, 1, 1, 5)
    for n, name in enumerate(names):
        found.engines.append(Measured(name, "fp32", 30.0, 40.0, 90.0, 7.0))
        for point in [Point(batch, 1, 20, tokens) for batch in (1, 8) for tokens in (8, 16)]:
            samples = [Sample(10.0 + n, 1.0, 2.0, [1.0 + n] * point.new_tokens, 0.1, point.batch * point.new_tokens)]
            found.points.append(PointReport.of(name, point, samples))
            found.points[-1].step_bound = found.points[-1].encoder_bound = Bound(1, 1, 1.0, 0.5, "arithmetic")
            found.points[-1].kinds = [NodeKind("encoder", kind, 2.0 + n, 1.0) for kind in ("MatMul", "Softmax")]
    found.points.sort(key=lambda each: str(each.point))
    return found


def pages() -> dict[str, str]:
    broken = engine("trt", failures=["scores differ"], blame="sentence 1, token 2, hidden")
    broken.layers[-2].difference = 1.0
    return {"check": check.check_page(report(broken, engine())), "bench": bench.bench_page(benchmark("ort", "eager"))}


@pytest.mark.long
@needs_browser
@pytest.mark.parametrize("name", ["check", "bench"])
def test_no_column_is_cut_off(name: str, tmp_path: Path) -> None:
    """On a screen of 1280 pixels: nothing is wider than what shows it, which a script around the page reads."""
    slow = benchmark("native:native-int8-bf16-cache", "trt")  # with every column, each as wide as they get
    for each in slow.points:
        each.latency_ms, each.device_ms = Latency(123456.0, 234567.0, 345678.0), 98765.0
        each.encoder_ms = each.first_token_ms = each.step_ms = Spread(12345.0, 23456.0, 34567.0)
    inside = html.escape(pages()[name] if name == "check" else bench.bench_page(slow))
    outside = f"""<!DOCTYPE html><body style="margin:0">
    <iframe srcdoc="{inside}" style="width:100%;height:9000px;border:0"></iframe><script>onload = () => {{
      const parts = [...document.querySelector("iframe").contentDocument.querySelectorAll(".scroll")];
      const cut = parts.filter(part => part.scrollWidth > part.clientWidth).length;
      document.title = parts.length + " parts, " + cut + " cut off";
    }}</script>"""
    (tmp_path / "around.html").write_text(outside)
    assert BROWSER
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,900", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "around.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    (found,) = re.findall(r"<title>(\d+) parts, 0 cut off</title>", done.stdout)
    assert int(found) >= 4


def test_a_page_says_first_what_was_found() -> None:
    found = benchmark("ort", "ort:int8")
    found.bundle, found.date = "bundles/de", "2026-11-26"
    for each in found.points:
        each.tokens_per_s = 300.0 if each.engine == "ort:int8" else 100.0
    page = Page(bench.bench_page(found)).text
    first = "Benchmark of bundles/de, 2026-11-26 ort:int8 is 3.0 times as fast as ort (batch 8"
    assert " ".join(page.split()).find(first) < 400 and first in " ".join(page.split())
    assert "GPU ms" not in page and "GPU ms" not in str(found), "no column without values"
    lossy = engine("ort:int8", quality={"greedy": {"eager": {"BLEU": 40.0}, "engine": {"BLEU": 39.95}}})
    page = " ".join(Page(check.check_page(report(engine(), lossy), "bundles/de")).text.split())
    assert "of bundles/de, 20" in page and "ort:int8: BLEU -0.05 (greedy)" in page


def seen(page: Path, *options: str, width: int = 1100) -> tuple[Any, str]:
    """The pixels of a page (height, width, 3), and what the browser complains of."""
    assert BROWSER
    image = page.with_suffix(".png")
    quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr")
    size = (f"--user-data-dir={page.parent / 'profile'}", f"--window-size={width},3000", f"--screenshot={image}")
    done = subprocess.run(
        [BROWSER, *quiet, *size, *options, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    pixels = np.rint(imread(image)[:, :, :3] * 255).astype(int)
    return pixels, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def count(pixels: Any, colour: tuple[int, int, int]) -> int:
    return int((np.abs(pixels - np.array(colour)).max(2) <= 2).sum())


@needs_browser
@pytest.mark.parametrize("name", ["check", "bench"])
def test_a_page_is_readable_in_light_and_dark(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.html"
    path.write_text(pages()[name])
    for options, ground, ink, curve in (
        ((), LIGHT, (0x1B, 0x1F, 0x24), (0x22, 0x62, 0xC6)),
        (("--blink-settings=preferredColorScheme=0",), DARK, (0xE4, 0xE7, 0xEB), (0x6E, 0xA8, 0xFE)),
    ):
        pixels, complaints = seen(path, *options)
        assert not complaints
        assert count(pixels, ground) > 0.5 * pixels[:, :, 0].size and tuple(pixels[0, 0]) == ground
        assert count(pixels, ink) > 500 and count(pixels, curve) > 200, "letters and curves follow the scheme"
        other = LIGHT if ground == DARK else DARK
        assert count(pixels, other) < 0.01 * pixels[:, :, 0].size, "no plot keeps the other scheme's ground"


@needs_browser
def test_a_browser_would_tell_of_what_a_page_must_not_do(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(pages()["check"].replace("</main>", '<img src="x.png"></main>'))
    assert "Content Security Policy" in seen(path)[1]


def test_the_page_of_a_benchmark() -> None:
    html = bench.bench_page(benchmark("ort", "<eager> & $x$"))
    page = Page(html)
    for words in (
        "A processor",
        "ms per step, batch 1, beams 1",
        "tokens/s, beams 1",
        "latency ms",
        "MatMul",
        "encoder",
    ):
        assert words in page.text
    assert "<eager> & $x$" in page.text and "<eager>" not in html
    assert page.text.count("Values") == 2 + 2 + 2, "behind every plot"
    assert all((value or "").startswith("#") for name, value in page.attributes if name in ("href", "xlink:href"))


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
@pytest.mark.parametrize("verb", ["check", "bench"])
def test_without_the_extra_nothing_begins(package: str, verb: str, tmp_path: Path) -> None:
    code = "import sys; sys.modules[sys.argv.pop(1)] = None; from tformer_deploy.cli import main; main()"
    command = [sys.executable, "-c", code, package, verb, tmp_path, "--html", tmp_path / "page.html"]
    done = subprocess.run(list(map(str, command)), capture_output=True, timeout=120)
    told = f"error: the package '{package}' is not installed: pip install '.[report]' in a checkout of tformer-deploy"
    assert failed_line(done) == told and done.stdout == b""
