"""Serves the in-process engine over HTTP: ``python -m rl_megatron.engines.local.server <options>``.

It can be used to try engine servers without vLLM or SGLang: several servers sample while the learner trains, and load
weights while completions run. Requests come and go while others decode, and continue after their weights were
replaced. Every request needs the run's token (`engine_token`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import queue
import threading
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from rl_megatron.agents.endpoint.server import BoundedProtocol
from rl_megatron.config.sections.rollout import RunningRequests
from rl_megatron.engines.answers import join_continuation, make_spans
from rl_megatron.engines.engine_token import AuthMiddleware
from rl_megatron.engines.local import adapter
from rl_megatron.engines.local.engine import Decoding, LocalEngine, PendingSequences, make_decoder
from rl_megatron.errors import EngineError, RLMegatronError
from rl_megatron.models.families.fields import read_config
from rl_megatron.models.kv_cache import KVCache
from rl_megatron.types import Completion, GenerationRequest, SamplingParams, Span
from rl_megatron.weights.boxes import whole_box
from rl_megatron.weights.checks.reports import ChecksumReport, checksum, packed_report
from rl_megatron.weights.layouts.families import read_shape
from rl_megatron.weights.routes import mirror

Ended = list[tuple[str, list[Completion]]]
"""(name, completions in order) of each request that has ended."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Sequence:
    """One completion of a request."""

    name: str
    number: int
    request: GenerationRequest
    part: Completion | None = None  # sampled before a replacement of weights that recomputes
    versions: list[tuple[int, int]] = field(default_factory=list)  # (first token, version) of later tokens

    @property
    def text(self) -> tuple[int, ...]:
        """The tokens to continue from."""
        made = () if self.part is None else self.part.token_ids.tolist()
        return (*self.request.token_ids, *made)

    @property
    def params(self) -> SamplingParams:
        """The parameters of the rest."""
        made = 0 if self.part is None else len(self.part.token_ids)
        return replace(self.request.params, max_new_tokens=self.request.params.max_new_tokens - made)

    def whole(self, rest: Completion) -> Completion:
        """Returns the completion: ``part``, and then ``rest``."""
        rest = replace(rest, spans=make_spans(self.versions))
        return rest if self.part is None else join_continuation(self.part, rest)


