"""The in-process rollout engine: a plain torch model decodes in batches, for small models and tests.

A RolloutEngine sends lists of requests to the ranks' engines. Requests that are made together are one batch of each.

Decodes with continuous batching: each sequence takes a row of the cache until it ends. Requests may come at any time,
and wait in order of arrival. Prompts are prefilled a block at a time. The completions of a prompt copy its keys and
values. The first decoding step computes the last prompt token, so that the same code produces every sampled token.
Active rows are always the first n: a step works on slices, and Python loops run over requests and blocks. They run
over the sequences of a step only if they have stop texts, or must return the tokens that sampling kept.

A sequence has a place from its request until its completion is taken. The tables of its parameters and of its output
are indexed by places. It has a row only while it decodes, and moves to another when gaps between rows are closed.

Letters: n active rows, S places, P prompts of a block, V vocabulary.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from rl_megatron.columns import Ragged
from rl_megatron.errors import EngineError
from rl_megatron.interfaces import RolloutEngine
from rl_megatron.models.kv_cache import KVCache, PrefixCache
from rl_megatron.models.reference import DecoderModel, FullAttention
from rl_megatron.models.shape import ModelShape
from rl_megatron.observability import activity
from rl_megatron.section import MAX_TEMPERATURE, MIN_TEMPERATURE
from rl_megatron.types import Completion, GenerationRequest, Span
from rl_megatron.weights.layouts.families import find_family, hf_layout
from rl_megatron.weights.layouts.layout import float32_in_files

# Padded prompt tokens that are prefilled together: bounds a block's memory.
MAX_PREFILL_TOKENS = 16384

_ROUTES, _KEPT = "routes", "kept"

ROW_MULTIPLE = 8

# Integer state of a sequence. The first three increase by one in each step.
_POSITION, _PRODUCED, _OUT, _LIMIT, _STOPS, _OLDEST, _TOKEN = range(7)
_COLUMNS = 7


class BatchingEngine(RolloutEngine, ABC):
    """Distributes the requests of one pass of the event loop over ``replicas``."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._pending: list[tuple[GenerationRequest, asyncio.Future[Sequence[Completion]]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def batch(self, replica: int, requests: list[GenerationRequest]) -> list[list[Completion]]:
        """Returns completions of each request, in order. Its error is the error of every request of the batch."""

    @override
    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Sequence[Completion]] = loop.create_future()
        if not self._pending:
            loop.call_soon(self._dispatch)  # runs when all ready callers have added their requests
        self._pending.append((request, answer))
        return await answer

    @override
    def partial_completion(self, request_id: str) -> Completion | None:
        return None

    @override
    async def collect_partials(self) -> None:
        pass

    def _dispatch(self) -> None:
        pending, self._pending = self._pending, []
        for replica in range(self._replicas):
            if share := pending[replica :: self._replicas]:
                task = asyncio.ensure_future(self._serve(replica, share))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _serve(
        self, replica: int, share: list[tuple[GenerationRequest, asyncio.Future[Sequence[Completion]]]]
    ) -> None:
        try:
            results = await self.batch(replica, [request for request, _ in share])
        except Exception as error:  # noqa: BLE001  the callers raise it
            for _, answer in share:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (_, answer), completions in zip(share, results, strict=True):
            if not answer.done():
                answer.set_result(completions)


class InProcessEngine(BatchingEngine):
    """One in-process engine, which decodes in a thread."""

    def __init__(self, engine: LocalEngine) -> None:
        super().__init__(1)
        self._engine, self._turn = engine, asyncio.Lock()

    @override
    async def batch(self, replica: int, requests: list[GenerationRequest]) -> list[list[Completion]]:
        async with self._turn:
            return await asyncio.to_thread(self._engine.generate, requests)


