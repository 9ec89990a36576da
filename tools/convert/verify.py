"""Verifies a checkpoint: its files, shapes, NaN and infinite values, and differences from another checkpoint.

``--logprobs`` compares the learner's forward pass with transformers' on the same texts. Both run unsharded in float32
on the CPU: the learner as one rank in a separate process, transformers in this one.
"""

from __future__ import annotations

import math
import multiprocessing
import random
import shlex
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import permutations, repeat
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from launcher.processes.environment import inherited
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.digests import Digest, mismatches
from rl_megatron.errors import CheckpointError, ConfigError
from rl_megatron.features.lora.files import adapter_copies, stored_lora
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import Completion, Prompt, RolloutGroup, Span
from rl_megatron.weights.checkpoints.convert import converted_shape, hf_tensors
from rl_megatron.weights.checkpoints.megatron import is_megatron, stored_files, stored_shape
from rl_megatron.weights.checkpoints.streaming import FORGET_BYTES, Copy, Files, OnBytes, OnProgress
from rl_megatron.weights.checkpoints.torch_dist import Chunk, open_chunk, read_index
from rl_megatron.weights.formats.hf_folder import is_draft
from rl_megatron.weights.layouts.families import megatron_layout, read_shape
from tools.convert.conversion import display
from tools.convert.inspection import dropped_draft_matrices, found

_MAX_LINES = 50
_MAX_DIFFERENCES = 4  # lines about tensors of two different models
_SIZES = {
    "family": "model_type",
    "num_layers": "layers",
    "hidden_size": "hidden size",
    "num_heads": "heads",
    "num_kv_heads": "key and value heads",
    "head_dim": "head size",
    "num_experts": "experts",
    "expert_width": "expert width",
    "shared_width": "shared experts' width",
    "dense_width": "MLP width",
    "vocab_size": "vocabulary",
}
"""Fields of `ModelShape` that different models differ in, and how a sentence calls them."""


class Difference(str):
    """A line about a tensor that differs between two checkpoints, or that only one has."""

    __slots__ = ()


def print_problems(
    folder: Path, *, against: Path | None = None, config: Path | None = None, family: str | None = None
) -> bool:
    """Prints the problems, of different models a few; returns True if there are none. Raises RLMegatronError if the
    folder is unreadable."""
    folder = found(folder)
    against = None if against is None else found(against)
    problems, written = _check_run(folder.resolve()) if is_megatron(folder) else ([], None)
    with display(folder.name) as progress:
        problems += verify(folder, against=against, config=config, family=family, written=written, on_progress=progress)
    shown, differences = problems, [line for line in problems if isinstance(line, Difference)]
    if against is not None and differences and (sentence := different_models(folder, against, config, family)):
        print(sentence)
        own = [line for line in problems if not isinstance(line, Difference)]
        shown = [*own, *differences[:_MAX_DIFFERENCES]]
    for line in shown[:_MAX_LINES]:
        print(line)
    if more := len(problems) - min(len(shown), _MAX_LINES):
        print(f"and {more} more")
    print(f"{folder}: {len(problems) or 'no'} problems" + (f", compared with {against}" if against else ""))
    return not problems


def different_models(folder: Path, against: Path, config: Path | None, family: str | None) -> str | None:
    """Returns a sentence with the sizes in which two checkpoints' models differ; None if they have the same sizes."""
    if stored_lora(folder) is not None:
        return None
    shapes = [converted_shape(one, config, family) for one in (folder, against)]
    pairs = [(name, *(getattr(shape, key) for shape in shapes)) for key, name in _SIZES.items()]
    differ = ", ".join(f"{name} {here} and {there}" for name, here, there in pairs if here != there)
    return f"{folder} and {against} are different models: {differ}" if differ else None


