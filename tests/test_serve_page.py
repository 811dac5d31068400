"""The description of the server's routes is complete, and true; the pages need nothing from outside."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import tformer_deploy
from tformer_deploy.decoding import DecodeOptions
from tformer_deploy.serve import app, openapi, site
from tformer_deploy.serve.app import make_app
from tformer_deploy.serve.cards import card
from tformer_deploy.serve.models import Caps, Model, Models
from tformer_deploy.serve.protocols import own

from .serving import BROKEN, REFUSED, events, post

DESCRIBED_ELSEWHERE = {"deepl", "kserve", "libretranslate", "openai", "openai_api"}
"""Protocols of others, which have descriptions of their own."""


def checked(name: str, value: Any) -> Any:
    """A value that holds what the description says of a schema, and says no more."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": openapi.schemas()}}
    jsonschema.Draft202012Validator(schema).validate(value)
    return value


def test_every_route_is_described_or_named() -> None:
    guard = make_app(Models([]))
    with guard.current.use() as held:
        found: list[Any] = [*guard.own.routes, *held.app.routes]  # type: ignore[attr-defined]
    routes = {(route.path, method.lower()) for route in found for method in route.methods - {"HEAD"}}
    others = [each for each in app.PROTOCOLS if each is not own]
    assert {each.__name__.rpartition(".")[2] for each in others} <= DESCRIBED_ELSEWHERE, "describe a new protocol"
    routes -= {
        (route.path, method.lower())
        for protocol in others
        for route in protocol.routes(Models([]))
        for method in route.methods
    }
    described = {(path, method) for path, found in openapi.description(True)["paths"].items() for method in found}
    assert routes - described == {(path, "get") for path in openapi.PAGES}
    assert described < routes


def test_the_description_has_every_key_and_option_with_its_text() -> None:
    schemas = openapi.schemas()
    assert set(schemas["DecodeOptions"]["properties"]) == set(vars(DecodeOptions())) - {"endless"}
    for name in ("Translate", "DecodeOptions"):
        assert all(each.get("description") for each in schemas[name]["properties"].values()), name
    assert schemas["DecodeOptions"]["properties"]["top_p"] == {
        "type": "number",
        "exclusiveMinimum": 0,
        "maximum": 1,
        "default": 1.0,
        "description": "Draw from the fewest best tokens that reach this probability (Holtzman et al. 2020).",
    }
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    ("options", "valid"),
    [
        ({}, True),
        ({"beams": 3, "n_best": 2, "length_penalty": 1, "stop": "exact"}, True),
        ({"suppress": [5], "bad_words": [[5, 6], [7]]}, True),
        ({"sampling": True, "temperature": 0.5}, True),
        ({"beams": 0}, False),
        ({"beams": "2"}, False),
        ({"top_p": 0, "sampling": True}, False),
        ({"min_p": 1, "sampling": True}, False),
        ({"stop": "never"}, False),
        ({"bad_words": [5]}, False),
        ({"beam": 2}, False),
        ({"endless": True}, False),
    ],
)
def test_options_that_the_description_refuses_are_refused(client: Any, options: Any, valid: bool) -> None:
    answer = post(client, text="w7", options=options)
    assert (answer.status_code == 200) == valid, answer.text
    try:
        checked("DecodeOptions", options)
    except jsonschema.ValidationError:
        assert not valid
    else:
        assert valid
    checked("Translations" if valid else "Error", answer.json())


