"""The trial of advantages of the user's own before a run: what is refused and warned of, and which groups teach."""

from __future__ import annotations

import contextlib

import pytest

from rl_megatron.config.io import load_config
from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.errors import ConfigError
from rl_megatron.interfaces import Roles
from rl_megatron.training.credit.shaping import groups_that_differ
from rl_megatron.training.update import Update
from tests.unit.algorithms.test_own_algorithms import _mine  # noqa: F401  a fixture: files of the page, and faulty.py
from tests.unit.training.test_credit import advantages, group

ONE = "rollout.group_size=1"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("faulty:nothing", "'nothing' of faulty is not there"),
        (
            "faulty:none",
            r"of a group's rewards \[0.0, (0.0, )*0.0\], must return .* finite advantages; it returned \[n",
        ),
        ("faulty:one", "must return a tensor of as many finite advantages; it returned 0.25"),
        ("faulty:lists", "it returned list"),
        ("faulty:raising", "raised KeyError: 'a key'"),
    ],
)
def test_advantages_that_cannot_train_are_refused_where_the_update_is_made(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.advantage_mean=.*{reason}"):
        made(name)


def made(name: str, *more: str) -> None:
    """An update of such advantages."""
    config = load_config("tiny_cpu", ["algorithm=reinforce", f"algorithm.advantage_mean={name}", *more])
    Update(config=config, roles=Roles(learners={}, frozen={}, engine=None, weights=None), attention_cost=0.0)  # type: ignore[arg-type]


GAP = ["algorithm.kl.coefficient=0.1", "algorithm.kl.estimator=k1", "algorithm.kl.placement=completion_reward"]
TURNS = ["environment.function=calculator", "environment.template=plain", "algorithm.credit=turn"]


@pytest.mark.parametrize(
    ("name", "keys", "refused"),
    [
        ("maxrl:maxrl", [ONE], True),
        ("maxrl:maxrl", [ONE, *TURNS], False),
        ("maxrl:maxrl", [ONE, *TURNS, "algorithm.turn_baseline=index"], True),
        ("maxrl:maxrl", [ONE, *GAP], False),
        ("maxrl:maxrl", ["rollout.group_size=2"], False),
        ("faulty:above_half", [ONE], False),
        ("faulty:of_sixteen", ["rollout.group_size=16"], False),
        ("faulty:zero", [], True),
        ("faulty:beyond_one", [], False),
    ],
)
def test_advantages_that_are_all_0_in_groups_of_the_runs_size_are_refused(
    name: str, keys: list[str], refused: bool
) -> None:
    said = (
        rf"advantage_mean={name}: all advantages are 0 in groups of rollout.group_size=.* so nothing is trained; return"
    )
    with pytest.raises(ConfigError, match=said) if refused else contextlib.nullcontext():
        made(name, *keys)


@pytest.mark.parametrize(
    ("name", "keys", "warned"),
    [
        ("maxrl:maxrl", [], False),
        ("faulty:above_half", [], False),
        ("faulty:above_half", ["algorithm.normalise_rewards=batch"], True),
        ("faulty:above_half", ["algorithm.advantage_std=group"], False),
    ],
)
@pytest.mark.parametrize("mode", ["off", "refill", "drop"])
def test_groups_that_are_left_out_although_they_have_advantages_are_warned_of(
    caplog: pytest.LogCaptureFixture, name: str, keys: list[str], warned: bool, mode: str
) -> None:
    made(name, f"rollout.dynamic_sampling={mode}", *keys)
    said = f"leaves out groups of equal rewards, which algorithm.advantage_mean={name} gives advantages"
    assert (f"rollout.dynamic_sampling={mode} {said}" in caplog.text) == (warned and mode != "off")


@pytest.mark.parametrize(
    ("name", "keys", "told"),
    [
        ("maxrl:maxrl", [], []),
        ("faulty:variance_of_bits", ["rollout.group_size=4"], ["-0.5, -0.5, -0.5, -0.5"]),
        ("faulty:std", [], []),
        ("faulty:std", TURNS, ["rewards [0.0]"]),
    ],
)
def test_groups_that_a_run_may_not_have_are_warned_of_and_not_refused(
    caplog: pytest.LogCaptureFixture, name: str, keys: list[str], told: list[str]
) -> None:
    made(name, *keys)
    said = [text for text in caplog.messages if "a run with such rewards would end there" in text]
    assert bool(said) == bool(told)
    assert all(one in "".join(said) for one in told)


def test_the_function_says_which_groups_teach() -> None:
    sampled = [group("a", [1.0, 1.0], [2, 2]), group("b", [0.5, 0.5], [2, 2]), group("c", [1.0, 0.5], [2, 2])]

    def teach(**section: object) -> list[bool]:
        row = AlgorithmSection.model_validate(
            {"advantage_mean": "faulty:above_half", "advantage_std": "none", **section}
        )
        return groups_that_differ(sampled, row, max_new_tokens=4)

    assert teach() == [True, False, True]
    assert teach(reward_scale=0.5) == [False, True, True]
    assert teach(advantage_std="group") == [False, False, True]
    assert teach(normalise_rewards="batch") == [False, False, True], "what the function will get is not known yet"
    assert teach(advantage_mean="faulty:beyond_one") == [False, False, False]


def test_a_function_of_lengths_gets_those_of_completions_and_of_turns() -> None:
    """Dynamic sampling asks it too, of the same lengths."""
    sampled = [group("a", [1.0, 0.0, 0.5], [2, 3, 1]), group("b", [0.5, 0.5], [2, 1])]
    section = {"advantage_mean": "opo:opo", "advantage_std": "none"}
    of_a = 2.5 / 6
    for credit in ("completion", "turn"):
        found = advantages(9, sampled, credit=credit, **section)
        assert [one[0] for one in found] == pytest.approx([1 - of_a, -of_a, 0.5 - of_a, 0.0, 0.0], abs=1e-7)
        row = AlgorithmSection.model_validate({"credit": credit, **section})
        assert groups_that_differ(sampled, row, max_new_tokens=9) == [True, False]
    made("opo:opo")
