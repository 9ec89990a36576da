"""Columns of a step on real ranks: they travel once, and none is taken that a rank was not sent."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from launcher.controller.roles import LearnerGroup
from launcher.hosts.local import LocalLauncher
from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.config.io import load_config
from rl_megatron.data.packing import Packer, packer_of, unpack
from rl_megatron.errors import RLMegatronError
from rl_megatron.interfaces import Roles
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.types import Samples
from tests.samples import sequences_of

pytestmark = pytest.mark.usefixtures("forked_nursery")
_PIDFD_GETFD = 438  # a system call of Linux 5.6
LENGTHS = [7, 12, 30, 19] + [500] * 96
PROMPT = 5
TINY = TinySizes(num_layers=2, hidden_size=32, num_experts=4)


def sampled(of: Sequence[int] = LENGTHS) -> Samples:
    """Rows of random tokens, sampled after the prompt."""
    g, lengths = torch.Generator().manual_seed(0), torch.tensor(of)
    ends = lengths.cumsum(0)
    rows = [torch.randint(0, 256, (length + 1,), generator=g) for length in of]
    place = torch.arange(int(ends[-1])) - torch.repeat_interleave(ends - lengths, lengths)
    mask = place >= PROMPT - 1
    logprobs = -torch.rand(len(mask), generator=g) * mask
    return sequences_of(
        of,
        input_ids=torch.cat([row[:-1] for row in rows]),
        targets=torch.cat([row[1:] for row in rows]),
        mask=mask,
        rollout_logprobs=logprobs,
        old_logprobs=logprobs.clone(),
    )


def written() -> int:
    """Bytes that this process has written, to the ranks' streams and anywhere else."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def received(pid: int) -> int:
    """Bytes that all sockets of a process have received over TCP, as the kernel counts them."""
    process, total = os.pidfd_open(pid), 0
    for number in map(int, os.listdir(f"/proc/{pid}/fd")):
        file = ctypes.CDLL(None).syscall(_PIDFD_GETFD, process, number, 0)
        assert file >= 0, "the kernel refuses to show another process's sockets"
        if stat.S_ISSOCK(os.fstat(file).st_mode):
            with socket.socket(fileno=file) as one:
                if one.family == socket.AF_INET and one.type == socket.SOCK_STREAM:
                    told = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                    total += int.from_bytes(told[128:136], "little")  # tcpi_bytes_received
        else:
            os.close(file)
    os.close(process)
    return total


def by_transformers(model: Path, samples: Samples, row: int) -> Tensor:
    first, stop = samples.cu_seqlens[row : row + 2].tolist()
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model)(samples.input_ids[None, first:stop]).logits[0]
    return logits.float().log_softmax(-1).gather(1, samples.targets[first:stop, None]).squeeze(1)


async def replayed(roles: Roles, packer: Packer, samples: Samples) -> None:
    """Routers that take the experts of a pass before give its log-probs; a stage reads its own layers' alone."""
    assert isinstance(roles.policy, LearnerGroup)
    batch = packer.pack(samples)
    said = await roles.policy.score(batch, frozenset({"logprobs", "routes"}))
    logprobs, routes = (unpack(batch, said[what], samples) for what in ("logprobs", "routes"))
    assert routes.shape == (len(samples.targets), 2, TINY.experts_per_token)
    ranks = [worker.process.pid for worker in roles.policy._group.workers]
    bytes_read = []
    for given in (None, routes, 3 - routes):
        again = replace(samples, input_ids=samples.input_ids.clone(), routes=given)
        before = [received(pid) for pid in ranks]
        batch = packer.pack(again)
        found = unpack(batch, (await roles.policy.score(batch, frozenset({"logprobs"})))["logprobs"], again)
        bytes_read.append([received(pid) - old for pid, old in zip(ranks, before, strict=True)])
        differs = (found - logprobs).abs().max().item()
        assert differs > 0.1 if given is not None and given is not routes else differs < 1e-5
    of_stage = routes.nbytes / 2 / 2  # of a data-parallel rank's rows, one layer
    for rank in (2, 3):  # the second stage; the first ranks have theirs by a pipe from the controller
        assert (bytes_read[1][rank] - bytes_read[0][rank]) / of_stage == pytest.approx(1.0, abs=0.1)


def test_a_step_of_two_data_parallel_ranks_with_two_stages(tmp_path: Path) -> None:
    """Log-probs are transformers'; bytes are counted at the streams; the last pass ends the run."""
    keys = ("learner.threads=1", "learner.ep=1", "learner.dp=2", "learner.pp=2", "rollout.temperature=1.0")
    config = load_config("tiny_cpu", keys)
    model = make_tiny_model(TINY, tmp_path / "cache", seed=3)
    samples, packer = sampled(), packer_of(config.learner, attention_cost=0.0)

    async def step(roles: Roles) -> None:
        before = written()
        batch = packer.pack(samples, ranks=packer.ranks(samples, most=2, seed=0))
        said = await roles.policy.score(batch, frozenset({"logprobs"}))
        current = unpack(batch, said["logprobs"], samples)
        for row in range(3):
            first, stop = samples.cu_seqlens[row : row + 2].tolist()
            torch.testing.assert_close(current[first:stop], by_transformers(model, samples, row), atol=1e-4, rtol=0)
        scored = replace(samples, old_logprobs=current)
        for minibatch in packer.minibatches(scored, most=2, seeds=[0]):
            await roles.policy.backward(minibatch, CrossEntropy())
            await roles.policy.step(1e-4)
        moved, tokens = written() - before, len(samples.targets) + samples.num_sequences
        columns = 4 * (tokens + int(samples.mask.sum()) + len(current))
        assert columns < moved <= 1.05 * columns, moved / columns
        row = roles.rank_metrics()
        assert columns < row["plane/bytes"] <= moved
        assert row["plane/seconds"] > 0
        assert roles.rank_metrics()["plane/bytes"] == 0

    async def run() -> None:
        async with LocalLauncher(model, tmp_path).start(config) as roles:
            await step(roles)
            await replayed(roles, packer, samples)
            await roles.policy.forget()
            assert isinstance(roles.policy, LearnerGroup)
            sent = roles.policy._plane._sent
            batch = packer.pack(samples)
            sent.shares(batch, to_score=True)  # as if ranks had them
            await roles.policy.score(batch, frozenset({"logprobs"}))

    with pytest.raises(RLMegatronError, match=r"asked for 'input_ids' of rows .*, which it was not sent"):
        asyncio.run(run())
