"""K epochs over a rollout batch: every sequence once an epoch, in an order of each epoch's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from rl_megatron.config.io import load_config
from rl_megatron.data.packing import Packer, with_own_columns
from rl_megatron.errors import ConfigError
from rl_megatron.seeds import seed_of
from rl_megatron.types import ParallelDims, Samples
from tests.samples import sequences_of


def numbered(count: int) -> Samples:
    """Sequences of one position that hold their number."""
    numbers = torch.arange(count)
    return sequences_of([1] * count, input_ids=numbers, targets=numbers, nll_weights=0.1 * (numbers % 2))


def parts_of(samples: Samples, seeds: Sequence[int], *, most: int, unit: int = 1) -> list[Samples]:
    """Each minibatch fits one micro-batch; sequences of one length keep their order there."""
    packer = Packer(dims=ParallelDims(), max_tokens=100, attention_cost=0.0, unit=unit)
    made = packer.minibatches(samples, most=most, seeds=seeds)
    return [with_own_columns(batch).micro_batches[0][0] for batch in made]


def orders(*, step: int, epochs: int) -> list[list[int]]:
    seeds = [seed_of(0, step, epoch) for epoch in range(epochs)]
    parts = parts_of(numbered(12), seeds, most=3)
    assert len(parts) == 3 * epochs
    return [torch.cat([p.input_ids for p in parts[i : i + 3]]).tolist() for i in range(0, len(parts), 3)]


def test_each_epoch_and_step_shuffles_anew_and_repeats_itself() -> None:
    found = orders(step=1, epochs=4) + orders(step=2, epochs=4)
    assert len({tuple(order) for order in found}) == 8
    assert all(sorted(order) == list(range(12)) for order in found)
    assert orders(step=1, epochs=4) == found[:4]


def test_fewer_sequences_than_minibatches_are_one_each() -> None:
    assert [part.num_sequences for part in parts_of(numbered(5), [1], most=8)] == [1] * 5


def test_pairs_stay_together_and_fewer_than_minibatches_are_one_each() -> None:
    parts = parts_of(numbered(6), [1], most=8, unit=2)
    assert sorted(part.input_ids.tolist() for part in parts) == [[0, 1], [2, 3], [4, 5]]


GROUPS = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 3, 3, 4, 5])


def groups_of_parts(seed: int, dp: int) -> list[list[int]]:
    """The groups of each minibatch's sequences, in the order of the batch."""
    samples = replace(numbered(12), group_of=GROUPS)
    packer = Packer(dims=ParallelDims(dp=dp), max_tokens=3, whole_groups=True, attention_cost=0.0)
    ranks, out = packer.ranks(samples, most=3, seed=seed), []
    for batch in packer.minibatches(samples, most=3, seeds=[seed]):
        for d, row in enumerate(batch.sequences):
            assert set(ranks[torch.cat(row).numpy()]) <= {d}
        numbers = sorted(torch.cat([torch.cat(row) for row in batch.sequences]).tolist())
        out.append(GROUPS[numbers].tolist())
    return out


def test_whole_groups_are_in_one_minibatch_each_whatever_the_ranks() -> None:
    for seed in range(20):
        parts = groups_of_parts(seed, dp=1)
        assert [len(set(part)) for part in parts] == [2, 2, 2]
        assert sorted(number for part in parts for number in part) == GROUPS.tolist()  # none in two parts, none twice
        assert all(part.count(number) == GROUPS.tolist().count(number) for part in parts for number in part)
        assert groups_of_parts(seed, dp=2) == groups_of_parts(seed, dp=4) == parts
    assert len({str(groups_of_parts(seed, dp=1)) for seed in range(20)}) > 10


def test_fewer_groups_than_minibatches_are_one_each_and_without_the_key_groups_are_cut() -> None:
    samples = replace(numbered(12), group_of=GROUPS)
    packer = Packer(dims=ParallelDims(), max_tokens=100, whole_groups=True, attention_cost=0.0)
    assert len(list(packer.minibatches(samples, most=12, seeds=[0]))) == 6
    assert [part.num_sequences for part in parts_of(samples, [0], most=3)] == [4, 4, 4]


def test_nll_weights_are_over_the_right_tokens_of_their_minibatch() -> None:
    for part in parts_of(numbered(12), [1], most=3):
        assert part.nll_weights is not None
        right = int((part.input_ids % 2).sum())
        assert abs(part.nll_weights.sum().item() - (0.1 if right else 0.0)) < 1e-6


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["train.minibatches=1"], "with train.minibatches=1 a minibatch is the whole batch"),
        (["algorithm=dpo"], "preference.beta=0.1 keeps each group's pair together"),
        (["algorithm=spo"], "a group is one completion"),
        (["rollout.prompts_per_step=3", "train.minibatches=4"], r"more than the 3 whole groups .*prompts_per_step=3\)"),
    ],
)
def test_whole_groups_that_move_nothing_or_are_too_few_are_refused(keys: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config("tiny_cpu", ["train.whole_groups=true", *keys])
