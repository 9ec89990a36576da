"""The format and length rewards, and the section that configures them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from pydantic import ValidationError

from rl_megatron.config.io import load_config
from rl_megatron.config.sections.reward import RewardSection
from rl_megatron.errors import ConfigError
from rl_megatron.rewards.registry import resolve_reward
from rl_megatron.types import Prompt
from tests.completions import completion

PROMPT = Prompt(id="train:7", text="q", token_ids=(1,), answer="4")


def score(section: RewardSection, texts: Sequence[str], lengths: Sequence[int] = ()) -> list[float]:
    completions = [completion((1,) * n) for n in lengths or [1] * len(texts)]
    return [one.total for one in asyncio.run(resolve_reward(section)(PROMPT, completions, texts))]


def test_the_whole_completion_must_match_the_format() -> None:
    section = RewardSection(function="format", format={"pattern": r"<a>.*</a>"})
    assert score(section, ["<a>4</a>", "so <a>4</a>", "<a>4</a>\n", "<a>\n</a>", ""]) == [1, 0, 0, 0, 0]
    over_lines = RewardSection(function="format", format={"pattern": r"(?s)<a>.*</a>\s*"})
    assert score(over_lines, ["<a>\n</a>\n", "x<a></a>"]) == [1, 0]


def test_the_length_preference_is_flat_inside_and_linear_outside() -> None:
    section = RewardSection(function="length", length={"min_tokens": 4, "max_tokens": 6, "falloff_tokens": 4})
    lengths = [0, 1, 3, 4, 6, 7, 9, 10, 99]
    assert score(section, [""] * 9, lengths) == [0.0, 0.25, 0.75, 1.0, 1.0, 0.75, 0.25, 0.0, 0.0]
    hard = RewardSection(function="length", length={"max_tokens": 6})
    assert score(hard, [""] * 3, [0, 6, 7]) == [1, 1, 0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("format", r"format needs reward\.format\.pattern"),
        ("length", r"set reward\.length\.max_tokens or reward\.length\.min_tokens"),
        ("lengths", r"reward\.function='lengths' is unknown; did you mean 'length'\?"),
    ],
)
def test_a_function_without_its_options_says_which(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_reward(name)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reward.format.pattern=a(b"], r"reward\.format\.pattern='a\(b': not a regular expression"),
        (["reward.length.min_tokens=5", "reward.length.max_tokens=4"], "min_tokens=5 is more than"),
        (["reward.function=length", "reward.parts.format=1"], "are both given"),
        (["reward.parts.format=0", "reward.parts.length=0.0"], "weights of format, length are all 0, and no KL"),
        *(
            (
                ["reward.parts.exact_match=0", *keys],
                r"are all 0, and the policy is compared with itself.*set algorithm\.kl\.reference to a teacher",
            )
            for keys in (["algorithm=gkd"], ["algorithm=distill"], ["algorithm=gkd", "algorithm.kl.follow_rate=0.05"])
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
