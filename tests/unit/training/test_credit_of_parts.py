"""Credit by states (GiGPO), by parts of a reward (GDPO) and by a completion's steps, in plain loops."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.data.samples import char_ends_to_tokens, single_turns, split_into_steps, to_samples
from rl_megatron.environments.protocol import EnvironmentStep, Observation, Reply, Transcript
from rl_megatron.environments.registry import EnvironmentFactory
from rl_megatron.errors import ConfigError, DataError, EnvironmentFailure, RewardError
from rl_megatron.rewards.threads import scored
from rl_megatron.training.credit import (
    AlgorithmState,
    assign_credit,
    groups_with_gradient,
    shape_rewards,
    trainable_groups,
    turn_states,
)
from rl_megatron.types import (
    Completion,
    Prompt,
    RewardResult,
    RolloutGroup,
    Samples,
    Span,
    TokenSequence,
    Trajectory,
    Turn,
)
from tests.completions import branched, completion, drawn, group
from tests.documents import blocks
from tests.rows import BESIDE, config_of
from tests.scripted_engine import Scripted, sampler
from tests.unit.training.test_credit import by_turn

GIGPO = {"turn_baseline": "state", "turn_compared": "returns", "turn_weight": 1.0, "gamma_turn": 0.95}
Shown = tuple[str, float]  # what the model read before a turn, and the turn's reward


def played(turns: Sequence[Shown], seed: int) -> Trajectory:
    """One row: before each turn the letters that it reads, and what it says is drawn by the seed."""
    rng, tokens, found = random.Random(seed), list[int](), list[Turn]()
    for shown, reward in turns:
        tokens += map(ord, shown)
        length = rng.randint(1, 3)
        said: Any = {"logprobs": np.zeros(length, np.float32), "finish_reason": "stop", "spans": (Span(0, 0),)}
        found.append(Turn(start=len(tokens), **said, text="", reward=reward))
        tokens += [rng.randrange(90) for _ in range(length)]
    row = TokenSequence(token_ids=np.array(tokens, np.int32), turns=tuple(found))
    return Trajectory(chains=(row,), reward=sum(reward for _, reward in turns))


def test_a_step_hashes_the_states_of_a_trajectory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks which groups teach, for a metric and for advantages."""
    hashed, blake2b = list[int](), hashlib.blake2b
    monkeypatch.setattr(hashlib, "blake2b", lambda **given: hashed.append(1) or blake2b(**given))
    groups = [group("a", [played([("start", 0.0), ("x", 1.0)], seed) for seed in range(4)])]
    first, count = turn_states(groups).tolist(), len(hashed)
    assert count
    groups_with_gradient(groups, AlgorithmSection.model_validate({"credit": "turn", **GIGPO}), max_new_tokens=9)
    assert turn_states(groups).tolist() == first
    assert len(hashed) == count


def test_a_tree_by_hand() -> None:
    """Returns by halves: 0.5 and 1; 0, 0, 0; 0.25 and 0.5. From "start" they are 0.25 in the mean, from "x" 0.5, from
    "y" 0.25; trajectories have 0.5."""
    tree = [
        played([("start", 0.0), ("x", 1.0)], 1),
        played([("start", 0.0), ("x", 0.0), ("y", 0.0)], 2),
        played([("start", 0.0), ("y", 0.5)], 3),
    ]
    found = by_turn([group("a", tree)], advantage_std="none", **{**GIGPO, "gamma_turn": 0.5, "turn_weight": 2.0})
    good, bad = [0.5 + 2 * 0.25, 0.5 + 2 * 0.5], [-0.5 - 2 * 0.25, -0.5 - 2 * 0.5, -0.5 - 2 * 0.25]
    assert found == [good, bad, [0.0, 0.0 + 2 * 0.25]]


