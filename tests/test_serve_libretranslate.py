"""LibreTranslate's protocol, with its own client."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.error import HTTPError

import pytest

from .serving import BROKEN, PAIRS, translated

libretranslate = pytest.importorskip("libretranslatepy")


@pytest.fixture
def http(serve: Callable[..., Any]) -> Any:
    return serve(named=PAIRS)


def client_of(http: Any, key: str | None = None) -> Any:
    return libretranslate.LibreTranslateAPI(str(http.base_url), key)


def refused(error: pytest.ExceptionInfo[HTTPError]) -> tuple[int, str]:
    [(name, message)] = json.loads(error.value.read()).items()
    assert name == "error" and "\n" not in message
    return error.value.code, message


def test_its_client_translates(http: Any) -> None:
    client = client_of(http)
    assert client.translate("w7 w8", "de", "en") == translated("w7 w8", PAIRS["de-en"]).text
    assert client.translate("w7 w8", "de-AT", "en-US") == translated("w7 w8", PAIRS["de-en"]).text
    assert client.translate("w7 w8", "de", "pt-BR") == translated("w7 w8", PAIRS["de-en"], {}).text
    best = client.translate("w7 w8\n\nw9\r\n", "en", "pt-BR")
    assert best == "\n".join([translated("w7 w8", {}).text, "", translated("w9", {}).text, ""])


def test_its_client_sees_the_languages(http: Any) -> None:
    assert client_of(http).languages() == [
        {"code": "de", "name": "German", "targets": ["en", "pt-BR"]},
        {"code": "en", "name": "English", "targets": ["pt-BR"]},
        {"code": "fr", "name": "French", "targets": ["de", "en"]},
        {"code": "pt-BR", "name": "Portuguese (BR)", "targets": []},
    ]


@pytest.mark.parametrize(
    ("asked", "status", "message"),
    [
        (("w7", "en", "zz"), 400, "no model from 'en' to 'zz': the server's pairs are de-en, en-pt_br, fr-de"),
        (("w7", "auto", "en"), 400, "texts for 'en' may be in de, fr: say which language is the source"),
        (("w7", "", "en"), 400, "source: must be a language's code"),
        ((f"w{BROKEN} w4", "de", "pt-BR"), 500, "de-en: "),
        (("w4 " * 20, "de", "en"), 422, "21 tokens exceeds the limit of 16"),
        (("w4\n" * 4, "de", "en"), 400, "5 texts exceed this server's limit of 4"),
        (("w4" * 3000, "de", "en"), 413, "a body of more than 2000 bytes"),
    ],
)
def test_its_client_raises_our_message(http: Any, asked: Any, status: int, message: str) -> None:
    with pytest.raises(HTTPError) as error:
        client_of(http).translate(*asked)
    found = refused(error)
    assert found[0] == status and message in found[1]


def test_languages_are_not_detected(http: Any) -> None:
    with pytest.raises(HTTPError) as error:
        client_of(http).detect("w7")
    assert refused(error) == (400, "languages are not detected: say the source language")


def test_its_client_sends_the_key_in_the_body(serve: Callable[..., Any]) -> None:
    http = serve("sésame", named=PAIRS)
    expected = translated("w7 w8", PAIRS["de-en"]).text
    assert client_of(http, "sésame").translate("w7 w8", "de", "en") == expected
    for key in (None, "", "wrong"):
        with pytest.raises(HTTPError) as error:
            client_of(http, key).translate("w7", "de", "en")
        assert refused(error) == (
            403,
            "the key is missing or wrong: send it as api_key, or in the header Authorization",
        )
        with pytest.raises(HTTPError) as error:
            client_of(http, key).detect("w7")
        assert refused(error)[0] == 403
        assert len(client_of(http, key).languages()) == 4
    body = {"q": "w7 w8", "source": "de", "target": "en"}
    assert http.post("/translate", json={**body, "api_key": 3}).status_code == 403
    assert http.post("/v1/translate", json={"text": "w7", "api_key": "sésame"}).status_code == 401
    answer = http.post("/translate", json=body, headers={"Authorization": "Bearer sésame".encode()})
    assert answer.json() == {"translatedText": expected}


def test_json_may_have_several_texts_and_alternatives(http: Any) -> None:
    body = {"q": ["w7 w8", "w9\nw5"], "source": "auto", "target": "pt-BR", "alternatives": 1}
    answer = http.post("/translate", json={**body, "source": "en", "format": "text"}).json()
    wide = [translated(text, {}, beams=2, n_best=2) for text in ("w7 w8", "w9", "w5")]
    best, others = [each.text for each in wide], [each.alternatives[0].text for each in wide]
    assert answer == {
        "translatedText": [best[0], f"{best[1]}\n{best[2]}"],
        "alternatives": [[others[0]], [f"{others[1]}\n{others[2]}"]],
    }
    single = http.post("/translate", data={"q": "w7 w8", "source": "en", "target": "pt-br", "alternatives": "1"})
    assert single.json() == {"translatedText": best[0], "alternatives": [others[0]]}


def test_the_only_source_language_is_found(serve: Callable[..., Any]) -> None:
    http = serve(named={"de-en": {}})
    answer = http.post("/translate", json={"q": "w7 w8", "source": "auto", "target": "en"}).json()
    assert answer["translatedText"] == translated("w7 w8", {}).text
    assert answer["detectedLanguage"] == {"confidence": 100, "language": "de"}


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"format": "html"}, 400, "format='html': only text is translated, no markup"),
        ({"alternatives": -1}, 400, "alternatives=-1: must be a whole number"),
        ({"alternatives": True}, 400, "alternatives=True: must be a whole number"),
        ({"alternatives": 4}, 422, "5 beams or samples exceed this server's limit of 4"),
        ({"alternatives": "9" * 20}, 400, "alternatives='999"),
        ({"q": []}, 400, "q: must be a string or a list of strings, not empty"),
        ({"q": 3}, 400, "q: must be a string or a list of strings, not empty"),
        ({"target": None}, 400, "target: must be a language's code"),
        ({"quelle": "de"}, 400, "unknown key of [body] 'quelle'"),
    ],
)
def test_what_is_not_supported_is_refused(http: Any, fields: dict[str, Any], status: int, message: str) -> None:
    answer = http.post("/translate", json={"q": "w7", "source": "de", "target": "en", **fields})
    assert answer.status_code == status and message in answer.json()["error"]


def test_bodies_that_are_no_forms_are_refused(http: Any) -> None:
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    for body in (b"\xff", b"q=%ff", b"&" * 1500):
        answer = http.post("/translate", content=body, headers=kind)
        assert "the body is no form in UTF-8" in answer.json()["error"]
    answer = http.post("/translate", files={"q": b"w7"})
    assert answer.status_code == 400 and "multipart/form-data is not read" in answer.json()["error"]
