"""What ranks of a cell do and see, in a process of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.data.packing import Packer
from rl_megatron.errors import RLMegatronError
from rl_megatron.features.lora.rows import LoraLayouts
from rl_megatron.features.overlap.feature import overlap_of
from rl_megatron.types import Batch, Samples, SkippedStep, Want
from rl_megatron.weights.boxes import Box
from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, MadeUp, read_boxes
from rl_megatron.weights.layouts.families import hf_layout, megatron_layout, read_shape
from rl_megatron.weights.layouts.layout import Layout
from tests.matrix.cells import MAX_TOKENS, SEQUENCES, Cell
from tests.rows import policy_loss
from tests.samples import sequences_of, train_step

if TYPE_CHECKING:
    from rl_megatron.learner.trained import MegatronLearner

VOCABULARY, TEMPERATURE = 61, 0.7
BUCKET = 3000  # parameters of one, where their communication overlaps: so there are several
BAD = 7  # a text whose advantages are infinite in a step that is skipped
LOSS = policy_loss(objective="cispo", aggregation="token_mean", entropy_coefficient=0.1)
ASKED: frozenset[Want] = frozenset({"logits", "logprobs", "entropy"})


@cache
def texts() -> Sequence[Tensor]:
    """12 of random tokens."""
    g = torch.Generator().manual_seed(5)
    lengths = torch.randint(6, 40, (12,), generator=g).tolist()
    return [torch.randint(0, VOCABULARY, (length,), generator=g) for length in lengths]


def rate(learner: LearnerSection) -> float:
    """The learning rate. It moves weights in bfloat16 further than they are rounded."""
    return 5e-3 if learner.dtype == "float32" else 5e-2


def prompt_of(number: int) -> int:
    """How many first tokens of a text are not trained."""
    return 2 + number % 3


def make_samples(shape: Any, features: Sequence[str]) -> Samples:
    """The texts with advantages and log-probs of before, and with experts to take if the cell replays them."""
    g, each = torch.Generator().manual_seed(6), texts()
    lengths = torch.tensor([len(text) - 1 for text in each])
    n = int(lengths.sum())
    masks = [torch.arange(len(text) - 1) >= prompt_of(i) - 1 for i, text in enumerate(each)]
    more: dict[str, Any] = {}
    if "replay" in features:
        drawn = torch.rand(n, shape.num_layers - shape.dense_layers, shape.num_experts, generator=g).argsort(-1)
        more["extra"] = {"routes": drawn[..., : shape.experts_per_token].to(torch.uint8)}
    return sequences_of(
        lengths,
        input_ids=torch.cat([text[:-1] for text in each]),
        targets=torch.cat([text[1:] for text in each]),
        mask=torch.cat(masks),
        advantages=torch.repeat_interleave(torch.randn(len(each), generator=g), lengths),
        old_logprobs=torch.full((n,), -4.0) + torch.randn(n, generator=g),
        **more,
    )


def packed(samples: Samples, learner: LearnerSection) -> Batch:
    return Packer(dims=learner.dims, max_tokens=MAX_TOKENS, padding=learner.padding).pack(samples)


class Drawn(MadeUp):
    """Adapters as after training: no B is 0."""

    def read(self, name: str, box: Box) -> Tensor:
        return super().read(name, box).mul_(2)


def layouts_of(folder: Path, learner: LearnerSection) -> tuple[Layout, Layout]:
    """The model's, over ranks and as files have it, with its draft layer if that is trained."""
    shape = replace(read_shape(folder), drafts=learner.draft.train)
    return megatron_layout(shape, learner.dims, stages=learner.stages), hf_layout(shape)


def of_adapters(ranks: Layout, hf: Layout, learner: LearnerSection) -> tuple[Layout, Layout]:
    return LoraLayouts(learner.lora).on_ranks(ranks), LoraLayouts(learner.lora).in_files(ranks, hf)


def made(folder: Path, learner: LearnerSection, rank: int, device: torch.device) -> MegatronLearner:
    """A policy with the folder's weights, read by the tables; what they forget is not a number."""
    from rl_megatron.learner import trained
    from rl_megatron.learner.megatron import make_policy

    ranks, hf = layouts_of(folder, learner)
    small = partial(trained.DistributedDataParallelConfig, bucket_size=BUCKET)
    overlaps = overlap_of(learner).gradients
    with patch.object(trained, "DistributedDataParallelConfig", small) if overlaps else nullcontext():
        policy = make_policy(hf.shape, learner, device, temperature=TEMPERATURE)
    tensors = dict(policy.tensors)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == ranks.local_shapes(rank)
    for tensor in (*tensors.values(), *policy.adapters.values()):
        tensor.fill_(math.nan)
    read_boxes(HFFolder(folder), hf, ranks, rank, tensors)
    if learner.lora.rank is not None:
        of_ranks, of_files = of_adapters(ranks, hf, learner)
        read_boxes(Drawn(folder, of_files.local_shapes(0), 3), of_files, of_ranks, rank, policy.adapters)
    policy.adopt()
    return policy


