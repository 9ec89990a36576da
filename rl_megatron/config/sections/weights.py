"""The ``weights`` section: the transport of the learner's weights to the engine, and what each transport supports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import field_validator
from pydantic_core import PydanticCustomError

from rl_megatron.section import OwnCode, Positive, Section

_FILLING = frozenset({"verify", "delta", "bucket_mb", "folder"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportKind:
    """What a transport supports, for checks of the configuration; `rl_megatron.weights.transports` has its code."""

    name: str
    keys: frozenset[str]
    """The keys of the section that it reads between the learner and the in-process engine."""
    direct: bool = False
    """Whether it also sends shards into the ranks of servers; without that, servers load the file on rank 0."""
    one_process: bool = False
    """Whether learner and engine must be one process."""
    maps: Literal["cpu", "cuda"] | None = None
    """The device whose memory two processes map, on one machine."""
    over_group: bool = False
    """Whether weights go over the process group itself, which on GPUs requires one GPU for each rank."""

    def backend(self, device: str) -> str:
        """The backend of the process group of the learner's ranks, on ``device``, and the servers' ranks."""
        return "nccl" if self.over_group and device == "cuda" else "gloo"

    def reaches(self, *, served: bool) -> bool:
        """Whether it can send weights to servers (``served``), or to the in-process engine."""
        return not (served and self.one_process)

    def reads(self, *, served: bool) -> frozenset[str]:
        """The keys of the section that have an effect. With every transport, rank 0 also fills the file for servers."""
        if not served:
            return self.keys
        return _FILLING | {"meeting_host"} if self.direct else _FILLING


_KINDS = (
    TransportKind(name="process_group", keys=frozenset({"verify", "delta", "bucket_mb"}), direct=True, over_group=True),
    TransportKind(name="shared_memory", keys=frozenset({"verify"}), direct=True, maps="cpu"),
    TransportKind(name="cuda_ipc", keys=frozenset({"verify", "bucket_mb"}), direct=True, maps="cuda"),
    TransportKind(name="memory", keys=frozenset({"verify"}), one_process=True),
    TransportKind(name="file", keys=frozenset({"verify", "folder"})),
)
TRANSPORT_KINDS: Mapping[str, TransportKind] = {kind.name: kind for kind in _KINDS}
"""The transports by the values of ``weights.transport``; any other value names code of the user's own."""
_OWN = TransportKind(name="package.module:name", keys=_FILLING)
_EMBEDDED, _SERVED = TRANSPORT_KINDS["process_group"], TRANSPORT_KINDS["file"]  # what auto stands for
_FILLS_FILE = "process_group"


class WeightsSection(Section):
    """The transport of the learner's weights to the in-process engine (docs/weights.md) or to engine servers
    (docs/engines.md)."""

    transport: Literal["auto", "process_group", "shared_memory", "cuda_ipc", "memory", "file"] | OwnCode = "auto"
    """process_group: over gloo or NCCL; shared_memory, cuda_ipc: both sides map the same memory of one machine or of
    its GPUs; memory: inside the one process of learner and engine; file: in ``folder``, for servers as whole
    checkpoints that their own loaders read. auto: file for servers, else process_group. ``package.module:name`` is a
    function of your own that makes a Transport (docs/weights.md); for servers it fills their file. Its code is run."""
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
    """transport=file, or any with servers: the folder of the weights' files, which every reader must see. null:
    ``weights`` in the run's folder; for servers /dev/shm, or the run's folder if some of them start on other nodes."""
    meeting_host: str | None = None
    """Servers with a transport other than file: the controller's address for the rendezvous of learner and server
    ranks. null: loopback, or the address at which a job's other nodes reach the controller."""

    @field_validator("transport", mode="before")
    @classmethod
    def _renamed(cls, value: object) -> object:
        if value == "disk":
            raise PydanticCustomError("renamed", "Input should be 'file', the new name of 'disk'")
        return value

    def kind(self, *, served: bool) -> TransportKind:
        """The kind of ``transport``; auto depends on whether servers sample (``served``)."""
        if self.transport == "auto":
            return _SERVED if served else _EMBEDDED
        return TRANSPORT_KINDS.get(self.transport) or replace(_OWN, name=self.transport)

    def filling(self, *, served: bool) -> WeightsSection:
        """The section for pushes between learner ranks: into their engines, or for servers into the file on rank 0.

        That file is filled over the process group, or by code of the user's own.
        """
        name = self.kind(served=served).name
        if served and name in TRANSPORT_KINDS:
            name = _FILLS_FILE
        return self.model_copy(update={"transport": name})