def sampled(seed: int, groups: int = 3) -> tuple[list[RolloutGroup], list[list[list[Shown]]]]:
    rng = random.Random(seed)
    told = [
        [
            [("start", rng.choice([0.0, -0.1])), *((rng.choice("abcd"), rng.choice([0.0, 0.3, 1.0])) for _ in range(n))]
            for n in (rng.randint(0, 4) for _ in range(5))
        ]
        for _ in range(groups)
    ]
    of = [[played(one, rng.randrange(2**20)) for one in trajectories] for trajectories in told]
    return [group(f"p{n}", one) for n, one in enumerate(of)], told


def normalized(values: Sequence[float], std: str) -> list[float]:
    if len({round(value, 9) for value in values}) == 1:
        return [0.0] * len(values)
    scale = statistics.stdev(values) + 1e-6 if std == "group" else 1.0
    return [(value - statistics.fmean(values)) / scale for value in values]


def by_the_paper(
    trajectories: Sequence[Sequence[Shown]], *, gamma: float, weight: float, std: str
) -> list[list[float]]:
    """Equations 3 to 8, of one group."""
    episodes = normalized([sum(reward for _, reward in one) for one in trajectories], std)
    returns, peers = dict[tuple[int, int], float](), defaultdict[str, list[tuple[int, int]]](list)
    for i, one in enumerate(trajectories):
        for t, (state, _) in enumerate(one):
            returns[i, t] = sum(gamma ** (k - t) * one[k][1] for k in range(t, len(one)))
            peers[state].append((i, t))
    steps = {
        place: step
        for places in peers.values()
        for place, step in zip(places, normalized([returns[p] for p in places], std), strict=True)
    }
    return [
        [whole + weight * steps[i, t] for t in range(len(one))]
        for i, (whole, one) in enumerate(zip(episodes, trajectories, strict=True))
    ]


@pytest.mark.parametrize("rows", ["one row", "a row a turn"])
@pytest.mark.parametrize("std", ["group", "none"])
@pytest.mark.parametrize(("gamma", "weight"), [(0.95, 1.0), (1.0, 0.3), (0.0, 2.0)])
def test_advantages_are_those_of_the_papers_equations(gamma: float, weight: float, std: str, rows: str) -> None:
    """Also where the rows of a trajectory repeat what was before: a state is what was read since the turn before."""
    compared = "returns" if gamma else "rewards"
    keys = {"gamma_turn": gamma, "turn_weight": weight, "turn_compared": compared}
    for seed in range(4):
        groups, told = sampled(seed)
        if rows == "a row a turn":
            groups = [replace(g, trajectories=tuple(map(branched, g.trajectories))) for g in groups]
        found = by_turn(groups, advantage_std=std, **GIGPO | keys)
        wanted = [one for of in told for one in by_the_paper(of, gamma=gamma, weight=weight, std=std)]
        assert len(found) == len(wanted)
        for some, others in zip(found, wanted, strict=True):
            assert some == pytest.approx(others, rel=1e-5, abs=1e-6)


def test_a_context_that_goes_on_from_no_turn_is_a_state_as_a_whole() -> None:
    """The second turns read the same behind another beginning each, as where a template leaves out thoughts."""
    rows = [played([("start", 0.0)], 1), played([("start", 0.0)], 2)]
    again = [played([(f"{beginning}, and then x", reward)], 3) for beginning, reward in (("one", 1.0), ("two", 0.0))]
    apart = [
        replace(one, chains=(*one.chains, replace(two.chains[0], turns=(replace(two.turns[0], number=1),))), reward=r)
        for one, two, r in zip(rows, again, (1.0, 0.0), strict=True)
    ]
    keys = {**GIGPO, "turn_weight": None, "advantage_std": "none", "gamma_turn": 0.5}
    assert by_turn([group("a", apart)], **keys) == [[0.25, 0.0], [-0.25, 0.0]]
    alike = [replace(one, chains=(one.chains[0], apart[0].chains[1])) for one in apart]
    assert by_turn([group("a", alike)], **keys) == [[0.25, 0.5], [-0.25, -0.5]]


