"""Builds the models of one rank: policy, critic, frozen policy. Every rank of the world calls these functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.feature import drop_captures, prepare_chunks
from rl_megatron.learner import cpu
from rl_megatron.learner.keywords import LOGITS_TOKENS, keywords
from rl_megatron.models.shape import ModelShape

cpu.install()  # must precede the modules below, which bind megatron's functions

from megatron.core.models.gpt import GPTModel  # noqa: E402

from rl_megatron.learner.heads import (  # noqa: E402
    EXACT,
    Float32Head,
    Head,
    PolicyAndValueHead,
    ScoreLayer,
    ValueHead,
    ValueLayer,
    ValueOnHiddenStates,
    VocabHead,
    replace_output_layer,
    stop_before_output_layer,
)
from rl_megatron.learner.model.build import build_chunks, make_config  # noqa: E402
from rl_megatron.learner.trained import MegatronLearner, MegatronScorer, modules  # noqa: E402


def make_policy(
    shape: ModelShape,
    learner: LearnerSection,
    device: torch.device,
    *,
    temperature: float,
    top_k: int = 0,
    valued: bool = False,
) -> MegatronLearner:
    """Returns this rank's part of the learner of a policy, or of a reward model, whose ``shape`` scores; after
    `init_process_groups`. Every rank calls it. ``top_k`` is `VocabHead`'s; a ``valued`` policy is its own critic."""
    config = make_config(shape, learner)
    models = build_chunks(shape, learner, config)
    head: Head = ValueHead()
    if shape.has_score_head:
        replace_output_layer(ScoreLayer, models, config)
    else:
        policy = _vocab_head(shape, learner, models, temperature, top_k=top_k)
        head = PolicyAndValueHead(policy=policy, values=ValueOnHiddenStates(models, config)) if valued else policy
    prepare_chunks(shape, learner, models)
    return MegatronLearner(shape, learner, device, config, models, head)


def make_frozen(
    shape: ModelShape,
    learner: LearnerSection,
    device: torch.device,
    *,
    temperature: float,
    top_k: int = 0,
    top_below: int = EXACT,
) -> MegatronScorer:
    """Makes a model without gradients, optimizer or CUDA graphs; of a ``shape`` that scores, a reward model."""
    shape, learner = replace(shape, num_draft_layers=False), drop_captures(learner)
    config = make_config(shape, learner)
    models = build_chunks(shape, learner, config)
    if shape.has_score_head:
        replace_output_layer(ScoreLayer, models, config)
        head: Head = ValueHead()
    else:
        head = _vocab_head(shape, learner, models, temperature, top_k=top_k, top_below=top_below)
    chunks = [module.to(device).requires_grad_(False) for module in modules(config, models)]
    return MegatronScorer(shape, learner, device, models, head, chunks)


def make_critic(shape: ModelShape, learner: LearnerSection, device: torch.device) -> MegatronLearner:
    """Makes a learner with a value layer, which is initialized to 0, in place of a policy's output layer."""
    untied = replace(shape, tie_embeddings=False, num_draft_layers=False)
    config = make_config(untied, learner)
    chunks = build_chunks(untied, learner, config)
    replace_output_layer(ValueLayer, chunks, config)
    return MegatronLearner(untied, learner, device, config, chunks, ValueHead())


def _vocab_head(
    shape: ModelShape,
    learner: LearnerSection,
    models: Sequence[GPTModel],
    temperature: float,
    *,
    top_k: int,
    top_below: int = EXACT,
) -> VocabHead:
    vocab_size, chunk = shape.vocab_size, LOGITS_TOKENS
    if learner.head_dtype is None:
        return VocabHead(temperature=temperature, vocab_size=vocab_size, chunk=chunk, top_k=top_k, top_below=top_below)
    stop_before_output_layer(models)
    announces = bool(keywords(learner, shape).ddp.get("overlap_grad_reduce"))
    return Float32Head(
        temperature=temperature, vocab_size=vocab_size, chunk=chunk, model=models[-1], announces=announces
    )
