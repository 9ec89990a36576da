"""Moments in bfloat16 by TransformerEngine's own FusedAdam, with kernels in torch, on a pretended GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.models.shape import ModelShape
from tests.distributed.pretended import te
from tests.distributed.pretended.ranks import World, run_worlds
from tests.distributed.pretended.tensor import plain
from tests.distributed.test_kept import LENGTHS, MOE, TOKENS, samples
from tools.planner.memory import footprints

STEPS = 3
RATE, CLIP = 1e-2, 0.1
KEPT = ("bfloat16", "float32")
RESUMED = (  # from, with
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
    ("float32", "bfloat16"),
)
CUT = replace(MOE, num_layers=3)  # two data-parallel ranks' halves of its parameters end inside of one
UNTOUCHED = 3  # a parameter whose gradient is 0
PIECE = 1000  # parameters that are stepped at once in one of the runs


def learner(moments: str, dp: int = 1, leaves: str | None = None, **settings: float) -> LearnerSection:
    keys = {"device": "cuda", "dtype": "bfloat16", "layers": "torch", "dp": dp, "offload": {"while_sampling": leaves}}
    return LearnerSection.model_validate(
        {**keys, "optimizer": {"moments_dtype": moments, "clip_grad": CLIP, **settings}}
    )


def rank_main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    from rl_megatron.learner import optimizer, world

    device = world.join(learner("float32"), rank=rank, rendezvous=f"file://{folder}/rendezvous", seed=0)
    seen: dict[str, Any] = {"adopted": adopted(device)}
    for moments in KEPT:
        policy = started(device, learner(moments))
        apart = stepped_apart(policy, moments)
        (folder / moments).mkdir()
        policy.save(folder / moments)
        seen[moments] = {"apart": apart, "held": held(policy), "next": [step(policy), step(policy)]}
    seen["resumed"] = []
    for was, moments in RESUMED:
        policy = made(device, learner(moments))
        policy.load(folder / was)
        before = places(policy)
        policy.load(folder / was)
        assert places(policy) == before  # no second state
        seen["resumed"].append([step(policy), step(policy)])
    optimizer.STEPPED_AT_ONCE = PIECE
    seen["parked"] = parked(device, "bfloat16", folder / "parked")
    policy = made(device, learner("bfloat16"), CUT)
    policy.load(folder / "by two")
    (folder / "by one").mkdir()
    policy.save(folder / "by one")
    policy = made(device, learner("bfloat16", weight_decay=0.5, beta1=0.7))
    policy.load(folder / "bfloat16")
    step(policy)
    groups = policy._optimizer.param_groups
    seen["settings"] = sorted({(group["weight_decay"], group["betas"][0]) for group in groups if group["params"]})
    (folder / "rank0.json").write_text(json.dumps(seen))
    world.leave()


def two_ranks_main(rank: int, folder: Path) -> None:
    """Steps, saves and resumes on two data-parallel ranks."""
    torch.set_num_threads(1)
    from rl_megatron.learner import world

    section = learner("bfloat16", dp=2)
    device = world.join(section, rank=rank, rendezvous=f"file://{folder}/rendezvous of two", seed=0)
    policy = started(device, section, CUT)
    for _ in range(STEPS):
        step(policy)
    (folder / "by two").mkdir(exist_ok=True)
    policy.save(folder / "by two")
    followed = [step(policy), step(policy)]
    policy = made(device, section, CUT)
    policy.load(folder / "by two")
    assert [step(policy), step(policy)] == followed
    world.leave()


def parked(device: torch.device, moments: str, folder: Path) -> list[tuple[float, float]]:
    """Steps of a run that goes on from a checkpoint of one whose optimizer left the GPU before each step."""
    policy = started(device, learner(moments, leaves="optimizer"))
    for _ in range(STEPS):
        policy.park(pushed=True)
        step(policy, without_one)
    policy.park(pushed=True)
    folder.mkdir()
    policy.save(folder)
    policy = made(device, learner(moments))
    policy.load(folder)
    return [step(policy), step(policy)]


def made(device: torch.device, section: LearnerSection, shape: ModelShape = MOE) -> Any:
    from rl_megatron.learner.megatron import make_policy

    return make_policy(shape, section, device, temperature=1.0)


def started(device: torch.device, section: LearnerSection, shape: ModelShape = MOE) -> Any:
    policy = made(device, section, shape)
    fill(policy, 0)
    policy.adopt()
    return policy


def fill(policy: Any, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    for name, tensor in policy.tensors.items():
        whole = torch.randn(tensor.shape, generator=g) * 0.02
        tensor.copy_(torch.ones(tensor.shape) if "norm" in name else whole)


def gradient(policy: Any) -> float:
    said = policy.backward([samples(0)], CrossEntropy(), num_tokens=TOKENS, num_sequences=len(LENGTHS))
    return float(said["loss"].value)


def step(policy: Any, change: Callable[[Any], None] = lambda _: None) -> tuple[float, float]:
    """Loss and gradient norm, after a ``change`` of gradients."""
    loss = gradient(policy)
    change(policy)
    return loss, policy.step(RATE).grad_norm


def without_one(policy: Any) -> None:
    parameters(policy)[UNTOUCHED].main_grad.zero_()


def parameters(policy: Any) -> list[Any]:
    return [p for chunk in policy._trained for p in chunk.parameters()]


def stepped_apart(policy: Any, moments: str) -> dict[str, float]:
    """Steps beside torch's AdamW, whose float32 weights have the same gradients and whose moments are rounded after
    each step: the most that weights differ, as a share of the steps, and the share of the model's that do."""
    trained = parameters(policy)
    weights = [torch.nn.Parameter(plain(p.detach()).float().clone()) for p in trained]
    start = [weight.detach().clone() for weight in weights]
    adam = torch.optim.AdamW(weights, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for _ in range(STEPS):
        gradient(policy)
        without_one(policy)
        for weight, parameter in zip(weights, trained, strict=True):
            weight.grad = plain(parameter.main_grad).float().clone()
        torch.nn.utils.clip_grad_norm_(weights, CLIP)
        policy.step(RATE)
        adam.step()
        for state in adam.state.values() if moments != "float32" else ():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(state[name].bfloat16())
    moved = torch.cat([(weight - was).flatten() for weight, was in zip(weights, start, strict=True)]).detach()
    found = torch.cat([plain(p.detach()).flatten() for p in trained])
    wanted = torch.cat([weight.detach().flatten() for weight in weights])
    return {
        "moved": float(moved.abs().max()),
        "apart": float((main_weights(policy) - wanted).abs().max() / moved.abs().max()),
        "further": float(((main_weights(policy) - wanted).abs() > 1e-5 * moved.abs().max()).float().mean()),
        "unequal": float((found != wanted.bfloat16()).float().mean()),
    }


def main_weights(policy: Any) -> torch.Tensor:
    """The optimizer's float32 weights, in the order of the model's parameters."""
    from rl_megatron.learner.checkpoint.state import _values_of
    from rl_megatron.learner.optimizer import inner_optimizers

    parts = inner_optimizers(policy._optimizer)
    of = {p: part for part in parts for p in part.model_param_group_index_map}
    every = parameters(policy)
    return torch.cat([plain(_values_of(lambda x: x, of[p], p)["param"].detach()).flatten() for p in every])


def adopted(device: torch.device) -> list[bool]:
    """Whether weights that were written over others are those that are stepped, by steps of a rate of 0."""
    policy = started(device, learner("bfloat16"))
    step(policy)
    fill(policy, 1)
    policy.adopt()
    wanted = {name: plain(tensor).clone() for name, tensor in policy.tensors.items()}
    gradient(policy)
    policy.step(0.0)
    return [torch.equal(plain(tensor), wanted[name]) for name, tensor in policy.tensors.items()]


def held(policy: Any) -> dict[str, int]:
    """Bytes of the optimizer's state, by dtype."""
    from rl_megatron.learner.optimizer import state_of

    weights = {p.untyped_storage().data_ptr() for chunk in policy._trained for p in chunk.parameters()}
    out: dict[str, int] = {}
    for tensor in state_of(policy._optimizer):
        if tensor.untyped_storage().data_ptr() not in weights:
            out[str(tensor.dtype)] = out.get(str(tensor.dtype), 0) + tensor.nbytes
    return out


def places(policy: Any) -> list[int]:
    from rl_megatron.learner.optimizer import state_of

    return [tensor.data_ptr() for tensor in state_of(policy._optimizer)]


pytestmark = pytest.mark.skipif(not (te.FOLDER / ".installed").exists(), reason="needs `make .venv/te/.installed`")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("moments")
    by_two = World(main=two_ranks_main, size=2, arguments=(root,))
    run_worlds([by_two, World(main=rank_main, size=1, arguments=(root,))], before=te.load)
    return root


@pytest.fixture(scope="module")
def seen(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "rank0.json").read_text())
    return found


