"""Shipped environments, those of docs/examples, and what an environment of the user's own may demonstrate."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from write_tasks import run

from launcher.build.sampler import demonstrations, load_environment
from launcher.preflight.checks import preflight
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.reward import EnvironmentSection
from rl_megatron.environments.protocol import EnvironmentStep, Reply
from rl_megatron.environments.registry import EnvironmentFactory, resolve_environment
from rl_megatron.environments.shipped import Calculator, Guess, evaluated
from rl_megatron.errors import ConfigError, EnvironmentFailure
from rl_megatron.types import Prompt
from tests.unit.rollout.test_environment_source import Talks

TASK = Prompt(id="37*45", text="37*45=", token_ids=(1,), answer="1665")


def reply(text: str) -> Reply:
    return Reply(text=text, message={"role": "assistant", "content": text}, finish_reason="stop")


def stepped(text: str) -> EnvironmentStep:
    async def play() -> EnvironmentStep:
        calculator = Calculator()
        assert (await calculator.start(TASK, seed=0)).messages == ({"role": "user", "content": "37*45="},)
        return await calculator.step(reply(text))

    return asyncio.run(play())


@pytest.mark.parametrize(
    ("text", "value"), [("37*45", 1665), ("07*045", 315), ("2+3*4-1", 13), ("(2-5)*3", -9), ("100", 100), ("00*0", 0)]
)
def test_it_computes_sums_differences_and_products(text: str, value: int) -> None:
    assert evaluated(text) == value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *[(text, "syntax") for text in ("", "37*", "a*2", "f(2)", "2**9", "4/2", "1.5", "True", "'a'*3", "-2", "1,2")],
        *[(text, "syntax") for text in ("__import__('os').getpid()", "[1]*9", "1 if 1 else 2", "(" * 60, "\0")],
        ("999999999*9999999999", "large"),
        ("9" * 19, "large"),
        ("1+" * 40 + "1", "long"),
    ],
)
def test_anything_else_is_refused_with_a_word_for_the_model(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"^{why}$"):
        evaluated(text)


def test_a_calculation_is_observed_and_an_answer_ends() -> None:
    step = stepped("?37*45")
    assert step.observation is not None
    assert step.observation.content == ":1665"
    assert step.reward is None
    assert step.metrics == {"calculations": 1, "failed_calculations": 0}
    failed = stepped("?37**45")
    assert failed.observation is not None
    assert (failed.observation.content, failed.metrics["failed_calculations"]) == (":syntax", 1)
    expected = [(1.0, None), (0.0, None), (0.0, None), (0.0, None)]
    assert [(one.reward, one.observation) for one in map(stepped, ("!1665", "!1664", "1665", ""))] == expected


def test_a_third_of_the_texts_to_learn_from_use_the_calculator() -> None:
    texts = [Calculator().demonstration(TASK, seed) for seed in range(2000)]
    assert {("!1665",), ("?37*45", ":1665", "!1665")} == {tuple(one) for one in texts}
    assert 0.32 < sum(len(one) == 3 for one in texts) / 2000 < 0.38  # 0.35 within three standard errors
    with pytest.raises(ValueError, match="demonstrated=3 is a share"):
        Calculator(demonstrated=3)


# The shipped game of guesses: hints, rewards of turns, and what its texts teach.
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
            seen.append((guess, str(step.observation.content)))
    return steps


def bisects(seen: list[tuple[int, str]]) -> int:
    first = max((guess + 1 for guess, hint in seen if hint == ">"), default=0)
    return (first + min((guess for guess, hint in seen if hint == "<"), default=16) - 1) // 2


def test_guesses_get_the_bits_that_they_settle() -> None:
    games = [asyncio.run(played(one, bisects)) for one in TASKS]
    assert sum(steps[-1].metrics["found"] for steps in games) == 15
    assert all(step.metrics["kept"] == 1 for steps in games for step in steps)
    totals = [math.fsum(step.reward or 0 for step in steps) for steps in games]
    assert totals[:15] == [1.0] * 15  # exactly
    assert totals[15] == pytest.approx(4 / 5, abs=1e-5)  # 7, 11, 13 and 14 leave 15 alone, which nobody said
    expected = [math.log2(16 / 7) / 5, math.log2(7 / 3) / 5, math.log2(3) / 5]
    assert [step.reward for step in games[0]] == pytest.approx([*expected, 1 - sum(expected)], abs=1e-5)
    draws = random.Random(0)
    for _ in range(40):
        for one in TASKS:
            steps = asyncio.run(played(one, lambda _: draws.randrange(16)))
            assert (math.fsum(step.reward or 0 for step in steps) >= 1) == (steps[-1].metrics["found"] == 1)
            alone = asyncio.run(played(one, bisects, rewarded="found"))
            assert [step.reward for step in alone] == [0.0] * (len(alone) - 1) + [alone[-1].metrics["found"]]
    first, *others = asyncio.run(played(TASKS[9], lambda seen: [8, 3, 8, 9][len(seen)]))
    assert first.observation is not None
    assert first.observation.content == ">"
    assert [step.metrics["kept"] for step in others] == [0.0, 0.0, 1.0]
    assert [step.reward for step in others[:2]] == [0.0, 0.0]


@pytest.mark.parametrize("text", ["", "16", "-1", "7 ", "seven", "٣", "1" * 5000])
def test_what_is_no_number_of_the_range_settles_nothing(text: str) -> None:
    step = asyncio.run(guessed(TASKS[3], text))
    assert step.observation is not None
    assert (step.observation.content, step.reward, step.metrics["kept"]) == ("!", 0.0, 0.0)


def test_its_texts_teach_to_write_and_not_to_search() -> None:
    texts = [Guess().demonstration(TASKS[number], seed) for number in range(16) for seed in range(100)]
    assert {len(one) for one in texts} == {1, 3, 5, 7}
    assert {int(text) for one in texts for text in one[::2]} == set(range(16))
    assert all(hint in "<>" for one in texts for hint in one[1::2])
    found = sum(int(one[-1]) == number for number in range(16) for one in texts[number * 100 : number * 100 + 100])
    assert found / len(texts) == pytest.approx(1 - (15 / 16) ** 4, abs=0.03)


@pytest.mark.parametrize(
    ("options", "words"), [({"numbers": 1}, "numbers=1 is how many"), ({"rewarded": "turn"}, "give bits or found")]
)
def test_options_that_it_refuses(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve_environment(EnvironmentSection(function="guess", options=options))


# The environments of docs/examples are loaded as a user's own are.
EXAMPLES = Path(__file__).parents[3] / "docs" / "examples" / "environments"


@pytest.mark.parametrize(
    ("function", "option"),
    [
        ("nemo_gym_sessions:NemoGym", "url"),
        ("openenv_episodes:OpenEnv", "url"),
        ("reasoning_gym_problems:ReasoningGym", "tag"),
    ],
)
def test_an_example_is_an_environment_of_ones_own(function: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    made = resolve_environment(EnvironmentSection(function=function, options={option: "x"}))
    assert isinstance(made, EnvironmentFactory)
    assert made.options == {option: "x"}
    with pytest.raises(ConfigError, match=r"environment\.options\.other: "):
        resolve_environment(EnvironmentSection(function=function, options={option: "x", "other": "y"}))


# Problems of a function of one's own, written as both files or as none.
HALF = "price: 3 € and \ud83d"  # a lone surrogate, as a reply that was cut has it
Rows = list[dict[str, Any]]


def problems(question: str = HALF, held_out: int = 1) -> tuple[Rows, Rows]:
    row = {"question": question, "answer": "3"}
    return [row], [row] * held_out


def odd(what: str) -> Any:
    rows = [{"question": "2 + 1", "answer": 3}]
    others: dict[str, Any] = {
        "numpy": (rows, [*rows, {"answer": np.int64(3)}]),
        "nan": ([*rows, {"answer": float("nan")}], rows),
        "three": (rows, rows, rows),
        "none": None,
        "texts": [rows[0], rows[0]],
        "empty": (rows, []),
    }
    return others[what]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("numpy", r"row 2 of eval\.jsonl: .*int64"),
        ("nan", r"row 2 of train\.jsonl: "),
        ("three", "it must give a pair"),
        ("texts", "row 1 of train\\.jsonl: 'question' is no mapping"),
        ("none", "it must give a pair"),
        ("empty", r"no row for eval\.jsonl"),
    ],
)
def test_what_is_no_data_is_refused_by_its_row_and_nothing_is_written(tmp_path: Path, what: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(tmp_path / "out", f"{__name__}:odd", [f"what={what}"])
    assert not (tmp_path / "out").exists()


def given(folder: Path, *keys: str) -> None:
    run(folder, f"{__name__}:problems", keys)


def test_half_of_a_surrogate_pair_is_written_and_read_as_it_is(tmp_path: Path) -> None:
    given(tmp_path)
    for path in sorted(tmp_path.iterdir()):
        assert json.loads(path.read_text(encoding="utf-8"))["question"] == HALF
        assert "3 € and \\ud83d" in path.read_text(encoding="utf-8")


def test_a_disk_that_is_full_leaves_nothing_that_keeps_from_repeating_it(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # bytes of a file: enough for one problem
    try:
        with pytest.raises(OSError, match="File too large"):
            given(tmp_path, "question=2 + 1", "held_out=500")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())
    given(tmp_path, "question=2 + 1", "held_out=500")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eval.jsonl", "train.jsonl"]


# What an environment of the user's own may demonstrate for a warm start, told before the run and within it.
SHOWN = Prompt(id="3*4", text="3*4=", token_ids=tuple(b"3*4="), answer="12", question="3*4")


class OneText(Talks):
    """As a reward's answer would be."""

    def demonstration(self, task: Prompt, seed: int) -> Any:
        return f"!{task.answer}"


