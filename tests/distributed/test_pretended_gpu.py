"""The learner's branch for GPUs on pretended ones: equal to the CPU's, and within the rules of CUDA and NCCL."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.models.tiny import make_tiny_model
from rl_megatron.options.kept import offloaded as offloaded_halves
from rl_megatron.options.offload import HELD
from rl_megatron.weights.boxes import whole_box
from rl_megatron.weights.checks.checksums import checksum
from rl_megatron.weights.checks.reports import Beside
from tests.distributed import gpu_branch, moved, offloaded
from tests.distributed.pretended.ranks import World, run_worlds
from tests.distributed.ranks import run_ranks
from tests.distributed.test_engine_ends import tensors_of
from tests.distributed.test_kept import TOKENS
from tests.family_models import save_model
from tools.planner.memory import footprints

MUON = {"optimizer": {"name": "muon", "weight_decay": 0.1}}
PARKED = {"offload": {"while_sampling": "optimizer"}}  # the state leaves the GPU before each step
LAYOUTS = {
    "one": {},
    "tp2-ep2": {"tp": 2, "ep": 2},
    "pp2": {"pp": 2},
    "deterministic": {"deterministic": True},
    "delta nets, deterministic": {"deterministic": True},
    "bfloat16": {"dtype": "bfloat16"},
    "muon": {**MUON, "dp": 2, **PARKED},
    "muon, bfloat16": {**MUON, "dtype": "bfloat16"},
    "muon, bfloat16, parked": {**MUON, "dtype": "bfloat16", **PARKED},
}
ON_CPU = {
    "one": ("cpu", {}),
    "delta nets, deterministic": ("cpu-delta nets", {}),
    "bfloat16": ("cpu-bfloat16", {"dtype": "bfloat16"}),
    "muon": ("cpu-muon", {**MUON, "dp": 2}),
}
"""The same there."""


def refusals(rank: int, folder: Path) -> None:
    """What a GPU refuses, each planted here."""
    import torch
    import torch.distributed as dist
    from megatron.core.pipeline_parallel.schedules import custom_backward

    gpu, host = torch.arange(6.0, device="cuda").view(2, 3), torch.ones(2, 3)
    with pytest.raises(RuntimeError, match=r"same device: add at tests/.*test_pretended_gpu.py:\d+ got \(2, 3\)"):
        gpu + host
    with pytest.raises(RuntimeError, match="same device: mul"):
        (gpu.clone().requires_grad_() * host).sum().backward()
    with pytest.raises(RuntimeError, match="same device: index"):
        host[gpu[0].long()]
    with pytest.raises(TypeError, match="to numpy"):
        gpu.numpy()
    torch.use_deterministic_algorithms(True)
    with pytest.raises(RuntimeError, match=r"cumsum_cuda_kernel does not have a deterministic .*: tests/.*:\d+"):
        gpu.cumsum(1)
    assert gpu.long().cumsum(1)[1].tolist() == [3, 7, 12]
    torch.use_deterministic_algorithms(False)
    assert (gpu + 1.0 + host.sum()).device.type == "cuda"  # scalars may be the host's
    assert gpu[host[:, 0].long() - 1].tolist() == [[0, 1, 2], [0, 1, 2]]  # and so may indices
    assert gpu.new_tensor([1.0]).is_cuda
    assert (gpu.cpu() + host).is_cpu
    first, _ = gpu.requires_grad_().split(1)
    for backward in (torch.autograd.backward, custom_backward):  # autograd itself makes the other part's gradient
        backward(first.sum(), None)
    assert gpu.grad.tolist() == [[2, 2, 2], [0, 0, 0]]
    gpu = gpu.detach()
    dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=1)
    with pytest.raises(RuntimeError, match=r"allreduce_: Tensors must be contiguous, not \(3, 2\)"):
        dist.all_reduce(gpu.t())
    with pytest.raises(RuntimeError, match=r"allreduce_ of torch\.int16, which NCCL does not know"):
        dist.all_reduce(gpu.to(torch.int16))
    with pytest.raises(RuntimeError, match="has tensors of the host among those of GPUs"):
        dist.all_gather([torch.empty(2, 3)], gpu)
    dist.destroy_process_group()


def in_a_thread(rank: int) -> None:
    """Of a server with several ranks each sees all GPUs; a new thread's is the first."""
    import torch

    torch.cuda.set_device(3)
    weight, ready = torch.arange(6.0, device="cuda").view(2, 3), torch.cuda.current_stream().record_event()
    with ThreadPoolExecutor(1) as thread, pytest.raises(RuntimeError, match="wait for cuda:3 in a thread that has not"):
        thread.submit(ready.synchronize).result()
    beside = Beside()
    beside.read("w", weight)
    assert beside.report().read == [("w", whole_box((2, 3)), checksum(weight.cpu(), (2, 3)))]


