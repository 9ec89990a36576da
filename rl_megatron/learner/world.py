"""Joins and leaves a run's torch.distributed world, makes megatron's process groups in it, and passes batches on."""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.data.rows import OwnLayers, Share, has_layers, select_layers
from rl_megatron.errors import ConfigError
from rl_megatron.feature import active


def init_process_groups(
    learner: LearnerSection,
    *,
    rank: int,
    rendezvous: str,
    seed: int,
    store: int | None = None,
    gpu: int | None = None,
) -> torch.device:
    """Joins the world as ``rank`` and makes megatron's groups. Returns this rank's device. Every rank calls it.

    ``rendezvous`` is a torch.distributed init method: ``file://`` on one machine, ``tcp://host:port`` between nodes.
    There rank 0 serves the ranks' store on the listening socket of file descriptor ``store``, so that it is bound to
    one address. ``gpu`` is this rank's on its node; None: its number's. Raises if not all ranks arrive within
    ``learner.timeout_seconds``, and ConfigError if a rank with ``learner.device=cpu`` sees a GPU, or another none. With
    ``learner.deterministic`` torch raises RuntimeError from now on for an operation that has no deterministic kernel.
    """
    if learner.deterministic:
        torch.use_deterministic_algorithms(True)
    d, device = learner.dims, torch.device(learner.device)
    if device.type == "cpu" and torch.cuda.is_available():
        raise ConfigError(
            "learner.device=cpu, but this process sees a GPU, and megatron would put all weights on it; start the run "
            "with CUDA_VISIBLE_DEVICES= (empty), or set learner.device=cuda"
        )
    if device.type != "cpu":
        if not (count := torch.cuda.device_count()):
            raise ConfigError(
                f"learner.device={learner.device}, but rank {rank} on {socket.gethostname()} sees no GPU; "
                "look at `nvidia-smi` and CUDA_VISIBLE_DEVICES on that node; or set learner.device=cpu"
            )
        device = torch.device(device.type, (rank if gpu is None else gpu) % count)
        torch.cuda.set_device(device)
    limit = timedelta(seconds=learner.timeout_seconds)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if rendezvous.startswith("tcp://"):
        host, port = rendezvous.removeprefix("tcp://").rsplit(":", 1)
        server = dist.TCPStore(  # type: ignore[attr-defined]  # torch names it in no __all__
            host, int(port), d.world_size, rank == 0, limit, master_listen_fd=store
        )
        dist.init_process_group(backend, store=server, rank=rank, world_size=d.world_size, timeout=limit)
    else:
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=d.world_size, timeout=limit)
    dist.all_reduce(torch.zeros((), device=device))  # NCCL wants every rank in a group's first call; a push has not all
    make_groups(learner, seed=seed)
    return device


def make_groups(learner: LearnerSection, *, seed: int) -> None:
    """Makes megatron's groups in the world that this process has joined. Every rank calls it."""
    d = learner.dims
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=d.tp,
        pipeline_model_parallel_size=d.pp,
        virtual_pipeline_model_parallel_size=d.vpp if d.vpp > 1 else None,
        context_parallel_size=d.cp,
        expert_model_parallel_size=d.ep,
        expert_tensor_parallel_size=d.etp,
        distributed_timeout_minutes=math.ceil(learner.timeout_seconds / 60),
    )
    model_parallel_cuda_manual_seed(seed, use_cudagraphable_rng=any(one.captures for one in active(learner)))


class Relay:
    """Passes shares from the first rank of a data-parallel rank's ranks (tp x cp x pp) on to the others, each with the
    columns' entries of its own layers.

    Every rank makes one.
    """

    def __init__(self, learner: LearnerSection, rank: int) -> None:
        d, limit = learner.dims, timedelta(seconds=learner.timeout_seconds)
        self._rank = rank
        self._group: dist.ProcessGroup | None = None
        for data_rank in range(d.dp if d.world_size > d.dp else 0):
            ranks = [r for r in range(d.world_size) if d.dp_rank(r) == data_rank]
            group = dist.new_group(ranks, timeout=limit, backend="gloo")
            if rank in ranks:
                self._group, self._ranks = group, ranks

    def receive(self, share: Share | None, layers: OwnLayers) -> Share:
        """Returns the first rank's ``share``; others have None. ``layers`` are this rank's. Collective among them."""
        if self._group is None:
            assert share is not None
            return share
        told = torch.tensor([0, 0] if share is None else [len(share), has_layers(share)])
        dist.broadcast(told, self._ranks[0], group=self._group)
        size, layered = told.tolist()
        stages = self._stages(layers) if layered else []
        if len(stages) > 1:
            return self._relay_layers(share, stages)
        tensor = torch.empty(size, dtype=torch.uint8) if share is None else torch.from_numpy(share)
        dist.broadcast(tensor, self._ranks[0], group=self._group)
        return tensor.numpy()

    def _stages(self, layers: OwnLayers) -> list[tuple[OwnLayers, list[int]]]:
        """Returns the layers of each stage, and its ranks."""
        width, names = torch.tensor(max(map(len, layers.values()))), sorted(layers)
        dist.all_reduce(width, op=dist.ReduceOp.MAX, group=self._group)
        own = torch.full((len(names), int(width)), -1)
        for row, name in zip(own, names, strict=True):
            row[: len(layers[name])] = torch.tensor(layers[name])
        of_ranks = [torch.empty_like(own) for _ in self._ranks]
        dist.all_gather(of_ranks, own, group=self._group)
        stages: list[tuple[OwnLayers, list[int]]] = []
        for rank, told in zip(self._ranks, of_ranks, strict=True):
            its = {name: tuple(row[row >= 0].tolist()) for name, row in zip(names, told, strict=True)}
            known = next((ranks for of_stage, ranks in stages if of_stage == its), None)
            if known is None:
                stages.append((its, [rank]))
            else:
                known.append(rank)
        return stages

    def _relay_layers(self, share: Share | None, stages: Sequence[tuple[OwnLayers, list[int]]]) -> Share:
        """Sends each stage's share once to its first rank, which sends it to the others of the stage."""
        first, *beside = next(ranks for _, ranks in stages if self._rank in ranks)
        mine = None
        if share is not None:
            for of_stage, (leader, *_) in stages:
                part = select_layers(share, of_stage)
                if leader == self._rank:
                    mine = part
                else:
                    self._send(part, leader)
        if mine is None:
            mine = self._received(self._ranks[0] if self._rank == first else first)
        for rank in beside if self._rank == first else ():
            self._send(mine, rank)
        return mine

    def _send(self, share: Share, to: int) -> None:
        dist.send(torch.tensor([len(share)]), to, group=self._group)
        dist.send(torch.from_numpy(share), to, group=self._group)

    def _received(self, source: int) -> Share:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, source, group=self._group)
        share = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(share, source, group=self._group)
        return share.numpy()


def destroy_process_groups() -> None:
    """Waits for every rank, then leaves the world. Every rank calls it."""
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
