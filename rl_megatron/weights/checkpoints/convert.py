"""Hugging Face folders to megatron ``torch_dist`` checkpoints and back: a gather of byte ranges, file by file.

It needs no model, process group or GPU, and torch, whose import takes as long as a copy of gigabytes, only if numbers
change. It maps its input and writes its output in blocks of a MiB, so its memory does not grow with the model. It
writes files under a temporary name, syncs and renames them. After a kill it continues with the missing files. The
result gets its own name only when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path

from rl_megatron.chat_templates import TemplateValue
from rl_megatron.digests import digest_bytes
from rl_megatron.errors import ConfigError
from rl_megatron.files import write_atomically
from rl_megatron.models.shape import STACKED, ModelShape
from rl_megatron.weights.bytes.dtypes import DType, widest
from rl_megatron.weights.bytes.mapped import MappedFile, read_header
from rl_megatron.weights.checkpoints.hugging_face import hf_copies, write_safetensors
from rl_megatron.weights.checkpoints.megatron import (
    has_draft,
    index_files,
    is_megatron,
    megatron_copies,
    must_have_config,
    stacked_place,
    stored_shape,
    write_chunks,
)
from rl_megatron.weights.checkpoints.streaming import (
    Copy,
    Files,
    Fragment,
    OnProgress,
    Share,
    Sink,
    StreamedTensor,
    divide_files,
    write_files,
)
from rl_megatron.weights.checkpoints.torch_dist import read_index
from rl_megatron.weights.formats.hf_folder import (
    INDEX,
    config_text,
    copy_companions,
    file_names,
    index_text,
    is_draft,
    weight_files,
)
from rl_megatron.weights.formats.schemes import quantization_config
from rl_megatron.weights.layouts.families import find_family, hf_layout, megatron_layout, read_shape
from rl_megatron.weights.layouts.layout import Layout, keeping_dtype
from rl_megatron.weights.layouts.tables.drafts import has_draft_rows
from rl_megatron.weights.plans.plan import plan

_ALL = Share()
_bytes_of: Callable[[StreamedTensor], int] = attrgetter("num_bytes")


def hf_to_megatron(
    source: Path,
    out: Path,
    *,
    family: str | None = None,
    dtype: DType | None = None,
    shard_bytes: int = 10**9,
    on_progress: OnProgress = lambda n, total: None,
    share: Share = _ALL,
) -> list[int]:
    """Writes the Hugging Face folder as a ``torch_dist`` checkpoint that loads at any TP, PP, EP and ETP.

    Copies config.json and the `companions`, so that the conversion back needs nothing else. Dequantizes
    block-scaled float8 to ``dtype``, or to config.json's dtype. Tensors that share one of megatron's are cast to the
    widest dtype among them, which it has. ``family`` is one of the user's own, as `read_shape`
    takes it. Returns the shares that lack files, as `write_files`. Raises CheckpointError,
    WeightError or ConfigError naming what is missing, truncated, unknown, misshapen or not a number; ``out`` is then
    complete or absent.
    """
    if dtype is DType.F8_E4M3:
        raise ConfigError("dtype=float8_e4m3fn: a megatron checkpoint cannot hold block scales; set another dtype")
    shape = converted_shape(source, family=family)
    hf, megatron = hf_layout(shape), megatron_layout(shape)  # the order of rows on one rank is that of any file
    stored, files = hf_copies(source, shape, dtype)
    tensors = _to_megatron(cast_copies(stored, dtype, hf), hf, megatron)
    sinks = [
        Sink(name=f"__{i}_0.distcp", tensors=tuple(group), write=partial(write_chunks, shape=shape))
        for i, group in enumerate(divide_files(tensors, shard_bytes, _bytes_of))
    ]

    def finish(folder: Path, notes: Mapping[str, list[dict[str, object]]]) -> None:
        index_files(folder, sinks, notes, shape)
        written = {str(dtype)} if dtype else set()
        config = config_text(
            source, written, drafts=shape.num_draft_layers, stacked=[key for key in STACKED if getattr(shape, key)]
        )
        copy_companions(source, folder)
        write_atomically(folder / "config.json", config.encode())

    options = convert_options(source, family, dtype, shard_bytes)
    return write_files(source, out, sinks, files, on_progress, finish, companion=source, options=options, share=share)


def _to_megatron(tensors: Sequence[Copy], hf: Layout, megatron: Layout) -> list[Copy]:
    """The parameters of ``megatron``; those that its checkpoint stacks in one tensor have one dtype."""
    home = {tensor.name: tensor for tensor in tensors}
    sizes, pieces = megatron.local_shapes(0), list(plan(hf, megatron).receives(0))
    keys = {name: stacked_place(name, megatron.shape)[0] for name in sizes}
    found: dict[str, set[DType]] = {}
    for piece in pieces:
        found.setdefault(keys[piece.dst_param], set()).add(home[piece.src_param].dtype)
    dtypes = {name: widest(found[key]) for name, key in keys.items()}
    fragments: dict[str, list[Fragment]] = {}
    for piece in pieces:
        (whole,) = _cast(home[piece.src_param], dtypes[piece.dst_param]).fragments
        fragment = Fragment(box=piece.dst_box, source=whole.source, src_box=piece.src_box)
        fragments.setdefault(piece.dst_param, []).append(fragment)
    return [
        Copy(name=name, shape=size, dtype=dtypes[name], fragments=tuple(fragments[name]))
        for name, size in sizes.items()
    ]


def megatron_to_hf(
    source: Path,
    out: Path,
    *,
    config: Path | None = None,
    family: str | None = None,
    dtype: DType | None = None,
    shard_bytes: int = 2 * 10**9,
    on_progress: OnProgress = lambda n, total: None,
    share: Share = _ALL,
    variables: Mapping[str, TemplateValue] | None = None,
) -> list[int]:
    """Writes a ``torch_dist`` checkpoint, saved in any layout, as a Hugging Face folder.

    ``config`` is a folder with config.json and tokenizer if the checkpoint has none; ``variables`` are set in its chat
    template as `copy_companions` does. float8_e4m3fn quantizes linear
    layers to block-scaled float8, and keeps other tensors as they are stored. Raises like `hf_to_megatron`.
    """
    companion = config or source
    shape = converted_shape(source, config, family)
    quantize = dtype is DType.F8_E4M3
    stored, files = megatron_copies(source, shape)
    plain = stored if quantize else cast_copies(stored, dtype, hf_layout(shape))
    tensors = _quantized(plain) if quantize else list(plain)
    quantization = quantization_config([(tensor.name, tensor.shape) for tensor in tensors]) if quantize else None
    return write_hf(
        source,
        out,
        tensors,
        files,
        companion=companion,
        config=config_text(
            companion,
            {str(plain[0].dtype)},
            quantization,
            drafts=shape.num_draft_layers,
            scores=shape.has_score_head and not read_shape(companion, family).has_score_head,
        ),
        options=convert_options(companion, family, dtype, shard_bytes),
        shard_bytes=shard_bytes,
        on_progress=on_progress,
        share=share,
        variables=variables,
    )


def write_hf(
    source: Path,
    out: Path,
    tensors: Sequence[StreamedTensor],
    files: Files,
    *,
    companion: Path,
    config: str,
    options: Mapping[str, object],
    shard_bytes: int,
    on_progress: OnProgress,
    share: Share,
    variables: Mapping[str, TemplateValue] | None = None,
) -> list[int]:
    """Writes ``tensors`` as a Hugging Face folder with ``config`` as its config.json. It gets the tokenizer of
    ``companion``, with the ``variables`` of its chat template.

    ``options`` are the values that the files depend on, besides ``source``. Returns and raises like `write_files`.
    """
    groups = divide_files(tensors, shard_bytes, _bytes_of)
    names = file_names(len(groups))
    sinks = [
        Sink(name=name, tensors=tuple(group), write=write_safetensors)
        for name, group in zip(names, groups, strict=True)
    ]

    def finish(folder: Path, _: Mapping[str, list[dict[str, object]]]) -> None:
        if len(sinks) > 1:
            weight_map = {tensor.name: sink.name for sink in sinks for tensor in sink.tensors}
            write_atomically(
                folder / INDEX, index_text(weight_map, sum(tensor.num_bytes for tensor in tensors)).encode()
            )
        copy_companions(companion, folder, variables)
        write_atomically(folder / "config.json", config.encode())

    return write_files(
        source, out, sinks, files, on_progress, finish, companion=companion, options=options, share=share
    )


def convert_options(companion: Path, family: str | None, dtype: DType | None, shard_bytes: int) -> dict[str, object]:
    """Returns the values that the files depend on, besides their source."""
    config = digest_bytes((companion / "config.json").read_bytes()).xxh3_128
    return {"config": config, "family": family, "dtype": dtype, "shard_bytes": shard_bytes}


def converted_shape(source: Path, config: Path | None = None, family: str | None = None) -> ModelShape:
    """The sizes of the model of a checkpoint of either kind, with the draft layers that it holds.

    Those of a family that has no rows for them are left out. ``config`` is a folder with config.json for a megatron
    checkpoint that has none. It may be of the policy from which a reward model began; that has one row in its output
    layer. Raises like `is_megatron`, `must_have_config` and `read_shape`.
    """
    if not is_megatron(source):
        shape = read_shape(source, family)
        return (
            replace(shape, num_draft_layers=True) if _has_rows(shape) and not_the_decoders(source, shape)[1] else shape
        )
    if config is None:
        must_have_config(source)
    shape, sizes = stored_shape(source, read_shape(config or source, family)), read_index(source)[0]
    if sizes.get("output_layer.weight", ())[:1] == (1,):
        shape = replace(shape, has_score_head=True, tie_embeddings=False)
    return replace(shape, num_draft_layers=True) if _has_rows(shape) and has_draft(sizes) else shape


def _has_rows(shape: ModelShape) -> bool:
    """True if the model may have draft layers, and its family has rows for them."""
    return bool(shape.draft_layers) and has_draft_rows(find_family(shape).tables["megatron"])


def not_the_decoders(source: Path, shape: ModelShape) -> tuple[list[str], list[str]]:
    """Returns the prefixes outside the model, and the draft layers, with tensors in a Hugging Face folder. Raises like
    `weight_files`."""
    if not shape.draft_layers and not shape.other_prefixes:
        return [], []
    files, placed = weight_files(source)
    names = placed or read_header(MappedFile(source / files[0]))
    beside = [prefix.rstrip(".") for prefix in shape.other_prefixes if any(name.startswith(prefix) for name in names)]
    drafts = [name for name in names if is_draft(name, shape) and not name.startswith(shape.other_prefixes)]
    numbers = {name.split(".")[2] for name in drafts if not name.startswith("mtp.")}
    alone = ["mtp"] if any(name.startswith("mtp.") for name in drafts) else []
    return beside, [*alone, *(f"model.layers.{layer}" for layer in sorted(numbers, key=int))]


def hf_tensors(folder: Path, config: Path | None = None, family: str | None = None) -> tuple[list[Copy], Files]:
    """The Hugging Face tensors of a checkpoint of either kind, to read block by block.

    ``config`` is a folder with config.json if ``folder`` has none. Raises like `hf_to_megatron`.
    """
    shape = converted_shape(folder, config, family)
    return megatron_copies(folder, shape) if is_megatron(folder) else hf_copies(folder, shape, None)


def cast_copies(tensors: Sequence[Copy], dtype: DType | None, layout: Layout) -> list[Copy]:
    """The tensors in ``dtype``, except those that a row of ``layout`` leaves in their dtype."""
    exact = keeping_dtype(layout)
    return [tensor if tensor.name in exact else _cast(tensor, dtype) for tensor in tensors]


def _cast(tensor: Copy, dtype: DType | None) -> Copy:
    if dtype is None or dtype is tensor.dtype:
        return tensor
    from rl_megatron.weights.checkpoints.casting import cast

    return cast(tensor, dtype)


def _quantized(tensors: Sequence[Copy]) -> list[StreamedTensor]:
    from rl_megatron.weights.checkpoints.casting import quantized

    return [one for tensor in tensors for one in quantized(tensor)]
