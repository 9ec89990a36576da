"""A step's seconds as ``plan`` and ``submit`` show them: by hand, beside ``scale``, and why there are none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import AutoConfig

from launcher.programs.scale import asked_of
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.models.named import NAMED
from rl_megatron.scaling.estimates import StepTime, estimate, gpus_by_role
from rl_megatron.scaling.hardware import GPUS
from rl_megatron.scaling.planner.search import search
from rl_megatron.scaling.rl_step import RlStep, rl_step
from rl_megatron.scaling.rollouts import lengths_of

BY_ADDRESS = (
    *("rollout.server.addresses=http://a:1", "rollout.server.memory_fraction=null", "rollout.server.tp=1"),
    "weights.transport=direct",
)
CONF = Path(__file__).resolve().parents[3] / "conf"
SHAPE = NAMED["qwen3-30b-a3b"]


def job(name: str, *keys: str) -> RunConfig:
    return load_config(name, ["model.path=/given", "run.launcher=slurm", *keys])


def told(config: RunConfig) -> StepTime:
    found = estimate(config, NAMED[str(config.model.name)]).step
    assert found is not None
    return found


@pytest.mark.parametrize("recipe", ["qwen3_235b_a22b", "deepseek_v3", "kimi_k2"])
def test_the_comment_of_a_recipe_says_what_overlap_would_save(recipe: str) -> None:
    text = (CONF / f"{recipe}.yaml").read_text(encoding="utf-8")
    said = re.findall(r"a step's seconds: ([\d,]+),\n# or ([\d,]+) with train.max_staleness=1 \((\d+) % less\)", text)
    now, then = (told(job(recipe, f"train.max_staleness={k}")).seconds for k in (0, 1))
    assert said == [(f"{now:,.0f}", f"{then:,.0f}", f"{100 * (1 - then / now):.0f}")]


def test_a_synchronous_step_by_hand() -> None:
    found = told(job("qwen3_30b_a3b", "slurm.speeds.mean_tokens=1000"))
    assert found.predicted is not None
    step, tokens = found.predicted.step, 64 * 16 * (512 + 1000)
    assert found.seconds == step.seconds == pytest.approx(sum(step.parts.values()))
    assert step.tokens_a_second == pytest.approx(tokens / step.seconds)
    scores = 3 * 4 * 128 * 32 * 48 * (1512 * 1513 / 2) * 64 * 16  # of 32 heads in 48 layers, with the keys before
    peak = (6 * SHAPE.active_parameters * tokens + scores) / (8 * 989.5e12)
    assert found.predicted.mfu == pytest.approx(peak / step.parts["training"])
    text = "\n".join(found.lines())
    assert f"a step: {step.seconds:,.1f} s, predicted for slurm.speeds.gpu=h200:" in text
    assert re.search(r"training [\d.]+ s, log-probs [\d.]+ s, push 2\.0 s, rollout [\d.]+ s\n", text)
    assert f"{tokens / step.seconds:,.0f} tokens/s, {tokens / step.seconds / 8:,.0f} on each of 8 GPUs" in text
    assert "expect training at 0.75 to 1.3 times its rate" in text
    assert "completions of 1,000 tokens in the mean are assumed" in text


def test_accepted_proposals_are_assumed_or_given_and_said() -> None:
    keys = ("weights.transport=file", "learner.draft.train=true", "rollout.server.draft_tokens=1")
    seconds = []
    for share, tokens in ((None, "1.85"), (0.5, "1.50"), (0.0, "1.00")):
        more = () if share is None else (f"slurm.speeds.draft_acceptance={share}",)
        found = told(job("deepseek_v3", *keys, *more))
        assert found.predicted is not None
        said = f"a server's step with rollout.server.draft_tokens=1 gives {tokens} tokens of a row, by slurm.speeds"
        assert any(said in line for line in found.lines())
        seconds.append(found.predicted.step.sampled.longest * float(tokens))
    assert seconds == pytest.approx(seconds[:1] * 3)  # all steps take as long
    assert not any("draft" in line for line in told(job("deepseek_v3", *keys[:2])).lines())


def test_frozen_routers_have_no_gradient_at_the_peak_either() -> None:
    """As the metric mfu/train counts."""
    keys = ("qwen3_30b_a3b", "slurm.speeds.mean_tokens=1000")
    trained, frozen = (told(job(*keys, *more)).predicted for more in ((), ("learner.router.frozen=true",)))
    assert trained is not None
    assert frozen is not None
    gradients = 2 * 48 * 2048 * 128 * 64 * 16 * (512 + 1000)  # of 128 experts' rows in 48 layers
    assert trained.peak_seconds - frozen.peak_seconds == pytest.approx(gradients / (8 * 989.5e12), rel=1e-6)


def test_a_stated_step_stays_the_step_and_the_predicted_one_is_beside_it() -> None:
    lines = list(told(job("qwen3_30b_a3b", "slurm.speeds.step_seconds=300")).lines())
    assert lines[0] == "a step: 300 s (slurm.speeds.step_seconds)"
    assert re.fullmatch(r"predicted: [\d.]+ s, predicted for slurm.speeds.gpu=h200:", lines[1])


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (("slurm.speeds.gpu=null",), "set slurm.speeds.gpu to the kind of your GPUs, as h100"),
        (BY_ADDRESS, "the GPUs of servers at rollout.server.addresses are not known"),
        (("learner.lora.rank=32",), "they are of training all weights, and learner.lora.rank=32 trains adapters"),
        (("rollout.server.tp=4", "rollout.server.pp=2"), "servers of one stage, and rollout.server.pp=2"),
        (("rollout=local", "weights.transport=direct"), "servers that sample, and rollout.engine=local"),
        (
            ("environment.function=calculator", "reward.function=exact_match", "data.chat_template=false"),
            "they are of single completions, and environment.function=calculator",
        ),
    ],
)
def test_a_step_that_is_not_predicted_has_a_floor_and_a_reason(keys: tuple[str, ...], why: str) -> None:
    found = told(job("qwen3_30b_a3b", *keys))
    text = "\n".join(found.lines())
    assert text.startswith("a step: at least ")
    assert re.search(rf"seconds by phase are not predicted: .*{re.escape(why)}", text)
    with pytest.raises(ConfigError, match=r"slurm\.speeds\.gpu=h1000: neither a known GPU nor a file; known: a100"):
        told(job("qwen3_30b_a3b", "slurm.speeds.gpu=h1000"))
    with pytest.raises(ConfigError, match=r"learner\.fp8=blockwise: A100 multiplies nothing in float8; leave it out"):
        told(job("qwen3_30b_a3b", "slurm.speeds.gpu=a100", "learner.fp8=blockwise"))
    with pytest.raises(
        ConfigError, match=r"learner\.fp8=mxfp8: H200 has no .* which b200, b300, gb200, gb300 have; set"
    ):
        told(job("qwen3_30b_a3b", "slurm.speeds.gpu=h200", "learner.fp8=mxfp8"))
    told(job("qwen3_30b_a3b", "slurm.speeds.gpu=gb200", "learner.fp8=mxfp8"))


def test_scale_searches_no_layout_for_trajectories() -> None:
    keys = ("environment.function=calculator", "reward.function=exact_match", "data.chat_template=false")
    with pytest.raises(ConfigError, match=r"environment\.function=calculator: scale plans single completions"):
        asked_of(("qwen3-30b-a3b", "gpus=16", "gpu=h100", *keys))


def test_a_plan_that_scale_found_has_the_seconds_that_scale_says() -> None:
    """But for the push, which is that of the real plan."""
    arguments = ("qwen3-30b-a3b", "gpus=16", "gpu=h100", "rollout.prompts_per_step=64", "mean_tokens=1500")
    given = asked_of(arguments)
    best = search(given.wanted).plans[0]
    assert (given.tree["slurm"]["speeds"]) == {"gpu": "h100", "mean_tokens": 1500}  # type: ignore[index]
    found = told(best.config)
    assert found.predicted is not None
    for part, seconds in best.step.parts.items():
        assert found.predicted.step.parts[part] == pytest.approx(seconds, rel=0.2 if part == "push" else 1e-9)
    assert found.seconds == pytest.approx(best.step.seconds, rel=0.01)


def step(config: RunConfig) -> RlStep:
    return rl_step(
        config, SHAPE, GPUS["h100"], lengths_of(1000, 7168), prompt=512, staleness=config.train.max_staleness
    )


def test_gpus_that_no_key_counts_are_those_of_ranks_and_servers() -> None:
    """slurm.gpus_per_node=0: 8 ranks, with the servers on their GPUs or on two more."""
    found = told(job("qwen3_30b_a3b", "slurm.gpus_per_node=0")).predicted
    assert found is not None
    assert found.gpus == 8
    assert any("on each of 8 GPUs" in line for line in found.lines())
    beside = job("qwen3_30b_a3b_disaggregated", "slurm.gpus_per_node=0")
    counts = {"learner": beside.learner.dims.world_size, "engines": 2}
    assert gpus_by_role(beside) == counts


def test_completions_longer_in_the_mean_than_any_may_be_are_refused() -> None:
    why = r"slurm\.speeds\.mean_tokens=9000 is more than rollout\.max_new_tokens=7168; lower the first"
    with pytest.raises(ConfigError, match=why):
        told(job("qwen3_30b_a3b", "slurm.speeds.mean_tokens=9000"))


def test_requests_in_flight_that_take_the_whole_step_hold_nothing_back() -> None:
    """A synchronous step of 64 groups, on servers with places for 124."""
    keys = ("rollout.max_new_tokens=1024", "rollout.server.replicas=4")
    few, whole, more = (told(job("qwen3_30b_a3b", *keys, f"rollout.server.concurrency={n}")) for n in (16, 64, 1000))
    assert few.seconds > whole.seconds == more.seconds
    said = ["holds the servers back" in "\n".join(found.lines()) for found in (few, whole, more)]
    assert said == [True, False, False]


def test_roles_with_ranks_of_their_own_compute_beside_the_policy() -> None:
    keys = ("algorithm=ppo", "algorithm.kl.coefficient=0.1", "learner.router.frozen=false")
    shared = step(job("qwen3_30b_a3b", *keys)).parts
    apart = step(job("qwen3_30b_a3b", *keys, "roles.critic=separate", "roles.reference=separate")).parts
    assert shared["critic"] > shared["training"] > 0 == apart["critic"]
    assert apart["reference"] == pytest.approx(0 if "log-probs" in apart else shared["reference"])
    assert gpus_by_role(job("qwen3_30b_a3b", *keys, "roles.critic=separate")) == {"learner": 8, "critic": 8}


@pytest.mark.parametrize("model", ["training", "critic"])
def test_muon_takes_longer_than_adamw_in_the_model_that_it_steps(model: str) -> None:
    keys = ("algorithm=ppo", "learner.overlap.parameters=false", "learner.offload.optimizer=0")
    section = {"training": "learner", "critic": "algorithm.critic"}[model]
    adamw, muon = (step(job("qwen3_30b_a3b", *keys, *more)).parts for more in ((), (f"{section}.optimizer.name=muon",)))
    assert {name for name in adamw if adamw[name] != muon[name]} == {model}
    assert muon[model] > adamw[model]


def judge(folder: Path, times: int) -> Path:
    """config.json of a reward model of the policy's sizes with so many times its layers."""
    sizes = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768}
    sizes |= {"hidden_size": 2048, "num_hidden_layers": 48 * times, "vocab_size": 151936}
    sizes |= {"num_experts": 128, "num_experts_per_tok": 8}
    classes = ["Qwen3MoeForSequenceClassification"]
    AutoConfig.for_model("qwen3_moe", **sizes, architectures=classes).save_pretrained(folder / str(times))
    return folder / str(times)


