"""What a rank says whose GPU is full, by a stand-in for what CUDA reports."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from launcher.wire.greetings import Setup
from launcher.worker.models import remember, telling_of_memory
from launcher.worker.process import _machines
from rl_megatron.config.io import load_config
from rl_megatron.models.named import NAMED
from rl_megatron.scaling.memory import footprints

GB = 10**9
MODEL = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}


def rank_of(folder: Path, *keys: str) -> Setup:
    """Of a Qwen3-30B-A3B on eight GPUs."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    config = load_config("qwen3_30b_a3b", [f"model.path={folder}", *keys])
    return Setup(config=config, model_folder=folder, run_folder=folder / "run", rendezvous="file:///none")


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch as on a GPU of 80 GB: it holds 70 GB, of which 61.25 are allocated, and others 8."""
    told = {"is_available": True, "mem_get_info": (2 * GB, 80 * GB), "memory_reserved": 70 * GB}
    told |= {"memory_allocated": 61.25 * GB, "max_memory_allocated": 69 * GB}
    for name, value in told.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda **_: {"segments": [], "device_traces": [[]]})


def notes_of(setup: Setup, rank: int = 3) -> list[str]:
    with pytest.raises(torch.OutOfMemoryError) as found, telling_of_memory(setup, rank):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")
    return list(found.value.__notes__)


@pytest.mark.usefixtures("full")
def test_the_plans_terms_stand_beside_what_is_allocated_and_a_snapshot_is_left(tmp_path: Path) -> None:
    setup = rank_of(tmp_path, "profile.memory=true")
    setup.run_folder.mkdir()
    plan, largest, now, snapshot = notes_of(setup)
    (own,) = {one.total: one for one in footprints(setup.config, NAMED["qwen3-30b-a3b"]) if one.rank == 3}.values()
    terms = ", ".join(f"{name} {size / GB:.3g}" for name, size in own.terms.items() if size)
    assert plan == f"the plan of its GPU, {own.total / GB:.3g} GB: {terms}"
    assert largest.startswith(f"the largest, {own.largest}: ")
    assert now == (
        "now: 61.2 GB allocated of 70.0 that torch holds, 69.0 at most; 8.0 by others and outside of torch, of 80.0"
    )
    path = tmp_path / "run" / "profile" / "out_of_memory_rank-3.pickle"
    assert snapshot == f"a snapshot of what was allocated where, for pytorch.org/memory_viz: {path}"
    assert pickle.loads(path.read_bytes()) == {"segments": [], "device_traces": [[]]}


@pytest.mark.usefixtures("full")
def test_a_folder_that_takes_no_snapshot_and_one_without_a_plan_are_told(tmp_path: Path) -> None:
    setup = rank_of(tmp_path, "profile.memory=true")
    (tmp_path / "run").write_text("a file in its place")
    (tmp_path / "config.json").write_text("{}")
    unplanned, _, unwritten = notes_of(setup)
    assert unplanned.startswith("there is no plan of its GPU beside: ")
    assert unwritten.startswith(f"no snapshot: {tmp_path}/run/profile/")
    assert notes_of(rank_of(tmp_path))[-1].startswith("profile.memory=true writes a snapshot")


NCCL = "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.29.7\nLast error:\nCuda failure 2 "


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize(
    ("error", "full_of"),
    [
        (torch.distributed.DistBackendError(f"{NCCL}'out of memory'"), True),
        (torch.distributed.DistBackendError(f"{NCCL}'invalid argument'"), False),
        (torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), False),
    ],
)
def test_libraries_that_allocate_beside_torch_fill_a_gpu_too(tmp_path: Path, error: Exception, full_of: bool) -> None:
    """Their errors get the same lines, and are the run's fault like torch's own, not the machine's."""
    with pytest.raises(type(error)) as found, telling_of_memory(rank_of(tmp_path), 3):
        raise error
    notes = getattr(found.value, "__notes__", [])
    assert [note.partition(",")[0] for note in notes[:1]] == ["the plan of its GPU"] * full_of
    assert _machines(error) is not full_of


def test_allocations_are_remembered_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history_impl", lambda *a, **k: given.append((a, k)))
    remember()
    assert given == [(("all",), {"max_entries": 200_000})]
