"""Tells the frozen model beside adapters from others of its sizes, by a sample of its numbers."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from rl_megatron.digests import digest_of
from rl_megatron.errors import CheckpointError
from rl_megatron.weights.bytes.bits import to_tensor
from rl_megatron.weights.checkpoints.convert import converted_shape, hf_tensors
from rl_megatron.weights.checkpoints.megatron import HeldLora
from rl_megatron.weights.formats.hf_folder import is_draft

_SAMPLED = 4096  # numbers of a tensor


def base_digest(folder: Path, family: str | None = None) -> str:
    """The digest of the first numbers of two tensors of each kind, of a checkpoint of either kind but for its draft
    layers. They are rounded to bfloat16, so that a copy in other files or in that dtype has the same.

    It reads some 100 blocks of a MiB, however large the model is, and both matrices of a tied pair that are stored.
    Raises as `hf_tensors`.
    """
    shape = converted_shape(folder, family=family)
    tensors = {one.name: one for one in hf_tensors(folder, None, family)[0] if not is_draft(one.name, shape)}
    kinds: dict[str, list[str]] = {}
    for name in sorted(tensors):
        kinds.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    sampled = []
    for names in kinds.values():
        for name in (names[0], names[-1]):
            block = next(tensors[name].blocks(lambda _: None, multiple=1)).reshape(-1)[:_SAMPLED]
            numbers = to_tensor(block, tensors[name].dtype).to(torch.bfloat16)
            sampled.append(name.encode() + numbers.view(torch.uint8).numpy().tobytes())
    return digest_of(b"".join(sampled)).xxh3_128


def raise_other_base(source: Path, held: HeldLora, base: str, where: str) -> None:
    """Raises CheckpointError if the adapters of ``source`` were trained beside a model of another digest than ``base``,
    that of ``where``; older checkpoints have none."""
    if held.base not in (None, base):
        raise CheckpointError(
            f"{source} holds adapters of another model than {where}: a sample of the weights that they were trained "
            f"beside has the digest {held.base}, and that model's has {base}; give the model that training began from"
        )