def held(policy: MegatronLearner) -> dict[str, Tensor]:
    """A copy of what it has."""
    policy.gather()
    return {name: tensor.clone() for name, tensor in (*policy.tensors.items(), *policy.adapters.items())}


def differing(policy: MegatronLearner, before: Mapping[str, Tensor]) -> list[str]:
    return [name for name, tensor in held(policy).items() if not torch.equal(tensor, before[name])]


def of_step(result: Any) -> dict[str, Any] | None:
    """Numbers of a step that was made; None off the last stage."""
    assert not isinstance(result, SkippedStep), result
    if result is None:
        return None
    said = {name: metric.value for name, metric in {**result.of_loss, **result.step.metrics}.items()}
    return {"norm": result.step.grad_norm, **said}


def steps(rank: int, cell: Cell, folder: Path, to: Path) -> dict[str, Any]:
    """Scores, a skipped step, a step in parts, a checkpoint and a step after it; in another layout that step again."""
    from rl_megatron.learner import world
    from rl_megatron.learner.optimizer import bucket_groups

    learner = cell.learner
    device = world.join(learner, rank=rank, rendezvous=f"file://{to}/rendezvous", seed=1)
    policy = made(folder, learner, rank, device)
    before = held(policy)
    if learner.lora.rank is None and (folder / "megatron").exists():
        policy.load_weights(folder / "megatron")
        assert differing(policy, before) == [], "a converted checkpoint holds other weights than the tables give"
    batch, row = mine(policy, cell, learner, rank, folder)
    asked = ASKED | {"routes"} if read_shape(folder).num_experts and not row[0].extra else ASKED
    seen: dict[str, Any] = {"dp": learner.dims.dp_rank(rank), "scores": policy.score(row, asked)}
    seen["culprits"] = skipped(policy, row, batch, learner, rank)
    assert differing(policy, before) == [], "a skipped step moved weights"
    if learner.padding.sizes:
        has_few_shapes(policy, row, learner)
    groups = bucket_groups(policy._trained)
    for group in groups:
        group.start_param_sync = Mock(wraps=group.start_param_sync)
    seen["first"] = of_step(in_parts(policy, row, batch, learner))
    policy.save(to / "saved")
    seen["saved"] = held(policy)
    seen["second"] = of_step(one_step(policy, row, batch, learner))
    seen["buckets"], gathers = len(groups), {group.start_param_sync.call_count for group in groups}
    if overlap_of(learner).parameters:
        waits_for_weights(policy, row)
    elif learner.optimizer.name == "adamw":
        assert gathers == {2}, f"two steps gathered buckets of weights {gathers} times"
    seen["tensors"], seen["bytes"] = held(policy), held_bytes(policy)
    with policy.merged():
        seen["merged"] = dict(held(policy)) if learner.lora.rank is not None else {}
    if (most := read_shape(folder).indexer) is not None:
        refuses_longer(policy, row[0], most.top_k)
    world.leave()
    return seen


