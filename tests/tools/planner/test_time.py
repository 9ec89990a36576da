"""Seconds of a step against other arithmetic, and as `plan` and `submit` show them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.errors import ConfigError
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import ModelShape
from rl_megatron.placement.ranks import gpus_by_role
from rl_megatron.training.flops import PASSES, training_flops
from rl_megatron.types import ParallelDims
from rl_megatron.weights.layouts.learner import rank_parameters
from tests.recipes.collectives import collectives
from tests.unit.launcher.test_memory import DEEPSEEK, QWEN_30B, QWEN_APART
from tools.planner.estimates import StepTime, estimate
from tools.planner.hardware import GPUS, PRIOR, Gpu, gpu_named
from tools.planner.layers import replicated
from tools.planner.rl_step import RlStep, length_distribution, rl_step
from tools.planner.scale import parse_request
from tools.planner.search import search
from tools.planner.time import LearnerWork, step_seconds, step_terms

IDEAL = replace(
    PRIOR, gemm=1, gemm_fp8=1, attention=1, power=0, tile=0, passes=0, links=1, host=0, imbalance=1, fixed=0, age=0
)
FREE = replace(GPUS["h100"], hbm=1e15, nvlink=1e15, network=1e15)
"""A GPU whose memory and links take no time: what is left are the products."""
LENGTH = 4096


def work(name: str | ModelShape, gpu: Gpu = FREE, micro: float = 1, **degrees: int) -> LearnerWork:
    shape = NAMED[name] if isinstance(name, str) else name
    dims = ParallelDims(**degrees)
    return LearnerWork(shape=shape, dims=dims, gpu=gpu, tokens=LENGTH, length=LENGTH, micro_batches=micro)


DEGREES: list[dict[str, int]] = [{}, {"tp": 4, "dp": 2, "ep": 8}, {"tp": 2, "cp": 2, "dp": 2, "ep": 2, "etp": 2}]


@pytest.mark.parametrize("name", [*(name for name, shape in NAMED.items() if shape.delta is None), "dense"])
@pytest.mark.parametrize("degrees", DEGREES)
def test_at_the_peak_a_step_is_its_counted_products_over_the_ranks(name: str, degrees: dict[str, int]) -> None:
    """The count is `flops`', which torch confirms; attention's backward pass has five products for four."""
    shape = replace(NAMED["qwen3-30b-a3b"], num_experts=0, dense_width=6144) if name == "dense" else NAMED[name]
    degrees = {k: v for k, v in degrees.items() if shape.num_experts or k not in ("ep", "etp")}
    found = step_terms(work(shape, **degrees), IDEAL)
    without = {"hidden_size": 0, "num_experts": 0, "dense_width": 0, "vocab_size": 0, "latent": None}
    width = shape.head_dim if shape.latent is None else (shape.head_dim + shape.latent.value_dim) / 2
    scores = training_flops(replace(shape, **without), [LENGTH]) / PASSES * width / shape.head_dim
    counted = training_flops(shape, [LENGTH]) + scores / 2
    ranks = degrees.get("tp", 1) * degrees.get("cp", 1)
    assert sum(found.values()) == pytest.approx(counted / ranks / 989.5e12, rel=2e-3)
    assert found["attention"] == pytest.approx((PASSES + 0.5) * scores / ranks / 989.5e12, rel=2e-3)


@pytest.mark.parametrize("degrees", DEGREES)
def test_delta_nets_take_their_chunks_products_which_are_more_than_their_states(degrees: dict[str, int]) -> None:
    """FLOPs count a position's use of the state, once a pass; what is computed is whole chunks, and again backward."""
    shape = NAMED["qwen3-next-80b-a3b"]
    found = sum(step_terms(work(shape, **degrees), IDEAL).values())
    ranks = degrees.get("tp", 1) * degrees.get("cp", 1)
    counted = training_flops(shape, [LENGTH]) / ranks / 989.5e12
    assert counted < found < 1.03 * counted
    plain = step_terms(work(replace(shape, delta=None), **degrees), IDEAL)
    assert found < sum(plain.values())  # attention to all positions takes more


