"""The ``weights`` section: the transport of the learner's weights to the engine, and what each transport supports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rl_megatron.feature import with_features
from rl_megatron.section import Positive, Section

NODE_MEMORY = Path("/dev/shm")
"""Folders in it are each node's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportKind:
    """Properties of a transport, for checks of the configuration; `rl_megatron.weights.routes` has its code."""

    name: str
    direct: bool = True
    """Whether it sends shards into the ranks of servers; without that, servers load the file on their node."""
    members: bool = False
    """Whether ranks of servers may join the learner's process group."""
    last_hop: bool = False
    """Whether they may share GPUs or nodes with the learner's, which pass weights on through memory that both map."""


PROCESS_GROUP = TransportKind(name="process_group")
FILE = TransportKind(name="file", direct=False)


@with_features("weights")
class WeightsSection(Section):
    """The transport of the learner's weights to the in-process engine (docs/how_it_works.md) or to engine servers
    (docs/engines.md)."""

    transport: Literal["auto", "file", "direct"] = "auto"
    """direct: straight into the ranks of servers, over one process group, gloo or NCCL. A rank of servers is a member,
    or on a GPU of the learner's (on CPUs: on its node) maps memory of the learner rank there, which hands on what the
    others send. file:
    whole checkpoints in ``folder``, which the servers' own loaders read. auto: direct for servers on nodes of their
    own, unless ``folder`` or ``delta`` is set; else file. The in-process engine always gets weights over the process
    group of the learner's ranks (docs/how_it_works.md)."""
    delta: bool = False
    """Into the in-process engine, and into the file of servers: whether to send only the bytes that changed since the
    last version."""
    bucket_mb: Positive = 64
    """Into the in-process engine, and into the file of servers: most MiB that a process packs and sends together.
    transport=direct into servers always uses buckets of 64 MiB."""
    folder: Path | None = None
    """The folder of the servers' files of weights, which every reader must see; a run has a folder of its own there,
    while it lasts. null: /dev/shm, where each of the learner's nodes with servers has a file of its own, or the run's
    folder if servers have nodes of their own or are by address elsewhere than on this machine."""
    rendezvous_host: str | None = None
    """transport=direct into servers: the controller's address for the rendezvous of learner and server
    ranks. null: loopback, or the address at which a job's other nodes reach the controller."""
