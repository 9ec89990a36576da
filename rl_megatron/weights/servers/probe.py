"""The probe: fixed texts that engine and learner must score alike if the engine holds the learner's weights."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from rl_megatron.data.packing import pack, unpack
from rl_megatron.data.samples import to_samples
from rl_megatron.data.trajectories import single_turns
from rl_megatron.interfaces import Scorer
from rl_megatron.options.padding import PaddingSection
from rl_megatron.types import Completion, GenerationRequest, ParallelDims, Prompt, SamplingParams, Span

_TEXTS, _TEXT_TOKENS = 4, 16
_SAMPLED = 4  # tokens that engines sample after a text that they cannot score
_TIES = 1  # texts in which two experts may be so close that rounding chooses; seen at a gap of 6e-8
PROBE_LENGTH = _TEXT_TOKENS + 1  # with the token that a server makes behind a text that it scores

ScoredText = tuple[tuple[int, ...], tuple[int, ...], Sequence[float]]
"""A prompt, the tokens after it, and their log-probs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The same texts at every push, with token ids from the whole vocabulary, so that most experts get some.

    At temperature 1 engines score the texts in one forward pass, and the learner need not wait for the engine. Engines
    cannot score text at other temperatures: there they sample a few more tokens, which the learner scores.
    """

    texts: tuple[tuple[int, ...], ...]
    temperature: float
    tolerance: float  # nats

    @classmethod
    def make(cls, *, vocab_size: int, max_length: int, temperature: float, tolerance: float) -> Probe:
        """Texts that fit into ``max_length`` tokens, each with the token that a server makes behind it."""
        chosen = random.Random(0)
        length = min(PROBE_LENGTH, max_length) - 1
        texts = tuple(tuple(chosen.randrange(vocab_size) for _ in range(length)) for _ in range(_TEXTS))
        return cls(texts=texts, temperature=temperature, tolerance=tolerance)

    def one(self, version: int) -> Probe:
        """A probe with one of the texts, chosen by ``version``."""
        return replace(self, texts=(self.texts[version % len(self.texts)],))

    @property
    def given(self) -> bool:
        """Whether engines score the texts themselves, instead of tokens that they sample after them."""
        return self.temperature == 1

    def requests(self) -> list[GenerationRequest]:
        """Requests to continue every text; prompt and sampled tokens together are as long as a text."""
        params = SamplingParams(
            temperature=self.temperature, top_p=1.0, max_new_tokens=_SAMPLED, stop_token_ids=(), seed=0
        )
        return [
            GenerationRequest(id=f"probe {i}", token_ids=text[:-_SAMPLED], num_completions=1, params=params)
            for i, text in enumerate(self.texts)
        ]

    def continued(self, completions: Sequence[Sequence[Completion]]) -> list[ScoredText]:
        """The texts that an engine continued, with its log-probs."""
        return [
            (text[:-_SAMPLED], tuple(one.token_ids.tolist()), one.logprobs.tolist())
            for text, (one,) in zip(self.texts, completions, strict=True)
        ]

    def scored(self, logprobs: Sequence[Sequence[float]]) -> list[ScoredText]:
        """The given texts with an engine's log-probs."""
        return [(t[:1], t[1:], said) for t, said in zip(self.texts, logprobs, strict=True)]

    def judge(self, engine: Sequence[ScoredText], other: Sequence[Sequence[float]], whose: str) -> tuple[str, bool]:
        """Compare two sets of log-probs. Returns a message, empty within the tolerance, and whether to refuse."""
        gaps = [
            max((abs(a - b) for a, b in zip(said, theirs, strict=True)), key=lambda gap: (math.isnan(gap), gap))
            for (_, _, said), theirs in zip(engine, other, strict=True)
        ]
        over = [gap for gap in gaps if not gap <= self.tolerance]  # NaN too
        if not over:
            return "", False
        found = (
            f"log-probs of the probe differ from {whose} by up to {max(over):.3g} nats, in {len(over)} of {len(gaps)} "
            f"texts; rollout.server.probe_tolerance is {self.tolerance:g}"
        )
        return found, len(over) > min(_TIES, len(gaps) - 1)


async def scores_of(
    learner: Scorer, dims: ParallelDims, padding: PaddingSection, texts: Sequence[ScoredText]
) -> list[list[float]]:
    """The learner's log-probs of the tokens after each prompt."""
    groups = [
        single_turns(
            Prompt(id=f"probe {i}", text="", token_ids=prompt, answer=""),
            [
                Completion(
                    token_ids=np.array(behind, np.int32),
                    logprobs=np.array(said, np.float32),
                    finish_reason="length",
                    spans=(Span(0, 0),),
                )
            ],
        )
        for i, (prompt, behind, said) in enumerate(texts)
    ]
    samples = to_samples(groups)
    batch = pack(samples, dims=dims, max_tokens=len(groups) * _TEXT_TOKENS, padding=padding)
    said = await learner.score(batch, frozenset({"logprobs"}))
    values = unpack(batch, said["logprobs"], samples)
    bounds = pairwise(samples.cu_seqlens.tolist())
    return [values[start:stop][samples.mask[start:stop]].tolist() for start, stop in bounds]