def simulated(stages: int, micro: int, forward: float, backward: float) -> float:
    """Seconds of 1F1B, event by event: a rank takes a backward pass as soon as it may hold no more in flight."""
    done: dict[tuple[str, int, int], float] = {}
    now, order = [0.0] * stages, []
    for stage in range(stages):
        ahead = min(stages - stage, micro)
        steps = [("f", i) for i in range(ahead)]
        for i in range(micro):
            steps.append(("b", i))
            if i + ahead < micro:
                steps.append(("f", i + ahead))
        order.append(steps)
    while any(order):
        for stage in range(stages):
            if not order[stage]:
                continue
            kind, i = order[stage][0]
            before = (kind, i, stage - 1) if kind == "f" else (kind, i, stage + 1)
            first = before[2] < 0 or before[2] >= stages
            if not first and before not in done:
                continue
            now[stage] = max(now[stage], 0.0 if first else done[before]) + (forward if kind == "f" else backward)
            done[kind, i, stage] = now[stage]
            order[stage].pop(0)
    return max(now)


@pytest.mark.parametrize(("stages", "micro"), [(2, 4), (4, 8), (8, 8), (6, 48)])
def test_a_pipeline_fills_and_drains_once(stages: int, micro: int) -> None:
    """Against a simulation of each pass; without an output layer, so that stages are alike."""
    shape = replace(NAMED["qwen3-30b-a3b"], vocab_size=1, num_layers=48)
    alone = step_seconds(work(shape), IDEAL)
    wanted = simulated(stages, micro, alone / stages / 3, alone / stages * 2 / 3)
    given = replace(work(shape, micro=micro, pp=stages), stages=(48 // stages,) * stages)
    assert step_seconds(given, IDEAL) == pytest.approx(wanted, rel=1e-5)


def test_the_slowest_stage_sets_the_pace() -> None:
    shape = replace(NAMED["qwen3-30b-a3b"], vocab_size=1)
    even, odd = (replace(work(shape, micro=1e6, pp=2), stages=stages) for stages in ((24, 24), (30, 18)))
    assert step_seconds(odd, IDEAL) / step_seconds(even, IDEAL) == pytest.approx(30 / 24, rel=1e-4)


def test_bytes_of_messages_take_their_link() -> None:
    """Qwen3-30B-A3B, 4,096 tokens of 2,048 bfloat16: 16.8 MB, times 8 experts of which 7 of 8 are on other ranks of an
    NVLink domain; 2 ways, forward and backward, 48 layers; over the network half of all, one copy for a node. With them
    go a float32 probability, one way, and once each rank's counts of 128 experts, of 8 bytes."""
    token, slow = 2048 * 2 + 4 / 2, replace(FREE, nvlink=450.0, network=50.0)
    inside = step_terms(work("qwen3-30b-a3b", slow, dp=8, ep=8), IDEAL)["all-to-all"]
    assert inside == pytest.approx(48 * (4096 * token * 8 * 7 / 8 * 2 * 2 + 8 * 128 * 8) / 450e9, rel=1e-6)
    across = step_terms(work("qwen3-30b-a3b", slow, dp=16, ep=16), IDEAL)["all-to-all"]
    assert across == pytest.approx(48 * (4096 * token * 2 * (1 - 0.5**8) * 0.5 * 2 * 2 + 16 * 128 * 8) / 50e9, rel=1e-6)
    plain = replace(work("qwen3-30b-a3b", slow, dp=16, ep=16), dispatcher="alltoall")
    copies = step_terms(plain, replace(IDEAL, plain=1.0))["all-to-all"]
    assert copies == pytest.approx(48 * (4096 * token * 8 * 0.5 * 2 * 2 + 16 * 128 * 8) / 50e9, rel=1e-6)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3"])
@pytest.mark.parametrize("again", [False, True])
def test_messages_take_the_bytes_of_the_closed_form_that_dry_runs_confirm(name: str, again: bool) -> None:
    """Of a gathered or scattered tensor a rank sends or gets (tp - 1) / tp, of an all-to-all (ep - 1) / ep."""
    shape, link, sizes = NAMED[name], 1e9, {"parameters": 2.0, "gradients": 4.0}
    degrees, recompute = {"tp": 4, "ep": 8, "dp": 2}, {"uniform": 1 if again else None}
    learner = LearnerSection.model_validate(
        {**degrees, "dtype": "bfloat16", "max_tokens_per_micro_batch": LENGTH, "recompute": recompute}
    )
    counted = collectives(learner, shape, 0, sizes, layers=range(shape.num_layers), micro_batches=1)
    sparse = len(shape.moe_layers)
    held = replicated(shape, shape.num_layers, sparse, last=True) * 4  # gradients, once a step
    of_counts = sparse * (1 + again) * 8 * shape.num_experts * 8
    parts = counted["all-gather"] - sizes["parameters"] - of_counts + counted["reduce-scatter"] - sizes["gradients"]
    parts += 2 * (counted["all-reduce"] - held)
    near = replace(FREE, nvlink=link / 1e9)
    given = replace(work(shape, near, **degrees), dispatcher="alltoall", again=frozenset({"full"} if again else ()))
    found = step_terms(given, replace(IDEAL, plain=1.0))
    assert found["tensor parallel"] == pytest.approx(parts * 3 / 4 / link, rel=1e-9)
    sent = counted["all-to-all"] * 7 / 8 + of_counts
    assert found["all-to-all"] == pytest.approx(sent / link, rel=1e-4 if again else 1e-9)


def test_without_overlap_gradients_are_scattered_and_parameters_gathered_once() -> None:
    """As dry runs count: those of experts, too, which have an optimizer of their own."""
    slow, shape = replace(FREE, nvlink=1.0), NAMED["qwen3-30b-a3b"]
    dense = replace(shape, num_experts=0, dense_width=6144)

    def seconds(of: ModelShape, hidden: bool) -> float:
        return step_terms(replace(work(of, slow, dp=2), sync_hidden=hidden), IDEAL)["gradients, parameters"]

    _, experts = rank_parameters(shape, ParallelDims(dp=2))
    attention, _ = rank_parameters(shape, ParallelDims(dp=2))
    assert seconds(shape, False) == pytest.approx((experts + attention) / 2 * (4 + 2) / 1e9, rel=1e-6)
    held, _ = rank_parameters(dense, ParallelDims(dp=2))
    assert seconds(dense, False) == pytest.approx(held / 2 * (4 + 2) / 1e9, rel=1e-6)


def test_float32_is_multiplied_at_its_own_peak() -> None:
    """67 TFLOP/s of an H100 (its data sheet), outside of tensor cores, not 989.5; so is a float32 head."""
    given = work("qwen3-30b-a3b")
    one, four = (sum(step_terms(replace(given, precision=p), IDEAL).values()) for p in ("bfloat16", "float32"))
    assert four / one == pytest.approx(989.5 / 67, rel=1e-6)
    head = step_terms(replace(given, again=frozenset({"head"})), IDEAL)["output layer"]
    assert head == pytest.approx(4 * 2 * LENGTH * 2048 * 151936 / 67e12, rel=1e-3)
    assert step_terms(replace(given, precision="float8"), IDEAL)["attention"] == step_terms(given, IDEAL)["attention"]


def test_launches_count_where_they_take_longer_and_a_scored_pass_is_the_forward_pass_alone() -> None:
    """48 layers, each launched once forward and twice backward."""
    given = work("qwen3-30b-a3b")
    scored = replace(given, scored=True)
    for one, passes in ((given, 3), (scored, 1)):
        found = step_terms(one, replace(IDEAL, host=1.0))
        assert sum(found.values()) - found["output layer"] == pytest.approx(48 * passes, rel=1e-6)
    both, alone = step_terms(given, IDEAL), step_terms(scored, IDEAL)
    assert both["linears"] == pytest.approx(3 * alone["linears"])
    assert both["attention"] == pytest.approx(3.5 * alone["attention"])
    assert not {"optimizer", "fixed", "gradients, parameters"} & alone.keys()


def test_copies_of_activations_count_where_they_take_longer_than_the_layer() -> None:
    """A layer of 48 takes a third of its seconds forward; 25 GB/s over PCIe, each way."""
    given = replace(work(replace(NAMED["qwen3-30b-a3b"], vocab_size=1)))
    layer = step_seconds(given, IDEAL) / 48
    copied = 25e9 * layer / LENGTH  # bytes of a token that take as long as both passes
    for share in (0.2, 0.5, 1.0):
        terms = step_terms(replace(given, moved=(0.0, copied * share)), IDEAL)
        wanted = 48 * layer * (max(0.0, share - 1 / 3) + max(0.0, share - 2 / 3))
        assert terms.get("activations on the host", 0.0) == pytest.approx(wanted, rel=1e-4)


def test_recomputing_whole_layers_adds_their_forward_pass() -> None:
    shape = replace(NAMED["qwen3-30b-a3b"], vocab_size=1)
    found = step_terms(replace(work(shape), again=frozenset({"full"})), IDEAL)
    assert found["computed again"] == pytest.approx(training_flops(shape, [LENGTH]) / PASSES / 989.5e12, rel=2e-3)


def test_gpus_are_found_by_name_or_described_by_a_file(tmp_path: Path) -> None:
    assert gpu_named("h100").peak.bfloat16 == 989.5
    assert all(gpu.peak.bfloat16 > 100 for gpu in GPUS.values())
    mine = tmp_path / "mine.yaml"
    mine.write_text("like: h100\nnetwork: 25\nper_node: 4\n")
    assert gpu_named(str(mine)) == replace(GPUS["h100"], network=25, per_node=4)
    for text, reason in (
        ("network: 25\n", "like=None must name the GPU"),
        ("like: h100\nnic: 25\n", "'nic' is not a GPU's; keys: like, cuda_name"),
        ("like: h100\nnetwork: -1\n", "network=-1 must be a number above 0"),
        ("like: h100\ndomain: 1.5\n", "domain=1.5 must be a whole number above 0"),
        ("- h100\n", "a file of a GPU has keys"),
    ):
        mine.write_text(text)
        with pytest.raises(ConfigError, match=reason):
            gpu_named(str(mine))
    with pytest.raises(ConfigError, match="gpu=h1000: neither a known GPU nor a file; known: a100"):
        gpu_named("h1000")


# A step's seconds as ``plan`` and ``submit`` show them: by hand, beside ``scale``, and why there are none.
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


def test_a_synchronous_step_by_hand() -> None:
    found = told(job(QWEN_30B, "slurm.speeds.mean_tokens=1000"))
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


def test_accepted_proposals_are_assumed_and_said() -> None:
    keys = ("weights.transport=file", "learner.draft.train=true", "rollout.server.draft_tokens=1")
    seconds = []
    for count, tokens in ((1, "1.85"), (2, "2.57")):
        found = told(job(DEEPSEEK, *keys[:2], f"rollout.server.draft_tokens={count}"))
        said = f"a server's step with rollout.server.draft_tokens={count} gives {tokens} tokens of a row (assumed)"
        assert any(said in line for line in found.lines())
        seconds.append(found.predicted.step.sampled.longest)
    assert seconds[1] < seconds[0]
    assert not any("draft" in line for line in told(job(DEEPSEEK, *keys[:2])).lines())


def test_frozen_routers_have_no_gradient_at_the_peak_either() -> None:
    """As the metric mfu/train counts."""
    keys = (QWEN_30B, "slurm.speeds.mean_tokens=1000")
    trained, frozen = (told(job(*keys, *more)).predicted for more in ((), ("learner.router.frozen=true",)))
    gradients = 2 * 48 * 2048 * 128 * 64 * 16 * (512 + 1000)  # of 128 experts' rows in 48 layers
    assert trained.peak_seconds - frozen.peak_seconds == pytest.approx(gradients / (8 * 989.5e12), rel=1e-6)


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
    text = "\n".join(told(job(QWEN_30B, *keys)).lines())
    assert text.startswith("a step: at least ")
    assert re.search(rf"seconds by phase are not predicted: .*{re.escape(why)}", text)
    with pytest.raises(ConfigError, match=r"slurm\.speeds\.gpu=h1000: neither a known GPU nor a file; known: a100"):
        told(job(QWEN_30B, "slurm.speeds.gpu=h1000"))
    with pytest.raises(ConfigError, match=r"learner\.fp8=blockwise: A100 multiplies nothing in float8; leave it out"):
        told(job(QWEN_30B, "slurm.speeds.gpu=a100", "learner.fp8=blockwise"))
    with pytest.raises(ConfigError, match=r"learner\.fp8=mxfp8: H200 has no .* which b200, b300, gb200, gb300 have"):
        told(job(QWEN_30B, "slurm.speeds.gpu=h200", "learner.fp8=mxfp8"))
    told(job(QWEN_30B, "slurm.speeds.gpu=gb200", "learner.fp8=mxfp8"))


def test_scale_searches_no_layout_for_trajectories() -> None:
    keys = ("environment.function=calculator", "reward.function=exact_match", "data.chat_template=false")
    with pytest.raises(ConfigError, match=r"environment\.function=calculator: scale plans single completions"):
        parse_request(("qwen3-30b-a3b", "gpus=16", "gpu=h100", *keys))


def test_a_plan_that_scale_found_has_the_seconds_that_scale_says() -> None:
    """But for the push, which is that of the real plan."""
    given = parse_request(("qwen3-30b-a3b", "gpus=16", "gpu=h100", "rollout.prompts_per_step=64", "mean_tokens=1500"))
    best = search(given.wanted).plans[0]
    assert (given.tree["slurm"]["speeds"]) == {"gpu": "h100", "mean_tokens": 1500}  # type: ignore[index]
    found = told(best.config)
    for part, seconds in best.step.parts.items():
        assert found.predicted.step.parts[part] == pytest.approx(seconds, rel=0.2 if part == "push" else 1e-9)
    assert found.seconds == pytest.approx(best.step.seconds, rel=0.01)


def step(config: RunConfig) -> RlStep:
    return rl_step(
        config, SHAPE, GPUS["h100"], length_distribution(1000, 7168), prompt=512, staleness=config.train.max_staleness
    )


def test_gpus_that_no_key_counts_are_those_of_ranks_and_servers() -> None:
    """slurm.gpus_per_node=0: 8 ranks, with the servers on their GPUs or on two more."""
    found = told(job(QWEN_30B, "slurm.gpus_per_node=0")).predicted
    assert found.gpus == 8
    assert any("on each of 8 GPUs" in line for line in found.lines())
    beside = job(QWEN_APART, "slurm.gpus_per_node=0")
    assert gpus_by_role(beside) == {"learner": beside.learner.dims.world_size, "engines": 2}


def test_completions_longer_in_the_mean_than_any_may_be_are_refused() -> None:
    why = r"slurm\.speeds\.mean_tokens=9000 is more than rollout\.max_new_tokens=7168; lower the first"
    with pytest.raises(ConfigError, match=why):
        told(job(QWEN_30B, "slurm.speeds.mean_tokens=9000"))


def test_requests_in_flight_that_take_the_whole_step_hold_nothing_back() -> None:
    """A synchronous step of 64 groups, on servers with places for 124."""
    keys = ("rollout.max_new_tokens=1024", "rollout.server.replicas=4")
    few, whole, more = (told(job(QWEN_30B, *keys, f"rollout.server.max_concurrent_groups={n}")) for n in (16, 64, 1000))
    assert few.seconds > whole.seconds == more.seconds
    said = ["holds the servers back" in "\n".join(found.lines()) for found in (few, whole, more)]
    assert said == [True, False, False]


def test_roles_with_ranks_of_their_own_compute_beside_the_policy() -> None:
    keys = ("algorithm=ppo", "algorithm.kl.coefficient=0.1", "learner.router.frozen=false")
    shared = step(job(QWEN_30B, *keys)).parts
    apart = step(job(QWEN_30B, *keys, "roles.critic=separate", "roles.reference=separate")).parts
    assert shared["critic"] > shared["training"] > 0 == apart["critic"]
    assert apart["reference"] == pytest.approx(0 if "log-probs" in apart else shared["reference"])
    assert gpus_by_role(job(QWEN_30B, *keys, "roles.critic=separate")) == {"learner": 8, "critic": 8}


def test_muon_takes_longer_than_adamw_in_each_model_that_it_steps() -> None:
    keys = ("algorithm=ppo", "learner.overlap.parameters=false", "learner.offload.optimizer=0")
    adamw, muon = (step(job(QWEN_30B, *keys, *more)).parts for more in ((), ("learner.optimizer.name=muon",)))
    assert {name for name in adamw if adamw[name] != muon[name]} == {"training", "critic"}
    assert all(muon[model] > adamw[model] for model in ("training", "critic"))


def judge(folder: Path, times: int) -> Path:
    """config.json of a reward model of the policy's sizes with so many times its layers."""
    sizes = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768}
    sizes |= {"hidden_size": 2048, "num_hidden_layers": 48 * times, "vocab_size": 151936}
    sizes |= {"num_experts": 128, "num_experts_per_tok": 8}
    classes = ["Qwen3MoeForSequenceClassification"]
    AutoConfig.for_model("qwen3_moe", **sizes, architectures=classes).save_pretrained(folder / str(times))
    return folder / str(times)


@pytest.mark.parametrize(("name", "staleness"), [(QWEN_30B, 0), (QWEN_APART, 2)])
def test_a_reward_model_on_ranks_scores_beside_servers(name: str, staleness: int, tmp_path: Path) -> None:
    keys = ("algorithm.old_logprobs=learner", "learner.head_dtype=null", f"train.max_staleness={staleness}")
    ranked = (*keys, "reward.function=ranks:taste")
    without = step(job(name, *keys))
    small, large = (step(job(name, *ranked, f"reward_models.taste.path={judge(tmp_path, n)}")) for n in (1, 100))
    assert (small.parts, small.seconds) == (without.parts, without.seconds)
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
    pairs = step(job(QWEN_30B, *keys, "algorithm=dpo"))
    two, all_sampled = (step(job(QWEN_30B, *keys, *kl, f"rollout.group_size={n}")) for n in (2, 16))
    assert pairs.parts["training"] == pytest.approx(two.parts["training"], rel=0.02)
    assert pairs.parts["reference"] == pytest.approx(two.parts["reference"], rel=0.02)
    assert (pairs.tokens, pairs.parts["rollout"]) == (two.tokens, all_sampled.parts["rollout"])
    assert pairs.parts["reward models"] == pytest.approx(all_sampled.parts["reward models"], rel=0.02)


def test_the_least_staleness_that_is_printed_is_the_least_by_the_seconds() -> None:
    """Of a run whose longest completion is many times the mean."""
    keys = ("rollout.max_new_tokens=14336", "slurm.speeds.mean_tokens=200", "rollout.prompts_per_step=8")
    seconds, least = {}, set()
    for k in range(1, 9):
        found = told(job(QWEN_APART, *keys, "train.minibatches=1", f"train.max_staleness={k}"))
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
    here = job(QWEN_APART, "train.max_staleness=2")
    found = told(here)
    assert found.predicted.step.staleness == 2
    assert found.seconds < sum(found.predicted.step.parts.values())
    assert "; sampling overlaps the rest (staleness 2)" in "\n".join(found.lines())
    assert gpus_by_role(here) == {"learner": 6, "engines": 6}
    beside = step(job(QWEN_30B, "train.max_staleness=2"))  # on the learner's GPUs
    assert (beside.staleness, beside.seconds) == (0, pytest.approx(sum(beside.parts.values())))


def test_one_rank_pushes_nothing_to_itself() -> None:
    config = load_config("tiny_cpu", ["run.launcher=slurm", "learner.dp=1", "learner.ep=1"])
    _, hop, *_ = estimate(config, SHAPE).lines()
    assert hop == "  nothing goes over a node's loopback"
