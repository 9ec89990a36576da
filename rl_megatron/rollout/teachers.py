"""Teachers behind engine servers, together one frozen model: it says what they think of each token of a batch.

Letters: S sequences, N positions of all of them, D data-parallel ranks, M micro-batches, k tokens of a teacher.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from rl_megatron.config.sections.services import SERVICE, TeacherSection
from rl_megatron.errors import ConfigError, EngineError, ServiceError
from rl_megatron.interfaces import FrozenModel
from rl_megatron.rollout.servers.adapter import Sampling
from rl_megatron.rollout.servers.decoding import Judged
from rl_megatron.rollout.servers.http import AttemptFailed, Server
from rl_megatron.services import ServiceAddress, Services
from rl_megatron.types import Batch, Samples, Scores, Want

logger = logging.getLogger(__name__)

_TRIED = (1, 2, 3)  # a text of tokens that every vocabulary has


@dataclass(slots=True, kw_only=True)
class Teacher:
    """One teacher, at a server or at the replicas of a service of the run, which take turns."""

    name: str
    section: TeacherSection
    adapter: Sampling
    services: Services
    _servers: dict[ServiceAddress, Server] = field(default_factory=dict)
    _slots: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.section.concurrency)

    async def judge(self, text: Sequence[int], top: int) -> Judged:
        """What it says of the text, with its ``top`` most probable tokens at each place. Raises EngineError."""
        wait, given = 1.0, f"algorithm.kl.teachers.{self.name}"
        for left in range(self.section.retries, -1, -1):
            try:
                async with self._slots, asyncio.timeout(self.section.timeout_seconds):
                    return await self.adapter.judge(self._server(), text, top)
            except TimeoutError:
                said = f"no answer within timeout_seconds={self.section.timeout_seconds:g}"
            except (AttemptFailed, ServiceError) as error:  # a service may be restarting
                said = str(error)
            except EngineError as error:
                raise EngineError(f"{given}: {error}") from error
            if left:
                logger.warning("%s: %s; retrying in %g s", given, said, wait)
                await asyncio.sleep(wait)
                wait *= 2
        raise EngineError(f"{given}: {said}; attempts made: {self.section.retries + 1}")

    def _server(self) -> Server:
        """The server whose turn it is. Raises ServiceError if none serves now."""
        given = self.section.server
        if given.startswith(SERVICE):
            address = self.services.address(given.removeprefix(SERVICE))
        else:
            address = ServiceAddress(url=given, key=_token(self.section.token_file))
        if address not in self._servers:
            limit = self.section.timeout_seconds
            self._servers[address] = Server(address.url, token=address.key or None, timeout_seconds=limit)
        return self._servers[address]

    async def close(self) -> None:
        """Close its connections."""
        for server in self._servers.values():
            await server.close()


class Teachers(FrozenModel):
    """A frozen model whose log-prob of a token is the weighted mean of those of the teachers of its prompt's source:
    its KL by k1 is the weighted sum of the teachers'."""

    def __init__(self, teachers: Sequence[Teacher], *, top: int, vocab_size: int, sources: Sequence[str]) -> None:
        """``top``: how many tokens the only teacher of a source names; all of ``vocab_size``, the policy's, where it
        has no more. ``sources`` of the data, as ``Samples.source_of`` counts them."""
        self._teachers, self._top, self._vocab_size = teachers, min(top, vocab_size), vocab_size
        self._sources = sources

    async def try_out(self) -> None:
        """Ask each for a short text. Raises EngineError for one that does not answer as it should."""
        await asyncio.gather(*(one.judge(_TRIED, 1) for one in self._teachers))

    @override
    async def score(self, batch: Batch, want: frozenset[Want]) -> Mapping[Want, Scores]:
        """Positions of sequences without a masked-in target are 0, and are not asked for. Raises EngineError."""
        if others := want - {"logprobs", "top"}:
            raise EngineError(f"a teacher behind a server tells log-probs, and no {', '.join(sorted(others))}")
        samples, top = batch.samples, self._top if "top" in want else 0
        asked = [int(one) for row in batch.sequences for part in row for one in part]
        said = dict(zip(asked, await asyncio.gather(*(self._judged(samples, one, top) for one in asked)), strict=True))
        of_sequences: dict[Want, dict[int, Tensor]] = {
            "logprobs": {one: logprobs for one, (logprobs, _) in said.items()},
            "top": {one: named for one, (_, named) in said.items()},
        }
        return {name: _in_micro_batches(batch, of_sequences[name]) for name in want}

    async def _judged(self, samples: Samples, one: int, top: int) -> tuple[Tensor, Tensor]:
        """Log-probs [L - 1] and the most probable tokens [L - 1, 2, k] of a sequence of the samples."""
        first, stop = samples.cu_seqlens[one : one + 2].tolist()
        if not samples.mask[first:stop].any():
            return torch.zeros(stop - first), torch.zeros(stop - first, 2, top)
        text = [*samples.input_ids[first:stop].tolist(), int(samples.targets[stop - 1])]
        source = "" if samples.source_of is None else self._sources[int(samples.source_of[one])]
        of = [teacher for teacher in self._teachers if not teacher.section.sources or source in teacher.section.sources]
        answers = await asyncio.gather(*(teacher.judge(text, top) for teacher in of))
        total = sum(teacher.section.weight for teacher in of)
        logprobs = torch.zeros(stop - first, dtype=torch.float64)
        for teacher, said in zip(of, answers, strict=True):
            logprobs += teacher.section.weight / total * torch.from_numpy(said.logprobs.astype("float64"))
        ids, of_ids = (torch.from_numpy(x.astype("float32")) for x in (answers[0].top_ids, answers[0].top_logprobs))
        if top and int(ids.max()) >= self._vocab_size:
            raise EngineError(
                f"algorithm.kl.teachers.{of[0].name}: it names token {int(ids.max())}, and the policy's last is "
                f"{self._vocab_size - 1}; set algorithm.kl.estimator=k1, or serve a model of as many tokens"
            )
        return logprobs.float(), torch.stack([ids, of_ids], 1)

    @override
    async def forget(self) -> None:
        """Servers keep nothing of a batch."""

    @override
    async def start_from(self, folder: Path) -> None:
        raise EngineError(f"a teacher behind a server has the server's weights, not those of {folder}")

    @override
    async def release(self) -> None:
        """Servers' memory is no rank's."""

    async def close(self) -> None:
        """Close all connections."""
        for one in self._teachers:
            await one.close()


def _in_micro_batches(batch: Batch, of_sequences: Mapping[int, Tensor]) -> Scores:
    like = next(iter(of_sequences.values()))
    nothing = like.new_zeros((0, *like.shape[1:]))
    return [
        [torch.cat([nothing, *(of_sequences[int(one)] for one in part)]) for part in row] for row in batch.sequences
    ]


def _token(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        return file.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"token_file={file}: {error}") from error