def test_groups_teach_by_trajectories_or_by_turns_of_one_state() -> None:
    long, short = [("start", 0.0), ("x", 0.0), ("y", 1.0)], [("start", 0.0), ("z", 1.0)]
    other = [("start", 0.0), ("v", 0.5), ("w", 0.5)]
    sampled = [
        group("returns differ", [played(long, 1), played(short, 2)]),
        group("nothing differs", [played(short, 1), played(short, 2)]),
        group("only the trajectories", [played([("a", 1.0)], 1), played([("b", 0.0)], 2)]),
        group("undiscounted returns are equal", [played(long, 1), played(other, 2)]),
    ]

    def teach(**keys: object) -> list[bool]:
        section = AlgorithmSection.model_validate({"credit": "turn", **GIGPO, **keys})
        return groups_with_gradient(sampled, section, max_new_tokens=9)

    assert teach() == [True, False, True, True]
    assert teach(turn_weight=None) == [True, False, False, True]
    assert teach(gamma_turn=1.0) == [False, False, True, False]


def test_turns_share_states_within_groups_alone() -> None:
    def shared(*groups: RolloutGroup) -> float:
        states = turn_states(groups)
        return float((states.bincount()[states] > 1).double().mean())

    one, other = [("start", 0.0), ("x", 0.0)], [("start", 0.0), ("y", 0.0), ("z", 0.0)]
    assert shared(group("a", [played(one, 1), played(other, 2)])) == 2 / 5
    assert shared(*(group(name, [played(one, seed)]) for seed, name in enumerate("ab"))) == 0
    assert shared(group("a", [played([("start", 0.0), ("x", 0.0), ("x", 0.0)], 1)])) == 2 / 3


class Rooms:
    """Says how often it was asked, and names the room where that was, if it has a name."""

    def __init__(self, rooms: Sequence[str | None]) -> None:
        self.rooms, self.asked = rooms, 0

    def _seen(self) -> Observation:
        self.asked += 1
        return Observation(content=f"{self.asked}.", state=self.rooms[self.asked - 1])

    async def start(self, task: Prompt, seed: int) -> Observation:
        return self._seen()

    async def step(self, reply: Reply) -> EnvironmentStep:
        return EnvironmentStep(observation=self._seen()) if self.asked < len(self.rooms) else EnvironmentStep(reward=1)

    async def score(self, transcript: Transcript) -> float:
        return 0.0

    async def close(self) -> None:
        pass


def in_rooms(*rooms: Any) -> RolloutGroup:
    ours = sampler(Scripted(lambda text: "x"), EnvironmentFactory(functools.partial(Rooms, rooms)), group_size=2)
    (found,) = asyncio.run(ours.groups(drawn([Prompt(id="p", text="p", token_ids=(1,), answer="")], 1)))
    assert found.group is not None
    return found.group


def test_states_that_an_environment_names_are_those_that_are_compared() -> None:
    """Its turns read "1.", "2.", "3." and "4."; the third goes without a name. A checkpoint keeps them."""
    found, kept = in_rooms("hall", "attic", None, "hall"), TypeAdapter(RolloutGroup)
    assert [[turn.state for turn in one.turns] for one in found.trajectories] == [["hall", "attic", None, "hall"]] * 2
    for one in (found, kept.validate_json(kept.dump_json(found))):
        assert turn_states([one]).tolist() == [0, 1, 2, 0] * 2
    with pytest.raises(EnvironmentFailure, match="step returned an Observation of state 7, which is not text"):
        in_rooms("hall", 7)


# Advantages of each part of a reward (GDPO): its paper's equations, which groups teach, and what is refused.
WEIGHTS = {"right": 1.0, "short": 0.5, "seen": 0.0}
Parts = Mapping[str, Sequence[float]]


def group_of_parts(name: str, parts: Parts, weights: Mapping[str, float] = WEIGHTS) -> RolloutGroup:
    """Completions of 1, 2, 3, … tokens, with these values of each part."""
    rows = [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]
    of = [{part: (value, weights[part]) for part, value in row.items()} for row in rows]
    sampled = [completion(range(10, 11 + place)) for place, _ in enumerate(rows)]
    totals = [math.fsum(weights[part] * value for part, value in row.items()) for row in rows]
    prompt = Prompt(id=name, text=name, token_ids=(1, 2), answer="")
    return single_turns(prompt, sampled, ["x"] * len(rows), totals, of)


