"""The page at `/` in headless Chromium: type, stream, cancel, errors, the key, alignment, phones, dark mode."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .browser import BROWSER, needs_browser
from .serving import BROKEN, Watched, counted, translator_of, wait_for

api = pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.long, needs_browser]
TEXT = "w7 w8 w9"
CONTRASTS = """() => {
  const luminance = colour => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = at => {
    for (; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (!colour.endsWith(", 0)")) return colour;
    }
    throw new Error("no ground");
  };
  const own = at => at.matches("input, select, textarea")
    || [...at.childNodes].some(node => node.nodeType === 3 && node.data.trim());
  return [...document.body.querySelectorAll("*")].filter(at => at.checkVisibility() && !at.disabled && own(at))
    .map(at => {
    const [a, b] = [getComputedStyle(at).color, ground(at)].map(luminance);
    return [at.tagName + " " + at.textContent.slice(0, 20), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
  });
}"""
"""The contrast of each element that has text, as WCAG 2 defines it."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page; at the end it has had no error, and has asked nobody but its server."""
    contexts, told = [], []

    def start(client: Any, path: str = "/", **how: Any) -> Any:
        context = chromium.new_context(**how)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: told.append(str(error)))
        page.on("console", lambda line: told.append(line.text) if "Content Security Policy" in line.text else None)
        outside = lambda request: not request.url.startswith((str(client.base_url), "data:"))  # noqa: E731
        page.on("request", lambda request: told.append(request.url) if outside(request) else None)
        page.goto(str(client.base_url).rstrip("/") + path)
        return page

    yield start
    for context in contexts:
        context.close()
    assert not told


def translate(page: Any, text: str = TEXT) -> None:
    page.get_by_label("Text").fill(text)
    page.keyboard.press("Control+Enter")


def ended(page: Any) -> str:
    """Wait until nothing runs; returns the output."""
    api.expect(page.locator("#timing, #error").filter(has_text=".")).to_have_count(1)
    api.expect(page.get_by_role("button", name="Cancel")).to_be_disabled()
    return str(page.locator("#output").text_content())


