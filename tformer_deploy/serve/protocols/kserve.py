"""KServe v2, which is Triton's protocol too: texts as a BYTES tensor `text`, translations as tensors.

The Open Inference Protocol over HTTP, with Triton's extensions `binary_tensor_data` and `parameters`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ... import __version__
from ...base.errors import ConfigError, unknown
from ...base.settings import parse_settings
from ...decoding import DecodeOptions
from ...translate.translator import Result
from ..answers import Json, parse_object, read_body
from ..models import Model, Models, UnknownModel
from ..waiting import all_results, translate_all
from .tensors import Tensor, as_objects, parameters_of, read_tensors

OPEN = ("/v2/health/live", "/v2/health/ready")
LENGTH = "Inference-Header-Content-Length"
"""Header: bytes of JSON, where binary tensors follow."""
INPUTS = {"text": "BYTES"}
OUTPUTS = {"text": "BYTES", "score": "FP64", "finished": "BOOL", "tokens": "INT32"}
OPTIONS = [each.name for each in fields(DecodeOptions)]
KEYS = ("id", "inputs", "outputs", "parameters", "model_name", "model_version")
NONE = Result("", [], -sys.float_info.max)
"""Stands where a text has fewer outputs than were asked for; its `tokens` are -1."""
REFUSED = {
    "sequence_id": "requests have no state",
    "sequence_start": "requests have no state",
    "sequence_end": "requests have no state",
    "priority": "texts start in the order in which they came",
    "timeout": "the server's own limit of seconds holds",
}
"""Triton's parameters of a request that would change what is done."""
ABSENT = ("repository", "systemsharedmemory", "cudasharedmemory", "trace", "logging")
OF_MODELS = ("config", "stats", "trace/setting", "generate", "generate_stream")
"""Triton's extensions that are refused by name."""


@dataclass(frozen=True)
class Infer:
    """What a request asks."""

    texts: Tensor
    prefixes: Sequence[str]
    decoding: dict[str, Any]
    outputs: dict[str, bool] = field(default_factory=dict)
    """Each output that is wanted, and whether binary."""
    id: str = ""


def routes(models: Models) -> list[Route]:
    """The routes."""

    async def kserve_server(request: Request) -> Response:
        extensions = ["binary_tensor_data", "parameters"]
        return Json({"name": "tformer", "version": __version__, "extensions": extensions})

    async def kserve_live(request: Request) -> Response:
        return Json({"live": True})

    async def kserve_ready(request: Request) -> Response:
        return Json({"ready": True})

    async def kserve_model(request: Request) -> Response:
        return Json(_metadata(_model_of(models, request)))

    async def kserve_model_ready(request: Request) -> Response:
        return Json({"name": _model_of(models, request).name, "ready": True})

    async def kserve_infer(request: Request) -> Response:
        return await _infer(request, _model_of(models, request))

    async def kserve_index(request: Request) -> Response:
        listed = [{"name": model.name, "version": model.version, "state": "READY", "reason": ""} for model in models]
        return Json(listed)

    async def kserve_absent(request: Request) -> Response:
        raise HTTPException(404, f"{request.url.path:.80} is of an extension that this server does not have")

    both = ["GET", "POST"]
    of_models = [
        ("", ["GET"], kserve_model),
        ("/ready", ["GET"], kserve_model_ready),
        ("/infer", ["POST"], kserve_infer),
        *((f"/{name}", both, kserve_absent) for name in OF_MODELS),
    ]
    versions = ("", "/versions/{version}")
    return [
        Route("/v2", kserve_server),
        Route("/v2/health/live", kserve_live),
        Route("/v2/health/ready", kserve_ready),
        Route("/v2/repository/index", kserve_index, methods=["POST"]),
        *(
            Route(f"/v2/models/{{name}}{version}{path}", handler, methods=methods)
            for version in versions
            for path, methods, handler in of_models
        ),
        *(Route(f"/v2/{name}{{rest:path}}", kserve_absent, methods=both) for name in ABSENT),
    ]


def _model_of(models: Models, request: Request) -> Model:
    """The model that a path names, in that version. Raises UnknownModel."""
    model, version = models.get(request.path_params["name"]), request.path_params.get("version", "")
    if version and version != model.version:
        has = f"it has '{model.version}'" if model.version else "it has none"
        raise UnknownModel(f"model '{model.name}' has no version '{version:.80}': {has}; or name no version")
    return model


def _metadata(model: Model) -> dict[str, Any]:
    return {
        "name": model.name,
        "versions": [model.version] if model.version else [],
        "platform": "tformer_bundle",
        "inputs": [{"name": name, "datatype": datatype, "shape": [-1]} for name, datatype in INPUTS.items()],
        "outputs": [{"name": name, "datatype": datatype, "shape": [-1]} for name, datatype in OUTPUTS.items()],
    }


