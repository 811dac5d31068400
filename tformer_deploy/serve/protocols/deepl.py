"""DeepL's protocol: `POST /v2/translate`, and `/v2/languages` and `/v2/usage`, for its clients with a server URL."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...base.errors import ConfigError, DataError, LimitError, unknown
from ..answers import Json, as_texts, headers_of, message_of, read_fields, status_of
from ..errors import NoKey, TooLarge
from ..languages import Pairs, shown
from ..models import Models
from ..waiting import translate_lines

PATHS = ("/v2/translate", "/v2/languages", "/v2/usage", "/v2/document", "/v2/glossar", "/v2/write", "/v3/")
SUBMITS = ("/v2/translate",)
REGIONS = {"EN": ("EN-GB", "EN-US"), "PT": ("PT-BR", "PT-PT")}
"""What its clients ask for instead of a target language, which they refuse."""
NO_LIMIT = 10**12
"""Characters: what DeepL says where there is no limit."""
TRUE, FALSE = (True, "1", "true"), (False, "0", "false")
VALUES: dict[str, tuple[Any, ...]] = {
    "show_billed_characters": (*TRUE, *FALSE),
    "preserve_formatting": (*TRUE, *FALSE),  # nothing is ever changed
    "split_sentences": (*TRUE, *FALSE, "nonewlines"),
    "formality": ("default", "prefer_more", "prefer_less"),  # the last two: if the language has them
    "model_type": ("latency_optimized", "prefer_quality_optimized"),
}
"""What an option may be; others change results in ways that are not ours."""


def failed(error: BaseException) -> Response:
    """The answer to a request that failed: the statuses by which clients choose an exception."""
    wrong = isinstance(error, (ConfigError, LimitError, DataError)) and not isinstance(error, TooLarge)
    status = 403 if isinstance(error, NoKey) else 400 if wrong else status_of(error)
    return Json({"message": message_of(error)}, status, headers_of(error))


def routes(models: Models) -> list[Route]:
    """The routes."""
    characters = 0

    async def fields_of(request: Request) -> dict[str, Any]:
        return await read_fields(request, models.body_bytes)

    async def deepl_translate(request: Request) -> Response:
        nonlocal characters
        fields = await fields_of(request)
        texts = as_texts("text", fields.pop("text", None))
        source, target = (language(fields, name) for name in ("source_lang", "target_lang"))
        if not target:
            raise ConfigError("target_lang: must be a language's code, such as DE")
        check_options(fields)
        source = source or models.pairs.only_source(target)
        through = models.find(source, target)
        whole = fields.get("split_sentences", "1") not in TRUE
        asked = [" ".join(text.split("\n")) for text in texts] if whole else texts
        results = await translate_lines(request, through, asked, {})
        characters += sum(map(len, texts))
        answers = []
        for text, lines in zip(texts, results, strict=True):
            answer = {"detected_source_language": source.upper(), "text": "\n".join(line.text for line in lines)}
            billed = {"billed_characters": len(text)} if fields.get("show_billed_characters") in TRUE else {}
            answers.append({**answer, **billed})
        return Json({"translations": answers})

    async def deepl_languages(request: Request) -> Response:
        fields = {**request.query_params, **(await fields_of(request) if "content-type" in request.headers else {})}
        side = fields.get("type", "source")
        if side not in ("source", "target"):
            raise unknown("type", str(side), ("source", "target"))
        return Json(listed(models.pairs, side))

    async def deepl_usage(request: Request) -> Response:
        return Json({"character_count": characters, "character_limit": NO_LIMIT})

    return [
        Route("/v2/translate", deepl_translate, methods=["POST"]),
        Route("/v2/languages", deepl_languages, methods=["GET", "POST"]),
        Route("/v2/usage", deepl_usage, methods=["GET", "POST"]),
    ]


def language(fields: dict[str, Any], name: str) -> str:
    """A language's code, taken from the fields; empty if there is none. Raises ConfigError."""
    code = fields.pop(name, None) or ""
    if not isinstance(code, str):
        raise ConfigError(f"{name}: must be a language's code, such as DE")
    return code.strip()


def check_options(fields: dict[str, Any]) -> None:
    """Raise ConfigError for what would change results and cannot be done."""
    for name, value in fields.items():
        if name not in VALUES:
            raise ConfigError(f"{name:.40} is not an option of this server: leave it out")
        if not any(value == each and type(value) is type(each) for each in VALUES[name]):
            valid = ", ".join(str(each) for each in VALUES[name])
            raise ConfigError(f"{name}={value!r:.40} is not supported by this server: it may be {valid}")


def listed(pairs: Pairs, side: str) -> list[dict[str, Any]]:
    """The source or target languages."""
    codes = pairs.sources
    if side == "target":
        codes = sorted({target for source in pairs.sources for target in pairs.targets(source)})
    found = []
    for code in codes:
        ours = pairs.spelled(code).upper()
        for name in REGIONS.get(ours, (ours,)) if side == "target" else (ours,):
            formality = {"supports_formality": False} if side == "target" else {}
            found.append({"language": name, "name": shown(name.lower().replace("-", "_")), **formality})
    return found