def test_the_output_comes_token_by_token(
    serve: Callable[..., Any], visit: Callable[..., Any], engine: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = engine.step

    def slow(*args: Any, **named: Any) -> Any:
        time.sleep(0.1)
        return step(*args, **named)

    monkeypatch.setattr(engine, "step", slow)
    page = visit(serve())
    page.evaluate(
        """() => { window.seen = []; new MutationObserver(() => seen.push([
             performance.now(), document.getElementById("output").textContent]))
             .observe(document.getElementById("output"), {childList: true, characterData: true, subtree: true}); }"""
    )
    translate(page)
    [expected] = translator_of(Watched()).translate([TEXT])
    assert len(expected.text.split()) > 3 and ended(page) == expected.text
    seen = [(when, text) for when, text in page.evaluate("seen") if text]
    assert len({text for _, text in seen}) == len(expected.text.split()) and seen[-1][0] - seen[0][0] > 100
    assert f"{len(expected.ids)} tokens in" in page.locator("#timing").inner_text()


def test_outputs_scores_and_the_alignment_are_shown(serve: Callable[..., Any], visit: Callable[..., Any]) -> None:
    page = visit(serve())
    page.get_by_label("Model").select_option("b")
    page.get_by_label("Beams").fill("3")
    page.get_by_label("Outputs").fill("2")
    translate(page)
    [expected] = translator_of(Watched()).translate([TEXT], beams=3, n_best=2, align=True)
    assert ended(page) == expected.text
    shown = page.locator("#alternatives li").all_inner_texts()
    assert [each.split() for each in shown] == [
        [*each.text.split(), f"{each.score:.3f}"] for each in (expected, *expected.alternatives)
    ]
    words, found = TEXT.split(), page.locator("#alignment p").nth(1).locator("span")
    assert [each for each in found.all_inner_texts() if each != "·"] == expected.text.split()
    titles = [span.get_attribute("title") for span in found.all()]
    assert titles == [[*words, "·"][i] for i in expected.alignment]
    assert page.locator("#alignment line").count() == len(expected.alignment)
    assert "TableEngine" in page.locator("#card").inner_text() or "Watched" in page.locator("#card").inner_text()


def test_without_attention_no_alignment_is_asked_for(
    serve: Callable[..., Any], visit: Callable[..., Any], engine: Watched
) -> None:
    engine.attention = False
    page = visit(serve())
    translate(page)
    assert ended(page) == translator_of(Watched()).translate([TEXT])[0].text
    assert page.locator("#aligned").is_hidden() and not page.locator("#error").inner_text()


@pytest.mark.parametrize("how", ["key", "button"])
def test_cancel_frees_the_place(
    how: str, serve: Callable[..., Any], visit: Callable[..., Any], engine: Watched, cancelled: Callable[[], bool]
) -> None:
    client = serve()
    page = visit(client)
    engine.open.clear()
    translate(page)
    wait_for(lambda: counted(client, "running_lines") == 1)
    if how == "key":
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Cancel").click()
    ended(page)
    assert page.locator("#timing").inner_text() == "Cancelled." and not page.locator("#error").inner_text()
    wait_for(cancelled)
    engine.open.set()
    wait_for(lambda: counted(client, "running_lines") == 0)
    assert page.get_by_role("button", name="Translate").is_enabled()


@pytest.mark.parametrize(
    ("text", "message"), [("w4 " * 100, "300 bytes exceeds"), (f"w{BROKEN} w5 w6", "NaN or infinite")]
)
def test_an_error_is_shown_in_one_line(
    text: str, message: str, serve: Callable[..., Any], visit: Callable[..., Any]
) -> None:
    page = visit(serve())
    translate(page, text)
    error = page.get_by_role("alert")
    api.expect(error).to_contain_text(message)
    assert "\n" not in error.inner_text()
    translate(page)
    assert ended(page) and not error.inner_text()


def test_the_key_is_asked_for_and_kept_in_memory_only(serve: Callable[..., Any], visit: Callable[..., Any]) -> None:
    page = visit(serve("sésame"))
    for key, status in (("wrong", "a key is needed"), ("sésame", "")):
        page.get_by_label("Key of this server").fill(key)
        page.keyboard.press("Enter")
        if status:
            api.expect(page.get_by_role("alert")).to_contain_text(status)
    api.expect(page.locator("#key-form")).to_be_hidden()
    translate(page)
    assert ended(page)
    assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
    page.reload()
    api.expect(page.get_by_label("Key of this server")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_on_a_phone_in_light_and_dark(
    scheme: str, serve: Callable[..., Any], visit: Callable[..., Any]
) -> None:
    client = serve()
    how = {"viewport": {"width": 320, "height": 640}, "color_scheme": scheme}
    page = visit(client, **how)
    page.get_by_label("Beams").fill("3")
    page.get_by_label("Outputs").fill("3")
    translate(page)
    ended(page)
    for each in (page, visit(client, "/docs", **how)):
        assert each.evaluate("document.documentElement.scrollWidth <= innerWidth")
        contrasts = each.evaluate(CONTRASTS)
        assert len(contrasts) > 15 and min(contrasts, key=lambda found: found[1])[1] >= 4.5, contrasts
        ground = each.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 27)")


def test_every_field_has_a_label_and_shows_its_focus(serve: Callable[..., Any], visit: Callable[..., Any]) -> None:
    page = visit(serve())
    assert page.evaluate("[...document.querySelectorAll('input, select, textarea')].every(at => at.labels.length)")
    reached = []
    for _ in range(6):
        page.keyboard.press("Tab")
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert reached == ["text", "model", "beams", "n-best", "go", "A"]