@pytest.mark.parametrize(("name", "staleness"), [("qwen3_30b_a3b", 0), ("qwen3_30b_a3b_disaggregated", 2)])
def test_a_reward_model_on_ranks_scores_beside_servers_and_a_step_waits_for_the_longer(
    name: str, staleness: int, tmp_path: Path
) -> None:
    keys = ("algorithm.old_logprobs=learner", "learner.head_dtype=null", f"train.max_staleness={staleness}")
    ranked = (*keys, "reward.function=ranks:taste")
    without = step(job(name, *keys))
    small, large = (step(job(name, *ranked, f"reward_models.taste.path={judge(tmp_path, n)}")) for n in (1, 100))
    assert small.parts == without.parts
    assert small.seconds == without.seconds
    scored = large.parts["rollout"] + large.parts["reward models"]
    output_layer = 2048 * 151936 / SHAPE.active_parameters
    assert scored == pytest.approx(100 * (1 - output_layer) * large.parts["log-probs"], rel=0.1)
    if staleness:
        assert large.seconds == large.slower == scored
    else:
        assert large.seconds == pytest.approx(sum(large.parts.values()))


def test_of_pairs_two_of_each_group_are_trained_on_and_all_are_sampled_and_scored(tmp_path: Path) -> None:
    """Training and the reference are those of another row with groups of two, and what samples with groups of 16."""
    keys = ("rollout.group_size=16", "reward.function=ranks:taste", f"reward_models.taste.path={judge(tmp_path, 150)}")
    kl = ("algorithm.kl.coefficient=0.1", "algorithm.old_logprobs=rollout")
    pairs = step(job("qwen3_30b_a3b", *keys, "algorithm=dpo"))
    two, all_sampled = (step(job("qwen3_30b_a3b", *keys, *kl, f"rollout.group_size={n}")) for n in (2, 16))
    assert pairs.parts["training"] == pytest.approx(two.parts["training"], rel=0.02)
    assert pairs.parts["reference"] == pytest.approx(two.parts["reference"], rel=0.02)
    assert pairs.tokens == two.tokens
    assert pairs.parts["rollout"] == all_sampled.parts["rollout"]
    assert pairs.parts["reward models"] == pytest.approx(all_sampled.parts["reward models"], rel=0.02)


