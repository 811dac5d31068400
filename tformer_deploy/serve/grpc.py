"""KServe v2 over gRPC: the calls that `protocols.kserve` answers over HTTP, and Triton's streams, by the same rules."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from concurrent.futures import Future
from contextlib import aclosing, contextmanager
from threading import Thread
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from .. import __version__
from ..base.errors import ConfigError, TformerError
from .answers import REQUEST_ID, message_of, status_of
from .app import Guard, request_id
from .errors import Absent, NoKey
from .models import Model, Models, UnknownModel
from .protocols.inference import PIECE, outputs_of
from .protocols.kserve import in_version, metadata
from .protocols.messages import Infer, read_infer, response
from .protocols.tensors import Tensor
from .texts import Outcome, all_results
from .waiting import Stream, translate_all

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""Codes for our statuses; for all others, INTERNAL."""
FAILURES = logging.getLogger("tformer_deploy.serve.grpc")
OPEN = ("ServerLive", "ServerReady")
"""Calls that need no key."""
STREAM = "ModelStreamInfer"
AT_ONCE = 256
"""Requests of one stream that run, or whose answers the client has not taken; no further one is read."""


class Caller:
    """A client that waits. When it goes away, gRPC cancels the task that answers it."""

    async def receive(self) -> MutableMapping[str, Any]:
        """Wait for ever."""
        await asyncio.Event().wait()
        raise AssertionError


class Service:
    """What `tritonclient`'s stubs ask for: a function for each call."""

    def __init__(self, guard: Guard) -> None:
        self.guard, self.ending = guard, asyncio.Event()

    def __getattr__(self, name: str) -> Callable[[Any, Any], Any]:
        return self._stream if name == STREAM else self._unary(name)

    def _unary(self, name: str) -> Callable[[Any, Any], Awaitable[Any]]:
        async def call(request: Any, context: Any) -> Any:
            with self._noted(name, context) as noted:
                try:
                    self._check_key(name, context)
                    with self.guard.current.use() as held:
                        calls = Calls(held.models, not self.guard.current.draining)
                        return await getattr(calls, name, _absent(name))(request)
                except Exception as error:
                    noted.append(error)
                    await _abort(context, error)

        return call

    async def _stream(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Answers to the requests of a stream, each as soon as it is there; errors are of their requests."""
        try:
            self._check_key(STREAM, context)
        except NoKey as error:
            with self._noted(STREAM, context) as noted:
                noted.append(error)
                await _abort(context, error)
        answers: asyncio.Queue[tuple[Any, bool] | None] = asyncio.Queue()
        places = asyncio.Semaphore(AT_ONCE)

        async def read() -> None:
            try:
                async with asyncio.TaskGroup() as running:
                    async for request in self._until_the_end(requests):
                        await places.acquire()
                        running.create_task(self._answer(request, context, answers))
            finally:
                answers.put_nowait(None)

        reading = asyncio.create_task(read())
        try:
            while found := await answers.get():
                answer, last = found
                yield answer
                if last:
                    places.release()
            await reading
        finally:
            reading.cancel()

    async def _until_the_end(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """The requests of a stream, until the client has no more or the server ends."""
        ending = asyncio.ensure_future(self.ending.wait())
        try:
            while True:
                coming = asyncio.ensure_future(anext(requests, None))
                await asyncio.wait({coming, ending}, return_when=asyncio.FIRST_COMPLETED)
                if not coming.done() or (request := coming.result()) is None:
                    coming.cancel()
                    return
                yield request
        finally:
            ending.cancel()

    async def _answer(self, request: Any, context: Any, answers: asyncio.Queue[tuple[Any, bool] | None]) -> None:
        """Put the answers to a request of a stream, each with whether it is the last."""
        with self._noted(STREAM, context) as noted:
            try:
                with self.guard.current.use() as held:
                    model = in_version(held.models, request.model_name, request.model_version)
                    infer = read_infer(request, streams=True)
                    async for outputs, last in _parts(model, infer):
                        answer = response(model, request.id, infer.wanted(outputs), last)
                        answers.put_nowait((pb.ModelStreamInferResponse(infer_response=answer), last))
            except Exception as error:
                noted.append(error)
                failed = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
                answer = pb.ModelStreamInferResponse(error_message=message_of(error), infer_response=failed)
                answers.put_nowait((answer, True))

    def _check_key(self, name: str, context: Any) -> None:
        """Raise NoKey for a call without the key, unless it needs none."""
        if name not in OPEN and not self.guard.has_key(dict(context.invocation_metadata())):
            raise NoKey("a key is needed: send authorization: Bearer KEY in the call's metadata")

    @contextmanager
    def _noted(self, name: str, context: Any) -> Iterator[list[Exception]]:
        """Log and count a request; the block names its error, if it has one."""
        errors: list[Exception] = []
        number, start, status = request_id(dict(context.invocation_metadata())), time.perf_counter(), 499
        REQUEST_ID.set(number)
        try:
            yield errors
            status = 200
        finally:
            error = errors[0] if errors else None
            if error and not isinstance(error, TformerError):
                FAILURES.error("request %s", number, exc_info=error)
            status = status_of(error) if error else status
            line = {"request": number, "method": "gRPC", "path": name, "status": status}
            self.guard.note(line, f"grpc_{name}", time.perf_counter() - start, error)


class Calls:
    """The calls that have one answer, of the models that are served now."""

    def __init__(self, models: Models, ready: bool) -> None:
        self.models, self.ready = models, ready

    async def ServerLive(self, request: Any) -> Any:
        """Whether the server runs."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any) -> Any:
        """Whether requests should come here."""
        return pb.ServerReadyResponse(ready=self.ready)

    async def ServerMetadata(self, request: Any) -> Any:
        """The server's name, version and extensions."""
        return pb.ServerMetadataResponse(name="tformer", version=__version__, extensions=["parameters"])

    async def ModelReady(self, request: Any) -> Any:
        """Whether there is a model, in that version."""
        try:
            in_version(self.models, request.name, request.version)
        except UnknownModel:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=self.ready)

    async def ModelMetadata(self, request: Any) -> Any:
        """A model's inputs and outputs."""
        return pb.ModelMetadataResponse(**metadata(in_version(self.models, request.name, request.version)))

    async def RepositoryIndex(self, request: Any) -> Any:
        """All models."""
        listed = [{"name": model.name, "version": model.version, "state": "READY"} for model in self.models.listed()]
        return pb.RepositoryIndexResponse(models=listed)

    async def ModelInfer(self, request: Any) -> Any:
        """Translations of texts."""
        model, infer = in_version(self.models, request.model_name, request.model_version), read_infer(request)
        [outputs] = [outputs async for outputs, _ in _parts(model, infer)]
        return response(model, request.id, infer.wanted(outputs))


