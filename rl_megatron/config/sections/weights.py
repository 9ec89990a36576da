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
    """A transport as rules between keys see it; `rl_megatron.weights.transports` has its code."""

    name: str
    keys: frozenset[str]
    """Those of the section that it reads between the learner and an engine in the learner's processes."""
    direct: bool = False
    """Whether it also sends shards into the ranks of servers; without that, servers load the file on rank 0."""
    one_process: bool = False
    """Whether learner and engine must be one process."""
    maps: Literal["cpu", "cuda"] | None = None
    """The device whose memory two processes map, on one machine."""
    over_group: bool = False
    """Whether weights go over the process group itself, which on GPUs wants one for each rank."""

    def backend(self, device: str) -> str:
        """Of the process group in which the learner's ranks on ``device`` meet those of servers."""
        return "nccl" if self.over_group and device == "cuda" else "gloo"

    def reaches(self, *, served: bool) -> bool:
        """Whether servers, or an engine in the learner's processes, can be given weights by it."""
        return not (served and self.one_process)

    def reads(self, *, served: bool) -> frozenset[str]:
        """The keys of the section that have an effect. The file for servers is filled whatever the transport."""
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
"""By ``weights.transport``; what is not here is code of the user's own."""
_OWN = TransportKind(name="package.module:name", keys=_FILLING)
_EMBEDDED, _SERVED = TRANSPORT_KINDS["process_group"], TRANSPORT_KINDS["file"]  # what auto stands for
_FILLS_FILE = "process_group"


class WeightsSection(Section):
    """How the learner's weights reach what samples: the engine in the learner's processes (docs/weights.md), or servers
    (docs/engines.md)."""

    transport: Literal["auto", "process_group", "shared_memory", "cuda_ipc", "memory", "file"] | OwnCode = "auto"
    """process_group: gloo or NCCL; shared_memory, cuda_ipc: one machine, in memory of the host or of its GPUs that both
    map; memory: learner and engine are one process; file: in ``folder``, for servers whole and read by their own
    loaders. auto: file for servers, else process_group. ``package.module:name`` is a function of your own that makes a
    Transport (docs/weights.md); for servers it fills their file. Its code is run."""
    verify: bool = True
    """Whether receivers compare a 64-bit digest of every box that they hold with the sender's. What engine servers
    hold is verified in any case, by checksums of their own (docs/engines.md)."""
    delta: bool = False
    """Whether to send only what changed since the version before: transport=process_group, or into the servers' file.
    """
    bucket_mb: Positive = 64
    """Most MiB that a process packs and sends at once: transport=process_group or cuda_ipc, or into the servers' file.
    What goes directly into servers has buckets of 64 MiB."""
    folder: Path | None = None
    """Where weights lie on their way, seen by all that read them: transport=file, or any with servers. null:
    ``weights`` in the run's folder; for servers /dev/shm, or where some are started on other nodes the run's folder."""
    meeting_host: str | None = None
    """The controller's address, at which ranks of learner and servers find each other: servers, transport other than
    file. null: loopback, or the one at which a job's other nodes reach it."""

    @field_validator("transport", mode="before")
    @classmethod
    def _renamed(cls, value: object) -> object:
        if value == "disk":
            raise PydanticCustomError("renamed", "Input should be 'file', the new name of 'disk'")
        return value

    def kind(self, *, served: bool) -> TransportKind:
        """That of ``transport``, or of what auto stands for where servers sample, or where they do not."""
        if self.transport == "auto":
            return _SERVED if served else _EMBEDDED
        return TRANSPORT_KINDS.get(self.transport) or replace(_OWN, name=self.transport)

    def filling(self, *, served: bool) -> WeightsSection:
        """The section for the way to what learner ranks hold: their engines, or for servers the file on rank 0.

        That file is filled over the process group, or by code of the user's own.
        """
        name = self.kind(served=served).name
        if served and name in TRANSPORT_KINDS:
            name = _FILLS_FILE
        return self.model_copy(update={"transport": name})
