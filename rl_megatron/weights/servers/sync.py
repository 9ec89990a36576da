"""A WeightSync into engine servers: a version is served once it is known that every server holds what the learner has.

Checksums say so of all that a server keeps as its loader put it, the probe of what its kernels keep otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from rl_megatron.errors import CorruptionError, ReplicasLost, SyncError
from rl_megatron.interfaces import Scorer, WeightSync
from rl_megatron.types import Completion, GenerationRequest, ParallelDims, WeightUpdate
from rl_megatron.weights.checks.compare import compare, sealed_by
from rl_megatron.weights.checks.reports import NO_KINDS, Kinds, Report, seconds_waited
from rl_megatron.weights.servers import mirror
from rl_megatron.weights.servers.direct import Direct, Senders
from rl_megatron.weights.servers.probe import Probe, Scored, scores_of

logger = logging.getLogger(__name__)

_TOLD = 20  # tensors that an error names


class Replicas(Protocol):
    """The engine servers, as a weight sync sees them. ``only`` names one of them: what it is asked, and nobody else."""

    def stale(self, name: str) -> bool:
        """Whether it answers, but does not serve."""
        ...

    async def load(
        self, path: Path, version: int, *, only: str | None = None, private: Kinds = NO_KINDS
    ) -> Mapping[str, Sequence[Report]]:
        """Every replica holds the mirror file's weights; none serves them. What each rank holds, by replica.

        Parameters of ``private`` kinds, by replica, have no checksums. Raises SyncError; ReplicasLost where all died.
        """
        ...

    async def sample_everywhere(
        self, requests: Sequence[GenerationRequest], *, only: str | None = None
    ) -> Mapping[str, list[list[Completion]]]:
        """By each replica with the weights it holds; by its name."""
        ...

    async def score_everywhere(
        self, texts: Sequence[Sequence[int]], *, only: str | None = None
    ) -> Mapping[str, list[list[float]]]:
        """Log-probs of each text's tokens but the first, likewise."""
        ...

    async def commit(self, version: int, *, only: str | None = None) -> None:
        """Serve the weights that were loaded."""
        ...

    def refuse(self) -> None:
        """Serve nothing until other weights are loaded and committed."""
        ...


@dataclass(slots=True, kw_only=True)
class _Trust:
    """What is known of the servers: kinds of parameters that they keep in layouts of their own, and who was probed."""

    private: dict[str, frozenset[str]] = field(default_factory=dict)  # by server
    probed: set[str] = field(default_factory=set)


class Sender(WeightSync, Protocol):
    """The learner, whose push ends in the mirror file."""

    async def sums(self) -> Sequence[Report]:
        """Checksums of the boxes that each rank answers for, of what was pushed last."""
        ...


@runtime_checkable
class LearnerWeights(Sender, Senders, Protocol):
    """The learner's ranks: into the mirror file, or straight into engine ranks."""


Reference = tuple[Probe, Sequence[Sequence[float]]] | None
"""What was asked last and a verified replica's log-probs of these texts; None where checksums alone verified it."""


Answers = Mapping[str, tuple[list[Scored], list[list[float]]]]
"""By replica: what it says of the probe's texts, and the learner of the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    """The version that is served, and the learner's checksums of it."""

    version: int
    reference: Reference
    checksums: Mapping[str, int]


