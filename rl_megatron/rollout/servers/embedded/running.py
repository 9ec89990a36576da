"""Samples requests that come and go while others decode, and that go on after their weights were replaced."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from rl_megatron.config.sections.rollout import RunningRequests
from rl_megatron.models.kv_cache import KVCache
from rl_megatron.rollout.local.decoding import Continuations, Decoding
from rl_megatron.rollout.local.engine import LocalEngine
from rl_megatron.rollout.servers.answers import joined, spans_of
from rl_megatron.types import Completion, GenerationRequest, SamplingParams, Span

Ended = list[tuple[str, list[Completion]]]
"""Requests by name whose every completion has ended, with these in order."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Sequence:
    """One completion of a request."""

    name: str
    number: int
    request: GenerationRequest
    part: Completion | None = None  # made before a replacement of weights that computes again
    versions: list[tuple[int, int]] = field(default_factory=list)  # of what is made since: (first token, version)

    @property
    def text(self) -> tuple[int, ...]:
        """The tokens to go on from."""
        made = () if self.part is None else self.part.token_ids.tolist()
        return (*self.request.token_ids, *made)

    @property
    def params(self) -> SamplingParams:
        """Those of the rest."""
        made = 0 if self.part is None else len(self.part.token_ids)
        return replace(self.request.params, max_new_tokens=self.request.params.max_new_tokens - made)

    def whole(self, rest: Completion) -> Completion:
        """The completion, of which ``rest`` was made since ``part``."""
        rest = replace(rest, spans=spans_of(self.versions))
        return rest if self.part is None else joined(self.part, rest)


class RunningBatch:
    """The completions that a process samples, at most ``slots`` at once. One thread calls every method.

    A completion's random numbers depend on its request's seed, its number and a token's position in its text, so that
    they go on where other weights stopped.
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
        self._decoded: dict[int, tuple[_Sequence, Continuations]] = {}  # by place
        self._done: dict[str, dict[int, Completion]] = {}  # of requests that are not finished, by number
        self._counts: dict[str, int] = {}
        self.tokens = 0  # sampled since the start

    @property
    def unfinished(self) -> bool:
        """Whether a completion decodes or waits."""
        return bool(self._queue or self._decoded)

    @property
    def counts(self) -> tuple[int, int]:
        """Completions that decode, and that wait; any thread may ask."""
        return len(self._decoded), len(self._queue)

    def start(self, name: str, request: GenerationRequest) -> None:
        """Have the request's completions wait for a slot. Raises EngineError if it cannot be served."""
        self._engine.check(request)
        self._counts[name], self._done[name] = request.num_completions, {}
        self._queue += [_Sequence(name=name, number=n, request=request) for n in range(request.num_completions)]

    @torch.inference_mode()
    def step(self) -> Ended:
        """Make one token of each completion that has a slot.

        Raises EngineError if the weights give log-probs that are not finite.
        """
        self._admit()
        self.tokens += len(self._decoded)
        if self._decoding.unfinished:
            self._decoding.step()
        return self._finished(self._ended())

    @torch.inference_mode()
    def pause(self, mode: RunningRequests) -> Ended:
        """Before other weights are loaded: keep what completions have made, and what they have cached if ``mode`` says
        so; with ``abort`` end them where they are."""
        if mode == "keep_cache":
            return []
        self._decoding.cut(self._decoded.keys())
        cut = self._ended()
        if mode == "abort":
            waiting, self._queue = self._queue, deque()
            return self._finished([*map(_aborted, cut), *((one, _nothing(one)) for one in waiting)])
        for sequence, part in reversed(cut):
            sequence.part = part
            self._queue.appendleft(sequence)
        return []

    def resume(self) -> None:
        """Label what is made from now on with the engine's version."""
        assert self._engine.version is not None
        made = self._decoding.made()
        for place, (sequence, _) in self._decoded.items():
            sequence.versions.append((made[place], self._engine.version))

    @torch.inference_mode()
    def abort(self, name: str) -> Ended:
        """End a request's completions where they are."""
        self._decoding.cut([place for place, (one, _) in self._decoded.items() if one.name == name])
        waiting = [one for one in self._queue if one.name == name]
        self._queue = deque(one for one in self._queue if one.name != name)
        return self._finished([*map(_aborted, self._ended()), *((one, _nothing(one)) for one in waiting)])

    def drop(self) -> list[str]:
        """Forget everything. Returns the names of all requests."""
        self._decoding.cut(self._decoded.keys())
        self._decoding.ended()
        self._free += self._decoded
        names = list(self._counts)
        for held in (self._queue, self._decoded, self._done, self._counts):
            held.clear()
        return names

    def _admit(self) -> None:
        """Give waiting completions the free slots. Those of one prompt share its prefill."""
        groups: dict[tuple[object, ...], list[_Sequence]] = {}
        for _ in range(min(len(self._free), len(self._queue))):
            one = self._queue.popleft()
            alike = (one.text, replace(one.params, seed=0), one.request.routes)
            own = (one.request.params.seed,) if one.params.router_noise else ()  # it is in the prompt's cache too
            groups.setdefault((*alike, *own), []).append(one)
        self._decoding.add([self._asked(sequences) for sequences in groups.values()])

    def _asked(self, sequences: list[_Sequence]) -> Continuations:
        first, text = sequences[0], sequences[0].text
        asked = Continuations(
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
        """The completions of sequences that have ended, whose places are free again."""
        places = self._decoding.ended()
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
    """What a completion without a slot has made."""
    empty = Completion(
        token_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), finish_reason="abort", spans=(Span(0, 0),)
    )
    return empty if sequence.part is None else replace(sequence.part, finish_reason="abort")
