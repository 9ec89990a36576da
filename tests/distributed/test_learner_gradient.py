"""The learner's forward, backward, clipping and AdamW against transformers' model under torch's own optimizer."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.config.run import TinyModelSection
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.data.packing import pack
from rl_megatron.models.tiny import make_tiny_model
from rl_megatron.options.optimizer import OptimizerSection
from rl_megatron.training.measures import Made
from rl_megatron.types import Samples
from rl_megatron.weights.layouts.families import read_shape
from tests.distributed.ranks import run_ranks
from tests.optimizer_step import train_step

STEPS = 10
LEARNING_RATE = 2e-3
CLIP = 0.5  # below the gradient norm of a random model, so that clipping is seen to work
TINY = TinyModelSection(num_layers=2)
SEED = 5  # of a model with no token so near a tie between two experts that rounding decides


def make_samples() -> Samples:
    """48 ragged sequences of a learnable pattern, the first half of each masked out."""
    g = torch.Generator().manual_seed(7)
    lengths = torch.randint(3, 40, (48,), generator=g)
    n = int(lengths.sum())
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    position = torch.arange(n) - torch.repeat_interleave(cu[:-1], lengths)
    ids = torch.randint(0, 256, (n,), generator=g)
    return Samples(
        input_ids=ids,
        targets=(ids * 3 + 1) % 256,
        mask=position >= torch.repeat_interleave(lengths // 2, lengths),
        advantages=torch.zeros(n),
        rollout_logprobs=torch.zeros(n),
        old_logprobs=torch.zeros(n),
        cu_seqlens=cu,
    )


def rank_main(rank: int, learner: LearnerSection, folder: Path, model: Path) -> None:
    """One rank: fill from the checkpoint, train, write loss and gradient norm of each step."""
    torch.set_num_threads(1)
    from rl_megatron.learner import world
    from rl_megatron.learner.megatron import make_policy
    from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, read_boxes
    from rl_megatron.weights.layouts.layout import Layout
    from rl_megatron.weights.layouts.tables.qwen3_moe import HF_QWEN3_MOE, MEGATRON_QWEN3_MOE

    shape = read_shape(model)
    rendezvous = f"file://{folder}/rendezvous"
    device = world.join(learner, rank=rank, rendezvous=rendezvous, seed=0)
    megatron = make_policy(shape, learner, device, temperature=1.0)
    layout = Layout(table=MEGATRON_QWEN3_MOE, shape=shape, dims=learner.dims, vocab_multiple=learner.vocab_multiple)
    read_boxes(HFFolder(model), Layout(table=HF_QWEN3_MOE, shape=shape), layout, rank, dict(megatron.tensors))
    megatron.adopt()
    batch = pack(make_samples(), dims=learner.dims, max_tokens=400)
    counts = {"num_tokens": batch.num_tokens, "num_sequences": batch.num_sequences}
    mine = batch.micro_batches[learner.dims.dp_rank(rank)]
    results = [train_step(megatron, mine, CrossEntropy(), LEARNING_RATE, **counts) for _ in range(STEPS)]
    seen = [(result.loss, result.step.grad_norm) for result in results if isinstance(result, Made)]
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))
    world.leave()


def transformers_steps(model: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm (before clipping) of each step, on the same sequences one by one."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    section = LearnerSection().optimizer
    adam = torch.optim.AdamW(
        reference.parameters(), lr=LEARNING_RATE, betas=(section.beta1, section.beta2), eps=section.eps, weight_decay=0
    )
    samples = make_samples()
    bounds = samples.cu_seqlens.tolist()
    rows = [slice(a, b) for a, b in pairwise(bounds)]
    ids, targets, mask = (
        torch.nn.utils.rnn.pad_sequence([column[row] for row in rows], batch_first=True)
        for column in (samples.input_ids, samples.targets, samples.mask)
    )
    seen = []
    for _ in range(STEPS):
        adam.zero_grad()
        logprobs = reference(ids).logits.log_softmax(-1).gather(2, targets[..., None]).squeeze(2)
        loss = -logprobs[mask].mean()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), CLIP)
        adam.step()
        seen.append((loss.item(), norm.item()))
    return seen


@pytest.mark.parametrize(("tied", "pp"), [(False, 1), (True, 2)], ids=["untied", "tied-pp2"])
def test_ten_steps_are_those_of_transformers_and_torch(tied: bool, pp: int, tmp_path: Path) -> None:
    spec = TINY.model_copy(update={"tie_embeddings": tied})
    model = make_tiny_model(spec, tmp_path / "models", seed=SEED)
    learner = LearnerSection(pp=pp, optimizer=OptimizerSection(clip_grad=CLIP))
    run_ranks(rank_main, pp, learner, tmp_path, model)
    wanted = transformers_steps(model)
    found = json.loads((tmp_path / f"rank{pp - 1}.json").read_text())
    assert all(norm > CLIP for _, norm in wanted[:3])
    for (loss, norm), (wanted_loss, wanted_norm) in zip(found, wanted, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=1e-4)
        assert norm == pytest.approx(wanted_norm, rel=1e-4)