RIGHT, SHORT = [1.0, 0.0, 0.0, 1.0], [0.0, 0.5, 1.0, 1.0]
GROUPS = [
    group_of_parts("a", {"right": RIGHT, "short": SHORT, "seen": [9.0, 0.0, 3.0, 1.0]}),
    group_of_parts("b", {"right": [0.0, 0.0, 1.0, 0.0], "short": [1.0] * 4}),  # one part is equal, one is not there
]


def section(**row: object) -> AlgorithmSection:
    return AlgorithmSection.model_validate({"advantage_of": "parts", **row})


def advantages(row: AlgorithmSection, groups: Sequence[RolloutGroup] = GROUPS) -> list[float]:
    """Of completions, each of whose tokens has the same."""
    shaped = shape_rewards(groups, row, AlgorithmState(), max_new_tokens=9)
    samples, _ = assign_credit(to_samples(groups), groups, shaped, row, success_reward=1.0)
    found = []
    for start, stop in zip(samples.cu_seqlens[:-1], samples.cu_seqlens[1:], strict=True):
        (value,) = set(samples.advantages[start:stop][samples.mask[start:stop]].tolist())
        found.append(value)
    return found


def standardized(values: Sequence[float], others: bool = False) -> list[float]:
    """(r - mean) / std of one group, or with the mean of the others; 0 where all are equal."""
    spread, total, count = statistics.stdev(values), sum(values), len(values)
    means = [(total - value) / (count - 1) if others else total / count for value in values]
    return [(value - mean) / spread if spread else 0.0 for value, mean in zip(values, means, strict=True)]


def summed(others: bool = False) -> list[float]:
    """Equations 4 and 5 of arXiv:2601.05242, with its weights."""
    first = [a + 0.5 * b for a, b in zip(standardized(RIGHT, others), standardized(SHORT, others), strict=True)]
    return [*first, *standardized([0.0, 0.0, 1.0, 0.0], others)]


@pytest.mark.parametrize("others", [False, True])
def test_parts_are_normalised_over_their_group_before_they_are_added(others: bool) -> None:
    assert advantages(section(leave_one_out=others)) == pytest.approx(summed(others), rel=1e-5, abs=1e-6)


def test_the_row_normalises_the_sum_over_the_completions_of_the_batch() -> None:
    """Equation 6; over tokens, as before, long completions would weigh more."""
    row = config_of("gdpo").algorithm
    mean, spread = statistics.mean(summed()), statistics.stdev(summed())
    wanted = [(value - mean) / spread for value in summed()]
    assert advantages(row) == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert advantages(row.model_copy(update={"whiten_of": "tokens"})) != pytest.approx(wanted, rel=1e-2)


def test_of_one_part_it_is_grpo_and_of_a_std_of_the_batch_each_part_has_its_own() -> None:
    alone = [group_of_parts("a", {"right": RIGHT}), group_of_parts("b", {"right": [0.0, 0.0, 1.0, 0.0]})]
    assert advantages(section(), alone) == advantages(AlgorithmSection(), alone)
    spread_of_right = statistics.stdev([*RIGHT, 0.0, 0.0, 1.0, 0.0])
    spread_of_short = statistics.stdev([*SHORT, 1.0, 1.0, 1.0, 1.0])
    wanted = [
        (a - 0.5) / spread_of_right + 0.5 * (b - 0.625) / spread_of_short for a, b in zip(RIGHT, SHORT, strict=True)
    ]
    assert advantages(section(advantage_std="batch"))[:4] == pytest.approx(wanted, rel=1e-5)
    other = replace(GROUPS[1], trajectories=alone[1].trajectories)  # of a source whose reward has no such part
    spread_of_short = statistics.stdev(SHORT)
    wanted = [
        (a - 0.5) / spread_of_right + 0.5 * (b - 0.625) / spread_of_short for a, b in zip(RIGHT, SHORT, strict=True)
    ]
    assert advantages(section(advantage_std="batch"), [GROUPS[0], other])[:4] == pytest.approx(wanted, rel=1e-5)