class ServedWeights:
    """A WeightSync into engine servers. ``inner`` moves the learner's weights into the mirror file ``path``.

    ``direct`` moves them straight into the servers' ranks instead; the mirror is filled for an export alone then.
    ``probes``: "auto" asks servers whose checksums verify every tensor at their first version alone, others after
    that about one text, and about all where it does not agree.
    """

    def __init__(
        self,
        *,
        inner: Sender,
        path: Path,
        replicas: Replicas,
        learner: Scorer,
        dims: ParallelDims,
        probe: Probe,
        probes: Literal["auto", "always"] = "auto",
        direct: Direct | None = None,
    ) -> None:
        self._inner, self._path, self._replicas = inner, path, replicas
        self._learner, self._dims, self._probe, self._probes = learner, dims, probe, probes
        self._shapes: Mapping[str, tuple[int, ...]] = {}
        self._trust = _Trust()
        self._scoring: asyncio.Future[list[list[float]]] | None = None  # by the learner, ahead of servers
        self._asks = False  # whether the last version was probed, as the next will be then
        self._direct = direct
        self._lock = asyncio.Lock()  # the mirror holds one version
        self._served: _Served | None = None

    async def push(self, version: int) -> WeightUpdate:
        """Raises SyncError where what a replica holds is not what the learner has."""
        started = time.perf_counter()
        async with self._lock:
            self._served = None
            try:
                moved, self._served, verify_seconds = await self._serve(version)
            except BaseException:
                self._replicas.refuse()
                raise
        return replace(
            moved,
            seconds=time.perf_counter() - started,
            verify_seconds=moved.verify_seconds + verify_seconds,
        )

    async def _serve(self, version: int) -> tuple[WeightUpdate, _Served, float]:
        """Move, verify and commit, again where all replicas died of it."""
        moved = sealing = self._scoring = None
        if self._direct is None:
            moved = await self._inner.push(version)
            sealing = asyncio.ensure_future(self._seal(version))  # while servers load, and what follows
            self._score_early(version)
        try:
            while True:
                try:
                    update, reports, seal = await self._moved(version, moved, sealing)
                    reference, verify_seconds = await self._verify(version, reports, seal)
                    await self._replicas.commit(version)
                except ReplicasLost as error:
                    logger.warning("%s\nloaded again as soon as a server is back", error)
                    continue
                served = _Served(version=version, reference=reference, checksums=seal.checksums)
                return update, served, verify_seconds
        finally:  # what they raise, whoever waits for them does
            await asyncio.gather(*filter(None, (sealing, self._scoring)), return_exceptions=True)

    def _score_early(self, version: int) -> None:
        """Have the learner score while servers load, where the probe was asked last time, as it will be then."""
        if self._asks and self._probe.given and self._scoring is None:
            self._scoring = asyncio.ensure_future(self._scores(self._probe.one(version)))

    async def _seal(self, version: int) -> mirror.Seal:
        """What each tensor must be wherever it arrives: of the learner's own, not of what the file holds."""
        reports = await self._inner.sums()
        self._shapes = self._shapes or mirror.shapes(self._path)
        return mirror.seal(self._path, version, sealed_by(reports, self._shapes))

    async def refit(self, name: str) -> None:
        """Have a stale replica serve what the others do, or did. Raises SyncError where it does not hold it then.

        Beside its checksums, it must score as a replica did that the learner itself compared: the learner may have
        moved on. Where nothing is served, or a push was faster, this does nothing.
        """
        async with self._lock:
            if self._served is None or not self._replicas.stale(name):
                return
            version, reference = self._served.version, self._served.reference
            if self._direct is not None and not await self._mirrored(self._direct, self._served):
                logger.info("%s waits for the next push: the learner no longer has version %d", name, version)
                return
            reports = await self._replicas.load(self._path, version, only=name)
            unseen = self._compare(name, reports[name], mirror.seal_of(self._path, version))
            if reference is None and unseen:
                raise SyncError(f"version {version} is not served at {name}: nothing verifies {min(unseen)} there")
            if reference is not None:
                probe, known = reference
                said = (await self._replicas.score_everywhere(probe.texts, only=name))[name]
                found, refused = probe.judge(probe.scored(said), known, "a verified replica's")
                if refused:
                    raise SyncError(f"version {version} arrived wrong at {name}, and is not served there: {found}")
            self._trust.probed.add(name)
            await self._replicas.commit(version, only=name)

    async def _mirrored(self, direct: Direct, served: _Served) -> bool:
        """Fill the mirror with what went straight into servers; False where the learner has moved on since."""
        direct.meet_again()
        await self._inner.push(served.version)
        now = (await self._seal(served.version)).checksums
        return all(now.get(name) == before for name, before in served.checksums.items())

    async def export(self, folder: Path) -> None:
        """Raises CorruptionError where the mirror has not what the learner has."""
        if self._served is not None:
            version = self._served.version
            if self._direct is not None:  # what went straight to the engines is in no file
                await self._inner.push(version)
                await self._seal(version)
            await asyncio.to_thread(mirror.check, self._path, version)
        await self._inner.export(folder)

    async def _moved(
        self, version: int, moved: WeightUpdate | None, sealing: asyncio.Future[mirror.Seal] | None
    ) -> tuple[WeightUpdate, Mapping[str, Sequence[Report]], mirror.Seal]:
        """What moved, what each rank of each replica holds, and what it should. Raises SyncError."""
        if self._direct is not None:
            behind = partial(self._score_early, version)
            return await self._direct.push(version, private=self._trust.private, behind=behind)
        assert moved is not None
        assert sealing is not None
        reports = await self._replicas.load(self._path, version, private=self._trust.private)
        loaded = time.perf_counter()
        seal = await asyncio.shield(sealing)
        waited = time.perf_counter() - loaded + seconds_waited(reports)
        moved = replace(
            moved,
            num_bytes=moved.num_bytes + len(reports) * self._path.stat().st_size,
            verify_seconds=moved.verify_seconds + waited,
        )
        if seal.error is not None:
            error, tensor = seal.error
            logger.info("version %d is quantised: off by up to %.3g of a tensor, %s", version, error, tensor)
            moved = replace(moved, quantization_error=error)
        return moved, reports, seal

    async def _verify(
        self, version: int, reports: Mapping[str, Sequence[Report]], seal: mirror.Seal
    ) -> tuple[Reference, float]:
        """What a verified replica says of the texts; seconds spent on nothing but verifying. Raises SyncError."""
        started = time.perf_counter()
        unseen = {name: self._compare(name, said, seal) for name, said in reports.items()}
        reference: Reference = None
        new = bool(reports.keys() - self._trust.probed)
        self._asks = self._probes == "always" or any(unseen.values()) or new
        if self._asks:
            reference = await self._ask(version, unseen, everything=new or self._probes == "always")
        self._trust.probed |= reports.keys()
        return reference, time.perf_counter() - started

    def _compare(self, name: str, reports: Sequence[Report], seal: mirror.Seal) -> frozenset[str]:
        """Tensors of a server that no checksum verifies. Raises CorruptionError for those that differ."""
        self._shapes = self._shapes or mirror.shapes(self._path)
        private = self._trust.private.get(name, frozenset())
        found = compare(seal.checksums, self._shapes, reports, private)
        if found.differing and name not in self._trust.private:
            private = found.private(reports)
            found = compare(seal.checksums, self._shapes, reports, private)
        if found.differing:
            named = sorted(found.differing)
            more = f" and {len(named) - _TOLD} more" if len(named) > _TOLD else ""
            raise CorruptionError(
                f"{name}: it holds other bytes than the learner wrote in {', '.join(named[:_TOLD])}{more}"
            )
        if name not in self._trust.private:
            self._trust.private[name] = private
            kinds = f", of them {', '.join(sorted(private))} in layouts of its own" if private else ""
            logger.info("%s: checksums verify all but %d tensors%s", name, len(found.unseen), kinds)
        return found.unseen

    async def _ask(self, version: int, unseen: Mapping[str, frozenset[str]], *, everything: bool) -> Reference:
        """What a replica says of the texts. Raises SyncError where one says other log-probs than the learner."""
        one, wrong = self._probe.one(version), []
        if not everything:
            answers = await self._answers(one, self._scoring)
            if not any(found for found, _ in self._judged(one, answers).values()):
                return await self._reference(one, answers)
        answers = await self._answers(self._probe, None)
        for name, (found, refused) in self._judged(self._probe, answers).items():
            if refused:
                blind = sorted(unseen[name])
                told = f"; no checksum verifies {', '.join(blind[:3])} ({len(blind)} tensors)" if blind else ""
                wrong.append(f"{name}: {found}{told}")
            elif found:
                logger.info("taken for near ties between experts: %s: %s", name, found)
        if wrong:
            for name in unseen.keys() - self._trust.probed:
                del self._trust.private[name]  # nothing has verified what it called its own
            raise SyncError(
                "\n  ".join([f"version {version} arrived wrong, and is not served:", *wrong])
                + "\n  the engine loads this model's weights wrongly, or it computes with another precision"
            )
        return await self._reference(self._probe, answers)

    @staticmethod
    def _judged(probe: Probe, answers: Answers) -> dict[str, tuple[str, bool]]:
        return {name: probe.judge(said, learner, "the learner's") for name, (said, learner) in answers.items()}

    async def _reference(self, probe: Probe, answers: Answers) -> Reference:
        """What one replica says of the texts that all were asked about."""
        if not probe.given:
            return probe, next(iter((await self._replicas.score_everywhere(probe.texts)).values()))
        return probe, [said for _, _, said in next(iter(answers.values()))[0]]

    async def _answers(self, probe: Probe, learner: asyncio.Future[list[list[float]]] | None) -> Answers:
        """What each replica and the learner say of the same tokens, asked at once where these are given."""
        if probe.given:
            said, known = await asyncio.gather(
                self._replicas.score_everywhere(probe.texts), learner or self._scores(probe)
            )
            return {name: (probe.scored(one), known) for name, one in said.items()}
        out = {}
        for name, answers in (await self._replicas.sample_everywhere(probe.requests())).items():
            scored = probe.continued(answers)
            out[name] = (scored, await scores_of(self._learner, self._dims, scored))
        return out

    async def _scores(self, probe: Probe) -> list[list[float]]:
        """The learner's, of given texts."""
        texts = probe.scored([[0.0] * (len(text) - 1) for text in probe.texts])
        return await scores_of(self._learner, self._dims, texts)
