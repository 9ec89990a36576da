"""Sets of problems through the real sampler and reward, with an engine whose answers are written down."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from launcher.build.data import Data, load_data, problem_sets
from launcher.build.sampler import make_sampler
from launcher.preflight.own_code import check
from launcher.preflight.subject import PreflightContext
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.eval import EvalSection, EvalSetSection
from rl_megatron.config.sections.reward import RewardSection
from rl_megatron.config.sections.rollout import RolloutSection
from rl_megatron.data.problems.prompts import load_held_out, load_prompts
from rl_megatron.data.problems.rendering import RowForm
from rl_megatron.errors import ConfigError, RewardError
from rl_megatron.evaluation.figures import chance_interval, rate_interval, share_interval
from rl_megatron.evaluation.sets import EvalSet, measure, set_metrics
from rl_megatron.interfaces import RolloutEngine
from rl_megatron.models.tiny import TinySizes, byte_tokenizer, make_tiny_model
from rl_megatron.observability.metrics import documented
from rl_megatron.rewards.registry import resolve_reward, resolve_rewards
from rl_megatron.rollout.sampler import RolloutSampler
from rl_megatron.training.evaluation import Evaluator
from rl_megatron.types import Completion, GenerationRequest, Prompt, SamplingParams, token_limits
from tests import scripted_engine
from tests.completions import completion

ANSWERS = {  # by problem: the texts of its four samples
    "solved": ("7", "7", "7", "7"),
    "split": ("7", "7", "8", "8"),
    "mostly": ("7", "8", "7", "9"),
    "never": ("", "", "words", "9"),
}
PROMPTS = tuple(Prompt(id=name, text="", token_ids=(1,), answer="7") for name in ANSWERS)


@dataclass
class Written(RolloutEngine):
    """Answers what is written; a sample without text was cut."""

    answers: Mapping[str, Sequence[str]] = field(default_factory=lambda: ANSWERS)
    asked: list[GenerationRequest] = field(default_factory=list)

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        self.asked.append(request)
        texts = self.answers[request.id.rpartition(": ")[2]][: request.num_completions]
        return [completion([*map(ord, text or " ")], finish="stop" if text else "length") for text in texts]

    def partial_completion(self, request_id: str) -> Completion | None:
        return None

    async def collect_partials(self) -> None: ...


def sampler(engine: RolloutEngine, reward: Any = "final_number", **section: Any) -> RolloutSampler:
    return RolloutSampler(
        engine=engine,
        reward_function=resolve_reward(reward) if isinstance(reward, str) else reward,
        decode=lambda tokens: "".join(map(chr, tokens)).strip(),
        rollout=RolloutSection(max_new_tokens=5),
        reward=RewardSection(**section),
        stop_token_ids=(0,),
        seed=3,
    )


def held_out(name: str, **keys: Any) -> EvalSet:
    section = EvalSetSection(**keys)
    return EvalSet(name=name, prompts=PROMPTS, section=section, temperature=section.temperature or 0.0)


def evaluation(engine: RolloutEngine, *sets: EvalSet, **section: Any) -> Evaluator:
    return Evaluator(sampler=sampler(engine), sets=sets, section=EvalSection(**section), last_step=100)


def test_figures_are_those_counted_by_hand() -> None:
    engine = Written()
    one = held_out("math", samples=4, temperature=0.6, pass_at=(1, 2, 4))
    row = asyncio.run(evaluation(engine, one).row(0))
    assert row["eval/math/mean_at_4"] == (4 + 2 + 2 + 0) / 16 == row["eval/accuracy"] == row["eval/math/pass_at_1"]
    assert row["eval/math/pass_at_2"] == pytest.approx((1 + 5 / 6 + 5 / 6 + 0) / 4)  # of six pairs one has no right one
    assert row["eval/math/pass_at_4"] == 3 / 4
    assert row["eval/math/maj_at_4"] == (1 + 1 / 2 + 1 + 0) / 4  # an even vote counts half; 7 wins with two votes
    assert row["eval/math/truncated"] == 2 / 16
    assert row["eval/math/length"] == 20 / 16  # "words" has five, all others one
    assert row["eval/math/errors"] == 0
    assert all(documented(name) for name in row)
    found = asyncio.run(measure(sampler(engine), one, EvalSection())).metrics((1, 2, 4))
    assert found["pass@1"] == found["mean@4"] == rate_interval([4, 2, 2, 0], samples=4)
    assert found["all@2"] == chance_interval([1, 1 / 6, 1 / 6, 0], samples=4)
    assert found["pass@2"] == chance_interval([1, 5 / 6, 5 / 6, 0], samples=4)
    assert found["maj@4"] == share_interval([1, 1 / 2, 1, 0], samples=4)


def test_what_is_asked_is_what_the_set_says() -> None:
    engine = Written()
    limits = {"top_p": 0.9, "top_k": 20, "min_p": 0.05, "max_new_tokens": 64}
    sets = (held_out("first"), held_out("second", samples=2, temperature=0.7, **limits))
    asyncio.run(evaluation(engine, *sets).row(0))
    first, second = (next(one for one in engine.asked if f" {name}:" in one.id) for name in ("first", "second"))
    assert (first.params.temperature, first.num_completions, first.params.max_new_tokens) == (0.0, 1, 5)
    assert second.params == SamplingParams(temperature=0.7, stop_token_ids=(0,), seed=second.params.seed, **limits)
    assert second.num_completions == 2
    assert not any(one.exact_logprobs for one in engine.asked)
    assert len({one.params.seed for one in engine.asked}) == len(engine.asked) == 8


def test_each_sample_that_is_scored_is_told() -> None:
    told = list[int]()
    asyncio.run(measure(sampler(Written()), held_out("math", samples=4, temperature=0.6), EvalSection(), told.append))
    assert told == [4] * len(PROMPTS)


def test_limits_are_those_that_leave_tokens_out() -> None:
    every = {"top_p": 0.9, "top_k": 20, "min_p": 0.05}
    assert token_limits(EvalSetSection(temperature=1.0, **every)) == every
    params = sampler(Written()).params(temperature=1.0)
    assert token_limits(params) == {}
    assert token_limits(replace(params, top_k=1)) == {"top_k": 1}


def test_without_sets_the_row_and_the_requests_are_what_they_were() -> None:
    engine = Written()
    whole = EvalSet(name=None, prompts=PROMPTS, section=EvalSetSection(), temperature=0.0)
    assert asyncio.run(evaluation(engine, whole).row(10)) == {"eval/accuracy": 3 / 4, "eval/errors": 0}
    assert [one.id for one in engine.asked] == [f"evaluation: {name}" for name in ANSWERS]


def test_a_reward_that_reads_no_answer_has_no_majority_and_failed_ones_count_as_wrong() -> None:
    one = held_out("math", samples=4, temperature=1.0)

    async def strict(prompt: Prompt, completions: object, texts: Sequence[str]) -> list[float]:
        return [1.0 if text == "7" else float("nan") if text == "9" else 0.0 for text in texts]

    from rl_megatron.rewards.threads import Async

    measured = asyncio.run(measure(sampler(Written(), Async(strict), on_error="drop"), one, EvalSection()))
    assert measured.votes is None
    assert (measured.right, measured.errors) == ((4, 2, 2, 0), 2)


def test_a_sample_of_several_turns_is_as_long_as_all_of_them() -> None:
    task = Prompt(id="3*4", text="3*4=", token_ids=(1,), answer="12")
    script = {"3*4=": "?3*4", "3*4=?3*4:12": "!12"}
    one = EvalSet(name="products", prompts=(task,), section=EvalSetSection(samples=2), temperature=0.5)
    ours = scripted_engine.sampler(scripted_engine.Scripted(lambda text: script[text]))
    measured = asyncio.run(measure(ours, one, EvalSection()))
    assert (measured.right, measured.length, measured.truncated) == ((2,), len("?3*4") + 1 + len("!12") + 1, 0.0)
    script["3*4=?3*4:12"] = "!" * 12
    measured = asyncio.run(measure(ours, one, EvalSection()))
    assert (measured.length, measured.truncated) == (len("?3*4") + 1 + 12, 1.0)


def test_samples_without_a_turn_are_counted_beside_the_accuracy(caplog: pytest.LogCaptureFixture) -> None:
    class SaysNothing(scripted_engine.Scripted):
        async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
            (one,) = await super().generate(request)
            if "trajectory 1," not in request.id:
                return [one]
            return [replace(one, token_ids=np.array([], np.int32), logprobs=np.array([], np.float32))]

    tasks = [Prompt(id=text, text=text, token_ids=(1,), answer="12") for text in ("3*4=", "2*6=")]
    one = EvalSet(name=None, prompts=tasks, section=EvalSetSection(samples=2), temperature=0.5)
    ours = scripted_engine.sampler(SaysNothing(lambda text: "!12"))
    row = asyncio.run(Evaluator(sampler=ours, sets=(one,), section=EvalSection(), last_step=1).row(0))
    assert row == {"eval/accuracy": 3 / 4, "eval/errors": 1}
    assert "evaluation: 1 of 4 samples have no reward and count as wrong" in caplog.text
    assert "evaluation: length and truncated are of 2 of 4 samples; the other 2 are of prompts of" in caplog.text
    alone = replace(one, name="products", prompts=tasks[:1], section=EvalSetSection(samples=3))
    measured = asyncio.run(measure(ours, alone, EvalSection()))
    assert (measured.length, measured.truncated, measured.errors) == (None, None, 1)
    assert not {"eval/products/length", "eval/products/truncated"} & set_metrics("products", measured, ()).keys()


def test_each_set_is_due_at_its_own_steps() -> None:
    sets = (held_out("first"), held_out("rare", every=40), held_out("ends", every=0), held_out("often", every=7))
    ours = evaluation(Written(), *sets, every=10)
    when = {one.name: [n for n in range(101) if one in ours._due(n)] for one in sets}
    assert (when["first"], when["rare"]) == (list(range(0, 101, 10)), [0, 40, 80, 100])
    assert (when["ends"], when["often"]) == ([0, 100], [*range(0, 99, 7), 100])
    assert ours.due(7)
    assert not ours.due(8)
    row = asyncio.run(ours.row(7))
    assert "eval/accuracy" not in row
    assert "eval/often/mean_at_1" in row
    assert asyncio.run(ours.row())["eval/accuracy"] == 3 / 4  # of a warm start: the first set alone


REFUSED = {
    "eval.sets.a.pass_at=8": "eval.sets.a.pass_at=8 needs as many samples, but samples=1; raise the second",
    "eval.sets.a.samples=4": "eval.sets.a: samples=4 with temperature 0, where every sample is the most likely",
    "eval.sets.a.top_k=5": "eval.sets.a: top_k=5 with temperature 0",
    "eval.sets.a.every=5": "eval.sets.a.every=5: the first set gives eval/accuracy, which eval.every=10 times",
    "eval.sets.A.samples=1": r"must be text that matches \^\[a-z\]",
    "eval.sets.a.data.type=mixture": "no such choice; one of: run, arithmetic, files, hub",
    "eval.sets.a.pass_at=1,x": "eval.sets.a.pass_at='x': must be a valid integer",
    "eval.sets.a.min_p=2": "eval.sets.a.min_p=2",
}


@pytest.mark.parametrize("keys", [("fields.messages",), ("fields.messages", "fields.tools"), ("fields.margin",)])
def test_a_set_has_no_conversations_and_no_margins(keys: tuple[str, ...]) -> None:
    """Those have no tokens to sample from, and a set's samples are compared with no worse answer."""
    data = ["eval.sets.own.samples=1", *(f"eval.sets.a.data.{one}" for one in ("type=files", "eval=a.jsonl"))]
    with pytest.raises(ConfigError) as refused:
        load_config("tiny_cpu", [*data, *(f"eval.sets.a.data.{key}=talk" for key in keys)])
    for key in keys:
        assert f"eval.sets.a.data.{key}=talk: a set's rows are problems with an answer each" in str(refused.value)


