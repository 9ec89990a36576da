"""Serves the in-process engine over HTTP: ``python -m rl_megatron.rollout.servers.embedded.server <options>``.

So what engine servers do can be tried where no vLLM or SGLang is: several of them sample while the learner trains, and
take weights while completions run. Every request needs the run's token (`engine_token`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import queue
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from rl_megatron.config.sections.rollout import RunningRequests
from rl_megatron.errors import EngineError, RLMegatronError
from rl_megatron.models.families.fields import read_config
from rl_megatron.rollout.endpoint.server import BoundedProtocol
from rl_megatron.rollout.local.engine import LocalEngine, decoder_of
from rl_megatron.rollout.servers.embedded import wire
from rl_megatron.rollout.servers.embedded.running import Ended, RunningBatch
from rl_megatron.rollout.servers.engine_token import EngineToken
from rl_megatron.types import Completion, GenerationRequest
from rl_megatron.weights.boxes import whole_box
from rl_megatron.weights.checks.checksums import checksum
from rl_megatron.weights.checks.reports import Report, packed_report
from rl_megatron.weights.layouts.families import read_shape
from rl_megatron.weights.servers import mirror

T = TypeVar("T")

_CLOSING_SECONDS = 1


class Sampler(threading.Thread):
    """The thread that samples; between two tokens it does what others ask of it.

    All computation of torch is in it, so that it competes with nothing.
    """

    def __init__(self, engine: LocalEngine, *, slots: int) -> None:
        super().__init__(name="sampler", daemon=True)
        self._engine, self.running = engine, RunningBatch(engine, slots=slots)
        self.paused = False
        self._loop = asyncio.get_running_loop()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._answers: dict[str, asyncio.Future[list[Completion]]] = {}

    def run(self) -> None:
        """Sample until the process ends. An error that no request explains ends it: its guard starts another."""
        try:
            self._sample()
        except BaseException:  # noqa: BLE001  whatever it is, nothing would be sampled any more
            traceback.print_exc()
            os._exit(1)

    def _sample(self) -> None:
        while True:
            self._orders.get()()
            with self._engine.model.packed() if self._works else contextlib.nullcontext():
                while self._works:
                    self._step()
                    while self._works and not self._orders.empty():
                        self._orders.get()()

    @property
    def _works(self) -> bool:
        return not self.paused and self.running.unfinished

    def _step(self) -> None:
        with contextlib.suppress(RLMegatronError):  # callers of sampled get it
            self.answer(self.running.step)

    async def order(self, function: Callable[[], T]) -> T:
        """Call ``function`` in the thread, between two tokens. Returns and raises as it does."""
        answer: asyncio.Future[T] = self._loop.create_future()

        def call() -> None:
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001  the caller gets it
                self._loop.call_soon_threadsafe(answer.set_exception, error)
            else:
                self._loop.call_soon_threadsafe(answer.set_result, result)

        self._orders.put(call)
        return await answer

    async def sampled(self, name: str, request: GenerationRequest) -> list[Completion]:
        """All completions of a request. Raises EngineError."""
        answer: asyncio.Future[list[Completion]] = self._loop.create_future()
        self._answers[name] = answer
        try:
            await self.order(lambda: self.running.start(name, request))
            return await answer
        finally:
            del self._answers[name]

    def answer(self, change: Callable[[], Ended]) -> None:
        """Answer the requests that have ended by ``change``. If it raises, that answers all, and is raised."""
        try:
            ended = change()
        except RLMegatronError as error:
            for name in self.running.drop():
                self._tell(name, error)
            raise
        for name, completions in ended:
            self._tell(name, completions)

    def _tell(self, name: str, said: list[Completion] | RLMegatronError) -> None:
        def tell() -> None:
            answer = self._answers.get(name)
            if answer is None or answer.done():
                return
            if isinstance(said, RLMegatronError):
                answer.set_exception(said)
            else:
                answer.set_result(said)

        self._loop.call_soon_threadsafe(tell)


class _Protocol(BoundedProtocol):
    files_share = 2  # almost all files of this process are connections


class Service:
    """The paths that the adapter asks."""

    def __init__(self, engine: LocalEngine, *, slots: int, description: Mapping[str, object]) -> None:
        self._engine, self._slots, self._description = engine, slots, description
        self._sampler: Sampler

    @contextlib.asynccontextmanager
    async def running(self, _: Starlette) -> AsyncIterator[None]:
        """With the thread that samples; it ends with the process."""
        self._sampler = Sampler(self._engine, slots=self._slots)
        self._sampler.start()
        yield

    def routes(self) -> list[Route]:
        """All paths."""
        asked = {
            "/health": self._health,
            "/openapi.json": self._describe,
            "/tokens": self._tokens,
            "/gauges": self._gauges,
        }
        ordered = ("generate", "abort", "score", "pause", "resume", "load", "held", "boxes")
        return [
            *(Route(path, endpoint) for path, endpoint in asked.items()),
            *(Route(f"/{name}", getattr(self, f"_{name}"), methods=["POST"]) for name in ordered),
        ]

    async def _health(self, _: Request) -> Response:
        return Response()

    async def _describe(self, _: Request) -> Response:
        return JSONResponse(self._description)

    async def _tokens(self, _: Request) -> Response:
        return JSONResponse(self._sampler.running.tokens)

    async def _gauges(self, _: Request) -> Response:
        running, waiting = self._sampler.running.counts
        return JSONResponse({"running": running, "waiting": waiting, "tokens": self._sampler.running.tokens})

    async def _generate(self, asked: Request) -> Response:
        name, request = wire.request_of(await asked.json())
        return JSONResponse(wire.answer_of(await self._sampler.sampled(name, request)))

    async def _abort(self, asked: Request) -> Response:
        name, running = (await asked.json())["name"], self._sampler.running
        await self._sampler.order(lambda: self._sampler.answer(lambda: running.abort(name)))
        return Response()

    async def _score(self, asked: Request) -> Response:
        text = torch.tensor([(await asked.json())["text"]])

        def score() -> list[float]:
            logprobs = self._engine.model.logits(text)[0, :-1].log_softmax(-1)
            found: list[float] = logprobs.gather(1, text[0, 1:, None]).view(-1).tolist()
            return found

        return JSONResponse(await self._sampler.order(score))

    async def _pause(self, asked: Request) -> Response:
        mode: RunningRequests = (await asked.json())["mode"]

        def pause() -> None:
            if not self._sampler.paused:
                self._sampler.paused = True
                self._sampler.answer(lambda: self._sampler.running.pause(mode))

        await self._sampler.order(pause)
        return Response()

    async def _resume(self, _: Request) -> Response:
        def resume() -> None:
            self._sampler.running.resume()
            self._sampler.paused = False

        await self._sampler.order(resume)
        return Response()

    async def _load(self, asked: Request) -> Response:
        body = await asked.json()
        path, version = Path(body["path"]), int(body["version"])

        def load() -> Report:
            if not self._sampler.paused:
                raise EngineError("pause before weights are replaced")
            found = mirror.read(path, version)
            self._engine.withdraw()
            for name, tensor in self._engine.tensors.items():
                tensor.copy_(found[name])
            self._engine.serve(version)
            return self._checked()

        return JSONResponse(packed_report(await self._sampler.order(load), body["known"]))

    async def _held(self, asked: Request) -> Response:
        body = await asked.json()
        return JSONResponse(packed_report(await self._sampler.order(self._checked), body["known"]))

    async def _boxes(self, _: Request) -> Response:
        return JSONResponse({name: whole_box(tensor.shape) for name, tensor in self._engine.tensors.items()})

    def _checked(self) -> Report:
        """Checksums of the tensors that the engine holds."""
        tensors = self._engine.tensors.items()
        rows = [(name, name, whole_box(one.shape), checksum(one, tuple(one.shape))) for name, one in tensors]
        return Report(rows=rows, seconds=0.0)


async def _refused(_: Request, error: Exception) -> Response:
    return PlainTextResponse(str(error), status_code=400)


def application(options: argparse.Namespace) -> Starlette:
    """The application, which samples with weights of zeros until some are loaded."""
    torch.set_num_threads(options.threads)
    engine = LocalEngine(
        read_shape(options.model),
        slots=options.slots,
        dtype=getattr(torch, options.dtype),
        device="cpu",
        max_length=options.max_length,
    )
    engine.decode = options.tokenizer and decoder_of(options.tokenizer)
    known = read_config(options.model).get("architectures") or ()
    described = {
        "protocol": wire.PROTOCOL,
        "dtype": options.dtype,
        "max_length": options.max_length,
        "architecture": ",".join(known),
    }
    service = Service(engine, slots=options.slots, description=described)
    return Starlette(
        routes=service.routes(),
        lifespan=service.running,
        middleware=[Middleware(EngineToken)],
        exception_handlers={RLMegatronError: _refused},
    )


def main() -> None:
    """Serve until a signal ends the process."""
    parser = argparse.ArgumentParser(description="a server of the in-process engine")
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--max-length", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--tokenizer", type=Path, help="folder with the tokenizer, for requests with stop texts")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    options = parser.parse_args()
    uvicorn.run(
        application(options),
        host=options.host,
        port=options.port,
        log_level="warning",
        access_log=False,
        http=_Protocol,
        backlog=_Protocol.backlog(),
        timeout_graceful_shutdown=_CLOSING_SECONDS,
    )


if __name__ == "__main__":
    main()
