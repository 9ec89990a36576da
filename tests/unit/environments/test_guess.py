"""The shipped game of guesses: hints, rewards of turns, and what its texts teach."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable

import pytest

from rl_megatron.config.sections.reward import EnvironmentSection
from rl_megatron.environments.guess import Guess
from rl_megatron.environments.protocol import EnvironmentStep, Reply
from rl_megatron.environments.registry import resolve_environment
from rl_megatron.errors import ConfigError
from rl_megatron.types import Prompt

Player = Callable[[list[tuple[int, str]]], int]


def task(number: int) -> Prompt:
    """One whose number is this of 16."""
    for place in range(1000):
        one = Prompt(id=str(place), text="", token_ids=(1,), answer="")
        if asyncio.run(guessed(one, str(number))).observation is None:
            return one
    raise AssertionError(number)


async def guessed(one: Prompt, text: str) -> EnvironmentStep:
    game = Guess()
    assert [message["content"] for message in (await game.start(one, 0)).messages] == ["?"]
    return await game.step(said(text))


def said(text: str) -> Reply:
    return Reply(text=text, message={"role": "assistant", "content": text}, finish_reason="stop")


TASKS = [task(number) for number in range(16)]


async def played(one: Prompt, player: Player, rewarded: str = "bits") -> list[EnvironmentStep]:
    """Up to four guesses."""
    game, seen, steps = Guess(rewarded=rewarded), list[tuple[int, str]](), list[EnvironmentStep]()  # type: ignore[arg-type]
    await game.start(one, 0)
    while len(steps) < 4 and (not steps or steps[-1].observation is not None):
        guess = player(seen)
        steps.append(step := await game.step(said(str(guess))))
        if step.observation is not None:
            seen.append((guess, str(step.observation.said)))
    return steps


def bisects(seen: list[tuple[int, str]]) -> int:
    first = max((guess + 1 for guess, hint in seen if hint == ">"), default=0)
    behind = min((guess for guess, hint in seen if hint == "<"), default=16)
    return (first + behind - 1) // 2


def test_bisection_finds_15_of_16_and_each_guess_gets_the_bits_that_it_settles() -> None:
    games = [asyncio.run(played(one, bisects)) for one in TASKS]
    assert sum(steps[-1].metrics["found"] for steps in games) == 15
    assert all(step.metrics["kept"] == 1 for steps in games for step in steps)
    totals = [math.fsum(step.reward or 0 for step in steps) for steps in games]
    assert totals[:15] == [1.0] * 15  # exactly
    assert totals[15] == pytest.approx(4 / 5, abs=1e-5)  # 7, 11, 13 and 14 leave 15 alone, which nobody said
    expected = [math.log2(16 / 7) / 5, math.log2(7 / 3) / 5, math.log2(3) / 5]
    assert [step.reward for step in games[0]] == pytest.approx([*expected, 1 - sum(expected)], abs=1e-5)


def test_the_sum_is_1_only_where_the_number_is_found() -> None:
    draws = random.Random(0)
    for _ in range(40):
        for one in TASKS:
            steps = asyncio.run(played(one, lambda _: draws.randrange(16)))
            assert (math.fsum(step.reward or 0 for step in steps) >= 1) == (steps[-1].metrics["found"] == 1)
            alone = asyncio.run(played(one, bisects, rewarded="found"))
            assert [step.reward for step in alone] == [0.0] * (len(alone) - 1) + [alone[-1].metrics["found"]]


@pytest.mark.parametrize("text", ["", "16", "-1", "7 ", "seven", "٣", "1" * 5000])
def test_what_is_no_number_of_the_range_settles_nothing(text: str) -> None:
    step = asyncio.run(guessed(TASKS[3], text))
    assert step.observation is not None
    assert (step.observation.said, step.reward, step.metrics["kept"]) == ("!", 0.0, 0.0)


def test_a_guess_against_the_hints_settles_nothing() -> None:
    first, *others = asyncio.run(played(TASKS[9], lambda seen: [8, 3, 8, 9][len(seen)]))
    assert first.observation is not None
    assert first.observation.said == ">"
    assert [step.metrics["kept"] for step in others] == [0.0, 0.0, 1.0]
    assert [step.reward for step in others[:2]] == [0.0, 0.0]


def test_its_texts_teach_to_write_and_not_to_search() -> None:
    texts = [Guess().demonstration(TASKS[number], seed) for number in range(16) for seed in range(100)]
    assert {len(one) for one in texts} == {1, 3, 5, 7}
    guesses = [int(text) for one in texts for text in one[::2]]
    assert set(guesses) == set(range(16))
    assert all(hint in "<>" for one in texts for hint in one[1::2])
    found = sum(int(one[-1]) == number for number in range(16) for one in texts[number * 100 : number * 100 + 100])
    assert found / len(texts) == pytest.approx(1 - (15 / 16) ** 4, abs=0.03)


@pytest.mark.parametrize(
    ("options", "words"), [({"numbers": 1}, "numbers=1 is how many"), ({"rewarded": "turn"}, "give bits or found")]
)
def test_options_that_it_refuses(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve_environment(EnvironmentSection(function="guess", options=options))
