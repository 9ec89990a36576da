"""Each reward against answers graded by hand.

These tests start processes.
"""

from __future__ import annotations

from tests.unit.rewards.test_rewards import score


def test_math_verify_knows_equal_expressions() -> None:
    assert score("math_verify", r"\frac{1}{2}", r"\boxed{0.5}", "so it is 1/2", "it is 2", "?") == [1, 1, 0, 0]
    assert score("math_verify", "work\n#### 1,000", "The answer is 1000.", "100") == [1, 0]
    assert score("math_verify", "x+1", "$1+x$", "$x-1$") == [1, 0]
