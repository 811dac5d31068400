"""Language pairs: which model a request for languages goes to, and texts that go through two models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tformer_deploy.base.errors import ConfigError
from tformer_deploy.serve.languages import Pairs, UnknownPair
from tformer_deploy.serve.models import Model, Models

from .serving import BROKEN, CAPS, Watched, ask_and_leave, counted, events, post, translator_of, wait_for

PAIRS = Pairs(["numbers", "de-en", "en-fr", "En-pt_BR", "en-de", "eng_Latn-zul_Latn", "my-model", "en-fr_CA", "fr-de"])
NAMED: dict[str, Any] = {
    "numbers": {},
    "de-en": {"max_tokens": 12},
    "en-fr": {"length_penalty": 0.6},
    "it-en": {"min_tokens": 18},
}


@pytest.mark.parametrize(
    ("source", "target", "way"),
    [
        ("en", "de", ["en-de"]),
        ("EN", "de-AT", ["en-de"]),
        ("en-GB", "pt-br", ["En-pt_BR"]),
        ("en", "fr-CA", ["en-fr_CA"]),
        ("en", "fr-CH", ["en-fr"]),
        ("eng_Latn", "zul_Latn", ["eng_Latn-zul_Latn"]),
        ("de", "fr", ["de-en", "en-fr"]),
        ("de", "fr_CA", ["de-en", "en-fr_CA"]),
        ("", "en", ["de-en"]),
        ("fr", "en", ["fr-de", "de-en"]),
    ],
)
def test_the_shortest_way_is_taken(source: str, target: str, way: list[str]) -> None:
    if source == "" and target == "en":  # from French too, through German
        with pytest.raises(UnknownPair, match="may be in de, fr: say which language is the source"):
            PAIRS.way(source, target)
        pairs = Pairs(["de-en", "en-de"])
        assert pairs.way("", "en-US") == ("de-en",) and pairs.only_source("EN") == "de"
    else:
        assert PAIRS.way(source, target) == tuple(way)


@pytest.mark.parametrize(
    "pair", [("en", "en"), ("en-US", "en-GB"), ("fr", "pt_BR"), ("zz", "en"), ("", "zz"), ("de", "")]
)
def test_languages_without_a_way_are_refused(pair: tuple[str, str]) -> None:
    with pytest.raises(UnknownPair, match=r"no model from .* the server's pairs are de-en, en-fr, en-pt_br"):
        PAIRS.way(*pair)
    with pytest.raises(UnknownPair, match="none: name models as in en-de=BUNDLE"):
        Pairs(["numbers"]).way(*pair)


def test_the_languages_of_a_server() -> None:
    assert PAIRS.sources == ["de", "en", "eng_latn", "fr"]
    assert PAIRS.targets("de") == ["en", "fr", "fr_ca", "pt_br"]


def test_a_request_names_languages_instead_of_a_model(serve: Callable[..., Any]) -> None:
    client = serve(named=NAMED, aliases={"fr-it": "numbers"})
    for pair, model in (("en", "fr"), "en-fr"), (("fr-CH", "it"), "fr-it"):
        found = post(client, source_lang=pair[0], target_lang=pair[1], text="w7 w8").json()
        assert found["model"] == model and "pivot" not in found
        assert found["results"] == post(client, model=model, text="w7 w8").json()["results"]
    for body, status, message in (
        ({"source_lang": "en", "target_lang": "zz"}, 404, "no model from 'en' to 'zz': the server's pairs are de-en"),
        ({"source_lang": "en"}, 400, "source_lang without target_lang"),
        ({"target_lang": "en", "model": "de-en"}, 400, "model and languages are both given"),
        ({"target_lang": 3}, 400, "must be strings"),
        ({"model": "fr-itt"}, 404, "did you mean 'fr-it'"),
    ):
        answer = post(client, text="w4", **body)
        assert answer.status_code == status and message in answer.json()["error"]


@pytest.mark.parametrize("options", [{}, {"beams": 3, "n_best": 2}])
def test_a_text_goes_through_a_third_language(serve: Callable[..., Any], options: dict[str, Any]) -> None:
    client = serve(named=NAMED)
    texts = ["w7 w8", "", f"w{BROKEN} w5", "w9"]
    languages = {"source_lang": "de", "target_lang": "fr", "options": options}
    found = post(client, text=texts, prefix=["", "", "", "w6 w6"], **languages).json()
    assert (found["pivot"], found["model"]) == ("de-en", "en-fr")
    first, empty, broken, begun = found["results"]
    first_of, second_of = translator_of(Watched(), max_tokens=12), translator_of(Watched(), length_penalty=0.6)
    [between, other] = [each.text for each in first_of.translate(["w7 w8", "w9"])]
    expected, ended = second_of.translate([between, other], ["", "w6 w6"], **options)
    assert (first["text"], first["score"], empty["text"]) == (expected.text, expected.score, "")
    assert [each["text"] for each in first.get("alternatives", [])] == [each.text for each in expected.alternatives]
    assert begun["text"] == ended.text and begun["text"].startswith("w6 w6")
    assert broken["status"] == 500 and broken["error"].startswith("de-en: ") and "NaN" in broken["error"]
    streamed = events(post(client, text="w7 w8", stream=True, **languages))
    assert streamed[-1] == ("result", first)
    assert "".join(piece["text"] for _, piece in streamed[:-1]) == expected.text


def test_an_error_names_the_model_on_the_way(serve: Callable[..., Any], engine: Watched) -> None:
    client = serve(named=NAMED)
    answer = post(client, source_lang="it", target_lang="fr", text="w7 w8")
    assert answer.status_code == 422 and answer.json()["error"].startswith("en-fr: line 1: a source of ")
    for stream in (False, True):
        answer = post(client, source_lang="de", target_lang="fr", text=f"w{BROKEN} w5", stream=stream)
        assert answer.status_code == 500 and answer.json()["error"].startswith("de-en: ")
        count = len(engine.encoded)
        for options, status, message in (
            ({"align": True}, 400, "align: positions would be those of a text between de-en, en-fr"),
            ({"beams": 5}, 422, "5 beams or samples exceed"),
            ({"beam": 5}, 400, "did you mean 'beams'"),
        ):
            answer = post(client, source_lang="de", target_lang="fr", text="w4", options=options, stream=stream)
            assert answer.status_code == status and message in answer.json()["error"]
        assert len(engine.encoded) == count, "nothing has run before the options were checked"


def test_a_client_that_goes_away_stops_both_models(
    serve: Callable[..., Any], engine: Watched, cancelled: Callable[[], bool]
) -> None:
    client = serve(named=NAMED)
    engine.open.clear()
    ask_and_leave(client, "de-en", text="w4 w5", source_lang="de", target_lang="fr")
    wait_for(cancelled)
    engine.open.set()
    wait_for(lambda: counted(client, "running_lines", "de-en") == 0)
    assert counted(client, "steps_total", "en-fr") == 0


def test_an_alias_may_say_how_outputs_begin(serve: Callable[..., Any]) -> None:
    client = serve(named={"en-de": {}}, aliases={"en-fr": "en-de:w9"})
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["en-de", "en-fr"]
    assert [each["name"] for each in client.post("/v2/repository/index").json()] == ["en-de", "en-fr"]
    plain = post(client, target_lang="de", text="w7 w8").json()["results"][0]
    french = post(client, target_lang="fr", text="w7 w8", options={"first_adds_zero": True}).json()["results"][0]
    expected = translator_of(Watched()).translate(["w7 w8"], first_ids=(9,), first_adds_zero=True)[0]
    assert (french["text"], french["score"]) == (expected.text, expected.score) and french["text"].startswith("w9 ")
    assert not plain["text"].startswith("w9 ")
    scores = post(client, "/v1/score", model="en-fr", source="w7", target="w5").json()["scores"][0]["tokens"]
    assert scores == translator_of(Watched(), first_ids=(9,)).score(["w7"], ["w5"])[0]


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        ("b", "a:w99", "alias b: 'w99' is not in the target vocabulary of a"),
        ("b", "aa", "unknown model of alias b 'aa': did you mean 'a'"),
        ("a", "a", "alias a: a model has this name"),
    ],
)
def test_wrong_aliases_are_refused(name: str, asked: str, message: str) -> None:
    with translator_of(Watched()) as translator:
        model = Model("a", translator, CAPS)
        with pytest.raises(ConfigError, match=message):
            Models([model], {name: asked})
        model.scheduler.close()