async def _infer(request: Request, model: Model) -> Response:
    if encoding := request.headers.get("content-encoding"):
        raise ConfigError(f"Content-Encoding '{encoding:.40}' is not supported: send the body as it is")
    body = await read_body(request, model.caps.body_bytes)
    length = request.headers.get(LENGTH, "")
    if length and not (length.isascii() and length.isdigit() and int(length[:12]) <= len(body)):
        raise ConfigError(f"{LENGTH}: {length:.40} is not the length of the JSON in a body of {len(body)} bytes")
    end = int(length) if length else len(body)
    asked = read_request(parse_object(body[:end]), body[end:])
    pairs = list(zip(asked.texts.values, asked.prefixes, strict=True))
    outcomes = await translate_all(request, model, pairs, asked.decoding)
    return _answer(model, asked, all_results(outcomes))


def read_request(body: dict[str, Any], binary: bytes) -> Infer:
    """A request as it was sent. Raises ConfigError."""
    for key in body:
        if key not in KEYS:
            raise unknown("key of the body", f"{key:.40}", KEYS)
    parameters, inputs = dict(parameters_of(body)), read_tensors(body.get("inputs"), binary)
    all_binary = parameters.pop("binary_data_output", False) is True
    texts = _texts(inputs, "text")
    if not texts or not texts.values:
        raise ConfigError("input 'text': send a BYTES tensor with one text at least")
    prefixes = _texts(inputs, "prefix")
    if prefixes and len(prefixes.values) != len(texts.values):
        counts = f"{len(texts.values)} texts, {len(prefixes.values)} prefixes"
        raise ConfigError(f"{counts}: give each text one, empty for none")
    outputs = {name: all_binary for name in OUTPUTS}
    if body.get("outputs"):
        wanted = as_objects("outputs", body["outputs"])
        outputs = {each["name"]: parameters_of(each).get("binary_data", all_binary) is True for each in wanted}
        for name in outputs:
            if name not in OUTPUTS:
                raise unknown("output", f"{name:.40}", OUTPUTS)
    begins = prefixes.values if prefixes else [""] * len(texts.values)
    decoding, sent = _decoding(parameters, inputs), body.get("id", "")
    if not isinstance(sent, str):
        raise ConfigError("id: must be a string")
    return Infer(texts, begins, decoding, outputs, sent)


def _texts(inputs: dict[str, Tensor], name: str) -> Tensor | None:
    """Take an input of texts. Raises ConfigError."""
    tensor = inputs.pop(name, None)
    if tensor and tensor.datatype != "BYTES":
        raise ConfigError(f"input '{name}': must be of type BYTES, not {tensor.datatype}")
    return tensor


def _decoding(parameters: dict[str, Any], inputs: dict[str, Tensor]) -> dict[str, Any]:
    """Decoding options: parameters, and further inputs of one value each. Raises ConfigError."""
    for name, reason in REFUSED.items():
        if name in parameters:
            raise ConfigError(f"parameter '{name}' is not supported: {reason}")
    for name, tensor in inputs.items():
        if name not in OPTIONS:
            raise unknown("input", f"{name:.40}", ["text", "prefix", *OPTIONS])
        if len(tensor.values) != 1:
            raise ConfigError(f"input '{name}': {len(tensor.values)} values: give one, which holds for all texts")
        if name in parameters:
            raise ConfigError(f"'{name}' is both an input and a parameter: give one of them")
        parameters[name] = tensor.values[0]
    for name in parameters:
        if name not in OPTIONS:
            raise unknown("parameter", f"{name:.40}", OPTIONS)
    return {
        name: parse_settings(DecodeOptions, "parameters", {name: value})[name] if isinstance(value, str) else value
        for name, value in parameters.items()
    }


def _answer(model: Model, asked: Infer, results: Sequence[Result]) -> Response:
    """The outputs that are wanted: in JSON, or after it."""
    count = model.translator.asking(**asked.decoding).options.n_best
    shape = [*asked.texts.shape, count] if count > 1 else list(asked.texts.shape)
    each = [output for result in results for output in ([result, *result.alternatives] + [NONE] * count)[:count]]
    values: dict[str, list[Any]] = {
        "text": [output.text for output in each],
        "score": [output.score for output in each],
        "finished": [output.finished for output in each],
        "tokens": [-1 if output is NONE else len(output.ids) for output in each],
    }
    described, binary = [], b""
    for name, is_binary in asked.outputs.items():
        tensor = Tensor(name, OUTPUTS[name], shape, values[name])
        if is_binary:
            packed = tensor.packed()
            described.append({**tensor.described(), "parameters": {"binary_data_size": len(packed)}})
            binary += packed
        else:
            described.append({**tensor.described(), "data": tensor.values})
    answer = {"model_name": model.name, "model_version": model.version, "outputs": described}
    header = json.dumps({**answer, "id": asked.id} if asked.id else answer, ensure_ascii=False).encode()
    if not any(asked.outputs.values()):
        return Response(header, media_type="application/json")
    return Response(header + binary, headers={LENGTH: str(len(header))}, media_type="application/octet-stream")