class LocalEngine:
    """Generates synchronously with the weights in ``tensors``, which a weight push overwrites in place.

    It decodes at most ``slots`` sequences together. A prompt and its completion have at most ``max_length`` tokens.
    """

    def __init__(
        self, shape: ModelShape, *, slots: int, dtype: torch.dtype, device: torch.device | str, max_length: int
    ) -> None:
        family = find_family(shape)
        self.model = DecoderModel(
            shape, dtype=dtype, device=device, max_length=max_length, names=family.names, decoder=family.decoder
        )
        self._tensors = {**self.model.tensors, **_draft_tensors(shape, dtype, device)}
        self.version: int | None = 0
        self._slots, self.max_length = slots, max_length
        self.decode: Callable[[Sequence[int]], str] | None = None
        """Decodes tokens to text for requests with stop texts. None: these requests are refused."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The Hugging Face tensors, each a view to write in place between calls of `generate`.

        Tensors of draft layers, if ``shape`` has some, are held for exports and not used to sample.
        """
        return self._tensors

    def withdraw(self) -> None:
        """Stops serving until `serve`, because ``tensors`` are being written."""
        self.version = None

    def serve(self, version: int) -> None:
        """Serves the weights in ``tensors`` as ``version``, which labels everything sampled from then on."""
        self.version = version

    @torch.inference_mode()
    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """Returns completions of each request, in order. Raises EngineError for a request that cannot be served.

        A completion depends only on its request and its number in it (up to rounding with other batch shapes).
        """
        version = self.version
        if version is None:
            asked = ", ".join(repr(request.id) for request in requests[:3])
            raise EngineError(f"request {asked}: the weights are being replaced; send it after the next commit")
        for request in requests:
            self.check(request)
        wanted = [request for request in requests if request.num_completions]
        if not wanted:
            return [[] for _ in requests]
        with self.model.packed():
            every, width = make_continuations(wanted), max(request.params.max_new_tokens for request in wanted)
            places = sum(request.num_completions for request in wanted)
            decoding = Decoding(self.model, self._cache(wanted), places=places, width=width, decode=self.decode)
            decoding.add(every)
            while decoding.unfinished:
                decoding.step()
                activity.part("decoding")
        completions = iter(decoding.completions(every, version))
        return [[next(completions) for _ in range(request.num_completions)] for request in requests]

    def _cache(self, requests: Sequence[GenerationRequest]) -> KVCache:
        """Makes a cache for these requests, just large enough. A reused one would keep the shapes and idle rows of
        earlier batches. A resumed run would then sample other bits than an uninterrupted one."""
        rows = min(self._slots, sum(request.num_completions for request in requests))
        columns = max(len(request.token_ids) + request.params.max_new_tokens - 1 for request in requests)
        model = self.model
        return KVCache(model.shape, rows=rows, columns=columns, dtype=model.dtype, device=model.device)

    def check(self, request: GenerationRequest) -> None:
        """Raises EngineError for a request that cannot be served."""
        prompt, params, vocabulary = request.token_ids, request.params, self.model.shape.vocab_size
        if request.partial is not None:
            problem = (
                "this engine answers batch by batch and does not go on from what was begun; send it without, or set "
                "rollout=vllm or sglang"
            )
        elif not prompt or min(prompt) < 0 or max(prompt) >= vocabulary:
            problem = f"the prompt must have one or more token ids in [0, {vocabulary}), got {prompt[:8]}..."
        elif params.max_new_tokens < 1 or request.num_completions < 0:
            problem = f"max_new_tokens={params.max_new_tokens} must be >= 1 and num_completions >= 0"
        elif len(prompt) + params.max_new_tokens > self.max_length:
            problem = (
                f"{len(prompt)} prompt tokens + max_new_tokens={params.max_new_tokens} exceed the engine's "
                f"max_length={self.max_length}; shorten the prompt or lower max_new_tokens"
            )
        elif params.temperature and not MIN_TEMPERATURE <= params.temperature <= MAX_TEMPERATURE:
            allowed = f"0 (greedy), or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
            problem = f"temperature={params.temperature} must be {allowed}"
        elif not 0 < params.top_p <= 1:
            problem = f"top_p={params.top_p} must be in (0, 1]"
        elif not (params.top_k >= 0 and 0 <= params.min_p <= 1):
            problem = f"top_k={params.top_k} must be >= 0, min_p={params.min_p} in [0, 1]"
        elif params.stop and self.decode is None:
            problem = f"stop={params.stop} needs the model's tokenizer, and this engine was made without"
        elif any(not 0 <= token < vocabulary for token in params.stop_token_ids):
            problem = f"stop_token_ids={params.stop_token_ids} must be in [0, {vocabulary})"
        else:
            return
        raise EngineError(f"request {request.id!r}: {problem}")


