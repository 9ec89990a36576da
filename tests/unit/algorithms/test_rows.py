"""The tables of docs/algorithms.md are the rows a reader copies: each must build, and name only keys that exist."""

from __future__ import annotations

import functools
import re
import shutil
import tempfile
from pathlib import Path
from typing import get_args

import pytest
import yaml

from rl_megatron.algorithms import corrections
from rl_megatron.algorithms.advantages import LEVELS
from rl_megatron.algorithms.aggregation import AGGREGATIONS
from rl_megatron.algorithms.kl import ESTIMATORS
from rl_megatron.algorithms.objectives import OBJECTIVES
from rl_megatron.algorithms.ratios import RATIO_LEVELS
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.algorithm import AlgorithmSection, CorrectionSection, KLSection
from rl_megatron.errors import ConfigError
from tests.rows import BESIDE, NAMES, WITH_TURNS, config_of

ROOT = Path(__file__).parents[3]


def documented_rows() -> dict[str, dict[str, object]]:
    rows = {}
    for line in (ROOT / "docs" / "algorithms.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 6 and "=" in cells[4]:
            pairs = re.fullmatch(r"`(.*)`", cells[4])
            assert pairs, line
            rows[cells[0]] = {k: yaml.safe_load(_number(v)) for k, v in (p.split("=") for p in pairs[1].split())}
    return rows


def _number(text: str) -> str:
    """YAML 1.1 reads 3e-4 as a string."""
    return str(float(text)) if re.fullmatch(r"[0-9.]+e-?[0-9]+", text) else text


@pytest.mark.parametrize("name", NAMES)
def test_the_shipped_configuration_is_the_documented_row_and_builds(name: str) -> None:
    keys = [f"{of_section(key)}={value}" for key, value in documented_rows()[name].items()]
    base = "calculator" if name in WITH_TURNS else "tiny_cpu"
    by_keys = load_config(base, ["algorithm=default_row", *BESIDE.get(name, ()), *keys], conf_with_an_empty_row())
    assert by_keys == config_of(name)


def of_section(key: str) -> str:
    return key if key.partition(".")[0] in RunConfig.model_fields else f"algorithm.{key}"


@functools.cache
def conf_with_an_empty_row() -> Path:
    """A copy of conf/ in which ``algorithm=default_row`` is the schema's defaults."""
    copy = Path(tempfile.mkdtemp()) / "conf"
    shutil.copytree(ROOT / "conf", copy)
    (copy / "algorithm" / "default_row.yaml").write_text("{}\n")
    return copy


def test_every_row_of_the_page_ships() -> None:
    assert sorted(documented_rows()) == NAMES


def test_the_limits_of_the_papers_are_in_the_rows() -> None:
    """A token ratio's 0.2 in a GSPO recipe is a thousand times too wide."""
    rows = documented_rows()
    assert (rows["gspo"]["clip_low"], rows["gspo"]["clip_high"]) == (3e-4, 4e-4)
    assert rows["dapo"]["clip_high"] == 0.28


def test_a_sequence_ratio_makes_grpo_gspo() -> None:
    clips = ["algorithm.clip_low=3e-4", "algorithm.clip_high=4e-4"]
    changed = load_config("tiny_cpu", ["algorithm=grpo", "algorithm.ratio_level=sequence", *clips])
    assert changed.algorithm == load_config("tiny_cpu", ["algorithm=gspo"]).algorithm


def test_the_names_that_the_schema_allows_are_those_of_the_tables() -> None:
    fields = {
        (AlgorithmSection, "ratio_level"): set(RATIO_LEVELS),
        (AlgorithmSection, "aggregation"): set(AGGREGATIONS),
        (AlgorithmSection, "advantage_std"): set(LEVELS) | {"advantages"},
        (CorrectionSection, "mode"): set(corrections.MODES) | {"none"},
        (CorrectionSection, "level"): set(corrections.LEVELS) | {"worst"},
        (KLSection, "estimator"): set(ESTIMATORS),
    }
    for (section, name), names in fields.items():
        assert set(get_args(section.model_fields[name].annotation)) == names
    or_own = {"objective": set(OBJECTIVES), "advantage_mean": set(LEVELS) | {"greedy", "moving", "tracked"}}
    for name, names in or_own.items():
        known, _ = get_args(AlgorithmSection.model_fields[name].annotation)
        assert set(get_args(known)) == names


@pytest.mark.parametrize(
    "keys", [["objective=reinforce", "ratio_level=sequence"], ["ratio_level=sequence", "aggregation=token_mean"]]
)
def test_an_unsound_row_is_refused_with_its_reason(keys: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.(objective|aggregation)="):
        load_config("tiny_cpu", ["algorithm=grpo", *(f"algorithm.{key}" for key in keys)])


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["advantage_mean=moving"], "advantage_mean=moving: that baseline is the reward of a whole completion"),
        (["advantage_mean=greedy", "advantage_std=none"], "advantage_mean=greedy: that baseline is the reward of a"),
        (["turn_baseline=index", "advantage_std=batch"], "turns of one number are compared within their group"),
        (["turn_baseline=index", "advantage_std=advantages"], "turns of one number are compared within their group"),
        (["turn_baseline=state", "advantage_std=batch", "turn_compared=returns"], "from one state are compared"),
        (["turn_baseline=state"], r"turn_compared=rewards, gamma_turn=1: .* set turn_compared=returns, or g"),
        (["turn_compared=returns", "gamma_turn=0"], "turn_compared=returns does nothing.* is its own reward"),
        (["turn_compared=returns", "advantage_mean=none", "advantage_std=none"], "turns are not compared"),
        (["advantage_mean=batch", "advantage_std=advantages"], "leaves the std of its rewards as it is"),
        (
            ["advantage_std=none", "std_unbiased=false"],
            r"advantage_std=none does not read it.*=group or batch or advantages",
        ),
        (["normalise_rewards=group"], "normalise_rewards=group: it changes the sum.* or set credit=completion"),
        (["kl.coefficient=0.1", "kl.placement=completion_reward"], "the reward of the last; set kl.placement=loss"),
        (["kl.coefficient=0.1", "kl.placement=token_reward"], "the reward of the last; set kl.placement=loss"),
        (["turn_baseline=index", "advantage_mean=none", "advantage_std=none"], "turns are not compared"),
        (["ratio_level=turn"], r"long sequence.*ratio_level=turn; set aggregation=seq_mean_token_mean"),
    ],
)
def test_what_credit_over_turns_cannot_be_beside_is_refused(keys: list[str], reason: str) -> None:
    given = [*(f"algorithm.{key}" for key in keys), "algorithm.credit=turn"]
    with pytest.raises(ConfigError, match=reason):
        load_config("tiny_cpu", ["algorithm=dapo", *given])


