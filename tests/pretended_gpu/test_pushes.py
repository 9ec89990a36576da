"""Weights on pretended GPUs: transports, engine ranks that slept, the embedded engine, and a learner that another
process goes on with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.models.tiny import make_tiny_model
from tests.distributed import gpu_branch, test_carried
from tests.distributed.pretended.plugin import run_ranks as run_ranks_on_gpus
from tests.distributed.pretended.ranks import World, run_worlds
from tests.distributed.ranks import run_ranks


def transports(rank: int, folder: Path) -> None:
    """Two processes with a GPU each."""
    import torch
    import torch.distributed as dist

    from rl_megatron.types import ParallelDims
    from tests.distributed import test_transport as base

    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.cuda.set_device(rank)
    for connect in (base.over_gloo, base.changes_only):
        base.check_push(rank, ParallelDims(ep=2, dp=2), 2, torch.float32, connect, "cuda")
        base.check_push(rank, ParallelDims(pp=2), 1, torch.bfloat16, connect, "cuda")
    dist.barrier()
    dist.destroy_process_group()


def engine_main(rank: int, learner: LearnerSection, folder: Path, model: Path, again: bool) -> None:
    """One rank: fill and train, or load what such a one saved; train on, push into the embedded engine, and sample."""
    import torch

    from rl_megatron.engines.local.engine import LocalEngine
    from rl_megatron.learner import world
    from rl_megatron.learner.megatron import make_frozen, make_policy
    from rl_megatron.types import GenerationRequest, SamplingParams
    from rl_megatron.weights.checks.reports import checksum
    from rl_megatron.weights.layouts.families import hf_layout, megatron_layout, read_shape
    from rl_megatron.weights.plans.plan import plan
    from rl_megatron.weights.routes.group import ProcessGroupTransport, Staging

    torch.set_num_threads(1)
    shape = read_shape(model)
    device = world.init_process_groups(learner, rank=rank, rendezvous=f"file://{folder}/rendezvous {again}", seed=1)
    policy = make_policy(shape, learner, device, temperature=0.7)
    row, counts = gpu_branch.batch_of(learner, rank)
    if again:
        policy.load(folder / "saved")
    else:
        gpu_branch.fill(policy, learner, rank, model)
        gpu_branch.train_step(policy, row, gpu_branch.GRPO, 1e-3, **counts)
        policy.save(folder / "saved")
    made = gpu_branch.train_step(policy, row, gpu_branch.GRPO, 1e-3, **counts)
    seen: dict[str, Any] = {"step": (made.loss, made.result.grad_norm)}
    frozen = make_frozen(shape, learner, device, temperature=0.7)
    gpu_branch.fill(frozen, learner, rank, model)
    scores = frozen.score(row, frozenset({"logprobs"}))
    seen["reference"] = [x.tolist() for x in scores["logprobs"]]
    layout = megatron_layout(shape, learner.dims)
    engine = LocalEngine(shape, slots=4, dtype=torch.float32, device=device, max_length=64)
    moves = plan(layout, replace(hf_layout(shape), dims=learner.dims))
    staging = Staging(ProcessGroupTransport(moves, src=dict(policy.tensors), dst=engine.tensors), engine)
    staging.stage(0)
    staging.commit(0)
    seen["checksums"] = {name: checksum(t, tuple(t.shape)) for name, t in engine.tensors.items()}
    params = SamplingParams(temperature=0.7, top_p=1.0, max_new_tokens=8, stop_token_ids=(257,), seed=3)
    request = GenerationRequest(id="a", token_ids=(65, 66, 67), num_completions=4, params=params)
    seen["tokens"] = [list(map(int, c.token_ids)) for c in engine.generate([request])[0]]
    (folder / f"{again}.json").write_text(json.dumps(seen))
    world.destroy_process_groups()


def test_process_group_and_changes_write_gpus(tmp_path: Path) -> None:
    run_worlds([World(main=transports, size=2, arguments=(tmp_path,))])


def test_learner_ranks_carry_versions_to_engine_ranks_that_slept_on_their_gpus(tmp_path: Path) -> None:
    """Through CUDA IPC, each on its own GPU; before each version an engine rank's weights get other memory, of NaN."""
    versions = (test_carried.WHOLE, test_carried.FLIPPED, test_carried.AGAIN)
    said = test_carried.run(tmp_path, "ABCDDCBA", *versions, device="cuda", start=run_ranks_on_gpus)
    learners, engines = said[: test_carried.LEARNERS], said[test_carried.LEARNERS :]
    for rank, one in enumerate(learners):
        assert one["received"] == 4 * test_carried.missing(rank, test_carried.ENGINES - 1 - rank)
        assert one["staged"] <= 4 * test_carried.BUCKET
    found = [test_carried.differing(learners, engines, number) for number in range(len(versions))]
    assert found == [set(), {learners[0]["flipped"]}, set()]


def test_reference_saved_state_and_engine_are_those_of_the_cpu(tmp_path: Path) -> None:
    model, seen = make_tiny_model(gpu_branch.TINY, tmp_path, seed=3), {}
    for device in ("cuda", "cpu"):
        (tmp_path / device / "saved").mkdir(parents=True)
        given = (LearnerSection(device=device), tmp_path / device, model)
        if device == "cuda":
            run_worlds([World(main=engine_main, size=1, arguments=(*given, again)) for again in (False, True)])
        else:
            run_ranks(engine_main, 1, *given, False)
        seen[device] = {p.stem: json.loads(p.read_text()) for p in (tmp_path / device).glob("*.json")}
    gpu, cpu = seen["cuda"]["False"], seen["cpu"]["False"]
    assert seen["cuda"]["True"] == gpu  # to the bit, the engine's tokens too
    assert (gpu["step"], gpu["tokens"]) == (pytest.approx(cpu["step"], rel=1e-6), cpu["tokens"])
    for found, wanted in zip(gpu["reference"], cpu["reference"], strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
