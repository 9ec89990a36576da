"""Seconds of a step against other arithmetic: counted FLOPs, a simulated pipeline, bytes by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rl_megatron.errors import ConfigError
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import ModelShape
from rl_megatron.scaling.constants import PRIOR
from rl_megatron.scaling.flops import PASSES, forward_flops, training_flops
from rl_megatron.scaling.hardware import GPUS, Gpu, gpu_named
from rl_megatron.scaling.time import LearnerWork, step_seconds, step_terms
from rl_megatron.types import ParallelDims

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


@pytest.mark.parametrize("name", [*NAMED, "dense"])
@pytest.mark.parametrize("degrees", [{}, {"tp": 4, "dp": 2, "ep": 8}, {"tp": 2, "cp": 2, "dp": 2, "ep": 2, "etp": 2}])
def test_at_the_peak_a_step_is_its_counted_products_over_the_ranks(name: str, degrees: dict[str, int]) -> None:
    """The count is `flops`', which torch confirms; attention's backward pass has five products for four."""
    shape = replace(NAMED["qwen3-30b-a3b"], num_experts=0, dense_width=6144) if name == "dense" else NAMED[name]
    degrees = {k: v for k, v in degrees.items() if shape.num_experts or k not in ("ep", "etp")}
    found = step_terms(work(shape, **degrees), IDEAL)
    without = {"hidden_size": 0, "num_experts": 0, "dense_width": 0, "vocab_size": 0, "latent": None}
    width = shape.head_dim if shape.latent is None else (shape.head_dim + shape.latent.value_dim) / 2
    scores = forward_flops(replace(shape, **without), [LENGTH]) * width / shape.head_dim
    counted = training_flops(shape, [LENGTH]) + scores / 2
    ranks = degrees.get("tp", 1) * degrees.get("cp", 1)
    assert sum(found.values()) == pytest.approx(counted / ranks / 989.5e12, rel=2e-3)
    assert found["attention"] == pytest.approx((PASSES + 0.5) * scores / ranks / 989.5e12, rel=2e-3)


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
    NVLink domain; 2 ways, forward and backward, 48 layers; over the network half of all, one copy for a node."""
    slow = replace(FREE, nvlink=450.0, network=50.0)
    inside = step_terms(work("qwen3-30b-a3b", slow, dp=8, ep=8), IDEAL)["all-to-all"]
    assert inside == pytest.approx(4096 * 2048 * 2 * 8 * 7 / 8 / 450e9 * 2 * 2 * 48, rel=1e-6)
    across = step_terms(work("qwen3-30b-a3b", slow, dp=16, ep=16), IDEAL)["all-to-all"]
    assert across == pytest.approx(4096 * 2048 * 2 * 2 * (1 - 0.5**8) * 0.5 / 50e9 * 2 * 2 * 48, rel=1e-6)
    plain = replace(work("qwen3-30b-a3b", slow, dp=16, ep=16), dispatcher="alltoall")
    copies = step_terms(plain, replace(IDEAL, plain=1.0))["all-to-all"]
    assert copies == pytest.approx(4096 * 2048 * 2 * 8 * 0.5 / 50e9 * 2 * 2 * 48, rel=1e-6)


def test_recomputing_whole_layers_adds_their_forward_pass() -> None:
    shape = replace(NAMED["qwen3-30b-a3b"], vocab_size=1)
    plain = work(shape)
    found = step_terms(replace(plain, again=frozenset({"full"})), IDEAL)
    forward = forward_flops(shape, [LENGTH]) / 989.5e12
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
