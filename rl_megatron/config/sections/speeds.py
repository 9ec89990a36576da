"""The ``slurm.speeds`` section: speeds of the cluster by which ``plan`` and ``submit`` estimate seconds."""

from __future__ import annotations

from rl_megatron.section import PositiveFloat, Section


class SpeedsSection(Section):
    """Speeds of the cluster, in GB/s (1e9 bytes) each way, by which ``plan`` and ``submit`` estimate pushes and
    checkpoints, and what steps are predicted by. The defaults are assumed, not measured. No run is faster by them."""

    gpu: str | None = None
    """Kind of the GPUs, by which ``plan`` and ``submit`` predict a step's seconds by phase, as h100, or a YAML file as
    ``rl-megatron scale`` takes (docs/scaling.md); null: they say only what no step can beat."""
    mean_tokens: PositiveFloat | None = None
    """Mean length of completions, in tokens, of the predicted step; null: half of rollout.max_new_tokens."""

    nic: PositiveFloat = 50.0
    """A GPU's share of the network between nodes; 50 is a link of 400 Gb/s for each GPU."""
    nvlink: PositiveFloat = 450.0
    """A GPU's links inside its node."""
    memory: PositiveFloat = 10.0
    """A file in a node's memory (/dev/shm) or on its own disk, for each process that writes or reads it."""
    storage_node: PositiveFloat = 5.0
    """The shared file system, for one node."""
    storage: PositiveFloat = 100.0
    """The shared file system, for all nodes together."""
    tflops: PositiveFloat = 989.0
    """Peak of a GPU in bfloat16, 1e12 FLOP/s, for the floor of a step's seconds; 989 is an H100's or H200's."""
    step_seconds: PositiveFloat | None = None
    """Seconds of a step, as in ``seconds/step`` of a run's metrics: ``plan`` and ``submit`` compare pushes and
    checkpoints with it, and warn above a tenth; null: they compare with the floor, and do not warn."""
