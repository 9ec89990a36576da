"""A teacher in engine servers as a frozen model: it scores each token of a batch.

Letters: S sequences, N positions of all of them, D data-parallel ranks, M micro-batches, k tokens of a teacher.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.teachers import TeacherSection, teacher_role
from rl_megatron.engines.adapter import Sampling
from rl_megatron.engines.answers import TopLogprobs
from rl_megatron.engines.http import Server, Unauthorized
from rl_megatron.errors import EngineError
from rl_megatron.http.client import TryAgain, retried
from rl_megatron.http.token_file import TokenFile
from rl_megatron.interfaces import FrozenModel
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import Batch, Samples, Scores, Want

_CONCURRENCY, _RETRIES = 64, 5  # sequences in flight; retries after 1, 2, 4, ... seconds
_TRIED = (1, 2, 3)  # a text of tokens that every vocabulary has


@dataclass(slots=True, kw_only=True)
class ServedTeacher(FrozenModel):
    """A teacher at a server.

    It names ``top`` tokens at a place, or all of ``vocab_size``, the policy's, if that is less. Each attempt has its
    own connection. Raises ConfigError for a ``token_file`` without a token.
    """

    name: str
    section: TeacherSection
    adapter: Sampling
    top: int
    vocab_size: int
    _slots: asyncio.Semaphore = field(init=False)
    _token: TokenFile | None = field(init=False)

    def __post_init__(self) -> None:
        file, key = self.section.token_file, f"algorithm.kl.teachers.{self.name}.token_file"
        self._token = None if file is None else TokenFile(file=file, key=key)
        self._slots = asyncio.Semaphore(_CONCURRENCY)

    async def judge(self, text: Sequence[int], top: int) -> TopLogprobs:
        """Returns log-probs of the text and the ``top`` most probable tokens at each place. Raises EngineError."""
        given = f"algorithm.kl.teachers.{self.name}"
        try:
            return await retried(lambda: self._attempt(text, top), retries=_RETRIES, wait=1.0, about=given)
        except (TryAgain, EngineError) as error:
            raise EngineError(f"{given}: {error}") from error

    async def _attempt(self, text: Sequence[int], top: int) -> TopLogprobs:
        url, limit = self.section.server, self.section.timeout_seconds
        assert url is not None, "a teacher that ranks hold is none of these"
        async with self._slots:
            server = Server(url, token=self._token, timeout_seconds=limit)
            try:
                async with asyncio.timeout(limit):
                    return await self.adapter.score_top(server, text, top)
            except TimeoutError as error:
                raise TryAgain(f"no answer within timeout_seconds={limit:g}") from error
            except Unauthorized as error:
                if not server.token:
                    raise
                raise TryAgain(str(error)) from error  # its file may hold another token at the next attempt
            finally:
                await server.close()

    async def try_out(self) -> None:
        """Sends it a short text. Raises EngineError if it does not answer correctly."""
        await self.judge(_TRIED, 1)

    @override
    async def score(self, batch: Batch, want: frozenset[Want]) -> Mapping[Want, Scores]:
        """Requests scores, except of sequences without a masked-in target, which are 0. Raises EngineError."""
        if others := want - {"logprobs", "top"}:
            raise EngineError(f"a teacher on a server returns log-probs, not {', '.join(sorted(others))}")
        samples, top = batch.samples, min(self.top, self.vocab_size) if "top" in want else 0
        asked = [int(one) for row in batch.sequences for part in row for one in part]
        said = dict(zip(asked, await asyncio.gather(*(self._judged(samples, one, top) for one in asked)), strict=True))
        of_sequences: dict[Want, dict[int, Tensor]] = {
            "logprobs": {one: logprobs for one, (logprobs, _) in said.items()},
            "top": {one: named for one, (_, named) in said.items()},
        }
        return {name: _scatter_scores(batch, of_sequences[name]) for name in want}

    async def _judged(self, samples: Samples, one: int, top: int) -> tuple[Tensor, Tensor]:
        """Returns log-probs [L - 1] and the most probable tokens [L - 1, 2, k] of a sequence of the samples."""
        first, stop = samples.cu_seqlens[one : one + 2].tolist()
        if not samples.mask[first:stop].any():
            return torch.zeros(stop - first), torch.zeros(stop - first, 2, top)
        said = await self.judge([*samples.input_ids[first:stop].tolist(), int(samples.targets[stop - 1])], top)
        logprobs, ids, of_ids = (
            torch.from_numpy(x.astype("float32")) for x in (said.logprobs, said.top_ids, said.top_logprobs)
        )
        if top and int(ids.max()) >= self.vocab_size:
            raise EngineError(
                f"algorithm.kl.teachers.{self.name}: it names token {int(ids.max())}, and the policy's last is "
                f"{self.vocab_size - 1}; set algorithm.kl.estimator=k1, or serve a model of as many tokens"
            )
        return logprobs, torch.stack([ids, of_ids], 1)

    @override
    async def free_step(self) -> None:
        """Does nothing: servers keep nothing of a batch."""

    @override
    async def load_weights(self, folder: Path) -> None:
        raise EngineError(f"a teacher on a server has the server's weights, and cannot load those of {folder}")

    @override
    async def release_memory(self) -> None:
        """Does nothing: servers' memory is not on a rank."""


def _scatter_scores(batch: Batch, of_sequences: Mapping[int, Tensor]) -> Scores:
    like = next(iter(of_sequences.values()))
    nothing = like.new_zeros((0, *like.shape[1:]))
    return [
        [torch.cat([nothing, *(of_sequences[int(one)] for one in part)]) for part in row] for row in batch.sequences
    ]


async def served_teachers(
    config: RunConfig, shape: ModelShape, adapter_of: Callable[[str], Sampling], tell: Callable[[str], None]
) -> dict[str, ServedTeacher]:
    """Returns the configuration's teachers in servers, by role, after a first request to each. Raises EngineError, and
    ConfigError as `ServedTeacher`."""
    kl = config.algorithm.kl
    teachers = {
        teacher_role(name): ServedTeacher(
            name=name, section=one, adapter=adapter_of(one.engine), top=kl.top_k, vocab_size=shape.vocab_size
        )
        for name, one in kl.teachers.items()
        if one.server is not None and one.engine is not None
    }
    if teachers:
        tell(f"asking teachers: {', '.join(one.name for one in teachers.values())}")
        await asyncio.gather(*(one.try_out() for one in teachers.values()))
    return teachers