def pushed_during_a_step(rank: int, path: Path) -> None:
    """SGLang's step reads the weights on a stream of its own, as late as it may, while our worker loads others."""
    import torch

    from tests.distributed import test_engine_ends as base
    from tests.distributed.pretended import streams

    streams.install()
    base.server(path.parent)  # puts what our worker asks of SGLang in place
    from rl_megatron.engines.sglang import worker

    model, step = base.Whole(), torch.cuda.Stream()
    model.params = {name: torch.full_like(one, 7.0, device="cuda") for name, one in model.params.items()}
    seen = {name: torch.zeros(one.shape) for name, one in model.params.items()}
    with torch.cuda.stream(step):
        for name, one in model.params.items():
            seen[name].copy_(one, non_blocking=True)
    order = {"do": "load", "path": str(path), "answer": str(path.parent / "answer"), "version": 4, "private": []}
    worker.load(model, [(json.dumps({**order, "runner": "target"}), torch.empty(0))])
    step.synchronize()
    assert "rows" in json.loads((path.parent / "answer.0").read_text())
    assert all(bool((one == 7.0).all()) for one in seen.values())
    new = base.tensors_of(4)
    assert all(torch.equal(one.cpu(), new[name]) for name, one in model.params.items())


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By layout, what each rank saw; those of `ON_CPU` are of one rank of ``learner.device=cpu``."""
    root = tmp_path_factory.mktemp("worlds")
    model, worlds = make_tiny_model(gpu_branch.TINY, root, seed=3), []
    (delta := root / "qwen3_next").mkdir()
    save_model("qwen3_next", delta, vocab_size=512)
    for name, keys in LAYOUTS.items():
        learner = LearnerSection.model_validate({"device": "cuda", **keys})
        arguments = (learner, root / name, delta if "delta" in name else model)
        worlds.append(World(main=gpu_branch.rank_main, size=learner.dims.world_size, arguments=arguments))
    there = dict(ON_CPU.values())
    for name in (*LAYOUTS, *there, "refusals", *offloaded.RUNS, *moved.LAYOUTS):
        (root / name).mkdir()
    worlds += [World(main=refusals, size=1, arguments=(root / "refusals",)), World(main=in_a_thread, size=1)]
    for name, run in offloaded.RUNS.items():
        worlds.append(World(main=offloaded.rank_main, size=run.pp, arguments=(root / name, name)))
    for name in moved.LAYOUTS:
        size = moved.learner(name).dims.world_size
        worlds.append(World(main=moved.rank_main, size=size, arguments=(root / name, name)))
    run_worlds(worlds)
    for name, keys in there.items():
        learner = LearnerSection.model_validate(keys)
        of = delta if "delta" in name else model
        run_ranks(gpu_branch.rank_main, learner.dims.world_size, learner, root / name, of)
    names = (*LAYOUTS, *there, *offloaded.RUNS, *moved.LAYOUTS)
    files = {name: sorted((root / name).glob("rank*.json")) for name in names}
    return {name: [json.loads(path.read_text()) for path in paths] for name, paths in files.items()}


@pytest.mark.parametrize("name", ON_CPU)
def test_each_rank_computes_what_the_cpu_does(name: str, seen: Any) -> None:
    """Float32's loss and bfloat16's differ by 3e-4. Of Muon float32 is compared: in bfloat16 a gradient's other last
    bit becomes 4e-3 of the next loss."""
    for number, (gpu, cpu) in enumerate(zip(seen[name], seen[ON_CPU[name][0]], strict=True)):
        assert (gpu["device"], cpu["device"]) == (f"cuda:{number}", "cpu")
        assert gpu["routes"] == cpu["routes"]
        for what in ("logprobs", "steps"):
            for found, wanted in zip(gpu[what], cpu[what], strict=True):
                # Other kernels: measured 9e-10 in loss and norm; of delta nets, whose weights are large, 8e-6.
                assert found == pytest.approx(wanted, rel=1e-4 if "delta" in name else 1e-6)


def test_muons_state_leaves_the_gpu_and_comes_back_to_the_bit(seen: Any) -> None:
    stayed, left = (seen[name][0]["steps"] for name in ("muon, bfloat16", "muon, bfloat16, parked"))
    assert left == stayed
    assert stayed[0][0] != stayed[1][0]


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in ON_CPU and "muon" not in name])
def test_every_layout_computes_what_one_rank_does(name: str, seen: Any) -> None:
    (cpu,) = seen["cpu"]
    ranks = [rank for rank in seen[name] if rank["steps"]]
    assert ranks
    for rank in ranks:
        for found, wanted in zip(rank["steps"], cpu["steps"], strict=True):
            assert found == pytest.approx(wanted, rel=1e-5, abs=1e-7)


def test_no_operation_of_the_learner_lacks_a_kernel_that_adds_in_one_order(seen: Any) -> None:
    assert {name: seen[name][0]["deterministic"] for name in ("one", "deterministic")} == {
        "one": [False, False],
        "deterministic": [True, True],
    }


WAITS = {  # of a step of two layers and three micro-batches, by file
    "megatron/core/transformer/moe/moe_utils.py": 24,  # masks and counts of the dispatcher, twice a layer and pass
    "megatron/core/optimizer/clip_grads.py": 1,
    "rl_megatron/learner/forward.py": 2,  # sums; extremes
    "rl_megatron/learner/observers/experts.py": 1,
}


def test_a_step_makes_the_host_wait_no_more_often_than_is_known(seen: Any) -> None:
    by_line = seen["one"][0]["waits"]
    found = Counter[str]()
    for line, count in by_line.items():
        found[line.rsplit(":", 1)[0]] += count
    assert not found - Counter(WAITS), f"more than is known, by line: {by_line}"


def test_checksums_of_all_tensors_are_the_hosts_and_waited_for_once(seen: Any) -> None:
    for name in LAYOUTS:
        for rank in seen[name]:
            assert rank["sums"] == rank["sums on the host"]
            if rank["device"] != "cpu":
                assert rank["waits for sums"] == 1


def test_all_ranks_make_the_first_call_of_the_default_group(seen: Any) -> None:
    """NCCL connects them in it; a push's first call comes from some of them."""
    assert [rank["first"] for name in LAYOUTS for rank in seen[name]] == [["allreduce_"]] * 12


