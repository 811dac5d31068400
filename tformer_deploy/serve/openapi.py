"""The OpenAPI 3.1 description of the server's own routes, made from the dataclasses that read requests."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, Field, fields
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from .. import __version__
from ..base.settings import field_texts
from ..decoding import DecodeOptions
from ..decoding.options import Bounds
from .protocols import own

Schema = dict[str, Any]

PAGES = ("/", "/docs", "/openapi.json")
"""Routes that the description leaves out: pages for people, and itself."""
OPEN = ("/healthz", "/healthz/live", "/healthz/ready")
"""Described routes that need no key."""
REFUSED = ("endless",)
"""Decoding options that a server does not take."""
KINDS: dict[Any, str] = {int: "integer", float: "number", bool: "boolean", str: "string"}
ERRORS = {
    400: "The request is wrong: not JSON, an unknown key or option, too many texts.",
    401: "The key is missing or wrong.",
    403: "Only the server's own machine may ask this.",
    404: "No such model, or no model of these languages.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    422: "A text or an option is beyond what the model takes or the server allows.",
    429: "The queue is full: try again after the seconds in `Retry-After`.",
    500: "The engine failed; the server goes on.",
    503: "The server cannot take the text now: try again after the seconds in `Retry-After`.",
    504: "The text did not end in time.",
}
"""Statuses that are not 200."""
KEY_PARTS: Schema = {"Bearer": {"type": "http", "scheme": "bearer"}}
KEY_PARTS["Header"] = {"type": "apiKey", "in": "header", "name": "X-API-Key"}


def description(key: bool) -> Schema:
    """The whole description. `key`: whether clients need one."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tformer serve",
            "version": __version__,
            "description": "Translation with encoder-decoder models; texts of all clients share the engine's steps.",
        },
        "paths": _paths(),
        "components": {"schemas": schemas(), **({"securitySchemes": KEY_PARTS} if key else {})},
        **({"security": [{name: []} for name in KEY_PARTS]} if key else {}),
    }


def schemas() -> dict[str, Schema]:
    """Bodies and answers by name."""
    translate = object_of(own.Translate)
    translate["properties"]["options"] = {**translate["properties"]["options"], "$ref": _ref("DecodeOptions")}
    options = object_of(DecodeOptions)
    for name in REFUSED:
        del options["properties"][name]
    return {
        "Translate": translate,
        "DecodeOptions": options,
        "Score": object_of(own.Score),
        "Translation": TRANSLATION,
        "Translations": TRANSLATIONS,
        "Scores": SCORES,
        "Cards": CARDS,
        "Reloaded": RELOADED,
        "Error": {**_object({"error": {"type": "string", "description": "One line."}}), "additionalProperties": False},
        "Health": _object({"status": {"type": "string"}}, models={"type": "array", "items": {"type": "string"}}),
    }


def object_of(cls: type[Any]) -> Schema:
    """The schema of a JSON object that `from_dict` makes a dataclass of."""
    hints, texts = get_type_hints(cls), field_texts(cls)
    found = {each.name: _property(each, hints[each.name], texts.get(each.name, "")) for each in fields(cls)}
    required = [each.name for each in fields(cls) if each.default is each.default_factory is MISSING]
    needed = {"required": required} if required else {}
    text = inspect.getdoc(cls) or ""
    return {"type": "object", "description": text, "properties": found, **needed, "additionalProperties": False}


def _property(each: Field[Any], kind: Any, text: str) -> Schema:
    """A field: its type, bounds, default and what it is."""
    schema = _type(kind)
    if (bounds := each.metadata.get("bounds")) and kind in (int, float):
        schema |= _bounds(bounds)
    if text := each.metadata.get("text", text):
        schema["description"] = text
    if each.default is not MISSING:
        schema["default"] = list(each.default) if isinstance(each.default, tuple) else each.default
    return schema


def _type(kind: Any) -> Schema:
    """A type of an annotation."""
    if get_origin(kind) is Literal:
        return {"enum": list(get_args(kind))}
    if isinstance(kind, UnionType):
        return {"anyOf": [_type(each) for each in get_args(kind)]}
    if get_origin(kind) is tuple:
        return {"type": "array", "items": _type(get_args(kind)[0])}
    if get_origin(kind) is list:
        return {"type": "array", "items": _type(get_args(kind)[0]), "minItems": 1}
    if get_origin(kind) is dict:
        return {"type": "object"}
    return {"type": KINDS[kind]}


def _bounds(bounds: Bounds) -> Schema:
    words = {"minimum": bounds.least, "maximum": bounds.most}
    words |= {"exclusiveMinimum": bounds.above, "exclusiveMaximum": bounds.below}
    return {word: value for word, value in words.items() if value is not None}


def _ref(name: str) -> str:
    return f"#/components/schemas/{name}"


def _object(required: dict[str, Schema], **optional: Schema) -> Schema:
    return {"type": "object", "properties": {**required, **optional}, "required": list(required)}


def _list(items: Schema, text: str) -> Schema:
    return {"type": "array", "items": items, "description": text}