def _check_run(shards: Path) -> tuple[list[str], Mapping[str, Digest] | None]:
    """Returns problems that prevent a resume from the run's checkpoint with ``shards``; if it is sound, its digests."""
    from rl_megatron.training import checkpoints  # imports torch

    try:
        return [], checkpoints.read(shards.parent).files if checkpoints.file_digests(shards) else None
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
    """Yields a line for each problem; none for a sound checkpoint of either kind, or sound adapters of the model of
    ``config``.

    It is compared with ``against`` tensor by tensor, to the bit; a tensor that only one of them has is a problem.
    ``written`` has the digests of all files of a run's checkpoint with its shards in ``folder``, by name in the folder
    above. They replace the chunks' own checksums, so that each file is read once for either. Raises CheckpointError,
    WeightError or ConfigError if the checkpoint cannot be read to its end: a torn or missing file, an unknown, missing
    or misshapen tensor.
    """
    if against is not None and (stored_lora(folder) is None) != (stored_lora(against) is None):
        raise ConfigError(
            f"one of {folder} and {against} holds adapters alone (learner.lora), the other a whole model; merge the "
            "adapters first (rl-megatron convert --merge)"
        )
    tensors, files = _tensors(folder, config, family)
    chunks = read_index(folder)[1] if written is None and is_megatron(folder) else []
    files = stored_files(folder, sorted({chunk.file for chunk in chunks})) | files  # some may hold no weights
    total = sum(chunk.length for chunk in chunks)
    total += sum(tensor.num_bytes for tensor in tensors) + sum(digest.bytes for digest in (written or {}).values())

    def on_bytes(count: int) -> None:
        on_progress(count, total)

    if written is not None:
        for name, digest in written.items():
            yield from mismatches(folder.resolve().parent, {name: digest}, read=True)
            on_bytes(digest.bytes)
    yield from _bad_sums(folder, chunks, files, on_bytes)
    others: dict[str, Copy] = {}
    other_files = files
    if against is not None:
        theirs, other_files = _tensors(against, config, family)
        others = {tensor.name: tensor for tensor in theirs}
        for each in (folder, against):
            own = [] if is_megatron(each) else dropped_draft_matrices(each, converted_shape(each, config, family))
            yield from (f"{each}: {line}; it is not compared" for line in own)
        yield from _list_unmatched(
            {folder: {tensor.name for tensor in tensors}, against: others.keys()}, config, family
        )
    seen = 0
    for tensor in tensors:
        yield from _wrong(tensor, others.get(tensor.name), on_bytes)
        seen += tensor.num_bytes
        if seen > FORGET_BYTES:
            files.forget()
            other_files.forget()
            seen = 0


def _tensors(folder: Path, config: Path | None, family: str | None) -> tuple[list[Copy], Files]:
    lora = stored_lora(folder)
    if lora is None:
        return hf_tensors(folder, config, family)
    if config is None:
        raise ConfigError(
            f"{folder} holds adapters alone (learner.lora); give --config with the Hugging Face folder of the model "
            "that they were trained with"
        )
    adapters, files = adapter_copies(folder, read_shape(config, family), lora)
    return list(adapters.values()), files


def _list_unmatched(names: Mapping[Path, Set[str]], config: Path | None, family: str | None) -> Iterator[str]:
    """Yields a line for each tensor that only one checkpoint has, and notes if the other has no draft layers."""
    for folder, other in permutations(names, 2):
        if found := sorted(names[folder] - names[other]):
            shape, drafts = (
                converted_shape(folder, config, family),
                converted_shape(other, config, family).num_draft_layers,
            )
            for name in found:
                left = is_draft(name, shape) and not drafts
                why = f"; {other} was made without draft layers" if left else ""
                yield Difference(f"{name} is only in {folder}{why}")


def _wrong(tensor: Copy, other: Copy | None, on_bytes: OnBytes) -> Iterator[str]:
    if other is not None and (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
        here, there = (f"{one.dtype} {one.shape}" for one in (tensor, other))
        yield Difference(f"{tensor.name} is {here} here and {there} in the other checkpoint")
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
        yield Difference(f"{tensor.name}: {different} of {tensor.num_bytes} bytes differ")


def _bad_sums(folder: Path, chunks: Sequence[Chunk], files: Files, on_bytes: OnBytes) -> Iterator[str]:
    """Yields chunks with bytes that do not match the zip's checksum. torch may be set to write 0 for it."""
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


Texts = Sequence[Sequence[int]]
LogProbs = Sequence[Sequence[float]]
_SECONDS = 3600.0  # the learner's time to load and to score
_TOKENS = 64


def compare_logprobs(
    folder: Path,
    *,
    against: Path | None,
    config: Path | None,
    family: str | None,
    layers: str,
    num_texts: int,
    tolerance: float,
    threads: int,
) -> bool:
    """True if every token's log-prob is within ``tolerance`` nats. Prints a line per text. Raises RLMegatronError."""
    folder, against = found(folder), None if against is None else found(against)
    reference = against or folder
    if is_megatron(reference):
        raise ConfigError(
            f"{reference} is a megatron checkpoint, which transformers cannot read; give --against a Hugging Face "
            "folder of the same weights"
        )
    try:
        learner = LearnerSection(layers=layers)
    except ValidationError as error:
        raise ConfigError(
            f"--layers={layers!r:.200}: it must be auto, torch or your own package.module:name"
        ) from error
    if stored_lora(folder) is not None:
        raise ConfigError(
            f"{folder} holds adapters alone (learner.lora); merge them with their model "
            f"(rl-megatron convert {shlex.quote(str(folder))} OUT --config MODEL --merge) and give OUT"
        )
    shape = read_shape(config or (reference if is_megatron(folder) else folder), family)
    shape = stored_shape(folder, shape) if is_megatron(folder) else shape
    if shape.has_score_head:
        raise ConfigError(
            f"{folder} is a sequence classifier, which scores texts and has no log-probs; give the model that it was "
            "trained from"
        )
    _check_known(reference)
    texts = random_texts(shape.vocab_size, min(_TOKENS, shape.max_positions), num_texts)
    ours = _learner(folder, shape, learner, texts, threads)
    theirs = _transformers(reference, texts, threads)
    table, worst = differences(ours, theirs, tolerance)
    console = Console(markup=False)
    console.print(table)
    said = "within" if worst <= tolerance else "NOT within"
    console.print(f"{folder} beside transformers' {reference}: {said} {tolerance:g}", soft_wrap=True, highlight=False)
    return worst <= tolerance


def _check_known(folder: Path) -> None:
    """Raises ConfigError for a model that transformers has no class for."""
    from transformers import AutoConfig, __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    try:
        if AutoConfig.from_pretrained(folder, trust_remote_code=False).model_type in KNOWN:
            return
    except ValueError as error:
        reason = str(error).partition("\n")[0]
    else:
        reason = "its class of this model_type gives no log-probs"
    raise ConfigError(
        f"{folder}: transformers {__version__} cannot compute its log-probs: {reason:.300}; give --against a folder "
        "of the same weights whose model_type it knows (Kimi-K2's are deepseek_v3)"
    )


def differences(ours: LogProbs, theirs: LogProbs, tolerance: float) -> tuple[Table, float]:
    """Returns a table with a row for each text, and the largest difference of a token; NaN counts as infinite."""
    table = Table("text", "tokens", "mean difference", "largest", "", title="log-probs, in nats")
    worst = 0.0
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True), 1):
        apart = [abs(a - b) if math.isfinite(a - b) else math.inf for a, b in zip(one, other, strict=True)]
        worst = max(worst, *apart)
        verdict = "equal" if max(apart) <= tolerance else "DIFFERENT"
        table.add_row(str(number), str(len(apart)), f"{sum(apart) / len(apart):.2g}", f"{max(apart):.2g}", verdict)
    return table, worst


