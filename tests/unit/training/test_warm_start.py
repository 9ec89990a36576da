"""What a warm start looks at before its first step, as none of its steps is in a checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from rl_megatron.config.io import load_config
from rl_megatron.data.problems.prompt_stream import PromptStream
from rl_megatron.errors import DataError
from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.training.jobs.warm_start import Targets, WarmStart, answers
from rl_megatron.types import Prompt

NONE: Any = None


def prompts(*lengths: int) -> list[Prompt]:
    """With answers of so many tokens."""
    return [
        Prompt(id=f"train:{line}", text="?", token_ids=(63,), answer="a" * length)
        for line, length in enumerate(lengths, 1)
    ]


def warm_start(data: Sequence[Prompt], targets: Targets = answers, *keys: str) -> WarmStart:
    """Of three steps of two prompts; a prompt and 30 tokens of an answer fit a micro-batch."""
    given = ["learner.max_tokens_per_micro_batch=31", "warm_start.steps=3", "warm_start.batch_size=2"]
    return WarmStart(
        config=load_config("tiny_cpu", [*given, *keys]),
        roles=NONE,
        prompts=PromptStream(data, seed=0),
        tokenizer=byte_tokenizer(),
        vocab_size=259,
        targets=targets,
        evaluation=NONE,
        supervised=NONE,
    )


LATE = (
    r"^prompt 'train:4' has 32 positions with what warm_start\.steps=3 learns of it, but learner\."
    r"max_tokens_per_micro_batch=31; raise the latter, leave the row out, or set warm_start\.steps=0$"
)


def test_a_long_answer_is_named_before_the_first_step() -> None:
    with pytest.raises(DataError, match=LATE):
        asyncio.run(warm_start(prompts(1, 2, 3, 31, 4, 5)).start(fresh=True))


def test_an_answer_that_just_fits_is_learned_in_the_order_of_the_seed() -> None:
    ours, data = warm_start(prompts(1, 2, 3, 30, 4, 5)), prompts(1, 2, 3, 30, 4, 5)
    asyncio.run(ours.start(fresh=True))
    assert ours.prompts.take(6) == PromptStream(data, seed=0).take(6)


def test_a_resume_looks_at_what_is_left() -> None:
    data = prompts(1, 2, 3, 31, 4, 5)
    drawn = [prompt.id for prompt in PromptStream(data, seed=0).take(6)]
    done = drawn.index("train:4") // 2 + 1  # steps, the long answer's among them
    ours = warm_start(data)
    ours.prompts.take(2 * done)
    ours.number = done
    asyncio.run(ours.start(fresh=False))
    assert [prompt.id for prompt in ours.prompts.take(6 - 2 * done)] == drawn[2 * done :]


def test_a_demonstration_that_is_long_in_a_later_epoch_is_named_in_its_step() -> None:
    def longer(drawn: Sequence[Prompt], step: int) -> list[tuple[str, ...]]:
        return [("a", "b" * 10 * step, "c") for _ in drawn]

    ours = warm_start(prompts(1, 2), longer)
    asyncio.run(ours.start(fresh=True))
    with pytest.raises(DataError, match=r"^prompt 'train:\d' has 34 positions"):
        asyncio.run(ours.step(3, Stopwatch()))