def test_a_mean_of_the_batch_is_over_the_completions_that_have_the_part() -> None:
    """So that without a std, too, it is not what the sums have, whose mean is over all."""
    other = group_of_parts("b", {"right": [0.0, 0.0, 1.0, 0.0]})
    found = advantages(section(advantage_mean="batch", advantage_std="none"), [GROUPS[0], other])
    right, short = statistics.mean([*RIGHT, 0.0, 0.0, 1.0, 0.0]), statistics.mean(SHORT)
    wanted = [a - right + 0.5 * (b - short) for a, b in zip(RIGHT, SHORT, strict=True)]
    assert found == pytest.approx([*wanted, *(value - right for value in (0.0, 0.0, 1.0, 0.0))], rel=1e-5)


@pytest.mark.parametrize("std", ["group", "batch"])
def test_a_group_of_equal_totals_teaches_by_its_parts(std: str) -> None:
    """Unless its parts are equal, or cancel; a part of weight 0 is recorded alone."""
    same_total = group_of_parts("total", {"right": [1.0, 0.0, 0.5], "short": [0.0, 2.0, 1.0]})
    equal = group_of_parts("equal", {"right": [1.0, 1.0], "short": [0.5, 0.5], "seen": [0.0, 1e39]})
    cancels = group_of_parts(
        "cancels", {"right": [1.0, 0.3, 0.1], "short": [0.0, 0.7, 0.9]}, {"right": 0.7, "short": 0.7}
    )
    groups = [same_total, equal, cancels, group_of_parts("differs", {"right": [1.0, 0.0]})]
    assert len(set(same_total.rewards)) == len(set(equal.rewards)) == 1
    assert groups_with_gradient(groups, AlgorithmSection(), max_new_tokens=9)[0] is False
    row = section(advantage_std=std)
    assert groups_with_gradient([], row, max_new_tokens=9) == []
    for found in (groups_with_gradient, trainable_groups):
        assert found(groups, row, max_new_tokens=9) == [True, False, std == "batch", True]
    if std == "group":  # exactly: whitening would make rounding as large as other advantages
        assert advantages(row, [cancels]) == advantages(config_of("gdpo").algorithm, [cancels]) == [0.0] * 3
    assert max(map(abs, advantages(row, [same_total]))) > 0.2


def test_a_completion_without_parts_is_named() -> None:
    (one, *rest) = GROUPS[0].trajectories
    stored = replace(GROUPS[0], trajectories=(replace(one, parts={}), *rest))
    with pytest.raises(DataError, match=r"reward of prompt 'a' has no parts: .*start a new run, or set advantage_of="):
        advantages(section(), [GROUPS[1], stored])


