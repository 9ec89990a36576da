"""An optimizer's state on pretended GPUs: it leaves them while servers sample, or its moments are in bfloat16."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.data.packing import Packer
from rl_megatron.interfaces import ForwardPass
from rl_megatron.models.shape import ModelShape
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.types import Samples, Want
from rl_megatron.weights.bytes.parked import OffloadedTensors
from rl_megatron.weights.layouts.families import read_shape
from tests.distributed.pretended import te
from tests.distributed.pretended.ranks import World, run_worlds
from tests.distributed.pretended.tensor import plain
from tests.distributed.ranks import ragged_samples
from tests.distributed.test_kept import LENGTHS, MOE, TOKENS, samples
from tests.rows import policy_loss
from tests.samples import share_of
from tests.savings import hold_back
from tools.planner import memory
from tools.planner.memory import footprints, host_bytes, pinned

if TYPE_CHECKING:
    from launcher.worker.learner_rank import LearnerRank

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
    "algorithm.kl.reference_update_rate=0.5",  # so that the reference is saved and loaded, and is 4 bytes a parameter
)


def config_of(level: str | None, folder: Path, *keys: str) -> RunConfig:
    given = () if level is None else (f"learner.offload.while_sampling={level}",)
    return load_config("tiny_cpu", [*KEYS, *given, f"weights.folder={folder}", *keys])


def rank_main(rank: int, name: str, keys: Sequence[str], root: Path, model: Path) -> None:
    """One rank of a run; that of "resumed" goes on from the checkpoint of "optimizer"."""
    torch.set_num_threads(1)
    import rl_megatron.learner.megatron  # noqa: F401  makes megatron run here: before its functions are bound
    from launcher.wire import Setup
    from launcher.worker import models
    from launcher.worker.learner_rank import LearnerRank
    from rl_megatron.learner import trained

    trained.SLAB = models.SLAB = SLAB
    folder, resumed = root / name, name == "resumed"
    config = config_of(RUNS[name], folder, *keys)
    setup = Setup(config=config, model_folder=model, run_folder=folder, rendezvous=f"file://{folder}/rendezvous")
    worker = LearnerRank(setup, rank, None)
    for _ in range(2):  # the first push of a run comes before both, and leaves the GPUs
        worker.release_memory()
        worker.load_weights("reference", model)
        worker.load_weights("critic", model)
    worker.release_memory()
    for role in ("policy", "critic") if resumed else ():
        worker.load(role, root / "optimizer" / role)
    seen = {}
    for version in (SAVED,) if resumed else range(1, STEPS + 1):
        worker.release_memory()
        worker.stage(version)
        worker.commit(version)
        said = {"sampling": alive(), "pinned": pieces(), "pushed": worker.checksums()}
        if version == SAVED:
            go = hold_back()
            said["saved"] = saved(worker, folder)
        seen[version] = said | step(worker, config, rank, interrupted=version == STEPS)
        if version == SAVED:  # what has left the GPU since then is written over what had left before
            worker.release_memory()
            go.set()
            for role in ("policy", "critic"):
                worker.finalize(role)
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))
    worker.close()


def saved(worker: LearnerRank, folder: Path) -> int:
    """Bytes that are alive after a checkpoint."""
    for role in ("policy", "critic"):
        (folder / role).mkdir(exist_ok=True)
        worker.save(role, folder / role)  # by another thread, while the caller goes on
    return alive()


def step(worker: LearnerRank, config: RunConfig, rank: int, *, interrupted: bool) -> dict[str, Any]:
    """Scores of reference and critic, loss and gradient norm of both that are trained, and bytes that are alive.

    ``interrupted``: GPUs are left between backward and step too.
    """
    from rl_megatron.algorithms.auxiliary import ValueLoss

    dims, g = config.learner.dims, torch.Generator().manual_seed(5)
    samples = ragged_samples(4, g)
    batch = Packer(dims=dims, max_tokens=96).pack(replace(samples, advantages=samples.mask.float()))
    row, counts = batch.micro_batches[dims.dp_rank(rank)], (batch.num_tokens, batch.num_sequences)
    share = share_of(row, dims, rank, to_score=True)
    asked: dict[str, frozenset[Want]] = {"reference": frozenset({"logprobs"}), "critic": frozenset({"values"})}
    answers = worker.score([ForwardPass(role=role, outputs=want) for role, want in asked.items()], share)
    reference, values = (scores for scores, _ in answers)
    said: dict[str, Any] = {"reference": [x.tolist() for x in reference["logprobs"]]}
    said["values"] = [x.tolist() for x in values["values"]]
    scored = [with_scores(*each) for each in zip(row, reference["logprobs"], values["values"], strict=True)]
    for role, loss in (("policy", GRPO), ("critic", ValueLoss(clip=0.2))):
        found = worker.backward(role, share_of(scored, dims, rank, to_score=False), loss, *counts)
        if interrupted:
            worker.release_memory()
            said["interrupted"] = alive()
        said[role] = found["loss"].value, worker.step(role, 1e-3).grad_norm
    worker.update_reference(0.5)
    return said | {"training": alive()}


def with_scores(samples: Samples, reference: torch.Tensor, values: torch.Tensor) -> Samples:
    old = torch.zeros_like(reference)
    return replace(samples, old_logprobs=reference, old_values=values, returns=values + 1, rollout_logprobs=old)


def pieces() -> list[int]:
    """Bytes of each piece of the host's memory that this process has pinned for what left the GPU."""
    parked = [one for one in gc.get_objects() if type(one) is OffloadedTensors]
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


