"""A checkpoint of small stages or in bfloat16 goes on in another layout; tests/matrix has models' of both optimizers.

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
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.data.packing import Packer
from rl_megatron.models.shape import ModelShape, Rope, Router
from rl_megatron.training.optimizer_steps import CompletedStep
from rl_megatron.types import Loss, Samples, SkippedStep
from tests.distributed.ranks import ragged_samples, run_ranks
from tests.rows import policy_loss
from tests.samples import train_step
from tests.savings import assert_same_state, held_back, read_back
from tests.small_models import TINY_MOE

if TYPE_CHECKING:
    from rl_megatron.learner.trained import MegatronLearner

STEPS = 2
RANKS = 2
MOE = replace(TINY_MOE, num_layers=2, hidden_size=32, head_dim=8, num_experts=4, expert_width=24, max_positions=64)
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
HALF = {"dtype": "bfloat16"}
MUON = {"optimizer": {"name": "muon", "weight_decay": 0.1}}
OTHERS = {"beta1": 0.7, "beta2": 0.8, "eps": 1e-3, "weight_decay": 0.5}
Relay = tuple[ModelShape, Sequence[Mapping[str, Any]]]
RELAYS: Mapping[str, Relay] = {
    "experts": (
        replace(MOE, num_layers=5),
        [{"tp": 2}, {"pp": 2, "vpp": 2, "stage_layers": "1+2+1*2"}, {"cp": 2, "ep": 2}, {}],  # etp is 2, then 1
    ),
    "experts with biases": (BIASED, [{"tp": 2, "etp": 1}, {}, {"ep": 2}]),  # dp is 1, then 2
    "muon, experts with biases": (BIASED, [{**MUON, "tp": 2, "etp": 1}, {**MUON, "ep": 2}]),
    "muon, bfloat16": (MOE, [{**MUON, **HALF, "dp": 2}, {**MUON, **HALF, "dp": 2}, {**MUON, **HALF, "tp": 2}]),
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
    batch = Packer(dims=learner.dims, max_tokens=1000).pack(make_samples())
    counts = {"num_tokens": batch.num_tokens, "num_sequences": batch.num_sequences}
    found = []
    for _ in range(STEPS):
        result = train_step(megatron, batch.micro_batches[learner.dims.dp_rank(rank)], loss, 1e-3, **counts)
        assert not isinstance(result, SkippedStep)
        if isinstance(result, CompletedStep):
            found.append((result.loss, result.result.grad_norm))
    return found


def leg(rank: int, folder: Path, relay: str, number: int) -> dict[str, Any]:
    """Load from the leg before, step; save and step on for the leg behind."""
    from rl_megatron.learner import world
    from rl_megatron.learner.checkpoint import loading
    from rl_megatron.learner.megatron import make_policy

    shape, layouts = RELAYS[relay]
    learner = LearnerSection.model_validate(layouts[number])
    device = world.init_process_groups(
        learner, rank=rank, rendezvous=f"file://{folder}/rendezvous-{relay}-{number}", seed=1
    )
    megatron, loss = make_policy(shape, learner, device, temperature=0.7), policy_loss(objective="cispo")
    if number == 0:
        fill(megatron)
    if number > 0:
        megatron.load(folder / f"{relay}-{number - 1}")
        if learner.dtype == "bfloat16":
            megatron.save(folder / f"{relay}-{number}-loaded")
    if number < len(layouts) - 1:
        megatron.save(folder / f"{relay}-{number}-earlier")
    plan = megatron._planned.plan
    seen = {"first": steps(megatron, learner, rank, loss)}
    if number < len(layouts) - 1:
        megatron._planned.plan = None
        megatron.save(folder / f"{relay}-{number}-fresh")
        megatron._planned.plan = plan
        with patch.object(torch, "save", wraps=torch.save) as saved:
            with held_back():  # written after the steps behind it, as it was before them
                saving = megatron.start_save(folder / f"{relay}-{number}")
                seen["then"] = steps(megatron, learner, rank, loss)
            saving.finalize()
        by_hand = [Path(call.args[1]).name for call in saved.call_args_list if isinstance(call.args[1], Path)]
        assert by_hand == (["common.pt"] if plan is not None and rank == 0 else [])
        assert megatron._planned.plan is plan
        assert (plan is None) == (loading.READS_WITHOUT_COMMON or "muon" in relay)
    world.destroy_process_groups()
    return seen


def as_older_versions(folder: Path) -> None:
    """One process: checkpoints with one optimizer for all parameters, experts' too, or in which experts' biases decay,
    and what then happens here."""
    from megatron.core.optimizer import get_standard_config_overrides

    from rl_megatron.learner import optimizer, world
    from rl_megatron.learner.megatron import make_policy
    from rl_megatron.learner.model import build

    loss, seen = policy_loss(objective="cispo"), {}
    for name, shape in (("sharded", MOE), ("biases", BIASED)):
        learner = LearnerSection()
        device = world.init_process_groups(learner, rank=0, rendezvous=f"file://{folder}/rendezvous-old-{name}", seed=1)
        with pytest.MonkeyPatch.context() as patch:
            if name == "biases":
                patch.setattr(optimizer, "overrides", get_standard_config_overrides)
            else:
                patch.setattr(build, "_mark_experts", lambda _: None)
            old = make_policy(shape, learner, device, temperature=0.7)
        assert len(old._optimizer.chained_optimizers) == 1 + (name == "biases")
        fill(old)
        steps(old, learner, 0, loss)
        (folder / name).mkdir()
        old.save(folder / name)
        new = make_policy(shape, learner, device, temperature=0.7)
        new.load(folder / name)
        seen[name] = [steps(old, learner, 0, loss), steps(new, learner, 0, loss)]
        world.destroy_process_groups()
    (folder / "old.json").write_text(json.dumps(seen))


def with_other_settings(folder: Path) -> None:
    """One process: how far steps of AdamW after a resume are from its formula with the settings of the run that
    resumes, and what groups of parameters then say."""
    from rl_megatron.learner import world
    from rl_megatron.learner.megatron import make_policy
    from rl_megatron.learner.optimizer import inner_optimizers

    loss, seen = policy_loss(objective="cispo"), {}
    for name, options in (("sharded", {}), ("muon", MUON)):
        first, then = ({**options, "optimizer": {**options.get("optimizer", {}), **said}} for said in ({}, OTHERS))
        if name == "muon":
            then["optimizer"]["muon"] = {"scale": "original"}
        learner = LearnerSection.model_validate(first)
        device = world.init_process_groups(
            learner, rank=0, rendezvous=f"file://{folder}/rendezvous-settings-{name}", seed=1
        )
        saving = make_policy(BIASED, learner, device, temperature=0.7)
        fill(saving)
        steps(saving, learner, 0, loss)
        (folder / f"settings {name}").mkdir()
        saving.save(folder / f"settings {name}")
        learner = LearnerSection.model_validate(then)
        resumed = make_policy(BIASED, learner, device, temperature=0.7)
        resumed.load(folder / f"settings {name}")
        parts = inner_optimizers(resumed._optimizer)
        apart = Apart(resumed, parts)
        steps(resumed, learner, 0, loss)
        groups = [group for part in parts for group in part.optimizer.param_groups if "scale" in group]
        seen[name] = {"apart": apart.worst, "stepped": apart.stepped, "muon": [g["scale"] for g in groups]}
        world.destroy_process_groups()
    (folder / "settings.json").write_text(json.dumps(seen))


class Apart:
    """Compares steps of AdamW with its formula (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2)."""

    def __init__(self, megatron: MegatronLearner, parts: Sequence[Any]) -> None:
        self.worst, self.stepped = 0.0, [0, 0]  # parameters that do not decay, and that do
        self._wanted: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._decays = {}
        for chunk in megatron._trained:
            for name, parameter in chunk.named_parameters():
                self._decays[id(parameter)] = parameter.dim() > 1 and "bias" not in name
        for part in (part for part in parts if isinstance(part.optimizer, torch.optim.AdamW)):
            for parameter, (group, order) in getattr(part, "model_param_group_index_map", {}).items():
                main = part.optimizer.param_groups[group]["params"][order]
                self._decays[id(main)] = self._decays[id(parameter)]
            part.optimizer.register_step_pre_hook(self._before)
            part.optimizer.register_step_post_hook(self._after)

    def _before(self, adam: torch.optim.Optimizer, *_: Any) -> None:
        said = OTHERS
        for parameter in (p for group in adam.param_groups for p in group["params"]):
            state, decays = adam.state[parameter], self._decays[id(parameter)]
            count = int(state["step"]) + 1
            mean = said["beta1"] * state["exp_avg"] + (1 - said["beta1"]) * parameter.grad
            square = said["beta2"] * state["exp_avg_sq"] + (1 - said["beta2"]) * parameter.grad**2
            first, second = (1 - said[key] ** count for key in ("beta1", "beta2"))
            change = (mean / first) / ((square / second).sqrt() + said["eps"])
            decay = said["weight_decay"] * parameter.detach() if decays else 0.0
            self._wanted.append((parameter, parameter.detach() - 1e-3 * (change + decay)))
            self.stepped[decays] += 1

    def _after(self, *_: Any) -> None:
        for parameter, wanted in self._wanted:
            self.worst = max(self.worst, float((parameter.detach() - wanted).abs().max()))
        self._wanted.clear()


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
        with_other_settings(folder)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("relays")
    for relay, (_, layouts) in RELAYS.items():
        for number in range(len(layouts)):
            for what in ("", "-loaded", "-earlier", "-fresh"):
                (folder / f"{relay}-{number}{what}").mkdir()
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
        wanted, resumed = before[-1]["then"], [rank["first"] for rank in after if rank["first"]]
        assert resumed
        assert len(wanted) == STEPS
        if layout == was:
            assert resumed == [wanted] * len(resumed)
        for steps_of_rank in resumed:
            for (loss, norm), (wanted_loss, wanted_norm) in zip(steps_of_rank, wanted, strict=True):
                half = layout.get("dtype") == "bfloat16"  # in which layouts differ, a resume or none
                most = (5e-3, 2e-2) if half else (1e-6, 1e-5)
                assert loss == pytest.approx(wanted_loss, rel=most[0], abs=most[0]), layout
                assert norm == pytest.approx(wanted_norm, rel=most[1]), layout


def test_a_later_save_by_the_plan_of_the_first_is_one_planned_again_to_the_bit(seen: Path) -> None:
    compared = 0
    for folder in sorted(path for path in seen.glob("*-fresh") if (path / ".metadata").exists()):
        fresh, planned = (read_back(seen / name) for name in (folder.name, folder.name.removesuffix("-fresh")))
        earlier = read_back(seen / folder.name.replace("-fresh", "-earlier"))
        assert_same_state(fresh, planned)
        moments = [name for name in fresh if "exp_avg" in name or "momentum" in name]
        assert moments
        assert not any(torch.equal(fresh[name], earlier[name]) for name in moments), folder.name
        compared += 1
    assert compared == 8


def test_muons_state_of_bfloat16_parameters_is_the_same_to_the_bit_in_another_layout(seen: Path) -> None:
    """What a layout has loaded and saves again at once is what was saved: dp 2, again, and then tp 2."""
    _, layouts = RELAYS["muon, bfloat16"]
    for number in range(1, len(layouts)):
        saved, again = (
            _load_state_dict_from_keys(checkpoint_id=seen / f"muon, bfloat16-{name}")
            for name in (f"{number - 1}", f"{number}-loaded")
        )
        tensors = {name for name, value in saved.items() if isinstance(value, torch.Tensor)}
        assert {"optimizer.state.momentum_buffer", "optimizer.state.fp32_param"} <= {
            ".".join(name.split(".")[:3]) for name in tensors
        }
        for name in tensors:
            padded = saved[name].shape != again[name].shape  # of the vocabulary, to another multiple
            rows = MOE.vocab_size if padded else len(saved[name])
            assert torch.equal(saved[name][:rows], again[name][:rows]), name
            assert padded is (number == 2 and ("embedding" in name or "output_layer" in name))


def test_a_checkpoint_of_an_older_version_without_expert_parallelism_goes_on(seen: Path) -> None:
    found = json.loads((seen / "old.json").read_text())
    for name in ("sharded", "biases"):
        went_on, resumed = found[name]
        assert resumed == [pytest.approx(step, rel=1e-6) for step in went_on]


@pytest.mark.parametrize("name", ["sharded", "muon"])
def test_a_resumed_run_steps_by_its_own_settings_and_only_matrices_decay(name: str, seen: Path) -> None:
    found = json.loads((seen / "settings.json").read_text())[name]
    assert found["apart"] < 1e-6  # of steps of 1e-3
    assert min(found["stepped"]) > 0
    assert found["muon"] == (["original"] if name == "muon" else [])