class RunningBatch:
    """The completions that a process samples, at most ``slots`` together. One thread calls every method.

    A completion's random numbers depend on its request's seed, its number and a token's position in its text. So
    they continue where other weights stopped.
    """

    def __init__(self, engine: LocalEngine, *, slots: int) -> None:
        model, max_length = engine.model, engine.max_length
        cache = KVCache(model.shape, rows=slots, columns=max_length, dtype=model.dtype, device=model.device)
        self._engine, self._decoding = (
            engine,
            Decoding(model, cache, places=slots, width=max_length, decode=engine.decode),
        )
        self._free = list(range(slots))
        self._queue: deque[_Sequence] = deque()
        self._decoded: dict[int, tuple[_Sequence, PendingSequences]] = {}  # place -> sequence
        self._done: dict[str, dict[int, Completion]] = {}  # unfinished request -> number -> completion
        self._counts: dict[str, int] = {}
        self.tokens = 0  # sampled since the start

    @property
    def unfinished(self) -> bool:
        """True if a completion decodes or waits."""
        return bool(self._queue or self._decoded)

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of completions that decode, and that wait. Any thread may read it."""
        return len(self._decoded), len(self._queue)

    def start(self, name: str, request: GenerationRequest) -> None:
        """Queues the request's completions for slots. Raises EngineError if it cannot be served."""
        self._engine.check(request)
        self._counts[name], self._done[name] = request.num_completions, {}
        self._queue += [_Sequence(name=name, number=n, request=request) for n in range(request.num_completions)]

    @torch.inference_mode()
    def step(self) -> Ended:
        """Samples one token of each completion that has a slot.

        Raises EngineError if the weights give log-probs that are not finite.
        """
        self._admit()
        self.tokens += len(self._decoded)
        if self._decoding.unfinished:
            self._decoding.step()
        return self._finished(self._ended())

    @torch.inference_mode()
    def pause(self, mode: RunningRequests) -> Ended:
        """Keeps the completions' tokens before other weights are loaded, and with ``keep_cache`` their cached keys and
        values. With ``abort`` it ends the completions early."""
        if mode == "keep_cache":
            return []
        self._decoding.finish_early(self._decoded.keys())
        cut = self._ended()
        if mode == "abort":
            waiting, self._queue = self._queue, deque()
            return self._finished([*map(_aborted, cut), *((one, _nothing(one)) for one in waiting)])
        for sequence, part in reversed(cut):
            sequence.part = part
            self._queue.appendleft(sequence)
        return []

    def resume(self) -> None:
        """Labels tokens sampled from now on with the engine's version."""
        assert self._engine.version is not None
        made = self._decoding.token_counts()
        for place, (sequence, _) in self._decoded.items():
            sequence.versions.append((made[place], self._engine.version))

    @torch.inference_mode()
    def abort(self, name: str) -> Ended:
        """Ends a request's completions early."""
        self._decoding.finish_early([place for place, (one, _) in self._decoded.items() if one.name == name])
        waiting = [one for one in self._queue if one.name == name]
        self._queue = deque(one for one in self._queue if one.name != name)
        return self._finished([*map(_aborted, self._ended()), *((one, _nothing(one)) for one in waiting)])

    def drop(self) -> list[str]:
        """Drops all requests. Returns their names."""
        self._decoding.finish_early(self._decoded.keys())
        self._decoding.pop_finished()
        self._free += self._decoded
        names = list(self._counts)
        for held in (self._queue, self._decoded, self._done, self._counts):
            held.clear()
        return names

    def _admit(self) -> None:
        """Gives waiting completions the free slots. Completions of one prompt share its prefill."""
        groups: dict[tuple[object, ...], list[_Sequence]] = {}
        for _ in range(min(len(self._free), len(self._queue))):
            one = self._queue.popleft()
            alike = (one.text, replace(one.params, seed=0), one.request.columns)
            own = (one.request.params.seed,) if one.params.router_noise else ()  # the prompt's cache has the noise too
            groups.setdefault((*alike, *own), []).append(one)
        self._decoding.add([self._call(sequences) for sequences in groups.values()])

    def _call(self, sequences: list[_Sequence]) -> PendingSequences:
        first, text = sequences[0], sequences[0].text
        asked = PendingSequences(
            request=replace(first.request, token_ids=text, params=first.params, num_completions=len(sequences)),
            places=[self._free.pop() for _ in sequences],
            seeds=[one.request.params.seed for one in sequences],
            numbers=[one.number for one in sequences],
            counters=[len(text)] * len(sequences),
        )
        assert self._engine.version is not None
        for place, one in zip(asked.places, sequences, strict=True):
            one.versions = [(0, self._engine.version)]
            self._decoded[place] = one, replace(asked, places=[place], seeds=[], numbers=[], counters=[])
        return asked

    def _ended(self) -> list[tuple[_Sequence, Completion]]:
        """Returns the completions of ended sequences, and frees their places."""
        places = self._decoding.pop_finished()
        if not places:
            return []
        ended = [self._decoded.pop(place) for place in places]
        self._free += places
        completions = self._decoding.completions([asked for _, asked in ended], 0)
        return [(one, one.whole(said)) for (one, _), said in zip(ended, completions, strict=True)]

    def _finished(self, ended: Iterable[tuple[_Sequence, Completion]]) -> Ended:
        out = []
        for sequence, completion in ended:
            done = self._done[sequence.name]
            done[sequence.number] = completion
            if len(done) == self._counts[sequence.name]:
                del self._done[sequence.name], self._counts[sequence.name]
                out.append((sequence.name, [done[number] for number in sorted(done)]))
        return out


def _aborted(ended: tuple[_Sequence, Completion]) -> tuple[_Sequence, Completion]:
    return ended[0], replace(ended[1], finish_reason="abort")


def _nothing(sequence: _Sequence) -> Completion:
    """Returns the partial completion of a sequence without a slot."""
    empty = Completion(
        token_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), finish_reason="abort", spans=(Span(0, 0),)
    )
    return empty if sequence.part is None else replace(sequence.part, finish_reason="abort")


T = TypeVar("T")

_CLOSING_SECONDS = 1


class Sampler(threading.Thread):
    """The thread that samples. Between two tokens it runs functions that others have queued.

    All torch computation runs in it, so that nothing competes with it.
    """

    def __init__(self, engine: LocalEngine, *, slots: int) -> None:
        super().__init__(name="sampler", daemon=True)
        self._engine, self.running = engine, RunningBatch(engine, slots=slots)
        self.paused = False
        self._loop = asyncio.get_running_loop()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._answers: dict[str, asyncio.Future[list[Completion]]] = {}

    def run(self) -> None:
        """Samples until the process ends. An error that no request explains ends it: its guard starts another."""
        try:
            self._sample()
        except BaseException:  # noqa: BLE001  after any error, nothing more would be sampled
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
        """Calls ``function`` in the thread, between two tokens. Returns its result or raises its error."""
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
        """Returns all completions of a request. Raises EngineError."""
        answer: asyncio.Future[list[Completion]] = self._loop.create_future()
        self._answers[name] = answer
        try:
            await self.order(lambda: self.running.start(name, request))
            return await answer
        finally:
            del self._answers[name]

    def answer(self, change: Callable[[], Ended]) -> None:
        """Answers the requests that ``change`` has ended. If it raises, all requests and the caller get the error."""
        try:
            ended = change()
        except RLMegatronError as error:
            for name in self.running.drop():
                self._tell(name, error)
            raise
        for name, completions in ended:
            self._tell(name, completions)

    def _tell(self, name: str, result: list[Completion] | RLMegatronError) -> None:
        def tell() -> None:
            answer = self._answers.get(name)
            if answer is None or answer.done():
                return
            if isinstance(result, RLMegatronError):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        self._loop.call_soon_threadsafe(tell)


