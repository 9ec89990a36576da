"""Credit by states (GiGPO, arXiv:2505.10978): a tree by hand, the paper's equations in plain loops, and what is one
state."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.environments.protocol import EnvironmentStep, Observed, Reply, Transcript
from rl_megatron.environments.registry import EnvironmentMaker
from rl_megatron.errors import EnvironmentFailed
from rl_megatron.training.credit.shaping import groups_that_differ, shared_states, states_of
from rl_megatron.types import Chain, Prompt, RolloutGroup, Span, Trajectory, Turn
from tests.completions import drawn
from tests.scripted_engine import Scripted, sampler
from tests.turns import branched, group
from tests.unit.training.test_turn_credit import by_turn

GIGPO = {"turn_baseline": "state", "turn_compared": "returns", "turn_weight": 1.0, "gamma_turn": 0.95}
Shown = tuple[str, float]  # what the model read before a turn, and the turn's reward


def played(turns: Sequence[Shown], seed: int) -> Trajectory:
    """One row: before each turn the letters that it reads, and what it says is drawn by the seed."""
    rng, tokens, found = random.Random(seed), list[int](), list[Turn]()
    for shown, reward in turns:
        tokens += map(ord, shown)
        length = rng.randint(1, 3)
        found.append(
            Turn(
                start=len(tokens),
                logprobs=np.zeros(length, np.float32),
                finish_reason="stop",
                spans=(Span(0, 0),),
                text="",
                reward=reward,
            )
        )
        tokens += [rng.randrange(90) for _ in range(length)]
    row = Chain(token_ids=np.array(tokens, np.int32), turns=tuple(found))
    return Trajectory(chains=(row,), reward=sum(reward for _, reward in turns))


def test_a_step_hashes_the_states_of_a_trajectory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks which groups teach, for a metric and for advantages."""
    hashed, blake2b = list[int](), hashlib.blake2b
    monkeypatch.setattr(hashlib, "blake2b", lambda **given: hashed.append(1) or blake2b(**given))
    groups = [group("a", [played([("start", 0.0), ("x", 1.0)], seed) for seed in range(4)])]
    first = states_of(groups).tolist()
    count = len(hashed)
    assert count
    groups_that_differ(groups, AlgorithmSection.model_validate({"credit": "turn", **GIGPO}), max_new_tokens=9)
    assert shared_states(groups) == 1.0
    assert states_of(groups).tolist() == first
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
    assert found == [
        [0.5 + 2 * 0.25, 0.5 + 2 * 0.5],
        [-0.5 - 2 * 0.25, -0.5 - 2 * 0.5, -0.5 - 2 * 0.25],
        [0.0, 0.0 + 2 * 0.25],
    ]


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


def normalised(values: Sequence[float], std: str) -> list[float]:
    if len({round(value, 9) for value in values}) == 1:
        return [0.0] * len(values)
    scale = statistics.stdev(values) + 1e-6 if std == "group" else 1.0
    return [(value - statistics.fmean(values)) / scale for value in values]


def by_the_paper(
    trajectories: Sequence[Sequence[Shown]], *, gamma: float, weight: float, std: str
) -> list[list[float]]:
    """Equations 3 to 8, of one group."""
    episodes = normalised([sum(reward for _, reward in one) for one in trajectories], std)
    returns, peers = dict[tuple[int, int], float](), defaultdict[str, list[tuple[int, int]]](list)
    for i, one in enumerate(trajectories):
        for t, (state, _) in enumerate(one):
            returns[i, t] = sum(gamma ** (k - t) * one[k][1] for k in range(t, len(one)))
            peers[state].append((i, t))
    steps = {
        place: step
        for places in peers.values()
        for place, step in zip(places, normalised([returns[p] for p in places], std), strict=True)
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
        return groups_that_differ(sampled, section, max_new_tokens=9)

    assert teach() == [True, False, True, True]
    assert teach(turn_weight=None) == [True, False, False, True]
    assert teach(gamma_turn=1.0) == [False, False, True, False]


def test_the_share_of_turns_whose_state_others_have_counts_within_groups() -> None:
    one, other = [("start", 0.0), ("x", 0.0)], [("start", 0.0), ("y", 0.0), ("z", 0.0)]
    assert shared_states([group("a", [played(one, 1), played(other, 2)])]) == 2 / 5
    assert shared_states([group(name, [played(one, seed)]) for seed, name in enumerate("ab")]) == 0
    assert shared_states([group("a", [played([("start", 0.0), ("x", 0.0), ("x", 0.0)], 1)])]) == 2 / 3


class Rooms:
    """Says how often it was asked, and names the room where that was, if it has a name."""

    def __init__(self, rooms: Sequence[str | None]) -> None:
        self.rooms, self.asked = rooms, 0

    def _seen(self) -> Observed:
        self.asked += 1
        return Observed(said=f"{self.asked}.", state=self.rooms[self.asked - 1])

    async def start(self, task: Prompt, seed: int) -> Observed:
        return self._seen()

    async def step(self, reply: Reply) -> EnvironmentStep:
        return EnvironmentStep(observation=self._seen()) if self.asked < len(self.rooms) else EnvironmentStep(reward=1)

    async def score(self, transcript: Transcript) -> float:
        return 0.0

    async def close(self) -> None:
        pass


def in_rooms(*rooms: Any) -> RolloutGroup:
    ours = sampler(Scripted(lambda text: "x"), EnvironmentMaker(functools.partial(Rooms, rooms)), group_size=2)
    (found,) = asyncio.run(ours.groups(drawn([Prompt(id="p", text="p", token_ids=(1,), answer="")], 1)))
    assert found.group is not None
    return found.group


def test_states_that_an_environment_names_are_those_that_are_compared() -> None:
    """Its turns read "1.", "2.", "3." and "4."; the third goes without a name. A checkpoint keeps them."""
    found, kept = in_rooms("hall", "attic", None, "hall"), TypeAdapter(RolloutGroup)
    assert [[turn.state for turn in one.turns] for one in found.trajectories] == [["hall", "attic", None, "hall"]] * 2
    for one in (found, kept.validate_json(kept.dump_json(found))):
        assert states_of([one]).tolist() == [0, 1, 2, 0] * 2
    with pytest.raises(EnvironmentFailed, match="step returned an Observed of the state 7, which is no text"):
        in_rooms("hall", 7)
