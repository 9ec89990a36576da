"""What ranks of a cell do and see, in a process of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial, partialmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from rl_megatron.algorithms.auxiliary import ValueLoss
from rl_megatron.algorithms.losses import PolicyAndValueLoss
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.data.packing import Packer
from rl_megatron.errors import RLMegatronError
from rl_megatron.features.lora.rows import LoraLayouts
from rl_megatron.features.overlap.feature import overlap_section
from rl_megatron.types import Batch, Loss, Samples, SkippedStep, Want
from rl_megatron.weights.boxes import Box
from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, RandomWeights, read_boxes
from rl_megatron.weights.layouts.families import hf_layout, megatron_layout, read_shape
from rl_megatron.weights.layouts.layout import Layout
from tests.matrix.cells import MAX_TOKENS, SEQUENCES, Cell, has_values
from tests.rows import policy_loss
from tests.samples import sequences_of, train_step

if TYPE_CHECKING:
    from rl_megatron.learner.trained import MegatronLearner

VOCABULARY, TEMPERATURE = 61, 0.7
BUCKET = 3000  # parameters of one, where their communication overlaps: so there are several
BAD = 7  # a text whose advantages are infinite in a step that is skipped
LOSS = policy_loss(objective="cispo", aggregation="token_mean", entropy_coefficient=0.1)
CLIP, COEFFICIENT = 0.2, 0.5  # of the value loss
ASKED: frozenset[Want] = frozenset({"logits", "logprobs", "entropy", "values"})
VALUE_LAYER = ("value_layer.weight", "value_layer.bias")


@cache
def texts() -> Sequence[Tensor]:
    """12 of random tokens."""
    g = torch.Generator().manual_seed(5)
    lengths = torch.randint(6, 40, (12,), generator=g).tolist()
    return [torch.randint(0, VOCABULARY, (length,), generator=g) for length in lengths]


def loss_of(features: Sequence[str]) -> Loss:
    value = ValueLoss(clip=CLIP)
    if "critic" in features:
        return value
    return PolicyAndValueLoss(policy=LOSS, value=value, coefficient=COEFFICIENT) if "own critic" in features else LOSS


def first_values(shape: Sequence[int]) -> Tensor:
    """A value layer's, which are not 0."""
    return torch.linspace(-1, 1, math.prod(shape)).view(*shape)


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
    if has_values(features):
        more |= {"old_values": torch.randn(n, generator=g), "returns": torch.randn(n, generator=g)}
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


class Drawn(RandomWeights):
    """Adapters as after training: no B is 0."""

    def read(self, name: str, box: Box) -> Tensor:
        return super().read(name, box).mul_(2)


def layouts_of(folder: Path, learner: LearnerSection, features: Sequence[str] = ()) -> tuple[Layout, Layout]:
    """The model's, over ranks and as files have it, with its draft layer if that is trained. A critic's are those of a
    classifier."""
    shape = replace(read_shape(folder), num_draft_layers=learner.draft.train)
    if "critic" in features:
        shape = replace(shape, has_score_head=True, tie_embeddings=False)
    return megatron_layout(shape, learner.dims, stages=learner.stages), hf_layout(shape)