def random_texts(vocab_size: int, length: int, count: int) -> Texts:
    """Returns fixed token ids from the whole vocabulary, so that most experts get some."""
    chosen = random.Random(0)
    return [[chosen.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def _transformers(folder: Path, texts: Texts, threads: int) -> list[list[float]]:
    """Returns transformers' log-prob of each token after the first."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
        found = []
        with torch.inference_mode():
            for text in texts:
                ids = torch.tensor([text])
                logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
                found.append(logprobs.gather(1, ids[0, 1:, None]).squeeze(1).tolist())
    finally:
        torch.set_num_threads(usual)
    return found


def _learner(folder: Path, shape: ModelShape, learner: LearnerSection, texts: Texts, threads: int) -> list[list[float]]:
    """Returns the same by a learner of one rank."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    with inherited(threads=threads, device="cpu"):
        given = (writer, folder, shape, learner, texts)
        process = multiprocessing.get_context("spawn").Process(target=_rank, args=given)
        process.start()
    writer.close()
    try:
        if not reader.poll(_SECONDS):
            raise CheckpointError(f"{folder}: the learner did not score it within {_SECONDS:g} s")
        found = reader.recv()
    except EOFError as error:
        raise CheckpointError(f"{folder}: the learner's process ended before it had scored it") from error
    finally:
        process.kill()
        process.join()
    if isinstance(found, Exception):
        raise found
    return list(found)


def _rank(writer: Connection, folder: Path, shape: ModelShape, learner: LearnerSection, texts: Texts) -> None:
    """Runs in the learner's process: sends the log-probs, or the exception."""
    warnings.simplefilter("ignore")  # megatron warns of packages that it could use
    from rl_megatron.learner.megatron import make_policy  # first: it makes megatron run here

    # isort: split
    import torch

    from rl_megatron.data.samples import to_samples
    from rl_megatron.learner import world
    from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, read_boxes
    from rl_megatron.weights.layouts.families import hf_layout

    with tempfile.TemporaryDirectory() as place:
        try:
            device = world.init_process_groups(learner, rank=0, rendezvous=f"file://{place}/store", seed=0)
            policy = make_policy(shape, learner, device, temperature=1.0)
            if is_megatron(folder):
                policy.load_weights(folder)
            else:
                layout = megatron_layout(shape)
                read_boxes(HFFolder(folder), hf_layout(shape), layout, 0, dict(policy.tensors))
                policy.adopt()
            found = policy.score([to_samples([_group(text) for text in texts])], frozenset({"logprobs"}))
            assert found is not None, "the only rank answers"
            parts = torch.split(found["logprobs"][0], [len(text) - 1 for text in texts])
            writer.send([part.tolist() for part in parts])
        except Exception as error:  # noqa: BLE001  sent, and raised where it is received
            writer.send(error)
        finally:
            world.destroy_process_groups()


def _group(text: Sequence[int]) -> RolloutGroup:
    """Returns a text as a group in which every token after the first counts as sampled."""
    from rl_megatron.data.samples import single_turns  # imports torch

    rest = np.array(text[1:], np.int32)
    zeros = np.zeros(len(rest), np.float32)
    completion = Completion(token_ids=rest, logprobs=zeros, finish_reason="length", spans=(Span(0, 0),))
    prompt = Prompt(id="text", text="", token_ids=tuple(text[:1]), answer="")
    return single_turns(prompt, [completion])
