"""What layers keep for their backward pass, and gradients: counted on real ranks, and by the plan's formulas."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import rl_megatron.learner.megatron  # noqa: F401  before megatron is imported
from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.learner.checkpoint.loading import READS_WITHOUT_COMMON
from rl_megatron.models.shape import DeltaNet, LatentAttention, ModelShape, Rope, Router
from rl_megatron.options.gradients import Gradients
from rl_megatron.options.kept import freed, halves
from rl_megatron.options.option import Elements, Rank
from rl_megatron.options.recompute import Recompute, RecomputeSection
from rl_megatron.types import LossInputs, LossOutput, Samples
from tests.distributed.ranks import run_ranks
from tests.samples import sequences_of
from tests.small_models import TINY_MOE
from tools.planner.memory import footprints

LENGTHS = torch.tensor([60, 61] * 4)  # in one class, so that little is padding, which is not counted
TOKENS = int(LENGTHS.sum())
MOE = replace(TINY_MOE, num_layers=2)
SIGMOID = Router(score="sigmoid", selection_bias=True, scaling=2.5)
SHAPES: Mapping[str, ModelShape] = {
    "experts": MOE,
    "a dense layer, shared experts": replace(MOE, dense_layers=1, dense_width=96, shared_width=48, router=SIGMOID),
    "no norm of heads": replace(MOE, qk_norm=None, normalize_top_k=False),
    "norm over all heads": replace(MOE, qk_norm="all"),
    "dense": replace(MOE, num_experts=0, experts_per_token=0, expert_width=0, dense_width=96),
    "latent attention": replace(  # values as wide as keys: torch keeps the scores of others on CPUs
        MOE,
        num_kv_heads=4,
        head_dim=24,
        qk_norm=None,
        router=SIGMOID,
        latent=LatentAttention(query_rank=24, kv_rank=16, nope_dim=16, rope_dim=8, value_dim=24),
        rope=Rope(dim=8),
    ),
    "delta nets, gates": replace(
        MOE,
        shared_width=48,
        delta=DeltaNet(key_heads=2, value_heads=4, key_dim=16, value_dim=24, kernel=4),
        delta_layers=(0,),
        output_gate=True,
        shared_gate=True,
        zero_centered=True,
    ),
    "fused experts, sinks": replace(
        MOE, qk_norm=None, sinks=True, expert_bias=True, qkv_bias=True, out_bias=True, clamped_swiglu=7.0
    ),
}
Case = tuple[str, Mapping[str, Any]]
HALF = {"dtype": "bfloat16"}  # float32 experts compute rows in blocks of 64 on CPUs, and keep those
RECOMPUTED: Sequence[tuple[str, Mapping[str, Any]]] = [
    ("experts", {"uniform": 1}),
    ("experts", {"uniform": 2}),
    ("experts", {"moe": True}),
    ("experts", {"moe_act": True}),
    ("experts", {"core_attn": True, "moe_act": True}),
    ("fused experts, sinks", {"core_attn": True, "moe_act": True}),
    ("a dense layer, shared experts", {"mlp": True, "shared_experts": True}),
    ("latent attention", {"mla_up_proj": True}),
    ("latent attention", {"mla_up_proj": True, "moe": True}),
]
ALONE = [
    *((name, HALF) for name in SHAPES),
    *((name, {**HALF, "recompute": keys}) for name, keys in RECOMPUTED),
    ("experts", {**HALF, "gradient_dtype": "bfloat16"}),
]
PLAIN: Sequence[Case] = [("fused experts, sinks", HALF), ("experts", {})]
"""With the attention that a GPU's fused kernels do not take: grouped queries with a mask, or in float32."""
MICRO_BATCHES = 2
MORE_OF_AN_EXPERT = 3 if READS_WITHOUT_COMMON else 0
"""Bytes that megatron-core 0.19 keeps more of each token and expert, not planned: 0.2 % of what DeepSeek-V3 keeps."""
PLENTY = Elements(dense=10**6, experts=10**7)
BETWEEN = "between"  # for a half of a layer
Seen = tuple[ModelShape, LearnerSection, list[Any]]


def samples(seed: int) -> Samples:
    g = torch.Generator().manual_seed(seed)
    ids, targets = torch.randint(0, 250, (2, TOKENS), generator=g)
    return sequences_of(LENGTHS, input_ids=ids, targets=targets)