TRANSLATION = _object(
    {
        "text": {"type": "string"},
        "score": {"type": "number", "description": "Sum of the tokens' log-probabilities, end token included."},
        "finished": {"type": "boolean", "description": "False: a limit cut it off."},
        "tokens": {"type": "integer", "description": "How many, without the end token."},
    },
    alignment=_list({"type": "integer"}, "The source token, from 0, of each token; only with the option align."),
    pieces=_list({"type": "string"}, "The text of each token; only with align."),
    source_pieces=_list({"type": "string"}, "The text of each source token; only with align."),
    alternatives=_list({"$ref": _ref("Translation")}, "The other outputs of the n best, or the other samples."),
)
FAILURE = _object({"error": {"type": "string"}, "status": {"type": "integer"}})
TRANSLATIONS = _object(
    {
        "model": {"type": "string"},
        "results": _list(
            {"anyOf": [{"$ref": _ref("Translation")}, FAILURE]}, "For each text, in order: a translation, or its error."
        ),
    },
    pivot={"type": "string", "description": "The first of two models that led to the language."},
)
SCORES = _object(
    {
        "model": {"type": "string"},
        "scores": _list(
            _object({"score": {"type": "number"}, "tokens": {"type": "array", "items": {"type": "number"}}}),
            "For each target its log-probability, and that of each token, end token included.",
        ),
    }
)


CARDS = _object(
    {
        "models": _list(
            _object(
                {
                    "name": {"type": "string"},
                    "engine": {"type": "string", "description": "Backend, and variant if it is not the default."},
                    "precision": {"type": "string"},
                    "steps": {
                        "type": "string",
                        "description": "What takes the steps that texts share: C++, or Python and why.",
                    },
                    "attention": {"type": "boolean", "description": "Whether the option align may be set."},
                    "source_tokens": {"type": "integer", "description": "Most tokens of a text."},
                    "limits": {"type": "object", "description": "The most that a request may ask for."},
                },
                bundle={"type": "string", "description": "Name of the bundle's folder."},
                sha256={"type": "string", "description": "Hash of its manifest, which has the hash of every file."},
                check=_object(
                    {
                        "passed": {"type": "boolean"},
                        "sentences": {"type": "integer"},
                        "equal": {"type": "object", "description": "By way of decoding: sentences with equal tokens."},
                    }
                ),
            ),
            "Each model; the first is the default.",
        )
    }
)
RELOADED = _object(
    {
        "models": _list(
            _object(
                {
                    "name": {"type": "string"},
                    "sha256": {"type": "string", "description": "Hash of its bundle's manifest."},
                    "new": {"type": "boolean", "description": "Whether it was opened now; its manifest has changed."},
                }
            ),
            "Each model.",
        )
    }
)


def _paths() -> dict[str, Schema]:
    sent = _object({"event": {"enum": ["piece", "result", "error"]}, "data": {"type": "string"}})
    stream = {"text/event-stream": {"schema": sent}}
    return {
        "/v1/translate": {"post": _post("translate", "Translate one or several texts.", "Translations", stream)},
        "/v1/score": {"post": _post("score", "Give the log-probability of translations.", "Scores")},
        "/v1/cards": {"get": _get("cards", "What the models are, and what may be asked of them.", "Cards")},
        "/healthz": {"get": _get("healthz", "Whether the server takes requests.", "Health")},
        "/healthz/live": {"get": _get("live", "Whether the server runs.", "Health")},
        "/healthz/ready": {"get": _get("ready", "Whether the server takes requests.", "Health")},
        "/metrics": {"get": _get("metrics", "Numbers for Prometheus.", "")},
        "/admin/reload": {"post": _reload()},
    }


def _post(name: str, summary: str, answer: str, more: Schema | None = None) -> Schema:
    body = {"application/json": {"schema": {"$ref": _ref(name.capitalize())}}}
    refusals = {str(status): _error(status) for status in ERRORS if status != 403}
    return {
        "operationId": name,
        "summary": summary,
        "requestBody": {"required": True, "content": body},
        "responses": {"200": _answer(answer, more), **refusals},
    }


def _reload() -> Schema:
    summary = "Open bundles that have changed, and serve them. Without a key, only the server's own machine may ask."
    errors = {str(status): _error(status) for status in (401, 403, 500)}
    return {"operationId": "reload", "summary": summary, "responses": {"200": _answer("Reloaded"), **errors}}


def _get(name: str, summary: str, answer: str) -> Schema:
    refusals = {} if answer == "Health" else {"401": _error(401)}
    if name in ("healthz", "ready"):
        refusals = {"503": {**_answer("Health"), "description": "The server is about to end."}}
    openly: Schema = {"security": []} if answer == "Health" else {}
    return {"operationId": name, "summary": summary, **openly, "responses": {"200": _answer(answer), **refusals}}


def _answer(name: str, more: Schema | None = None) -> Schema:
    plain = {"text/plain": {"schema": {"type": "string"}}}
    content = {"application/json": {"schema": {"$ref": _ref(name)}}} if name else plain
    return {"description": "The answer.", "content": {**content, **(more or {})}}


def _error(status: int) -> Schema:
    return {
        "description": ERRORS[status],
        "content": {"application/json": {"schema": {"$ref": _ref("Error")}}},
    }
