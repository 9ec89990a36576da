"""What a rank says of its memory when it runs out: the plan's terms, what torch allocated, and a snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from launcher.wire.greetings import Setup
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import RLMegatronError
from rl_megatron.models.shape import ModelShape
from rl_megatron.observability.timeline.kernels import FOLDER
from rl_megatron.placement.names import file_stem
from rl_megatron.scaling.hardware import GB
from rl_megatron.scaling.memory import Footprint, advice, footprints
from rl_megatron.weights.layouts.families import read_shape
from rl_megatron.weights.layouts.learner import job_shape

_SAID = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_ENTRIES = 200_000  # allocations and frees that are remembered, the latest


def remember() -> None:
    """Have torch record where memory is allocated from now on, for `lines_of_memory`."""
    torch.cuda.memory._record_memory_history(max_entries=_ENTRIES)


@contextmanager
def telling_of_memory(setup: Setup, rank: int) -> Iterator[None]:
    """Have an error inside for want of a GPU's memory carry `lines_of_memory` of this rank as notes."""
    try:
        yield
    except RuntimeError as error:
        for line in lines_of_memory(setup, rank) if of_full_memory(error) else ():
            error.add_note(line)
        raise


def of_full_memory(error: BaseException) -> bool:
    """Whether a GPU's memory is full: torch's own error, or the words of libraries that allocate beside torch.

    These are NCCL's ``Cuda failure 2 'out of memory'`` in a DistBackendError, CUDA's ``CUDA error: out of memory`` and
    cuBLAS's status. What torch says of a full machine has none of them.
    """
    words = isinstance(error, RuntimeError) and any(text in str(error) for text in _SAID)
    return words or isinstance(error, torch.OutOfMemoryError)


def lines_of_memory(setup: Setup, rank: int) -> Iterator[str]:
    """The plan of this rank's GPU beside what torch holds of it now; a snapshot with ``profile.memory``.

    Nothing is raised: the rank has an error already.
    """
    config, role = setup.config, setup.role
    try:
        planned = _planned(config, job_shape(config, read_shape(setup.model_folder, config.learner.model)), role, rank)
        terms = ", ".join(f"{name} {size / GB:.3g}" for name, size in planned.terms.items() if size)
        yield f"the plan of its GPU, {planned.total / GB:.3g} GB: {terms}"
        yield f"the largest, {planned.largest}: {advice(config, planned.largest)}"
    except RLMegatronError as error:
        yield f"there is no plan of its GPU beside: {error}"
    if torch.cuda.is_available():
        free, whole = torch.cuda.mem_get_info()
        held = torch.cuda.memory_reserved()
        yield (
            f"now: {torch.cuda.memory_allocated() / GB:.1f} GB allocated of {held / GB:.1f} that torch holds, "
            f"{torch.cuda.max_memory_allocated() / GB:.1f} at most; {(whole - free - held) / GB:.1f} by others and "
            f"outside of torch, of {whole / GB:.1f}"
        )
    if config.profile.memory:
        yield _snapshot(setup.run_folder / FOLDER / f"out_of_memory_{file_stem(role, rank)}.pickle")
    else:
        yield "profile.memory=true writes a snapshot of what was allocated where, for pytorch.org/memory_viz"


def _planned(config: RunConfig, policy: ModelShape, role: str, rank: int) -> Footprint:
    """Of the rank itself if the plan has it, else of the first one of its stage; in the fuller phase."""
    inner = config.learner.dims.world_size // config.learner.dims.pp
    found = [one for one in footprints(config, policy) if one.role == role and one.stage == rank // inner]
    own = [one for one in found if one.rank == rank] or found
    return max(own, key=lambda one: one.total)


def _snapshot(path: Path) -> str:
    try:
        path.parent.mkdir(exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
    except (OSError, RuntimeError) as error:
        return f"no snapshot: {path}: {error}"
    return f"a snapshot of what was allocated where, for pytorch.org/memory_viz: {path}"
