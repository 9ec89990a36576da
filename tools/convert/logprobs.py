"""The learner's forward of a checkpoint beside transformers', on the same texts.

Both run unsharded in float32 on the CPU: the learner as one rank in a separate process, transformers in this one.
"""

from __future__ import annotations

import math
import multiprocessing
import random
import shlex
import tempfile
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from launcher.processes.environment import inherited
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.data.trajectories import single_turns
from rl_megatron.errors import CheckpointError, ConfigError
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import Completion, Prompt, RolloutGroup, Span
from rl_megatron.weights.checkpoints.kind import is_megatron
from rl_megatron.weights.checkpoints.megatron import held_lora, held_shape
from rl_megatron.weights.layouts.families import megatron_layout, read_shape
from tools.convert.inspection import found

Texts = Sequence[Sequence[int]]
LogProbs = Sequence[Sequence[float]]
_SECONDS = 3600.0  # for the learner to load and to score
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
    """Whether every token's log-prob is within ``tolerance`` nats; prints a line per text. Raises RLMegatronError."""
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
    if held_lora(folder) is not None:
        raise ConfigError(
            f"{folder} holds adapters alone (learner.lora); merge them with their model "
            f"(rl-megatron convert {shlex.quote(str(folder))} OUT --config MODEL --merge) and give OUT"
        )
    shape = read_shape(config or (reference if is_megatron(folder) else folder), family)
    shape = held_shape(folder, shape) if is_megatron(folder) else shape
    if shape.scores:
        raise ConfigError(
            f"{folder} is a sequence classifier, which scores texts and has no log-probs; give the model that it was "
            "trained from"
        )
    _check_known(reference)
    texts = made_up_texts(shape.vocab_size, min(_TOKENS, shape.longest), num_texts)
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
        f"{folder}: transformers {__version__} cannot compute it beside: {reason:.300}; give --against a folder of the "
        "same weights whose model_type it knows (Kimi-K2's are deepseek_v3)"
    )


def differences(ours: LogProbs, theirs: LogProbs, tolerance: float) -> tuple[Table, float]:
    """A table with a row for each text, and the largest difference of a token; NaN counts as infinite."""
    table = Table("text", "tokens", "mean difference", "largest", "", title="log-probs, in nats")
    worst = 0.0
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True), 1):
        apart = [abs(a - b) if math.isfinite(a - b) else math.inf for a, b in zip(one, other, strict=True)]
        worst = max(worst, *apart)
        verdict = "equal" if max(apart) <= tolerance else "DIFFERENT"
        table.add_row(str(number), str(len(apart)), f"{sum(apart) / len(apart):.2g}", f"{max(apart):.2g}", verdict)
    return table, worst


def made_up_texts(vocab_size: int, length: int, count: int) -> Texts:
    """Fixed token ids from the whole vocabulary, so that most experts get some."""
    chosen = random.Random(0)
    return [[chosen.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def _transformers(folder: Path, texts: Texts, threads: int) -> list[list[float]]:
    """transformers' log-prob of each token after the first."""
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
    """The same by a learner of one rank."""
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
            device = world.join(learner, rank=0, rendezvous=f"file://{place}/store", seed=0)
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
            world.leave()


def _group(text: Sequence[int]) -> RolloutGroup:
    """A text as a group in which every token after the first counts as sampled."""
    rest = np.array(text[1:], np.int32)
    zeros = np.zeros(len(rest), np.float32)
    completion = Completion(token_ids=rest, logprobs=zeros, finish_reason="length", spans=(Span(0, 0),))
    prompt = Prompt(id="text", text="", token_ids=tuple(text[:1]), answer="")
    return single_turns(prompt, [completion])
