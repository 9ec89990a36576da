"""How a rank joins its world, and when it cannot."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.errors import ConfigError


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
    assert world.join(LearnerSection(device="cuda"), rank=1, rendezvous="file:///x", seed=1, gpu=3) == device
    assert heard == [device, "init", ("all_reduce", device), "megatron", "seed"]


def test_a_rank_that_sees_no_gpu_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_megatron.learner import world

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    where = rf"rank 3 on {re.escape(socket.gethostname())} sees no GPU; look at .*CUDA_VISIBLE_DEV"
    with pytest.raises(ConfigError, match=where):
        world.join(LearnerSection(device="cuda", dp=4), rank=3, rendezvous=f"file://{tmp_path}/x", seed=1)