def rank_of(elements: Elements, **changes: Any) -> Rank:
    """A rank of one stage with these parameters, all of them trained."""
    others = {"tokens": 0, "layers": (), "inputs": (), "longest": 0, "largest": 0, **changes}
    return Rank(stage=0, parameters=elements, trained=elements, matrices=elements, **others)


class Saved:
    """A tensor that autograd keeps, and the half of a layer that saved it."""

    def __init__(self, tensor: Tensor, half: str | None) -> None:
        self.tensor, self.half = tensor, half


class Count:
    """Counts the bytes that each half of a layer keeps when the loss is computed, and those kept between layers: each
    storage once, parameters and rotary angles never, and nothing from outside of the layers."""

    def __init__(self, learner: Any) -> None:
        self._half: str | None = None
        self._saved: weakref.WeakSet[Saved] = weakref.WeakSet()
        self._packed: Any = None
        self._parameters = [p for chunk in learner._trained for p in chunk.parameters()]
        self.bytes: Counter[str] = Counter()
        for model in learner._models:
            decoder = model.decoder
            model.register_forward_pre_hook(lambda *_: self._enter(None))
            decoder.register_forward_pre_hook(lambda *_: self._enter(BETWEEN))
            decoder.final_layernorm.register_forward_pre_hook(lambda *_: self._enter(None))
            for layer in decoder.layers:
                layer.register_forward_pre_hook(self._enter_layer, with_kwargs=True)
                layer.register_forward_hook(lambda *_: self._enter(BETWEEN))
                second = f"{layer.layer_number - 1} {'moe' if hasattr(layer.mlp, 'router') else 'mlp'}"
                layer.pre_mlp_layernorm.register_forward_pre_hook(lambda *_, second=second: self._enter(second))

    def _enter(self, half: str | None) -> None:
        self._half = half

    def _enter_layer(self, layer: Any, _: Any, given: Mapping[str, Any]) -> None:
        self._packed = given["packed_seq_params"]
        self._enter(f"{layer.layer_number - 1} attention")

    def hooks(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor)

    def _pack(self, tensor: Tensor) -> Saved:
        saved = Saved(tensor, self._half)
        self._saved.add(saved)
        return saved

    def read(self) -> None:
        """Whole storages, by the first half that saved them."""
        self.bytes.clear()
        seen = {t.untyped_storage().data_ptr() for t in (*self._parameters, *(self._packed.rotary or ()))}
        for saved in sorted(self._saved, key=lambda saved: saved.half is not None):
            storage = saved.tensor.untyped_storage()
            if saved.half is not None and storage.data_ptr() not in seen:
                self.bytes[saved.half] += storage.nbytes()
            seen.add(storage.data_ptr())


def passed(shape: ModelShape, learner: LearnerSection, meter: Any) -> dict[str, Any]:
    """A step of random weights: the loss, the gradient's norm and bytes, those of each half, and those that the step
    added at its peak and that it left."""
    from rl_megatron.learner.megatron import make_policy
    from rl_megatron.learner.optimizer import create_state

    made = make_policy(shape, learner, torch.device("cpu"), temperature=1.0)
    g = torch.Generator().manual_seed(0)
    for name, tensor in made.tensors.items():
        tensor.fill_(1) if "norm" in name else tensor.normal_(std=0.02, generator=g)
    made.adopt()
    count = Count(made)

    def loss(inputs: LossInputs) -> LossOutput:
        count.read()
        return CrossEntropy()(inputs)

    with count.hooks():
        row = [samples(number) for number in range(MICRO_BATCHES)]
        counts = {"num_tokens": MICRO_BATCHES * TOKENS, "num_sequences": MICRO_BATCHES * len(LENGTHS)}
        said = made.backward(row, loss, **counts)
    gradients = [b.grad_data for c in made._trained for b in (*c.buffers, *c.expert_parallel_buffers)]
    create_state(made._optimizer)
    before = meter.live
    meter.restart()
    norm = made.step(0.0).grad_norm
    return {
        "loss": said and said["loss"].value,
        "norm": norm,
        "step": (meter.peak - before, meter.live - before),
        "bytes": count.bytes,
        "gradients": sum(buffer.nbytes for buffer in gradients),
    }


def rank_main(rank: int, folder: Path, cases: Sequence[Case], plain: int) -> None:
    """All cases, which have one layout, in one world; the last ``plain`` ones with plain attention."""
    torch.set_num_threads(1)
    from rl_megatron.learner import world
    from tests.recipes.meter import Meter

    learners = [LearnerSection.model_validate(keys) for _, keys in cases]
    world.join(learners[0], rank=rank, rendezvous=f"file://{folder}/rendezvous", seed=0)
    seen = []
    for number, ((name, _), learner) in enumerate(zip(cases, learners, strict=True)):
        kernel = sdpa_kernel(SDPBackend.MATH) if number >= len(cases) - plain else contextlib.nullcontext()
        with kernel, Meter() as meter:
            seen.append(passed(SHAPES[name], learner, meter))
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))
    world.leave()


