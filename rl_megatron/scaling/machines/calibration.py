"""A machine's calibration: a JSON file of what was measured on it, and of the hardware entry that was fitted to that.

``rl-megatron scale --calibrate FILE`` writes it; ``scale MODEL gpu=FILE`` and ``scale --check`` read it. No torch.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from rl_megatron.durable import write_atomically
from rl_megatron.errors import ConfigError
from rl_megatron.models.shape import ModelShape
from rl_megatron.options.device import DeviceKeys
from rl_megatron.options.dtype import DtypeKeys
from rl_megatron.scaling.constants import FITTED, MEMORY
from rl_megatron.scaling.flops import Peak
from rl_megatron.scaling.hardware import GPUS, Gpu, gpu_named
from rl_megatron.section import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section


class Product(Section):
    """A linear layer of [rows, wide] by [deep, wide]: seconds of its forward pass, and of both passes."""

    rows: Positive
    wide: Positive
    deep: Positive
    forward: PositiveFloat
    both: PositiveFloat


class Grouped(Section):
    """``experts`` gated MLPs of ``width``, each on ``rows``: seconds of the forward pass, and of both passes."""

    experts: Positive
    rows: Positive
    hidden: Positive
    width: Positive
    forward: PositiveFloat
    both: PositiveFloat


class Attended(Section):
    """Causal attention of ``tokens`` in sequences of ``length``: seconds of both passes."""

    tokens: Positive
    length: Positive
    heads: Positive
    head_dim: Positive
    both: PositiveFloat


class Moved(Section):
    """Bytes that were copied, or that each of ``ranks`` received from the others, and the seconds."""

    ranks: Positive
    num_bytes: Positive
    seconds: PositiveFloat


class ModelSizes(Section):
    """ModelSizes of a made-up mixture of experts."""

    hidden: Positive
    layers: Positive
    heads: Positive
    kv_heads: Positive
    head_dim: Positive
    experts: Positive
    chosen: Positive
    width: Positive
    vocabulary: Positive

    @property
    def shape(self) -> ModelShape:
        """The model."""
        return ModelShape(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            num_experts=self.experts,
            experts_per_token=self.chosen,
            expert_width=self.width,
            vocab_size=self.vocabulary,
            rope_theta=1e4,
            norm_eps=1e-6,
            normalize_top_k=True,
            tie_embeddings=False,
            max_positions=4096,
        )


class LearnerProbe(Section):
    """A step of the real learner on a made-up model: each rank's tokens, seconds to train on them and to score them."""

    sizes: ModelSizes
    tokens: Positive
    length: Positive
    micro_batches: Positive
    dp: Positive = 1
    ep: Positive = 1
    train: PositiveFloat
    score: PositiveFloat


class Decoded(Section):
    """A token of ``rows`` sequences of the embedded engine, which had ``context`` tokens before it in the mean."""

    sizes: ModelSizes
    rows: Positive
    context: Positive
    seconds: PositiveFloat


class Curves(Section):
    """What was measured while ``ranks`` processes computed at the same time."""

    ranks: Positive
    products: tuple[Product, ...]
    grouped: tuple[Grouped, ...]
    attention: tuple[Attended, ...]
    memory: tuple[Moved, ...]
    all_to_all: tuple[Moved, ...] = ()
    all_gather: tuple[Moved, ...] = ()
    probes: tuple[LearnerProbe, ...]
    decoded: tuple[Decoded, ...] = ()
    process_bytes: NonNegative = 0
    """Of a rank's process before it has a model; 0 on GPUs, whose allocators count from 0."""


class MachineEntry(Section):
    """A hardware entry: rates in FLOP/s and GB/s, and the constants of `constants.Constants` that differ by machine."""

    flops: PositiveFloat
    memory_rate: PositiveFloat
    link: PositiveFloat
    tile: NonNegativeFloat
    attention: PositiveFloat
    passes: NonNegativeFloat
    plain: PositiveFloat
    host: NonNegativeFloat
    fixed: NonNegativeFloat
    backward: PositiveFloat
    operation: NonNegativeFloat
    each_expert: NonNegativeFloat
    latency: NonNegativeFloat
    inside: NonNegativeFloat
    adam: NonNegativeFloat
    logits: NonNegativeFloat
    decode_layer: NonNegativeFloat
    decode_token: NonNegativeFloat
    decode_products: NonNegativeFloat


class MachineLoad(Section):
    """Curves, and the entry that was fitted to them."""

    curves: Curves
    entry: MachineEntry


class Calibration(DtypeKeys, DeviceKeys):
    """The file. ``alone``: one process computed; ``together``: ``ranks`` of them did at the same time."""

    format: Literal[1] = 1
    name: str
    date: str
    threads: Positive
    memory: PositiveFloat
    """GB of a GPU, or of the machine for each rank."""
    versions: dict[str, str]
    alone: MachineLoad
    together: MachineLoad | None = None

    def load(self, ranks: int) -> MachineLoad:
        """The one that holds for a run of so many ranks on the machine. Raises ConfigError if there is none."""
        if ranks == 1:
            return self.alone
        if self.together is None or self.together.curves.ranks < ranks:
            most = 1 if self.together is None else self.together.curves.ranks
            raise ConfigError(
                f"the calibration of {self.name} holds for {most} rank{'s' * (most > 1)} at once, and {ranks} compute "
                f"here; measure with rl-megatron scale --calibrate FILE --ranks {ranks}"
            )
        return self.together

    def gpu(self, ranks: int) -> Gpu:
        """The hardware entry of one of so many ranks. Raises ConfigError as `load` does."""
        entry = self.load(ranks).entry
        return hardware(entry, name=self.name, device=self.device, memory=self.memory, ranks=ranks)


def hardware(entry: MachineEntry, *, name: str, device: str, memory: float, ranks: int) -> Gpu:
    """The planner's hardware entry of a rank's share of a machine."""
    constants = replace(
        FITTED,
        gemm=1.0,
        gemm_fp8=1.0,
        power=0.0,
        links=1.0,
        age=0.0,
        ahead=1.0 if device == "cpu" else FITTED.ahead,
        **{name: getattr(entry, name) for name in _CONSTANTS},
    )
    return replace(
        GPUS["h100"],
        cuda_name=name,
        memory=memory,
        hbm=entry.memory_rate / MEMORY,
        nvlink=entry.link,
        network=entry.link,
        domain=ranks,
        per_node=ranks,
        measured=Peak(names=(name,), bfloat16=entry.flops / 1e12, float8=None),
        constants=constants,
    )


_CONSTANTS = (
    *("tile", "attention", "passes", "plain", "host", "fixed"),
    *("backward", "operation", "each_expert", "latency", "inside", "adam", "logits"),
)


def read_calibration(path: Path) -> Calibration:
    """Raises ConfigError for a file that is not there or is not a calibration, with the key that is wrong."""
    try:
        return Calibration.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; rl-megatron scale --calibrate FILE writes one") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(
            f"{path}: not a calibration: {where}: {first['msg']}; measure again with rl-megatron scale --calibrate FILE"
        ) from error


def write_calibration(path: Path, found: Calibration) -> None:
    """Replace the file, whole or not at all."""
    write_atomically(path, found.model_dump_json(indent=1).encode())


def machine_named(name: str, ranks: int, key: str = "gpu") -> Gpu:
    """A calibrated machine by its JSON file, for a run of so many ranks on it; else as `gpu_named`."""
    if name.endswith(".json"):
        return read_calibration(Path(name)).gpu(ranks)
    return gpu_named(name, key)


def today() -> str:
    """The date of a calibration, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")
