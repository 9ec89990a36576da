"""What layers keep for their backward pass, and gradients: counted on real ranks, in dry runs, and by the plan."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import rl_megatron.learner.megatron  # noqa: F401  before megatron is imported
from launcher.build.model import starting_shape
from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.config.activations import freed, halves
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.learner import LearnerSection, RecomputeSection
from rl_megatron.learner import heads
from rl_megatron.learner.checkpoint.loading import READS_WITHOUT_COMMON
from rl_megatron.models.shape import DeltaNet, Indexer, LatentAttention, ModelShape, Rope, Router
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.types import LossInputs, LossOutput, Samples
from rl_megatron.weights.layouts.learner import Elements, Rank
from tests.distributed.ranks import run_ranks
from tests.recipes.collectives import collectives, layers_of
from tests.recipes.dry_run import counted_micro_batches, dry_runs
from tests.recipes.meter import Meter
from tests.samples import sequences_of
from tests.small_models import TINY_MOE
from tools.planner.memory import footprints
from tools.planner.terms import kept_bytes, optimizer_bytes

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
    "sparse attention": replace(
        MOE,
        num_kv_heads=4,
        head_dim=24,
        qk_norm=None,
        router=SIGMOID,
        latent=LatentAttention(query_rank=24, kv_rank=16, nope_dim=16, rope_dim=8, value_dim=24),
        indexer=Indexer(heads=2, head_dim=16, top_k=40, layers=(0,)),
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
    ("experts", {"parts": ["moe"]}),
    ("experts", {"parts": ["moe_act"]}),
    ("experts", {"parts": ["core_attn", "moe_act"]}),
    ("fused experts, sinks", {"parts": ["core_attn", "moe_act"]}),
    ("a dense layer, shared experts", {"parts": ["mlp", "shared_experts"]}),
    ("latent attention", {"parts": ["mla_up_proj"]}),
    ("latent attention", {"parts": ["mla_up_proj", "moe"]}),
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
    return Rank(stage=0, parameters=elements, trained_parameters=elements, matrices=elements, **others)


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
        for layer, chosen in self._packed.chosen.items():  # what the indexer chose is with the micro-batch
            self.bytes[f"{layer} attention"] += chosen.untyped_storage().nbytes()


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
    world.init_process_groups(learners[0], rank=rank, rendezvous=f"file://{folder}/rendezvous", seed=0)
    seen = []
    for number, ((name, _), learner) in enumerate(zip(cases, learners, strict=True)):
        kernel = sdpa_kernel(SDPBackend.MATH) if number >= len(cases) - plain else contextlib.nullcontext()
        with kernel, Meter() as meter:
            seen.append(passed(SHAPES[name], learner, meter))
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))
    world.destroy_process_groups()


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
        longest = 0 if shape.indexer is None else int(LENGTHS.max())
        for half, planned in halves(learner, shape, layer, longest).items():
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
        gone = on_gpu.model_copy(update={"recompute": RecomputeSection(parts=("core_attn",))})
        assert freed(gone, shape, 1, longest)["core_attn"] > held - fused


def test_recomputation_frees_what_the_plan_says_and_changes_no_bit(alone: Sequence[Seen]) -> None:
    without = {shape: seen for shape, _, (seen,) in alone[: len(SHAPES)]}
    for shape, learner, (seen,) in alone[len(SHAPES) : -1]:
        assert (seen["loss"], seen["norm"]) == (without[shape]["loss"], without[shape]["norm"]), learner.recompute
        rank = rank_of(Elements(dense=0, experts=0), tokens=TOKENS, layers=tuple(range(shape.num_layers)))
        planned = kept_bytes(learner, shape, rank)
        assert sum(seen["bytes"].values()) == pytest.approx(planned, rel=0.03), (shape.family, learner.recompute)


def test_gradients_of_bfloat16_have_half_the_bytes_and_almost_the_norm(alone: Sequence[Seen]) -> None:
    (_, _, (whole,)), *_, (shape, learner, (half,)) = alone
    assert half["loss"] == whole["loss"]
    assert half["norm"] == pytest.approx(whole["norm"], rel=1e-2)
    assert half["norm"] != whole["norm"]
    planned = {m.terms["gradients"] for m in footprints(RunConfig(learner=learner), shape)}
    assert [half["gradients"]] == pytest.approx(list(planned), rel=0.01)  # buffers are padded
    assert 2 * half["gradients"] == whole["gradients"]
    per_parameter = optimizer_bytes(learner, shape, rank_of(PLENTY))[1] / PLENTY.both
    added, left = half["step"]
    assert added == pytest.approx(half["gradients"] / 2 * per_parameter, rel=0.02)
    assert whole["step"][0] < 0.7 * added  # what is there before: the norms of some gradients
    assert max(left, whole["step"][1]) <= 0


# The dry run of a rank counts what the real rank holds and sends, and what the plan says of a recipe's stages.
SEQUENCE = 128
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2-ep2": {"tp": 2, "ep": 2, "router": {"seq_aux_loss": 0.1, "z_loss": 0.1}},
    "pp2, recomputed, float32 head": {"pp": 2, "recompute": {"uniform": 1}, "head_dtype": "float32"},
    "pp2, recomputed, scores": {"pp": 2, "recompute": {"uniform": 1}},
}
SHAPE = replace(TINY_MOE, hidden_size=128, head_dim=32, expert_width=64, vocab_size=64)  # most bytes are a layer's


def shape_of(layout: str) -> ModelShape:
    return replace(SHAPE, has_score_head=True, tie_embeddings=False) if "scores" in layout else SHAPE


def learner_of(layout: str) -> LearnerSection:
    keys = {"dtype": "bfloat16", "max_tokens_per_micro_batch": 1024, "timeout_seconds": 120, **LAYOUTS[layout]}
    return LearnerSection.model_validate(keys)


def real(rank: int, layout: str, folder: Path) -> None:
    """A rank with weights, in a world of two, whose routers choose all experts equally often."""
    torch.set_num_threads(1)
    from rl_megatron.learner import world
    from tests.recipes.fake_step import micro_batch, policy

    learner = learner_of(layout)
    import megatron.core.distributed.param_and_grad_buffer as buffers

    for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):  # those of GPUs
        setattr(buffers, name, getattr(buffers, name).upstream)
    world.init_process_groups(learner, rank=rank, rendezvous=f"file://{folder}/{layout}", seed=1)
    heads.CPU_CHUNK_BYTES = 1 << 62
    packed = micro_batch(learner, SEQUENCE)
    even = torch.arange(len(packed.source) * SHAPE.experts_per_token) % SHAPE.num_experts
    layers = SHAPE.num_layers // learner.pp
    routes = even.view(-1, 1, SHAPE.experts_per_token).expand(-1, layers, -1).to(torch.uint8)
    counted = []
    for _ in range(3):
        with Meter() as meter:
            made = policy(shape_of(layout), learner, replace(packed, extra={"routes": routes}))
            for tensor in made.tensors.values():
                tensor.normal_(std=0.02)
            made.adopt()
            counted.append(made.counted(meter, learner.pp, rank))
    found = min(counted, key=lambda one: one.passes)  # gloo's thread may release what it has sent late
    (folder / f"{layout} real {rank}.json").write_text(json.dumps(asdict(found)))
    world.destroy_process_groups()


def dry(_: int, layout: str, rank: int, folder: Path) -> None:
    from tests.recipes.fake_step import dry_run

    learner = learner_of(layout)
    found = dry_run(shape_of(layout), learner, rank, sequence=SEQUENCE, micro_batches=learner.pp)
    (folder / f"{layout} dry {rank}.json").write_text(json.dumps(asdict(found)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_counts_what_a_real_rank_holds_and_sends(layout: str, tmp_path: Path) -> None:
    run_ranks(real, 2, layout, tmp_path)
    for rank in (0, 1):
        run_ranks(dry, 1, layout, rank, tmp_path)
        said, true = (json.loads((tmp_path / f"{layout} {kind} {rank}.json").read_text()) for kind in ("dry", "real"))
        assert {key: said[key] for key in ("stage", "parameters", "gradients")} == {
            key: true[key] for key in ("stage", "parameters", "gradients")
        }
        assert said["optimizer"] == pytest.approx(true["optimizer"], rel=0.01)
        assert said["passes"] == pytest.approx(true["passes"], rel=0.03)
        assert said["collectives"] == true["collectives"]
        assert_formula(learner_of(layout), shape := shape_of(layout), said)
        terms = {m.stage: m.terms for m in footprints(RunConfig(learner=learner_of(layout)), shape)}[said["stage"]]
        assert said["passes"] == pytest.approx(terms["activations"] + terms["logits"], rel=0.04)


def test_of_a_job_that_scores_it_builds_the_model_that_the_job_trains(tmp_path: Path) -> None:
    model = make_tiny_model(TinySizes(), tmp_path, 0)
    config = load_config("reward_tiny", ["run.name=x", f"model.path={model}"])
    (planned, *_) = footprints(config, starting_shape(config))
    (said,) = dry_runs(config, str(model), [0])
    assert said.parameters == planned.terms["parameters"]


@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (4, 2), (8, 4), (8, 1)])
def test_it_has_as_many_micro_batches_in_flight_as_there_ever_are(pp: int, vpp: int) -> None:
    """The first stage of an interleaved pipeline has passed 2 (pp - 1) + (vpp - 1) pp + 1 chunks forward when the first
    goes back (arXiv:2104.04473); as many micro-batches as stages have fewer."""
    count = counted_micro_batches(LearnerSection.model_construct(pp=pp, vpp=vpp))
    ahead = pp if vpp == 1 else 2 * (pp - 1) + (vpp - 1) * pp + 1
    assert count % pp == 0, "megatron-core's interleaved schedule wants whole rounds"
    assert count * vpp >= ahead
    assert vpp == 1 or pp * vpp < ahead


def assert_formula(learner: LearnerSection, shape: ModelShape, said: dict[str, Any]) -> None:
    """The closed form has the same kinds of collectives, with their bytes."""
    layers = layers_of(learner, shape, said["stage"])
    found = collectives(learner, shape, said["stage"], said, layers=layers, micro_batches=learner.pp)
    counted = {kind: sent for kind, (_, sent) in said["collectives"].items() if sent > 1000}
    assert found.keys() >= counted.keys()
    assert {kind: found[kind] for kind in counted} == {kind: pytest.approx(n, rel=0.03) for kind, n in counted.items()}


MANY = replace(
    SHAPE, num_layers=6, num_experts=64
)  # a token's numbers for all of them are as large as its hidden state


def in_stages() -> LearnerSection:
    keys = {"dtype": "bfloat16", "pp": 3, "ep": 8, "dp": 8, "recompute": {"uniform": 1}}
    return LearnerSection.model_validate({**keys, "max_tokens_per_micro_batch": 1024})


def dry_stage(last: int, folder: Path) -> None:
    from tests.recipes.fake_step import dry_run

    stage = 2 * last
    found = dry_run(MANY, in_stages(), 8 * stage, sequence=SEQUENCE, micro_batches=3)
    (folder / str(stage)).write_text(str(found.passes))


def test_stages_hold_nothing_of_micro_batches_that_are_through_nor_outputs_that_are_sent(tmp_path: Path) -> None:
    run_ranks(dry_stage, 2, tmp_path)  # each in a world of its own
    first, _, last = sorted(footprints(RunConfig(learner=in_stages()), MANY), key=lambda found: found.stage)
    for planned in (first, last):
        counted = int((tmp_path / str(planned.stage)).read_text())
        more = planned.terms["activations"] + planned.terms["logits"] - counted
        assert 0 < more < 1024 * MANY.hidden_size * 2  # attention's copy, which sequences of one length do not need


LATENT = replace(
    SHAPE,
    num_kv_heads=4,
    head_dim=40,
    qk_norm=None,
    latent=LatentAttention(query_rank=48, kv_rank=32, nope_dim=32, rope_dim=8, value_dim=24),
    rope=Rope(dim=8),
)
SHARED = replace(LATENT, dense_layers=1, dense_width=256, shared_width=64)
DENSE = replace(SHAPE, family="qwen3", num_experts=0, experts_per_token=0, expert_width=0, dense_width=192)
LONG = 4096


def dry_latent_over_tp(_: int, folder: Path) -> None:
    from tests.recipes.fake_step import dry_run

    (folder / "latent").write_text(json.dumps(asdict(dry_run(SHARED, over_tp(), 0, sequence=SEQUENCE))))


def over_tp() -> LearnerSection:
    keys = {"dtype": "bfloat16", "tp": 2, "ep": 2, "recompute": {"uniform": 1}, "max_tokens_per_micro_batch": 1024}
    return LearnerSection.model_validate(keys)


def test_latents_shared_experts_and_dense_layers_send_what_the_closed_form_says(tmp_path: Path) -> None:
    run_ranks(dry_latent_over_tp, 1, tmp_path)
    said = json.loads((tmp_path / "latent").read_text())
    assert_formula(over_tp(), SHARED, said)
    (terms,) = [m.terms for m in footprints(RunConfig(learner=over_tp()), SHARED) if m.rank == 0]
    assert said["passes"] == pytest.approx(terms["activations"] + terms["logits"], rel=0.04)


def dry_adapters(stage: int, folder: Path) -> None:
    from tests.recipes.fake_step import dry_run

    found = dry_run(SHARED, with_adapters(), stage, sequence=SEQUENCE, micro_batches=2)
    (folder / str(stage)).write_text(json.dumps(asdict(found)))


def with_adapters() -> LearnerSection:
    lora = {"rank": 4, "targets": ["experts"]}
    keys = {"dtype": "bfloat16", "pp": 2, "stage_layers": "1+3", "lora": lora, "max_tokens_per_micro_batch": 1024}
    return LearnerSection.model_validate(keys)


def test_a_stage_without_adapters_has_no_gradients_and_no_state(tmp_path: Path) -> None:
    """Adapters of experts alone, of which the first stage, a dense layer, has none."""
    run_ranks(dry_adapters, 2, tmp_path)  # each in a world of its own
    for planned in footprints(RunConfig(learner=with_adapters()), SHARED):
        said = json.loads((tmp_path / str(planned.stage)).read_text())
        assert said["gradients"] == planned.terms["gradients"]
        assert said["optimizer"] == pytest.approx(planned.terms["optimizer"], rel=0.01, abs=1000)
        assert (said["gradients"] > 0) is (planned.stage == 1)


def dry_dense_over_tp(_: int, folder: Path) -> None:
    from tests.recipes.fake_step import dry_run

    learner = over_tp().model_copy(update={"ep": 1})
    (folder / "dense").write_text(str(dry_run(DENSE, learner, 0, sequence=SEQUENCE).passes))


def test_dense_layers_over_tp_hold_the_gathered_gradient_of_their_output(tmp_path: Path) -> None:
    run_ranks(dry_dense_over_tp, 1, tmp_path)
    learner = over_tp().model_copy(update={"ep": 1})
    (terms,) = [m.terms for m in footprints(RunConfig(learner=learner), DENSE) if m.rank == 0]
    assert int((tmp_path / "dense").read_text()) == pytest.approx(terms["activations"] + terms["logits"], rel=0.03)


def dry_latent(_: int, folder: Path) -> None:
    from tests.recipes.fake_step import dry_run

    learner = latent_learner().model_copy(update={"fp8": "tensorwise"})  # not torch's layers'
    (folder / "passes").write_text(str(dry_run(LATENT, learner, 0, sequence=LONG).passes))


def latent_learner() -> LearnerSection:
    keys = {"dtype": "bfloat16", "cp": 2, "max_tokens_per_micro_batch": LONG, "timeout_seconds": 120}
    return LearnerSection.model_validate(keys)


def test_latent_attention_over_cp_keeps_its_mask_and_no_scores_as_on_gpus(tmp_path: Path) -> None:
    run_ranks(dry_latent, 1, tmp_path)
    (planned,) = [m.terms for m in footprints(RunConfig(learner=latent_learner()), LATENT) if m.rank == 0]
    mask = LATENT.num_layers * (LONG // 2) * LONG * 2  # numbers to add in bfloat16, which the plan does not count
    passes = planned["activations"] + planned["logits"] + mask
    assert 0.75 * passes < int((tmp_path / "passes").read_text()) < 1.1 * passes
    assert 1.1 * passes < LATENT.num_heads * mask  # which scores in bfloat16 take


def test_a_meter_counts_what_lives_and_what_is_sent() -> None:
    with Meter() as meter:
        kept = torch.zeros(1000)
        more = kept + 1
        assert (meter.live, meter.peak) == (8000, 8000)
        part = more[:10]
        del more
        assert meter.live == 8000  # a view holds all of it
        del part
        assert (meter.live, meter.peak) == (4000, 8000)
        meter.restart()
        kept.add_(1)
        assert (meter.live, meter.peak, meter.calls) == (4000, 4000, {})
