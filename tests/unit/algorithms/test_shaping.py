from __future__ import annotations

import pytest
import torch

from rl_megatron.algorithms.shaping import drop_truncated, overlong_penalty, score_finished


def test_overlong_penalty_grows_over_the_buffer_before_the_limit() -> None:
    penalty = overlong_penalty(torch.tensor([100, 16384, 18432, 20480]), max_length=20480, buffer=4096)
    assert penalty.tolist() == [0.0, 0.0, -0.5, -1.0]
    of_a_fifth = overlong_penalty(torch.tensor([100, 16384, 18432, 20480]), max_length=20480, buffer=0.2)
    assert of_a_fifth.tolist() == pytest.approx([0.0, 0.0, -0.5, -1.0])
    assert overlong_penalty(torch.tensor([8, 9, 10]), max_length=10, buffer=1).tolist() == [0.0, 0.0, -1.0]
    assert overlong_penalty(torch.tensor([15, 20, 99]), max_length=20, buffer=10, factor=3).tolist() == [-1.5, -3, -3]


def test_truncated_sequences_leave_the_loss() -> None:
    mask = torch.tensor([False, True, True, True])
    assert drop_truncated(mask, torch.tensor([False, True]), torch.tensor([0, 2, 4])).tolist() == [
        False,
        True,
        False,
        False,
    ]


def test_scores_of_the_unfinished() -> None:
    rewards = score_finished(torch.tensor([2.0, 2.0]), torch.tensor([True, False]), unfinished_reward=-1.0)
    assert rewards.tolist() == [2.0, -1.0]
