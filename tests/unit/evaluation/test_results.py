"""Which files of results are of the same problems."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.build.data import problem_sets
from rl_megatron.config.io import load_config
from rl_megatron.config.sections.data import FileData
from rl_megatron.config.sections.eval import EvalSetSection
from rl_megatron.data.problems.prompts import load_prompts
from rl_megatron.data.problems.rendering import RowForm
from rl_megatron.errors import DataError
from rl_megatron.evaluation.results import (
    Results,
    SetResult,
    differing_sampling_keys,
    eval_digest,
    finished_sets,
    make_result,
    paired_figures,
    read_results,
    unfinished,
)
from rl_megatron.evaluation.sets import EvalSet, EvalSetSamples
from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.types import Prompt

ROW = {"question": "1+1?", "answer": "2"}


def result(folder: Path, row: dict[str, str], template: str) -> SetResult:
    """Of a model whose chat template this is."""
    for name in ("train", "eval"):
        (folder / f"{name}.jsonl").write_text(json.dumps(row if name == "eval" else {"question": "x", "answer": "y"}))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    data = FileData(type="files", train=folder / "train.jsonl", eval=folder / "eval.jsonl", chat_template=True)
    _, prompts = load_prompts(data, RowForm(tokenizer=tokenizer, max_tokens=50, on_long_prompt="fail"), seed=0)
    measured = EvalSetSamples(
        problems=tuple(one.id for one in prompts),
        samples=1,
        right=(1,),
        votes=None,
        errors=0,
        length=1.0,
        truncated=0.0,
        seconds=0.0,
    )
    return make_result(EvalSet(name="one", prompts=prompts, section=EvalSetSection(), temperature=0.0), measured)


def compared(folder: Path, *sets: SetResult) -> int:
    """The figures that both have, by files."""
    read = []
    for one in sets:
        Results(model="", weights="", engine="", config={}, sets={"one": one}).write(folder / "one.json", private=False)
        read.append(read_results(folder / "one.json"))
    return len(paired_figures(*read))


def test_problems_are_told_by_what_the_data_say_not_by_tokens(tmp_path: Path) -> None:
    first = result(tmp_path, ROW, "<a>{{ messages[0].content }}")
    second = result(tmp_path, ROW, "<other>{{ messages[0].content }}")
    assert first.digest != second.digest
    assert compared(tmp_path, first, second) == 1
    for row in ({**ROW, "question": "1+2?"}, {**ROW, "answer": "3"}):
        with pytest.raises(DataError, match=r"different problems \(1 and 1\), so nothing .* evaluate both on one$"):
            compared(tmp_path, first, result(tmp_path, row, "<a>{{ messages[0].content }}"))
    tested = [result(tmp_path, {**ROW, "tests": said}, "{{ messages[0].content }}") for said in "aab"]
    assert compared(tmp_path, *tested[:2]) == 1
    with pytest.raises(DataError, match=r"set one: the two have the same questions .* other fields .* evaluate both"):
        compared(tmp_path, *tested[1:])


def evaluated(folder: Path, *keys: str) -> Results:
    """Its file of one set, with these keys."""
    config = load_config("tiny_cpu", ["eval.sets.one.samples=1", *keys])
    section = {**config.eval.sets["one"].model_dump(mode="json"), "temperature": config.eval.set_temperature("one")}
    one = replace(result(folder, ROW, "{{ messages[0].content }}"), section=section)
    found = Results(
        model="", weights="", engine=config.rollout.engine, config=config.model_dump(mode="json"), sets={"one": one}
    )
    found.write(folder / "one.json", private=False)
    return read_results(folder / "one.json")


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("eval.success_reward=0", r"eval.success_reward \(1.0 and 0.0\)"),
        ("reward.function=length", r"reward.function \(exact_match and length\)"),
        ("eval.sets.one.reward.function=length", r"reward.function \(exact_match and length\)"),
        ("environment.function=calculator", r"environment.function \(None and calculator\)"),
    ],
)
def test_samples_that_were_judged_otherwise_are_not_compared(tmp_path: Path, key: str, said: str) -> None:
    plain = ["environment.template=plain"] if key.startswith("environment") else []
    first, second = evaluated(tmp_path), evaluated(tmp_path, key, *plain)
    with pytest.raises(DataError, match=f"set one: the two evaluations have .*{said}.* with the same keys"):
        paired_figures(first, second)


RANKS = ("reward.function=ranks:judge", "reward_models.judge.path=a")
TESTS = ("reward.parts.tests=1",)


@pytest.mark.parametrize(
    ("keys", "other", "said"),
    [
        (RANKS, "reward_models.judge.path=b", r"reward_models.judge.path \(a and b\)"),
        (TESTS, "sandbox.seconds=30", r"sandbox.seconds \(10.0 and 30.0\)"),
        (TESTS, "reward.parts.tests=2", r"reward.parts.tests.weight \(1.0 and 2.0\)"),
    ],
)
def test_keys_that_a_reward_names_judge_too(tmp_path: Path, keys: tuple[str, ...], other: str, said: str) -> None:
    first, second = evaluated(tmp_path, *keys), evaluated(tmp_path, *keys, other)
    with pytest.raises(DataError, match=f"set one: the two evaluations have other rewards, by {said}, so "):
        paired_figures(first, second)


def test_of_judges_that_differ_their_own_sections_are_not_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"by reward.function \(ranks:judge and exact_match\), so "):
        paired_figures(evaluated(tmp_path, *RANKS), evaluated(tmp_path))


@pytest.mark.parametrize(
    ("keys", "free"),
    [
        (TESTS, "sandbox.allow_unfenced=true"),
        ((*TESTS, "eval.sets.one.reward.function=length"), "sandbox.seconds=30"),
        ((*RANKS, "eval.sets.one.reward.function=length"), "reward_models.judge.path=b"),
    ],
)
def test_keys_of_other_sections_that_judge_nothing_may_differ(tmp_path: Path, keys: tuple[str, ...], free: str) -> None:
    assert len(paired_figures(evaluated(tmp_path, *keys), evaluated(tmp_path, *keys, free))) == 1


def test_what_judges_no_sample_may_differ_and_how_samples_were_drawn_is_told(tmp_path: Path) -> None:
    first, alike = (
        evaluated(tmp_path),
        evaluated(tmp_path, "reward.timeout_seconds=9", "reward.on_error=drop", "seed=9"),
    )
    other = evaluated(tmp_path, "eval.sets.one.temperature=0.5", "rollout.max_new_tokens=9", "rollout.ignore_eos=true")
    older = replace(first, config={"reward": {"function": "exact_match"}})
    assert all(len(paired_figures(first, each)) == 1 for each in (alike, other, older))
    assert not differing_sampling_keys(first, alike)
    tokens = first.config["rollout"]["max_new_tokens"]
    drawn = ["temperature (0.0 and 0.5)", f"max_new_tokens ({tokens} and 9)", "rollout.ignore_eos (False and True)"]
    assert differing_sampling_keys(first, other) == {"one": drawn}
    served = ("rollout=vllm", "learner.device=cuda", "learner.dtype=bfloat16", "weights.transport=file")
    quantized = [evaluated(tmp_path, *served, f"rollout.server.quantization={one}") for one in ("none", "fp8")]
    assert differing_sampling_keys(*quantized) == {"one": ["rollout.server.quantization (none and fp8)"]}


def way(*keys: str, mark: str = "", tests: str = "") -> str:
    """How a run with these keys, whose template writes this mark, measures its accuracy by these tests."""
    meta = {"tests": tests} if tests else {}
    held_out = [
        Prompt(id=f"{n}", text="", token_ids=tuple(f"{mark}{n}+1".encode()), answer=f"{n + 1}", meta=meta)
        for n in (1, 2)
    ]
    config = load_config("tiny_cpu", ["eval.sets.one.limit=2", "eval.sets.one.temperature=1", *keys])
    return eval_digest(
        config.model_dump(mode="json"), problem_sets(config, held_out, lambda data, **_: held_out[::-1])[0]
    )


OTHER_WAYS = pytest.mark.parametrize(
    ("keys", "mark"),
    [
        *((["eval.sets.one.limit=1"], ""), (["eval.sets.one.data.type=arithmetic"], ""), ([], "<user>")),
        *((["eval.sets.one.temperature=0.5"], ""), (["eval.sets.one.top_p=0.9"], "")),
        *((["eval.sets.one.max_new_tokens=3"], ""), (["eval.sets.one.reward.function=final_number"], "")),
        (["eval.success_reward=0.5"], ""),
    ],
)


@OTHER_WAYS
def test_accuracies_are_told_by_problems_and_by_how_samples_are_drawn_and_judged(keys: list[str], mark: str) -> None:
    assert way(*keys, mark=mark) != way()
    assert way(*keys, mark=mark, tests="a") != way(*keys, mark=mark, tests="b") != way(*keys, mark=mark)


def test_neither_when_a_set_is_measured_nor_its_other_figures_tell_accuracies_apart() -> None:
    others = ("eval.every=3", "eval.sets.one.samples=8", "eval.sets.one.pass_at=1,8", "eval.sets.two.limit=1")
    assert way(*others, "reward.timeout_seconds=9", "train.steps=7") == way()


TWO = ("eval.sets.two.samples=2", "eval.sets.two.temperature=1")


def begun(
    *keys: str, mark: str = "", weights: str = "w", tests: str = "", **shown: Any
) -> tuple[Results, list[EvalSet]]:
    """An evaluation with the keys of `way`, which has measured no set yet, and its sets, whose second problem has these
    tests; ``shown``: variables of the chat template."""
    held_out = [
        Prompt(id=f"{n}", text="", token_ids=tuple(f"{mark}{n}+1".encode()), answer=f"{n + 1}", meta={"tests": said})
        for n, said in ((1, ""), (2, tests))
    ]
    config = load_config("tiny_cpu", ["eval.sets.one.limit=2", "eval.sets.one.temperature=1", *keys])
    given = config.model_dump(mode="json")
    given["model"]["template_variables"] = shown
    results = Results(model="m", weights=weights, engine=config.rollout.engine, config=given, sets={})
    return results, problem_sets(config, held_out, lambda data, **_: held_out[::-1])


def kept(folder: Path, *keys: str, errors: int = 0, **others: Any) -> list[str]:
    """The sets that such an evaluation takes from one of two sets that was stopped after both, of which the first had
    so many samples without a reward."""
    results, sets = begun(*TWO)
    measured = EvalSetSamples(
        problems=("1", "2"), samples=1, right=(1, 0), votes=None, errors=0, length=1.0, truncated=0.0, seconds=0.0
    )
    numbers = {"one": errors, "two": 0}
    found = {str(one.name): make_result(one, replace(measured, errors=numbers[str(one.name)])) for one in sets}
    replace(results, sets=found).write(unfinished(folder / "a.json"), private=False)
    return list(finished_sets(folder / "a.json", *begun(*TWO, *keys, **others)))


@OTHER_WAYS
def test_a_set_of_other_problems_draws_or_rewards_is_not_kept(tmp_path: Path, keys: list[str], mark: str) -> None:
    assert "one" not in kept(tmp_path, *keys, mark=mark)


def test_a_set_is_kept_of_the_same_weights_whatever_becomes_of_others(tmp_path: Path) -> None:
    assert kept(tmp_path) == ["one", "two"]
    assert kept(tmp_path, "eval.sets.two.samples=4", "reward.timeout_seconds=9", "train.steps=7") == ["one"]
    assert kept(tmp_path, "eval.sets.one.pass_at=1") == ["two"]
    assert not kept(tmp_path, weights="other")
    assert not kept(tmp_path, "seed=5")
    assert not kept(tmp_path, tests="other")
    assert not kept(tmp_path, enable_thinking=False)
    assert kept(tmp_path, errors=1) == ["two"]
    assert not finished_sets(tmp_path / "b.json", *begun())