def run(folder: Path, cases: Sequence[Case], plain: int = 0) -> Iterator[Seen]:
    """Each case with what its ranks saw."""
    dims = LearnerSection.model_validate(cases[0][1]).dims
    run_ranks(rank_main, dims.world_size, folder, cases, plain)
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(dims.world_size)]
    for (name, keys), *seen in zip(cases, *ranks, strict=True):
        yield SHAPES[name], LearnerSection.model_validate(keys), seen


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Seen]:
    return list(run(tmp_path_factory.mktemp("alone"), [*ALONE, *PLAIN], len(PLAIN)))


@pytest.fixture
def alone(every: Sequence[Seen]) -> Sequence[Seen]:
    return every[: len(ALONE)]


def assert_as_planned(shape: ModelShape, learner: LearnerSection, seen: Sequence[Any]) -> None:
    """All ranks together, because experts' loads differ."""
    for layer in range(shape.num_layers):
        for half, planned in halves(learner, shape, layer).items():
            held = sum(rank["bytes"][f"{layer} {half}"] for rank in seen)
            routed = MORE_OF_AN_EXPERT * shape.num_experts if half == "moe" else 0
            assert held == pytest.approx(len(seen) * TOKENS * (planned + routed), rel=0.03), (shape, layer, half)


def test_layers_keep_what_the_plan_says(alone: Sequence[Seen], tmp_path: Path) -> None:
    for case in alone[: len(SHAPES)]:
        assert_as_planned(*case)
    for case in run(tmp_path, [("experts", {**HALF, "tp": 2, "ep": 2})]):
        assert_as_planned(*case)


def test_attention_without_a_fused_kernel_keeps_the_probabilities_that_the_plan_says(every: Sequence[Seen]) -> None:
    longest = int(LENGTHS.max())
    for shape, learner, (seen,) in every[len(ALONE) :]:
        on_gpu = learner.model_copy(update={"device": "cuda", "layers": "torch"})
        held, fused = (halves(each, shape, 1, longest)["attention"] for each in (on_gpu, learner))
        assert seen["bytes"]["1 attention"] == pytest.approx(TOKENS * held, rel=0.03), shape.family
        assert held > 1.2 * fused
        gone = on_gpu.model_copy(update={"recompute": RecomputeSection(core_attn=True)})
        assert freed(gone, shape, 1, longest)["core_attn"] > held - fused


def test_recomputation_frees_what_the_plan_says_and_changes_no_bit(alone: Sequence[Seen]) -> None:
    without = {shape: seen for shape, _, (seen,) in alone[: len(SHAPES)]}
    for shape, learner, (seen,) in alone[len(SHAPES) : -1]:
        assert (seen["loss"], seen["norm"]) == (without[shape]["loss"], without[shape]["norm"]), learner.recompute
        rank = rank_of(Elements(dense=0, experts=0), tokens=TOKENS, layers=tuple(range(shape.num_layers)))
        planned = Recompute().memory(learner, shape, rank, {})["activations"]
        assert sum(seen["bytes"].values()) == pytest.approx(planned, rel=0.03), (shape.family, learner.recompute)


def test_gradients_of_bfloat16_have_half_the_bytes_and_almost_the_norm(alone: Sequence[Seen]) -> None:
    (_, _, (whole,)), *_, (shape, learner, (half,)) = alone
    assert half["loss"] == whole["loss"]
    assert half["norm"] == pytest.approx(whole["norm"], rel=1e-2)
    assert half["norm"] != whole["norm"]
    planned = {m.terms["gradients"] for m in footprints(RunConfig(learner=learner), shape)}
    assert [half["gradients"]] == pytest.approx(list(planned), rel=0.01)  # buffers are padded
    assert 2 * half["gradients"] == whole["gradients"]
    per_parameter = Gradients().memory(learner, shape, rank_of(PLENTY), {"step": 0})["step"] / PLENTY.both
    added, left = half["step"]
    assert added == pytest.approx(half["gradients"] / 2 * per_parameter, rel=0.02)
    assert whole["step"][0] < 0.7 * added  # what is there before: the norms of some gradients
    assert max(left, whole["step"][1]) <= 0
