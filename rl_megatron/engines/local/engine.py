"""The in-process rollout engine: a plain torch model decodes in batches, for small models and tests.

A RolloutEngine asks the ranks' engines for lists of requests: requests that are made together are one batch of each.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from rl_megatron.engines.local.decoding import Decoding, continuations_of
from rl_megatron.errors import EngineError
from rl_megatron.interfaces import RolloutEngine
from rl_megatron.models.kv_cache import KVCache
from rl_megatron.models.reference import ReferenceModel
from rl_megatron.models.shape import ModelShape
from rl_megatron.observability import activity
from rl_megatron.section import MAX_TEMPERATURE, MIN_TEMPERATURE
from rl_megatron.types import Completion, GenerationRequest
from rl_megatron.weights.layouts.families import family_of, hf_layout
from rl_megatron.weights.layouts.layout import float32_in_files


class Batched(RolloutEngine, ABC):
    """Distributes the requests of one turn of the event loop over ``replicas``."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._pending: list[tuple[GenerationRequest, asyncio.Future[Sequence[Completion]]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def batch(self, replica: int, requests: list[GenerationRequest]) -> list[list[Completion]]:
        """Completions of each request, in order. What it raises, every request of the batch raises."""

    @override
    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Sequence[Completion]] = loop.create_future()
        if not self._pending:
            loop.call_soon(self._dispatch)  # after all callers that are ready have asked
        self._pending.append((request, answer))
        return await answer

    @override
    def so_far(self, request_id: str) -> Completion | None:
        return None

    @override
    async def interrupt(self) -> None:
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


class InThisProcess(Batched):
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

    It decodes at most ``slots`` sequences at once; a prompt and its completion have at most ``max_length`` tokens.
    """

    def __init__(
        self, shape: ModelShape, *, slots: int, dtype: torch.dtype, device: torch.device | str, max_length: int
    ) -> None:
        family = family_of(shape)
        self.model = ReferenceModel(
            shape, dtype=dtype, device=device, max_length=max_length, names=family.names, decoder=family.decoder
        )
        self._tensors = {**self.model.tensors, **_draft_tensors(shape, dtype, device)}
        self.version: int | None = 0
        self._slots, self.max_length = slots, max_length
        self.decode: Callable[[Sequence[int]], str] | None = None
        """Makes text of tokens, for requests with stop texts; None: these are refused."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every Hugging Face tensor, as a view to write in place between calls of `generate`.

        Those of draft layers, if ``shape`` has some, are held for exports, and sample nothing.
        """
        return self._tensors

    def withdraw(self) -> None:
        """Stop serving until `serve`, because ``tensors`` are being written."""
        self.version = None

    def serve(self, version: int) -> None:
        """Serve the weights in ``tensors`` as ``version``, which labels everything sampled from then on."""
        self.version = version

    @torch.inference_mode()
    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """Completions of each request, in order. Raises EngineError for a request that cannot be served.

        A completion depends only on its request and its number in it (up to rounding by other batch shapes).
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
            every, width = continuations_of(wanted), max(request.params.max_new_tokens for request in wanted)
            places = sum(request.num_completions for request in wanted)
            decoding = Decoding(self.model, self._cache(wanted), places=places, width=width, decode=self.decode)
            decoding.add(every)
            while decoding.unfinished:
                decoding.step()
                activity.part("decoding")
        completions = iter(decoding.completions(every, version))
        return [[next(completions) for _ in range(request.num_completions)] for request in requests]

    def _cache(self, requests: Sequence[GenerationRequest]) -> KVCache:
        """A cache of their own, just large enough. A kept one would give products the shapes and idle rows of earlier
        batches, so that a resumed run samples other bits than one that went on."""
        rows = min(self._slots, sum(request.num_completions for request in requests))
        columns = max(len(request.token_ids) + request.params.max_new_tokens - 1 for request in requests)
        model = self.model
        return KVCache(model.shape, rows=rows, columns=columns, dtype=model.dtype, device=model.device)

    def check(self, request: GenerationRequest) -> None:
        """Raises EngineError for a request that cannot be served."""
        prompt, params, vocabulary = request.token_ids, request.params, self.model.shape.vocab_size
        if request.begun is not None:
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


def decoder_of(folder: Path) -> Callable[[Sequence[int]], str]:
    """Makes text of tokens by the tokenizer of a folder, special tokens included."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _draft_tensors(shape: ModelShape, dtype: torch.dtype, device: torch.device | str) -> dict[str, Tensor]:
    if not shape.drafts:
        return {}
    layout, without = hf_layout(shape), hf_layout(replace(shape, drafts=False))
    exact = float32_in_files(layout)
    own = layout.local_shapes(0).keys() - without.local_shapes(0).keys()
    return {
        name: torch.zeros(size, dtype=torch.float32 if name in exact else dtype, device=device)
        for name, size in layout.local_shapes(0).items()
        if name in own
    }
