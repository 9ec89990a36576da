"""The shift, the mask and ragged gathers, against per-sequence lists written out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rl_megatron.data.samples import (
    check_ends,
    end_of_answers,
    select,
    split_minibatches,
    supervised_rows,
    to_samples,
    with_last_tokens,
    written_samples,
)
from rl_megatron.data.trajectories import single_turns
from rl_megatron.errors import DataError
from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.types import Completion, Prompt, RolloutGroup, Samples
from tests import completions

COLUMNS = ("input_ids", "targets", "mask", "advantages", "rollout_logprobs", "old_logprobs")


def completion(*tokens: int, logprobs: tuple[float, ...]) -> Completion:
    return completions.completion(tokens, logprobs)


def group(name: str, prompt: tuple[int, ...], *of: Completion) -> RolloutGroup:
    return single_turns(Prompt(id=name, text="", token_ids=prompt, answer=""), of)


@pytest.fixture
def samples() -> Samples:
    groups = [
        group("a", (1, 2, 3), completion(4, 5, logprobs=(-0.5, -0.25)), completion(6, logprobs=(-1.0,))),
        group("b", (7,), completion(8, 9, logprobs=(-2.0, -4.0))),
    ]
    return to_samples(groups)


def test_tokens_are_shifted_by_one_and_only_completion_tokens_are_masked_in(samples: Samples) -> None:
    assert samples.cu_seqlens.tolist() == [0, 4, 7, 9]
    assert samples.input_ids.tolist() == [1, 2, 3, 4, 1, 2, 3, 7, 8]
    assert samples.targets.tolist() == [2, 3, 4, 5, 2, 3, 6, 8, 9]
    assert samples.mask.tolist() == [False, False, True, True, False, False, True, True, True]
    assert not samples.advantages.any()
    assert samples.rollout_logprobs.tolist() == [0, 0, -0.5, -0.25, 0, 0, -1, -2, -4]
    assert torch.equal(samples.old_logprobs, samples.rollout_logprobs)


def test_dtypes_are_those_of_the_contract(samples: Samples) -> None:
    wanted = [torch.int64, torch.int64, torch.bool, torch.float32, torch.float32, torch.float32]
    assert [getattr(samples, name).dtype for name in COLUMNS] == wanted
    assert samples.cu_seqlens.dtype == torch.int64


def test_old_logprobs_share_no_memory_with_the_rollouts(samples: Samples) -> None:
    samples.old_logprobs.fill_(9.0)
    assert samples.rollout_logprobs.max() <= 0


def test_a_sequence_without_a_sampled_token_is_named() -> None:
    with pytest.raises(DataError, match="'late'"):
        to_samples([group("late", (1, 2), completion(logprobs=()))])


def test_supervised_targets_end_with_eos() -> None:
    prompts = [Prompt(id="x", text="1+1=", token_ids=tuple(b"1+1="), answer="2")]
    samples = written_samples(supervised_rows(prompts, [("2",)], byte_tokenizer(), {"": 257}))
    assert samples.input_ids.tolist() == list(b"1+1=2")
    assert samples.targets.tolist() == [*b"+1=2", 257]
    assert samples.mask.tolist() == [False, False, False, True, True]
    assert samples.advantages.tolist() == [0, 0, 0, 1, 1]
    assert samples.rollout_logprobs.tolist() == [0] * 5


def test_select_takes_whole_sequences_in_the_order_asked(samples: Samples) -> None:
    picked = select(samples, torch.tensor([2, 0]))
    assert picked.cu_seqlens.tolist() == [0, 2, 6]
    for name in COLUMNS:
        column = getattr(samples, name)
        assert torch.equal(getattr(picked, name), torch.cat([column[7:9], column[0:4]])), name


def test_what_ends_a_supervised_target_ends_sampling_and_is_a_token_of_the_tokenizer() -> None:
    tokenizer = byte_tokenizer()
    for stops, end in (((256, 257), 257), ((256,), 256), ((900, 258, 256), 258), ((900,), None), ((), None)):
        assert end_of_answers(tokenizer, stops) == end
    prompts = [Prompt(id="x", text="1+1=", token_ids=tuple(b"1+1="), answer="2")]
    with pytest.raises(
        DataError, match=r"none of the tokens that end sampling, .* eos_token_id in generation_config\.json"
    ):
        supervised_rows(prompts, [("2",)], tokenizer, {"": None})


@pytest.mark.parametrize(("answer", "said"), [("2<pad>", 256), ("<eos>2", 257), ("2<eos>", 257), ("2", None)])
def test_an_answer_that_spells_what_ends_sampling_is_refused(answer: str, said: int | None) -> None:
    """As texts that a chat template wrote have it, at their end, too."""
    tokenizer = byte_tokenizer()
    tokenizer.split_special_tokens = False
    prompts = [Prompt(id="x", text="<eos>=", token_ids=(257, 1), answer=answer)]
    for target in ((answer,), ("1", "read <eos>", answer)):
        rows = supervised_rows(prompts, [target], tokenizer, {"": 257})
        if said is None:
            check_ends(rows, (256, 257))
        else:
            with pytest.raises(
                DataError, match=rf"prompt 'x': its answer spells a token that ends sampling .id {said}.,"
            ):
                check_ends(rows, (256, 257))


def test_select_of_nothing_is_an_empty_batch(samples: Samples) -> None:
    nothing = select(samples, torch.tensor([], dtype=torch.int64))
    assert (nothing.num_sequences, len(nothing.input_ids)) == (0, 0)


def test_minibatches_hold_every_sequence_once_and_depend_on_the_seed_alone() -> None:
    parts = split_minibatches(11, 3, seed=1)
    assert [len(part) for part in parts] == [4, 4, 3]
    order = np.concatenate(parts).tolist()
    assert sorted(order) == list(range(11))
    assert order != list(range(11))
    again, other = (np.concatenate(split_minibatches(11, 3, seed=seed)).tolist() for seed in (1, 2))
    assert order == again
    assert order != other


def test_more_minibatches_than_sequences_is_an_error() -> None:
    with pytest.raises(DataError, match="3 sequences into 4 minibatches"):
        split_minibatches(3, 4, seed=0)


def test_the_last_token_becomes_an_input_for_the_critic(samples: Samples) -> None:
    longer, is_last = with_last_tokens(samples)
    assert longer.input_ids.tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 8, 9]
    assert is_last.nonzero().flatten().tolist() == [4, 8, 11]
    assert longer.cu_seqlens.tolist() == [0, 5, 9, 12]
    assert torch.equal(longer.input_ids[~is_last], samples.input_ids)
    for column, before in ((longer.mask, samples.mask), (longer.targets, samples.targets)):
        assert torch.equal(column[~is_last], before)
        assert not column[is_last].any()


def test_pairs_stay_together_in_minibatches() -> None:
    for part in split_minibatches(10, 2, seed=3, unit=2):
        first = part.reshape(-1, 2)
        assert (first[:, 0] % 2 == 0).all()
        assert (first[:, 1] == first[:, 0] + 1).all()
    with pytest.raises(DataError, match="5 pairs into 6"):
        split_minibatches(10, 6, seed=0, unit=2)