# Moments in bfloat16 by TransformerEngine's own FusedAdam, with kernels in torch, on a pretended GPU.
MOMENT_STEPS = 3
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


def moments_main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    from rl_megatron.learner import optimizer, world

    device = world.init_process_groups(learner("float32"), rank=rank, rendezvous=f"file://{folder}/rendezvous", seed=0)
    seen: dict[str, Any] = {"adopted": adopted(device)}
    for moments in KEPT:
        policy = started(device, learner(moments))
        apart = stepped_apart(policy, moments)
        (folder / moments).mkdir()
        policy.save(folder / moments)
        seen[moments] = {"apart": apart, "held": held(policy), "next": [one_step(policy), one_step(policy)]}
    seen["resumed"] = []
    for was, moments in RESUMED:
        policy = made(device, learner(moments))
        policy.load(folder / was)
        before = places(policy)
        policy.load(folder / was)
        assert places(policy) == before  # no second state
        seen["resumed"].append([one_step(policy), one_step(policy)])
    optimizer.STEPPED_AT_ONCE = PIECE
    seen["parked"] = parked(device, "bfloat16", folder / "parked")
    policy = made(device, learner("bfloat16"), CUT)
    policy.load(folder / "by two")
    (folder / "by one").mkdir()
    policy.save(folder / "by one")
    policy = made(device, learner("bfloat16", weight_decay=0.5, beta1=0.7))
    policy.load(folder / "bfloat16")
    one_step(policy)
    groups = policy._optimizer.param_groups
    seen["settings"] = sorted({(group["weight_decay"], group["betas"][0]) for group in groups if group["params"]})
    (folder / "rank0.json").write_text(json.dumps(seen))
    world.destroy_process_groups()


def two_ranks_main(rank: int, folder: Path) -> None:
    """Steps, saves and resumes on two data-parallel ranks."""
    torch.set_num_threads(1)
    from rl_megatron.learner import world

    section = learner("bfloat16", dp=2)
    device = world.init_process_groups(section, rank=rank, rendezvous=f"file://{folder}/rendezvous of two", seed=0)
    policy = started(device, section, CUT)
    for _ in range(MOMENT_STEPS):
        one_step(policy)
    (folder / "by two").mkdir(exist_ok=True)
    policy.save(folder / "by two")
    followed = [one_step(policy), one_step(policy)]
    policy = made(device, section, CUT)
    policy.load(folder / "by two")
    assert [one_step(policy), one_step(policy)] == followed
    world.destroy_process_groups()


def parked(device: torch.device, moments: str, folder: Path) -> list[tuple[float, float]]:
    """Steps of a run that goes on from a checkpoint of one whose optimizer left the GPU before each step."""
    policy = started(device, learner(moments, leaves="optimizer"))
    for _ in range(MOMENT_STEPS):
        policy.offload(pushed=True)
        one_step(policy, without_one)
    policy.offload(pushed=True)
    folder.mkdir()
    policy.save(folder)
    policy = made(device, learner(moments))
    policy.load(folder)
    return [one_step(policy), one_step(policy)]


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


