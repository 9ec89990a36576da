"""Each reward against answers graded by hand."""

from __future__ import annotations

import asyncio
import sys
import threading
from fractions import Fraction
from pathlib import Path

import pytest

from rl_megatron.errors import ConfigError, RewardError
from rl_megatron.rewards.final_number import last_number
from rl_megatron.rewards.registry import resolve_reward
from rl_megatron.types import Prompt
from tests.completions import completion


def score(name: str, answer: str, *texts: str) -> list[float]:
    completions = [completion((1,)) for _ in texts]
    prompt = Prompt(id="train:7", text="", token_ids=(1,), answer=answer)
    return [one.total for one in asyncio.run(resolve_reward(name)(prompt, completions, texts))]


def test_exact_match_looks_past_white_space_only() -> None:
    assert score("exact_match", " 95", "95", " 95\n", "095", "95.", "") == [1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("so 48/2=24", "24"),
        ("$1,234.50 in all", "1234.5"),
        ("-$5", "-5"),
        ("$-5.", "-5"),
        ("it is 5-3", "3"),
        ("x = -3", "-3"),
        ("\u22127", "-7"),
        ("+7", "7"),
        ("50%", "50"),
        (".5", "1/2"),
        ("one half is 1/2", "1/2"),
        ("-3/4", "-3/4"),
        ("0.1", "1/10"),
        ("**72**", "72"),
        ("1, 2, 3", "3"),
        ("1,2345", "2345"),
        ("#### 1,000,000", "1000000"),
        ("version 1.2.3", "3"),
        ("1e-05", "1/100000"),
        ("-2.5E+16.", "-25000000000000000"),
        ("1/2e3", "1/2000"),
        ("1e5000", "5000"),
        ("2e-3x", "3"),
        ("$1{,}000{,}000$", "1000000"),
    ],
)
def test_the_last_number_is_read_exactly(text: str, value: str) -> None:
    assert last_number(text) == Fraction(value)


@pytest.mark.parametrize("text", ["", "none", "5/0", "9" * 5000, "\u0663", "-", "$"])
def test_what_is_no_number_is_none(text: str) -> None:
    assert last_number(text) is None


def test_final_number_reads_the_answer_behind_the_hashes() -> None:
    answer = "48+24 = <<48+24=72>>72 clips, 3 left.\n#### 72"
    assert score("final_number", answer, "The answer is 72.", "72.0", "72, or 71", "144/2", "") == [1, 1, 0, 1, 0]
    assert score("final_number", "it is 3", "3") == [1]


def test_an_answer_without_a_number_names_the_prompt() -> None:
    with pytest.raises(RewardError, match="'train:7'"):
        score("final_number", "3 are left.\n#### none", "3")


LATEX = (
    *(r"\frac{1}{2}", r"\frac12", r"- \frac{35}{9}", r"3 \frac{1}{2}", r"3\sqrt{13}", r"70 \sqrt{2}", r"2\pi", "e^2"),
    *("p - q", "2k+2", "y = 2x + 3", "x=5", "6 - 5i", "3R^2", "2*x+1", "sqrt(2)", "5!", "2^{10}", r"\log_2 3", "3:2"),
    *(
        r"\left( 3, \frac{\pi}{2} \right)",
        "[0,1)",
        r"(-\infty,3]",
        r"x \in [-2,7]",
        "x<5",
        r"\{1,2,3\}",
        "1,2,3",
        "-2,1",
    ),
    *(r"1\pm\sqrt{19}", r"3 \times 10^8", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"90^\circ", r"\text{(C)}", "25_8"),
    *(r"5.4 \text{ cents}", r"10\%", r"\$18.90", "58,500", "5 cm", "120 degrees", "-5", "\u22125", "+5", "7th", "yes"),
)


def test_an_unknown_name_has_a_near_miss_and_the_list() -> None:
    with pytest.raises(
        ConfigError, match=r"'exact_mach' is unknown; did you mean 'exact_match'\? allowed: exact_match"
    ):
        resolve_reward("exact_mach")


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_rewards_for_test.py").write_text(
        "import threading\n"
        "LIMIT = 3\n"
        "stop = threading.Event()\n"
        "def by_length(prompt, completions, texts):\n"
        "    return [float(len(text)) for text in texts]\n"
        "async def later(prompt, completions, texts):\n"
        "    return [float(prompt.answer == text) for text in texts]\n"
        "class Scorer:\n"
        "    async def __call__(self, prompt, completions, texts):\n"
        "        return [0.5 for _ in texts]\n"
        "scorer = Scorer()\n"
        "def broken(prompt, completions, texts):\n"
        "    raise ZeroDivisionError('mine')\n"
        "def stuck(prompt, completions, texts):\n"
        "    stop.wait()\n"
    )
    (tmp_path / "bad_rewards_for_test.py").write_text("import not_there_at_all\n")
    (tmp_path / "raising_rewards_for_test.py").write_text("1 / 0\n")
    (tmp_path / "leaving_rewards_for_test.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "my_rewards_for_test"


def test_functions_of_the_user_may_be_plain_async_or_objects(user_module: str) -> None:
    assert score(f"{user_module}:by_length", "a", "xx", "") == [2, 0]
    assert score(f"{user_module}:later", "a", "a", "b") == [1, 0]
    assert score(f"{user_module}:scorer", "a", "a", "b") == [0.5, 0.5]


def test_what_a_plain_function_raises_is_named(user_module: str) -> None:
    with pytest.raises(RewardError, match=r"^raised ZeroDivisionError: mine$"):
        score(f"{user_module}:broken", "a", "x")


async def test_a_function_that_never_returns_can_be_left(user_module: str) -> None:
    prompt = Prompt(id="p", text="", token_ids=(1,), answer="")
    with pytest.raises(TimeoutError):
        # would hang at the end if the loop joined the thread
        await asyncio.wait_for(resolve_reward(f"{user_module}:stuck")(prompt, [], []), 0.05)
    stuck = [thread for thread in threading.enumerate() if thread.name == "reward"]
    assert stuck
    assert all(thread.daemon for thread in stuck)
    sys.modules[user_module].stop.set()  # the loop is closed by now: its late result must go nowhere
    for thread in stuck:
        thread.join(5)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere_at_all:f", "no module 'nowhere_at_all'; install it or put its folder on PYTHONPATH"),
        ("my_rewards_for_test:by_lenght", "'by_lenght' of my_rewards_for_test is not there; did you mean 'by_length'"),
        ("my_rewards_for_test:LIMIT", "'LIMIT' of my_rewards_for_test is not a function"),
        ("my_rewards_for_test:", "write it as package.module:function"),
        (":f", "write it as package.module:function"),
        ("bad_rewards_for_test:f", "importing bad_rewards_for_test failed: No module named 'not_there_at_all'"),
        ("raising_rewards_for_test:f", "raised ZeroDivisionError"),
        ("leaving_rewards_for_test:f", "importing leaving_rewards_for_test raised SystemExit: 0"),
    ],
)
def test_paths_that_lead_nowhere_say_why(user_module: str, path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_reward(path)
