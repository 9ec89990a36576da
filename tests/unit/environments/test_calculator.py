"""The shipped calculator: what it computes, what it refuses, and what its texts teach."""

from __future__ import annotations

import asyncio

import pytest

from rl_megatron.environments.calculator import Calculator, evaluated
from rl_megatron.environments.protocol import EnvironmentStep, Reply
from rl_megatron.types import Prompt

TASK = Prompt(id="37*45", text="37*45=", token_ids=(1,), answer="1665")


def reply(text: str) -> Reply:
    return Reply(text=text, message={"role": "assistant", "content": text}, finish_reason="stop")


def stepped(text: str) -> EnvironmentStep:
    async def play() -> EnvironmentStep:
        calculator = Calculator()
        seen = await calculator.start(TASK, seed=0)
        assert seen.messages == ({"role": "user", "content": "37*45="},)
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
    assert step.observation.said == ":1665"
    assert step.reward is None
    assert step.metrics == {"calculations": 1, "failed_calculations": 0}
    failed = stepped("?37**45")
    assert failed.observation is not None
    assert (failed.observation.said, failed.metrics["failed_calculations"]) == (":syntax", 1)
    assert [(one.reward, one.observation) for one in map(stepped, ("!1665", "!1664", "1665", ""))] == [
        (1.0, None),
        (0.0, None),
        (0.0, None),
        (0.0, None),
    ]


def test_a_third_of_the_texts_to_learn_from_use_the_calculator() -> None:
    texts = [Calculator().demonstration(TASK, seed) for seed in range(2000)]
    assert {("!1665",), ("?37*45", ":1665", "!1665")} == {tuple(one) for one in texts}
    assert 0.32 < sum(len(one) == 3 for one in texts) / 2000 < 0.38  # 0.35 within three standard errors
    with pytest.raises(ValueError, match="demonstrated=3 is a share"):
        Calculator(demonstrated=3)