def one_step(policy: Any, change: Callable[[Any], None] = lambda _: None) -> tuple[float, float]:
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
    for _ in range(MOMENT_STEPS):
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
    one_step(policy)
    fill(policy, 1)
    policy.adopt()
    wanted = {name: plain(tensor).clone() for name, tensor in policy.tensors.items()}
    gradient(policy)
    policy.step(0.0)
    return [torch.equal(plain(tensor), wanted[name]) for name, tensor in policy.tensors.items()]


def held(policy: Any) -> dict[str, int]:
    """Bytes of the optimizer's state, by dtype."""
    from rl_megatron.learner.optimizer import optimizer_state

    weights = {p.untyped_storage().data_ptr() for chunk in policy._trained for p in chunk.parameters()}
    out: dict[str, int] = {}
    for tensor in optimizer_state(policy._optimizer):
        if tensor.untyped_storage().data_ptr() not in weights:
            out[str(tensor.dtype)] = out.get(str(tensor.dtype), 0) + tensor.nbytes
    return out


def places(policy: Any) -> list[int]:
    from rl_megatron.learner.optimizer import optimizer_state

    return [tensor.data_ptr() for tensor in optimizer_state(policy._optimizer)]


@pytest.fixture(scope="module")
def moments_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (te.FOLDER / ".installed").exists():
        pytest.skip("needs `make .venv/te/.installed`")
    root = tmp_path_factory.mktemp("moments")
    by_two = World(main=two_ranks_main, size=2, arguments=(root,))
    run_worlds([by_two, World(main=moments_main, size=1, arguments=(root,))], before=te.load)
    return root


@pytest.fixture(scope="module")
def moments_seen(moments_root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((moments_root / "rank0.json").read_text())
    return found


@pytest.mark.parametrize("moments", KEPT)
def test_it_steps_as_torchs_adamw_whose_moments_are_rounded_after_each_step(moments: str, moments_seen: Any) -> None:
    """One parameter has no gradient, so its moments are zeros."""
    apart = moments_seen[moments]["apart"]
    assert apart["moved"] > RATE
    most = {"bfloat16": 2**-9, "float32": 1e-5}  # where a sum rounds otherwise
    assert apart["apart"] < most[moments]
    assert apart["further"] < 1e-3
    assert apart["unequal"] < 1e-3  # of the model's, in bfloat16


def test_written_weights_are_adopted(moments_seen: Any) -> None:
    assert moments_seen["adopted"] == [True] * len(moments_seen["adopted"])


def test_its_state_has_the_planned_bytes(moments_seen: Any) -> None:
    for moments in KEPT:
        config = RunConfig(learner=learner(moments))
        (planned,) = {m.terms["optimizer"] for m in footprints(config, MOE)}
        assert sum(moments_seen[moments]["held"].values()) == pytest.approx(planned, rel=0.02)
    each = moments_seen["float32"]["held"]["torch.float32"] // 12  # parameters
    assert moments_seen["bfloat16"]["held"] == {"torch.float32": 4 * each, "torch.bfloat16": 4 * each}


def test_a_resume_continues_and_may_change_the_dtype(moments_seen: Any) -> None:
    same, to_float32, to_bfloat16 = moments_seen["resumed"]
    assert same == moments_seen["bfloat16"]["next"]
    assert to_float32[0] == moments_seen["bfloat16"]["next"][0]
    rounded = 2**-8  # bfloat16 rounds both moments by at most 2^-9, which moves a step by less than that together
    assert to_float32[1] == pytest.approx(moments_seen["bfloat16"]["next"][1], rel=rounded)
    assert to_bfloat16[0] == moments_seen["float32"]["next"][0]
    assert to_bfloat16[1] == pytest.approx(moments_seen["float32"]["next"][1], rel=rounded)


def test_a_resumed_run_has_its_own_settings_and_only_matrices_decay(moments_seen: Any) -> None:
    assert moments_seen["settings"] == [[0.0, 0.7], [0.5, 0.7]]


def test_it_steps_in_pieces_and_leaves_the_gpu_and_is_saved_meanwhile_to_the_same_bits(moments_seen: Any) -> None:
    assert moments_seen["parked"] == moments_seen["bfloat16"]["next"]


def test_where_ranks_change_the_state_stays(moments_root: Path) -> None:
    before, after = state(moments_root / "by two"), state(moments_root / "by one")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def state(folder: Path) -> dict[str, Tensor]:
    """The whole tensors of the optimizer in a checkpoint."""
    found = _load_state_dict_from_keys(checkpoint_id=folder)
    return {name: tensor for name, tensor in found.items() if name.startswith("optimizer.state.")}