def held_bytes(policy: Any) -> dict[str, int]:
    """Of this rank, by what the plan of memory calls them; megatron pads gradients for their reduction."""
    from rl_megatron.learner.optimizer import state_of

    chunks = policy._chunks
    held_by = [p for chunk in chunks for p in chunk.parameters()]
    held_by += [tensor for name, tensor in policy.tensors.items() if ".indexer." in name]  # which is not trained
    buffers = [b for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    stepped = {p.untyped_storage().data_ptr() for p in held_by}  # the weights themselves in float32
    state = [
        one for one in state_of(policy._optimizer) if one.untyped_storage().data_ptr() not in stepped and one.dim()
    ]
    return {
        "parameters": sum(p.nbytes for p in held_by),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer": sum(tensor.nbytes for tensor in state),
    }


def has_few_shapes(policy: Any, row: Sequence[Samples], learner: LearnerSection) -> None:
    """Asserts that kernels see few shapes, though texts have many lengths."""
    shapes = {(len(m.input_ids), len(m.attention.cu_seqlens_q), m.num_segments) for m in policy._pack(row)}
    assert len({len(m.input_ids) for m in row}) > 1
    assert {tokens * learner.cp for tokens, *_ in shapes} <= {*learner.padding.sizes}
    assert {tuple(counts) for _, *counts in shapes} == {(SEQUENCES + 2, SEQUENCES + 1)}


def waits_for_weights(policy: MegatronLearner, row: Sequence[Samples]) -> None:
    """Asserts that a step leaves other ranks' weights to the next pass, which has them all."""
    stale = {name: tensor.clone() for name, tensor in policy.tensors.items()}
    first = policy.score(row, frozenset({"logprobs"}))
    assert differing(policy, stale), "no weight waits for the next pass"
    again = policy.score(row, frozenset({"logprobs"}))
    assert first is None or all(map(torch.equal, first["logprobs"], again["logprobs"])), "a pass had weights of before"


def refuses_longer(policy: MegatronLearner, samples: Samples, most: int) -> None:
    """Than an indexer chooses whole."""
    n = most + 1
    longer = {name: torch.cat([column] * n)[:n] for name, column in samples.columns.items()}
    with pytest.raises(RLMegatronError, match=f"a sequence = {n} is more than index_topk={most} of model_type="):
        policy.score([Samples(**longer, cu_seqlens=torch.tensor([0, n]))], frozenset({"logits"}))


def resumed(rank: int, cell: Cell, folder: Path, to: Path) -> dict[str, Any]:
    """The step after the checkpoint, in the layout ``then``."""
    from rl_megatron.learner import world

    learner = cell.resumed
    device = world.join(learner, rank=rank, rendezvous=f"file://{to}/rendezvous-then", seed=2)
    policy = made(folder, learner, rank, device)
    policy.load(to / "saved")
    batch, row = mine(policy, cell, learner, rank, folder)
    seen = {"second": of_step(one_step(policy, row, batch, learner)), "tensors": held(policy)}
    world.leave()
    return seen


def mine(
    policy: MegatronLearner, cell: Cell, learner: LearnerSection, rank: int, folder: Path
) -> tuple[Batch, list[Samples]]:
    """The batch, and this rank's micro-batches with the experts of its own layers."""
    batch = packed(make_samples(read_shape(folder), cell.features), learner)
    row = list(batch.micro_batches[learner.dims.dp_rank(rank)])
    if "replay" in cell.features:
        layers = list(policy.column_layers["routes"])
        row = [replace(m, extra={"routes": m.extra["routes"][:, layers]}) for m in row]  # type: ignore[index]
    return batch, row


def counts_of(batch: Batch) -> dict[str, int]:
    return {"num_tokens": batch.num_tokens, "num_sequences": batch.num_sequences}


def one_step(policy: MegatronLearner, row: Sequence[Samples], batch: Batch, learner: LearnerSection) -> Any:
    return train_step(policy, row, LOSS, rate(learner), **counts_of(batch))


def skipped(
    policy: MegatronLearner, row: Sequence[Samples], batch: Batch, learner: LearnerSection, rank: int
) -> list[tuple[int, int]]:
    """The micro-batches that a step with infinite advantages of text `BAD` blames."""
    sequences = batch.sequences[learner.dims.dp_rank(rank)]
    bad = [
        replace(m, advantages=torch.full_like(m.advantages, math.inf)) if BAD in ids else m
        for m, ids in zip(row, sequences, strict=True)
    ]
    result = train_step(policy, bad, LOSS, rate(learner), **counts_of(batch))
    assert isinstance(result, SkippedStep)
    return [(one.data_rank, one.micro_batch) for one in result.culprits]


def in_parts(policy: MegatronLearner, row: Sequence[Samples], batch: Batch, learner: LearnerSection) -> Any:
    """A step of two passes, with a score between them and a dropped pass before, where the layout allows that."""
    counts = counts_of(batch)
    if overlap_of(learner).gradients:
        policy.backward(row, LOSS, **counts)
        with pytest.raises(RLMegatronError, match="a step takes one backward pass"):
            policy.backward(row, LOSS, **counts)
        policy.drop()
    half = len(row) // 2 if learner.vpp == 1 and not overlap_of(learner).gradients else 0
    if half == 0:
        return one_step(policy, row, batch, learner)
    policy.backward(row[half:], LOSS, **counts)
    policy.drop()
    first = policy.backward(row[:half], LOSS, **counts)
    policy.score(row[:half], frozenset({"logprobs"}))
    result = train_step(policy, row[half:], LOSS, rate(learner), **counts)
    if first is None:
        return result
    loss = replace(result.of_loss["loss"], value=result.of_loss["loss"].value + first["loss"].value)
    return replace(result, of_loss={"loss": loss})
