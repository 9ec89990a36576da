"""A checkpoint of adapters alone, as the learner's shards hold them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from rl_megatron.features.lora.feature import LoraSection
from rl_megatron.features.lora.files import write_lora
from rl_megatron.features.lora.rows import LoraLayouts
from rl_megatron.models.shape import ModelShape
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.checkpoints.megatron import index_files, write_chunks
from rl_megatron.weights.checkpoints.streaming import Copy, Fragment, Sink
from rl_megatron.weights.layouts.families import megatron_layout


def save_adapters(folder: Path, shape: ModelShape, base: str | None = None) -> Path:
    """Each number of them is 1; ``base`` is the digest of the model that they stand beside."""
    lora = LoraSection(rank=4, alpha=8.0)
    ones = [
        Copy(name=name, shape=size, dtype=DType.F32, fragments=(_ones(size),))
        for name, size in LoraLayouts(lora).on_ranks(megatron_layout(shape)).local_shapes(0).items()
    ]
    sink = Sink(name="__0_0.distcp", tensors=tuple(ones), write=partial(write_chunks, shape=shape))
    folder.mkdir()
    with (folder / sink.name).open("wb") as file:
        index_files(folder, [sink], {sink.name: sink.write(file, ones, lambda _: None)}, shape)
    write_lora(folder, lora, base)
    return folder


def _ones(size: tuple[int, ...]) -> Fragment:
    box = tuple((0, edge) for edge in size)
    return Fragment(box=box, source=lambda: np.ones(size, np.float32), src_box=box)