@pytest.mark.parametrize("moments", KEPT)
def test_it_steps_as_torchs_adamw_whose_moments_are_rounded_after_each_step(moments: str, seen: Any) -> None:
    """One parameter has no gradient, so its moments are zeros."""
    apart = seen[moments]["apart"]
    assert apart["moved"] > RATE
    most = {"bfloat16": 2**-9, "float32": 1e-5}  # where a sum rounds otherwise
    assert apart["apart"] < most[moments]
    assert apart["further"] < 1e-3
    assert apart["unequal"] < 1e-3  # of the model's, in bfloat16


def test_written_weights_are_adopted(seen: Any) -> None:
    assert seen["adopted"] == [True] * len(seen["adopted"])


def test_its_state_has_the_planned_bytes(seen: Any) -> None:
    for moments in KEPT:
        config = RunConfig(learner=learner(moments))
        (planned,) = {m.terms["optimizer"] for m in footprints(config, MOE)}
        assert sum(seen[moments]["held"].values()) == pytest.approx(planned, rel=0.02)
    each = seen["float32"]["held"]["torch.float32"] // 12  # parameters
    assert seen["bfloat16"]["held"] == {"torch.float32": 4 * each, "torch.bfloat16": 4 * each}


def test_a_resume_continues_and_may_change_the_dtype(seen: Any) -> None:
    same, to_float32, to_bfloat16 = seen["resumed"]
    assert same == seen["bfloat16"]["next"]
    assert to_float32[0] == seen["bfloat16"]["next"][0]
    rounded = 2**-8  # bfloat16 rounds both moments by at most 2^-9, which moves a step by less than that together
    assert to_float32[1] == pytest.approx(seen["bfloat16"]["next"][1], rel=rounded)
    assert to_bfloat16[0] == seen["float32"]["next"][0]
    assert to_bfloat16[1] == pytest.approx(seen["float32"]["next"][1], rel=rounded)


def test_a_resumed_run_has_its_own_settings_and_only_matrices_decay(seen: Any) -> None:
    assert seen["settings"] == [[0.0, 0.7], [0.5, 0.7]]


def test_it_steps_in_pieces_and_leaves_the_gpu_and_is_saved_meanwhile_to_the_same_bits(seen: Any) -> None:
    assert seen["parked"] == seen["bfloat16"]["next"]


def test_where_ranks_change_the_state_stays(root: Path) -> None:
    before, after = state(root / "by two"), state(root / "by one")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def state(folder: Path) -> dict[str, Tensor]:
    """The whole tensors of the optimizer in a checkpoint."""
    found = _load_state_dict_from_keys(checkpoint_id=folder)
    return {name: tensor for name, tensor in found.items() if name.startswith("optimizer.state.")}
