"""Decodes one call of the in-process engine with continuous batching: each sequence takes a row until it ends.

Sequences wait in request order. Prompts are prefilled a block at a time; the completions of a prompt copy its keys and
values. The first decoding step computes the last prompt token, so that the same code produces every sampled token.
Active rows are always the first n: a step works on slices, and Python loops run over requests and blocks, never over
the sequences of a step.

Letters: n active rows, S sequences of the call, P prompts of a block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from rl_megatron.data.routes import encode_routes, routes_dtype
from rl_megatron.errors import EngineError
from rl_megatron.models.kv_cache import KVCache
from rl_megatron.models.reference import CausalAttention, ReferenceModel
from rl_megatron.rollout.local.noise import RouterNoise, completion_streams, prompt_streams
from rl_megatron.rollout.local.sampling import RowSampling, choose_tokens, stream_keys, uniforms
from rl_megatron.types import Completion, GenerationRequest, Routes, Span

# Padded prompt tokens prefilled at once: bounds a block's memory.
MAX_PREFILL_TOKENS = 16384

ROW_MULTIPLE = 8

# Integer state of a sequence. The first three grow by one in each step.
_POSITION, _PRODUCED, _OUT, _LIMIT, _STOPS, _OLDEST, _TOKEN = range(7)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Prompts prefilled together, from number `first` of the call; sequences before `stop` use them."""

    prefix: Tensor  # [2 * layers, P, longest, K, D], each prompt without its last token, right-aligned
    first: int
    stop: int