def test_an_offloaded_optimizer_steps_as_one_on_the_gpu_and_resumes_with_any_share(seen: Any) -> None:
    (found,) = seen["offloaded"]
    shares = found["shares"]
    alone = shares["0.0"]["steps"]
    assert found["resumed"] == [alone[offloaded.BEFORE]] * len(offloaded.RUNS["offloaded"].resumed)
    for share, said in shares.items():
        assert said["steps"] == alone
        config = RunConfig(learner=offloaded.learner(float(share)))
        (planned,) = {m.terms["optimizer"] for m in footprints(config, offloaded.MOE)}
        assert said["bytes"]["cuda"] == pytest.approx(planned, rel=0.08)  # the share is of whole parameters
    weights = shares["0.0"]["bytes"]["cuda"] // 12
    assert [shares[share]["bytes"]["cpu"] for share in ("0.0", "1.0")] == [0, 16 * weights]


def test_an_offloaded_optimizer_resumes_where_the_first_stage_has_no_experts(seen: Any) -> None:
    for found in seen["offloaded, a stage without experts"]:
        alone, half = (found["shares"][share]["steps"] for share in ("0.0", "0.5"))
        assert half == alone
        assert found["resumed"] == [alone[offloaded.BEFORE]]
        assert found["settings"] == [[0.0, 0.7], [0.5, 0.7]]  # its own, and only matrices decay


@pytest.mark.parametrize("layout", moved.LAYOUTS)
def test_halves_of_layers_in_the_hosts_memory_change_no_bit(layout: str, seen: Any) -> None:
    for rank in seen[layout]:
        alone = rank[""]
        for said in rank.values():
            assert said["steps"] == alone["steps"]
            assert said["weights"] == alone["weights"]
    assert len({norm for _, norm in seen[layout][0][""]["steps"]}) == moved.STEPS  # it learns


@pytest.mark.parametrize("parts", moved.PARTS[1:])
def test_halves_of_layers_leave_the_gpu_with_the_bytes_of_the_plan(parts: Sequence[str], seen: Any) -> None:
    """At the loss of one rank's last step, whose sequences need no padding: all of a micro-batch's halves have been
    copied, and the last of them are still on the GPU too."""
    (rank,) = seen["moved"]
    learner, name = moved.learner("moved", parts), "+".join(parts)
    halves = [held for layer in range(moved.SHAPE.num_layers) for held in offloaded_halves(learner, moved.SHAPE, layer)]
    last = [rank[""]["live"][-1], rank[name]["live"][-1], rank[name]["moved"][-1]]
    for before, after, copied in zip(*last, strict=True):
        assert copied == pytest.approx(TOKENS * sum(halves), rel=0.03)
        assert before - after == pytest.approx(TOKENS * sum(halves[:-HELD]), rel=0.03)


def test_the_host_pins_no_more_for_halves_of_ragged_micro_batches_than_the_fullest_take(seen: Any) -> None:
    for layout in moved.LAYOUTS:
        for rank in seen[layout]:
            for said in rank.values():
                assert said["pinned"] == -(-said["most"] // moved.SLAB) * moved.SLAB


def test_a_push_waits_for_the_step_that_sglang_has_under_way(tmp_path: Path) -> None:
    """Under keep_cache a pause is only noted, and the step launched last goes on."""
    save_file(tensors_of(4), path := tmp_path / "model.safetensors")
    path.with_name("model.safetensors.json").write_text('{"version": 4, "writers": 1}')
    run_worlds([World(main=pushed_during_a_step, size=1, arguments=(path,))])
