"""A reference that follows the policy, and what a critic starts from, on a rank that holds both; how it joins."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

import rl_megatron.learner.megatron  # noqa: F401  before megatron is imported
from launcher.preflight.model_files import check
from launcher.preflight.subject import PreflightContext
from launcher.wire import Setup
from launcher.worker.models import RankModels
from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.config.io import load_config
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.errors import ConfigError, WeightError
from rl_megatron.features.lora.merging import merge_adapters
from rl_megatron.learner.checkpoint.state import has_extra_state
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.weights.bytes.moving_average import MovingAverage
from rl_megatron.weights.checkpoints.convert import megatron_to_hf
from tests.distributed.test_role_layouts import sampled
from tools.convert.inspection import describe

RATE = 0.25
GIVEN = ("algorithm=grpo", "algorithm.kl.coefficient=0.1", f"algorithm.kl.reference_update_rate={RATE}", "learner.ep=1")
LORA = ("learner.lora.rank=4",)
PROJECTION = "decoder.layers.0.self_attention.linear_proj."

Arrays = Mapping[str, NDArray[np.float32]]


@contextlib.contextmanager
def rank_of(policy: Path, folder: Path, *keys: str) -> Iterator[RankModels]:
    """The only rank of a run, with the policy's first weights."""
    folder.mkdir()
    config, threads = load_config("tiny_cpu", [*GIVEN, f"model.path={policy}", *keys]), torch.get_num_threads()
    rendezvous = f"file://{folder}/rendezvous"
    setup = Setup(config=config, model_folder=policy, run_folder=folder, rendezvous=rendezvous, role="learner")
    rank = RankModels(setup, 0, None)
    try:
        rank.load_weights("policy", policy)
        yield rank
    finally:
        rank.close()
        torch.set_num_threads(threads)


def save(rank: RankModels, folder: Path) -> None:
    folder.mkdir()
    rank.save("policy", folder)
    rank.finalize("policy")


def trained(rank: RankModels, seed: int) -> Arrays:
    """Other weights of the policy, or of its adapters; those that its passes then compute with."""
    learner, g = rank._learners["policy"], torch.Generator().manual_seed(seed)
    for tensor in (learner.adapters or learner.tensors).values():
        tensor += 0.02 * torch.randn(tensor.shape, generator=g)
    learner.adopt()
    before = {name: tensor.float().numpy().copy() for name, tensor in learner.tensors.items()}
    with learner.merged():
        now = {name: tensor.float().numpy().copy() for name, tensor in learner.tensors.items()}
    if learner.adapters:
        a, b = (learner.adapters[f"{PROJECTION}lora_{one}"].float().numpy() for one in "AB")
        np.testing.assert_allclose(
            now[f"{PROJECTION}weight"], before[f"{PROJECTION}weight"] + 32 / 4 * b @ a, rtol=1e-5
        )
    return now


def average(held: MovingAverage | None) -> Arrays:
    """In float32, from the upper and lower halves of its bits."""
    assert held is not None
    found = {}
    for name, tensor in held.tensors.items():
        if tensor.dtype == torch.bfloat16:
            upper = tensor.view(torch.int16).numpy().astype(np.int32)
            found[name] = ((upper << 16) + held.rest[name].numpy()).view(np.float32)
        else:
            found[name] = tensor.numpy().copy()
    return found