P = "algorithm.advantage_of=parts"


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["advantage_std=none"], "advantage_std=none, comparing parts gives the same result as comparing sums"),
        (["advantage_mean=greedy", "advantage_std=none"], f"{P} with algorithm.advantage_mean=greedy: that baseline"),
        (["advantage_mean=moving"], f"{P} with algorithm.advantage_mean=moving: that baseline is for the sum"),
        (["advantage_mean=tracked"], f"{P} with algorithm.advantage_mean=tracked: that baseline is for the sum"),
        (["credit=turn"], f"{P} with algorithm.credit=turn: parts are compared between whole.*set credit=comp"),
        (["credit=gae"], f"{P} with algorithm.credit=gae: .*a critic would have no effect; set credit=comp"),
        (["credit=discounted"], "whiten=true and algorithm.credit=discounted: a completion then has several"),
        (["unfinished_reward=0"], f"{P} with algorithm.unfinished_reward=0: it changes the sum"),
        (["overlong_buffer=2"], f"{P} with algorithm.overlong_buffer=2: it changes the sum.*make it a part"),
        (["kl.coefficient=0.1", "kl.placement=completion_reward"], "the KL is not one of the compared parts"),
        (["preference.beta=0.1"], "advantage_of=parts does nothing: .*trains on pairs and does not read it"),
        (["whiten=false"], "whiten_of=completions does nothing"),
    ],
)
def test_what_is_of_the_sum_is_refused_with_its_reason(keys: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        config_of("gdpo", *(f"algorithm.{key}" for key in keys))


SOURCES = ["data=mixture", "data.sources.sums.type=arithmetic", "data.sources.more.type=arithmetic"]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["algorithm=gdpo"], rf"{P} with reward\.function=exact_match: this reward has no parts.* in reward\.parts"),
        (
            ["algorithm=gdpo", *BESIDE["gdpo"], "reward.on_error=0.5"],
            rf"{P} with reward\.on_error=0\.5: that number replaces the sum",
        ),
        (
            ["algorithm=gdpo", *BESIDE["gdpo"], *SOURCES, "data.sources.more.reward.function=format"],
            r"with data\.sources\.more\.reward\.function=format: this reward has no parts.*\.more\.reward\.parts",
        ),
    ],
)
def test_rewards_without_parts_are_refused_before_the_run(keys: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config("tiny_cpu", keys)


def test_choices_that_mean_something_for_each_part_are_taken() -> None:
    for row in (
        *(["leave_one_out=true"], ["advantage_std=batch"], ["advantage_std=advantages"], ["advantage_mean=batch"]),
        *(["whiten=false", "whiten_of=tokens", "credit=discounted"], ["objective=cispo"], ["drop_truncated=true"]),
    ):
        config_of("gdpo", *(f"algorithm.{key}" for key in row))
    own = [f"data.sources.{name}.reward.parts.exact_match=1" for name in ("sums", "more")]
    config = load_config("tiny_cpu", ["algorithm=gdpo", *SOURCES, *own])  # the run's own reward judges nothing
    assert isinstance(config, RunConfig)
    unscaled = ["algorithm.advantage_std=none", "algorithm.advantage_mean=batch"]
    with pytest.raises(ConfigError, match="advantage_of=parts does nothing"):
        load_config("tiny_cpu", ["algorithm=gdpo", *SOURCES, *own, *unscaled])
    other = "data.sources.more.reward.parts.length=1"  # of which the mean is over this source alone
    assert isinstance(load_config("tiny_cpu", ["algorithm=gdpo", *SOURCES, *own, other, *unscaled]), RunConfig)
    with pytest.raises(ConfigError, match=r"function=calculator with .*: an environment gives one reward"):
        load_config("calculator", ["algorithm=gdpo"])


def test_functions_of_your_own_get_one_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest of a group is 1, all others 0; which is no function of a sum's parts together."""
    module = type(torch)("largest_for_test")
    module.largest = lambda rewards: (rewards == rewards.max()).double()
    monkeypatch.setitem(__import__("sys").modules, "largest_for_test", module)
    row = section(advantage_mean="largest_for_test:largest", advantage_std="none")
    assert advantages(row)[:4] == [1.0, 0.0, 0.5, 1.5]
    assert groups_with_gradient(GROUPS, row, max_new_tokens=9) == [True, True]


# Rewards of a completion's steps: DeepSeekMath's process supervision (arXiv:2402.03300, 4.1.3) in plain loops.
PAGE = Path(__file__).parents[3] / "docs" / "data.md"
WORDS = ["a", "bc", " def", "", ".\n", "\n\n", " g", "h.", " \n", " i"]
PROMPT = Prompt(id="p", text="", token_ids=(7, 7, 7), answer="")
Steps = list[tuple[int, float]]


def decode(tokens: Sequence[int]) -> str:
    """Drops the space that a text begins with, as SentencePiece's decoders do; word 3 is a special token."""
    return "".join(WORDS[token] for token in tokens).removeprefix(" ")


def completion_of(tokens: Sequence[int], *spans: tuple[int, int]) -> Completion:
    logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32)
    found = tuple(Span(*span) for span in spans or ((0, 1),))
    return Completion(token_ids=np.array(tokens, np.int32), logprobs=logprobs, finish_reason="stop", spans=found)


