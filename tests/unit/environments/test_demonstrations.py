"""What an environment of the user's own may demonstrate for a warm start, told before the run and within it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from launcher.build.environment import demonstrations, made_environment
from launcher.preflight.checks import preflight
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import EnvironmentFailed
from rl_megatron.types import Prompt
from tests.unit.rollout.test_environment_source import Talks

TASK = Prompt(id="3*4", text="3*4=", token_ids=tuple(b"3*4="), answer="12", question="3*4")


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
def test_another_answer_than_texts_ends_the_warm_start_with_environment_and_prompt(
    kind: Callable[..., Any], said: str
) -> None:
    config = configured(kind)
    made = made_environment(config)
    assert made is not None
    given = rf"^environment '{__name__}:{kind.__name__}': demonstration of prompt '3\*4' \('3\*4='\){MADE_FOR}{said}"
    with pytest.raises(EnvironmentFailed, match=given):
        demonstrations(made, config)([TASK], 1)


@pytest.mark.parametrize(("kind", "said"), WRONG.items())
def test_it_is_told_before_the_run_of_the_first_problem(kind: Callable[..., Any], said: str) -> None:
    (problem,) = preflight(configured(kind), for_job=False).texts("problem")
    given = r"warm_start\.steps, before the run: environment '.*': demonstration of prompt 'made-up' \('.*='\)"
    given += f"{MADE_FOR}{said}"
    assert re.match(given, problem), problem


def test_right_texts_are_learned_as_they_are_and_nothing_is_said_of_them() -> None:
    config = configured(Shouts)
    made = made_environment(config)
    assert made is not None
    assert demonstrations(made, config)([TASK], 1) == [("?3*4", ":12", "!12")]
    assert preflight(config, for_job=False).texts("problem") == []
