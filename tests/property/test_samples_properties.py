"""A ragged batch of any rollouts is what a loop over their tokens makes of them, to the bit."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_megatron.data.samples import to_samples
from rl_megatron.types import Prompt, RolloutGroup
from tests.completions import completion, group

TOKEN = st.integers(0, 2**31 - 1)
LOGPROB = st.floats(-1000, 0.0, width=32)
SAMPLED = st.lists(st.tuples(TOKEN, LOGPROB), min_size=1, max_size=12)
PROMPT = st.lists(TOKEN, min_size=1, max_size=8)
GROUPS = st.lists(st.tuples(PROMPT, st.lists(SAMPLED, min_size=1, max_size=4)), min_size=1, max_size=5)


def made(prompt: list[int], sampled: list[list[tuple[int, float]]]) -> RolloutGroup:
    of = [completion([token for token, _ in one], [said for _, said in one]) for one in sampled]
    return group(Prompt(id="p", text="", token_ids=tuple(prompt), answer=""), of)


@settings(max_examples=200, deadline=None)
@given(GROUPS)
def test_samples_are_those_of_a_loop_over_tokens(groups: list[tuple[list[int], list[list[tuple[int, float]]]]]) -> None:
    inputs, targets, mask, logprobs, bounds = [], [], [], [], [0]
    for prompt, completions in groups:
        for sampled in completions:
            row = [*((token, None) for token in prompt), *sampled]
            for (before, _), (token, said) in pairwise(row):
                inputs.append(before)
                targets.append(token)
                mask.append(said is not None)
                logprobs.append(0.0 if said is None else said)
            bounds.append(len(inputs))
    samples = to_samples([made(*one) for one in groups])
    assert samples.input_ids.tolist() == inputs
    assert samples.targets.tolist() == targets
    assert samples.mask.tolist() == mask
    assert samples.rollout_logprobs.numpy().tobytes() == np.array(logprobs, np.float32).tobytes()
    assert samples.old_logprobs.numpy().tobytes() == np.array(logprobs, np.float32).tobytes()
    assert samples.cu_seqlens.tolist() == bounds
    assert torch.equal(samples.advantages, torch.zeros(len(inputs)))
