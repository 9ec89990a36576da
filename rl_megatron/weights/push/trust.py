"""Verifies that engine servers hold the learner's weights: by checksums, and by a probe where these do not suffice.

Checksums cover parameters that a server keeps as loaded. The probe covers those that kernels keep in a private layout:
fixed texts that engine and learner must score alike. Deliveries move the weights; this module only verifies.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from rl_megatron.config.sections.learner import PaddingSection
from rl_megatron.data.packing import Packer, unpack
from rl_megatron.data.samples import single_turns, to_samples
from rl_megatron.errors import SyncError
from rl_megatron.interfaces import Scorer
from rl_megatron.types import Completion, GenerationRequest, ParallelDims, Prompt, SamplingParams, Span
from rl_megatron.weights.boxes import Shape
from rl_megatron.weights.checks.compare import Comparison, ServerComparisons
from rl_megatron.weights.checks.reports import ChecksumReport, Kinds
from rl_megatron.weights.routes import mirror

logger = logging.getLogger(__name__)

_TEXTS, _TEXT_TOKENS = 4, 16
_SAMPLED = 4  # tokens that engines sample after a text that they cannot score
_TIES = 1  # texts in which two experts may be so close that rounding chooses; seen at a gap of 6e-8
PROBE_LENGTH = _TEXT_TOKENS + 1  # includes the token that a server makes after a text that it scores

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
        """Texts that fit into ``max_length`` tokens, each with the token that a server makes after it."""
        chosen = random.Random(0)
        length = min(PROBE_LENGTH, max_length) - 1
        texts = tuple(tuple(chosen.randrange(vocab_size) for _ in range(length)) for _ in range(_TEXTS))
        return cls(texts=texts, temperature=temperature, tolerance=tolerance)

    def with_one_text(self, version: int) -> Probe:
        """A probe with one of the texts, chosen by ``version``."""
        return replace(self, texts=(self.texts[version % len(self.texts)],))

    @property
    def scores_given_text(self) -> bool:
        """True if engines score the texts themselves, instead of tokens that they sample after them."""
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

    def continued_texts(self, completions: Sequence[Sequence[Completion]]) -> list[ScoredText]:
        """The texts that an engine continued, with its log-probs."""
        return [
            (text[:-_SAMPLED], tuple(one.token_ids.tolist()), one.logprobs.tolist())
            for text, (one,) in zip(self.texts, completions, strict=True)
        ]

    def scored(self, logprobs: Sequence[Sequence[float]]) -> list[ScoredText]:
        """The given texts with an engine's log-probs."""
        return [(t[:1], t[1:], said) for t, said in zip(self.texts, logprobs, strict=True)]

    def judge(self, engine: Sequence[ScoredText], other: Sequence[Sequence[float]], owner: str) -> tuple[str, bool]:
        """Compares two sets of log-probs. Returns a message, empty within the tolerance, and whether to refuse."""
        gaps = [
            max((abs(a - b) for a, b in zip(said, theirs, strict=True)), key=lambda gap: (math.isnan(gap), gap))
            for (_, _, said), theirs in zip(engine, other, strict=True)
        ]
        over = [gap for gap in gaps if not gap <= self.tolerance]  # NaN too
        if not over:
            return "", False
        found = (
            f"log-probs of the probe differ from {owner} by up to {max(over):.3g} nats, in {len(over)} of {len(gaps)} "
            f"texts; rollout.server.probe_tolerance is {self.tolerance:g}"
        )
        return found, len(over) > min(_TIES, len(gaps) - 1)


