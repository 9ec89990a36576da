"""A checkpoint of one layout goes on in another as in its own, whichever degrees change, and of whichever model.

Runs are relays. Each layout loads what the one before saved, makes the steps that the one before makes after saving,
and then saves and goes on itself. All run in two processes that are started once.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rl_megatron.algorithms.auxiliary import ValueLoss
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.data.packing import pack
from rl_megatron.errors import CheckpointError
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import LatentAttention, ModelShape, Rope, Router
from rl_megatron.training.measures import Made
from rl_megatron.types import Loss, Samples, SkippedStep
from tests.distributed.ragged import ragged_samples
from tests.distributed.ranks import run_ranks
from tests.optimizer_step import train_step
from tests.rows import policy_loss

if TYPE_CHECKING:
    from rl_megatron.learner.trained import MegatronLearner

STEPS = 2
RANKS = 2
MOE = replace(
    NAMED["qwen3-30b-a3b"],
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_experts=4,
    experts_per_token=2,
    expert_width=24,
    vocab_size=259,
    max_positions=64,
)
BIASED = replace(  # gpt-oss: experts are one tensor, with biases
    MOE,
    family="gpt_oss",
    qk_norm=None,
    sinks=True,
    windows=(5, 0),
    expert_bias=True,
    qkv_bias=True,
    out_bias=True,
    clamped_swiglu=1.0,
    router=Router(logit_bias=True),
    rope=Rope(),
)
LATENT = replace(  # DeepSeek-V3: latent attention, a dense first layer, a shared expert, a selection bias
    MOE,
    family="deepseek_v3",
    num_kv_heads=4,
    head_dim=18,
    latent=LatentAttention(query_rank=10, kv_rank=12, nope_dim=10, rope_dim=8, value_dim=6),
    dense_layers=1,
    dense_width=48,
    shared_width=24,
    router=Router(score="sigmoid", selection_bias=True, scaling=2.5),
    qk_norm=None,
)
WHOLE = {"optimizer": {"distributed": False}}  # every data rank has the optimizer's whole state
MUON = {"optimizer": {"name": "muon", "weight_decay": 0.1}}
Relay = tuple[ModelShape, Sequence[Mapping[str, Any]]]
RELAYS: Mapping[str, Relay] = {
    "experts": (
        replace(MOE, num_layers=5),
        [{"tp": 2}, {"pp": 2, "vpp": 2, "stage_layers": "1+2+1*2"}, {"cp": 2, "ep": 2}, {}],  # etp is 2, then 1
    ),
    "experts with biases": (BIASED, [{"tp": 2, "etp": 1}, {"ep": 2}]),  # dp is 1, then 2
    "latent attention": (LATENT, [{"tp": 2, "ep": 2}, {"pp": 2}, {"tp": 2}]),  # pp: the first stage has no experts
    "whole optimizer": (LATENT, [{**WHOLE, "pp": 2}, WHOLE]),
    "muon": (LATENT, [{**MUON, "tp": 2}, {**MUON, "tp": 2}, {**MUON, "pp": 2}, {**MUON, "cp": 2, "ep": 2}, MUON]),
    "muon, experts with biases": (BIASED, [{**MUON, "tp": 2, "etp": 1}, {**MUON, "ep": 2}]),
    "muon, bfloat16": (MOE, [{**MUON, "dp": 2, "dtype": "bfloat16"}] * 2),
}


def make_samples() -> Samples:
    """6 ragged sequences with advantages and returns."""
    g = torch.Generator().manual_seed(5)
    samples = ragged_samples(6, g)
    n = len(samples.input_ids)
    drawn = {name: torch.randn(n, generator=g) for name in ("advantages", "old_values", "returns")}
    return replace(samples, old_logprobs=torch.full((n,), -5.5), **drawn)


def fill(learner: MegatronLearner) -> None:
    """Numbers of each tensor's own, alike on all ranks that hold it whole."""
    for name, tensor in learner.tensors.items():
        g = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        mean = 1.0 if "norm" in name else 0.0
        tensor.copy_(torch.empty(tensor.shape).normal_(mean, 0.1, generator=g))
    learner.adopt()


def steps(megatron: MegatronLearner, learner: LearnerSection, rank: int, loss: Loss) -> list[tuple[float, float]]:
    """Loss and gradient norm of the next steps; empty off the last stage."""
    batch = pack(make_samples(), dims=learner.dims, max_tokens=1000)
    counts = {"num_tokens": batch.num_tokens, "num_sequences": batch.num_sequences}
    found = []
    for _ in range(STEPS):
        result = train_step(megatron, batch.micro_batches[learner.dims.dp_rank(rank)], loss, 1e-3, **counts)
        assert not isinstance(result, SkippedStep)
        if isinstance(result, Made):
            found.append((result.loss, result.step.grad_norm))
    return found


