"""A learner that leaves its GPUs while servers sample, on pretended GPUs: the same numbers, and the planned bytes."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.data.packing import pack
from rl_megatron.interfaces import Pass
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.types import Samples, Want
from rl_megatron.weights.bytes.parked import Parked
from rl_megatron.weights.layouts.families import read_shape
from tests.distributed.pretended.ranks import World, run_worlds
from tests.distributed.ranks import ragged_samples
from tests.rows import policy_loss
from tests.samples import share_of
from tests.savings import hold_back
from tools.planner import memory
from tools.planner.memory import footprints, host_bytes, pinned

if TYPE_CHECKING:
    from launcher.worker.learner_rank import Worker

TINY = TinySizes(num_layers=1)
GRPO = policy_loss(objective="cispo", aggregation="token_mean")
RUNS = {"all stays": None, "optimizer": "optimizer", "resumed": "gradients"}  # what leaves the GPUs in each
SIZE = 2
STEPS = 3
SLAB = 2**13  # bytes, of which a model's weights take more
SAVED = 2  # the push after which a checkpoint is written, while servers would sample; ``resumed`` makes this step alone
KEYS = (
    *("rollout=vllm", "rollout.server.colocated=true", "rollout.server.memory_fraction=0.3"),
    *("learner.device=cuda", "learner.dtype=bfloat16", "learner.ep=2", "learner.dp=2", "learner.threads=1"),
    *("algorithm=ppo", "algorithm.kl.coefficient=0.05", "algorithm.kl.placement=token_reward"),
    *("algorithm.kl.estimator=k1", "weights.delta=false", "weights.transport=file", "slurm.gpus_per_node=2"),
    "algorithm.kl.follow_rate=0.5",  # so that the reference is saved and loaded, and is 4 bytes a parameter
)


def config_of(level: str | None, folder: Path, *keys: str) -> RunConfig:
    given = () if level is None else (f"learner.offload.while_sampling={level}",)
    return load_config("tiny_cpu", [*KEYS, *given, f"weights.folder={folder}", *keys])


def rank_main(rank: int, name: str, keys: Sequence[str], root: Path, model: Path) -> None:
    """One rank of a run; that of "resumed" goes on from the checkpoint of "optimizer"."""
    torch.set_num_threads(1)
    import rl_megatron.learner.megatron  # noqa: F401  makes megatron run here: before its functions are bound
    from launcher.wire.channel import Setup
    from launcher.worker import models
    from launcher.worker.learner_rank import Worker
    from rl_megatron.learner import trained

    trained.SLAB = models.SLAB = SLAB
    folder, resumed = root / name, name == "resumed"
    config = config_of(RUNS[name], folder, *keys)
    setup = Setup(config=config, model_folder=model, run_folder=folder, rendezvous=f"file://{folder}/rendezvous")
    worker = Worker(setup, rank, None)
    for _ in range(2):  # the first push of a run comes before both, and leaves the GPUs
        worker.release()
        worker.start_from("reference", model)
        worker.start_from("critic", model)
    worker.release()
    for role in ("policy", "critic") if resumed else ():
        worker.load(role, root / "optimizer" / role)
    seen = {}
    for version in (SAVED,) if resumed else range(1, STEPS + 1):
        worker.release()
        worker.stage(version)
        worker.commit(version)
        said = {"sampling": alive(), "pinned": pieces(), "pushed": worker.checksums()}
        if version == SAVED:
            go = hold_back()
            said["saved"] = saved(worker, folder)
        seen[version] = said | step(worker, config, rank, interrupted=version == STEPS)
        if version == SAVED:  # what has left the GPU since then is written over what had left before
            worker.release()
            go.set()
            for role in ("policy", "critic"):
                worker.durable(role)
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))
    worker.close()


def saved(worker: Worker, folder: Path) -> int:
    """Bytes that are alive after a checkpoint."""
    for role in ("policy", "critic"):
        (folder / role).mkdir(exist_ok=True)
        worker.save(role, folder / role)  # by another thread, while the caller goes on
    return alive()


def step(worker: Worker, config: RunConfig, rank: int, *, interrupted: bool) -> dict[str, Any]:
    """Scores of reference and critic, loss and gradient norm of both that are trained, and bytes that are alive.

    ``interrupted``: GPUs are left between backward and step too.
    """
    from rl_megatron.algorithms.auxiliary import ValueLoss

    dims, g = config.learner.dims, torch.Generator().manual_seed(5)
    samples = ragged_samples(4, g)
    batch = pack(replace(samples, advantages=samples.mask.float()), dims=dims, max_tokens=96)
    row, counts = batch.micro_batches[dims.dp_rank(rank)], (batch.num_tokens, batch.num_sequences)
    share = share_of(row, dims, rank, to_score=True)
    asked: dict[str, frozenset[Want]] = {"reference": frozenset({"logprobs"}), "critic": frozenset({"values"})}
    answers = worker.score([Pass(role=role, want=want) for role, want in asked.items()], share)
    reference, values = (scores for scores, _ in answers)
    said: dict[str, Any] = {"reference": [x.tolist() for x in reference["logprobs"]]}
    said["values"] = [x.tolist() for x in values["values"]]
    scored = [with_scores(*each) for each in zip(row, reference["logprobs"], values["values"], strict=True)]
    for role, loss in (("policy", GRPO), ("critic", ValueLoss(clip=0.2))):
        found = worker.backward(role, share_of(scored, dims, rank, to_score=False), loss, *counts)
        if interrupted:
            worker.release()
            said["interrupted"] = alive()
        said[role] = found["loss"].value, worker.step(role, 1e-3).grad_norm
    worker.lead(0.5)
    return said | {"training": alive()}


def with_scores(samples: Samples, reference: torch.Tensor, values: torch.Tensor) -> Samples:
    old = torch.zeros_like(reference)
    return replace(samples, old_logprobs=reference, old_values=values, returns=values + 1, rollout_logprobs=old)


def pieces() -> list[int]:
    """Bytes of each piece of the host's memory that this process has pinned for what left the GPU."""
    parked = [one for one in gc.get_objects() if type(one) is Parked]
    return [slab.numel() for one in parked for kind in one._slabs.values() for slab in kind.slabs]


