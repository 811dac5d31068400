"""The page of a parity report: well formed, self-contained, and telling the truth about odd numbers."""

from __future__ import annotations

import dataclasses
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from tformer_deploy.base.pages.figures import Decades
from tformer_deploy.base.pages.page import short_number
from tformer_deploy.bundle.recipe import Tolerance
from tformer_deploy.check.figures import layer_plot, step_plot
from tformer_deploy.check.page import MAX_ROWS, check_page
from tformer_deploy.check.report import EngineReport, Report
from tformer_deploy.check.results import Constants, Divergence, Entries, Layer, Outputs, StepDifference, Top1

NASTY = "<script>alert('x')</script> & \"q\" \x00 \udc80"
NAMES = ("encoder_embedding", "encoder_layer_0", "memory", "cross_k_0", "decoder_embedding", "hidden", "log_probs")


class Page(HTMLParser):
    """Refuses a page whose elements are not closed in order; collects tags, attributes and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert not self.open
        ids = [value for name, value in self.attributes if name == "id"]
        assert len(set(ids)) == len(ids)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        self.tags.append(tag)
        self.attributes += attrs

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if self.open[-1:] != ["style"] else ""


def engine(name: str = "ort", **values: object) -> EngineReport:
    found = EngineReport(name, encoder_max=8e-6, encoder_sentences=64, scores_max=1.7e-5, scores_count=1234)
    found.scores_mean, found.scores_p999 = 4e-7, 5.5e-6
    found.steps = [StepDifference(1e-6 * (n + 1), 1e-7, 1000 - 30 * n) for n in range(25)]
    found.layers = [Layer(layer, 1e-6, 2.0) for layer in NAMES]
    found.outputs = [Outputs(mode, "", 1000, 998, 2, score_max=1e-6) for mode in ("greedy", "beam", "sampling")]
    found.invariance = [Outputs("greedy", "alone", 100, 90, 1, 4, 5), Outputs("beam", "padded", 100, 100)]
    found.quality = {"greedy": {"eager": {"BLEU": 39.1}, "engine": {"BLEU": 39.05}}}
    for key, value in values.items():
        setattr(found, key, value)
    return found


def report(*engines: EngineReport, **values: object) -> Report:
    found = Report(1000, 13460, "corpus.en", "ab" * 32, {"beams": 5}, {"torch": "2"}, {"onnx": "1"})
    found.engines = list(engines)
    found.eager_invariance = [Outputs("greedy", "alone", 100, 99, 1)]
    for key, value in values.items():
        setattr(found, key, value)
    return found


def divergence(sentence: int, margin: float = 0.1) -> Divergence:
    return Divergence(sentence, "beam", "", 3, 17, -1, -0.25, math.nan, margin)


def svgs(page: str) -> list[ET.Element]:
    """The plots of a page; parsing refuses what is not well formed."""
    found = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    return [ET.fromstring(svg.replace("<svg ", '<svg xmlns:xlink="x" ', 1)) for svg in found]


def letters(svg: ET.Element) -> list[str]:
    return [text.text or "" for text in svg.iter("text")]


def placed(svg: ET.Element, colour: str) -> list[tuple[float, float]]:
    """Where the marks of a colour are."""
    marks = [use for use in svg.iter("use") if f"fill: var(--{colour})" in use.get("style", "")]
    return [(float(use.get("x", "")), float(use.get("y", ""))) for use in marks]


def test_the_text_lists_some_ties_of_each_kind() -> None:
    ties = [divergence(i) for i in range(7)] + [dataclasses.replace(divergence(9), mode="greedy")]
    lines = str(report(engine(ties=ties))).splitlines()
    assert sum("tie: beam" in line for line in lines) == 5 and sum("tie: greedy: sentence 10" in line for line in lines)
    assert "  2 further ties: --json and --html list all" in lines
    assert "further" not in str(report(engine(ties=ties[2:])))


def test_constants_entries_and_sizes_are_told() -> None:
    found = engine(
        constants=Constants(83, 83, ["encoder: val_44"]),
        vocabulary=[Entries("source", 32000, 2e-6, 7), Entries("target", 32001, 3e-3, 9)],
        sizes=[Outputs("wide beam", "", 3, 3), Outputs("greedy", "large", 512, 448, failed=64)],
        rows_max=1.5e-6,
    )
    page = check_page(report(found))
    text = Page(page).text
    assert "83 of 83 equal to the checkpoint's; 1 of other origin (encoder: val_44)" in text
    assert "Target entries, each once" in text and "32,001 ids" in text and "greedy, as many sentences as fit" in text
    assert f"Equal rows of a wide beam have scores within {short_number(1.5e-6)} of each other." in text
    lines = str(report(found))
    assert "constants         83 of 83" in lines and "large, greedy          448 of 512 rows the same" in lines
    assert "target entries    max difference 3.00e-03   32,001, each fed once" in lines
    skipped = engine(constants=Constants(skipped="no <onnx>"))
    assert "not compared: no &lt;onnx&gt;" in check_page(report(skipped))


def test_a_passing_report() -> None:
    page = check_page(report(engine()))
    text = Page(page).text
    assert "✓ PASSED" in text and "FAILED" not in text and "loosened" not in text
    for expected in ("corpus.en", "13,460", "abababababab", "fp32", "998 / 1,000", "1.70e-5", "39.05", "-0.05"):
        assert expected in text
    # The invariance check: the engine's own figures and eager's.
    for expected in ("90 / 100", "4 failed", "5 as in eager", "eager 99\u00a0/\u00a0100"):
        assert expected in text


def test_a_failing_report_tells_where() -> None:
    failures = [f"failure number {n}" for n in range(9)]
    text = Page(check_page(report(engine(failures=failures, blame="sentence 4, encoder_layer_2")))).text
    assert "✗ FAILED" in text and "PASSED" not in text
    assert "First difference: sentence 4, encoder_layer_2" in text and "5 more failures" in text
    assert all(text.count(failure) == 1 for failure in failures)


def test_no_engine_is_a_failure() -> None:
    assert "✗ FAILED" in check_page(report()) and "No engine was checked" in check_page(report())


def test_decisions_calibration_and_shortlists_are_told() -> None:
    few = Top1(steps=1000, equal=850, near=60)
    found = report(
        engine(top1=few, tolerance=Tolerance(top1=0.97)), shortlist="lists.bin", calibration="calibrated <so>"
    )
    page = check_page(found)
    assert marked(page, "Decisions") == ["91.00%<small>at least 97.00%</small>"] and "calibrated &lt;so&gt;" in page
    assert "With lists.bin: both sides" in page
    assert marked(check_page(report(engine(top1=few, tolerance=Tolerance(top1=0.9)))), "Decisions") == []


def test_several_engines_have_a_summary_and_a_section_each() -> None:
    page = Page(check_page(report(engine(), engine("trt", failures=["scores differ"]))))
    assert "FAILED 1 of 2 engines" in page.text
    for target in ("engine-1", "engine-2"):
        assert ("id", target) in page.attributes and ("href", f"#{target}") in page.attributes
    assert "✓ PASSED" in page.text


def test_loosened_limits_are_marked() -> None:
    loose = engine("ort:mine", loosened=["scores", "tokens"], tolerance=Tolerance(1e-4, 1e-2, tokens=False))
    text = Page(check_page(report(engine(), loose))).text
    assert "loosened limits" in text and "scores 0.01loosened" in text and "tokens may differloosened" in text
    assert text.count("encoder 1e-4 ·") == 2 and text.count("0.01loosened") == 2, "the line of limits and the table"


LOSSY = Tolerance(0.5, 1.0, 0.3, tokens=False, unstable=0.01)


def test_every_engine_has_its_own_precision_and_limits() -> None:
    lossy = engine("ort:int8", precision="int8", tolerance=LOSSY, encoder_max=0.03, scores_max=0.4)
    page = check_page(report(engine(), lossy))
    text = Page(page).text
    assert "Limits of fp32 · encoder 1e-4 · scores 1e-4 · bleu 0.1 · tokens equal" in text
    assert "Limits of int8 · encoder 0.5 · scores 1 · bleu 0.3 · tokens may differ · unstable 0.01" in text
    assert "0.400limit\u00a01" in text and "1.70e-5limit\u00a01e-4" in text, "in the summary"
    assert ">0.400<" in page and 'class="bad">0.400' not in page, "within its own limits"


def marked(page: str, part: str) -> list[str]:
    """What is marked as bad in a part of a page that begins with a heading."""
    return re.findall(r'<td class="bad">(.*?)</td>', page.split(f"<h3>{part}</h3>")[1].split("<h3>")[0])


def test_decisions_that_may_differ_are_not_failures() -> None:
    outputs = [Outputs("greedy", "", 1000, 700, 200, 100), Outputs("beam", "", 1000, 640, 200, 160)]
    again = [Outputs("greedy", "alone", 100, 94, failed=6)]
    values = {"outputs": outputs, "invariance": again, "failures": ["greedy (alone): 6 of 100 sentences differ"]}
    exact = check_page(report(engine(**values), engine()))
    lossy = check_page(report(engine(precision="int8", tolerance=LOSSY, **values), engine()))
    assert marked(exact, "Outputs") == ["100", "160"] and marked(lossy, "Outputs") == []
    for page in (exact, lossy):
        assert marked(page, "Same sentences in other batches") == ["94 / 100<small>6 failed</small>" + EAGER]
    assert "100 failed" in Page(exact).text and "100 differ" not in Page(exact).text
    text = Page(lossy).text
    assert "100 differ" in text and "160 differ" in text and "100 failed" not in text and "6 failed" in text
    assert "Outputs that differ from eager's, as this precision may" in text
    assert "as this precision may" not in Page(exact).text


def test_a_share_may_differ_from_itself_in_another_batch() -> None:
    """As far as chance goes, as in the check."""
    for sentences, failed, bad in ((100, 5, False), (100, 6, True), (12, 2, False), (12, 3, True), (30, 3, False)):
        again = [Outputs("greedy", "alone", sentences, sentences - failed, failed=failed)]
        page = check_page(report(engine(tolerance=LOSSY, invariance=again), engine()))
        assert bool(marked(page, "Same sentences in other batches")) == bad
        text = Page(page).text
        assert (f"{failed} failed" in text) == bad and (f"{failed} differ" in text) == (not bad)


EAGER = "<small>eager 99\u00a0/\u00a0100</small>"


def test_nothing_is_loaded_or_run() -> None:
    page = check_page(report(engine(), engine(NASTY, failures=[NASTY])))
    parsed = Page(page)
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & set(parsed.tags)
    names = {name for name, _ in parsed.attributes}
    assert not {"src", "srcset"} & names and not any(name.startswith("on") for name in names)
    assert all((value or "").startswith("#") for name, value in parsed.attributes if name in ("href", "xlink:href"))
    assert not re.search(r"url\((?!#)|@import|https?:", page)


def test_every_text_is_escaped() -> None:
    nasty = engine(NASTY, blame=NASTY, failures=[NASTY], ties=[Divergence(0, NASTY, NASTY, 0, 1, 2, 0, 0, 0)])
    nasty.layers = [Layer(NASTY, 1.0, 1.0)]
    nasty.outputs = nasty.invariance = [Outputs(NASTY, NASTY, 1, 1)]
    nasty.quality = {NASTY: {"eager": {NASTY: 1.0}, "engine": {}}}
    nasty.precision = NASTY
    values = {"corpus": NASTY, "weights_sha256": NASTY, "options": {NASTY: "<td>"}}
    page = check_page(report(nasty, nasty, reference={NASTY: NASTY}, machine={"<td>": "<td>"}, **values))
    page.encode("utf-8")
    assert "<script" not in page and "\x00" not in page
    assert "<script>alert('x')</script> & \"q\" \ufffd \ufffd" in Page(page).text
    assert svgs(page)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 0.0, 5e-324, 1e300])
def test_odd_numbers_are_shown(odd: float) -> None:
    values = {name: odd for name in ("encoder_max", "scores_max", "scores_mean", "scores_p999", "seconds")}
    found = engine(steps=[StepDifference(odd, odd, 3), StepDifference(1e-6, 1e-7, 0)], **values)
    found.layers = [Layer("memory", odd, odd), Layer("log_probs", 1e-6, 2.0)]
    found.outputs = [Outputs("greedy", score_max=odd)]
    found.divergences = found.ties = [Divergence(0, "greedy", "", 0, 1, 2, odd, odd, odd)]
    found.quality = {"greedy": {"eager": {"BLEU": odd}, "engine": {"BLEU": odd}}}
    page = check_page(report(found))
    assert short_number(odd) in Page(page).text
    for svg in svgs(page):
        for element in svg.iter():
            numbers = [element.get(name, "0") for name in ("x", "y")] + element.get("d", "").split()
            assert all(math.isfinite(float(value)) for value in numbers if value not in "MLCQz")


def test_not_a_number_lies_at_the_edge_and_is_beyond_the_limit() -> None:
    odd = engine(layers=[Layer("memory", math.nan, 1.0), Layer("hidden", 1e-6, 1.0)], failures=["NaN"])
    (layers,) = svgs(layer_plot(odd))
    (bad,), (good,) = placed(layers, "bad"), placed(layers, "decoder")
    assert bad[0] > good[0] and placed(layers, "encoder") == [] and "NaN of 1.00" in letters(layers)
    (steps,) = svgs(step_plot([StepDifference(math.nan, 1e-7, 5), StepDifference(1e-6, 1e-7, 2)], 1e-4))
    ((_, height),) = placed(steps, "bad")
    assert height < min(placed(steps, each)[0][1] for each in ("encoder", "mean")) and "NaN" in letters(steps)


def test_layers_are_in_order_and_the_one_to_blame_is_marked() -> None:
    found = engine(failures=["scores differ"], blame="sentence 4, token 2, hidden", tolerance=Tolerance(1e-4, 1e-3))
    found.layers[3].difference = found.layers[4].difference = 3e-4
    (plot,) = svgs(layer_plot(found))
    heights = {text.text: float(text.get("y", "")) for text in plot.iter("text")}
    expected = [name if name != "hidden" else "▸ hidden" for name in NAMES]
    assert [heights[name] for name in expected] == sorted(heights[name] for name in expected)
    # The encoder's limit is not that of the scores, and what is on the way alarms nobody where the engine passed.
    assert [len(placed(plot, colour)) for colour in ("encoder", "bad", "decoder")] == [3, 1, 3]
    passed = layer_plot(engine(layers=found.layers, tolerance=found.tolerance))
    assert [len(placed(svgs(passed)[0], colour)) for colour in ("encoder", "bad", "decoder")] == [4, 0, 3]
    assert "▸" not in passed


def test_steps_tell_how_many_sentences_are_behind_them() -> None:
    steps = [StepDifference(2e-6, 1e-6, 40), StepDifference(0.0, 0.0, 10)]
    (plot,) = svgs(step_plot(steps, 1e-4))
    bars = [path.get("d", "") for path in plot.iter("path") if "fill: var(--counts)" in path.get("style", "")]
    tall = [max(ys) - min(ys) for d in bars if (ys := [float(y) for y in re.findall(r"[ML] \S+ (\S+)", d)])]
    assert len(tall) == 2 and tall[0] == pytest.approx(4 * tall[1], rel=1e-3)
    text = Page(check_page(report(engine(steps=steps)))).text
    assert re.search(r"Values\s*Position\s*Largest\s*Mean\s*Sentences\s*12\.00e-61\.00e-640\s*20010", text)


@pytest.mark.parametrize("values", [[1e-9, 3e-4], [0.0], [0.0, 1e-6, math.nan], [1e-300, 1e300, math.inf], [1e-4]])
def test_a_scale_holds_its_values_in_order(values: list[float]) -> None:
    scale = Decades(values)
    places = [scale.at(value) for value in values]
    ticks = [*scale.ticks().values()]
    assert places == sorted(places) and min(places) >= ticks[0] and max(places) <= ticks[-1]
    assert ticks == sorted(set(ticks)) and 2 <= len(ticks) <= 9


def test_tables_of_divergences_are_cut() -> None:
    found = engine(divergences=[divergence(n) for n in range(MAX_ROWS + 57)], ties=[divergence(5000, math.inf)])
    text = Page(check_page(report(found))).text
    assert f"Divergences ({MAX_ROWS + 57})" in text and "and 57 more" in text and "Ties (1)" in text
    assert text.count("-0.250000") == MAX_ROWS + 1 and "5,001" in text


def test_empty_lists() -> None:
    page = check_page(
        report(EngineReport("ort"), sentences=0, options={}, reference={}, machine={}, eager_invariance=[])
    )
    text = Page(page).text
    for expected in ("No output was compared", "Not checked", "No layer was compared", "No step was compared"):
        assert expected in text
    assert "Quality" not in text and not svgs(page)