def leg(rank: int, folder: Path, relay: str, number: int) -> dict[str, Any]:
    """Load from the leg before, step; save and step on for the leg behind."""
    from rl_megatron.learner import world
    from rl_megatron.learner.megatron import make_critic, make_policy

    shape, layouts = RELAYS[relay]
    learner = LearnerSection.model_validate(layouts[number])
    device = world.join(learner, rank=rank, rendezvous=f"file://{folder}/rendezvous-{relay}-{number}", seed=1)
    made: dict[str, tuple[MegatronLearner, Loss]] = {
        "policy": (make_policy(shape, learner, device, temperature=0.7), policy_loss(objective="cispo"))
    }
    if shape is BIASED:
        made["critic"] = make_critic(shape, learner, device), ValueLoss(clip=0.2)
    seen = {}
    for role, (megatron, loss) in made.items():
        if number == 0:
            fill(megatron)
        else:
            megatron.load(folder / f"{relay}-{number - 1}-{role}")
        seen[role] = {"first": steps(megatron, learner, rank, loss)}
        if number < len(layouts) - 1:
            megatron.save(folder / f"{relay}-{number}-{role}")
            seen[role]["then"] = steps(megatron, learner, rank, loss)
    world.leave()
    return seen


def as_older_versions(folder: Path) -> None:
    """One process: a checkpoint with one optimizer for all parameters, experts' too, and what then happens here."""
    from rl_megatron.learner import world
    from rl_megatron.learner.megatron import make_policy
    from rl_megatron.learner.model import build

    shape, loss, seen = MOE, policy_loss(objective="cispo"), {}
    for name, options in (("sharded", {}), ("whole", WHOLE)):
        learner = LearnerSection.model_validate(options)
        device = world.join(learner, rank=0, rendezvous=f"file://{folder}/rendezvous-old-{name}", seed=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "_mark_experts", lambda _: None)
            old = make_policy(shape, learner, device, temperature=0.7)
        assert len(old._optimizer.chained_optimizers) == 1
        fill(old)
        steps(old, learner, 0, loss)
        (folder / name).mkdir()
        old.save(folder / name)
        new = make_policy(shape, learner, device, temperature=0.7)
        try:
            new.load(folder / name)
            seen[name] = [steps(old, learner, 0, loss), steps(new, learner, 0, loss)]
        except CheckpointError as error:
            seen[name] = str(error)
        world.leave()
    (folder / "old.json").write_text(json.dumps(seen))


def rank_main(rank: int, folder: Path) -> None:
    """One rank of all relays; it is idle where a layout has fewer."""
    torch.set_num_threads(1)
    import rl_megatron.learner.megatron  # noqa: F401  makes megatron run here

    for relay, (_, layouts) in RELAYS.items():
        for number, layout in enumerate(layouts):
            if rank < LearnerSection.model_validate(layout).dims.world_size:
                seen = leg(rank, folder, relay, number)
                (folder / f"{relay}-{number}-rank{rank}.json").write_text(json.dumps(seen))
    if rank == RANKS - 1:
        as_older_versions(folder)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("relays")
    for relay, (_, layouts) in RELAYS.items():
        for number in range(len(layouts)):
            for role in ("policy", "critic"):
                (folder / f"{relay}-{number}-{role}").mkdir()
    run_ranks(rank_main, RANKS, folder)
    return folder


@pytest.mark.parametrize("relay", RELAYS)
def test_another_layout_goes_on_as_the_one_that_saved(relay: str, seen: Path) -> None:
    _, layouts = RELAYS[relay]
    runs = [
        [json.loads(path.read_text()) for path in sorted(seen.glob(f"{relay}-{number}-rank*.json"))]
        for number in range(len(layouts))
    ]
    for was, layout, before, after in zip(layouts, layouts[1:], runs, runs[1:], strict=False):
        for role, saved in before[-1].items():
            resumed = [rank[role]["first"] for rank in after if rank[role]["first"]]
            assert resumed
            assert len(saved["then"]) == STEPS
            if layout == was:
                assert resumed == [saved["then"]] * len(resumed)
            for steps_of_rank in resumed:
                for (loss, norm), (wanted_loss, wanted_norm) in zip(steps_of_rank, saved["then"], strict=True):
                    assert loss == pytest.approx(wanted_loss, rel=1e-6, abs=1e-6), (layout, role)
                    assert norm == pytest.approx(wanted_norm, rel=1e-5), (layout, role)


def test_a_checkpoint_of_an_older_version_without_expert_parallelism_goes_on(seen: Path) -> None:
    found = json.loads((seen / "old.json").read_text())
    went_on, resumed = found["sharded"]
    assert resumed == [pytest.approx(step, rel=1e-6) for step in went_on]
    assert "whole was written with learner.ep=1 and learner.optimizer.distributed=false by an older" in found["whole"]