@pytest.mark.parametrize("given", REFUSED)
def test_what_a_set_cannot_be_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[given]):
        load_config("tiny_cpu", [given])


def test_of_a_sets_files_the_first_max_eval_rows_are_read_and_none_to_train_on(tmp_path: Path) -> None:
    rows = [{"question": "short", "answer": "1"}, {"question": "long " * 99, "answer": "2"}, {"question": 7}]
    (tmp_path / "e.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    keys = ["type=files", "train=none.jsonl", f"eval={tmp_path}/e.jsonl", "max_eval=1"]
    config = load_config("tiny_cpu", [f"eval.sets.a.data.{key}" for key in keys])
    form = RowForm(tokenizer=byte_tokenizer(), max_tokens=99, on_long_prompt="fail")
    (found,) = problem_sets(config, [], partial(load_held_out, form=form, seed=0))
    assert [one.text for one in found.prompts] == ["short"]
    load_prompts(config.data, form, seed=0, on_leak="fail", sets=config.eval.data_of_sets)


def test_a_sets_files_need_no_train_and_a_saved_configuration_is_valid_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "defaults: tiny_cpu\n"
        "eval:\n  sets:\n    sums: {limit: 64}\n"
        "    aime: {data: {type: files, eval: aime.jsonl}, samples: 8, temperature: 0.6, max_new_tokens: 90}\n"
    )
    config = load_config(str(path), [])
    assert cast(Any, config.eval.sets["aime"].data).train == Path("aime.jsonl")
    assert config.longest_completion == 90
    assert list(config.eval.sets) == ["sums", "aime"]
    from rl_megatron.config.io import save_resolved

    save_resolved(config, tmp_path / "again.yaml")
    assert load_config(str(tmp_path / "again.yaml"), []) == config