async def score_texts(
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
    batch = Packer(dims=dims, max_tokens=len(groups) * _TEXT_TOKENS, padding=padding).pack(samples)
    said = await learner.score(batch, frozenset({"logprobs"}))
    values = unpack(batch, said["logprobs"], samples)
    bounds = pairwise(samples.cu_seqlens.tolist())
    return [values[start:stop][samples.mask[start:stop]].tolist() for start, stop in bounds]


class Probed(Protocol):
    """The engine servers, as a probe asks them. ``only`` names a single server to ask."""

    async def sample_on_all(
        self, requests: Sequence[GenerationRequest], *, only: str | None = None
    ) -> Mapping[str, list[list[Completion]]]:
        """Completions by each server with its present weights, by server. Raises SyncError."""
        ...

    async def score_on_all(
        self, texts: Sequence[Sequence[int]], *, only: str | None = None
    ) -> Mapping[str, list[list[float]]]:
        """Log-probs (nats) of each text's tokens after the first, by server. Raises SyncError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedProbe:
    """The texts of a push's probe, and a verified server's log-probs (nats) of their tokens after the first."""

    probe: Probe
    logprobs: Sequence[Sequence[float]]


Answers = Mapping[str, tuple[list[ScoredText], list[list[float]]]]
"""Server -> its scores of the probe's texts, and the learner's scores of the same tokens."""


class PushVerifier:
    """Knows which servers are verified, and which kinds of parameters each keeps in a private layout.

    ``probes``: "auto" probes a server at its first version. After that it probes only servers whose checksums do not
    cover every tensor, with one text, and with all if that disagrees. The mirror file at ``path`` names the tensors.
    """

    def __init__(
        self,
        *,
        path: Path,
        servers: Probed,
        learner: Scorer,
        dims: ParallelDims,
        probe: Probe,
        padding: PaddingSection | None = None,
        probes: Literal["auto", "always"] = "auto",
    ) -> None:
        self._path, self._servers = path, servers
        self._learner, self._dims, self._probe, self._probes = learner, dims, probe, probes
        self._padding = padding or PaddingSection()
        self._checks = ServerComparisons()
        self._probed: set[str] = set()
        self._asks = False  # the last version was probed, so that the next will be
        self._scoring: asyncio.Future[list[list[float]]] | None = None  # the learner's scores, ahead of the servers'

    @property
    def private(self) -> Kinds:
        """Kinds of parameters that checksums cannot cover, by server."""
        return self._checks.private

    def begin(self, version: int) -> None:
        """Makes the learner score while servers load, if the last version was probed, so that this one will be."""
        if self._asks and self._probe.scores_given_text and self._scoring is None:
            self._scoring = asyncio.ensure_future(self._scores(self._probe.with_one_text(version)))

    async def end(self) -> None:
        """Waits for the learner's scores of `begin`; `verify` has raised their error."""
        if self._scoring is not None:
            await asyncio.gather(self._scoring, return_exceptions=True)
        self._scoring = None

    async def verify(
        self, version: int, reports: Mapping[str, Sequence[ChecksumReport]], checksums: Mapping[str, int]
    ) -> VerifiedProbe | None:
        """Compares the reports of each server's ranks with the learner's checksums, and probes if needed.

        None if checksums alone sufficed. Raises CorruptionError that names tensors that differ, SyncError if a
        server's log-probs differ from the learner's.
        """
        known = dict[object, Comparison]()
        unseen = {name: await self._compare(name, said, checksums, known) for name, said in reports.items()}
        verified = None
        new = bool(reports.keys() - self._probed)
        self._asks = self._probes == "always" or any(unseen.values()) or new
        if self._asks:
            verified = await self._ask(version, unseen, everything=new or self._probes == "always")
        self._probed |= reports.keys()
        return verified

    async def verify_one(
        self,
        version: int,
        name: str,
        reports: Sequence[ChecksumReport],
        checksums: Mapping[str, int],
        verified: VerifiedProbe | None,
    ) -> None:
        """Compares the restarted server ``name`` with the learner's checksums and a ``verified`` server's scores.

        The learner is not asked, as it may have trained on. Raises like `verify`, and SyncError if a
        tensor has neither a checksum nor a score.
        """
        unseen = await self._compare(name, reports, checksums)
        if verified is None and unseen:
            raise SyncError(f"version {version} is not served at {name}: nothing verifies {min(unseen)} there")
        if verified is not None:
            probe = verified.probe
            said = (await self._servers.score_on_all(probe.texts, only=name))[name]
            found, refused = probe.judge(probe.scored(said), verified.logprobs, "a verified replica's")
            if refused:
                raise SyncError(f"version {version} arrived wrong at {name}, and is not served there: {found}")
        self._probed.add(name)

    async def verify_file(self, version: int) -> None:
        """Raises CorruptionError if the mirror file's bytes are not the learner's, SyncError for another version."""
        await asyncio.to_thread(mirror.check, self._path, version)

    @cached_property
    def _shapes(self) -> Mapping[str, Shape]:
        return mirror.shapes(self._path)

    async def _compare(
        self,
        name: str,
        reports: Sequence[ChecksumReport],
        checksums: Mapping[str, int],
        known: dict[object, Comparison] | None = None,
    ) -> frozenset[str]:
        """Tensors of a server that no checksum verifies. Raises CorruptionError for those that differ."""
        found = await asyncio.to_thread(self._checks.find, name, checksums, self._shapes, reports, known)
        return found.verified(name, "that the learner wrote")

    async def _ask(self, version: int, unseen: Mapping[str, frozenset[str]], *, everything: bool) -> VerifiedProbe:
        """Probes the servers. Raises SyncError if a server's log-probs differ from the learner's."""
        one, wrong = self._probe.with_one_text(version), []
        if not everything:
            answers = await self._answers(one, self._scoring)
            if not any(found for found, _ in _judged(one, answers).values()):
                return await self._verified(one, answers)
        answers = await self._answers(self._probe, None)
        for name, (found, refused) in _judged(self._probe, answers).items():
            if refused:
                blind = sorted(unseen[name])
                told = f"; no checksum verifies {', '.join(blind[:3])} ({len(blind)} tensors)" if blind else ""
                wrong.append(f"{name}: {found}{told}")
            elif found:
                logger.info("tolerated as near ties between experts: %s: %s", name, found)
        if wrong:
            for name in unseen.keys() - self._probed:
                del self._checks.private[name]  # its private kinds are not verified
            raise SyncError(
                "\n  ".join([f"version {version} arrived wrong, and is not served:", *wrong])
                + "\n  the engine loads this model's weights wrongly, or computes in another precision"
            )
        return await self._verified(self._probe, answers)

    async def _verified(self, probe: Probe, answers: Answers) -> VerifiedProbe:
        """Returns a verified server's scores of the probe's texts."""
        if not probe.scores_given_text:
            scored = await self._servers.score_on_all(probe.texts)
            return VerifiedProbe(probe=probe, logprobs=next(iter(scored.values())))
        return VerifiedProbe(probe=probe, logprobs=[said for _, _, said in next(iter(answers.values()))[0]])

    async def _answers(self, probe: Probe, learner: asyncio.Future[list[list[float]]] | None) -> Answers:
        """Each server's and the learner's scores of the same tokens; concurrently if the tokens are given."""
        if probe.scores_given_text:
            said, known = await asyncio.gather(self._servers.score_on_all(probe.texts), learner or self._scores(probe))
            return {name: (probe.scored(one), known) for name, one in said.items()}
        out = {}
        for name, answers in (await self._servers.sample_on_all(probe.requests())).items():
            scored = probe.continued_texts(answers)
            out[name] = (scored, await score_texts(self._learner, self._dims, self._padding, scored))
        return out

    async def _scores(self, probe: Probe) -> list[list[float]]:
        """The learner's scores of the given texts."""
        texts = probe.scored([[0.0] * (len(text) - 1) for text in probe.texts])
        return await score_texts(self._learner, self._dims, self._padding, texts)


def _judged(probe: Probe, answers: Answers) -> dict[str, tuple[str, bool]]:
    return {name: probe.judge(said, learner, "the learner's") for name, (said, learner) in answers.items()}
