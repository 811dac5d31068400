"""DeepL's protocol, with its own client."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from .serving import BROKEN, PAIRS, Watched, post, translated, wait_for

deepl = pytest.importorskip("deepl")


@pytest.fixture(autouse=True)
def no_further_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepl.http_client, "max_network_retries", 0)


@pytest.fixture
def http(serve: Callable[..., Any]) -> Any:
    return serve("the key", named=PAIRS)


def client_of(http: Any, key: str = "the key") -> Any:
    return deepl.DeepLClient(key, server_url=str(http.base_url))


@pytest.fixture
def client(http: Any) -> Any:
    return client_of(http)


def test_its_client_translates(client: Any) -> None:
    found = client.translate_text("w7 w8", source_lang="DE", target_lang="EN-US")
    assert found.text == translated("w7 w8", PAIRS["de-en"]).text
    assert (found.detected_source_lang, found.billed_characters) == ("DE", 5)
    both = client.translate_text(["w7 w8", "w9\n\nw5"], source_lang="de", target_lang="PT-BR")
    through = PAIRS["de-en"], PAIRS["en-pt_BR"]
    lines = [translated(text, *through).text for text in ("w9", "", "w5")]
    assert [each.text for each in both] == [translated("w7 w8", *through).text, "\n".join(lines)]
    [only] = client.translate_text(["w7"], target_lang="DE")  # from French alone
    assert (only.text, only.detected_source_lang) == (translated("w7", PAIRS["fr-de"]).text, "FR")


@pytest.mark.parametrize("split", ["0", "nonewlines", deepl.SplitSentences.OFF])
def test_lines_are_together_if_they_are_not_to_be_split(client: Any, split: Any) -> None:
    found = client.translate_text("w7\nw8", source_lang="EN", target_lang="PT-BR", split_sentences=split)
    assert found.text == translated("w7 w8", {}).text


def test_its_client_sees_the_languages(client: Any) -> None:
    sources, targets = client.get_source_languages(), client.get_target_languages()
    assert {each.code: each.name for each in sources} == {"DE": "German", "EN": "English", "FR": "French"}
    assert {each.code: each.name for each in targets} == {
        "DE": "German",
        "EN-GB": "English (GB)",
        "EN-US": "English (US)",
        "PT-BR": "Portuguese (BR)",
    }
    assert not any(each.supports_formality for each in targets)
    for target in targets:
        assert client.translate_text("w7", source_lang="FR", target_lang=target) if target.code != "PT-BR" else True


def test_its_client_sees_the_usage(client: Any) -> None:
    client.translate_text(["w7 w8", "w9"], source_lang="DE", target_lang="EN-GB")
    usage = client.get_usage()
    assert usage.character.count == 7 and not usage.any_limit_reached


def test_a_wrong_key_is_its_own_exception(http: Any) -> None:
    for ask in (lambda client: client.translate_text("w7", target_lang="DE"), lambda client: client.get_usage()):
        with pytest.raises(deepl.AuthorizationException, match="message: a key is needed: send Authorization"):
            ask(client_of(http, "wrong"))
    assert post(http, "/v2/translate", text="w7", target_lang="DE").status_code == 403


def test_a_full_queue_is_its_own_exception(serve: Callable[..., Any], engine: Watched) -> None:
    http = serve(named={"de-en": {}}, slots=1, max_queue=1)
    engine.open.clear()
    threads = [threading.Thread(target=post, args=(http,), kwargs={"text": "w4"}) for _ in range(2)]
    for thread, place in zip(threads, ("running", "waiting"), strict=True):
        thread.start()
        wait_for(lambda place=place: f'{place}_lines{{model="de-en"}} 1.0' in http.get("/metrics").text)  # type: ignore[misc]
    with pytest.raises(deepl.TooManyRequestsException, match=r"message: 1 lines are waiting: try again later"):
        client_of(http).translate_text("w7", source_lang="DE", target_lang="EN-US")
    engine.open.set()
    for thread in threads:
        thread.join(20)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            "w7",
            {"target_lang": "ZZ"},
            r"Bad request, message: no model from 'DE' to 'ZZ': the server's pairs are de-en",
        ),
        ("w7", {"source_lang": None}, "message: texts for 'EN-US' may be in de, fr: say which language is the source"),
        ("w7", {"formality": "more"}, "message: formality='more' is not supported by this server: it may be default"),
        ("w7", {"context": "w8"}, "message: context is not an option of this server: leave it out"),
        ("w7", {"tag_handling": "xml"}, "message: tag_handling is not an option"),
        ("w7", {"glossary": "3"}, "message: glossary_id is not an option"),
        ("w7", {"model_type": "quality_optimized"}, "message: model_type='quality_optimized' is not supported"),
        ("w7", {"extra_body_parameters": {"split_sentences": 1}}, "message: split_sentences=1 is not supported"),
        ("w7", {"extra_body_parameters": {"text": [3]}}, "message: text: must be a string or a list of strings"),
        ("w7", {"extra_body_parameters": {"source_lang": 3}}, "message: source_lang: must be a language's code"),
        ("w4 " * 20, {}, "Bad request, message: line 1: a source of 21 tokens exceeds the limit of 16"),
        (["w4"] * 5, {}, "Bad request, message: 5 texts exceed this server's limit of 4"),
        ("w4" * 1000, {}, "413 .*a body of more than 2000 bytes"),
        (f"w{BROKEN} w4", {"target_lang": "PT-BR"}, "500 .*de-en: "),
    ],
)
def test_what_cannot_be_done_is_its_exception_with_our_message(
    client: Any, text: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(deepl.DeepLException, match=message) as error:
        client.translate_text(text, **{"source_lang": "DE", "target_lang": "EN-US", **options})
    assert "\n" not in str(error.value)


def test_options_that_change_nothing_are_taken(client: Any) -> None:
    options = {"formality": "prefer_more", "preserve_formatting": True, "model_type": "prefer_quality_optimized"}
    found = client.translate_text("w7", source_lang="FR", target_lang="DE", split_sentences="1", **options)
    assert found.text == translated("w7", PAIRS["fr-de"]).text


def test_other_calls_of_its_client_are_refused(client: Any) -> None:
    for ask in (client.list_glossaries, client.list_multilingual_glossaries, client.get_glossary_languages):
        with pytest.raises(deepl.DeepLException, match=r"Not [Ff]ound.*docs/serve.md has the paths of this server"):
            ask()


def test_forms_are_read(http: Any) -> None:
    http.headers["Authorization"] = "DeepL-Auth-Key the key"
    form = {"text": ["w7 w8", "w9"], "target_lang": "EN", "source_lang": "FR"}
    found = http.post("/v2/translate", data=form).json()
    assert found == {
        "translations": [
            {"detected_source_language": "FR", "text": translated(text, PAIRS["fr-de"], PAIRS["de-en"]).text}
            for text in form["text"]
        ]
    }
    billed = http.post("/v2/translate", data={**form, "text": "w7", "show_billed_characters": "1"}).json()
    assert billed["translations"][0]["billed_characters"] == 2
    assert len(http.get("/v2/languages?type=target").json()) == 4
    for answer, message in (
        (http.post("/v2/translate", data={"text": "w7"}), "target_lang: must be a language's code"),
        (http.get("/v2/languages?type=both"), "unknown type 'both'"),
    ):
        assert answer.status_code == 400 and message in answer.json()["message"]


def test_no_body_is_read_beyond_the_limit(http: Any) -> None:
    http.headers.update(
        {"Authorization": "DeepL-Auth-Key the key", "Content-Type": "application/x-www-form-urlencoded"}
    )
    for path in ("/v2/languages", "/v2/translate"):
        answer = http.post(path, content=b"x" * 2001)
        assert answer.status_code == 413 and "a body of more than 2000 bytes" in answer.json()["message"]
