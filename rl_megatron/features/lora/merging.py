"""Creates adapters before the first step, and merges a checkpoint's adapters into their model, tensor by tensor.

A sample of the model's numbers distinguishes it from others of the same sizes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from rl_megatron.digests import digest_bytes
from rl_megatron.errors import ConfigError
from rl_megatron.features.lora.files import adapter_copies, raise_other_base, stored_lora
from rl_megatron.features.lora.rows import hf_adapter_name
from rl_megatron.weights.boxes import Box
from rl_megatron.weights.bytes.bits import cast_checked, to_tensor
from rl_megatron.weights.bytes.dtypes import Bits, DType
from rl_megatron.weights.checkpoints.convert import cast_copies, convert_options, converted_shape, hf_tensors, write_hf
from rl_megatron.weights.checkpoints.hugging_face import hf_copies
from rl_megatron.weights.checkpoints.safetensors_io import STD, RandomWeights
from rl_megatron.weights.checkpoints.streaming import Copy, OnProgress, Share, Sliceable, fingerprint
from rl_megatron.weights.formats.hf_folder import config_text, is_draft
from rl_megatron.weights.layouts.families import hf_layout, read_shape

_SAMPLED = 4096  # sampled numbers of a tensor


class UntrainedAdapters(RandomWeights):
    """Adapters by peft's names before the first step, as peft draws them: A uniform up to 1 / sqrt(in), B 0."""

    @override
    def read(self, name: str, box: Box) -> Tensor:
        if ".lora_B." in name:
            return torch.zeros([stop - start for start, stop in box])
        return super().read(name, box).mul_(1 / (STD * math.sqrt(3 * self.shapes()[name][-1])))


def base_digest(folder: Path, family: str | None = None) -> str:
    """Computes the digest of the first numbers of two tensors of each kind, of a checkpoint of either kind without its
    draft layers. They are rounded to bfloat16, so that a copy in other files or in that dtype has the same digest.

    It reads some 100 blocks of a MiB for a model of any size, and both matrices of a tied pair if both are stored.
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
    return digest_bytes(b"".join(sampled)).xxh3_128


@dataclass(frozen=True, slots=True, kw_only=True)
class _Merged:
    """A stored matrix with B A added in float32 as it is read, then rounded to its dtype."""

    name: str
    source: Sliceable
    dtype: DType
    a: Tensor
    b: Tensor

    def __getitem__(self, box: tuple[slice, ...]) -> Bits:
        values = to_tensor(self.source[box].copy(), self.dtype).float()
        merged = values.addmm_(self.b[box[0]], self.a[:, box[1]])
        return cast_checked(self.name, merged, self.dtype)


def export(source: Path, base: Path, out: Path, *, family: str | None, dtype: str) -> bool:
    """Merges adapters for `rl_megatron.feature.exported`. Raises as `merge_adapters`."""
    if stored_lora(source) is None:
        return False
    merge_adapters(source, base, out, family=family, dtype=DType(dtype))
    return True


def merge_adapters(
    source: Path,
    base: Path,
    out: Path,
    *,
    family: str | None = None,
    dtype: DType | None = None,
    shard_bytes: int = 2 * 10**9,
    on_progress: OnProgress = lambda n, total: None,
    share: Share | None = None,
) -> list[int]:
    """Writes the Hugging Face folder ``base`` with the adapters of the checkpoint ``source`` merged into its weights.

    Returns and raises as `megatron_to_hf`, and as `raise_other_base`.
    """
    if dtype is DType.F8_E4M3:
        raise ConfigError("dtype=float8_e4m3fn: merge first, then convert the new folder")
    lora, shape = stored_lora(source), converted_shape(base, family=family)
    if lora is None:
        raise ConfigError(f"{source} holds a whole model; there is nothing to merge")
    if lora.base is not None:
        raise_other_base(source, lora, base_digest(base, family), str(base))
    adapters, own_files = adapter_copies(source, read_shape(base, family), lora)
    stored, files = hf_copies(base, shape, dtype)
    tensors = []
    for tensor in cast_copies(stored, dtype, hf_layout(shape)):
        if (a := adapters.get(hf_adapter_name(tensor.name, "A"))) is not None:
            b, scale = adapters[hf_adapter_name(tensor.name, "B")], lora.alpha / a.shape[0]
            tensor = tensor.mapped(partial(_merged, tensor, a, b, scale))
        tensors.append(tensor)
    return write_hf(
        base,
        out,
        tensors,
        files | own_files,
        companion=base,
        config=config_text(base, {str(dtype)} if dtype else set(), drafts=shape.num_draft_layers),
        options=convert_options(base, family, dtype, shard_bytes) | {"adapters": fingerprint(source)},
        shard_bytes=shard_bytes,
        on_progress=on_progress,
        share=share or Share(),
    )


def _merged(tensor: Copy, a: Copy, b: Copy, scale: float, source: Sliceable) -> _Merged:
    return _Merged(name=tensor.name, source=source, dtype=tensor.dtype, a=_whole(a), b=_whole(b, scale))


def _whole(tensor: Copy, scale: float = 1.0) -> Tensor:
    """Returns a whole small tensor in float32, times ``scale``."""
    blocks = [to_tensor(block, tensor.dtype).float() for block in tensor.blocks(lambda n: None)]
    return torch.cat(blocks) * scale