def make_decoder(folder: Path) -> Callable[[Sequence[int]], str]:
    """Returns a function that decodes tokens with a folder's tokenizer, including special tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _draft_tensors(shape: ModelShape, dtype: torch.dtype, device: torch.device | str) -> dict[str, Tensor]:
    if not shape.num_draft_layers:
        return {}
    layout, without = hf_layout(shape), hf_layout(replace(shape, num_draft_layers=False))
    exact = float32_in_files(layout)
    own = layout.local_shapes(0).keys() - without.local_shapes(0).keys()
    return {
        name: torch.zeros(size, dtype=torch.float32 if name in exact else dtype, device=device)
        for name, size in layout.local_shapes(0).items()
        if name in own
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingSequences:
    """Sequences that continue one prompt with the parameters of ``request``. Their prompt is prefilled once.

    The lists have an entry for each sequence: its place, its seed, its number among the seed's completions, and its
    first random number's index.
    """

    request: GenerationRequest
    places: Sequence[int]
    seeds: Sequence[int]
    numbers: Sequence[int]
    counters: Sequence[int]

    @property
    def prefix_length(self) -> int:
        """The number of tokens to prefill: all of the prompt except the last."""
        return len(self.request.token_ids) - 1


def make_continuations(requests: Sequence[GenerationRequest]) -> list[PendingSequences]:
    """Returns all completions of the requests, at places from 0 on."""
    ends = accumulate(request.num_completions for request in requests)
    return [
        PendingSequences(
            request=request,
            places=range(end - request.num_completions, end),
            seeds=[request.params.seed] * request.num_completions,
            numbers=range(request.num_completions),
            counters=[0] * request.num_completions,
        )
        for request, end in zip(requests, ends, strict=True)
    ]


@dataclass(slots=True, kw_only=True)
class _Block:
    """Prompts that are prefilled together, and the sequences that wait for rows to continue them."""

    prefix: PrefixCache  # cache of each prompt without its last token
    places: Tensor
    prompts: Tensor  # number of each sequence's prompt in ``prefix``
    started: int = 0


class Decoding:
    """Decodes sequences at up to ``places`` places, of at most ``width`` new tokens each, in the rows of ``cache``."""

    def __init__(
        self,
        model: DecoderModel,
        cache: KVCache,
        *,
        places: int,
        width: int,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self._model, self._cache, self._num, self._width = model, cache, places, width
        device = model.device
        self._any_greedy = self._any_limit = self._any_noise = False
        self._initial = torch.zeros(_COLUMNS, places, dtype=torch.int64, device=device)
        self._initial_sampling = torch.zeros(5, places, device=device)
        self._stop_rows: dict[tuple[int, ...], int] = {}
        self._stop_table = torch.zeros(0, dtype=torch.bool, device=device)
        self._decode, self._texts = decode, dict[int, tuple[str, ...]]()  # place -> stop texts
        self._uniforms = torch.zeros(places * width, device=device)
        self._noise_streams = torch.zeros(places, dtype=torch.int64)
        self._noise_levels = torch.zeros(places)
        self._state = self._initial.new_zeros(_COLUMNS, cache.rows)
        self._sampling = self._initial_sampling.new_zeros(5, cache.rows)
        self._out_tokens = self._initial.new_zeros(places * width)
        self._out_logprobs = self._initial_sampling.new_zeros(places * width)
        self._out_routes: Tensor | None = None  # made with the first request for routes
        self._prompt_routes: dict[int, Tensor] = {}  # place -> routes of its prompt without its last token
        self._kept: dict[int, list[NDArray[Any]]] = {}  # place -> ids [k] that each token was drawn from, if asked for
        self._lengths = self._initial.new_zeros(places)
        self._stopped = self._initial.new_zeros(places, dtype=torch.bool)
        self._clock = self._oldest = self._active = 0
        self._waiting: deque[PendingSequences] = deque()
        self._block: _Block | None = None
        self._ended: list[Tensor] = []

    @property
    def unfinished(self) -> bool:
        """True if a sequence is still decoding (if one waits, another decodes)."""
        return self._active > 0

    def add(self, requests: Sequence[PendingSequences]) -> None:
        """Appends sequences to the queue, and starts as many as there are free rows."""
        if not requests:
            return
        if not self._active:  # nothing depends on the clock
            self._clock = max(one.prefix_length for one in requests)
        params = [one.request.params for one in requests]
        self._any_greedy |= any(p.temperature == 0 for p in params)
        self._any_limit |= any(p.top_p < 1 or p.top_k or p.min_p for p in params)
        self._any_noise |= any(p.router_noise for p in params)
        if self._out_routes is None and any(_ROUTES in one.request.columns for one in requests):
            self._out_routes = self._room(self._num * self._width)
        self._write_tables(requests)
        self._waiting += requests
        self._admit()

    def step(self) -> None:
        """Decodes one token in every active row. Waiting sequences take the rows of finished ones."""
        # A few idle rows are computed too: few batch sizes, few kernels to prepare (see `linear`).
        padded = min(-(-self._active // ROW_MULTIPLE) * ROW_MULTIPLE, self._cache.rows)
        self._cache.open_column(self._clock, active=padded, oldest=self._oldest)
        tokens_in, positions = self._state[_TOKEN, :padded], self._state[_POSITION, :padded]
        routes = self._room(padded) if self._out_routes is not None else None
        noise = self._noise_of_rows(padded) if self._any_noise else None
        hidden = self._model.hidden(tokens_in, positions, self._cache, routes, noise)
        state = self._state[:, : self._active]
        logits = self._model.project(hidden)[: self._active]
        inverse_temperature, top_p, greedy, top_k, min_p = self._sampling[:, : self._active].unsqueeze(-1)
        rows = RowSampling(
            inverse_temperature=inverse_temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            greedy=greedy > 0,
            any_greedy=self._any_greedy,
            any_limit=self._any_limit,
            any_kept=bool(self._kept),
        )
        tokens, logprobs, kept = choose_tokens(logits, self._uniforms.take(state[_OUT]), rows)
        if kept is not None:
            self._keep(state[_OUT] // self._width, kept)
        self._out_tokens.scatter_(0, state[_OUT], tokens)
        self._out_logprobs.scatter_(0, state[_OUT], logprobs)
        if self._out_routes is not None and routes is not None:
            self._out_routes.index_copy_(0, state[_OUT], routes[: self._active])
        state[_TOKEN] = tokens
        state[: _OUT + 1] += 1
        self._clock += 1
        stopped = self._stop_table.take(state[_STOPS] + tokens)
        if self._texts:
            stopped = stopped | self._completes_text(state)
        finished = stopped | (state[_PRODUCED] == state[_LIMIT])
        if finished.any():
            self._retire(finished, stopped)
            self._admit()

    def _keep(self, places: Tensor, kept: Ragged) -> None:
        """Adds the tokens that each of these places' tokens was drawn from, where the request asks for them."""
        own = np.split(kept.values.int().cpu().numpy(), kept.counts.cumsum(0)[:-1].cpu().numpy())
        for place, ids in zip(places.tolist(), own, strict=True):
            if place in self._kept:
                self._kept[place].append(ids)

    def _completes_text(self, state: Tensor) -> Tensor:
        """Returns which active rows [n] bool have a stop text that their last token completes.

        A text of n bytes has at most n tokens; the token before them may lose a space.
        """
        assert self._decode is not None
        produced = state[_PRODUCED].tolist()
        found = [False] * len(produced)
        for row, (end, made) in enumerate(zip(state[_OUT].tolist(), produced, strict=True)):
            if texts := self._texts.get((end - made) // self._width):
                window = min(made, 1 + max(len(one.encode()) for one in texts))
                text = self._decode(self._out_tokens[end - window : end].tolist())
                found[row] = any(one in text for one in texts)
        return torch.tensor(found, device=state.device)

    def pop_finished(self) -> list[int]:
        """Returns the places of sequences that have ended since the last call."""
        ended, self._ended = self._ended, []
        return torch.cat(ended).tolist() if ended else []

    def token_counts(self) -> dict[int, int]:
        """Returns place -> number of tokens that each decoding sequence has produced."""
        state = self._state[:, : self._active]
        places = (state[_OUT] - state[_PRODUCED]) // self._width
        return dict(zip(places.tolist(), state[_PRODUCED].tolist(), strict=True))

    def finish_early(self, places: Collection[int]) -> None:
        """Ends running sequences at ``places`` early and keeps the tokens sampled so far."""
        if places:
            state = self._state[:, : self._active]
            ended = torch.isin((state[_OUT] - state[_PRODUCED]) // self._width, self._initial.new_tensor([*places]))
            self._retire(ended, torch.zeros_like(ended))
            self._update_oldest()

    def completions(self, requests: Sequence[PendingSequences], version: int) -> list[Completion]:
        """Returns the sequences' completions, in order, labeled with weight ``version``. Their places become free.

        Raises EngineError if a log-prob is not finite.
        """
        places = torch.tensor([place for one in requests for place in one.places], device=self._model.device)
        lengths, stopped = self._lengths[places], self._stopped[places].tolist()
        inside = torch.arange(self._width, device=lengths.device) < lengths[:, None]
        tokens = self._out_tokens.view(-1, self._width)[places]
        logprobs = self._out_logprobs.view(-1, self._width)[places]
        bad = (inside & ~logprobs.isfinite()).nonzero()
        if len(bad):
            wanted = int(places[int(bad[0, 0])])
            request = next(one.request for one in requests if wanted in one.places)
            raise EngineError(
                f"request {request.id!r}: log-probs by weight version {version} are not finite; its weights are too "
                "large or not finite; resume from the last checkpoint with a lower learning rate"
            )
        counts = lengths.tolist()
        ids, nats = tokens[inside].int().cpu().numpy(), logprobs[inside].cpu().numpy()
        routes = self._routes(requests, places, inside, counts)
        return [
            Completion(
                token_ids=ids[end - length : end],
                logprobs=nats[end - length : end],
                finish_reason="stop" if by_stop else "length",
                spans=(Span(0, version),),
                columns={**({} if its_routes is None else {_ROUTES: its_routes}), **self._kept_column(place)},
            )
            for place, end, length, by_stop, its_routes in zip(
                places.tolist(), accumulate(counts), counts, stopped, routes, strict=True
            )
        ]

    def _kept_column(self, place: int) -> dict[str, Ragged]:
        """Returns the column of kept tokens of an ended sequence, if its request asks for it, and frees it."""
        if (kept := self._kept.pop(place, None)) is None:
            return {}
        values = np.concatenate([np.zeros(0, np.int32), *kept])
        return {_KEPT: Ragged(values, np.array([len(ids) for ids in kept], np.int32))}

    def _room(self, rows: int) -> Tensor:
        """Makes a buffer for the routes of ``rows`` tokens, [rows, layers with experts, k]."""
        s = self._model.shape
        size = (rows, len(s.moe_layers), s.experts_per_token)
        return torch.zeros(size, dtype=getattr(torch, s.route_dtype), device=self._model.device)

    def _routes(
        self, requests: Sequence[PendingSequences], places: Tensor, inside: Tensor, lengths: Sequence[int]
    ) -> Iterator[NDArray[Any] | None]:
        """Yields each sequence's routes, prompt's first, or None if its request does not ask for them."""
        wanted = [_ROUTES in one.request.columns for one in requests for _ in one.places]
        if self._out_routes is None:
            yield from [None] * len(wanted)
            return
        made = self._out_routes.view(self._num, self._width, *self._out_routes.shape[1:])[places][inside].cpu()
        for place, asks, own in zip(places.tolist(), wanted, made.split(list(lengths)), strict=True):
            of_prompt = self._prompt_routes.pop(place, None)
            if not asks or of_prompt is None:
                yield None
            else:
                yield torch.cat((of_prompt.cpu(), own)).numpy()

    def _write_tables(self, requests: Sequence[PendingSequences]) -> None:
        """Writes each sequence's initial state, sampling parameters and random numbers."""
        device, vocabulary = self._model.device, self._model.shape.vocab_size
        counts = torch.tensor([len(one.places) for one in requests], device=device)
        prompt = torch.arange(len(counts), device=device).repeat_interleave(counts)
        places = torch.tensor([place for one in requests for place in one.places], device=device)
        params = [one.request.params for one in requests]
        self._know_stops([p.stop_token_ids for p in params])
        for one in requests:
            for place in one.places:
                self._texts.pop(place, None)
                self._kept.pop(place, None)
                if _KEPT in one.request.columns:
                    self._kept[place] = []
                if one.request.params.stop:
                    self._texts[place] = one.request.params.stop

        def spread(values: Sequence[int] | Sequence[float]) -> Tensor:
            return torch.tensor(values, device=device).index_select(0, prompt)

        state = [places] * _COLUMNS
        state[_POSITION] = state[_OLDEST] = spread([one.prefix_length for one in requests])
        state[_PRODUCED] = torch.zeros_like(places)
        state[_OUT] = places * self._width
        state[_LIMIT] = spread([p.max_new_tokens for p in params])
        state[_STOPS] = spread([self._stop_rows[p.stop_token_ids] * vocabulary for p in params])
        state[_TOKEN] = spread([one.request.token_ids[-1] for one in requests])
        self._initial[:, places] = torch.stack(state)
        sampling = [
            spread([1 / p.temperature if p.temperature else 1.0 for p in params]),
            spread([p.top_p for p in params]),
            spread([float(p.temperature == 0) for p in params]),
            spread([float(p.top_k or torch.inf) for p in params]),
            spread([p.min_p for p in params]),
        ]
        self._initial_sampling[:, places] = torch.stack(sampling).float()
        seeds = torch.tensor([_signed(seed) for one in requests for seed in one.seeds])
        numbers = torch.tensor([number for one in requests for number in one.numbers])
        first = torch.tensor([counter for one in requests for counter in one.counters])
        random = uniforms(stream_keys(seeds, numbers)[:, None], first[:, None] + torch.arange(self._width))
        self._uniforms.view(-1, self._width)[places] = random.to(device)
        self._noise_streams[places.cpu()] = completion_streams(seeds, numbers)
        self._noise_levels[places.cpu()] = torch.tensor([p.router_noise for p in params])[prompt.cpu()]

    def _know_stops(self, sets: Sequence[tuple[int, ...]]) -> None:
        """Adds a row for each new set of stop tokens to their table."""
        for tokens in dict.fromkeys(sets):
            if tokens not in self._stop_rows:
                row = self._stop_table.new_zeros(self._model.shape.vocab_size)
                row[list(tokens)] = True
                self._stop_rows[tokens] = len(self._stop_rows)
                self._stop_table = torch.cat((self._stop_table, row))

    def _noise_of_rows(self, rows: int) -> RouterNoise:
        """Returns the noise of the next step's tokens. Idle rows get the noise of some sequence."""
        places = (self._state[_OUT, :rows] // self._width).clamp(max=self._num - 1)
        streams, levels = self._noise_streams.to(places.device), self._noise_levels.to(places.device)
        return self._noise(streams.take(places), self._state[_POSITION, :rows], levels.take(places))

    def _noise_of_prompts(self, requests: Sequence[PendingSequences], positions: Tensor) -> RouterNoise:
        """Returns the noise of these prompts without their last tokens."""
        seeds = torch.tensor([_signed(one.seeds[0]) for one in requests])
        levels = torch.tensor([one.request.params.router_noise for one in requests])
        lengths = torch.tensor([one.prefix_length for one in requests])
        streams = prompt_streams(seeds).repeat_interleave(lengths).to(positions.device)
        return self._noise(streams, positions, levels.repeat_interleave(lengths).to(positions.device))

    def _noise(self, keys: Tensor, positions: Tensor, levels: Tensor) -> RouterNoise:
        shape = self._model.shape
        return RouterNoise(
            keys=keys,
            positions=positions,
            deviations=levels,
            num_layers=shape.num_layers,
            num_experts=shape.num_experts,
        )

    def _prefill(self) -> _Block:
        """Prefills the prompts that waited longest, as many as the free rows can start within the token limit."""
        longest, sequences, taken = 0, 0, list[PendingSequences]()
        free = self._cache.rows - self._active
        while self._waiting and (not taken or sequences < free):
            longest = max(longest, self._waiting[0].prefix_length)
            if taken and longest * (len(taken) + 1) > MAX_PREFILL_TOKENS:
                break
            taken.append(self._waiting.popleft())
            sequences += len(taken[-1].places)
        shape, device = self._model.shape, self._model.device
        lengths = [one.prefix_length for one in taken]
        indexed = self._cache.indexed
        whole = FullAttention(lengths, shape=shape, device=device, keep=self._model.dtype, indexed=indexed)
        prompts = [token for one in taken for token in one.request.token_ids[:-1]]
        routes = None if self._out_routes is None else self._room(len(prompts))
        if prompts:
            tokens, noise = torch.tensor(prompts, device=device), None
            if self._any_noise:
                noise = self._noise_of_prompts(taken, whole.positions)
            self._model.hidden(tokens, whole.positions, whole, routes, noise)
        if routes is not None:
            for one, its_own in zip(taken, routes.split(lengths), strict=True):
                self._prompt_routes |= dict.fromkeys(one.places, its_own)
        counts = torch.tensor([len(one.places) for one in taken], device=device)
        return _Block(
            prefix=whole.prefix,
            places=torch.tensor([place for one in taken for place in one.places], device=device),
            prompts=torch.arange(len(taken), device=device).repeat_interleave(counts),
        )

    def _retire(self, finished: Tensor, stopped: Tensor) -> None:
        """Records the rows marked in ``finished`` [n] and closes the gaps with rows from the end."""
        out = self._state[:, finished.nonzero().view(-1)]
        places = (out[_OUT] - out[_PRODUCED]) // self._width
        self._lengths[places] = out[_PRODUCED]
        self._stopped[places] = stopped[finished]
        self._ended.append(places)
        self._active -= len(places)
        gaps = finished[: self._active].nonzero().view(-1)
        movers = finished[self._active :].logical_not().nonzero().view(-1) + self._active
        if len(gaps):
            self._state[:, gaps] = self._state[:, movers]
            self._sampling[:, gaps] = self._sampling[:, movers]
            self._cache.move(movers, gaps)

    def _admit(self) -> None:
        """Starts waiting sequences in the free rows."""
        while self._active < self._cache.rows and (self._block is not None or self._waiting):
            block = self._block or self._prefill()
            num = min(self._cache.rows - self._active, len(block.places) - block.started)
            rows = slice(self._active, self._active + num)
            waited = slice(block.started, block.started + num)
            places, prompts = block.places[waited], block.prompts[waited]
            state = self._initial[:, places]
            self._cache.insert(rows.start, self._clock, block.prefix.select(prompts), state[_POSITION])
            self._state[:, rows] = state
            self._state[_OLDEST, rows] = self._clock - state[_POSITION]
            self._sampling[:, rows] = self._initial_sampling[:, places]
            self._active, block.started = rows.stop, waited.stop
            self._block = block if block.started < len(block.places) else None
        self._update_oldest()

    def _update_oldest(self) -> None:
        """Finds the oldest column that is still in use."""
        if self._active:
            self._oldest = int(self._state[_OLDEST, : self._active].min())


def _signed(seed: int) -> int:
    """Maps any int to an int64."""
    return (seed + 2**63) % 2**64 - 2**63


_GOLDEN = -0x61C8864680B583EB  # splitmix64's constants as signed int64
_MIX_1 = -0x40A7B892E31B1A47
_MIX_2 = -0x6B2FB644ECCEEE15


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """Sampling parameters of each row. ``greedy`` rows have temperature 1 here: their log-probs are the model's own.

    ``any_greedy``, ``any_limit`` and ``any_kept`` are true if any row needs that work, so that a step need not read the
    tensors.
    """

    inverse_temperature: Tensor  # [n, 1] float32
    top_p: Tensor  # [n, 1] float32
    top_k: Tensor  # [n, 1] float32; infinity: no limit
    min_p: Tensor  # [n, 1] float32
    greedy: Tensor  # [n, 1] bool
    any_greedy: bool
    any_limit: bool  # any of top_p, top_k and min_p
    any_kept: bool = False  # the tokens that these keep are returned


def stream_keys(seeds: Tensor, completions: Tensor) -> Tensor:
    """Returns the random stream of each (request seed, completion number), both [n] int64 -> [n] int64."""
    return _mix(_mix(seeds * _GOLDEN) + completions * _GOLDEN)


def uniforms(keys: Tensor, counters: Tensor) -> Tensor:
    """Returns number ``counters`` [n] of each stream: float32 in [0, 1) with 24 random bits.

    splitmix64 of Steele, Lea and Flood (2014).
    """
    # In a counter-based stream a token's number depends only on its place, not on the rest of the batch.
    bits = _mix(keys + (counters + 1) * _GOLDEN) >> 40
    return (bits & 0xFFFFFF).float().mul_(2.0**-24)


def choose_tokens(logits: Tensor, uniform: Tensor, rows: RowSampling) -> tuple[Tensor, Tensor, Ragged | None]:
    """Draws tokens [n] int64, and returns them with their log-probs [n] under the distribution of the draw.

    With ``any_kept`` it also returns the tokens of that distribution, most likely first. It has none for a row that is
    greedy or without limits.

    ``logits`` [n, V] float32 are overwritten. Inverse-CDF sampling with ``uniform`` [n] in [0, 1). Greedy rows take
    the most likely token, with the model's log-prob at temperature 1.
    """
    probabilities = logits.mul_(rows.inverse_temperature).softmax(-1)
    cumulative = probabilities.cumsum(-1)
    tokens = _invert(cumulative, uniform.unsqueeze(1) * cumulative[:, -1:])
    chosen = probabilities.gather(1, tokens)
    kept = Ragged(tokens[:0, 0], torch.zeros_like(tokens[:, 0])) if rows.any_kept else None
    if rows.any_limit:
        cut = (rows.top_k < torch.inf) | (rows.min_p > 0)
        limited = (rows.top_p < 1) | cut
        ordered, token_of_rank, last = _likely(probabilities, rows, cut)
        likely, mass_share = _draw_likely(ordered, token_of_rank, last, uniform.unsqueeze(1))
        tokens, chosen = torch.where(limited, likely, tokens), torch.where(limited, mass_share, chosen)
        if rows.any_kept:
            inside = (ordered > 0) & (torch.arange(ordered.shape[1], device=last.device) <= last)
            inside &= limited & ~rows.greedy
            kept = Ragged(token_of_rank[inside], inside.sum(-1))
    if rows.any_greedy:
        best = logits.argmax(-1, keepdim=True)
        tokens = torch.where(rows.greedy, best, tokens)
        chosen = torch.where(rows.greedy, probabilities.gather(1, best), chosen)
    return tokens.squeeze(1), chosen.squeeze(1).log_(), kept


def _likely(probabilities: Tensor, rows: RowSampling, cut: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns probabilities [n, V], most likely first, their tokens, and the rank [n, 1] of the last that is needed to
    reach a mass of top_p (Holtzman et al., 2020).

    In rows that are ``cut`` [n, 1] it first applies min_p (arXiv:2407.01082) and top_k, renormalized: vLLM's order.
    """
    ordered, token_of_rank = probabilities.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(ordered.shape[1], device=ordered.device)
    left = ordered.where((ordered >= rows.min_p * ordered[:, :1]) & (ranks < rows.top_k), 0.0)
    ordered = torch.where(cut, left / left.sum(-1, keepdim=True), ordered)
    last = (ordered.cumsum(-1) < rows.top_p).sum(-1, keepdim=True).clamp_(max=probabilities.shape[1] - 1)
    return ordered, token_of_rank, last


def _draw_likely(ordered: Tensor, token_of_rank: Tensor, last: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draws from the most likely tokens up to rank ``last``, renormalized."""
    cumulative = ordered.cumsum(-1)
    mass = cumulative.gather(1, last)
    rank = _invert(cumulative, uniform * mass)
    return token_of_rank.gather(1, rank), ordered.gather(1, rank) / mass


def _invert(cumulative: Tensor, target: Tensor) -> Tensor:
    """Returns the first column with cumulative mass over ``target``, never of probability zero; the last for NaN."""
    return torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)


def _mix(z: Tensor) -> Tensor:
    # >> is arithmetic on int64: the masks make it logical.
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _MIX_1
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


_STREAM = 0x6E6F697365  # "noise": another stream than the one that chooses the tokens
_STEP = 2.0**-24  # distance between two numbers of `uniforms`, which begin at 0
_PROMPT = -1  # completions share their prompt's keys and values, and so this stream


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterNoise:
    """Noise for the router logits of N tokens. A call with a layer's number returns [N, E] float32, in logits."""

    keys: Tensor  # [N] int64, the tokens' streams
    positions: Tensor  # [N] int64, positions in their sequences
    deviations: Tensor  # [N] float32, standard deviations; 0: no noise
    num_layers: int
    num_experts: int

    def __call__(self, layer: int) -> Tensor:
        """Returns independent normal numbers for each token and expert of the layer, times the token's deviation."""
        first = (self.positions * self.num_layers + layer) * self.num_experts
        counters = first[:, None] + torch.arange(self.num_experts, device=first.device)
        return uniform_to_normal(uniforms(self.keys[:, None], counters)).mul_(self.deviations[:, None])


def uniform_to_normal(uniform: Tensor) -> Tensor:
    """Converts float32 multiples of 2**-24 in [0, 1) to normal numbers, in place. All are finite, and 0 and the
    largest input give numbers of equal size."""
    return uniform.mul_(2).add_(_STEP - 1).erfinv_().mul_(math.sqrt(2))  # the sum is exact, and never -1 or 1


def completion_streams(seeds: Tensor, completions: Tensor) -> Tensor:
    """Returns the stream of each completion's last prompt token and sampled tokens: [n] int64 of [n] and [n]."""
    return stream_keys(stream_keys(seeds, completions), torch.full_like(seeds, _STREAM))


def prompt_streams(seeds: Tensor) -> Tensor:
    """Returns the stream of the other tokens of each request's prompt: [n] int64 of [n]."""
    return completion_streams(seeds, torch.full_like(seeds, _PROMPT))
