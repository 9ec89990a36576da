"""The ``weights`` section: the transport of the learner's weights to the engine, and what each transport supports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rl_megatron.section import OwnCode, Positive, Section

NODE_MEMORY = Path("/dev/shm")
"""Folders in it are each node's own."""
_FILLING = frozenset({"verify", "delta", "bucket_mb", "folder"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportKind:
    """What a transport supports, for checks of the configuration; `rl_megatron.weights.transports` has its code."""

    name: str
    keys: frozenset[str]
    """The keys of the section that it reads between the learner and the in-process engine."""
    direct: bool = False
    """Whether it also sends shards into the ranks of servers; without that, servers load the file on their node."""
    embedded: bool = True
    """Whether it sends into the in-process engine."""
    one_process: bool = False
    """Whether learner and engine must be one process."""
    maps: Literal["cpu", "cuda"] | None = None
    """The device whose memory two processes map, on one machine."""
    group: Literal["all", "learner"] | None = None
    """The ranks over whose process group weights go to servers, on GPUs one rank each: those of learner and servers, or
    the learner's alone, which hand them on to the servers' ranks beside them."""
    crosses: Literal["links", "memory", "nothing", "file", "unknown"] = "unknown"
    """What the bytes cross: links between GPUs or nodes, a node's memory, nothing, a file, or what own code uses."""
    alike: tuple[str, ...] = ()
    """What learner and servers must have alike where both are on GPUs: names of
    `rl_megatron.weights.checks.libraries.FIELDS`."""

    @property
    def has_rings_on_gpus(self) -> bool:
        """Whether each pair of processes has slots in a GPU's memory."""
        return self.maps == "cuda"

    def backend(self, device: str) -> str:
        """The backend of the process group over which weights go, of ranks on ``device``."""
        return "nccl" if self.group and device == "cuda" else "gloo"

    def compared(self, device: str) -> tuple[str, ...]:
        """What must be alike in the environments of learner and servers on ``device``, if it joins their ranks."""
        return () if device == "cpu" else self.alike

    def reaches(self, *, served: bool) -> bool:
        """Whether it can send weights to servers (``served``), or to the in-process engine."""
        return not self.one_process if served else self.embedded

    def reads(self, *, served: bool) -> frozenset[str]:
        """The keys of the section that have an effect. With every transport ranks also fill the files for servers."""
        if not served:
            return self.keys
        return _FILLING | {"meeting_host"} if self.direct else _FILLING


_KINDS = (
    TransportKind(
        name="process_group",
        keys=frozenset({"verify", "delta", "bucket_mb"}),
        direct=True,
        group="all",
        crosses="links",
        alike=("nccl", "torch", "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"),
    ),
    TransportKind(name="shared_memory", keys=frozenset({"verify"}), direct=True, maps="cpu", crosses="memory"),
    TransportKind(
        name="cuda_ipc",
        keys=frozenset({"verify", "bucket_mb"}),
        direct=True,
        maps="cuda",
        crosses="links",
        alike=("handle",),
    ),
    TransportKind(
        name="carried",
        keys=frozenset(),
        direct=True,
        embedded=False,
        group="learner",
        crosses="links",
        alike=("handle",),
    ),
    TransportKind(name="memory", keys=frozenset({"verify"}), one_process=True, crosses="nothing"),
    TransportKind(name="file", keys=frozenset({"verify", "folder"}), crosses="file"),
)
TRANSPORT_KINDS: Mapping[str, TransportKind] = {kind.name: kind for kind in _KINDS}
"""The transports by the values of ``weights.transport``; any other value names code of the user's own."""
_OWN = TransportKind(name="package.module:name", keys=_FILLING)
_STRAIGHT, _SERVED = TRANSPORT_KINDS["process_group"], TRANSPORT_KINDS["file"]  # what auto stands for
_FILLS_FILE = "process_group"


class WeightsSection(Section):
    """The transport of the learner's weights to the in-process engine (docs/weights.md) or to engine servers
    (docs/engines.md)."""

    transport: Literal["auto", "process_group", "shared_memory", "cuda_ipc", "carried", "memory", "file"] | OwnCode = (
        "auto"
    )
    """process_group: over gloo or NCCL; shared_memory, cuda_ipc: both sides map the same memory of one machine or of
    its GPUs; carried: into servers on the learner's nodes, by process_group to the learner rank on the same GPU (on
    CPUs: node) as a server's rank, and through cuda_ipc or shared_memory from there; memory: inside the one process of
    learner and engine; file: in ``folder``, for servers as whole checkpoints that their own loaders read. auto:
    process_group; but file for servers on the learner's nodes or by address, and for servers with ``folder`` or
    ``delta``. ``package.module:name`` is a function of your own that makes a Transport (docs/weights.md); for servers
    it fills their file. Its code is run."""
    push: Literal["merged", "adapters"] = "merged"
    """What servers get of a model with adapters (learner.lora). merged: at each push the whole model, adapters merged,
    so that engines need no LoRA of their own; adapters: the frozen model once, then each version's adapters, which
    servers hold beside those before and load while they sample (docs/lora.md)."""
    verify: bool = True
    """Whether receivers compare a 64-bit digest of every box that they hold with the sender's. Engine servers are
    always verified, by checksums of their own (docs/engines.md)."""
    delta: bool = False
    """transport=process_group, or servers with the file: whether to send only the bytes that changed since the last
    version."""
    bucket_mb: Positive = 64
    """transport=process_group or cuda_ipc, or servers with the file: most MiB that a process packs and sends at once.
    Direct transports into servers always use buckets of 64 MiB."""
    folder: Path | None = None
    """transport=file, or any with servers: the folder of the weights' files, which every reader must see; a run has a
    folder of its own there, while it lasts. null: ``weights`` in the run's folder; for servers /dev/shm, where each of
    the learner's nodes with servers has a file of its own, or the run's folder if they have nodes of their own or are
    by address elsewhere than on this machine."""
    meeting_host: str | None = None
    """Servers with a transport other than file: the controller's address for the rendezvous of learner and server
    ranks. null: loopback, or the address at which a job's other nodes reach the controller."""

    def kind(self, *, served: bool, apart: bool = False) -> TransportKind:
        """The kind of ``transport``; auto depends on whether servers sample (``served``), on nodes of their own."""
        if self.transport == "auto":
            by_file = served and (not apart or self.delta or self.folder is not None)
            return _SERVED if by_file else _STRAIGHT
        return TRANSPORT_KINDS.get(self.transport) or replace(_OWN, name=self.transport)

    def filling(self, *, served: bool) -> WeightsSection:
        """The section for pushes between learner ranks: into their engines, or for servers into the files of servers.

        These are filled over the process group, or by code of the user's own.
        """
        name = self.kind(served=served).name
        if served and name in TRANSPORT_KINDS:
            name = _FILLS_FILE
        return self.model_copy(update={"transport": name})
