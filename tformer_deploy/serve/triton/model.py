"""The model that runs in Triton's Python backend: its requests are lines of one scheduler.

Triton calls `execute` with new requests while others run. Answers are sent when they are known, by a thread of their
own, so that the scheduler's steps do not wait for Triton.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from ...base.errors import TformerError, extras
from ...translate.opening import open_translator
from ...translate.scheduler import Line
from ..errors import message_of, status_of
from ..models import Model
from ..protocols.inference import PIECE, Asked, outputs_of, read_asked
from ..protocols.tensors import Tensor, texts_of
from ..served import warm_up
from ..texts import Outcome, all_results, cancel, check_busy, check_count, submit_all
from .repository import read_parameters

CHECK_SECONDS = 0.1
"""How often Triton is asked whether a request was cancelled."""
KINDS = {"BYTES": np.object_, "FP64": np.float64, "BOOL": np.bool_, "INT32": np.int32}
NUMBERS = {"f": "FP64", "b": "BOOL", "i": "INT64", "u": "INT64"}
"""Datatypes by kinds of arrays; all others are texts."""
CODES = {
    400: "INVALID_ARG",
    422: "INVALID_ARG",
    404: "NOT_FOUND",
    429: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "UNAVAILABLE",
    499: "CANCELLED",
}
"""Names of Triton's codes for our statuses; for all others, INTERNAL. Triton makes them after the import of this."""


class TritonPythonModel:
    """What Triton loads, calls and unloads."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the bundle, and take its first steps. Raises TritonModelException."""
        config = json.loads(args["model_config"])
        folder = Path(args["model_repository"]) / args["model_version"]
        try:
            settings, caps = read_parameters(config.get("parameters", {}))
            with extras():
                translator = open_translator(settings.options(folder))
            self.model = Model(args["model_name"], translator, caps, settings.slots, settings.max_queue)
            warm_up(self.model)
        except TformerError as error:
            raise pb_utils.TritonModelException(message_of(error)) from None
        self.streams = pb_utils.using_decoupled_model_transaction_policy(config)
        self.outbox = Outbox(self.model)

    def execute(self, requests: Sequence[Any]) -> None:
        """Queue the texts of requests; their answers come later."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                asked = _read(request, self.streams)
                self.outbox.submit(sender, asked, request.requested_output_names())
            except Exception as error:
                send_error(sender, error)

    def finalize(self) -> None:
        """Unload, when all texts have ended."""
        self.model.close()
        self.outbox.close()


class Answering:
    """A request on its way to its answer."""

    def __init__(self, sender: Any, asked: Asked, wanted: Collection[str]) -> None:
        self.sender, self.asked, self.wanted = sender, asked, wanted
        self.lines: list[Line | TformerError] = []
        self.left = len(asked.texts.values)
        """Texts that have not ended."""


class Outbox:
    """Queues the texts of requests, and sends pieces and answers in a thread of its own."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        """What the thread is to do; None: end."""
        self._pending: set[Answering] = set()
        self._thread = Thread(target=self._run, name="tformer answers", daemon=True)
        self._thread.start()

    def submit(self, sender: Any, asked: Asked, wanted: Collection[str]) -> None:
        """Queue the texts of a request. Raises errors that concern all of them."""
        check_count(len(asked.pairs), self.model)
        answering = Answering(sender, asked, wanted)
        due = time.monotonic() + self.model.caps.seconds
        write = (lambda piece: self._tasks.put(partial(self._send_piece, answering, piece))) if asked.stream else None
        answering.lines = submit_all(self.model, asked.pairs, asked.decoding, due, write)
        self._tasks.put(partial(self._pending.add, answering))
        ended = partial(self._end_text, answering)
        for line in answering.lines:
            if isinstance(line, Line):
                line.future.add_done_callback(lambda _: self._tasks.put(ended))
            else:
                self._tasks.put(ended)

    def close(self) -> None:
        """End the thread when all is sent."""
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        checked = 0.0
        while True:
            try:
                with suppress(Empty):
                    task = self._tasks.get(timeout=CHECK_SECONDS if self._pending else None)
                    if not task:
                        return
                    task()
                if time.monotonic() - checked > CHECK_SECONDS:
                    checked = time.monotonic()
                    for each in self._pending:
                        if each.sender.is_cancelled():
                            cancel(each.lines)
            except Exception:
                pb_utils.Logger.log_error(traceback.format_exc())

    def _send_piece(self, answering: Answering, piece: str) -> None:
        if PIECE in answering.wanted:
            tensor = Tensor(PIECE, "BYTES", [1], [piece])
            answering.sender.send(pb_utils.InferenceResponse([_sent(tensor)]))

    def _end_text(self, answering: Answering) -> None:
        answering.left -= 1
        if answering.left:
            return
        self._pending.discard(answering)
        try:
            outcomes = [_outcome(line) for line in answering.lines]
            check_busy(outcomes)
            tensors = outputs_of(self.model, answering.asked, all_results(outcomes))
            response = pb_utils.InferenceResponse([_sent(each) for each in tensors if each.name in answering.wanted])
        except Exception as error:
            send_error(answering.sender, error)
        else:
            answering.sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def send_error(sender: Any, error: Exception) -> None:
    """Answer a request that failed."""
    if not isinstance(error, TformerError):
        pb_utils.Logger.log_error("".join(traceback.format_exception(error)))
    code = getattr(pb_utils.TritonError, CODES.get(status_of(error), "INTERNAL"))
    response = pb_utils.InferenceResponse(error=pb_utils.TritonError(message_of(error), code))
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _outcome(line: Line | TformerError) -> Outcome:
    return line.future.exception() or line.result() if isinstance(line, Line) else line


def _read(request: Any, streams: bool) -> Asked:
    """What a request of Triton asks. Raises ConfigError."""
    parameters = json.loads(request.parameters() or "{}")
    if request.timeout():
        parameters["timeout"] = request.timeout()
    if request.correlation_id():
        parameters["sequence_id"] = request.correlation_id()
    inputs = {tensor.name(): _received(tensor.name(), tensor.as_numpy()) for tensor in request.inputs()}
    return read_asked(inputs, parameters, streams)


def _received(name: str, values: NDArray[Any]) -> Tensor:
    """An input. Raises ConfigError for a text that is not UTF-8."""
    datatype = NUMBERS.get(values.dtype.kind, "BYTES")
    flat: list[Any] = values.flatten().tolist()
    if datatype == "BYTES":
        flat = texts_of(name, flat)
    return Tensor(name, datatype, list(values.shape), flat)


def _sent(tensor: Tensor) -> Any:
    """An output."""
    values = [each.encode() for each in tensor.values] if tensor.datatype == "BYTES" else tensor.values
    return pb_utils.Tensor(tensor.name, np.array(values, KINDS[tensor.datatype]).reshape(tensor.shape))
