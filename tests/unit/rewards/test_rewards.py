"""Each reward against answers graded by hand, rules, and weighted sums."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import ValidationError

from rl_megatron.config.io import load_config
from rl_megatron.config.sections.reward import RewardSection
from rl_megatron.config.sections.rollout import RolloutSection
from rl_megatron.errors import ConfigError, RewardError
from rl_megatron.rewards.registry import resolve_reward, resolve_rewards
from rl_megatron.rewards.rules import last_number
from rl_megatron.rollout.sampler import RolloutSampler
from rl_megatron.rollout.stream import GroupResult, RolloutBatch
from rl_megatron.types import Completion, GenerationRequest, Prompt, RewardResult
from tests.completions import completion, drawn


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
        ("10² or 2⁻²", "1/4"),
        ("½", "1/2"),
        ("2½", "5/2"),
        ("it is 1 1/2.", "3/2"),
        ("x = –5", "-5"),
        ("pages 3–5", "5"),
        ("７０ ０００", "70000"),
        ("3 × 10⁸", "300000000"),
        ("0.1̅6̅", "16/99"),
        ("answer: 7 (as 7² = 49)", "7"),
        ("#### 7 apples (since 3 + (2 + 2) = 7, or 8)", "7"),
        ("The answer is **7**, because 7² = 49.\nIt is not 8.", "8"),
        ("The answer is 7.5, as 2 * 7.5 = 15. Check: 15", "15"),
        ("The answer is not 5, because 2 + 4 = 6.", "6"),
        ("Let x = 2, since y = 4 it is 6", "6"),
        ("12 (6 for each)", "6"),
        ("Total: 3 * 4 (since 3*4=12)", "12"),
        ("Total: $3 × 4 dollars (as 3 × 4 = 12)", "12"),
        ("It is x - 3 (because 10 - 3 = 7)", "7"),
        ("The answer is 2 + 2, since 2 + 2 = 4", "4"),
        ("The answer is -7 (since -7 + 8 = 1)", "-7"),
        ("It is 3/4 (as 6/8 is)", "3/4"),
        ("2 + 3 = 5 (as 5 - 3 = 2)", "5"),
    ],
)
def test_the_last_number_is_read_exactly(text: str, value: str) -> None:
    assert last_number(text) == Fraction(value)


@pytest.mark.parametrize(
    "text", ["", "none", "5/0", "9" * 5000, "\u0663", "-", "$", "2√3", "√(3)", "9⁹⁹⁹⁹", "1e999⁹", "0⁻¹"]
)
def test_what_is_no_number_is_none(text: str) -> None:
    assert last_number(text) is None


def test_final_number_reads_the_answer_behind_the_hashes() -> None:
    answer = "48+24 = <<48+24=72>>72 clips, 3 left.\n#### 72"
    assert score("final_number", answer, "The answer is 72.", "72.0", "72, or 71", "144/2", "") == [1, 1, 0, 1, 0]
    assert score("final_number", "it is 3", "3") == [1]
    with pytest.raises(RewardError, match="'train:7'"):
        score("final_number", "3 are left.\n#### none", "3")


LATEX = (
    *(r"\frac{1}{2}", r"\frac12", r"- \frac{35}{9}", r"3 \frac{1}{2}", r"3\sqrt{13}", r"70 \sqrt{2}", r"2\pi", "e^2"),
    *("p - q", "2k+2", "y = 2x + 3", "x=5", "6 - 5i", "3R^2", "2*x+1", "sqrt(2)", "5!", "2^{10}", r"\log_2 3", "3:2"),
    *(
        *(r"\left( 3, \frac{\pi}{2} \right)", "[0,1)", r"(-\infty,3]", r"x \in [-2,7]", "x<5", r"\{1,2,3\}", "1,2,3"),
        "-2,1",
    ),
    *(r"1\pm\sqrt{19}", r"3 \times 10^8", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"90^\circ", r"\text{(C)}", "25_8"),
    *(r"5.4 \text{ cents}", r"10\%", r"\$18.90", "58,500", "5 cm", "120 degrees", "-5", "\u22125", "+5", "7th", "yes"),
)


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
    with pytest.raises(RewardError, match=r"^raised ZeroDivisionError: mine$"):
        score(f"{user_module}:broken", "a", "x")


TRL = """
def columns(prompts, completions, answer, level, **kwargs):
    assert (prompts, answer, level) == (["1+1?"] * 2, ["2"] * 2, [3] * 2)
    assert kwargs == {"completion_ids": [[1], [1]], "tags": [["a"]] * 2}
    return [None if text == "?" else float(text == wanted) for text, wanted in zip(completions, answer)]