def test_the_least_staleness_that_is_printed_is_the_least_by_the_seconds() -> None:
    """Of a run whose longest completion is many times the mean."""
    keys = ("rollout.max_new_tokens=14336", "slurm.speeds.mean_tokens=200", "rollout.prompts_per_step=8")
    seconds, least = {}, set()
    for k in range(1, 9):
        found = told(job("qwen3_30b_a3b_disaggregated", *keys, "train.minibatches=1", f"train.max_staleness={k}"))
        text = "\n".join(found.lines())
        ((said, given),) = re.findall(r"max_staleness=(\d+) is the least .* waits for it, .*; here it is (\d+)", text)
        assert int(given) == k
        assert ("which only makes data older" in text) == (k > int(said))
        seconds[k] = found.seconds
        least.add(int(said))
    (k,) = least
    assert 1 < k < 8
    assert seconds[k] == pytest.approx(min(seconds.values()))
    assert seconds[k - 1] > 1.01 * seconds[k]


def test_servers_with_gpus_of_their_own_sample_while_the_learner_trains() -> None:
    here = job("qwen3_30b_a3b_disaggregated", "train.max_staleness=2")
    found = told(here)
    assert found.predicted is not None
    assert found.predicted.step.staleness == 2
    assert found.seconds < sum(found.predicted.step.parts.values())
    assert "; sampling overlaps the rest (staleness 2)" in "\n".join(found.lines())
    assert gpus_by_role(here) == {"learner": 6, "engines": 2}
    beside = step(job("qwen3_30b_a3b", "train.max_staleness=2"))  # on the learner's GPUs
    assert beside.staleness == 0
    assert beside.seconds == pytest.approx(sum(beside.parts.values()))


def test_one_rank_pushes_nothing_to_itself() -> None:
    config = load_config("tiny_cpu", ["run.launcher=slurm", "learner.dp=1", "learner.ep=1"])
    _, hop, *_ = estimate(config, SHAPE).lines()
    assert hop == "  nothing goes over a node's loopback"
