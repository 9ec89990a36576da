"""``rl-megatron doctor --gpu``: whether a learner computes on this node's GPUs what it does on its CPU, and how fast
they exchange data."""

from __future__ import annotations

import importlib.metadata
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from launcher.programs import gpu_step
from launcher.rehearsal import machine
from launcher.rehearsal.survey import survey
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError, RLMegatronError
from rl_megatron.options.device import GPU
from rl_megatron.scaling.flops import peak_of
from rl_megatron.scaling.hardware import GB
from rl_megatron.scaling.memory import footprints

LOSS, NORM = 1e-5, 1e-4
"""How far losses and gradient norms in float32 may be from the CPU's, relative."""
MEMORY = (0.8, 1.1)
"""The least and the most memory, of its plan's."""
_LIMIT = 180.0  # seconds of the links
_NOT_HELD = ("reserved", "weight push", "engine")  # terms of a plan that a step alone does not hold
_PACKAGES = (
    ("transformer-engine", "fused layers; python -m pip install --no-build-isolation transformer-engine[pytorch]"),
    ("flash-attn", "optional: TransformerEngine can use its kernels; python -m pip install flash-attn"),
    (
        "deep_ep",
        "optional: learner.dispatcher=deepep; built from its repository, for hybridep from its branch hybrid-ep",
    ),
    ("apex", "optional: NVIDIA's fused optimizer, built from its repository; the index's apex is another project"),
)


def examine() -> bool:
    """Print what is found on this node's GPUs. Returns whether all that was measured is as it should be.

    Each GPU makes the steps, one after the other. Raises ConfigError without a GPU that torch can use, RLMegatronError
    if a step on the CPU fails.
    """
    count = _count()
    wrong: list[str] = []
    for line in _versions():
        print(line, flush=True)
    cpu = gpu_step.ask("cpu")
    for fits, line in chain(*(stepped(number, cpu) for number in range(count)), linked(count)):
        print(("ok: " if fits else "WRONG: ") + line, flush=True)
        wrong += [] if fits else [line]
    print(f"{len(wrong)} of these are wrong" if wrong else "all that was measured is as it should be", flush=True)
    return not wrong


def _count() -> int:
    """The GPUs that torch sees. Raises ConfigError if there is none."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.device_count()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        driver = f"the driver has {len(machine.gpus())}"
    except OSError as error:
        driver = str(error)
    raise ConfigError(
        f"doctor --gpu: torch {torch.__version__} sees no GPU; {driver}; CUDA_VISIBLE_DEVICES is "
        f"{'not set' if hidden is None else repr(hidden)}. It needs an NVIDIA driver, a torch that is built for its "
        f"CUDA (this one is {'for CUDA ' + torch.version.cuda if torch.version.cuda else 'for CPUs alone'}), and a GPU "
        "that CUDA_VISIBLE_DEVICES does not hide; run it on the node that has the GPUs (docs/install.md)"
    )


def _versions() -> Iterator[str]:
    """Of what a learner on GPUs imports, and how to install what is missing."""
    import torch

    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    yield f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}"
    try:
        for gpu in machine.gpus():
            yield f"{gpu['name']}: driver {gpu['driver']}, {gpu['used_mb']} of {gpu['memory_mb']} MB used"
    except OSError as error:
        yield f"driver not asked: {error}"
    for name in gpu_step.TF32:
        if os.environ.get(name, "0") != "0":
            yield (
                f"{name}={os.environ[name]}: a learner here multiplies float32 in TF32, with 10 bits; the steps below "
                "are made without it"
            )
    for name, purpose in _PACKAGES:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"{name}: not installed ({purpose})"


def stepped(number: int, cpu: Mapping[str, Any], *, small: bool = False) -> Iterator[tuple[bool, str]]:
    """The steps of the GPU of this number, in a process of their own: whether each finding fits, and a line that names
    the GPU. Steps that fail are a line too."""
    try:
        gpu = gpu_step.ask(GPU, number, small=small)
    except RLMegatronError as error:
        yield False, f"GPU {number}: {error}"
        return
    peak = peak_of(gpu["gpu"])  # by the name that CUDA gives, which tells a part of a GPU (MIG)
    known = "not known" if peak is None else f"{peak.bfloat16:g} TFLOP/s in bfloat16"
    for fits, line in chain(compared(gpu, cpu), remembered(gpu, small=small), [(True, f"peak {known}")]):
        yield fits, f"GPU {number} ({gpu['gpu']}): {line}"


def compared(gpu: Mapping[str, Any], cpu: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    """Losses and norms of the steps beside the CPU's: whether they are near enough, and a line."""
    for what, most in (("losses", LOSS), ("norms", NORM)):
        errors = [abs(a / b - 1) for a, b in zip(gpu[what], cpu[what], strict=True)]
        error = max(errors) if all(map(math.isfinite, errors)) else math.inf  # max passes over a NaN that is not first
        told = f"{what} of two float32 steps are the CPU's to {error:.1e}, relative; at most {most:g}"
        yield error <= most, told


def remembered(gpu: Mapping[str, Any], *, small: bool = False) -> Iterator[tuple[bool, str]]:
    """The bytes that the step held at most, beside its plan."""
    learner = gpu_step.learner_of(GPU).model_dump()
    short = {"max_prompt_tokens": 8, "max_new_tokens": 8}  # of an engine that is not there
    config = RunConfig.model_validate({"learner": learner, "rollout": short})
    (planned,) = footprints(config, gpu_step.shape_of(small))
    wanted = sum(held for term, held in planned.terms.items() if term not in _NOT_HELD)
    least, most = MEMORY
    told = f"a step held {gpu['bytes'] / GB:.2f} GB; planned {wanted / GB:.2f}, of which {least:.0%} to {most:.0%} fit"
    yield least * wanted <= gpu["bytes"] <= most * wanted, told


def linked(count: int, device: str = GPU) -> Iterator[tuple[bool, str]]:
    """An all-reduce between all GPUs of this node over NCCL, or between processes on its CPU over gloo; those are
    started here."""
    if count == 1:
        yield True, "NCCL between GPUs: not measured, because this node has one GPU"
        return
    config = RunConfig.model_validate({"learner": {"device": device, "dp": count}})
    with tempfile.TemporaryDirectory() as folder:
        found = survey(config, Path(folder), None, _LIMIT)
    for failures in found.failures.values():
        yield from ((False, failure) for failure in failures)
    yield from rates(
        "NCCL" if device == GPU else "gloo",
        found.groups(),
        [float(link["flops"]) for link in found.links() if "flops" in link],
    )


def rates(
    over: str, groups: Mapping[str, Mapping[tuple[int, ...], float]], flops: Sequence[float]
) -> Iterator[tuple[bool, str]]:
    """What links and products reached; figures without a bound."""
    for kind, each in groups.items():
        for ranks, rate in each.items():
            yield True, f"{over}, an all-reduce of {len(ranks)} ranks ({kind}): {rate / GB:.1f} GB/s that each sends"
    if flops:
        yield True, f"matrix products: {min(flops) / 1e12:.3g} to {max(flops) / 1e12:.3g} TFLOP/s"