class _Protocol(BoundedProtocol):
    files_share = 2  # almost all files of this process are connections


class Service:
    """The HTTP paths that the adapter calls."""

    def __init__(self, engine: LocalEngine, *, slots: int, description: Mapping[str, object]) -> None:
        self._engine, self._slots, self._description = engine, slots, description
        self._sampler: Sampler

    @contextlib.asynccontextmanager
    async def running(self, _: Starlette) -> AsyncIterator[None]:
        """Starts the thread that samples. The thread ends with the process."""
        self._sampler = Sampler(self._engine, slots=self._slots)
        self._sampler.start()
        yield

    def routes(self) -> list[Route]:
        """Returns all routes."""
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

    async def _generate(self, http_request: Request) -> Response:
        name, request = adapter.decode_request(await http_request.json())
        return JSONResponse(adapter.encode_completions(await self._sampler.sampled(name, request)))

    async def _abort(self, request: Request) -> Response:
        name, running = (await request.json())["name"], self._sampler.running
        await self._sampler.order(lambda: self._sampler.answer(lambda: running.abort(name)))
        return Response()

    async def _score(self, request: Request) -> Response:
        text = torch.tensor([(await request.json())["text"]])

        def score() -> list[float]:
            logprobs = self._engine.model.logits(text)[0, :-1].log_softmax(-1)
            found: list[float] = logprobs.gather(1, text[0, 1:, None]).view(-1).tolist()
            return found

        return JSONResponse(await self._sampler.order(score))

    async def _pause(self, request: Request) -> Response:
        mode: RunningRequests = (await request.json())["mode"]

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

    async def _load(self, request: Request) -> Response:
        body = await request.json()
        path, version = Path(body["path"]), int(body["version"])

        def load() -> ChecksumReport:
            if not self._sampler.paused:
                raise EngineError("pause before weights are replaced")
            found = mirror.read(path, version)
            self._engine.withdraw()
            for name, tensor in self._engine.tensors.items():
                tensor.copy_(found[name])
            self._engine.serve(version)
            return self._checked()

        return JSONResponse(packed_report(await self._sampler.order(load), body["known"]))

    async def _held(self, request: Request) -> Response:
        body = await request.json()
        return JSONResponse(packed_report(await self._sampler.order(self._checked), body["known"]))

    async def _boxes(self, _: Request) -> Response:
        return JSONResponse({name: whole_box(tensor.shape) for name, tensor in self._engine.tensors.items()})

    def _checked(self) -> ChecksumReport:
        """Computes checksums of the tensors that the engine holds."""
        tensors = self._engine.tensors.items()
        rows = [(name, name, whole_box(one.shape), checksum(one, tuple(one.shape))) for name, one in tensors]
        return ChecksumReport(rows=rows, seconds=0.0)


async def _refused(_: Request, error: Exception) -> Response:
    return PlainTextResponse(str(error), status_code=400)


def application(options: argparse.Namespace) -> Starlette:
    """Makes the application. Its weights are zeros until some are loaded."""
    torch.set_num_threads(options.threads)
    engine = LocalEngine(
        read_shape(options.model),
        slots=options.slots,
        dtype=getattr(torch, options.dtype),
        device="cpu",
        max_length=options.max_length,
    )
    engine.decode = options.tokenizer and make_decoder(options.tokenizer)
    known = read_config(options.model).get("architectures") or ()
    described = {
        "protocol": adapter.PROTOCOL,
        "dtype": options.dtype,
        "max_length": options.max_length,
        "architecture": ",".join(known),
    }
    service = Service(engine, slots=options.slots, description=described)
    return Starlette(
        routes=service.routes(),
        lifespan=service.running,
        middleware=[Middleware(AuthMiddleware)],
        exception_handlers={RLMegatronError: _refused},
    )


def main() -> None:
    """Serves until a signal ends the process."""
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