def judged(tokens: Sequence[Sequence[int]], steps: Sequence[Steps]) -> RolloutGroup:
    """A group whose completions have these tokens and steps."""
    texts = [decode(one) for one in tokens]
    said = scored(steps, texts, steps=True)
    whole = single_turns(PROMPT, [completion_of(one) for one in tokens], texts, [one.total for one in said])
    return split_into_steps(whole, said, decode)


def drawn_steps(seed: int) -> tuple[list[list[int]], list[Steps]]:
    """Four completions of up to 20 tokens with up to 5 steps each, at any characters."""
    rng = random.Random(seed)
    tokens = [[0, *(rng.randrange(len(WORDS)) for _ in range(rng.randrange(20)))] for _ in range(4)]
    steps = []
    for one in tokens:
        length = len(decode(one))
        ends = sorted(rng.sample(range(1, length + 1), min(rng.randrange(1, 6), length)))
        steps.append([(end, rng.choice([-1.0, 0.0, 0.3, 1.0])) for end in ends])
    return tokens, steps


def first_with(tokens: Sequence[int], end: int) -> int:
    return next(count for count in range(1, len(tokens) + 1) if len(decode(tokens[:count])) >= end)


def in_plain_loops(tokens: Sequence[Sequence[int]], steps: Sequence[Steps]) -> list[list[float]]:
    """Every token's sum of the normalized rewards of the steps that end at it or behind it."""
    placed = []
    for one, its in zip(tokens, steps, strict=True):
        by_end: dict[int, float] = {}
        for end, reward in its:
            at = first_with(one, end)
            by_end[at] = by_end.get(at, 0.0) + reward
        last = max(by_end)
        by_end[len(one)] = by_end.pop(last)
        placed.append(by_end)
    rewards = [reward for by_end in placed for reward in by_end.values()]
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    out = []
    for one, by_end in zip(tokens, placed, strict=True):
        normal = {end: (reward - mean) / (std + 1e-6) if std > 1e-9 else 0.0 for end, reward in by_end.items()}
        out.append([sum(value for end, value in normal.items() if end > t) for t in range(len(one))])
    return out


def credited(groups: Sequence[RolloutGroup], *keys: str) -> Samples:
    section = load_config("tiny_cpu", ["algorithm=grpo_process", *keys]).algorithm
    rewards = shape_rewards(groups, section, AlgorithmState(), max_new_tokens=99)
    return assign_credit(to_samples(groups), groups, rewards, section, success_reward=1.0)[0]


@pytest.mark.parametrize("seed", range(12))
def test_advantages_are_the_sums_of_later_steps_normalised_rewards(seed: int) -> None:
    """Two groups in a batch: a step is compared with those of its own."""
    both = [drawn_steps(seed), drawn_steps(seed + 100)]
    samples = credited([judged(*one) for one in both])
    wanted = [value for one in both for of in in_plain_loops(*one) for value in of]
    assert samples.advantages[samples.mask].tolist() == pytest.approx(wanted, abs=1e-5)
    assert not samples.advantages[~samples.mask].any()


@pytest.mark.parametrize("seed", range(20))
def test_ends_are_those_of_decoding_every_prefix(seed: int) -> None:
    rng = random.Random(seed)
    tokens = [0, *(rng.randrange(len(WORDS)) for _ in range(300))]
    ends = sorted(rng.sample(range(1, len(decode(tokens)) + 1), 25))
    assert char_ends_to_tokens(tokens, ends, decode) == [first_with(tokens, end) for end in ends]