def of_adapters(ranks: Layout, hf: Layout, learner: LearnerSection) -> tuple[Layout, Layout]:
    return LoraLayouts(learner.lora).on_ranks(ranks), LoraLayouts(learner.lora).file_layout(ranks, hf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A learner on this rank, with the weights of the cell's folder, and what it trains on."""

    policy: MegatronLearner
    learner: LearnerSection
    loss: Loss
    batch: Batch
    row: Sequence[Samples]  # this rank's micro-batches
    blamed: Sequence[bool]  # those that have the text `BAD`

    @property
    def counts(self) -> dict[str, int]:
        return {"num_tokens": self.batch.num_tokens, "num_sequences": self.batch.num_sequences}

    def step(self, row: Sequence[Samples] | None = None) -> Any:
        return train_step(self.policy, row or self.row, self.loss, rate(self.learner), **self.counts)

    def backward(self, row: Sequence[Samples]) -> Any:
        return self.policy.backward(row, self.loss, **self.counts)

    def score(self, row: Sequence[Samples]) -> Any:
        """Log-probs or values."""
        return self.policy.score(row, frozenset({"logprobs", "values"}) & self.policy._head.outputs)


def made(cell: Cell, folder: Path, learner: LearnerSection, rank: int, device: torch.device) -> Ready:
    """A learner with the folder's weights, read by the tables; what they forget is not a number. It has this rank's
    micro-batches, with the experts of its own layers."""
    from rl_megatron.learner import trained
    from rl_megatron.learner.megatron import make_critic, make_policy

    ranks, hf = layouts_of(folder, learner)
    small = partial(trained.DistributedDataParallelConfig, bucket_size=BUCKET)
    overlaps, features = overlap_section(learner).gradients, cell.features
    with patch.object(trained, "DistributedDataParallelConfig", small) if overlaps else nullcontext():
        if "critic" in features:
            policy = make_critic(hf.shape, learner, device)
        else:
            policy = make_policy(hf.shape, learner, device, temperature=TEMPERATURE, valued="own critic" in features)
    tensors, shapes = dict(policy.tensors), ranks.local_shapes(rank)
    dropped = {name: torch.empty(shapes[name]) for name in shapes.keys() - tensors.keys() if "critic" in features}
    assert dropped.keys() <= {"output_layer.weight"}
    assert {name: tuple(t.shape) for name, t in (tensors | dropped).items()} == shapes
    for tensor in (*tensors.values(), *policy.adapters.values()):
        tensor.fill_(math.nan)
    read_boxes(HFFolder(folder), hf, ranks, rank, tensors | dropped)
    for tensor in values_of(policy).values():
        assert not tensor.any(), "a fresh value layer says something"
        tensor.copy_(first_values(tensor.shape))
    if learner.lora.rank is not None:
        of_ranks, of_files = of_adapters(ranks, hf, learner)
        read_boxes(Drawn(folder, of_files.local_shapes(0), 3), of_files, of_ranks, rank, policy.adapters)
    policy.adopt()
    if learner.offload.leaving:
        for name in ("score", "backward", "step", "zero_grad", "save"):
            setattr(policy, name, partial(parked, policy, getattr(policy, name)))
    batch = packed(make_samples(read_shape(folder), features), learner)
    number = learner.dims.dp_rank(rank)
    row = list(batch.micro_batches[number])
    if "replay" in features:
        layers = list(policy.column_layers["routes"])
        row = [replace(m, extra={"routes": m.extra["routes"][:, layers]}) for m in row]  # type: ignore[index]
    blamed = [BAD in ids for ids in batch.sequences[number]]
    return Ready(policy=policy, learner=learner, loss=loss_of(features), batch=batch, row=row, blamed=blamed)


def pretend_gpu() -> None:
    """In this process what leaves a GPU's memory leaves the host's: state, and what layers keep for a backward pass."""
    from rl_megatron.learner import cpu
    from rl_megatron.learner.model import build, offload
    from rl_megatron.weights.bytes import parked

    def there(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        with patch.multiple(torch.Tensor, is_cuda=True, device=torch.device("cuda", 0)):
            return function(*given, **named)

    build.refuse, offload.LEAST = Mock(), 1
    for module in (offload, parked):
        module.torch = cpu._make_torch_proxy()
    for owner, name in ((offload.Activations, "_pack"), (parked.OffloadedTensors, "offload")):
        setattr(owner, name, partialmethod(partial(there, getattr(owner, name))))


def parked(policy: MegatronLearner, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Calls it as servers that sampled before would let it: nothing is in a GPU's memory."""
    policy.offload(pushed=False)
    buffers = [b for chunk in policy._all_chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    assert not any(t.untyped_storage().nbytes() for b in buffers for t in (b.param_data, b.grad_data) if t is not None)
    return call(*given, **named)


def values_of(policy: MegatronLearner) -> dict[str, Tensor]:
    """The value layer, which only the last stage has."""
    from rl_megatron.learner.heads import ValueParameter
    from rl_megatron.learner.parameters import global_parameters

    return {name: p.data for name, p in global_parameters(policy._models) if isinstance(p, ValueParameter)}


def held(policy: MegatronLearner) -> dict[str, Tensor]:
    """A copy of what it has."""
    policy.onload()
    policy.gather()
    every = (policy.tensors, policy.adapters, values_of(policy))
    return {name: tensor.clone() for tensors in every for name, tensor in tensors.items()}


def differing(policy: MegatronLearner, before: Mapping[str, Tensor]) -> list[str]:
    return [name for name, tensor in held(policy).items() if not torch.equal(tensor, before[name])]


def of_step(result: Any) -> dict[str, Any] | None:
    """Numbers of a step that was made; None off the last stage."""
    assert not isinstance(result, SkippedStep), result
    if result is None:
        return None
    said = {name: metric.value for name, metric in {**result.loss_metrics, **result.result.observer_metrics}.items()}
    return {"norm": result.result.grad_norm, **said}


def steps(rank: int, cell: Cell, folder: Path, to: Path) -> dict[str, Any]:
    """Scores, a skipped step, a step in parts, a checkpoint and a step after it; in another layout that step again."""
    from rl_megatron.learner import world
    from rl_megatron.learner.model import offload
    from rl_megatron.learner.optimizer import bucket_groups

    learner = cell.learner
    device = world.init_process_groups(learner, rank=rank, rendezvous=f"file://{to}/rendezvous", seed=1)
    if "offload" in cell.features:
        pretend_gpu()
    one = made(cell, folder, learner, rank, device)
    policy, row = one.policy, one.row
    before = held(policy)
    if learner.lora.rank is None and (folder / "megatron").exists():
        policy.load_weights(folder / "megatron")
        assert differing(policy, before) == [], "a converted checkpoint holds other weights than the tables give"
    routes = {"routes"} if read_shape(folder).num_experts and not row[0].extra else set()
    seen: dict[str, Any] = {"dp": learner.dims.dp_rank(rank)}
    seen["scores"] = policy.score(row, ASKED & policy._head.outputs | routes)
    seen["culprits"] = skipped(one)
    assert differing(policy, before) == [], "a skipped step moved weights"
    if learner.padding.sizes:
        has_few_shapes(policy, row, learner)
    groups = bucket_groups(policy._trained)
    for group in groups:
        group.start_param_sync = Mock(wraps=group.start_param_sync)
    seen["first"] = of_step(in_parts(one))
    policy.save(to / "saved")
    seen["saved"] = held(policy)
    seen["second"] = of_step(one.step())
    seen["buckets"], gathers = len(groups), {group.start_param_sync.call_count for group in groups}
    if overlap_section(learner).parameters:
        waits_for_weights(one)
    elif learner.optimizer.name == "adamw":
        assert gathers == {2}, f"two steps gathered buckets of weights {gathers} times"
    seen["tensors"], seen["bytes"] = held(policy), held_bytes(policy)
    if cell.plain != learner:
        has_bits_of_plain(seen, cell, folder, rank, device)
    assert not learner.offload.activations or offload.arena().num_bytes > 0, "no half of a layer has left"
    with policy.merged():
        seen["merged"] = dict(held(policy)) if learner.lora.rank is not None else {}
    if (most := read_shape(folder).indexer) is not None:
        attends_by_given(one)
        refuses_longer(policy, row[0], most.top_k)
    world.destroy_process_groups()
    return seen


def held_bytes(policy: Any) -> dict[str, int]:
    """Of this rank, by what the plan of memory calls them; megatron pads gradients for their reduction."""
    from rl_megatron.learner.optimizer import optimizer_state

    chunks = policy._chunks
    held_by = [p for chunk in chunks for p in chunk.parameters()]
    frozen = (".indexer.linear_wq_b.", ".indexer.linear_wk.")  # an indexer's; the plan leaves out its small tensors
    held_by += [tensor for name, tensor in policy.tensors.items() if any(part in name for part in frozen)]
    buffers = [b for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    stepped = {p.untyped_storage().data_ptr() for p in held_by}  # the weights themselves in float32
    state = [
        one
        for one in optimizer_state(policy._optimizer)
        if one.untyped_storage().data_ptr() not in stepped and one.dim()
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


def waits_for_weights(one: Ready) -> None:
    """Asserts that a step leaves other ranks' weights to the next pass, which has them all."""
    stale = {name: tensor.clone() for name, tensor in (*one.policy.tensors.items(), *values_of(one.policy).items())}
    first = one.score(one.row)
    assert differing(one.policy, stale), "no weight waits for the next pass"
    again = one.score(one.row)
    for name in first or ():
        assert all(map(torch.equal, first[name], again[name])), "a pass had weights of before"


def has_bits_of_plain(seen: Mapping[str, Any], cell: Cell, folder: Path, rank: int, device: torch.device) -> None:
    """Asserts that both steps without the features `BITWISE` have the same metrics and weights. With overlap there are
    several buckets, which sum the norm in another order, and a step has one pass."""
    plain, overlaps = made(cell, folder, cell.plain, rank, device), overlap_section(cell.learner).gradients
    for step, after in (("first", "saved"), ("second", "tensors")):
        found = of_step(plain.step() if overlaps or step == "second" else in_parts(plain)) or {}
        same = found.keys() - ({"norm"} if overlaps else set())
        assert {name: found[name] for name in same} == {name: seen[step][name] for name in same}
        assert differing(plain.policy, seen[after]) == [], f"the {step} step has other bits"


def refuses_longer(policy: MegatronLearner, samples: Samples, most: int) -> None:
    """Than an indexer chooses whole, in a layout in which ranks lack what it reads."""
    n, why = most + 1, "with learner.cp=2 ranks share a sequence"
    longer = {name: torch.cat([column] * n)[:n] for name, column in samples.columns.items()}
    said = f"a sequence = {n} is more than index_topk={most} of model_type=.*: {why}"
    with patch.object(policy, "_dense", why), pytest.raises(RLMegatronError, match=said):
        policy.score([Samples(**longer, cu_seqlens=torch.tensor([0, n]))], frozenset({"logits"}))


class Chosen(dict[int, Tensor]):
    """What a pass chose, which it takes out again."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, Tensor] = {}

    @override
    def __setitem__(self, layer: int, chosen: Tensor) -> None:
        self.seen[layer] = chosen
        super().__setitem__(layer, chosen)


def attends_by_given(one: Ready) -> None:
    """Asserts that what is in a micro-batch before a pass is in place of indexers' choice: to its own a model says the
    same, to others not. No pass leaves what indexers chose."""
    from rl_megatron.learner.model import latent

    policy, row, made = one.policy, one.row, one.policy._pack(one.row)

    def through(entries: Sequence[dict[int, Tensor]], call: Callable[[Sequence[Samples]], Any]) -> Any:
        for micro_batch, entry in zip(made, entries, strict=True):
            micro_batch.attention.chosen = entry
        with patch.object(policy, "_pack", lambda _: made):
            return call(row)

    score, own, trained = partial(through, call=one.score), [Chosen() for _ in made], [Chosen() for _ in made]
    first = score(own)
    through(trained, one.backward)
    assert all(each.seen and not each for each in (*own, *trained))
    with patch.object(latent, "choose_packed", side_effect=AssertionError("an indexer chose again")):
        again = score([one.seen for one in own])
        keys = [{n: torch.arange(x.shape[1]).int().expand_as(x) for n, x in one.seen.items()} for one in own]
        other = score(keys)
    assert all(one.keys() == two.seen.keys() for one, two in zip(keys, own, strict=True))
    if first is not None:
        said, same, apart = (torch.cat(one["logprobs"]) for one in (first, again, other))
        assert (said - same).abs().max() < 1e-5
        assert (said - apart).abs().max() > 1e-2


def resumed(rank: int, cell: Cell, folder: Path, to: Path) -> dict[str, Any]:
    """The step after the checkpoint, in the layout ``then``."""
    from rl_megatron.learner import world

    device = world.init_process_groups(cell.resumed, rank=rank, rendezvous=f"file://{to}/rendezvous-then", seed=2)
    one = made(cell, folder, cell.resumed, rank, device)
    one.policy.load(to / "saved")
    seen = {"second": of_step(one.step()), "tensors": held(one.policy)}
    world.destroy_process_groups()
    return seen


def skipped(one: Ready) -> list[tuple[int, int]]:
    """The micro-batches that a step with infinite advantages and returns of text `BAD` blames."""
    bad = []
    for m, blamed in zip(one.row, one.blamed, strict=True):
        spoilt = {"advantages", "returns"} & m.columns.keys() if blamed else set()
        bad.append(replace(m, **{name: torch.full_like(m.columns[name], math.inf) for name in spoilt}))
    result = one.step(bad)
    assert isinstance(result, SkippedStep)
    return [(found.data_rank, found.micro_batch) for found in result.culprits]


def in_parts(one: Ready) -> Any:
    """A step of two passes, with a score between them and a dropped pass before, where the layout allows that."""
    policy, row, overlaps = one.policy, one.row, overlap_section(one.learner).gradients
    if overlaps:
        one.backward(row)
        with pytest.raises(RLMegatronError, match="a step takes one backward pass"):
            one.backward(row)
        policy.zero_grad()
    half = len(row) // 2 if one.learner.vpp == 1 and not overlaps else 0
    if half == 0:
        return one.step()
    one.backward(row[half:])
    policy.zero_grad()
    first = one.backward(row[:half])
    one.score(row[:half])
    result = one.step(row[half:])
    if first is None:
        return result
    loss = replace(result.loss_metrics["loss"], value=result.loss_metrics["loss"].value + first["loss"].value)
    return replace(result, loss_metrics={"loss": loss})