@pytest.mark.parametrize("keys", [(), ("learner.dtype=bfloat16",), LORA], ids=["float32", "bfloat16", "adapters"])
def test_it_is_the_moving_average_and_a_checkpoint_has_it(keys: tuple[str, ...], tmp_path: Path) -> None:
    policy, shards = make_tiny_model(TinySizes(num_layers=1), tmp_path, seed=0), tmp_path / "shards"
    with rank_of(policy, tmp_path / "run", *keys) as rank:
        wanted = {name: t.double().numpy().copy() for name, t in rank._learners["policy"].tensors.items()}
        save(rank, tmp_path / "warm_start")  # whose plan later saves do not use, which have more
        assert not has_extra_state(tmp_path / "warm_start")
        rank.load_weights("reference", policy)
        save(rank, tmp_path / "first")
        for seed in range(3):
            now = trained(rank, seed)
            rank.update_reference(RATE)
            wanted = {name: (1 - RATE) * held + RATE * now[name] for name, held in wanted.items()}
        saved = average(rank._average)
        assert saved.keys() == wanted.keys()
        for name, held in saved.items():
            np.testing.assert_allclose(held, wanted[name], rtol=1e-6, atol=1e-7, err_msg=name)
        assert np.abs(saved[f"{PROJECTION}weight"] - now[f"{PROJECTION}weight"]).max() > 1e-3
        save(rank, shards)
        assert rank._learners["policy"]._planned.num_created == 2  # by the plan of the one before
        trained(rank, 3)
        rank.update_reference(RATE)
        after = average(rank._average)
    with rank_of(policy, tmp_path / "resumed", *keys) as rank:
        rank.load("policy", shards)
        assert_same(average(rank._average), saved)
        trained(rank, 3)
        rank.update_reference(RATE)
        assert_same(average(rank._average), after)
    told = {part.what: part.parameters for part in describe(shards).parts if part.what.startswith("beside")}
    count = sum(held.size for held in saved.values()) * (2 if "learner.dtype=bfloat16" in keys else 1)  # of two halves
    assert told == {"beside the model: a reference that follows it": count}
    out = tmp_path / "converted"
    if keys == LORA:
        merge_adapters(shards, policy, out)
    else:
        megatron_to_hf(shards, out, config=policy)
    assert names_in(out) == names_in(policy)  # of the policy's tensors alone


def stepped(rank: RankModels) -> list[Tensor]:
    """The weights after an optimizer step, and those that it stepped: in bfloat16 others."""
    learner, samples = rank._learners["policy"], sampled([7, 12])
    tokens = int(samples.mask.sum())
    learner.backward([samples], CrossEntropy(), num_tokens=tokens, num_sequences=2)
    learner.step(0.02)
    return [tensor.clone() for tensor in held_by(rank)]


def held_by(rank: RankModels) -> list[Tensor]:
    learner = rank._learners["policy"]
    main = [p for group in learner._optimizer.param_groups for p in group["params"]]
    return [*learner.tensors.values(), *(p.detach() for p in main)]


def names_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {*file.keys()}


def assert_same(one: Arrays, other: Arrays) -> None:
    assert one.keys() == other.keys()
    for name, held in one.items():
        np.testing.assert_array_equal(held.view(np.int32), other[name].view(np.int32), err_msg=name)


def test_what_bfloat16_would_round_away_is_kept() -> None:
    """A hundred moves, each of which is less than half of the last bit of bfloat16."""
    start, leader = torch.full((3,), -1.0).bfloat16(), torch.tensor([-1.5, -0.5, 300.0]).bfloat16()
    held = MovingAverage({"w": start})
    held.tensors["w"].copy_(start)
    held.restart()
    for _ in range(100):
        held.move({"w": leader}, 0.001)
    wanted = leader.double() + (start.double() - leader.double()) * 0.999**100
    np.testing.assert_allclose(average(held)["w"], wanted.numpy(), rtol=2e-6)
    assert torch.equal(held.tensors["w"], torch.from_numpy(average(held)["w"]).bfloat16())  # the nearest


# What a critic starts from, on a rank that holds it beside the policy.
@contextlib.contextmanager
def critic_rank(policy: Path, folder: Path, *keys: str) -> Iterator[RankModels]:
    """The only rank of a run with a critic."""
    folder.mkdir()
    config, threads = load_config("tiny_cpu", ["algorithm=ppo", "learner.ep=1", *keys]), torch.get_num_threads()
    rendezvous = f"file://{folder}/rendezvous"
    rank = RankModels(
        Setup(config=config, model_folder=policy, run_folder=folder, rendezvous=rendezvous, role="learner"), 0, None
    )
    try:
        yield rank
    finally:
        rank.close()
        torch.set_num_threads(threads)