@pytest.mark.parametrize(
    ("row", "key", "same"), [("grpo", "credit", "completion"), ("gspo", "ratio_level", "sequence")]
)
def test_turns_without_an_environment_are_refused(row: str, key: str, same: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.{key}=turn: .* a completion is one turn.*{key}={same}; set"):
        load_config("tiny_cpu", [f"algorithm={row}", f"algorithm.{key}=turn"])
    load_config("calculator", [f"algorithm={row}", f"algorithm.{key}=turn"])


def test_keys_of_turns_without_credit_over_turns_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"gamma_turn=0\.5 does nothing.*algorithm\.credit=turn does"):
        load_config("tiny_cpu", ["algorithm.gamma_turn=0.5"])


def test_steps_of_a_completion_have_no_states() -> None:
    """Nothing is read between them, also where another source has an environment."""
    mixed = ["warm_start.steps=0", "data=mixture", "data.sources.played.environment.function=guess"]
    mixed += [f"data.sources.{name}.type=arithmetic" for name in ("judged", "played")]
    for of, beside in (("reward", []), ("data.sources.judged.reward", mixed)):
        keys = ["algorithm=gigpo", f"{of}.steps=true", f"{of}.function=tests.toy_roles:grade_steps", *beside]
        with pytest.raises(ConfigError, match=r"turn_baseline=state with reward\.steps=true: a step begins where the"):
            load_config("tiny_cpu", keys)
        load_config("tiny_cpu", [*keys, "algorithm.turn_baseline=index"])


def test_a_range_of_the_batch_acts_without_a_std_and_not_under_its_own() -> None:
    """Centring and a std of the same batch undo it."""
    range_of_batch = "algorithm.normalise_rewards=batch"
    load_config("tiny_cpu", ["algorithm=reinforce", range_of_batch, "algorithm.advantage_mean=none"])
    with pytest.raises(ConfigError, match=r"normalise_rewards=batch.*centring and division, undoes it"):
        load_config("tiny_cpu", ["algorithm=liteppo", range_of_batch, "algorithm.advantage_mean=batch"])
