"""The dry run of a rank counts what the real rank holds and sends, and what the plan says of a recipe's stages."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.build.model import starting_shape
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.learner import logprobs
from rl_megatron.models.shape import LatentAttention, ModelShape, Rope
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.options.fusion import FusionSection
from tests.distributed.ranks import run_ranks
from tests.recipes.collectives import collectives, layers_of
from tests.recipes.dry_run import counted_micro_batches, dry_runs
from tests.recipes.meter import Meter
from tests.small_models import TINY_MOE
from tools.planner.memory import footprints

SEQUENCE = 128
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2-ep2": {"tp": 2, "ep": 2, "router": {"seq_aux_loss": 0.1, "z_loss": 0.1}},
    "pp2, recomputed, float32 head": {"pp": 2, "recompute": {"uniform": 1}, "head_dtype": "float32"},
    "pp2, recomputed, scores": {"pp": 2, "recompute": {"uniform": 1}},
}
SHAPE = replace(TINY_MOE, hidden_size=128, head_dim=32, expert_width=64, vocab_size=64)  # most bytes are a layer's


def shape_of(layout: str) -> ModelShape:
    return replace(SHAPE, scores=True, tie_embeddings=False) if "scores" in layout else SHAPE


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
    world.join(learner, rank=rank, rendezvous=f"file://{folder}/{layout}", seed=1)
    logprobs.CPU_CHUNK_BYTES = 1 << 62
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
    world.leave()


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

    kernels = {"fp8": "tensorwise", "fusion": FusionSection(router=True)}  # not torch's layers'
    learner = latent_learner().model_copy(update=kernels)
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