def test_only_the_output_layer_of_its_folder_is_left_out(tmp_path: Path) -> None:
    policy, deep = (make_tiny_model(TinySizes(num_layers=n), tmp_path, seed=0) for n in (1, 2))
    with critic_rank(policy, tmp_path / "run", f"model.path={policy}") as rank:
        rank.load_weights("critic", policy)
        with pytest.raises(WeightError, match=r"critic has no tensor for \d+ of its tensors, as 'decoder.layers.1."):
            rank.load_weights("critic", deep)


def test_a_critic_of_another_optimizer_takes_a_checkpoints_weights_and_a_preflight_its_sizes(tmp_path: Path) -> None:
    policy, shards = make_tiny_model(TinySizes(num_layers=1), tmp_path, seed=0), tmp_path / "critic"
    with critic_rank(policy, tmp_path / "run", f"model.path={policy}") as rank:
        rank.load_weights("critic", policy)
        for value in rank._learners["critic"].value_weight.values():
            value.fill_(0.5)
        rank._learners["critic"].adopt()
        wanted = {name: t.clone() for name, t in rank._learners["critic"].tensors.items()}
        shards.mkdir()
        rank.save("critic", shards)
        rank.finalize("critic")
    for model, refused in ((policy, False), (make_tiny_model(TinySizes(), tmp_path, seed=0), True)):
        keys = ("algorithm=ppo", "learner.ep=1", f"model.path={model}", f"algorithm.critic.path={shards}")
        found = [one.text for one in check(PreflightContext(load_config("tiny_cpu", keys), for_job=False))]
        assert any("is not a checkpoint of a critic with the policy's sizes" in one for one in found) == refused, found
    with critic_rank(policy, tmp_path / "then", f"model.path={policy}", "learner.optimizer.name=muon") as rank:
        rank.load_weights("critic", shards)
        critic = rank._learners["critic"]
        assert all(bool((value == 0.5).all()) for value in critic.value_weight.values())
        assert all(torch.equal(critic.tensors[name], tensor) for name, tensor in wanted.items())


# How a rank joins its world, and when it cannot.
def test_all_ranks_are_in_the_first_call_of_the_default_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL connects ranks in a group's first call; that of a push would come from a part of them alone."""
    from rl_megatron.learner import world

    heard: list[object] = []

    def notes(name: str) -> Any:
        return lambda *args, **kwargs: heard.append(name)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: heard.append(device))
    monkeypatch.setattr(torch, "zeros", lambda *size, device: device)
    monkeypatch.setattr(world.dist, "init_process_group", notes("init"))
    monkeypatch.setattr(world.dist, "all_reduce", lambda x: heard.append(("all_reduce", x)))
    monkeypatch.setattr(world.parallel_state, "initialize_model_parallel", notes("megatron"))
    monkeypatch.setattr(world, "model_parallel_cuda_manual_seed", notes("seed"))
    device = torch.device("cuda", 3)
    assert (
        world.init_process_groups(LearnerSection(device="cuda"), rank=1, rendezvous="file:///x", seed=1, gpu=3)
        == device
    )
    assert heard == [device, "init", ("all_reduce", device), "megatron", "seed"]


def test_a_rank_that_sees_no_gpu_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_megatron.learner import world

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    where = rf"rank 3 on {re.escape(socket.gethostname())} sees no GPU; look at .*CUDA_VISIBLE_DEV"
    with pytest.raises(ConfigError, match=where):
        world.init_process_groups(
            LearnerSection(device="cuda", dp=4), rank=3, rendezvous=f"file://{tmp_path}/x", seed=1
        )
