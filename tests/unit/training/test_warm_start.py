"""What a warm start looks at before its first step, as none of its steps is in a checkpoint."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rl_megatron.config.io import load_config
from rl_megatron.data.packing import Packer
from rl_megatron.data.problems.prompt_stream import PromptStream
from rl_megatron.errors import DataError, EnvironmentFailed
from rl_megatron.interfaces import Roles
from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.observability import progress
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.training.jobs import warm_start as warm_starts
from rl_megatron.training.jobs.warm_start import Targets, WarmStart, answers
from rl_megatron.training.jobs.written import SupervisedSteps
from rl_megatron.training.optimizer_steps import OptimizerSteps
from rl_megatron.types import ParallelDims, Prompt
from tests.unit.training.test_bad_steps import MADE, Kept

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
    learner = Kept(MADE)
    return WarmStart(
        config=load_config("tiny_cpu", [*given, *keys]),
        roles=Roles(learners={"policy": learner}, frozen={}, engine=NONE, weights=NONE),
        prompts=PromptStream(data, seed=0),
        tokenizer=byte_tokenizer(),
        end_token_ids={"": 257},
        stop_token_ids=(257, 258),
        vocab_size=259,
        targets=targets,
        evaluation=NONE,
        supervised=SupervisedSteps(
            learner=learner,
            packer=Packer(dims=ParallelDims(), max_tokens=31, attention_cost=0.0),
            optimizer_steps=OptimizerSteps(name="policy", most=0),
        ),
    )


LATE = (
    r"^prompt 'train:4' has 32 positions with what warm_start\.steps=3 learns of it, but learner\."
    r"max_tokens_per_micro_batch=31; raise the latter, leave the row out, or set warm_start\.steps=0$"
)


def test_a_long_answer_is_named_before_the_first_step() -> None:
    with pytest.raises(DataError, match=LATE):
        asyncio.run(warm_start(prompts(1, 2, 3, 31, 4, 5)).start(fresh=True))


def test_an_answer_that_spells_the_end_of_one_is_named_before_the_first_step() -> None:
    ours = warm_start(prompts(1, 2), lambda drawn, _: [("2<eos>",) for _ in drawn])
    ours.tokenizer.split_special_tokens = False
    with pytest.raises(DataError, match=r"^prompt 'train:\d': its answer spells a token that ends sampling \(id 257\)"):
        asyncio.run(ours.start(fresh=True))


def test_an_answer_that_is_marked_as_bad_is_named_before_the_first_step() -> None:
    """As of KTO's rows; not a label that is the answer itself."""
    data = [replace(one, meta={"label": one.id != "train:2"}) for one in prompts(1, 2, 3)]
    with pytest.raises(DataError, match=r"^prompt 'train:2': field 'label' is false, which says of KTO's rows"):
        asyncio.run(warm_start(data).start(fresh=True))
    asyncio.run(warm_start([replace(one, answer="false") for one in data]).start(fresh=True))


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
    assert ours.state().ends == {"": 257}  # that another version, or another tokenizer's, is compared with
    asyncio.run(ours.start(fresh=False))
    assert [prompt.id for prompt in ours.prompts.take(6 - 2 * done)] == drawn[2 * done :]


def test_a_demonstration_that_is_long_in_a_later_epoch_is_named_in_its_step() -> None:
    def longer(drawn: Sequence[Prompt], step: int) -> list[tuple[str, ...]]:
        return [("a", "b" * 10 * step, "c") for _ in drawn]

    ours = warm_start(prompts(1, 2), longer)
    asyncio.run(ours.start(fresh=True))
    with pytest.raises(DataError, match=r"^prompt 'train:\d' has 34 positions"):
        asyncio.run(ours.step(3, Stopwatch()))


async def test_rows_of_the_first_epoch_are_made_once_and_learned_as_they_were_looked_at() -> None:
    made = list[tuple[int, list[str]]]()

    def noted(drawn: Sequence[Prompt], step: int) -> list[tuple[str]]:
        made.append((step, [prompt.id for prompt in drawn]))
        return [(f"{step}",) for _ in drawn]

    ours = warm_start(prompts(1, 2, 3, 4), noted, "warm_start.steps=4")
    kept = ours.supervised.learner
    assert isinstance(kept, Kept)
    await ours.start(fresh=True)
    learned = []
    for number in range(1, 5):
        await ours.step(number, Stopwatch())
        learned.append([int(ids[-1]) for part in kept.batch.micro_batches[0] for ids in (part.input_ids,)])
    assert learned == [[ord(f"{number}")] for number in range(1, 5)]
    assert [step for step, _ in made] == [1, 2, 3, 4]
    drawn = [prompt.id for prompt in PromptStream(prompts(1, 2, 3, 4), seed=0).take(8)]
    assert [name for _, names in made for name in names] == drawn


async def test_rows_beyond_those_that_are_kept_are_made_again_in_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows a step of a prompt, a letter and the end; the look says how far it is."""
    monkeypatch.setattr(warm_starts, "TOKENS_KEPT", 12)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_NOTES", 0.0)
    made, said = list[int](), list[str]()

    def noted(drawn: Sequence[Prompt], step: int) -> list[tuple[str]]:
        made.append(step)
        return answers(drawn, step)

    ours = warm_start(prompts(*[1] * 6), noted)
    ours.note = said.append
    await ours.start(fresh=True)
    for number in range(1, 4):
        await ours.step(number, Stopwatch())
    assert made == [1, 2, 3, 3]
    assert said == [f"looking at what the warm start learns: step {step} of 3" for step in (1, 2, 3)]


async def test_a_demonstration_that_takes_its_time_does_not_hold_up_the_event_loop() -> None:
    answered = threading.Event()

    def waits(drawn: Sequence[Prompt], step: int) -> list[tuple[str]]:
        assert answered.wait(10), "the event loop did not get a turn"
        return [("a",) for _ in drawn]

    asyncio.get_running_loop().call_later(0.0, answered.set)
    await warm_start(prompts(1, 2), waits).step(1, Stopwatch())


def test_demonstrations_that_never_end_end_the_run_and_keep_no_thread_waiting() -> None:
    ever = threading.Event()

    def hangs(drawn: Sequence[Prompt], step: int) -> list[tuple[str]]:
        ever.wait(20)
        return []

    ours = warm_start(prompts(1, 2), hangs, "run.watchdog_seconds=0.1")
    with pytest.raises(EnvironmentFailed, match=r"step 1: its rows took more than 0\.1 s \(run\.watchdog_seconds\)"):
        asyncio.run(ours.start(fresh=True))
    ever.set()
