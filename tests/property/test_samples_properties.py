"""A ragged batch of any trajectories equals the result of a loop over their tokens, to the bit."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_megatron.data.samples import to_samples
from rl_megatron.types import Chain, Prompt, RolloutGroup, Span, Trajectory, Turn

TOKEN, LOGPROB = st.integers(0, 2**31 - 1), st.floats(-1000, 0.0, width=32)
GIVEN, SAMPLED = st.tuples(TOKEN, st.none()), st.tuples(TOKEN, LOGPROB)
CONTEXT, TURN = st.lists(GIVEN, min_size=1, max_size=6), st.lists(SAMPLED, min_size=1, max_size=8)
Said = list[tuple[int, float | None]]
Row = tuple[list[tuple[Said, Said]], Said]  # context and turn, as often as it likes, and what stands behind the last
ROW = st.tuples(st.lists(st.tuples(CONTEXT, TURN), min_size=1, max_size=3), st.lists(GIVEN, max_size=3))
GROUPS = st.lists(st.lists(st.lists(ROW, min_size=1, max_size=2), min_size=1, max_size=3), min_size=1, max_size=4)


def chain(row: Row) -> Chain:
    pairs, rest = row
    tokens, turns = list[int](), list[Turn]()
    for context, said in pairs:
        tokens += [token for token, _ in context]
        logprobs = np.array([logprob for _, logprob in said], np.float32)
        turns.append(Turn(start=len(tokens), logprobs=logprobs, finish_reason="stop", spans=(Span(0, 0),), text=""))
        tokens += [token for token, _ in said]
    return Chain(token_ids=np.array([*tokens, *(token for token, _ in rest)], np.int32), turns=tuple(turns))


def group(trajectories: list[list[Row]]) -> RolloutGroup:
    made = [Trajectory(chains=tuple(map(chain, rows)), reward=0.0) for rows in trajectories]
    return RolloutGroup(prompt=Prompt(id="p", text="", token_ids=(), answer=""), trajectories=tuple(made))


@settings(max_examples=200, deadline=None)
@given(GROUPS)
def test_samples_are_those_of_a_loop_over_tokens(groups: list[list[list[Row]]]) -> None:
    inputs, targets, mask, logprobs, bounds = [], [], [], [], [0]
    for pairs, rest in (row for trajectories in groups for rows in trajectories for row in rows):
        whole = [*(one for pair in pairs for part in pair for one in part), *rest]
        for (before, _), (token, said) in pairwise(whole):
            inputs.append(before)
            targets.append(token)
            mask.append(said is not None)
            logprobs.append(0.0 if said is None else said)
        bounds.append(len(inputs))
    samples = to_samples([group(trajectories) for trajectories in groups])
    assert samples.input_ids.tolist() == inputs
    assert samples.targets.tolist() == targets
    assert samples.mask.tolist() == mask
    assert samples.rollout_logprobs.numpy().tobytes() == np.array(logprobs, np.float32).tobytes()
    assert samples.old_logprobs.numpy().tobytes() == np.array(logprobs, np.float32).tobytes()
    assert samples.cu_seqlens.tolist() == bounds
    assert torch.equal(samples.advantages, torch.zeros(len(inputs)))
