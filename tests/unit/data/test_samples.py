"""The shift, the mask and ragged gathers, against lists written out by hand; routes of completions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from rl_megatron.data.samples import (
    answer_end_token,
    append_last_targets,
    check_ends,
    dense_column,
    select,
    single_turns,
    split_minibatches,
    supervised_rows,
    supervised_samples,
    to_samples,
)
from rl_megatron.errors import DataError, EngineError
from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.rollout.stream import Draw, GroupResult, LedgerState, PendingPrompt, StreamState
from rl_megatron.types import Completion, Prompt, RolloutGroup, Samples
from tests import completions
from tests.completions import columns_of, completion

COLUMNS = ("input_ids", "targets", "mask", "advantages", "rollout_logprobs", "old_logprobs")


def sampled(*tokens: int, logprobs: tuple[float, ...]) -> Completion:
    return completions.completion(tokens, logprobs)


def group(name: str, prompt: tuple[int, ...], *of: Completion) -> RolloutGroup:
    return single_turns(Prompt(id=name, text="", token_ids=prompt, answer=""), of)


@pytest.fixture
def samples() -> Samples:
    groups = [
        group("a", (1, 2, 3), sampled(4, 5, logprobs=(-0.5, -0.25)), sampled(6, logprobs=(-1.0,))),
        group("b", (7,), sampled(8, 9, logprobs=(-2.0, -4.0))),
    ]
    return to_samples(groups)


def test_tokens_are_shifted_and_only_completion_tokens_are_masked_in(samples: Samples) -> None:
    assert samples.cu_seqlens.tolist() == [0, 4, 7, 9]
    assert samples.input_ids.tolist() == [1, 2, 3, 4, 1, 2, 3, 7, 8]
    assert samples.targets.tolist() == [2, 3, 4, 5, 2, 3, 6, 8, 9]
    assert samples.mask.tolist() == [False, False, True, True, False, False, True, True, True]
    assert not samples.advantages.any()
    assert samples.rollout_logprobs.tolist() == [0, 0, -0.5, -0.25, 0, 0, -1, -2, -4]
    assert torch.equal(samples.old_logprobs, samples.rollout_logprobs)
    wanted = [torch.int64, torch.int64, torch.bool, torch.float32, torch.float32, torch.float32]
    assert [getattr(samples, name).dtype for name in COLUMNS] == wanted
    assert samples.cu_seqlens.dtype == torch.int64
    samples.old_logprobs.fill_(9.0)
    assert samples.rollout_logprobs.max() <= 0


def test_a_sequence_without_a_sampled_token_is_named() -> None:
    with pytest.raises(DataError, match="'late'"):
        to_samples([group("late", (1, 2), sampled(logprobs=()))])


def test_supervised_targets_end_with_eos() -> None:
    prompts = [Prompt(id="x", text="1+1=", token_ids=tuple(b"1+1="), answer="2")]
    samples = supervised_samples(supervised_rows(prompts, [("2",)], byte_tokenizer(), {"": 257}))
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
    nothing = select(samples, torch.tensor([], dtype=torch.int64))
    assert (nothing.num_sequences, len(nothing.input_ids)) == (0, 0)


def test_what_ends_a_supervised_target_ends_sampling_and_is_a_token_of_the_tokenizer() -> None:
    tokenizer = byte_tokenizer()
    for stops, end in (((256, 257), 257), ((256,), 256), ((900, 258, 256), 258), ((900,), None), ((), None)):
        assert answer_end_token(tokenizer, stops) == end
    prompts = [Prompt(id="x", text="1+1=", token_ids=tuple(b"1+1="), answer="2")]
    with pytest.raises(DataError, match=r"none of the tokens that end sampling, .* eos_token_id"):
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
                DataError, match=rf"prompt 'x': its answer contains the text of a token that ends sampling .id {said}"
            ):
                check_ends(rows, (256, 257))


def test_minibatches_hold_every_sequence_once_and_depend_on_the_seed_alone() -> None:
    parts = split_minibatches(11, 3, seed=1)
    assert [len(part) for part in parts] == [4, 4, 3]
    order = np.concatenate(parts).tolist()
    assert sorted(order) == list(range(11))
    assert order != list(range(11))
    again, other = (np.concatenate(split_minibatches(11, 3, seed=seed)).tolist() for seed in (1, 2))
    assert order == again
    assert order != other
    with pytest.raises(DataError, match="3 sequences into 4 minibatches"):
        split_minibatches(3, 4, seed=0)


def test_the_last_token_becomes_an_input_for_the_critic(samples: Samples) -> None:
    longer, is_last = append_last_targets(samples)
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


# Columns of completions, as routes are: checked, concatenated, and restored from a checkpoint.
def chosen(positions: int, *, first: int = 0, num_experts: int = 16) -> np.ndarray:
    """[positions, 2, 3], every number below ``num_experts``; each position differs from its neighbors."""
    experts = (first + np.arange(positions * 6).reshape(positions, 2, 3)) % num_experts
    return experts.astype(np.uint8 if num_experts <= 256 else np.int16)


def routed_group(routes: list[np.ndarray | None], *, prompt: int = 3, new: int = 2, name: str = "a") -> RolloutGroup:
    of = [completion((7,) * new, columns=None if r is None else {"routes": r}) for r in routes]
    return single_turns(Prompt(id=name, text="", token_ids=(1,) * prompt, answer=""), of)


def contents(of: RolloutGroup) -> tuple[object, ...]:
    rows = [row for one in of.trajectories for row in one.chains]
    turns = [(t.start, t.logprobs.tolist(), t.finish_reason, t.spans, t.text) for row in rows for t in row.turns]
    return of.prompt, of.rewards, [(row.token_ids.tolist(), columns_of(row)) for row in rows], turns


def test_samples_hold_every_positions_routes_in_the_order_of_the_completions() -> None:
    arrays = [chosen(4), chosen(4, first=5), chosen(2, first=9)]
    a, b, c = arrays
    samples = to_samples([routed_group([a, b]), routed_group([c], prompt=1, name="b")])
    routes = dense_column(samples.extra, "routes")
    assert routes is not None
    assert routes.dtype == torch.uint8
    assert routes.tolist() == np.concatenate(arrays).tolist()
    picked = dense_column(select(samples, torch.tensor([2, 0])).extra, "routes")
    assert picked is not None
    assert picked.tolist() == np.concatenate([arrays[2], arrays[0]]).tolist()
    assert to_samples([routed_group([None, None])]).extra == {}


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (None, "'a': a completion has no routes"),
        (chosen(5), r"'a': a completion's routes have 5 entries, but its .* 5 tokens, and there must be 4"),
        (chosen(4)[:, :1], r"'a': its routes have shape \(4, 1, 3\); it must be \(4, 2, 3\), for each of 5 tokens"),
        (chosen(4)[:, :, :2], r"'a': its routes have shape \(4, 2, 2\)"),
    ],
)
def test_routes_that_do_not_fit_their_sequence_are_refused(second: np.ndarray | None, says: str) -> None:
    with pytest.raises((DataError, EngineError), match=says):
        to_samples([routed_group([chosen(4), second])])


def test_waiting_rollouts_keep_their_routes_in_a_checkpoint() -> None:
    wide = chosen(4, first=300, num_experts=512)
    every_byte = np.arange(240, dtype=np.uint8).reshape(40, 2, 3)
    groups = (routed_group([wide, None]), routed_group([every_byte], prompt=39))
    places = tuple(
        PendingPrompt(
            drawn=Draw(ordinal=i, prompt=one.prompt, batch=1), birth=0, due=1, answered=GroupResult(group=one)
        )
        for i, one in enumerate(groups)
    )
    counts = {"version": 3, "drawn": 2, "opened": 0, "credit": 0, "ahead": 0, "calm": 0}
    state = StreamState(**counts, batch=("a", "b"), places=places, left_out=(), ledger=LedgerState())
    adapter = TypeAdapter(StreamState)
    again = adapter.validate_json(adapter.dump_json(state))
    found = [place.answered.group for place in again.places if place.answered is not None]
    assert [contents(one) for one in found if one is not None] == [contents(one) for one in groups]
    assert replace(again, places=()) == replace(state, places=())
