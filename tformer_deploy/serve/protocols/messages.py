"""KServe v2's messages over gRPC, of the package `tritonclient`: requests to what is asked, outputs to answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from ...base.errors import ConfigError
from ..models import Model
from .inference import OUTPUTS, PIECE, Asked, check_outputs, read_asked
from .tensors import Tensor, parameters_of, read_tensor, texts_of

CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""Where a tensor's values stand, if they are not raw."""
FINAL, WANTS_FINAL = "triton_final_response", "triton_enable_empty_final_response"
"""Parameters of streams: of the last answer to a request; of a request that wants that one marked, as it always is."""


@dataclass(frozen=True)
class Infer:
    """A request."""

    asked: Asked
    outputs: Sequence[str]
    """Those that are wanted."""

    def wanted(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Those of some outputs that are wanted."""
        return [each for each in outputs if each.name in self.outputs]


def read_infer(message: Any, streams: bool = False) -> Infer:
    """A ModelInferRequest. `streams`: the answer may come in pieces. Raises ConfigError."""
    parameters = _parameters(message.parameters)
    if streams:
        parameters.pop(WANTS_FINAL, None)
    inputs: dict[str, Tensor] = {}
    if message.raw_input_contents and len(message.raw_input_contents) != len(message.inputs):
        counts = f"{len(message.inputs)} inputs, {len(message.raw_input_contents)} raw_input_contents"
        raise ConfigError(f"{counts}: send all inputs raw, or none")
    raw = message.raw_input_contents or [None] * len(message.inputs)
    for described, binary in zip(message.inputs, raw, strict=True):
        if described.name in inputs:
            raise ConfigError(f"input '{described.name:.40}' stands twice")
        inputs[described.name] = _tensor(described, binary)
    asked = read_asked(inputs, parameters, streams)
    known = [*OUTPUTS, PIECE] if asked.stream else list(OUTPUTS)
    for output in message.outputs:
        parameters_of({"parameters": _parameters(output.parameters)})
    wanted = [output.name for output in message.outputs]
    check_outputs(wanted, known)
    return Infer(asked, wanted or known)


def response(model: Model, number: str, outputs: Sequence[Tensor], final: bool | None = None) -> Any:
    """A ModelInferResponse to the request of an id. `final`: of a stream, whether it is the last."""
    answer = pb.ModelInferResponse(model_name=model.name, model_version=model.version, id=number)
    for tensor in outputs:
        answer.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        answer.raw_output_contents.append(tensor.packed())
    if final is not None:
        answer.parameters[FINAL].bool_param = final
    return answer


def _tensor(described: Any, binary: bytes | None) -> Tensor:
    """An input. Raises ConfigError."""
    header = {
        "name": described.name,
        "datatype": described.datatype,
        "shape": list(described.shape),
        "parameters": _parameters(described.parameters),
    }
    parameters_of(header)
    if binary is None and described.datatype in CONTENTS:
        values = getattr(described.contents, CONTENTS[described.datatype])
        header["data"] = texts_of(described.name, values) if described.datatype == "BYTES" else list(values)
    return read_tensor(header, binary)


def _parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(each, each.WhichOneof("parameter_choice") or "", None) for name, each in parameters.items()}