# A set of problems with a reward of its own: what judges which prompt, by the composition root's own functions.
SETS = (
    "run.name=x",
    "reward.function=length",
    "reward.length.min_tokens=1000",  # of training: nothing is that long
    "eval.sets.plain.limit=4",
    "eval.sets.exact.limit=4",
    "eval.sets.exact.reward.function=exact_match",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(TinySizes(), tmp_path_factory.mktemp("models"), 0)


def built(config: RunConfig, model: Path) -> tuple[RolloutSampler, Data]:
    """The sampler of a run whose engine answers every problem rightly, and the run's data."""
    data = load_data(config, model)
    answers = {prompt.id: (prompt.answer,) for one in data.sets for prompt in one.prompts}
    reward = resolve_rewards(config.reward, config.own_rewards)
    sampler = make_sampler(config, None, Written(answers), reward, data, vocab_size=259)
    assert isinstance(sampler, RolloutSampler)
    return sampler, data


def test_each_set_is_judged_by_its_own_reward_and_the_others_by_the_runs(model: Path) -> None:
    config = load_config("tiny_cpu", list(SETS))
    sampler, data = built(config, model)
    plain, exact = (asyncio.run(measure(sampler, one, config.eval)) for one in data.sets)
    assert plain.right == (0, 0, 0, 0)
    assert exact.right == (1, 1, 1, 1)
    assert {prompt.source for prompt in data.train[:4]} == {""}  # training keeps the run's reward


def fails(prompt: object, completions: object, texts: object) -> list[float]:
    raise KeyError("price")


def test_what_follows_an_error_is_what_the_sets_own_reward_says(model: Path) -> None:
    """A sample that failed is wrong, also where the number in its place is a success."""
    own = [f"eval.sets.exact.reward.{key}" for key in (f"function={__name__}:fails", "on_error=1.0")]
    config = load_config("tiny_cpu", [*SETS, *own])
    sampler, data = built(config, model)
    measured = asyncio.run(measure(sampler, data.sets[1], config.eval))
    assert (measured.errors, measured.right) == (4, (0, 0, 0, 0))
    sampler, data = built(load_config("tiny_cpu", [*SETS, own[0]]), model)
    with pytest.raises(RewardError, match=r"fails.*price"):
        asyncio.run(measure(sampler, data.sets[1], config.eval))


def test_the_preflight_asks_the_reward_of_each_set(model: Path) -> None:
    found = check(PreflightContext(load_config("tiny_cpu", [*SETS, f"model.path={model}"]), for_job=False))
    facts = [each.text for each in found if each.kind == "fact"]
    assert facts[0].startswith("reward 'length' gives 0 for the answer itself")
    assert facts[1].startswith("reward 'exact_match' gives 1 for the answer itself, 0 for")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("eval.sets.exact.reward.length.max_tokens=5", r"eval\.sets\.exact\.reward\.length\.max_tokens=5 does nothing"),
        ("environment.function=calculator", "the environment gives the reward"),
        ("eval.sets.plain.reward.parts.exact_match=0", "eval.sets.plain.reward.parts: the weights of exact_match are"),
    ],
)
def test_what_says_nothing_is_refused_with_its_key(more: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("tiny_cpu", [*SETS, more])


def test_an_unknown_reward_is_named_by_the_sets_key() -> None:
    config = load_config("tiny_cpu", [*SETS, "eval.sets.plain.reward.function=exact"])
    with pytest.raises(ConfigError, match=r"eval\.sets\.plain\.reward\.function='exact' is unknown"):
        resolve_rewards(config.reward, config.own_rewards)
