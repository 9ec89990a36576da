"""The ``weights`` section: the transport of the learner's weights to the engine, and what each transport supports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rl_megatron.section import Positive, Section

NODE_MEMORY = Path("/dev/shm")
"""Folders in it are each node's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportKind:
    """What a transport supports, for checks of the configuration; `rl_megatron.weights.routes` has its code."""

    name: str
    direct: bool = True
    """Whether it sends shards into the ranks of servers; without that, servers load the file on their node."""
    group: Literal["all", "learner"] | None = None
    """The ranks over whose process group weights go to servers, on GPUs one rank each: those of learner and servers, or
    the learner's alone, which hand them on to the servers' ranks beside them."""
    has_rings_on_gpus: bool = False
    """Whether each pair of processes has slots in a GPU's memory."""
    alike: tuple[str, ...] = ()
    """What learner and servers must have alike where both are on GPUs: names of
    `rl_megatron.weights.checks.libraries.FIELDS`."""

    def backend(self, device: str) -> str:
        """The backend of the process group over which weights go, of ranks on ``device``."""
        return "nccl" if self.group and device == "cuda" else "gloo"

    def compared(self, device: str) -> tuple[str, ...]:
        """What must be alike in the environments of learner and servers on ``device``, if it joins their ranks."""
        return () if device == "cpu" else self.alike


PROCESS_GROUP = TransportKind(
    name="process_group", group="all", alike=("nccl", "torch", "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")
)
CUDA_IPC = TransportKind(name="cuda_ipc", has_rings_on_gpus=True, alike=("handle",))
CARRIED = TransportKind(name="carried", group="learner", alike=("handle",))
FILE = TransportKind(name="file", direct=False)


class WeightsSection(Section):
    """The transport of the learner's weights to the in-process engine (docs/weights.md) or to engine servers
    (docs/engines.md)."""

    transport: Literal["auto", "file", "direct"] = "auto"
    """direct: straight into the ranks of servers. Servers by address, on nodes of their own, or on further GPUs of one
    machine are one process group with the learner's ranks, over gloo or NCCL. Servers on the learner's GPUs (in a job:
    on its nodes) map its memory: on one node, by CUDA IPC, that of all ranks, if a server has as many GPUs as the
    learner; else that of the rank on the same GPU, or on CPUs node, to which the others send what it hands on. file:
    whole checkpoints in ``folder``, which the servers' own loaders read. auto: direct for servers on nodes of their
    own, unless ``folder`` or ``delta`` is set; else file. The in-process engine always gets weights over the process
    group of the learner's ranks (docs/weights.md)."""
    push: Literal["merged", "adapters"] = "merged"
    """What servers get of a model with adapters (learner.lora). merged: at each push the whole model, adapters merged,
    so that engines need no LoRA of their own; adapters: the frozen model once, then each version's adapters, which
    servers hold beside those before and load while they sample (docs/lora.md)."""
    delta: bool = False
    """Into the in-process engine, and into the file of servers: whether to send only the bytes that changed since the
    last version."""
    bucket_mb: Positive = 64
    """Into the in-process engine, and into the file of servers: most MiB that a process packs and sends at once.
    transport=direct into servers always uses buckets of 64 MiB."""
    folder: Path | None = None
    """The folder of the servers' files of weights, which every reader must see; a run has a folder of its own there,
    while it lasts. null: /dev/shm, where each of the learner's nodes with servers has a file of its own, or the run's
    folder if servers have nodes of their own or are by address elsewhere than on this machine."""
    meeting_host: str | None = None
    """transport=direct into servers: the controller's address for the rendezvous of learner and server
    ranks. null: loopback, or the address at which a job's other nodes reach the controller."""
