"""Converts a checkpoint with a progress display."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from shutil import disk_usage
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from rl_megatron.config.io import load_config
from rl_megatron.config.run import TemplateVariable
from rl_megatron.errors import ConfigError
from rl_megatron.features.lora.files import adapters_to_peft, peft_skips_note, stored_lora, unknown_base_reason
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.checkpoints import convert
from rl_megatron.weights.checkpoints.megatron import is_megatron, total_bytes
from rl_megatron.weights.checkpoints.streaming import OnProgress, Share, Sink, must_be_new
from rl_megatron.weights.formats.hf_folder import chat_template, has_tokenizer
from tools.convert.inspection import describe, dropped_tensors, found

_NAMED_PARTS = 20
_PART = re.compile(r"(\d{1,6})/(\d{1,6})")
DTYPES = (DType.F32, DType.BF16, DType.F16, DType.F8_E4M3)
_SHORT = {"fp32": DType.F32, "bf16": DType.BF16, "fp16": DType.F16}


def run(
    source: Path,
    out: Path,
    *,
    dtype: str | None = None,
    shard_gb: float | None = None,
    config: Path | None = None,
    family: str | None = None,
    upcycle: str | None = None,
    merge: bool = False,
    part: str | None = None,
    dry_run: bool = False,
) -> None:
    """Converts to the other kind; ``source``'s own kind is detected. Raises RLMegatronError.

    ``upcycle`` is the argument of `read_upcycling`, and ``part`` that of `read_share`; ``merge`` is only for adapters.
    With ``dry_run`` it prints what it would write, and writes nothing.
    """
    share = read_share(part)
    source = found(source)
    kind = None if dtype is None else read_dtype(dtype)
    if shard_gb is not None and not shard_gb > 0:
        raise ConfigError(f"shard size {shard_gb} GB must be above 0")
    options = {} if shard_gb is None else {"shard_bytes": int(shard_gb * 1e9)}
    if share.count == 1:
        must_be_new(out)
    backwards = is_megatron(source)
    adapted = backwards and stored_lora(source) is not None
    making = None if upcycle is None else _upcycling(upcycle, config, family)
    if adapted or merge:
        given = [f"--shard-gb {shard_gb}"] * bool(options) + [f"--dtype {dtype}"] * (dtype is not None)
        making = _adapting(source, config or source, family, merge=merge, given=given)
    note = dropped_tensors(config if adapted and config else source, config, family)
    if note is not None:
        print(f"note: {note}", file=sys.stderr)
    if making is None and backwards:
        variables = _template_variables(source, config, family)
        making = partial(convert.megatron_to_hf, config=config, family=family, variables=variables)
    making = making or partial(convert.hf_to_megatron, family=family)
    if dry_run:
        kept = backwards or merge or upcycle is not None
        form = "adapters of peft" if adapted and not merge else "Hugging Face" if kept else "megatron torch_dist"
        making(source, out, dtype=kind, share=replace(share, on_plan=partial(tell_plan, out, form)), **options)
        return
    with display(source.name) as progress:
        missing = making(source, out, dtype=kind, on_progress=progress, share=share, **options)
    if missing:
        others = ", ".join(str(index + 1) for index in missing[:_NAMED_PARTS])
        if more := len(missing[_NAMED_PARTS:]):
            others += f" and {more} more"
        print(
            f"part {share.index + 1} of {share.count} is written; not yet: {others}. The part that ends last completes "
            f"{out}. If one fails, run it again"
        )
        return
    if adapted and (unknown := unknown_base_reason(source, config or source)):
        print(f"note: {unknown}", file=sys.stderr)
    if adapted and not merge:
        print(f"{out}: adapters for {config or source}, {total_bytes(out):,} bytes; peft and engines load the folder")
        if left := peft_skips_note(source, config or source, family):
            print(f"note: {left}", file=sys.stderr)
        return
    same = [] if dtype or upcycle or merge else ["--against", str(source)]
    read = (["--config", str(config)] if config and not merge else []) + (["--family", family] if family else [])
    check = shlex.join(["rl-megatron", "convert", str(out), "--verify", *same, *read])
    _tell(source, out, check, f" learner.model={family}" if family else "")


def _template_variables(source: Path, config: Path | None, family: str | None) -> Mapping[str, TemplateVariable]:
    """Returns ``model.template_variables`` of the run around ``source``, if that is a reward model's shards. If the run
    cannot be read, it prints a note that the chat template of ``config`` is unchanged."""
    if config is None or not convert.converted_shape(source, config, family).has_score_head:
        return {}
    own, why = source.resolve().parents[2:3], f"{source} is in no run's folder"
    if own and (file := own[0] / "config.yaml").is_file():
        try:
            return load_config(str(file), []).model.template_variables
        except ConfigError as error:
            why = str(error)
    if chat_template(config) is not None:
        said = f"the chat template is that of {config} as it is, and has no model.template_variables of the run"
        print(f"note: {said} that made {source}, unless that folder has them: {why}", file=sys.stderr)
    return {}


def _adapting(
    source: Path, base: Path, family: str | None, *, merge: bool, given: Sequence[str]
) -> Callable[..., list[int]]:
    """Returns a writer of adapters, or of ``base`` with them merged. Raises ConfigError for options without effect."""
    if not is_megatron(source) or stored_lora(source) is None:
        raise ConfigError(f"--merge: {source} is no checkpoint of adapters (learner.lora); leave it out")
    if merge:
        from rl_megatron.features.lora.merging import merge_adapters  # imports torch

        return lambda source, out, **more: merge_adapters(source, base, out, family=family, **more)
    if given:
        said = "adapters are written as they are stored; leave it out, or merge them (rl-megatron convert --merge)"
        raise ConfigError(f"{', '.join(given)}: {said}")

    def write(source: Path, out: Path, *, dtype: None, **more: Any) -> list[int]:
        return adapters_to_peft(source, out, config=base, family=family, **more)

    return write


def _upcycling(text: str, config: Path | None, family: str | None) -> Callable[..., list[int]]:
    """Returns an upcycling with the options in ``text``. Raises ConfigError, also for options of other conversions."""
    from tools.convert.upcycle import read_upcycling, upcycle  # imports torch

    given = [f"--config {config}"] * (config is not None) + [f"--family {family}"] * (family is not None)
    if given:
        raise ConfigError(f"--upcycle makes a Qwen3-MoE folder of a Qwen3 one, without {' and '.join(given)}")
    return partial(upcycle, given=read_upcycling(text))


def read_dtype(text: str) -> DType:
    """Parses a dtype by its name or its short name, for example ``bf16``. Raises ConfigError for any other text."""
    if text not in _SHORT and text not in DTYPES:
        raise ConfigError(f"dtype={text!r} is unknown; one of: {', '.join((*DTYPES, *_SHORT))}")
    return _SHORT.get(text) or DType(text)


def read_share(part: str | None) -> Share:
    """Parses a share of files, ``K/N``; None is all of them. Raises ConfigError for any other text."""
    if part is None:
        return Share()
    numbers = _PART.fullmatch(part)
    index, count = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if not 1 <= index <= count:
        raise ConfigError(f"part {part!r} must be K/N with 1 <= K <= N, as 2/8")
    return Share(index=index - 1, count=count)


def tell_plan(out: Path, kind: str, sinks: Sequence[Sink], unwritten: Sequence[Sink]) -> None:
    """Prints the files that a conversion to ``out`` would write. Raises ConfigError if the disk lacks space for those
    ``unwritten``."""
    counts: dict[DType, int] = {}
    tensors = [tensor for sink in sinks for tensor in sink.tensors]
    for tensor in tensors:
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + prod(tensor.shape)
    values = ", ".join(f"{count:,} values in {dtype}" for dtype, count in counts.items())
    size, files = sum(tensor.num_bytes for tensor in tensors), f"{len(sinks):,} file{'s' * (len(sinks) > 1)}"
    print(f"would write {out}: {kind}, {files} of weights, {values}, {size:,} bytes")
    left = sum(tensor.num_bytes for sink in unwritten for tensor in sink.tensors)
    if len(unwritten) < len(sinks):
        print(f"this command would write {len(unwritten):,} of them, {left:,} bytes; others have or write the rest")
    folder = next(folder for folder in out.absolute().parents if folder.is_dir())
    free = disk_usage(folder).free
    if left > free:
        raise ConfigError(
            f"{out} needs {left:,} more bytes, and {folder} has {free:,} bytes free; make room, or give another OUT"
        )
    print(f"{folder} has {free:,} bytes free")
    print("nothing was written and no weight was read; the conversion also rejects NaN and infinite values")


def _tell(source: Path, out: Path, check: str, model: str) -> None:
    """Prints the contents of the new folder and the commands that use it."""
    made = describe(out)
    tensors, parameters = sum(part.tensors for part in made.parts), sum(part.parameters for part in made.parts)
    print(f"{out}: {made.kind}, {tensors:,} tensors, {parameters:,} parameters, {total_bytes(out):,} bytes")
    print(f"check it: {check}")
    if has_tokenizer(out):
        print(f"train it: rl-megatron train {shlex.quote(f'model.path={out}')}{model} ...")
    else:
        print(f"note: {source} has no tokenizer, so {out} has none; copy one there before model.path={out}")


@contextmanager
def display(name: str) -> Iterator[OnProgress]:
    """Shows a bar with rate and time left, on stderr."""
    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=None)
        yield lambda count, total: bar.update(task, advance=count, total=total)
