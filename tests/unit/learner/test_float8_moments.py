"""The scale and the numbers of moments in float8, whose Adam tests/distributed/test_low_moments.py steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rl_megatron.learner.adam.float8 import as_float32, scale_of


@pytest.mark.parametrize(
    ("largest", "wanted"),
    [(448.0, 1.0), (448.1, 2.0), (-224.1, 1.0), (224.0, 0.5), (3e-8, 2.0**-33), (0.0, 2.0**-126), (1e-38, 2.0**-126)],
)
def test_a_scale_is_the_least_power_of_two_that_fits(largest: float, wanted: float) -> None:
    assert scale_of(torch.tensor([0.0, largest, largest / 3])).tolist() == [wanted]


def test_numbers_are_read_wherever_they_are() -> None:
    """1.5 by its bits: exponent 7, mantissa 100."""
    held = SimpleNamespace(_data=torch.tensor([0b0_0111_100, 0b1_0000_000], dtype=torch.uint8), _fp8_dtype="e4m3")
    held._scale_inv = torch.tensor([0.25])
    assert as_float32(held, lambda tensor: tensor).tolist() == [0.375, 0.0]
    assert as_float32(torch.ones(2, dtype=torch.bfloat16), lambda tensor: tensor + 1).tolist() == [2.0, 2.0]