def named(completions, solution):
    return [float(text == wanted) for text, wanted in zip(completions, solution, strict=True)]
async def later(*, prompts, completions, completion_ids, level=None):
    return [float(level[0] + len(ids)) for ids in completion_ids]
def chat(completions, prompts, **kwargs):
    assert prompts[0] == [{"role": "user", "content": "1+1?"}]
    return [float(message["content"] == "2") for (message,) in completions]
def lost(prompts, completions, answer, color, **kwargs):
    return [1.0 for _ in completions]
def logs(prompts, completions, log_metric):
    return [1.0 for _ in completions]
class Judge:
    def __call__(self, prompts, completions, **kwargs):
        return [float(text == "2") for text in completions]
judge = Judge()
def ours(prompts, completions, texts):
    return [float(text == prompts.answer) for text in texts]
"""


def test_functions_of_trl_are_called_in_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As TRL's GRPOTrainer does: keywords, and lists of one value for each completion."""
    (tmp_path / "trl_rewards_for_test.py").write_text(TRL)
    monkeypatch.syspath_prepend(str(tmp_path))
    row = {"level": 3, "tags": ["a"]}
    texts = Prompt(id="p", text="<user>1+1?", question="1+1?", token_ids=(1,), answer="2", meta=row)
    messages = replace(texts, question='[{"role": "user", "content": "1+1?"}]')

    def called(name: str, prompt: Prompt = texts) -> Sequence[RewardResult]:
        return asyncio.run(resolve_reward(f"trl_rewards_for_test:{name}")(prompt, [completion((1,))] * 2, ["2", "?"]))

    right, abstaining = called("columns")
    assert (right.total, abstaining.abstains) == (1.0, True)
    other = replace(texts, meta={"answer": "of another column"})
    for name, prompt in (("named", texts), ("named", other), ("chat", messages), ("judge", texts), ("ours", texts)):
        assert [one.total for one in called(name, prompt)] == [1.0, 0.0], name
    assert [one.total for one in called("later")] == [4.0, 4.0]
    for name, parameter in (("lost", "color"), ("logs", "log_metric")):
        with pytest.raises(
            RewardError, match=f"its parameters {parameter} are not fields of the row, which has answer, level"
        ):
            called(name)


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
        ("./rewards/mine.py:f", "write mine:f; the folder of the file must be this one, or on PYTHONPATH"),
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


# The format and length rewards, and the section that configures them.
RATE = "algorithm.kl.reference_update_rate"
PROMPT = Prompt(id="train:7", text="q", token_ids=(1,), answer="4")


def scores_of(section: RewardSection, texts: Sequence[str], lengths: Sequence[int] = ()) -> list[float]:
    completions = [completion((1,) * n) for n in lengths or [1] * len(texts)]
    return [one.total for one in asyncio.run(resolve_reward(section)(PROMPT, completions, texts))]


def test_the_whole_completion_must_match_the_format() -> None:
    section = RewardSection(function="format", format={"pattern": r"<a>.*</a>"})
    assert scores_of(section, ["<a>4</a>", "so <a>4</a>", "<a>4</a>\n", "<a>\n</a>", ""]) == [1, 0, 0, 0, 0]
    over_lines = RewardSection(function="format", format={"pattern": r"(?s)<a>.*</a>\s*"})
    assert scores_of(over_lines, ["<a>\n</a>\n", "x<a></a>"]) == [1, 0]


