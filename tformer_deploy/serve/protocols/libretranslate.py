"""LibreTranslate's protocol: `POST /translate` and `GET /languages`, for its clients and front ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...base.errors import ConfigError
from ...base.settings import from_dict
from ...translate.translator import Result
from ..answers import Json, as_texts, check_key, headers_of, message_of, read_fields, status_of
from ..errors import NoKey
from ..languages import UnknownPair, shown
from ..models import Model, Models
from ..waiting import translate_lines

PATHS = ("/translate", "/languages", "/detect")
SUBMITS = ("/translate",)
OPEN = ("/languages",)
"""Needs no key, as front ends ask before they have one."""
KEY_IN_BODY = ("/translate", "/detect")


@dataclass(frozen=True)
class Asked:
    """The body of `/translate`."""

    q: str | list[str]
    """One text, or several."""
    source: str
    """Language of the texts; `auto`: the only one that the target has."""
    target: str
    format: str = "text"
    alternatives: int | str = 0
    """Further translations of each text."""
    api_key: str = ""

    def __post_init__(self) -> None:
        as_texts("q", self.q)
        for name in ("source", "target"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ConfigError(f"{name}: must be a language's code, such as en")
        if self.format != "text":
            raise ConfigError(f"format={self.format!r:.40}: only text is translated, no markup: send format=text")

    @property
    def texts(self) -> list[str]:
        """All texts."""
        return as_texts("q", self.q)

    @property
    def further(self) -> int:
        """How many alternatives. Raises ConfigError."""
        digits = "" if isinstance(self.alternatives, bool) else str(self.alternatives)
        if not digits.isdecimal() or not digits.isascii() or len(digits) > 9:  # Python reads no more than thousands
            raise ConfigError(f"alternatives={self.alternatives!r:.40}: must be a whole number from 0")
        return int(digits)


def failed(error: BaseException) -> Response:
    """The answer to a request that failed: a wrong key is 403, languages that are not there 400."""
    status = 403 if isinstance(error, NoKey) else 400 if isinstance(error, UnknownPair) else status_of(error)
    return Json({"error": message_of(error)}, status, headers_of(error))


def routes(models: Models) -> list[Route]:
    """The routes."""

    async def translate(request: Request) -> Response:
        fields = await read_fields(request, models.body_bytes)
        check_key(request, fields.get("api_key"))
        asked = from_dict(Asked, fields, "body")
        auto = asked.source.lower() == "auto"
        source = models.pairs.only_source(asked.target) if auto else asked.source
        through = models.find(source, asked.target)
        results = await translate_lines(request, through, asked.texts, options(through[-1], asked.further))
        answer: dict[str, Any] = {"translatedText": [joined(each) for each in results]}
        if auto:
            detected = {"confidence": 100, "language": models.pairs.spelled(source)}
            answer["detectedLanguage"] = [detected for _ in results]
        if asked.further:
            answer["alternatives"] = [[joined(each, n) for n in range(1, asked.further + 1)] for each in results]
        if isinstance(asked.q, str):
            answer = {name: values[0] for name, values in answer.items()}
        return Json(answer)

    async def languages(request: Request) -> Response:
        pairs = models.pairs
        return Json(
            [
                {
                    "code": pairs.spelled(code),
                    "name": shown(code),
                    "targets": [pairs.spelled(target) for target in pairs.targets(code)],
                }
                for code in pairs.codes
            ]
        )

    async def detect(request: Request) -> Response:
        fields = await read_fields(request, models.body_bytes)
        check_key(request, fields.get("api_key"))
        raise ConfigError("languages are not detected: say the source language")

    return [
        Route("/translate", translate, methods=["POST"]),
        Route("/languages", languages, methods=["GET"]),
        Route("/detect", detect, methods=["POST"]),
    ]


def options(model: Model, further: int) -> dict[str, Any]:
    """Decoding options for so many alternatives beside the best output."""
    usual = model.translator.options
    if not further:
        return {}
    return {"n_best": further + 1, **({} if usual.sampling else {"beams": max(usual.beams, further + 1)})}


def joined(lines: list[Result], number: int = 0) -> str:
    """The text of lines; with a number, that of their alternatives. A line that has fewer keeps its best."""
    chosen = ([line, *line.alternatives] for line in lines)
    return "\n".join(each[number].text if number < len(each) else each[0].text for each in chosen)