def test_a_completion_in_steps_has_the_tokens_of_the_whole_and_the_versions_that_sampled_them() -> None:
    tokens, text = [0, 1, 2, 4, 6, 6], decode([0, 1, 2, 4, 6, 6])
    said = scored([[(3, 1.0), (8, 2.0), (10, 4.0)]], [text], steps=True)
    whole = single_turns(PROMPT, [completion_of(tokens, (0, 5), (1, 6), (4, 7))], [text], [7.0])
    ((one,), (before,)) = split_into_steps(whole, said, decode).trajectories, whole.trajectories
    ((row,), (old,)) = one.chains, before.chains
    assert row.token_ids.tolist() == old.token_ids.tolist()
    assert [turn.start for turn in row.turns] == [3, 5, 7]
    assert np.concatenate([turn.logprobs for turn in row.turns]).tolist() == old.turns[0].logprobs.tolist()
    assert "".join(turn.text for turn in row.turns) == text
    assert [turn.spans for turn in row.turns] == [(Span(0, 5), Span(1, 6)), (Span(0, 6),), (Span(0, 7),)]
    assert [turn.reward for turn in row.turns] == [1.0, 2.0, 4.0]


def test_ends_within_one_token_are_one_step_and_a_number_is_none() -> None:
    """Token 2 has four characters; a completion whose reward failed is not cut."""
    tokens = [0, 2, 1]
    group = judged([tokens], [[(2, 1.0), (4, 2.0), (6, 4.0)]])
    assert [(turn.start, turn.reward) for turn in group.trajectories[0].turns] == [(3, 3.0), (5, 4.0)]
    text = decode(tokens)
    for plain in (RewardResult(total=1.0), RewardResult(total=2.0, steps=((1, float("nan")),), error="not finite")):
        whole = single_turns(PROMPT, [completion_of(tokens)], [text], [plain.total])
        assert split_into_steps(whole, [plain], decode).trajectories == whole.trajectories


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([[]], r"end at \[\]; there must be one at least"),
        ([[(2, 1.0), (2, 1.0)]], r"end at \[2, 2\]; .* must ascend, from 1 to the 3 characters"),
        ([[(0, 1.0)]], "must ascend, from 1"),
        ([[(4, 1.0)]], "from 1 to the 3 characters of its text"),
        ([[1.0, 2.0]], r"returned a float as a step of completion 0; it must be \(end, reward\)"),
        ([[(1.5, 2.0)]], r"must be \(end, reward\)"),
        (["1"], "returned a str '1' for completion 0; .*, or a list of its steps"),
        ([1.0, [(1, 1.0)]], "steps of completion 1"),
    ],
)
def test_steps_that_cannot_be_placed_are_refused(given: Any, reason: str) -> None:
    with pytest.raises(RewardError, match=reason):
        scored(given, ["abc"], steps=True)


def test_steps_without_the_key_are_refused() -> None:
    with pytest.raises(RewardError, match=r"returned a list for completion 0.*Steps are read with reward.steps=true"):
        scored([[(1, 1.0)]], ["abc"])
    assert scored([1, [(1, 0.5), (np.int64(3), 0.25)]], ["abc", "abc"], steps=True)[1].total == 0.75


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["algorithm=grpo", "reward.steps=true"], "reward.steps=true does nothing: with algorithm.credit=completion"),
        (["algorithm=gspo_token", "reward.steps=true"], "steps=true does nothing: with algorithm.credit=discounted"),
        (["algorithm=grpo", "algorithm.credit=turn"], "=turn without environment.function or reward.steps=true"),
        (["algorithm=grpo_process", "reward.parts.format=1.0"], "reward.parts .*: a sum of parts has no steps"),
        (["algorithm=grpo_process", "rollout.interrupt.earliest=0.1"], "interrupt.earliest=.* with reward.steps=true"),
    ],
)
def test_what_reads_no_steps_or_has_none_is_refused(keys: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config("tiny_cpu", keys)


def test_the_reward_of_the_page_gives_steps_that_are_placed() -> None:
    (documented,) = [one for one in blocks(PAGE, "python") if "def sums" in one.text]
    found: dict[str, Any] = {}
    exec(documented.text, found)
    prompt = Prompt(id="p", text="", token_ids=(1,), answer="12")
    texts = ["5+5=10\n10+2=12", "5+5=11\n11+1=12\n12", "no sum"]
    said = scored(found["sums"](prompt, [], texts), texts, steps=True)
    assert [one.steps for one in said] == [((7, 1.0), (14, 2.0)), ((7, 0.0), (15, 1.0), (17, 1.0)), ((6, 0.0),)]