class Asynchronous(Talks):
    """As the other four methods are."""

    async def demonstration(self, task: Prompt, seed: int) -> Any:
        return [f"!{task.answer}"]


class Raising(Talks):
    def demonstration(self, task: Prompt, seed: int) -> Any:
        raise KeyError("price list")


class Leaving(Talks):
    def demonstration(self, task: Prompt, seed: int) -> Any:
        sys.exit("no price list")


class Unmade(Raising):
    """Its own start fails."""

    def __init__(self) -> None:
        raise KeyError("no price list")


class Numbers(Talks):
    def demonstration(self, task: Prompt, seed: int) -> Any:
        return [12]


class Nothing(Talks):
    def demonstration(self, task: Prompt, seed: int) -> Any:
        return []


class Half(Talks):
    def demonstration(self, task: Prompt, seed: int) -> Any:
        return ["!12", "\ud83d"]


class Shouts(Talks):
    """What it returns is right."""

    def demonstration(self, task: Prompt, seed: int) -> Any:
        return (f"?{task.question}", ":12", f"!{task.answer}")


def unmade() -> Talks:
    raise KeyError("no list of prices")


def silent() -> Talks:
    return Talks()


WRONG: dict[Callable[..., Any], str] = {
    OneText: r"returned '!.*'; it must return a list of texts",
    Asynchronous: r"is async, which it may not be; it must return a list",
    Raising: r"raised KeyError: 'price list'; fix it",
    Unmade: r"raised KeyError: 'no price list'; fix it",
    unmade: r"raised KeyError: 'no list of prices'; fix it",
    silent: r"raised AttributeError: .*demonstration.*; fix it",
    Leaving: r"raised SystemExit: no price list; fix it",
    Numbers: r"returned 12 as text 0; it must return a list",
    Nothing: r"returned \[\]; it must return a list",
    Half: r"returned '.*ud83d' as text 1, which holds half of a surrogate pair",
}