def test_the_length_preference_is_one_inside_and_none_outside() -> None:
    section = RewardSection(function="length", length={"min_tokens": 4, "max_tokens": 6})
    assert scores_of(section, [""] * 6, [0, 3, 4, 6, 7, 99]) == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    assert scores_of(RewardSection(function="length", length={"max_tokens": 6}), [""] * 3, [0, 6, 7]) == [1, 1, 0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("format", r"format needs reward\.format\.pattern"),
        ("length", r"set reward\.length\.max_tokens or reward\.length\.min_tokens"),
        ("lengths", r"reward\.function='lengths' is unknown; did you mean 'length'\? allowed: exact_match, "),
    ],
)
def test_a_function_without_its_options_says_which(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_reward(name)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reward.format.pattern=a(b"], r"reward\.format\.pattern='a\(b': not a regular expression"),
        (["reward.length.min_tokens=5", "reward.length.max_tokens=4"], "min_tokens=5 with .*max_tokens=4: no length i"),
        (["reward.function=length", "reward.parts.format=1"], "are both given"),
        (["reward.parts.format=0", "reward.parts.length=0.0"], "weights of format, length are all 0, and no KL"),
        *(
            (
                ["reward.parts.exact_match=0", *keys],
                r"are all 0, and the policy is its own reference.*set algorithm\.kl\.reference to a teacher",
            )
            for keys in (["algorithm=gkd"], ["algorithm=distill"], ["algorithm=gkd", f"{RATE}=0.05"])
        ),
        (["reward.parts.Format=1"], r"reward\.parts\.Format.*text that matches"),
        (["reward.parts.format.weights=1"], r"reward\.parts\.format\.weights=1: no such key.*weight"),
        (["reward.parts.format=yes"], r"reward\.parts\.format='yes': a section, not one value"),
        (["reward.parts.format=.nan"], r"reward\.parts\.format\.weight=\.nan: must be a finite number"),
    ],
)
def test_what_cannot_run_is_refused_with_its_key(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("tiny_cpu", overrides)


def test_parts_are_written_short_or_long_on_the_command_line() -> None:
    section = load_config(
        "tiny_cpu",
        ["reward.parts.final_number=1", "reward.parts.style.function=format", "reward.parts.style.weight=-2"],
    ).reward
    assert section.functions == {"final_number": "final_number", "style": "format"}
    assert [part.weight for part in section.parts.values()] == [1, -2]
    assert RewardSection().functions == {"exact_match": "exact_match"}
    assert RewardSection.model_validate(section.model_dump(mode="json")) == section
    with pytest.raises(ValidationError):
        RewardSection(parts={"style": True})


# Weighted sums of rewards: their values, their faults, and their way into a step's metrics.
DONE = completion((1, 2))
PROMPTS = [Prompt(id=f"p{i}", text="", token_ids=(i,), answer=str(i)) for i in range(3)]


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("parts_for_test")

    async def never(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[float]:
        await asyncio.Event().wait()
        return []

    module.never = never
    module.order = lambda prompt, completions, texts: [float(i) for i, _ in enumerate(texts)]
    module.short = lambda prompt, completions, texts: [1.0]
    module.broken = lambda prompt, completions, texts: 1 / 0
    module.gaps = lambda prompt, completions, texts: [math.inf if prompt.id == "p1" and i == 0 else 2.0 for i in (0, 1)]
    monkeypatch.setitem(__import__("sys").modules, "parts_for_test", module)
    return module


def parts(**given: tuple[str, float]) -> RewardSection:
    return RewardSection(parts={name: {"function": f, "weight": w} for name, (f, w) in given.items()})


def parts_of(section: RewardSection, *texts: str) -> Sequence[RewardResult]:
    return asyncio.run(resolve_reward(section)(PROMPTS[1], [DONE] * len(texts), texts))


def test_the_sum_is_weighted_and_each_part_is_kept_unweighted(mine: types.ModuleType) -> None:
    section = parts(right=("exact_match", 2.0), late=("parts_for_test:order", -0.5), seen=("exact_match", 0.0))
    assert parts_of(section, "1", "x", "1") == [
        RewardResult(total=2.0, parts={"right": 1, "late": 0, "seen": 1}),
        RewardResult(total=-0.5, parts={"right": 0, "late": 1, "seen": 0}),
        RewardResult(total=1.0, parts={"right": 1, "late": 2, "seen": 1}),
    ]


@pytest.mark.parametrize(
    ("function", "message"),
    [("broken", "part 'bad' raised ZeroDivisionError"), ("short", "part 'bad' returned 1 rewards for 2 completions")],
)
def test_a_failed_part_is_named_and_no_other_waited_for(mine: types.ModuleType, function: str, message: str) -> None:
    section = parts(stuck=("parts_for_test:never", 1.0), bad=(f"parts_for_test:{function}", 1.0))
    with pytest.raises(RewardError, match=message):
        parts_of(section, "1", "2")


def test_a_part_counts_only_where_those_it_names_are_enough(mine: types.ModuleType) -> None:
    """By what their functions gave: also where these count for nothing themselves."""
    gated = {"function": "parts_for_test:order", "when": {"right": 1.0}}
    chained = {"function": "exact_match", "when": {"right": 0.5, "late": 1.5}}
    weighed = {"right": {"function": "exact_match", "weight": 2.0}, "late": gated, "chained": chained}
    found = parts_of(RewardSection.model_validate({"parts": weighed}), "1", "x", "1", "1")
    assert [one.parts for one in found] == [
        {"right": 1, "late": 0, "chained": 0},
        {"right": 0, "late": 0, "chained": 0},
        {"right": 1, "late": 2, "chained": 1},
        {"right": 1, "late": 3, "chained": 1},
    ]
    assert [one.total for one in found] == [2.0, 0.0, 5.0, 6.0]
    gaps = {"function": "parts_for_test:gaps", "when": {"right": 1.0}}
    unfinished, wrong = parts_of(
        RewardSection.model_validate({"parts": {"right": {"function": "exact_match"}, "gaps": gaps}}), "x", "x"
    )
    assert math.isnan(unfinished.total)  # infinite, and 0 for no bound
    assert wrong.total == 0.0


def test_a_part_that_abstains_is_left_out_of_the_sum(mine: types.ModuleType) -> None:
    mine.some = lambda prompt, completions, texts: [None if text == "?" else 2.0 for text in texts]
    section = parts(right=("exact_match", 1.0), some=("parts_for_test:some", 0.5))
    judged, abstaining = parts_of(section, "1", "?")
    assert judged == RewardResult(total=2.0, parts={"right": 1, "some": 2})
    assert abstaining == RewardResult(total=0.0, parts={"right": 0})
    gate = {"some": {"function": "parts_for_test:some"}, "right": {"function": "exact_match", "when": {"some": 1.0}}}
    assert [one.total for one in parts_of(RewardSection.model_validate({"parts": gate}), "1", "?")] == [3.0, 0.0]
    alone = parts(seen=("exact_match", 0.0), some=("parts_for_test:some", 0.5))
    unpaid = parts(seen=("exact_match", 0.0), some=("parts_for_test:some", 0.0))  # as where a teacher alone teaches
    assert [one.total for one in parts_of(unpaid, "1", "?")] == [0.0, 0.0]
    with pytest.raises(RewardError, match="completion 1 got no reward: the function, or every part, abstains"):
        asyncio.run(sampler(alone, lambda t: "1" if t[0] < 99 else "?").groups(drawn(PROMPTS)))
    batch = RolloutBatch.from_results(
        asyncio.run(sampler(section, lambda t: str(t[0]) if t[0] < 99 else "?").groups(drawn(PROMPTS)))
    )
    assert batch.part_means() == {"reward/part/right": 0.5, "reward/part/some": 2.0}
    assert batch.part_counts == {"right": 6, "some": 3}


@pytest.mark.parametrize("other", ["late", "length"])
def test_a_bound_on_no_other_part_is_refused(other: str) -> None:
    with pytest.raises(ValueError, match=rf"parts\.late\.when\.{other}: '{other}' is not another part; the others are"):
        RewardSection.model_validate({"parts": {"right": 1.0, "late": {"when": {other: 1.0}}}})


def test_infinities_and_unknown_parts(mine: types.ModuleType) -> None:
    for first, second in ((math.inf, -math.inf), (math.nan, 1.0), (1.7e308, 1.7e308)):
        mine.first, mine.second = (lambda *_, x=first: [x]), (lambda *_, x=second: [x])
        (one,) = parts_of(parts(a=("parts_for_test:first", 1.0), b=("parts_for_test:second", 1.0)), "")
        assert not math.isfinite(one.total)
    with pytest.raises(ConfigError, match=r"reward\.parts\.exact\.function='exact' is unknown; did you mean"):
        resolve_reward(RewardSection(parts={"exact": 1.0}))
    with pytest.raises(ConfigError, match=r"reward\.parts\.mine\.function='nowhere_at_all:f': no module"):
        resolve_reward(parts(mine=("nowhere_at_all:f", 1.0)))


class Engine:
    """Answers each request with its prompt's number, then with x."""

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        return [completion((token,)) for token in (request.token_ids[0], 99)[: request.num_completions]]


def sampler(section: RewardSection, decode: Callable[[Sequence[int]], str] = lambda t: str(t[0])) -> RolloutSampler:
    return RolloutSampler(
        engine=Engine(),
        reward_function=resolve_reward(section),
        decode=decode,
        rollout=RolloutSection(group_size=2),
        reward=section,
        stop_token_ids=(),
        seed=0,
    )


def test_part_means_are_over_the_scored_completions(mine: types.ModuleType) -> None:
    section = parts(right=("exact_match", 2.0), order=("parts_for_test:order", 1.0))
    batch = RolloutBatch.from_results(asyncio.run(sampler(section).groups(drawn(PROMPTS))))
    assert [group.rewards for group in batch.groups] == [(2.0, 1.0)] * 3
    assert batch.part_means() == {"reward/part/right": 0.5, "reward/part/order": 0.5}
    assert batch.reward_sum / batch.num_completions == 2 * 0.5 + 0.5


@pytest.mark.parametrize(("on_error", "count", "right"), [(-1.0, 5, 2.0), ("drop", 4, 2.0)])
def test_empty_completions_count_not(mine: types.ModuleType, on_error: str | float, count: int, right: float) -> None:
    section = parts(right=("exact_match", 1.0), gaps=("parts_for_test:gaps", 1.0))
    with pytest.raises(RewardError, match=r"'exact_match, parts_for_test:gaps' of prompt 'p1'.*0 got nan.*\(gaps: inf"):
        asyncio.run(sampler(section).groups(drawn(PROMPTS)))
    ours = sampler(section.model_copy(update={"on_error": on_error}))
    batch = RolloutBatch.from_results(asyncio.run(ours.groups(drawn(PROMPTS))))
    assert batch.reward_errors == 1
    assert set(batch.part_counts.values()) == {count}
    assert batch.part_means() == {"reward/part/right": right / count, "reward/part/gaps": 2.0}


def test_a_batch_counts_what_was_scored_of_groups_that_are_left_out() -> None:
    group = cast(Any, SimpleNamespace(trajectories=[SimpleNamespace(num_sampled=n) for n in (3, 4)], greedy=None))
    kept = GroupResult(group=group, rewards=(0.1, 0.2), scored=(RewardResult(total=0.1, parts={"a": -1.0}),) * 2)
    equal = replace(kept, group=None, reason="equal_rewards", left_out_tokens=5)
    failed = GroupResult(group=None, reason="reward_error", scored=(RewardResult(total=math.nan, error="why"),) * 2)
    batch = RolloutBatch.from_results([kept, equal, failed, kept])
    assert (batch.groups, batch.filtered_groups, batch.dropped_groups) == ((group, group), 1, 1)
    assert (batch.num_completions, batch.reward_sum, batch.reward_errors) == (6, 0.9, 2)
    assert batch.num_tokens == 2 * (3 + 4) + 5
    assert batch.part_means() == {"reward/part/a": -1.0}
    assert RolloutBatch().part_means() == {}


def test_a_sampled_completion_has_the_parts_of_its_sources_reward_if_that_worked(mine: types.ModuleType) -> None:
    run = parts(right=("exact_match", 2.0), gaps=("parts_for_test:gaps", -0.5))
    run, own = run.model_copy(update={"on_error": 0.0}), parts(order=("parts_for_test:order", 1.0))
    rewards = resolve_rewards(run, {"other": own})
    ours = replace(sampler(run), reward_function=rewards, source_rewards={"other": own})
    groups = RolloutBatch.from_results(
        asyncio.run(ours.groups(drawn([*PROMPTS[:2], replace(PROMPTS[2], source="other")])))
    ).groups
    assert [[one.parts for one in group.trajectories] for group in groups] == [
        [{"right": (1.0, 2.0), "gaps": (2.0, -0.5)}, {"right": (0.0, 2.0), "gaps": (2.0, -0.5)}],
        [{}, {"right": (0.0, 2.0), "gaps": (2.0, -0.5)}],
        [{"order": (0.0, 1.0)}, {"order": (1.0, 1.0)}],
    ]


def test_a_reward_without_parts_has_none() -> None:
    batch = RolloutBatch.from_results(asyncio.run(sampler(RewardSection()).groups(drawn(PROMPTS))))
    assert (batch.part_sums, batch.part_counts) == ({}, {})
