"""Verifies a checkpoint: its files, shapes, NaN and infinite values, and differences from another checkpoint."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import permutations, repeat
from math import prod
from pathlib import Path

import numpy as np

from rl_megatron.digests import Digest, misfits
from rl_megatron.errors import CheckpointError, ConfigError
from rl_megatron.weights.checkpoints.convert import converted_shape, hf_tensors, own_left_out
from rl_megatron.weights.checkpoints.kind import is_megatron
from rl_megatron.weights.checkpoints.megatron import adapter_copies, held_files, held_lora
from rl_megatron.weights.checkpoints.streaming import FORGET_BYTES, Copy, Files, OnBytes, OnProgress
from rl_megatron.weights.checkpoints.torch_dist import Chunk, open_chunk, read_index
from rl_megatron.weights.formats.hf_folder import is_draft
from rl_megatron.weights.layouts.families import read_shape
from tools.convert.conversion import display
from tools.convert.inspection import found

_MAX_LINES = 50


def print_problems(
    folder: Path, *, against: Path | None = None, config: Path | None = None, family: str | None = None
) -> bool:
    """Print what is wrong; return whether nothing is. Raises RLMegatronError if it cannot be read to its end."""
    folder = found(folder)
    against = None if against is None else found(against)
    problems, written = _of_run(folder.resolve()) if is_megatron(folder) else ([], None)
    with display(folder.name) as progress:
        problems += verify(folder, against=against, config=config, family=family, written=written, on_progress=progress)
    for line in problems[:_MAX_LINES]:
        print(line)
    if len(problems) > _MAX_LINES:
        print(f"and {len(problems) - _MAX_LINES} more")
    print(f"{folder}: {len(problems) or 'no'} problems" + (f", compared with {against}" if against else ""))
    return not problems


def _of_run(shards: Path) -> tuple[list[str], Mapping[str, Digest] | None]:
    """What keeps the checkpoint of a run, where ``shards`` is part of one, from being resumed, or else its digests."""
    from rl_megatron.training import checkpoints  # imports torch

    try:
        return [], checkpoints.read(shards.parent).files if checkpoints.files_of(shards) else None
    except CheckpointError as error:
        return [str(error)], None


def verify(
    folder: Path,
    *,
    against: Path | None = None,
    config: Path | None = None,
    family: str | None = None,
    written: Mapping[str, Digest] | None = None,
    on_progress: OnProgress = lambda n, total: None,
) -> Iterator[str]:
    """Yield a line for each problem; none for a sound checkpoint of either kind, or of adapters beside the model of
    ``config``.

    It is compared with ``against`` tensor by tensor, to the bit; one that only one of them has is a problem.
    ``written``: of a run's checkpoint, whose shards ``folder`` holds, the digests of all files, by name in the folder
    above; they count in place of the chunks' own checksums, so that each file is read once for either. Raises
    CheckpointError, WeightError or ConfigError if the checkpoint cannot be read to its end: a torn or missing file, an
    unknown, missing or misshapen tensor.
    """
    if against is not None and (held_lora(folder) is None) != (held_lora(against) is None):
        raise ConfigError(
            f"one of {folder} and {against} holds adapters alone (learner.lora), the other a whole model; merge the "
            "adapters first (rl-megatron convert --merge)"
        )
    tensors, files = _tensors(folder, config, family)
    chunks = read_index(folder)[1] if written is None and is_megatron(folder) else []
    files = held_files(folder, sorted({chunk.file for chunk in chunks})) | files  # some may hold no weights
    total = sum(chunk.length for chunk in chunks)
    total += sum(tensor.num_bytes for tensor in tensors) + sum(digest.bytes for digest in (written or {}).values())

    def on_bytes(count: int) -> None:
        on_progress(count, total)

    if written is not None:
        for name, digest in written.items():
            yield from misfits(folder.resolve().parent, {name: digest}, read=True)
            on_bytes(digest.bytes)
    yield from _bad_sums(folder, chunks, files, on_bytes)
    others: dict[str, Copy] = {}
    other_files = files
    if against is not None:
        theirs, other_files = _tensors(against, config, family)
        others = {tensor.name: tensor for tensor in theirs}
        for each in (folder, against):
            yield from (f"{each}: {line}; it is not compared" for line in own_left_out(each, config, family))
        yield from _alone({folder: {tensor.name for tensor in tensors}, against: others.keys()}, config, family)
    seen = 0
    for tensor in tensors:
        yield from _wrong(tensor, others.get(tensor.name), on_bytes)
        seen += tensor.num_bytes
        if seen > FORGET_BYTES:
            files.forget()
            other_files.forget()
            seen = 0


def _tensors(folder: Path, config: Path | None, family: str | None) -> tuple[list[Copy], Files]:
    lora = held_lora(folder)
    if lora is None:
        return hf_tensors(folder, config, family)
    if config is None:
        raise ConfigError(
            f"{folder} holds adapters alone (learner.lora); give --config with the Hugging Face folder of the model "
            "that they were trained beside"
        )
    adapters, files = adapter_copies(folder, read_shape(config, family), lora)
    return list(adapters.values()), files


def _alone(names: Mapping[Path, Set[str]], config: Path | None, family: str | None) -> Iterator[str]:
    """A line for each tensor that only one of two checkpoints has; it says if the other is without draft layers."""
    for folder, other in permutations(names, 2):
        if found := sorted(names[folder] - names[other]):
            shape, drafts = converted_shape(folder, config, family), converted_shape(other, config, family).drafts
            for name in found:
                left = is_draft(name, shape) and not drafts
                yield f"{name} is only in {folder}" + (f"; {other} was made without draft layers" if left else "")


def _wrong(tensor: Copy, other: Copy | None, on_bytes: OnBytes) -> Iterator[str]:
    if other is not None and (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
        here, there = (f"{one.dtype} {one.shape}" for one in (tensor, other))
        yield f"{tensor.name} is {here} here and {there} in the other checkpoint"
        other = None
    bad = different = 0
    others = repeat(None) if other is None else other.blocks(lambda n: None, multiple=1)
    pairs = zip(tensor.blocks(on_bytes, multiple=1), others, strict=False)
    for block, same in pairs:
        bad += tensor.dtype.not_numbers(block)
        if same is not None:
            different += int(np.count_nonzero(block.reshape(-1).view(np.uint8) != same.reshape(-1).view(np.uint8)))
    if bad:
        yield f"{tensor.name}: {bad} of {prod(tensor.shape)} values are NaN or infinite"
    if different:
        yield f"{tensor.name}: {different} of {tensor.num_bytes} bytes differ"


def _bad_sums(folder: Path, chunks: Sequence[Chunk], files: Files, on_bytes: OnBytes) -> Iterator[str]:
    """Chunks whose bytes do not match the zip's checksum. torch may be set to write none, which reads as 0."""
    unforgotten = 0
    for chunk in chunks:
        left = chunk.length
        archive = open_chunk(files[folder / chunk.file], chunk)
        summed = [entry for entry in archive.infolist() if entry.CRC]
        for entry in summed:
            try:
                with archive.open(entry) as data:
                    while count := len(data.read(1 << 20)):
                        left -= count
                        on_bytes(count)
                        unforgotten += count
                        if unforgotten > FORGET_BYTES:
                            files.forget()
                            unforgotten = 0
            except zipfile.BadZipFile as error:
                yield f"{folder / chunk.file}, {chunk.key} {chunk.offsets}: {error}"
        on_bytes(left)
