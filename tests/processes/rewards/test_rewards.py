"""Each reward against answers graded by hand.

These tests start processes.
"""

from __future__ import annotations

import pytest

from rl_megatron.errors import RewardError
from tests.unit.rewards.test_rewards import LATEX, score


def test_math_verify_knows_equal_expressions() -> None:
    assert score("math_verify", r"\frac{1}{2}", r"\boxed{0.5}", "so it is 1/2", "it is 2", "?") == [1, 1, 0, 0]
    assert score("math_verify", "work\n#### 1,000", "The answer is 1000.", "100") == [1, 0]
    assert score("math_verify", "x+1", "$1+x$", "$x-1$") == [1, 0]


@pytest.mark.parametrize("answer", LATEX)
def test_math_verify_reads_latex_without_dollars_as_latex(answer: str) -> None:
    assert score("math_verify", answer, rf"The answer is $\boxed{{{answer}}}$.") == [1]


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (r"3\sqrt{13}", r"\sqrt{117}", "3"),
        ("6 - 5i", "-5i + 6", "5"),
        ("2k+2", "2(k+1)", "2"),
        ("1,2,3", "3, 2, 1", "1.2"),
        (r"1\frac{4}{5}", "1.8", "0.8"),
        ("10 or 12", "10, 12", "12"),
        ("10,000 dollars", "10000", "10"),
        ("1.5 million dollars", "1.5", "1"),
        ("1 000 000", "1000000", "0"),
        ("25%", r"25\%", "20"),
        ("£5", "5", "6"),
    ],
)
def test_math_verify_reads_the_whole_answer(answer: str, right: str, wrong: str) -> None:
    assert score("math_verify", answer, rf"$\boxed{{{right}}}$", rf"$\boxed{{{wrong}}}$", f"so {wrong}") == [1, 0, 0]


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("1e-3", "0.001", "1"),
        ("0.00001", "1e-05", "1"),
        ("1.5e+16", r"1.5 \times 10^{16}", "1.5"),
        ("e-3", "e-3", "0.001"),
        (r"2e^{-3}", r"\frac{2}{e^3}", "0.002"),
        ("1,000", "1{,}000", "1"),
    ],
)
def test_math_verify_reads_powers_of_ten(answer: str, right: str, wrong: str) -> None:
    assert score("math_verify", answer, rf"$\boxed{{{right}}}$", rf"$\boxed{{{wrong}}}$") == [1, 0]


def test_math_verify_refuses_an_answer_it_cannot_read() -> None:
    with pytest.raises(RewardError, match="'train:7'"):
        score("math_verify", "", "1")
