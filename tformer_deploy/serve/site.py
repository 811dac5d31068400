"""What people see: a page to translate with, the models' cards, the description of the routes, and a page of it."""

from __future__ import annotations

import json
from base64 import b64encode
from hashlib import sha256
from html import escape
from pathlib import Path
from re import DOTALL, findall
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from .answers import Json
from .cards import card
from .models import Models
from .openapi import description

FOLDER = Path(__file__).parent / "page"
CLOSED = ("default-src 'none'", "img-src data:", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'")


def routes(models: Models, key: bool) -> list[Route]:
    """The routes. `key`: whether clients need one."""
    described = description(key)
    index, cards = html_of("index.html"), [card(model) for model in models]
    docs = html_of("docs.html").replace("<!-- content -->", docs_content(described))

    async def show_index(request: Request) -> Response:
        return page(index)

    async def show_cards(request: Request) -> Response:
        return Json({"models": cards})

    async def openapi(request: Request) -> Response:
        return Json(described)

    async def show_docs(request: Request) -> Response:
        return page(docs)

    pages = [Route("/", show_index), Route("/docs", show_docs)]
    return [*pages, Route("/openapi.json", openapi), Route("/v1/cards", show_cards)]


def html_of(name: str) -> str:
    """A page of the package."""
    return (FOLDER / name).read_text(encoding="utf-8")


def page(html: str) -> Response:
    """A page that may run the code and styles that it has itself, may ask this server, and nothing else."""
    parts = {tag: findall(rf"<{tag}>(.*?)</{tag}>", html, DOTALL) for tag in ("style", "script")}
    allowed = [f"{tag}-src {' '.join(map(_hash, found))}" for tag, found in parts.items() if found]
    policy = "; ".join([*CLOSED, "connect-src 'self'", *allowed])
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
    return HTMLResponse(html, headers=headers)


def _hash(content: str) -> str:
    return f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"


def docs_content(described: dict[str, Any]) -> str:
    """A description as HTML: each route with what it takes and answers, then the schemas."""
    parts = []
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}</p>")
            if body := operation.get("requestBody"):
                parts.append(f"<p>Takes {_linked(body['content']['application/json']['schema'])}.</p>")
            rows = [[code, _answer(found), escape(found["description"])] for code, found in _responses(operation)]
            parts.append(_table(["status", "answer", ""], rows))
    for name, schema in described["components"]["schemas"].items():
        parts.append(f'<h2 id="{name}">{name}</h2><p>{escape(schema.get("description", ""))}</p>')
        required = schema.get("required", ())
        rows = [
            [f"<code>{escape(key)}</code>", _kind(each), _default(each, key in required), _text(each)]
            for key, each in schema["properties"].items()
        ]
        parts.append(_table(["key", "type", "default", ""], rows))
    return "\n".join(parts)


def _responses(operation: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return list(operation["responses"].items())


def _answer(response: dict[str, Any]) -> str:
    kinds = response["content"].items()
    return ", or ".join(_linked(kind["schema"]) if "json" in name else f"<code>{name}</code>" for name, kind in kinds)


def _linked(schema: dict[str, Any]) -> str:
    name = schema["$ref"].rpartition("/")[2]
    return f'<a href="#{name}">{name}</a>'


def _kind(schema: dict[str, Any]) -> str:
    """A type, in words."""
    if "$ref" in schema:
        return _linked(schema)
    if "anyOf" in schema:
        return " or ".join(map(_kind, schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(f"<code>{escape(json.dumps(each))}</code>" for each in schema["enum"])
    if schema["type"] == "array":
        return f"list of {_kind(schema['items'])}"
    return escape(schema["type"])


def _default(schema: dict[str, Any], required: bool) -> str:
    if required:
        return "required"
    return f"<code>{escape(json.dumps(schema['default']))}</code>" if "default" in schema else ""


BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "less than"}


def _text(schema: dict[str, Any]) -> str:
    """What a key is, and its bounds."""
    limits = " and ".join(f"{words} {schema[name]:.10g}" for name, words in BOUNDS.items() if name in schema)
    return escape(" ".join(filter(None, [schema.get("description", ""), f"{limits.capitalize()}." if limits else ""])))


def _table(heads: list[str], rows: list[list[str]]) -> str:
    head = "".join(f'<th scope="col">{each}</th>' for each in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
