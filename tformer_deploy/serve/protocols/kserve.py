"""KServe v2, which is Triton's protocol too: texts as a BYTES tensor `text`, translations as tensors.

The Open Inference Protocol over HTTP, with Triton's extensions `binary_tensor_data` and `parameters`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ... import __version__
from ...base.errors import ConfigError, unknown
from ...translate.translator import Result
from ..answers import Json, parse_object, read_body
from ..models import Model, Models, UnknownModel
from ..texts import all_results
from ..waiting import translate_all
from .inference import INPUTS, OUTPUTS, Asked, check_outputs, outputs_of, read_asked
from .tensors import as_objects, parameters_of, read_tensors

OPEN = ("/v2/health/live", "/v2/health/ready")
LENGTH = "Inference-Header-Content-Length"
"""Header: bytes of JSON, where binary tensors follow."""
KEYS = ("id", "inputs", "outputs", "parameters", "model_name", "model_version")
ABSENT = ("repository", "systemsharedmemory", "cudasharedmemory", "trace", "logging")
OF_MODELS = ("config", "stats", "trace/setting", "generate", "generate_stream")
"""Triton's extensions that are refused by name."""


@dataclass(frozen=True)
class Infer:
    """A request."""

    asked: Asked
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
        return Json(metadata(_model_of(models, request)))

    async def kserve_model_ready(request: Request) -> Response:
        return Json({"name": _model_of(models, request).name, "ready": True})

    async def kserve_infer(request: Request) -> Response:
        return await _infer(request, _model_of(models, request))

    async def kserve_index(request: Request) -> Response:
        listed = [
            {"name": model.name, "version": model.version, "state": "READY", "reason": ""} for model in models.listed()
        ]
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
        Route("/v2/models/stats", kserve_absent),
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
    return in_version(models, request.path_params["name"], request.path_params.get("version", ""))


def in_version(models: Models, name: str, version: str) -> Model:
    """A model, in a version if that is not empty. Raises UnknownModel."""
    model = models.get(name)
    if version and version != model.version:
        has = f"it has '{model.version}'" if model.version else "it has none"
        raise UnknownModel(f"model '{model.name}' has no version '{version:.80}': {has}; or name no version")
    return model


def metadata(model: Model) -> dict[str, Any]:
    """A model's inputs and outputs."""
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
    infer = read_request(parse_object(body[:end]), body[end:])
    outcomes = await translate_all(request, model, infer.asked.pairs, infer.asked.decoding)
    return _answer(model, infer, all_results(outcomes))


def read_request(body: dict[str, Any], binary: bytes) -> Infer:
    """A request as it was sent. Raises ConfigError."""
    for key in body:
        if key not in KEYS:
            raise unknown("key of the body", f"{key:.40}", KEYS)
    parameters, inputs = dict(parameters_of(body)), read_tensors(body.get("inputs"), binary)
    all_binary = parameters.pop("binary_data_output", False) is True
    outputs = {name: all_binary for name in OUTPUTS}
    if body.get("outputs"):
        wanted = as_objects("outputs", body["outputs"])
        outputs = {each["name"]: parameters_of(each).get("binary_data", all_binary) is True for each in wanted}
        check_outputs(outputs)
    sent = body.get("id", "")
    if not isinstance(sent, str):
        raise ConfigError("id: must be a string")
    return Infer(read_asked(inputs, parameters), outputs, sent)


def _answer(model: Model, infer: Infer, results: Sequence[Result]) -> Response:
    """The outputs that are wanted: in JSON, or after it."""
    outputs = {tensor.name: tensor for tensor in outputs_of(model, infer.asked, results)}
    described, binary = [], b""
    for name, is_binary in infer.outputs.items():
        tensor = outputs[name]
        if is_binary:
            packed = tensor.packed()
            described.append({**tensor.described(), "parameters": {"binary_data_size": len(packed)}})
            binary += packed
        else:
            described.append({**tensor.described(), "data": tensor.values})
    answer = {"model_name": model.name, "model_version": model.version, "outputs": described}
    header = json.dumps({**answer, "id": infer.id} if infer.id else answer, ensure_ascii=False).encode()
    if not any(infer.outputs.values()):
        return Response(header, media_type="application/json")
    return Response(header + binary, headers={LENGTH: str(len(header))}, media_type="application/octet-stream")
