"""Each token's own weight version, from engines' spans to the share of the proximal policy."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import torch

from rl_megatron.algorithms.corrections import proximal_share
from rl_megatron.data.samples import to_samples
from rl_megatron.training.measures import gaps_of, token_versions
from rl_megatron.types import Chain, Prompt, RolloutGroup, Span, Trajectory, Turn


def turn(start: int, count: int, *spans: tuple[int, int]) -> Turn:
    logprobs = np.full(count, -0.5, np.float32)
    return Turn(start=start, logprobs=logprobs, finish_reason="stop", spans=tuple(Span(*s) for s in spans), text="")


def test_tokens_of_rows_with_several_turns_and_versions() -> None:
    """Positions 0 ... L - 2 of a row have tokens 1 ... L - 1 as targets."""
    long = Chain(
        token_ids=np.arange(10, dtype=np.int32), turns=(turn(2, 4, (0, 1), (3, 2)), turn(7, 3, (0, 2), (1, 4)))
    )
    short = Chain(token_ids=np.arange(3, dtype=np.int32), turns=(turn(1, 2, (0, 3)),))
    group = RolloutGroup(
        prompt=Prompt(id="p", text="", token_ids=(0,), answer=""),
        trajectories=(Trajectory(chains=(long, short), reward=1.0),),
    )
    samples = to_samples([group])
    versions = token_versions([group], samples)
    assert versions.tolist() == [1, 1, 1, 1, 2, 1, 2, 4, 4, 3, 3]
    sampled = samples.mask.tolist()
    assert sampled == [False, True, True, True, True, False, True, True, True, True, True]
    lengths, ages = gaps_of([group], step=6).T  # which begins with version 5
    of_tokens = torch.repeat_interleave(ages, lengths)
    assert of_tokens.tolist() == [5 - version for version in versions[samples.mask].tolist()]
    share = proximal_share(versions, proximal_version=4, version=5)
    closed = [Fraction(4 - v, 5 - v) for v in (1, 1, 1, 2, 2, 4, 4, 3, 3)]
    assert torch.equal(share[samples.mask], torch.tensor([float(one) for one in closed]))
