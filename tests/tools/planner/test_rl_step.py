"""A step of reinforcement learning against engines simulated token by token, and against the real plan's bytes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from rl_megatron.config.io import load_config
from rl_megatron.models.named import NAMED
from rl_megatron.training.flops import training_flops
from rl_megatron.types import ParallelDims
from tests.unit.launcher.test_memory import DEEPSEEK, KIMI, QWEN_30B, QWEN_235B, QWEN_235B_SHARED
from tools.planner import rl_step as rollouts
from tools.planner.estimates import push_cost
from tools.planner.hardware import FITTED, GPUS, MEMORY
from tools.planner.layouts import SLOTS, SearchRequest, placements, with_keys
from tools.planner.memory import weights_served
from tools.planner.rl_step import (
    ServerShape,
    cache_bytes,
    forward_seconds,
    learner_work,
    length_distribution,
    push_bytes,
    rl_step,
    rows_that_fit,
    sampled,
    score_seconds,
    server_shape,
    token_seconds,
)
from tools.planner.scale import configuration_file, parse_request
from tools.planner.search import PlannedRun, search
from tools.planner.time import step_terms

H100, SHAPE = GPUS["h100"], NAMED["qwen3-30b-a3b"]
SERVER = ServerShape(tp=2, dp=1, cache=35e9)


def test_lengths_have_their_mean_and_their_cut() -> None:
    for mean, most in ((500.0, 4096.0), (3000.0, 4096.0), (1.0, 10.0)):
        found = length_distribution(mean, most)
        assert sum(found) / len(found) == pytest.approx(mean, rel=1e-6)
        assert list(found) == sorted(found)
        assert found[-1] <= most
    assert length_distribution(3000.0, 4096.0)[-1] == 4096.0


def sent(rows: float, hidden: int, ranks: int, over: float) -> float:
    """Seconds of an all-reduce of ``rows``, or of an all-gather and a reduce-scatter: as nccl-tests counts bytes, two
    times (n - 1) / n of the whole, over links of ``over`` GB/s."""
    return 2 * (ranks - 1) / ranks * 2 * hidden * rows / (over * 1e9 * FITTED.links)


def test_a_token_reads_the_weights_that_some_row_uses_and_the_cache() -> None:
    """Qwen3-30B-A3B on two H100: 3.3 B weights without experts' choice, 8 experts of 4.7 M in 48 layers for one row."""
    dense = 48 * 2048 * (2 * 32 + 2 * 4) * 128 + 48 * 2048 * 128 + 151936 * 2048
    experts, cache = 48 * 8 * 3 * 2048 * 768, 2 * 2 * 48 * 4 * 128 * 1000
    read = (2 * (dense + experts) + cache) / 2 / (rollouts.READ * 3350e9)
    fixed = rollouts.TOKEN_SECONDS + 48 * rollouts.LAYER_SECONDS
    sums = 48 * 2 * sent(1, 2048, 2, over=450)  # of attention and of experts
    assert token_seconds(SHAPE, SERVER, H100, 1, 1000) == pytest.approx(read + fixed + sums, rel=1e-9)
    spread = replace(SERVER, tp=1, dp=2)  # each GPU has all of the attention, half of the experts and of the rows
    read = (2 * (dense + experts / 2) + cache / 2) / (rollouts.READ * 3350e9)
    to_experts = 48 * sent(1, 2048, 2, over=450)
    assert token_seconds(SHAPE, spread, H100, 1, 1000) == pytest.approx(read + fixed + to_experts, rel=1e-9)
    assert cache_bytes(SHAPE, 1) == 98304  # bytes of a token: 96 KiB, as vLLM reports of this model
    assert cache_bytes(NAMED["deepseek-v3"], 1) == 2 * 61 * 576
    assert cache_bytes(NAMED["deepseek-v3.2"], 1) == 2 * 61 * 576 + 61 * 132  # 128 numbers of 8 bits, and a float32
    half = replace(SHAPE, windows=(128, 0) * (SHAPE.num_layers // 2))  # as gpt-oss has
    assert cache_bytes(half, 2816) == 98304 * (128 + 2816) / 2


def test_a_row_of_delta_nets_has_their_states_and_a_token_reads_and_writes_them() -> None:
    """Qwen3-Next-80B-A3B over tp 4: of the states that vLLM's gated_delta_net_state_shape gives, [8, 128, 128] a rank
    and the last 3 inputs of 2,048 channels, in each of 36 layers; of 2 heads of keys and values one a rank, in 12."""
    shape, server = NAMED["qwen3-next-80b-a3b"], ServerShape(tp=4, dp=2, cache=40e9)
    state = 36 * (4 * 8 * 128 * 128 + 2 * 3 * 2048)
    assert rollouts.state_bytes(shape) == 4 * state
    keys = 12 * 2 * 2 * 256 * 3000
    assert rollouts.rows_that_fit(shape, server, 3000) == pytest.approx(2 * 40e9 / (keys + state))
    assert rollouts.state_bytes(SHAPE) == 0
    light = replace(server, experts=0.0, others=0.0)  # without what the weights take
    read = 512 / 2 * (keys + 2 * state) / (rollouts.READ * 3350e9)
    fixed = rollouts.TOKEN_SECONDS + 48 * rollouts.LAYER_SECONDS
    fixed += 48 * (sent(256, 2048, 4, over=450) + sent(512, 2048, 8, over=450))
    assert token_seconds(shape, light, H100, 512, 3000) == pytest.approx(read + fixed, rel=1e-9)


def test_published_tokens_take_the_predicted_seconds() -> None:
    """DeepSeek-R1 in float8 on 8 H200 and on two nodes of 8 H100, Qwen3-30B-A3B on an A100: milliseconds of a token of
    so many rows that three public issues name (`rollouts.LAYER_SECONDS`)."""
    deepseek = NAMED["deepseek-v3"]
    for gpu, tp, rows, measured in (
        ("h200", 8, 8, 12.8),
        ("h200", 8, 16, 17.2),
        ("h200", 8, 32, 25.6),
        ("h200", 8, 64, 34.6),
        ("h100", 16, 1, 31.2),
    ):
        server = ServerShape(tp=tp, dp=1, cache=1e9, experts=1.0, others=1.0)
        assert 1e3 * token_seconds(deepseek, server, GPUS[gpu], rows, 1536) == pytest.approx(measured, rel=0.1)
    alone = ServerShape(tp=1, dp=1, cache=1e9)
    assert 1e3 * token_seconds(SHAPE, alone, GPUS["a100"], 1, 192) == pytest.approx(9.6, rel=0.15)


def test_proposals_are_verified_in_one_pass_and_those_accepted_are_tokens_of_it() -> None:
    """DeepSeek-V3 over 32 H100, by its published sizes: 37.1 B weights of a token with the 0.93 B of the output layer,
    8 + 1 of 257 experts of 44.04 M in 58 layers, 187.1 M of attention in 61 and in the draft layer."""
    deepseek, rows, context = NAMED["deepseek-v3"], 16, 2000
    server = ServerShape(tp=8, dp=4, cache=20e9, drafts=2, accepted=1.5)
    expert, head, router, attention = 3 * 7168 * 2048, 129280 * 7168, 256 * 7168, 187.1e6
    others = 61 * attention + 3 * 3 * 7168 * 18432 + 58 * (expert + router) + head

    def touched(positions: int) -> float:
        return 256 * (1 - (1 - 8 / 256) ** positions) * expert

    cache = 2 * (512 + 64) * context * rows / 4
    read = 2 * others / 8 + 2 * 58 * touched(3 * rows) / 32 + 61 * cache  # three positions of a row, one cache
    draft = 2 * (attention + expert + router + head) / 8 + 2 * touched(rows) / 32 + cache
    step = (read + 2 * draft) / (rollouts.READ * 3350e9)
    step += rollouts.TOKEN_SECONDS + (61 + 2) * rollouts.FAR_LAYER_SECONDS
    # Attention's and dense MLPs' sums of a group of 8; all rows to the experts of four nodes, by eight links of each.
    step += (61 + 3) * sent(3 * rows / 4, 7168, 8, over=450) + 58 * sent(3 * rows, 7168, 4, over=8 * 50)
    step += 2 * (sent(rows / 4, 7168, 8, over=450) + sent(rows, 7168, 4, over=8 * 50))
    assert token_seconds(deepseek, server, H100, rows, context) == pytest.approx(step / 2.5, rel=2e-3)
    plain = replace(server, drafts=0, accepted=0.0)
    fitting = [rollouts.rows_that_fit(deepseek, one, context) for one in (server, plain)]
    assert fitting[0] == pytest.approx(fitting[1] * 61 / 62)
    rejected = replace(server, accepted=0.0)
    assert token_seconds(deepseek, rejected, H100, rows, context) > token_seconds(deepseek, plain, H100, rows, context)


@pytest.mark.parametrize("drafts", [1, 3])
def test_as_many_proposals_are_accepted_as_in_draws_that_end_at_the_first_that_is_not(drafts: int) -> None:
    drawn, steps = random.Random(drafts), 20_000
    accepted = 0
    for _ in range(steps):
        ends = [drawn.random() >= rollouts.ACCEPTED for _ in range(drafts)]
        accepted += ends.index(True) if True in ends else drafts
    assert rollouts.tokens_accepted(drafts) == pytest.approx(accepted / steps, rel=0.02)


def simulated(rows: list[float], slots: int, prompt: float) -> float:
    """Seconds until the last of ``rows`` ends, if each that ends makes room for the next; 16 tokens at a time."""
    waiting, now, running = list(rows), 0.0, list[list[float]]()
    while waiting or running:
        while waiting and len(running) < slots:
            running.append([waiting.pop(0), 0.0])
        context = prompt + sum(done for _, done in running) / len(running)
        now += 16 * token_seconds(SHAPE, SERVER, H100, len(running), context)
        for row in running:
            row[1] += 16
        running = [row for row in running if row[1] < row[0]]
    return now


@pytest.mark.parametrize(("waves", "slots"), [(1, 64), (2, 64), (4, 128)])
def test_sampling_takes_as_long_as_if_each_token_is_simulated(waves: int, slots: int) -> None:
    """Up to 12 %: the queue's rows are taken at their mean length, and the last ones as if all had just begun."""
    lengths = length_distribution(1000, 4096)
    order = [lengths[i * 37 % 64] for i in range(64)] * (waves * slots // 64)
    group = {"replicas": 1, "completions": len(order), "group": len(order), "prompt": 0}
    found = sampled(SHAPE, SERVER, H100, **group, lengths=lengths, slots=slots)
    assert found.lone_seconds == pytest.approx(simulated(order, slots, 0), rel=0.12)
    assert found.steady < found.lone_seconds


def in_groups(groups: list[list[float]], requests: int) -> float:
    """Seconds until the last of ``groups`` ends, if a group that has ended makes room for the next; 16 tokens at a
    time."""
    waiting, now, running = list(groups), 0.0, list[list[list[float]]]()
    while waiting or running:
        while waiting and len(running) < requests:
            running.append([[length, 0.0] for length in waiting.pop(0)])
        rows = [row for group in running for row in group if row[1] < row[0]]
        now += 16 * token_seconds(SHAPE, SERVER, H100, len(rows), sum(done for _, done in rows) / len(rows))
        for row in rows:
            row[1] += 16
        running = [group for group in running if any(done < length for length, done in group)]
    return now


@pytest.mark.parametrize(("requests", "group"), [(4, 8), (16, 4)])
def test_requests_that_wait_for_their_longest_completion_hold_servers_back(requests: int, group: int) -> None:
    """rollout.server.max_concurrent_groups counts groups, and the places of their ended completions stay empty."""
    lengths, count = length_distribution(1000, 4096), 12 * requests
    drawn = random.Random(0)
    groups = [[drawn.choice(lengths) for _ in range(group)] for _ in range(count)]
    of = {"replicas": 1, "completions": count * group, "group": group, "prompt": 0.0, "slots": 256}
    found = sampled(SHAPE, SERVER, H100, lengths=lengths, concurrency=requests, **of)
    truth = in_groups(groups, requests)
    assert found.lone_seconds == pytest.approx(truth, rel=0.15)
    assert found.steady == pytest.approx(truth, rel=0.2)
    free = sampled(SHAPE, SERVER, H100, lengths=lengths, **of)
    assert found.held_back
    assert not free.held_back
    assert free.lone_seconds < 0.7 * found.lone_seconds
    enough = sampled(SHAPE, SERVER, H100, lengths=lengths, concurrency=free.requests, **of)
    assert not enough.held_back
    assert enough.lone_seconds == pytest.approx(free.lone_seconds, rel=0.01)


def test_quantized_servers_read_their_own_bytes() -> None:
    """Experts in float8 with a float32 scale for 128 x 128 weights; the head stays in bfloat16."""
    keys = ["model.path=.", "run.launcher=slurm", "rollout.server.memory_fraction=0.5"]
    shapes = []
    for quantization in ("none", "fp8"):
        config = load_config(QWEN_30B, [*keys, f"rollout.server.quantization={quantization}"])
        shapes.append(server_shape(config, config.rollout.server, weights_served(config, SHAPE), SHAPE, H100))
    plain, quantized = shapes
    assert plain.experts == 2
    assert plain.others == pytest.approx(2, rel=1e-3)  # but for norms
    assert quantized.experts == pytest.approx(1 + 4 / 128**2)
    attention, head = 48 * 2048 * (2 * 32 + 2 * 4) * 128, 151936 * 2048
    router = 48 * 2048 * 128
    assert quantized.others == pytest.approx((attention + 2 * (head + router)) / (attention + head + router), rel=1e-2)
    freed = quantized.cache - plain.cache
    assert freed == pytest.approx((48 * 128 * 3 * 2048 * 768 + attention) / 8, rel=0.01)  # a byte of each, on 8 GPUs
    fast, slow = (token_seconds(SHAPE, one, H100, 8, 1000) for one in (quantized, plain))
    assert fast < slow


def test_servers_with_a_draft_layer_read_two_bytes_of_each_weight_too() -> None:
    keys = ["model.path=.", "run.launcher=slurm", "weights.transport=file", "learner.draft.train=true"]
    deepseek, found = replace(NAMED["deepseek-v3"], num_draft_layers=True), {}
    for more in ((), ("rollout.server.draft_tokens=1",)):
        config = load_config(DEEPSEEK, [*keys, *more])
        found[more] = server_shape(config, config.rollout.server, weights_served(config, deepseek), deepseek, H100)
    for one in found.values():
        assert one.experts == pytest.approx(2, rel=1e-9)
        assert one.others == pytest.approx(2, rel=1e-3)  # but for norms and selection biases
    assert [(one.drafts, one.accepted) for one in found.values()] == [(0, 0.0), (1, 0.85)]


@pytest.mark.parametrize("name", [QWEN_235B, DEEPSEEK, KIMI, QWEN_235B_SHARED, QWEN_30B])
def test_the_closed_form_of_a_push_has_the_real_plans_bytes(name: str) -> None:
    """The real plan repeats what all tensor-parallel ranks hold (latents' down-projections); the form shares it. Where
    ranks of servers are beside the learner's, the form counts what these hold themselves, too: an eighth."""
    config = load_config(name, ["model.path=.", "run.launcher=slurm"])
    hop = push_cost(config, NAMED[str(config.model.name)]).hops[0]
    total, sent, received = push_bytes(config, NAMED[str(config.model.name)])
    handed = 8 / 7 if name == QWEN_30B else 1.0  # each of its eight ranks holds an eighth of the experts
    assert total == pytest.approx(handed * hop.total, rel=0.05)
    assert received == pytest.approx(handed * hop.received, rel=0.05)
    assert sent == pytest.approx(handed * hop.sent, rel=0.12)


def step(k: int | None, *keys: str) -> tuple[float, int]:
    """Seconds and staleness of a step of a configuration with these keys."""
    config = load_config(QWEN_235B, ["model.path=.", "run.launcher=slurm", *("rollout.prompts_per_step=32", *keys)])
    lengths, shape = length_distribution(500, 7168), NAMED["qwen3-235b-a22b"]
    found = rl_step(config, shape, H100, lengths, prompt=512, staleness=k)
    learner = sum(s for name, s in found.parts.items() if name not in ("rollout", "waiting for the longest"))
    if k == 0:
        assert found.seconds == pytest.approx(learner + found.sampled.lone_seconds)
    elif found.staleness:
        slower, in_turns = max(learner, found.sampled.steady), learner + found.sampled.lone_seconds
        assert found.seconds == pytest.approx(max(slower, min(found.sampled.longest / found.staleness, in_turns)))
        assert (found.sampled.longest / slower <= found.staleness) == (found.seconds <= slower * (1 + 1e-9))
    return found.seconds, found.staleness


def test_staleness_hides_what_is_shorter_and_the_longest_completion_over_its_steps() -> None:
    """streaming's law: a step takes no longer than the slower side once k >= W / T."""
    alone, one, two, best = step(0)[0], step(1)[0], step(2)[0], step(None)
    assert alone >= one > two >= best[0]
    assert best[1] >= 1
    assert step(best[1] + 1)[0] == pytest.approx(best[0], rel=1e-9)
    few = ("rollout.prompts_per_step=2", "train.minibatches=1")  # over whose step full servers' longest would reach
    assert step(1, *few)[0] == step(0, *few)[0] > step(None, *few)[0]
    if best[1] > 1:
        assert step(best[1] - 1)[0] > best[0]


def test_servers_that_share_gpus_sample_together_what_one_does() -> None:
    """Two servers of 8 GPUs on the same 8 take as long as one, where rows are as many on each; on 16 half of it."""

    def rollout(servers: int, nodes: int, completions: int) -> float:
        keys = ["model.path=.", "run.launcher=slurm", "weights.transport=auto", "rollout.server.memory_fraction=0.2"]
        keys += [f"rollout.server.replicas={servers}", f"slurm.nodes={nodes}", f"learner.dp={2 * nodes}"]
        config = load_config(QWEN_30B, [*keys, f"rollout.prompts_per_step={completions // 16}"])
        return rl_step(config, SHAPE, H100, length_distribution(3584, 7168), prompt=512).parts["rollout"]

    assert rollout(2, 1, 2048) == pytest.approx(2 * rollout(1, 1, 1024))
    assert rollout(2, 1, 2048) == pytest.approx(2 * rollout(2, 2, 2048))
    assert rollout(3, 2, 3072) == pytest.approx(1.5 * rollout(3, 3, 3072))  # two of them on one node


def test_a_reward_models_output_layer_has_one_score_and_no_logits() -> None:
    config = load_config(QWEN_30B, ["model.path=.", "run.launcher=slurm"])
    policy, judge = (
        step_terms(learner_work(config, one, H100, 4000)) for one in (SHAPE, replace(SHAPE, has_score_head=True))
    )
    assert 0 < judge["output layer"] < 1e-2 * policy["output layer"]
    assert policy["linears"] == judge["linears"]
    fewer = training_flops(SHAPE, [4000]) - training_flops(replace(SHAPE, has_score_head=True), [4000])
    assert fewer == 6 * 4000 * SHAPE.hidden_size * (SHAPE.vocab_size - 1)


def test_a_forward_pass_is_a_third_of_trainings_products() -> None:
    config = load_config(QWEN_30B, ["model.path=.", "run.launcher=slurm", "learner.recompute.uniform=null"])
    work = learner_work(config, SHAPE, H100, 4000)
    assert (step_terms(work)["linears"] / 3) < forward_seconds(work, 1) < sum(step_terms(work).values()) / 2.5
    assert forward_seconds(work, 4) > 3 * forward_seconds(work, 1)


def test_a_draft_layer_is_trained_and_does_not_score() -> None:
    trained = replace(NAMED["deepseek-v3"], num_draft_layers=True)
    config = load_config(DEEPSEEK, ["model.path=.", "run.launcher=slurm"])
    shapes = (trained, replace(trained, num_draft_layers=False))
    with_draft, without = (replace(learner_work(config, one, H100, 4000), dims=ParallelDims()) for one in shapes)
    (seconds, bare), drafts = (step_terms(work) for work in (with_draft, without)), {"draft layers", "output layer"}
    assert seconds["draft layers"] > 0
    assert seconds["output layer"] == pytest.approx(2 * bare["output layer"])
    assert {name: s for name, s in seconds.items() if name not in drafts} == pytest.approx(
        {name: s for name, s in bare.items() if name not in drafts}
    )
    assert forward_seconds(with_draft, 1) == forward_seconds(without, 1)


def test_engines_that_are_full_sample_faster_than_a_tail() -> None:
    even, tail = (1000.0,) * 64, length_distribution(1000, 8000)
    of = {"replicas": 1, "completions": 64, "group": 64, "prompt": 0.0, "slots": 64}
    flat, long = (sampled(SHAPE, SERVER, H100, lengths=lengths, **of) for lengths in (even, tail))
    assert long.lone_seconds > 1.5 * flat.lone_seconds
    assert long.steady == pytest.approx(flat.steady, rel=1e-6)


@pytest.mark.parametrize(
    ("keys", "passes"),
    [
        (["algorithm=grpo", "algorithm.old_logprobs=rollout"], 0.0),
        (["algorithm=grpo", "algorithm.old_logprobs=learner"], 1.0),
        (["algorithm=top_entropy", "algorithm.old_logprobs=rollout"], 1.0),
        (["algorithm=bapo", "train.epochs=2"], 1 + 7 / 4),  # each of eight minibatches but the first reads a quarter
    ],
)
def test_passes_of_the_policy_without_gradients_are_those_that_a_step_makes(keys: list[str], passes: float) -> None:
    config = load_config(QWEN_30B, [*keys, "algorithm.routing_replay=off", "model.path=x", "train.minibatches=4"])
    parts = rl_step(config, SHAPE, H100, [500.0], prompt=100.0).parts
    one = forward_seconds(learner_work(config, SHAPE, H100, 600.0), 4)
    assert parts.get("log-probs", 0.0) == pytest.approx(passes * one, rel=1e-9)


@pytest.mark.parametrize("head", ["null", "float32"])
def test_norms_of_logits_gradients_read_logits_again_and_a_float32_head_multiplies_again(head: str) -> None:
    """The learner's `logit_norms` makes its logits by itself, of 2,048 columns and 151,936 tokens. The rate of float32
    is 67e12 FLOP/s; three more passes go over logits of 4 bytes at 3.35e12 bytes a second."""
    keys = ["algorithm=otb", f"learner.head_dtype={head}", "model.path=x", "train.minibatches=4"]
    config = load_config(QWEN_30B, keys)
    work = replace(learner_work(config, SHAPE, H100, 600.0), dims=ParallelDims(), stages=None)
    positions = work.tokens * work.micro_batches * 4
    read = 3 * positions * 151936 * 4 / (3350e9 * MEMORY)
    multiplied = 2 * positions * 2048 * 151936 / (67e12 * FITTED.gemm) * (head == "float32")
    multiplied *= (1 + FITTED.tile / work.tokens) * (1 + FITTED.tile / 2048)
    assert (score_seconds(config, work) - forward_seconds(work, 4)) == pytest.approx(read + multiplied, rel=1e-6)


def test_a_policy_that_teaches_itself_makes_one_more_pass_over_longer_sequences() -> None:
    """As much longer as its prompt's limit is: of 400 tokens in place of 100, behind which are 500."""
    teacher = ["algorithm=gkd", "algorithm.kl.teachers.me.prompt={prompt}"]
    teacher += ["algorithm.kl.teachers.me.max_prompt_tokens=800"]
    config = load_config(QWEN_30B, [*teacher, "model.path=x", "rollout.max_prompt_tokens=200"])
    parts = rl_step(config, SHAPE, H100, [500.0], prompt=100.0).parts
    wanted = forward_seconds(learner_work(config, SHAPE, H100, 900.0), config.train.minibatches)
    assert parts["teacher_me"] == pytest.approx(wanted, rel=1e-9)
    assert parts["teacher_me"] > 1.4 * parts["log-probs"]
    average = load_config(
        QWEN_30B, [*teacher, "algorithm.kl.reference_update_rate=0.1", "model.path=x", "rollout.max_prompt_tokens=200"]
    )
    assert rl_step(average, SHAPE, H100, [500.0], prompt=100.0).parts == parts  # no second pass as the reference


def test_demonstrations_are_trained_on_and_not_sampled() -> None:
    given = (["algorithm=luffy", "rollout.group_size=7"], ["algorithm=dr_grpo", "rollout.group_size=8"])
    keys = ["model.path=x", "algorithm.routing_replay=off", "algorithm.old_logprobs=rollout"]
    each = [load_config(QWEN_30B, [*row, *keys]) for row in given]
    shown, more = (rl_step(one, SHAPE, H100, [500.0], prompt=100.0).parts for one in each)
    assert (shown["training"], shown["rollout"] < more["rollout"]) == (pytest.approx(more["training"]), True)


# How many sequences the servers of a plan have at once, where the user does not say.
def room_of(plan: PlannedRun, wanted: SearchRequest) -> float:
    """The rows that the cache of a plan's server holds."""
    config, shape = plan.config, wanted.shape
    server = server_shape(config, config.rollout.server, weights_served(config, shape), shape, wanted.gpu)
    return rows_that_fit(shape, server, wanted.mean)


def test_servers_have_the_slots_that_take_the_least_time_of_those_that_their_cache_holds() -> None:
    keys = ("qwen3-30b-a3b", "gpus=16", "gpu=h100", "rollout.prompts_per_step=256", "learner.pp=2", "learner.vpp=1")
    given = parse_request(keys)
    best = search(given.wanted).plans[0]
    each = {slots: search(parse_request((*keys, f"rollout.slots={slots}")).wanted).plans[0] for slots in SLOTS}
    fitting = [plan.step.seconds for slots, plan in each.items() if slots <= room_of(plan, given.wanted)]
    assert best.step.seconds <= min(fitting)
    assert best.step.seconds < 0.9 * each[512].step.seconds
    slots = best.config.rollout.slots
    assert best.keys["rollout.slots"] == slots > 512
    assert f"slots: {slots}\n" in configuration_file(given, best)
    assert "rollout.slots" not in each[512].keys


def test_several_servers_are_planned_where_one_would_gather_too_many_rows() -> None:
    """A GPU of 128 reads 3.5 GB of experts of Qwen3-235B-A22B for a token, one of 32 14 GB, 5 ms more; but to gather
    and scatter 3,072 rows of 8 KB in 94 layers, over a node's eight links of 50 GB/s, takes 17 ms, and 768 rows 3 ms.
    """
    wanted = parse_request(("qwen3-235b-a22b", "gpus=512", "gpu=h100", "slurm.engines.nodes=48")).wanted
    ((_, placed),) = placements(wanted)
    server = with_keys(wanted.base, placed).rollout.server
    assert (server.count, server.ranks) == (12, 32)


def test_servers_get_no_more_slots_than_their_cache_holds() -> None:
    """Of long completions, of which it holds fewer than the default's 512."""
    keys = ("qwen3-30b-a3b", "gpus=16", "gpu=h100", "rollout.max_new_tokens=39936", "slurm.engines.nodes=1")
    wanted = parse_request(keys).wanted
    best = search(wanted).plans[0]
    assert best.config.rollout.slots <= room_of(best, wanted) < 512


def test_each_replica_of_a_server_has_the_slots_of_a_request_and_a_cache_is_used_whole() -> None:
    """vLLM refuses servers of fewer; between two of the values that are tried lies up to half of a cache."""
    keys = ("qwen3-235b-a22b", "gpus=64", "gpu=h100", "rollout.max_new_tokens=39936")
    for group in (16, 64):
        wanted = parse_request((*keys, f"rollout.group_size={group}")).wanted
        for _, placed in placements(wanted):
            rollout = with_keys(wanted.base, placed).rollout
            assert rollout.slots // rollout.server.dp >= group
    few = parse_request((*keys, "rollout.group_size=2")).wanted
    found = {with_keys(few.base, placed).rollout.slots for _, placed in placements(few)}
    assert any(64 < slots < 512 for slots in found - {*SLOTS})
