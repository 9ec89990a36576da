"""Shares of sources: counts at every prefix for random weights, and exact resumes at random positions."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from rl_megatron.data.problems.mixture import MixtureState, Proportions
from rl_megatron.data.problems.prompt_stream import PromptStream
from rl_megatron.types import Prompt

WEIGHTS = st.lists(st.floats(0.01, 1000) | st.integers(1, 1000).map(float), min_size=1, max_size=9)
STATE = TypeAdapter(MixtureState)


@given(weights=WEIGHTS, steps=st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_every_prefix_is_within_one_of_its_share_by_the_rule_in_plain_words(weights: list[float], steps: int) -> None:
    shares = Proportions({f"s{i}": weight for i, weight in enumerate(weights)})
    total, taken = sum(map(Fraction, weights)), Counter[str]()
    for n in range(1, steps + 1):
        due = {
            f"s{i}": (taken[f"s{i}"] + 1) / Fraction(weight)
            for i, weight in enumerate(weights)
            if taken[f"s{i}"] < Fraction(weight) * n / total
        }
        taken[name := shares.next()] += 1
        assert name == min(due, key=due.__getitem__)
        for i, weight in enumerate(weights):
            assert abs(taken[f"s{i}"] - Fraction(weight) * n / total) < 1, (n, i)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 7), st.floats(0.1, 9)), min_size=1, max_size=4),
    before=st.integers(0, 60),
    after=st.integers(1, 60),
)
@settings(max_examples=60, deadline=None)
def test_the_order_after_a_resume_is_the_uninterrupted_one(
    sizes: list[tuple[int, float]], before: int, after: int
) -> None:
    prompts = [
        Prompt(id=f"s{i}/{row}", text="", token_ids=(0,), answer="", source=f"s{i}")
        for i, (size, _) in enumerate(sizes)
        for row in range(size)
    ]
    weights = {f"s{i}": weight for i, (_, weight) in enumerate(sizes)}
    whole = PromptStream(prompts, seed=3, weights=weights).take(before + after)
    first, second = (PromptStream(prompts, seed=3, weights=weights) for _ in range(2))
    first.take(before)
    second.restore(STATE.validate_json(STATE.dump_json(first.state())))  # type: ignore[arg-type]
    assert second.take(after) == whole[before:]