def alive() -> int:
    """Bytes of the pretended GPU's storages that are alive in this process."""
    from tests.distributed.pretended.tensor import OnGpu

    gc.collect()
    storages = {}
    for one in gc.get_objects():
        if issubclass(type(one), OnGpu):  # as isinstance, without a look at each object
            storage = one.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


HELD = ("parameters", "gradients", "optimizer", "critic", "reference")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parked")


@pytest.fixture(scope="module")
def model(root: Path) -> Path:
    return make_tiny_model(TINY, root, seed=3)


@pytest.fixture(scope="module")
def seen(root: Path, model: Path) -> dict[str, list[dict[str, Any]]]:
    """By run, what each rank saw, by version of the weights."""
    for name in RUNS:
        (root / name).mkdir()
    run_worlds([World(main=rank_main, size=SIZE, arguments=(n, (), root, model)) for n in RUNS])
    paths = {name: [root / name / f"rank{rank}.json" for rank in range(SIZE)] for name in RUNS}
    return {name: [json.loads(path.read_text()) for path in files] for name, files in paths.items()}


@pytest.mark.parametrize("name", ["optimizer", "resumed"])
def test_every_number_and_every_pushed_tensor_is_the_same_to_the_bit(name: str, seen: Any) -> None:
    for found, wanted in zip(seen[name], seen["all stays"], strict=True):
        for version, said in found.items():
            for what in ("pushed", "reference", "values", "policy", "critic"):
                assert said[what] == wanted[version][what], (version, what)
    steps = [said["policy"] for said in seen["all stays"][0].values()]
    assert len({loss for loss, _ in steps}) == STEPS  # it learns


MOMENTS = ("sampling", "saved", "interrupted")
REST = 0.04  # of all: rotary angles, what observers count, and tensors smaller than a GPU's allocator gives


def test_while_servers_sample_gpus_hold_what_is_planned(seen: Any, root: Path, model: Path) -> None:
    shape, second = read_shape(model), str(SAVED)
    for name, level in RUNS.items():
        planned = {f.phase: f.terms for f in footprints(config_of(level, root), shape)}
        stays, everything = (sum(planned[phase][term] for term in HELD) for phase in ("sampling", "training"))
        left = everything - stays
        for rank, before in zip(seen[name], seen["all stays"], strict=True):
            assert before[second]["sampling"] - rank[second]["sampling"] == pytest.approx(left, rel=0.03), name
            assert rank[second]["training"] == before[second]["training"]  # all is back
            after = [said[moment] for said in rank.values() for moment in MOMENTS if moment in said]
            assert max(after) < stays + REST * everything, name
            assert max(after[1:]) - min(after[1:]) < 256, name  # after the first step


def test_the_host_holds_all_but_gradients(seen: Any, model: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SLAB", SLAB)
    shape = read_shape(model)
    configs = {level: config_of(level, root) for level in RUNS.values()}
    held = {level: host_bytes(config, shape) for level, config in configs.items()}
    assert held[None] == held["gradients"] == 0
    asked = [rank[str(SAVED)]["pinned"] for rank in seen["optimizer"]]
    assert {max(sizes) for sizes in asked} == {SLAB}
    found = sum(pinned(size) for sizes in asked for size in sizes)
    assert found == pytest.approx(held["optimizer"], rel=0.05)  # what is smaller than a GPU's allocator gives stays
