"""The warm start: supervised steps on right answers, or an environment's demonstrations, until held-out accuracy is
high enough."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from rl_megatron.config.run import RunConfig
from rl_megatron.data.problems.pool import PromptStream
from rl_megatron.data.problems.rendering import refuse_bad_answers
from rl_megatron.data.samples import (
    EndTokens,
    SupervisedRow,
    check_ends,
    check_tokens,
    supervised_rows,
    supervised_samples,
    warn_if_end_changed,
)
from rl_megatron.errors import DataError, EnvironmentFailure
from rl_megatron.interfaces import Learner, RunComponents
from rl_megatron.observability.progress import seldom
from rl_megatron.observability.recorder import Row, Stopwatch
from rl_megatron.rewards.threads import run_in_daemon_thread
from rl_megatron.training.checkpoints import TrainerState
from rl_megatron.training.evaluation import Evaluator
from rl_megatron.training.jobs.written import TOKENS_KEPT, SupervisedSteps
from rl_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

T = TypeVar("T")

Targets = Callable[[Sequence[Prompt], int], Sequence[Sequence[str]]]
"""Texts to learn of each prompt in a step of this number: the model's text, what it reads then, and so on in turns."""


async def shielded(work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of ``work``. Raises a cancellation once it has ended: processes in it wait for each other."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    finally:
        await asyncio.wait({task})


def answers(prompts: Sequence[Prompt], step: int) -> list[tuple[str]]:
    """Returns the right answer of each prompt. Raises DataError for one that is marked as bad."""
    refuse_bad_answers(prompts)
    return [(prompt.answer,) for prompt in prompts]


def warm_start_rows(
    prompts: Sequence[Prompt],
    targets: Sequence[Sequence[str]],
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    end_token_ids: EndTokens,
    stop_token_ids: Sequence[int],
    vocab_size: int,
) -> list[SupervisedRow]:
    """Returns the rows that a step learns of the prompts and their targets. Raises DataError that names a prompt with
    more tokens than a micro-batch holds, a token that the model lacks, or a text that ends sampling."""
    rows = supervised_rows(prompts, targets, tokenizer, end_token_ids)
    check_tokens(rows, vocab_size)
    check_ends(rows, stop_token_ids)
    steps, most = config.warm_start.steps, config.learner.max_tokens_per_micro_batch
    for row in rows:
        if (positions := len(row.token_ids) - 1) > most:
            raise DataError(
                f"prompt {row.id!r} has {positions} positions with what warm_start.steps={steps} learns of it, but "
                f"learner.max_tokens_per_micro_batch={most}; raise the latter, leave the row out, or set "
                "warm_start.steps=0"
            )
    return rows


@dataclass(slots=True, kw_only=True)
class WarmStart:
    """A Job of ``training.loop``: cross-entropy on ``targets``, configured by ``warm_start``."""

    config: RunConfig
    roles: RunComponents
    prompts: PromptStream
    tokenizer: PreTrainedTokenizerBase
    end_token_ids: EndTokens  # tokens after each of the model's texts
    stop_token_ids: Sequence[int]
    vocab_size: int  # vocabulary size of the policy
    targets: Targets
    evaluation: Evaluator
    supervised: SupervisedSteps
    note: Callable[[str], None] = logger.info
    """Shows how far the look at what is left to learn is."""
    name: str = "warm start"
    first_step_is_saved: bool = False
    number: int = 0  # number of the last step
    _ahead: dict[int, list[SupervisedRow]] = field(default_factory=dict)  # rows of later steps that are made

    async def start(self, *, fresh: bool) -> Row | None:
        """Looks at what is left to learn, or pushes the weights: where a step follows, ``evaluate`` does before it."""
        if self.config.warm_start.steps:
            await asyncio.to_thread(self.prompts.read_ahead)
            await self._prefetch_rows()
            return self._row() if fresh else None
        if fresh:
            await self.roles.weight_sync.push(0)
        return None

    async def step(self, number: int, watch: Stopwatch) -> Row:
        """Makes an optimizer step on ``warm_start.batch_size`` problems; the loss is null if it was skipped."""
        c, self.number = self.config, number
        prompts, rows = await self._draw(number)
        made = await self.supervised.step(supervised_samples(rows), c.warm_start.learning_rate, prompts)
        loss = None if made is None else made.loss
        return {**self._row(), "warm_start/loss": loss, **self.roles.rank_metrics()}

    async def _prefetch_rows(self) -> None:
        """Makes the rows of the steps that are left, until one has no new prompt. A bad row would lose the steps before
        it, which have no checkpoint. The first ``TOKENS_KEPT`` are kept for their steps. Raises as `_draw`."""
        before, left_out, seen = self.prompts.state(), tuple(self.prompts.left_out), set[str]()
        steps, tokens, note = self.config.warm_start.steps, 0, seldom(self.note)
        for number in range(self.number + 1, steps + 1):
            prompts, rows = await self._draw(number)
            tokens += sum(len(row.token_ids) for row in rows)
            if tokens <= TOKENS_KEPT:
                self._ahead[number] = rows
            note(f"looking at what the warm start learns: step {number} of {steps}")
            if seen.issuperset(names := [prompt.id for prompt in prompts]):
                break
            seen.update(names)
        self.prompts.restore(before, left_out)

    async def _draw(self, number: int) -> tuple[list[Prompt], list[SupervisedRow]]:
        """Returns the next prompts, and the rows of step ``number``, in a thread: the targets may be the user's code.

        Raises as `warm_start_rows`, and EnvironmentFailure after ``run.watchdog_seconds``.
        """
        limit, function = self.config.watchdog_seconds, self.config.environment.function
        try:
            async with asyncio.timeout(limit) as late:
                return await run_in_daemon_thread(partial(self._pop_prefetched, number))
        except TimeoutError as error:
            if not late.expired():
                raise
            sooner = f"have demonstrations of environment.function={function} return sooner, or " if function else ""
            raise EnvironmentFailure(
                f"warm start, step {number}: its rows took more than {limit:g} s (run.watchdog_seconds); {sooner}raise "
                "run.watchdog_seconds"
            ) from error

    def _pop_prefetched(self, number: int) -> tuple[list[Prompt], list[SupervisedRow]]:
        prompts = self.prompts.next_prompts(self.config.warm_start.batch_size)
        if (ahead := self._ahead.pop(number, None)) is not None:
            return prompts, ahead
        texts, ends, stops = self.targets(prompts, number), self.end_token_ids, self.stop_token_ids
        return prompts, warm_start_rows(prompts, texts, self.config, self.tokenizer, ends, stops, self.vocab_size)

    def _row(self) -> Row:
        return {"step": 0, "phase": "warm_start", "warm_start/step": self.number}

    async def evaluate(self, watch: Stopwatch) -> Row:
        """Pushes the weights, and measures held-out accuracy."""
        await shielded(self.roles.weight_sync.push(0))
        return await self.evaluation.row()

    def should_stop(self, row: Row) -> bool:
        """True if held-out accuracy has reached ``warm_start.stop_at_accuracy``."""
        return float(row.get("eval/accuracy") or 0) >= self.config.warm_start.stop_at_accuracy

    def learners(self) -> dict[str, Learner]:
        """Returns the policy alone, keyed by its subfolder of a checkpoint."""
        return {"learner": self.roles.policy}

    async def flush(self, stop: asyncio.Event) -> None:
        """Does nothing: no work is under way between steps."""

    def state(self) -> TrainerState:
        """Returns the position in the data."""
        prompts, steps = self.prompts.state(), self.supervised.optimizer_steps
        skipped = {steps.name: steps.skipped_in_a_row}
        ends, number = dict(self.end_token_ids), self.number
        return TrainerState(step=0, prompts=prompts, stream=None, ends=ends, skipped=skipped, warm_start_step=number)

    async def restore(self, state: TrainerState) -> None:
        """Continues from ``state``, and pushes the weights."""
        self.number = state.warm_start_step or 0
        steps = self.supervised.optimizer_steps
        steps.skipped_in_a_row = state.skipped.get(steps.name, 0)
        await asyncio.to_thread(self.prompts.digest)
        self.prompts.restore(state.prompts)
        warn_if_end_changed(state.ends, self.end_token_ids)
        await self.roles.weight_sync.push(0)

    async def close(self) -> None:
        """Forgets the rows of steps that an early end left out; waits until the evaluations' environments close."""
        self._ahead.clear()
        await self.evaluation.wait_closed()
