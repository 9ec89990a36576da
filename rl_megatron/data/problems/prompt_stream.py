"""Streams prompts shuffled without end: of one source or of several in their shares, without those left out."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from rl_megatron.config.sections.data import CurriculumSection
from rl_megatron.data.problems.mixture import OLDER_DIGESTS, Epochs, MixtureState, Proportions, SourceState
from rl_megatron.data.problems.pool import Listed, Pool, Upcoming
from rl_megatron.data.problems.prompt_table import PromptTable
from rl_megatron.errors import CheckpointError, DataError
from rl_megatron.types import Prompt

logger = logging.getLogger(__name__)

_SAME_LEAKS = (
    "and with data.on_leak and eval.sets by which the same problems are dropped; if nothing of these has changed, an "
    "older version of rl_megatron, with which to resume it, took other problems for equal (docs/running.md)"
)


class PromptStream:
    """Endless epochs over ``prompts``, each shuffled by (seed, epoch), so that a position determines the order.

    With ``weights`` each prompt is of one of these sources, which follow each other by `Proportions`; without, all
    prompts are of one source. ``left_out`` are the rows of ``prompts`` that are drawn no more. With a ``curriculum``
    `table` has their pass rates, which the caller updates, saves and restores, and says which are drawn; with a
    ``track_decay`` their values too.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        weights: Mapping[str, float] | None = None,
        curriculum: CurriculumSection | None = None,
        track_decay: float | None = None,
    ) -> None:
        if not len(prompts):
            raise DataError("no prompts to train on")
        self._pool, self._weights = prompts if isinstance(prompts, Pool) else Listed(prompts), dict(weights or {})
        self.left_out = set[int]()
        rows = self._pool.sources(list(self._weights)) if weights else {"": np.arange(len(prompts), dtype=np.uint32)}
        self._epochs = {name: Epochs(own, seed=seed) for name, own in rows.items()}
        self.table: PromptTable | None = None
        if (curriculum is not None and curriculum.is_on) or track_decay is not None:
            section = curriculum or CurriculumSection()
            self.table = PromptTable(self._pool, rows, section, seed=seed, track_decay=track_decay)
        self._shares = Proportions(self._weights or {"": 1.0})

    def take(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts, across the end of an epoch if need be."""
        return [self._next(self._shares.next()) for _ in range(n)]

    def read_ahead(self) -> None:
        """Read what the next prompts, `state` and `leave_out` need: large files, for minutes. In a thread; nobody else
        uses the stream meanwhile."""
        self.digest()
        self._pool.row_of(self._pool.name_of(0))  # which may make a table of all names
        for epochs in self._epochs.values():
            number = epochs.drawn
            (row,) = epochs.draws(number, number + 1).tolist()
            self._pool.read_ahead(row, Upcoming(number, epochs.draws))

    @property
    def reads(self) -> bool:
        """Whether `take` reads or renders rows of files, unless `make_next` did."""
        return self._pool.reads

    def make_next(self, n: int) -> None:
        """Read and render the prompts that `take` is to give next, for seconds if the chat template is slow. In a
        thread; nobody else takes from the stream meanwhile. What is wrong with a row `take` raises."""
        shares = Proportions(self._weights or {"": 1.0}, self._shares.taken)
        for name, count in Counter(shares.next() for _ in range(n)).items():
            epochs, left = self._epochs[name], count
            for number in range(first := epochs.drawn, first + len(epochs.rows)):
                (row,) = epochs.draws(number, number + 1).tolist()
                if row in self.left_out or (self.table and not self.table.draws(row, number // len(epochs.rows))):
                    continue
                try:
                    left -= self._pool.read_ahead(row, Upcoming(number, epochs.draws))
                except DataError:
                    return
                if not left:
                    break

    def digest(self) -> Mapping[str, str]:
        """A checksum of each source's prompts, which `state` and `restore` compare: read once."""
        return self._digests

    def leave_out(self, prompt: Prompt) -> None:
        """Draw ``prompt`` no more. Raises DataError if no other of its source is left."""
        self.left_out.add(self._pool.row_of(prompt.id))
        name = prompt.source if self._weights else ""
        rows = self._epochs[name].rows
        if len(self.left_out) >= len(rows) and self.left_out.issuperset(rows.tolist()):
            of = f" of source {name!r}" if name else ""
            raise DataError(f"no prompts{of} are left to train on: none of {len(rows)} can be sampled")
        if self.table is not None:
            self.table.keep_enough(self.left_out)

    def epochs(self, more: int = 0) -> dict[str, float]:
        """The epochs of each source of a mixture that were drawn, or will be after so many ``more`` prompts."""
        found, whole = self._epochs, sum(self._weights.values())
        shares = {name: more * weight / whole for name, weight in self._weights.items()}
        return {name: found[name].passed + share / len(found[name].rows) for name, share in shares.items()}

    def state(self) -> dict[str, int] | MixtureState:
        """The position in the stream; ``restore`` of it and ``left_out`` continues with the same prompts."""
        if not self._weights:
            (only,) = self._epochs.values()
            size, digest = len(self._pool), _short(self._digests[""])
            return {"epoch": only.epoch, "position": only.position, "num_prompts": size, "digest": digest}
        taken = self._shares.taken
        sources = {
            name: SourceState(
                epoch=one.epoch,
                position=one.position,
                size=len(one.rows),
                digest=self._digests[name],
                weight=self._weights[name],
                taken=taken[name],
            )
            for name, one in self._epochs.items()
        }
        return MixtureState(position=sum(taken.values()), sources=sources)

    def restore(self, state: Mapping[str, int] | MixtureState, left_out: Sequence[int] = ()) -> None:
        """Continue from ``state``; where weights have changed, shares are counted from there on.

        Raises CheckpointError if it belongs to another data set.
        """
        if isinstance(state, MixtureState):
            self._restore_sources(state)
        elif self._weights:
            raise CheckpointError("the checkpoint was made with one source of prompts, and data.sources has several")
        elif state["num_prompts"] != len(self._pool):
            raise CheckpointError(
                f"the checkpoint was made with {state['num_prompts']} training prompts, but the data has "
                f"{len(self._pool)}; resume with the same data and limits, {_SAME_LEAKS}"
            )
        elif "digest" in state and state["digest"] not in map(_short, self._digests_of("")):
            raise CheckpointError(
                f"the checkpoint was made with as many training prompts ({state['num_prompts']}), but with others, by "
                f"their digest; resume with the same files, {_SAME_LEAKS}"
            )
        else:
            self._epochs[""].move(state["epoch"], state["position"])
        self.left_out = set(left_out)

    def _next(self, name: str) -> Prompt:
        """The next prompt of this source that is not left out or too long, and that the curriculum draws.

        With a table, rows that are too long are left out: they are none of those that must be left.
        """
        epochs, table, tried = self._epochs[name], self.table, 0
        while True:
            row = epochs.next()
            tried += 1
            if row not in self.left_out and (table is None or table.draws(row, epochs.epoch)):
                prompt = self._pool.at(row, Upcoming(epochs.drawn - 1, epochs.draws))
                if prompt is not None:
                    return prompt
                if table is not None:
                    self.left_out.add(row)
            if tried % len(epochs.rows):
                continue
            if table is not None:  # which knows what was left out since the last step, at the cost of all rows
                table.keep_enough(self.left_out)
            if self.left_out.issuperset(epochs.rows.tolist()) or (table is None and tried > len(epochs.rows)):
                raise DataError("every prompt has too many tokens; the warnings before name the key to raise")

    @cached_property
    def _digests(self) -> dict[str, str]:
        return {name: self._pool.digest(one.rows) for name, one in self._epochs.items()}

    def _digests_of(self, name: str) -> Iterator[str]:
        """Those that a checkpoint of the source's prompts may have: after the first those of older versions."""
        yield self._digests[name]
        for of in OLDER_DIGESTS:
            yield self._pool.digest(self._epochs[name].rows, of)

    def _restore_sources(self, state: MixtureState) -> None:
        if list(state.sources) != list(self._weights):
            then, now = ", ".join(state.sources), ", ".join(self._weights) or "one source"
            raise CheckpointError(f"the checkpoint was made with the sources {then}, but the data has {now}")
        for name, source in state.sources.items():
            size = len(self._epochs[name].rows)
            if source.size != size or source.digest not in self._digests_of(name):
                raise CheckpointError(
                    f"data.sources.{name}: the checkpoint was made with {source.size} training prompts of digest "
                    f"{source.digest}, but the source has {size} of {self._digests[name]}; resume with the same file "
                    f"and limits, {_SAME_LEAKS}"
                )
        for name, source in state.sources.items():
            self._epochs[name].move(source.epoch, source.position)
        before = {name: source.weight for name, source in state.sources.items()}
        if before == self._weights:
            self._shares = Proportions(before, {name: source.taken for name, source in state.sources.items()})
        else:
            logger.warning(
                "the weights of data.sources were %s and are %s: after %d prompts, shares are counted from there on",
                *(before, self._weights, state.position),
            )
            self._shares = Proportions(self._weights)


def _short(digest: str) -> int:
    """60 bits of it, which checkpoints of one source have."""
    return int(digest[:15], 16)