MADE_FOR = "(, for which the environment is made,)? "


def configured(kind: Callable[..., Any], *keys: str) -> RunConfig:
    return load_config("calculator", [f"environment.function={__name__}:{kind.__name__}", "run.name=x", *keys])


@pytest.mark.parametrize(("kind", "said"), WRONG.items())
def test_another_answer_than_texts_ends_the_warm_start_with_both_names(kind: Callable[..., Any], said: str) -> None:
    config = configured(kind)
    made = load_environment(config)
    assert made is not None
    given = rf"^environment '{__name__}:{kind.__name__}': demonstration of prompt '3\*4' \('3\*4='\){MADE_FOR}{said}"
    with pytest.raises(EnvironmentFailure, match=given):
        demonstrations(made, config)([SHOWN], 1)


@pytest.mark.parametrize(("kind", "said"), WRONG.items())
def test_it_is_told_before_the_run_of_the_first_problem(kind: Callable[..., Any], said: str) -> None:
    (problem,) = preflight(configured(kind), for_job=False).texts("problem")
    given = r"warm_start\.steps, before the run: environment '.*': demonstration of prompt 'made-up' \('.*='\)"
    given += f"{MADE_FOR}{said}"
    assert re.match(given, problem), problem


def test_right_texts_are_learned_as_they_are_and_nothing_is_said_of_them() -> None:
    config = configured(Shouts)
    made = load_environment(config)
    assert made is not None
    assert demonstrations(made, config)([SHOWN], 1) == [("?3*4", ":12", "!12")]
    assert preflight(config, for_job=False).texts("problem") == []