def _absent(name: str) -> Callable[[Any], Awaitable[Any]]:
    async def refuse(request: Any) -> Any:
        raise Absent(f"{name} is of an extension that this server does not have: docs/serve.md")

    return refuse


async def _abort(context: Any, error: Exception) -> None:
    """End a call with an error."""
    await context.abort(CODES.get(status_of(error), grpc.StatusCode.INTERNAL), message_of(error))


async def _parts(model: Model, infer: Infer) -> AsyncIterator[tuple[list[Tensor], bool]]:
    """The outputs of an answer's parts, and whether each is the last. Raises the first error of a text."""
    asked, outcomes = infer.asked, list[Outcome]()
    if asked.stream:
        stream = await Stream.open(model, asked.pairs[0], asked.decoding)
        items = stream.items()
        async with aclosing(items):
            async for item in items:
                if not isinstance(item, str):
                    outcomes = [item]
                elif PIECE in infer.outputs:
                    yield [Tensor(PIECE, "BYTES", [1], [item])], False
    else:
        outcomes = await translate_all(Caller(), model, asked.pairs, asked.decoding)
    yield outputs_of(model, asked, all_results(outcomes)), True


class GrpcServer:
    """A server in a thread with an event loop of its own."""

    def __init__(self, guard: Guard, host: str, port: int, most_bytes: int, shared: bool = False) -> None:
        """Listen. `most_bytes`: of a request. `shared`: other processes listen on the port too.

        Raises ConfigError where the port is taken.
        """
        self._guard, self._most_bytes, self._shared = guard, most_bytes, shared
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._closed = False
        self._started: Future[tuple[asyncio.AbstractEventLoop, int]] = Future()
        self._thread = Thread(target=lambda: asyncio.run(self._serve()), name="tformer gRPC")
        self._thread.start()
        self._loop, self.port = self._started.result()

    def close(self, seconds: float) -> None:
        """Take no more calls; those that run get so many seconds to end."""
        if not self._closed:
            self._closed = True
            self._loop.call_soon_threadsafe(self._ending.set_result, seconds)
        self._thread.join()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        self._ending: asyncio.Future[float] = loop.create_future()
        options = [("grpc.max_receive_message_length", self._most_bytes), ("grpc.so_reuseport", int(self._shared))]
        server = grpc.aio.server(options=options)
        service = Service(self._guard)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(service, server)
        try:
            port = server.add_insecure_port(self._address)
            await server.start()
        except Exception:
            message = f"{self._address} cannot be listened on: choose another --grpc-port, or another --host"
            self._started.set_exception(ConfigError(message))
            return
        self._started.set_result((loop, port))
        seconds = await self._ending
        service.ending.set()
        await server.stop(seconds)