class Decoding:
    """Decodes all ``requests``, each for one or more completions, in the rows of ``cache``."""

    def __init__(self, model: ReferenceModel, requests: Sequence[GenerationRequest], cache: KVCache) -> None:
        self._model, self._cache, self._requests = model, cache, requests
        self._prefix_lengths = [len(request.token_ids) - 1 for request in requests]
        self._ends = list(accumulate(request.num_completions for request in requests))
        self._num, self._width = self._ends[-1], max(request.params.max_new_tokens for request in requests)
        self._any_greedy = any(request.params.temperature == 0 for request in requests)
        self._any_top_p = any(request.params.top_p < 1 for request in requests)
        self._any_routes = any(request.routes for request in requests)
        self._any_noise = any(request.params.router_noise for request in requests)
        self._prompt_of, self._initial, self._initial_sampling, self._stop_table = self._sequence_state()
        self._seeds = torch.tensor([(r.params.seed + 2**63) % 2**64 - 2**63 for r in requests])  # any int, as int64
        self._in_group = torch.cat([torch.arange(request.num_completions) for request in requests])
        self._uniforms = self._random_numbers()
        self._noise_streams = completion_streams(self._seeds[self._prompt_of.cpu()], self._in_group)
        self._noise_levels = torch.tensor([request.params.router_noise for request in requests])
        self._state = self._initial.new_zeros(len(self._initial), cache.rows)
        self._sampling = self._initial_sampling.new_zeros(len(self._initial_sampling), cache.rows)
        self._out_tokens = self._initial.new_zeros(self._num * self._width)
        self._out_logprobs = self._initial_sampling.new_zeros(self._num * self._width)
        self._out_routes = self._room(self._num * self._width)
        self._prompt_routes: list[Tensor] = []  # of each prefilled prompt without its last token
        self._lengths = self._initial.new_zeros(self._num)
        self._stopped = self._initial.new_zeros(self._num, dtype=torch.bool)
        self._clock, self._oldest, self._active, self._admitted = max(self._prefix_lengths), 0, 0, 0
        self._block = self._prefill(0)
        self._admit()

    @property
    def unfinished(self) -> bool:
        """Whether a sequence is still decoding (if one waits, another decodes)."""
        return self._active > 0

    def step(self) -> None:
        """Decode one token in every active row; waiting sequences take the rows of finished ones."""
        # A few idle rows are computed too: few batch sizes, few kernels to prepare (see `linear`).
        padded = min(-(-self._active // ROW_MULTIPLE) * ROW_MULTIPLE, self._cache.rows)
        self._cache.open_column(self._clock, active=padded, oldest=self._oldest)
        tokens_in, positions = self._state[_TOKEN, :padded], self._state[_POSITION, :padded]
        routes = self._room(padded)
        noise = self._noise_of_rows(padded) if self._any_noise else None
        hidden = self._model.hidden(tokens_in, positions, self._cache.attend, routes, noise)
        state = self._state[:, : self._active]
        logits = self._model.project(hidden)[: self._active]
        inverse_temperature, top_p, greedy = self._sampling[:, : self._active].unsqueeze(-1)
        rows = RowSampling(
            inverse_temperature=inverse_temperature,
            top_p=top_p,
            greedy=greedy > 0,
            any_greedy=self._any_greedy,
            any_top_p=self._any_top_p,
        )
        tokens, logprobs = choose_tokens(logits, self._uniforms.take(state[_OUT]), rows)
        self._out_tokens.scatter_(0, state[_OUT], tokens)
        self._out_logprobs.scatter_(0, state[_OUT], logprobs)
        if self._out_routes is not None and routes is not None:
            self._out_routes.index_copy_(0, state[_OUT], routes[: self._active])
        state[_TOKEN] = tokens
        state[: _OUT + 1] += 1
        self._clock += 1
        stopped = self._stop_table.take(state[_STOPS] + tokens)
        finished = stopped | (state[_PRODUCED] == state[_LIMIT])
        if finished.any():
            self._retire(finished, stopped)
            self._admit()

    def completions(self, version: int) -> list[Completion]:
        """Every sequence's completion, in request order, labelled with weight ``version``.

        Raises EngineError if a log-prob is not finite.
        """
        lengths, stopped = self._lengths.tolist(), self._stopped.tolist()
        inside = (torch.arange(self._width, device=self._lengths.device) < self._lengths[:, None]).view(-1)
        bad = (inside & ~self._out_logprobs.isfinite()).nonzero()
        if len(bad):
            request = self._requests[int(self._prompt_of[int(bad[0]) // self._width])]
            raise EngineError(
                f"request {request.id!r}: log-probs by weight version {version} are not finite; its weights are too "
                "large or not finite; resume from the last checkpoint with a lower learning rate"
            )
        tokens, logprobs = self._out_tokens[inside].int().cpu().numpy(), self._out_logprobs[inside].cpu().numpy()
        routes = self._routes(inside, lengths)
        return [
            Completion(
                token_ids=tokens[end - length : end],
                logprobs=logprobs[end - length : end],
                finish_reason="stop" if by_stop else "length",
                spans=(Span(0, version),),
                routes=its_routes,
            )
            for end, length, by_stop, its_routes in zip(accumulate(lengths), lengths, stopped, routes, strict=True)
        ]

    def _room(self, rows: int) -> Tensor | None:
        """A buffer for the routes of ``rows`` tokens, [rows, layers, k]; None if no request asks for routes."""
        if not self._any_routes:
            return None
        s = self._model.shape
        size = (rows, s.num_layers, s.experts_per_token)
        return torch.zeros(size, dtype=routes_dtype(s.num_experts), device=self._model.device)

    def _routes(self, inside: Tensor, lengths: Sequence[int]) -> list[Routes | None]:
        """The routes of each sequence whose request asks for them: its prompt's, then its sampled tokens'."""
        if self._out_routes is None:
            return [None] * self._num
        sampled = self._out_routes[inside].cpu().split(list(lengths))
        num_experts = self._model.shape.num_experts
        return [
            encode_routes(torch.cat((self._prompt_routes[prompt].cpu(), own)).numpy(), num_experts=num_experts)
            if self._requests[prompt].routes
            else None
            for prompt, own in zip(self._prompt_of.tolist(), sampled, strict=True)
        ]

    def _sequence_state(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Prompt number [S], integer state [7, S] and sampling [3, S] of every sequence; stop tokens [sets * V]."""
        device, vocabulary = self._model.device, self._model.shape.vocab_size
        params = [request.params for request in self._requests]
        counts = torch.tensor([request.num_completions for request in self._requests], device=device)
        prompt = torch.arange(len(counts), device=device).repeat_interleave(counts)
        sequence = torch.arange(self._num, device=device)

        def spread(values: list[int] | list[float]) -> Tensor:
            return torch.tensor(values, device=device).index_select(0, prompt)

        sets = {tokens: row for row, tokens in enumerate(dict.fromkeys(p.stop_token_ids for p in params))}
        stop_table = torch.zeros(len(sets), vocabulary, dtype=torch.bool, device=device)
        for tokens, row in sets.items():
            stop_table[row, list(tokens)] = True
        state = [sequence] * 7
        state[_POSITION] = state[_OLDEST] = spread(self._prefix_lengths)
        state[_PRODUCED] = torch.zeros_like(sequence)
        state[_OUT] = sequence * self._width
        state[_LIMIT] = spread([p.max_new_tokens for p in params])
        state[_STOPS] = spread([sets[p.stop_token_ids] * vocabulary for p in params])
        state[_TOKEN] = spread([request.token_ids[-1] for request in self._requests])
        sampling = [
            spread([1 / p.temperature if p.temperature else 1.0 for p in params]),
            spread([p.top_p for p in params]),
            spread([float(p.temperature == 0) for p in params]),
        ]
        return prompt, torch.stack(state), torch.stack(sampling).float(), stop_table.view(-1)

    def _random_numbers(self) -> Tensor:
        """A random number in [0, 1) for every token that the call may sample, [S * width], indexed like the tokens."""
        keys = stream_keys(self._seeds[self._prompt_of.cpu()], self._in_group)
        return uniforms(keys[:, None], torch.arange(self._width)).view(-1).to(self._model.device)

    def _noise_of_rows(self, rows: int) -> RouterNoise:
        """The noise of the next step's tokens; idle rows have that of some sequence."""
        sequences = (self._state[_OUT, :rows] // self._width).clamp(max=self._num - 1)
        return self._noise(
            self._noise_streams.to(sequences.device).take(sequences),
            self._state[_POSITION, :rows],
            self._prompt_of.take(sequences),
        )

    def _noise_of_prompts(self, requests: range, positions: Tensor) -> RouterNoise:
        """The noise of the prompts of these requests without their last tokens."""
        numbers = torch.tensor(requests, device=positions.device).repeat_interleave(
            torch.tensor([self._prefix_lengths[number] for number in requests], device=positions.device)
        )
        return self._noise(prompt_streams(self._seeds).to(positions.device).take(numbers), positions, numbers)

    def _noise(self, keys: Tensor, positions: Tensor, requests: Tensor) -> RouterNoise:
        shape = self._model.shape
        return RouterNoise(
            keys=keys,
            positions=positions,
            deviations=self._noise_levels.to(keys.device).take(requests),
            num_layers=shape.num_layers,
            num_experts=shape.num_experts,
        )

    def _prefill(self, first: int) -> _Block:
        """Prefill prompts from ``first`` on, as many as the free rows can start within the token limit."""
        longest, stop = 0, first
        start = self._ends[first - 1] if first else 0
        free = self._cache.rows - self._active
        while stop < len(self._requests) and (stop == first or self._ends[stop - 1] - start < free):
            longest = max(longest, self._prefix_lengths[stop])
            if stop > first and longest * (stop + 1 - first) > MAX_PREFILL_TOKENS:
                break
            stop += 1
        shape, device = self._model.shape, self._model.device
        attend = CausalAttention(self._prefix_lengths[first:stop], shape=shape, device=device, keep=self._model.dtype)
        prompts = [token for request in self._requests[first:stop] for token in request.token_ids[:-1]]
        routes = self._room(len(prompts))
        if prompts:
            tokens, noise = torch.tensor(prompts, device=device), None
            if self._any_noise:
                noise = self._noise_of_prompts(range(first, stop), attend.positions)
            self._model.hidden(tokens, attend.positions, attend, routes, noise)
        if routes is not None:
            self._prompt_routes += routes.split(self._prefix_lengths[first:stop])
        return _Block(prefix=attend.kept, first=first, stop=stop)

    def _retire(self, finished: Tensor, stopped: Tensor) -> None:
        """Record the rows marked in ``finished`` [n] and close the gaps with rows from the end."""
        out = self._state[:, finished.nonzero().view(-1)]
        sequences = out[_OUT] - out[_PRODUCED]
        sequences //= self._width
        self._lengths[sequences] = out[_PRODUCED]
        self._stopped[sequences] = stopped[finished]
        self._active -= len(sequences)
        gaps = finished[: self._active].nonzero().view(-1)
        movers = finished[self._active :].logical_not().nonzero().view(-1) + self._active
        if len(gaps):
            self._state[:, gaps] = self._state[:, movers]
            self._sampling[:, gaps] = self._sampling[:, movers]
            self._cache.move(movers, gaps)

    def _admit(self) -> None:
        """Start waiting sequences in the free rows, and find the oldest column still in use."""
        while self._active < self._cache.rows and self._admitted < self._num:
            if self._admitted == self._ends[self._block.stop - 1]:
                self._block = self._prefill(self._block.stop)
            num = min(self._cache.rows - self._active, self._ends[self._block.stop - 1] - self._admitted)
            rows, sequences = slice(self._active, self._active + num), slice(self._admitted, self._admitted + num)
            state = self._initial[:, sequences]
            prompts = self._prompt_of[sequences] - self._block.first
            self._cache.insert(rows.start, self._clock, self._block.prefix.index_select(1, prompts), state[_POSITION])
            self._state[:, rows] = state
            self._state[_OLDEST, rows] = self._clock - state[_POSITION]
            self._sampling[:, rows] = self._initial_sampling[:, sequences]
            self._active, self._admitted = rows.stop, sequences.stop
        if self._active:
            self._oldest = int(self._state[_OLDEST, : self._active].min())