def test_answers_are_as_described(client: Any) -> None:
    texts = ["w7 w8", "", f"w{BROKEN} w5", f"w{REFUSED}"]
    body = {"text": texts, "options": {"beams": 3, "n_best": 2, "min_tokens": 3, "align": True}}
    found = checked("Translations", client.post("/v1/translate", json=checked("Translate", body)).json())
    assert found["results"][0]["alignment"] and found["results"][0]["alternatives"][0]["alignment"]
    assert found["results"][2]["error"]
    for each in (found["results"][0], *found["results"][0]["alternatives"]):
        assert "".join(each["pieces"]) == each["text"] and len(each["pieces"]) == len(each["alignment"])
    assert found["results"][0]["source_pieces"] == ["w7", " w8", ""]
    result = events(post(client, text="w7 w8", stream=True))[-1][1]
    checked("Translation", result)
    assert "pieces" not in result
    cards = checked("Cards", client.get("/v1/cards").json())["models"]
    assert [each["name"] for each in cards] == ["numbers", "b"] and cards[0]["attention"]
    assert cards[0]["steps"] == "Python"
    scores = checked("Score", {"source": "w7 w8", "target": "w5 w6"})
    assert checked("Scores", client.post("/v1/score", json=scores).json())["scores"]
    checked("Error", client.post("/v1/score", content=b"{").json())
    for model in ({}, ["b"]):
        answer = client.post("/v1/score", json={**scores, "model": model})
        assert (answer.status_code, answer.json()) == (400, {"error": "model must be a string"})
    for path in openapi.OPEN:
        checked("Health", client.get(path).json())


def test_the_description_and_its_page_need_no_key_and_nothing_from_outside(serve: Callable[..., Any]) -> None:
    client = serve("a key")
    described = client.get("/openapi.json").json()
    assert described == json.loads(json.dumps(openapi.description(key=True)))
    assert described["openapi"] == "3.1.0" and described["security"] == [{"Bearer": []}, {"Header": []}]
    answer = client.get("/docs")
    for path in described["paths"]:
        assert f" {path}</code>" in answer.text
    assert all(name in answer.text for name in described["components"]["schemas"]["DecodeOptions"]["properties"])
    closed(answer)
    closed(client.get("/"))
    refused = client.get("/v1/cards")
    assert refused.status_code == 401 and "a key is needed" in checked("Error", refused.json())["error"]


def test_the_card_of_a_bundle() -> None:
    folder = Path(__file__).parent / "bundles/v2/names"
    with tformer_deploy.load(folder) as translator:
        model = Model("names", translator, Caps())
        found = checked("Cards", {"models": [card(model)]})["models"][0]
        model.scheduler.close()
    report = json.loads((folder / "check.json").read_text())
    assert (found["bundle"], found["engine"], found["precision"], found["attention"]) == ("names", "ort", "fp32", True)
    assert found["sha256"] == hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    assert found["check"]["passed"] and found["check"]["sentences"] == report["sentences"]
    [ort] = [each for each in report["engines"] if each["engine"] == "ort"]
    assert found["check"]["equal"] == {each["mode"]: each["equal"] for each in ort["outputs"]} != {}


def closed(answer: Any) -> None:
    """A page names nothing outside, and the browser is told to load nothing from there."""
    assert answer.status_code == 200 and not re.search(r"//[\w[]|@import|url\(", answer.text)
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy and "http" not in policy
    for tag in ("style", "script"):
        found = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", answer.text, re.DOTALL)
        assert all(site._hash(each) in policy for each in found)
    assert " style=" not in answer.text and not re.search(r"<[^>]* on\w+=", answer.text), "the policy forbids them"


@pytest.mark.long
def test_schemathesis_finds_nothing(serve: Callable[..., Any], tmp_path: Path) -> None:
    """It makes requests of the description, good and bad, and compares the answers with it.

    Rules between options are not in the description, so that some requests that hold it are refused.
    """
    pytest.importorskip("schemathesis")
    (tmp_path / "refusals.toml").write_text(
        '[checks.negative_data_rejection]\nexpected-statuses = ["400", "404", "413", "422"]\n'
    )
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(tmp_path / "refusals.toml")]
    command += ["run", f"{serve().base_url}/openapi.json", "--no-color", "--seed", "1", "-n", "20"]
    command += ["--exclude-checks", "positive_data_acceptance"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
