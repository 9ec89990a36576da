"""Seconds of a step against other arithmetic: counted FLOPs, a simulated pipeline, bytes by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.errors import ConfigError
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import ModelShape
from rl_megatron.scaling.constants import PRIOR
from rl_megatron.scaling.flops import PASSES, training_flops
from rl_megatron.scaling.hardware import GPUS, Gpu, gpu_named
from rl_megatron.scaling.layers.messages import replicated
from rl_megatron.scaling.parameters import rank_parameters
from rl_megatron.scaling.time import LearnerWork, step_seconds, step_terms
from rl_megatron.types import ParallelDims
from tests.recipes.collectives import collectives

IDEAL = replace(
    PRIOR, gemm=1, gemm_fp8=1, attention=1, power=0, tile=0, passes=0, links=1, host=0, imbalance=1, fixed=0, age=0
)
FREE = replace(GPUS["h100"], hbm=1e15, nvlink=1e15, network=1e15)
"""A GPU whose memory and links take no time: what is left are the products."""
LENGTH = 4096


def work(name: str | ModelShape, gpu: Gpu = FREE, micro: float = 1, **degrees: int) -> LearnerWork:
    shape = NAMED[name] if isinstance(name, str) else name
    return LearnerWork(
        shape=shape, dims=ParallelDims(**degrees), gpu=gpu, tokens=LENGTH, length=LENGTH, micro_batches=micro
    )


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
            start = max(now[stage], 0.0 if first else done[before])
            now[stage] = start + (forward if kind == "f" else backward)
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
    token = 2048 * 2 + 4 / 2
    slow = replace(FREE, nvlink=450.0, network=50.0)
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
    degrees = {"tp": 4, "ep": 8, "dp": 2}
    recompute = {"uniform": 1 if again else None}
    learner = LearnerSection.model_validate(
        {**degrees, "dtype": "bfloat16", "max_tokens_per_micro_batch": LENGTH, "recompute": recompute}
    )
    layers = range(shape.num_layers)
    counted = collectives(learner, shape, 0, sizes, layers=layers, micro_batches=1)
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
    slow = replace(FREE, nvlink=1.0)
    shape = NAMED["qwen3-30b-a3b"]
    dense = replace(shape, num_experts=0, dense_width=6144)

    def seconds(of: ModelShape, hidden: bool) -> float:
        given = replace(work(of, slow, dp=2), sync_hidden=hidden)
        return step_terms(given, IDEAL)["gradients, parameters"]

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
    plain = work(shape)
    found = step_terms(replace(plain, again=frozenset({"full"})), IDEAL)
    forward = training_flops(shape, [LENGTH]) / PASSES / 989.5e12
    assert found["computed again"] == pytest.approx(forward, rel=2e-3)


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
